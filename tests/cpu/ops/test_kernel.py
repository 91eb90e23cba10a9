"""Machine code of Numba's kernels is kept between processes; if it cannot be kept, nothing fails."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")
import numba
import torch

from refold.cache import default_folder
from refold.ops.linear_scan import _numba
from refold.ops.numba import kernel as kernels
from refold.ops.numba.blocks import ArgumentPlace, share_out

CODE = """
import torch, refold
from refold.ops.linear_scan import _numba
h, _ = refold.ops.linear_scan(torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1), backend="numba")
assert h.flatten().tolist() == [1, 1.5, 1.75]
print(sum(_numba._sweep.run.stats.cache_hits.values()))
"""


def loaded(folder):
    """Run the operator in a process of its own; returns how many functions it loaded."""
    environment = {**os.environ, "REFOLD_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.exhaustive
def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    assert loaded(tmp_path) == 0
    assert loaded(tmp_path) == 1


@pytest.fixture
def named(monkeypatch, tmp_path):
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def fresh(function=_numba._sweep.function):
    return kernels.Kernel(function, dict(_numba._sweep.options))


def is_right(kernel, monkeypatch):
    """Plan the operator with a kernel and run it: what the registry remembers has another one."""
    monkeypatch.setattr(_numba, "_sweep", kernel)
    given = {"initial_state": None, "cu_seqlens": None, "reset": None, "reverse": False}
    h, state = _numba.linear_scan(a=torch.full((1, 3, 1), 0.5), x=torch.ones(1, 3, 1), **given)
    return (h.flatten().tolist(), state.tolist()) == ([1, 1.5, 1.75], [[1.75]])


@pytest.mark.parametrize("workers", [1, 2])
def test_one_plan_serves_all_tensors(named, monkeypatch, workers):
    def shifted(x, by, y, blocks):
        for low, high in blocks:
            for i in range(low, high):
                y[i] = x[i] + by[i]

    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    slots = ArgumentPlace(torch.float64, (8,)), ArgumentPlace(torch.float32, (8,))
    call = share_out(fresh(shifted), (slots[0], torch.arange(8.0).numpy(), slots[1]), ((),), (0, 8), 2, 1 << 20)
    for k in range(100):
        y = torch.zeros(8)
        call(torch.full((8,), float(k), dtype=torch.float64), y)
        assert y.tolist() == [k + i for i in range(8)]
    with pytest.raises(ValueError, match="zip"):
        call(torch.zeros(8, dtype=torch.float64))


def test_nothing_is_kept_where_nothing_may_be(named, monkeypatch):
    monkeypatch.setattr(kernels, "default_folder", default_folder)  # tests keep machine code elsewhere
    for folder in ("off", "/dev/null/nowhere"):
        monkeypatch.setenv("REFOLD_CACHE", folder)
        assert fresh()._folder() is None
        assert is_right(fresh(), monkeypatch)
    assert not named.exists()


def test_without_numbas_setting_kernels_are_compiled_anew(named, monkeypatch):
    before = numba.config.CACHE_DIR
    assert fresh().kept() is not None
    assert before == numba.config.CACHE_DIR
    monkeypatch.delattr(numba.config, "CACHE_DIR")
    assert fresh().kept() is None
    assert is_right(fresh(), monkeypatch)


def test_another_text_has_another_folder(named, monkeypatch, tmp_path):
    first = fresh()._folder()
    other = tmp_path / "other.py"
    other.write_text("# a helper that changed")
    monkeypatch.setattr(kernels, "_SHARED", [*kernels._SHARED, other])
    assert fresh()._folder() != first
    assert len(list((named / "numba").iterdir())) == 2


def test_a_full_disk_is_no_error(named, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    kernel = fresh()
    kernel.run = full
    assert is_right(kernel, monkeypatch)
