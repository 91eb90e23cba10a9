"""Loops that return what they read, or what earlier steps made: values, gradients, strides, and shared memory."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import refold
from refold.compiler.dynamo.call_site import CallSite

pytestmark = pytest.mark.rows(16)

STEPS = 33


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def biquad_goes_on(x, states):
    x1, x2, y1, y2 = states
    out = []
    for t in range(x.shape[1]):
        y = 0.3 * x[:, t] + 0.2 * x1 + 0.1 * x2 + 0.5 * y1 - 0.2 * y2
        x2, x1, y2, y1 = x1, x[:, t], y1, y
        out.append(y)
    return torch.stack(out, 1), (x1, x2, y1, y2)


def biquad(x):
    """A filter in its direct form, whose four states go to the next call."""
    return biquad_goes_on(x, [torch.zeros_like(x[:, 0])] * 4)


def views(x, w):
    h = torch.zeros_like(x[:, 0, :, 0])
    seen, out = x[:, 0], []
    for t in range(1, x.shape[1]):
        h = 0.5 * h + x[:, t, :, 0] * w
        before = seen
        seen = x[:, t]
        part = seen[:, 1:].transpose(1, 2)
        row = w[None]
        out.append(h)
    return torch.stack(out, 1), seen, before, part, row


def items(x):
    h, out = torch.zeros_like(x[:, 0]), []
    for v in x.unbind(1):
        h = 0.5 * h + v
        out.append(h)
    return torch.stack(out, 1), v


def pieces(x):
    h, out = torch.zeros_like(x[:, 0]), []
    for v in x.split(3, 1):
        h = 0.5 * h + v.sum(1)
        last = v[:, 1]
        out.append(h)
    return torch.stack(out, 1), last


def backwards(x):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1] - 1, 3, -2):
        h = 0.5 * h + x[:, t]
        last = x[:, t - 1]
        out.append(h)
    return torch.stack(out, 1), last


RETURNED = [
    (biquad, [(2, STEPS, 8)]),
    (biquad_goes_on, [(2, STEPS, 8), (4, 2, 8)]),
    (views, [(2, STEPS, 8, 3), (8,)]),
    (items, [(2, STEPS, 8)]),
    (pieces, [(2, 3 * STEPS, 8)]),
    (backwards, [(2, STEPS, 8)]),
]
each = pytest.mark.parametrize(("fn", "shapes"), RETURNED, ids=[fn.__name__ for fn, _ in RETURNED])


def shared(results, inputs):
    """Return which results lie in which input's memory."""
    places = [x.untyped_storage().data_ptr() for x in inputs]
    return [[y.untyped_storage().data_ptr() == place for place in places] for y in results]


def compare(fn, shapes, training, dynamic=None):
    """Compare one call with eager's; return what was rewritten."""
    torch._dynamo.reset()
    compiled = refold.compile(fn, strict=True, accept="always", verify="off", dynamic=dynamic)
    calls = []
    for run in (compiled, fn):
        inputs = [draw(*shape).requires_grad_(training) for shape in shapes]
        results = tree_leaves(run(*inputs))
        grads = []
        if training:
            total = sum(y.square().sum() for y in results)
            grads = torch.autograd.grad(total, inputs)
        calls.append((results, grads, shared(results, inputs), [y.stride() for y in results]))
    torch.testing.assert_close(*(call[:2] for call in calls), rtol=1e-4, atol=1e-4)
    assert calls[0][2:] == calls[1][2:]
    return [row.detail for row in compiled.report.rewrites if row.status == "applied"]


@each
@pytest.mark.parametrize("training", [False, True])
def test_results_are_the_views_that_eager_returns(fn, shapes, training):
    assert compare(fn, shapes, training)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fn", [biquad, items], ids=lambda fn: fn.__name__)
def test_with_a_length_that_only_a_run_knows(fn):
    assert compare(fn, [(2, STEPS, 8)], training=True, dynamic=True)


def test_the_wrong_step_is_seen(monkeypatch):
    held = CallSite._held
    monkeypatch.setattr(CallSite, "_held", lambda self, x: (held(self, x)[0], held(self, x)[1] + 1))
    with pytest.raises(AssertionError):
        compare(pieces, [(2, 3 * STEPS, 8)], training=False)


def test_a_result_that_is_changed_later_changes_what_it_is_a_view_of():
    def fn(x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t]
            last = x[:, t]
            out.append(h)
        last += 1
        return torch.stack(out, 1), x.sum()

    torch._dynamo.reset()
    mine, theirs = (draw(2, STEPS, 8) for _ in range(2))
    torch.testing.assert_close(refold.compile(fn, strict=True, accept="always")(mine), fn(theirs))
    torch.testing.assert_close(mine, theirs)


def test_what_a_later_line_changes_is_returned_as_it_is_then():
    def fn(x):
        h, out = torch.zeros_like(x[:, 0]), []
        x = x * 1
        for t in range(x.shape[1]):
            h = 0.5 * h + x[:, t]
            last = x[:, t]
            out.append(h)
        x.mul_(2)
        return torch.stack(out, 1), last

    torch._dynamo.reset()
    x = draw(2, STEPS, 8)
    torch.testing.assert_close(refold.compile(fn, strict=True, accept="always")(x), fn(x))


def in_a_tuple(x):
    h = torch.zeros_like(x[:, 0])
    kept = (h, h)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        kept = (h, kept[0])
    return kept


def in_a_list(x):
    h = torch.zeros_like(x[:, 0])
    delays = [h, h, h]
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        delays = [x[:, t], *delays[:-1]]
    return h, delays


def in_a_dictionary(x):
    h = torch.zeros_like(x[:, 0])
    state = {"now": h, "before": [x[:, 0], h]}
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        state = {"now": h, "before": [x[:, t], state["now"]]}
    return state


@pytest.mark.exhaustive
@pytest.mark.parametrize("fn", [in_a_tuple, in_a_list, in_a_dictionary], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_a_state_that_moves_within_what_keeps_it(fn, training):
    """No step computes with these tensors, and each takes another place at the next step."""
    assert compare(fn, [(2, STEPS, 8)], training)


@pytest.mark.exhaustive
def test_one_tensor_at_the_first_step_and_several_at_the_last():
    """Two carries that start as one tensor are told apart by the step that made what they hold."""

    def fn(x):
        now = before = long_before = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            now, before, long_before = 0.5 * now - 0.2 * long_before + x[:, t], now, before
        return now, before, long_before

    for training in (False, True):
        assert compare(fn, [(2, STEPS, 8)], training)
