"""How far the results and gradients of a program are from those of a function in float64."""

import torch

from support.scans import flat


def errors(program, fn, given, training=False):
    """Return the relative L2 error of each result, and in training of the gradient of each input that has one.

    An input may be None.
    """
    results = []
    for run, dtype in ((program, torch.float32), (fn, torch.float64)):
        leaves = [x if x is None else x.to(dtype, copy=True).requires_grad_(training) for x in given]
        found = flat(run(*leaves))
        if training:
            sum(y.square().sum() for y in found).backward()
        gradients = [x.grad for x in leaves if x is not None and x.grad is not None]
        results.append([x.detach() for x in (*found, *gradients)])
    return [float((got - want).norm() / want.norm()) for got, want in zip(*results, strict=True)]
