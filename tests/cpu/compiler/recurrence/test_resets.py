"""Loops that replace their state by a mask forget it, even a state that is NaN or infinite."""

import math

import pytest
import torch

import refold
from support.scans import operators

pytestmark = pytest.mark.rows(16)

STEPS = 24


def over_time(step, reverse=False):
    """Return a loop that collects its states; ``step`` is called with the state, input, decay and mask of a step."""

    def fn(x, decay, mask):
        state, out = torch.zeros_like(x[:, 0]), []
        for t in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
            state = step(state, x[:, t], decay[:, t], mask[:, t, None])
            out.append(state)
        return torch.stack(out[::-1] if reverse else out, 1)

    return fn


def hidden(x, decay, mask):
    """What a step shows is chosen, too."""
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * torch.where(mask[:, t, None], 1.0, state) + x[:, t]
        out.append(torch.where(mask[:, t, None], 0.5, state * 2))
    return torch.stack(out, 1)


LOOPS = {
    "replaced": over_time(lambda state, x, decay, mask: torch.where(mask, x, decay * state + x)),
    "filled": over_time(lambda state, x, decay, mask: state.masked_fill(mask, 0.0) * decay + x),
    "hidden": hidden,
    # No reset: both sides read the state.
    "kept": over_time(lambda state, x, decay, mask: torch.where(mask, state, decay * state + x)),
    # Zero times NaN is NaN.
    "multiplied": over_time(lambda state, x, decay, mask: state * (~mask) * decay + x),
    "against time": over_time(lambda state, x, decay, mask: torch.where(mask, 0.0, state) * decay + x, reverse=True),
}


def inputs(bad=None):
    generator = torch.Generator().manual_seed(0)
    x, decay = (torch.rand(2, STEPS, 3, generator=generator) for _ in range(2))
    mask = torch.rand(2, STEPS, generator=generator) < 0.2
    mask[0, 12] = True
    if bad is not None:
        x[0, 7, 1] = bad
        x[1, 9, 2] = bad
    return x, decay, mask


def gradients(fn, x, decay, mask):
    leaves = [x.clone().requires_grad_(), decay.clone().requires_grad_()]
    y = fn(*leaves, mask)
    weight = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return y.detach(), *torch.autograd.grad(y, leaves, weight)


CASES = [(name, "capture") for name in LOOPS] + [(name, "unroll") for name in ("replaced", "hidden", "against time")]


@pytest.mark.parametrize(("name", "loops"), CASES)
def test_values(name, loops):
    torch._dynamo.reset()
    loop = LOOPS[name]
    run = refold.compile(loop, accept="always", verify="off", loops=loops)
    with torch.no_grad():
        for bad in (None, math.nan, math.inf):
            given = inputs(bad)
            expected, found = loop(*given), run(*given)
            assert bad is None or bool((~expected.isfinite()).any())
            torch.testing.assert_close(found.isfinite(), expected.isfinite(), msg=f"{bad}")
            torch.testing.assert_close(found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0))
    assert [name.removesuffix(", against time") for name in operators(run)] == ["linear_scan"]


@pytest.mark.parametrize("loops", ["capture", "unroll"])
@pytest.mark.parametrize("name", ["replaced", "against time"])
def test_gradients(name, loops):
    torch._dynamo.reset()
    loop = LOOPS[name]
    run = refold.compile(loop, accept="always", verify="off", loops=loops)
    for bad in (None, math.nan):
        given = inputs(bad)
        expected, found = gradients(loop, *given), gradients(run, *given)
        for one, other in zip(found, expected, strict=True):
            finite = other.isfinite()
            assert bool(one[finite].isfinite().all())
            torch.testing.assert_close(one[finite], other[finite])


def test_a_loop_that_is_reset_keeps_its_states():
    """Operators that never write the states have no resets."""

    def attention(q, k, v, mask):
        state, out = torch.zeros(q.shape[0], q.shape[2], v.shape[2]), []
        for t in range(q.shape[1]):
            state = torch.where(mask[:, t, None, None], 0.0, state) + k[:, t, :, None] * v[:, t, None, :]
            out.append((q[:, t, :, None] * state).sum(1))
        return torch.stack(out, 1)

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, STEPS, 4, generator=generator) for _ in range(3))
    mask = torch.zeros(2, STEPS, dtype=torch.bool)
    mask[:, 12] = True
    v[:, 5] = math.nan
    torch._dynamo.reset()
    run = refold.compile(attention, accept="always", verify="off")
    with torch.no_grad():
        found, expected = run(q, k, v, mask), attention(q, k, v, mask)
    assert operators(run) == ["linear_scan"]
    assert bool(expected[:, 12:].isfinite().all())
    torch.testing.assert_close(found[:, 12:], expected[:, 12:])
