"""Turn cumulative sums of what was divided by a cumulative product into scans.

``P * cumsum(x / P)`` with the cumulative product P of a is the recurrence ``h[t] = a[t] h[t-1] + x[t]``, for what is
divided by P at one step is multiplied by it at all later ones. So is ``exp(A) * cumsum(x * exp(-A))`` with the
cumulative sum A of log a. With logarithms of x, too, it is ``A + logcumsumexp(log x - A)``, the logarithm of h. A scan
divides by nothing, so no product underflows, and its errors do not grow with A. Of logarithms whose exponential alone
is read, exponentials are taken first.

Shapes. Values are (..., t, ...). Source: Heinsen 2023 (arXiv:2311.06281), equations 3 to 7, read backwards; as in the
training of minGRU and minLSTM (Feng et al. 2024, arXiv:2410.01201).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..ir.fx import arg, is_tensor, is_training, known, same, value
from ..ir.rewrite import Rewrite
from ..recurrence.scanned import Found, scanned

aten = torch.ops.aten

NAME = "replace rescaled sum"
WHY = "it is divided by a product over time, and multiplied by it again, in passes over all of memory"
# Shorter sums are ordinary layer code.
SHORTEST = 8


def replace_rescaled_sums(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace rescaled cumulative sums (..., t, ...) by scans."""
    if is_training(graph):
        return
    replaced = dict[Node, Node]()
    for target, read in ((aten.logcumsumexp.default, _of_logarithms), (aten.cumsum.default, _of_quotients)):
        for total in graph.find_nodes(op="call_function", target=target):
            for found in read(total):
                if wanted(found.node.name) and (made := scanned(found, NAME, WHY, replaced)) is not None:
                    yield made
    if replaced:
        graph.eliminate_dead_code()


def _of_logarithms(total: Node) -> Iterator[Found]:
    """Read ``A + logcumsumexp(b - A)``, with any signs of A."""
    shifted, dim = _summed(total)
    if shifted is None or shifted.target not in (aten.sub.Tensor, aten.add.Tensor) or shifted.kwargs:
        return
    added = shifted.target is aten.add.Tensor
    for b, sums in (shifted.args, shifted.args[::-1]) if added else (shifted.args,):
        back = aten.sub.Tensor if added else aten.add.Tensor
        given = _factors(_Product(sums, -1 if added else 1).plain(), dim) if _is_like(b, total) else None
        if given is None:
            continue
        for end in _ends(total, back, partial(operator.is_, sums)):
            outer = list(end.users)
            if outer and all(x.target is aten.exp.default for x in outer):
                yield from (Found(x, b=b, dim=dim, exponents=True, **given) for x in outer)
            else:
                yield Found(end, b=b, dim=dim, logarithm=True, **given)


def _of_quotients(total: Node) -> Iterator[Found]:
    """Read ``P * cumsum(x / P)``."""
    scaled, dim = _summed(total)
    for x, product in _quotients(scaled):
        given = _factors(product, dim) if _is_like(x, total) else None
        if given is not None:
            for end in _ends(total, aten.mul.Tensor, partial(_is_product, product)):
                yield Found(end, b=x, dim=dim, **given)


class _Product(NamedTuple):
    """A product over time: the exponential of ``sign`` times a node, or the node itself if that is zero."""

    node: Any
    sign: int

    def plain(self) -> _Product:
        """Return the same without a sign in the node."""
        negative = self.sign and is_tensor(self.node) and self.node.target is aten.neg.default
        return _Product(self.node.args[0], -self.sign) if negative else self


def _product(node: Any) -> _Product:
    """Read a factor."""
    if is_tensor(node) and node.target is aten.exp.default:
        return _Product(node.args[0], 1).plain()
    return _Product(node, 0)


def _is_product(found: _Product, node: Any) -> bool:
    return _product(node) == found


def _quotients(scaled: Any) -> Iterator[tuple[Any, _Product]]:
    """Read ``x / P``, or ``x * exp(-A)``: x and P."""
    if scaled is None or scaled.kwargs:
        return
    if scaled.target is aten.div.Tensor:
        yield scaled.args[0], _product(scaled.args[1])
    elif scaled.target is aten.mul.Tensor:
        for x, inverse in (scaled.args, scaled.args[::-1]):
            found = _product(inverse)
            if found.sign:
                yield x, _Product(found.node, -found.sign)


def _summed(total: Node) -> tuple[Any, int]:
    """Read the terms of a long cumulative sum in one dtype, and its axis; None for what is none."""
    x, dim = arg(total, 0), arg(total, 1, "dim")
    val = value(total)
    if not val.dim() or not val.is_floating_point() or value(x).dtype != val.dtype:
        return None, 0
    length = known(val.shape[dim])
    return (None if isinstance(length, int) and length < SHORTEST else x), dim % val.dim()


def _factors(found: _Product, dim: int) -> dict[str, Any] | None:
    """Read a product over time as factors of a recurrence; None if it is none, or over another axis."""
    product, late = found.node, 0
    if not is_tensor(product):
        return None
    target = (aten.cumsum if found.sign else aten.cumprod).default
    if product.target is aten.constant_pad_nd.default and arg(product, 2, "value", 0) == (0.0 if found.sign else 1.0):
        inner, pads = product.args[:2]
        own = 2 * (value(product).dim() - 1 - dim)
        if own >= len(pads) or any(n for i, n in enumerate(pads) if i != own):
            return None
        if not isinstance(pads[own], int) or pads[own] < 0:
            return None
        product, late = inner, pads[own]
    if product.target is not target or product.kwargs or product.args[1] % value(product).dim() != dim:
        return None
    a: Any = product.args[0]
    if value(a).dtype != value(product).dtype:
        return None
    return {"a": a, "exponent": bool(found.sign), "late": late, "sign": found.sign or 1}


def _ends(total: Node, target: Any, other: Callable[[Any], bool]) -> list[Node]:
    """Return all that reads a sum, if an operation combines it with a certain other node in each of them."""

    def is_end(user: Any) -> bool:
        if user.target is not target or user.kwargs or value(user).shape != value(total).shape:
            return False
        a, b = user.args
        return (a is total and other(b)) or (b is total and other(a))

    return list(total.users) if all(map(is_end, total.users)) else []


def _is_like(x: Any, total: Node) -> bool:
    """Tell whether an operand has the shape of the sum."""
    if not is_tensor(x):
        return False
    shapes = value(x).shape, value(total).shape
    return len(shapes[0]) == len(shapes[1]) and all(map(same, *shapes))
