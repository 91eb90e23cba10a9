"""Recurrences of a graph that are no captured loops: found before autograd (design decision 9).

A backward reads what its forward wrote: decays, products, states. An operator that never writes them must be there
before autograd, and brings its own backward. So Dynamo's graph is traced to ATen without a backward. The passes of that
stage (`refold.compiler.pipeline.PASSES`) run over the traced graph. What they found is put into Dynamo's graph, between
values that Dynamo has a node for. All else of Dynamo's graph stays as it is, in-place operations and `no_grad` among
it.

Inference has no such need. But what is put into Dynamo's graph is traced anew with it, and then values lie in memory as
the operators write them, not as the original did: what reads them needs no copy.

Shapes and strides of all values are those that Dynamo traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from ...ops.torch.registry import OPS
from ..inductor import duplicate
from ..ir.builder import Builder, downstream, extract, is_constant, placeholders, same_strides, upstream, walk
from ..ir.captured_loop import CapturedLoop, captured_loops, loop_nodes
from ..ir.fx import CONVERT, HALF, copied_graph, is_erased, is_made, is_tensor, registers_hook, until_fixed, value
from ..ir.metadata import evaluated, twin, with_strides_of
from ..ir.operators import SCAN
from ..ir.rewrite import Rewrite
from ..ir.source import CALLED, located, name_of
from ..ir.views import is_view
from ..passes.fuse_chunked_deltas import fuse_chunked_deltas
from ..pipeline import Stage, passes_of
from ..pipeline import run as run_pipeline
from ..private import HigherOrderOperator, tree_flatten, tree_leaves, tree_map, tree_unflatten
from ..recurrence import quadratic_form
from ..recurrence.prefix import FEWEST_LEVELS, levels
from ..refusals import Refusal, refused
from .associative_scan import Neighbours
from .body import differentiable
from .mutation import changed_in_place, is_autograd_function, storages, writers, writes, written
from .one_call import run_alone
from .to_aten import environment, to_aten

aten = torch.ops.aten
_DEVICES = ("cpu", "cuda")
# What Dynamo itself writes into a graph for ``with torch.autocast(...)``.
_ENTER: Any = getattr(torch.amp.autocast_mode, "_enter_autocast", None)
_EXIT: Any = getattr(torch.amp.autocast_mode, "_exit_autocast", None)
_PRODUCTS = (aten.mul.Tensor, aten.sum.dim_IntList)
# What takes parts of tensors, and what multiplies, by the names that a Dynamo graph has for it.
_PARTS = {"getitem", "slice", "narrow", "pad", "constant_pad_nd", "select"}
_MULTIPLIES = {"mul", "imul", "multiply", "addcmul"}
_PRODUCES = ("matmul", "bmm", "einsum")
_VMAP = "torch._functorch.predispatch"
# What must be before loops that are no scans, for a search around them, and how many steps show whether that finds
# anything: delta rules in chunks.
_INVERTS = ("solve_triangular", "setitem")
_FIRST_STEPS = 3
LONGEST = 8_000
"""How many nodes loops may have, all steps counted, for a search that takes a trace of them all: some 30 seconds."""


def find_rewrites(
    gm: GraphModule, path: tuple[str, ...], wanted: Callable[[str], bool], notes: list[str], known: bool = False,
    training: bool = True,
) -> BeforeAutograd | None:  # fmt: skip
    """Find what can be rewritten in a Dynamo graph before autograd.

    Args:
        gm: The graph; not changed.
        path: Which part of it, as `refold.compiler.ir.captured_loop.parts` gives them.
        wanted: Which sites may be rewritten.
        notes: Gets a sentence for what cannot be looked at, or cannot be replaced.
        known: Whether it was found before in this graph, with the same inputs, that what is wanted can stand there.
        training: Whether gradients will be taken. If not, passes after autograd look at what stays.

    Returns:
        What was found; None if nothing was.
    """
    part: Any = gm.get_submodule(".".join(path))
    if not _worth_a_look(part, training):
        return None
    if (hooked := next(filter(registers_hook, part.graph.nodes), None)) is not None:
        # What is traced without gradients cannot tell a value from the one whose gradients the hook sees.
        hook = Refusal("hook", f"a hook is registered on `{name_of(hooked.all_input_nodes[0])}`", *located(hooked))
        if training and (note := f"nothing was rewritten before autograd: {hook.advice}") not in notes:
            notes.append(note)
        return None

    def read(*how: Any) -> BeforeAutograd:
        return until_fixed(lambda: BeforeAutograd(duplicate(part), *how), notes)

    found: BeforeAutograd | None = None
    try:
        if nodes := loop_nodes(part):
            if not read(lambda _: True, True, True, _FIRST_STEPS).rewrites:
                return None
            if nodes > LONGEST:
                notes.append(f"nothing was rewritten around a loop that is {nodes} operations long, step by step")
                return None
        found = read(wanted, known, training)
        reasons = [*found.notes, *(f"{what} stays as it is: {reason.advice}" for what, reason in found.refused.items())]
    except Exception as error:  # what cannot be traced once more has no common error
        reason = (str(error).splitlines() or [""])[0]
        reasons = [
            f"nothing was rewritten before autograd: {refused('not-traced', f'{type(error).__name__}: {reason}')}"
        ]
    if training:
        notes += [reason for reason in reasons if reason not in notes]
    return found if found is not None and found.rewrites else None


def _worth_a_look(gm: GraphModule, training: bool) -> bool:
    """Tell whether a graph may hold what the passes look for."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call")]

    def has(*parts: str) -> bool:
        return any(part in _name(node) for node in calls for part in parts)

    if has("grad_increment_nesting", "jvp_increment_nesting"):
        return False  # the graph takes a derivative itself, by ``torch.func``; an operator brings one of its own
    if not training and _may_need_gradients(gm):
        return False  # a value may have one, although no result has
    if loop_nodes(gm):
        loops = captured_loops(gm).values()
        return any(loop.takes_chunks for loop in loops) or (bool(loops) and has(*_INVERTS))
    if not training:  # without a convolution, passes after autograd find the same
        return has("conv1d")
    if any(node.target is SCAN.target or is_made(node) or _is_definition(gm, node) for node in calls):
        return True
    if has("cumsum", "conv", *_INVERTS) or any(map(_weighs_pairs, calls)):
        return True
    return levels(calls, lambda x: _name(x) in _PARTS, lambda x: _name(x) in _MULTIPLIES) >= FEWEST_LEVELS


