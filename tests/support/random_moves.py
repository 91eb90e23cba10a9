"""Random graphs of moves of axes, in all their spellings, for the readers of `refold.compiler.ir.moves`."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

aten, prims = torch.ops.aten, torch.ops.prims
MOST_AXES, MOST_ELEMENTS = 5, 600
KINDS = (
    "copy", "convert", "same", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "squeeze_one", "squeeze_some",
    "permute", "transpose", "t", "expand", "repeat", "slice", "strided", "select", "unbind", "split", "pad", "cut",
    "cat", "stack", "flip", "rev", "roll", "slice_scatter", "select_scatter",
)  # fmt: skip


def _step(r: Random, kind: str, x: Tensor) -> Tensor | None:
    """Apply a move of a kind; None if it does not go with the shape."""
    rank, shape = x.dim(), list(x.shape)
    near = lambda d: d - rank if r.random() < 0.5 else d  # noqa: E731  # counted from either end
    if kind == "copy":
        return r.choice([aten.clone.default, aten.alias.default, aten.detach.default])(x)
    if kind == "same":
        return prims.convert_element_type.default(x, x.dtype)
    if kind == "convert":
        return aten.copy.default(torch.zeros_like(x), x)
    if kind == "unsqueeze" and rank < MOST_AXES:
        return aten.unsqueeze.default(x, r.randrange(-rank - 1, rank + 1))
    if kind == "squeeze":
        return aten.squeeze.default(x)
    if not rank or not x.numel():
        return None
    dim = r.randrange(rank)
    size = shape[dim]
    if kind == "view":
        return aten.reshape.default(x, [*shape[:dim], -1])
    if kind == "flatten" and rank > 1:
        return aten.reshape.default(x, [*shape[: max(dim - 1, 0)], -1, *shape[max(dim, 1) + 1 :]])
    if kind == "unflatten" and rank < MOST_AXES and (parts := [n for n in range(2, size) if size % n == 0]):
        part = r.choice(parts)
        return aten.reshape.default(x, [*shape[:dim], part, size // part, *shape[dim + 1 :]])
    if kind == "squeeze_one":
        return aten.squeeze.dim(x, near(dim))
    if kind == "squeeze_some":
        return aten.squeeze.dims(x, [near(d) for d in r.sample(range(rank), r.randrange(1, rank + 1))])
    if kind == "permute":
        return aten.permute.default(x, [near(d) for d in r.sample(range(rank), rank)])
    if kind == "transpose":
        return aten.transpose.int(x, near(dim), near(r.randrange(rank)))
    if kind == "t" and rank <= 2:
        return aten.t.default(x)
    if kind == "expand" and rank < MOST_AXES:
        front = [2] if r.random() < 0.4 else []
        return aten.expand.default(x, [*front, *(r.choice([2, 3]) if n == 1 else r.choice([n, -1]) for n in shape)])
    if kind == "repeat" and rank < MOST_AXES:
        return aten.repeat.default(x, [r.choice([1, 1, 2]) for _ in range(rank + r.randrange(2))])
    start = r.randrange(size)
    stop = r.randrange(start + 1, size + 1)
    from_end = r.random() < 0.3
    if kind in ("slice", "strided"):
        ends = (start - size, stop if r.random() < 0.5 else 2**63 - 1) if from_end else (start, stop)
        return aten.slice.Tensor(x, near(dim), *ends, 1 if kind == "slice" else 2)
    if kind == "select":
        return aten.select.int(x, near(dim), start - size if from_end else start)
    if kind == "unbind":
        return aten.unbind.int(x, near(dim))[start]
    if kind == "split":
        parts = aten.split.Tensor(x, r.randrange(1, size + 1), near(dim))
        return r.choice(parts)
    if kind == "pad":
        pads = [r.randrange(3) for _ in range(2 * r.randrange(1, rank + 1))]
        return aten.constant_pad_nd.default(x, pads, r.choice([0.0, 1.0]))
    if kind == "cut" and size > 1:
        return aten.constant_pad_nd.default(x, [*[0, 0] * (rank - 1 - dim), -1, r.randrange(2)])
    if kind == "cat":
        return aten.cat.default([x, aten.slice.Tensor(x, dim, 0, stop)], near(dim))
    if kind == "stack" and rank < MOST_AXES:
        return aten.stack.default([x, aten.flip.default(x, [dim])], near(dim))
    if kind in ("flip", "rev"):
        dims = r.sample(range(rank), r.randrange(1, rank + 1))
        return aten.flip.default(x, [near(d) for d in dims]) if kind == "flip" else prims.rev.default(x, dims)
    if kind == "roll":
        return aten.roll.default(x, [r.randrange(-size, 2 * size)], [near(dim)])
    if kind == "slice_scatter":
        step = r.choice([1, 1, 2])
        part = aten.flip.default(aten.slice.Tensor(x, dim, start, stop, step), [dim])
        return aten.slice_scatter.default(x, part, near(dim), start - size if from_end else start, stop, step)
    if kind == "select_scatter":
        part = aten.select.int(x, dim, r.randrange(size))
        return aten.select_scatter.default(x, part, near(dim), start - size if from_end else start)
    return None


def draw(r: Random, x: Tensor, most: int = 5, turned: int | None = None) -> GraphModule:
    """Draw a graph that moves the axes of ``x``; first it turns one round, if that is named."""
    kinds = [r.choice(KINDS) for _ in range(r.randrange(1, most + 1))]
    seed = r.randrange(1 << 30)

    def fn(x: Tensor) -> Tensor:
        own = Random(seed)
        x = x if turned is None else aten.flip.default(x, [turned])
        for kind in kinds:
            y = _step(own, kind, x)
            x = x if y is None or y.numel() > MOST_ELEMENTS or y.dim() > MOST_AXES else y
        return x

    return make_fx(fn, tracing_mode="fake")(x)


def values(gm: GraphModule, *inputs: Tensor) -> dict[Node, Tensor]:
    """Run a graph and return the value of each node."""
    run = Interpreter(gm, garbage_collect_values=False)
    run.run(*inputs)
    return {node: x for node, x in run.env.items() if isinstance(x, Tensor)}
