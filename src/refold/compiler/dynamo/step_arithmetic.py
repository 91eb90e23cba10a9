"""What a step computes from its number, for all steps at once: ``0.9 ** (T - t)``, ``t * dt``, ``t < lengths``.

Python computes it step by step in integers of any size and in float64. Here it is a tensor over time, int64 or float64.
In an operation it behaves as a Python number does: it does not change the dtype of a tensor of the same kind.

Shapes. A number of the step becomes (t,), and is padded to (t, 1, ..., 1) where it meets a value (t, ...).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import is_tensor, value
from ..ir.source import expression
from ..recurrence.vectorize import NotALoop, Value
from .induction_variable import depends_on_iteration

aten = torch.ops.aten

_ORDERS = ("eq", "ne", "lt", "le", "gt", "ge")
_FUNCTIONS = ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan")
# What Python does with numbers, and PyTorch with tensors of them: the same, or to the last bit but one (powers).
_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.floordiv: aten.floor_divide.default,
    operator.mod: aten.remainder.Tensor,
    operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default,
    torch.sym_float: aten.alias.default,
    torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
    **{getattr(operator, name): getattr(aten, name).Tensor for name in _ORDERS},
    **{getattr(torch, f"_sym_{name}"): getattr(aten, name).default for name in _FUNCTIONS},
}
_COMPARISONS = {getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in _ORDERS}
# The type of a Python number, and the dtype in which a tensor of them holds what Python does.
_KINDS = {
    torch.SymInt: (int, torch.int64),
    torch.SymFloat: (float, torch.float64),
    torch.SymBool: (bool, torch.bool),
}
# Operations of a tensor and a number, and the same of two tensors.
OF_TENSORS = {
    **{op: op for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)},
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    **_COMPARISONS,
}


def is_number(x: Any) -> bool:
    """Tell whether a node is a number that a step computes."""
    val = x.meta.get("val") if isinstance(x, Node) else None
    return isinstance(val, tuple(_KINDS)) and (not isinstance(val, torch.SymInt) or depends_on_iteration(val))


class Counting:
    """Emits numbers over time."""

    def __init__(self, emit: Builder, step: Node, count: int) -> None:
        self.emit, self.step, self.count = emit, step, count

    def values(self, x: Any) -> Sequence[Any]:
        """Return the numbers of all steps, as Python computes them."""
        if not isinstance(x, Node):
            return [x] * self.count
        if not isinstance(self.count, int):
            raise NotALoop(
                "number-arithmetic", f"`{expression(x)}`, a number, is not known for all lengths of the loop", x
            )
        if x is self.step:
            return range(self.count)
        if x.target not in _ARITHMETIC:
            name = getattr(x.target, "__name__", x.target)
            raise NotALoop("number-arithmetic", f"a step computes `{expression(x)}`, {name} of its number", x)
        target: Any = x.target
        try:
            found: list[Any] = [target(*each) for each in zip(*map(self.values, x.args), strict=True)]
        except ArithmeticError as error:
            raise NotALoop("number-arithmetic", f"`{expression(x)}` fails at a step: {error}", x) from error
        kind: Any = _KINDS[type(x.meta["val"])][0]
        if any(type(y) is not kind or not math.isfinite(y) or (kind is int and abs(y) >= 2**53) for y in found):
            raise NotALoop(
                "number-arithmetic", f"`{expression(x)}` is too large at a step, or not always of one kind", x
            )
        return found

    def over_time(self, x: Any, dtype: torch.dtype, device: torch.device) -> Value:
        """Return a number as a tensor over time of that dtype, rounded once."""
        self.values(x)
        return Value(self.emit.cast(self._tensor(x, device), dtype), True)

    def _tensor(self, x: Any, device: torch.device) -> Node:
        emit = self.emit
        if not isinstance(x, Node):
            exact = dict(_KINDS.values())[type(x)]
            return emit.call(aten.full.default, [self.count], x, dtype=exact, device=device)
        if x is self.step:
            return emit.call(aten.arange.default, self.count, dtype=torch.int64, device=device)
        parts = [self._tensor(y, device) for y in x.args]
        if isinstance(x.meta["val"], torch.SymFloat):
            parts = [emit.cast(y, torch.float64) for y in parts]
        return emit.call(_ARITHMETIC[x.target], *parts)

    def combined(self, node: Any, operands: Sequence[Any]) -> list[Value]:
        """Return the operands of an operation of a tensor and a number, the number as a tensor.

        Args:
            node: The operation at one of the steps.
            operands: Its arguments over all steps; for the number, its node.
        """
        (like,) = (x for x in node.args if is_tensor(x))
        (number,) = (x for x in node.args if is_number(x))
        kind, _ = _KINDS[type(number.meta["val"])]
        dtype = torch.result_type(value(like), kind(1))
        if dtype in (torch.float16, torch.bfloat16):
            if node.target in _COMPARISONS:
                raise NotALoop(
                    "number-arithmetic", f"`{expression(node)}` compares numbers of low precision with the step's", node
                )
            dtype = torch.float32  # in which PyTorch computes, too: only the result is rounded
        if node.target in (aten.pow.Tensor_Scalar, aten.pow.Scalar) and not dtype.is_floating_point:
            raise NotALoop("number-arithmetic", f"`{expression(node)}` takes powers of integers", node)
        device = value(node).device
        return [self.over_time(x, dtype, device) if is_number(x) else self._cast(x, dtype) for x in operands]

    def _cast(self, x: Any, dtype: torch.dtype) -> Any:
        return Value(self.emit.cast(x.node, dtype), x.has_time) if isinstance(x, Value) else x
