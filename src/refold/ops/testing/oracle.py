"""Gradients by definition: that of each operator on float64 tensors, differentiated by PyTorch.

Finite differences are too coarse and too slow to compare every element.
"""

from __future__ import annotations

import numpy as np
import torch

from refold.ops.testing.problems import Problem


def gradients(problem: Problem, cotangents: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the gradients of a problem's results, weighted by cotangents, in every floating-point array."""
    arrays = {name: torch.from_numpy(array) for name, array in problem.arrays.items()}
    leaves = {name: a.requires_grad_() for name, a in arrays.items() if a.is_floating_point()}
    weighted = [(r * torch.from_numpy(c)).sum() for r, c in zip(problem.defined(arrays), cotangents, strict=True)]
    found = torch.autograd.grad(torch.stack(weighted).sum(), list(leaves.values()), allow_unused=True)
    return {
        name: np.zeros(leaf.shape) if grad is None else grad.numpy()
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
