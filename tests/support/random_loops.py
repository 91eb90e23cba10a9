"""Random loops over time: linear recurrences of one state, and of several that read one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from .programs import Program, Tensors


@dataclass
class _Draw:
    """The sizes of a recurrence, its options, and its inputs as they are asked for."""

    r: Random
    steps: int
    about: list[str] = field(default_factory=list)
    inputs: Tensors = field(default_factory=list)
    timed: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.r.randrange(2**30))
        self.dtype = self.r.choice([torch.float32, torch.float32, torch.float64])
        self.batch, self.heads = self.r.choice([1, 2, 3]), self.r.choice([1, 2, 4])
        self.keys, self.values = self.r.choice([1, 2, 4, 5]), self.r.choice([1, 3, 4, 6])
        self.groups = self.r.choice([n for n in (1, 2, 4) if self.heads % n == 0])

    def choose(self, what: str, options: Sequence[Any]) -> Any:
        """Draw an option and note it."""
        found = self.r.choice(list(options))
        self.about.append(f"{what}={found}")
        return found

    def input(self, *shape: int, scale: float = 1.0) -> int:
        """Add an argument; returns its position."""
        return self.given(scale * torch.randn(shape, generator=self.generator, dtype=torch.float64), None)

    def sequence(self, *shape: int, change: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> int:
        """Add an argument with a time axis somewhere, (batch, time, ...) as the function sees it."""
        full = (self.batch, self.steps, *shape)
        x = change(torch.randn(full, generator=self.generator, dtype=torch.float64))
        order = self.r.choice([range(len(full)), self.r.sample(range(len(full)), len(full))])
        dense = x.to(self.dtype).permute(*order).contiguous()
        return self.given(dense.permute(*[list(order).index(d) for d in range(len(full))]), 1)

    def given(self, x: torch.Tensor, time: int | None) -> int:
        self.inputs.append(x.to(self.dtype))
        self.timed.append(time)
        return len(self.inputs) - 1


Step = Callable[[Sequence[torch.Tensor], int], Any]


def _resets(d: _Draw, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Draw whether some steps forget what was before: a value that stands for that, at a few of them."""
    if d.choose("resets", [False, False, True]):
        at = [d.r.randrange(d.steps) for _ in range(d.r.choice([1, 2, d.steps]))]
        return lambda x: x.index_fill(1, torch.tensor(at), value)
    return lambda x: x


def _decay(d: _Draw) -> Step | None:
    """Draw what the state (batch, heads, keys, values) is multiplied by."""
    h, k, v = d.heads, d.keys, d.values
    kind = d.choose(
        "decay",
        ["none", "number", "negative", "head", "head exp", "signed", "token", "token exp", "step", "mask", "key",
         "key exp", "key", "key exp", "value", "mamba", "mamba", "channel", "states", "power"],
    )  # fmt: skip
    if kind == "none":
        return None
    if kind in ("number", "negative"):
        number = 0.9 if kind == "number" else -0.7
        return lambda xs, t: number
    if kind == "head":
        a = d.input(h)
        return lambda xs, t: xs[a].sigmoid()[:, None, None]
    if kind == "head exp":
        a = d.input(h)
        return lambda xs, t: torch.exp(-xs[a].exp())[None, :, None, None]
    if kind == "signed":
        a = d.input(h)
        return lambda xs, t: xs[a][:, None, None]
    if kind == "token":
        g = d.sequence(h, change=_resets(d, -math.inf))
        return lambda xs, t: xs[g][:, t].sigmoid()[..., None, None]
    if kind == "token exp":
        change = _resets(d, -math.inf)
        g = d.sequence(h, change=lambda x: change(-x.abs()))
        return lambda xs, t: xs[g][:, t].exp()[:, :, None, None]
    if kind == "step":
        dt, a = d.sequence(h, change=torch.nn.functional.softplus), d.input(h)
        return lambda xs, t: torch.exp(xs[dt][:, t] * -xs[a].exp())[..., None, None]
    if kind == "mask":
        change = _resets(d, 0.0)
        m = d.sequence(change=lambda x: change(torch.ones_like(x)))
        return lambda xs, t: xs[m][:, t, None, None, None]
    if kind in ("key", "value", "states"):
        shape = {"key": (h, k, 1), "value": (h, 1, v), "states": (h, k, v)}[kind]
        g = d.sequence(*shape, change=_resets(d, -math.inf))
        return lambda xs, t: xs[g][:, t].sigmoid()
    if kind == "key exp":
        change = _resets(d, -math.inf)
        g = d.sequence(h, k, change=lambda x: change(torch.nn.functional.logsigmoid(x)))
        return lambda xs, t: xs[g][:, t].exp()[..., None]
    if kind == "mamba":  # dt for each value, A for each value and state
        dt, a = d.sequence(h, v, change=torch.nn.functional.softplus), d.input(h, k, v)
        return lambda xs, t: torch.exp(xs[dt][:, t, :, None, :] * -xs[a].exp())
    if kind == "channel":
        a = d.input(h, k)
        return lambda xs, t: xs[a].sigmoid()[None, :, :, None]
    g = d.sequence(h, k)
    return lambda xs, t: (xs[g][:, t].sigmoid() ** (1 / 4)).unsqueeze(-1)


