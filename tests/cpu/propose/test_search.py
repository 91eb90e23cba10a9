"""The loop: ask, try, report the outcome; the record, and resuming a run."""

import json
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from refold.cli import app
from refold.errors import ArgumentError, ProposerError
from refold.judge import Terms, source
from refold.propose import Budget, Proposal, local, search
from refold.propose.protocol import Request, proposals

ORIGINAL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        for _ in range(600):
            y = x @ x.mT
        return y

def get_inputs():
    return [torch.randn(2, 5, 4)]
"""
GOOD = """
import torch

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.bmm(x, x.mT)
"""
ZEROS = GOOD.replace("return ", "return 0 * ")
HOSTILE = "import pathlib\npathlib.Path(pathlib.__file__).write_text('')\nModelNew = None\n"
TERMS = Terms(level="quick", threads=1)


class Scripted:
    """Proposes what a script says, and keeps what it was asked."""

    name, destination, facts = "scripted", "", False

    def __init__(self, *script):
        self.script, self.asked = list(script), []

    def propose(self, request):
        self.asked.append(request)
        answer = self.script.pop(0) if self.script else []
        if isinstance(answer, BaseException):
            raise answer
        return [Proposal(text) for text in answer]

    def spent(self):
        return {"tokens": 100.0 * len(self.asked), "money": 0.5 * len(self.asked)}


def _search(tmp_path, *script, **options):
    proposer = Scripted(*script)
    folder = options.pop("folder", tmp_path / "run")
    return search(source(ORIGINAL, role="original"), proposer, folder, TERMS, **options), proposer


def test_verdicts_are_fed_back_until_something_is_accepted(tmp_path):
    run, proposer = _search(tmp_path, [ZEROS], ["no python"], [HOSTILE], [GOOD], budget=Budget(rounds=5))
    assert [a.outcome for a in run.tried] == ["refused", "refused", "refused", "accepted"]
    assert [a.check for a in run.tried] == ["N1", "", "P4", ""]
    assert run.best == 3
    assert run.ended == "all proposals"
    assert (tmp_path / "run" / "accepted.py").read_text() == GOOD
    evidence = [json.loads(line) for line in (tmp_path / "run" / "accepted.jsonl").read_text().splitlines()]
    assert evidence[-1]["outcome"] == "accepted"
    assert evidence[0]["terms"]["tried"] == 4  # so the race errs with a quarter of one percent
    shown = [[a.source for a in request.attempts] for request in proposer.asked]
    assert shown == [[], [ZEROS], ["no python", ZEROS], [HOSTILE, "no python"], [GOOD, HOSTILE, "no python"]]
    assert f"proposal 3 is accepted, {run.accepted.speedup:.2f}x" in str(run)


def test_requests_hold_no_seed_and_no_values(tmp_path):
    run, proposer = _search(tmp_path, [ZEROS], budget=Budget(rounds=1))
    log = [json.loads(line) for line in (tmp_path / "run" / "trials" / "000.jsonl").read_text().splitlines()]
    asked = json.loads(proposer.asked[0].to_json())
    facts = {"regions", "choices", "times_ms", "roofline", "seconds"}
    assert set(asked) == {"schema", "source", "dtype", "train", "inputs", "machine", "attempts", "wanted"} | facts
    assert asked["inputs"] == [{"shape": [2, 5, 4], "dtype": "float32"}]
    assert str(log[-1]["seed"]) not in (tmp_path / "run" / "run.jsonl").read_text()
    assert run.ended == "all 1 rounds"


@pytest.mark.parametrize("limit", [{"rounds": 0}, {"seconds": -1.0}, {"tokens": float("nan")}, {"money": -0.5}])
def test_a_budget_that_is_none_is_refused(limit):
    with pytest.raises(ArgumentError, match=f"{next(iter(limit))} must be [01] or more, not "):
        Budget(**limit)


@pytest.mark.parametrize(
    ("given", "said"),
    [(("--money", "1"), "--money needs --price"), (("--price", "1", "-1"), "Give two prices, 0 or more"),
     (("--rounds", "-1"), "rounds must be 1 or more, not -1")],
)  # fmt: skip
def test_a_limit_that_cannot_hold_is_refused(given, said, tmp_path):
    """Money without prices would never be spent."""
    found = CliRunner().invoke(app, ["optimize", "x.py", "--propose", "search", "--run", str(tmp_path / "run"), *given])
    assert said in str(found.exception)


@pytest.mark.parametrize(("name", "value"), [("parallel", 0), ("keep", -1)])
def test_a_number_of_proposals_that_is_none_is_refused(name, value, tmp_path):
    with pytest.raises(ArgumentError, match=f"^{name} must be [01] or more, not {value}$"):
        _search(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("budget", "ended"),
    [
        (Budget(tokens=100), "all 100 tokens"),
        (Budget(money=1.0), "all 1 money"),
        (Budget(seconds=0), "all 0 seconds"),
        (Budget(rounds=2), "all 2 rounds"),
    ],
)
def test_a_budget_ends_a_run(budget, ended, tmp_path):
    run, _ = _search(tmp_path, *[[f"x = {i}"] for i in range(9)], budget=budget)
    assert run.ended == ended


def test_a_run_that_was_cut_short_is_resumed(tmp_path):
    _search(tmp_path, [ZEROS], [GOOD], budget=Budget(rounds=2))
    with (tmp_path / "run" / "run.jsonl").open("a") as record:
        record.write('{"event": "propo')
    run, proposer = _search(tmp_path, [ZEROS], budget=Budget(rounds=1), resume=True)
    assert [a.source for a in proposer.asked[0].attempts] == [GOOD, ZEROS]
    assert [a.outcome for a in run.tried] == ["refused", "accepted", "refused"]
    assert "proposed before" in run.tried[2].reason
    assert run.best == 1
    again, _ = _search(tmp_path, budget=Budget(rounds=1), resume=True)
    assert again.best == 1


def test_an_interruption_keeps_what_was_found_and_can_be_resumed(tmp_path):
    run, _ = _search(tmp_path, [GOOD], KeyboardInterrupt())
    assert run.ended == "an interruption"
    assert (tmp_path / "run" / "accepted.py").read_text() == GOOD
    again, proposer = _search(tmp_path, ["x = 1"], budget=Budget(rounds=1), resume=True)
    assert [a.source for a in proposer.asked[0].attempts] == [GOOD]
    assert [a.outcome for a in again.tried] == ["accepted", "refused"]


def test_a_record_in_which_something_is_missing_is_not_resumed(tmp_path):
    _search(tmp_path, [ZEROS], budget=Budget(rounds=1))
    record = tmp_path / "run" / "run.jsonl"
    record.write_text(record.read_text().replace('"proposal"', '"prop', 1))
    with pytest.raises(ArgumentError, match="not the record of a run"):
        _search(tmp_path, resume=True)


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ArgumentError, match="is not empty"):
        _search(tmp_path, folder=tmp_path)
    with pytest.raises(ArgumentError, match="not the record of a run"):
        _search(tmp_path, folder=tmp_path, resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_another_original_is_not_resumed(tmp_path):
    _search(tmp_path, ["x = 1"], budget=Budget(rounds=1))
    other = source(ORIGINAL + "\n# other", role="original")
    with pytest.raises(ArgumentError, match="another original"):
        search(other, Scripted(), tmp_path / "run", TERMS, resume=True)
    with pytest.raises(ArgumentError, match="on other terms"):
        search(
            source(ORIGINAL, role="original"), Scripted(), tmp_path / "run", replace(TERMS, level="full"), resume=True
        )


def test_a_proposer_that_fails_at_once_is_an_error_and_later_an_end(tmp_path):
    with pytest.raises(ProposerError, match="gone"):
        _search(tmp_path, ProposerError("gone"))
    run, _ = _search(tmp_path, ["x = 1"], ProposerError("gone"), folder=tmp_path / "second")
    assert run.ended == "an error: gone"


def test_files_and_a_replay_of_them(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "1.py").write_text(ZEROS)
    (folder / "2.py").write_text(GOOD)
    original = source(ORIGINAL, role="original")
    first = search(original, local.from_files(folder), tmp_path / "first", TERMS, parallel=2)
    again = search(original, local.from_run(tmp_path / "first"), tmp_path / "again", TERMS)
    assert [a.outcome for a in first.tried] == [a.outcome for a in again.tried] == ["refused", "accepted"]
    with pytest.raises(ProposerError, match="neither a file nor a folder"):
        local.from_files(tmp_path / "missing")
    with pytest.raises(ProposerError, match="not the record"):
        local.from_run(folder)


AGENT = """
import json, sys
request = json.load(sys.stdin)
texts = json.load(open(sys.argv[1]))
print(json.dumps({"proposals": [{"kind": "source", "text": texts[len(request["attempts"])]}]}))
"""


def test_a_command_improves_a_layer_from_the_command_line(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "texts.json").write_text(json.dumps([ZEROS, GOOD]))
    (tmp_path / "layer.py").write_text(ORIGINAL)
    command = f"command:{sys.executable} {tmp_path / 'agent.py'} {tmp_path / 'texts.json'}"
    arguments = ["optimize", str(tmp_path / "layer.py"), "--propose", command, "--run", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*arguments, "--level", "quick", "--rounds", "2"])
    assert result.exit_code == 0, result.output
    assert "proposal 1 is accepted" in result.stdout
    assert GOOD.strip() in result.stdout


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('hello')", "did not answer with JSON"),
        ("print('[]')", "must answer"),
        ("import sys; sys.exit('broken')", "exit code 1: broken"),
        ("""print('{"proposals": [{"kind": "magic", "text": ""}]}')""", "kinds that are taken"),
        ("""print('{"proposals": [{}]}')""", "has no text"),
        ("import time; time.sleep(60)", "within 1 s"),
    ],
)
def test_a_command_that_answers_badly(code, message):
    request = Request(ORIGINAL, "float32", False, (), {})
    with pytest.raises(ProposerError, match=message):
        local.Command([sys.executable, "-I", "-c", code], timeout=1.0 if "within" in message else 30.0).propose(request)


def test_a_command_that_does_not_exist():
    with pytest.raises(ProposerError, match="cannot be run"):
        local.Command(["/nowhere/agent"]).propose(Request(ORIGINAL, "float32", False, (), {}))


def test_proposals_from_json():
    assert proposals('{"proposals": [{"text": "a", "note": "b"}]}', origin="x") == [Proposal("a", "b")]
    with pytest.raises(ProposerError, match="did not answer with JSON"):
        proposals("[" * 100_000, origin="x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--propose", "search", "--run", "/dev/null/x"], "/dev/null/x of a run cannot be made"),
        (["--propose", "search", "--run", __file__], "of a run cannot be made: Not a directory"),
        (["--propose", "file:x.py"], "needs --run"),
        (["--run", "x"], "--run goes with --propose"),
        (["--rounds", "2"], "--rounds goes with --propose"),
        (["--propose", "search", "--run", "x", "--html", "a.html"], "--html does not go with --propose"),
        (["--propose", "nobody:x", "--run", "x"], "must be rules"),
        (["--propose", "openai:m", "--run", "x"], "base_url must be"),
    ],
)
def test_options_that_do_not_fit(options, message, tmp_path):
    (tmp_path / "layer.py").write_text(ORIGINAL)
    result = CliRunner().invoke(app, ["optimize", str(tmp_path / "layer.py"), *options])
    assert message in str(result.exception)
