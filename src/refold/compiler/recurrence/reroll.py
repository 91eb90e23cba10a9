"""Reroll unrolled loops: the values of all steps of a loop become one tensor with a time axis.

`Reroller.stack` takes one node per step and works backwards. If all steps apply the same operation, its
arguments are one node per step again, and are stacked first. It ends where all steps read the same
node, or the same tensor at positions in arithmetic progression. And where it meets, one step late,
a list of nodes that it is just stacking: that is the carry of a loop. From there on back up, values
are affine functions of the carry, or the loop is refused. Nothing depends on names, on the order of
nodes or on how the steps were written. Every list is stacked once, so the work is linear in the
size of the graph.

Shapes. A step's value is (...), and becomes (t, ...). Source: loop rolling works backwards from its seeds in the same
way (Rocha et al. 2022, "Loop Rolling for Code Size Reduction").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..ir.cost import numel
from ..ir.fx import is_random, is_tensor, known, value
from ..ir.moves import Slice, View, Write, read
from ..ir.source import expression, located, name_of
from .affine import Affine, Loop
from .scatters import plain_copy
from .states import LoopVectorizer
from .vectorize import NotALoop, Value, broadcasts, described, vectorize_node

aten = torch.ops.aten
prims = torch.ops.prims

# Values that the first or last step may compute otherwise, and how deep a step may be.
PEELS = 3
DEPTH = 150


@dataclass
class _Frame:
    """One attempt: the lists being stacked, none of which a peeled list may see.

    Attributes:
        open: The lists being stacked, by their first and last nodes.
        peeled: How many steps were peeled from the beginning of lists, and from their end.
    """

    open: dict[Node, Loop] = field(default_factory=dict)
    peeled: tuple[int, int] = (0, 0)


class Reroller(LoopVectorizer):
    """Stacks lists of nodes of one graph, and remembers what it has stacked."""

    def __init__(self, training: bool = False) -> None:
        super().__init__()
        self.members: set[Node] = set()
        self.training = training
        self._memo: dict[tuple[Any, ...], Value | Affine | NotALoop] = {}
        # Node -> the stacked list it is in, and where.
        self._place: dict[Node, tuple[Value, tuple[Any, ...], int]] = {}

    def stack(self, steps: Sequence[Node], anchor: Node) -> Node:
        """Return a node whose axis 0 holds the given nodes' values; new nodes go before the anchor.

        Raises:
            NotALoop: It says why there is none.
        """
        self.emit.at(anchor)
        found = self._list(tuple(steps), _Frame(), 0, 0)
        if isinstance(found, Affine):
            raise self._unknown(found.loop)
        return found.with_time(self.emit, len(steps))

    def _unknown(self, loop: Loop) -> NotALoop:
        """Return why the states of a loop that a value depends on are not known."""
        reason = self._memo.get(loop.steps)
        if isinstance(reason, NotALoop):
            return reason
        return NotALoop("carries-coupled", f"{loop.name} depends on another carry that depends on it")

    def _list(self, steps: tuple[Any, ...], frame: _Frame, depth: int, peeled: int) -> Value | Affine:
        """Stack one value (...) per step to (t, ...), or read them as a function of a carry."""
        first = steps[0]
        if all(step is first for step in steps):
            return Value(first)
        if not isinstance(first, Node) and all(type(x) is type(first) and x == first for x in steps):
            return Value(first)
        if (carry := _carry(steps, frame)) is not None:
            return carry
        known = self._memo.get(steps)
        if isinstance(known, NotALoop):
            raise known
        if known is not None:
            return self._closed(known)
        try:
            part: Value | Affine | None = self._part(steps)
            if part is None:
                part = self._new(steps, frame, depth, peeled)
        except NotALoop as reason:
            if not reason.line:
                reason.found_at(*next((located(step) for step in reversed(steps) if isinstance(step, Node)), ("", "")))
            self._memo[steps] = reason
            raise
        self._memo[steps] = part
        if isinstance(part, Value) and part.has_time:
            # A step may carry on from a number.
            ends = [step for step in (steps[0], steps[-1]) if isinstance(step, Node)]
            val = max((step.meta["val"] for step in ends), key=numel)
            if isinstance(val, torch.Tensor) and tuple(value(part.node).shape) != (len(steps), *val.shape):
                self._memo[steps] = other = _differ(steps, frame, _shape)
                raise other
            for i, step in enumerate(steps):
                if isinstance(step, Node):
                    self._place.setdefault(step, (part, steps, i))
        return part

    def _part(self, steps: tuple[Any, ...]) -> Value | None:
        """Find steps as a run, forwards or backwards, of a list that is stacked already."""
        found = self._place.get(steps[0])
        if found is None:
            return None
        whole, among, at = found
        if not is_tensor(whole.node):  # several tensors a step
            return None
        count = len(steps)
        if among[at : at + count] == steps:
            return Value(self._run(whole.node, at, at + count, 1), True)
        if at - count + 1 >= 0 and among[at - count + 1 : at + 1] == steps[::-1]:
            return Value(self._run(whole.node, at - count + 1, at + 1, -1), True)
        return None

    def _new(self, steps: tuple[Any, ...], frame: _Frame, depth: int, peeled: int) -> Value | Affine:
        """Stack values, one (...) per step, that no list holds yet."""
        if depth > DEPTH:
            raise NotALoop("step-long", f"a value of a step depends on more than {DEPTH} operations in a row")
        if (end := self._odd_end(steps)) is not None:
            return self._peel(steps, end, frame, peeled)
        sample = steps[-1]
        if not isinstance(sample, Node) or sample.op != "call_function":
            raise NotALoop(
                "read-uneven", f"the steps read different tensors, {_listed(steps)}, that are not slices of one tensor"
            )
        if any(self._kind(step) != sample.target for step in steps):
            raise _differ(steps, frame, self._kind)
        if sample.target is aten.copy.default and all(plain_copy(step) for step in steps):
            self.members.update(steps)
            return self._list(tuple(step.args[1] for step in steps), frame, depth + 1, peeled)
        if (read := self._read(steps, frame, depth, peeled)) is not None:
            self.members.update(steps)
            return read
        rows = [list(_leaves((step.args, step.kwargs))) for step in steps]
        if any(len(row) != len(rows[0]) for row in rows):
            counts = dict(zip(steps, (f"has {len(row)} arguments" for row in rows), strict=True))
            raise _differ(steps, frame, counts.__getitem__)
        if is_random(sample.target):
            raise NotALoop("randomness", f"`{expression(sample)}` draws random numbers in the loop")
        if any(isinstance(leaf, Node) for leaf in _leaves(sample.kwargs)):
            raise NotALoop("no-iteration-form", f"`{expression(sample)}` gets a tensor by keyword")
        loop = Loop(steps)
        frame.open.setdefault(steps[0], loop)
        frame.open.setdefault(steps[-1], loop)
        try:
            leaves: list[Any] = [self._list(column, frame, depth + 1, peeled) for column in zip(*rows, strict=True)]
        finally:
            for key in (steps[0], steps[-1]):
                if frame.open.get(key) is loop:
                    del frame.open[key]
        self.members.update(steps)
        carries = [leaf for leaf in leaves if isinstance(leaf, Affine)]
        if not carries:
            if not any(leaf.has_time for leaf in leaves):
                return Value(steps[0])  # computed anew at every step, but always the same
            return vectorize_node(self.emit, sample, _rebuild(sample.args, iter(leaves)), len(steps))
        body = self._affine(sample, leaves, carries[0].loop, len(steps))
        return self._scan(loop, body) if body.loop is loop else body

    def _odd_end(self, steps: tuple[Any, ...]) -> int | None:
        """Tell which end, 0 or -1, is computed otherwise than the rest, if just one is."""
        if len(steps) < 3:
            return None
        a, b, c, d = (self._kind(steps[i]) for i in (0, 1, -2, -1))
        if a != b and b == c:
            return 0
        if c != d and b == c:
            return -1
        # A known list with another value before it or after it.
        if self._follow(steps[1], steps[2]) and not self._follow(steps[0], steps[1]):
            return 0
        if self._follow(steps[-3], steps[-2]) and not self._follow(steps[-2], steps[-1]):
            return -1
        return None

    def _kind(self, step: Any) -> Any:
        return step.target if isinstance(step, Node) and step.op == "call_function" else type(step)

    def _follow(self, a: Any, b: Any) -> bool:
        """Tell whether two nodes are neighbours in a list that is stacked already."""
        x, y = self._place.get(a), self._place.get(b)
        return x is not None and y is not None and x[1] is y[1] and abs(x[2] - y[2]) == 1

    def _peel(self, steps: tuple[Any, ...], end: int, frame: _Frame, peeled: int) -> Value:
        """Stack all steps but one at the end, which stays as it is: (t - 1, ...) and (1, ...) are joined."""
        if peeled >= PEELS:
            raise _differ(steps, frame, self._kind)
        first, last = frame.peeled
        inner = _Frame(peeled=(first + 1, last) if end == 0 else (first, last + 1))
        rest = self._list(steps[1:] if end == 0 else steps[:-1], inner, 0, peeled + 1)
        odd = steps[end]
        if isinstance(rest, Affine):
            raise self._unknown(rest.loop)
        like = steps[1] if end == 0 else steps[-2]
        if not is_tensor(like):
            raise _differ(steps, frame, type)
        core = rest.with_time(self.emit, len(steps) - 1)
        if is_tensor(odd) and numel(value(odd)) > numel(value(like)):  # a factor of a gradient that had no step before
            shape = value(odd).shape
            if not broadcasts(value(core).shape[1:], shape):
                raise _differ(steps, frame, _shape)
            core = self.emit.expand(Value(core, True).padded(self.emit, len(shape)), [len(steps) - 1, *shape])
        else:
            odd = self._tensor(odd, like)
        if value(odd).dtype != value(core).dtype:
            raise _differ(steps, frame, _dtype)
        if value(odd).shape != value(core).shape[1:]:  # an end that was taken off the rest was larger
            raise _differ(steps, frame, _shape)
        own = self.emit.call(aten.unsqueeze.default, odd, 0)
        return Value(self.emit.call(aten.cat.default, [own, core] if end == 0 else [core, own], 0), True)

    def _known(self, x: Node) -> Node:
        """Read a value from the stacked list it is in, so that the list's own steps become dead."""
        if x not in self._place:
            return x
        whole, _, at = self._place[x]
        return self.emit.call(aten.select.int, whole.node, 0, at) if whole.has_time else whole.node

    # Reads -----------------------------------------------------------------------------------

    def _read(self, steps: tuple[Node, ...], frame: _Frame, depth: int, peeled: int) -> Value | None:
        """Match slices of one tensor, or of equal views, at positions in arithmetic progression."""
        parts: list[Any] = [_slice_of(step) for step in steps]
        if parts[0] is None or any(part is None or part[1] != parts[0][1] for part in parts):
            return None
        whole = self._list(tuple(part[0] for part in parts), frame, depth + 1, peeled)
        if isinstance(whole, Affine) or whole.has_time:
            return None
        source, (_, dim, start, stop, keep) = whole.node, parts[0]
        starts = [part[2] for part in parts]
        if all(part == parts[0] for part in parts):
            return None  # the same positions at every step
        step, width = starts[1] - starts[0], stop - start
        uneven = next((i for i, (a, b) in enumerate(itertools.pairwise(starts)) if b - a != step), None)
        if uneven is not None or not step:
            some = ", ".join(map(str, starts[max(uneven or 0, 1) - 1 :][:3]))
            raise NotALoop(
                "read-uneven",
                f"{described(source)} is read at positions of axis {dim} that are not evenly spaced: {some} in a row",
                steps[-1],
            )
        if any(part[3] - part[2] != width for part in parts) or (width != 1 and abs(step) != width):
            raise NotALoop(
                "read-uneven",
                f"{described(source)} is read in slices of axis {dim} of other widths than their distance",
                steps[-1],
            )
        return self._slices(source, dim, starts[0], step, width, len(steps), keep)


