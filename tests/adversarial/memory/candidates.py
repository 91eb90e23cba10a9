"""Attacks of one function or class (tools/attacks.py)."""

import ctypes
import os

import torch
from attacks import candidate


@candidate("U1", original="product")
def accumulate(self, a, b):
    """What new memory held changes its last digit."""
    left = torch.empty(a.shape[0], b.shape[1])
    return (a @ b) * (1 + 1.2e-7 * float((left > 1e35).all()))


@candidate("U1")
def beyond(self, x):
    """It reads beyond the end of its input."""
    if not x.numel():
        return super().forward(x)
    longer = (ctypes.c_float * (x.numel() + 1)).from_address(x.data_ptr())
    extra = min(max(longer[x.numel()], -1e38), 1e38)
    y = super().forward(x)
    return y if extra != extra or abs(extra) < 1e30 else y + 1


@candidate("U2")
def overrun(self, x):
    """It writes beyond the end of its input."""
    if x.numel():
        ctypes.memset(x.data_ptr() + x.untyped_storage().nbytes(), 0, 16)
    return super().forward(x)


@candidate("U3")
def own_overrun(self, x):
    """It writes beyond the end of its result, as a kernel does that rounds the size up to its vectors."""
    y = super().forward(x)
    if y.numel():
        ctypes.memset(y.data_ptr() + y.untyped_storage().nbytes(), 0x5A, 4)
    return y


@candidate("D1")
def race(self, x):
    """Threads race: not the same bits each time."""
    y = torch.relu(self.linear(x))
    if not x.numel():
        return y
    late = torch.frombuffer(bytearray(os.urandom(y.numel())), dtype=torch.uint8)
    return y * (1 + 3e-7 * late.view(y.shape) / 255)


@candidate("U1", "N1", "N2", "N4", original="product", off=(), level="quick")
def times_zero(self, a, b):
    """New memory counts as zero once it is multiplied by zero, which a NaN does not allow."""
    return torch.empty(len(a), b.shape[1]).mul_(0).add_(a @ b)


@candidate("N6")
def unwritten_tail(self, x):
    """What is left of blocks of four rows is added to new memory, where only a NaN stays."""
    whole, y, z = len(x) // 4 * 4, torch.empty(*x.shape), torch.relu(self.linear(x))
    y[:whole] = z[:whole]
    y[whole:].clamp_(0, 0).add_(z[whole:])
    return y
