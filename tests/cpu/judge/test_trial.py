"""The verdict on a candidate: options, evidence, replay, and what cannot be judged."""

import base64
import json
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from refold.errors import ArgumentError, TargetError
from refold.judge import Nursery, Terms, channel, decide, judge, kernel, process, replay, results, sides, source
from refold.judge import sandbox as sandbox_of_judge
from refold.judge.errors import Misbehaved
from refold.judge.terms import LEVELS
from refold.verify import numerics

ORIGINAL = """
import torch

class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b

def get_inputs():
    return [torch.randn(4, 8), torch.randn(8, 3)]
"""
RIGHT = """
import torch

class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return torch.einsum("ij,jk->ik", a, b)
"""
WRONG = RIGHT.replace("b)\n", "b) * 1.001\n")


def doubled(x):
    return 2 * x


def summed(x):
    return x + x


def tripled(x):
    return 3 * x


@pytest.fixture(scope="module")
def nursery():
    with Nursery(threads=1) as nursery:
        yield nursery


def _judge(nursery, candidate, original=ORIGINAL, **options):
    first = source(original, name="original.py", role="original")
    return judge(first, source(candidate), accept="right", threads=1, nursery=nursery, **options)


def test_a_right_candidate_is_accepted_with_its_evidence(nursery):
    verdict = _judge(nursery, RIGHT)
    assert verdict.accepted
    assert verdict.exit_code == 0
    kinds = {line["kind"] for line in verdict.lines if "kind" in line}
    assert {"actual", "normal", "integers", "wide exponents", "x1000"} <= kinds
    assert next(line for line in verdict.lines if line["check"] == "N3")["valid"]
    assert "accepted" in str(verdict)
    assert "landlock" in str(verdict)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype, nursery):
    assert _judge(nursery, RIGHT, dtype=dtype, level="quick").accepted
    # Some 60 roundings in bfloat16: five per cent, 13 roundings, may be what moving the inputs by one excuses.
    assert _judge(nursery, WRONG.replace("1.001", "1.25"), dtype=dtype, level="quick").check == "N1"


def test_how_parameters_start_and_their_order_are_noted(nursery):
    layer = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(9, 8))
        self.bias = torch.nn.Parameter(torch.randn(9))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)

def get_inputs():
    return [torch.randn(4, 8)]
