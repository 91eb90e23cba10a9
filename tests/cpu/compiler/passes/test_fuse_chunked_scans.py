"""Scans written in chunks become one operator in every spelling; other code stays as it is."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import refold
from refold.verify import Timing
from refold.verify.numerics import unit_roundoff
from support.chunked import (
    BATCH,
    CHANNELS,
    GROUPS,
    HEADS,
    NEAR_MISSES,
    SPELLINGS,
    STATES,
    Listing,
    difference,
    inputs,
    multiplied,
    repeat_groups,
)

pytestmark = pytest.mark.rows(16)

NAME = "fuse chunked scan"


def check(outcome, rewrites):
    assert outcome.names == [NAME] * rewrites
    assert outcome.targets.count("refold.ssd.default") == 1
    assert not [target for target in outcome.targets if "mm" in target or "cumsum" in target]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("final", [True, False])
def test_spellings(rewritten, name, final):
    listing = SPELLINGS[name]
    check(rewritten(listing if final else lambda *args: listing(*args)[0], *inputs()), 1 + final)


def test_powers_of_two(rewritten, monkeypatch):
    monkeypatch.setattr(torch, "exp", torch.exp2)
    check(rewritten(Listing(), *inputs()), 2)


def test_initial_state(rewritten):
    check(rewritten(Listing(), *inputs(), torch.randn(BATCH, HEADS, CHANNELS, STATES)), 2)


@pytest.mark.parametrize("how", ["interleave", "tile", "expand"])
@pytest.mark.parametrize("groups", [1, GROUPS])
def test_groups_are_not_repeated(rewritten, groups, how):
    def layer(x, a, B, C):
        return Listing()(x, a, repeat_groups(B, how), repeat_groups(C, how))

    outcome = rewritten(layer, *inputs(groups=groups))
    check(outcome, 2)
    candidate = outcome.rewrites[0].candidate
    (scan,) = candidate.graph.find_nodes(op="call_function", target=torch.ops.refold.ssd.default)
    assert [scan.args[i].meta["val"].shape[2] for i in (3, 4)] == [groups, groups]


@pytest.mark.parametrize("tokens", [1, 3, 4, 11])
def test_padding_is_dropped(rewritten, tokens):
    def layer(x, dt, A, B, C):
        pad = -tokens % 4
        x, a, B, C = (F.pad(v, [0, 0] * (v.dim() - 2) + [0, pad]) for v in (x * dt[..., None], dt * A, B, C))
        y, state = Listing()(x, a, B, C)
        return y[:, :tokens], state

    x, dt, B, C = inputs(tokens)
    outcome = rewritten(layer, x, dt, torch.randn(HEADS), B, C)
    check(outcome, 2)
    assert f"{tokens} tokens" in outcome.rewrites[0].detail


@pytest.mark.exhaustive
def test_padding_of_some_is_kept(rewritten):
    def layer(x, a, B, C):
        return Listing()(F.pad(x, (0, 0, 0, 0, 0, 1)), a, B, C)[0]

    x, a, B, C = inputs()
    check(rewritten(layer, x[:, :11], a, B, C), 1)


def arguments(outcome):
    """Return the inputs that each argument of the operator reads."""
    (scan,) = outcome.rewrites[0].candidate.graph.find_nodes(op="call_function", target=torch.ops.refold.ssd.default)

    def behind(node):
        return {node.name} if node.op == "placeholder" else set().union(*map(behind, node.all_input_nodes))

    return [behind(node) for node in scan.args[:5]]


@pytest.mark.parametrize("scaled", ["x", "B"])
def test_step_size_is_taken_out_of_decay_and_input(rewritten, scaled):
    def layer(x, dt, A, B, C):
        x, B = (x * dt[..., None], B) if scaled == "x" else (x, B * dt[..., None])
        return Listing()(x, -dt * torch.exp(A), B, C)[0] * 2

    x, dt, B, C = inputs()
    outcome = rewritten(layer, x, dt, torch.randn(HEADS), B, C)
    check(outcome, 1)
    assert [len(read) for read in arguments(outcome)] == [1] * 5
    assert "div" not in "".join(outcome.targets)


@pytest.mark.exhaustive
def test_decay_apart_from_the_input(rewritten):
    x, a, B, C = inputs()
    a[:, ::3] = 0
    a[:, 1] = 1e-30
    check(rewritten(Listing(), x, a, B, C), 2)


@pytest.mark.exhaustive
def test_constant_decay(rewritten):
    def retention(x, log_gamma, B, C):
        return Listing()(x, log_gamma.expand(x.shape[:3]), B * 0.25, C)[0]

    x, _, B, C = inputs()
    outcome = rewritten(retention, x, -torch.rand(HEADS), B, C)
    check(outcome, 1)
    assert "div" not in "".join(outcome.targets)


@pytest.mark.exhaustive
def test_heads_before_time(rewritten):
    def layer(x, a, B, C):
        return Listing()(x.transpose(1, 2), a.transpose(1, 2), B.transpose(1, 2), C.transpose(1, 2))[0].transpose(1, 2)

    check(rewritten(layer, *(v.transpose(1, 2).contiguous() for v in inputs())), 1)


@pytest.mark.exhaustive
def test_growing_states_are_right(rewritten):
    x, a, B, C = inputs(48)
    check(rewritten(partial(Listing(chunk=8)), x, a.abs(), B, C), 2)


@pytest.mark.exhaustive
def test_double_precision(rewritten):
    outcome = rewritten(Listing(), *(v.double() for v in inputs()))
    assert outcome.names == [NAME] * 2
    assert outcome.worst() < 64 * unit_roundoff(torch.float64)


@pytest.mark.parametrize("listing", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_stay(rewritten, listing):
    outcome = rewritten(listing, *inputs())
    assert NAME not in outcome.names
    assert "refold.ssd.default" not in outcome.targets
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


LAST = "contract last state"
ABOUT_OUTPUTS = {"other_decay_from_the_start", "other_keys", "other_queries", "other_values", "scaled_values"}
ABOUT_OUTPUTS |= {"states_behind_the_chunk"}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("initial", [True, False])
def test_last_state_alone_is_one_product(rewritten, name, initial):
    listing = SPELLINGS[name]
    first = [torch.randn(BATCH, HEADS, CHANNELS, STATES)] * initial
    outcome = rewritten(lambda *args: listing(*args)[1], *inputs(), *first)
    assert outcome.names == [LAST]
    assert [target for target in outcome.targets if "mm" in target] == ["aten.bmm.default"]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.exhaustive
def test_last_state_of_groups_with_step_sizes(rewritten):
    def layer(x, dt, A, B, C):
        return Listing()(x * dt[..., None], dt * A, repeat_groups(B), repeat_groups(C))[1]

    x, dt, B, C = inputs(groups=GROUPS)
    outcome = rewritten(layer, x, dt, torch.randn(HEADS), B, C)
    assert outcome.names == [LAST]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("name", sorted(NEAR_MISSES.keys() - ABOUT_OUTPUTS))
def test_near_misses_of_a_last_state_stay(rewritten, name):
    listing = NEAR_MISSES[name]
    outcome = rewritten(lambda *args: listing(*args)[1], *inputs())
    assert LAST not in outcome.names
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.exhaustive
def test_another_state_stays(rewritten):
    def layer(x, a, B, C):
        kept = []
        Listing(carry=lambda states: kept.append(states) or states[:, :-1])(x, a, B, C)
        return kept[0][:, 1]

    assert LAST not in rewritten(layer, *inputs()).names


def swapped(x, a, B, C):
    """Read B and x with channels and states exchanged: equal sizes do not make them equal."""
    return Listing(einsum=lambda e, *f: torch.einsum(e.replace("bcshp->bchpn", "bcshp->bchnp"), *f))(x, a, B, C)


def one_term(x, a, B, C):
    chunks = [v.unflatten(1, (-1, 4)) for v in (x, a, B, C)]
    x, a, B, C = chunks
    return torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, difference(a.permute(0, 3, 1, 2)), x)


def chunks_as_positions(x, a, B, C):
    return Listing(chunk=4)(*(v.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2) for v in (x, a, B, C)))


@pytest.mark.exhaustive
def test_channels_and_states_exchanged_stay(rewritten):
    x, a, B, C = inputs()
    assert NAME not in rewritten(swapped, x, a, B[..., :CHANNELS], C[..., :CHANNELS]).names


def test_one_term_stays(rewritten):
    assert NAME not in rewritten(one_term, *inputs()).names


@pytest.mark.exhaustive
def test_another_order_of_time_is_a_scan_in_that_order(rewritten):
    check(rewritten(chunks_as_positions, *inputs(16)), 2)


@pytest.mark.exhaustive
def test_long_products_stay(rewritten):
    def powers(x, y):
        total = x
        for _ in range(1200):
            total = total * y
        return total + x * y

    assert NAME not in rewritten(powers, torch.rand(3), torch.rand(3)).names


def test_training_keeps_its_intermediates(rewritten):
    outcome = rewritten(Listing(), *(v.requires_grad_() for v in inputs()))
    assert NAME not in outcome.names


@pytest.mark.exhaustive
def test_dynamic_lengths_stay_right(rewritten):
    assert rewritten(Listing(), *inputs(), dynamic=True).worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.exhaustive
@pytest.mark.codegen
def test_compiled_and_proven():
    torch._dynamo.reset()
    args = inputs(24)
    compiled = refold.compile(Listing(chunk=8), accept="always", strict=True)
    with torch.no_grad():
        got, expected = compiled(*args), Listing(chunk=8)(*args)
    rows = compiled.report.graphs[0].applied
    assert [row.name for row in rows] == [NAME] * 2
    assert all(error["passed"] for row in rows for error in row.errors)
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 64 * unit_roundoff(torch.float32)


@pytest.mark.parametrize(
    ("listing", "stands"), [(Listing(einsum=multiplied), False), (Listing(between=difference), True)]
)
def test_a_tie_goes_to_the_contractions_if_there_are_any(monkeypatch, listing, stands):
    torch._dynamo.reset()
    tie = Timing(speedup=1.0, base_ms=1.0, candidate_ms=1.0, at_least=0.9, at_most=1.1, pairs=9, faster=False)
    monkeypatch.setattr("refold.compiler.validate.region.clearly_less", lambda *args: False)  # else there is no race
    monkeypatch.setattr("refold.compiler.validate.region.race", lambda *args, **kwargs: tie)
    monkeypatch.setattr("refold.compiler.validate.region.compile_or_none", lambda region, *args: region)  # to be timed
    monkeypatch.setattr("refold.compiler.validate.program.race", lambda *args, **kwargs: replace(tie, faster=True))
    compiled = refold.compile(lambda *args: listing(*args)[0], strict=True)
    with torch.no_grad():
        compiled(*inputs())
    assert ({row.name for row in compiled.report.graphs[0].applied} == {NAME}) == stands
    assert {row.status for row in compiled.report.rewrites if row.name == NAME} == {"applied" if stands else "refused"}
