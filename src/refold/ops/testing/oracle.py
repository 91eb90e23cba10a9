"""Gradients by definition: each operator again in torch, in float64, one token after the other, differentiated.

The reference is NumPy and has no gradients. Finite differences of it are too coarse and too slow to compare every
element. So each operator has a file ``oracle.py``; the contract compares it with the reference.
"""

from __future__ import annotations

import math
from importlib import import_module
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
    """Compute the operator's results as differentiable functions of the arrays."""
    spec = problem.spec
    function = getattr(import_module(f"{spec.module}.oracle"), spec.name.removesuffix("_step"))
    one = spec.time_optional and "t" not in problem.case.sizes
    timed = {arg.name for arg in spec.args if one and arg.timed}
    arrays = {"initial_state" if k == "state" else k: v.unsqueeze(1) if k in timed else v for k, v in arrays.items()}
    found = function(arrays, problem.all_options())
    return (found[0][:, 0], *found[1:]) if one else found


def _sequences(arrays: dict[str, Tensor]) -> list[tuple[int, int, int]]:
    """Return batch row, first token and end of each sequence."""
    batch, seqlen = arrays["x"].shape[:2]
    if "cu_seqlens" not in arrays:
        return [(row, 0, seqlen) for row in range(batch)]
    offsets = arrays["cu_seqlens"].tolist()
    return [(0, start, end) for start, end in pairwise(offsets)]


def walk(arrays: dict[str, Tensor], zero: Tensor, step: Any, reverse: bool = False) -> tuple[Tensor, Tensor]:
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


def step_size(arrays: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """Compute the step sizes of the scans of Mamba: bias, softplus and limits, each optional."""
    dt = arrays["dt"] + arrays["dt_bias"] if "dt_bias" in arrays else arrays["dt"]
    dt = F.softplus(dt) if options["dt_softplus"] else dt
    low, high = options.get("dt_limit", (-math.inf, math.inf))
    dt = torch.where(dt < low, low, dt)  # not clamp, whose gradient is zero at NaN
    return torch.where(dt > high, high, dt)


def finish(y: Tensor, arrays: dict[str, Tensor], D: Tensor | None) -> Tensor:
    """Add the skip connection and multiply by the gate of the scans of Mamba, if they are given."""
    y = y if D is None else y + D * arrays["x"]
    return y * F.silu(arrays["z"]) if "z" in arrays else y
