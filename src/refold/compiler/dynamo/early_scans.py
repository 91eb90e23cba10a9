"""Recurrences that a Dynamo graph holds otherwise than as a loop become scans, before autograd.

``torch``'s ``associative_scan`` is a network that combines neighbours in time: written out by Dynamo
(``combine_mode="generic"``), or one operation with a graph of its own. So are scans by doubling and by trees that
people write themselves; `refold.compiler.recurrence.prefix` reads them all. After autograd, or after Inductor has
decomposed what moves tensors, they would be hard to read.

What moves, multiplies and adds tensors is traced to ATen, apart from the rest of the graph. Recurrences are replaced
there, and what has changed is put back: from the nodes that both programs read to those that depend on the change.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..inductor import duplicate
from ..ir.builder import Builder, downstream, upstream
from ..ir.fx import concrete, value
from ..ir.rewrite import Rewrite, source_line
from ..recurrence.affine import Affine, Loop, LoopVectorizer
from ..recurrence.prefix import Found, recurrences
from ..recurrence.replace import SCANS
from ..recurrence.vectorize import Value
from .body import differentiable, environment, to_aten, twin
from .call_site import example, storage
from .loop import Neighbours, is_scan
from .mutation import changed_in_place, is_tracked

aten = torch.ops.aten

# A network of eight steps has this many levels; what is combined less often is none.
_FEWEST = 3
_SLICES = {"getitem", "slice", "narrow", "pad", "constant_pad_nd"}
_PRODUCTS = {"mul", "mul_", "imul", "multiply", "addcmul", "addcmul_"}
_IN_PLACE = {"setitem", "copy_", "mul_", "imul", "addcmul_", "add_", "iadd"}
_TRACED = _SLICES | _PRODUCTS | _IN_PLACE | {
    "select", "cat", "concat", "concatenate", "stack", "view", "reshape", "flatten", "unflatten", "unsqueeze",
    "squeeze", "movedim", "moveaxis", "transpose", "permute", "flip", "swapaxes", "chunk", "split", "unbind", "clone",
    "contiguous", "expand", "to", "float", "size", "type_as", "zeros_like", "ones_like", "new_zeros", "new_ones",
    "zeros", "ones", "add", "sub", "neg", "exp",
}  # fmt: skip
_VMAP = "torch._functorch.predispatch"
WHY = "its states are combined pair by pair, in passes over all of memory"


# PyTorch's own operation ----------------------------------------------------------------------


def define_scans(gm: GraphModule, everywhere: bool) -> GraphModule:
    """Replace PyTorch's ``associative_scan`` operation by its definition.

    Inductor has no code for it on the CPU. Its gradient is that of independent results, so that a factor gets none of
    the gradient of what it multiplied (torch 2.13): in training the definition is differentiated instead.

    Args:
        gm: A Dynamo graph; not changed.
        everywhere: Whether it is replaced on all devices, not only on the CPU.
    """

    def to_replace(node: Any) -> bool:
        return is_scan(node) and (everywhere or example(node.args[1][0]).device.type == "cpu")

    if not any(map(to_replace, gm.graph.nodes)):
        return gm
    gm = duplicate(gm)
    for node in list(filter(to_replace, gm.graph.nodes)):
        name = f"{node.name}_definition"
        gm.add_submodule(name, _definition(gm, node))
        with gm.graph.inserting_before(node):
            call = gm.graph.call_module(name, (*node.args[1], *node.args[2]))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _definition(gm: GraphModule, node: Any) -> Neighbours:
    combine, xs, _ = node.args
    return Neighbours(gm.get_submodule(str(combine.target)), len(xs))  # type: ignore[arg-type]


# Scans --------------------------------------------------------------------------------------------


@dataclass
class EarlyScan:
    """A part of a Dynamo graph, as a scan.

    Attributes:
        gm: The graph.
        rewrite: The record of it, which the check and the timing use.
        roots: The nodes that it computes, and for each of them what reads it.
        after: The node that it goes after.
        traced: All nodes that may have become needless.
    """

    gm: GraphModule
    rewrite: Rewrite
    roots: dict[Node, list[Node]]
    after: Node
    traced: list[Node]

    def splice(self) -> None:
        """Put the scan into the graph."""
        graph, copies = self.gm.graph, dict[Any, Node]()
        source = self.rewrite.candidate.graph
        by_name = {node.name: node for node in graph.nodes}
        for placeholder, name in zip(source.find_nodes(op="placeholder"), self.rewrite.inputs, strict=True):
            copies[placeholder] = by_name[name]
        with graph.inserting_before(self.after.next):
            for node in source.nodes:
                if node.op == "call_function":
                    copies[node] = graph.node_copy(node, lambda x: copies[x])
                    trace = next(iter(self.roots)).meta.get("stack_trace", "")
                    copies[node].meta = {"example_value": node.meta["val"], "stack_trace": trace}
        made: Any = source.output_node().args[0]
        depending: set[Node] = set()
        for (root, readers), new in zip(self.roots.items(), made, strict=True):
            for reader in readers:
                reader.replace_input_with(root, copies[new])
            depending |= downstream(copies[new])
        _erase_unread(graph, self.traced, depending)


def early_scans(gm: GraphModule, training: bool) -> list[EarlyScan]:
    """Find the recurrences of a Dynamo graph that are no loops.

    Args:
        gm: The graph; only `EarlyScan.splice` changes it.
        training: Whether autograd comes after.
    """
    nodes = _candidates(gm)
    traced = _trace(gm, nodes) if nodes else None
    if traced is None:
        return []
    after = copy.deepcopy(traced.graph)
    after.owning_module = traced.graph.owning_module
    twins = dict(zip(traced.graph.nodes, after.nodes, strict=True))
    details = _rewrite(after)
    return _Changes(gm, nodes, traced, after, twins).parts(details, training) if details else []


def _candidates(gm: GraphModule) -> list[Node]:
    """Return the nodes that move, multiply and add tensors; none if they are too few for a network."""
    known = [node for node in gm.graph.nodes if _is_known(gm, node)]
    changed, inside = changed_in_place(gm, cautious=True), set[Node]()
    others = {storage(x) for node in set(gm.graph.nodes) - set(known) if _is_change(node) for x in node.all_input_nodes}
    for node in known:
        given = [x for x in node.all_input_nodes if not (x.op == "get_attr" and is_scan(node))]
        # What is in a tensor that is changed in place elsewhere depends on when it is read. An operator's own gradient
        # is none that a graph can take.
        if not any(
            storage(x) in (others if x in inside else changed)
            or is_tracked(example(x))
            or not (x in inside or isinstance(example(x), (torch.Tensor, int, torch.SymInt)))
            for x in given
        ):
            inside.add(node)
    nodes = [node for node in known if node in inside]
    return nodes if _levels(nodes) >= _FEWEST else []


def _levels(nodes: Sequence[Node]) -> int:
    """Return how often what is multiplied was sliced from what was multiplied before."""
    levels: dict[Node, int] = {}
    sliced: dict[Node, bool] = {}
    most = 0
    for node in nodes:
        name = _name(node)
        if is_scan(node) or node.op == "call_module":
            return _FEWEST
        levels[node] = max((levels.get(x, 0) for x in node.all_input_nodes), default=0)
        sliced[node] = name in _SLICES or any(sliced.get(x, False) for x in node.all_input_nodes)
        if name in _PRODUCTS and sliced[node]:
            levels[node], sliced[node] = levels[node] + 1, False
        most = max(most, levels[node])
    # Where slices are written to, what reads them next is not seen to depend on that.
    in_place = sum(_name(node) in _IN_PLACE for node in nodes)
    return most + in_place


def _is_known(gm: GraphModule, node: Node) -> bool:
    if node.op == "call_module":
        return isinstance(gm.get_submodule(str(node.target)), Neighbours)
    if node.op not in ("call_function", "call_method"):
        return False
    vmapped = getattr(node.target, "__module__", "") == _VMAP
    return is_scan(node) or vmapped or (_name(node) in _TRACED and "out" not in node.kwargs)


def _is_change(node: Node) -> bool:
    return node.op.startswith("call") and _name(node).endswith("_") and not _name(node).endswith("__")


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


@dataclass
class _Traced:
    """Nodes of a Dynamo graph in ATen.

    Attributes:
        graph: The ATen graph. Its results are what other nodes of the Dynamo graph read.
        sources: For each placeholder, the node that it stands for.
        values: For each of the nodes, its value after the last of them; less what is not needed.
        read: Those of the nodes that others read, in the order of results.
    """

    graph: Graph
    sources: dict[Node, Node]
    values: dict[Node, Node]
    read: list[Node]


def _trace(gm: GraphModule, nodes: Sequence[Node]) -> _Traced | None:
    """Trace nodes to ATen; None if that is not possible."""
    inside, opaque = set(nodes), list[Node]()
    graph, copies, root = Graph(), dict[Node, Node](), torch.nn.Module()
    for x in dict.fromkeys(x for node in nodes for x in node.all_input_nodes):
        if x not in inside and isinstance(example(x), (torch.Tensor, int, torch.SymInt)):
            copies[x] = graph.placeholder(x.name)
            opaque.append(x)
    for node in nodes:
        if node.op == "call_module" or is_scan(node):
            module = _definition(gm, node) if is_scan(node) else gm.get_submodule(str(node.target))
            operands: Any = (*node.args[1], *node.args[2]) if is_scan(node) else node.args  # type: ignore[misc]
            root.add_module(node.name, module)
            copies[node] = graph.call_module(node.name, tuple(copies[x] for x in operands))
        else:
            copies[node] = graph.node_copy(node, lambda x: copies[x])
    inner = _within_vmap(nodes)
    if inner and _last_changes(nodes):
        return None  # levels of functorch are counted from the outermost, and changes in place need one
    kept = [node for node in nodes if isinstance(example(node), torch.Tensor) and node not in inner]
    graph.output(tuple(copies[node] for node in kept))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment([example(x) for x in opaque]))
    with mode:
        fakes = [twin(example(x)) for x in opaque]
    run = Interpreter(GraphModule(root, graph)).run
    try:
        module = to_aten(mode, run, *fakes, functional=not inner, keep=("stack",))
    except Exception:  # whatever is unusual about these operations: nothing is read
        return None
    traced = fx_graph_cse(module.graph)
    traced.owning_module = module
    if traced.find_nodes(op="call_function", target=aten.copy_.default):
        return None  # something that comes from elsewhere is changed
    output: Any = traced.output_node()
    values = dict(zip(kept, output.args[0], strict=True))
    sources = dict(zip(traced.find_nodes(op="placeholder"), opaque, strict=True))
    read = [node for node in kept if any(user not in inside for user in node.users)]
    output.args = (tuple(values[node] for node in read),)
    traced.eliminate_dead_code()
    return _Traced(traced, sources, {node: x for node, x in values.items() if not x._erased}, read)


def _within_vmap(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes that compute within a ``vmap``; what leaves it does not count."""
    inner, depth = set[Node](), 0
    for node in nodes:
        name, own = _name(node), getattr(node.target, "__module__", "") == _VMAP
        depth += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
        if (own or depth) and name != "_remove_batch_dim":
            inner.add(node)
    return inner