def _grouped(d: _Draw, width: int) -> Step:
    """Draw a sequence of vectors, one per head or one per group of heads: (batch, heads, width)."""
    groups = d.choose("groups", [d.heads, d.groups])
    x = d.sequence(groups, width)
    times = d.heads // groups
    if d.choose("repeat", ["interleave", "expand"]) == "interleave":
        return lambda xs, t: xs[x][:, t].repeat_interleave(times, 1)

    def expanded(xs: Sequence[torch.Tensor], t: int) -> torch.Tensor:
        own = xs[x][:, t]
        return own[:, :, None].expand(-1, -1, times, -1).reshape(own.shape[0], groups * times, width)

    return expanded


def _added(d: _Draw, key: Step) -> Step:
    """Draw what a step adds to the state."""
    x = d.sequence(d.heads, d.values)
    kind = d.choose("added", ["outer", "outer", "scaled", "bmm", "einsum"])
    if kind == "bmm":
        return lambda xs, t: key(xs, t).unsqueeze(-1) @ xs[x][:, t].unsqueeze(-2)
    if kind == "einsum":
        return lambda xs, t: torch.einsum("bhk,bhv->bhkv", key(xs, t), xs[x][:, t])
    if kind == "scaled":
        b = d.sequence(d.heads)
        return lambda xs, t: xs[b][:, t, :, None, None] * key(xs, t)[..., None] * xs[x][:, t, :, None]
    return lambda xs, t: key(xs, t)[..., None] * xs[x][:, t, :, None, :]


