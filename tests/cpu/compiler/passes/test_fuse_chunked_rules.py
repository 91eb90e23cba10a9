"""Rules in chunks that read, write or correct in their own way become the operator of the delta rule, too."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import refold
from refold.compiler import early_rewrites
from refold.compiler.dynamo.capture.trace import SHORTEST
from refold.compiler.options import Options
from refold.compiler.passes import fuse_chunked_deltas
from refold.compiler.passes.reroll_loops import STAYS
from refold.compiler.validate.region import validate_region
from refold.verify.numerics import unit_roundoff
from support.products import few, others_exhaustive
from support.scans import names, operators, spliced

CHUNK = 4
FORMS = ("strengths", "gates", "low rank", "linear")


def pairs(a, b, upto, g, diagonal):
    """Multiply all rows of two arrays, with the decays between them; zeros above a diagonal."""
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril(diagonal)
    between = (upto.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(~past[..., None], -torch.inf).exp()
    if g.shape[-1] == 1:
        return a @ b.mT * between.squeeze(-1)
    return torch.einsum("...id,...jd,...ijd->...ij", a, b, between)


def inverse(lower, views):
    """Invert I + lower; ``views`` gets a view of its rows, before they are written."""
    x = -lower
    views.append(x.flatten(-2))
    for i in range(1, CHUNK):
        x[..., i, :i] = x[..., i, :i].clone() + (x[..., i, :i, None].clone() * x[..., :i, :i].clone()).sum(-2)
    return x + torch.eye(CHUNK, dtype=x.dtype)


def in_chunks(q, k, v, g, beta, a, b, w, state=None, *, form, early=False, wide=None, wrong="", views=None):
    """Go through chunks, by the formula of one token that a form has.

    strengths    S <- Diag(e^g) S;  S <- S + k beta (v - Sᵀ a)ᵀ
    gates        S <- Diag(e^g) S;  S <- S + k (w v - Sᵀ (b k))ᵀ
    low rank     S <- Diag(e^g) S + b (Sᵀ a)ᵀ + k vᵀ
    linear       S <- Diag(e^g) S + k vᵀ

    Args:
        q: Queries ``(b, t, h, n)``, as are k, a and b; decays g ``(b, t, h)`` or ``(b, t, h, n)``.
        k: Keys.
        v: Values ``(b, t, h, p)``, as are w; strengths beta ``(b, t, h)``.
        g: Log decays.
        beta: Strengths.
        a: What is read.
        b: A gate, or the keys of what is corrected.
        w: A gate.
        state: The state before the first token, ``(b, h, n, p)``.
        form: See above.
        early: Whether the state is read before it decays; in the low rank, it always is.
        wide: The dtype of chunks; that of the inputs if None.
        wrong: What is left out.
        views: A list that gets views of what chunks are corrected by, less the diagonal.
    """
    views = [] if views is None else views
    tokens, early = q.shape[1], early or form == "low rank"

    def cut(x):
        x = x.transpose(1, 2)
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, -tokens % CHUNK))
        return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:]).to(wide or x.dtype)

    if form == "strengths":
        a, v = (x * beta.unsqueeze(-1) for x in (a, v))
    q, k, v, a, b, w, own = map(cut, (q * q.shape[-1] ** -0.5, k, v, a, b, w, g))
    own = own if g.dim() == 4 else own.unsqueeze(-1)
    g = own.cumsum(-2)
    before, end = g - own if early else g, g[..., -1:, :]
    key, written, read = {"gates": (k, w * v, b * k), "low rank": (b, v, -a)}.get(form, (k, v, a))
    if wrong != "decays" and form != "linear":
        corrects = inverse(pairs(read, key, before, g, -1), views)
        u = pairs(a, k, before, g, -1) @ v if form == "low rank" else written
        u, x = corrects @ u, corrects @ (read * before.exp())
    elif form != "linear":
        corrects = inverse(pairs(read, key, 0 * g, 0 * g, -1), views)
        u, x = corrects @ written, corrects @ read
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    out = torch.zeros_like(v)
    for i in range(q.shape[2]):
        rest, since = end[:, :, i].exp().mT, (end[:, :, i] - g[:, :, i]).exp()
        y, held = (q[:, :, i] * g[:, :, i].exp()) @ state, state * rest
        if form != "linear":
            new = u[:, :, i] - x[:, :, i] @ state
            y = y + pairs(q[:, :, i], key[:, :, i], g[:, :, i], g[:, :, i], 0) @ new
            held = held + (key[:, :, i] * since).mT @ new
        if form in ("linear", "low rank"):
            y = y + pairs(q[:, :, i], k[:, :, i], g[:, :, i], g[:, :, i], 0) @ v[:, :, i]
            held = held + (k[:, :, i] if wrong == "write" else k[:, :, i] * since).mT @ v[:, :, i]
        out[:, :, i], state = y, held
    out = out.reshape(*out.shape[:2], -1, out.shape[-1])[:, :, :tokens]
    return out.transpose(1, 2).contiguous(), state


def inputs(tokens, keyed=False, n=3, p=5):
    draw = torch.Generator().manual_seed(0)
    q, k, a, b = (0.5 * torch.randn(2, tokens, 2, n, generator=draw) for _ in range(4))
    v, w = (torch.rand(2, tokens, 2, p, generator=draw) - 0.5 for _ in range(2))
    beta, g = torch.rand(2, tokens, 2, generator=draw), -torch.rand(2, tokens, 2, n, generator=draw)
    return [q, k, v, g if keyed else g[..., 0], beta, a, b, w, torch.randn(2, 2, n, p, generator=draw)]


def forms(*kept):
    """Parametrize with forms, decays per key, early reads, and lengths with sizes of states."""
    every = [
        (form, keyed, early, *sizes)
        for form in FORMS for keyed in (False, True) for early in (False, True)
        for sizes in ((2 * CHUNK, 3, 5), (2 * CHUNK + 1, CHUNK, CHUNK), (3 * CHUNK - 1, 2, 2))
        if not (early and form in ("low rank", "linear"))
    ]  # fmt: skip
    return pytest.mark.parametrize(
        ("form", "keyed", "early", "tokens", "n", "p"), others_exhaustive(every, [every.index(row) for row in kept])
    )


SOME = (
    ("strengths", False, True, 9, 4, 4), ("gates", True, False, 8, 3, 5), ("low rank", True, False, 11, 2, 2),
    ("linear", False, False, 9, 4, 4), ("linear", True, False, 8, 3, 5),
)  # fmt: skip


@forms(*SOME)
def test_forms(rewritten, form, keyed, early, tokens, n, p):
    outcome = rewritten(lambda *xs: in_chunks(*xs, form=form, early=early), *inputs(tokens, keyed, n, p))
    assert outcome.names == [f"fuse chunked {'linear attention' if form == 'linear' else 'delta rule'}"] * 2
    assert outcome.targets.count("refold.delta_rule.default") == 1
    assert not [target for target in outcome.targets if "mm" in target or "cumsum" in target]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@forms(SOME[0], SOME[2], SOME[4])
def test_training(around_loops, form, keyed, early, tokens, n, p):
    seen, error = around_loops(lambda *xs: in_chunks(*xs, form=form, early=early), inputs(tokens, keyed, n, p))
    assert names(seen.rewrites) == ["delta_rule"] * 2
    assert error < 1e-5


@pytest.mark.parametrize("final", [True, False])
def test_a_state_that_is_given_in_the_form_of_another(around_loops, final):
    """``state.to(q)`` reads no value of q, so it detaches nothing."""
    *given, state = inputs(2 * CHUNK)

    def fn(*xs):
        y, last = in_chunks(*xs, state.to(xs[0]), form="strengths")
        return (y, last) if final else y

    seen, error = around_loops(fn, given)
    assert names(seen.rewrites) == ["delta_rule"] * (1 + final)
    assert not any("[detached]" in note for note in seen.notes)
    assert error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("form", "read"), [("strengths", False), ("low rank", False), ("strengths", True)])
def test_a_loop_over_rows_that_returns_nothing(around_loops, monkeypatch, form, read):
    """It writes the rows of the inverse in place, and is dropped where nothing else reads them."""
    monkeypatch.setitem(globals(), "CHUNK", SHORTEST + 4)

    def fn(*xs):
        views = []
        y, _ = in_chunks(*xs, form=form, views=views)
        return (y, views[0].mean(-1)) if read else y

    seen, error = around_loops(fn, inputs(2 * CHUNK, n=17))
    assert names(seen.rewrites) == ["delta_rule"]
    assert any(note.startswith(STAYS) for note in seen.notes) == read
    assert error < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_chunks_that_are_widened_after_they_are_cut(rewritten, form):
    *given, _ = (x.bfloat16() for x in inputs(2 * CHUNK))
    outcome = rewritten(lambda *xs: in_chunks(*xs, form=form, wide=torch.float32), *given)
    assert len(outcome.names) == 2
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let loops over chunks wait, as where operators have kernels."""
    monkeypatch.setattr(early_rewrites, "has_pointwise_kernels", lambda device: True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["training", pytest.param("inference", marks=pytest.mark.exhaustive)])
