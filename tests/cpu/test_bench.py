"""``refold bench``: suites that load, rows that are kept, runs that can be compared."""

import json
import re
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, permutations
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

import refold
from refold.bench import (
    compile_time,
    generation_torch,
    language_models,
    linear_attention,
    models,
    operators_gpu,
    peers,
    progress,
    published,
    rows,
    suites,
    training,
)  # fmt: skip
from refold.bench.contest import contest, times_ms
from refold.bench.recurrences import medians_ms, recurrences
from refold.cli import app
from refold.errors import ArgumentError, CapacityError, MissingDependency, TargetError
from refold.generate.torch import Generator
from refold.models import counts
from refold.models.checkpoint import random_params
from refold.models.configs import Mamba2Config
from refold.ops.timed import from_checkout
from support.models import MIXER

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture
def toy(monkeypatch):
    """Plant a suite that measures nothing."""

    def toy(*, sizes: tuple[int, ...] = (1, 2), wrong: bool = False, stops: int = 0, fails: bool = False):
        """Time nothing."""
        for size in sizes:
            if not progress.wanted(case=str(size)):
                continue
            if stops == size:
                raise KeyboardInterrupt
            if fails:
                raise ZeroDivisionError("planted")
            yield {"case": str(size), "times_ms": {"refold": 2.0 * size}, **({"refused": "planted"} if wrong else {})}

    monkeypatch.setattr(suites.Suite, "load", lambda self: toy)
    return toy


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.05, "0.0500"),
        (3.0, "3.00"),
        (9.996, "10.0"),
        (99.94, "99.9"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (1e-5, "1.00e-05"),
    ],
)
def test_numbers_have_three_digits(value, text):
    assert rows.rounded(value) == text


@pytest.mark.parametrize("suite", suites.SUITES.values(), ids=lambda suite: suite.name)
def test_every_suite_can_be_listed(suite):
    assert suite.about().endswith(".")
    assert suite.settings({}) == {}


def test_the_list_names_all_suites_and_options():
    said = run("list").output
    assert all(name in said for name in suites.SUITES)
    assert "steps=512,4096" in said
    assert "fused=" in said


def test_rows_are_written_as_they_are_measured_and_compared(toy, tmp_path):
    out = tmp_path / "new" / "rows.jsonl"
    assert run("run", "cpu", "--out", str(out)).exit_code == 0
    assert run("run", "cpu", "--set", "sizes=4", "--out", str(out)).exit_code == 0
    found = rows.read(out)
    assert [row["case"] for row in found] == ["1", "2", "4"]
    assert found[0]["suite"] == "cpu"
    assert found[2]["command"] == "refold bench run cpu --set=sizes=4"
    assert found[0]["env"]["torch"]
    faster = tmp_path / "faster.jsonl"
    for row in found[1:]:
        rows.append(faster, row | {"times_ms": {"refold": row["times_ms"]["refold"] / 4}})
    assert [(a, b) for *_, a, b in rows.compare(found, rows.read(faster))] == [(4.0, 1.0), (8.0, 2.0)]
    assert "4.00          cpu 2: refold times_ms" in run("compare", str(out), str(faster)).output


def test_times_whose_percentiles_overlap_are_said_to_be_the_same():
    def row(low, high):
        times = {"median_ms": (low + high) / 2, "p20_ms": low, "p80_ms": high}
        return {"case": "1", **{name: {"refold": ms} for name, ms in times.items()}}

    def verdicts(*pair):
        return [(one.which, one.verdict) for one in rows.compare([row(2.0, 3.0)], [row(*pair)])]

    assert verdicts(1.0, 1.9) == [("refold median_ms", "faster")]
    assert verdicts(1.0, 2.1) == verdicts(2.9, 4.0) == [("refold median_ms", "same")]
    assert verdicts(3.1, 4.0) == [("refold median_ms", "slower")]
    assert rows.compare([{"case": "1", "hot_ms": 1.0}], [{"case": "1", "hot_ms": 1.0}])[0].verdict == ""


