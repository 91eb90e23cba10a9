"""Dynamo's variables as capture sees them: tensors, alone or in tuples, each of a form."""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    ListVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedClassVariable,
)
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy

from ...ir.source import iterated, named, segment
from ...refusals import Refusal
from ..induction_variable import depends_on_iteration

# torch._dynamo.symbolic_convert.InstructionTranslatorBase: the interpreter of one frame.
Translator = Any
Variable = Any


class NotCaptured(Refusal):
    """A loop is not captured.

    Attributes:
        alike: How many steps from this one on are alike, if another one is what it is refused for.
    """

    alike = 1


def not_carried(names: str) -> NotCaptured:
    """Return the refusal of state that changes, and that no loop can carry."""
    return NotCaptured(
        "python-state", f"each step changes {names}, and that is neither a tensor nor an integer that counts"
    )


def realized(x: Variable) -> Variable:
    """Realize a lazy variable."""
    return x.realize() if isinstance(x, LazyVariableTracker) else x


def name_of(tx: Translator, x: Variable) -> str:
    """Give the user's name of a variable of Dynamo's: a local variable of the frame, or where it comes from."""
    local = next((name for name, y in tx.symbolic_locals.items() if y is x), None)
    return local or source_of(x) or "a list"


def source_of(x: Variable) -> str:
    """Return where a variable of Dynamo's comes from, as ``self.h``; empty if it was made in the compiled code."""
    source = getattr(getattr(x, "source", None), "name", "")
    return named(source() if callable(source) else source)


def place_of(tx: Translator, instruction: Any) -> tuple[str, str]:
    """Return the line of an instruction, as ``file:line: code``, and its expression; empty if they are not known."""
    file, at = tx.f_code.co_filename, instruction.positions
    if at is None or at.lineno is None:
        return "", ""
    code = linecache.getline(file, at.lineno).strip()
    text = iterated(file, at.lineno) if instruction.opname == "FOR_ITER" else ""
    return f"{file}:{at.lineno}: {code}".rstrip(": "), text or segment(file, at)


def while_of(tx: Translator, instruction: Any) -> str:
    """Return the line of the ``while`` that an instruction goes back to, as ``file:line: code``."""
    code, at = tx.f_code, instruction.positions
    last = tx.lineno if at is None or at.lineno is None else at.lineno
    lines = ((number, linecache.getline(code.co_filename, number).strip()) for number in range(last, 0, -1))
    found = next(((n, text) for n, text in lines if text.startswith("while") or n <= code.co_firstlineno), None)
    number, text = found if found and found[1].startswith("while") else (last, "")
    return f"{code.co_filename}:{number}: {text}".rstrip(": ")


def is_constant(x: Variable) -> bool:
    """Tell whether a variable is a Python number, a string or the like."""
    return type(x) is ConstantVariable


def tensors(x: Variable) -> list[Variable]:
    """Return the tensors that a variable consists of; none if it consists of anything but tensors and constants."""
    return [y for _, y in _leaves(x) if type(y) is TensorVariable]


def numbers(x: Variable) -> dict[str, Variable]:
    """Return the numbers, and other constants, that a nest of tensors holds as well, by where they are in it."""
    return {at: y for at, y in _leaves(x) if type(y) is not TensorVariable} if tensors(x) else {}


def _leaves(x: Variable, at: str = "") -> list[tuple[str, Variable]]:
    x = realized(x)
    if type(x) in (TensorVariable, ConstantVariable, SymNodeVariable):
        return [(at, x)]
    names = _names(x)
    places = range(len(_items(x))) if names is None else names
    form = ".{}" if names is not None and not _is_dict(x) else "[{!r}]"
    parts = [_leaves(item, at + form.format(name)) for name, item in zip(places, _items(x), strict=True)]
    return [y for part in parts for y in part] if all(parts) else []


def changeable(x: Variable) -> list[Variable]:
    """Return the lists, dictionaries and objects that a variable consists of."""
    x = realized(x)
    own = [x] if type(x) is ListVariable or _is_dict(x) or _fields(x) is not None else []
    return [*own, *(y for item in _items(x) for y in changeable(item))]


def attributes(x: Variable) -> dict[str, Variable]:
    """Read the attributes of an object that was made in the compiled code."""
    tx: Any = InstructionTranslator.current_tx()
    return tx.output.side_effects.store_attr_mutations.get(x, {})


def structure(x: Variable) -> Any:
    """Return how a variable consists of tensors: equal for equal nests."""
    x = realized(x)
    if type(x) in (ConstantVariable, SymNodeVariable):
        return ConstantVariable
    kind = _named_tuple(x) or (type(x.value) if _fields(x) else type(x))
    return kind, _names(x), [structure(item) for item in _items(x)]


