"""Recurrences as people write them: eager, ``torch.compile`` and refold, over the number of steps.

Each is written from its definition, in the spelling that public code has, and returns what such code returns. The tests
of the compiler run the same functions.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compiler.compile_time import unrolled_seconds
from ..compiler.dynamo import captures_loops
from ..compiler.ir.operators import CONTRACTED, HEADS, SCAN
from ..errors import ArgumentError
from ..verify.timing import once_ms, sample_ms
from .options import check_names
from .progress import wanted
from .rows import Row
from .turns import Turn, take_turns

# Batch and channels of a case; heads have eight channels.
BATCH, CHANNELS, HEAD = 4, 64, 8
# A result may err so many times as much as eager's own float32 does against float64.
BOUND = 16
# Calls are repeated so often, and no longer than this in all.
ROUNDS, LONG_MS = 21, 1000.0
# Calls of tens of microseconds are repeated for so long in each round.
WARM_MS = 2.0
PASSES = {False: "forward", True: "forward and backward"}


def ema(x: Tensor, a: Tensor) -> Tensor:
    """Compute an exponential moving average, by ``lerp``."""
    a, h, out = a.sigmoid(), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.lerp(h, x[:, t], a)
        out.append(h)
    return torch.stack(out, 1)


def min_gru(x: Tensor, z: Tensor) -> Tensor:
    """Run the loop of minGRU (Feng et al. 2024, arXiv:2410.01201)."""
    z, h, out = z.sigmoid(), torch.zeros_like(x[:, :1]), []
    for t in range(x.shape[1]):
        h = (1 - z[:, t : t + 1]) * h + z[:, t : t + 1] * x[:, t : t + 1]
        out.append(h)
    return torch.cat(out, 1)


def log_space(gate: Tensor, hidden: Tensor) -> Tensor:
    """Train minGRU by sums of logarithms (Heinsen 2023, arXiv:2311.06281; Feng et al. 2024)."""
    sums = -F.softplus(gate).cumsum(1)
    positive = torch.where(hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden))
    return (sums + (positive - F.softplus(-gate) - sums).logcumsumexp(1)).exp()


def associative(a: Tensor, x: Tensor) -> Tensor:
    """Compute a gated recurrence by PyTorch's ``associative_scan``."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return associative_scan(combine, (a.sigmoid(), x), 1, combine_mode="generic")[1]  # type: ignore[arg-type]


def doubling(a: Tensor, x: Tensor) -> Tensor:
    """Do the same by doubling (Hillis & Steele 1986)."""
    a, k = a.sigmoid(), 1
    while k < x.shape[1]:
        x = torch.cat([x[:, :k], x[:, k:] + a[:, k:] * x[:, :-k]], 1)
        a = torch.cat([a[:, :k], a[:, k:] * a[:, :-k]], 1)
        k *= 2
    return x


def lru(x: Tensor, nu: Tensor, theta: Tensor) -> Tensor:
    """Run a linear recurrent unit, a complex diagonal (Orvieto et al. 2023, arXiv:2303.06349)."""
    decay = torch.exp(torch.complex(-nu.exp(), theta))
    h, out = torch.zeros_like(x[:, 0]) * decay, []
    for t in range(x.shape[1]):
        h = decay * h + x[:, t]
        out.append(h.real)
    return torch.stack(out, 1)


