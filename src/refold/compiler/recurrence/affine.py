"""The carry of a loop: affine, elementwise functions of it, and the scan that computes all its states.

Values of a step are `Value`s, the same or stacked over all steps, or `Affine` functions of a state
that is not known yet. Once a step's new state turns out to be affine in its old one, ``_scan``
computes all states at once, and the functions of the carry become values too.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ...ops.torch.registry import OPS, node_args
from ..ir.fx import is_tensor, known, value
from .vectorize import Emitter, NotALoop, Value, is_pointwise

aten = torch.ops.aten
prims = torch.ops.prims

_SAME = (aten.clone.default, aten.alias.default, aten.detach.default)
# Views: of a carry only those may occur that add or drop axes of size one, or take all of an axis.
_VIEWS = (
    aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor,
    aten.select.int,
)  # fmt: skip


@dataclass(eq=False)
class Loop:
    """A list of nodes that is being stacked; a loop if it turns out to depend on itself.

    Attributes:
        steps: The nodes, one a step.
        reverse: Whether a step depends on the one after it.
        initial: What the first step to run reads instead of a step; set once the carry was met.
        states: All steps' values, once they are known.
        scan: The operator's result that ``states`` is a view of, (batch, time, ...).
        body: What a step does with the carry.
        previous: What each step read of the one before.
        last: The last state, if something cheaper than ``states`` holds it.
        operator: What computes its states.
        count: How many steps there are, if one node stands for all of them.
        name: What to call it to a person.
    """

    steps: tuple[Node, ...]
    reverse: bool = False
    initial: Any = None
    states: Node | None = None
    scan: Node | None = None
    body: Affine | None = None
    previous: Node | None = None
    last: Node | None = None
    operator: str = "linear_scan"
    count: Any = None
    name: str = "the carry"

    @property
    def length(self) -> Any:
        """How many steps there are."""
        return len(self.steps) if self.count is None else known(self.count)

    @property
    def described(self) -> str:
        """What it is, for a person."""
        steps = self.length if isinstance(self.length, int) else "any number of"
        sizes = [str(size) if isinstance(known(size), int) else "any" for size in value(self.steps[0]).shape]
        return f"{steps} steps of a state of {' x '.join(sizes) or 1} as one {self.operator}"


@dataclass(frozen=True)
class Affine:
    """``scale * carry + offset``, elementwise; None stands for 1 and for 0.

    ``shape`` is a step's shape: the carry's, but for axes of size one; None before anything was done to the carry.
    """

    loop: Loop
    scale: Value | None = None
    offset: Value | None = None
    shape: tuple[int, ...] | None = None


class LoopVectorizer:
    """Emits what a loop's steps do, for all steps at once."""

    def __init__(self) -> None:
        self.emit = Emitter()
        self.loops: list[Loop] = []

    def _closed(self, x: Value | Affine) -> Value | Affine:
        """Turn a function of a carry into a value once the carry's loop is known."""
        if isinstance(x, Affine) and x.loop.previous is not None:
            return self._apply(x, x.loop.previous, x.loop.steps[0])
        return x

    def _apply(self, x: Affine, carry: Node, step: Node) -> Value:
        shape = tuple(value(step).shape) if x.shape is None else x.shape
        out, rank = self.emit.reshape(carry, [value(carry).shape[0], *shape]), len(shape)
        if x.scale is not None:
            out = self.emit.call(aten.mul.Tensor, out, self.emit.padded(x.scale, rank))
        if x.offset is not None:
            out = self.emit.call(aten.add.Tensor, out, self.emit.padded(x.offset, rank))
        return Value(out, True)

    def _tensor(self, x: Any, like: Node) -> Node:
        """Return a node of the shape of another."""
        if not isinstance(x, Node):
            if isinstance(x, bool) or not isinstance(x, (int, float)):
                raise NotALoop("initial-state", f"the first step reads {x!r}")
            val = value(like)
            return self.emit.call(aten.full.default, list(val.shape), x, dtype=val.dtype, device=val.device)
        if not is_tensor(x):
            raise NotALoop("carry-not-tensor", "a step carries something that is not a tensor")
        x = self._known(x)
        if value(x).dim() > value(like).dim():
            raise NotALoop("initial-state", "the first step reads a value of another shape")
        return self.emit.expand(x, value(like).shape)

    def _known(self, x: Node) -> Node:
        """Return the node to read a value from outside the loop from."""
        return x

    def _run(self, x: Node, start: int, stop: int, step: int, dim: int = 0) -> Node:
        """Take positions ``start..stop`` of an axis, in the order that the sign of the step says."""
        if (start, stop, abs(step)) != (0, value(x).shape[dim], 1):
            x = self.emit.call(aten.slice.Tensor, x, dim, start, stop, abs(step))
        return x if step > 0 else self.emit.call(prims.rev.default, x, [dim])

    def _slices(self, x: Node, dim: int, start: int, step: int, width: int, count: int, keep: bool) -> Value:
        """Read slices of one axis, the first at ``start`` and each ``step`` after the one before, all at once."""
        low = min(start, start + step * (count - 1))
        high = max(start, start + step * (count - 1)) + width
        if width == 1:
            x = self._run(x, low, high, step, dim)
        else:
            x = self._run(x, low, high, 1, dim)
            shape = value(x).shape
            x = self.emit.reshape(x, [*shape[:dim], count, width, *shape[dim + 1 :]])
            x = self._run(x, 0, count, 1 if step > 0 else -1, dim)
        rank = value(x).dim()
        x = self.emit.permute(x, [dim, *(d for d in range(rank) if d != dim)])
        if width == 1 and keep:
            x = self.emit.call(aten.unsqueeze.default, x, dim + 1)
        return Value(x, True)

    def _affine(self, node: Any, leaves: list[Any], loop: Loop, count: int) -> Affine:
        """Apply one step's operation to functions of the carry."""
        if not isinstance(value(loop.steps[-1]), torch.Tensor):
            raise NotALoop("carry-not-tensor", f"{loop.name} is not a tensor but several, made by one operation")
        if value(loop.steps[-1]).is_complex():
            raise NotALoop("carry-complex", f"{loop.name} is complex, and the operators compute with real numbers")
        found, shape = self._operation(node, leaves, loop, count), tuple(value(node).shape)
        if _without_ones(shape) != _without_ones(value(loop.steps[-1]).shape):
            raise NotALoop("carry-shape", f"{loop.name} is broadcast to another shape")
        return replace(found, shape=shape)

    def _operation(self, node: Any, leaves: list[Any], loop: Loop, count: int) -> Affine:
        if other := next((x.loop for x in leaves if isinstance(x, Affine) and x.loop is not loop), None):
            raise NotALoop("carries-coupled", f"{loop.name} depends on {other.name}, and that on it")
        target, operands = node.target, [x for x in leaves if isinstance(x, Affine) or _counts(x)]
        mine: Affine = next(x for x in leaves if isinstance(x, Affine))
        if target in _SAME:
            return mine
        if target in _VIEWS and _without_ones(value(node).shape) == _without_ones(value(node.args[0]).shape):
            scale, offset = (self._viewed(part, node) for part in (mine.scale, mine.offset))
            return Affine(loop, scale, offset)
        if target is prims.convert_element_type.default and node.args[1].is_floating_point:
            return mine
        if not is_pointwise(target):
            raise NotALoop("mixes-elements", f"{target} mixes elements of {loop.name}")
        if target in (aten.add.Tensor, aten.sub.Tensor):
            a, b = operands[:2]  # the factor may be the third
            alpha = node.kwargs.get("alpha", 1) * (-1.0 if target is aten.sub.Tensor else 1.0)
            return self._plus(a, b if alpha == 1 else self._scaled(b, Value(alpha), loop), loop)
        if target is aten.mul.Tensor:
            a, b = operands
            if isinstance(a, Affine) and isinstance(b, Affine):
                raise NotALoop("carry-squared", f"{loop.name} is multiplied by itself")
            a, b = (a, b) if isinstance(a, Affine) else (b, a)
            return self._scaled(a, b, loop)
        if target is aten.div.Tensor and isinstance(operands[0], Affine) and not isinstance(operands[1], Affine):
            inverse = self._call(aten.reciprocal.default, loop, operands[1])
            return self._scaled(operands[0], inverse, loop)
        if target is aten.addcmul.default and not node.kwargs:
            a, b, c = leaves
            if isinstance(b, Affine) and isinstance(c, Affine):
                raise NotALoop("carry-squared", f"{loop.name} is multiplied by itself")
            b, c = (c, b) if isinstance(c, Affine) else (b, c)
            return self._plus(a, self._scaled(b, c, loop), loop)
        if target is aten.neg.default:
            return self._scaled(mine, Value(-1.0), loop)
        if target is aten.where.self and isinstance(leaves[0], Value):
            return self._where(node, leaves, loop, count)
        raise NotALoop("carry-not-affine", f"{loop.name} enters {target}, which is not affine in it")

    def _viewed(self, part: Value | None, view: Any) -> Value | None:
        """Let what is broadcast against a view's input be broadcast against the view, which moves axes of size one."""
        if part is None or not is_tensor(part.node):
            return part
        given, shape = value(view.args[0]).shape, value(view).shape
        own = value(part.node).shape[part.has_time :]
        padded = [*[1] * (len(given) - len(own)), *own]
        kept = iter([size for size, full in zip(padded, given, strict=True) if full != 1])
        sizes = [1 if full == 1 else next(kept) for full in shape]
        return Value(self.emit.reshape(part.node, [*value(part.node).shape[: part.has_time], *sizes]), part.has_time)

    def _call(self, target: Any, loop: Loop, *operands: Value) -> Value:
        """Combine what does not depend on the carry."""
        if not any(isinstance(x.node, Node) for x in operands):
            a, b = (*(x.node for x in operands), 0)[:2]
            numbers = {aten.mul.Tensor: lambda: a * b, aten.add.Tensor: lambda: a + b}
            return Value(numbers.get(target, lambda: 1.0 / a)())
        if not isinstance(operands[0].node, Node):
            operands = operands[::-1]
        rank = max(value(x.node).dim() - x.has_time for x in operands if isinstance(x.node, Node))
        out = self.emit.call(target, *(self.emit.padded(x, rank) for x in operands))
        return Value(out, any(x.has_time for x in operands))

    def _plus(self, a: Affine | Value, b: Affine | Value, loop: Loop) -> Affine:
        parts = []
        for x in (a, b):
            parts.append((x.scale or Value(1.0), x.offset) if isinstance(x, Affine) else (None, x))
        scales = [scale for scale, _ in parts if scale is not None]
        offsets = [offset for _, offset in parts if offset is not None]
        scale = scales[0] if len(scales) == 1 else self._call(aten.add.Tensor, loop, *scales)
        if len(offsets) == 2:
            offsets = [self._call(aten.add.Tensor, loop, *offsets)]
        return Affine(loop, scale, offsets[0] if offsets else None)

    def _scaled(self, x: Affine | Value, by: Value, loop: Loop) -> Any:
        if isinstance(x, Value):
            return self._call(aten.mul.Tensor, loop, x, by)
        scale = by if x.scale is None else self._call(aten.mul.Tensor, loop, x.scale, by)
        return Affine(loop, scale, None if x.offset is None else self._call(aten.mul.Tensor, loop, x.offset, by))

    def _where(self, node: Node, leaves: list[Any], loop: Loop, count: int) -> Affine:
        """Choose between functions of the carry by a mask that does not depend on it."""
        mask, sides = leaves[0], leaves[1:]
        rank, outs = value(node).dim(), []
        for missing, name in ((0.0, "scale"), (0.0, "offset")):
            chosen = []
            for x in sides:
                part = getattr(x, name) if isinstance(x, Affine) else (x if name == "offset" else Value(missing))
                if part is None:
                    part = Value(1.0 if name == "scale" else 0.0)
                chosen.append(self.emit.padded(Value(self.emit.with_time(part, count, node), True), rank))
            outs.append(Value(self.emit.call(aten.where.self, self.emit.padded(mask, rank), *chosen), True))
        scale, offset = outs
        return Affine(loop, scale, offset)

    # The loop itself -------------------------------------------------------------------------

    def _scan(self, loop: Loop, body: Affine) -> Value:
        """Compute all states at once, and note what each step read."""
        emit, like, count = self.emit, loop.steps[-1], loop.length
        val = value(like)
        static = loop.count is not None or all(isinstance(size, int) for size in val.shape)
        if not (val.is_floating_point() and static):
            raise NotALoop("carry-dtype", f"{loop.name} is not a floating-point tensor of known shape")
        initial = self._tensor(loop.initial, like)
        shape = [count, *val.shape]
        operands = [initial]
        for part in (body.scale or Value(1.0), body.offset or Value(0.0)):
            x = emit.with_time(part, count, like)
            operands.append(emit.expand(emit.padded(Value(x, True), val.dim()), shape))
        dtype = functools.reduce(torch.promote_types, (value(x).dtype for x in operands), val.dtype)
        if not dtype.is_floating_point:
            raise NotALoop("carry-dtype", "the recurrence is not over real numbers")
        # The operator wants a batch axis before time; any axis of the state will do.
        order = [1, 0, *range(2, len(shape))] if val.dim() else [0]
        operands = [emit.cast(x, dtype) for x in operands]
        operands[1:] = [emit.permute(x, order) for x in operands[1:]]
        if not val.dim():
            operands = [emit.call(aten.unsqueeze.default, x, 0) for x in operands]
        first, a, x = (emit.call(aten.clone.default, x, memory_format=torch.contiguous_format) for x in operands)
        given = node_args("linear_scan", a=a, x=x, initial_state=first, reverse=loop.reverse)
        scan = emit.call(OPS["linear_scan"], *given)
        out = emit.call(operator.getitem, scan, 0)
        loop.scan, loop.body = out, body
        out = emit.permute(out, order) if val.dim() else emit.call(aten.squeeze.dim, out, 0)
        loop.states = emit.cast(out, val.dtype)
        before = emit.call(aten.unsqueeze.default, emit.cast(initial, val.dtype), 0)
        inner = emit.call(aten.slice.Tensor, loop.states, 0, *((1, count) if loop.reverse else (0, count - 1)))
        pair = [inner, before] if loop.reverse else [before, inner]
        loop.previous = emit.call(aten.cat.default, pair, 0)
        self.loops.append(loop)
        return Value(loop.states, True)


def _without_ones(shape: Any) -> list[Any]:
    return [size for size in shape if size != 1]


def _counts(x: Any) -> bool:
    """Tell whether a leaf is an operand: a tensor or a number."""
    return isinstance(x, Value) and (isinstance(x.node, Node) or type(x.node) in (int, float, complex))
