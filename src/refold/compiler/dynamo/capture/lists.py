"""Lists that steps make longer, and lists that they read at a position that moves.

While a body is traced, stand-ins take the place of lists' items. `GrowingList` is for every list that the body could
append to. It takes new items at either end, and gives back those, and as many of the items before as are assumed to be
known (`capture.locations.ListEnd`): ``ys[-1]`` is the carry of a loop that keeps it in a list. It takes one item for a
position that moves (``ys[t] = h``), if no step reads the list. Everything else that looks at the items refuses.
`SequenceView` is for lists of slices that stay as they are: ``xs[t]`` is then what a loop over ``xs`` would get.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.variables import ConstantVariable, ListVariable, SymNodeVariable, TupleVariable
from torch._dynamo.variables.base import ValueMutationNew

from ..induction_variable import InductionVariable
from .iterators import Items, sequence
from .variables import NotCaptured, Translator, Variable, realized


class GrowingList:
    """Stands in for a list's items: takes new ones, and knows what was asked of the old ones."""

    def __init__(self, owner: ListVariable, number: InductionVariable, name: str) -> None:
        self.name = name
        self.owner, self.items, self.mutation, self.number = owner, owner.items, owner.mutation_type, number
        # New items at the front and the back, in the list's order, and the items that were there next to them.
        self.front: list[Variable] = []
        self.back: list[Variable] = []
        self.first: list[Variable] = []
        self.last: list[Variable] = []
        self.read = False
        # What is put at a position that moves: how far each step, the first position, and the item.
        self.stored: tuple[int, int, Variable] | None = None
        # How many of the first and last items the body asked for, and by how many items it took the list to grow.
        self.wants = (0, 0)
        self.rates: set[int] = set()
        owner.items, owner.mutation_type = self, ValueMutationNew()  # type: ignore[assignment]
        owner.call_method = self._call_method  # type: ignore[method-assign]
        owner.as_python_constant = self._as_python_constant  # type: ignore[method-assign]
        owner.tp_iter_impl = self._refuse  # type: ignore[assignment]
        owner.mp_ass_subscript_impl = self._assign  # type: ignore[method-assign]
        owner.sq_inplace_concat_impl = self._concatenate  # type: ignore[assignment]
        owner.getitem_const = partial(_read, owner)  # type: ignore[method-assign]

    def restore(self) -> None:
        """Give the list its items back."""
        self.owner.items, self.owner.mutation_type = self.items, self.mutation
        del self.owner.call_method, self.owner.as_python_constant, self.owner.tp_iter_impl
        del self.owner.mp_ass_subscript_impl, self.owner.sq_inplace_concat_impl, self.owner.getitem_const

    @property
    def grown(self) -> bool:
        """Whether there are new items."""
        return bool(self.taken)

    @property
    def taken(self) -> list[Variable]:
        """What one step puts into the list: at its front, at its back, and at a position that moves."""
        return [*self.front, *self.back, *([] if self.stored is None else [self.stored[2]])]

    def check(self) -> None:
        """Raise if a position that depends on the step was read as another than it is at later steps."""
        if self.stored is not None and (self.read or self.front or self.back):
            raise NotCaptured("list-read", f"the loop reads `{self.name}`, of which each step writes another item")
        if self.rates and (self.front or self.rates != {len(self.back)}):
            raise NotCaptured("list-read", f"`{self.name}` is read at a position that does not move as the list grows")

    def append(self, item: Variable) -> None:
        """Take a new last item."""
        self.back.append(item)

    def extend(self, items: Any) -> None:
        """Take new last items."""
        self.back.extend(items)

    def insert(self, at: Any, item: Variable) -> None:
        """Take a new first item."""
        if type(at) is not int or at != 0:
            self._refuse()
        self.front.insert(0, item)

    def __getitem__(self, at: Any) -> Variable:
        self.read = True
        if isinstance(at, torch.SymInt):
            at = self._from_the_end(at)
        if type(at) is not int:
            self._refuse()
        known = self.front + self.first if at >= 0 else self.last + self.back
        wanted = at + 1 if at >= 0 else -at
        if wanted <= len(known):
            return known[at]
        self.wants = (wanted - len(self.front), 0) if at >= 0 else (0, wanted - len(self.back))
        if max(self.wants) > len(self.items):
            raise NotCaptured("list-read", f"the loop reads `{self.name}` where its first step finds nothing")
        raise NotCaptured("list-read", f"the loop reads `{self.name}`, which it makes longer")

    def _from_the_end(self, at: torch.SymInt) -> int:
        """Return a position that moves with the step as one from the end, which moves as well."""
        found = self.number.affine(at)
        if found is None:
            return self._refuse()
        if found[0] == 0:
            return found[1]
        self.rates.add(found[0])
        location = found[1] - len(self.items) - len(self.back)
        return location if location < 0 else self._refuse()

    def _call_method(self, tx: Translator, name: str, args: Any, kwargs: Any) -> Any:
        # Dynamo asks for the length when it extends.
        if name == "extend" and len(args) == 1 and type(args[0]) in (ListVariable, TupleVariable):
            self.extend(args[0].items)
            return ConstantVariable.create(None)
        if name == "__setitem__":  # so it is done up to torch 2.11
            return self._assign(tx, *args)
        if name == "__iter__":  # torch <= 2.11 goes through a list this way
            self._refuse()
        return type(self.owner).call_method(self.owner, tx, name, args, kwargs)

    def _assign(self, tx: Translator, key: Any, value: Any) -> Any:
        key = realized(key)
        if not isinstance(key, SymNodeVariable):
            return type(self.owner).call_method(self.owner, tx, "__setitem__", [key, value], {})
        found = self.number.affine(key.sym_num)
        if found is None or not found[0] or type(found[1]) is not int or self.stored is not None or value is None:
            return self._refuse()
        _within(key.sym_num, found[1], len(self.items))
        self.stored = *found, value
        return ConstantVariable.create(None)

    def _concatenate(self, tx: Translator, items: Variable) -> Any:
        self._call_method(tx, "extend", [items], {})
        return self.owner

    def _as_python_constant(self) -> Any:
        # Dynamo asks of its own accord, for one, when it makes a function of a closure.
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    def _refuse(self, *args: Any) -> Any:
        self.read = True
        raise NotCaptured("list-read", f"the loop reads `{self.name}`, which it makes longer")

    __len__ = __iter__ = __contains__ = __add__ = __reversed__ = _refuse