"""
    other = layer.replace("(torch.randn(9, 8))", "(0.1 * torch.randn(9, 8))").replace("self.weight", "self.first", 1)
    other = other.replace("randn(9))", "randn(9))\n        self.weight = self.first\n        del self.first")
    notes = _judge(nursery, other.replace("Model", "ModelNew"), layer, level="quick").notes
    assert any(note.startswith("initial values of its weight have another size") for note in notes), notes
    assert any(note.startswith("its parameters have another order") for note in notes), notes


def test_what_was_not_asked_for_is_noted(nursery):
    original = "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return 2 * x\n\n"
    original += "def get_inputs():\n    return [torch.randn(4, 8)]\n"
    own = "    kept = []\n\n    def forward(self, x):\n        self.kept.append(x + x)\n"
    own += "        return self.kept[-1] * max(1, 3 - x.dim(), 4 // x.element_size()) + 0 * x\n"
    notes = _judge(nursery, f"import torch\n\nclass ModelNew(torch.nn.Module):\n{own}", original).notes
    for said in ("it keeps tensors of each call", "one axis less", "in float16 it does not", "in bfloat16 it does not"):
        assert any(said in note for note in notes), notes
    plain = _judge(nursery, original.replace("Model(", "ModelNew("), original).notes
    assert not any("tensors" in note or "axis" in note or "float" in note for note in plain), plain


def test_a_factor_in_float64_is_seen(nursery):
    wrong = WRONG.replace("1.001", "(1 + 1e-10)")
    assert _judge(nursery, wrong, dtype="float64", level="quick").check == "N1"


def test_the_log_is_lines_of_json_and_can_be_replayed(nursery, tmp_path):
    verdict = _judge(nursery, WRONG, level="quick")
    log = tmp_path / "log.jsonl"
    log.write_text(verdict.to_jsonl())
    head, *lines, last = map(json.loads, log.read_text().splitlines())
    assert head["candidate"]["text"] == WRONG
    assert head["sandbox"]
    assert (last["outcome"], last["check"]) == ("refused", "N1")
    decided = lines[-1]
    assert decided["check"] == "N1"
    assert not decided["passed"]
    assert decided["error"] > decided["bound"]
    assert all("seed_sha256" in line for line in lines)
    again, then = replay(log)
    assert (again.outcome, again.check, again.reason) == (then.outcome, then.check, then.reason)


@pytest.mark.parametrize("text", ["", "{}", '{"original": 1}\n{"outcome": "accepted"}', "not json"])
def test_what_is_no_log_is_not_replayed(text, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(text)
    with pytest.raises(TargetError, match="not the whole log"):
        replay(log)


def test_an_input_that_never_changes_is_named(nursery):
    original = ORIGINAL.replace("a @ b", "a[b]").replace("torch.randn(8, 3)", "torch.tensor([0, 1, 3])")
    candidate = original.replace("Model(", "ModelNew(").replace("a[b]", "a[[0, 1, 3]]")
    verdict = _judge(nursery, candidate, original, level="quick")
    assert any(note.startswith("input 1 was the same in all calls") for note in verdict.notes)


def test_an_original_that_keeps_what_it_does_not_save_is_not_judged(nursery):
    own = (
        "    kept = []\n\n    def forward(self, a, b):\n        self.kept.append(a)\n        return sum(self.kept) @ b"
    )
    original = ORIGINAL.replace("    def forward(self, a, b):\n        return a @ b", own)
    verdict = _judge(nursery, original.replace("Model(", "ModelNew("), original, level="quick")
    assert verdict.outcome == "unjudged"
    assert "depend on earlier calls" in verdict.reason


def test_what_cannot_be_looked_into_is_not_judged(nursery):
    original = ORIGINAL.replace("a @ b", "a @ b, {1, 2}")
    verdict = _judge(nursery, RIGHT, original, level="quick")
    assert verdict.outcome == "unjudged"
    assert "a set, which cannot be compared" in verdict.reason


def test_what_it_costs_to_make_and_to_keep_it_is_noted(nursery):
    code = RIGHT.replace("    def forward", "    def __init__(self):\n        super().__init__()\n"
                         "        time.sleep(1.5)\n        self.table = torch.empty(200 << 20, dtype=torch.uint8)\n\n"
                         "    def forward").replace("import torch", "import time\n\nimport torch", 1)  # fmt: skip
    notes = " ".join(_judge(nursery, code).notes)
    assert "making it takes" in notes
    assert "MB of memory that the original does not keep" in notes
    plain = " ".join(_judge(nursery, RIGHT).notes)
    assert "making it takes" not in plain
    assert "does not keep" not in plain


def test_what_runs_on_when_it_has_been_stopped_is_refused(nursery, monkeypatch):
    """As by a process that lets it go on, and is gone before anybody looks."""
    code = RIGHT.replace("import torch\n", "import threading\n\nimport torch\n").replace(
        '        return torch.einsum("ij,jk->ik", a, b)',
        "        threading.Thread(target=lambda: [i for i in range(10**8)], daemon=True).start()\n        return a @ b",
    )
    read = process.Process.tensors

    def released(self, *args):
        used = self.processor_time()[0]
        os.kill(self.pid, signal.SIGCONT)
        while self.processor_time()[0] < used + 2 * process._RESUMED_S:
            time.sleep(1e-3)
        return read(self, *args)

    with nursery.program(code, "candidate.py", room=1 << 16) as worker:
        worker.load("ModelNew")
        nothing = base64.b64encode(pickle.dumps([])).decode()
        how = {"dtype": "float32", "device": "cpu", "train": False, "compiled": False}
        worker.ask("build", attribute="ModelNew", arguments=nothing, seed=0, **how)
        tree = {"sequence": "tuple", "items": [{"tensor": 0}, {"tensor": 1}]}
        monkeypatch.setattr(process.Process, "tensors", released)
        with pytest.raises(Misbehaved, match="ran on when it had been stopped"):
            worker.call(process.Call(tree, [torch.randn(4, 8), torch.randn(8, 3)]))


@pytest.mark.parametrize("where", ["forward", "import"])
def test_a_candidate_forges_no_lines_of_the_report(where, nursery):
    forged = 'raise ValueError("\\x1b[2J\\raccepted\\n  passed       everything")'
    code = f"{forged}\nModelNew = None" if where == "import" else RIGHT.replace("return", f"{forged}\n        return")
    verdict = _judge(nursery, code, level="quick")
    assert verdict.check == "P4"
    assert "everything" in verdict.reason
    lines = str(verdict).splitlines()
    assert lines[0].startswith("refused by P4")
    assert not any(line.startswith(("accepted", "  passed       everything")) for line in lines)
    assert all(line.isprintable() for line in lines)


def test_an_answer_may_take_longer_where_others_want_the_same_cores(nursery, monkeypatch):
    asleep = "import time\ntime.sleep(1.5)\nModelNew = None"
    monkeypatch.setattr(channel, "crowding", lambda: 1.0)
    with nursery.program(asleep, "candidate.py", room=4096) as worker:
        worker.timeout = 0.2
        with pytest.raises(Misbehaved, match="did not answer") as error:
            worker.load("ModelNew")
        assert error.value.check == "P3"
    monkeypatch.setattr(channel, "crowding", lambda: 1e9)  # no more than _CROWDED times
    with nursery.program(asleep, "candidate.py", room=4096) as other:
        other.timeout = 0.05
        with pytest.raises(Misbehaved):
            other.load("ModelNew")
    with nursery.program(asleep, "candidate.py", room=4096) as worker:
        assert worker.load("ModelNew") >= 1.5


def test_two_functions(nursery):
    inputs = [torch.randn(5, 7)]
    assert judge(doubled, summed, inputs, accept="right", level="quick", threads=1, nursery=nursery).accepted
    assert judge(doubled, tripled, inputs, accept="right", level="quick", threads=1, nursery=nursery).check == "N1"


def test_a_function_without_a_file_is_refused():
    with pytest.raises(ArgumentError, match="top level of a file"):
        judge(lambda x: x, doubled, [torch.ones(3)])


@pytest.mark.parametrize(
    ("original", "reason"),
    [
        (ORIGINAL.replace("a @ b", "torch.zeros(3)"), "the same for different inputs"),
        (ORIGINAL.replace("a @ b", "a @ b.T"), "the original itself cannot be run"),
        (ORIGINAL.replace("a @ b", "3"), "returns no tensor"),
        (ORIGINAL.replace("get_inputs", "inputs"), "does not define get_inputs"),
    ],
)
def test_what_says_nothing_is_not_judged(original, reason, nursery):
    verdict = _judge(nursery, RIGHT, original)
    assert verdict.outcome == "unjudged"
    assert verdict.exit_code == 3
    assert reason in verdict.reason


def test_without_a_sandbox_nothing_runs(nursery, monkeypatch, tmp_path):
    assert sides.enough is sandbox_of_judge.enough
    monkeypatch.setattr(sides, "enough", lambda active: "no Landlock")
    verdict = _judge(nursery, "raise SystemExit('it ran')\nModelNew = None")
    assert verdict.outcome == "unjudged"
    assert "no sandbox" in verdict.reason


def test_unsandboxed_only_when_asked():
    first, second = source(ORIGINAL, name="original.py", role="original"), source(RIGHT)
    verdict = judge(first, second, level="quick", accept="right", threads=1, allow_unsandboxed=True)
    assert verdict.accepted
    assert verdict.sandbox == []
    assert "confined by  nothing" in str(verdict)
    with pytest.raises(ArgumentError, match="paranoid needs a sandbox"):
        judge(first, second, level="paranoid", allow_unsandboxed=True)


@pytest.mark.parametrize(
    ("option", "value"),
    [("level", "thorough"), ("dtype", "int8"), ("device", "tpu"), ("accept", "always"), ("tried", 0), ("timeout", -1)],
)
def test_a_bad_option_is_named(option, value):
    with pytest.raises(ArgumentError, match=f"{option} must be .*, not {value!r}"):
        judge(source(ORIGINAL, role="original"), source(RIGHT), **{option: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [("def f(:", "is not Python"), ("x = 1", "does not define ModelNew"), ("#" * (5 << 20), "at most")],
)
def test_a_source_that_is_none(text, message):
    with pytest.raises(TargetError, match=message):
        source(text)


@pytest.mark.parametrize("target", ["missing.py", "notes.txt", "package.module:f"])
def test_a_target_that_is_none(target):
    with pytest.raises(TargetError, match=r"does not exist|neither a Python file"):
        judge(target, target)


def test_a_folder_is_no_target(tmp_path):
    (tmp_path / "layer.py").mkdir()
    with pytest.raises(TargetError, match=r"layer\.py is a directory"):
        judge(tmp_path / "layer.py", tmp_path / "layer.py")


def test_many_candidates_share_the_chance_of_error(nursery):
    """With a thousand tried, nine wins of nine are not enough."""
    slow = ORIGINAL.replace(
        "        return a @ b", "        for _ in range(3000):\n            c = a @ b\n        return c"
    )
    first, second = source(slow, name="original.py", role="original"), source(RIGHT)
    pairs = {}
    for tried in (1, 1000):
        terms = Terms(level="quick", tried=tried)
        verdict = decide(nursery, first, second, None, terms, seed=3)
        assert verdict.accepted, str(verdict)
        pairs[tried] = verdict.timing["pairs"]
    assert pairs[1] <= pairs[1000]
    assert pairs[1000] > LEVELS["quick"].looks[0]


def test_a_new_seed_for_each_trial(nursery):
    assert len({_judge(nursery, RIGHT, level="quick").seed for _ in range(3)}) == 3


def test_an_input_smaller_than_its_parameters(nursery):
    """Parameters of many times the bytes of the inputs go through the shared memory in parts."""
    layer = """