def rebuilt(
    tx: Translator,
    x: Variable,
    values: Iterator[Variable],
    others: Iterator[Variable] | None = None,
    frozen: bool = False,
) -> Variable:
    """Put other tensors in place of a variable's.

    Args:
        tx: The frame.
        x: The variable.
        values: The tensors.
        others: What to put in place of its `numbers`; they stay without.
        frozen: Whether Dynamo refuses to change lists and dictionaries: another variable may stand for the same one.
    """
    x = realized(x)
    if type(x) is TensorVariable:
        return next(values)
    if type(x) in (ConstantVariable, SymNodeVariable):
        return x if others is None else next(others)
    items = [rebuilt(tx, item, values, others, frozen) for item in _items(x)]
    if type(x) is ListVariable:
        return ListVariable(items, mutation_type=None if frozen else ValueMutationNew())
    if _is_dict(x):
        entries = dict(zip(x.items, items, strict=True))
        return ConstDictVariable(entries, mutation_type=None if frozen else ValueMutationNew())
    if _fields(x) is not None:
        return UserDefinedClassVariable(type(x.value), source=x.cls_source).call_function(tx, items, {})
    kind = _named_tuple(x)
    return TupleVariable(items) if kind is None else VariableTracker.build(tx, kind).call_function(tx, items, {})


def _items(x: Variable) -> list[Variable]:
    if _is_dict(x):
        return list(x.items.values())
    if (fields := _fields(x)) is not None:
        return [attributes(x)[name] for name in fields]
    return list(x.items) if type(x) in (TupleVariable, ListVariable) or _named_tuple(x) else []


def _names(x: Variable) -> list[Any] | None:
    """Return the keys of a dictionary, or the fields of a dataclass or named tuple; None of anything else."""
    if _is_dict(x):
        return [key.vt.as_python_constant() for key in x.items]
    kind: Any = _named_tuple(x)
    return _fields(x) if kind is None else list(kind._fields)


def _is_dict(x: Variable) -> bool:
    """Tell whether a variable is a plain dictionary with constants for keys."""
    return (
        type(x) is ConstDictVariable and x.python_type() is dict and all(key.vt.is_python_constant() for key in x.items)
    )


def _fields(x: Variable) -> list[str] | None:
    """Return the fields of a dataclass that the compiled code makes of them and nothing else; None of anything else."""
    made = isinstance(getattr(x, "mutation_type", None), AttributeMutationNew)
    if not made or not dataclasses.is_dataclass(getattr(x, "value", None)):
        return None
    fields = dataclasses.fields(x.value)
    names = [field.name for field in fields]
    plain = x.value.__dataclass_params__.init and all(field.init and not field.kw_only for field in fields)
    plain = plain and not hasattr(x.value, "__post_init__")
    return names if plain and names and set(attributes(x)) == set(names) else None


def _named_tuple(x: Variable) -> type | None:
    """Return the class of a named tuple; None of anything else."""
    kind = getattr(x, "tuple_cls", None)
    return kind if kind is not None and hasattr(kind, "_fields") else None


def example(x: Variable) -> torch.Tensor:
    """Return the fake value of a tensor."""
    return x.as_proxy().node.meta["example_value"]


def form(x: torch.Tensor, name: str = "") -> tuple[Any, ...]:
    """List what a program can ask of a tensor, by its name, without reading it; no size may depend on the step."""
    shape, strides = (_fixed(sizes, name) for sizes in (x.shape, x.stride()))
    return (type(x), shape, strides, x.dtype, x.device, x.requires_grad)


def described(x: torch.Tensor) -> str:
    """Say for a person what `form` returns."""
    grad = "with" if x.requires_grad else "without"
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)} {grad} a gradient"


def _fixed(sizes: Any, name: str) -> tuple[Any, ...]:
    """Return sizes so that equal ones compare as equal: numbers, or expressions in Dynamo's symbols."""
    return tuple(size if isinstance(size, int) else _expression(size, name) for size in sizes)


def _expression(size: torch.SymInt, name: str) -> Any:
    if (known := size.node.maybe_as_int()) is not None:
        return known
    if depends_on_iteration(size):
        raise NotCaptured("carry-shape", f"a size of {f'`{name}`' if name else 'a tensor'} depends on the step")
    return size.node.expr


def fresh(tx: Translator, like: torch.Tensor, count: Any = None) -> torch.Tensor:
    """Make another fake value of the same form, or ``count`` of them in one tensor."""
    form(like)  # raises where a size depends on the step
    kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    with tx.output.fake_mode, torch.enable_grad():
        if count is None:
            made = torch.empty_strided(like.shape, like.stride(), **kind)
        else:
            made = torch.empty((count, *like.shape), **kind)
        # Neither a leaf nor a view of one: the user may change it in place.
        return made.copy_(torch.empty((), **kind, requires_grad=True)) if like.requires_grad else made


def every_fresh(tx: Translator, like: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Make ``count`` fake values of the same form: at once, which takes a tenth of the time, unless strides differ."""
    together = fresh(tx, like, count)
    with tx.output.fake_mode, torch.enable_grad():
        made: list[Any] = list(torch.ops.aten.unbind_copy.int(together))  # no views
    if made and form(made[0]) == form(like):
        return made
    return [fresh(tx, like) for _ in range(count)]


def placeholder(tx: Translator, tracer: Any, name: str, like: torch.Tensor) -> Variable:
    """Add an argument to the graph under construction."""
    return wrap_fx_proxy(tx, tracer.create_graph_input(name, torch.Tensor, like), example_value=like)
