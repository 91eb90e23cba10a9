"""A loop over time is captured in every spelling, with all of its steps, and its gradients are right."""

import functools

import pytest
import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

import refold

pytestmark = pytest.mark.rows(16)

B, T, D = 2, 40, 5


def xs(steps=T):
    return torch.randn(B, steps, D, generator=torch.Generator().manual_seed(0))


def zero(x):
    return torch.zeros_like(x[:, 0])


def walrus_zip(x):
    h = zero(x)
    return torch.stack([h := d * h + xt for d, xt in zip(x.sigmoid().unbind(1), x.unbind(1))], 1)  # noqa: B905


def enumerated_tensor(x):
    h, ys = zero(x), []
    for t, xt in enumerate(x.transpose(0, 1), 1):
        h = 0.5 * h + xt * t
        ys.append(h)
    return torch.stack(ys, 1)


def zipped_enumeration(x):
    h, ys = zero(x), []
    for (t, a), b, n in zip(enumerate(x.unbind(1)), x.sigmoid().unbind(1), range(7, 200)):  # noqa: B905
        h = b * h + a
        ys.append(h * x[:, t] * n)
    return torch.stack(ys, 1), n


def reversed_tuple(x):
    h, ys = zero(x), []
    for xt in reversed(x.unbind(1)):
        h = 0.5 * h + xt
        ys.append(h)
    ys.reverse()
    return torch.stack(ys, 1)


def sliced(x):
    h, ys = zero(x), []
    for xt in x.unbind(1)[::-1]:
        h = 0.5 * h + xt
        ys.append(h)
    return torch.stack(list(reversed(ys)), 1)


def left_over(x):
    h, g, ys, zs = zero(x), zero(x), [], []
    for xt in x.unbind(1):
        h = 0.5 * h + xt
        ys.append(h)
    for xt in torch.stack(ys, 1).unbind(1):
        g = 0.5 * g + xt
        zs.append(g)
    return torch.stack(zs, 1)


def used_behind(x):
    h = zero(x)
    for xt in x.unbind(1):
        h = 0.5 * h + xt
    return h, xt


def while_down(x):
    h, t, ys = zero(x), x.shape[1] - 1, []
    while t >= 0:
        h = 0.5 * h + x[:, t]
        ys.append(h)
        t -= 1
    return torch.stack(ys, 1), t


def while_break(x):
    h, t = zero(x), 0
    while True:
        h = 0.5 * h + x[:, t]
        t += 1
        if t == x.shape[1]:
            break
    return h


def while_in_a_function(x):
    def run(h, t):
        while t + 1 < x.shape[1] and t >= 0:
            t = t + 1
            h = 0.5 * h + x[:, t]
        return h

    return run(run(zero(x), -1 + 1), 0)


def while_else(x):
    h, t = zero(x), 0
    while t < x.shape[1]:
        h = 0.5 * h + x[:, t]
        t += 2
    else:
        h = h + 1
    return h


def by_position(x):
    hs = [zero(x)]
    for t in range(x.shape[1]):
        hs.append(0.5 * hs[t] + x[:, t])
    return torch.stack(hs, 1)


def two_back(x):
    hs = [x[:, 0], x[:, 1]]
    for t in range(2, x.shape[1]):
        hs.append(0.5 * hs[-1] + 0.25 * hs[-2] + x[:, t])
    return torch.stack(hs, 1)


def first_inserted(x):
    hs = [zero(x)]
    for t in range(x.shape[1] - 1, -1, -1):
        hs.insert(0, 0.5 * hs[0] + x[:, t])
    return torch.stack(hs[:-1], 1)


def extended(x):
    h, ys = zero(x), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys += [h, h * 2]
        ys.append(-h)
    return torch.stack(ys, 1), len(ys)


def plain_list(x):
    ws, h = [x[:, 0], x[:, 1]], zero(x)
    for t in range(x.shape[1]):
        h = ws[0] * h + x[:, t] * ws[-1]
    return h


