"""Recurrences in further spellings of public code are found, and agree with eager in float64."""

import collections
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import refold
from refold.compiler.recurrence.affine import clamp_shares
from refold.compiler.recurrence.states import LoopVectorizer
from refold.compiler.recurrence.vectorize import Value
from support.agreement import check, outputs, rewritten

pytestmark = pytest.mark.rows(16)

BATCH, STEPS, CHANNELS, HEADS, HEAD = 2, 24, 6, 2, 4


def rwkv6_of_one_sequence(r, k, v, w, u):
    """Heads are matrices, and their outer products products of matrices."""
    r, k, v, w = r.view(-1, HEADS, 1, HEAD), k.view(-1, HEADS, HEAD, 1), v.view(-1, HEADS, 1, HEAD), torch.exp(w)
    w, u, state = torch.exp(-w).view(-1, HEADS, HEAD, 1), u.view(HEADS, HEAD, 1), k.new_zeros(HEADS, HEAD, HEAD)
    out = k.new_empty(r.shape[0], HEADS, HEAD)
    for t in range(r.shape[0]):
        a = k[t] @ v[t]
        out[t] = (r[t] @ (u * a + state)).squeeze(1)
        state = a + w[t] * state
    return out.view(-1, HEADS * HEAD)


def mlstm_by_chunks(k, v, i, f):
    """The states of xLSTM's matrix memory at the ends of chunks, with their stabiliser (arXiv:2503.13427)."""
    k, v = (x.unflatten(1, (-1, 4)) for x in (k, v))
    i, f = (x[..., 0].unflatten(1, (-1, 4)) for x in (i, F.logsigmoid(f)))
    b = f.cumsum(-1)
    a, g = b[..., -1:] - b + i, b[..., -1]
    top, c, states = torch.zeros_like(g[:, 0]), k.new_zeros(k.shape[0], k.shape[-1], k.shape[-1]), []
    for n in range(k.shape[1]):
        new = torch.max(g[:, n] + top, a[:, n].max(-1).values)
        inputs = k[:, n] * torch.exp(a[:, n] - new[:, None])[..., None]
        c = torch.exp(g[:, n] + top - new)[:, None, None] * c + inputs.mT @ v[:, n]
        top = new
        states.append(c)
    return torch.stack(states, 1)


def kalman_of_columns(z, gain):
    """Positions and velocities in a plane, as columns that matrices multiply from the left."""
    moves = torch.eye(4).to(z) + 0.1 * torch.eye(4).roll(2, 1).triu(1).to(z)
    sees = torch.eye(4)[:2].to(z)
    x, out = z.new_zeros(z.shape[0], 4, 1), []
    for t in range(z.shape[1]):
        x = 0.9 * (moves @ x)
        x = x + 0.3 * gain.sigmoid() @ (z[:, t, :2].unsqueeze(-1) - sees @ x)
        out.append(x.squeeze(-1))
    return torch.stack(out, 1)


def linear_prediction(x, coefficients):
    """An all-pole filter whose coefficients change at every step."""
    x, past, out = x[..., 0], torch.zeros_like(x[:, 0, :3]), []
    for t in range(x.shape[1]):
        y = x[:, t] - torch.linalg.vecdot(0.2 * coefficients[:, t, :3], past)
        past = torch.cat([y.unsqueeze(1), past[:, :-1]], dim=1)
        out.append(y)
    return torch.stack(out, 1)


def s4d_by_steps(u, re, im, c):
    """Complex states, a step in a function of its own, time last."""
    rate, c = torch.complex(-re.exp(), im), torch.complex(c, im)
    decay = torch.exp(0.1 * rate)
    inputs, state, out = (decay - 1) / rate, torch.zeros(u.shape[0], *rate.shape, dtype=rate.dtype), []

    def step(x, state):
        state = torch.einsum("bhn,hn->bhn", state, decay) + torch.einsum("hn,bh->bhn", inputs, x.to(inputs.dtype))
        return 2 * torch.einsum("hn,bhn->bh", c, state).real, state

    for x in u.mT.unbind(-1):
        y, state = step(x, state)
        out.append(y)
    return F.gelu(torch.stack(out, -1))


