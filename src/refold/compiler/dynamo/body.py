"""The body of a captured loop, computed for all steps at once.

The body is traced to ATen once, with the number of the step as a symbol. Each of its values is then the same at every
step, or a tensor with a time axis, or an affine function of a carry. Carries that are affine in themselves are scans
(`refold.compiler.recurrence.states`). Nothing here is proportional to the number of steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..ir.builder import walk
from ..ir.captured_loop import CapturedLoop
from ..ir.fx import CONVERT, SCATTERS, arg, is_random, is_tensor, is_zero, take_place, value
from ..ir.metadata import twin
from ..ir.source import expression, located, name_of
from ..private import tree_flatten, tree_leaves, tree_unflatten
from ..recurrence.affine import Affine, Loop
from ..recurrence.delta import RankOne, read_rank_one
from ..recurrence.delta_form import Corrections
from ..recurrence.forms import CORRECTED
from ..recurrence.scatters import content
from ..recurrence.states import LoopVectorizer
from ..recurrence.vectorize import NotALoop, Value, vectorize_node
from .growing import take_parts
from .induction_variable import InductionVariable, depends_on_iteration
from .kept_in_place import keep
from .one_call import Operations
from .positions import slice_of
from .read_back import Origin, promote
from .step_arithmetic import OF_TENSORS, Counting, is_number
from .to_aten import environment, to_aten

aten = torch.ops.aten
prims = torch.ops.prims

# Larger constants of a body are not written into the graph number by number.
_CONSTANT = 4096


@dataclass(frozen=True)
class Slices:
    """Where a step's item comes from: a position of an axis of a tensor, ``start + step * k``.

    With a ``width``, positions are parts of that size, and the item keeps the axis.
    """

    dim: int
    start: int
    step: int
    width: int | None = None

    def item(self, x: torch.Tensor, k: Any) -> torch.Tensor:
        """Return a step's item."""
        at = self.start + self.step * k
        return x.select(self.dim, at) if self.width is None else x.narrow(self.dim, at * self.width, self.width)


@dataclass
class StepWrites:
    """What all steps write to a tensor: positions of an axis, and the content's node."""

    operand: int
    dim: int
    start: int
    step: int
    width: int
    content: Node


@dataclass
class Traced:
    """A loop's body in ATen.

    Attributes:
        module: Takes the step's number and all operands.
        mode: Where its fake values live.
        number: The step's number as a symbol.
        step: The placeholder of that.
        placeholders: Those of the operands: what is carried, then the rest.
        results: What it returns: the new carries, then the rest.
        writes: What it writes.
        carried: How many carries there are.
        names: What to call the operands, the carried ones first.
        added: Where the carries begin that the loop itself has not; they are the last ones.
        fixed: What the last operands are that the loop itself has not.
        finals: Operands that hold a carry at last: (operand, index in the results).
        left: Carries that a step changes in place before it puts other tensors in their place.
        elements: Carries that are elements of others and only computed for all steps at once: new value and name.
    """

    module: GraphModule
    mode: FakeTensorMode
    number: InductionVariable
    step: Node
    placeholders: list[Node]
    results: list[Any]
    writes: list[StepWrites]
    carried: int
    names: tuple[str, ...]
    added: list[Origin]
    fixed: list[Origin]
    finals: list[tuple[int, int]]
    left: list[int]
    elements: dict[Node, tuple[Any, str]] = field(default_factory=dict)

    @property
    def own(self) -> list[Node]:
        """The placeholders of the operands that the loop itself has."""
        placeholders = self.placeholders[: len(self.placeholders) - len(self.fixed)]
        return placeholders[: self.carried - len(self.added)] + placeholders[self.carried :]


