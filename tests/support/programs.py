"""Random programs, rewritten without generating code, and compared with eager.

A program is drawn from a `random.Random`, so that hypothesis can shrink it and a seed can name it. `graph` draws views,
slices, repeats, sums, means and products; `recurrence` draws loops over time. Both return a `Program`: a function, and
tensors to call it with. `failure` traces it, runs the compiler's passes with nothing checked, and says what is wrong.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from refold.compiler.dynamo import captures_loops
from refold.compiler.ir.builder import same_strides
from refold.compiler.ir.metadata import stale
from refold.compiler.pipeline import run
from refold.compiler.recurrence import duality, gated_chunks, lti_chunks
from refold.compiler.session import describe_captured
from refold.report import GraphReport

Tensors = list[torch.Tensor]


@dataclass
class Program:
    """A function of tensors, and what it is called with.

    Attributes:
        fn: The function; returns a tuple of tensors.
        inputs: Its arguments.
        about: What was drawn, for a person.
        gradient: ``""`` for values alone, ``"autograd"`` for a joint graph of values and gradients.
        hostile: More arguments, with infinities and NaN in them.
        clean: For each argument the steps, of its axis 1, that come before these; all if it has no time axis.
    """

    fn: Callable[..., tuple[torch.Tensor, ...]]
    inputs: Tensors
    about: str
    gradient: str = ""
    hostile: list[Tensors] = field(default_factory=list)
    clean: list[slice] = field(default_factory=list)


# Graphs ----------------------------------------------------------------------------------------

_SIZES = (1, 2, 3, 4, 6)
_MOST_ELEMENTS, _MOST_AXES = 4000, 6


def _view(r: Random, x: torch.Tensor) -> torch.Tensor:
    """Draw something that makes no product and no sum."""
    rank = x.dim()
    kind = r.choice(
        ["permute", "unsqueeze", "expand", "flatten", "unflatten", "negate", "repeat", "slice", "narrow", "pad",
         "squeeze", "interleave", "tanh", "flip", "select", "where", "contiguous"]
    )  # fmt: skip
    if kind == "unsqueeze" and rank < _MOST_AXES:
        return x.unsqueeze(r.randrange(rank + 1))
    if kind == "negate":
        return -x
    if kind == "tanh":
        return x.tanh()
    if kind == "squeeze":
        return x.squeeze()
    if kind == "contiguous":
        return x.contiguous()
    if not rank:
        return x
    dim = r.randrange(rank)
    size = x.shape[dim]
    if kind == "permute":
        return x.permute(r.sample(range(rank), rank))
    if kind == "expand" and 1 in x.shape:
        dim = r.choice([d for d in range(rank) if x.shape[d] == 1])
        return x.expand([r.choice([2, 3]) if d == dim else n for d, n in enumerate(x.shape)])
    if kind == "flatten" and dim + 1 < rank:
        return x.flatten(dim, dim + 1)
    if kind == "unflatten" and rank < _MOST_AXES and (parts := [n for n in range(2, size) if size % n == 0]):
        part = r.choice(parts)
        return x.unflatten(dim, (part, size // part))
    if kind == "repeat" and rank < _MOST_AXES:
        return x.repeat([r.choice([1, 1, 2]) for _ in range(rank + r.randrange(2))])
    if kind == "interleave":
        return x.repeat_interleave(2, dim=dim)
    if kind == "slice":
        return x.narrow(dim, 0, size)[(slice(None),) * dim + (slice(None, None, r.choice([1, 2])),)]
    if kind == "narrow" and size > 1:
        start = r.randrange(size - 1)
        return x.narrow(dim, start, r.randrange(1, size - start + 1))
    if kind == "pad":
        return torch.nn.functional.pad(x, [r.randrange(2) if at // 2 == dim else 0 for at in range(2 * rank)])
    if kind == "flip":
        return x.flip(dim)
    if kind == "select":
        return x.select(dim, r.randrange(size))
    if kind == "where":
        return torch.where(torch.arange(size) < r.randrange(size + 1), x.movedim(dim, -1), 0.0)
    return x


def _views(r: Random, x: torch.Tensor, most: int) -> torch.Tensor:
    for _ in range(r.randrange(most)):
        if x.numel() <= _MOST_ELEMENTS and x.dim() < _MOST_AXES:
            x = _view(r, x)
    return x


def _multiplied(r: Random, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dim() + y.dim() <= _MOST_AXES and x.numel() * y.numel() <= 5 * _MOST_ELEMENTS and r.random() < 0.6:
        out = x.reshape([*x.shape, *[1] * y.dim()]) * y
        return out.permute(r.sample(range(out.dim()), out.dim())) if r.random() < 0.5 else out
    pairs = zip(x.shape[::-1], y.shape[::-1], strict=False)
    return x * y if all(a == b or 1 in (a, b) for a, b in pairs) else x


def _combined(r: Random, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Draw a product or a sum."""
    kind = r.choice(
        ["product", "product", "square", "sum", "sum", "mean", "scaled", "matrix", "einsum", "plus", "keep"]
    )
    if kind == "product":
        return _multiplied(r, x, y)
    if kind == "square" and x.dim() > 1:
        a, b = r.sample(range(x.dim()), 2)
        return x * x.transpose(a, b) if x.shape[a] == x.shape[b] else x
    if kind in ("sum", "mean") and x.dim():
        dims = r.sample(range(x.dim()), r.randrange(1, x.dim() + 1))
        return getattr(x, kind)(dims, keepdim=r.random() < 0.3)
    if kind == "scaled":
        return x * r.choice([0.5, -2, 3])
    if kind == "plus":
        return x + x.flip(0) if x.dim() else x
    if kind == "matrix" and x.dim() in (2, 3):
        return x @ x.mT
    if kind == "einsum" and x.dim() and y.dim() and x.shape[-1] == y.shape[-1] and x.dim() + y.dim() <= 5:
        letters = "abcdef"[: x.dim() + y.dim() - 2]
        left, right = letters[: x.dim() - 1], letters[x.dim() - 1 :]
        return torch.einsum(f"{left}z,{right}z->{left}{right}", x, y)
    return x


