"""The state at a loop's head: where it is kept, and what is assumed of it at every step's beginning.

A `Place` is where a body can leave something for the next step: a local variable, a cell (a variable that an inner
function shares, so also the walrus target of a comprehension before Python 3.12), a list, or an end of one that
grows. A `Form` says for each place what a trace of the body puts there. `refine` compares with what the body left
there, and returns the form to try next; when there is none, the form holds at every step by induction.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._dynamo.variables import ListVariable, SymNodeVariable, TupleVariable
from torch._dynamo.variables.base import AttributeMutationNew
from torch._dynamo.variables.misc import CellVariable

from ..stepnumber import StepNumber
from .lists import Growing
from .variables import Refused, Translator, Variable, example, form, fresh, is_constant, realized, tensors

CONTENTS = "cell_contents"


class Place(Protocol):
    """Where a body can leave something for the next step."""

    @property
    def name(self) -> str:
        """What a person calls it."""

    def now(self, tx: Translator) -> Variable | None:
        """Return what is there, if anything."""

    def put(self, tx: Translator, x: Variable) -> None:
        """Leave something there."""

    def clear(self, tx: Translator) -> None:
        """Leave nothing there: to read it fails."""


@dataclass(frozen=True)
class Local:
    """A local variable of the frame."""

    name: str

    def now(self, tx: Translator) -> Variable | None:
        """Return what is there, if anything."""
        return tx.symbolic_locals.get(self.name)

    def put(self, tx: Translator, x: Variable) -> None:
        """Leave something there."""
        tx.symbolic_locals[self.name] = x

    def clear(self, tx: Translator) -> None:
        """Leave nothing there."""
        tx.symbolic_locals.pop(self.name, None)


@dataclass(frozen=True)
class Cell:
    """A variable that functions share."""

    cell: CellVariable

    @property
    def name(self) -> str:
        """Its name in the compiled function, if it has one there."""
        return self.cell.local_name or "a variable of an outer function"

    def now(self, tx: Translator) -> Variable | None:
        """Return what is there, if anything."""
        stored = tx.output.side_effects.store_attr_mutations.get(self.cell, {})
        return stored.get(CONTENTS, self.cell.pre_existing_contents)

    def put(self, tx: Translator, x: Variable) -> None:
        """Leave something there."""
        tx.output.side_effects.store_cell(self.cell, x)

    def clear(self, tx: Translator) -> None:
        """Leave nothing there."""
        tx.output.side_effects.store_attr_mutations.get(self.cell, {}).pop(CONTENTS, None)
        self.cell.pre_existing_contents = None


@dataclass(frozen=True)
class End:
    """The first or last items of a list that grows."""

    owner: ListVariable
    count: int
    at_front: bool

    name = "the end of a list"

    def now(self, tx: Translator) -> Variable:
        """Return the items, in a tuple."""
        items: Any = self.owner.items
        if self.at_front:
            return TupleVariable((items.front + items.first if isinstance(items, Growing) else items)[: self.count])
        return TupleVariable((items.last + items.back if isinstance(items, Growing) else items)[-self.count :])

    def put(self, tx: Translator, x: Variable) -> None:
        """Take the items of a tuple for those at this end while the body is traced; else the list has them itself."""
        items: Any = self.owner.items
        if isinstance(items, Growing):
            setattr(items, "first" if self.at_front else "last", list(x.items))

    def clear(self, tx: Translator) -> None:
        """Refuse."""
        raise Refused("the ends of a list are not of the same kind at every step")


@dataclass(frozen=True)
class Contents:
    """All items of a list that stays as long as it is, such as the states of a stack of layers."""

    owner: ListVariable

    name = "a list that is read and written"

    def now(self, tx: Translator) -> Variable:
        """Return the items, in a tuple."""
        return TupleVariable(list(self.owner.items))

    def put(self, tx: Translator, x: Variable) -> None:
        """Replace the items."""
        tx.output.side_effects.mutation(self.owner)
        self.owner.items[:] = x.items

    def clear(self, tx: Translator) -> None:
        """Refuse."""
        raise Refused("a list does not hold the same kind of things at every step")


@dataclass
class Form:
    """What is assumed of the state at every step's beginning."""

    # Places that hold other tensors at each step, with examples of them, flat.
    carried: dict[Place, list[torch.Tensor]] = field(default_factory=dict)
    # Places that no step reads before it writes them.
    written: set[Place] = field(default_factory=set)
    # Places of integers that grow by a constant: value at the first step, growth.
    counters: dict[Place, tuple[int, int]] = field(default_factory=dict)
    # Lists that stay as they are.
    plain: set[ListVariable] = field(default_factory=set)
    # Of the written places, those whose value changes in a way that no step may see.
    unknown: set[Place] = field(default_factory=set)

    @property
    def places(self) -> set[Place]:
        """All places of which something is assumed."""
        return {*self.carried, *self.written, *self.counters}

    def carry(self, tx: Translator, place: Place) -> bool:
        """Assume of a place that it holds other tensors at each step; return whether it holds tensors."""
        found = tensors(place.now(tx))
        if found:
            self.carried[place] = [example(x) for x in found]
        return bool(found)

    def copy(self) -> Form:
        """Return a form that can be changed apart."""
        return Form(*(getattr(self, x.name).copy() for x in dataclasses.fields(self)))


