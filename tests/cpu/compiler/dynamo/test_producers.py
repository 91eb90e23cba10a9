"""Decays and inputs that are computed before a loop become part of its region, in inference and in training."""

import pytest
import torch
from torch.nn.functional import softplus

import refold
from refold.compiler.dynamo import to_scan
from support.scans import compiled, flat, names, operators, spliced

pytestmark = pytest.mark.rows(16)

B, T, D, N, H = 2, 40, 6, 4, 2


def tensors(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    sizes = (B, T, D), (B, T, D), (D, N), (B, T, N), (B, T, N)
    return [torch.randn(*size, generator=g, dtype=dtype) for size in sizes]


def scanned(decays, inputs, C, h):
    ys = []
    for t in range(inputs.shape[1]):
        h = decays[:, t] * h + inputs[:, t]
        ys.append((h * C[:, t, None]).sum(-1))
    return torch.stack(ys, 1), h


def mamba(x, dt, A, Bm, C):
    dt = softplus(dt)
    decays = torch.exp(dt.unsqueeze(-1) * -torch.exp(A))
    inputs = (dt * x).unsqueeze(-1) * Bm.unsqueeze(2)
    return scanned(decays, inputs, C, torch.zeros(x.shape[0], *A.shape, dtype=x.dtype))


def one_decay_a_head(x, dt, A, Bm, C):
    dt = softplus(dt[..., :1])
    decays = torch.exp(-dt * A[0, 0].square())[..., None].expand(*x.shape, A.shape[1])
    return scanned(decays, (dt * x)[..., None] * Bm[:, :, None], C, x.new_zeros(x.shape[0], *A.shape))


def constant_decay_a_key(x, dt, A, Bm, C):
    """RWKV-5: only the code before the loop shows that the decay is positive."""
    w, v = torch.exp(-torch.exp(A[0]))[:, None], torch.stack([x.repeat(1, 1, 3), dt.repeat(1, 1, 3)], 2)
    s, ys = v.new_zeros(v.shape[0], 2, N, v.shape[3]), []
    for t in range(v.shape[1]):
        kv = Bm[:, t, None, :, None] * v[:, t, :, None, :]
        ys.append((torch.stack([C, Bm], 2)[:, t, :, :, None] * (s + A[1:3, :, None] * kv)).sum(2))
        s = w * s + kv
    return torch.stack(ys, 1), s


FOUND = [(mamba, "selective_scan"), (one_decay_a_head, "ssd"), (constant_decay_a_key, "delta_rule")]


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # Sums over at most T decayed products, in another order.
        assert (a - b).norm() <= T * torch.finfo(a.dtype).eps * b.norm()


def with_gradients(program, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = flat(program(*leaves))
    loss = sum(y.square().sum() for y in results)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [y.detach() for y in results], gradients


@pytest.mark.parametrize(("fn", "operator"), FOUND, ids=[fn.__name__ for fn, _ in FOUND])
def test_training(fn, operator):
    run = compiled(fn)
    for got, want in zip(with_gradients(run, tensors()), with_gradients(fn, tensors()), strict=True):
        close(got, want)
    assert operators(run) == [operator]


@pytest.mark.parametrize(("fn", "operator"), FOUND, ids=[fn.__name__ for fn, _ in FOUND])
def test_training_in_float64(fn, operator):
    (run, report), inputs = spliced(fn, "training"), tensors(torch.float64)
    for got, want in zip(with_gradients(run, inputs), with_gradients(fn, inputs), strict=True):
        close(got, want)
    assert names(report.rewrites) == [operator]


def changed_afterwards(x, dt, A, Bm, C):
    """What the decays were formed from is another value when the loop runs."""
    dt = softplus(dt)
    decays = torch.exp(dt.unsqueeze(-1) * -torch.exp(A))
    inputs = (dt * x).unsqueeze(-1) * Bm.unsqueeze(2)
    dt.zero_()
    return scanned(decays, inputs, C, x.new_zeros(x.shape[0], *A.shape))


def changed_itself(x, dt, A, Bm, C):
    decays = torch.exp(dt.unsqueeze(-1) * -torch.exp(A))
    inputs = (dt * x).unsqueeze(-1) * Bm.unsqueeze(2)
    inputs[:, 3] = 1.0
    return scanned(decays, inputs, C, x.new_zeros(x.shape[0], *A.shape))


def changed_by_relu(x, dt, A, Bm, C):
    d = dt * 1.0
    decays, inputs = torch.exp(-d.unsqueeze(-1) * torch.exp(A)), (d * x).unsqueeze(-1) * Bm.unsqueeze(2)
    torch.nn.functional.relu(d.sub_(0.5), True)
    return *scanned(decays, inputs, C, x.new_zeros(x.shape[0], *A.shape)), d


def written_by_a_loop(step):
    """Return a model whose second loop reads what the first has written to a tensor of zeros."""

    def fn(x, dt, A, Bm, C):
        written, carry = torch.zeros_like(x), x.new_zeros(x.shape[0], D)
        for t in range(x.shape[1]):
            carry = step(carry, x[:, t])
            written[:, t] = carry
        decays = torch.exp(-dt.unsqueeze(-1) * torch.exp(A))
        inputs = (dt * (2.0 * written)).unsqueeze(-1) * Bm.unsqueeze(2)
        return scanned(decays, inputs, C, x.new_zeros(x.shape[0], *A.shape))

    return fn


CHANGED = {
    "afterwards": changed_afterwards,
    "itself": changed_itself,
    "relu": changed_by_relu,
    "scan": written_by_a_loop(lambda h, x: 0.5 * h + x),
    "no_scan": written_by_a_loop(lambda h, x: torch.tanh(0.5 * h + x)),
}


@pytest.mark.parametrize("fn", CHANGED.values(), ids=CHANGED)
def test_what_changes_is_read_when_it_was(fn):
    inputs = tensors()
    inputs[1] = inputs[1].sigmoid()
    run = compiled(fn)
    with torch.no_grad():
        close(run(*inputs), fn(*inputs))
    assert run.report.graphs[0].applied


def detached(x, dt, A, Bm, C):
    decays = torch.exp(softplus(dt).unsqueeze(-1) * -torch.exp(A)).detach()
    return scanned(decays, x.unsqueeze(-1) * Bm.unsqueeze(2), C, x.new_zeros(x.shape[0], *A.shape))


def without_gradient(x, dt, A, Bm, C):
    with torch.no_grad():
        decays = torch.exp(softplus(dt).unsqueeze(-1) * -torch.exp(A))
    return scanned(decays, x.unsqueeze(-1) * Bm.unsqueeze(2), C, x.new_zeros(x.shape[0], *A.shape))


class Straight(torch.autograd.Function):
    """An exponential with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return 3 * g


def own_gradient(x, dt, A, Bm, C):
    decays = Straight.apply(softplus(dt).unsqueeze(-1) * -torch.exp(A))
    return scanned(decays, x.unsqueeze(-1) * Bm.unsqueeze(2), C, x.new_zeros(x.shape[0], *A.shape))


@pytest.mark.parametrize("fn", [detached, without_gradient, own_gradient])
def test_gradients_that_are_not_the_formulas_own(fn):
    for got, want in zip(with_gradients(compiled(fn), tensors()), with_gradients(fn, tensors()), strict=True):
        close(got, want)


def dropped(x, dt, A, Bm, C):
    decays = torch.exp(softplus(dt).unsqueeze(-1) * -torch.exp(A))
    inputs = torch.nn.functional.dropout(x.unsqueeze(-1) * Bm.unsqueeze(2), 0.5)
    return scanned(decays, inputs, C, x.new_zeros(x.shape[0], *A.shape))


def projected(x, dt, A, Bm, C):
    decays = torch.exp(softplus(dt).unsqueeze(-1) * -torch.exp(A))
    return scanned(decays, ((x @ A) @ A.mT).unsqueeze(-1) * Bm.unsqueeze(2), C, x.new_zeros(x.shape[0], *A.shape))


def test_a_step_size_that_the_inputs_have_once():
    """The decay has it squared."""

    def fn(x, dt, A, Bm, C):
        decays = torch.exp(-(dt * dt).unsqueeze(-1) * torch.exp(A))
        return scanned(decays, (dt * x).unsqueeze(-1) * Bm.unsqueeze(2), C, x.new_zeros(x.shape[0], *A.shape))

    run = compiled(fn)
    with torch.no_grad():
        close(run(*tensors()), fn(*tensors()))
    assert operators(run) == ["linear_scan"]


def reads_of(fn, monkeypatch):
    """Return the nodes before its loop that were taken into the rewrite."""
    found, original = [], to_scan.elementwise_producers

    def recorded(*args):
        found.append({str(getattr(node.target, "__name__", node.target)) for node in original(*args)})
        return original(*args)

    monkeypatch.setattr(to_scan, "elementwise_producers", recorded)
    torch._dynamo.reset()
    refold.explain(fn, *tensors())
    return found[0]


def test_only_what_is_elementwise_is_done_again(monkeypatch):
    assert reads_of(mamba, monkeypatch) == {"softplus", "unsqueeze", "exp", "neg", "mul", "zeros"}
    assert "dropout" not in reads_of(dropped, monkeypatch)
    assert not {"matmul", "transpose"} & reads_of(projected, monkeypatch)
