"""The suite of sequences that ranks share: its rival is right, bytes are counted, and what is hidden is found."""

import pytest
import torch
from torch.distributed import all_reduce, group

from refold import ops
from refold.bench.all_to_all import all_to_all
from refold.bench.scale import overlap, scale
from refold.bench.scale_model import BETWEEN_HOSTS, Fit, fit, groups, on_paper
from refold.errors import ArgumentError
from refold.ops import timed
from refold.parallel import Cut
from support.ranks import on_ranks


def work(rank, size):
    """Return the largest differences between all-to-alls and states, of results and gradients."""
    timed.place, found = "cpu", {}
    for op, parameters in (("ssd", ["A"]), ("delta_rule", [])):
        torch.manual_seed(rank)
        given = timed.shared_calls()[op](16)
        for name in parameters:
            all_reduce(given[name])
        given = {n: a.double().requires_grad_() if isinstance(a, torch.Tensor) else a for n, a in given.items()}
        inputs, cut = [a for a in given.values() if isinstance(a, torch.Tensor)], Cut(group.WORLD, (16,) * size)
        for y in (getattr(ops, op)(**given, group=cut)[0], all_to_all(getattr(ops, op), given, cut)):
            grads = dict(zip(given, torch.autograd.grad(y, inputs, torch.ones_like(y)), strict=False))
            for name in parameters:  # partial sums
                all_reduce(grads[name])
            found.setdefault(op, []).append([y.detach(), *grads.values()])
    return {op: max(float((a - b).abs().max()) for a, b in zip(*pair, strict=True)) for op, pair in found.items()}


def test_all_to_all_gives_what_states_give(tmp_path):
    found = on_ranks(2, work, tmp_path)
    assert max(max(rank.values()) for rank in found.values()) < 1e-12, found


@pytest.mark.slow
def test_rows_of_ranks_and_of_groups_of_them():
    rows = list(
        scale(
            operators=("ssd",),
            passes=("training",),
            tokens=(16,),
            ranks=(1, 2, 4),
            ways=("states",),
            repeats=1,
            device="cpu",
        )
    )
    assert [(row["backend"], row["tokens"]) for row in rows] == [
        ("1 ranks", 16), ("1 ranks", 64), ("2 ranks", 32), ("2 ranks", 64), ("4 ranks", 64),
    ]  # fmt: skip
    state = 4 * 64 * (64 * 128 + 1)  # and a number per head
    assert [row.get("sent_bytes", 0) for row in rows] == [0, 0, 2 * state, 2 * state, 3 * 2 * state]  # there and back


def test_groups_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ArgumentError, match="must divide the most ranks, 3"):
        list(scale(ranks=(1, 2, 3), device="cpu"))


def test_the_model_of_time_finds_what_rows_were_made_of():
    def row(ranks, tokens, seconds):
        return {"op": "ssd", "pass": "forward", "backend": f"{ranks} ranks", "tokens": ranks * tokens,
                "median_s": seconds, "sent_bytes": (ranks - 1) * 10**6}  # fmt: skip

    made = Fit(share=0.03, call=2e-5, rank=1e-5, host=9e-4)
    alone = {n: n / 1e8 for n in (2**15, 2**17, 2**18, 2**19)}
    rows = [row(1, n, p) for n, p in alone.items()]
    rows += [row(ranks, n, made.seconds(p, ranks)) for n, p in alone.items() for ranks in (2, 4)]
    (calls,) = groups(rows)
    assert fit(calls) == pytest.approx(made)
    two = next(each for each in calls if (each.ranks, each.tokens) == (2, 2**17))
    assert two.weak == pytest.approx(alone[2**17] / two.seconds)
    assert two.strong == pytest.approx(alone[2**18] / two.seconds / 2)
    took, efficiency = on_paper(calls, 2**17, 1024)
    assert took == pytest.approx(1.03 * alone[2**17] + 2e-5 + 1023 * 1e6 / BETWEEN_HOSTS)
    assert efficiency == pytest.approx(alone[2**17] / took)


def test_what_is_hidden():
    line = [(10.0, 30.0, "scan"), (20.0, 50.0, "ncclDevKernel_AllGather"), (40.0, 45.0, "copy"), (60.0, 70.0, "scan")]
    assert overlap(line) == pytest.approx({"collective_s": 30e-6, "hidden_s": 15e-6, "idle_s": 20e-6})
