"""Every operator, every backend, every case of the spec: the contract."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from refold.ops.backends import absence
from refold.ops.spec import Case, OpSpec, all_specs
from refold.ops.testing import CHECKS, check, problem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("torch", "numba", "jax", *(["triton"] if INTERPRETED else []))

CORE = ("values", "gradients", "no_worse_than_torch")
SLOW = ("jax", "triton")
"""They compile for, or interpret, each new shape: every case in float32, a sample of them for the rest."""


def cells(every: int = 1, always: str = "") -> Iterator[Any]:
    """Yield spec, backend and case; of slow backends, one case out of ``every``, and the one that is to be there."""
    for spec in all_specs():
        for backend in BACKENDS:
            reason = absence(spec, backend)
            if reason is not None:
                missing = pytest.mark.skip(reason=reason)
                yield pytest.param(spec, backend, None, marks=missing, id=f"{spec.name}-{backend}")
                continue
            for i, case in enumerate(spec.cases()):
                if backend in SLOW and i % every and case.name != always:
                    continue
                yield pytest.param(spec, backend, case, id=f"{spec.name}-{backend}-{case.name}")


@pytest.mark.parametrize(("spec", "backend", "case"), list(cells()))
def test_float32(spec: OpSpec, backend: str, case: Case) -> None:
    given = problem(spec, case)
    for name in CORE if backend in SLOW else CHECKS:
        check(name, given, backend)


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in CORE])
@pytest.mark.parametrize(
    ("spec", "backend", "case"),
    [c for c in cells(every=6, always="packed_empty") if c.values[1] in SLOW and c.values[2] is not None],
)
def test_properties_of_slow_backends(spec: OpSpec, backend: str, case: Case, name: str) -> None:
    """A pack is always among the cases: no other case says what a sequence must not see of its neighbours."""
    check(name, problem(spec, case), backend)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("spec", "backend", "case"), list(cells(every=6, always="all_t25")))
def test_half_precision(spec: OpSpec, backend: str, case: Case, dtype: str) -> None:
    given = problem(spec, case, dtype)
    for name in CORE:
        check(name, given, backend)


@pytest.mark.parametrize(
    ("spec", "case"), [pytest.param(s, c, id=f"{s.name}-{c}") for s in all_specs() for c in s.cases()]
)
def test_float64(spec: OpSpec, case: Case) -> None:
    given = problem(spec, case, "float64")
    for name in ("values", "gradients"):
        check(name, given, "torch")
