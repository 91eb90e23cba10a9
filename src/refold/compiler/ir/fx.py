"""What one FX node says: its value, its arguments, and sizes that may be symbols."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from ..private import HigherOrderOperator, statically_known_true, tree_leaves

aten = torch.ops.aten

# Conversions to another dtype, and the dtypes of 16 bits.
CONVERT = torch.ops.prims.convert_element_type.default
CASTS = (aten._to_copy.default, CONVERT)
HALF = (torch.bfloat16, torch.float16)
# Sums of two tensors; sums over axes; products of matrices; writes of a part; what gives the elements of a tensor
# another shape, where they lie or wherever.
SUMS = (aten.add.Tensor, aten.sub.Tensor)
SUMS_OVER_AXES = (aten.sum.dim_IntList, aten.mean.dim)
MATMULS = (aten.mm.default, aten.bmm.default)
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)
VIEWS = (aten.view.default, aten._unsafe_view.default)
RESHAPES = (*VIEWS, aten.reshape.default)

Size = int | torch.SymInt
T = TypeVar("T")


def concrete(size: Any) -> Any:
    """Return a size as a number: for a symbol, the value it had when traced; 1 if only a run knows it."""
    if not isinstance(size, torch.SymInt):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def only_a_run_knows(graph: Graph) -> bool:
    """Tell whether a value of a graph has a size that had none when traced: the steps of PyTorch's ``while_loop``."""
    values = (x for node in graph.nodes for x in tree_leaves(node.meta.get("val")))
    sizes = (size for x in values if isinstance(x, torch.Tensor) for size in x.shape)
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes)


def known(size: Any) -> Any:
    """Return a size as a number, if it is one by now: Dynamo may have decided on a symbol."""
    number = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return size if number is None else number


class SizesFixed(Exception):
    """Sizes of a graph became numbers while a pass read it, so it is to be traced again; the message says why."""


def fix(found: Iterable[Any]) -> bool:
    """Make sizes numbers, with all symbols in them, by guards of the compiled program; tell whether one was none."""
    symbols = [size for size in found if not isinstance(known(size), int)]
    for size in symbols:
        for symbol in size.node.expr.free_symbols:
            int(size.node.shape_env.create_symintnode(symbol, hint=None))
    return bool(symbols)


def until_fixed(read: Callable[[], T], notes: list[str]) -> T:
    """Call what traces and reads a graph; again where sizes became numbers meanwhile, of which the notes tell."""
    while True:
        try:
            return read()
        except SizesFixed as fixed:
            notes.append(str(fixed))


def place(at: Any, size: Any) -> int | None:
    """Return a position counted from the front; None if it is not known as a number."""
    at, size = known(at), known(size)
    if not isinstance(at, int) or (at < 0 and not isinstance(size, int)):
        return None
    return at + size if at < 0 else at


def power(node: Any) -> tuple[Any, float] | None:
    """Read a power of a number: the exponent, and the number's logarithm, 1 for ``exp``; None if it is none."""
    if node.target in (aten.exp.default, aten.exp2.default):
        return node.args[0], 1.0 if node.target is aten.exp.default else math.log(2)
    base, x = node.args if node.target is aten.pow.Scalar else (None, None)
    return (x, math.log(base)) if isinstance(base, int | float) and 0 < base < math.inf and base != 1 else None


def value(node: Node) -> torch.Tensor:
    """Return the fake tensor that a graph node carries."""
    return node.meta["val"]


def sizes(node: Node) -> list[int]:
    """Return the sizes of the tensor that a node carries as numbers; see `concrete`."""
    return [concrete(size) for size in value(node).shape]


def arg(node: Node, position: int, name: str = "", default: Any = None) -> Any:
    """Return an argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


_MADE = "refold_made"


def mark_as_made(node: Node, made: bool = True) -> None:
    """Note that refold made a call of an operator, which is not the user's own; traces of the graph keep the note."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _MADE: made}