def trace(loop: CapturedLoop, count: Any, operands: Sequence[Any], sequences: Sequence[Slices]) -> Traced:
    """Trace a loop's body.

    Args:
        loop: The loop.
        count: How many steps it has.
        operands: Example values: the carried, the tensors that items are slices of, the rest.
        sequences: For each item, which slice.

    Raises:
        NotALoop: The body changes its arguments otherwise than by writing slices that no step reads.
    """
    # What is decided on sizes that are symbols is decided for the compiled program.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment([count, *operands]))
    with mode:
        fakes = [twin(x) for x in operands]
    number = InductionVariable(mode.shape_env, count)  # type: ignore[arg-type]
    split = loop.carried, loop.carried + len(sequences)

    def step(run: Callable[..., Any], k: Any, *xs: Any) -> Any:
        state, tensors, rest = xs[: split[0]], xs[split[0] : split[1]], xs[split[1] :]
        items = [s.item(x, k) for x, s in zip(tensors, sequences, strict=True)]
        return run(*state, k, *items, *rest)

    watched = _Watched(loop.body)
    with mode, torch.no_grad():
        step(watched.run, 0, *map(twin, fakes))
    if (drawing := watched.draws) is not None:
        raise NotALoop("randomness", f"`{expression(drawing)}` draws random numbers in the loop", drawing)
    module = to_aten(mode, functools.partial(step, Interpreter(loop.body).run), number.symint, *fakes)
    with mode:
        take_parts(module.graph)
    number.take_guards()
    if not number.hold(count) if isinstance(count, torch.SymInt) else number.steps(count) < count:
        raise NotALoop("step-number", number.decided(count))
    graph = module.graph
    graph.eliminate_dead_code()
    counted, *placeholders = graph.find_nodes(op="placeholder")
    promoted = promote(graph, placeholders, number)
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    at, own = loop.carried, list(placeholders)
    kept, changed, left = keep(graph, own, at, range(at + len(sequences), len(own)), results)
    carries = [*promoted.carries, *kept]
    for last, (state, *_) in zip(
        (placeholders[at - 1] if at else counted, *(x[0] for x in carries)), carries, strict=False
    ):
        last.append(state)
    placeholders[at:at] = [state for state, *_ in carries]
    placeholders += [node for node, _ in promoted.before]
    results[at:at] = [new for _, new, _ in carries]
    finals = [(i, i) for i in changed]
    finals += [(origin.operand, at + i) for i, (*_, origin) in enumerate(carries) if origin.dim is None]
    graph.output_node().args = (tuple(results),)
    graph.eliminate_dead_code()
    writes = [_write(node, own, number) for node in graph.find_nodes(op="call_function", target=aten.copy_.default)]
    return Traced(
        module, mode, number, counted, placeholders, results, writes, loop.carried + len(carries),
        tuple(loop.names),
        [origin for *_, origin in carries], [origin for _, origin in promoted.before],
        finals,
        left,
    )  # fmt: skip


class _Watched(Interpreter):
    """Runs a graph, and notes a node that draws random numbers."""

    draws: Node | None = None

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        with Operations() as ran:
            out = super().run_node(n)
        if any(is_random(func) for func, _ in ran.seen):
            self.draws = n
        return out


def _write(copy: Any, placeholders: list[Node], number: InductionVariable) -> StepWrites:
    """Read a change of an argument as a write to positions that move with the step."""
    written: Any = copy.args[0]
    scatter: Any = copy.args[1]
    if written not in placeholders or not isinstance(scatter, Node) or scatter.target not in SCATTERS:
        raise NotALoop("in-place", "a step changes a tensor in place", copy)
    if scatter.args[0] is not written:
        raise NotALoop("write-uneven", "a step writes to several places of a tensor", scatter)
    rank, dim = value(scatter).dim(), arg(scatter, 2, "dim", 0)
    single = scatter.target is aten.select_scatter.default
    place = slice_of(scatter, 3, single, number)
    if place is None:
        raise NotALoop("write-uneven", "the slices that the steps write overlap or leave gaps", scatter)
    return StepWrites(placeholders.index(written), dim % rank, *place, content(scatter))  # type: ignore[arg-type]