@pytest.mark.slow
def test_a_run_that_was_stopped_keeps_its_rows_and_goes_on(toy, tmp_path):
    out = str(tmp_path / "rows.jsonl")
    stopped = run("run", "cpu", "--set", "sizes=1,2,3", "--set", "stops=3", "--out", out)
    assert stopped.exit_code == 130
    assert "--resume continues" in stopped.stderr
    assert [row["case"] for row in rows.read(tmp_path / "rows.jsonl")] == ["1", "2"]
    resumed = run("run", "cpu", "--set", "sizes=1,2,3", "--out", out, "--resume")
    assert "... 1/1 cpu 3" in resumed.stderr
    assert [row["case"] for row in rows.read(tmp_path / "rows.jsonl")] == ["1", "2", "3"]
    again = run("run", "cpu", "--set", "sizes=1,2,3", "--out", out, "--resume")
    assert f"nothing to measure: {out} has all of it" in again.stderr
    assert again.exit_code == 0


@pytest.mark.slow
def test_published_results_stand_next_to_their_own_code_or_a_reason(toy, tmp_path, monkeypatch):
    def suite(*, checkout: str = "", device: str = "cuda"):
        """Time nothing."""
        row = {"case": device, "errors": {"refold": 1e-7}, "launches": {"eager": 900, "refold": 2}}
        yield row | {"times_ms": {"eager": 9.0, "refold": 2.0, "copy": 0.1, **({"theirs": 3.0} if checkout else {})}}

    part = published.Part("fused scan", "cpu", {"device": "cpu"}, "theirs", peer="mamba2-jax")
    monkeypatch.setattr(published, "PARTS", {"cpu": (part,)})
    monkeypatch.setattr(suites.Suite, "load", lambda self: published.published if self.name == "published" else suite)
    out = tmp_path / "rows.jsonl"
    assert run("run", "published", "--cpu", "--set", f"peers={tmp_path}", "--out", str(out)).exit_code == 0
    (alone, counts) = rows.read(out)
    assert (alone["ratio"], alone["of_fastest"]) == (None, 4.5)
    assert alone["not_run"]["theirs"] == "not run: no checkout of it (mamba2-jax) was given"
    assert (counts["result"], counts["counts"]["eager"]) == ("correctness and traces", 900)
    assert len({rows.identity(row) for row in (alone, counts)}) == 2
    (tmp_path / "mamba2-jax").mkdir()
    (alone, _) = published.published(device="cpu", peers=str(tmp_path))
    assert (alone["ratio"], alone["of_fastest"], alone["not_run"]) == (1.5, 1.5, {})
    assert "nothing to measure" in run("run", "published", "--cpu", "--out", str(out), "--resume").stderr

    def too_large(**options):
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    monkeypatch.setattr(suites.Suite, "load", lambda self: too_large)
    (alone,) = published.published(device="cpu", peers=str(tmp_path))
    assert alone["not_run"]["refold"] == "not run: OutOfMemoryError: CUDA out of memory"
    assert alone["not_run"]["theirs"] == alone["not_run"]["refold"]


@pytest.mark.parametrize("part", [part for parts in published.PARTS.values() for part in parts])
def test_parts_of_published_results_name_options_of_their_suites(part):
    suite, options = suites.find(part.suite), dict(part.options)
    assert part.result in published.RESULTS
    if part.peer is not None:
        options[published.PEERS[part.peer]] = ""
    known = suite.options()
    assert options.keys() <= known.keys()
    assert all(type(value) is type(known[name]) for name, value in options.items() if name != "batch")


@pytest.mark.slow
def test_a_limit_of_time_leaves_measurements_to_the_next_run(toy, tmp_path):
    out = str(tmp_path / "rows.jsonl")
    ended = run("run", "cpu", "--out", out, "--limit", "0")
    assert ended.exit_code == 3
    assert "measurements left: 2; the same command with --resume goes on" in ended.stderr
    assert not Path(out).exists()
    assert run("run", "cpu", "--out", out, "--limit", "600", "--resume").exit_code == 0
    assert len(rows.read(Path(out))) == 2


@pytest.mark.slow
def test_one_of_several_suites_that_fails_does_not_stop_the_others(toy, tmp_path):
    out = str(tmp_path / "rows.jsonl")
    ended = run("run", "ssd", "cpu", "--set", "ssd.fails=true", "--out", out)
    assert ended.exit_code == 1
    assert "ZeroDivisionError: planted" in ended.stderr
    assert "failed: ssd; the reasons are above" in ended.stderr
    assert {row["suite"] for row in rows.read(Path(out))} == {"cpu"}
    assert isinstance(run("run", "ssd", "--set", "fails=true").exception, ZeroDivisionError)


