"""Small tools on ATen graphs: insert nodes that know their values, cut regions out."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from ..private import SYMBOLIC_ARITHMETIC
from .fx import CONVERT, Size, concrete, is_random, same, value

aten = torch.ops.aten
prims = torch.ops.prims


class UnknownSize(Exception):
    """A symbolic size has no node in the graph that computes it; the rewrite is not possible."""


class Builder:
    """Inserts nodes before an anchor, each with the fake value that Inductor expects in its metadata.

    Equal calls are inserted once, so that equal reads stay recognisable as equal.
    """

    graph: Graph
    anchor: Node
    fake_mode: Any

    def __init__(self, anchor: Node | None = None, replaced: Iterable[Node] = (), like: Node | None = None) -> None:
        """Insert before ``anchor``; never read ``replaced`` nodes, which the rewrite makes dead.

        An anchor without a fake value, such as an output, borrows the fake mode of ``like``.
        """
        self.added: list[Node] = []
        self.replaced = set(replaced)
        self._made: dict[Any, Node] = {}
        if anchor is not None:
            self.at(anchor, like)

    def at(self, anchor: Node, like: Node | None = None) -> None:
        """Insert before this node from now on; anchors must come in graph order."""
        self.graph, self.anchor = anchor.graph, anchor
        self.fake_mode = value(like or anchor).fake_mode  # type: ignore[attr-defined]
        self._meta = {key: entry for key, entry in anchor.meta.items() if key not in ("val", "tensor_meta")}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call and compute its fake value, or return the equal one that is there already."""
        key = (target, _frozen(args), _frozen(kwargs))
        if key in self._made:
            return self._made[key]
        args, kwargs = map_aggregate((args, kwargs), self._argument)  # type: ignore[assignment]
        fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            val = target(*fake_args, **fake_kwargs)
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta.update(self._meta)
        node.meta["val"] = val
        self.added.append(node)
        self._made[key] = node
        return node

    def settle(self) -> None:
        """Forget which calls were made: their arguments may have been replaced since, or a result must be its own."""
        self._made.clear()

    def undo(self) -> None:
        """Remove every node inserted so far."""
        for node in reversed(self.added):
            self.graph.erase_node(node)
        self.added.clear()
        self._made.clear()

    def _argument(self, x: Any) -> Any:
        return self.size(x) if isinstance(x, torch.SymInt) else x

    def size(self, size: Size) -> Any:
        """Return an argument for a size: the number, the node that has it as value or axis, or one that computes it.

        Raises:
            UnknownSize: It holds a symbol that no node before the anchor has.
        """
        if isinstance(size, int) or size.node.expr.is_Integer:
            return int(size)
        for node in self.graph.nodes:
            if node is self.anchor:
                break
            if node in self.replaced:
                continue
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt) and same(val, size):
                return node
            if isinstance(val, torch.Tensor):
                for dim, own in enumerate(val.shape):
                    if isinstance(own, torch.SymInt) and same(own, size):
                        return self.call(aten.sym_size.int, node, dim)
        x, env = size.node.expr, size.node.shape_env
        if x.is_Symbol or (type(x) not in SYMBOLIC_ARITHMETIC and not x.is_Add and not x.is_Mul):
            raise UnknownSize(str(x))
        apply = operator.add if x.is_Add else operator.mul if x.is_Mul else SYMBOLIC_ARITHMETIC[type(x)]
        return self.combined(apply, [self.size(env.create_symintnode(part, hint=None)) for part in x.args])

    def reshape(self, x: Node, shape: Sequence[Size]) -> Node:
        """Reshape; copies only if it must."""
        own = value(x).shape
        if len(own) == len(shape) and all(same(a, b) for a, b in zip(own, shape, strict=True)):
            return x
        sizes = [self.size(size) for size in shape]
        try:
            return self.call(aten.view.default, x, sizes)
        except (RuntimeError, ValueError):  # strides do not allow a view
            return self.call(aten.view.default, self.dense(x), sizes)

    def dense(self, x: Node) -> Node:
        """Copy into contiguous memory, unless x lies so already."""
        if value(x).is_contiguous():
            return x
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def full(self, number: Any, like: Node, shape: Sequence[Size] = ()) -> Node:
        """Return a tensor full of a number, of a shape and with the dtype and device of ``like``."""
        return self.call(aten.full.default, list(shape), number, dtype=value(like).dtype, device=value(like).device)

    def times(self, x: Node, number: float) -> Node:
        """Multiply by a number, unless it is one."""
        return x if number == 1 else self.call(aten.mul.Tensor, x, number)

    def combined(self, target: Any, xs: Iterable[Any]) -> Node:
        """Combine values by an operation of two, from the first one on."""
        return functools.reduce(functools.partial(self.call, target), xs)

    def stack(self, xs: Sequence[Node], axis: int = 0) -> Node:
        """Stack tensors along a new axis; Inductor, which has no code for ``aten.stack``, does the same."""
        return self.call(aten.cat.default, [self.call(aten.unsqueeze.default, x, axis) for x in xs], axis)

    def expand(self, x: Node, shape: Sequence[Size]) -> Node:
        """Expand, unless the shape is right already."""
        return x if tuple(value(x).shape) == tuple(shape) else self.call(aten.expand.default, x, list(shape))

    def positions(self, count: Size, device: torch.device) -> Node:
        """Return 0, 1, ... as int64."""
        kinds = {"dtype": torch.int64, "device": device, "requires_grad": False}
        return self.call(prims.iota.default, count, start=0, step=1, **kinds)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Convert, unless the dtype is right already."""
        return x if value(x).dtype == dtype else self.call(CONVERT, x, dtype)

    def permute(self, x: Node, order: Sequence[int]) -> Node:
        """Permute axes, unless they are in order already."""
        return x if list(order) == list(range(len(order))) else self.call(aten.permute.default, x, list(order))

    def restride(self, x: Node, like: torch.Tensor) -> Node:
        """Give ``x`` the memory layout of ``like``, so that nothing downstream can tell them apart.

        Inductor inlines the copy into elementwise consumers; it costs memory traffic only before
        an external kernel.
        """
        return x if same_strides(value(x), like) else self.copy(x, like)

    def copy(self, x: Node, like: torch.Tensor) -> Node:
        """Copy ``x`` into the memory layout of ``like``, whatever its own is when the graph runs."""
        # Dense copies in the order of like's strides, outermost first; of equal ones, an axis of size one is innermost.
        sizes = [*zip(like.stride(), like.shape, strict=True)]
        order = sorted(range(like.dim()), key=lambda dim: [concrete(n) for n in sizes[dim]], reverse=True)
        dense = self.call(aten.clone.default, self.permute(x, order), memory_format=torch.contiguous_format)
        return self.permute(dense, [order.index(dim) for dim in range(like.dim())])


def _frozen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(_frozen(y) for y in x)
    if isinstance(x, dict):
        return tuple(sorted((key, _frozen(y)) for key, y in x.items()))
    if isinstance(x, torch.SymInt):
        return (torch.SymInt, str(x.node.expr))
    return (type(x), x)


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors of one shape lie in memory alike; axes of size one do not count."""
    dims = [dim for dim, size in enumerate(b.shape) if not same(size, 1)]
    return all(same(a.stride(dim), b.stride(dim)) for dim in dims)