def _last_changes(nodes: Sequence[Node]) -> dict[Any, Node]:
    """Return for each storage that is changed in place the node that changes it last."""
    return {storage(node.args[0]): node for node in nodes if _name(node) in _IN_PLACE}  # type: ignore[arg-type]


def _rewrite(graph: Graph) -> dict[str, str]:
    """Replace recurrences of an ATen graph by scans, in place; return by the name of each scan what it is."""
    details: dict[str, str] = {}

    def note(detail: str) -> None:
        details.update({x.name: detail for x in graph.nodes if x.target in SCANS and x.name not in details})

    note("")
    done: set[Any] = set()
    for found in recurrences(list(graph.nodes)):
        if (what := (found.a, found.b, found.reverse)) not in done and found.node.users:
            done.add(what)
            note(_scan(found).described + (", against time" if found.reverse else ""))
    graph.eliminate_dead_code()
    names = {x.name for x in graph.nodes}
    return {name: detail for name, detail in details.items() if detail and name in names}


def _scan(found: Found) -> Loop:
    """Replace a value that is a whole recurrence by a scan."""
    root, vectorizer = found.node, LoopVectorizer()
    vectorizer.emit.at(root)
    emit, rank = vectorizer.emit, value(root).dim()

    def over_time(x: Node) -> Value:
        own = found.dim - (rank - value(x).dim())
        return Value(emit.permute(x, [own, *(d for d in range(value(x).dim()) if d != own)]), True)

    step = emit.call(aten.select.int, root, found.dim, 0)
    loop = Loop((step,), reverse=found.reverse, initial=0, count=value(root).shape[found.dim])
    factors = found.a
    if factors is not None and found.exponent:
        factors = emit.call(aten.exp.default, factors)
    scale = None if factors is None else over_time(factors)
    states: Any = vectorizer._scan(loop, Affine(loop, scale, over_time(found.b)))
    new = emit.permute(states.node, [*range(1, found.dim + 1), 0, *range(found.dim + 1, rank)])
    build = Builder(root)
    root.replace_all_uses_with(build.restride(new, value(root)), delete_user_cb=lambda user: user is not step)
    root.graph.erase_node(step)
    return loop


