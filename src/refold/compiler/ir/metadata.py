"""Fake values that graph nodes carry: keep them true after an edit, and tell whether they are.

Inductor takes shapes, dtypes and strides from a node's fake value and generates code that relies on them. A value that
is computed in another way may lie in memory in another way. Then the fake values of all that reads it are out of date,
although every operation by itself is right. Run node by node, the graph gives the right numbers. Compiled, it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..private import HigherOrderOperator, tree_leaves, tree_map
from .builder import Builder, same_strides, walk
from .fx import VIEWS, concrete, known, value

aten = torch.ops.aten

_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def substitute(node: Node, new: Node, outside: bool = True) -> list[Node]:
    """Let what reads a node read another of the same shape and dtype.

    Args:
        node: The node.
        new: What to read instead.
        outside: Whether that holds for what leaves the graph or enters another, too. It keeps its strides.

    Returns:
        The readers whose fake values are to be refreshed.
    """
    readers = []
    for user in list(node.users):
        if _follows(user):
            readers.append(user)
            user.replace_input_with(node, new)
        elif outside:
            user.replace_input_with(node, Builder(user, like=new).restride(new, value(node)))
    return readers


def refresh(graph: Graph, changed: Iterable[Node], but: Node | None = None) -> None:
    """Compute fake values anew, from nodes on of which an argument was replaced.

    A view that the new strides do not allow gets a copy to look at. What leaves the graph or enters another keeps its
    strides.

    Args:
        graph: The graph, its nodes in order.
        changed: Nodes of which an argument was replaced by one of other strides.
        but: A node that takes any strides.
    """
    dirty = set(changed)
    if not dirty:
        return
    before: dict[Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        if node is but or not (node in dirty or any(x in before for x in node.all_input_nodes)):
            continue
        if not _follows(node):
            for x in node.all_input_nodes:
                if x in before and not same_strides(value(x), before[x]):
                    node.replace_input_with(x, Builder(node, like=x).restride(x, before[x]))
        else:
            old = node.meta["val"]
            node.meta["val"] = _computed(node)
            if not _alike(old, node.meta["val"]):
                before[node] = old


def with_strides_of(values: Mapping[Node, Any], graph: Graph) -> dict[Node, Any] | None:
    """Return the fake values of a graph that would be others if some nodes had these; nothing is edited.

    None if something relies on the strides that there are: a view that is then none, or what leaves the graph.
    """
    changed = dict(values)
    for node in graph.nodes:
        if node in values or not any(x in changed for x in node.all_input_nodes):
            continue
        if not _follows(node):
            return None
        try:
            new = evaluated(node, changed)
        except (RuntimeError, ValueError):
            return None
        if not _alike(node.meta["val"], new):
            changed[node] = new
    return changed


def stale(graph: Graph) -> str:
    """Say which node of a graph is not what its fake value claims; empty if none is."""
    for node in graph.nodes:
        if _follows(node) and not _alike(node.meta["val"], real := evaluated(node)):
            return f"{node.target} makes {_described(real)}, its metadata says {_described(node.meta['val'])}"
    return ""


def in_numbers(root: Node, until: Callable[[Node], bool]) -> Node:
    """Copy what computes a value, with sizes as the numbers that they had when traced: `concrete`.

    Args:
        root: Computes the value.
        until: Tells which other values are inputs of the copy.
    """
    graph, copies = Graph(root.graph.owning_module), dict[Node, Any]()
    needed = set(walk([root], lambda x: () if until(x) and x is not root else x.all_input_nodes))
    for node in (x for x in root.graph.nodes if x in needed):
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            copies[node] = concrete(val)
        elif _follows(node) and (node is root or not until(node)):
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = new = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            new.meta["val"] = val
            new.meta["val"] = evaluated(new)
        elif node.op == "get_attr":
            copies[node] = graph.node_copy(node)
        else:
            copies[node] = new = graph.placeholder(node.name)
            with value(root).fake_mode:  # type: ignore[attr-defined]
                new.meta["val"] = tree_map(lambda x: twin(x, concrete), val)
    return copies[root]


def twin(x: Any, number: Callable[[Any], Any] = known) -> Any:
    """Make another tensor of the same form, with the numbers for sizes that are known by now, or that are given."""
    if not isinstance(x, torch.Tensor):
        return number(x)
    shape, strides = ([*map(number, of)] for of in (x.shape, x.stride()))
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


def _follows(node: Node) -> bool:
    """Tell whether a node's fake value follows from those of its arguments."""
    return (
        node.op == "call_function"
        and not isinstance(node.target, HigherOrderOperator)
        and not _BY_VALUE & set(getattr(node.target, "tags", ()))
        and bool(_tensors(node.meta.get("val")))
        and all("val" in x.meta for x in node.all_input_nodes)
    )


def _computed(node: Node) -> Any:
    """Return a node's fake value; a view that is no longer possible gets a copy first."""
    try:
        return evaluated(node)
    except (RuntimeError, ValueError):
        if node.target not in VIEWS:
            raise
    source: Any = node.args[0]
    dense = Builder(node).call(aten.clone.default, source, memory_format=torch.contiguous_format)
    node.replace_input_with(source, dense)
    return evaluated(node)


def evaluated(node: Node, values: Mapping[Node, Any] = MappingProxyType({})) -> Any:
    """Return a node's fake value, computed of those of its arguments, or of ``values`` in their place."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: values.get(x, x.meta["val"]))
    fakes = _tensors((args, kwargs)) or _tensors(node.meta["val"])
    # The user's autocast, which may be active, is in the graph already.
    with torch.autocast(fakes[0].device.type, enabled=False), fakes[0].fake_mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _tensors(val: Any) -> list[Any]:
    return [x for x in tree_leaves(val) if isinstance(x, torch.Tensor)]


def _alike(a: Any, b: Any) -> bool:
    pairs = zip(_tensors(a), _tensors(b), strict=True)
    return all((x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device) and same_strides(x, y) for x, y in pairs)


def _described(val: Any) -> str:
    return " and ".join(f"{x.dtype} {tuple(x.shape)} with strides {tuple(x.stride())}" for x in _tensors(val))
