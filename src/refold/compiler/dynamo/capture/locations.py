"""Where a body can leave something for the next step.

Such a place is a local variable, a cell, an attribute, an entry of a dictionary, a list, or an end of a list that
grows. A cell is a variable that an inner function shares. Before Python 3.12, the walrus target of a comprehension is a
cell, too. In a graph of its own Dynamo lets no code change what was there before. `AttributeRecorder`, `DictRecorder`
and `ListRecorder` let it, tell what was changed, and put it back.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch._dynamo.current_scope_id import current_scope_id
from torch._dynamo.variables import ConstDictVariable, LazyVariableTracker, ListVariable, TupleVariable
from torch._dynamo.variables.base import AttributeMutation
from torch._dynamo.variables.lists import DequeVariable
from torch._dynamo.variables.misc import CellVariable

from .lengths import Stacked
from .lists import GrowingList
from .variables import NotCaptured, Translator, Variable, is_constant, name_of, not_carried, numbers, source_of

CONTENTS = "cell_contents"
LISTS = (ListVariable, DequeVariable)
# A list that gets longer, and is read, may be a window that is not full yet: it is looked at again when it has so many.
WINDOW = 8


class Location(Protocol):
    """Where a body can leave something for the next step."""

    @property
    def name(self) -> str:
        """What a person calls it."""

    def now(self, tx: Translator) -> Variable | None:
        """Read the variable that is there, if any."""

    def put(self, tx: Translator, x: Variable) -> None:
        """Leave something there."""

    def clear(self, tx: Translator) -> None:
        """Leave nothing there: to read it fails."""


@dataclass(frozen=True)
class Local:
    """A local variable of the frame."""

    name: str

    def now(self, tx: Translator) -> Variable | None:
        """Read the variable that is there, if any."""
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
        """Read the variable that is there, if any."""
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
class Attribute:
    """An attribute of an object, once it was set: Dynamo sets it after the compiled code."""

    owner: Variable
    attribute: str

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{source_of(self.owner) or 'an object'}.{self.attribute}"

    def now(self, tx: Translator) -> Variable | None:
        """Read the variable that it was set to, if it was."""
        return tx.output.side_effects.store_attr_mutations.get(self.owner, {}).get(self.attribute)

    def put(self, tx: Translator, x: Variable) -> None:
        """Set it to something else."""
        tx.output.side_effects.store_attr_mutations[self.owner][self.attribute] = x

    def clear(self, tx: Translator) -> None:
        """Refuse."""
        raise not_carried(f"`{self.name}`")


@dataclass(frozen=True)
class DictEntry:
    """The value of a key that a dictionary has and keeps."""

    owner: ConstDictVariable
    key: Any
    of: str = field(default="a dictionary", compare=False)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.of}[{self.key.vt.value!r}]" if is_constant(self.key.vt) else f"a value of {self.of}"

    def now(self, tx: Translator) -> Variable:
        """Return the value."""
        return self.owner.items[self.key]

    def put(self, tx: Translator, x: Variable) -> None:
        """Replace the value."""
        tx.output.side_effects.mutation(self.owner)
        self.owner.items[self.key] = x

    def clear(self, tx: Translator) -> None:
        """Refuse."""
        raise not_carried(f"`{self.name}`")


@dataclass(frozen=True)
class ListEnd:
    """The first or last items of a list that grows."""

    owner: ListVariable
    count: int
    at_front: bool
    of: str = field(default="a list", compare=False)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.of}[{0 if self.at_front else -1}]"

    def now(self, tx: Translator) -> Variable:
        """Return the items, in a tuple."""
        items: Any = self.owner.items
        if self.at_front:
            return TupleVariable((items.front + items.first if isinstance(items, GrowingList) else items)[: self.count])
        return TupleVariable((items.last + items.back if isinstance(items, GrowingList) else items)[-self.count :])

    def put(self, tx: Translator, x: Variable) -> None:
        """Take the items of a tuple for those at this end while the body is traced; else the list has them itself."""
        items: Any = self.owner.items
        if isinstance(items, GrowingList):
            setattr(items, "first" if self.at_front else "last", list(x.items))

    def clear(self, tx: Translator) -> None:
        """Refuse."""
        raise NotCaptured("list-kind", f"`{self.name}` is not of the same kind at every step")


@dataclass(frozen=True)
class ListLocation:
    """All items of a list that stays as long as it is, such as the states of a stack of layers."""

    owner: ListVariable
    name: str = field(default="a list", compare=False)

    def now(self, tx: Translator) -> Variable:
        """Return the items, in a tuple."""
        return TupleVariable(list(self.owner.items))

    def put(self, tx: Translator, x: Variable) -> None:
        """Replace the items."""
        tx.output.side_effects.mutation(self.owner)
        self.owner.items[:] = x.items

    def clear(self, tx: Translator) -> None:
        """Refuse."""
        raise NotCaptured("list-kind", f"`{self.name}` does not hold the same kind of things at every step")


@dataclass(frozen=True)
class NumberIn:
    """A number in a nest of tensors that is carried, as in ``(h, n)``: it is put there together with the tensors."""

    nest: Location
    at: str

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.nest.name}{self.at}"

    def now(self, tx: Translator) -> Variable | None:
        """Return the number."""
        nest = self.nest.now(tx)
        return None if nest is None else numbers(nest).get(self.at)

    def put(self, tx: Translator, x: Variable) -> None:
        """Leave it to the nest."""

    def clear(self, tx: Translator) -> None:
        """Refuse."""
        raise not_carried(f"`{self.name}`")


def most_in(x: Variable) -> int:
    """Return how many items a window has once it is full: what a deque says, or a usual one."""
    most = x.maxlen.as_python_constant() if type(x) is DequeVariable else None
    return most or WINDOW


class AttributeRecorder:
    """Lets cells and attributes of all objects be changed, and puts them back."""

    def __init__(self, tx: Translator) -> None:
        effects = tx.output.side_effects
        # What was set, and (since torch 2.12) how it is to be set.
        self.tables = [effects.store_attr_mutations, getattr(effects, "attr_mutation_kinds", {})]
        found = dict.fromkeys([*effects.id_to_variable.values(), *effects.store_attr_mutations])
        self.owners = {x: x.mutation_type for x in found if isinstance(x.mutation_type, AttributeMutation)}
        self.stored = [{x: copy.copy(table[x]) for x in self.owners if x in table} for table in self.tables]
        self.cells = {x: x.pre_existing_contents for x in self.owners if isinstance(x, CellVariable)}
        self.contents = {cell: cell.now(tx) for cell in map(Cell, self.cells)}
        for x in self.owners:
            x.mutation_type = _of_this_scope(x.mutation_type)

    def changed(self, tx: Translator) -> dict[Location, Variable | None]:
        """List the locations that hold another variable than before."""
        found: dict[Location, Variable | None] = {}
        for cell, was in self.contents.items():
            if (now := cell.now(tx)) is not was:
                found[cell] = now
        for x in self.owners.keys() - self.cells.keys():
            before, after = self.stored[0].get(x, {}), self.tables[0].get(x, {})
            found |= {Attribute(x, name): y for name, y in after.items() if y is not before.get(name)}
        return found

    def put_back(self) -> None:
        """Undo all changes."""
        for x, contents in self.cells.items():
            x.pre_existing_contents = contents
        for table, stored in zip(self.tables, self.stored, strict=True):
            for x in self.owners:
                table.pop(x, None)
                if x in stored:
                    table[x] = copy.copy(stored[x])

    def restore(self) -> None:
        """Undo all changes, and allow no others."""
        self.put_back()
        for x, mutation in self.owners.items():
            x.mutation_type = mutation


class DictRecorder:
    """Lets the values of a dictionary's keys be changed, and puts them back."""

    def __init__(self, owner: ConstDictVariable, name: str) -> None:
        self.name = name
        self.owner, self.items, self.mutation = owner, owner.items, owner.mutation_type
        owner.items, owner.mutation_type = copy.copy(owner.items), _of_this_scope(owner.mutation_type)

    def changed(self, tx: Translator) -> dict[Location, Variable | None]:
        """List the locations that hold another variable than before.

        Raises:
            NotCaptured: The keys are not.
        """
        now = self.owner.items
        if list(now) != list(self.items):
            raise NotCaptured("dictionary-keys", f"`{self.name}` gets or loses keys in the loop")
        return {DictEntry(self.owner, key, self.name): y for key, y in now.items() if y is not self.items[key]}

    def put_back(self) -> None:
        """Undo all changes."""
        self.owner.items.clear()
        self.owner.items.update(self.items)

    def restore(self) -> None:
        """Give the dictionary its values back."""
        self.owner.items, self.owner.mutation_type = self.items, self.mutation