# Back into Dynamo's graph -------------------------------------------------------------------------


class _Changes:
    """What has changed in an ATen graph, cut out along nodes that the Dynamo graph has, too."""

    def __init__(
        self, gm: GraphModule, nodes: list[Node], traced: _Traced, after: Graph, twins: dict[Node, Node]
    ) -> None:
        self.gm, self.nodes, self.traced, self.after, self.twins = gm, nodes, traced, after, twins
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.changes = _last_changes(nodes)
        given, live = set(twins.values()), upstream(after.output_node())
        self.dirty: set[Node] = set()
        for x in after.nodes:
            if x in live and (x not in given or any(y in self.dirty for y in x.all_input_nodes)):
                self.dirty.add(x)
        self.clean = {
            twins[x]: node
            for x, node in (*traced.sources.items(), *((x, node) for node, x in traced.values.items()))
            if twins[x] in live and twins[x] not in self.dirty and storage(node) not in self.changes
        }
        output: Any = after.output_node().args[0]
        self.now = {node: twins[x] for node, x in traced.values.items() if twins[x] in live}
        self.now |= dict(zip(traced.read, output, strict=True))

    def parts(self, details: dict[str, str], training: bool) -> list[EarlyScan]:
        """Return one part for all that depends on the same scans."""
        groups: list[tuple[set[Node], dict[Node, list[Node]]]] = []
        for node, readers in self._roots().items():
            scans = {x for x in upstream(self.now[node]) if x.target in SCANS and x in self.dirty}
            joined = [group for group in groups if group[0] & scans]
            groups = [group for group in groups if group not in joined]
            merged: dict[Node, list[Node]] = {}
            for group in joined:
                merged |= group[1]
            groups.append((scans.union(*(group[0] for group in joined)), merged | {node: readers}))
        found = []
        for scans, roots in groups:
            detail = "; ".join(
                dict.fromkeys(details[x.name] for x in self.after.nodes if x in scans and x.name in details)
            )
            if detail and (part := self._part(roots, detail, training)) is not None:
                found.append(part)
        return found

    def _roots(self) -> dict[Node, list[Node]]:
        """Return the first nodes that depend on what is new, each with what reads it."""
        read: dict[Node, list[Node]] = {}
        for node in self.traced.values:
            after = self.order[self.changes.get(storage(node), node)]
            readers = [user for user in node.users if self.order[user] > after]
            if readers and self.now.get(node) in self.dirty:
                read[node] = readers
        firsts = {self.now[node] for node in read}
        roots = {}
        for node, readers in read.items():
            changed = self.changes.get(storage(node), node)
            if self.order[node] < self.order[changed] or not (upstream(self.now[node]) - {self.now[node]}) & firsts:
                roots[node] = readers
        return roots

    def _part(self, roots: dict[Node, list[Node]], detail: str, training: bool) -> EarlyScan | None:
        ends, stop = [self.now[node] for node in roots], dict(self.clean)
        while True:
            inputs = _cut(ends, stop)
            # One that follows from others is computed: what is drawn for a check must not contradict itself.
            following = [x for x in inputs if (upstream(x) - {x}) & set(inputs)]
            if not following:
                break
            for x in following:
                del stop[x]
        back = {new: old for old, new in self.twins.items()}
        starts = {back[x]: self.clean[x] for x in inputs}
        own = [self.traced.values[node] for node in roots]
        starts |= {x: self.traced.sources[x] for x in _cut(own, {**starts, **self.traced.sources}) if x not in starts}
        takes = list(starts.values())
        changed = [self.changes[storage(node)] for node in roots if storage(node) in self.changes]
        last = max((*takes, *changed), key=self.order.__getitem__)
        if any(self.order[reader] <= self.order[last] for readers in roots.values() for reader in readers):
            return None
        first = next(iter(roots))
        rewrite = Rewrite(
            name="scan without a loop",
            site=first.name,
            source=source_line(first),
            why=WHY,
            detail=detail,
            original=_module(self.traced.graph, list(starts), own),
            candidate=_module(self.after, [self.twins[x] for x in starts], ends),
            inputs=tuple(node.name for node in takes),
            multilinear=False,
            terms=max(concrete(n) for x in ends for n in value(x).shape),
            spread=0.1,
            differentiated=tuple(_has_gradient(example(node)) for node in takes) if training else (),
        )
        return EarlyScan(self.gm, rewrite, roots, last, self.nodes)


