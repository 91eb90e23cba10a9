"""Generators that are read to their end into a list: ``tuple(f(x) for x in xs)``, ``ys.extend(states(xs))``.

A ``yield`` is then an append to that list. While Dynamo collects a generator's items, the generator's frame knows the
list, and its loops are lifted like loops that append.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._dynamo import utils
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.variables import ConstantVariable, ListVariable
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable

from .variables import Translator, Variable


def yielded(frame: Translator) -> ListVariable | None:
    """Return the list of what a generator's frame yields, into which it is read."""
    return vars(frame).get("refold_yielded")


def step_over_yield(frame: Translator, instruction: Instruction) -> bool:
    """Do what a ``yield`` does, if that comes next in a frame that is read into a list; else return False."""
    items = yielded(frame)
    if items is None or instruction.opname != "YIELD_VALUE":
        return False
    items.items.append(frame.pop())
    frame.push(ConstantVariable.create(None))
    frame.instruction_pointer += 1
    return True


@contextlib.contextmanager
def _collected(tx: Translator, generator: Variable, items: ListVariable) -> Iterator[None]:
    """Let a generator put the items of its loops that are lifted into a list, into which its others go one by one."""
    frame: Any = getattr(generator, "inline_tracer", None)
    if not isinstance(generator, LocalGeneratorObjectVariable) or frame is None:
        yield
        return
    outer, frame.refold_yielded = yielded(frame), items
    try:
        yield
    finally:
        frame.refold_yielded = outer


def install() -> None:
    """Make Dynamo say where the items of a generator go that is read to its end."""
    call_method: Any = ListVariable.call_method

    def call(self: Any, tx: Translator, name: str, args: Any, kwargs: Any) -> Any:
        with _collected(tx, args[0], self) if name == "extend" and len(args) == 1 else contextlib.nullcontext():
            return call_method(self, tx, name, args, kwargs)

    ListVariable.call_method = call  # type: ignore[method-assign]
    if hasattr(utils, "unpack_and_apply_fn"):
        apply = utils.unpack_and_apply_fn

        def unpack(tx: Translator, iterable: Variable, fn: Any) -> None:
            # Only a list of Dynamo's own is not looked at before it is full.
            if type(getattr(fn, "__self__", None)) is not list:
                return apply(tx, iterable, fn)
            found = ListVariable([], mutation_type=ValueMutationNew())
            with _collected(tx, iterable, found):
                apply(tx, iterable, found.items.append)
            fn.__self__.extend(found.items)

        utils.unpack_and_apply_fn = unpack  # type: ignore[assignment]
    else:  # torch <= 2.11

        def force_unpack(self: Any, tx: Translator) -> list[Variable]:
            found = ListVariable([], mutation_type=ValueMutationNew())
            with _collected(tx, self, found):
                self.force_apply_to_var_sequence(tx, found.items.append)
            return found.items

        LocalGeneratorObjectVariable.force_unpack_var_sequence = force_unpack  # type: ignore[attr-defined]
