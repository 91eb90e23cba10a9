"""Rewrite functions before autograd without code generation, and compare results and gradients with float64."""

import torch

from refold.compiler.dynamo import captures_loops
from refold.verify.numerics import unit_roundoff

from .scans import Described


def gradients(fn, args):
    """Return results, and gradients for cotangents that every dtype holds exactly."""
    results = torch.utils._pytree.tree_leaves(fn(*args))
    if not torch.is_grad_enabled():
        return results
    results = [y for y in results if y.requires_grad]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randint(-4, 5, y.shape, generator=generator).to(y) for y in results]
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    found = torch.autograd.grad(results, leaves, weights, allow_unused=True, materialize_grads=True)
    return [*(y.detach() for y in results), *found]


def inferred(fn, *args, graphs=None, results=None):
    """Do as `trained` for inference, where there are no gradients."""
    with torch.no_grad():
        return trained(fn, *args, graphs=graphs, results=results)


def trained(fn, *args, graphs=None, results=None):
    """Compile a function without code generation; return its report, and errors of results and gradients.

    Errors are relative to float64, in units of what the function itself is off. ``graphs`` gets the graph that runs,
    ``results`` what the function returns.
    """
    seen = Described("training" if torch.is_grad_enabled() else "inference")

    @captures_loops
    def backend(gm, _):
        made = seen.describe(gm)
        if graphs is not None:
            graphs.append(made.graph)
        return made

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    if results is not None:
        results.append(compiled(*args))
    got = gradients(compiled, args)
    own = gradients(fn, args)
    wide = [x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args]
    errors = []
    for y, o, r in zip(got, own, gradients(fn, wide), strict=True):
        assert (y.shape, y.dtype) == (o.shape, o.dtype)
        floor = 4 * unit_roundoff(y.dtype) * float(r.norm())
        errors.append(float((y.double() - r).norm()) / (float((o.double() - r).norm()) + floor + 1e-300))
    return seen.report, max(errors)