def _weighs_pairs(node: Node) -> bool:
    """Tell whether a product may be of weights between any two of many tokens."""
    sizes = [size for size in getattr(node.meta.get("example_value"), "shape", ()) if isinstance(size, int)]
    long = [size for size in sizes if size >= quadratic_form.SHORTEST]
    return _name(node) in _PRODUCES and len(set(long)) < len(long)


def _may_need_gradients(gm: GraphModule) -> bool:
    """Tell whether gradients are enabled, in all of a graph or in parts, and an input has one."""
    inside = any(_name(node).endswith("set_grad_enabled") and node.args == (True,) for node in gm.graph.nodes)
    given = [node.meta.get("example_value") for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    return (inside or torch.is_grad_enabled()) and any(map(_asks, given))


def _is_definition(gm: GraphModule, node: Node) -> bool:
    return node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), Neighbours)


def _has_effect(node: Node) -> bool:
    return node.is_impure() or node.op == "call_module" or isinstance(node.target, HigherOrderOperator)


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


class BeforeAutograd:
    """What the passes make of a Dynamo graph before autograd.

    Attributes:
        rewrites: What they found, between values of Dynamo's graph.
        refused: Why something that they found cannot stand in Dynamo's graph.
        notes: What they say.
    """

    def __init__(
        self,
        gm: GraphModule,
        wanted: Callable[[str], bool] = lambda _: True,
        known: bool = False,
        training: bool = True,
        most: int | None = None,
    ) -> None:
        """Trace the graph and run the passes; see `find_rewrites`.

        With ``most``, only so many steps of each loop are traced, to see what is around loops.
        """
        self.gm = gm
        self.rewrites: list[Rewrite] = []
        self.refused: dict[str, Refusal] = {}
        self.notes: list[str] = []
        self._ends = _name_ends(gm)
        self._memory = {node: storages(node) for node in gm.graph.nodes}
        self._writers = writers(gm, cautious=True)  # to each of these memories
        self._maker: dict[Any, Node] = {}  # of each of these memories
        for node, memory in self._memory.items():
            self._maker |= dict.fromkeys(memory - self._maker.keys(), node)
        self._order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self._loops = captured_loops(gm)
        # Whether each value has a gradient, which takes another run of the graph to see.
        self._graph, named, self._constants, self._needs = _trace(gm, training and not known, most)
        if not (training or known):
            self._needs = dict.fromkeys(gm.graph.nodes, False)
        self._traced = {node.name: node for node in copied_graph(self._graph).nodes}  # as it was before any pass
        _widen_products(self._graph)
        for node, aten in named.items():
            if node.op == "placeholder":
                aten.meta[CALLED] = name_of(node)
        self._every = {aten: node for node, aten in reversed(named.items())}  # of equals, the first
        self._named: dict[Node, Node] = {}
        self._roots: list[tuple[Node, Node, str]] = []
        self._standing: set[str] = set()  # operators of the rewrites
        self._values: dict[Node, Any] = {}  # of traced nodes, where copies are left out before them
        with torch.set_grad_enabled(training):  # passes ask whether gradients will be taken of what they make
            passes = [one for one in passes_of(Stage.FORWARD) if most is None or one.apply is fuse_chunked_deltas]
            run_pipeline(self._graph, wanted, self.notes, passes, self._take)

    def _take(self, found: Rewrite) -> None:
        """Note a rewrite that was just made."""
        by_name = {node.name: node for node in self._graph.nodes}
        new, old = by_name[found.result], by_name[found.site]
        self._named = {aten: node for aten, node in self._every.items() if by_name.get(aten.name) is aten}
        here = old in self._named and not self._is_written_later(self._named[old])
        roots = [(self._named[old], new)] if here else [(self._named[x], x) for x in self._readers(new)]
        inputs = self._sources([by_name[name] for name in found.inputs])
        given = [self._named[x] for x in inputs]
        reason = self._reason(given, [root for root, _ in roots]) if self._needs else None
        if reason is not None:
            reason.found_at(found.source, "")
            self.refused[f"{found.name} [{found.site}]"] = reason
            return
        ours = _operators(found.original) - self._traced.keys()
        if not found.timed_alone and ours - self._standing:
            return  # it goes on from a rewrite that cannot stand
        self._standing |= _operators(found.candidate)
        naive = None if ours and not found.timed_alone else self._original(old, inputs)
        self._roots += [(root, x, old.name) for root, x in roots]
        self.rewrites.append(
            dataclasses.replace(
                found,
                original=naive or self._from(inputs, found.original, found.inputs),
                candidate=self._from(inputs, found.candidate, found.inputs),
                inputs=tuple(node.name for node in given),
                multilinear=False,  # gradients are longer sums, which small integers do not make exact
                differentiated=tuple(self._needs[node] for node in given) if self._needs else (),
            )
        )

    def _readers(self, new: Node) -> list[Node]:
        """Return the first nodes after one that Dynamo has a node for."""
        found: dict[Node, None] = {}
        stack = [new]
        while stack:
            for user in stack.pop().users:
                if user in self._named:
                    found[user] = None
                else:
                    stack.append(user)
        return list(found)

    def _sources(self, nodes: Sequence[Node]) -> list[Node]:
        """List what nodes are computed from, as far as Dynamo has nodes for it."""
        seen = walk(reversed(nodes), lambda x: () if x in self._named else reversed(x.all_input_nodes))
        return [node for node in seen if node in self._named]

    def _reason(self, inputs: list[Node], roots: list[Node]) -> Refusal | None:
        """Say why a rewrite between these nodes of Dynamo's graph cannot stand there; None if it can."""

        def because(reason: str, message: str, node: Node, name: Any = None) -> Refusal:
            name = name if isinstance(name, Node) else node
            return Refusal(reason, message.format(f"`{name_of(name)}`"), *located(node))

        if not roots:
            return Refusal("no-place", "its result has no name in the code")
        if (_ENTER is None or _EXIT is None) and any(map(_autocasts, roots)):
            return because("mode", "{} is under autocast, which this PyTorch cannot leave in a graph", roots[0])
        shared = {place for root in roots for place in self._memory[root]}
        for x in self.gm.graph.output_node().all_input_nodes:
            if self._memory[x] & shared and x not in downstream(*roots):
                return because("no-place", "its result shares memory with {}", x)
        for x in inputs:
            if any(self._order[x] > self._order[root] for root in roots):
                return because("no-place", "a result is read before its input {} is computed", x)
        seen, stack = set(inputs), list(roots)
        for node in inputs:
            if changes := self._changes(node):
                return because("in-place", "its input {} is changed in place", changes[0], changes[0].args[0])
        while stack:
            node = stack.pop()
            if node in seen or node in self._constants or node.op == "placeholder":
                continue
            seen.add(node)
            stack.extend(node.all_input_nodes)
            if isinstance(node.target, HigherOrderOperator):
                return because(
                    "higher-order",
                    "{} is computed by an autograd function, or by an operation that takes a function",
                    node,
                )
            changes = self._changes(node)
            if changes and not self._are_before(changes, node, roots):
                return because("in-place", "{} is changed in place", changes[0], changes[0].args[0])
            stack.extend(changes)
            # A loop may return nothing and write what it computes: its own nodes are asked.
            asked = self._loops[node].body.graph.nodes if node in self._loops else [node]
            if (detached := next(filter(self._is_detached, asked), None)) is not None:
                return because("detached", "{} is detached, or computed without gradients", detached)
        return None

    def _is_detached(self, node: Node) -> bool:
        """Tell whether a value has no gradient, although what it is computed of has one."""
        asked = {x for x in node.all_input_nodes if self._needs.get(x)}
        if self._needs.get(node) or not asked:
            return False
        values = tree_leaves([x.meta.get("example_value") for x in (node, *_target(node))])
        if not any(isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in values):
            return False
        return (ran := run_alone(node)) is None or not asked.isdisjoint(ran[2])

    def _changes(self, node: Node) -> list[Node]:
        """List the calls that may write to a node's memory, rather those that are known to write."""
        found = {x for place in self._memory[node] for x in self._writers.get(place, ())}
        return sorted(found, key=lambda x: (not writes(x), self._order[x]))

    def _is_written_later(self, node: Node) -> bool:
        """Tell whether a node stands before a write to it, so that its value in the traced graph is a later one."""
        return any(self._order[x] > self._order[node] for x in self._changes(node))

    def _are_before(self, changes: list[Node], node: Node, roots: list[Node]) -> bool:
        """Tell whether a node's memory is made in the graph, and written only by known calls before the roots.

        The original stays where it is, so that what else reads that memory finds it as before.
        """
        makers = [self._maker[place] for place in self._memory[node] & self._writers.keys()]
        made = all(x.op in ("call_function", "call_method") for x in makers)
        known = all(x in self._loops or writes(x) for x in changes)
        return made and known and all(self._order[x] <= self._order[root] for x in changes for root in roots)

    def _original(self, root: Node, inputs: list[Node]) -> GraphModule | None:
        """Cut out what computed a node, as it was traced; None if Dynamo has no node for it."""
        if root not in self._named:
            return None
        part = extract(self._traced[root.name], [self._traced[x.name] for x in inputs])
        differentiable(part.graph)
        part.recompile()
        return part

    def _from(self, inputs: list[Node], part: GraphModule, names: Sequence[str]) -> GraphModule:
        """Return a part of the graph as a function of the nodes that Dynamo has."""
        graph = Graph()
        copies = placeholders(graph, inputs)
        by_name = {node.name: node for node in self._graph.nodes}
        inner = {
            placeholder: _copied(by_name[name], graph, copies)
            for placeholder, name in zip(part.graph.find_nodes(op="placeholder"), names, strict=True)
        }
        graph.output(graph.graph_copy(part.graph, inner))
        graph.eliminate_dead_code()
        differentiable(graph)
        return GraphModule(part, graph)

    def spliced(self) -> GraphModule:
        """Put what was found into Dynamo's graph, and return it."""
        copies = dict(self._named)
        for root, new, old in sorted(self._roots, key=lambda found: self._order[found[0]]):
            if is_erased(new):
                continue  # a later rewrite replaced all that reads it
            if copies.get(new) is root:
                del copies[new]
            new = self._with_fewer_copies(old, new)
            with self.gm.graph.inserting_before(root), _without_autocast(root):
                found = _copied(new, self.gm.graph, copies)
            root.replace_all_uses_with(found)
        for node in self._ends:
            node.replace_all_uses_with(node.all_input_nodes[0])
            self.gm.graph.erase_node(node)
        self._drop_unseen_loops()
        differentiable(self.gm.graph)
        self.gm.graph.lint()
        self.gm.recompile()
        return self.gm

    def _drop_unseen_loops(self) -> None:
        """Erase loops of which nothing is used any more; whoever compiles the graph would unroll them first."""
        alive = self._alive()
        loops = self._loops.keys() - alive
        dead = downstream(*loops, *(x for call in loops for x in written(self.gm, call))) - alive
        for node in [x for x in reversed(self.gm.graph.nodes) if x in dead]:
            self.gm.graph.erase_node(node)

    def _alive(self) -> set[Node]:
        """Return the nodes that a result or an effect depends on, those that write to memory that is read included."""
        needed, writers = list[Node](), dict[Node, list[Node]]()
        for place, calls in self._writers.items():
            writers.setdefault(self._maker[place], []).extend(calls)
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                needed += [node, *writers.get(node, ())]
            elif node not in self._loops and not writes(node) and _has_effect(node):
                needed.append(node)
        return set(walk(needed, lambda x: [*x.all_input_nodes, *writers.get(x, ())]))

    def _with_fewer_copies(self, old: str, new: Node) -> Node:
        """Replace a node without copies whose only purpose is a memory layout that nothing needs.

        A candidate has the strides of the original, and a dense operand for an operator. Dynamo's graph is traced anew,
        so other strides are fine where no view relies on them and none leaves the graph. Operators take any operand
        whose last axis is dense.
        """
        operators = set(OPS.values())
        for node in upstream(new):
            if node.target is aten.clone.default and node.users and operators.issuperset(x.target for x in node.users):
                dense: Any = node.args[0]
                if self._laid_out(dense).stride(-1) == 1:
                    node.replace_all_uses_with(dense)
        source = _before_copy(new)
        if source is None or old not in self._traced or new.name in self._traced:
            return new
        traced = self._traced[old]
        values = with_strides_of(self._values | {traced: self._laid_out(source)}, traced.graph)
        if values is None:
            return new
        self._values = values
        return source

    def _laid_out(self, node: Node) -> Any:
        """Return the fake value of a node where copies were left out before it."""
        if node.name in self._traced:
            traced = self._traced[node.name]
            return self._values.get(traced, traced.meta["val"])
        return evaluated(node, {x: self._laid_out(x) for x in node.all_input_nodes})


