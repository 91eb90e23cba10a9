"""Loops that move a few elements, read what they wrote, or compute what grows: random ones, and planted bugs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import refold
from refold.compiler.dynamo import growing, read_back, split_carries
from refold.compiler.dynamo.read_back import Origin
from refold.compiler.ir.moves import Cat
from refold.compiler.recurrence import systems
from support.programs import Program, judge_captured

pytestmark = pytest.mark.rows(16)

STEPS = 17
few = settings(max_examples=4, deadline=None, derandomize=True, database=None)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outcome(fn, *inputs, gradient=True):
    return judge_captured(Program(fn, list(inputs), "", "autograd" if gradient else ""))


def right(fn, *inputs, found="", gradient=True):
    got = outcome(fn, *inputs, gradient=gradient)
    assert got.failure == "", got.failure
    assert any(found in name for name in got.rewrites), got.rewrites


# Elements ----------------------------------------------------------------------------------------


def moved(h, x, m, kind):
    """One step on a state of some elements at the end."""
    if kind == "cat":
        return torch.cat([h[..., 1:], x[..., None]], -1)
    if kind == "cat in front":
        return torch.cat((x.unsqueeze(-1), h[..., :-1]), h.dim() - 1)
    if kind == "roll":
        h = torch.roll(h, shifts=1, dims=-1)
        h[..., 0] = x
        return h
    if kind == "flip":
        return 0.5 * h.flip(-1) + x[..., None]
    if kind == "product":
        return h @ m + x[..., None]
    if kind == "matrix first":
        return (m @ h.unsqueeze(-1)).squeeze(-1) - x[..., None]
    if kind == "einsum":
        return torch.einsum("...k,jk->...j", h, m) + x[..., None]
    first, *_, last = h.unbind(-1)
    return torch.stack([m[0, 0] * first - m[0, 1] * last, *[x] * (h.shape[-1] - 2), m[1, 0] * first + x], -1)


KINDS = ("cat", "cat in front", "roll", "flip", "product", "matrix first", "einsum", "stack")


def loop_over(kind, size, last=False, reverse=False):
    def fn(x, m, w):
        m = 0.4 * m.tanh()
        h, out = x.new_zeros(x.shape[0], x.shape[2], size), []
        for t in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
            h = moved(h, x[:, t], m, kind)
            out.append((h * w).sum(-1) + h[..., 0])
        return (torch.stack(out, 1), h) if last else (torch.stack(out, 1),)

    return fn


def elements(size):
    return draw(2, STEPS, 3), draw(size, size, seed=1), draw(size, seed=2)


@pytest.mark.exhaustive
@pytest.mark.slow
@few
@given(st.sampled_from(KINDS), st.integers(2, 4), st.booleans(), st.booleans())
def test_elements_are_carries(kind, size, last, reverse):
    right(loop_over(kind, size, last, reverse), *elements(size), found="roll up loop")


def test_windows_need_no_scan():
    right(loop_over("cat", 4), *elements(4), found="steps that carry nothing, all at once")


def test_a_step_in_other_coordinates():
    """A state that is permuted and merged for a product, and put back."""

    def fn(x, m):
        h, out = x.new_zeros(3, 2, 2), []
        for t in range(x.shape[1]):
            y = h.transpose(0, 1).reshape(6, 2) @ (0.4 * m.tanh())
            h = y.view(2, 3, 2).permute(1, 0, 2) + x[:, t]
            out.append(h)
        return (torch.stack(out, 1),)

    right(fn, draw(3, STEPS, 2, 2), draw(2, 2, seed=1), found="linear_system of 2")


def test_a_carry_that_begins_with_another_shape_is_not_split():
    def fn(x, w):
        h = before = torch.zeros_like(x[:, 0])
        ys = []
        for t in range(x.shape[1]):
            h, before = 0.5 * h + 0.5 * before + x[:, t], w * 2
            ys.append(h)
        return torch.stack(ys, 1), before

    assert outcome(fn, draw(2, STEPS, 3), draw(3)).failure == ""


@pytest.mark.exhaustive
def test_convolved_windows():
    def fn(x, w, dense):
        h, out = x.new_zeros(x.shape[0], x.shape[2], 2), []
        for t in range(x.shape[1]):
            h = torch.cat([h, x[:, t].unsqueeze(2)], 2)
            own = torch.nn.functional.conv1d(h, w, groups=3, padding=2)[:, :, 2]
            out.append(own + torch.nn.functional.conv1d(h, dense)[:, :, 0])
            h = h[:, :, 1:]
        return (torch.stack(out, 1),)

    right(fn, draw(2, STEPS, 3), draw(3, 1, 3, seed=1), draw(3, 3, 3, seed=2), found="all at once")


@pytest.mark.parametrize("rule", ["roll", "product"])
def test_a_wrong_rule_is_caught(rule, monkeypatch):
    rules, key = {
        "roll": (split_carries.ELEMENTS.by_move, Cat),
        "product": (split_carries._RULES, torch.ops.aten.mm.default),
    }[rule]
    own = rules[key]

    def wrong(*given):
        made = own(*given)
        found, *mixes = made if isinstance(made, tuple) else (made,)
        turned = split_carries.Elements(found.axis, found.parts[1:] + found.parts[:1])
        return (turned, *mixes) if mixes else turned

    monkeypatch.setitem(rules, key, wrong)
    assert outcome(loop_over(rule, 3), *elements(3)).failure


# What steps wrote --------------------------------------------------------------------------------


def recursion(lags, ahead, reverse, window, twice):
    def fn(x, a):
        steps, y = x.shape[1] - 8, torch.sin(x)  # what is not yet written counts, too
        far = max(lags)
        for k in range(steps):
            t = x.shape[1] - 1 - far - k - ahead if reverse else far + k
            side = -1 if reverse else 1
            if window:
                low = t + 1 if reverse else t - far
                past = (y[:, low : low + far] * a[:far]).sum(1)
            else:
                past = sum(a[i] * y[:, t - side * lag] for i, lag in enumerate(lags))
            y[:, t] = x[:, t] + past + y[:, t + side * ahead]
            if twice:
                y[:, t] -= 0.5 * y[:, t] * a[0]
        return (y,)

    return fn


@few
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True), st.integers(0, 2),
    st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_was_written_is_a_carry(lags, ahead, reverse, window, twice):
    a = 0.2 * draw(4, seed=1)
    right(recursion(lags, ahead, reverse, window, twice), draw(2, STEPS + 8), a, found="roll up loop", gradient=False)


def test_a_wrong_beginning_is_caught(monkeypatch):
    own = read_back._promote

    def wrong(graph, written, number, promoted):
        own(graph, written, number, promoted)
        for i, (node, new, origin) in enumerate(promoted.carries):
            promoted.carries[i] = node, new, Origin(origin.operand, origin.dim, origin.at + 1)

    monkeypatch.setattr(read_back, "_promote", wrong)
    fn = recursion([1, 2], 0, False, False, False)
    assert outcome(fn, draw(2, STEPS + 8), 0.2 * draw(4, seed=1), gradient=False).failure


# States in place ---------------------------------------------------------------------------------


def in_place(kind):
    def fn(x, a):
        h = start = torch.sin(x[:, 0])
        window, out = x.new_zeros(*h.shape, 3), []
        for t in range(x.shape[1]):
            if kind == "operators":
                h *= a
                h += x[:, t]
            else:
                h.mul_(a).add_(x[:, t])
            window.copy_(window.roll(-1, -1))
            window[..., -1] = x[:, t]
            out.append(window.sum(-1) + h if kind != "collected" else h)
        return torch.stack(out, 1), h.clone(), 2 * start, window * 1

    return fn


@pytest.mark.parametrize("kind", ["operators", "methods"])
def test_states_in_place_are_carries(kind):
    right(in_place(kind), draw(2, STEPS, 3), 0.5 * draw(3, seed=1), found="linear_scan", gradient=False)


def test_a_tensor_that_is_collected_and_changed_is_its_last_content():
    assert outcome(in_place("collected"), draw(2, STEPS, 3), 0.5 * draw(3, seed=1), gradient=False).failure == ""


def reset_before(kind):
    """A step changes the state in place, and then puts another tensor in its place."""

    def fn(x, a):
        done = x[..., 0] > 0.5
        h = begin = torch.zeros_like(x[:, 0])
        other, out = h if kind == "two names" else torch.zeros_like(h), torch.zeros_like(x)
        listed = []
        for t in range(x.shape[1]):
            if kind == "kept":
                other = h
            h[done[:, t]] = 0
            h += 0.1
            h = a * h + x[:, t]
            out[:, t] = h + other
            listed.append(h if kind == "collected" else h * 2)
        if kind == "changed later":
            h += 1
        return out, h * 3, torch.stack(listed, 1), (begin if kind == "read later" else x.new_ones(3)) * a

    return fn


@pytest.mark.exhaustive
def test_a_state_that_is_changed_in_place_and_then_replaced_is_a_carry():
    right(reset_before(""), draw(2, STEPS, 3), 0.5 * draw(3, seed=1), found="linear_scan")
    right(reset_before(""), draw(2, STEPS, 3), 0.5 * draw(3, seed=1), found="linear_scan", gradient=False)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", ["two names", "kept", "collected", "changed later", "read later"])
def test_a_state_that_is_changed_in_place_and_read_elsewhere_stays(kind, gradient):
    got = outcome(reset_before(kind), draw(2, STEPS, 3), 0.5 * draw(3, seed=1), gradient=gradient)
    assert got.failure == "", got.failure


def test_a_hook_on_a_result_sees_all_of_its_gradient():
    def fn(x):
        h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out[:, t] = h
        h.register_hook(lambda grad: 2 * grad)
        return h * 1, out

    assert outcome(fn, draw(2, STEPS, 3)).failure == ""


# What grows --------------------------------------------------------------------------------------


def positions(kind, offset):
    def fn(x):
        h, out = torch.zeros_like(x[:, 0]), []
        freq = torch.arange(x.shape[2], dtype=x.dtype) / 3
        for t in range(x.shape[1]):
            if kind == "outer":
                p = torch.outer(torch.arange(t + offset + 1).to(x), freq).cos()[-1]
            elif kind == "power":
                p = (0.9 ** torch.arange(offset, t + offset + 1, dtype=x.dtype)[:, None] * freq)[-1:].sum(0)
            else:
                p = (torch.arange(0, 2 * (t + 3), 2)[t + 1 : t + 2, None].to(x) * 0.01 * freq).sin()[0]
            h = 0.9 * h + x[:, t] * p
            out.append(h)
        return (torch.stack(out, 1),)

    return fn


@pytest.mark.exhaustive
@few
@given(st.sampled_from(["outer", "power", "middle"]), st.integers(0, 3))
def test_growing_tensors(kind, offset):
    right(positions(kind, offset), draw(2, STEPS, 3), found="linear_scan")


def test_wrong_numbers_are_caught(monkeypatch):
    own = growing._numbers
    monkeypatch.setattr(growing, "_numbers", lambda build, x, start, length: own(build, x, start + 1, length))
    assert outcome(positions("outer", 1), draw(2, STEPS, 3)).failure


@pytest.mark.exhaustive
def test_overlapping_windows_and_parts_of_a_split():
    def fn(x, w):
        h, out = torch.zeros_like(x[:, 0]), []
        for t, part in enumerate(x.split(1, 1)):
            past = x[:, max(t - 2, 0) : t + 1] if t < 2 else x[:, t - 2 : t + 1]
            h = 0.9 * h + part[:, 0] + ((past * w[:, None]).sum(1) if t >= 2 else 0)
            out.append(h)
        return (torch.stack(out, 1),)

    right(fn, draw(2, STEPS + 2, 3), draw(3, seed=1), found="linear_scan")


# What stays --------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_window_that_nothing_reads_stays():
    def fn(x):
        window = x.new_zeros(2, 3)
        for t in range(STEPS):
            window = torch.cat([window[:, 1:], x[:, t, None]], 1)
        return 2 * x

    x = draw(2, STEPS)
    report = refold.explain(fn, x)
    assert "nothing that it computes is used [no-scan]" in str(report)
    assert torch.equal(refold.compile(fn, strict=True, cache=False)(x), fn(x))


def test_a_long_loop_that_reads_no_tensor_stays():
    def fn(x):
        powers = torch.stack([torch.full((1,), 0.9 ** (i + 1)) for i in range(16)])
        return (x * powers[:, 0],)

    x = draw(2, 16)
    torch.testing.assert_close(refold.compile(fn, strict=True, verify="off", accept="always")(x)[0], fn(x)[0])


def kept_and_reset(x, a):
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h[x[:, t, 0] > 0] = 0
        h = a * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def test_a_reset_in_place_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(systems, "_sweeps", lambda x: None)  # as without Numba, and on a GPU
    with torch.no_grad():
        (note,) = [note for note in refold.explain(kept_and_reset, draw(2, 20, 4), 0.1).graphs[0].notes if "[" in note]
    assert "`h = torch.where(mask, y, h)`" in note
    assert "[in-place]" in note
    assert "test_elements.py:" in note
