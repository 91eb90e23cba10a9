"""What is assumed of the state at a loop's head, at every step's beginning.

A `CarrySpec` says for each location (`capture.locations`) what a trace of the body puts there. `widen` compares
with what the body left there, and returns the form to try next; when there is none, the form holds at every step by
induction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.variables import ListVariable, SymNodeVariable

from ..induction_variable import InductionVariable
from .iterators import Numbers
from .lists import GrowingList
from .locations import ListEnd, ListLocation, Local, Location, NumberIn, most_in
from .variables import (
    NotCaptured,
    Translator,
    Variable,
    changeable,
    example,
    form,
    fresh,
    is_constant,
    not_carried,
    numbers,
    realized,
    structure,
    tensors,
)


@dataclass
class CarrySpec:
    """What is assumed of the state at every step's beginning."""

    # Places that hold other tensors at each step, with examples of them, flat.
    carried: dict[Location, list[torch.Tensor]] = field(default_factory=dict)
    # Places that no step reads before it writes them.
    written: set[Location] = field(default_factory=set)
    # Places of numbers that grow by a constant, or by a constant factor.
    counters: dict[Location, Numbers] = field(default_factory=dict)
    # Lists that stay as they are.
    plain: set[ListVariable] = field(default_factory=set)
    # Of the written locations, those whose value changes in a way that no step may see.
    unknown: set[Location] = field(default_factory=set)

    @property
    def locations(self) -> set[Location]:
        """All locations of which something is assumed."""
        return {*self.carried, *self.written, *self.counters}

    def carry(self, tx: Translator, location: Location, replaced: bool = False) -> bool:
        """Assume of a location that it holds other tensors at each step; return whether it holds tensors.

        Args:
            tx: The frame.
            location: The location.
            replaced: Whether steps are known to replace what is there: a list or an object may also be changed.
        """
        now = location.now(tx)
        found = tensors(now) if replaced or not changeable(now) else []
        if found:
            self.carried[location] = [example(x) for x in found]
        return bool(found)

    def count(self, location: Location, before: Any, then: Any, number: InductionVariable) -> bool:
        """Assume of a location that its number grows, if a step changes it; return whether that may be.

        Args:
            location: The location.
            before: What is there before the loop.
            then: What the body left there.
            number: The step's number in that trace.
        """
        counter = self.counters.get(location)
        before, then = realized(before), realized(then)  # since torch 2.15, sums of integers are lazy
        if counter is not None:
            if not isinstance(then, SymNodeVariable) or not counter.grow(then.sym_num, number):
                other = counter.otherwise()
                if other is None:
                    raise NotCaptured(
                        "python-state", f"`{location.name}` does not grow by the same number, or factor, at every step"
                    )
                self.counters[location] = other
            return True
        known = is_constant(before) and is_constant(then)
        if then is before or (known and before.value is then.value):
            return True
        if not known or type(before.value) is not type(then.value) or type(then.value) not in (int, float):
            return False
        self.counters[location] = Numbers(before.value, then.value - before.value)
        return True

    def numbers(self, tx: Translator, nest: Location, given: Callable[[Numbers], Variable]) -> Iterator[Variable]:
        """Iterate over variables for the numbers of a nest: for those that grow, the given ones."""
        for at, x in numbers(nest.now(tx)).items():
            counter = self.counters.get(NumberIn(nest, at))
            yield x if counter is None else given(counter)

    def copy(self) -> CarrySpec:
        """Return a form that can be changed apart."""
        return CarrySpec(*(getattr(self, x.name).copy() for x in dataclasses.fields(self)))


def first_spec(tx: Translator, stored: set[str], live: set[str]) -> CarrySpec:
    """Guess a form from what the frame's variables hold before the loop.

    Args:
        tx: The frame.
        stored: The variables that the body's code writes.
        live: Those that it, or what comes after the loop, may read before they are written.
    """
    found = CarrySpec()
    for name in sorted(stored):
        location = Local(name)
        if location.now(tx) is None or name not in live:
            found.written.add(location)
        else:
            found.carry(tx, location)
    return found


def widen(
    tx: Translator,
    assumed: CarrySpec,
    after: dict[Location, Variable | None],
    growing_lists: list[GrowingList],
    number: InductionVariable,
) -> CarrySpec | None:
    """Compare the state after the body with the one before it.

    Args:
        tx: The frame, as it is before the loop.
        assumed: The form that the body was traced from.
        after: What the body left in every location that it may have written.
        growing_lists: The lists that the body could append to.
        number: The step's number in that trace.

    Returns:
        A form to try next; None if the body leads from the form that was assumed to itself.
    """
    new = assumed.copy()
    then: Any
    for location, then in after.items():
        if location in assumed.written or isinstance(location, NumberIn):
            continue
        before: Any = location.now(tx)
        if location in assumed.carried:
            found = tensors(then)
            if isinstance(location, ListLocation) and len(found) > len(assumed.carried[location]):
                refused = NotCaptured("list-read", f"the loop reads `{location.name}`, which it makes longer")
                refused.alike = max(most_in(location.owner) - len(assumed.carried[location]), 1)
                raise refused
            if structure(before) != structure(then):
                raise NotCaptured("state-unstable", f"`{location.name}` is not the same kind of thing after a step")
            values = [example(x) for x in found]
            if [form(x, location.name) for x in values] != [form(x) for x in assumed.carried[location]]:
                new.carried[location] = [fresh(tx, x) for x in values]
            now = numbers(then)
            for at, x in numbers(before).items():
                place = NumberIn(location, at)
                if not new.count(place, x, now[at], number):
                    raise not_carried(f"`{place.name}`")
        elif new.count(location, before, then, number):
            continue
        elif before is None or not new.carry(tx, location, not isinstance(location, (ListEnd, ListLocation))):
            new.written.add(location)
            new.unknown |= {location} if before is not None and not isinstance(then, SymNodeVariable) else set()
    for growing in growing_lists:
        if growing.read and not growing.grown:
            new.plain.add(growing.owner)
            for location in [x for x in new.carried if isinstance(x, ListEnd) and x.owner is growing.owner]:
                del new.carried[location]
    same = (new.written, new.counters, new.plain) == (assumed.written, assumed.counters, assumed.plain)
    carried_same = new.carried.keys() == assumed.carried.keys() and all(
        new.carried[x] is assumed.carried[x] for x in new.carried
    )
    return None if same and carried_same else new
