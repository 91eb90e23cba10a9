"""The delta rule in chunks becomes one operator in every spelling; what is almost one is refused by its check."""

from contextlib import nullcontext

import pytest
import torch

import refold
from cpu.compiler.beside_float64 import errors
from refold.compiler.dynamo import before_autograd, captures_loops
from refold.compiler.dynamo.capture.trace import SHORTEST
from refold.compiler.inductor import show_graph
from refold.compiler.ir.captured_loop import captured_loops
from refold.compiler.options import Options
from refold.compiler.pipeline import run
from refold.compiler.validate.region import validate_region
from refold.verify.numerics import unit_roundoff
from support.chunked_deltas import CHUNK, chunked, inputs
from support.products import few
from support.scans import Described, names, operators, spliced
from support.trial import no_code

pytestmark = pytest.mark.rows(16)

NAME = "fuse chunked delta rule"


def called(fn, given, *more, **options):
    """Give a function only the arrays that are there."""
    there = [x is not None for x in given]

    def call(*arrays):
        arrays, rest = list(arrays[: sum(there)]), arrays[sum(there) :]
        return fn(*(arrays.pop(0) if one else None for one in there), *rest, **options)

    return call, [x for x in given if x is not None] + list(more)


def check(outcome, rewrites):
    assert outcome.names == [NAME] * rewrites
    assert outcome.targets.count("refold.delta_rule.default") == 1
    assert not [target for target in outcome.targets if "mm" in target or "cumsum" in target or "solve" in target]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("decay", ["head", "key", "none"])