class ListRecorder:
    """Lets the items of a list be changed that stays as long as it is, and puts them back."""

    def __init__(self, owner: ListVariable) -> None:
        self.owner, self.items, self.mutation = owner, owner.items, owner.mutation_type
        owner.items, owner.mutation_type = list(owner.items), _of_this_scope(owner.mutation_type)

    def changed(self, tx: Translator) -> dict[Location, Variable | None]:
        """Return the items."""
        location = ListLocation(self.owner, name_of(tx, self.owner))
        return {location: location.now(tx)}

    def put_back(self) -> None:
        """Undo all changes."""
        self.owner.items[:] = self.items

    def restore(self) -> None:
        """Give the list its items back."""
        self.owner.items, self.owner.mutation_type = self.items, self.mutation


def _of_this_scope(mutation: Any) -> Any:
    """Return a mark by which Dynamo lets what was made outside of this graph be changed in it."""
    mine = copy.copy(mutation)
    mine.scope = current_scope_id()
    return mine


def containers(tx: Translator) -> list[Variable]:
    """Return the lists, deques, tuples and dictionaries that Dynamo knows and a frame's code leads to."""
    effects = tx.output.side_effects
    stack: list[Any] = [*tx.symbolic_locals.values(), *tx.stack, *effects.id_to_variable.values()]
    stack += [y for stored in effects.store_attr_mutations.values() for y in stored.values()]
    found: dict[int, Variable] = {}
    while stack:
        x: Any = stack.pop()
        if isinstance(x, LazyVariableTracker) and x.is_realized():
            x = x.realize()
        if isinstance(x, CellVariable) and x.pre_existing_contents is not None:
            stack.append(x.pre_existing_contents)
        elif type(x) in (*LISTS, TupleVariable, ConstDictVariable) and id(x) not in found:
            if isinstance(x.items, Stacked):
                continue
            found[id(x)] = x
            stack += x.items.values() if type(x) is ConstDictVariable else x.items
    return list(found.values())
