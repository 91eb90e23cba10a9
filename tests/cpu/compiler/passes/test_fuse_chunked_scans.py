"""Scans written in chunks become one operator however they are spelled; what is no scan stays as it is."""

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import refold
from refold.verify import Race
from refold.verify.numerics import unit_roundoff

BATCH, HEADS, GROUPS, CHANNELS, STATES = 2, 4, 2, 5, 6
NAME = "fuse chunked scan"


def below(length, diagonal=0):
    return torch.ones(length, length, dtype=torch.bool).tril(diagonal)


def masked_running_sum(a, diagonal=0, strict=-1):
    """Exponentiate s[i, j] = a[j+1] + ... + a[i], a running sum over masked copies."""
    copies = a[..., None].expand(*a.shape, a.shape[-1]).masked_fill(~below(a.shape[-1], strict), 0)
    return torch.exp(copies.cumsum(-2).masked_fill(~below(a.shape[-1], diagonal), -torch.inf))


def difference(a, diagonal=0):
    total = a.cumsum(-1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(~below(a.shape[-1], diagonal), -torch.inf).exp()


def masked_last(a):
    total = a.cumsum(-1)
    return torch.where(below(a.shape[-1]), torch.exp(total.unsqueeze(-1) - total.unsqueeze(-2)), 0.0)


def lower_triangle(a):
    total = a.cumsum(-1)
    return (total[..., None] - total[..., None, :]).exp().tril()


def multiplied(equation, *factors):
    """Do what einsum does by broadcasting, multiplying and summing."""
    terms, out = equation.split("->")
    letters = sorted(set(terms) - {","})
    total = 1.0
    for term, factor in zip(terms.split(","), factors, strict=True):
        order = [term.index(letter) for letter in letters if letter in term]
        shape = [slice(None) if letter in term else None for letter in letters]
        total = total * factor.permute(order)[tuple(shape)]
    kept = [letter for letter in letters if letter in out]
    return total.sum([letters.index(letter) for letter in letters if letter not in out]).permute(
        [kept.index(letter) for letter in out]
    )


@dataclass
class Listing:
    """The listing of the Mamba-2 paper; every field is a way to spell it, or to get it wrong."""

    chunk: int = 4
    between: object = masked_running_sum
    between_chunks: object = None
    einsum: object = torch.einsum
    last: object = field(default=lambda since: since[..., -1:])
    carry: object = field(default=lambda states: states[:, :-1])
    join: object = field(default=lambda initial, states: torch.cat([initial, states], 1))
    pad: tuple = (1, 0)
    wrong: dict = field(default_factory=dict)

    def __call__(self, x, a, B, C, initial=None):
        def chunked(v):
            return v.reshape(v.shape[0], -1, self.chunk, *v.shape[2:])

        parts = {"x": x, "a": a, "B": B, "C": C}
        x, a, B, C = map(chunked, parts.values())
        other = {name: chunked(value(**parts)) for name, value in self.wrong.items()}
        einsum = self.einsum
        a = a.permute(0, 3, 1, 2)
        since = a.cumsum(-1)
        within = einsum("bclhn,bcshn,bhcls,bcshp->bclhp", C, B, self.between(a), x)
        to_end = torch.exp(self.last(other.get("a_end", a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).cumsum(-1)) - since)
        states = einsum("bcshn,bhcs,bcshp->bchpn", other.get("B", B), to_end, other.get("x", x))
        states = self.join(torch.zeros_like(states[:, :1]) if initial is None else initial[:, None], states)
        jumps = (self.between_chunks or self.between)(
            F.pad(other["a_total"].sum(2).mT if "a_total" in other else since[..., -1], self.pad)
        )
        states = einsum("bhzc,bchpn->bzhpn", jumps, states)
        from_start = torch.exp(other["a_start"].permute(0, 3, 1, 2).cumsum(-1) if "a_start" in other else since)
        across = einsum("bclhn,bchpn,bhcl->bclhp", other.get("C", C), self.carry(states), from_start)
        return (within + across).flatten(1, 2), states[:, -1]


def inputs(tokens=12, groups=HEADS):
    x, a = torch.randn(BATCH, tokens, HEADS, CHANNELS), torch.randn(BATCH, tokens, HEADS)
    B, C = (torch.randn(BATCH, tokens, groups, STATES) for _ in "BC")
    return x, a, B, C


def repeat_groups(B, how="interleave"):
    if how == "interleave":
        return B.repeat_interleave(HEADS // B.shape[2], dim=2)
    if how == "tile":
        return B.repeat(1, 1, HEADS // B.shape[2], 1)
    return B[:, :, :, None].expand(-1, -1, -1, HEADS // B.shape[2], -1).flatten(2, 3)


def check(outcome, rewrites):
    assert outcome.names == [NAME] * rewrites
    assert outcome.targets.count("refold.ssd.default") == 1
    assert not [target for target in outcome.targets if "mm" in target or "cumsum" in target]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


SPELLINGS = {
    "plain": Listing(),
    "difference": Listing(between=difference),
    "masked_last": Listing(between=masked_last),
    "lower_triangle": Listing(between=lower_triangle),
    "mixed": Listing(between=difference, between_chunks=masked_running_sum),
    "multiplied": Listing(einsum=multiplied),
    "sum": Listing(last=lambda since: since[..., since.shape[-1] - 1, None]),
    "chunk_of_two": Listing(chunk=2),
    "chunk_of_six": Listing(chunk=6),
    "one_chunk": Listing(chunk=12),
    "bounded_slice": Listing(carry=lambda states: states[:, : states.shape[1] - 1]),
}


@pytest.mark.parametrize("listing", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("final", [True, False])
def test_spellings(rewritten, listing, final):
    check(rewritten(listing if final else lambda *args: listing(*args)[0], *inputs()), 1 + final)


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


def test_padding_of_some_is_kept(rewritten):
    def layer(x, a, B, C):
        return Listing()(F.pad(x, (0, 0, 0, 0, 0, 1)), a, B, C)[0]

    x, a, B, C = inputs()
    check(rewritten(layer, x[:, :11], a, B, C), 1)


def arguments(outcome):
    """Return what becomes of the inputs on the way to the operator: which of them each argument reads."""
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


def test_decay_apart_from_the_input(rewritten):
    x, a, B, C = inputs()
    a[:, ::3] = 0
    a[:, 1] = 1e-30
    check(rewritten(Listing(), x, a, B, C), 2)


def test_constant_decay(rewritten):
    def retention(x, log_gamma, B, C):
        return Listing()(x, log_gamma.expand(x.shape[:3]), B * 0.25, C)[0]

    x, _, B, C = inputs()
    outcome = rewritten(retention, x, -torch.rand(HEADS), B, C)
    check(outcome, 1)
    assert "div" not in "".join(outcome.targets)


def test_heads_before_time(rewritten):
    def layer(x, a, B, C):
        return Listing()(x.transpose(1, 2), a.transpose(1, 2), B.transpose(1, 2), C.transpose(1, 2))[0].transpose(1, 2)

    check(rewritten(layer, *(v.transpose(1, 2).contiguous() for v in inputs())), 1)


def test_growing_states_are_right(rewritten):
    x, a, B, C = inputs(48)
    check(rewritten(partial(Listing(chunk=8)), x, a.abs(), B, C), 2)


def test_double_precision(rewritten):
    outcome = rewritten(Listing(), *(v.double() for v in inputs()))
    assert outcome.names == [NAME] * 2
    assert outcome.worst() < 64 * unit_roundoff(torch.float64)


NEAR_MISSES = {
    "mask_without_diagonal": Listing(between=partial(masked_running_sum, diagonal=-1)),
    "mask_one_too_wide": Listing(between=partial(difference, diagonal=1)),
    "sum_includes_the_first": Listing(between=partial(masked_running_sum, strict=0)),
    "mask_without_diagonal_between_chunks": Listing(between_chunks=partial(difference, diagonal=-1)),
    "decay_to_the_first": Listing(last=lambda since: since[..., :1]),
    "other_decay_to_the_end": Listing(wrong={"a_end": lambda x, a, B, C: a + 1}),
    "other_decay_from_the_start": Listing(wrong={"a_start": lambda x, a, B, C: 2 * a}),
    "other_decay_between_chunks": Listing(wrong={"a_total": lambda x, a, B, C: a.flip(0)}),
    "other_keys": Listing(wrong={"B": lambda x, a, B, C: C}),
    "other_queries": Listing(wrong={"C": lambda x, a, B, C: B}),
    "other_values": Listing(wrong={"x": lambda x, a, B, C: x + 1}),
    "scaled_values": Listing(wrong={"x": lambda x, a, B, C: 2 * x}),
    "states_behind_the_chunk": Listing(carry=lambda states: states[:, 1:]),
    "initial_state_last": Listing(join=lambda initial, states: torch.cat([states, initial], 1)),
    "totals_one_late": Listing(pad=(0, 1)),
}


@pytest.mark.parametrize("listing", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_stay(rewritten, listing):
    outcome = rewritten(listing, *inputs())
    assert NAME not in outcome.names
    assert "refold.ssd.default" not in outcome.targets
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


LAST = "contract last state"
ABOUT_OUTPUTS = {"other_decay_from_the_start", "other_keys", "other_queries", "other_values", "scaled_values"}
ABOUT_OUTPUTS |= {"states_behind_the_chunk"}


@pytest.mark.parametrize("listing", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("initial", [True, False])
def test_last_state_alone_is_one_product(rewritten, listing, initial):
    first = [torch.randn(BATCH, HEADS, CHANNELS, STATES)] * initial
    outcome = rewritten(lambda *args: listing(*args)[1], *inputs(), *first)
    assert outcome.names == [LAST]
    assert [target for target in outcome.targets if "mm" in target] == ["aten.bmm.default"]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


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


def test_channels_and_states_exchanged_stay(rewritten):
    x, a, B, C = inputs()
    assert NAME not in rewritten(swapped, x, a, B[..., :CHANNELS], C[..., :CHANNELS]).names


def test_one_term_stays(rewritten):
    assert NAME not in rewritten(one_term, *inputs()).names


def test_another_order_of_time_is_a_scan_in_that_order(rewritten):
    check(rewritten(chunks_as_positions, *inputs(16)), 2)


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


def test_dynamic_lengths_stay_right(rewritten):
    assert rewritten(Listing(), *inputs(), dynamic=True).worst() < 64 * unit_roundoff(torch.float32)


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
    tie = Race(speedup=1.0, base_ms=1.0, candidate_ms=1.0, at_least=0.9, at_most=1.1, pairs=9, faster=False)
    monkeypatch.setattr("refold.compiler.validate.region.clearly_less", lambda *args: False)  # else there is no race
    monkeypatch.setattr("refold.compiler.validate.region.race", lambda *args, **kwargs: tie)
    monkeypatch.setattr("refold.compiler.validate.program.race", lambda *args, **kwargs: replace(tie, faster=True))
    compiled = refold.compile(lambda *args: listing(*args)[0], strict=True)
    with torch.no_grad():
        compiled(*inputs())
    assert ({row.name for row in compiled.report.graphs[0].applied} == {NAME}) == stands
    assert {row.status for row in compiled.report.rewrites if row.name == NAME} == {"applied" if stands else "refused"}
