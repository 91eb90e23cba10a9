# ruff: noqa: E501 - a table reads better with one case a line
"""Specs, validation and dispatch on numpy arrays: no framework needed."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import refold.ops as ops
from refold.errors import ArgumentError, BackendUnsupported, DtypeError, ShapeError
from refold.ops.spec import all_specs, load, operators


def ssd_arrays(**changed: Any) -> dict[str, Any]:
    arrays = {
        "x": np.ones((2, 9, 4, 3)), "dt": np.ones((2, 9, 4)), "A": -np.ones(4), "B": np.ones((2, 9, 2, 5)),
        "C": np.ones((2, 9, 2, 5)),
    }  # fmt: skip
    return {**arrays, **changed}


# name: changed arguments, error, message
WRONG = {
    "missing axis": ({"dt": np.ones((2, 9))}, ShapeError, r"ssd: dt must have the axes \(b, t, h\); got shape \(2, 9\)"),
    "time differs": ({"B": np.ones((2, 8, 2, 5))}, ShapeError, r"B has t=8 but x has t=9 .*h=4.* Slice, pad or expand B"),
    "state size differs": ({"C": np.ones((2, 9, 2, 6))}, ShapeError, "C has n=6 but B has n=5"),
    "heads do not divide": (
        {"B": np.ones((2, 9, 3, 5)), "C": np.ones((2, 9, 3, 5))}, ShapeError, "heads must divide into groups; got h=4, g=3",
    ),
    "integer input": ({"x": np.ones((2, 9, 4, 3), int)}, DtypeError, "ssd: x must be float32 or .*; got int64"),
    "no tokens": ({"x": np.ones((2, 0, 4, 3))}, ShapeError, r"axis t \(time\) of x is empty"),
    "no array": ({"x": [1.0]}, DtypeError, "x must be a torch, jax or numpy array; got list"),
    "None": ({"B": None}, ArgumentError, "B is required"),
    "mixed": ({"B": [1.0]}, DtypeError, "B is a builtins.list but x is a numpy array"),
    "state": ({"initial_state": np.ones((2, 4, 5, 3))}, ShapeError, "initial_state has p=5 but x has p=3"),
    "state of another batch": ({"initial_state": np.ones((1, 4, 3, 5))}, ShapeError, "initial_state has b=1 but x has b=2"),
    "chunk size zero": ({"chunk_size": 0}, ArgumentError, "chunk_size must be None or a positive integer; got 0"),
    "chunk size negative": ({"chunk_size": -64}, ArgumentError, "got -64"),
    "chunk size true": ({"chunk_size": True}, ArgumentError, "got True"),
    "limits swapped": ({"dt_limit": (1.0, 0.5)}, ArgumentError, r"dt_limit must be a pair .*; got \(1.0, 0.5\)"),
    "limits NaN": ({"dt_limit": (0.0, float("nan"))}, ArgumentError, "dt_limit"),
    "one limit": ({"dt_limit": (1.0,)}, ArgumentError, "dt_limit"),
    "state dtype": ({"state_dtype": "int8"}, ArgumentError, "state_dtype must be None or a float dtype; got 'int8'"),
    "unknown backend": ({"backend": "cuda"}, ArgumentError, "backend must be one of triton, numba, torch, jax, reference"),
    "other framework": ({"backend": "torch"}, BackendUnsupported, "torch: takes torch arrays; these are numpy"),
    "packed batch": ({"cu_seqlens": np.array([0, 9])}, ShapeError, "with cu_seqlens the batch is 1; x has b=2"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_named_with_its_value_and_a_remedy(case: str) -> None:
    changed, error, message = WRONG[case]
    with pytest.raises(error, match=message) as caught:
        ops.ssd(**ssd_arrays(**changed))
    assert str(caught.value).rstrip().endswith((".", "None to let refold choose.")), "the remedy is a sentence"


PACKS = {
    "no zero": ([1, 9], ArgumentError, "must start with 0; got 1"),
    "short": ([0, 4, 8], ArgumentError, "must end at t=9; got 8"),
    "long": ([0, 4, 10], ArgumentError, "must end at t=9; got 10"),
    "decreasing": ([0, 6, 4, 9], ArgumentError, "must not decrease; got 6 then 4 at 1"),
    "negative": ([0, -3, 9], ArgumentError, "must not decrease; got 0 then -3"),
    "one entry": ([0], ShapeError, "must be 1-D with k \\+ 1 >= 2 entries"),
    "two axes": ([[0, 9]], ShapeError, "must be 1-D"),
    "floats": ([0.0, 9.0], DtypeError, "cu_seqlens must be int32 or int64; got float64"),
}


@pytest.mark.parametrize("case", PACKS)
def test_inconsistent_pack(case: str) -> None:
    offsets, error, message = PACKS[case]
    one_row = {name: a[:1] if a.ndim > 1 else a for name, a in ssd_arrays().items()}
    with pytest.raises(error, match=message):
        ops.ssd(**one_row, cu_seqlens=np.array(offsets))


def test_states_of_a_pack_are_one_a_sequence() -> None:
    one_row = {name: a[:1] if a.ndim > 1 else a for name, a in ssd_arrays().items()}
    with pytest.raises(ShapeError, match="initial_state has k=1 but cu_seqlens has k=2"):
        ops.ssd(**one_row, cu_seqlens=np.array([0, 4, 9]), initial_state=np.ones((1, 4, 3, 5)))


def test_explain_lists_every_backend_in_order_and_prints() -> None:
    answer = ops.explain("ssd", **ssd_arrays())
    assert list(answer) == list(load("ssd").backends)
    assert answer.chosen == "reference"
    assert answer["reference"] is None
    assert "takes torch arrays" in (answer["torch"] or "")
    assert str(answer).splitlines()[0] == "ssd:"
    assert len(str(answer).splitlines()) == 1 + len(answer)


def test_explain_of_an_unknown_operator_lists_those_there_are() -> None:
    with pytest.raises(ArgumentError, match="no operator 'sdd'; it has causal_conv1d, causal_conv1d_step, delta_rule"):
        ops.explain("sdd", np.ones(3))


@pytest.mark.parametrize("name", operators())
def test_references_are_short(name: str) -> None:
    import importlib
    import inspect

    module = importlib.import_module(f"refold.ops.{name}.reference")
    assert len(inspect.getsource(module).splitlines()) <= 60


@pytest.mark.parametrize("name", [*operators(), "dispatch"])
def test_examples_in_docstrings(name: str) -> None:
    import doctest
    import importlib

    # As a reader copies them: with the names that they import, and no others.
    result = doctest.testmod(importlib.import_module(f"refold.ops.{name}"), globs={})
    assert result.failed == 0
    assert result.attempted > 0


def test_every_spec_has_cases_with_distinct_names_and_models() -> None:
    for spec in all_specs():
        cases = spec.cases()
        names = [case.name for case in cases]
        assert len(set(names)) == len(names) > 3
        assert spec.flops(cases[0].sizes) > 0
        signature_order = [arg.name for arg in spec.args] + [option.name for option in spec.options]
        assert len(set(signature_order)) == len(signature_order)


def test_numpy_results_have_the_dtypes_of_the_spec() -> None:
    arrays = {name: a.astype(np.float32) for name, a in ssd_arrays().items()}
    y, state = ops.ssd(**arrays)
    assert (y.dtype, state.dtype) == (np.float32, np.float32)
    y, state = ops.ssd(**{**arrays, "x": arrays["x"].astype(np.float16)}, state_dtype="float64")
    assert (y.dtype, state.dtype) == (np.float16, np.float64)


def test_in_place_step_on_numpy() -> None:
    state = np.zeros((2, 4, 3, 5))
    _, same = ops.ssd_step_(
        np.ones((2, 4, 3)), np.ones((2, 4)), -np.ones(4), np.ones((2, 1, 5)), np.ones((2, 1, 5)), state
    )
    assert same is state
    assert (state == 1).all()


def test_importing_the_operators_imports_no_framework() -> None:
    code = "import sys, refold.ops; sys.exit('torch' in sys.modules or 'jax' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_is_a_reason() -> None:
    code = (
        "import sys, numpy as np, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('torch', 'triton', 'jax') else find(name, *a)\n"
        "import refold.ops.backends as d\n"
        "from refold.ops.spec import ArrayMeta, Meta, load\n"
        "meta = Meta('ssd', 'jax', {'x': ArrayMeta((1,), 'float32', 'jax')}, {})\n"
        "print(d.refusal(load('ssd'), 'jax', meta))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert answer == "the package jax is not installed; pip install 'refold[jax]'\n"
