"""The words of index notation, and what each is in ATen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...ops.spec import load, operators
from ..ir.operators import SCAN

# What values may be made of; results keep PyTorch's rules of promotion, where what has no letters counts as a tensor
# without axes.
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")


@dataclass(frozen=True)
class Elementwise:
    """A function of numbers: how many it takes, and its overload in ATen."""

    arguments: int
    overload: str


_UNARY = """
    neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh
    asinh acosh atanh sigmoid relu erf erfc floor ceil round trunc isnan isinf logical_not bitwise_not
"""
_BINARY = "add sub mul div fmod remainder eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor"
_PLAIN_BINARY = "atan2 maximum minimum logical_and logical_or logical_xor clamp_min clamp_max"
_COMMUTATIVE = """
    add mul eq ne maximum minimum logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
"""

ELEMENTWISE: Mapping[str, Elementwise] = {
    **{name: Elementwise(1, "default") for name in _UNARY.split()},
    **{name: Elementwise(2, "Tensor") for name in _BINARY.split()},
    **{name: Elementwise(2, "default") for name in _PLAIN_BINARY.split()},
    "pow": Elementwise(2, "Tensor_Scalar"),
    "where": Elementwise(3, "self"),
}
# Their arguments may be exchanged.
COMMUTATIVE = frozenset(_COMMUTATIVE.split())

# Over the letters that the result lacks. `var` is the mean of squared distances from the mean.
REDUCTIONS = {"mean": "mean.dim", "max": "amax.default", "min": "amin.default", "var": "var.correction"}

# Along a letter: how many values they read. The scan is ``h[t] = a[t] h[t-1] + x[t]``, from a third value on.
FOLDS = {"cumsum": (1, 1), "cumprod": (1, 1), SCAN.name: (2, 3)}


@dataclass(frozen=True)
class Operator:
    """An operator of refold's: arguments (and whether each is optional), options, results."""

    arguments: Mapping[str, bool]
    options: tuple[str, ...]
    results: tuple[str, ...]


def _operator(name: str) -> Operator:
    spec = load(name)
    arguments = {arg.name: arg.optional for arg in spec.args if arg.name != "cu_seqlens"}
    options = tuple(option.name for option in spec.options if option.schema != "ScalarType?")
    return Operator(arguments, options, tuple(output.name for output in spec.outputs))


OPERATORS = {name: _operator(name) for name in operators() if name not in FOLDS}
