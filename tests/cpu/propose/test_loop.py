"""The whole loop: a scripted endpoint over HTTP, a command, and other layers that use an accepted rule."""

import contextlib
import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.errors import ArgumentError, RefoldWarning, TargetError
from refold.judge import Terms, source
from refold.propose import Budget, Proposal, guarded, proposer, search
from refold.propose.applied import _versions, save
from refold.propose.chat import Chat
from refold.propose.prompt import answers, question
from refold.propose.systematic import Systematic, alternatives
from refold.targets import load
from support.endpoint import EVENTS

pytest.importorskip("httpx")

EXAMPLES = Path(__file__).parents[3] / "examples" / "propose"
ORIGINAL = (EXAMPLES / "layer.py").read_text().replace("64, 128", "16, 24").replace("[512]", "[32]")
PROGRAM = {
    "inputs": {"x": "b t", "w": "d"},
    "sizes": {},
    "steps": [
        {"let": "e[b t]", "do": "exp", "of": ["x[b t]"]},
        {"let": "f[d]", "do": "exp", "of": ["w[d]"]},
        {"let": "y[b t]", "do": "contract", "of": ["e[b t]", "f[d]"]},
    ],
    "result": "y[b t]",
}
WRONG = {**PROGRAM, "steps": [*PROGRAM["steps"][:2], {**PROGRAM["steps"][2], "of": ["e[b t]", "f[d]", 1.001]}]}
SOURCE = (EXAMPLES / "agent.py").read_text().split('"""')[3]
HOSTILE = "import os\nos.kill(os.getppid(), 9)\nclass ModelNew: pass\n"
RIGHT = Terms(level="quick", threads=1, accept="right")


def block(language, content):
    return f"Because.\n\n```{language}\n{content}\n```\n"


def answer(kind, content):
    return block("json", json.dumps({"kind": kind, kind: content}))


@pytest.mark.parametrize("style", ["openai"], indirect=True)  # test_chat.py has all that differs in the other
def test_an_endpoint_that_does_everything_that_endpoints_do(server, style, tmp_path, monkeypatch):
    """Good and bad answers, errors that pass, broken and slow streams: each has the right verdict, and the run ends."""
    waits = []
    monkeypatch.setattr("refold.propose.chat._sleep", waits.append)
    events = EVENTS[style]
    slow = (each for each in events(answer("plan", {"skip": ["0:nothing"]})))
    server.script = [
        (429, {"retry-after": "3"}, "slow down"),
        events(answer("program", PROGRAM)),
        events(block("json", '{"kind": "program", "program": {')),
        events(answer("program", WRONG), whole=False),
        (503, {}, "overloaded"),
        events(answer("program", WRONG)),
        slow,
        events(answer("plan", {"inductor": {"rm -rf": True}})),
        events(block("python", HOSTILE)),
        events(block("python", SOURCE)),
        events("I have no idea, but you said sk-very-secret."),
        (401, {}, "no such key"),
    ]
    chat = Chat(style, "some-model", base_url=server.url, tries=3, idle=5.0)
    run = search(source(ORIGINAL, role="original"), chat, tmp_path / "run", RIGHT, budget=Budget(rounds=20))
    found = [(a.kind, a.outcome, a.check) for a in run.tried]
    assert found[:8] == [
        ("program", "accepted", ""),
        ("program", "refused", "grammar"),
        ("program", "refused", "N1"),
        ("plan", "accepted", ""),
        ("plan", "refused", "grammar"),
        ("source", "refused", "P4"),
        ("source", "accepted", ""),
        ("source", "refused", ""),
    ]
    assert run.tried[7].reason.startswith("the answer holds no fenced block")
    assert run.ended.startswith("an error:")
    assert waits[0] == 3.0
    assert len(waits) == 3
    assert "not JSON" in run.tried[1].reason
    assert "inductor takes the options" in run.tried[4].reason
    assert server.script == []
    written = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert written
    assert not any(b"sk-very-secret" in content for content in written)
    first = server.seen[1][2]["messages"][-1]["content"]
    for part in ("contract(", '"let": "add[b t d]"', "operations of a matrix product", "A plan may choose"):
        assert part in first or part.replace("contract(", '"do": "contract"') in first
    later = server.seen[5][2]["messages"][-1]["content"]
    assert "An earlier program was accepted" in later
    folder = tmp_path / "run"
    assert json.loads((folder / "accepted.rule.json").read_text())["name"] == "run 0"
    again = search(
        source(ORIGINAL, role="original"), proposer(f"replay:{folder}"), tmp_path / "again", RIGHT,
        budget=Budget(rounds=20), parallel=8,
    )  # fmt: skip
    assert [(a.kind, a.outcome, a.check) for a in again.tried] == found