def _reset(d: _Draw) -> Callable[[Sequence[torch.Tensor], int, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Draw how a step adds to the state that it has decayed; some replace it where a mask says so."""
    kind = d.choose("select", [*["no"] * 8, "state", "sum", "fill", "keep"])
    if kind == "no":
        return lambda xs, t, state, new: state + new
    wide = d.choose("mask", ["batch", "head", "state"])
    shape = {"batch": (), "head": (d.heads,), "state": (d.heads, d.keys, d.values)}[wide]
    m = d.sequence(*shape, change=lambda x: x - 0.7)

    def mask(xs: Sequence[torch.Tensor], t: int) -> torch.Tensor:
        own = xs[m][:, t] > 0
        return own.reshape(*own.shape, *[1] * (4 - own.dim()))

    if kind == "state":
        return lambda xs, t, state, new: torch.where(mask(xs, t), new, state + new)
    if kind == "sum":
        return lambda xs, t, state, new: torch.where(~mask(xs, t), state, 1.0) + new
    if kind == "fill":
        return lambda xs, t, state, new: (new.new_zeros(()) + state).masked_fill(mask(xs, t), 0.0) + new
    return lambda xs, t, state, new: torch.where(mask(xs, t), state, state * 0.5 + new)


def _odd(d: _Draw) -> tuple[Callable[[int], int], Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]:
    """Draw what public code has and no rule expects: which step's inputs a step reads; what it does to state and input.

    Inputs read in turns, products with a truth value, lists of axes that are empty.
    """
    kind = d.choose("odd", [*["no"] * 9, "turns", "true", "no axes"])
    period = max(2, d.steps // 2) if kind == "turns" else d.steps
    same = lambda x: x  # noqa: E731
    true, no_axes = lambda x: x * True, lambda x: x.flip(())
    return lambda t: t % period, true if kind == "true" else same, no_axes if kind == "no axes" else same


def _read(d: _Draw) -> Callable[[Sequence[torch.Tensor], int, torch.Tensor], torch.Tensor]:
    """Draw what a step makes of the state."""
    kind = d.choose("read", ["sum", "sum", "einsum", "bmm", "scaled", "state"])
    if kind == "state":
        return lambda xs, t, h: h * 1.0
    query = _grouped(d, d.keys)
    if kind == "einsum":
        return lambda xs, t, h: torch.einsum("bhk,bhkv->bhv", query(xs, t), h)
    if kind == "bmm":
        return lambda xs, t, h: (query(xs, t).unsqueeze(-2) @ h).squeeze(-2)
    if kind == "scaled":
        scale = d.keys**-0.5
        return lambda xs, t, h: ((query(xs, t) * scale)[..., None] * h).sum(2)
    return lambda xs, t, h: (h * query(xs, t)[..., None]).sum(-2)


def _collected(how: str, ys: Tensors) -> torch.Tensor:
    if how == "stack":
        return torch.stack(ys, 1)
    if how == "cat":
        return torch.cat([y.unsqueeze(1) for y in ys], dim=1)
    if how == "moved":
        return torch.stack(ys).movedim(0, 1)
    out = ys[0].new_zeros(ys[0].shape[0], len(ys), *ys[0].shape[1:])
    for t, y in enumerate(ys):
        out[:, t] = y
    return out


def recurrence(r: Random, captured: bool = False) -> Program:
    """Draw a loop over time.

    Args:
        r: Where from.
        captured: Whether it shall be long enough for Dynamo to capture it.
    """
    d = _Draw(r, r.randrange(16, 22) if captured else r.randrange(4, 10))
    decay = _decay(d)
    key = _grouped(d, d.keys)
    added, read = _added(d, key), _read(d)
    order = d.choose("order", ["after", "after", "before", "both"])
    initial = d.choose("initial", ["zeros", "given", "none", "number"])
    first = d.input(d.batch, d.heads, d.keys, d.values) if initial == "given" else None
    written = d.choose("collected", ["stack", "cat", "moved", "write"])
    returned = d.choose("returned", ["outputs", "outputs", "both", "last"])
    reverse = d.choose("reverse", [False, False, True])
    forget = d.choose("forget", [False, False, False, True])
    bonus = d.input(d.heads, d.keys) if order == "both" else None
    d.r = Random(" ".join(["resets", *d.about]))  # of its own, so that all else that a seed names stays what it is
    reset = _reset(d)
    d.r = Random(" ".join(["unexpected", *d.about]))
    turn, true, no_axes = _odd(d)
    d.r = r
    shape, steps = (d.batch, d.heads, d.keys, d.values), d.steps

    def fn(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        starts = {"zeros": xs[0].new_zeros(shape), "given": xs[first or 0], "number": 0.0}
        state: Any = starts.get(initial)
        ys: Tensors = []
        out = None
        for step in reversed(range(steps)) if reverse else range(steps):
            t = turn(step)
            new = no_axes(added(xs, t))
            before = xs[0].new_zeros(shape) if state is None or isinstance(state, float) else state
            if state is None:
                state = new
            else:
                state = true(state)
                if forget and step % 5 == 3:
                    state = state * 0
                if decay is not None:
                    state = decay(xs, t) * state
                state = reset(xs, t, state, new)
            seen = before if order == "before" else state
            if bonus is not None:
                seen = before + xs[bonus][:, :, None] * new
            y = read(xs, t, seen)
            if written == "write":
                if out is None:
                    out = y.new_zeros(y.shape[0], steps, *y.shape[1:])
                out[:, step] = y
            ys.append(y)
        whole = out if out is not None else _collected(written, ys)
        return {"outputs": (whole,), "both": (whole, state), "last": (state,)}[returned]

    gradient = d.choose("gradient", ["", "autograd", "functional"])
    program = Program(fn, d.inputs, " ".join(map(str, [d.dtype, steps, *shape, *d.about])))
    if gradient == "functional" and not captured:
        wanted = tuple(at for at in range(len(d.inputs)) if r.random() < 0.6) or (0,)
        program.fn = lambda *xs: torch.func.grad(lambda *ys: sum(y.sin().sum() for y in fn(*ys)), argnums=wanted)(*xs)
    elif gradient:
        program.gradient = "autograd"
    if gradient != "functional":
        program.hostile = [_hostile(d, r, reverse)]
        before = slice(d.steps // 2, None) if reverse else slice(d.steps // 2)
        program.clean = [slice(None) if time is None else before for time in d.timed]
    return program


def _hostile(d: _Draw, r: Random, reverse: bool) -> Tensors:
    """Put infinities or NaN into one argument, from some step on."""
    inputs = [x.clone() for x in d.inputs]
    at = r.choice([i for i, time in enumerate(d.timed) if time is not None])
    half = range(d.steps // 2, d.steps) if not reverse else range(d.steps // 2)
    for t in half:
        inputs[at][:, t] = r.choice([math.nan, math.inf, -math.inf])
    return inputs


# Several carries --------------------------------------------------------------------------------


# Spellings of a running maximum or minimum, and of other bounds.
_BOUNDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda h, x: torch.relu(h + x),
    "clamp": lambda h, x: torch.clamp(h + x, min=0.1),
    "clamped": lambda h, x: torch.clamp(x, max=h + 0.5),
    "minimum": lambda h, x: torch.minimum(x, h),
    "stack": lambda h, x: torch.stack([x, h, -x]).amax(0),
    "first": lambda h, x: torch.stack([h, x], -1).min(-1).values,
    "sum": lambda h, x: torch.logsumexp(torch.stack([h, x]), 0),
    "decaying": lambda h, x: torch.maximum(0.9 * h, x),
    "rectified": lambda h, x: torch.relu(x.cos() * h + x),
    "both": lambda h, x: torch.clamp(h + x, -1, 0.5),
    "tensors": lambda h, x: torch.clamp(0.5 * h + x, x.sin(), x.cos()),
    "hard": lambda h, x: x - torch.nn.functional.hardtanh(h + x),
}

# Bounds of carries of which each reads another one.
_WITHIN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "relu": lambda h, x: torch.relu(h),
    "maximum": torch.maximum,
    "smooth": torch.logaddexp,
    "flip": lambda h, x: torch.relu(h).flip(-1),  # so do its elements
}


def coupled(r: Random, captured: bool = True) -> Program:
    """Draw a captured loop with two or three carries that read one another, with a complex one, or with a maximum."""
    d = _Draw(r, r.randrange(16, 24) if captured else r.randrange(4, 10))
    kind = d.choose("kind", ["coupled", "coupled", "complex", "maximum", "scaled"])
    wide = d.choose("wide", [(d.heads,), (d.heads, d.values)])
    x, g = d.sequence(*wide), d.sequence(*wide)
    reverse = d.choose("reverse", [False, False, True])
    returned = d.choose("returned", ["outputs", "both", "last"])
    collected = d.choose("collected", ["stack", "cat", "moved", "write"])
    count = d.choose("carries", [2, 2, 3])
    a = d.input(count, count, *wide, scale=0.3)
    varying = d.choose("varying", [False, False, True])
    together = d.choose("together", [True, False])  # all from the old values, or each from what is there
    initial = d.choose("initial", ["zeros", "given"])
    first = d.input(d.batch, *wide)
    d.r = Random(" ".join(["bound", *d.about]))  # of its own, so that all else that a seed names stays what it is
    bound = d.choose("bound", ["largest", *_BOUNDS]) if kind == "maximum" else "largest"
    d.r = Random(" ".join(["within", *d.about]))
    within = d.choose("within", [*["no"] * 3, *_WITHIN])
    d.r = r

    def start(xs: Sequence[torch.Tensor]) -> torch.Tensor:
        return xs[first] if initial == "given" else torch.zeros_like(xs[first])

    def linear(xs: Sequence[torch.Tensor], t: int, carries: Tensors) -> tuple[Tensors, torch.Tensor]:
        new = list(carries)
        for i in range(count):
            read = carries if together else new
            total = xs[x][:, t] if i == 0 else torch.zeros_like(carries[0])
            for j in range(count) if within == "no" else [(i + 1) % count]:
                factor = xs[a][i, j] * xs[g][:, t].tanh() if varying and i == j else xs[a][i, j]
                total = total + (read[j] if within == "smooth" else factor * read[j])
            new[i] = total if within == "no" else _WITHIN[within](total, xs[g][:, t])
        return new, new[0] - 0.5 * new[-1]

    def rotating(xs: Sequence[torch.Tensor], t: int, carries: Tensors) -> tuple[Tensors, torch.Tensor]:
        decay = torch.polar(xs[a][0, 0].sigmoid(), xs[a][0, 1])
        new = decay * carries[0] + (xs[x][:, t] if not varying else torch.complex(xs[x][:, t], xs[g][:, t]))
        return [new, *carries[1:]], new.real + new.imag if together else new.real

    def largest(xs: Sequence[torch.Tensor], t: int, carries: Tensors) -> tuple[Tensors, torch.Tensor]:
        decay = -xs[a][0, 0].exp() if not varying else torch.nn.functional.logsigmoid(xs[g][:, t])
        join = _BOUNDS.get(bound, torch.maximum if together else torch.logaddexp)
        new = join(carries[0] + decay, xs[x][:, t])
        return [new, *carries[1:]], new

    def stabilised(xs: Sequence[torch.Tensor], t: int, carries: Tensors) -> tuple[Tensors, torch.Tensor]:
        top, num, den = carries
        decay = -xs[a][0, 0].exp() if not varying else torch.nn.functional.logsigmoid(xs[g][:, t])
        new = torch.maximum(top + decay, xs[g][:, t])
        keep, take = (top + decay - new).exp(), (xs[g][:, t] - new).exp()
        num, den = keep * num + take * xs[x][:, t], keep * den + take
        return [new, num, den], num / den

    step = {"coupled": linear, "complex": rotating, "maximum": largest, "scaled": stabilised}[kind]

    def fn(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u = v = w = start(xs)
        if kind == "complex":
            u = torch.complex(u, torch.zeros_like(u))
        elif kind == "scaled":
            v = w = torch.zeros_like(u)
        ys: Tensors = []
        out = torch.zeros_like(xs[x]) if collected == "write" else None
        for t in reversed(range(d.steps)) if reverse else range(d.steps):
            (u, v, w), y = step(xs, t, [u, v, w])
            if out is not None:
                out[:, t] = y
            ys.append(y)
        whole = out if out is not None else _collected(collected, ys)
        last = torch.view_as_real(u) if kind == "complex" else u
        return {"outputs": (whole,), "both": (whole, last), "last": (last,)}[returned]

    program = Program(fn, d.inputs, " ".join(map(str, [d.dtype, d.steps, d.batch, *d.about])))
    program.gradient = d.choose("gradient", ["", "autograd"])
    return program
