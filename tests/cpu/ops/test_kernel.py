"""Machine code of Numba's kernels is kept between processes; if it cannot be kept, nothing fails."""

import subprocess
import sys

import pytest

pytest.importorskip("numba")
import numba
import torch

import refold
from refold.ops.linear_scan import _numba
from refold.ops.numba import kernel as kernels

CODE = """
import torch, refold
from refold.ops.linear_scan import _numba
h, _ = refold.ops.linear_scan(torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1), backend="numba")
assert h.flatten().tolist() == [1, 1.5, 1.75]
print(sum(_numba._sweep.run.stats.cache_hits.values()))
"""


def loaded(folder):
    """Run the operator in a process of its own; returns how often machine code was loaded."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment(folder))
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def environment(folder):
    import os

    return {**os.environ, "REFOLD_CACHE": str(folder), "OMP_NUM_THREADS": "1"}


def test_the_second_process_loads_what_the_first_compiled(tmp_path):
    assert loaded(tmp_path) == 0
    assert loaded(tmp_path) == 1
    for damaged in tmp_path.rglob("*.nbc"):
        damaged.write_bytes(b"")
    assert loaded(tmp_path) == 0


@pytest.fixture
def named(monkeypatch, tmp_path):
    monkeypatch.setenv("REFOLD_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def scan_with(kernel, monkeypatch):
    monkeypatch.setattr(_numba, "_sweep", kernel)
    h, _ = refold.ops.linear_scan(torch.full((1, 3, 1), 0.5), torch.ones(1, 3, 1), backend="numba")
    assert h.flatten().tolist() == [1, 1.5, 1.75]


def test_nothing_is_kept_where_nothing_may_be(named, monkeypatch):
    monkeypatch.setenv("REFOLD_CACHE", "off")
    assert kernels.Kernel(_numba._sweep.function, {}).kept() is None
    monkeypatch.setenv("REFOLD_CACHE", "/dev/null/nowhere")
    assert kernels.Kernel(_numba._sweep.function, {}).kept() is None


def test_without_numbas_setting_kernels_are_compiled_anew(named, monkeypatch):
    before = numba.config.CACHE_DIR
    assert kernels.Kernel(_numba._sweep.function, {}).kept() is not None
    assert before == numba.config.CACHE_DIR
    monkeypatch.delattr(numba.config, "CACHE_DIR")
    fresh = kernels.Kernel(_numba._sweep.function, {})
    assert fresh.kept() is None
    scan_with(fresh, monkeypatch)


def test_another_text_has_another_folder(named, monkeypatch, tmp_path):
    kernels.Kernel(_numba._sweep.function, {})
    other = tmp_path / "other.py"
    other.write_text("# a helper that changed")
    monkeypatch.setattr(kernels, "_SHARED", [*kernels._SHARED, other])
    kernels.Kernel(_numba._sweep.function, {})
    assert len(list((named / "numba").iterdir())) == 2


def test_a_full_disk_is_no_error(named, monkeypatch):
    kernel = kernels.Kernel(_numba._sweep.function, {})

    def full(*_):
        raise OSError(28, "No space left on device")

    kernel.run = full
    scan_with(kernel, monkeypatch)
