"""Machine code of Numba's kernels is kept between processes; if it cannot be kept, nothing fails."""

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("numba")
import numba
import torch

from refold.ops.linear_scan import _numba
from refold.ops.numba import kernel as kernels
from refold.ops.numba import machine

CODE = """
import sys, torch, refold
h, _ = refold.ops.linear_scan(torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1), backend="numba")
assert h.flatten().tolist() == [1, 1.5, 1.75]
print(int("numba" in sys.modules))
"""


def needs_numba(folder):
    """Run the operator in a process of its own; returns whether that imported Numba."""
    environment = {**os.environ, "REFOLD_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return bool(int(done.stdout))


def test_the_second_process_runs_what_the_first_compiled_without_numba(tmp_path):
    assert needs_numba(tmp_path)
    assert not needs_numba(tmp_path)
    (kept,) = tmp_path.rglob("*.o")
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-1], whole[:100] + b"x" + whole[101:]):
        kept.write_bytes(damaged)
        assert machine.read(kept) is None
    assert needs_numba(tmp_path)
    assert kept.read_bytes() == whole


@pytest.fixture
def named(monkeypatch, tmp_path):
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def fresh(apart=True, function=_numba._sweep.function):
    return kernels.Kernel(function, dict(_numba._sweep.options), apart)


def scan_with(kernel, monkeypatch, **given):
    """Plan the operator with a kernel and run it: what the registry remembers has another one."""
    monkeypatch.setattr(_numba, "_sweep", kernel)
    arguments = {"initial_state": None, "cu_seqlens": None, "reset": None, "reverse": False, **given}
    return _numba.linear_scan(**{"a": torch.full((1, 3, 1), 0.5), "x": torch.ones(1, 3, 1), **arguments})


def is_right(results):
    h, state = results
    return (h.flatten().tolist(), state.tolist()) == ([1, 1.5, 1.75], [[1.75]])


def test_both_ways_give_the_same_bits(named, monkeypatch):
    torch.manual_seed(0)
    a, x, reset = torch.rand(2, 9, 700), torch.randn(2, 9, 700), torch.rand(2, 9, 700) < 0.2
    results = []
    for apart in (True, False):
        kernel = fresh(apart)
        for given in ({}, {"reset": reset}, {"reverse": True}, {"initial_state": torch.ones(2, 700)}):
            results += scan_with(kernel, monkeypatch, a=a, x=x, **given)
        assert bool(kernel.codes) == apart
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:]))


def slot(x):
    return machine.Slot(x.dtype, tuple(x.shape))


def test_what_needs_numba_while_it_runs_runs_by_numba(named):
    def allocates(x, y):
        copy = x.copy()
        for i in range(len(y)):
            y[i] = copy[i]

    def takes_other_things(x, y):
        y[0] = x[0, 0]

    x, y = torch.arange(3.0), torch.zeros(3)
    kernel = fresh(True, allocates)
    kernel.prepared(slot(x), slot(y))(x, y)
    assert (y.tolist(), kernel.apart, kernel.codes) == ([0.0, 1.0, 2.0], False, {})
    kernel = fresh(True, takes_other_things)
    kernel.prepared(np.full((1, 1), 7.0), slot(y))(y)
    kernel.prepared(np.full((1, 1), 8.0, np.float32), slot(y))(y)
    assert (y[0], len(kernel.codes)) == (8.0, 2)
    with pytest.raises(AssertionError, match="contiguous"):
        kernel.prepared(np.zeros((2, 2)).T, slot(y))


@pytest.mark.parametrize("apart", [True, False])
def test_one_call_serves_all_tensors_and_keeps_its_arrays(named, apart):
    def shifted(x, by, y):
        for i in range(len(y)):
            y[i] = x[i] + by[i]

    call = fresh(apart, shifted).prepared(machine.Slot(torch.float64, (2,)), np.array([1.0, 2.0]), slot(torch.zeros(2)))
    others = [np.full(2, np.nan) for _ in range(1000)]  # takes the memory of an array that nobody has
    for k in range(len(others)):
        y = torch.zeros(2)
        call(torch.full((2,), float(k), dtype=torch.float64), y)
        assert y.tolist() == [k + 1.0, k + 2.0]
    with pytest.raises(ValueError, match="zip"):
        call(torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("apart", [True, False])
def test_nothing_is_kept_where_nothing_may_be(named, monkeypatch, apart):
    for folder in ("off", "/dev/null/nowhere"):
        monkeypatch.setenv("REFOLD_CACHE", folder)
        assert fresh()._folder() is None
        assert is_right(scan_with(fresh(apart), monkeypatch))
    assert not named.exists()


def test_without_numbas_setting_kernels_are_compiled_anew(named, monkeypatch):
    before = numba.config.CACHE_DIR
    assert fresh().kept() is not None
    assert before == numba.config.CACHE_DIR
    monkeypatch.delattr(numba.config, "CACHE_DIR")
    assert fresh().kept() is None
    assert is_right(scan_with(fresh(False), monkeypatch))


def test_without_a_name_of_numbas_it_runs_kernels_itself(named, monkeypatch):
    kinds = type(numba.njit(lambda: None)).__mro__
    monkeypatch.delattr(next(kind for kind in kinds if "inspect_llvm" in vars(kind)), "inspect_llvm")
    kernel = fresh()
    assert is_right(scan_with(kernel, monkeypatch))
    assert not kernel.apart


def test_another_text_has_another_folder(named, monkeypatch, tmp_path):
    first = fresh()._folder()
    other = tmp_path / "other.py"
    other.write_text("# a helper that changed")
    monkeypatch.setattr(kernels, "_SHARED", [*kernels._SHARED, other])
    assert fresh()._folder() != first
    assert len(list((named / "numba").iterdir())) == 2


@pytest.mark.parametrize("apart", [True, False])
def test_a_full_disk_is_no_error(named, monkeypatch, apart):
    def full(*_):
        raise OSError(28, "No space left on device")

    kernel = fresh(apart)
    if apart:
        monkeypatch.setattr(kernels, "write", full)
    else:
        kernel.run = full
    assert is_right(scan_with(kernel, monkeypatch))
