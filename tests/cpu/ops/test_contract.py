"""Every operator, every backend, every case of the spec: the contract."""

import os
from collections.abc import Iterator

import pytest

from refold.ops.dispatch import refusal
from refold.ops.spec import ArrayMeta, Case, Meta, OpSpec, all_specs
from refold.ops.testing import CHECKS, check, problem

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("torch", "jax", *(["triton"] if INTERPRETED else []))


def absence(spec: OpSpec, backend: str) -> str | None:
    """Return why a backend cannot be tested here at all, if its file or its package is missing."""
    frame = "jax" if backend == "jax" else "torch"
    meta = Meta(spec.name, frame, {"x": ArrayMeta((1,), "float32", "cpu")}, {})
    try:
        reason = refusal(spec, backend, meta)
    except (KeyError, IndexError):
        return None  # it is there and asked for more than a dummy can tell
    return reason if reason and ("no file" in reason or "installed" in reason or "implement" in reason) else None


def cells() -> Iterator[object]:
    for spec in all_specs():
        for backend in BACKENDS:
            reason = absence(spec, backend)
            if reason is not None:
                yield pytest.param(
                    spec, backend, None, marks=pytest.mark.skip(reason=reason), id=f"{spec.name}-{backend}"
                )
                continue
            for case in spec.cases():
                yield pytest.param(spec, backend, case, id=f"{spec.name}-{backend}-{case.name}")


@pytest.mark.parametrize(("spec", "backend", "case"), list(cells()))
def test_float32(spec: OpSpec, backend: str, case: Case) -> None:
    given = problem(spec, case)
    for name in CHECKS:
        check(name, given, backend)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("spec", "backend", "case"), list(cells()))
def test_half_precision(spec: OpSpec, backend: str, case: Case, dtype: str) -> None:
    given = problem(spec, case, dtype)
    for name in ("values", "gradients", "no_worse_than_torch"):
        check(name, given, backend)


@pytest.mark.parametrize(
    ("spec", "case"), [pytest.param(s, c, id=f"{s.name}-{c}") for s in all_specs() for c in s.cases()]
)
def test_float64(spec: OpSpec, case: Case) -> None:
    given = problem(spec, case, "float64")
    for name in ("values", "gradients"):
        check(name, given, "torch")
