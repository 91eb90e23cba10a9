"""A trial without names of PyTorch that are not public: it decides as before, and notes what it does not see."""

import importlib.util

import pytest
import torch

from refold import early
from refold.judge import Nursery, judge, source
from refold.judge.private import COSTS

JUDGE = early.WORKER.parent
NAMES = [name.rpartition(".")[2] for name in COSTS]
HOOKED = torch.nn.Linear(2, 2)
HOOKED.register_forward_hook(lambda *_: None)

PROGRAM = """
import torch

class {name}(torch.nn.Module):
    def forward(self, a, b):
        return {value}

def get_inputs():
    return [torch.randn(4, 8), torch.randn(8, 3)]
"""


def _copy(folder, names):
    """Copy the files of a trial's process to a folder, as if PyTorch had none of these names."""
    for file in ("worker.py", "messages.py", "sandbox.py", "private.py", "surroundings.py", "uses.py"):
        text = (JUDGE / file).read_text()
        for name in names if file == "private.py" else ():
            assert name in text
            text = text.replace(f'.{name}"', f'.{name}_of_another_version"')
        (folder / file).write_text(text)
    spec = importlib.util.spec_from_file_location("private_of_another_version", folder / "private.py")
    private = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(private)
    return private


def test_all_names_are_there(tmp_path):
    assert _copy(tmp_path, []).OFF == []


@pytest.mark.parametrize("name", NAMES)
def test_without_a_name_one_thing_is_not_seen(tmp_path, name):
    private = _copy(tmp_path, [name])
    (off,) = private.OFF
    assert f"{name}_of_another_version)" in off
    with private.DispatchMode():
        first = private.settings()
    assert private.settings().keys() == first.keys()
    assert private.count_hooks(HOOKED) == ([] if name == "_forward_hooks" else [1, 0, 0, 0])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.settings()["hooks of saved tensors"] is (name != "_top_saved_tensors_default_hooks")


@pytest.mark.exhaustive
def test_a_trial_decides_without_any_of_them(tmp_path, monkeypatch):
    _copy(tmp_path, NAMES)
    monkeypatch.setattr(early, "WORKER", tmp_path / "worker.py")
    original = source(PROGRAM.format(name="Model", value="a @ b"), name="original.py", role="original")
    with Nursery(threads=1) as started:
        for value, code in (("torch.einsum('ij,jk->ik', a, b)", 0), ("a @ b * 1.001", 1)):
            candidate = source(PROGRAM.format(name="ModelNew", value=value))
            verdict = judge(original, candidate, accept="right", threads=1, nursery=started)
            assert verdict.exit_code == code, str(verdict)
            assert sum("PyTorch" in note for note in verdict.notes) == len(NAMES)