@few(("form", "keyed"), [(form, keyed) for form in FORMS for keyed in (False, True)], [("linear", False)])
def test_loops_over_many_chunks(around_loops, form, keyed, mode, on_a_gpu):
    """A loop over chunks that is a scan of its states, too, is more than that."""
    seen, error = around_loops(lambda *xs: in_chunks(*xs, form=form), inputs(SHORTEST * CHUNK + 1, keyed), mode)
    assert names(seen.rewrites) == ["delta_rule"] * 2
    assert error < 1e-5


@pytest.mark.slow
def test_chunks_that_are_almost_a_rule_stay_a_scan(on_a_gpu):
    given = inputs(SHORTEST * CHUNK)
    almost = partial(in_chunks, form="linear", wrong="write")
    run = refold.compile(lambda *xs: almost(*xs), accept="always", strict=True)
    for got, want in zip(run(*given), almost(*(x.double() for x in given)), strict=True):
        assert (got - want).norm() < 1e-5 * want.norm()
    assert operators(run) == ["linear_scan"]
    assert any("[not-equal]" in row.reason for graph in run.report.graphs for row in graph.rewrites)


@pytest.mark.slow
def test_loops_over_chunks_are_scans_on_a_cpu():
    """Where operators have no kernels of their own, a scan and products of all chunks at once are faster."""
    run, seen = spliced(partial(in_chunks, form="linear"), "inference")
    run(*inputs(SHORTEST * CHUNK))
    assert names(seen.rewrites) == ["linear_scan"]


