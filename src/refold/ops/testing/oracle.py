"""The definitions again in torch: float64, one token after the other, so that autograd can differentiate them.

The reference is NumPy and has no gradients. Finite differences of it are too coarse and too slow to compare every
element. A test compares these definitions with the reference.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from refold.ops.testing.problems import Problem


def gradients(problem: Problem, cotangents: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the gradients of a problem's results, weighted by cotangents, in every floating-point array."""
    arrays = {name: torch.from_numpy(array) for name, array in problem.arrays.items()}
    leaves = {name: a.requires_grad_() for name, a in arrays.items() if a.is_floating_point()}
    weighted = [(r * torch.from_numpy(c)).sum() for r, c in zip(results(problem, arrays), cotangents, strict=True)]
    found = torch.autograd.grad(torch.stack(weighted).sum(), list(leaves.values()), allow_unused=True)
    return {
        name: np.zeros(leaf.shape) if grad is None else grad.numpy()
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def results(problem: Problem, arrays: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return what the operator returns, as differentiable functions of the arrays."""
    name = problem.spec.name.removesuffix("_step")
    arrays = dict(arrays)
    one = problem.spec.time_optional and "t" not in problem.case.sizes
    if "state" in arrays:
        arrays["initial_state"] = arrays.pop("state")
    if one:
        arrays = {k: v.unsqueeze(1) if k in ("x", "dt", "B", "C", "z", "decay") else v for k, v in arrays.items()}
    function = {
        "ssd": _ssd, "selective_scan": _selective_scan, "linear_scan": _linear_scan, "causal_conv1d": _causal_conv1d,
        "gated_rmsnorm": _gated_rmsnorm,
    }[name]  # fmt: skip
    found = function(arrays, problem.all_options())
    return (found[0][:, 0], *found[1:]) if one else found


def _sequences(arrays: dict[str, Tensor]) -> list[tuple[int, int, int]]:
    """Return batch row, first token and end of each sequence."""
    batch, seqlen = arrays["x"].shape[:2]
    if "cu_seqlens" not in arrays:
        return [(row, 0, seqlen) for row in range(batch)]
    offsets = arrays["cu_seqlens"].tolist()
    return [(0, start, end) for start, end in pairwise(offsets)]


def _walk(arrays: dict[str, Tensor], zero: Tensor, step: Any, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Run ``step(row, t, state) -> (y, state)`` over every sequence."""
    y: dict[tuple[int, int], Tensor] = {}
    finals = []
    for k, (row, start, end) in enumerate(_sequences(arrays)):
        state = arrays["initial_state"][k] if "initial_state" in arrays else zero
        for t in reversed(range(start, end)) if reverse else range(start, end):
            y[row, t], state = step(row, t, state)
        finals.append(state)
    batch, seqlen = arrays["x"].shape[:2]
    rows = [torch.stack([y[row, t] for t in range(seqlen)]) for row in range(batch)]
    return torch.stack(rows), torch.stack(finals)


def _step_size(arrays: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    dt = arrays["dt"] + arrays["dt_bias"] if "dt_bias" in arrays else arrays["dt"]
    dt = F.softplus(dt) if options["dt_softplus"] else dt
    low, high = options.get("dt_limit", (-math.inf, math.inf))
    dt = torch.where(dt < low, low, dt)  # not clamp, whose gradient is zero at NaN
    return torch.where(dt > high, high, dt)


def _finish(y: Tensor, arrays: dict[str, Tensor], D: Tensor | None) -> Tensor:
    y = y if D is None else y + D * arrays["x"]
    return y * F.silu(arrays["z"]) if "z" in arrays else y


def _ssd(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    x, d = arrays["x"], _step_size(arrays, options)
    repeat = x.shape[2] // arrays["B"].shape[2]
    B, C = (arrays[name].repeat_interleave(repeat, 2) for name in "BC")

    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.exp(d[row, t] * arrays["A"])[:, None, None]
        state = decay * state + (d[row, t, :, None] * x[row, t])[:, :, None] * B[row, t, :, None]
        return torch.einsum("hpn,hn->hp", state, C[row, t]), state

    y, finals = _walk(arrays, x.new_zeros(*x.shape[2:], B.shape[-1]), step)
    D = arrays.get("D")
    return _finish(y, arrays, None if D is None else D.reshape(x.shape[2], -1)), finals


def _selective_scan(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    x, d = arrays["x"], _step_size(arrays, options)
    B, C = (a if a.ndim == 4 else a[:, :, None] for a in (arrays["B"], arrays["C"]))
    B, C = (a.repeat_interleave(x.shape[2] // a.shape[2], 2) for a in (B, C))

    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.exp(d[row, t, :, None] * arrays["A"])
        if "decay" in arrays:
            factor = arrays["decay"][row, t, :, None] * factor
        state = factor * state + (d * x)[row, t, :, None] * B[row, t]
        return (state * C[row, t]).sum(-1), state

    y, finals = _walk(arrays, torch.zeros_like(arrays["A"]), step)
    return _finish(y, arrays, arrays.get("D")), finals


def _linear_scan(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        factor = arrays["a"][row, t]
        if "reset" in arrays:  # before the product, so that neither has a gradient there
            factor, state = (torch.where(arrays["reset"][row, t], 0.0, v) for v in (factor, state))
        state = factor * state + arrays["x"][row, t]
        return state, state

    return _walk(arrays, torch.zeros_like(arrays["x"][0, 0]), step, options["reverse"])


def _causal_conv1d(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    x, weight = arrays["x"], arrays["weight"]

    def step(row: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat([state, x[row, t, :, None]], 1)
        return (window * weight).sum(1), window[:, 1:]

    y, finals = _walk(arrays, x.new_zeros(x.shape[2], weight.shape[1] - 1), step)
    y = y + arrays["bias"] if "bias" in arrays else y
    return F.silu(y) if options["activation"] == "silu" else y, finals


def _gated_rmsnorm(arrays: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    x, weight = arrays["x"], arrays["weight"]
    gate = F.silu(arrays["z"]) if "z" in arrays else torch.ones_like(x)
    v = x if options["norm_before_gate"] else x * gate
    groups = v.unflatten(-1, (-1, options["group_size"] or x.shape[-1]))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + options["eps"])).flatten(-2) * weight
    return (normed * gate if options["norm_before_gate"] else normed,)