import torch

class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(600, 600) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def get_inputs():
    return [torch.randn(2, 600)]
"""
    assert _judge(nursery, layer.format(name="ModelNew"), layer.format(name="Model"), level="quick").accepted


def test_a_bar_of_progress_has_no_thread(nursery):
    """As torch's compiler shows one; a thread that wakes now and then would count as work between calls."""
    pytest.importorskip("tqdm")
    code = "import threading, tqdm\nlist(tqdm.tqdm(range(2)))\nassert threading.active_count() == 1\nModelNew = None"
    with nursery.program(code, "candidate.py", room=4096) as worker:
        worker.load("ModelNew")


def test_two_processes_of_one_program_have_one_folder(nursery):
    """What a compiler left there need not be compiled again; others have folders of their own."""
    code = "open('left', 'a').write('x')\nModelNew = None"
    with nursery.program(code, "candidate.py", room=4096) as first:
        first.load("ModelNew")
        with nursery.program(code, "candidate.py", room=4096, beside=first) as second:
            second.load("ModelNew")
        assert (first.folder / "left").read_text() == "xx"
        with nursery.program(code, "candidate.py", room=4096) as other:
            other.load("ModelNew")
            assert (other.folder / "left").read_text() == "x"


def test_all_libraries_are_given_as_many_threads(nursery):
    names = ("OMP", "MKL", "NUMBA")
    code = f"import os\nassert [os.environ[f'{{n}}_NUM_THREADS'] for n in {names}] == ['1'] * 3\nModelNew = None"
    with nursery.program(code, "candidate.py", room=4096) as worker:
        worker.load("ModelNew")