def sort_topologically(graph: Graph) -> None:
    """Put every node after its inputs; nodes that are in order stay in order."""
    placed: set[Node] = set()
    output = graph.output_node()
    for root in list(graph.nodes):
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [x for x in node.all_input_nodes if x not in placed]
            if node in placed or not missing:
                stack.pop()
                if node not in placed and node is not output:
                    output.prepend(node)
                placed.add(node)
            else:
                stack += missing[::-1]


def is_constant(node: Node) -> bool:
    """Tell whether a node computes the same value every time: from no input, but for tensors that the graph holds."""
    return all(
        type(held(x)) is torch.Tensor if x.op == "get_attr" else x.op == "call_function" and not is_random(x.target)
        for x in walk([node])
    )


def held(node: Node) -> Any:
    """Look up the attribute that a node reads: a tensor, where the user wrote a literal."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def tensors_read(node: Node) -> list[Node]:
    """List what a node reads, but for sizes."""
    return [x for x in node.all_input_nodes if not isinstance(x.meta.get("val"), torch.SymInt)]


def constants(graph: Graph) -> set[Node]:
    """Return tensors that a graph computes from sizes alone, the same every time."""
    found = set[Node]()
    for node in graph.nodes:
        if node.op == "call_function" and not is_random(node.target) and found.issuperset(tensors_read(node)):
            found.add(node)
    return {node for node in found if not isinstance(node.meta.get("val"), torch.SymInt)}


def upstream(node: Node) -> set[Node]:
    """Return a node and all that it depends on."""
    return set(walk([node]))


def downstream(*nodes: Node, until: Container[Node] = ()) -> set[Node]:
    """Return nodes and all that depends on them, but not what depends on those of ``until`` alone."""
    return set(walk(nodes, lambda x: () if x in until else x.users))


def walk(
    nodes: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]] = lambda x: x.all_input_nodes
) -> Iterator[Node]:
    """Yield nodes, the last one first, and after each its neighbours, and theirs; each node once."""
    stack, seen = [*nodes], set[Node]()
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            yield x
            stack.extend(neighbours(x))


def region_inputs(root: Node, inside: Iterable[Node]) -> list[Node]:
    """Return the nodes that feed ``root`` from outside the given nodes, in graph order.

    Constants, such as masks, belong to the region.
    """
    members = {root, *inside}
    feeding = {x for node in members for x in node.all_input_nodes if x not in members and not is_constant(x)}
    return [node for node in root.graph.nodes if node in feeding]


def between(root: Node, sources: Iterable[Node]) -> set[Node]:
    """Return the nodes that lie on a path from some of the sources to ``root``, without either end."""
    sources = set(sources)
    reached: set[Node] = set()
    for node in root.graph.nodes:
        if node not in sources and any(x in sources or x in reached for x in node.all_input_nodes):
            reached.add(node)
    return set(walk([root], lambda x: reached.intersection(x.all_input_nodes))) - {root}


def placeholders(graph: Graph, nodes: Iterable[Node]) -> dict[Node, Node]:
    """Let a graph take the values of nodes of another one."""
    copies = {node: graph.placeholder(node.name) for node in nodes}
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return copies


def extract(root: Node | Sequence[Node], inputs: Sequence[Node]) -> GraphModule:
    """Copy the nodes between ``inputs`` and a node, or several, into a module of their own that returns them."""
    roots, given = [root] if isinstance(root, Node) else list(root), set(inputs)
    needed = set(walk(roots, lambda x: () if x in given else x.all_input_nodes)) - given
    graph = Graph()
    copies = placeholders(graph, inputs)
    attributes = {}
    for node in roots[0].graph.nodes:
        if node in needed:
            if node.op == "placeholder":
                raise AssertionError(f"{node} is read by the region but is not one of its inputs")
            if node.op == "get_attr":
                attributes[node.target] = held(node)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(copies[root] if isinstance(root, Node) else tuple(copies[node] for node in roots))
    return GraphModule(attributes, graph)