def _name_ends(gm: GraphModule) -> list[Node]:
    """Give each buffer that is written and returned a node after all writes, which can be replaced."""
    output, changed = gm.graph.output_node(), changed_in_place(gm, cautious=True)
    ends = list[Node]()
    for node in output.all_input_nodes:
        if (
            node.op.startswith("call")
            and isinstance(node.meta.get("example_value"), torch.Tensor)
            and storages(node) & changed
        ):
            with gm.graph.inserting_before(output):
                ends.append(gm.graph.call_function(aten.alias.default, (node,)))
            ends[-1].meta = dict(node.meta)
            output.replace_input_with(node, ends[-1])
    return ends


def _operators(gm: GraphModule) -> set[str]:
    """Return the names of the calls of refold's operators."""
    operators = set(OPS.values())
    return {node.name for node in gm.graph.nodes if node.target in operators}


def _before_copy(node: Node) -> Node | None:
    """Find the node of which this is a copy with other strides, or a part; None if it is none."""
    shape, inner = value(node).shape, list(range(value(node).dim()))
    order = inner
    if node.target is aten.permute.default:
        node, order = node.args  # type: ignore[assignment]
    source: Any = node.args[0] if node.args else None
    if node.target is aten.slice.Tensor and source.target is aten.constant_pad_nd.default:
        whole: Any = source.args[0]
        first = node.args[2] == 0 and all(before == 0 for before in source.args[1][::2])
        return whole if first and order == inner and value(whole).shape == shape else None
    if node.target is not aten.clone.default:
        return None
    if source.target is aten.permute.default and [source.args[1][i] for i in order] == inner:
        return source.args[0]
    return source if list(order) == inner else None