def biquad(x: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Apply a second-order filter in direct form II, transposed."""
    a1, a2 = -1.8 * a.sigmoid()[0], 0.9 * a.sigmoid()[1]
    s1 = s2 = torch.zeros_like(x[:, 0])
    out = []
    for t in range(x.shape[1]):
        y = b[0] * x[:, t] + s1
        s1 = b[1] * x[:, t] - a1 * y + s2
        s2 = b[2] * x[:, t] - a2 * y
        out.append(y)
    return torch.stack(out, 1)


def holt(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Smooth twice: a level and its trend."""
    alpha, beta = alpha.sigmoid(), beta.sigmoid()
    level, trend, out = x[:, 0], torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        before = level
        level = alpha * x[:, t] + (1 - alpha) * (level + trend)
        trend = beta * (level - before) + (1 - beta) * trend
        out.append(level + trend)
    return torch.stack(out, 1)


def holt_winters(x: Tensor, rates: Tensor) -> Tensor:
    """Smooth a level, its trend and four seasons; a list has the seasons, and is read four steps back."""
    a, b, c = rates.sigmoid()
    level, trend = x[:, :4].mean(1), torch.zeros_like(x[:, 0])
    seasons, out = [x[:, i] - level for i in range(4)], []
    for t in range(4, x.shape[1]):
        before, season = level, seasons[t - 4]
        level = a * (x[:, t] - season) + (1 - a) * (level + trend)
        trend = b * (level - before) + (1 - b) * trend
        seasons.append(c * (x[:, t] - level) + (1 - c) * season)
        out.append(level + trend + seasons[t - 3])
    return torch.stack(out, 1)


def advantages(rewards: Tensor, values: Tensor, ends: Tensor) -> Tensor:
    """Estimate generalised advantages, backwards in time (Schulman et al. 2015, arXiv:1506.02438)."""
    goes_on, steps = (ends < 2.0).to(rewards), rewards.shape[1]
    last: Any = 0.0
    out: list[Any] = []
    for t in reversed(range(steps)):
        after = values[:, t + 1] if t < steps - 1 else 0.0
        last = rewards[:, t] + 0.99 * after * goes_on[:, t] - values[:, t] + 0.99 * 0.95 * goes_on[:, t] * last
        out.append(last)
    return torch.stack(out[::-1], 1)


def autoregression(x: Tensor, c: Tensor) -> Tensor:
    """Add a linear prediction from the last three values."""
    c = 0.3 * c.tanh()
    y1 = y2 = y3 = torch.zeros_like(x[:, 0])
    out = []
    for t in range(x.shape[1]):
        y = c[0] * y1 + c[1] * y2 + c[2] * y3 + x[:, t]
        y1, y2, y3 = y, y1, y2
        out.append(y)
    return torch.stack(out, 1)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal linear attention by cumulative sums (Katharopoulos et al. 2020, arXiv:2006.16236)."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)) for x in (F.elu(q) + 1, F.elu(k) + 1, v))
    states = torch.cumsum(k.unsqueeze(-1) * v.unsqueeze(-2), 1)
    norm = 1 / (torch.einsum("bthd,bthd->bth", q, k.cumsum(1)) + 1e-6)
    return torch.einsum("bthd,bthde,bth->bthe", q, states, norm).flatten(2)


def rwkv4(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Run the stabilised loop of RWKV-4 (Peng et al. 2023, arXiv:2305.13048)."""
    w = -torch.exp(w)
    num = den = torch.zeros_like(k[:, 0])
    top, out = torch.full_like(k[:, 0], -1e38), []
    for t in range(k.shape[1]):
        new = torch.maximum(top, u + k[:, t])
        old, own = torch.exp(top - new), torch.exp(u + k[:, t] - new)
        out.append((old * num + own * v[:, t]) / (old * den + own))
        new = torch.maximum(top + w, k[:, t])
        old, own = torch.exp(top + w - new), torch.exp(k[:, t] - new)
        num, den, top = old * num + own * v[:, t], old * den + own, new
    return torch.stack(out, 1)


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """Run the matrix memory of xLSTM with its stabiliser (Beck et al. 2024, arXiv:2405.04517)."""
    q, k, v = (x.unflatten(-1, (-1, HEAD)) for x in (q, k / HEAD**0.5, v))
    i, f = (x.unflatten(-1, (-1, HEAD))[..., :1] for x in (i, F.logsigmoid(f)))
    c, n, top = q.new_zeros(*q[:, 0].shape, HEAD), torch.zeros_like(q[:, 0]), torch.zeros_like(i[:, 0])
    out = []
    for t in range(q.shape[1]):
        new = torch.max(f[:, t] + top, i[:, t])
        keep, take = torch.exp(f[:, t] + top - new), torch.exp(i[:, t] - new)
        c = keep[..., None] * c + take[..., None] * v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        n, top = keep * n + take * k[:, t], new
        size = (n * q[:, t]).sum(-1, keepdim=True).abs()
        out.append((c * q[:, t].unsqueeze(-2)).sum(-1) / torch.maximum(size, torch.exp(-top)))
    return torch.stack(out, 1).flatten(2)


def change_of_mean(x: Tensor) -> Tensor:
    """Detect a change of the mean in both directions, by cumulative sums that stay above zero (Page 1954)."""
    up = down = torch.zeros_like(x[:, 0])
    out = []
    for t in range(x.shape[1]):
        up, down = F.relu(up + x[:, t] - 0.1), torch.clamp(down - x[:, t] - 0.1, min=0)
        out.append(torch.maximum(up, down))
    return torch.stack(out, 1)


def fading_maximum(x: Tensor) -> Tensor:
    """Scale by the largest magnitude so far, which fades, as training in 8 bits does."""
    largest, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        largest = torch.max(largest * 0.95, x[:, t].abs())
        out.append(x[:, t] / (largest + 1e-6))
    return torch.stack(out, 1)


def ind_rnn(x: Tensor, u: Tensor) -> Tensor:
    """Run a layer of IndRNN (Li et al. 2018, arXiv:1803.04831)."""
    u, h, out = u.tanh(), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = F.relu(x[:, t] + u * h)
        out.append(h)
    return torch.stack(out, 1)


def anti_windup(error: Tensor) -> Tensor:
    """Integrate within the limits of what the integral drives (Astrom & Rundqwist 1989)."""
    integral, out = torch.zeros_like(error[:, 0]), []
    for e in error.unbind(1):
        integral = (integral + 0.1 * e).clamp(-0.2, 0.3)
        out.append(2 * e + 0.5 * integral)
    return torch.stack(out, 1)


def selective(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor) -> Tensor:
    """Compute the selective scan of Mamba, step by step (Gu & Dao 2023, arXiv:2312.00752)."""
    dt, A = F.softplus(dt), -torch.exp(A)
    h, out = x.new_zeros(x.shape[0], x.shape[2], A.shape[1]), []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * A) * h + dt[:, t, :, None] * B[:, t, None, :HEAD] * x[:, t, :, None]
        out.append((h * C[:, t, None, :HEAD]).sum(-1))
    return torch.stack(out, 1)


def xpos_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run retention with positions that each step computes up to its own (Sun et al. 2023, arXiv:2307.08621)."""

    def turned(x: Tensor, t: int, power: float) -> Tensor:
        half, past = torch.arange(0, HEAD, 2, device=x.device), torch.arange(t + 1, device=x.device)
        scale = ((half + 0.4 * HEAD) / (1.4 * HEAD))[None] ** (power * past[:, None] / 512)
        angle = past[:, None] * 10000 ** (-half / HEAD)
        sin, cos = ((f(angle) * scale)[-1:].repeat_interleave(2, -1) for f in (torch.sin, torch.cos))
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos + other * sin

    q, k, v = (x.unflatten(-1, (-1, HEAD)) for x in (q, k, v))
    state, out = q.new_zeros(*q[:, 0].shape, HEAD), []
    for t in range(q.shape[1]):
        state = 0.96875 * state + turned(k[:, t], t, -1.0).unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((turned(q[:, t], t, 1.0).unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(out, 1).flatten(2)


def lfilter(x: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Filter by windows of the input, and of the output that the steps before have written, as audio libraries do."""
    order, x = a.shape[0], x.transpose(1, 2)
    windows = F.conv1d(F.pad(x, (order, 0)), b.repeat(x.shape[1], 1, 1), groups=x.shape[1])
    padded = x.new_zeros(*x.shape[:2], x.shape[2] + order)
    for t, now in enumerate(windows.permute(2, 0, 1)):
        padded[:, :, t + order] = now - padded[:, :, t : t + order] @ (0.3 * a.tanh())
    return padded[:, :, order:].transpose(1, 2)


def difference_equation(x: Tensor, a: Tensor) -> Tensor:
    """Solve a difference equation in the tensor of its solution."""
    a, y = 0.45 * a.tanh(), torch.zeros_like(x)
    for t in range(2, x.shape[1]):
        y[:, t] = x[:, t] + x[:, t - 1] + a[0] * y[:, t - 1] + a[1] * y[:, t - 2]
    return y


def rolled_window(x: Tensor, w: Tensor) -> Tensor:
    """Convolve with a window that each step rolls, as models cache it."""
    window, out = x.new_zeros(*x[:, 0].shape, w.shape[1] - 1), []
    for t in range(x.shape[1]):
        full = torch.cat([window, x[:, t, :, None]], -1)
        window = full[..., 1:]
        out.append(F.silu((full * w).sum(-1)))
    return torch.stack(out, 1)


def rotated_pairs(x: Tensor, r: Tensor, theta: Tensor) -> Tensor:
    """Turn and shrink pairs of channels, a complex recurrence in real numbers."""
    x = x.unflatten(-1, (-1, 2))
    c, s = r.sigmoid() * theta.cos(), r.sigmoid() * theta.sin()
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.stack([c * h[..., 0] - s * h[..., 1], s * h[..., 0] + c * h[..., 1]], -1) + x[:, t]
        out.append(h)
    return torch.stack(out, 1).flatten(2)


def tracker(x: Tensor, gain: Tensor) -> Tensor:
    """Track positions with a Kalman filter of fixed gain: a vector of two, and a matrix."""
    moves, gain = x.new_tensor([[1.0, 0.1], [0.0, 0.95]]), gain.sigmoid()
    x = x.flatten(2).mean(-1, keepdim=True)
    state, out = x.new_zeros(x.shape[0], 2), []
    for t in range(x.shape[1]):
        guess = state @ moves.T
        state = guess + (x[:, t] - guess[:, :1]) * gain
        out.append(state)
    return torch.stack(out, 1)


def bidirectional_ssm(x: Tensor, nu: Tensor, theta: Tensor) -> Tensor:
    """Scan a complex diagonal both ways by trees of pairs (Smith et al. 2022, arXiv:2208.04933)."""
    from torch._higher_order_ops.associative_scan import associative_scan

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return right[0] * left[0], torch.addcmul(right[1], right[0], left[1])

    decay = torch.exp(torch.complex(-nu.exp(), theta))
    pairs = decay.expand(x.shape), x * (decay - 1)
    both = [associative_scan(combine, pairs, 1, reverse=r, combine_mode="generic")[1] for r in (False, True)]  # type: ignore[arg-type]
    return torch.cat(both, -1).real


SEASONS = 4  # Steps that `holt_winters` reads before it starts.


@dataclass(frozen=True)
class Recurrence:
    """A recurrence and its inputs.

    Attributes:
        fn: The function.
        sequences: How many inputs are ``(batch, time, channels)``.
        rest: Shapes of the other inputs, which come after them.
        found: What it becomes, as the report names it.
        gradient: Whether eager can differentiate it: not what reads what it writes.
    """

    fn: Callable[..., Tensor]
    sequences: int
    rest: tuple[tuple[int, ...], ...]
    found: str
    gradient: bool = True

    def inputs(self, batch: int, steps: int, channels: int) -> list[Tensor]:
        """Draw inputs."""
        generator = torch.Generator().manual_seed(0)
        sizes = {0: channels}
        shapes: list[tuple[int, ...]] = [(batch, steps, channels)] * self.sequences
        shapes += [tuple(sizes.get(n, n) for n in shape) for shape in self.rest]
        return [torch.randn(shape, generator=generator) for shape in shapes]


RECURRENCES = {
    "ema": Recurrence(ema, 1, ((),), SCAN.name),
    "min-gru": Recurrence(min_gru, 2, (), SCAN.name),
    "log-space": Recurrence(log_space, 2, (), SCAN.name),
    "associative-scan": Recurrence(associative, 2, (), SCAN.name),
    "doubling": Recurrence(doubling, 2, (), SCAN.name),
    "lru": Recurrence(lru, 1, ((0,), (0,)), "complex scan"),
    "biquad": Recurrence(biquad, 1, ((3,), (2,)), "linear_system of 2"),
    "holt": Recurrence(holt, 1, ((), ()), "linear_system of 2"),
    "holt-winters": Recurrence(holt_winters, 1, ((3,),), "linear_system of 6"),
    "advantages": Recurrence(advantages, 3, (), SCAN.name),
    "autoregression": Recurrence(autoregression, 1, ((3,),), "linear_system of 3"),
    "linear-attention": Recurrence(linear_attention, 3, (), HEADS.name),
    "rwkv4": Recurrence(rwkv4, 2, ((0,), (0,)), "running maximum"),
    "mlstm": Recurrence(mlstm, 5, (), "running maximum"),
    "change-of-mean": Recurrence(change_of_mean, 1, (), "running maximum"),
    "fading-maximum": Recurrence(fading_maximum, 1, (), "bounded scan"),
    "ind-rnn": Recurrence(ind_rnn, 1, ((0,),), "bounded scan"),
    "anti-windup": Recurrence(anti_windup, 1, (), "bounded scan"),
    "selective": Recurrence(selective, 4, ((0, HEAD),), CONTRACTED.name),
    "xpos-retention": Recurrence(xpos_retention, 3, (), HEADS.name),
    "lfilter": Recurrence(lfilter, 1, ((4,), (3,)), "linear_system of 3", gradient=False),
    "difference-equation": Recurrence(difference_equation, 1, ((2,),), "linear_system of 2", gradient=False),
    "rolled-window": Recurrence(rolled_window, 1, ((0, 4),), "all at once"),
    "rotated-pairs": Recurrence(rotated_pairs, 1, ((), ()), "linear_system of 2"),
    "tracker": Recurrence(tracker, 1, ((2,),), "linear_system of 2"),
    "bidirectional-ssm": Recurrence(bidirectional_ssm, 1, ((0,), (0,)), "complex scan"),
}
"""By name. A size of zero in ``rest`` stands for the channels."""


def recurrences(
    *, steps: tuple[int, ...] = (512, 2048, 128, 4096), case: tuple[str, ...] = tuple(RECURRENCES), grad: bool = False,
    device: str = "cpu", budget: float = 300.0,
) -> Iterator[Row]:  # fmt: skip
    """Compare public recurrences, as written, with eager and torch.compile over the number of steps."""
    check_names("recurrences: case", case, RECURRENCES)
    if "holt-winters" in case and min(steps) < SEASONS:
        raise ArgumentError(f"recurrences: steps is {min(steps)}. Give {SEASONS} or more, or leave out holt-winters")
    for count in steps:
        for name in case:
            if grad and not RECURRENCES[name].gradient:
                continue
            if wanted(case=name, steps=count, **{"pass": PASSES[grad]}):
                yield measure(name, count, grad, device, budget)


def measure(name: str, steps: int, grad: bool, device: str, budget: float) -> Row:
    """Time one recurrence in up to three ways, end to end: calls, with the guards of what is compiled.

    Inductor cannot be interrupted. So torch.compile is not run if its compile would take longer than the budget, in
    seconds, as refold estimates it; then the row says so. The estimate is often several times too high.
    """
    import refold

    one = RECURRENCES[name]
    inputs = [x.to(device).requires_grad_(grad) for x in one.inputs(BATCH, steps, CHANNELS)]
    torch.compiler.reset()
    with torch.no_grad():
        weights = torch.randn(one.fn(*inputs).shape, generator=torch.Generator().manual_seed(1)).to(device)
    seconds = inductor_estimate(one.fn, inputs)
    compiled = refold.compile(one.fn, cache=False)
    start = time.perf_counter()
    results = {"refold": call(compiled, inputs, weights)}
    first = time.perf_counter() - start
    graph: Any = compiled.report.graphs[-1]
    runs: dict[str, Callable[..., Tensor]] = {"eager": one.fn, "refold": compiled}
    not_run = {}
    if seconds <= budget:
        runs["torch.compile"] = torch.compile(one.fn)
    else:
        not_run["torch.compile"] = f"its compile would take about {seconds:.0f} s, the budget is {budget:g} s"
    reference = call(one.fn, [x.detach().double().requires_grad_(grad) for x in inputs], weights)
    results["eager"] = call(one.fn, inputs, weights)
    errors = {who: max(map(error, own, reference)) for who, own in results.items()}
    row: Row = {
        "case": name,
        "steps": steps,
        "batch": BATCH,
        "pass": PASSES[grad],
        "found": [row.detail for row in graph.applied],
        "left": [f"{row.detail}: {row.reason}" for row in graph.rewrites if row.status == "refused"],
        "chosen": graph.chosen,
        "errors": errors,
        "not_run": not_run,
        "first_call_s": first,
        "compile_s": graph.compile_s,
        "checks_s": graph.checks_s,
        "notes": list(graph.notes),
    }
    if not errors["refold"] <= BOUND * errors["eager"] + 1e-6:
        return row | {"refused": f"an error above {BOUND} times eager's"}
    calls = {who: partial(call, fn, inputs, weights) for who, fn in runs.items()}
    return row | {"times_ms": medians_ms(calls, inputs[0].device)}


def call(fn: Callable[..., Tensor], inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Return a function's result, and the gradients of its sum with weights if the inputs need some."""
    grad = inputs[0].requires_grad
    with torch.set_grad_enabled(grad):
        y = fn(*inputs)
    return [y.detach(), *(gradients(y, inputs, weights.to(y)) if grad else ())]


def gradients(y: Tensor, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Return gradients; zeros of an input that has none."""
    return list(torch.autograd.grad(y, inputs, weights, materialize_grads=True))


def inductor_estimate(fn: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    """Return how many seconds refold thinks that Inductor takes for a function's loops."""
    found = []

    def estimate(gm: Any, _: Any) -> Any:
        found.append(unrolled_seconds(gm, "training" if inputs[0].requires_grad else "inference"))
        return gm

    with torch.set_grad_enabled(inputs[0].requires_grad):
        torch.compile(fn, backend=captures_loops(estimate))(*inputs)
    torch.compiler.reset()
    return sum(found)


def error(x: Tensor, exact: Tensor) -> float:
    """Return the distance from an exact result, relative to its norm."""
    return float((x.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def _sample(run: Turn, device: torch.device) -> float:
    end, best = time.perf_counter() + WARM_MS / 1e3, sample_ms(run, device)
    while time.perf_counter() < end:
        best = min(best, once_ms(run, device))
    return best


def medians_ms(runs: Mapping[str, Turn], device: torch.device) -> dict[str, float]:
    """Return medians of up to `ROUNDS` samples each, in turns, after a call that compiles; fewer if they are long.

    Every round has an order of its own. A sample is the best of a few calls, and of as many as fit in `WARM_MS`: the
    first ones take tens of microseconds more, because they find in the caches what the program before left there.
    """
    for name, run in runs.items():
        if name != "eager":
            run()
    order = random.Random(0)
    times = take_turns(
        runs, ROUNDS, lambda run, _: _sample(run, device), lambda found: sum(found) >= LONG_MS,
        lambda names: order.sample(names, len(names)),
    )  # fmt: skip
    return {name: statistics.median(found) for name, found in times.items()}
