"""Run layers of `layers` through the whole compiler, without generating code, in all the ways that people call them.

Dynamo captures, AOTAutograd traces, each pass runs, and, at ``verify="quick"``, each check: only the last step is left
out, and the graph that Inductor would make code from runs operation by operation. So a trial takes about a second.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest import mock

import torch
from torch._inductor.compile_fx import compile_fx
from torch.utils._pytree import tree_leaves

import refold
from refold.errors import RefoldWarning

from .layers import LAYERS, Sizes
from .mutants import mutant
from .programs import Outcome, Tensors, compared, nudged, widened

MODES = (
    "plain",
    "plain",
    "gradient",
    "gradient",
    "gradient",
    "no_grad",
    "inference",
    "autocast",
    "func.grad",
    "vmap",
    "leaf",
)


def _as_it_is(gm: torch.fx.GraphModule, *_: Any, **__: Any) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        return gm(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def no_code() -> Iterator[None]:
    """Let graphs run operation by operation where Inductor would generate code for them."""
    with mock.patch("refold.compiler.inductor.compile_fx", functools.partial(compile_fx, inner_compile=_as_it_is)):
        yield


def _floating(xs: Tensors) -> list[int]:
    return [at for at, x in enumerate(xs) if x.is_floating_point()]


def _called(mode: str, fn: Callable[..., Any], xs: Tensors) -> Tensors:
    """Call a function as the mode says: its results, and gradients if there are any."""
    xs = [x.detach().clone() for x in xs]
    if mode == "no_grad":
        with torch.no_grad():
            return tree_leaves(fn(*xs))
    if mode == "inference":
        with torch.inference_mode():
            return [x.clone() for x in tree_leaves(fn(*xs))]
    if mode in ("plain", "vmap", "func.grad"):
        return tree_leaves(fn(*xs))
    wanted = _floating(xs)[:1] if mode == "leaf" else _floating(xs)
    for at in wanted:
        xs[at].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else contextlib.nullcontext():
        results = tree_leaves(fn(*xs))
    generator = torch.Generator().manual_seed(0)
    roots = [y for y in results if y.requires_grad]
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in roots]
    leaves = [xs[at] for at in wanted]
    own = torch.autograd.grad(roots, leaves, weights, allow_unused=True, materialize_grads=True) if roots else ()
    return [x.detach() for x in (*results, *own)]


def _without_refold(mode: str, fn: Callable[..., Any], xs: Tensors) -> Exception | None:
    """Return the error that Dynamo itself makes of a call; None if it makes none."""
    torch._dynamo.reset()
    try:
        _called(mode, torch.compile(fn, backend="eager"), xs)
    except Exception as error:
        return error
    return None


def _transformed(mode: str, fn: Callable[..., Any], xs: Tensors) -> Callable[..., Any]:
    if mode == "func.grad":
        wanted = tuple(_floating(xs))

        def loss(*ys: torch.Tensor) -> torch.Tensor:
            return sum(y.sin().sum() for y in tree_leaves(fn(*ys)) if y.is_floating_point())

        return torch.func.grad(loss, argnums=wanted)
    if mode == "vmap":
        return lambda *ys: torch.func.vmap(lambda x: fn(x, *ys[1:]))(torch.stack([ys[0], ys[0] * 0.5]))
    return fn


def trial(r: Random, name: str = "", *, changed: bool = False, **given: Any) -> tuple[str, Outcome]:
    """Draw a layer and a way to call it, and compare what refold makes of it with eager.

    Args:
        r: Where from.
        name: The layer; drawn if empty.
        changed: Whether the layer is changed at random first (`support.mutants`).
        given: ``mode``, ``dtype``, ``verify`` or ``lengths`` in place of drawn ones.

    Returns:
        What was drawn, and what became of it.
    """
    name = name or r.choice(list(LAYERS))
    mode = r.choice(MODES)
    dtype = r.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16, torch.float16])
    verify = r.choice(["off", "off", "quick"])
    lengths = r.choice([(16,), (24,), (33,), (20, 31), (33, 18, 40), (5,), (1,), (2, 17)])
    batch = r.choice([1, 2, 2, 3, 3, 0])
    mode, dtype, verify, lengths, batch = (
        given.get(key, own)
        for key, own in zip(
            ("mode", "dtype", "verify", "lengths", "batch"), (mode, dtype, verify, lengths, batch), strict=True
        )
    )
    layer, text = mutant(name, r) if changed else (LAYERS[name], name)
    about = f"{text} {mode} {dtype} verify={verify} steps={lengths} batch={batch}"
    torch._dynamo.reset()
    names: list[str] = []
    sizes = r.randrange(2**30)
    compiled: Any = None
    for steps in lengths:
        made, xs = layer(Sizes(Random(sizes), dtype, batch, steps))
        fn = made if compiled is None else fn  # noqa: F821  # the layer of the first length sees the others, too
        plain = _transformed(mode, fn, xs)
        exactly = mode if mode != "autocast" else "gradient"
        try:
            runs = [_called(exactly, plain, widened(xs)), _called(mode, plain, xs)]
        except Exception as error:  # eager cannot do this
            return about, Outcome("", [f"eager: {type(error).__name__}"])
        if compiled is None:
            compiled = refold.compile(plain, verify=verify, accept="always", strict=True, cache=False)
        try:
            with no_code(), warnings.catch_warnings():
                warnings.simplefilter("error", RefoldWarning)
                runs.append(_called(mode, compiled, xs))
        except Exception:
            if (error := _without_refold(mode, plain, xs)) is not None:
                return about, Outcome("", [f"Dynamo: {type(error).__name__}"])
            raise
        names = [f"{row.name}: {row.detail}" for graph in compiled.report.graphs for row in graph.rewrites]
        if compared(*runs, []):
            generator = torch.Generator().manual_seed(0)
            moved = [_called(mode, plain, nudged(xs, generator)) for _ in range(3)]
            if failure := compared(*runs, [], moved):
                return about, Outcome(f"at {steps} steps: {failure}", names)
    return about, Outcome("", names)
