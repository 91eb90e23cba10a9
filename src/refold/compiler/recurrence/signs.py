"""What can be said of the sign of a value from how it is computed: step sizes and decays are softplus, exp, sigmoid.

A sign is that of all elements of a value of any shape. Source: the rule of signs, as an abstract interpretation (Cousot
& Cousot 1977). And whether its derivative fades with it, as theirs does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from ..ir.fx import CASTS, arg, power, value
from ..ir.moves import Cat, Copy, Expand, Flip, Moved, Pad, Permute, Rules, Slice, View, Write, read
from ..ir.views import is_view
from .segment_sums import constant_value

aten = torch.ops.aten


@dataclass(frozen=True)
class Sign:
    """Whether a value is never negative, and whether it is never positive; NaN counts as neither."""

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
_FADING = aten.sigmoid.default, aten.softplus.default, aten.log_sigmoid_forward.default
_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)


def sign(x: Any) -> Sign:
    """Return the sign of a node's value, or of a number."""
    if not isinstance(x, Node):
        return Sign(x >= 0, x <= 0) if isinstance(x, (int, float)) else UNKNOWN
    found = _by_rule(x) if x.op == "call_function" else UNKNOWN
    if found == UNKNOWN and (constant := constant_value(x)) is not None:
        return Sign(bool((constant >= 0).all()), bool((constant <= 0).all()))
    return found


def fades(x: Any) -> bool:
    """Tell whether the derivative of a value is no larger than a multiple of it where the value is small.

    So it is of ``exp``, of a sigmoid, of a softplus, and of products of these. Who divides by such a value loses digits
    of its gradient that do not count; of another value they do.
    """
    if not isinstance(x, Node):
        return True
    if x.op != "call_function":
        return False
    parts = [part for part in x.args if isinstance(part, Node)]
    if x.target in _FADING or power(x) or _is_log_sigmoid(x):
        return True
    if x.target in _CLAMPS:  # where it is clamped, the derivative is zero
        return len(parts) == 1 and fades(parts[0])
    if is_view(x) or x.target in (*CASTS, aten.neg.default, aten.log1p.default, aten.mul.Tensor):
        return bool(parts) and all(fades(part) or constant_value(part) is not None for part in parts)
    if x.target is aten.div.Tensor:
        return fades(x.args[0]) and (not isinstance(x.args[1], Node) or constant_value(x.args[1]) is not None)
    if x.target is aten.add.Tensor:
        return sign(x) in (POSITIVE, NEGATIVE) and all(map(fades, x.args))
    if x.target is aten.where.self:  # a softplus: ``where(x > 20, x, log1p(exp(x)))``
        condition, kept, other = x.args
        return (_exceeds_zero(condition, kept) or fades(kept)) and fades(other)
    return x.target is aten.log.default and _log(x) == NEGATIVE


def _is_log_sigmoid(x: Node) -> bool:
    """Tell whether a value is ``min(0, x) - log1p(exp(-|x|))``."""
    if x.target is not aten.sub.Tensor or not all(isinstance(part, Node) for part in x.args):
        return False
    least, rest = x.args
    if least.target is not aten.minimum.default or rest.target is not aten.log1p.default:  # type: ignore[union-attr]
        return False
    inner: Any = rest.args[0]  # type: ignore[union-attr]
    negative = inner.target is aten.exp.default and inner.args[0].target is aten.neg.default and inner.args[0].args[0]
    magnitude = negative and negative.target is aten.abs.default and negative.args[0]
    return bool(magnitude) and magnitude in least.args  # type: ignore[union-attr]


def _by_rule(x: Node) -> Sign:
    """Tell a node's sign by its operation."""
    if x.target in _POSITIVE:
        return POSITIVE
    if (moved := read(x)) is not None:
        return SIGNS.apply(None, moved, sign)
    rule = _RULES.get(x.target)
    return UNKNOWN if rule is None else rule(x)


SIGNS: Rules[None, Sign] = Rules()


@SIGNS.on(Copy, View, Permute, Expand, Slice, Flip, Cat, Write)
def _moved(_: None, x: Moved, *signs: Sign) -> Sign:
    return reduce(lambda a, b: a + b, signs)


@SIGNS.on(Pad)
def _padded(_: None, x: Pad, inner: Sign) -> Sign:
    return inner + sign(x.value)


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
    **dict.fromkeys(CASTS, lambda x: POSITIVE if value(arg(x, 0)).dtype == torch.bool else sign(arg(x, 0))),
    aten.cumsum.default: lambda x: sign(arg(x, 0)),
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
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.pow.Tensor_Tensor), _power),
}
