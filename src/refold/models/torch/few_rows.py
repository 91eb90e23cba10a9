"""Decoding of a few rows on the CPU: products that read a matrix once, and steps that read and write a state once.

Such a product takes as long as reading the weights. The libraries that torch calls may read at less than half of the
memory's rate (float32, one thread of an AMD EPYC: 16.6 GB/s with one row, 8 with two; here 38 and 31).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from refold.ops.numba.blocks import in_threads
from refold.ops.numba.kernel import Kernel, kernel

ROWS = 8
"""The most rows; beyond, a product is bound by its operations, and the libraries are as fast."""
BYTES_A_THREAD = 1 << 21
"""Bytes of a matrix that are worth a thread: reading them takes 50 us, waking one up 10 to 20."""
PIECES_A_THREAD = 4


def takes(x: Tensor, weight: Tensor) -> bool:
    """Tell whether `product` can multiply these."""
    return (
        all(type(a) in (Tensor, Parameter) and a.device.type == "cpu" for a in (x, weight))
        and x.dtype == weight.dtype == torch.float32
        and weight.is_contiguous()
        and x.numel() > 0
        and len(x) <= ROWS
    )


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T``, without a gradient: ``x (b, in)``, ``weight (out, in)``, ``(b, out)``."""
    result = torch.empty(len(x), len(weight))
    _share_out(_rows, (weight, x.contiguous(), result), len(weight), weight.nbytes)
    return result


def takes_state(x: Tensor, state: Tensor) -> bool:
    """Tell whether `ssd_` can move this state on."""
    return takes(x.flatten(1), state)


def ssd_(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> Tensor:
    """Return ``y (b, h, p)`` of a step of `ops.ssd_step_` without D and z, and overwrite ``state (b, h, p, n)``.

    The state is read and written once. No gradients. ``x (b, h, p)``, ``dt (b, h)``, ``A (h,)``, ``B, C (b, g, n)``.
    """
    y = torch.empty(x.shape)
    inputs = (x * dt[..., None], (dt * A).exp(), B.contiguous(), C.contiguous())
    _share_out(_states, (*inputs, state, y), x.shape[1], 2 * state.nbytes)
    return y


def _share_out(run: Kernel, arrays: tuple[Tensor, ...], size: int, moved: int) -> None:
    """Call ``run(*arrays, low, high)`` for ranges that make up ``size``; on threads if ``moved`` bytes pay."""
    given = [a.detach().numpy() for a in arrays]
    workers = max(1, min(torch.get_num_threads(), moved // BYTES_A_THREAD))
    edges = np.linspace(0, size, workers * PIECES_A_THREAD + 1, dtype=int).tolist()
    pieces = list(pairwise(edges if workers > 1 else (0, size)))
    in_threads(lambda piece: run(*given, *piece), pieces, workers)


@kernel(fastmath={"contract", "reassoc", "nsz"})
def _rows(weight: Any, x: Any, y: Any, low: Any, high: Any) -> None:
    """Write channels ``low`` to ``high`` of ``y``, four rows of x at a time; sums in any order."""
    fours = len(x) // 4 * 4
    for i in range(low, high):
        w = weight[i]
        for r in range(0, fours, 4):
            x0, x1, x2, x3 = x[r], x[r + 1], x[r + 2], x[r + 3]
            y0 = y1 = y2 = y3 = np.float32(0.0)
            for j in range(len(w)):
                y0 += w[j] * x0[j]
                y1 += w[j] * x1[j]
                y2 += w[j] * x2[j]
                y3 += w[j] * x3[j]
            y[r, i], y[r + 1, i], y[r + 2, i], y[r + 3, i] = y0, y1, y2, y3
        for r in range(fours, len(x)):
            row, total = x[r], np.float32(0.0)
            for j in range(len(w)):
                total += w[j] * row[j]
            y[r, i] = total


@kernel(fastmath={"contract", "reassoc", "nsz"})
def _states(x: Any, keep: Any, B: Any, C: Any, state: Any, y: Any, low: Any, high: Any) -> None:
    """Move heads ``low`` to ``high`` of all rows on: ``state = keep state + x B``, ``y = state C``."""
    heads = x.shape[1] // B.shape[1]
    for r in range(len(x)):
        for i in range(low, high):
            b, c, factor = B[r, i // heads], C[r, i // heads], keep[r, i]
            for k in range(x.shape[2]):
                s, v, total = state[r, i, k], x[r, i, k], np.float32(0.0)
                for j in range(len(s)):
                    s[j] = factor * s[j] + v * b[j]
                    total += s[j] * c[j]
                y[r, i, k] = total
