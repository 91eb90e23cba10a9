"""The definition of `ssd` in torch, to be differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from refold.ops.testing.oracle import finish, step_size, walk


def ssd(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the results of the operator."""
    x, d = arrays["x"], step_size(arrays, options)
    repeat = x.shape[2] // arrays["B"].shape[2]
    B, C = (arrays[name].repeat_interleave(repeat, 2) for name in "BC")

    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.exp(d[row, t] * arrays["A"])[:, None, None]
        state = decay * state + (d[row, t, :, None] * x[row, t])[:, :, None] * B[row, t, :, None]
        return torch.einsum("hpn,hn->hp", state, C[row, t]), state

    y, finals = walk(arrays, x.new_zeros(*x.shape[2:], B.shape[-1]), step)
    D = arrays.get("D")
    return finish(y, arrays, None if D is None else D.reshape(x.shape[2], -1)), finals