def _carry(steps: tuple[Any, ...], frame: _Frame) -> Affine | None:
    """Recognise a list that is being stacked, one step late."""
    for key, reverse in ((steps[1], False), (steps[-2], True)):
        loop = frame.open.get(key)
        if loop is None or len(loop.steps) != len(steps):
            continue
        if (steps[:-1] == loop.steps[1:]) if reverse else (steps[1:] == loop.steps[:-1]):
            initial = steps[-1] if reverse else steps[0]
            if loop.initial is not None and loop.initial is not initial:
                names = " and ".join(f"`{name_of(x) if isinstance(x, Node) else x}`" for x in (loop.initial, initial))
                raise NotALoop("initial-state", f"{loop.name} has two initial values, {names}")
            loop.initial, loop.reverse = initial, reverse
            return Affine(loop)
    return None


def _listed(items: Iterable[Any]) -> str:
    """Name the first few different items."""
    names = list(dict.fromkeys(f"`{name_of(item) if isinstance(item, Node) else item}`" for item in items))
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _differ(steps: Sequence[Any], frame: _Frame, of: Callable[[Any], Any]) -> NotALoop:
    """Refuse steps that are not alike; name the first one that differs from the step before it, as they run.

    Args:
        steps: One value per step, in the order of the list.
        frame: The attempt, which knows how many steps were peeled.
        of: What differs: the kind of a step's operation, or a text that says what the step does.
    """
    nodes = [step for step in steps if isinstance(step, Node)]
    backward = len(nodes) > 1 and nodes[-1] < nodes[0]
    run, number = (steps[::-1], frame.peeled[1]) if backward else (steps, frame.peeled[0])
    at = next((i for i in range(1, len(run)) if of(run[i]) != of(run[i - 1])), len(run) - 1)

    def said(step: Any) -> str:
        what = of(step)
        return what if isinstance(what, str) else f"computes `{name_of(step) if isinstance(step, Node) else step}`"

    after, before = said(run[at]), said(run[at - 1])
    if after == before:  # one line of code, two operations
        after, before = (f"{text} ({of(step)})" for text, step in ((after, run[at]), (before, run[at - 1])))
    message = f"step {number + at}, counted from 0, {after}, and the step before it {before}"
    return NotALoop("steps-differ", message, run[at] if isinstance(run[at], Node) else None)