def is_made(node: Node) -> bool:
    """Tell whether refold made a call of an operator."""
    return bool((node.meta.get("custom") or {}).get(_MADE))


def is_tensor(node: Any) -> bool:
    """Tell whether an argument is a graph node that holds one tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_zero(x: Any) -> bool:
    """Tell whether a node is a tensor that is made of zeros."""
    return isinstance(x, Node) and x.target is aten.full.default and bool(x.args[1] == 0)


def is_erased(node: Node) -> bool:
    """Tell whether a node was erased from its graph: its neighbours know it no more."""
    return node.prev.next is not node


def is_pointwise(target: Any) -> bool:
    """Tell whether an operation works on each element by itself, the same way every time."""
    return torch.Tag.pointwise in getattr(target, "tags", ()) and not is_random(target)


def is_random(target: Any) -> bool:
    """Tell whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_elementwise(target: Any) -> bool:
    """Tell whether an operation is pointwise, or converts elements to another dtype."""
    return is_pointwise(target) or target in CASTS


def same(a: Size, b: Size) -> bool:
    """Tell whether two sizes are equal for certain; never adds a guard."""
    return a == b if isinstance(a, int) and isinstance(b, int) else statically_known_true(a == b)


def factor_of_second(total: Node) -> Any:
    """Find the number that a sum of two tensors multiplies the second one by."""
    return total.kwargs.get("alpha", 1) * (-1.0 if total.target is aten.sub.Tensor else 1.0)  # type: ignore[operator]


def sum_dims(node: Node) -> list[int]:
    """Return the non-negative axes that a sum, a mean or a maximum reduces."""
    rank = len(value(arg(node, 0)).shape)
    dims = arg(node, 1, "dim") if node.target not in (aten.sum.default, aten.mean.default) else None
    if not dims and dims != 0:
        return list(range(rank))
    return sorted(dim % rank for dim in (dims if isinstance(dims, (list, tuple)) else [dims]) if rank)


def add_argument(graph: Graph, name: str) -> Node:
    """Add an argument to a graph at the point of insertion; a name that another has gets a number behind it."""
    node = graph.placeholder(name)
    node.target = node.name  # the name in the code of the graph
    return node


def take_place(new: Node, node: Node) -> None:
    """Let a node stand where another one does, which goes."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def copied_graph(graph: Graph) -> Graph:
    """Copy a graph; both have one owner."""
    new = copy.deepcopy(graph)
    new.owning_module = graph.owning_module
    return new


def is_training(graph: Graph) -> bool:
    """Tell whether a graph holds a backward."""
    return any(str(n.target).startswith("tangents") for n in graph.find_nodes(op="placeholder"))


def mend_powers(gm: GraphModule) -> None:
    """Change powers of negative numbers so that the code of a graph computes what its nodes say.

    PyTorch (2.13) prints ``pow(-0.9, x)`` as ``-0.9 ** x``, which Python reads as ``-(0.9 ** x)``.
    """
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        powers = [
            node
            for node in module.graph.find_nodes(op="call_function", target=operator.pow)
            if isinstance(node.args[0], (int, float)) and math.copysign(1.0, node.args[0]) < 0
        ]
        for node in powers:
            base, exponent = node.args
            if isinstance(exponent.meta.get("example_value"), torch.Tensor):
                node.target = torch.pow
                continue
            with module.graph.inserting_before(node):
                named = module.graph.call_function(operator.neg, (-base,))
            named.meta["example_value"] = base
            node.args = (named, exponent)
        if powers:
            module.recompile()


def loop_operation(node: Node) -> str:
    """Return which of PyTorch's operations a call is that take a step of a loop; empty if it is none of them."""
    name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
    return name if name in ("scan", "while_loop", "associative_scan", "map_impl") else ""


def registers_hook(node: Node) -> bool:
    """Tell whether a call registers a hook, which is to see all of a tensor's gradient."""
    name = node.target.name() if isinstance(node.target, HigherOrderOperator) else getattr(node.target, "__name__", "")
    return "register_hook" in name