def indexed_reversed(x):
    h, xs = zero(x), list(x.unbind(1))
    for t in range(len(xs)):
        h = 0.5 * h + xs[-1 - t] + xs[len(xs) - 1 - t]
    return h


def closure_counter(x):
    h, k = zero(x), 0

    def step(xt):
        nonlocal h, k
        h = 0.5 * h + xt * k
        k += 1

    for t in range(x.shape[1]):
        step(x[:, t])
    return h, k


def number_first(x):
    h, ys = 0.0, []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


def time_layers(x):
    hs = [zero(x) for _ in range(3)]
    ys = []
    for t in range(x.shape[1]):
        y = x[:, t]
        for l in range(3):
            hs[l] = 0.5 * hs[l] + y
            y = hs[l].tanh()
        ys.append(y)
    return torch.stack(ys, 1)


def reduced(x):
    return functools.reduce(lambda h, xt: 0.5 * h + xt, x.unbind(1))


def mapped_with_numbers(x):
    h, ys, seen = zero(x), [], []

    def gated(xt, t):
        seen.append(xt)
        return xt * t, xt.sigmoid()

    for t, (xt, gate) in enumerate(map(gated, x.unbind(1), range(100))):
        h = gate * h + xt + t
        ys.append(h)
    return torch.stack(ys, 1), torch.stack(seen, 1)


def pairs(x):
    h, ys = zero(x), []
    for xt in x.unbind(1):
        h = 0.5 * h + xt
        ys.append((h, xt))
    hs, gs = zip(*ys)  # noqa: B905
    return torch.stack(hs, 1) * torch.stack(gs, 1)


def single_items(x):
    h, ys = zero(x), []
    for xt in x.unbind(1):
        h = 0.5 * h + xt
        ys.append(h)
    return ys[-1], ys[5] + ys[-3], torch.stack(ys[::-1], 1), torch.stack(ys[3:9], 1), torch.cat([x[:, 0], *ys], 1)


ALL = (
    single_items, walrus_zip, enumerated_tensor, zipped_enumeration, reversed_tuple, sliced, used_behind, by_position,
    first_inserted, extended, plain_list, indexed_reversed, closure_counter, time_layers, mapped_with_numbers, pairs,
)  # fmt: skip
CAPTURED = [
    *((fn, [T]) for fn in ALL),
    (left_over, [T, T]), (two_back, [T - 2]), (number_first, [T - 1]), (reduced, [T - 1]),
    # The first and the last step of a `while` are traced by themselves.
    (while_down, [T - 2]), (while_break, [T - 2]), (while_else, [T // 2 - 2]),
    (while_in_a_function, [T - 3, T - 3]),
]  # fmt: skip


def differentiable(out):
    return sum(y.square().sum() for y in torch.utils._pytree.tree_leaves(out) if isinstance(y, torch.Tensor))


@pytest.mark.parametrize(("fn", "steps"), CAPTURED, ids=[case[0].__name__ for case in CAPTURED])
def test_values_and_gradients(captured, fn, steps):
    x = xs().requires_grad_()
    got, found = captured(fn, x)
    expected = fn(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*[torch.autograd.grad(differentiable(out), x) for out in (got, expected)])
    assert found == steps
    assert captured.notes == []


@pytest.mark.parametrize("fn", [case[0] for case in CAPTURED])
def test_dynamo_executes_as_much_whatever_the_length(captured, fn, monkeypatch):
    executed = []
    original = InstructionTranslatorBase.step

    def counted(tx):
        executed[-1] += 1
        return original(tx)

    monkeypatch.setattr(InstructionTranslatorBase, "step", counted)
    for steps in (T, 3 * T):
        executed.append(0)
        captured(fn, xs(steps))
    assert executed[0] == executed[1]


SCANS = [walrus_zip, zipped_enumeration, reversed_tuple, left_over, two_back, first_inserted, closure_counter]


@pytest.mark.parametrize("fn", SCANS)
@pytest.mark.parametrize("train", [False, True])
def test_they_become_scans(fn, train):
    torch._dynamo.reset()
    x = xs().requires_grad_(train)
    compiled = refold.compile(fn, accept="always", strict=True)
    got, expected = compiled(x), fn(x)
    # A factor of a half at most carries an error on: two of them, for values of a few units.
    tolerance = 2 * T * torch.finfo(x.dtype).eps
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    rows = [row for row in compiled.report.rewrites if "loop_over_time" in row.site]
    assert [row.status for row in rows] == ["applied"] * (2 if fn is left_over else 1)
    if train:
        grads = [torch.autograd.grad(differentiable(out), x) for out in (got, expected)]
        torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance * float(grads[1][0].abs().max()))


# Loops that are captured for the steps that are alike ------------------------------------------------


def exception_at_a_step(x):
    h = zero(x)
    for t in range(x.shape[1]):
        try:
            if t == 30:
                raise ValueError
            h = 0.5 * h + x[:, t]
        except ValueError:
            h = h - 1
    return h


def dtype_changes(x):
    h = zero(x)
    for t in range(x.shape[1]):
        h = (0.5 * h + x[:, t]).to(torch.float64 if t > 20 else torch.float32)
    return h


def begins_otherwise(x):
    h, ys = zero(x), []
    for t in range(x.shape[1]):
        h = h + x[:, t] / (t + 1) if t < 7 else 0.5 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


def windows_of_the_past(x):
    h, ys = zero(x), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, max(0, t - 3) : t + 1].mean(1)
        ys.append(h)
    return torch.stack(ys, 1)