def test_the_name_gpu_runs_all_that_need_one_and_options_can_be_of_one_suite():
    chosen = suites.choose(["gpu", "cpu"], {"ssd.fused": "/x", "cpu.rounds": "2"})
    names = {suite.name for suite, _ in chosen}
    assert names == {name for name, suite in suites.SUITES.items() if suite.device == "cuda"} | {"cpu"}
    for suite, options in chosen:
        assert suite.settings(options).keys() == options.keys()
        assert suite.runs_on(suite.settings(options)) == ("cpu" if suite.name == "cpu" else "cuda")
    fusion = [(suite, suite.settings(options)) for suite, options in chosen if suite.name == "fusion-example"]
    done = [{"suite": "fusion-example", "case": "fused_mamba", "layers": 8, "dtype": kind, "batch": batch}
            for kind in ("float32", "bfloat16") for batch in (1, 4, 16)]  # fmt: skip
    counts = [progress.count([(suite.name, partial(suite.load(), **options))], done) for suite, options in fusion]
    assert counts == [0, 3]  # the same sizes with another number of layers are not done
    given = {suite.name: options for suite, options in chosen}
    assert (given["ssd"], given["cpu"]) == ({"fused": "/x"}, {"rounds": "2"})
    with pytest.raises(ArgumentError, match="the suite ssd is not run"):
        suites.choose(["cpu"], {"ssd.fused": "/x"})


def test_rows_are_stored_by_machine_and_suite_in_place_of_older_ones(tmp_path):
    gpu = {"gpu": "NVIDIA H200", "processor": "Intel(R) Xeon(R) Processor @ 2.8GHz", "threads": 2}
    row = {"suite": "ssd-sizes", "device": "cuda", "case": "1", "median_ms": 2.0, "date": "2026-01-02", "env": gpu}
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for new in (row, row | {"case": "2"}, row | {"suite": "cpu", "device": "cpu"}):
        rows.append(first, new)
    for new in (row | {"median_ms": 1.0}, row | {"case": "2", "not_run": "no memory"}, row | {"case": "3"},
                row | {"case": "2", "median_ms": 3.0, "date": "2026-01-01"}):  # fmt: skip
        rows.append(second, new)
    results = tmp_path / "results"
    assert "results is not a folder" in str(run("store", str(first), "--results", str(results)).exception)
    results.mkdir()
    assert "ssd_sizes.jsonl: 0 replaced, 2 added" in run("store", str(first), "--results", str(results)).output
    said = run("store", str(second), "--results", str(results)).output
    assert "nvidia-h200/ssd_sizes.jsonl: 1 replaced, 1 added, 1 left as they were" in said
    found = rows.stored(results, "nvidia-h200", "ssd-sizes", "ssd")
    assert [(one["case"], one["median_ms"], "not_run" in one) for one in found] == [
        ("1", 1.0, False), ("2", 2.0, False), ("3", 2.0, False),
    ]  # fmt: skip
    assert len(rows.stored(results, "intel-xeon-2-threads", "cpu")) == 1
    with pytest.raises(ArgumentError, match="does not say its suite and machine"):
        rows.store([{"case": "1"}], results)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("layer.py --set fused=/home/a.b/fused-1/x", "layer.py --set fused=x"),
        ("/opt/venv/lib/python3.11/site-packages/transformers/models/a.py:7: y", "transformers/models/a.py:7: y"),
        ("tokens/s, https://a.org/b/c, ../a/b.py, src/a/b.py, 1 / 2 / 3", None),
    ],
)
def test_stored_rows_name_no_folder_of_the_machine(text, kept, tmp_path):
    env = {"processor": "a", "threads": 1}
    rows.store([{"suite": "cpu", "device": "cpu", "command": text, "env": env}], tmp_path)
    assert rows.stored(tmp_path, "a-1-thread", "cpu")[0]["command"] == (kept or text)


@pytest.mark.skipif(find_spec("mamba_ssm") is not None, reason="mamba-ssm is installed")
def test_what_could_not_run_says_so_and_is_tried_again():
    model = Mamba2Config(vocab_size=64, nlayers=1, mixer=MIXER)
    mamba_ssm, _, accelerated = generation_torch.rivals(model, "cpu", torch.float32)
    need, found = generation_torch.needed(model, 2), []
    for rival in (mamba_ssm, accelerated):
        found += generation_torch.rival_rows(rival, "tiny", "decode", rival.decoder, (2, 5, 3), need, 1, 3)
        found += generation_torch.rival_rows(
            rival, "tiny", "prefill", rival.reader, (9,), counts.decode(model, 2, 4), 1
        )
    assert found[2]["state_dtype"] == "float32"
    assert "No module named 'mamba_ssm'" in found[0]["not_run"]
    assert [row["backend"] for row in found if row.get("median_s", 0) > 0] == ["transformers, accelerated"] * 2
    run = progress.BenchRun(found, told=lambda text: None)
    named = [{key: row[key] for key in ("backend", "case")} for row in found]
    run.done = [{"suite": "", **row} for row in found]
    assert [run.wanted(what) for what in named] == [True, True, False, False]


