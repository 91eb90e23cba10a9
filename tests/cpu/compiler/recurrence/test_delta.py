"""Loops over time that are the delta rule become its operator, and similar ones do not: exact in float64."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import refold
from refold.compiler.decisions import Store
from refold.compiler.dynamo import captures_loops
from refold.compiler.ir.operators import RANK_ONE
from refold.compiler.options import Options
from refold.compiler.recurrence import systems
from refold.compiler.recurrence.delta import read_rank_one
from refold.compiler.session import GraphCompile
from support.agreement import outputs, rewritten
from support.products import each_pair
from support.scans import Described

pytestmark = pytest.mark.rows(16)

B, T, H, N, P = 2, 17, 3, 6, 4


def operands(channels=P):
    """Draw q, k, v, g, beta and r, (b, t, h, ...), in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(B, T, H, *shape, generator=generator, dtype=torch.float64)

    q, k, r = (F.normalize(draw(N), dim=-1) for _ in range(3))
    return q, k, draw(channels), -draw().exp(), draw().sigmoid(), r


def agree(fn, *inputs, training=False):
    """Compare a function with its rewritten self, in float64; return what its loops became."""
    found = []

    def run(*xs):
        y, rows = rewritten(flat, *xs, training=training)
        found.extend(rows)
        return y

    def flat(*xs):
        results = fn(*xs)
        return torch.cat([x.flatten() for x in results]) if isinstance(results, tuple) else results

    weights = torch.randn(flat(*inputs).shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = outputs(flat, inputs, training, weights)
    for x, y in zip(expected, outputs(run, inputs, training, weights), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9)
    return [row.detail for row in found if RANK_ONE.name in row.detail]


def as_transformers(query, key, value, g, beta, initial_state=None, output_final_state=True):
    """As its models compute without kernels: `torch_recurrent_gated_delta_rule` of Qwen3-Next."""
    query, key, value, beta, g = (x.transpose(1, 2).contiguous() for x in (query, key, value, beta, g))
    batch_size, num_heads, sequence_length, k_head_dim = key.shape
    v_head_dim = value.shape[-1]
    query = query * (1 / (query.shape[-1] ** 0.5))
    core_attn_out = torch.zeros(batch_size, num_heads, sequence_length, v_head_dim).to(value)
    last_recurrent_state = (
        torch.zeros(batch_size, num_heads, k_head_dim, v_head_dim).to(value)
        if initial_state is None
        else initial_state.to(value)
    )
    for i in range(sequence_length):
        q_t, k_t, v_t = query[:, :, i], key[:, :, i], value[:, :, i]
        g_t = g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
        beta_t = beta[:, :, i].unsqueeze(-1)
        last_recurrent_state = last_recurrent_state * g_t
        kv_mem = (last_recurrent_state * k_t.unsqueeze(-1)).sum(dim=-2)
        delta = (v_t - kv_mem) * beta_t
        last_recurrent_state = last_recurrent_state + k_t.unsqueeze(-1) * delta.unsqueeze(-2)
        core_attn_out[:, :, i] = (last_recurrent_state * q_t.unsqueeze(-1)).sum(dim=-2)
    y = core_attn_out.transpose(1, 2).contiguous()
    return (y, last_recurrent_state) if output_final_state else y


@each_pair(training=[False, True], initial=[False, True], final=[False, True])
def test_transformers_spelling(training, initial, final):
    q, k, v, g, beta, _ = operands()
    start = [torch.randn(B, H, N, P, dtype=torch.float64)] if initial else []

    def fn(*xs):
        return as_transformers(*xs, output_final_state=final)

    assert agree(fn, q, k, v, g, beta, *start, training=training) == [
        f"{T} steps of a state of {B} x {H} x {N} x {P} as one {RANK_ONE.name}"
    ]


def as_kda(q, k, v, g, beta, r):
    """With a decay per key, and the strength in the key."""
    g = g[..., None] * (1 + r.square())
    S, o = k.new_zeros(B, H, N, P), torch.zeros_like(v)
    for i in range(T):
        q_i, k_i, v_i, g_i, b_i = q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i]
        S = S * g_i[..., None].exp()
        S = S + torch.einsum("bhk,bhv->bhkv", b_i[..., None] * k_i, v_i - (k_i[..., None] * S).sum(-2))
        o[:, i] = torch.einsum("bhk,bhkv->bhv", q_i, S)
    return o


