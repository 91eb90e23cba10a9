"""Put a scan where a recurrence along an axis is computed in another way than by a loop.

Shapes. Values are (..., t, ...), and stay so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ir.builder import Builder, between, upstream
from ..ir.fx import concrete, value
from ..ir.rewrite import Rewrite, replace_node
from ..ir.views import is_view
from .affine import Affine, Bound, Loop
from .states import LoopVectorizer
from .vectorize import NotALoop, Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Found:
    """A value that is a recurrence: ``h[t] = a[t] h[t-1] + b[t]`` from h = 0 along an axis; ``t + 1`` if ``reverse``.

    Attributes:
        node: The value.
        a: The factors; None for a factor of one.
        exponent: Whether the factors are the exponentials of ``a``.
        b: The inputs.
        dim: The axis.
        reverse: Whether steps go against time.
        late: At how many steps, the first ones, the factor is one; ``a`` is so much shorter.
        sign: By what ``a`` is multiplied, if it is an exponent.
        exponents: Whether the inputs are the exponentials of ``b``.
        logarithm: Whether the value is the logarithm of such a recurrence; factors and inputs are exponentials then.
    """

    node: Node
    a: Node | None
    exponent: bool
    b: Node
    dim: int
    reverse: bool = False
    late: int = 0
    sign: int = 1
    exponents: bool = False
    logarithm: bool = False


def scanned(found: Found, name: str, why: str, replaced: dict[Node, Node]) -> Rewrite | None:
    """Replace one recurrence; None if no operator takes it.

    Args:
        found: The recurrence.
        name: What to call the rewrite.
        why: What is slow about the original.
        replaced: What stands for the recurrences that were replaced before; gets this one.
    """
    root, dim, vectorizer = found.node, found.dim, LoopVectorizer()
    rank, emit = value(root).dim(), vectorizer.emit
    emit.at(root)

    def over_time(x: Node) -> Value:
        """Return an operand, broadcast to (..., t, ...), with time as axis 0: (t, ...)."""
        own = dim - (rank - value(x).dim())
        return Value(emit.permute(x, [own, *(d for d in range(value(x).dim()) if d != own)]), True)

    operands = [replaced.get(x, x) for x in (found.a, found.b) if x is not None]
    step = emit.call(aten.select.int, root, dim, 0)
    loop = Loop((step,), reverse=found.reverse, initial=0, count=value(root).shape[dim])
    decay, b = None if found.a is None else operands[0], operands[-1]
    if decay is not None and found.sign < 0:
        decay = emit.call(aten.neg.default, decay)
    if decay is not None and found.late:
        after = value(decay).dim() - 1 - (dim - (rank - value(decay).dim()))
        fill = 0.0 if found.exponent else 1.0
        decay = emit.call(aten.constant_pad_nd.default, decay, [0, 0] * after + [found.late, 0], fill)
    if not found.logarithm:
        decay = emit.call(aten.exp.default, decay) if found.exponent and decay is not None else decay
        b = emit.call(aten.exp.default, b) if found.exponents else b
    try:
        scale = None if decay is None else over_time(decay)
        body = Affine(loop, scale, over_time(b))
        if found.logarithm:
            loop.initial = -math.inf
            body = Affine(loop, None, scale, bounds=(Bound(over_time(b), smooth=True),))
        states = vectorizer._scan(loop, body)
    except NotALoop:
        return None
    new = emit.permute(states.node, [*range(1, dim + 1), 0, *range(dim + 1, rank)])
    build = Builder(root)
    new = build.restride(new, value(root))
    emit.added.remove(step)
    root.graph.erase_node(step)
    replaced[root] = new
    # The network may view what the operands are views of otherwise: both versions of the region start from that.
    views, sources, live = dict[Node, None](), set[Node](), upstream(new)
    for x in operands:
        while is_view(x):
            views[x] = None
            x = x.all_input_nodes[0]
        sources.add(x)
    return replace_node(
        root,
        new,
        inside=between(root, sources),
        added=[*views, *(x for x in (*emit.added, *build.added) if x in live)],
        name=name,
        why=why,
        detail=loop.described + (", against time" if found.reverse else ""),
        multilinear=False,
        terms=max(concrete(n) for n in value(root).shape),
        spread=0.1,
    )