def _autocasts(root: Node) -> bool:
    """Tell whether autocast acts on what is inserted before a node."""
    before = itertools.takewhile(lambda node: node is not root, root.graph.nodes)
    targets = [getattr(node.target, "__name__", "") for node in before]
    inside = targets.count("_enter_autocast") > targets.count("_exit_autocast")
    return inside or any(map(torch.is_autocast_enabled, _DEVICES))


@contextlib.contextmanager
def _without_autocast(root: Node) -> Iterator[None]:
    """Keep autocast from changing the dtypes of what is inserted before a node."""
    graph, modes = root.graph, list[Node]()
    if _autocasts(root):
        modes = [graph.call_function(_ENTER, (device, None, False, None)) for device in _DEVICES]
    yield
    for mode in reversed(modes):
        graph.call_function(_EXIT, (mode,))


def _copied(node: Node, graph: Graph, copies: dict[Node, Node]) -> Node:
    """Copy a node, and what it needs that is not there yet."""
    if node not in copies:
        for x in node.all_input_nodes:
            _copied(x, graph, copies)
        copies[node] = graph.node_copy(node, lambda x: copies[x])
        copies[node].meta = {**node.meta, "example_value": node.meta["val"]}
    return copies[node]


def _widen_products(graph: Graph) -> None:
    """Turn a product in 16 bits that is widened into a product of widened factors.

    Autocast sums in float32 what it multiplies in 16 bits, and the sum is a contraction all the same. On a GPU, the sum
    itself does the widening. The graph is only read: what runs, and what rewrites are compared with, is the original.
    """
    widened: dict[Node, Node] = {}

    def widen(node: Node) -> Node:
        """Return a value in float32, converted where it comes from, and there once."""
        if node not in widened:
            build = Builder(node.next)
            if node.op == "call_function" and (is_view(node) or node.target in _PRODUCTS) and not node.kwargs:
                parts = [wide(x) for x in node.args]
                widened[node] = build.restride(build.call(node.target, *parts), value(node))
            else:
                widened[node] = build.call(CONVERT, node, torch.float32)
        return widened[node]

    def wide(x: Any) -> Any:
        return widen(x) if is_tensor(x) and value(x).dtype in HALF else x

    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if node.kwargs.get("dtype") == torch.float32 and value(node.args[0]).dtype in HALF:  # type: ignore[arg-type]
            node.args = (wide(node.args[0]), *node.args[1:])
            node.kwargs = {name: x for name, x in node.kwargs.items() if name != "dtype"}
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if value(node).dtype == torch.float32 and node not in widened.values():
            node.args = tuple(map(wide, node.args))
    for node in graph.find_nodes(op="call_function", target=CONVERT):
        source: Any = node.args[0]
        if value(node).dtype == torch.float32 and value(source).dtype in HALF and widened.get(source) is not node:
            new = widen(source)
            if same_strides(value(new), value(node)):
                node.replace_all_uses_with(new)
    graph.eliminate_dead_code()


