"""Emit the delta rule over all steps, for a step that is one (`refold.compiler.recurrence.delta`).

The operator takes q, k, r (b, t, h, n), v (b, t, h, p), log decays (b, t, h) or (b, t, h, n), strengths (b, t, h), and
a state (b, h, n, p). Of a state's other axes, b is the first, and h all the rest. Terms have the axes of all states:
time, then those of a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from operator import getitem
from typing import Any

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import mark_as_made, value
from ..ir.operators import RANK_ONE
from ..ir.sinking import sliced_early
from .delta import Query, RankOne, Weighted
from .delta_tokens import Tokens
from .duality import lay, logarithm, merged, signs_of
from .readout import Placed, terms
from .signs import sign
from .vectorize import Value

aten = torch.ops.aten


@dataclass(frozen=True)
class Corrections:
    """A carry that each step decays and corrects.

    Attributes:
        emit: Where operators are emitted to.
        step: What a step does.
        count: How many steps there are.
        initial: The state before the first, in the shape of a state; None for zeros.
        over_time: Gives a step's value over all steps.
    """

    emit: Builder
    step: RankOne
    count: Any
    initial: Node | None
    over_time: Callable[[Node], Value]

    @property
    def shape(self) -> list[Any]:
        """The shape of all states."""
        return [self.count, *value(self.step.state).shape]

    @property
    def rows(self) -> list[int | None]:
        """The axes b, t and those of h; None is an axis of size one."""
        others: list[int | None] = [place + 1 for place in self.step.others]
        return [*(others[:1] or [None]), 0, *(others[1:] or [None])]

    @property
    def key(self) -> int:
        """The axis n."""
        return self.step.n + 1

    @property
    def channel(self) -> int | None:
        """The axis p."""
        return None if self.step.p is None else self.step.p + 1

    @cached_property
    def decay(self) -> tuple[float, list[Placed]]:
        """The decay, as a number and factors."""
        number, found = self.step.decay.number, list[Placed]()
        for term in self.terms(self.step.decay):
            scale, parts = terms(self.emit, sliced_early(self.emit, term.node), term.state_axes)
            number, found = number * scale, found + parts
        return number, found

    @property
    def signless(self) -> bool:
        """Whether no decay can be negative."""
        return all(sign(term.node).nonnegative for rule in self.rules for term in rule.decay[1])

    @property
    def rules(self) -> tuple[Corrections, ...]:
        """The same of each delta rule of a step."""
        return (*(replace(self, step=rule) for rule in self.step.earlier), self)

    def terms(self, factors: Weighted) -> list[Placed]:
        """Return a step's factors over all steps."""
        found = []
        for part in factors.parts:
            x = self.over_time(part.node)
            axes = [*[0] * x.has_time, *(place + 1 for place in part.places)]
            node = self.emit.reshape(x.node, [self.shape[axis] for axis in axes])
            found.append(Placed(node, tuple(axes)))
        return found

    @cached_property
    def mask(self) -> Node | None:
        """The mask of the steps, (b, t, h); None if all are taken."""
        mask = self.step.mask
        return None if mask is None else self.laid(self.terms(mask[0]), 1.0, [], dtype=torch.bool)

    def taken(self, x: Any, other: float = 0.0) -> Any:
        """Put a number in place of x, (b, t, h) or with one more axis, at steps that are not taken."""
        mask, given = self.mask, self.step.mask
        if x is None or mask is None or given is None:
            return x
        mask = self.emit.call(aten.unsqueeze.default, mask, -1) if value(x).dim() > value(mask).dim() else mask
        number = self.emit.full(other, x)
        return self.emit.call(aten.where.self, mask, *((x, number) if given[1] else (number, x)))

    def laid(
        self, parts: list[Placed], number: float, last: Sequence[int | None], like: Node | None = None,
        dtype: torch.dtype | None = None,
    ) -> Node:  # fmt: skip
        """Return a product as the operator takes it, (b, t, h) and the last axes."""
        emit, dtype = self.emit, dtype or value(self.step.new).dtype
        parts = [Placed(emit.cast(term.node, dtype), term.state_axes) for term in parts]
        x = lay(emit, parts, [*self.rows, *last], self.shape, number, like)
        assert x is not None  # the axes of each were looked at
        return emit.dense(merged(emit, x, 2, len(self.rows)))


def refuses_rank_one(facts: Corrections) -> str | None:
    """Say why the operator does not take the decays: it wants their logarithms, which say nothing of a sign.

    Where no gradient is taken, signs are kept apart (`_signs`).
    """
    known = facts.signless or not (torch.is_grad_enabled() or facts.step.earlier)
    return None if known else "the state is multiplied by what may be negative"