def one_by_one(q, k, v, g, beta, *, cut="slice", merge="cat", erase=True, alike=None, state=None):
    """Cut each chunk for itself, and collect outputs in a list: ``(b, t, h, ...)``.

    If all tokens decay alike, ``alike`` is the sum of log decays in a chunk, and what it multiplies states by.
    """
    chunks = q.shape[1] // CHUNK
    if cut == "slice":
        parts = [[x[:, i * CHUNK : (i + 1) * CHUNK] for x in (q, k, v, g, beta)] for i in range(chunks)]
    else:
        cuts = (x.split(CHUNK, 1) if cut == "split" else x.chunk(chunks, 1) for x in (q, k, v, g, beta))
        parts = zip(*cuts, strict=True)
    state, ys = q.new_zeros(2, 2, k.shape[-1], v.shape[-1]) if state is None else state, []
    for part in parts:
        a, b, new, own, strength = (x.transpose(1, 2) for x in part)
        a, total = a * 0.5, own.cumsum(-1).unsqueeze(-1)
        total, fade = (total, total[:, :, -1:].exp()) if alike is None else alike
        if erase:
            read = b * strength.unsqueeze(-1)
            lower = pairs(read, b, total, total, -1) + torch.eye(CHUNK, dtype=q.dtype)
            new = new * strength.unsqueeze(-1) - (read * total.exp()) @ state
            new = torch.linalg.solve_triangular(lower, new, upper=False, unitriangular=True)
        y = pairs(a, b, total, total, 0) @ new + (a * total.exp()) @ state
        state = state * fade + (b * (total[:, :, -1:] - total).exp()).mT @ new
        ys.append(y if merge == "cat" else y.transpose(1, 2))
    if merge == "cat":
        return torch.cat(ys, 2).transpose(1, 2), state
    return torch.stack(ys, 1).flatten(1, 2), state