def _trace(
    gm: GraphModule, gradients: bool, most: int | None = None
) -> tuple[Graph, dict[Node, Node], set[Node], dict[Node, bool]]:
    """Trace a Dynamo graph to ATen, without a backward.

    An autograd function has a backward of its own, so what it returns is an input of the ATen graph: nothing is known
    of it, and it equals nothing else.

    Returns:
        The ATen graph; what became of each tensor of Dynamo's; which of these are constants; and for each of Dynamo's
        nodes, whether its value has a gradient, if that is asked for. No integer has one.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    examples = [node.meta["example_value"] for node in placeholders]
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment(examples))
    functions = list(filter(is_autograd_function, gm.graph.nodes))
    with mode:
        fakes = [twin(x) for x in examples]
        returned, form = tree_flatten([tree_map(twin, node.meta["example_value"]) for node in functions])
    keeping = _Keeping(gm, most)

    def run(*inputs: Any) -> Any:
        keeping.kept = dict(zip(functions, tree_unflatten(inputs[len(fakes) :], form), strict=True))
        results = keeping.run(*inputs[: len(fakes)])
        given = [keeping.given[node] for node in functions]
        return (results, given), list(keeping.tensors.values())

    traced = to_aten(mode, run, *fakes, *returned, to_read=True)
    graph = fx_graph_cse(traced.graph)
    graph.owning_module = traced
    output: Any = graph.output_node()
    results, values = output.args[0]
    output.args = (results,)
    named = {node: aten for node, aten in zip(keeping.tensors, values, strict=True) if isinstance(aten, Node)}
    constants = {node for node, aten in named.items() if is_constant(aten)}
    graph.eliminate_dead_code()
    alive = set(graph.nodes)
    named = {node: aten for node, aten in named.items() if aten in alive}
    if not gradients:
        return graph, named, constants, {}
    keeping.kept = {}
    with mode, torch.enable_grad():
        pairs = zip(fakes, examples, strict=True)
        keeping.run(*(x.requires_grad_().view_as(x) if _asks(like) else x for x, like in pairs))
    return graph, named, constants, keeping.needs


class _Keeping(Interpreter):
    """Notes each tensor and each size that is given, and what has a gradient, in loops at their last step."""

    def __init__(self, gm: GraphModule, most: int | None = None) -> None:
        super().__init__(gm)
        self.most = most  # how many steps of a loop are run; all if None
        self.tensors: dict[Node, torch.Tensor | torch.SymInt] = {}
        self.needs: dict[Node, bool] = {}
        # What calls return that are not run, and what they are given.
        self.kept: dict[Node, Any] = {}
        self.given: dict[Node, Any] = {}
        # The level of each vmap that is entered: the graph counts them from 1, but it runs within other transforms.
        self._levels: list[int] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one function; a ``vmap`` that Dynamo wrote out has its levels as numbers."""
        name = getattr(target, "__name__", "") if getattr(target, "__module__", "") == _VMAP else ""
        at = {"_add_batch_dim": 2, "_remove_batch_dim": 1}.get(name)
        if at is not None:
            args = (*args[:at], self._levels[args[at] - 1], *args[at + 1 :])
        out = super().call_function(target, args, kwargs)
        if name == "_vmap_increment_nesting":
            self._levels.append(out)
        elif name == "_vmap_decrement_nesting":
            self._levels.pop()
        return out

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module; a loop step by step."""
        loop: Any = self.module.get_submodule(target)
        if not isinstance(loop, CapturedLoop):
            return super().call_module(target, args, kwargs)
        steps = _Keeping(loop.body)
        out = loop.run(steps.run, args, self.most)
        self.needs |= steps.needs
        return out

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        if n in self.kept:
            out, self.given[n] = self.kept[n], self.fetch_args_kwargs_from_env(n)[0][2:]
        else:
            out = super().run_node(n)
        size = n.op == "placeholder" and isinstance(out, torch.SymInt)
        if size or (n.op != "output" and isinstance(out, torch.Tensor) and not is_batchedtensor(out)):
            self.tensors[n] = out
        self.needs[n] = any(map(_asks, tree_leaves((out, [self.env[x] for x in _target(n)]))))
        return out


def _target(node: Node) -> list[Node]:
    """Name the tensor that a call writes to and may not return."""
    return [x for x in node.args[:1] if isinstance(x, Node)] if writes(node) else []


def _asks(x: Any) -> bool:
    while isinstance(x, torch.Tensor) and is_batchedtensor(x):
        x = get_unwrapped(x)
    return isinstance(x, torch.Tensor) and x.requires_grad