def ungated(q, k, v, g, beta, r):
    """DeltaNet, with the strength as an axis of one element."""
    S, out, beta = torch.zeros(B, H, N, P).to(v), [], beta[..., None]
    for i in range(T):
        u = (v[:, i] - (S.clone() * k[:, i, ..., None]).sum(-2)) * beta[:, i]
        S = S.clone() + k[:, i].unsqueeze(-1) * u.unsqueeze(-2)
        out.append(torch.einsum("bhd,bhdm->bhm", q[:, i], S))
    return torch.stack(out, 1), S


def with_bmm(q, k, v, g, beta, r):
    """One axis for batch and heads, and `baddbmm`."""
    q, k, v, g, beta = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, g, beta))
    S, out = torch.zeros(B * H, N, P).to(v), []
    for i in range(T):
        S = g[:, i, None, None].exp() * S
        u = (v[:, i, None] - torch.bmm(k[:, i, None], S)) * beta[:, i, None, None]
        S = torch.baddbmm(S, k[:, i, :, None], u)
        out.append(torch.bmm(q[:, i, None], S)[:, 0])
    return torch.stack(out, 1), S


def with_einsum(q, k, v, g, beta, r):
    """Other keys are read than are written."""
    S, out = torch.zeros(B, H, N, P).to(v), []
    for q_t, k_t, v_t, r_t, g_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, r, g, beta)), strict=True):
        S = torch.einsum("bhnp,bh->bhnp", S, g_t.exp())
        u = v_t - torch.einsum("bhnp,bhn->bhp", S, r_t)
        S = S + torch.einsum("bhn,bhp,bh->bhnp", k_t, u, b_t)
        out.append(torch.einsum("bhnp,bhn->bhp", S, q_t))
    return torch.stack(out, 1), S


def one_sequence(q, k, v, g, beta, r):
    """A state without batch and heads; only the last one is used."""
    q, k, v, beta = q[0, :, 0], k[0, :, 0], v[0, :, 0], beta[0, :, 0]
    S = v.new_zeros(N, P)
    for i in range(T):
        S = S + torch.outer(k[i], (v[i] - (S * k[i, :, None]).sum(0)) * beta[i])
    return S


def two_queries(q, k, v, g, beta, r):
    S, out = v.new_zeros(B, H, N, P), []
    for i in range(T):
        S = S + k[:, i, ..., None] * (v[:, i] - (S * k[:, i, ..., None]).sum(-2))[..., None, :]
        out.append(torch.tanh((S * q[:, i, ..., None]).sum(-2)) * (S * r[:, i, ..., None]).sum(-2))
    return torch.stack(out, 1)


def with_addcmul(q, k, v, g, beta, r):
    S, out = v.new_zeros(B, H, N, P), []
    for i in range(T):
        S = S * g[:, i, :, None, None].exp()
        u = (v[:, i] - (S * k[:, i, ..., None]).sum(-2)) * beta[:, i, :, None]
        S = torch.addcmul(S, k[:, i, ..., None], u[:, :, None], value=0.5)
        out.append((S * q[:, i, ..., None]).sum(-2))
    return torch.stack(out, 1)


def with_mv(q, k, v, g, beta, r):
    """A state of (values, keys) of one head, times vectors."""
    q, k, v, g, beta = (x[0, :, 0] for x in (q, k, v, g, beta))
    S, out = v.new_zeros(P, N), []
    for i in range(T):
        S = S * g[i].exp()
        S = S + torch.outer((v[i] - S @ k[i]) * beta[i], k[i])
        out.append(torch.mv(S, q[i]))
    return torch.stack(out)


def rwkv7(q, k, v, g, beta, r):
    """Reads the state before its decay, and writes values under other keys."""
    w, a, b, S, out = (
        torch.exp(-0.6 * (g[..., None] * k).sigmoid()),
        -r,
        r * beta[..., None],
        v.new_zeros(B, H, P, N),
        [],
    )
    for t in range(T):
        sa = (S * a[:, t, :, None]).sum(-1)
        S = S * w[:, t, :, None] + sa[..., None] * b[:, t, :, None] + v[:, t, ..., None] * k[:, t, :, None]
        out.append((S * q[:, t, :, None]).sum(-1))
    return torch.stack(out, 1), S