@pytest.mark.parametrize("cut", ["slice", "split", "chunk"])
@pytest.mark.parametrize("merge", ["cat", "stack"])
@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.rows(3)
def test_chunks_that_are_cut_and_collected_one_by_one(rewritten, cut, merge, erase):
    given = inputs(3 * CHUNK)[:5]
    outcome = rewritten(lambda *xs: one_by_one(*xs, cut=cut, merge=merge, erase=erase), *given)
    assert outcome.names == [f"fuse chunked {'delta rule' if erase else 'linear attention'}"] * 2
    assert outcome.targets.count("refold.delta_rule.default") == 1
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


def spelled(how, rate):
    """Return the sums of log decays in a chunk whose tokens decay alike, and what it multiplies states by."""
    if how == "a number":
        rate = 0.25
    if how == "a constant":
        rate = 2.0 ** -(1 + 3 * torch.arange(2))[:, None, None]
    total = (-rate * torch.arange(1, CHUNK + 1)[:, None]).expand(1, 2, CHUNK, -1)
    if how == "the last of the sums":
        return total, total[:, :, -1].exp().unsqueeze(-1)
    if how == "the last factor":
        return total, total.exp().mT[..., -1:]
    return total, math.exp(-rate * CHUNK) if how == "a number" else torch.exp(-rate * CHUNK)


def all_alike(how, erase, started):
    """Go through chunks whose tokens decay alike, as in lightning attention; its inputs are those of `given_alike`."""
    return lambda q, k, v, beta, rate, state: one_by_one(
        q, k, v, q[..., 0], beta, erase=erase, alike=spelled(how, rate), state=state if started else None
    )


def given_alike(keyed, draw):
    n, p, chunks = (int(torch.randint(2, 7, (), generator=draw)) for _ in range(3))
    q, k, v, _, beta, *_, state = inputs(chunks * CHUNK, n=n, p=p)
    return [q, k, v, beta, torch.rand(2, 1, n if keyed else 1, generator=draw), state]


@pytest.mark.parametrize(("how", "keyed", "erase", "started"), others_exhaustive([
    ("a factor of its own", False, False, False), ("the last of the sums", True, True, False),
    ("a number", False, False, True), ("a factor of its own", False, True, True),
    ("the last of the sums", True, False, True), ("the last factor", False, False, True),
    ("a constant", False, True, False),
], range(3)))  # fmt: skip
def test_tokens_that_decay_alike(rewritten, how, keyed, erase, started):
    fn, given = all_alike(how, erase, started), given_alike(keyed, torch.Generator().manual_seed(len(how)))
    outcome = rewritten(fn, *given)
    assert outcome.names == [f"fuse chunked {'delta rule' if erase else 'linear attention'}"] * 2
    assert not [target for target in outcome.targets if "mm" in target]
    for got, want in zip(outcome.after, fn(*(x.double() for x in given)), strict=True):
        assert (got - want).norm() <= 64 * unit_roundoff(torch.float32) * want.norm()