def first_form(tx: Translator, stored: set[str], live: set[str]) -> Form:
    """Guess a form from what the frame's variables hold before the loop.

    Args:
        tx: The frame.
        stored: The variables that the body's code writes.
        live: Those that it, or what comes behind the loop, may read before they are written.
    """
    found = Form()
    for name in sorted(stored):
        place = Local(name)
        if place.now(tx) is None or name not in live:
            found.written.add(place)
        else:
            found.carry(tx, place)
    return found


def refine(
    tx: Translator, assumed: Form, after: dict[Place, Variable | None], lists: list[Growing], number: StepNumber
) -> Form | None:
    """Compare the state after the body with the one before it.

    Args:
        tx: The frame, as it is before the loop.
        assumed: The form that the body was traced from.
        after: What the body left in every place that it may have written.
        lists: The lists that the body could append to.
        number: The step's number in that trace.

    Returns:
        A form to try next; None if the body leads from the form that was assumed to itself.
    """
    new = assumed.copy()
    then: Any
    for place, then in after.items():
        if place in assumed.written:
            continue
        before: Any = place.now(tx)
        if place in assumed.carried:
            found = tensors(then)
            if len(found) != len(assumed.carried[place]) or type(realized(before)) is not type(then):
                raise Refused(f"{place.name} is not the same kind of thing after a step")
            values = [example(x) for x in found]
            if [form(x) for x in values] != [form(x) for x in assumed.carried[place]]:
                new.carried[place] = [fresh(tx, x) for x in values]
        elif place in assumed.counters:
            start, growth = assumed.counters[place]
            if not isinstance(then, SymNodeVariable) or number.affine(then.sym_num) != (growth, start + growth):
                raise Refused(f"{place.name} does not grow by the same number at every step")
        elif then is before or (is_constant(before) and is_constant(then) and before.value is then.value):
            continue
        elif is_constant(before) and is_constant(then) and type(before.value) is type(then.value) is int:
            new.counters[place] = before.value, then.value - before.value
        elif before is None or not new.carry(tx, place):
            new.written.add(place)
            new.unknown |= {place} if before is not None and not isinstance(then, SymNodeVariable) else set()
    for growing in lists:
        if growing.read and not growing.grown:
            new.plain.add(growing.owner)
            for place in [x for x in new.carried if isinstance(x, End) and x.owner is growing.owner]:
                del new.carried[place]
    same = (new.written, new.counters, new.plain) == (assumed.written, assumed.counters, assumed.plain)
    carried_same = new.carried.keys() == assumed.carried.keys() and all(
        new.carried[x] is assumed.carried[x] for x in new.carried
    )
    return None if same and carried_same else new


@contextlib.contextmanager
def writable_cells(tx: Translator) -> Iterator[list[Cell]]:
    """Let cells of outer scopes be written, and put them back afterwards."""
    attributes = tx.output.side_effects.store_attr_mutations
    cells = [x for x in tx.output.side_effects.id_to_variable.values() if isinstance(x, CellVariable)]
    cells = [x for x in cells if x.mutation_type is not None]
    before = [(x, x.mutation_type, x.pre_existing_contents, copy.copy(attributes.get(x))) for x in cells]
    try:
        for x in cells:
            x.mutation_type = AttributeMutationNew()
        yield [Cell(x) for x in cells]
    finally:
        for x, mutation, contents, stored in before:
            x.mutation_type, x.pre_existing_contents = mutation, contents
            attributes.pop(x, None)
            if stored is not None:
                attributes[x] = stored