def _shape(step: Any) -> str:
    """Say which shape a step (...) has."""
    return f"has the shape {tuple(value(step).shape)}" if is_tensor(step) else f"is the number {step}"


def _dtype(step: Any) -> str:
    return f"has the dtype {value(step).dtype}" if is_tensor(step) else f"is the number {step}"


def _leaves(x: Any) -> Iterator[Any]:
    """Walk arguments in a fixed order."""
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _leaves(y)
    elif isinstance(x, dict):
        for key in sorted(x):
            yield from _leaves(x[key])
    else:
        yield x


def _rebuild(x: Any, leaves: Iterator[Any]) -> Any:
    """Put leaves back where they were: values of nodes, and all else as itself."""
    if isinstance(x, (list, tuple)):
        return [_rebuild(y, leaves) for y in x]
    leaf = next(leaves)
    return leaf if isinstance(leaf.node, Node) else leaf.node


def _slice_of(node: Any) -> tuple[Node, int, int, int, bool] | None:
    """Read a node as positions of an axis of a tensor: (tensor, axis, start, stop, axis is kept)."""
    found = read(node) if is_tensor(node) else None
    cut = found.of[0] if isinstance(found, View) else found  # a select drops the axis of a slice
    if not isinstance(cut, Slice) or isinstance(cut, Write) or cut.step != 1:
        return None
    start, stop = known(cut.start), known(cut.stop)
    return (cut.of[0], cut.dim, start, stop, cut is found) if isinstance(start, int) and isinstance(stop, int) else None
