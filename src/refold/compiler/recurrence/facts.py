"""What is known of a recurrence whose states are only read through a contraction, computed once.

    h[t] = a[t] h[t-1] + b[t],    y[t] = sum over n of C[t] h[t]

``a``, ``b`` and ``C`` are products of factors, read in index notation, so the spelling does not matter. The states are
(t, b, *kept, n) in some order of kept and n: axis 0 is time, axis 1 is the batch. The contraction sums the axis ``n``,
and ``y`` keeps the axes ``kept``. Which form (`refold.compiler.recurrence.forms`) fits depends on the axes that factors
run along, and on whether ``a`` is an exponential.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import power, value
from ..ir.sinking import sliced_early
from .readout import Placed, Readout, terms
from .signs import sign
from .vectorize import Value

aten = torch.ops.aten


class Factors(NamedTuple):
    """A number times terms."""

    number: float
    terms: list[Placed]

    def along(self, n: int) -> tuple[list[Placed], list[Placed]]:
        """Split the terms into those that run along an axis, and the others."""
        return [x for x in self.terms if n in x.spans()], [x for x in self.terms if n not in x.spans()]

    @property
    def positive(self) -> bool:
        """Whether it is positive whatever the inputs; a term may be zero."""
        return self.number > 0 and all(sign(term.node).nonnegative for term in self.terms)


class Decay(NamedTuple):
    """A decay as ``exp(rate * steps * rates) * rest``: steps depend on time or batch, rates do not."""

    rate: float
    steps: list[Placed]
    rates: list[Placed]
    rest: Factors

    @property
    def plain(self) -> bool:
        """Whether it is an exponential and nothing else."""
        return self.rest.number == 1.0 and not self.rest.terms


@dataclass(frozen=True)
class Facts:
    """One recurrence and its readout.

    Attributes:
        emit: Where operators are emitted to.
        read: How the states are read.
        a: What each state is multiplied by on the way to the next.
        b: What is added.
        shape: Shape of all states.
        initial: The state before the first, ``shape[1:]``; None for zeros.
        varies: Whether ``a`` is a tensor; it is a number otherwise.
    """

    emit: Builder
    read: Readout
    a: Factors
    b: Factors
    shape: list[int]
    initial: Node | None
    varies: bool

    @property
    def n(self) -> int:
        """The axis of the states that is summed."""
        return self.read.summed

    @cached_property
    def kept(self) -> list[int]:
        """The other axes, without time and batch."""
        return [place for place in range(2, len(self.shape)) if place != self.n]

    @cached_property
    def decay(self) -> Decay | None:
        """The decay as an exponential; None if a part of it along ``n`` is none.

        A step size that is no factor of ``b`` is a part of the rest: operators multiply ``b`` by it.
        """
        found = self._exponential()
        if found is None:
            return None
        exponent, rest = found
        steps = [term for term in exponent.terms if term.spans() & {0, 1}]
        if Counter(steps) - Counter(self.b.terms):
            return Decay(0.0, [], [], self.a)
        rates = [term for term in exponent.terms if not term.spans() & {0, 1}]
        return Decay(exponent.number, steps, rates, rest)

    def _exponential(self) -> tuple[Factors, Factors] | None:
        """Read ``a`` as the exponential of a product, times factors that do not run along ``n``."""
        none = Factors(0.0, [])
        if not self.varies:
            return none, self.a
        if self.a.number == 1.0 and len(self.a.terms) == 1 and (exponent := self._exponent(self.a.terms[0])):
            return exponent, Factors(1.0, [])
        powers, others = self.a.along(self.n)
        if not powers:
            return none, self.a
        power = self._exponent(powers[0]) if len(powers) == 1 else None
        return None if power is None else (power, Factors(self.a.number, others))

    def _exponent(self, term: Placed) -> Factors | None:
        """Read a factor as the exponential of a product."""
        inner = unalias(term.node)
        if (read := power(inner)) is None or value(inner).dim() != len(term.state_axes):
            return None
        number, factors = terms(self.emit, read[0], term.state_axes)
        return Factors(number * read[1], factors)

    @cached_property
    def keys(self) -> list[Placed]:
        """The factors of `inputs` along ``n``."""
        return self.inputs.along(self.n)[0]

    @cached_property
    def values(self) -> list[Placed]:
        """The other factors of `inputs`."""
        return self.inputs.along(self.n)[1]

    @cached_property
    def inputs(self) -> Factors:
        """``b`` without the step sizes of an exponential decay."""
        left = list(self.b.terms)
        for term in self.decay.steps if self.decay is not None else ():
            left.remove(term)
        return Factors(self.b.number, left)

    @cached_property
    def queries(self) -> list[Placed]:
        """The factors of ``C`` along ``n``."""
        return Factors(1.0, self.read.others).along(self.n)[0]

    @cached_property
    def rest(self) -> list[Placed]:
        """The other factors of ``C``: they multiply ``y``."""
        return Factors(1.0, self.read.others).along(self.n)[1]

    @cached_property
    def decay_spans(self) -> set[int]:
        """The axes of the states that decays run along."""
        parts = (self.a.terms,) if self.decay is None else (self.decay.steps, self.decay.rates, self.decay.rest.terms)
        return spans(*(term for part in parts for term in part))

    @cached_property
    def heads(self) -> list[int]:
        """The axes, of those kept, that decays, keys or queries run along; of two axes, one always counts as such."""
        found = [place for place in self.kept if place in self.decay_spans | self.wide]
        return found or (self.kept[:1] if len(self.kept) == 2 else [])

    @cached_property
    def wide(self) -> set[int]:
        """The axes, of those kept, that keys and queries run along."""
        return spans(*self.keys, *self.queries) & set(self.kept)


def read_facts(
    emit: Builder, read: Readout, scale: Value | None, offset: Value | None, shape: list[int], initial: Node | None
) -> Facts | None:
    """Read a recurrence: ``scale`` (None for 1) and ``offset`` are broadcast to ``shape``.

    Returns:
        The facts; None if nothing is added that depends on time.
    """
    if offset is None or not offset.has_time:
        return None
    rank = len(shape)
    every = tuple(range(rank))
    a, varies = Factors(1.0, []), scale is not None and isinstance(scale.node, Node)
    if scale is not None and not varies:
        a = Factors(float(scale.node), [])
    elif scale is not None:
        factors = sliced_early(emit, scale.padded(emit, rank - 1))
        a = Factors(*terms(emit, factors, every[rank - value(factors).dim() :]))
    b = Factors(*terms(emit, sliced_early(emit, offset.padded(emit, rank - 1)), every))
    return Facts(emit, read, a, b, shape, initial, varies)


def spans(*factors: Placed) -> set[int]:
    """Find the axes of the states that terms run along."""
    return {place for term in factors for place in term.spans()}


def unalias(node: Node) -> Node:
    """Follow a node through copies and expansions."""
    while node.target in (aten.alias.default, aten.clone.default, aten.expand.default):
        node = node.args[0]  # type: ignore[assignment]
    return node