@pytest.mark.parametrize("erase", [False, True])
def test_training_of_tokens_that_decay_alike(around_loops, erase):
    given = given_alike(False, torch.Generator().manual_seed(int(erase)))
    seen, error = around_loops(all_alike("a factor of its own", erase, True), given)
    assert names(seen.rewrites) == ["delta_rule"] * 2
    assert error < 1e-5


def by_cumulative_sums(q, k, v, shift=1):
    """Sum what chunks write up to the one before, for all chunks at once, and look at a sum of keys besides."""
    a, b, c = (x.transpose(1, 2).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    states = F.pad((b.mT @ c).cumsum(2), (0, 0) * 2 + (shift, 0))[:, :, : a.shape[2]]
    y = (a * 0.5) @ states + ((a * 0.5) @ b.mT).tril() @ c
    return y.flatten(2, 3).transpose(1, 2), b.cumsum(-2).sum()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_states_that_are_cumulative_sums(rewritten, seed):
    q, k, v, *_ = given_alike(False, torch.Generator().manual_seed(seed))
    outcome = rewritten(by_cumulative_sums, q, k, v)
    assert outcome.names == ["fuse chunked linear attention"]
    assert not [target for target in outcome.targets if "mm" in target]
    for got, want in zip(outcome.after, by_cumulative_sums(*(x.double() for x in (q, k, v))), strict=True):
        assert (got - want).norm() <= 64 * unit_roundoff(torch.float32) * want.norm()
    (found,) = rewritten(lambda *xs: by_cumulative_sums(*xs, shift=0), q, k, v).rewrites
    drawn = [0.5 * torch.rand(x.meta["val"].shape) for x in found.original.graph.find_nodes(op="placeholder")]
    assert "[not-equal]" in validate_region(found, drawn, Options(accept="always")).reason


def test_dynamic_lengths_stay_right(rewritten):
    def joined(x):
        return torch.cat([x[:, :3], x[:, 3:6], torch.cat([x, 2 * x], 1)], 1).reshape(2, -1, 3).sum(-1)

    assert rewritten(joined, torch.randn(2, 6, 3), dynamic=True).worst() < 64 * unit_roundoff(torch.float32)


def test_a_layer_is_read_without_those_below_it(rewritten, monkeypatch):
    """What is walked for outputs in chunks depends on their own layer, not on how many follow."""

    def layers(x, count):
        for _ in range(count):
            q, k, v = (f(x).unflatten(1, (-1, CHUNK)) for f in (torch.sin, torch.cos, torch.tanh))
            x = x + ((q @ k.mT).softmax(-1) @ v).flatten(1, 2).relu()
        return x

    regions, region = [], fuse_chunked_deltas._Region
    monkeypatch.setattr(fuse_chunked_deltas, "_Region", lambda *args: regions.append(region(*args)) or regions[-1])
    walked = []
    for count in (2, 5):
        regions.clear()
        rewritten(lambda x, count=count: layers(x, count), torch.randn(2, 3 * CHUNK, 5))
        assert len(regions) == count
        walked.append({len(found.reached) for found in regions})
    assert walked[0] == walked[1]
    assert len(walked[0]) == 1


@pytest.mark.parametrize(("form", "wrong"), [("strengths", "decays"), ("low rank", "write"), ("linear", "write")])
def test_what_is_almost_one_is_refused(rewritten, form, wrong):
    rewrites = rewritten(lambda *xs: in_chunks(*xs, form=form, wrong=wrong), *inputs(3 * CHUNK)).rewrites
    assert rewrites
    for found in rewrites:
        shapes = [node.meta["val"].shape for node in found.original.graph.find_nodes(op="placeholder")]
        reason = validate_region(found, [0.5 * torch.rand(shape) for shape in shapes], Options(accept="always")).reason
        assert "[not-equal]" in reason
