"""Outputs that read each state before its update, alone or with a term of the same step: RWKV and its relatives."""

import pytest
import torch

from refold.compiler.recurrence import duality
from refold.compiler.recurrence.forms import FEW as CHUNK
from support.agreement import check
from support.scans import compiled, flat, operators

pytestmark = pytest.mark.rows(16)

H, K, V, STEPS = 2, 4, CHUNK, 2 * CHUNK + 5
KEYED = "delta_rule"


def inputs(batch=2, dtype=torch.float32, steps=STEPS):
    g = torch.Generator().manual_seed(batch)
    r, k, w = (torch.randn(batch, steps, H, K, generator=g, dtype=dtype) for _ in range(3))
    v = torch.randn(batch, steps, H, V, generator=g, dtype=dtype)
    u, state = torch.randn(H, K, generator=g, dtype=dtype), torch.randn(batch, H, K, V, generator=g, dtype=dtype)
    return r, k, v, -w.abs(), u, state


def reading(read, last=True):
    """Return a loop that sums, over keys, queries times what it reads.

    Args:
        read: Called with the state before a step, what is added to it, the state after, ``u``, and the step's values.
        last: Whether the last state is returned, too.
    """

    def fn(r, k, v, w, u, s):
        out = []
        for t in range(r.shape[1]):
            kv = k[:, t, :, :, None] * v[:, t, :, None, :]
            new = s * w[:, t].exp()[..., None] + kv
            out.append((r[:, t, :, :, None] * read(s, kv, new, u[..., None], v[:, t, :, None, :])).sum(-2))
            s = new
        return (torch.stack(out, 1), s) if last else torch.stack(out, 1)

    return fn


bonus = reading(lambda s, kv, new, u, v: s + u * kv)  # RWKV-6


def by_products(r, k, v, w, u, s):
    """`bonus` by matrix products, writing its outputs, from no state."""
    s, out = torch.zeros_like(s), torch.zeros_like(v)
    for t in range(r.shape[1]):
        a = k[:, t, :, :, None] @ v[:, t, :, None]
        out[:, t] = (r[:, t, :, None] @ (u[..., None] * a + s))[:, :, 0]
        s = a + w[:, t].exp()[..., None] * s
    return out


def one_decay_a_head(r, k, v, w, u, s):
    rate = w[0, 0, :, 0]
    out = []
    for t in range(r.shape[1]):
        dt = w[:, t, :, 1].square()
        b = (dt[..., None] * k[:, t])[..., None] * v[:, t, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", r[:, t], s + b))
        s = s * (dt * rate).exp()[..., None, None] + b
    return torch.stack(out, 1)


def output_first(r, k, v, w, u, s):
    """Mamba-1, its output read before the update."""
    x, dt, A = v[:, :, 0], v[:, :, 1].sigmoid(), w[0, 0, 0].expand(V, K) * 1.5
    h, out = s[:, 0].transpose(1, 2), []
    for t in range(x.shape[1]):
        out.append((h * r[:, t, 0, None]).sum(-1))
        h = torch.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * x[:, t])[..., None] * k[:, t, 0, None]
    return torch.stack(out, 1), h


FOUND = {
    "bonus": (bonus, KEYED),
    "by products": (by_products, KEYED),
    "the state": (reading(lambda s, kv, new, u, v: s), KEYED),
    # Several products next to the state, which has factors of its own and a sign.
    "difference": (reading(lambda s, kv, new, u, v: 2 * kv + v - 0.5 * s * u, last=False), KEYED),
    "one decay a head": (one_decay_a_head, "ssd"),
    "output first": (output_first, "selective_scan"),
}


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # Sums over at most all steps and keys, in another order, of products that are rounded a few times.
        assert (a - b).norm() <= 4 * K * STEPS**0.5 * torch.finfo(a.dtype).eps * b.norm()


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("given", [(1, torch.float32), (2, torch.float64)])
def test_values(name, given):
    (fn, operator), (batch, dtype) = FOUND[name], given
    run = compiled(fn)
    with torch.no_grad():
        close(flat(run(*inputs(batch, dtype))), flat(fn(*inputs(batch, dtype))))
    assert operators(run) == [operator]


@pytest.mark.parametrize(("fn", "operator"), FOUND.values(), ids=FOUND)
def test_gradients(fn, operator):
    run, results = compiled(fn, verify="off"), []  # its own bound is that of this test
    for program in (run, fn):
        leaves = [x.requires_grad_() for x in inputs()]
        loss = sum(y.square().sum() for y in flat(program(*leaves)))
        results.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    close(*results)
    assert operators(run) == [operator]


def transposed(r, k, v, w, u, s):
    """Keys and values are of one size: what is added to the state is not where it looks to be."""
    x, s, out = v[..., :K], s[..., :K], []
    for t in range(r.shape[1]):
        out.append((r[:, t, :, :, None] * (s.transpose(2, 3) + u[..., None])).sum(-2))
        s = s * w[:, t].exp()[..., None] + k[:, t, :, :, None] * x[:, t, :, None, :]
    return torch.stack(out, 1)


OTHERS = {
    "before and after the step": reading(lambda s, kv, new, u, v: s + new * u, last=False),
    "bent": reading(lambda s, kv, new, u, v: s.tanh(), last=False),
    "transposed": transposed,
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_other_readings_keep_the_states(fn):
    run = compiled(fn)
    with torch.no_grad():
        close([run(*inputs())], [fn(*inputs())])
    assert operators(run) == ["linear_scan"]


def not_shifted(emit, queries):
    return queries


def last_first(emit, y, query, initial, along):
    return y


def nothing(emit, scale, factors, n, target, shape):
    return emit.call(torch.ops.aten.full.default, [], 0.0, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("part", "wrong"), [("_next", not_shifted), ("_one_later", last_first), ("_contracted", nothing)]
)
def test_wrong_ones_are_refused(monkeypatch, part, wrong):
    monkeypatch.setattr(duality, part, wrong)
    run = compiled(bonus)
    with torch.no_grad():
        close(flat(run(*inputs())), flat(bonus(*inputs())))
    assert operators(run) == ["linear_scan"]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_sum_over_time_reads_no_single_state(batch):
    """Eligibility traces, in a loop that is short enough to be unrolled."""

    def fn(x, r):
        z = w = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1] - 1):
            z = 0.72 * z + x[:, t]
            w = w + 0.05 * r[:, t, None] * z
        return torch.cat([w, z], -1)

    g = torch.Generator().manual_seed(0)
    check(fn, [torch.randn(batch, 5, 6, generator=g), torch.randn(batch, 5, generator=g)], training=False)
