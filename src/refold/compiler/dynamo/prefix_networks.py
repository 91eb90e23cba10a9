"""Recurrences that a Dynamo graph computes as parallel prefix networks become scans.

``torch``'s ``associative_scan`` is such a network: written out by Dynamo (``combine_mode="generic"``), or one operation
with a graph that combines two neighbours. So are scans by doubling and by trees that people write themselves. What they
have in common is how they move and combine neighbours in time; `refold.compiler.recurrence.prefix` reads it.

This happens before autograd, so that the scan has its own backward. The operations that move, multiply and add tensors
are traced to ATen, apart from the rest of the graph; what they start from is opaque.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from ..ir.builder import Builder, between, downstream, extract, upstream
from ..ir.index import is_tensor, value
from ..ir.rewrite import Rewrite, source_line
from ..recurrence.affine import Affine, Carries, Loop
from ..recurrence.prefix import Found, recurrences
from ..recurrence.vectorize import NotALoop, Value
from .body import differentiable, environment, to_aten, twin
from .loop import Neighbours, is_scan
from .mutation import changed_in_place

aten = torch.ops.aten

# A network of eight steps has this many slices and products; a graph with fewer has none.
_FEWEST = 4
_MOVES = {
    "getitem", "slice", "narrow", "select", "cat", "concat", "concatenate", "stack", "pad", "constant_pad_nd", "view",
    "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "movedim", "moveaxis", "transpose", "permute", "flip",
    "swapaxes", "chunk", "split", "unbind", "clone", "contiguous", "expand", "to", "float", "size", "zeros_like",
    "ones_like", "new_zeros", "new_ones", "zeros", "ones", "setitem", "copy_",
}  # fmt: skip
_PRODUCTS = {"mul", "mul_", "imul", "multiply", "addcmul", "addcmul_"}
_SUMS = {"add", "add_", "iadd", "exp"}
_IN_PLACE = {"setitem", "copy_", "mul_", "imul", "addcmul_", "add_", "iadd"}
_VMAP = "torch._functorch.predispatch"


def define_scans(gm: GraphModule, everywhere: bool) -> GraphModule:
    """Replace PyTorch's ``associative_scan`` operation by its definition.

    Inductor has no code for it on the CPU. Its gradient is that of independent results, so that a factor gets none of the
    gradient of what it multiplied (torch 2.13): in training the definition is differentiated instead.

    Args:
        gm: A Dynamo graph.
        everywhere: Whether it is replaced on all devices, not only on the CPU.
    """
    calls = [
        node for node in gm.graph.nodes if is_scan(node) and (everywhere or _example(node.args[1][0]).device.type == "cpu")
    ]
    if not calls:
        return gm
    from ..inductor import duplicate

    gm = duplicate(gm)
    for node in [node for node in gm.graph.nodes if node.name in {call.name for call in calls}]:
        _define(gm, node)
    gm.recompile()
    return gm


def _define(gm: GraphModule, node: Any) -> Node:
    combine, xs, rest = node.args
    name = f"{node.name}_definition"
    gm.add_submodule(name, Neighbours(gm.get_submodule(str(combine.target)), len(xs)))  # type: ignore[arg-type]
    with gm.graph.inserting_before(node):
        call = gm.graph.call_module(name, (*xs, *rest))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    gm.graph.erase_node(node)
    return call


@dataclass
class Network:
    """One recurrence of a Dynamo graph, as a scan."""

    gm: GraphModule
    root: Node
    rewrite: Rewrite
    users: list[Node]
    after: Node
    moved: list[Node]

    def splice(self) -> None:
        """Put the scan where the network was."""
        graph, copies = self.gm.graph, dict[Any, Node]()
        source = self.rewrite.candidate.graph
        by_name = {node.name: node for node in graph.nodes}
        for placeholder, name in zip(source.find_nodes(op="placeholder"), self.rewrite.inputs, strict=True):
            copies[placeholder] = by_name[name]
        with graph.inserting_after(self.after):
            for node in source.nodes:
                if node.op == "call_function":
                    copies[node] = graph.node_copy(node, lambda x: copies[x])
                    copies[node].meta = {
                        "example_value": node.meta["val"],
                        "stack_trace": self.root.meta.get("stack_trace", ""),
                    }
                    graph._insert = copies[node].append
        new: Any = copies[source.output_node().args[0]]  # type: ignore[index]
        for user in self.users:
            user.replace_input_with(self.root, new)
        _drop(self.gm, self.moved, downstream(new))


def networks(gm: GraphModule, training: bool) -> list[Network]:
    """Find the recurrences of a Dynamo graph that are computed as networks."""
    moved = _moved(gm)
    if moved is None:
        return []
    made = _trace(gm, moved)
    if made is None:
        return []
    graph, inputs, results = made
    found = {one.node: one for one in recurrences(list(graph.nodes))}
    if not found:
        return []
    whole = [node for node in moved if results.get(node) in found]
    within = {x for one in found.values() for x in between(one.node, [one.b, *([] if one.a is None else [one.a])])}
    inner = _between_levels(moved)
    changed = _changes(gm, moved)
    out: list[Network] = []
    covered: set[Any] = set()
    order = {x: i for i, x in enumerate(gm.graph.nodes)}
    for node in whole:
        # The value is known at the end: earlier than the last change of its memory it is another one.
        last = changed.get(_storage(node), node)
        later = [
            user
            for user in node.users
            if order[user] > order[last] and user not in inner and results.get(user) not in within
        ]
        if not later:
            continue
        if results[node] in covered:
            continue
        try:
            rewrite = _rewrite(found[results[node]], inputs, graph, training)
        except NotALoop:
            continue
        rewrite_site = node.name
        object.__setattr__(rewrite, "site", rewrite_site)
        out.append(Network(gm, node, rewrite, later, last, moved))
        this = found[results[node]]
        covered |= {x for x, one in found.items() if (one.a, one.b) == (this.a, this.b)}
    return out


def _moved(gm: GraphModule) -> list[Node] | None:
    """Return the nodes that move, multiply and add tensors; None if they are too few for a network."""
    nodes: list[Node] = []
    slices = products = 0
    tensors: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), Neighbours) or is_scan(node):
            slices, products = slices + _FEWEST, products + _FEWEST
        elif node.op in ("call_function", "call_method"):
            name = str(getattr(node.target, "__name__", node.target))
            vmapped = getattr(node.target, "__module__", "") == _VMAP
            if not vmapped and (name not in _MOVES | _PRODUCTS | _SUMS or node.kwargs.get("out") is not None):
                continue
            slices += name in ("getitem", "slice", "narrow", "pad")
            products += name in _PRODUCTS
        else:
            continue
        nodes.append(node)
        tensors.add(node)
    return nodes if min(slices, products) >= _FEWEST else None


def _example(node: Any) -> Any:
    return node.meta.get("example_value")


def _storage(node: Node) -> Any:
    example = _example(node)
    if not isinstance(example, torch.Tensor) or is_batchedtensor(example):  # within a vmap
        return id(node)
    return example.untyped_storage()._cdata


def _changes(gm: GraphModule, moved: Sequence[Node]) -> dict[Any, Node]:
    """Return the last node that changes each storage."""
    last: dict[Any, Node] = {}
    for node in moved:
        name = getattr(node.target, "__name__", node.target)
        if name in _IN_PLACE and node.args:
            last[_storage(node.args[0])] = node  # type: ignore[arg-type]
    return last


def _trace(gm: GraphModule, moved: Sequence[Node]) -> tuple[Graph, dict[Node, Node], dict[Node, Node]] | None:
    """Trace nodes to ATen.

    Returns:
        The graph; its placeholders, as the nodes they stand for; and for each of the nodes its value there, at the end.
    """
    inside = set(moved)
    changed = changed_in_place(gm, cautious=True)
    changes = _changes(gm, moved)
    graph, copies = Graph(), dict[Node, Node]()
    opaque: list[Node] = []
    for node in moved:
        for x in node.all_input_nodes:
            if x in inside or x in copies:
                continue
            if is_scan(node) and x is node.args[0]:
                continue
            if not isinstance(_example(x), (torch.Tensor, int, torch.SymInt)):
                return None
            if _storage(x) in changed:
                return None  # what is in it depends on when it is read
            copies[x] = graph.placeholder(x.name)
            opaque.append(x)
    root = torch.nn.Module()
    for node in moved:
        if is_scan(node):
            combine, xs, rest = node.args
            combined = gm.get_submodule(str(combine.target))  # type: ignore[union-attr]
            root.add_module(node.name, Neighbours(combined, len(xs)))  # type: ignore[arg-type]
            copies[node] = graph.call_module(node.name, tuple(copies[x] for x in (*xs, *rest)))  # type: ignore[misc]
            continue
        if node.op == "call_module":
            root.add_module(node.name, gm.get_submodule(str(node.target)))
            copies[node] = graph.call_module(node.name, tuple(copies[x] for x in node.args))  # type: ignore[index]
            continue
        copies[node] = graph.node_copy(node, lambda x: copies[x])
    batched = {x for node in moved if getattr(node.target, "__module__", "") == _VMAP for x in (node, *node.users)}
    levels = any(getattr(node.target, "__name__", "") == "_vmap_increment_nesting" for node in moved)
    inner = _between_levels(moved)
    del batched
    kept = [node for node in moved if isinstance(_example(node), torch.Tensor) and node not in inner]
    graph.output(tuple(copies[node] for node in kept))
    if levels and changes:
        return None
    values = [_example(x) for x in opaque]
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment(values))
    with mode:
        fakes = [twin(x) for x in values]
    try:
        module = to_aten(mode, Interpreter(GraphModule(root, graph)).run, *fakes, functional=not levels, keep=("stack",))
    except Exception:  # whatever is unusual about these operations: no network is read
        return None
    traced = fx_graph_cse(module.graph)
    if traced.find_nodes(op="call_function", target=aten.copy_.default):
        return None  # something that comes from elsewhere is changed
    placeholders = dict(zip(traced.find_nodes(op="placeholder"), opaque, strict=True))
    outputs: Any = traced.output_node().args[0]
    return traced, placeholders, dict(zip(kept, outputs, strict=True))


def _between_levels(nodes: Sequence[Node]) -> set[Node]:
    """Return the nodes that compute within a ``vmap``; what leaves it does not count."""
    inner, depth = set[Node](), 0
    for node in nodes:
        name = getattr(node.target, "__name__", "")
        depth += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
        if getattr(node.target, "__module__", "") == _VMAP and name != "_remove_batch_dim" or (
            depth and name != "_remove_batch_dim"
        ):
            inner.add(node)
    return inner


def _rewrite(found: Found, inputs: dict[Node, Node], graph: Graph, training: bool) -> Rewrite:
    root = found.node
    if not all(is_tensor(x) for x in (root, found.b)):
        raise NotALoop("the recurrence is not one of tensors")
    carries = Carries()
    carries.emit.at(root)
    emit, rank = carries.emit, value(root).dim()

    def steps(x: Node) -> Value:
        own = found.dim - (rank - value(x).dim())
        order = [own, *(d for d in range(value(x).dim()) if d != own)]
        return Value(emit.permute(x, order), True)

    step = emit.call(aten.select.int, root, found.dim, 0)
    loop = Loop((step,), reverse=found.reverse, initial=0, count=value(root).shape[found.dim])
    factors = found.a
    if factors is not None and found.exponent:
        factors = emit.call(aten.exp.default, factors)
    scale = None if factors is None else steps(factors)
    scanned = carries._scan(loop, Affine(loop, scale, steps(found.b)))
    order = [*range(1, found.dim + 1), 0, *range(found.dim + 1, rank)]
    states = emit.permute(scanned.node, order)
    build = Builder(root)
    new = build.restride(states, value(root))
    needed = [x for x in inputs if x in upstream(root) or x in upstream(new)]
    original, candidate = extract(root, needed), extract(new, needed)
    for part in (original, candidate):
        differentiable(part.graph)
        part.recompile()
    names = tuple(inputs[x].name for x in needed)
    examples = [_example(inputs[x]) for x in needed]
    return Rewrite(
        name="scan prefix network",
        site=root.name,
        source=source_line(root),
        why="its states are combined pair by pair, in passes over all of memory",
        detail=loop.described + (", against time" if found.reverse else ""),
        original=original,
        candidate=candidate,
        inputs=names,
        multilinear=False,
        terms=int(loop.length),
        spread=0.1,
        differentiated=tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in examples) if training else (),
    )


def _drop(gm: GraphModule, moved: Sequence[Node], after: set[Node]) -> None:
    """Erase what computed a network, as far as nothing reads it; what comes ``after`` the scan no longer does."""
    graph = gm.graph
    nodes = [node for node in moved if node.graph is graph and not node._erased]
    inside = set(nodes)
    changes: dict[Any, list[Node]] = {}
    blocks: dict[Node, list[Node]] = {}
    block: list[Node] = []
    depth = 0
    for node in nodes:
        name = getattr(node.target, "__name__", node.target)
        if name in _IN_PLACE and node.args:
            changes.setdefault(_storage(node.args[0]), []).append(node)  # type: ignore[arg-type]
        if getattr(node.target, "__module__", "") == _VMAP or depth:
            depth += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
            block.append(node)
            for x in block:
                blocks[x] = block
            if name == "_vmap_decrement_nesting" and not depth:
                block = []
    live: set[Node] = set()
    stack = [node for node in graph.nodes if node not in inside]
    while stack:
        node = stack.pop()
        if node in live:
            continue
        live.add(node)
        stack += [x for x in node.all_input_nodes if x not in live]
        writes = () if node in after else changes.get(_storage(node), ())
        stack += [x for x in (*writes, *blocks.get(node, ())) if x not in live]
    for node in reversed(nodes):
        if node not in live:
            graph.erase_node(node)


_ = operator, tree_leaves
