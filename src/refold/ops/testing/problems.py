"""Test problems: the arrays of an `Example` in float64, holding only values that the tested dtype can represent.

So the reference and the implementation see the same numbers, and differ only by rounding inside the implementation.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np

from refold.ops.spec import CU_SEQLENS, Arg, ArrayMeta, Example, Meta, OpSpec, shape_of

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Problem:
    """One call: a spec, its case, the inputs, and the dtype of the activations."""

    spec: OpSpec
    case: Example
    dtype: str
    arrays: dict[str, np.ndarray]
    options: dict[str, Any] = field(default_factory=dict)

    def with_arrays(self, **changed: np.ndarray | None) -> Problem:
        """Return the problem with some arrays replaced, or removed where None."""
        arrays = {k: v for k, v in {**self.arrays, **changed}.items() if v is not None}
        return replace(self, arrays=arrays)

    def dtype_of(self, name: str) -> str:
        """Return the dtype name that an argument is passed in."""
        arg = next(a for a in self.spec.args if a.name == name)
        if not arg.differentiable:
            return arg.dtypes[0]
        return "float32" if arg.wide and self.half else self.dtype

    @property
    def half(self) -> bool:
        """Whether activations have 16 bits."""
        return self.dtype in ("float16", "bfloat16")

    def meta(self) -> Meta:
        """Let the spec read the call."""
        metas = {name: ArrayMeta(a.shape, self.dtype_of(name), "cpu") for name, a in self.arrays.items()}
        return self.spec.validate(Meta(self.spec.name, "numpy", metas, self.all_options()))

    def mixes(self) -> bool:
        """Whether tokens mix the elements of the state, so that what they write is a solution of equations."""
        return self.spec.carry is not None and self.spec.carry(self.meta()).kind == "matrix"

    def time_axis(self, name: str) -> int | None:
        """Return the axis of an argument that runs over tokens."""
        arg = next(a for a in self.spec.args if a.name == name)
        letters = _layout(arg, self.case).split()
        return letters.index("t") if "t" in letters and "t" in self.case.sizes else None

    def slice_time(self, low: int, high: int) -> Problem:
        """Return the problem of some of the tokens; states are left to the caller."""
        changed = {
            name: array.take(range(low, high), axis)
            for name, array in self.arrays.items()
            if (axis := self.time_axis(name)) is not None
        }
        return self.with_arrays(**changed)

    def reference(self) -> tuple[np.ndarray, ...]:
        """Return the results of the definition."""
        return self.defined(self.arrays)

    def defined(self, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the results of the definition on these arrays, or tensors."""
        function = getattr(import_module(f"{self.spec.module}.reference"), self.spec.name)
        absent = {arg.name: None for arg in self.spec.args if arg.name not in arrays}
        results = function(**arrays, **absent, **self.all_options())
        return results if isinstance(results, tuple) else (results,)

    def results(self) -> dict[str, np.ndarray]:
        """Return them by their names."""
        return dict(zip((out.name for out in self.spec.outputs), self.reference(), strict=True))

    def all_options(self) -> dict[str, Any]:
        """Return every option, defaults included."""
        return {option.name: self.options.get(option.name, option.default) for option in self.spec.options}

    def growth(self) -> float:
        """Return how rounding errors add up: the root of the number of terms of one result or gradient."""
        sizes = [s if isinstance(s, int) else math.prod(s) for s in self.case.sizes.values()]
        return math.sqrt(math.prod(sizes))

    def tolerance(self) -> float:
        """Return the error allowed relative to the largest value: a rounding of operands, then float32 sums."""
        accumulation = EPS["float64" if self.dtype == "float64" else "float32"]
        return EPS[self.dtype] + 4.0 * accumulation * self.growth()


def problem(spec: OpSpec, case: Example, dtype: str = "float32") -> Problem:
    """Return the inputs of a case; the same ones every time."""
    rng = np.random.default_rng(zlib.crc32(f"{spec.name}-{case.name}".encode()))
    sizes = dict(case.sizes)
    sizes["k"] = len(case.lengths) if case.lengths else sizes.get("b", 1)
    built = Problem(spec, case, dtype, {}, dict(case.options))
    for arg in spec.args:
        if arg.name == CU_SEQLENS:
            if case.lengths:
                built.arrays[arg.name] = np.cumsum([0, *case.lengths]).astype(np.int32)
            continue
        if arg.optional and arg.name not in case.given:
            continue
        values = arg.sample(rng, shape_of(_layout(arg, case), sizes))
        built.arrays[arg.name] = round_to(values, built.dtype_of(arg.name)) if arg.differentiable else values
    return built


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float64 values rounded to what a dtype holds."""
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32)
        return rounded.view(np.float32).astype(np.float64).reshape(values.shape)
    return values.astype(dtype).astype(np.float64)


def _layout(arg: Arg, case: Example) -> str:
    return arg.axes[case.layout.get(arg.name, 0)]