def sums_of_chunks(g, x):
    """A cumulative sum within chunks, and a state that goes from chunk to chunk."""
    h, out = torch.zeros_like(x[:, 0]), []
    for logs, part in zip(F.logsigmoid(g).split(2, dim=1), x.split(2, dim=1), strict=True):
        sums = logs.cumsum(1)
        states = sums.exp() * (h.unsqueeze(1) + (part * torch.exp(-sums)).cumsum(1))
        h = states[:, -1]
        out.append(states)
    return torch.cat(out, 1)


def halved(combine, elements):
    """Scan along axis 1 as JAX does it: of pairs first, then of what is between them."""
    count = elements[0].shape[1]
    if count < 2:
        return elements
    pairs = combine([x[:, : count - 1 : 2] for x in elements], [x[:, 1::2] for x in elements])
    odd = halved(combine, pairs)
    even = combine([x[:, : (count - 1) // 2] for x in odd], [x[:, 2::2] for x in elements])
    even = [torch.cat([x[:, :1], later], 1) for x, later in zip(elements, even, strict=True)]
    both = [torch.stack([e[:, : o.shape[1]], o], 2).flatten(1, 2) for e, o in zip(even, odd, strict=True)]
    return both if count % 2 == 0 else [torch.cat([x, e[:, -1:]], 1) for x, e in zip(both, even, strict=True)]


def gate_loop(q, k, v, size, angle):
    """Complex gates on outer products, scanned by halves (Katsch 2023, arXiv:2311.01927)."""
    gates = torch.polar(size.sigmoid(), angle)[..., :1, None]
    states = (k.unsqueeze(-1) * v.unsqueeze(-2)).to(gates.dtype)
    states = halved(lambda x, y: [x[0] * y[0], y[0] * x[1] + y[1]], [gates, states])[1]
    return torch.einsum("btn,btnd->btd", q.to(states.dtype), states).real


def operation(a, x):
    """PyTorch's own ``scan``, of which the last state is read, too."""
    from torch._higher_order_ops.scan import scan

    def step(h, now):
        h = now[0] * h + now[1]
        return h, 2 * h

    last, states = scan(step, torch.zeros_like(x[:, 0]), (a.sigmoid(), x), dim=1)
    return states + last.unsqueeze(1)


def operation_against_time(a, x):
    """The same backwards, with two states, and with what all steps read."""
    from torch._higher_order_ops.scan import scan

    decay = a.mean((0, 1)).sigmoid()

    def step(state, now):
        h = decay * state[0] + now
        return (h, 0.5 * state[1] + h), state[1].sin()

    zero = torch.zeros_like(x[:, 0])
    return scan(step, (zero, zero), x, dim=1, reverse=True)[1]


def fast_weights_of_one_sequence(q, k, v, g):
    """Matrices without a batch, and vectors that multiply them from the left (Schmidhuber 1992; GLA with one head)."""
    state, out = q.new_zeros(q.shape[1], v.shape[1]), []
    for qt, kt, vt, gt in zip(q, k, v, g, strict=True):
        state = torch.sigmoid(gt[0]) * state + torch.outer(kt, vt)
        out.append(qt @ state)
    return torch.stack(out)


def fast_weights_from_the_right(q, k, v, g):
    """The same with the state transposed, which is read before its step."""
    state, out = q.new_ones(v.shape[1], q.shape[1]), []
    for t in range(len(q)):
        out.append(torch.mv(state, q[t]))
        state = torch.addr(state * g[t].sigmoid(), v[t], k[t])
    return torch.stack(out)


def reset_by_a_mask(x, ends):
    """Actors of reinforcement learning forget at the end of an episode."""
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t]
        out.append(h)
        h = h.clone()
        h[ends[:, t, 0] > 1] = 0
    return torch.stack(out, 1)


def reset_by_filling(x, ends, start):
    """The same, by a fill, once with what is learned."""
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = (0.9 * h + x[:, t]).masked_fill(ends[:, t] > 1, 0.0)
        h = h.masked_fill(ends[:, t] < -1, start)
        out.append(h)
    return torch.stack(out, 1)


def learned_reset_of_layers(x, ends, start):
    hs, out = start.expand(3, x.shape[0], -1), []
    for t in range(x.shape[1]):
        hs = hs.clone()
        hs[:, ends[:, t, 0] > 0.5] = start
        hs = 0.9 * hs + x[:, t]
        out.append(hs.sum(0))
    return torch.stack(out, 1)


def running_range(x):
    high = low = x[:, 0]
    out = []
    for xt in x.unbind(1):
        high, low = torch.stack([high - 0.1, xt]).max(0).values, torch.minimum(xt, low + 0.1)
        out.append(high - low)
    return torch.stack(out, 1)


def running_logsumexp(x, g):
    h, out = x[:, 0], []
    for t in range(1, x.shape[1]):
        h = torch.logsumexp(torch.stack([h + F.logsigmoid(g[:, t]), x[:, t]], -1), -1)
        out.append(h)
    return torch.stack(out, 1)


def inputs_by_any_operation(x, g):
    """What a step computes of its inputs has no rule of its own here."""
    h, loss, out = torch.zeros_like(x[:, 0]), 0.0, []
    for t in range(x.shape[1]):
        largest = F.one_hot(x[:, t].argmax(-1), x.shape[2]).to(x)
        kept = x[:, t] * (x[:, t] >= x[:, t].topk(3, -1).values[:, -1:])
        h = g[:, t].sigmoid() * h + largest + F.pad(kept[:, 1:], (1, 0)) + x[:, t].gather(-1, g[:, t].argsort(-1))
        loss = loss + F.mse_loss(h, x[:, t]) + F.cross_entropy(x[:, t], x[:, t].argmin(-1))
        out.append(h)
    return torch.stack(out, 1) + loss


def membrane(x):
    """A leaky integrator whose steps leave pairs."""
    mem, recorded = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        mem = 0.9 * mem + x[:, step]
        recorded.append((mem, torch.sigmoid(10 * (mem - 1))))
    return torch.stack([m for m, _ in recorded]) + torch.stack([s for _, s in recorded])


def adam_in_place(g):
    """A quotient has a factor that depends on the step."""
    m, p, out = torch.zeros_like(g[:, 0]), torch.zeros_like(g[:, 0]), []
    for t in range(g.shape[1]):
        m.mul_(0.9).add_(g[:, t], alpha=0.1)
        p.addcdiv_(m, 1 + g[:, t] ** 2, value=-0.01 / (1 - 0.9 ** (t + 1)))
        out.append(p.clone())
    return torch.stack(out, 1)


def returns_of_lists(rewards, ends):
    """Lists of what was recorded at each step, read backwards (REINFORCE)."""
    rewards, ends = [rewards[:, t] for t in range(STEPS)], [ends[:, t] for t in range(STEPS)]
    value, out = torch.zeros_like(rewards[0]), []
    for reward, end in zip(rewards[::-1], ends[::-1], strict=True):
        value = reward + 0.99 * value * (end < 1)
        out.insert(0, value)
    return torch.stack(out, 1)


def columns_in_a_list(x):
    columns, h, out = [x[..., k] for k in range(STEPS)], torch.zeros_like(x[..., 0]), []
    for t in range(STEPS):
        h = 0.9 * h + columns[t]
        out.append(h)
    return torch.stack(out, -1)


def lists_of_moments(g, p):
    """Adam on a list of parameters, as PyTorch's own optimizers compute it."""
    params = [x[:, 0] for x in p.split(3, -1)]
    m, v = ([torch.zeros_like(x) for x in params] for _ in range(2))
    for t in range(g.shape[1]):
        grads = [x[:, t] for x in g.split(3, -1)]
        m = torch._foreach_lerp(m, grads, 0.1)
        v = torch._foreach_mul(v, 0.99)
        torch._foreach_addcmul_(v, grads, grads, 0.01)
        params = torch._foreach_addcdiv(params, m, torch._foreach_add(torch._foreach_sqrt(v), 1e-2), -0.01)
    return torch.cat(params, -1)


def halves_of_a_position(x):
    """Two writes per step, next to one another in one row."""
    h, out = x[:, 0], x.new_zeros(*x.shape[:2], 2 * x.shape[2])
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t]
        out[:, t, : x.shape[2]] = h
        out[:, t, x.shape[2] :] = h.tanh()
    return out


def over_time(step):
    """Return a loop over sequences that collects the states of a step."""

    def fn(*xs):
        h, out = torch.zeros_like(xs[0][:, 0]), []
        for t in range(xs[0].shape[1]):
            h = step(h, *(x[:, t] for x in xs))
            out.append(h)
        return torch.stack(out, 1)

    return fn


LONG, ONE, WEIGHTS = (BATCH, STEPS, CHANNELS), (STEPS, HEADS * HEAD), (CHANNELS, HEAD)
SPELLINGS = {
    rwkv6_of_one_sequence: ([ONE, ONE, ONE, ONE, ONE[1:]], "linear_scan"),
    mlstm_by_chunks: ([(BATCH, 4 * STEPS, CHANNELS)] * 4, "running maximum"),
    kalman_of_columns: ([LONG, (4, 2)], "linear_system of 4"),
    linear_prediction: ([LONG, LONG], "linear_system of 3"),
    s4d_by_steps: ([LONG, WEIGHTS, WEIGHTS, WEIGHTS], "complex scan"),
    sums_of_chunks: ([(BATCH, 2 * STEPS, CHANNELS)] * 2, "linear_scan"),
    gate_loop: ([LONG] * 5, "complex scan"),
    fast_weights_of_one_sequence: ([ONE] * 4, "ssd"),
    fast_weights_from_the_right: ([ONE] * 4, "linear_scan"),
    reset_by_a_mask: ([LONG] * 2, "linear_scan"),
    reset_by_filling: ([LONG, LONG, ()], "linear_scan"),
    learned_reset_of_layers: ([LONG, LONG, (CHANNELS,)], "linear_scan"),
    running_range: ([LONG], "running minimum"),
    running_logsumexp: ([LONG] * 2, "running maximum"),
    inputs_by_any_operation: ([LONG] * 2, "linear_scan"),
    membrane: ([LONG], "linear_scan"),
    adam_in_place: ([LONG], "linear_scan"),
    returns_of_lists: ([LONG] * 2, "linear_scan"),
    lists_of_moments: ([LONG] * 2, "linear_scan"),
    halves_of_a_position: ([LONG], "linear_scan"),
    columns_in_a_list: ([(BATCH, CHANNELS, STEPS)], "linear_scan"),
    operation: ([LONG] * 2, "linear_scan"),
    operation_against_time: ([LONG] * 2, "linear_scan"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by PyTorch's scan in eager
@pytest.mark.parametrize("fn", SPELLINGS)
@pytest.mark.parametrize("training", [False, True])
def test_found_and_right(fn, training):
    if fn in (operation, operation_against_time) and torch.__version__ < (2, 13):
        pytest.skip("its scan along another axis than the first has results of another shape, and no gradients")
    if fn is adam_in_place and training:
        pytest.skip("eager cannot differentiate what it changes in place")
    if fn is running_range and training and clamp_shares(False)[0] != 1.0:
        pytest.skip("since torch 2.14 no clamp hands its gradient to the first of equal values, as max does")
    shapes, found = SPELLINGS[fn]
    generator = torch.Generator().manual_seed(0)
    details = check(fn, [torch.randn(shape, generator=generator) for shape in shapes], training)
    assert any(found in detail for detail in details), details


@pytest.mark.parametrize("kept", ["in a list", "twice"])
def test_a_state_that_is_handed_on_is_one_tensor(kept):
    """Where a list or another variable has it as well, who changes the one changes the other."""

    def fn(x):
        u = v = w = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            u, v, w = 0.9 * u + x[:, t], u, u
            states.append(u)
        return (states, v) if kept == "in a list" else ([torch.stack(states), w], v)

    torch._dynamo.reset()
    states, v = refold.compile(fn, verify="off", accept="always", cache=False, loops="capture")(torch.randn(LONG))
    other = states[-2] if kept == "in a list" else states[1]
    v += 1
    assert torch.equal(v, other)


def test_an_operation_that_is_no_scan_stays_and_the_report_says_why():
    from torch._higher_order_ops.scan import scan

    def fn(x):
        def step(h, now):
            h = torch.tanh(h) + now
            return h, h.clone()

        return scan(step, torch.zeros_like(x[:, 0]), x, dim=1)[1]

    report = refold.explain(fn, torch.randn(BATCH, STEPS, CHANNELS))
    assert not report.rewrites
    assert "a scan operation stays as it is: `torch.tanh(h)`" in str(report)
    assert "[carry-not-affine]" in str(report)


@pytest.mark.parametrize("kept", ["in a variable", "in a window", "in a deque"])
@pytest.mark.parametrize("training", [False, True])
def test_a_state_in_place_that_a_later_step_reads_under_another_name(kept, training):
    """What is kept of the step before is the same tensor, so it has the new content as well."""

    def fn(x):
        h, before, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
        past = [before] * 2 if kept == "in a window" else collections.deque([before] * 2)
        for t in range(x.shape[1]):
            h.mul_(0.9).add_(x[:, t])
            out.append(1 + (before if kept == "in a variable" else past[0]))
            if kept == "in a variable":
                before = h
            else:
                past.append(h)
                past.pop(0) if kept == "in a window" else past.popleft()
        return torch.stack(out, 1)

    check(fn, [torch.randn(LONG)], training)


BOUNDED = {
    "relu": lambda h, x, c: F.relu(h + x),
    "clamp": lambda h, x, c: torch.clamp(h + x, min=0),
    "clamp to a tensor": lambda h, x, c: torch.clamp(h + x, min=c),
    "from above": lambda h, x, c: (h + x).clamp_max(1),
    "the other clamp": lambda h, x, c: torch.clamp(c, max=h - x),
    "maximum": lambda h, x, c: torch.maximum(c, h + x),
    "minimum": lambda h, x, c: torch.minimum(h + x, c),
    "of a stack": lambda h, x, c: torch.stack([c, h + x], -1).max(-1).values,
    "of a stack, shared": lambda h, x, c: torch.stack([c, h + x, -c], -1).amin(-1),
    "twice": lambda h, x, c: torch.clamp(torch.clamp(h + x, min=-1), min=c),
    "moved": lambda h, x, c: F.relu(h) + x,
    "moved from the right": lambda h, x, c: x - F.relu(h),
    "decaying": lambda h, x, c: torch.maximum(0.5 * h, x),
    "rectified": lambda h, x, c: F.relu(c.sign() * h + x),
    "from above, decaying": lambda h, x, c: torch.minimum(c.sigmoid() * h, x),
    "divided": lambda h, x, c: (h / 2 + x).clamp(min=c),
    "then decaying": lambda h, x, c: x + 0.5 * torch.maximum(h, c),
    "turned round": lambda h, x, c: c - torch.maximum(h, x) / 2,
    "both sides": lambda h, x, c: (h + x).clamp(-1, 1),
    "both sides, by tensors": lambda h, x, c: torch.clamp(h + x, c, -c),
    "both sides, by one tensor": lambda h, x, c: torch.minimum((0.5 * h + x).clamp(min=-1), c),
    "both sides, the upper one first": lambda h, x, c: torch.max(torch.min(h - x, c), -c),
    "both sides, then moved": lambda h, x, c: x - torch.clamp(h, -1, 1),
    "hard": lambda h, x, c: F.hardtanh(c * h + x),
    "hard, between others": lambda h, x, c: F.hardtanh(h + x, -2, 1),
    "relu6": lambda h, x, c: F.relu6(h + x),
    "clamp and relu": lambda h, x, c: F.relu((h + x).clamp(max=1)),
}


SHARED = ("of a stack, shared",)
"""Three equal items share a gradient as no pairs do: such a loop stays as it is."""
FIRST = ("of a stack", "twice", "both sides, by tensors")
"""What is rewritten where a clamp hands its gradient to its first operand: before torch 2.14."""


@pytest.mark.parametrize("name", BOUNDED)
def test_gradients_where_both_sides_of_a_bound_are_equal(name):
    """Each spelling hands its gradient on in its own way."""
    states = over_time(BOUNDED[name])

    def fn(x, c):
        return states(x, c) * c

    generator = torch.Generator().manual_seed(0)
    found = check(fn, [torch.randn(LONG, generator=generator).round() for _ in range(2)], True)
    if not (name in SHARED or (clamp_shares(False)[0] != 1.0 and name in FIRST)):
        (detail,) = found
        assert "running" in detail or "bounded scan" in detail


OTHERWISE = (
    "moved", "moved from the right", "then decaying", "turned round", "both sides, then moved",
    "of a stack", "of a stack, shared",
)  # fmt: skip
"""What is added after a bound, and the largest of a stack, share the gradient of what is not finite in another way."""


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name in BOUNDED if name not in OTHERWISE])
def test_gradients_before_what_is_not_finite(name, bad):
    fn = over_time(BOUNDED[name])
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(BATCH, STEPS, CHANNELS, generator=generator) for _ in range(2)]
    first = STEPS - 3
    inputs[0][0, first, :2] = bad
    weights = torch.randn(inputs[0].shape, generator=generator)
    found = outputs(lambda *xs: rewritten(fn, *xs, training=True)[0], inputs, True, weights)
    for mine, theirs in zip(found, outputs(fn, inputs, True, weights), strict=True):
        torch.testing.assert_close(mine[:, :first], theirs[:, :first])