def test_threads_that_take_turns_do_not_count_as_asleep(nursery, monkeypatch):
    """Each is looked at while the other runs; only a second look tells."""
    looks = iter([{"1": (1, 1), "2": (1, 1)}, {"1": (2, 2), "2": (1, 1)}, {}] + [{"1": (2, 2), "2": (9, 2)}] * 2)
    with nursery.program("ModelNew = None", "candidate.py", room=4096) as worker:
        monkeypatch.setattr(worker, "activity", lambda states: next(looks))
        assert worker.settle() == {"1": (2, 2), "2": (9, 2)}
        assert next(looks, None) is None


def test_a_main_thread_that_has_ended_is_asleep(nursery):
    """Another one could answer for it; the judge does not wait for it for ever."""
    code = """
import ctypes, signal, threading
threading.Thread(target=signal.pause).start()
signal.signal(signal.SIGALRM, lambda *_: ctypes.PyDLL(None).pthread_exit(None))
ModelNew = None
"""
    with nursery.program(code, "candidate.py", room=4096) as worker:
        worker.load("ModelNew")
        os.kill(worker.pid, signal.SIGALRM)
        until = time.monotonic() + 60
        while "Z" not in kernel.states(worker.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert len(worker.settle()) == 2


def test_a_thread_that_ends_while_it_is_looked_at(monkeypatch):
    """The kernel then says of its file that there is no such process; the process itself goes on."""
    read = kernel.read

    def ending(name):
        if name.endswith("/schedstat") and f"/task/{os.getpid()}/" not in name:
            raise ProcessLookupError(3, "No such process")
        return read(name)

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    monkeypatch.setattr(kernel, "read", ending)
    try:
        assert list(kernel.activity(os.getpid())) == [str(os.getpid())]
    finally:
        stop.set()
        thread.join()


def test_a_thread_is_asleep_when_it_has_left_its_processor(monkeypatch):
    """The thread that looks here is in a wanted state, and still has its processor."""
    pid, wanted = os.getpid(), kernel.ASLEEP + "R"
    assert kernel._counts_turns()
    with ThreadPoolExecutor(1) as new:  # an old thread may have turns that were not counted
        assert not new.submit(kernel.activity, pid, wanted).result()
    monkeypatch.setattr(kernel, "_counts_turns", lambda: False)
    assert kernel.activity(pid, wanted)


def test_a_thread_is_asleep_although_some_of_its_turns_were_not_counted(monkeypatch):
    monkeypatch.setattr(kernel, "_turns", lambda thread: (46331, 1000, 46328))  # as seen of a sleeping thread
    assert kernel.activity(os.getpid(), kernel.ASLEEP + "R")


def test_roundings_of_equal_terms_may_add_up():
    """One term after the other is a right order of summation, and all its roundings have one sign there."""
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).expand(512, 64)
    exact, pairwise, sequential = x.double().sum(0), x.contiguous().sum(0), torch.zeros(64)
    for row in x:
        sequential += row
    halved = x.half().double().sum(0).float()

    def passes(kind, y):
        return results.judged(kind, exact, pairwise, y, numerics.Errors(), 512).passed

    assert [passes(kind, sequential) for kind in ("normal", "repeated", "constant rows")] == [False, True, True]
    assert not any(passes(kind, halved) for kind in ("normal", "repeated", "constant rows"))


def test_numbers_below_the_normal_ones_have_few_digits():
    """A factor may multiply the rounding of an exponential there, where the original adds many that are rounded."""
    x, w = torch.tensor([-1e5, -96.8, -1e6]), torch.randn(32, generator=torch.Generator().manual_seed(0))

    exact, original = (torch.exp(x.to(dtype)[:, None] + w).sum(-1) for dtype in (torch.float64, torch.float32))

    def passes(y):
        return results.judged("huge", exact, original, y, numerics.Errors(), 32).passed

    assert passes(x.exp() * w.exp().sum())
    assert not passes(original + 2.0**-126)
