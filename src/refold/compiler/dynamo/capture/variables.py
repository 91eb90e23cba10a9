"""Dynamo's variables as capture sees them: tensors, alone or in tuples, each of a form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable, TupleVariable
from torch._dynamo.variables.builder import wrap_fx_proxy

from ...refusals import Refusal
from ..induction_variable import depends_on_iteration

# torch._dynamo.symbolic_convert.InstructionTranslatorBase: the interpreter of one frame.
Translator = Any
Variable = Any


class Refused(Refusal):
    """A loop is not captured."""


def realized(x: Variable) -> Variable:
    """Return what a lazy variable stands for."""
    return x.realize() if isinstance(x, LazyVariableTracker) else x


def is_constant(x: Variable) -> bool:
    """Tell whether a variable is a Python number, a string or the like."""
    return type(x) is ConstantVariable


def tensors(x: Variable) -> list[Variable]:
    """Return the tensors that a variable consists of; none if it consists of anything else."""
    x = realized(x)
    if type(x) is TensorVariable:
        return [x]
    if type(x) is TupleVariable:
        parts = [tensors(item) for item in x.items]
        return [y for part in parts for y in part] if all(parts) else []
    return []


def rebuilt(x: Variable, values: Iterator[Variable]) -> Variable:
    """Put other tensors in place of a variable's."""
    x = realized(x)
    return TupleVariable([rebuilt(item, values) for item in x.items]) if type(x) is TupleVariable else next(values)


def example(x: Variable) -> torch.Tensor:
    """Return the fake value of a tensor."""
    return x.as_proxy().node.meta["example_value"]


def form(x: torch.Tensor) -> tuple[Any, ...]:
    """Return what a program can ask of a tensor without reading it; sizes must not depend on the step."""
    return (type(x), _fixed(x.shape), _fixed(x.stride()), x.dtype, x.device, x.requires_grad)


def _fixed(sizes: Any) -> tuple[Any, ...]:
    """Return sizes so that equal ones compare as equal: numbers, or expressions in Dynamo's symbols."""
    return tuple(size if isinstance(size, int) else _expression(size) for size in sizes)


def _expression(size: torch.SymInt) -> Any:
    if (known := size.node.maybe_as_int()) is not None:
        return known
    if depends_on_iteration(size):
        raise Refused("carry-shape", "a size depends on the step")
    return size.node.expr


def fresh(tx: Translator, like: torch.Tensor, count: Any = None) -> torch.Tensor:
    """Make another fake value of the same form, or ``count`` of them in one tensor."""
    form(like)  # raises where a size depends on the step
    kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "requires_grad": like.requires_grad}
    with tx.output.fake_mode, torch.enable_grad():
        if count is None:
            made = torch.empty_strided(like.shape, like.stride(), **kind)
        else:
            made = torch.empty((count, *like.shape), **kind)
        return made.view_as(made) if like.requires_grad else made


def placeholder(tx: Translator, tracer: Any, name: str, like: torch.Tensor) -> Variable:
    """Add an argument to the graph under construction."""
    return wrap_fx_proxy(tx, tracer.create_graph_input(name, torch.Tensor, like), example_value=like)