def rwkv7_of_one_head(q, k, v, g, beta, r):
    """From a state that is given. Some decays are zero, and forget nothing of what was read."""
    w, S, out = k[0, :, 0].clamp(min=0), r[0, :P, 0], []
    for t in range(T):
        S = S * w[t] + torch.outer(S @ r[0, t, 0], q[0, t, 0]) + torch.outer(v[0, t, 0], k[0, t, 0])
        out.append(S @ q[0, t, 1])
    return torch.stack(out)


def fast_weights_that_fade(q, k, v, g, beta, r):
    """A step of gradient descent with weight decay: the error is that of the weights before they decay."""
    W, out = 0.1 * r[:, 0, ..., None] * v[:, 0, :, None], []
    for t in range(T):
        error = k[:, t, :, None] @ W - v[:, t, :, None]
        W = g[:, t, :, None, None].exp() * W - beta[:, t, :, None, None] * (k[:, t, ..., None] @ error)
        out.append(q[:, t, :, None] @ W)
    return torch.cat(out, 2), W


def as_one_matrix(q, k, v, g, beta, r, one=lambda v: torch.eye(N).to(v)[None].expand(H, N, N)):
    """A state of (values, keys), times an identity less what is erased."""
    S, out, I = v.new_zeros(B, H, P, N), [], one(v)
    for t in range(T):
        key, b = k[:, t, :, None], beta[:, t, :, None, None]
        S = g[:, t, :, None, None].exp() * (S @ (I - b * key.mT @ key)) + b * (v[:, t, ..., None] @ key)
        out.append((S @ q[:, t, ..., None]).squeeze(-1))
    return torch.stack(out, 1), S