def rank_one(facts: Corrections) -> tuple[dict[Node, Node], Node]:
    """Emit `RANK_ONE`: what each query reads, (t, ...), and the last state."""
    emit, step, n = facts.emit, facts.step, facts.key
    *earlier, given = map(_arguments, facts.rules)
    k = given["k"]
    signs, own = (None, None) if facts.signless else _signs(facts)
    for name in ("k", "r"):
        given[name] = _times(emit, given[name], signs)
    if step.early:
        given["r"] = _times(emit, given["r"] or given["k"], own)
    state_order = [facts.rows[0], *facts.rows[2:], n, facts.channel]
    if facts.initial is not None:
        start = emit.permute(facts.initial, [axis - 1 for axis in state_order if axis is not None])
        start = emit.reshape(start, [1 if axis is None else facts.shape[axis] for axis in state_order])
        given["initial_state"] = emit.dense(merged(emit, start, 1, len(facts.rows) - 1))
    under = None if step.under is None else facts.taken(facts.laid(facts.terms(step.under), 1.0, [n]))
    tokens = Tokens(emit, facts.count, step.early, _times(emit, under, signs), earlier)
    given = tokens.arguments(given)
    found, last = dict[Node, Node](), None
    for query in step.queries or [None]:
        q, scale = k, 1.0
        if query is not None:
            q, scale = facts.laid(facts.terms(query.factors), 1.0, [n], k), float(query.factors.number)
        result = emit.call(
            RANK_ONE.target, *RANK_ONE.args(q=tokens.queries(_times(emit, q, signs)), **given, scale=scale)
        )
        mark_as_made(result)
        if query is not None:
            found[query.node] = _read(facts, query, tokens.results(emit.call(getitem, result, 0)))
        last = last or tokens.state(emit.call(getitem, result, 1))
    assert last is not None
    if signs is not None:
        ends = emit.call(aten.unsqueeze.default, emit.call(aten.select.int, signs, 1, -1), -1)
        last = emit.call(aten.mul.Tensor, last, ends)
    return found, _natural(facts, last, state_order, [axis + 1 for axis in range(len(facts.shape) - 1)])


def _arguments(facts: Corrections) -> dict[str, Any]:
    """Return the arguments of one delta rule, but for queries and states."""
    step, n = facts.step, facts.key
    k = facts.laid(facts.terms(step.keys), 1.0, [n])
    given = {"k": k, "v": _inputs(facts, k), "g": _log_decay(facts, k), "beta": None, "r": None}
    if step.beta.parts:
        given["beta"] = facts.laid(facts.terms(step.beta), 1.0, [])
    if (step.reads.number, Counter(step.reads.parts)) != (1.0, Counter(step.keys.parts)):
        given["r"] = facts.laid(facts.terms(step.reads), step.reads.number, [n])
    return {name: facts.taken(x) for name, x in given.items()}


def _signs(facts: Corrections) -> tuple[Node, Node]:
    """Return the sign P of the product of all decays up to each step, (b, t, h, 1 or n), and that of the step's alone.

    States with these signs have decays that are never negative: P[t] S[t] = |D[t]| P[t-1] S[t-1] + P[t] k[t] u[t]ᵀ.
    """
    emit, (_, factors) = facts.emit, facts.decay
    x = facts.laid(factors, 1.0, [facts.key if any(facts.key in term.spans() for term in factors) else None])
    return signs_of(emit, facts.taken(x, 1.0))


def _times(emit: Builder, x: Any, signs: Node | None) -> Any:
    """Multiply by signs where there are some; what is not there stays so."""
    return x if x is None or signs is None else emit.call(aten.mul.Tensor, x, signs)


def _inputs(facts: Corrections, like: Node) -> Node:
    """Return v."""
    parts = (facts.laid(facts.terms(term), term.number, [facts.channel], like) for term in facts.step.inputs)
    return facts.emit.combined(aten.add.Tensor, parts)


def _log_decay(facts: Corrections, like: Node) -> Node | None:
    """Return g; None where nothing decays."""
    number, factors = facts.decay
    last = [facts.key] if any(facts.key in term.spans() for term in factors) else []
    if not facts.signless:
        factors = [Placed(facts.emit.call(aten.abs.default, term.node), term.state_axes) for term in factors]
    logs = [facts.laid([Placed(logarithm(facts.emit, term), term.state_axes)], 1.0, last) for term in factors]
    if number != 1.0:
        logs.append(facts.laid([], log(number), last, like))
    return facts.emit.combined(aten.add.Tensor, logs) if logs else None


def _natural(facts: Corrections, x: Node, order: Sequence[int | None], target: Sequence[int]) -> Node:
    """Split the merged axes of a result, and bring its axes into another order."""
    own = [axis for axis in order if axis is not None]
    x = facts.emit.reshape(x, [facts.shape[axis] for axis in own])
    return facts.emit.permute(x, [own.index(axis) for axis in target])


def _read(facts: Corrections, query: Query, y: Node) -> Node:
    """Lay y out as a query has it."""
    order = [*facts.rows, facts.channel]
    out = [place + 1 for place in query.out]
    ones = [axis for axis in order if axis and axis not in out]
    x = _natural(facts, y, order, [0, *ones, *out])
    return facts.emit.reshape(x, [facts.count, *value(query.node).shape])
