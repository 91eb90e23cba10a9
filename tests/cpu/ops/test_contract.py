"""Every operator, every backend, every case of the spec: the contract."""

import os
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest

from refold.ops.backends import absence
from refold.ops.spec import Example, OpSpec, all_specs, load
from refold.ops.testing import CHECKS, check, problem
from support.products import covering

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("torch", "numba", "jax", *(["triton"] if INTERPRETED else []))

CORE = ("values", "gradients", "no_worse_than_torch")
SLOW = ("jax", "triton")
"""They compile for, or interpret, each new shape: in half precision and for what is not `CORE`, some of the cases."""


def facts(spec: OpSpec, case: Example, backend: str) -> Iterator[tuple[Any, ...]]:
    """Yield the ways in which a case can be different. Arrays of JAX have no strides."""
    yield from (("given", arg.name, arg.name in case.given) for arg in spec.args if arg.optional)
    yield from (("option", option.name, str(case.options.get(option.name, option.default))) for option in spec.options)
    yield from (("layout", *changed) for changed in case.layout.items())
    yield from (("one", letter, size == 1) for letter, size in case.sizes.items())
    yield "doublings of tokens", 0 if case.lengths else case.sizes.get("t", 0).bit_length()
    yield "strided", case.strided and backend != "jax"
    yield "lengths", bool(case.lengths), 0 in case.lengths


@cache
def chosen(name: str, backend: str) -> list[int]:
    """Choose cases that show all that cases of an operator can show; their numbers."""
    spec = load(name)
    return covering(spec.cases(), lambda case: facts(spec, case, backend))


def shows(spec: OpSpec, case: Example, backend: str) -> bool:
    """Say whether a case is among those."""
    return spec.cases().index(case) in chosen(spec.name, backend)


def cells(every: int = 1, *always: str) -> Iterator[Any]:
    """Yield spec, backend and case. Without exhaustive tests, those run that show all facts.

    Of slow backends, without exhaustive tests the complete case and those of ``always`` run. Of Triton, which is
    interpreted, test_triton_interpreted.py chooses.

    Args:
        every: Of slow backends, one case out of so many, and those that always run.
        always: Names of cases.
    """
    for spec in all_specs():
        for backend in BACKENDS:
            reason = absence(spec, backend)
            if reason is not None:
                missing = pytest.mark.skip(reason=reason)
                yield pytest.param(spec, backend, None, marks=missing, id=f"{spec.name}-{backend}")
                continue
            for i, case in enumerate(spec.cases()):
                slow, named = backend in SLOW, case.name in (spec.complete, *always)
                if slow and i % every and not named:
                    continue
                kept = backend == "triton" or (named if slow else shows(spec, case, backend))
                marks = [] if kept else [pytest.mark.exhaustive]
                yield pytest.param(spec, backend, case, marks=marks, id=f"{spec.name}-{backend}-{case.name}")


@pytest.mark.parametrize(("spec", "backend", "case"), list(cells(1, "packed_empty")))
def test_float32(spec: OpSpec, backend: str, case: Example) -> None:
    given = problem(spec, case)
    for name in CHECKS if backend not in SLOW and shows(spec, case, backend) else CORE:
        check(name, given, backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("spec", "backend", "case"),
    [c for c in cells() if c.marks and c.values[1] not in SLOW and c.values[2]],
)
def test_properties_of_all_cases(spec: OpSpec, backend: str, case: Example) -> None:
    for name in CHECKS:
        if name not in CORE:
            check(name, problem(spec, case), backend)


def properties() -> Iterator[Any]:
    """Yield cells of slow backends and checks. A pack is always among the cases: no other case says what a sequence
    must not see of its neighbours; how it is cut into chunks, others say, too."""
    for cell in cells(6, "packed_empty"):
        _, backend, case = cell.values
        for name in CHECKS if backend in SLOW and case is not None else ():
            if name not in CORE:
                marks = [*cell.marks, *([pytest.mark.exhaustive] if case.lengths and name == "chunk_size" else [])]
                yield pytest.param(*cell.values, name, marks=marks, id=f"{cell.id}-{name}")


@pytest.mark.parametrize(("spec", "backend", "case", "name"), list(properties()))
def test_properties_of_slow_backends(spec: OpSpec, backend: str, case: Example, name: str) -> None:
    check(name, problem(spec, case), backend)


def halves() -> Iterator[Any]:
    """Yield cells and dtypes; of JAX, without exhaustive tests, one case in one of them."""
    for cell, dtype in product(cells(6, "all_t25"), ("bfloat16", "float16")):
        spec, backend, case = cell.values
        once = backend != "jax" or case is None or (case.name, dtype) == (spec.complete, "bfloat16")
        marks = [*cell.marks, *([] if once else [pytest.mark.exhaustive])]
        yield pytest.param(*cell.values, dtype, marks=marks, id=f"{cell.id}-{dtype}")


@pytest.mark.parametrize(("spec", "backend", "case", "dtype"), list(halves()))
def test_half_precision(spec: OpSpec, backend: str, case: Example, dtype: str) -> None:
    given = problem(spec, case, dtype)
    for name in CORE:
        check(name, given, backend)


@pytest.mark.parametrize(
    ("spec", "case"), [pytest.param(s, c, id=f"{s.name}-{c}") for s in all_specs() for c in s.cases()]
)
def test_float64(spec: OpSpec, case: Example) -> None:
    given = problem(spec, case, "float64")
    for name in ("values", "gradients"):
        check(name, given, "torch")
