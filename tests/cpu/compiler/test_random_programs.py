"""Random programs give the same results when they are rewritten without checks; planted bugs are caught.

Each kind runs for seconds here; ``python tools/fuzz.py --seeds 0 1000`` runs more.
"""

import importlib
import sys
from pathlib import Path
from random import Random

import pytest
import torch

import refold
from refold.compiler.dynamo.capture import emit
from refold.compiler.ir import moves, views
from refold.compiler.passes import recover_contractions
from refold.compiler.recurrence import affine, duality
from support import programs, random_graphs, random_loops, random_states, trial
from support.examples import examples
from support.layers import LAYERS, Sizes

pytestmark = pytest.mark.rows(16)


@examples(40)
def test_graphs(r):
    program = random_graphs.graph(r)
    assert programs.judge(program).failure == "", program.about


@examples(15)
def test_recurrences(r):
    program = random_loops.recurrence(r)
    assert programs.judge(program).failure == "", program.about


@examples(4)
def test_captured_loops(r):
    program = random_loops.recurrence(r, captured=True)
    assert programs.judge_captured(program).failure == "", program.about


@pytest.mark.parametrize("seed", [7200, 7202])
def test_captured_loops_are_rewritten(seed):
    """They read position ``t % steps``, which moves evenly: for a while it was not read, and nothing was tested."""
    assert programs.judge_captured(random_loops.recurrence(Random(seed), captured=True)).rewrites


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("of", ["sum", "softmax", "cumsum", "logsumexp", "amax"])
def test_axes_of_a_number(of, captured):
    """PyTorch takes a tensor without axes for one with an axis of size 1."""

    def fn(x, c):
        y = x
        for i in range(c.shape[0]):
            y = y * x + getattr(c[i], of)(-1)
        return (y,)

    judge = programs.judge_captured if captured else programs.judge
    generator = torch.Generator().manual_seed(0)
    assert judge(programs.Program(fn, [torch.rand(n, generator=generator) for n in (4, 20)], "")).failure == ""


# Bugs: how to plant one, in which kind of program it shows, and a seed that shows it.


def _mean_of_everything(patch):
    """A mean divides by the length of every axis, also of those that it keeps."""
    patch.setattr(recover_contractions, "sum_dims", lambda root: list(range(root.args[0].meta["val"].dim())))


def _inverse_permutation(patch):
    def rule(_, x, labels):
        return tuple(labels[x.order.index(dim)] for dim in range(len(labels)))

    patch.setitem(views.LABELS.by_move, moves.Permute, rule)


def _half_forgotten(patch):
    patch.setattr(duality, "FORGETS", -0.25)


def _never_forgets(patch):
    patch.setattr(duality, "forgets", lambda dtype: -1.0)


def _resets_multiply(patch):
    """What a choice does not read is multiplied by zero instead."""
    patch.setattr(affine.StepAlgebra, "_chosen_reset", lambda *_: None)


BUGS = [
    (_mean_of_everything, "graph", 16),
    (_inverse_permutation, "graph", 27),
    (_half_forgotten, "recurrence", 75),
    (_never_forgets, "recurrence", 58),
    (_resets_multiply, "recurrence", 13),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("plant", "kind", "seed"), BUGS, ids=lambda x: getattr(x, "__name__", None))
def test_planted_bugs_are_caught(plant, kind, seed, monkeypatch):
    program = (random_graphs.graph if kind == "graph" else random_loops.recurrence)(Random(seed))
    assert programs.judge(program).failure == "", program.about
    plant(monkeypatch)
    assert programs.judge(program).failure, program.about


@pytest.mark.parametrize(
    ("size", "joined", "read"), [(4, 0, (1, -1)), (3, 1, (-1, 2)), (5, 0, (1, 4)), (4, 0, (0, -1)), (3, 1, (1, 0))]
)
def test_reads_of_stacked_steps(size, joined, read):
    """A read of the last step is that step; a read along another axis is not."""

    def fn(x):
        return (torch.stack([x[t].sin() for t in range(4)], joined).select(*read).cos(),)

    for rank in (1, 2):
        x = torch.randn(4, *[size] * rank)
        assert programs.judge(programs.Program(fn, [x], "")).failure == ""


@pytest.mark.parametrize("shape", [(4, 2), (2, 2, 1), (2, 4, 1)])
@pytest.mark.parametrize("end", [0, 5])
def test_a_step_at_an_end_of_another_shape(shape, end):
    """What one step computes otherwise fits no axis of the others."""

    def fn(x, y):
        steps = [y.cos().sum() if t == end else x[t].sin().sum() for t in range(6)]
        return (torch.stack(steps),)

    assert programs.judge(programs.Program(fn, [torch.randn(6, *shape), torch.randn(2, 4)], "")).failure == ""


