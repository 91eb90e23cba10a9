"""Random programs, rewritten without generating code, and compared with eager (design decision 21).

A program is drawn from a `random.Random`, so that hypothesis can shrink it and a seed can name it. `random_graphs`
draws views, sums and products, `random_loops` loops over time, and `random_states` loops with states in lists and
objects. All return a `Program`: a function, and tensors to call it with. `judge` traces it, runs the compiler's passes
with nothing checked, and says what is wrong. `trial` runs layers that people write through the whole compiler.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from refold.compiler.dynamo import captures_loops
from refold.compiler.ir.builder import same_strides
from refold.compiler.ir.metadata import stale
from refold.compiler.ir.views import is_view
from refold.compiler.pipeline import run
from refold.compiler.recurrence import forms, lti_chunks
from refold.compiler.session import describe_captured
from refold.report import GraphReport
from refold.verify.numerics import in_strides

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


_TABLE = select_decomp_table()


class _SmallChunks:
    """Let scans over chunks use chunks so small that a short loop has several."""

    sizes = ((forms, "FEW", 3), (lti_chunks, "CHUNK", 3))

    def __enter__(self) -> None:
        self.saved = [getattr(home, name) for home, name, _ in self.sizes]
        for home, name, size in self.sizes:
            setattr(home, name, size)

    def __exit__(self, *_: object) -> None:
        for (home, name, _), size in zip(self.sizes, self.saved, strict=True):
            setattr(home, name, size)


@dataclass
class Outcome:
    """What became of one program: what is wrong with it, empty if nothing, and the names of the rewrites."""

    failure: str
    rewrites: list[str]


def traced(program: Program) -> GraphModule:
    """Trace a program to ATen; with gradients, to the joint graph of values and gradients."""
    if program.gradient:
        leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in program.inputs)
        own = lambda *xs: tuple(y.clone() for y in program.fn(*xs))  # noqa: E731  # no result may be a view
        gm = aot_export_joint_simple(own, leaves, trace_joint=True, decompositions=_TABLE)
    else:
        fn = torch.func.functionalize(program.fn, remove="mutations")
        gm = make_fx(fn, tracing_mode="fake", decomposition_table=_TABLE)(*program.inputs)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        gm.graph.erase_node(node)  # what Inductor never sees
    return gm


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
        with _SmallChunks():
            gm, found = describe_captured(gm, GraphReport(index=0))
        names.extend(f"{row.name}: {row.detail}" for row in found.rewrites)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(program.fn, backend=backend)
    gradient = bool(program.gradient)
    for values in [program.inputs, *program.hostile]:
        runs = [
            _with_gradients(fn, xs, gradient)
            for fn, xs in ((program.fn, widened(values)), (program.fn, values), (compiled, values))
        ]
        clean = program.clean if gradient and values is not program.inputs else []
        if compared(*runs, clean):
            generator = torch.Generator().manual_seed(0)
            moved = [_with_gradients(program.fn, nudged(values, generator), gradient) for _ in range(3)]
            if wrong := compared(*runs, clean, moved):
                return Outcome(wrong, names)
    return Outcome("", names)


def _with_gradients(fn: Callable[..., Any], values: Tensors, gradient: bool) -> Tensors:
    leaves = [x.detach().clone().requires_grad_(gradient and x.is_floating_point()) for x in values]
    results = list(fn(*leaves))
    if not gradient:
        return results
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in results]
    asked = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(results, asked, weights, allow_unused=True, materialize_grads=True)
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


def widened(values: Tensors) -> Tensors:
    wide = [x.double() if x.is_floating_point() else x.cdouble() if x.is_complex() else x for x in values]
    return [in_strides(y, x.stride()) for x, y in zip(values, wide, strict=True)]


class _Rounding(Interpreter):
    """Moves each result by up to one rounding, at random: what is left of a difference is then as noisy as it may be.

    Values that cancel may do so exactly in one order of summation and not in another. An element that is zero in eager
    mode by such luck says nothing of how exact eager mode is (Parker 1997, Monte Carlo arithmetic).
    """

    def __init__(self, gm: GraphModule, seed: int) -> None:
        super().__init__(gm)
        self.generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node."""
        y = super().run_node(n)
        if n.op != "call_function" or not isinstance(y, torch.Tensor) or is_view(n):
            return y
        return nudged([y], self.generator)[0]