def test_packages_are_hidden_for_a_while(monkeypatch):
    """transformers' layers in PyTorch are measured where mamba-ssm is installed, too."""
    for name in ("mamba_ssm", "mamba_ssm.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with peers.hidden("mamba_ssm", "causal_conv1d"):
        assert peers.absent("mamba_ssm.ops") is not None
    assert peers.absent("mamba_ssm.ops") is None
    assert "causal_conv1d" not in sys.modules


@pytest.mark.slow
def test_progress_says_what_runs_and_of_how_many(toy):
    assert run("run", "cpu", "--set", "sizes=5,7").stderr.splitlines() == ["... 1/2 cpu 5", "... 2/2 cpu 7"]
    assert run("run", "cpu", "-q").stderr == ""


@pytest.mark.parametrize(
    ("suite", "count"),
    [("cpu", 8), ("linear-attention", 8), ("compile-time", 2), ("fusion-example", 6),
     ("training", 3), ("ssd-jax", 1), ("recurrences", 104), ("models", 11), ("generation-cpu", 3),
     ("generation-torch-cpu", 2), ("engines", 29), ("generate", 36), ("decode", 43), ("prefill", 38), ("starts", 4)],
)  # fmt: skip
def test_measurements_are_counted_without_being_made(suite, count, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = {"device": "cpu"} if "device" in suites.find(suite).options() else {}
    assert progress.count([(suite, partial(suites.find(suite).load(), **options))], []) == count


def test_a_compile_beyond_the_budget_is_not_run_and_the_row_says_so(monkeypatch):
    monkeypatch.setattr(refold, "compile", partial(refold.compile, verify="off", accept="always"))
    (row,) = recurrences(steps=(20,), case=("ema",), budget=0.0)
    assert row["times_ms"].keys() == {"eager", "refold"}
    assert "the budget is 0 s" in row["not_run"]["torch.compile"]
    assert row["errors"]["refold"] < 1e-5


@pytest.mark.parametrize(
    ("suite", "option", "text", "said"),
    [
        ("compile-time", "steps", "512,0", r"compile-time: steps is '0'\. Give 1 to"),
        ("cpu", "tokens", "-1", "Give 1 to"),
        ("cpu", "rounds", "0", "Give 1 to"),
        ("cpu", "tokens", "99999999999999999999", "Give 1 to"),
        ("training", "width", "-1", "Give 0 to"),
        ("training", "calls", "1e3", "Give a value like 4"),
        ("fusion-example", "width", "0", "Give 1 to"),
        ("recurrences", "budget", "nan", "Give 0 to 1000000 seconds"),
        ("recurrences", "budget", "-1", "Give 0 to 1000000 seconds"),
        ("kernelbench", "seconds", "inf", "Give 0 to 1000000 seconds"),
        ("models", "both", "1", "Give true or false"),
    ],
)
def test_a_value_outside_the_range_of_an_option_is_refused(suite, option, text, said):
    with pytest.raises(ArgumentError, match=said):
        suites.find(suite).settings({option: text})


def test_a_limit_of_time_may_be_none():
    assert suites.find("kernelbench").settings({"total": "inf"})["total"] == float("inf")


@pytest.mark.parametrize(
    ("suite", "option", "text", "said"),
    [
        ("training", "layers", "mamba3", r"layers is 'mamba3'\. Give one of mamba1, mamba2, granite"),
        ("training", "dtype", "int8", "Give one of bfloat16, float32"),
        ("training", "verify", "slow", "Give one of quick, off"),
        ("training", "width", "100", "Give a multiple of 32"),
        ("models", "case", "gpt", "Give one of mamba2,"),
        ("models", "width", "640", "a multiple of 512"),
        ("linear-attention", "case", "x", "Give one of linear-attention, retnet"),
        ("recurrences", "case", "em", r"case is 'em'\. Give one of ema, min-gru"),
        ("recurrences", "steps", "3", "leave out holt-winters"),
        ("fusion-example", "dtype", "int8", "Give one of float32"),
        ("granite-layer", "dtype", "", "dtype is ''. Give one of"),
        ("kernelbench", "levels", "level9", "Give one of level1"),
        ("generation", "models", "9B", "Give one of 130M"),
        ("decode", "states", "int8", "Give one of float32"),
        ("engines", "model", "gpt", "Give one of nemotron-h-8b"),
    ],
)
def test_an_unknown_name_is_refused_before_anything_is_measured(suite, option, text, said):
    found = suites.find(suite)
    at = {"device": "cpu"} if "device" in found.options() else {}
    with pytest.raises(ArgumentError, match=said):
        progress.count([(suite, partial(found.load(), **found.settings({**at, option: text})))], [])


def test_problems_of_kernelbench_are_chosen_by_name(tmp_path):
    for level, file in (("level1", "1_a.py"), ("level1", "2_b.py"), ("level2", "1_c.py")):
        (tmp_path / level).mkdir(exist_ok=True)
        (tmp_path / level / file).write_text("")
    run = partial(suites.find("kernelbench").load(), folder=str(tmp_path), levels=("level1", "level2"))
    assert progress.count([("kernelbench", run)], []) == 3
    assert progress.count([("kernelbench", partial(run, only=("level2/1",)))], []) == 1
    with pytest.raises(ArgumentError, match=r"only is 'level2/2'\. Give problems of the levels, such as level1/1"):
        next(run(only=("level2/2",)))
    with pytest.raises(ArgumentError, match="has no folder level3"):
        next(run(levels=("level1", "level3")))


def test_a_device_that_is_not_here_is_refused_in_one_sentence():
    """So that a suite for a GPU does not end in PyTorch's traceback on a machine without one."""
    for name, device in (("training", "tpu:0"), ("models", "cpu:x"), ("linear-attention", "cuda:99")):
        found = run("run", name, "--set", f"device={device}").exception
        assert isinstance(found, ArgumentError)
        assert f"{name}: device {device!r} cannot be used here: " in str(found)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. More advice"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Code 12"
        ),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
    ],
    ids=["host", "gpu", "torch", "jax"],
)
def test_sizes_beyond_the_memory_are_one_sentence(error, monkeypatch):
    def toy():
        """Take all memory."""
        if progress.wanted(case="1"):
            raise error
        yield {}

    monkeypatch.setattr(suites.Suite, "load", lambda self: toy)
    found = run("run", "cpu").exception
    assert isinstance(found, CapacityError)
    assert re.match(r"cpu needs more memory: [^.\[]+\. Give smaller sizes$", str(found))