def test_the_command_of_the_example_wins_and_another_layer_uses_its_rule(tmp_path):
    run, rules = tmp_path / "run", tmp_path / "rules"
    command = f"command:{sys.executable} {EXAMPLES / 'agent.py'}"
    done = CliRunner().invoke(app, ["optimize", str(EXAMPLES / "layer.py"), "--propose", command, "--run", str(run),
                                    "--level", "quick", "--accept", "always"])  # fmt: skip
    assert done.exit_code == 0, done.output
    events = [json.loads(line) for line in (run / "run.jsonl").read_text().splitlines()]
    kinds = [e["kind"] for e in events if e["event"] == "proposal"]
    outcomes = [e["outcome"] for e in events if e["event"] == "verdict"]
    assert kinds == ["source", "program"]
    assert outcomes == ["accepted", "accepted"]
    kept = CliRunner().invoke(app, ["apply", str(run), "--save", str(rules)])
    assert kept.exit_code == 0, kept.output
    assert "kept as" in kept.output
    assert (rules / "guards.json").is_file()  # of what is right, the first: the source
    with pytest.raises(ArgumentError, match=r"holds no rule; a rule's file ends with \.rule\.json"):
        refold.compile(torch.nn.Identity(), rules=rules)
    save_rule(events, rules)
    layer, inputs = load(str(EXAMPLES / "other_layer.py"), device="cpu", dtype="float32", seed=0)
    compiled = refold.compile(layer, rules=rules, cache=False)
    with torch.no_grad():
        got = compiled(*inputs)
    (row,) = compiled.report.rewrites
    assert row.name.startswith("rule ")
    assert row.status == "applied"
    assert {error["kind"] for error in row.errors} >= {"actual", "normal", "infinities"}
    torch.testing.assert_close(got, layer(*inputs))


def save_rule(events, rules):
    for file in (rules.parent / "run" / "trials").glob("*.jsonl"):
        evidence = json.loads(file.read_text().splitlines()[0])
        if "rule" in evidence:
            (rules / "one.rule.json").write_text(json.dumps(evidence["rule"]))


def test_a_rule_is_checked_where_it_is_used():
    """A wrong rule from anywhere changes nothing but the report."""
    region = {
        "inputs": {"x": "b t", "w": "d"}, "sizes": {"b": 4, "t": 5, "d": 6},
        "steps": [{"let": "a[b t d]", "do": "add", "of": ["x[b t]", "w[d]"]},
                  {"let": "e[b t d]", "do": "exp", "of": ["a[b t d]"]},
                  {"let": "y[b t]", "do": "contract", "of": ["e[b t d]"]}], "result": "y[b t]"}  # fmt: skip
    rule = {"schema": 1, "name": "wrong", "region": region, "program": WRONG}
    x, w = torch.randn(3, 7), torch.randn(9)

    def fn(x, w):
        return torch.exp(x[:, :, None] + w).sum(-1)

    compiled = refold.compile(fn, rules=rule, cache=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, w), fn(x, w))
    (row,) = [row for row in compiled.report.rewrites if row.name == "rule wrong"]
    assert row.status == "refused"
    assert "not equal to the original" in row.reason


@pytest.mark.slow
def test_an_accepted_source_runs_only_where_it_was_tried(tmp_path):
    once = proposer("file:" + str(write(tmp_path / "candidate.py", SOURCE)))
    search(source(ORIGINAL, role="original"), once, tmp_path / "run", RIGHT)
    save(tmp_path / "run", tmp_path / "kept")
    module, (x,) = load(str(write(tmp_path / "layer.py", ORIGINAL)), device="cpu", dtype="float32", seed=1)
    replaced = guarded(module, tmp_path / "kept")
    with torch.no_grad():
        torch.testing.assert_close(replaced(x), module(x))
        assert not replaced.fallbacks
        module.w.mul_(2)  # its parameters are the module's
        torch.testing.assert_close(replaced(x), module(x))
        for reason, call in {
            r"inputs float32\[3, 24\]": lambda: replaced(x[:3]),
            r"inputs float64\[16, 24\]": lambda: replaced(x.double()),
            "keyword arguments x": lambda: replaced(x=x),
            "training mode": lambda: (module.train(), replaced(x))[1],
        }.items():
            with pytest.warns(RefoldWarning, match=reason):
                call()
        module.eval()
        replaced(x[:3])  # warned of once
    with pytest.warns(RefoldWarning, match="gradients are wanted"):
        replaced(x).sum().backward()
    assert module.w.grad is not None
    assert sum(replaced.fallbacks.values()) == 6
    assert dict(replaced.named_parameters()).keys() == {"original.w"}
    guards = tmp_path / "kept" / "guards.json"
    other = json.loads(guards.read_text())
    other["versions"]["torch"] = "1.0"
    guards.write_text(json.dumps(other))
    with pytest.warns(RefoldWarning, match="versions: torch .* instead of 1.0"), torch.no_grad():
        guarded(module, tmp_path / "kept")(x)
    write(tmp_path / "kept" / "candidate.py", SOURCE + "\n")
    with pytest.raises(ArgumentError, match="not the source that was accepted"):
        guarded(module, tmp_path / "kept")


