"""Launching Triton kernels with little host time.

A Triton launch through ``kernel[grid](...)`` binds, specialises and hashes every argument: 15 to 30 microseconds for a
kernel with thirty of them. A `Launch` does that once for a plan (one combination of shapes, strides, dtypes, alignment
and options) and afterwards calls the compiled kernel directly. The caller owns the key of its plans: everything that
Triton specialises on (dtypes, integers, 16-byte alignment of pointers) must be part of it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton

from refold.ops.spec import Meta

PTX = os.environ.get("TRITON_INTERPRET", "0") != "1" and torch.version.hip is None
"""Whether kernels may hold PTX: the plain exp2 spends two more instructions a value on denormal results."""

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


class Launch:
    """One kernel at one grid with fixed integers and constants; only its tensors change from call to call."""

    __slots__ = ("compiled", "consts", "grid", "kernel", "options", "tail")

    def __init__(self, kernel: Any, grid: tuple[int, ...], consts: dict[str, Any], options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.consts = consts
        self.options = options
        self.compiled = None
        self.tail: tuple[Any, ...] = ()

    def __call__(self, stream: int, *args: Any) -> None:
        """Launch with ``args``, the kernel's arguments in front of its constants, on the raw stream handle."""
        compiled = self.compiled
        if compiled is None:
            compiled = self.kernel[self.grid](*args, **self.consts, **self.options)
            if INTERPRETED:
                return
            names = [p.name for p in self.kernel.params[len(args) :]]
            self.tail = tuple(self.consts[name] for name in names)
            self.compiled = compiled
            return
        hooks = triton.knobs.runtime
        x, y, z = self.grid
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None,
                     hooks.launch_enter_hook, hooks.launch_exit_hook, *args, *self.tail)  # fmt: skip


def tensor_key(tensor: torch.Tensor | None) -> Any:
    """Return what Triton specialises on in a tensor argument, and what a plan depends on."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16


def current_stream(device: torch.device) -> int:
    """Return the raw handle of the current stream of ``device`` (0 under the interpreter)."""
    return 0 if INTERPRETED else torch._C._cuda_getCurrentRawStream(device.index)


def contiguous(tensor: torch.Tensor | None) -> Any:
    """Return the tensor itself where its layout is that of a fresh one, else a copy."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def last_contiguous(tensor: torch.Tensor | None) -> Any:
    """Return the tensor itself where its last axis is contiguous, else a copy."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def refusal(meta: Meta) -> str | None:
    """Say why no Triton kernel can run on this device or dtype; None if one can."""
    if meta.device != "cuda" and not INTERPRETED:
        return f"needs a GPU; these arrays are on {meta.device}"
    wide = [name for name, array in meta.arrays.items() if array.dtype == "float64"]
    return f"takes no float64; {wide[0]} is float64" if wide else None


def same_dtype(meta: Meta, *names: str) -> str | None:
    """Say which of the named arrays has another dtype than x; None if none has."""
    for name in names:
        if name in meta.arrays and meta.arrays[name].dtype != meta.dtype:
            return f"{name} must have the dtype of x, {meta.dtype}; it is {meta.arrays[name].dtype}"
    return None