class Body(LoopVectorizer):
    """Emits a body's values, for all steps, into a graph that holds the loop's operands."""

    def __init__(self, count: Any, traced: Traced, operands: Sequence[Node], anchor: Node, training: bool) -> None:
        super().__init__()
        self.count, self.number, self.training = count, traced.number, training
        self.module = traced.module
        self.emit.at(anchor)
        self.names = dict(zip(traced.placeholders, traced.names, strict=False))
        self.names |= {node: name for node, (_, name) in traced.elements.items()}
        self.carried = dict(zip(traced.placeholders[: traced.carried], traced.results, strict=False))
        self.carried |= {node: new for node, (new, _) in traced.elements.items()}
        self.initial = dict(zip(traced.placeholders, operands, strict=True))
        self.written = {traced.own[write.operand] for write in traced.writes}
        self.counting = Counting(self.emit, traced.step, count)
        self._memo: dict[Node, Value | Affine] = {}
        self._solved: dict[Node, Loop] = {}
        self._coupled = self._dependencies()
        self._corrected = self._corrections()

    def _corrections(self) -> dict[Node, RankOne]:
        """Return the carries that a step corrects under a key, each with what the step does, and for what reads it."""
        found: dict[Node, RankOne] = {}
        for state, new in self.carried.items():
            if not isinstance(new, Node) or new is state or len(self._coupled[state]) > 1:
                continue
            if (step := read_rank_one(self.module.graph, state, new)) is not None:
                found |= dict.fromkeys((state, step.new, new, *(query.node for query in step.queries)), step)
        return found

    def _named(self, node: Node) -> str:
        return self.names.get(node) or name_of(node)

    def over_time(self, x: Any) -> Node:
        """Return a value of the body with a time axis in front."""
        if not isinstance(x, Node):
            raise NotALoop("carry-not-tensor", f"the loop returns {x!r}, which is not a tensor")
        found = self._closed(self._value(x))
        if isinstance(found, Affine):
            raise NotALoop("carries-coupled", f"{found.loop.name} and another carry depend on each other")
        return found.with_time(self.emit, self.count)

    def last(self, x: Any) -> Node:
        """Return the last step's value."""
        if x in self.initial:
            return self.over_time_last(x)
        step = self._corrected.get(x)
        if step is not None and x in (step.new, self.carried[step.state]):
            self._correct(step)
            last = self._solved[step.state].last
            assert last is not None
            return last
        found = self._closed(self._value(x))
        assert isinstance(found, Value)
        if not found.has_time:
            return found.node
        loop = next((loop for loop in self._solved.values() if loop.steps[0] is x), None)
        if loop is not None and loop.last is not None:
            return loop.last
        return self.emit.call(aten.select.int, found.node, 0, -1)

    def over_time_last(self, x: Node) -> Node:
        """Return an argument as the last step passes it on."""
        if x in self.carried and self.carried[x] is not x:
            return self.emit.call(aten.select.int, self.over_time(x), 0, -1)
        return self.initial[x]

    def _value(self, node: Node) -> Value | Affine:
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt) and not depends_on_iteration(size):
            return Value(size)
        if node in self.written:
            raise NotALoop("shared-memory", f"a step reads `{self._named(node)}`, which steps write to")
        if node in self._corrected and node not in self._memo:
            self._correct(self._corrected[node])
            if node not in self._memo:
                name = self._solved[self._corrected[node].state].name
                raise NotALoop("states-read", f"{name} is read otherwise than by a sum over its keys after the step")
        if node in self.carried and self.carried[node] is not node:
            return self._carry(node)
        if node in self.initial:
            return Value(self.initial[node])
        if node not in self._memo:
            for argument, new in self.carried.items():
                if new is node and argument not in self._solved and argument.users:
                    self._carry(argument)  # this very node, as a scan
            if node not in self._memo:
                try:
                    self._memo[node] = self._step(node)
                except NotALoop as refusal:
                    refusal.found_at(*located(node))
                    raise
        return self._closed(self._memo[node])

    def _carry(self, node: Node) -> Value | Affine:
        loop = self._solved.get(node)
        if loop is None and len(self._coupled[node]) > 1:
            self._solve_together(self._coupled[node])
            loop = self._solved[node]
        if loop is None:
            new = self.carried[node]
            if not isinstance(new, Node):
                raise NotALoop("carry-not-tensor", f"the carry `{self.names[node]}` is not a tensor")
            loop = self._solved[node] = Loop(
                (new,), initial=self.initial[node], count=self.count, variable=self.names[node]
            )
            found = self._value(new)
            if isinstance(found, Affine):
                if found.loop is not loop:
                    raise NotALoop("carries-coupled", f"{loop.name} and {found.loop.name} depend on each other")
                self._memo[new] = self._scan(loop, found)
            else:  # nothing is carried further than one step
                if value(loop.initial).shape != value(new).shape:
                    raise NotALoop(
                        "initial-state",
                        f"{loop.name} has the shape {tuple(value(loop.initial).shape)} before the loop, and "
                        f"{tuple(value(new).shape)} after a step",
                    )
                loop.states = found.with_time(self.emit, self.count)
                first = self.emit.call(aten.unsqueeze.default, loop.initial, 0)
                inner = self.emit.call(aten.slice.Tensor, loop.states, 0, 0, self.count - 1)
                loop.previous = self.emit.call(aten.cat.default, [first, inner], 0)
        return Affine(loop) if loop.previous is None else Value(loop.previous, True)

    def _correct(self, step: RankOne) -> None:
        """Compute what reads the states of a carry that steps correct, and the last one."""
        if step.state in self._solved:
            return
        new, initial = self.carried[step.state], self.initial[step.state]
        loop = Loop((new,), initial=initial, count=self.count, variable=self.names[step.state])
        start = None if is_zero(initial) else self._tensor(initial, new)
        facts = Corrections(self.emit, step, loop.length, start, self._steady)
        if (reason := CORRECTED.refuses(facts)) is not None:
            raise NotALoop("decay-sign", f"{loop.name}: {reason}", step.new)
        loop.operator = CORRECTED.operator.name
        self._solved[step.state] = loop
        found = CORRECTED.emit(facts)
        assert found is not None
        reads, last = found
        loop.last = self.emit.cast(last, value(new).dtype)
        self._memo |= {node: Value(y, True) for node, y in reads.items()}
        self.loops.append(loop)

    def _steady(self, node: Node) -> Value:
        found = self._value(node)
        assert isinstance(found, Value)  # what a correction is made of depends on no carry that depends on it
        return found

    def _solve_together(self, carries: Sequence[Node]) -> None:
        """Compute the states of carries that depend on one another."""
        loops = []
        for node in carries:
            new = self.carried[node]
            if not isinstance(new, Node) or not is_tensor(new):
                raise NotALoop("carry-not-tensor", f"the carry `{self.names[node]}` is not a tensor")
            loops.append(Loop((new,), initial=self.initial[node], count=self.count, variable=self.names[node]))
        for node, loop in zip(carries, loops, strict=True):
            loop.system = tuple(loops)
            self._solved[node] = loop
        bodies = [self._value(self.carried[node]) for node in carries]
        self._system(loops, bodies)
        for loop in loops:
            if loop.steps[0] not in self.carried:
                self._memo[loop.steps[0]] = Value(loop.states, True)

    def _dependencies(self) -> dict[Node, list[Node]]:
        """Return for each carry all that depend on it and that it depends on, itself first in order."""
        carried = {node: [new] for node, new in self.carried.items() if isinstance(new, Node)}
        reach: dict[Node, set[Node]] = {}
        for node, new in self.carried.items():
            found = set(walk([new], lambda x: [*x.all_input_nodes, *carried.get(x, ())])) if node in carried else set()
            reach[node] = found & self.carried.keys()
        return {
            node: [x for x in self.carried if x is node or (x in reach[node] and node in reach[x])]
            for node in self.carried
        }

    def _step(self, node: Any) -> Value | Affine:
        if node.op == "get_attr":
            return self._constant(getattr(self.module, node.target))
        if node.target in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            return self._value(node.args[0])
        if is_random(node.target):
            raise NotALoop("randomness", f"`{expression(node)}` draws random numbers in the loop")
        if (read := self._read(node)) is not None:
            return read
        if any(isinstance(leaf, Node) for leaf in tree_leaves(node.kwargs)):
            raise NotALoop("no-iteration-form", f"`{expression(node)}` gets a tensor by keyword")
        flat, spec = tree_flatten(node.args)
        if any(map(is_number, flat)):
            return self._numbered(node)
        leaves: list[Any] = [self._value(x) if isinstance(x, Node) else Value(x) for x in flat]
        if any(isinstance(x, Affine) for x in leaves):
            carried = next(x for x in leaves if isinstance(x, Affine))
            if node.target is aten.detach.default and self.training:
                raise NotALoop("detached", f"{carried.loop.name} is detached")
            return self._affine(node, leaves, carried.loop, self.count)
        if any(x.has_time for x in leaves):
            packed = [x if isinstance(x.node, (Node, tuple)) else x.node for x in leaves]
            return vectorize_node(self.emit, node, list(tree_unflatten(packed, spec)), self.count)
        plain = tree_unflatten([x.node for x in leaves], spec)
        return Value(self.emit.call(node.target, *plain, **node.kwargs))

    def _constant(self, x: torch.Tensor) -> Value:
        """Write out a constant that the body makes of Python's numbers."""
        if x.numel() > _CONSTANT:
            raise NotALoop("python-constant", f"a step makes a tensor from {x.numel()} Python numbers")
        return Value(self.emit.call(torch.tensor, x.tolist(), dtype=x.dtype, device=x.device))

    def _numbered(self, node: Any) -> Value | Affine:
        """Run an operation that takes a number which the step computes."""
        emit, like = self.emit, value(node)
        if node.target in (aten.full.default, aten.scalar_tensor.default) and is_number(node.args[-1]):
            filled = self.counting.over_time(node.args[-1], like.dtype, like.device)
            return Value(emit.expand(filled.padded(emit, like.dim()), [self.count, *like.shape]), True)
        if node.target not in OF_TENSORS or len(node.args) != 2 or node.kwargs:
            raise NotALoop(
                "number-arithmetic", f"a step passes its number to {node.target}: `{expression(node)}`", node
            )
        leaves = self.counting.combined(node, [x if is_number(x) else self._value(x) for x in node.args])
        for x in leaves:
            if isinstance(x, Affine):
                return self._affine(node, leaves, x.loop, self.count)
        out = emit.call(OF_TENSORS[node.target], *(x.padded(emit, like.dim()) for x in leaves))
        return Value(emit.cast(out, like.dtype), True)

    def _read(self, node: Any) -> Value | None:
        """Match a slice whose position moves with the step."""
        if node.target not in (aten.select.int, aten.slice.Tensor) or not any(
            isinstance(x, Node) for x in node.args[1:]
        ):
            return None
        source = self._value(node.args[0])
        if isinstance(source, Affine) or source.has_time:
            raise NotALoop("read-computed", f"a step slices `{self._named(node.args[0])}`, which the loop computes")
        single = node.target is aten.select.int
        place = slice_of(node, 2, single, self.number)
        if place is None:
            raise NotALoop(
                "read-uneven",
                f"`{self._named(node.args[0])}` is read at positions that are not evenly spaced",
            )
        start, step, width = place
        if not step or (width != 1 and abs(step) > width):
            name = self._named(node.args[0])
            raise NotALoop("read-uneven", f"`{name}` is read in slices with gaps between them")
        return self._slices(
            source.node, node.args[1] % value(source.node).dim(), start, step, width, self.count, not single
        )


def differentiable(graph: Graph) -> None:
    """Replace operations that autograd does not know by their equals that it knows."""
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", "") != "prims" and node.target is not aten.copy.default:
            continue
        with graph.inserting_before(node):
            if node.target is aten.copy.default:  # the values of the second in the form of the first
                like = node.meta["val"]
                new = graph.call_function(aten._to_copy.default, node.args[1:2], {"dtype": like.dtype})
                new = graph.call_function(aten.expand.default, (new, list(like.shape)))
            elif node.target is prims.rev.default:
                new = graph.call_function(aten.flip.default, node.args)
            elif node.target is CONVERT:
                new = graph.call_function(aten._to_copy.default, node.args[:1], {"dtype": node.args[1]})
            elif node.target is prims.iota.default:
                kinds = {key: node.kwargs[key] for key in ("dtype", "device")}
                new = graph.call_function(aten.arange.default, node.args, kinds)
            else:
                raise NotALoop("no-gradient", f"{node.target} has no gradient: `{expression(node)}`", node)
        take_place(new, node)