def _cut(ends: Sequence[Node], stop: Container[Node]) -> list[Node]:
    """Return where a walk up from some nodes stops."""
    found, seen, stack = list[Node](), set[Node](), list(ends)
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x in stop:
            found.append(x)
        else:
            stack += x.all_input_nodes
    return found


def _module(graph: Graph, starts: Sequence[Node], ends: Sequence[Node]) -> GraphModule:
    """Copy what lies between some nodes of a graph and others, which it returns as a tuple."""
    part, copies = Graph(), dict[Node, Node]()
    for x in starts:
        copies[x] = part.placeholder(x.name)
        copies[x].meta = dict(x.meta)
    needed, stack = set[Node](), list(ends)
    while stack:
        x = stack.pop()
        if x not in needed and x not in copies:
            needed.add(x)
            stack += x.all_input_nodes
    for x in graph.nodes:
        if x in needed:
            copies[x] = part.node_copy(x, lambda y: copies[y])
    part.output(tuple(copies[x] for x in ends))
    differentiable(part)
    return GraphModule(graph.owning_module, part)  # type: ignore[arg-type]


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()


def _erase_unread(graph: Graph, nodes: Sequence[Node], after: set[Node]) -> None:
    """Erase nodes that nothing reads any more, changes in place among them.

    Args:
        graph: The Dynamo graph.
        nodes: The nodes.
        after: What depends on the new scan, and no longer on memory that was changed.
    """
    nodes = [node for node in nodes if not node._erased]
    inside = set(nodes)
    changes: dict[Any, list[Node]] = {}
    blocks: dict[Node, list[Node]] = {}  # a vmap is alive or not as a whole
    block: list[Node] = []
    depth = 0
    for node in nodes:
        name = _name(node)
        if name in _IN_PLACE:
            changes.setdefault(storage(node.args[0]), []).append(node)  # type: ignore[arg-type]
        if depth or getattr(node.target, "__module__", "") == _VMAP:
            depth += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
            block.append(node)
            blocks[node] = block
            if name == "_vmap_decrement_nesting" and not depth:
                block = []
    live: set[Node] = set()
    stack = [node for node in graph.nodes if node not in inside]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += node.all_input_nodes
            stack += [] if node in after else changes.get(storage(node), [])
            stack += blocks.get(node, [])
    for node in reversed(nodes):
        if node not in live:
            graph.erase_node(node)