def test_no_program_is_always_timed_after_the_same_one(monkeypatch):
    """What ran before leaves the caches, and with them tens of microseconds, to the next."""
    timed = []
    monkeypatch.setattr("refold.bench.recurrences._sample", lambda run, device: timed.append(run()) or 1.0)
    names = ["eager", "refold", "torch.compile"]
    times = medians_ms({name: partial(str, name) for name in names}, torch.device("cpu"))
    assert times == dict.fromkeys(names, 1.0)
    assert {*pairwise(timed)} >= {*permutations(names, 2)}
    assert all(sorted(timed[at : at + 3]) == sorted(names) for at in range(0, len(timed), 3))


def test_what_is_not_right_is_refused_and_the_exit_code_says_so(toy):
    assert run("run", "cpu", "--set", "wrong=true").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no-such"], "there is no suite 'no-such'. There are pointwise"),
        (["run", "cpu", "--set", "shape=3"], "has no option shape. It has sizes, wrong, stops, fails"),
        (["run", "cpu", "--set", "sizes=1,x"], "sizes is 'x'. Give a value like 1"),
        (["run", "cpu", "--set", "wrong=1"], "Give true or false"),
        (["run", "cpu", "--set", "wrong"], "give name=value"),
        (["run", "cpu", "--resume"], "--resume needs --out FILE"),
        (["run", "cpu", "--limit", "nan"], "--limit is nan"),
        (["run", "cpu", "--set", "sizes=1,-2"], "sizes is '-2'. Give 1 to 2147483647"),
        (["run", "cpu", "--set", "stops=-1"], "stops is '-1'. Give 0 to"),
        (["run", "cpu", "--set", "fails=true", "--out", "/dev/null/rows"], "/dev/null/rows cannot be written"),
        (
            ["plot", "operators", "--results", str(RESULTS), "--out", "/dev/null/x"],
            "--out /dev/null/x cannot be written",
        ),
        (["compare", "no-such.jsonl", "no-such.jsonl"], "no-such.jsonl cannot be read"),
    ],
)
def test_bad_input_names_what_came_and_what_to_do(toy, arguments, message):
    error = run(*arguments).exception
    assert isinstance(error, ArgumentError)
    assert message in str(error)