def left_early(x):
    h = zero(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        if t == 30:
            break
    return h


PARTLY = [
    (left_early, [30]),
    (begins_otherwise, [T - 7]),
    (windows_of_the_past, [T - 3]),
    (exception_at_a_step, [30]),
    (dtype_changes, [21, 18]),
]


@pytest.mark.parametrize(("fn", "steps"), PARTLY, ids=[case[0].__name__ for case in PARTLY])
def test_steps_that_differ_are_traced_by_themselves(captured, fn, steps):
    x = xs().requires_grad_()
    got, found = captured(fn, x)
    expected = fn(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*[torch.autograd.grad(differentiable(out), x) for out in (got, expected)])
    assert found == steps


# Loops that are not captured --------------------------------------------------------------------------


def wrong_position(x):
    hs = [zero(x), zero(x)]
    for t in range(x.shape[1]):
        hs.append(0.5 * hs[t // 2] + x[:, t])
    return torch.stack(hs, 1)


def appends_to_what_it_goes_through(x):
    xs, h = list(x.unbind(1)), zero(x)
    for xt in xs:
        h = 0.5 * h + xt
        if len(xs) < 60:
            xs.append(h)
    return h


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + v.abs()) ** 2


def autograd_function_in_a_step(x):
    x, v, spikes = x.clone().requires_grad_(), zero(x), []
    for t in range(x.shape[1]):
        v = 0.9 * v + x[:, t]
        spikes.append(Spike.apply(v - 1))
    return torch.stack(spikes, 1)


def two_names_for_a_list(x):
    ys = []
    zs = ys
    h = zero(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
        if len(zs) > 20:
            h = -h
    return torch.stack(ys, 1)


def grad_modes(x):
    h = zero(x)
    for t in range(x.shape[1]):
        with torch.no_grad():
            g = h * 0.5
        h = g + x[:, t]
    return h


NEVER = [
    (two_names_for_a_list, ""),
    (grad_modes, ""),
    *([(autograd_function_in_a_step, "`Spike.apply(v - 1)` takes a function")] if torch.__version__ >= (2, 12) else []),
    (wrong_position, "`hs`"),
    (appends_to_what_it_goes_through, "evenly spaced"),
]


@pytest.mark.parametrize(("fn", "why"), NEVER, ids=[case[0].__name__ for case in NEVER])
def test_others_run_as_they_are_and_the_notes_say_why(captured, fn, why):
    got, found = captured(fn, xs())
    torch.testing.assert_close(got, fn(xs()))
    assert found == []
    assert any(why in note and "traced step by step" in note for note in captured.notes)
