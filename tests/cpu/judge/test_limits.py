"""What a trial costs at most, and what it tells whom: no candidate stops the judge, and none speaks through it."""

import json
import os
import time

import pytest
import torch

from refold.errors import TargetError, printable
from refold.judge import Nursery, Terms, Verdict, judge, replay, source, weights
from refold.judge.checks import use
from refold.judge.errors import Misbehaved
from refold.judge.program import program
from refold.propose.loop import _shown
from refold.propose.protocol import Attempt

ORIGINAL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        return x * torch.exp(self.A_log)

def get_inputs():
    return [torch.randn(4, 8)]
"""
SAME = ORIGINAL.replace("Model(", "ModelNew(")


@pytest.fixture(scope="module")
def nursery():
    with Nursery(threads=1) as nursery:
        yield nursery


def _judge(nursery, candidate, **options):
    first = source(ORIGINAL, name="original.py", role="original")
    options = {"level": "quick", "accept": "right", "threads": 1, "nursery": nursery} | options
    return judge(first, source(candidate), **options)


def test_a_trial_has_a_limit_as_a_whole(nursery):
    slow = SAME.replace("import torch\n", "import time, torch\n", 1).replace(
        "return x", "time.sleep(0.5)\n        return x"
    )
    start = time.monotonic()
    verdict = _judge(nursery, slow, limit=4.0)
    assert time.monotonic() - start < 60
    assert verdict.outcome == "unjudged"
    assert "the time of the trial" in verdict.reason or "longer than its limit" in verdict.reason


def test_an_error_of_the_judge_is_a_verdict(nursery, monkeypatch):
    monkeypatch.setattr(use, "_other_mode", lambda *_: 1 / 0)
    verdict = _judge(nursery, SAME)
    assert verdict.outcome == "unjudged"
    assert "the judge itself failed: ZeroDivisionError" in verdict.reason


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor _ in range(1200):\n    os.mkdir('a')\n    os.chdir('a')\nos.chdir(os.environ['HOME'])\n",
        "import os\nos.mkdir('shut')\nopen('shut/file', 'w').close()\nos.chmod('shut', 0)\n",
        "import ctypes\nctypes.CDLL(None).prctl(15, b'VmData: none', 0, 0, 0)\n",
    ],
)
def test_folders_and_names_that_were_made_to_stumble_over(code, nursery):
    with nursery.program(code + "ModelNew = None", "candidate.py", room=4096) as process:
        process.load("ModelNew")
        assert process.held() > 1 << 20
        folder = process.folder
    assert not folder.exists()


def test_the_verdict_names_a_parameter_and_says_what_to_change(nursery):
    wrong = SAME.replace("torch.exp(self.A_log)", "torch.exp(self.A_log.detach()) + 0 * self.A_log")
    text = str(_judge(nursery, wrong, train=True))
    assert "gradient of A_log" in text
    assert "to pass      check the backward" in text


def test_who_proposed_it_is_told_what_it_could_know(nursery):
    """Not the words of an exception, which may hold a file, nor the name that the candidate gave it."""
    leak = "\n    def forward(self, x):\n        raise {}('SECRET')\n\nclass SECRET2(Exception): {}"
    for kind, more in (("ValueError", "pass"), ("SECRET2", "pass"), ("SECRET2", "__module__ = 'builtins'")):
        candidate = SAME.partition("\n    def forward")[0] + leak.format(kind, more)
        verdict = _judge(nursery, candidate)
        assert "SECRET" in verdict.reason
        assert "SECRET" not in verdict.told
        assert verdict.check == "P4"
        assert "at line 10" in verdict.told
    attempt = Attempt(candidate, verdict.outcome, verdict.check, verdict.reason, told=verdict.told)
    run = type("Run", (), {"tried": [attempt]})
    assert _shown(run, 3)[0].reason == verdict.told


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/hostname", "/etc/hosts", os.path.abspath(__file__)])
def test_files_of_users_and_of_the_machine_are_not_read(path, nursery):
    code = f"open({path!r}).read()\nModelNew = None"
    with (
        nursery.program(code, "candidate.py", room=4096) as process,
        pytest.raises(Misbehaved, match=r"PermissionError|FileNotFoundError"),
    ):
        process.load("ModelNew")


@pytest.mark.parametrize(
    "change", [{"seed": -1}, {"seed": 1 << 50}, {"timeout": 1e400}, {"train": [1]}, {"threads": 10**9}, {"text": 3}]
)
def test_an_edited_log_is_no_log(change, nursery, tmp_path):
    head, *_, last = map(json.loads, _judge(nursery, "ModelNew = None").to_jsonl().splitlines())
    for part in (last, head["terms"], head["original"]):
        part.update({name: value for name, value in change.items() if name in part})
    (tmp_path / "log.jsonl").write_text(f"{json.dumps(head)}\n{json.dumps(last)}\n")
    with pytest.raises(TargetError):
        replay(tmp_path / "log.jsonl")


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n# \xe4\n"])
def test_encodings_and_branches_of_a_source(prefix, tmp_path):
    text = "try:\n    import nothing_like_it\nexcept ImportError:\n    if True:\n        ModelNew: type = object\n"
    (tmp_path / "fast.py").write_bytes(prefix + text.encode())
    assert program(tmp_path / "fast.py", role="candidate").attribute == "ModelNew"
    (tmp_path / "fast.py").write_text("def f():\n    ModelNew = 1\n")
    with pytest.raises(TargetError, match="does not define"):
        program(tmp_path / "fast.py", role="candidate")


def test_what_was_tried_is_what_the_text_says(tmp_path):
    """In UTF-7, the comment is a line of code."""
    text = "# coding: utf-7\nclass ModelNew:\n    # +AAo-    pass\n    x = 1\n"
    (tmp_path / "fast.py").write_text(text)
    with pytest.raises(TargetError, match="use utf-8"):
        program(tmp_path / "fast.py", role="candidate")
    with pytest.raises(TargetError, match="let it declare utf-8"):
        source(text)
    (tmp_path / "fast.py").write_bytes(b"# coding: latin-1\nModelNew = '\xe4'\n")
    assert program(tmp_path / "fast.py", role="candidate").text == "# coding: utf-8\nModelNew = '\xe4'\n"


def test_a_large_file_is_not_read(tmp_path):
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(8 << 30)
    start = time.monotonic()
    with pytest.raises(TargetError, match="at most"):
        program(tmp_path / "large.py", role="candidate")
    assert time.monotonic() - start < 5


def test_nothing_acts_on_the_terminal():
    assert printable("a\x1b[2K\r\nb") == "a\\x1b[2K\\r | b"
    assert printable("a\x1b[2K\nb", lines=True) == "a\\x1b[2K\nb"


def test_terms_are_what_they_say():
    assert Terms(limit=5).limit == 5
    with pytest.raises(ValueError, match="limit must be positive"):
        Terms(limit=-1)


def test_weights_of_no_axis_get_other_values_of_no_axis():
    state = {"gain": torch.zeros(()), "empty": torch.zeros(0), "w": torch.ones(2, 3), "n": torch.tensor(3)}
    for kind in weights.KINDS:
        found = weights.drawn(kind, state, {"gain", "empty", "w"}, 1)
        assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in state.items()}
        assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in state.items()}
    assert weights.drawn("moved", state, {"gain"}, 1)["gain"] != 0


def test_a_verdict_is_printed_where_a_coarse_comparison_is_nearest_to_its_bound():
    first, second = (source(SAME, name=name, role="candidate") for name in ("a.py", "b.py"))
    verdict = Verdict(first, second, Terms(), outcome="accepted")
    verdict.line("N7", True, kind="x1000", error=1.0, bound=1.1)
    verdict.line("N1", True, kind="normal", error=1e-7, bound=1e-6, original=1e-7)
    assert "inputs: normal" in str(verdict)