def graph(r: Random) -> Program:
    """Draw a graph of views, sums and products."""
    shapes = [[r.choice(_SIZES) for _ in range(r.randrange(1, 4))] for _ in range(r.randrange(1, 4))]
    seed, steps = r.randrange(2**30), r.randrange(4, 12)

    def fn(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own, pool = Random(seed), list(inputs)
        for _ in range(steps):
            x = own.choice(pool)
            if x.numel() > _MOST_ELEMENTS:
                continue
            pool.append(_combined(own, _views(own, x, 4), _views(own, own.choice(pool), 3)))
        return tuple(x + 0 for x in pool[-3:])

    generator = torch.Generator().manual_seed(seed)
    dtype = r.choice([torch.float32, torch.float64])
    inputs = [torch.randint(-2, 3, shape, generator=generator).to(dtype) for shape in shapes]
    return Program(fn, inputs, f"graph {seed} of {steps} steps on {shapes}")


# Recurrences ------------------------------------------------------------------------------------


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
    d.r = r
    shape, steps = (d.batch, d.heads, d.keys, d.values), d.steps

    def fn(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        starts = {"zeros": xs[0].new_zeros(shape), "given": xs[first or 0], "number": 0.0}
        state: Any = starts.get(initial)
        ys: Tensors = []
        out = None
        for t in reversed(range(steps)) if reverse else range(steps):
            new = added(xs, t)
            before = xs[0].new_zeros(shape) if state is None or isinstance(state, float) else state
            if state is None:
                state = new
            else:
                if forget and t % 5 == 3:
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
                out[:, t] = y
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


# Judging ----------------------------------------------------------------------------------------

_TABLE = select_decomp_table()


class _SmallChunks:
    """Let scans over chunks use chunks so small that a short loop has several."""

    homes = ((gated_chunks, 3), (duality, 3), (lti_chunks, 3))

    def __enter__(self) -> None:
        self.saved = [home.CHUNK for home, _ in self.homes]
        for home, size in self.homes:
            home.CHUNK = size

    def __exit__(self, *_: object) -> None:
        for (home, _), size in zip(self.homes, self.saved, strict=True):
            home.CHUNK = size


@dataclass
class Outcome:
    """What became of one program: what is wrong with it, empty if nothing, and the names of the rewrites."""

    failure: str
    rewrites: list[str]


def traced(program: Program) -> GraphModule:
    """Trace a program to ATen; with gradients, to the joint graph of values and gradients."""
    if not program.gradient:
        fn = torch.func.functionalize(program.fn, remove="mutations")
        return make_fx(fn, tracing_mode="fake", decomposition_table=_TABLE)(*program.inputs)
    leaves = tuple(x.detach().requires_grad_() for x in program.inputs)
    own = lambda *xs: tuple(y.clone() for y in program.fn(*xs))  # noqa: E731  # no result may be a view
    return aot_export_joint_simple(own, leaves, trace_joint=True, decompositions=_TABLE)


def judge(program: Program, passes: Callable[[torch.fx.Graph], Any] = run) -> Outcome:
    """Rewrite a program with nothing checked, and compare it with what it was in float64."""
    gm = traced(program)
    before = copy.deepcopy(gm)
    with _SmallChunks():
        rewrites = passes(gm.graph)
    gm.recompile()
    names = [f"{rewrite.name}: {rewrite.detail}" for rewrite in rewrites]
    if wrong := stale(gm.graph):
        return Outcome(f"metadata: {wrong}", names)
    for values in [program.inputs, *program.hostile]:
        clean = program.clean if program.gradient and values is not program.inputs else []
        if wrong := _differs(before, gm, [*values, *_tangents(before, len(values))], clean):
            return Outcome(wrong, names)
    return Outcome("", names)


def judge_captured(program: Program) -> Outcome:
    """Let Dynamo capture a program's loops, replace them by scans with nothing checked, and compare in eager mode."""
    names: list[str] = []

    @captures_loops
    def backend(gm: GraphModule, _: Any) -> GraphModule:
        entry = GraphReport(index=0)
        with _SmallChunks():
            gm = describe_captured(entry, gm)
        names.extend(f"{row.name}: {row.detail}" for row in entry.rewrites)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(program.fn, backend=backend)
    for values in [program.inputs, *program.hostile]:
        runs = (_with_gradients(fn, xs, bool(program.gradient)) for fn, xs in
                ((program.fn, [x.double() for x in values]), (program.fn, values), (compiled, values)))  # fmt: skip
        clean = program.clean if program.gradient and values is not program.inputs else []
        if wrong := _compared(*runs, clean):
            return Outcome(wrong, names)
    return Outcome("", names)


def _with_gradients(fn: Callable[..., Any], values: Tensors, gradient: bool) -> Tensors:
    leaves = [x.detach().clone().requires_grad_(gradient) for x in values]
    results = list(fn(*leaves))
    if not gradient:
        return results
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in results]
    gradients = torch.autograd.grad(results, leaves, weights, allow_unused=True, materialize_grads=True)
    return [x.detach() for x in (*results, *gradients)]


def _tangents(gm: GraphModule, given: int) -> Tensors:
    """Draw what a joint graph takes besides its arguments, as it was traced."""
    generator, drawn = torch.Generator().manual_seed(0), []
    for node in gm.graph.find_nodes(op="placeholder")[given:]:
        like = node.meta["val"]
        values = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        drawn.append(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(values))
    return drawn


def _run(gm: GraphModule, values: Tensors) -> Tensors:
    with torch.no_grad():
        return torch.utils._pytree.tree_leaves(Interpreter(gm).run(*values))


def _in_float64(gm: GraphModule) -> GraphModule:
    from refold.compiler.ir.evaluate import computing_in

    return computing_in(gm, torch.float64)


def _differs(before: GraphModule, after: GraphModule, values: Tensors, clean: list[slice]) -> str:
    exact = _run(_in_float64(before), [x.double() if x.is_floating_point() else x for x in values])
    original, got = _run(before, values), _run(after, values)
    # Code is generated for the strides that the trace says. Eager's may be others: where several orders of axes are
    # possible, PyTorch's elementwise operations do not choose the same one with fake tensors.
    traced_as = [node and node.meta["val"] for node in before.graph.output_node().args[0]]
    for o, like, y in zip(original, traced_as, got, strict=True):
        if o is not None and not (same_strides(y, o) or same_strides(y, like)):
            return f"strides {y.stride()}, were {o.stride()}"
    return _compared(exact, original, got, clean)


def _compared(exact: Tensors, original: Tensors, got: Tensors, clean: list[slice]) -> str:
    """Say which result is wrong: further from float64 than rounding explains, or not finite where eager is.

    Of gradients, the last results, only the steps that are clean count: at others, eager itself may multiply what is
    not finite by a zero, or leave it out, depending on how the loop is written.
    """
    for at, (r, o, y) in enumerate(zip(exact, original, got, strict=True)):
        if o is None:
            continue
        place = at - (len(got) - len(clean))
        if place >= 0 and clean[place] != slice(None):
            r, o, y = (x[:, clean[place]] for x in (r, o, y))
        if (o.shape, o.dtype) != (y.shape, y.dtype):
            return f"result {at} is {y.dtype} {tuple(y.shape)}, was {o.dtype} {tuple(o.shape)}"
        good = o.isfinite() & r.isfinite()
        if bool((~y.isfinite() & good).any()):
            return f"result {at} has {int((~y.isfinite() & good).sum())} elements that are not finite and were"
        if bool((y.isfinite() & ~o.isfinite() & r.isnan()).any()):
            return f"result {at} has {int((y.isfinite() & o.isnan()).sum())} finite elements that were not a number"
        r, o, y = (torch.where(good, x.double(), 0.0) for x in (r, o, y))
        scale = float(r.abs().max()) if r.numel() else 0.0
        error, own = (float((x - r).abs().max()) if r.numel() else 0.0 for x in (y, o))
        unit = torch.finfo(original[at].dtype).eps
        if not error <= 64 * own + 256 * unit * (scale or 1.0):
            return f"result {at} is off by {error / (scale or 1.0):.1e}, eager by {own / (scale or 1.0):.1e}"
    return ""