def _loop(step, count=8):
    """Return a loop over (batch, time, channels) with a state; ``step`` is called with state, inputs, number, decay."""

    def fn(x, a):
        h, ys = torch.zeros_like(x[:, 0]), []
        for t in range(count):
            h = step(h, x, t, a)
            ys.append(h)
        return (torch.stack(ys, 1),)

    return fn


def _older(x, a):
    """States of five steps before; they are joined with a first part of another size."""
    ys = list(x[:, :5].unbind(1))
    for t in range(5, 8):
        ys.append(a * ys[t - 5] + x[:, t])
    return torch.cat([x[:, :5], *(y.unsqueeze(1) for y in ys[5:])], 1), torch.cat([ys[0][:, None], x[:, :5], x, x], 1)


ODD = {
    "inputs in turns": _loop(lambda h, x, t, a: a * h + x[:, t % 4], 12),
    "no axes to flip": _loop(lambda h, x, t, a: a * h + x[:, t].flip(())),
    "times true": _loop(lambda h, x, t, a: a * (h * True) + x[:, t] + True),
    "over zero": _loop(lambda h, x, t, a: (a * h) / (1.0 if t else 0.0) + x[:, t]),
    "all over zero": _loop(lambda h, x, t, a: a * (h / 0.0) + x[:, t]),
    "parts of several sizes": _older,
}


@pytest.mark.parametrize("gradient", ["", "autograd"])
@pytest.mark.parametrize("name", ODD)
def test_odd_steps(name, gradient):
    x, a = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((2, 8, 3), (3,)))
    assert programs.judge(programs.Program(ODD[name], [x, a], "", gradient)).failure == ""


@pytest.mark.parametrize("seed", [310003, 1, 2, 0])
def test_layers_of_public_code(seed):
    """A few of what ``tools/fuzz.py --kind layer`` runs: the whole compiler, but for generated code."""
    about, outcome = trial.trial(Random(seed))
    assert outcome.failure == "", about


@pytest.mark.parametrize("seed", [12, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(100, 120))])
def test_layers_that_were_changed_at_random(seed):
    about, outcome = trial.trial(Random(seed), changed=True)
    assert outcome.failure == "", about


@examples(6)
def test_coupled_loops(r):
    program = random_loops.coupled(r)
    assert programs.judge_captured(program).failure == "", program.about


@pytest.mark.parametrize(
    "bound", [torch.relu, lambda x: x.clamp(max=0.5), lambda x: torch.logaddexp(x, torch.zeros(4).to(x))]
)
def test_elements_that_read_one_another_within_bounds(bound):
    """A system has no bounds: these were once left out."""

    def fn(x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = bound(h + x[:, t]).flip(-1)
            out.append(h)
        return (torch.stack(out, 1),)

    x = torch.randn(2, 18, 4, generator=torch.Generator().manual_seed(0))
    assert programs.judge_captured(programs.Program(fn, [x], "")).failure == ""


@examples(10)
def test_states_that_are_kept_in_many_ways(r):
    program = random_states.kept(r)
    assert programs.judge_captured(program).failure == "", program.about


def test_a_state_that_is_left_out_is_seen(monkeypatch):
    """The check of a whole graph cannot see it: that graph is what capture made."""
    program = random_states.kept(Random(2))
    assert programs.judge_captured(program).failure == "", program.about
    monkeypatch.setattr(emit, "_is_read", lambda location, _, found, __: any(x.users for x in found.carried[location]))
    assert programs.judge_captured(program).failure, program.about


@pytest.mark.exhaustive
def test_the_last_state_of_a_retention_stays_one_scan_in_training():
    """A check with infinities does not refuse the second result of a scan because of what only the first reads."""
    fn, inputs = LAYERS["retention"](Sizes(Random(1), torch.float32, 2, 33))
    compiled = refold.compile(fn, accept="always", cache=False)
    with trial.no_code():
        compiled(*[x.requires_grad_() for x in inputs])
    rewrites = [row for row in compiled.report.graphs[0].rewrites if "ssd" in row.detail]
    assert [row.status for row in rewrites] == ["applied"] * 2


@pytest.mark.exhaustive
def test_checks_run_without_the_users_autocast():
    """It is in the graph already, and does not take float16 next to float64 on a CPU."""
    about, outcome = trial.trial(
        Random(0), "retention", mode="autocast", dtype=torch.float16, verify="quick", lengths=(2, 17), batch=1
    )
    assert outcome.failure == "", about


@pytest.mark.exhaustive
def test_the_fuzzer_goes_on_after_a_process_has_had_its_share(monkeypatch, capsys):
    """Python's own way to replace workers waits forever in some versions (CPython gh-115634)."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "tools"))
    fuzz = importlib.import_module("fuzz")
    monkeypatch.setattr(fuzz, "PROGRAMS_A_PROCESS", 2)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--kind", "graph", "--seeds", "0", "3"])
    assert fuzz.main() == 0
    assert "3 programs, 0 wrong" in capsys.readouterr().out
