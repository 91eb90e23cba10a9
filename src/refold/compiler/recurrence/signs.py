"""What can be said of the sign of a value from how it is computed: step sizes and decays are softplus, exp, sigmoid.

A sign is that of all elements of a value of any shape. Source: the rule of signs, as an abstract interpretation (Cousot
& Cousot 1977).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from ..ir.fx import arg
from ..ir.views import is_view
from .segment_sums import constant_value

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass(frozen=True)
class Sign:
    """Whether a value is nowhere negative, and whether it is nowhere positive; NaN counts as neither."""

    nonnegative: bool = False
    nonpositive: bool = False

    def __neg__(self) -> Sign:
        return Sign(self.nonpositive, self.nonnegative)

    def __add__(self, other: Sign) -> Sign:
        return Sign(self.nonnegative and other.nonnegative, self.nonpositive and other.nonpositive)

    def __mul__(self, other: Sign) -> Sign:
        alike = (self.nonnegative and other.nonnegative) or (self.nonpositive and other.nonpositive)
        unlike = (self.nonnegative and other.nonpositive) or (self.nonpositive and other.nonnegative)
        return Sign(alike, unlike)


POSITIVE, NEGATIVE = Sign(nonnegative=True), Sign(nonpositive=True)
UNKNOWN = Sign()

_POSITIVE = (
    aten.exp.default, aten.exp2.default, aten.sigmoid.default, aten.relu.default, aten.abs.default, aten.sqrt.default,
    aten.rsqrt.default, aten.softplus.default,
)  # fmt: skip
_COPIES = (
    aten.alias.default, aten.clone.default, aten.expand.default, aten.cumsum.default, aten.constant_pad_nd.default,
    aten._to_copy.default, prims.convert_element_type.default,
)  # fmt: skip


def sign(x: Any) -> Sign:
    """Return the sign of a node's value, or of a number."""
    if not isinstance(x, Node):
        return Sign(x >= 0, x <= 0) if isinstance(x, (int, float)) else UNKNOWN
    found = _by_rule(x) if x.op == "call_function" else UNKNOWN
    if found == UNKNOWN and (constant := constant_value(x)) is not None:
        return Sign(bool((constant >= 0).all()), bool((constant <= 0).all()))
    return found


def _by_rule(x: Node) -> Sign:
    """Return what the operation of a node says of its sign."""
    if x.target in _POSITIVE:
        return POSITIVE
    if x.target is aten.constant_pad_nd.default and any(x.args[2:]):
        return UNKNOWN
    if is_view(x) or x.target in _COPIES:
        return sign(arg(x, 0))
    rule = _RULES.get(x.target)
    return UNKNOWN if rule is None else rule(x)


def _parts(x: Node) -> list[Sign]:
    return [sign(part) for part in x.args]


def _clamp(x: Node) -> Sign:
    inner, low, high = sign(arg(x, 0)), arg(x, 1, "min"), arg(x, 2, "max")
    low = high if low is not None and high is not None and low > high else low
    above = (low is not None and low >= 0) or (inner.nonnegative and (high is None or high >= 0))
    below = (high is not None and high <= 0) or (inner.nonpositive and (low is None or low <= 0))
    return Sign(above, below)


def _where(x: Node) -> Sign:
    condition, kept, other = x.args
    return (POSITIVE if _exceeds_zero(condition, kept) else sign(kept)) + sign(other)


def _exceeds_zero(condition: Any, x: Any) -> bool:
    """Tell whether a condition says of a value that it is positive: ``x > 20``, as in a softplus."""
    if not isinstance(condition, Node) or condition.target is not aten.gt.Scalar or arg(condition, 1) < 0:
        return False
    compared: Any = condition.args[0]
    if compared is x:
        return True
    scaled = compared.target is aten.mul.Tensor and compared.args[0] is x
    return scaled and sign(compared.args[1]) == POSITIVE


def _log(x: Node) -> Sign:
    inner = arg(x, 0)
    while inner.target is aten.clamp_min.default and inner.args[1] <= 1:
        inner = inner.args[0]
    return NEGATIVE if inner.target is aten.sigmoid.default else UNKNOWN  # the logarithm of what is at most one


def _product(x: Node) -> Sign:
    return reduce(lambda a, b: a * b, _parts(x)) if not x.kwargs else UNKNOWN


def _sum(x: Node) -> Sign:
    return reduce(lambda a, b: a + b, _parts(x)) if not x.kwargs else UNKNOWN


def _power(x: Node) -> Sign:
    return POSITIVE if sign(arg(x, 0)).nonnegative else UNKNOWN


def _minimum(x: Node) -> Sign:
    a, b = _parts(x)
    return Sign(a.nonnegative and b.nonnegative, a.nonpositive or b.nonpositive)


_RULES: dict[Any, Callable[[Node], Sign]] = {
    aten.neg.default: lambda x: -sign(arg(x, 0)),
    aten.mul.Tensor: _product,
    aten.div.Tensor: _product,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: lambda x: sign(x.args[0]) + -sign(x.args[1]) if not x.kwargs else UNKNOWN,
    aten.minimum.default: _minimum,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda x: sign(x.args[0]) + sign(x.args[1]) if sign(x.args[1]).nonnegative else NEGATIVE,
    aten.where.self: _where,
    aten.log.default: _log,
    aten.log1p.default: _power,
    aten.pow.Tensor_Scalar: _power,
}
