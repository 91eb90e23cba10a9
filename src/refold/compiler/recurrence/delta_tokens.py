"""The tokens of the delta rule that one step of a loop becomes, where the rule alone is not what the step does.

    S[t] = D S[t-1] + k (b x - b S[t-1]ᵀ r)ᵀ + l zᵀ

The operator reads a decayed state, and writes under one key. So the state before its decay is read by a token of its
own. It writes what it read into one more row of the state, which the next token reads: nothing is divided by decays.
What is written under other keys l is written by a last token. Several delta rules in one step are as many tokens.

Arguments are those of `refold.ops.delta_rule`, (b, t, h, n) or (b, t, h); of m tokens a step, (b, t m, h, n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import value
from .duality import FORGETS

aten = torch.ops.aten


@dataclass(frozen=True)
class Tokens:
    """The tokens of all steps.

    Attributes:
        emit: Where operators are emitted to.
        steps: How many steps there are.
        early: Whether a step reads the state before it decays.
        under: The keys l, if they are others than k.
        earlier: The arguments of the rules of a step before its last one.
    """

    emit: Builder
    steps: Any
    early: bool
    under: Node | None
    earlier: Sequence[Mapping[str, Node | None]] = ()

    @property
    def each(self) -> int:
        """How many tokens a step becomes."""
        return 1 + self.early + (self.under is not None) + len(self.earlier)

    def arguments(self, given: Mapping[str, Node | None]) -> dict[str, Node | None]:
        """Return the arguments for all tokens, given those of steps."""
        k, v, g, beta, r = (given[name] for name in ("k", "v", "g", "beta", "r"))
        assert k is not None
        assert v is not None
        zeros, nothing = self._full(k, 0.0), self._full(v, 0.0)
        # Of the tokens of a step: keys, values, log decays, strengths, read keys.
        tokens: list[tuple[Node | None, ...]]
        tokens = [(k, nothing if self.under else v, g, beta, k if r is None else r)]
        initial = given.get("initial_state")
        if self.early:
            ((_, v0, _, _, read),) = tokens
            decay = zeros if g is None else self._per_key(g, k)
            assert read is not None
            tokens = [
                (self._row(zeros, 1.0), v0, self._row(zeros, FORGETS), beta, self._row(read, 0.0)),
                (self._row(k, 0.0), nothing, self._row(decay, 0.0), None, self._row(zeros, -1.0)),
            ]
            zeros = self._row(zeros, 0.0)
            initial = initial and self._row(initial, 0.0, 2)
        if self.under is not None:
            tokens.append((self._row(self.under, 0.0) if self.early else self.under, v, None, None, zeros))
        if self.earlier:
            tokens = self._in_a_row([*self.earlier, given], k)
        if len(tokens) > 1:
            k, v, g, beta, r = (
                self._in_turns(x, other) for x, other in zip(zip(*tokens, strict=True), (0, 0, 0, 1, 0), strict=True)
            )
        return {"k": k, "v": v, "g": g, "beta": beta, "r": r, "initial_state": initial}

    def _in_a_row(self, rules: Sequence[Mapping[str, Node | None]], like: Node) -> list[tuple[Node | None, ...]]:
        decays = [rule["g"] for rule in rules]
        if any(g is not None and value(g).dim() == value(like).dim() for g in decays):
            decays = [g and self._per_key(g, like) for g in decays]
        alike = all(rule["r"] is None for rule in rules)
        reads = [None if alike else rule["r"] or rule["k"] for rule in rules]
        return [(x["k"], x["v"], g, x["beta"], r) for x, g, r in zip(rules, decays, reads, strict=True)]

    def queries(self, q: Node) -> Node:
        """Return queries for all tokens: the last one of a step has that of the step."""
        q = self._row(q, 0.0) if self.early else q
        found = self._in_turns([*[self._full(q, 0.0)] * (self.each - 1), q], 0)
        assert found is not None
        return found

    def results(self, y: Node) -> Node:
        """Take what the last token of each step gives."""
        if self.each == 1:
            return y
        batch, _, *rest = value(y).shape
        return self.emit.call(aten.select.int, self.emit.reshape(y, [batch, self.steps, self.each, *rest]), 2, -1)

    def state(self, state: Node) -> Node:
        """Leave out the row that holds what was read."""
        return self.emit.call(aten.slice.Tensor, state, 2, 0, -1) if self.early else state

    def _row(self, x: Node, number: float, axis: int = -1) -> Node:
        # No padding: of symbolic sizes, that makes numbers.
        one = self.emit.call(aten.slice.Tensor, x, axis, 0, 1)
        return self.emit.call(aten.cat.default, [x, self._full(one, number)], axis)

    def _full(self, like: Node, number: float) -> Node:
        return self.emit.full(number, like, value(like).shape)

    def _per_key(self, g: Node, like: Node) -> Node:
        if value(g).dim() == value(like).dim():
            return g
        return self.emit.expand(self.emit.call(aten.unsqueeze.default, g, -1), value(like).shape)

    def _in_turns(self, xs: Sequence[Node | None], other: float) -> Node | None:
        """Let the tokens of arrays take turns; one that is None has this number everywhere."""
        like = next((x for x in xs if x is not None), None)
        if like is None or len(xs) == 1:
            return like
        stacked = self.emit.stack([self._full(like, other) if x is None else x for x in xs], 2)
        batch, _, _, *rest = value(stacked).shape
        return self.emit.reshape(stacked, [batch, self.steps * self.each, *rest])