@pytest.mark.parametrize("how", ["solve", "rows"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("final", [True, False])
def test_spellings(rewritten, decay, how, inside, final):
    fn, given = called(chunked, inputs(3 * CHUNK, decay), how=how, inside=inside)
    check(rewritten(fn if final else lambda *xs: fn(*xs)[0], *given), 1 + final)


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("tokens", [1, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
def test_lengths_and_initial_states(rewritten, decay, tokens):
    fn, given = called(chunked, inputs(tokens, decay), torch.randn(2, 2, 3, 5))
    check(rewritten(fn, *given), 2)


@pytest.mark.parametrize(("n", "p"), [(CHUNK, CHUNK), (CHUNK, 3), (2, 2), (5, CHUNK)])
def test_sizes_that_look_alike(rewritten, n, p):
    """Queries, values and states are told apart where all their sizes are the same, too."""
    fn, given = called(chunked, inputs(2 * CHUNK, n=n, p=p))
    check(rewritten(fn, *given), 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["solve", "rows"])
@pytest.mark.parametrize("tokens", [3 * CHUNK, 3 * CHUNK - 1])
def test_symbolic_sizes(rewritten, how, tokens):
    fn, given = called(chunked, inputs(tokens), how=how)
    check(rewritten(fn, *given, dynamic=True), 2)


@pytest.mark.slow
def test_another_batch_or_length_is_no_longer_program():
    """One compile serves all batches, as Inductor's does; another length has its own, which is as short."""
    seen, notes = [], []

    @captures_loops
    def backend(gm, given):
        found = []
        notes.extend(show_graph(gm, given, lambda graph: (found.extend(run(graph)), seen.append(len(graph.nodes)))))
        if len(seen) < 3:  # one batch, and all
            assert not any(validate_region(one, None, Options(accept="always")).reason for one in found)
        return gm

    compiled = torch.compile(called(chunked, inputs(CHUNK), how="rows")[0], backend=backend)
    for rows, tokens in [(1, 3), (2, 3), (3, 3), (3, 4)]:
        compiled(*(x[:1].repeat(rows, *[1] * (x.dim() - 1)) for x in inputs(tokens * CHUNK)))
    assert len(seen) == 3
    assert len(notes) == 1  # that sizes became numbers
    assert max(seen) < 2 * seen[0]


def attention(q, k, v, g, *, power=torch.exp, written=False):
    """Linear attention of (b, h, t, n) in chunks, the last of which may be shorter, with its last state.

    Decays are those of each token (b, h, t), or the same for all tokens (h, 1).
    """
    tokens, state = q.shape[2], q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    position, chunks, out = torch.arange(CHUNK) + 1.0, [], torch.empty_like(v)
    for start in range(0, tokens, CHUNK):
        end = min(start + CHUNK, tokens)
        queries, keys, values = (x[:, :, start:end].contiguous() for x in (q, k, v))
        total = g * position[: end - start] if g.dim() == 2 else g[:, :, start:end].cumsum(-1)
        least = total[..., -1:] if g.dim() == 3 else g * (end - start)
        pairs = (total[..., :, None] - total[..., None, :]).tril()
        within = (queries @ keys.mT * power(pairs)).tril() @ values
        y = within + (queries * power(total)[..., None]) @ state
        state = power(least)[..., None] * state + (keys * power(least - total)[..., None]).mT @ values
        chunks.append(y)
        out[:, :, start:end] = y
    return (out if written else torch.cat(chunks, 2)).transpose(1, 2), state


POWERS = {"e": torch.exp, "two": torch.exp2, "other": lambda x: torch.pow(1.5, x)}


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize(
    ("power", "tokens", "written"), [("e", 15, True), ("two", 15, False), ("other", 16, False), ("two", 16, True)]
)
def test_powers_and_a_shorter_last_chunk(around_loops, each, power, tokens, written):
    """What decays are powers of is read; a last chunk may be shorter, and outputs be written to a buffer."""
    q, k, v, g, _ = inputs(tokens)
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    given = [q, k, v, g if each else torch.tensor([[-0.3], [-0.1]])]
    found, error = around_loops(lambda *xs: attention(*xs, power=POWERS[power], written=written), given)
    assert names(found.rewrites) == ["delta_rule"] * 2
    assert error < 1e-5


@pytest.mark.parametrize("viewed", ["before", "after", "merged"])
def test_a_buffer_that_is_returned_with_a_view(viewed):
    """Results share memory as before: a view that merges chunks is not replaced alone."""

    def fn(q, k, v):
        out = torch.zeros_like(v.unflatten(2, (-1, CHUNK)) if viewed == "merged" else v)
        q, k, v = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v))
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
        first = out[:, :, 0]
        for i in range(q.shape[2]):
            at = i if viewed == "merged" else slice(i * CHUNK, i * CHUNK + CHUNK)
            out[:, :, at] = (q[:, :, i] @ k[:, :, i].mT).tril() @ v[:, :, i] + q[:, :, i] @ state
            state = state + k[:, :, i].mT @ v[:, :, i]
        return out, {"before": first, "after": out[:, :, 0], "merged": out.flatten(2, 3)}[viewed]

    run, seen = spliced(fn, "training")
    given = [x.transpose(1, 2) for x in inputs(3 * CHUNK)[:3]]
    assert max(errors(run, fn, given, True)) < 1e-5
    assert names(seen.rewrites) == ([] if viewed == "merged" else ["delta_rule"])
    y, view = run(*(x.clone().requires_grad_() for x in given))
    assert y.data_ptr() == view.data_ptr()


def test_strengths_of_what_is_read_alone(rewritten):
    fn, given = called(chunked, inputs(3 * CHUNK), wrong="values")
    check(rewritten(fn, *given), 2)


@pytest.mark.parametrize(("wrong", "applied"), [("", 2), ("state", 0), ("write", 0)])
@pytest.mark.parametrize("training", [False, True])
def test_what_is_almost_one_is_refused_where_nothing_else_is_checked(wrong, applied, training):
    fn, given = called(chunked, [x.requires_grad_(training) for x in inputs(3 * CHUNK)], wrong=wrong)
    run = refold.compile(fn, verify="off", accept="always", cache=False)
    with no_code():
        results = run(*given)
    for got, want in zip(results, fn(*given), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
    rows = [row for graph in run.report.graphs for row in graph.rewrites if row.name == NAME]
    assert len([row for row in rows if row.status == "applied"]) == applied
    assert applied or any("[not-equal]" in row.reason for row in rows)


@pytest.mark.parametrize(
    ("decay", "mode"),
    [("head", nullcontext()), ("key", nullcontext()), ("none", nullcontext()), ("head", torch.device("cpu"))],
)
def test_training(decay, mode):
    """A default device is a mode: Dynamo writes methods of tensors then, in place of functions."""
    fn, given = called(chunked, inputs(2 * CHUNK + 1, decay))
    run, results = refold.compile(fn, accept="always", strict=True), []
    for program in (run, fn):
        leaves = [x.clone().requires_grad_() for x in given]
        with mode:
            y, state = program(*leaves)
        (y.sum() + state.square().sum()).backward()
        results.append([y.detach(), state.detach(), *(x.grad for x in leaves)])
    assert operators(run) == ["delta_rule"] * 2
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.exhaustive
def test_parts_without_gradients_keep_them(recwarn):
    """A chunk that the code detaches has no gradient: nothing may be put in its place."""

    def detached(q, k, v, g, beta):
        y, state = chunked(q, k, v.detach() + 0 * v, g, beta)
        with torch.no_grad():
            z, _ = chunked(q, k, v, g, beta)
        return y + z, state

    given = inputs(2 * CHUNK)
    run, results = refold.compile(detached, accept="always"), []
    for program in (run, detached):
        leaves = [x.clone().requires_grad_() for x in given]
        program(*leaves)[0].sum().backward()
        results.append([x.grad for x in leaves])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm() + 1e-6


def plain(q, k, v, beta, *, between=lambda state, i: state, collect=False):
    """Go through chunks without decays; ``between`` is done to the state before each chunk."""
    q, k, v, beta = (x.transpose(1, 2).reshape(2, 2, -1, CHUNK, x.shape[-1]) for x in (q, k, v, beta[..., None]))
    eye = torch.eye(CHUNK, dtype=q.dtype).expand(*q.shape[:3], CHUNK, CHUNK)
    inverse = torch.linalg.solve_triangular(k * beta @ k.mT, eye, upper=False, unitriangular=True)
    u, w, within = inverse @ (v * beta), inverse @ (k * beta), (q @ k.mT).tril()
    state, out, kept = q.new_zeros(2, 2, k.shape[-1], v.shape[-1]), torch.zeros_like(v), []
    for i in range(q.shape[2]):
        state = between(state, i)
        new = u[:, :, i] - w[:, :, i] @ state
        y = q[:, :, i] @ state + within[:, :, i] @ new
        if collect:
            kept.append(y)
        else:
            out[:, :, i] = y
        state = state + k[:, :, i].mT @ new
    out = torch.stack(kept, 2) if collect else out
    return out.reshape(2, 2, -1, v.shape[-1]), state


EDGE = SHORTEST * CHUNK  # from so many tokens on, the loop over chunks is captured


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["training", "inference"])
@few(("tokens", "decay", "how"), [
    (EDGE, "head", "rows"), (EDGE - 1, "key", "solve"), (EDGE + 1, "none", "rows"), (EDGE + CHUNK, "head", "solve"),
    (EDGE - CHUNK + 1, "none", "solve"), (EDGE + 2 * CHUNK - 1, "key", "rows"),
], [(EDGE - 1, "key", "solve")])  # fmt: skip
@few("final", [False, True], [True])
def test_loops_over_many_chunks(around_loops, mode, tokens, decay, how, final):
    fn, given = called(chunked, inputs(tokens, decay), torch.randn(2, 2, 3, 5), how=how)
    seen, error = around_loops(fn if final else lambda *xs: fn(*xs)[0], given, mode)
    assert names(seen.rewrites) == ["delta_rule"] * (1 + final)
    assert not [note for note in seen.notes if "mixes-elements" in note]
    assert error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [SHORTEST - 1, SHORTEST])
def test_no_loop_is_left_to_unroll(chunks):
    left = []

    @captures_loops
    def backend(gm, _):
        gm = Described().describe(gm)
        left.extend(captured_loops(gm))
        return gm

    fn, given = called(chunked, inputs(chunks * CHUNK))
    torch.compile(fn, backend=backend, fullgraph=True)(*given)
    assert not left


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_loop_that_collects_its_outputs_in_a_list(around_loops):
    q, k, v, _, beta = inputs(EDGE, n=17)
    seen, error = around_loops(lambda *xs: plain(*xs, collect=True)[0], [q, k, v, beta])
    assert names(seen.rewrites) == ["delta_rule"]
    assert error < 1e-5


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_loop_that_detaches_its_state_stays(around_loops):
    q, k, v, _, beta = inputs(EDGE, n=6)
    seen, error = around_loops(lambda *xs: plain(*xs, between=lambda state, i: state.detach())[0], [q, k, v, beta])
    assert not seen.rewrites
    assert any("[detached]" in note for note in seen.notes)
    assert error < 1e-5


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("late", [2, EDGE // CHUNK - 1])
def test_a_step_that_differs_is_seen(late):
    """Where the first steps look like a delta rule, all of them are compared with one."""
    q, k, v, _, beta = inputs(EDGE, n=6)
    weights = torch.ones(EDGE // CHUNK).index_fill(0, torch.tensor(late), 0.5)
    run = refold.compile(lambda *xs: plain(*xs[:-1], between=lambda s, i: s * xs[-1][i])[0], accept="always")
    want = plain(*(x.double() for x in (q, k, v, beta)), between=lambda s, i: s * weights[i])[0]
    assert (run(q, k, v, beta, weights) - want).norm() < 1e-5 * want.norm()
    assert not operators(run)


@pytest.mark.exhaustive
def test_loops_that_are_too_long_are_named(around_loops, monkeypatch):
    monkeypatch.setattr(before_autograd, "LONGEST", 100)
    fn, given = called(chunked, inputs(EDGE))
    seen, error = around_loops(fn, given)
    assert not seen.rewrites
    assert any("operations long" in note for note in seen.notes)
    assert error < 1e-5