def as_a_diagonal_and_a_product(q, k, v, g, beta, r):
    """RWKV-7 by matrices, of (keys, values)."""
    S, out = v.new_zeros(B, H, N, P), []
    for t in range(T):
        A = torch.diag_embed(q[:, t].sigmoid()) - (r * beta[..., None])[:, t, ..., None] @ r[:, t, :, None]
        S = A @ S + k[:, t, ..., None] * v[:, t, :, None]
        out.append((S * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1), S


def from_an_identity(q, k, v, g, beta, r):
    S, out = torch.eye(N).to(v).expand(B, H, N, N), []
    for t in range(T):
        S = torch.eye(N).to(v) @ S - beta[:, t, :, None, None] * (k[:, t, ..., None] @ (k[:, t, :, None] @ S))
        S = S + k[:, t, ..., None] * r[:, t, :, None]
        out.append((S * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1), S


def delta_product(q, k, v, g, beta, r):
    """Two writes a step, after one decay per head."""
    S, out = v.new_zeros(B, H, N, P), []
    for t in range(T):
        S = S * g[:, t, :, None, None].exp()
        for key, b in ((k, beta), (r, 2 * beta)):
            error = v[:, t] - (S * key[:, t, ..., None]).sum(-2)
            S = S + error.unsqueeze(-2) * key[:, t, ..., None] * b[:, t, :, None, None]
        out.append((S * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1), S


def unlike_writes(q, k, v, g, beta, r):
    """Three: with a decay per key, by a matrix, and with other read keys; a state of (values, keys)."""
    S, out, I = 0.3 * v[:, 0, ..., None] * r[:, 0, :, None], [], torch.eye(N).to(v)
    for t in range(T):
        S = S * (g[:, t, :, None] * q[:, t].square()).exp()[:, :, None]
        S = S + (v[:, t] - (S @ k[:, t, ..., None])[..., 0])[..., None] * k[:, t, :, None]
        key, b = r[:, t, :, None], beta[:, t, :, None, None]
        S = S @ (I - b * key.mT @ key) + b * (v[:, t, ..., None] @ key)
        S = 0.9 * S
        S = S - k[:, t, :, None] * (S @ r[:, t, ..., None]) + k[:, t, :, None] * v[:, t, ..., None].tanh()
        out.append((S @ q[:, t, ..., None]).squeeze(-1))
    return torch.stack(out, 1), S


SPELLINGS = [
    as_kda, ungated, with_bmm, with_einsum, one_sequence, two_queries, with_addcmul, with_mv, rwkv7, rwkv7_of_one_head,
    fast_weights_that_fade, as_one_matrix, as_a_diagonal_and_a_product, from_an_identity, delta_product, unlike_writes,
]  # fmt: skip


@pytest.mark.parametrize("fn", SPELLINGS)
@pytest.mark.parametrize("training", [False, True])
def test_spellings(fn, training):
    assert len(agree(fn, *operands(), training=training)) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", ["read between", "of the old state", "what was read"])
def test_two_writes_that_are_no_two_delta_rules(other, few_coupled):
    def fn(q, k, v, g, beta, r):
        S, out = v.new_zeros(B, H, N, P), []
        for t in range(T):
            old, y = S, (S * q[:, t, ..., None]).sum(-2)
            S = S + k[:, t, ..., None] * (v[:, t] - (S * k[:, t, ..., None]).sum(-2))[:, :, None]
            between = (S * q[:, t, ..., None]).sum(-2) if other == "read between" else 0
            held, x = (old if other == "of the old state" else S), (y if other == "what was read" else v[:, t])
            S = S + r[:, t, ..., None] * (x - (held * r[:, t, ..., None]).sum(-2))[:, :, None]
            out.append((S * q[:, t, ..., None]).sum(-2) + between)
        return torch.stack(out, 1)

    assert not agree(fn, *operands())


# What a step may do otherwise than the delta rule, each with whether it is one all the same.
OTHERWISE = {
    "decay": {"key": True, "none": True, "value": False, "after": True, "key, after": True},
    "erased": {"r": True},  # another key than the one that is written
    "read": {"r": True, "q": True},
    "source": {"old": True, "new": False},
    "sign": {"+": True},
    "state": {"transposed": False},
    "strength": {"value": False, "of what is written": True},
    "asked": {"old": False},
}


def program(decay="head", erased="k", read="k", source="decayed", sign="-", state="", strength="head", asked="new"):
    """Return a loop with a step of these kinds."""

    def fn(q, k, v, g, beta, r):
        given, D, S, out = {"q": q, "k": k, "r": r}, g.exp()[..., None, None], v.new_zeros(B, H, N, N), []
        D = {"key": D * r.sigmoid()[..., None], "value": D * q.sigmoid()[..., None, :]}.get(decay.split(",")[0], D)
        b = beta[..., None, None] * (v.square()[..., None, :] if strength == "value" else 1)
        for t in range(T):
            late, K, R, E = decay.endswith("after"), *(given[name][:, t, ..., None] for name in ("k", read, erased))
            old, S = S, S if late or decay == "none" else S * D[:, t]
            write = K * v[:, t, ..., None, :] * b[:, t]
            held = {"old": old, "new": S + write, "decayed": S}[source]
            found = ((held.mT if state else held) * R).sum(-2, keepdim=True)
            erase = E * found * (1 if strength == "of what is written" else b[:, t])
            S = S + write + erase if sign == "+" else S + write - erase
            S = S * D[:, t] if late else S
            out.append(((old if asked == "old" else S) * q[:, t, ..., None]).sum(-2))
        return torch.stack(out, 1)

    return fn


SINGLE = [(name, kind) for name, kinds in OTHERWISE.items() for kind in kinds]


@pytest.fixture
def few_coupled(monkeypatch):
    """As without Numba: a state of so many elements is no small system."""
    monkeypatch.setattr(systems, "_sweeps", lambda x: None)


@pytest.mark.parametrize(("name", "kind"), SINGLE)
def test_one_thing_otherwise(name, kind, few_coupled):
    found = agree(program(**{name: kind}), *operands(N))
    assert bool(found) == OTHERWISE[name][kind]


@pytest.mark.parametrize("seed", range(8))
def test_some_things_otherwise(seed, few_coupled):
    """Whatever a step does: it is computed as it is written."""
    drawn = random.Random(seed)
    some = {name: drawn.choice([*kinds]) for name, kinds in OTHERWISE.items() if drawn.random() < 0.4}
    found = agree(program(**some), *operands(N), training=seed % 2 == 0)
    assert not found or all(OTHERWISE[name][kind] for name, kind in some.items())


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("per_key", [False, True])
def test_decays_of_any_sign_in_inference(early, per_key, few_coupled):
    """As an argument: some are negative, some zero."""

    def fn(q, k, v, a, r):
        S, out = r[:, 0, :, :, None] * v[:, 0, :, None], []
        for t in range(T):
            old, S = S, S * (a[:, t, ..., None] if per_key else a[:, t, :, :1, None])
            read = ((old if early else S) * k[:, t, ..., None]).sum(-2, keepdim=True)
            S = S + (r if per_key else k)[:, t, ..., None] * v[:, t, :, None] - k[:, t, ..., None] * read
            out.append((S * q[:, t, ..., None]).sum(-2))
        return torch.stack(out, 1), S

    q, k, v, _, _, r = operands()
    a = q.roll(1, 1).clamp(-1, 1) * (r.abs() > 0.1)
    assert len(agree(fn, q, k, v, a, r)) == 1
    assert not agree(fn, q, k, v, a, r, training=True)


def changed(v):
    one = torch.eye(N).to(v)
    one.fill_(0.5)
    return one


OTHER_MATRICES = [
    changed,
    lambda v: torch.eye(1).to(v).expand(N, N),
    lambda v: torch.eye(N).to(v).flip(0),
    lambda v: torch.eye(N).to(v)[torch.arange(N).flip(0)],
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("one", OTHER_MATRICES)
def test_another_matrix_than_the_identity(one, few_coupled):
    assert not agree(lambda *xs: as_one_matrix(*xs, one=one), *operands())


def reset(keep):
    """Return a loop over packed documents, each of which begins with a state of zeros."""

    def fn(q, k, v, g, beta, r):
        ends, S, out = g > -0.3, v.new_zeros(B, H, N, P), []
        for i in range(T):
            S = keep(S, ends[:, i, :, None, None])
            S = S + k[:, i, ..., None] * (v[:, i] - (S * k[:, i, ..., None]).sum(-2))[..., None, :]
            out.append((S * q[:, i, ..., None]).sum(-2))
        return torch.stack(out, 1), S

    return fn


@pytest.mark.parametrize("training", [False, True])
def test_a_factor_of_zero_ends_a_document(training):
    found = agree(reset(lambda S, end: S * (~end).to(S)), *operands(), training=training)
    assert len(found) == 1


@pytest.mark.exhaustive
def test_a_masked_state_stays(few_coupled):
    """Where a mask ends a NaN, a decay of zero would not."""
    assert not agree(reset(lambda S, end: torch.where(end, 0.0, S)), *operands())


def decayed(S, q, k, v, g, b, r):
    S = S * g.exp()[..., None, None]
    return S + k[..., None] * ((v - (S * k[..., None]).sum(-2)) * b[..., None])[..., None, :]


def read_early(S, q, k, v, g, b, r):
    """As RWKV-7."""
    erased = (r * b[..., None])[..., None] * (S * r[..., None]).sum(-2, keepdim=True)
    return S * (q + g[..., None]).sigmoid()[..., None] - erased + k[..., None] * v[..., None, :]


def twice(S, q, k, v, g, b, r):
    S = decayed(S, q, k, v, g, b, r)
    return S + r[..., None] * (v - (S * r[..., None]).sum(-2))[..., None, :]


def of_any_sign(S, q, k, v, g, b, r):
    S = S * g.sin()[..., None, None]
    return S + k[..., None] * (v - (S * k[..., None]).sum(-2))[..., None, :]


MASKED = {
    "new": lambda at, new, S: torch.where(at, new, S),
    "old": lambda at, new, S: torch.where(~at, S, new),
    "copied": lambda at, new, S: torch.where(~at.expand_as(S), S.clone(), new),
}
MASKS = {
    "some": torch.rand(B, T, generator=torch.Generator().manual_seed(0)) < 0.6,
    "per head": torch.rand(B, T, H, generator=torch.Generator().manual_seed(1)) < 0.6,
    "same": torch.arange(T) % 3 > 0,
    "all": torch.ones(B, T, dtype=torch.bool),
    "none": torch.zeros(B, T, dtype=torch.bool),
    "ends": torch.arange(T) < torch.tensor([[T], [5]]),
}


@each_pair(step=[decayed, read_early, twice, of_any_sign], how=[*MASKED], mask=[*MASKS], training=[False, True])
def test_steps_that_a_mask_takes(step, how, mask, training):
    """What is not a number in a step that is not taken ends there, as ``torch.where`` has it."""
    taken = MASKS[mask]
    at = taken.expand(B, T, *taken.shape[2:])[(..., *[None] * (5 - max(taken.dim(), 2)))]

    def fn(*xs):
        S, out = xs[5][:, 0, ..., None] * xs[2][:, 0, :, None], []
        for t in range(T):
            new = step(S, *(x[:, t] for x in xs))
            S = MASKED[how](at[:, t], new, S)
            out.append((S * xs[0][:, t, ..., None]).sum(-2))
        return torch.stack(out, 1), S

    given = operands()
    assert len(agree(fn, *given, training=training)) == (1 if step is not of_any_sign or not training else 0)
    if not training and mask != "same":
        bad = [x.masked_fill(~at[(..., *[0] * (at.dim() - x.dim()))], torch.nan) for x in given[1:5]]
        bad[0][:, 0], bad[1][:, 0] = given[1][:, 0], given[2][:, 0]
        assert len(agree(fn, given[0], *bad, given[5])) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [torch.arange(N)[:, None] > 2, torch.arange(P) > 1])
def test_a_mask_within_a_state(at, few_coupled):
    def fn(*xs):
        S, out = xs[2].new_zeros(B, H, N, P), []
        for t in range(T):
            S = torch.where(at, decayed(S, *(x[:, t] for x in xs)), S)
            out.append((S * xs[0][:, t, ..., None]).sum(-2))
        return torch.stack(out, 1)

    assert not agree(fn, *operands())


@pytest.mark.parametrize("training", [False, True])
def test_one_program_for_all_lengths(training):
    compiled = refold.compile(as_transformers, accept="always", verify="off", dynamic=True, strict=True, cache=False)
    graphs = set()
    for steps in (19, 40, 23):
        q, k, v, g, beta = (x[:, :1].repeat(1, steps, *[1] * (x.dim() - 2)) for x in operands()[:5])
        v = (v + torch.arange(steps)[:, None, None].sin()).requires_grad_(training)
        y, state = compiled(q, k, v, g, beta)
        expected = as_transformers(q, k, v, g, beta)
        torch.testing.assert_close((y, state), expected, rtol=1e-9, atol=1e-9)
        graphs |= {id(graph) for graph in compiled.report.graphs}
        assert RANK_ONE.name in str(compiled.report)
    assert len(graphs) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("early", [False, True])
def test_several_tokens_a_step_are_one_program_for_all_lengths(early):
    graphs = []

    def fn(q, k, v, g, r):
        S, out = v.new_zeros(*k.shape[::2], k.shape[3], v.shape[3]), []
        for t in range(k.shape[1]):
            old, S = S, S * g[:, t, :, None, None].exp()
            erased = k[:, t, ..., None] * ((old if early else S) * k[:, t, ..., None]).sum(-2, keepdim=True)
            S = S - erased + r[:, t, ..., None] * v[:, t, :, None]
            out.append((S * q[:, t, ..., None]).sum(-2))
        return torch.stack(out, 1), S

    def backend(gm, inputs):
        session = GraphCompile(gm, inputs, Options(verify="off", cache=False), Described("training"), Store(None, ""))
        session.rewrite_before_autograd()
        graphs.append([row.detail for row in session.rows.values()])
        return session.gm

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=captures_loops(backend), dynamic=True)
    q, k, v, g, _, r = operands()
    for steps in (17, T):
        given = [x[:, :steps].clone().requires_grad_() for x in (q, k, v, g, r)]
        torch.testing.assert_close(compiled(*given), fn(*given), rtol=1e-9, atol=1e-9)
    ((detail,),) = graphs
    assert detail.endswith(f"as one {RANK_ONE.name}")


@pytest.mark.exhaustive
def test_a_step_of_many_sums_is_not_read_to_its_end():
    def step(S, x):
        for _ in range(1200):
            S = S + x
        return S

    graph = make_fx(step, tracing_mode="fake")(torch.zeros(N, P), torch.zeros(N, P)).graph
    (state, _), (new,) = graph.find_nodes(op="placeholder"), graph.output_node().all_input_nodes
    assert read_rank_one(graph, state, new) is None
