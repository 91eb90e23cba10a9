"""The carry of a loop, and affine, elementwise functions of it.

Values of a step are `Value`s, the same or stacked over all steps, or `Affine` functions of a state that is not known
yet. Once a step's new state turns out to be affine in its old one, `states.py` computes all states.

Shapes. A step's value is (...), all steps' values are (t, ...).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import CONVERT, SUMS, factor_of_second, is_pointwise, is_tensor, known, value
from ..ir.moves import Copy, Expand, Slice, View, read, shape_of
from ..ir.operators import SCAN
from ..ir.source import expression, name_of
from ..private import without_modes
from .vectorize import NotALoop, Value

aten = torch.ops.aten

# Bounds: whether from above, whether smooth, and the share of a gradient that the first operand gets at a tie, and that
# both get if one of them is not a number.
EVEN, _FIRST, _SECOND = (0.5, 1.0), (1.0, 0.0), (0.0, 1.0)
_BOUNDS = {
    aten.maximum.default: (False, False, EVEN),
    aten.minimum.default: (True, False, EVEN),
    aten.logaddexp.default: (False, True, EVEN),
    aten.relu.default: (False, False, _SECOND),
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_min.Tensor), (False, False, None)),  # what PyTorch does
    **dict.fromkeys((aten.clamp_max.default, aten.clamp_max.Tensor), (True, False, None)),
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor), (False, False, None)),  # from below, unless it says so
    aten.hardtanh.default: (False, False, _SECOND),
}


@functools.cache
def clamp_shares(number: bool) -> tuple[float, float]:
    """Return a clamp's shares, by a number or a tensor, as this PyTorch has them: torch 2.14 changed both."""
    with without_modes() or contextlib.nullcontext(), torch.inference_mode(False), torch.enable_grad():
        x = torch.tensor([0.0, math.nan], requires_grad=True)
        y = torch.clamp(x, min=0.0) if number else torch.clamp(x, min=torch.zeros(2))
        tie, unknown = torch.autograd.grad(y.sum(), x)[0].tolist()
    return tie, unknown


_HARD = (Value(-1.0), Value(1.0))  # what hardtanh stays within unless it says so


@dataclass(eq=False)
class Loop:
    """A list of nodes that is being stacked; a loop if it turns out to depend on itself.

    Attributes:
        steps: The nodes, one per step.
        reverse: Whether a step depends on the one after it.
        initial: What the first step to run reads instead of a step; set once the carry was met.
        states: All steps' values, once they are known.
        scan: The operator's result that ``states`` is a view of, (batch, time, ...).
        body: What a step does with the carry.
        previous: What each step read of the one before.
        last: The last state, if something cheaper than ``states`` holds it.
        operator: What computes its states.
        count: How many steps there are, if one node stands for all of them.
        variable: What the user calls it, if it is known.
        system: The loops whose states are computed together, this one among them; empty if it is alone.
    """

    steps: tuple[Node, ...]
    reverse: bool = False
    initial: Any = None
    states: Node | None = None
    scan: Node | None = None
    body: Affine | None = None
    previous: Node | None = None
    last: Node | None = None
    operator: str = SCAN.name
    count: Any = None
    variable: str = ""
    system: tuple[Loop, ...] = ()

    @property
    def name(self) -> str:
        """What to call it to a person."""
        return f"the carry `{self.variable or name_of(self.steps[-1])}`"

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
class Bound:
    """What a function of a carry does not go beyond: its maximum with ``value``.

    ``upper`` makes that a minimum, and ``smooth`` a ``logaddexp``. ``shares`` are those of a gradient: what the
    function gets where the two are equal, and what both get where one of them is not a number.
    """

    value: Value
    upper: bool = False
    smooth: bool = False
    shares: tuple[float, float] = EVEN

    @property
    def kind(self) -> tuple[bool, bool, tuple[float, float]]:
        """All but the value."""
        return self.upper, self.smooth, self.shares