NUMBERS = {
    "counts": (1.0, lambda h, n, x: (h + (x - h) / n, n + 1.0), True),
    "begins small": (1e-4, lambda h, n, x: ((n * h + x) / (n + 1.0), n + 1.0), True),
    "falls": (3.0, lambda h, n, x: (0.5 * h + n * x, n - 0.5), True),
    "in two parts": (0.3, lambda h, n, x: (0.5 * h + n * x, n + 0.1 + 0.2), True),
    "discounts": (1.0, lambda h, n, x: (h + n * x, n * 0.9), True),
    "grows": (0.7, lambda h, n, x: (0.5 * h + x / n, 1.1 * n), True),
    "halves": (1.0, lambda h, n, x: (0.5 * h + n * x, n / 2), True),
    "changes its sign": (0.7, lambda h, n, x: (0.5 * h + n * x, -n), True),
    "changes its sign, an integer": (3, lambda h, n, x: (0.5 * h + n * x, n * -1), True),
    "takes turns": (0, lambda h, n, x: (0.5 * h + n * x, 1 - n), True),
    "halves and changes its sign": (1.0, lambda h, n, x: (0.5 * h + n * x, -n / 2), False),
    "within a root": (1.0, lambda h, n, x: (0.5 * h + x / math.sqrt(n), n + 1.0), True),
    "both": (1.0, lambda h, n, x: (0.5 * h + n * x, 0.5 * n + 1.0), False),
    "both, of small numbers": (1e-13, lambda h, n, x: (0.5 * h + 1e13 * n * x, 0.5 * n + 1e-14), False),
    "squares": (0.9, lambda h, n, x: (0.5 * h + n * x, n * n), False),
    "stops": (1.0, lambda h, n, x: (0.5 * h + n * x, n * 0.5 if n > 0.1 else n), False),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("training", [False, True])
def test_numbers_that_change(name, training):
    start, step, found = NUMBERS[name]

    def fn(x):
        h, n, out = torch.zeros_like(x[:, 0]), start, []
        for t in range(x.shape[1]):
            h, n = step(h, n, x[:, t])
            out.append(h)
        return torch.stack(out, 1) * n

    details = check(fn, [torch.randn(LONG, generator=torch.Generator().manual_seed(0))], training)
    assert any("linear_scan" in detail for detail in details) == found


def two_lists(x, h):
    out, again = [], []
    for t in range(x.shape[0]):
        h = torch.maximum(h, x[t])
        out.append(h)
        again.append(h)
    return torch.stack(out), torch.stack(again), h


def two_of_a_system(x, h):
    b, out, other = h, [], []
    for t in range(x.shape[0]):
        h, b = 0.9 * h - 0.1 * b + x[t], 0.1 * h + 0.9 * b
        out.append(h)
        other.append(b)
    return torch.stack(out), torch.stack(other), h, b


def collected_inputs(x, h):
    x, out, read = x.sin(), [], []
    for t in range(x.shape[0]):
        h = 0.9 * h + x[t]
        out.append(h)
        read.append(x[t])
    return torch.stack(out), torch.stack(read), h, x


@pytest.mark.parametrize("fn", [two_lists, two_of_a_system, collected_inputs], ids=lambda fn: fn.__name__)
def test_results_share_no_memory(fn):
    """Who changes one of them in place after the call changes no other."""
    results, rows = rewritten(fn, torch.randn(STEPS, CHANNELS), torch.zeros(CHANNELS), training=True)
    assert rows
    assert len({y.untyped_storage().data_ptr() for y in results}) == len(results)


PLANTED = {
    "_moved": ("moved", lambda _, x, by: replace(x, offset=by)),
    "_times": ("turned round", lambda self, x, by: replace(self._scaled(x, Value(by), x.loop), bounds=x.bounds)),
    "_within": ("both sides", lambda _, x, bound, node: replace(x, bounds=(bound,))),
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_wrong_rule_of_bounds_is_caught(rule, monkeypatch):
    name, wrong = PLANTED[rule]
    monkeypatch.setattr(LoopVectorizer, rule, wrong)
    with pytest.raises(AssertionError, match="error"):
        test_gradients_where_both_sides_of_a_bound_are_equal(name)


OTHERWISE = {
    "three bounds": lambda h, x: torch.maximum((h + x).clamp(-1, 1), 0.5 * x),
    "a factor of unknown sign": lambda h, x: x.sin() * F.relu(h) + x,
    "a smooth one that decays": lambda h, x: torch.logaddexp(0.5 * h, x),
    "a smooth one with an edge": lambda h, x: torch.logaddexp(h, x).clamp(max=1),
    "a choice": lambda h, x: torch.where(x > 0, F.relu(h + x), 0.0),
    "a choice before": lambda h, x: F.relu(torch.where(x > 1, 0.0, h) + x),
    "a bound that reads the state": lambda h, x: torch.minimum(h + x, 0.5 * h),
    "what is above a bound": lambda h, x: h - torch.minimum(h, x),
    "added to itself": lambda h, x: (y := F.relu(0.4 * h + x)) + y,
    "times itself": lambda h, x: (y := (0.4 * h + x).clamp(-1, 1)) * y,
    "divided by itself": lambda h, x: (y := (h + x).clamp(min=1)) / y,
}


@pytest.mark.parametrize("step", OTHERWISE.values(), ids=OTHERWISE)
def test_what_is_bounded_otherwise_stays(step):
    assert check(over_time(step), [torch.randn(LONG, generator=torch.Generator().manual_seed(0))], False) == []
