"""All states of a loop at once: a scan, a system of coupled carries, or a scan within bounds.

Once a step's new state turns out to be affine in its old one (`affine.py`), the states of all steps are computed, and
the functions of the carry become values too.

Shapes. A step's value is (...), all steps' values are (t, ...). The scan's operands are (b, t, ...): axis 0 of the
state stands in for the batch. Source: Blelloch 1990 (CMU-CS-90-190), section 1.4: first-order recurrences are scans.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.fx import is_tensor, mark_as_made, value
from ..ir.operators import SCAN
from ..ir.source import name_of
from .affine import EVEN, Affine, Loop, StepAlgebra, without_ones
from .systems import BOUNDED_SCAN, LINEAR_SYSTEM, largest, wide
from .vectorize import NotALoop, Value, broadcasts, described

aten = torch.ops.aten
prims = torch.ops.prims


class LoopVectorizer(StepAlgebra):
    """Emits what a loop's steps do, for all steps at once."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[Loop] = []

    def _tensor(self, x: Any, like: Node) -> Node:
        """Return a state before the first step, (...) or a number, in the shape of a step's value."""
        if not isinstance(x, Node):
            if isinstance(x, bool) or not isinstance(x, (int, float)):
                raise NotALoop("initial-state", f"`{name_of(like)}` is {x!r} before the first step, not a number")
            return self.emit.full(x, like, value(like).shape)
        if not is_tensor(x):
            raise NotALoop("carry-not-tensor", f"the state before the first step, `{name_of(x)}`, is not one tensor")
        x = self._known(x)
        if not broadcasts(value(x).shape, value(like).shape):
            raise NotALoop(
                "initial-state",
                f"the state before the first step, {described(x)}, does not have the shape of {described(like)}",
            )
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
        """Read slices of one axis, the first at ``start``, each ``step`` after the last, all at once: (t, ...)."""
        low = min(start, start + step * (count - 1))
        high = max(start, start + step * (count - 1)) + width
        if width == 1:
            x = self._run(x, low, high, step, dim)
        elif abs(step) < width:  # windows that overlap
            x = self._run(x, low, high, 1, dim)
            x = self.emit.call(aten.unfold.default, x, dim, width, abs(step))
            x = self._run(x, 0, count, 1 if step > 0 else -1, dim)
            last = value(x).dim() - 1
            return Value(self.emit.permute(x, [dim, *range(dim), last, *range(dim + 1, last)]), True)
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

    def _scan(self, loop: Loop, body: Affine) -> Value:
        """Compute all states, (t, ...), at once, and note what each step read."""
        emit, like, count = self.emit, loop.steps[-1], loop.length
        val = value(like)
        if val.is_complex() or body.bounds:
            self._bounded_scan(loop, body) if body.bounds else self._system((loop,), [body])
            return Value(loop.states, True)
        static = loop.count is not None or all(isinstance(size, int) for size in val.shape)
        if not (val.is_floating_point() and static):
            raise NotALoop(
                "carry-dtype",
                f"{loop.name} is not a floating-point tensor of known shape: {val.dtype} of {tuple(val.shape)}",
            )
        initial = self._tensor(loop.initial, like)
        shape = [count, *val.shape]
        operands = [initial]
        for part in (body.scale or Value(1.0), body.offset or Value(0.0)):
            x = part.with_time(emit, count, like)
            operands.append(emit.expand(Value(x, True).padded(emit, val.dim()), shape))
        dtype = functools.reduce(torch.promote_types, (value(x).dtype for x in operands), val.dtype)
        if not dtype.is_floating_point:
            raise NotALoop("carry-dtype", f"{loop.name} is computed in {dtype}, which is not a dtype of real numbers")
        # The operator wants a batch axis before time; any axis of the state will do.
        order = [1, 0, *range(2, len(shape))] if val.dim() else [0]
        operands = [emit.cast(x, dtype) for x in operands]
        if body.reset is not None:
            mask = body.reset.with_time(emit, count, like)
            operands.append(emit.expand(Value(mask, True).padded(emit, val.dim()), shape))
        operands[1:] = [emit.permute(x, order) for x in operands[1:]]
        if not val.dim():
            operands = [emit.call(aten.unsqueeze.default, x, 0) for x in operands]
        first, *timed = (emit.call(aten.clone.default, x, memory_format=torch.contiguous_format) for x in operands)
        by_name = dict(zip(("a", "x", "reset"), timed, strict=False))
        given = SCAN.args(**by_name, initial_state=first, reverse=loop.reverse)
        scan = emit.call(SCAN.target, *given)
        mark_as_made(scan)
        out = emit.call(operator.getitem, scan, 0)
        loop.scan, loop.body = out, body
        out = emit.permute(out, order) if val.dim() else emit.call(aten.squeeze.dim, out, 0)
        self._note_states(loop, emit.cast(out, val.dtype), emit.cast(initial, val.dtype))
        return Value(loop.states, True)

    def _note_states(self, loop: Loop, states: Node, initial: Node) -> None:
        """Note all states of a loop, and what each step read."""
        loop.states, count = states, loop.length
        before = self.emit.call(aten.unsqueeze.default, initial, 0)
        inner = self.emit.call(aten.slice.Tensor, states, 0, *((1, count) if loop.reverse else (0, count - 1)))
        loop.previous = self.emit.call(aten.cat.default, [inner, before] if loop.reverse else [before, inner], 0)
        self.loops.append(loop)

    def _bounded_scan(self, loop: Loop, body: Affine) -> None:
        """Compute all states, (t, ...), within bounds."""
        emit, like, count = self.emit, loop.steps[-1], loop.length
        val = value(like)
        if not val.is_floating_point() or loop.reverse:
            raise NotALoop(
                "carry-dtype",
                f"a running maximum or minimum needs a floating-point state and steps forward in time; {loop.name} is "
                f"{val.dtype}, {'backward' if loop.reverse else 'forward'} in time",
            )
        low, *high = body.bounds
        shape, dtype = list(val.shape), wide(val.dtype)

        def whole(part: Value, time: bool, sign: bool = True) -> Node:
            x = part.with_time(emit, count if time or part.has_time else 1, like)
            x = emit.cast(emit.expand(Value(x, True).padded(emit, val.dim()), [value(x).shape[0], *shape]), dtype)
            x = emit.call(aten.neg.default, x) if sign and low.upper else x
            # On a CPU, sweeps read contiguous memory: what computes x writes it so, which costs less than a copy.
            return emit.dense(x) if val.device.type == "cpu" else x

        # A minimum is a maximum of what is negated.
        initial = emit.cast(self._tensor(loop.initial, like), dtype)
        offset = body.offset or Value(0.0)
        solved = emit.call(
            BOUNDED_SCAN,
            None if body.scale is None else whole(body.scale, False, False),
            whole(offset, False),
            whole(low.value, not offset.has_time),
            whole(high[0].value, False) if high else None,
            emit.call(aten.neg.default, initial) if low.upper else initial,
            low.smooth,
            low.shares,
            high[0].shares if high else EVEN,
        )
        solved = emit.call(aten.neg.default, solved) if low.upper else solved
        kind = f"running {'minimum' if low.upper else 'maximum'}"
        loop.operator = kind if not high and body.scale is None else "bounded scan"
        self._note_states(loop, emit.cast(solved, val.dtype), emit.cast(initial, val.dtype))

    def _system(self, loops: Sequence[Loop], bodies: Sequence[Affine | Value]) -> None:
        """Compute the states, (t, ...) each, of coupled carries together, or of a complex one.

        The operator takes matrices (t, ..., k, k) and offsets (t, ..., k) for k carries.
        """
        emit, first = self.emit, loops[0]
        like, count = first.steps[-1], first.length
        val = value(like)
        most = largest(val)
        more = f" and {len(loops) - 3} more" if len(loops) > most else ""
        names = " and ".join(loop.name for loop in (loops[:3] if more else loops)) + more
        if len(loops) > most:
            raise NotALoop(
                "carries-coupled",
                f"{names} depend on one another; here up to {most} such carries are computed as one scan",
            )
        for body in bodies:
            if isinstance(body, Affine) and (body.reset is not None or body.bounds):
                beside = "stay within bounds" if body.bounds else "a mask replaces some of their elements"
                raise NotALoop("carries-coupled", f"{names} depend on one another, and {beside}")
        shapes = [value(x.steps[-1]).shape for x in loops]
        if any(value(x.steps[-1]).dtype != val.dtype for x in loops) or any(
            without_ones(own) != without_ones(val.shape) for own in shapes
        ):
            raise NotALoop("carry-shape", f"{names} depend on one another and differ in shape or dtype")
        shape = [*val.shape]

        def whole(part: Value, time: bool, own: Sequence[Any], shape: Sequence[Any]) -> Node:
            """Lay out an entry of a row of one's own shape, (time, ...), with one step if all are the same."""
            if not isinstance(part.node, Node):
                x = emit.full(part.node, like, [1, *own])
            elif not part.has_time:
                x = emit.call(aten.unsqueeze.default, emit.expand(part.node, [*own]), 0)
            else:
                x = part.padded(emit, len(own))
            steps = count if time or part.has_time else 1
            return emit.cast(shaped(emit.expand(x, [steps, *own]), [steps, *shape]), dtype)

        def shaped(x: Node, like: Sequence[Any]) -> Node:
            """Move axes of size one."""
            return x if [*value(x).shape] == [*like] else emit.reshape(x, [*like])

        pairs = list(zip(loops, bodies, strict=True))
        copied = _copied(pairs) if val.device.type == "cpu" else {}
        rows, size = len(loops) - len(copied), range(len(loops))
        pairs.sort(key=lambda pair: [*copied].index(pair[0]) + 1 if pair[0] in copied else 0)
        loops, bodies = zip(*pairs, strict=True)
        shapes = [value(x.steps[-1]).shape for x in loops]
        forms = [body.scales if isinstance(body, Affine) else {} for body in bodies[:rows]]
        entries = [[form.get(loops[j], Value(0.0)) or Value(1.0) for j in size] for form in forms]
        time = any(entry.has_time for row in entries for entry in row)
        parts = [body.offset if isinstance(body, Affine) else body for body in bodies[:rows]]
        read = [x.node for x in (*itertools.chain(*entries), *parts) if x is not None]
        dtypes = (value(node).dtype for node in read if isinstance(node, Node) and is_tensor(node))
        dtype = functools.reduce(torch.promote_types, dtypes, val.dtype)
        numbers = all(_is_number(entry) for row in entries for entry in row)  # the same for all elements of a state
        flat = [
            whole(entry, time, *([[1] * len(own), [1] * len(shape)] if numbers else [own, shape]))
            for row, own in zip(entries, shapes, strict=False)
            for entry in row
        ]
        matrix = emit.stack(flat)
        matrix = emit.reshape(matrix, [rows, len(loops), *value(matrix).shape[1:]])
        offsets = [whole(part or Value(0.0), True, own, shape) for part, own in zip(parts, shapes, strict=False)]
        offset = emit.stack(offsets)
        offset = emit.dense(offset) if val.device.type == "cpu" else offset
        initial = [emit.cast(self._tensor(loop.initial, loop.steps[-1]), val.dtype) for loop in loops]
        begun = any(isinstance(loop.initial, Node) or loop.initial for loop in loops)  # a zero is nothing to multiply
        starts = [shaped(x, shape) for x in initial] if begun else []
        start = emit.cast(emit.stack(starts), dtype) if begun else None
        copies = [loops.index(copied[loop]) for loop in loops[rows:]]
        solved = emit.cast(emit.call(LINEAR_SYSTEM, matrix, offset, start, first.reverse, copies), val.dtype)
        for i, (loop, start) in enumerate(zip(loops, initial, strict=True)):
            loop.operator = f"linear_system of {len(loops)}" if len(loops) > 1 else "complex scan"
            states: Any = emit.call(aten.select.int, solved, 0, i) if i < rows else copied[loop].previous
            self._note_states(loop, shaped(states, [count, *shapes[i]]), start)


def _copied(pairs: Sequence[tuple[Loop, Affine | Value]]) -> dict[Loop, Loop]:
    """Return the carries that only keep what another one was a step before, each after the one that it copies.

    Carries that copy one another in turns are not among them: they are computed.
    """
    found: dict[Loop, Loop] = {}
    for loop, body in pairs:
        if isinstance(body, Affine) and body.offset is None and len(body.scales) == 1:
            ((read, scale),) = body.scales.items()
            if scale is None or (isinstance(scale.node, int | float) and scale.node == 1):
                found[loop] = read
    known = [loop for loop, _ in pairs if loop not in found]
    ordered: dict[Loop, Loop] = {}
    while ready := {loop: read for loop, read in found.items() if loop not in ordered and read in (*known, *ordered)}:
        ordered |= ready
    return ordered


def _is_number(x: Value) -> bool:
    """Tell whether a value has one element at each step."""
    sizes = value(x.node).shape[x.has_time :] if isinstance(x.node, Node) and is_tensor(x.node) else ()
    return all(isinstance(size, int) and size == 1 for size in sizes)