class SequenceView(list[Any]):
    """Stands in for items that do not change: one at a position that moves with the step is an argument of the body."""

    def __init__(self, owner: Variable, number: InductionVariable, take: Callable[[Items], Variable]) -> None:
        super().__init__(owner.items)
        self.owner, self.items, self.number, self.take = owner, owner.items, number, take
        owner.items = self
        owner.getitem_const = partial(_read, owner)

    def restore(self) -> None:
        """Give the list its items back."""
        self.owner.items = self.items
        del self.owner.getitem_const

    def __getitem__(self, at: Any) -> Any:
        found = self.number.affine(at) if isinstance(at, torch.SymInt) else None
        if found is None or not found[0] or not -len(self) <= found[1] < len(self):
            return super().__getitem__(at)
        every, first = found
        low, high = _within(at, first, len(self))
        picked = [self.items[k] for k in range(first, high if every > 0 else low - 1, every)]
        element = sequence(picked) if len(picked) > 1 else None
        return self.take(element) if isinstance(element, Items) else super().__getitem__(at)


def _read(owner: Variable, tx: Translator, key: Variable) -> Any:
    """Read an item; a position that moves stays one, which Dynamo since torch 2.15 makes a number first."""
    key = realized(key)
    if not isinstance(key, SymNodeVariable):
        return type(owner).getitem_const(owner, tx, key)
    try:
        return owner.items[key.sym_num]
    except IndexError:
        raise_observed_exception(IndexError, tx, args=["list index out of range"])


def _within(at: torch.SymInt, first: int, length: int) -> tuple[int, int]:
    """Decide that a position that moves stays in a list, on the side of 0 where it is first; return that range."""
    low, high = (0, length) if first >= 0 else (-length, 0)
    if not (bool(at >= low) and bool(at < high)):
        raise IndexError
    return low, high