def nudged(values: Tensors, generator: torch.Generator) -> Tensors:
    """Move what is floating-point by up to one rounding, at random."""

    def nudge(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        move = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1
        return torch.empty_like(x).copy_(x.double() * (1 + torch.finfo(x.dtype).eps * move))

    return [nudge(x) for x in values]


def _in_float64(gm: GraphModule) -> GraphModule:
    from refold.compiler.ir.evaluate import computing_in

    return computing_in(gm, torch.float64)


def _differs(before: GraphModule, after: GraphModule, values: Tensors, clean: list[slice]) -> str:
    exact = _run(_in_float64(before), widened(values))
    original, got = _run(before, values), _run(after, values)
    # Code is generated for the strides that the trace says. Eager's may be others: where several orders of axes are
    # possible, PyTorch's elementwise operations do not choose the same one with fake tensors.
    traced_as = [node and node.meta["val"] for node in before.graph.output_node().args[0]]
    for o, like, y in zip(original, traced_as, got, strict=True):
        if o is not None and not (same_strides(y, o) or same_strides(y, like)):
            return f"strides {y.stride()}, were {o.stride()}"
    return compared(exact, original, got, clean) and compared(exact, original, got, clean, _moved(before, values))


def _moved(gm: GraphModule, values: Tensors) -> list[Tensors]:
    """Return the results of a graph when all that it computes is moved by up to one rounding."""
    with torch.no_grad():
        return [torch.utils._pytree.tree_leaves(_Rounding(gm, seed).run(*values)) for seed in range(3)]


def compared(exact: Tensors, original: Tensors, got: Tensors, clean: list[slice], moved: Sequence[Tensors] = ()) -> str:
    """Say which result is wrong: further from float64 than rounding explains, or not finite where eager is.

    Of gradients, the last results, only the steps that are clean count: at others, eager itself may multiply what is
    not finite by a zero, or leave it out, depending on how the loop is written.
    """
    for at, (r, o, y) in enumerate(zip(exact, original, got, strict=True)):
        if o is None:
            continue
        place = at - (len(got) - len(clean))
        others = [run[at] for run in moved]
        if place >= 0 and clean[place] != slice(None):
            r, o, y, *others = (x[:, clean[place]] for x in (r, o, y, *others))
        if (o.shape, o.dtype) != (y.shape, y.dtype):
            return f"result {at} is {y.dtype} {tuple(y.shape)}, was {o.dtype} {tuple(o.shape)}"
        good = o.isfinite() & r.isfinite()
        if bool((~y.isfinite() & good).any()):
            return f"result {at} has {int((~y.isfinite() & good).sum())} elements that are not finite and were"
        if place < 0 and bool((y.isfinite() & ~o.isfinite() & r.isnan()).any()):
            return f"result {at} has {int((y.isfinite() & o.isnan()).sum())} finite elements that were not a number"
        r, o, y, *others = (torch.where(good, x if x.is_complex() else x.double(), 0.0) for x in (r, o, y, *others))
        scale = float(r.abs().max()) if r.numel() else 0.0
        error, *owns = (float((x - r).abs().max()) if r.numel() else 0.0 for x in (y, o, *others))
        own = max(one for one in owns if not math.isnan(one))
        dtype = original[at].dtype
        unit = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
        if not error <= 64 * own + 256 * unit * (scale or 1.0):
            return f"result {at} is off by {error / (scale or 1.0):.1e}, eager by {own / (scale or 1.0):.1e}"
    return ""
