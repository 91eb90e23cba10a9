"""Random graphs of views, slices, repeats, sums, means, products, products of matrices and convolutions.

Inputs have any floating-point dtype and any layout, also with strides of zero; some are integers or truth values, some
axes are empty, and some values are written to in place.
"""

from __future__ import annotations

import copy
import math
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from .programs import Program, Tensors

_SIZES = (1, 2, 3, 4, 6)
_MOST_ELEMENTS, _MOST_AXES = 4000, 6


def _view(r: Random, x: Tensor) -> Tensor:
    """Draw something that makes no product and no sum."""
    rank = x.dim()
    kind = r.choice(
        ["permute", "unsqueeze", "expand", "flatten", "unflatten", "negate", "repeat", "slice", "narrow", "pad",
         "squeeze", "interleave", "tanh", "flip", "select", "where", "contiguous", "mT", "roll", "chunk", "diagonal",
         "strided", "convert"]
    )  # fmt: skip
    if kind == "unsqueeze" and rank < _MOST_AXES:
        return x.unsqueeze(r.randrange(rank + 1))
    if kind == "negate":
        return -x
    if kind == "tanh":
        return x.tanh()
    if kind == "squeeze":
        return x.squeeze()
    if kind == "contiguous":
        return x.contiguous()
    if kind == "convert":
        return x.to(r.choice([torch.float32, torch.float64]))
    if not rank:
        return x
    dim = r.randrange(rank)
    size = x.shape[dim]
    if kind == "permute":
        return x.permute(r.sample(range(rank), rank))
    if kind == "mT" and rank > 1:
        return x.mT
    if kind == "roll":
        return x.roll(r.choice([-1, 1, 2]), dim)
    if kind == "chunk" and size > 1:
        return r.choice(x.chunk(2, dim))
    if kind == "diagonal" and rank > 1:
        return x.diagonal(0, *r.sample(range(rank), 2))
    if kind == "expand" and 1 in x.shape:
        dim = r.choice([d for d in range(rank) if x.shape[d] == 1])
        return x.expand([r.choice([2, 3]) if d == dim else n for d, n in enumerate(x.shape)])
    if kind == "flatten" and dim + 1 < rank:
        return x.flatten(dim, dim + 1)
    if kind == "unflatten" and rank < _MOST_AXES and (parts := [n for n in range(2, size) if size % n == 0]):
        part = r.choice(parts)
        return x.unflatten(dim, (part, size // part))
    if kind == "repeat" and rank < _MOST_AXES:
        return x.repeat([r.choice([1, 1, 2]) for _ in range(rank + r.randrange(2))])
    if kind == "interleave":
        return x.repeat_interleave(2, dim=dim)
    if kind in ("slice", "strided"):
        start = r.randrange(size) if kind == "strided" and size else None
        return x[(slice(None),) * dim + (slice(start, None, r.choice([1, 2])),)]
    if kind == "narrow" and size > 1:
        start = r.randrange(size - 1)
        return x.narrow(dim, start, r.randrange(1, size - start + 1))
    if kind == "pad":
        return F.pad(x, [r.randrange(2) if at // 2 == dim else 0 for at in range(2 * rank)])
    if kind == "flip":
        return x.flip(dim)
    if kind == "select" and size:
        return x.select(dim, r.randrange(-size, size))
    if kind == "where":
        return torch.where(torch.arange(size) < r.randrange(size + 1), x.movedim(dim, -1), 0.0)
    return x


def _views(r: Random, x: Tensor, most: int) -> Tensor:
    for _ in range(r.randrange(most)):
        if x.numel() <= _MOST_ELEMENTS and x.dim() < _MOST_AXES:
            x = _view(r, x)
    return x


def _multiplied(r: Random, x: Tensor, y: Tensor) -> Tensor:
    if x.dim() + y.dim() <= _MOST_AXES and x.numel() * y.numel() <= 5 * _MOST_ELEMENTS and r.random() < 0.6:
        out = x.reshape([*x.shape, *[1] * y.dim()]) * y
        return out.permute(r.sample(range(out.dim()), out.dim())) if r.random() < 0.5 else out
    pairs = zip(x.shape[::-1], y.shape[::-1], strict=False)
    return x * y if all(a == b or 1 in (a, b) for a, b in pairs) else x


def _written(r: Random, x: Tensor, y: Tensor) -> Tensor:
    """Draw a copy that is written to in place."""
    x = x.clone()
    kind = r.choice(["mul", "add", "slice", "fill", "copy", "masked"])
    if kind == "mul":
        return x.mul_(r.choice([2, -1]))
    if kind == "masked":
        return x.masked_fill_(x > 1, 0.5)
    if not x.dim() or not x.numel():
        return x
    part = x.select(r.randrange(x.dim()), 0)
    if kind == "add":
        part.add_(1)
    elif kind == "slice":
        x[-1] = x[0] * 2
    elif kind == "fill":
        part.zero_()
    elif y.dim() and y.shape[-1:] == part.shape[-1:] and y.numel():
        part.copy_(y.reshape(-1, y.shape[-1])[0])
    return x


def _combined(r: Random, x: Tensor, y: Tensor, others: Tensors) -> Tensor:
    """Draw a product or a sum."""
    kind = r.choice(
        ["product", "product", "product", "square", "sum", "sum", "sum", "mean", "scaled", "matrix", "linear", "einsum",
         "plus", "keep", "written", "other", "convolution", "quotient"]
    )  # fmt: skip
    both = torch.promote_types(x.dtype, y.dtype)
    if kind == "product":
        return _multiplied(r, x, y)
    if kind == "square" and x.dim() > 1:
        a, b = r.sample(range(x.dim()), 2)
        return x * x.transpose(a, b) if x.shape[a] == x.shape[b] else x
    if kind in ("sum", "mean") and x.dim():
        dims = r.sample(range(x.dim()), r.randrange(1, x.dim() + 1))
        return getattr(x, kind)(dims if r.random() < 0.8 else r.choice(dims) - x.dim(), keepdim=r.random() < 0.3)
    if kind == "scaled":
        return x * r.choice([0.5, -2, 3])
    if kind == "quotient":
        return x / r.choice([4, -0.5])
    if kind == "plus":
        return x + x.flip(0) if x.dim() else x
    if kind == "matrix" and x.dim() in (2, 3):
        return x @ x.mT
    if kind == "linear" and x.dim() and y.dim() == 2 and x.shape[-1] == y.shape[-1]:
        return F.linear(x.to(both), y.to(both))
    if kind == "einsum" and x.dim() and y.dim() and x.shape[-1] == y.shape[-1] and x.dim() + y.dim() <= 5:
        letters = "abcdef"[: x.dim() + y.dim() - 2]
        left, right = letters[: x.dim() - 1], letters[x.dim() - 1 :]
        return torch.einsum(f"{left}z,{right}z->{left}{right}", x.to(both), y.to(both))
    if kind == "written":
        return _written(r, x, y)
    if kind == "convolution" and x.dim() == 3 and y.dim() == 3 and x.shape[1] == y.shape[1] and y.numel():
        return F.conv1d(x.to(both), y.to(both), padding=y.shape[2] - 1) if x.numel() else x
    if kind == "other" and others:
        other = r.choice(others)
        pairs = zip(x.shape[::-1], other.shape[::-1], strict=False)
        if not all(a == b or 1 in (a, b) for a, b in pairs):
            return x
        return torch.where(other, x, 0.0) if other.dtype == torch.bool and r.random() < 0.5 else x * other
    return x


def _input(r: Random, shape: list[int], generator: torch.Generator, dtype: torch.dtype, *, small: bool) -> Tensor:
    """Draw an input, in a layout that is as likely strange as not."""
    low, high = (-1, 2) if small else (-2, 3)
    kind = r.choice(["dense", "dense", "permuted", "sliced", "expanded"])
    if kind == "expanded" and len(shape) > 1:
        shape = [1, *shape[1:]]
    order = r.sample(range(len(shape)), len(shape)) if kind == "permuted" else list(range(len(shape)))
    extra = 2 if kind == "sliced" else 1
    x = torch.randint(low, high, [extra * shape[d] for d in order], generator=generator).to(dtype)
    x = x.permute([order.index(d) for d in range(len(shape))])[tuple(slice(None, None, extra) for _ in shape)]
    return x.expand([r.choice([2, 3]), *shape[1:]]) if kind == "expanded" and len(shape) > 1 else x


def graph(r: Random) -> Program:
    """Draw a graph of views, sums and products."""
    empty = r.random() < 0.04
    sizes = (*_SIZES, 0) if empty else _SIZES
    shapes = [[r.choice(sizes) for _ in range(r.randrange(1, 4))] for _ in range(r.randrange(1, 4))]
    seed, steps = r.randrange(2**30), r.randrange(4, 12)
    generator = torch.Generator().manual_seed(seed)
    dtype = r.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    # Few values in 16 bits: products of many overflow float16.
    small = dtype in (torch.bfloat16, torch.float16)
    inputs = [_input(r, shape, generator, dtype, small=small) for shape in shapes]
    floating = len(inputs)
    inputs += [
        torch.randint(0, 2, shape[-1:], generator=generator).to(r.choice([torch.bool, torch.int64, torch.int32]))
        for shape in shapes if r.random() < 0.3
    ]  # fmt: skip

    def fn(*xs: Tensor) -> tuple[Tensor, ...]:
        own, pool, others = Random(seed), list(xs[:floating]), list(xs[floating:])
        for _ in range(steps):
            x = own.choice(pool)
            if x.numel() > _MOST_ELEMENTS:
                continue
            pool.append(_combined(own, _views(own, x, 4), _views(own, own.choice(pool), 3), others))
        return tuple(x + 0 for x in pool[-3:])

    program = Program(fn, inputs, f"graph {seed} of {steps} steps on {[(*x.shape, x.dtype) for x in inputs]}")
    if r.random() < 0.3 and not empty:
        program.gradient = "autograd"
    elif r.random() < 0.3 and inputs[0].numel():
        bad = copy.deepcopy(inputs[0])  # with its strides, which the graph is traced for
        bad[tuple(r.randrange(n) for n in bad.shape)] = r.choice([math.nan, math.inf, -math.inf])
        program.hostile = [[bad, *inputs[1:]]]
    return program