MODES = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x, times):
        if self.training:
            x = torch.zeros_like(x)
        return (x * self.w + self.b) * times


def get_inputs():
    return [torch.randn(4, 3), 2]
"""


def test_a_replacement_follows_its_layer(tmp_path, monkeypatch):
    """It has the mode that it was tried in and the parameters of now, and is for the values that it was tried with."""
    found = "file:" + str(write(tmp_path / "candidate.py", MODES.replace("class Model(", "class ModelNew(")))
    search(source(MODES, role="original"), proposer(found), tmp_path / "run", RIGHT)
    save(tmp_path / "run", tmp_path / "kept")
    module, (x, times) = load(str(write(tmp_path / "layer.py", MODES)), device="cpu", dtype="float32", seed=1)
    replaced = guarded(module.train(), tmp_path / "kept")
    module.eval()
    with torch.no_grad():
        module.w = torch.nn.Parameter(torch.full((3,), 5.0))
        module.double().float()
        module.b += 1
        torch.testing.assert_close(replaced(x, times), module(x, times), rtol=0, atol=0)
        assert not replaced.fallbacks
        shared = []
        monkeypatch.setattr("refold.propose.applied._share", lambda *modules: shared.append(modules))
        replaced(x, times)
        assert not shared  # nothing changed since the last call
        module.b = module.b.clone()
        replaced(x, times)
        replaced(x, times)
        assert len(shared) == 1
        with pytest.warns(RefoldWarning, match="3, it was tried on"):
            torch.testing.assert_close(replaced(x, 3), module(x, 3))
        with pytest.warns(RefoldWarning, match="not contiguous"):
            replaced(torch.randn(3, 4).T, times)
        with pytest.warns(RefoldWarning, match="autocast"), torch.autocast("cpu"):
            replaced(x, times)
        module.double()
        with pytest.warns(RefoldWarning, match="parameters are not float32"):
            replaced(x, times)


@pytest.mark.slow
def test_a_replacement_that_would_not_see_its_layer_s_parameters_is_refused(tmp_path):
    """A list of parameters would go on with the values that the source drew for itself."""
    text = MODES.replace("class Model(", "class ModelNew(")
    write(tmp_path / "original.py", MODES)
    module, _ = load(str(tmp_path / "original.py"), device="cpu", dtype="float32", seed=1)
    held = text.replace("        self.register", "        self.kept = [self.w]\n        self.register")
    for wrong, source_text in ((False, text), (True, held)):
        keep(tmp_path, source_text)
        expected = pytest.raises(TargetError, match="holds parameters or buffers in other places")
        with expected if wrong else contextlib.nullcontext():
            guarded(module, tmp_path)


@pytest.mark.slow
def test_a_replacement_is_compared_with_its_layer_at_its_first_call(tmp_path):
    """A view of parameters that the source drew for itself is no object that could be found; its numbers are."""
    text = MODES.replace("class Model(", "class ModelNew(")
    stale = text.replace("        self.register", "        self.rows = self.w.detach()[:]\n        self.register")
    stale = stale.replace("self.w ", "self.rows ").replace("self.rows = torch", "self.w = torch")
    assert stale.count("self.rows") > 1
    module, (x, times) = load(str(write(tmp_path / "original.py", MODES)), device="cpu", dtype="float32", seed=1)
    module.w.data += 1
    for wrong, source_text in ((False, text), (True, stale)):
        keep(tmp_path, source_text)
        replaced = guarded(module.eval(), tmp_path)
        expected = pytest.warns(RefoldWarning, match="did not give what the original gives")
        with torch.no_grad(), expected if wrong else contextlib.nullcontext():
            torch.testing.assert_close(replaced(x, times), module(x, times))
        assert bool(replaced.fallbacks) == wrong
        with torch.no_grad():
            torch.testing.assert_close(replaced(x, times), module(x, times))


def keep(folder, text):
    """Keep a source for the inputs of MODES, as if a run had accepted it."""
    inputs = [{"shape": [4, 3], "dtype": "float32"}, {"value": 2}]
    guards = {"schema": 2, "sha256": hashlib.sha256(text.encode()).hexdigest(), "attribute": "ModelNew",
              "inputs": inputs, "device": "cpu", "train": False, "dtype": "float32",
              "versions": _versions()}  # fmt: skip
    write(folder / "candidate.py", text)
    write(folder / "guards.json", json.dumps(guards))


def write(path, text):
    path.write_text(text)
    return path


def test_nothing_accepted_is_nothing_to_apply(tmp_path):
    with pytest.raises(ArgumentError, match="holds no run"):
        save(tmp_path, tmp_path / "kept")
    (tmp_path / "run.jsonl").write_text("")
    with pytest.raises(ArgumentError, match="accepted nothing"):
        save(tmp_path, tmp_path / "kept")


def test_files_of_all_kinds_are_proposals(tmp_path):
    write(tmp_path / "a.json", json.dumps({"kind": "program", "program": PROGRAM}))
    write(tmp_path / "b.json", json.dumps({"kind": "plan", "plan": {"passes": []}}))
    write(tmp_path / "c.py", SOURCE)
    found = proposer(f"file:{tmp_path}").propose(request(wanted=5))
    assert [(p.kind, p.note) for p in found] == [("program", "a.json"), ("plan", "b.json"), ("source", "c.py")]
    assert json.loads(found[0].text) == {"program": PROGRAM}


def test_blocks_of_an_answer_are_proposals_by_their_language():
    text = answer("program", PROGRAM) + block("python", SOURCE) + block("", '{"kind": "plan"}') + block("text", "no")
    assert [p.kind for p in answers(text)] == ["program", "source", "plan"]
    assert [p.kind for p in answers(block("json", "{"))] == ["program"]


def request(**parts):
    from refold.propose import Request

    return Request("class Model: ...", "float32", False, ({"shape": [2, 3], "dtype": "float32"},), {}, **parts)


REGION = {"inputs": {"a": "i j", "b": "j k", "c": "k l"}, "sizes": {"i": 30, "j": 31, "k": 32, "l": 2},
          "steps": [{"let": "p[i k]", "do": "contract", "of": ["a[i j]", "b[j k]"]},
                    {"let": "h[i k]", "do": "mul", "of": ["p[i k]", 0.5]},
                    {"let": "q[i l]", "do": "contract", "of": ["h[i k]", "c[k l]"]},
                    {"let": "y[i l]", "do": "exp", "of": ["q[i l]"]}], "result": "y[i l]"}  # fmt: skip


def test_search_proposes_orders_the_least_work_first_and_then_plans():
    from refold.compiler.notation.program import parse

    others = alternatives(parse(REGION), 4)
    assert len(others) == 2
    assert "contract(c[k l], b[" in str(others[0])  # 30 * 31 * 2 + 31 * 32 * 2 multiply-adds
    places = [{"key": "0:mm", "pass": "multiply out", "detail": "", "status": ""}]
    choices = {"passes": ["multiply out"], "places": places,
               "operators": {}, "inductor": {"max_autotune": [True, False]}}  # fmt: skip
    facts = {"name": "y", "line": "", "program": REGION, "flops": 1, "bytes": 1, "least_bytes": 1, "least_ms": 1.0}
    asked = request(wanted=20, regions=(facts,), choices=choices)
    one = Systematic()
    found = one.propose(asked)
    assert [p.kind for p in found[: len(others)]] == ["program"] * len(others)
    assert [json.loads(p.text)["plan"] for p in found[len(others) :]] == [
        {"skip": ["0:mm"]}, {"passes": []}, {"passes": ["multiply out"]},
        {"inductor": {"max_autotune": True}}, {"inductor": {"max_autotune": False}},
    ]  # fmt: skip
    assert one.propose(asked) == []  # nothing twice
    assert "y[i l] = exp" in question(asked) or '"let": "y[i l]"' in question(asked)


def test_search_finds_the_order_that_wins(tmp_path):
    text = """
import torch

class Model(torch.nn.Module):
    def forward(self, a, b, c):
        return torch.sin(((a @ b) * 0.01) @ c)

def get_inputs():
    return [torch.randn(200, 200), torch.randn(200, 200), torch.randn(200, 2)]
"""
    run = search(source(text, role="original"), proposer("search"), tmp_path / "run", RIGHT, budget=Budget(rounds=1),
                 parallel=2)  # fmt: skip
    assert run.tried[0].kind == "program"
    assert run.tried[0].outcome == "accepted", run.tried[0].reason


def test_the_layer_that_cannot_be_compiled_takes_sources_alone(tmp_path):
    text = ORIGINAL.replace("torch.exp(x[:, :, None] + self.w).sum(-1)", "x.__class__(x.tolist()) * self.w.sum()")

    class Both:
        name, destination, facts = "both", "", True

        def propose(self, request):
            first = not request.attempts
            return [Proposal(json.dumps({"program": PROGRAM}), "", "program")] if first else []

        def spent(self):
            return {}

    run = search(source(text, role="original"), Both(), tmp_path / "run", RIGHT)
    assert run.tried[0].outcome in ("refused", "unjudged")