@dataclass(frozen=True)
class Affine:
    """``scale * carry + offset``, elementwise; None stands for 1 and for 0.

    Where ``reset`` is true it is ``offset``: the carry was not read there, and if it is NaN, that ends there. None
    stands for nowhere. ``shape`` is a step's shape: the carry's, but for axes of size one; None before anything was
    done to the carry. ``others`` are further carries of one system, each with its scale. With ``bounds`` it is that
    within the first, and then within the second; they bound it from two sides.
    """

    loop: Loop
    scale: Value | None = None
    offset: Value | None = None
    shape: tuple[int, ...] | None = None
    reset: Value | None = None
    others: tuple[tuple[Loop, Value | None], ...] = ()
    bounds: tuple[Bound, ...] = ()

    @property
    def scales(self) -> dict[Loop, Value | None]:
        """The scale of each carry."""
        return {self.loop: self.scale, **dict(self.others)}


def affine(scales: Mapping[Loop, Value | None], offset: Value | None, reset: Value | None = None) -> Affine:
    """Return a function of some carries."""
    (loop, scale), *others = scales.items()
    return Affine(loop, scale, offset, reset=reset, others=tuple(others))


class StepAlgebra:
    """Emits functions of carries that are not known yet, and what becomes of them once the carries are.

    Attributes:
        training: Whether gradients are taken of it. If not, bounds differ by their values alone.
    """

    training = True

    def __init__(self) -> None:
        self.emit = Builder()

    def _closed(self, x: Value | Affine) -> Value | Affine:
        """Turn a function of a carry into a value once the carry's loop is known."""
        if isinstance(x, Affine) and x.loop.previous is not None:
            return self._apply(x, x.loop.previous, x.loop.steps[0])
        return x

    def _apply(self, x: Affine, carry: Node, step: Node) -> Value:
        """Return a function of carries whose states are known, (t, ...), for all steps."""
        shape = tuple(value(step).shape) if x.shape is None else x.shape
        rank, terms = len(shape), list[Node]()
        for loop, scale in x.scales.items():
            assert loop.previous is not None  # all carries of a system are known at once
            term = self.emit.reshape(loop.previous, [value(carry).shape[0], *shape])
            if scale is not None:
                term = self.emit.call(aten.mul.Tensor, term, scale.padded(self.emit, rank))
            terms.append(term)
        out = self.emit.combined(aten.add.Tensor, terms)
        if x.reset is not None:
            zero = self.emit.full(0.0, out)
            out = self.emit.call(aten.where.self, x.reset.padded(self.emit, rank), zero, out)
        if x.offset is not None:
            out = self.emit.call(aten.add.Tensor, out, x.offset.padded(self.emit, rank))
        for bound in x.bounds:
            out = self._bounded(out, bound)
        return Value(out, True)

    def _bounded(self, x: Node, bound: Bound) -> Node:
        """Apply a bound to what has the rank of ``x``, (t, ...)."""
        if isinstance(bound.value.node, Node):
            by = bound.value.padded(self.emit, value(x).dim() - 1)
        else:
            by = self.emit.full(bound.value.node, x)
        if bound.smooth or bound.shares == EVEN:
            chosen = aten.logaddexp.default if bound.smooth else aten.maximum.default
            return self.emit.call(aten.minimum.default if bound.upper else chosen, x, by)
        tie, unknown = bound.shares
        above, below = (aten.lt, aten.gt) if bound.upper else (aten.gt, aten.lt)
        above_too, below_too = (aten.le, aten.ge) if bound.upper else (aten.ge, aten.le)
        beyond = self.emit.call((below if tie else below_too).Tensor, x, by)
        if unknown:
            return self.emit.call(aten.where.self, beyond, by, x)
        neither = self.emit.full(math.nan, x)
        within = self.emit.call((above_too if tie else above).Tensor, x, by)
        return self.emit.call(aten.where.self, within, x, self.emit.call(aten.where.self, beyond, by, neither))

    def _affine(self, node: Any, leaves: list[Any], loop: Loop, count: int) -> Affine:
        """Apply one step's operation to functions of the carry."""
        if not isinstance(value(loop.steps[-1]), torch.Tensor):
            raise NotALoop("carry-not-tensor", f"{loop.name} is not one tensor: one operation makes several")
        found, shape = self._operation(node, leaves, loop, count), tuple(value(node).shape)
        if without_ones(shape) != without_ones(value(loop.steps[-1]).shape):
            reason = f"`{expression(node)}` pairs elements of {loop.name} with one another, as {shape}"
            raise NotALoop("mixes-elements", reason)
        return replace(found, shape=shape)

    def _operation(self, node: Any, leaves: list[Any], loop: Loop, count: int) -> Affine:
        others = [x.loop for x in leaves if isinstance(x, Affine) and x.loop is not loop]
        if other := next((other for other in others if other not in loop.system), None):
            raise NotALoop("carries-coupled", f"{loop.name} and {other.name} depend on each other")
        target, operands = node.target, [x for x in leaves if isinstance(x, Affine) or _counts(x)]
        mine: Affine = next(x for x in leaves if isinstance(x, Affine))
        if _moves_ones(node):
            scales = {other: self._viewed(scale, node) for other, scale in mine.scales.items()}
            found = affine(scales, self._viewed(mine.offset, node), self._viewed(mine.reset, node))
            viewed = ((bound, self._viewed(bound.value, node)) for bound in mine.bounds)
            return replace(found, bounds=tuple(replace(bound, value=by or bound.value) for bound, by in viewed))
        if target in _BOUNDS or any(isinstance(x, Affine) and x.bounds for x in leaves):
            return self._bound(node, leaves, operands, mine)
        if target is CONVERT and node.args[1].is_floating_point:
            return mine
        if target in (aten.view_as_complex.default, aten.view_as_real.default):
            raise NotALoop("complex-as-real", f"`{expression(node)}` of {loop.name} is another view of its numbers")
        if not is_pointwise(target):
            raise NotALoop("mixes-elements", f"`{expression(node)}` mixes elements of {loop.name}")
        if target in SUMS:
            a, b = operands[:2]  # the factor may be the third
            alpha = factor_of_second(node)
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
        added = target in (aten.addcmul.default, aten.addcdiv.default)
        if added and not isinstance(factor := node.kwargs.get("value", 1), Node):
            a, b, c = leaves[:3]  # the factor may be the fourth
            if target is aten.addcdiv.default:
                if isinstance(c, Affine):
                    raise NotALoop("carry-not-affine", f"`{expression(node)}` divides by {loop.name}")
                c = self._call(aten.reciprocal.default, loop, c)
            if isinstance(b, Affine) and isinstance(c, Affine):
                raise NotALoop("carry-squared", f"{loop.name} is multiplied by itself")
            b, c = (c, b) if isinstance(c, Affine) else (b, c)
            product = self._scaled(b, c, loop)
            return self._plus(a, product if factor == 1 else self._scaled(product, Value(factor), loop), loop)
        if target is aten.neg.default:
            return self._scaled(mine, Value(-1.0), loop)
        if target is aten.where.self and isinstance(leaves[0], Value):
            return self._where(node, leaves, loop, count)
        raise NotALoop("carry-not-affine", f"`{expression(node)}` is not affine in {loop.name}")

    def _bound(self, node: Any, leaves: list[Any], operands: list[Any], mine: Affine) -> Affine:
        """Bound a function of a carry, or apply an operation to one within bounds."""
        loop, target = mine.loop, node.target
        rest = [x for x in operands if x is not mine]
        alone = not mine.others and mine.reset is None and sum(isinstance(x, Affine) for x in leaves) == 1
        found: Affine | None = mine if alone else None
        if target in _BOUNDS:
            for bound in self._limits(node, leaves, rest, mine) if alone and not node.kwargs else [None]:
                found = self._within(found, bound, node) if found is not None and bound is not None else None
        elif alone and target in SUMS:
            a, b = operands[:2]  # the factor may be the third
            alpha = factor_of_second(node)
            own, by = (mine, self._scaled(b, Value(alpha), loop)) if mine is a else (self._times(mine, alpha), a)
            if mine is a and alpha == 1:
                by = b
            found = None if own is None else self._moved(own, by)
        elif alone and target is aten.mul.Tensor:
            found = self._times(mine, rest[0].node)
        elif alone and target is aten.div.Tensor and mine is operands[0] and not isinstance(rest[0].node, Node):
            found = self._times(mine, _inverse(rest[0].node))
        elif alone and target is aten.neg.default:
            found = self._times(mine, -1.0)
        else:
            found = None
        if found is None:
            too = "with a bound before it, " if mine.bounds else ""
            raise NotALoop("carry-not-affine", f"{too}`{expression(node)}` is not affine in {loop.name}")
        return found

    def _limits(self, node: Any, leaves: list[Any], rest: list[Any], mine: Affine) -> list[Bound | None]:
        """Return the bounds that an operation sets, in their order; None for what is not one."""
        upper, smooth, known = _BOUNDS[node.target]
        shares: tuple[float, float] = known or clamp_shares(not any(isinstance(x.node, Node) for x in rest))
        shares = shares if leaves[0] is mine else (1 - shares[0], shares[1])
        shares = shares if self.training else EVEN
        if node.target is aten.hardtanh.default:
            rest = [*rest, *_HARD[len(rest) :]]
        elif node.target in (aten.clamp.default, aten.clamp.Tensor):
            upper = leaves[1].node is None
        if len(rest) < 2:
            return [Bound(rest[0] if rest else Value(0.0), upper, smooth, shares)]
        low, high = rest
        by_tensors = isinstance(low.node, Node) and isinstance(high.node, Node)
        if leaves[0] is not mine or (by_tensors and self.training and shares != _FIRST):  # no more one after another
            return [None]
        if by_tensors and self.training:  # only what is below the other has a gradient
            below = self._call(aten.lt.Tensor, mine.loop, low, high)
            fixed = self._call(aten.detach.default, mine.loop, low)
            low = self._call(aten.where.self, mine.loop, below, low, fixed)
        return [Bound(low, False, False, shares), Bound(high, True, False, shares)]

    def _within(self, x: Affine, bound: Bound, node: Node) -> Affine | None:
        """Set one more bound; None if there are too many."""
        if bound.smooth and x.scale is not None:
            return None
        if not x.bounds:
            return replace(x, bounds=(bound,))
        *before, last = x.bounds
        if last.kind == bound.kind:
            first = Value(last.value.with_time(self.emit, x.loop.length, node), True)
            both = self._bounded(first.padded(self.emit, value(node).dim()), bound)
            return replace(x, bounds=(*before, replace(last, value=Value(both, True))))
        if before or last.smooth or bound.smooth or last.upper == bound.upper:
            return None
        return replace(x, bounds=(last, bound))

    def _moved(self, x: Affine, by: Value) -> Affine:
        """Add what does not depend on the carry to a function of it within bounds."""
        offset = by if x.offset is None else self._call(aten.add.Tensor, x.loop, x.offset, by)
        bounds = (replace(own, value=self._call(aten.add.Tensor, x.loop, own.value, by)) for own in x.bounds)
        return replace(x, offset=offset, bounds=tuple(bounds))

    def _times(self, x: Affine, by: Any) -> Affine | None:
        """Multiply a function of a carry within bounds by a number; a negative one turns them round."""
        if by == 1:
            return x
        if type(by) not in (int, float) or not math.isfinite(by) or by == 0 or any(own.smooth for own in x.bounds):
            return None
        moved = self._scaled(x, Value(by), x.loop)
        bounds = (
            replace(own, value=self._call(aten.mul.Tensor, x.loop, own.value, Value(by)), upper=own.upper != (by < 0))
            for own in x.bounds
        )
        return replace(moved, bounds=tuple(bounds))

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
        """Combine what does not depend on the carry: numbers, values of each step (...), or of all steps (t, ...)."""
        if not any(isinstance(x.node, Node) for x in operands):
            a, b = (*(x.node for x in operands), 0)[:2]
            numbers = {aten.mul.Tensor: lambda: a * b, aten.add.Tensor: lambda: a + b}
            return Value(numbers.get(target, lambda: _inverse(a))())
        if not isinstance(operands[0].node, Node):
            operands = operands[::-1]
        rank = max(value(x.node).dim() - x.has_time for x in operands if isinstance(x.node, Node))
        out = self.emit.call(target, *(x.padded(self.emit, rank) for x in operands))
        return Value(out, any(x.has_time for x in operands))

    def _plus(self, a: Affine | Value, b: Affine | Value, loop: Loop) -> Affine:
        """Add two operands, at least one a function of carries; they broadcast as a step's values (...) do."""
        scales: dict[Loop, Value | None] = {}
        for x in (a, b):
            for own, scale in x.scales.items() if isinstance(x, Affine) else ():
                if own in scales:
                    both = (part or Value(1.0) for part in (scales[own], scale))
                    scale = self._call(aten.add.Tensor, loop, *both)
                scales[own] = scale
        offsets = [x.offset if isinstance(x, Affine) else x for x in (a, b)]
        terms = [offset for offset in offsets if offset is not None]
        if len(terms) == 2:
            terms = [self._call(aten.add.Tensor, loop, *terms)]
        resets = [x.reset for x in (a, b) if isinstance(x, Affine)]
        reset = resets[0]
        if len(resets) == 2 and reset is not None:  # forgotten is what both parts forget
            reset = None if resets[1] is None else self._call(aten.logical_and.default, loop, reset, resets[1])
        return affine(scales, terms[0] if terms else None, reset)

    def _scaled(self, x: Affine | Value, by: Value, loop: Loop) -> Any:
        """Multiply by what does not depend on the carry; both broadcast as a step's values (...) do."""
        if isinstance(x, Value):
            return self._call(aten.mul.Tensor, loop, x, by)
        scales = {
            own: by if scale is None else self._call(aten.mul.Tensor, loop, scale, by)
            for own, scale in x.scales.items()
        }
        offset = None if x.offset is None else self._call(aten.mul.Tensor, loop, x.offset, by)
        return affine(scales, offset, x.reset)

    def _where(self, node: Node, leaves: list[Any], loop: Loop, count: int) -> Affine:
        """Choose between functions of the carry by a mask that does not depend on it."""
        mask, sides = leaves[0], leaves[1:]
        rank = value(node).dim()

        def padded(part: Value) -> Node:
            if not isinstance(part.node, Node):
                return self.emit.full(part.node, node)
            return Value(part.with_time(self.emit, count), True).padded(self.emit, rank)

        def choose(parts: list[Value]) -> Value:
            if parts[0] == parts[1]:
                return parts[0]
            return Value(self.emit.call(aten.where.self, *map(padded, (mask, *parts))), True)

        if all(isinstance(x, Affine) for x in sides) and sides[0].scales.keys() != sides[1].scales.keys():
            raise NotALoop("carries-coupled", f"a mask chooses the new value of {loop.name} from several carries")
        carries = {own: None for x in sides if isinstance(x, Affine) for own in x.scales}
        scales: dict[Loop, Value | None] = {}
        for own in carries:
            given = [x.scales.get(own, Value(0.0)) if isinstance(x, Affine) else Value(0.0) for x in sides]
            scales[own] = choose([Value(1.0) if part is None else part for part in given])
        offsets = [x.offset if isinstance(x, Affine) else x for x in sides]
        offset = choose([Value(0.0) if part is None else part for part in offsets])
        return affine(scales, offset, self._chosen_reset(loop, mask, *sides))

    def _chosen_reset(self, loop: Loop, mask: Value, a: Affine | Value, b: Affine | Value) -> Value | None:
        """Return where a choice by a mask reads no carry: where it takes what is no function of it, or is reset."""
        parts = []
        for x, taken in ((a, mask), (b, None)):
            if isinstance(x, Affine) and x.reset is None:
                continue
            taken = taken or self._call(aten.logical_not.default, loop, mask)
            if isinstance(x, Affine) and x.reset is not None:
                taken = self._call(aten.logical_and.default, loop, taken, x.reset)
            parts.append(taken)
        return parts[0] if len(parts) == 1 else self._call(aten.logical_or.default, loop, *parts) if parts else None


def _moves_ones(node: Node) -> bool:
    """Tell whether a node adds or drops axes of size one at most, or takes all of an axis."""
    found = read(node)
    if found is None or not all(type(x) in (Copy, View, Expand, Slice) for x in found.chain()):
        return False
    return all(without_ones(shape_of(x)) == without_ones(found.shape) for x in found.nodes())


def without_ones(shape: Any) -> list[Any]:
    """Leave out the axes of size one."""
    return [size for size in shape if size != 1]


def _counts(x: Any) -> bool:
    """Tell whether a leaf is an operand: a tensor or a number."""
    return isinstance(x, Value) and (isinstance(x.node, Node) or type(x.node) in (bool, int, float, complex))


def _inverse(x: complex) -> complex:
    """Return 1 / x, as PyTorch divides by zero."""
    if x:
        return 1.0 / x
    return math.nan if isinstance(x, complex) else math.copysign(math.inf, x)