def test_lines_that_are_no_rows_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"case": "1"}\n\n[1]\n')
    with pytest.raises(ArgumentError, match=r"rows.jsonl:3 is '\[1\]', not a JSON object"):
        rows.read(path)
    path.write_bytes(b"\xb2{}")
    with pytest.raises(ArgumentError, match=r"rows\.jsonl is not text in UTF-8"):
        rows.read(path)


def test_rows_of_all_schemas_have_times():
    assert rows.times_ms({"median_ms": 2.0, "median_s": None, "copy_ms": 1}) == {"median_ms": 2.0, "copy_ms": 1}
    assert rows.times_ms({"median_s": 0.5, "first_call_s": {"refold": 3}}) == {
        "median_s": 500.0,
        "refold first_call_s": 3000.0,
    }


def test_the_environment_is_json():
    assert {"refold", "torch", "processor", "threads"} <= json.loads(run("env").output).keys()


def test_the_revision_is_that_of_the_source_and_of_nothing_around_it(tmp_path, monkeypatch):
    monkeypatch.delenv("REFOLD_REVISION", raising=False)
    file = tmp_path / "rows.py"
    file.write_text("1\n")

    def git(*arguments):
        given = ["-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(["git", *given], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    assert rows.revision(file) == "unknown"
    git("add", "rows.py")
    git("commit", "-qm", "one")
    clean = rows.revision(file)
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    file.write_text("2\n")
    assert rows.revision(file) == f"{clean}-dirty"


def test_a_real_suite_runs():
    (row,) = compile_time.compile_time(steps=(32,))
    assert row["first_call_s"] > 0
    assert row["report"]["graphs"][0]["rewrites"]


def test_a_line_of_the_granite_layer_is_timed_with_what_is_right_only():
    pytest.importorskip("transformers")
    from refold.bench import granite_layer

    inputs = [torch.randn(1, 24, 2, 16) for _ in range(2)]
    others = {
        "wrong": lambda C, B: C @ B.mT,
        "fails": lambda C, B: 1 / 0,
        "twice": lambda C, B: granite_layer.multiply_sum(C, 2 * B),
    }
    row = granite_layer.compared(granite_layer.multiply_sum, others, inputs, 1)
    assert row["times_ms"].keys() == {"eager", "refold", "torch.compile"}
    assert row["kernels"]["eager"] == 2
    verdicts = {pair.which: pair.verdict for pair in rows.compare([row], [row])}
    assert verdicts["eager times_ms"] == "same"
    assert row["not_run"]["twice"] == "an error above 0.0001"
    assert row["not_run"]["fails"] == "ZeroDivisionError: division by zero"
    assert row["not_run"]["wrong"].startswith("RuntimeError: The size of tensor")


@pytest.mark.parametrize("name", models.MODELS)
def test_models_have_as_many_layers_as_they_are_given(name):
    model, x = models.make(name, 128, 1), torch.randn(1, 5, 128)
    assert len(model.layers) == 1
    assert models.measure(model, {"eager": model}, x, 1e-4, 1)["times_ms"].keys() == {"eager"}


def test_models_are_compared_with_float64_before_they_are_timed():
    model = models.make("mamba2", 64, 1)
    fast = models._accelerated(model)
    programs = {"accelerated": fast, "refold": model, "fails": lambda **_: 1 / 0}
    row = models.measure(model, programs, torch.randn(1, 9, 64), 1e-4, 1)
    assert row["times_ms"].keys() == {"accelerated", "refold"}
    assert "division by zero" in row["not_run"]["fails"]
    del programs["fails"]
    fast.layers[0].mixer.D = torch.nn.Parameter(model.layers[0].mixer.D + 0.1)
    refused = models.measure(model, programs, torch.randn(1, 9, 64), 1e-4, 1)
    assert refused["refused"].startswith("accelerated: an error")
    assert refused["times_ms"].keys() == {"refold"}


def test_programs_of_linear_attention_agree():
    given = {"tokens": (17,), "batch": 1, "heads": 2, "channels": 4, "dtype": "float32", "rounds": 1, "verify": "off"}
    (row,) = linear_attention.linear_attention(device="cpu", case=("retnet",), **given)
    assert row["median_ms"].keys() == row["errors"].keys() == {"refold", "refold.ops", "eager"}
    assert row["not_run"].keys() == {"fla"}
    wrong = {"refold": lambda q, k, v, g: v}
    inputs = [torch.randn(1, 6, 1, n) for n in (4, 4, 4, 1)]
    refused = linear_attention.measure(linear_attention.loop, wrong, inputs, 1e-4, 1)
    assert refused["not_run"] == {"refold": "an error above 0.0001"}
    assert refused["refused"] == "refold: an error above 0.0001"


@pytest.mark.parametrize("wrong", [lambda: torch.tensor([1.0, torch.nan]), lambda: 1 / 0], ids=["nan", "raises"])
def test_a_contest_times_what_is_right_and_only_ours_refuse_the_row(wrong):
    right, cpu = partial(torch.ones, 2), torch.device("cpu")
    row, runs = contest({"eager": right, "fla": wrong}, lambda: torch.ones(2).double(), 1e-4, 1, cpu)
    assert row["times_ms"].keys() == runs.keys() == {"eager"}
    assert "refused" not in row
    row, runs = contest({"eager": right, "refold": wrong}, lambda: torch.ones(2).double(), 1e-4, 1, cpu)
    assert row["refused"] == f"refold: {row['not_run']['refold']}"
    assert runs.keys() == {"eager"}


def test_a_fast_program_is_not_timed_right_after_a_slow_one():
    """Its call would pay for what the slow one left in the host's caches."""
    order = []

    def called(name, seconds):
        order.append(name)
        time.sleep(seconds)

    programs = {"fast": partial(called, "fast", 0.004), "slow": partial(called, "slow", 0.02)}
    times = times_ms(programs, 3, torch.device("cpu"))
    turns = "".join(name[0] for name in order).split("s")
    assert turns[:3] == ["f"] * 3
    assert all(2 <= len(turn) <= 4 for turn in turns[3:5])  # ten milliseconds of calls, and the one that counts
    assert turns[5:] == [""]
    assert [len(found) for found in times.values()] == [3, 3]


def test_only_our_own_programs_refuse_a_row_of_training():
    layer, u = torch.nn.Linear(4, 4), torch.randn(2, 3, 4, requires_grad=True)

    def measured(**programs):
        return training.measure(layer, programs, u, 1e-4, 1, False)

    def wrong(x):
        return layer(x) * 1.01

    row = measured(**{"refold": layer, "torch.compile": wrong, "eager": wrong})
    assert "refused" not in row
    assert row["not_run"] == {"torch.compile": "an error above 0.0001"}
    assert row["median_ms"].keys() == {"refold", "eager"}
    assert row["errors"]["eager"] > 1e-3
    row = measured(refold=wrong, eager=layer)
    assert row["refused"] == "refold: an error above 0.0001"
    assert row["median_ms"].keys() == {"eager"}


def test_a_loop_of_the_host_decodes_what_the_generator_does():
    model = Mamba2Config(vocab_size=64, nlayers=1, mixer=MIXER)
    generator, ends = Generator(model, random_params(model)), []
    for make in (generation_torch.decoder, generation_torch.host_decoder):
        read = generator.read
        generator.read = lambda prompts, read=read: ends.append(read(prompts)) or ends[-1]
        make(generator, 2, 5, 3)()
        generator.read = read
    torch.testing.assert_close(*(end.logits for end in ends))
    narrow = generation_torch.decoder(Generator(model, random_params(model), state_dtype="bfloat16"), 2, 5, 3)
    least = [
        generation_torch.needed(model, 2)(call).bytes for call in (narrow, generation_torch.decoder(generator, 2, 5, 3))
    ]
    assert least[1] - least[0] == 2 * 2 * 2 * counts.state_elements(model)[0]  # rows, read and written, bytes saved
    assert generator.lengths(ends[0]).tolist() == generator.lengths(ends[1]).tolist() == [8, 8]


def test_a_slow_call_is_timed_once(monkeypatch):
    clock, made = [0.0], []

    def call(seconds):
        clock[0] += seconds
        made.append(seconds)

    monkeypatch.setattr(language_models.time, "perf_counter", lambda: clock[0])
    slow = 2 * language_models.SLOW_S
    found = list(
        language_models.in_turns(
            {"a": partial(call, 1.0), "b": partial(call, slow)}, "tiny", "read", 3, 1, counts.Counts(1, 1)
        )
    )
    assert [(row["median_s"], row["n"]) for row in found] == [(1.0, 3), (slow, 1)]
    assert sorted(made) == [1.0] * 4 + [slow]


def test_rivals_of_an_operator_are_judged_with_it(monkeypatch):
    monkeypatch.setattr(operators_gpu, "time_ms", lambda run, count: [run() is None, 2.0, 3.0])
    x, B = torch.randn(1, 9, 2, 4), torch.randn(1, 9, 1, 3)
    arguments = {"x": x, "dt": torch.rand(1, 9, 2), "A": -torch.rand(2), "B": B, "C": B}
    right = refold.ops.ssd(**arguments)[0]
    worse = right + 5e-3 * right.square().mean().sqrt()
    programs = {"mamba_ssm": lambda: worse, "fused": lambda: 1 / 0}
    case = operators_gpu.TimedCall("ssd", "1x9x2", arguments, programs, graded=True)
    found = operators_gpu.rivals(case)
    assert found["mamba_ssm_ms"] == 2.0
    assert found["fused_ms"] == "not run: ZeroDivisionError: division by zero"
    assert found["accuracy"]["refold"]["within_1e-3"] == 1
    assert found["accuracy"]["mamba_ssm"] == pytest.approx({"error": 5e-3, "within_1e-3": 0, "within_1e-2": 1}, rel=0.1)
    assert case.accuracy(lambda: right / 0)["error"] == float("inf")


def test_a_checkout_is_imported_next_to_the_package_of_its_name(tmp_path, monkeypatch):
    for folder, value in (("installed", 1), ("checkout", 2)):
        (tmp_path / folder / "twice_here").mkdir(parents=True)
        (tmp_path / folder / "twice_here" / "__init__.py").write_text("from twice_here.inner import value\n")
        (tmp_path / folder / "twice_here" / "inner.py").write_text(f"value = {value}\ndef fn():\n    return value\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    (tmp_path / "checkout" / "twice_here" / "__init__.py").write_text("import an_extension_that_was_not_built\n")
    import twice_here

    fn = from_checkout(str(tmp_path / "checkout"), "twice_here.inner", "fn")
    assert (fn(), twice_here.value, sys.modules["twice_here"]) == (2, 1, twice_here)
    with pytest.raises(ArgumentError, match=r"has no twice_here.inner.gn that can be imported"):
        from_checkout(str(tmp_path / "checkout"), "twice_here.inner", "gn")
    assert sys.modules["twice_here"] is twice_here


def test_kernelbench_runs_what_saves_most_first_and_nothing_where_nothing_was_found(tmp_path, monkeypatch):
    from refold.bench import kernelbench

    (tmp_path / "level1").mkdir()
    for name in ("1_a", "2_b", "3_c", "4_d"):
        (tmp_path / "level1" / f"{name}.py").write_text("")
    found = {"1": [], "2": [{"flops": [10, 5]}], "3": [{"flops": [9, 9]}, {"flops": [100, 0]}]}
    lines = [{"benchmark": "kernelbench", "example": f"level1/{name}", "found": rows} for name, rows in found.items()]
    file = tmp_path / "found.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(kernelbench, "run_one", lambda file, *_: {"ran": file.name})

    def run(**options):
        return list(kernelbench.kernelbench(folder=str(tmp_path), found=str(file), levels=("level1",), **options))

    rows = run()
    assert [row["example"][-1] for row in rows] == ["3", "2", "4", "1"]
    assert [row.get("ran") for row in rows] == ["3_c.py", "2_b.py", "4_d.py", None]
    assert "nothing is found" in rows[3]["skipped"]
    assert [row["example"][-1] for row in run(total=-1.0)] == ["1"]
    file.write_text("{}\nno")
    with pytest.raises(ArgumentError, match="holds no rows of this suite"):
        run()


def test_a_published_program_that_lacks_a_package_says_which(tmp_path):
    from refold.bench.fusion_example import source

    (tmp_path / "program.py").write_text("import no_such_package\n")
    with pytest.raises(MissingDependency, match="needs no_such_package, which is not installed"):
        source(str(tmp_path / "program.py"))
    (tmp_path / "page.html").write_text("no program")
    with pytest.raises(TargetError, match=r"page.html is no Python file"):
        source(str(tmp_path / "page.html"))
