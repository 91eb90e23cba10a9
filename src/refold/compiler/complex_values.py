"""Give complex values the layout they were traced with, because Inductor cannot copy them on a GPU.

Inductor leaves operations on complex values to ATen, and chooses layouts of real values as it likes. Where a real value
becomes a complex one (by a cast, as pairs, by a product with a complex one), the complex value may get another layout
than the traced one. What needs the traced layout (results of the graph, operators of refold) then gets a copy, for
which Inductor generates a kernel. Triton has no complex dtype, and the compile fails: ``KeyError: 'complex64'``.

If real values have their traced layouts where they become complex, all complex values have theirs, and nothing is
copied. The pass costs a copy of each such real value. So it does not run by default; `refold.compiler.inductor` runs it
after a failed compile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..ops.torch.nodes import define
from .ir.fx import CONVERT, is_tensor, value
from .private import OpOverload, tree_leaves

aten = torch.ops.aten


def _laid_out(x: Tensor) -> Tensor:
    """Return a new tensor with the same strides, gaps included; a dense one for an expanded one."""
    return torch.empty_like(x) if 0 in x.stride() else x.new_empty_strided(x.shape, x.stride())


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


def _fake_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def _of_pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(_laid_out(x).copy_(x))


def _fake_pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(_laid_out(x))


AS_TRACED = define("as_traced", "(Tensor x) -> Tensor", lambda x: _laid_out(x).copy_(x), _laid_out)
"""A copy, as one opaque node, of which Inductor knows that it needs and has the traced strides."""
CAST = define("complex_cast", "(Tensor x, ScalarType dtype) -> Tensor", _cast, _fake_cast)
"""A cast from or to a complex dtype, likewise."""
OF_PAIRS = define("of_pairs", "(Tensor x) -> Tensor", _of_pairs, _fake_pairs)
"""``view_as_complex``, likewise."""

_OPAQUE = {
    CONVERT: CAST,
    aten.view_as_complex.default: OF_PAIRS,
    aten.lift_fresh_copy.default: AS_TRACED,  # of a constant
}


def lay_out_complex_values(graph: Graph) -> None:
    """Make complex values with the strides they were traced with, in place.

    Args:
        graph: A graph that Inductor is about to generate code for, with fake values in its metadata.
    """
    copies: dict[Node, Node] = {}

    def copied(x: Node) -> Node:
        if x not in copies:
            with graph.inserting_after(x), value(x).fake_mode:  # type: ignore[attr-defined]
                copies[x] = graph.call_function(AS_TRACED, (x,))
                copies[x].meta = {**x.meta, "val": AS_TRACED(value(x))}
        return copies[x]

    for node in graph.find_nodes(op="get_attr"):
        if _is_complex(node):
            _in_pairs(node)
    for node in [node for node in graph.nodes if any(map(_is_complex, (node, *node.all_input_nodes)))]:
        if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
            continue
        if node.target is aten._conj.default and isinstance(node.args[0], complex):  # Inductor sees a tensor in it
            node.replace_all_uses_with(node.args[0].conjugate())  # type: ignore[arg-type]
            graph.erase_node(node)
        elif node.target in _OPAQUE:
            node.target = _OPAQUE[node.target]
        elif _is_complex(node):
            for x in node.all_input_nodes:
                if is_tensor(x) and not _is_complex(x) and x.op != "placeholder":
                    node.replace_input_with(x, copied(x))


def _in_pairs(node: Node) -> None:
    """Read a constant as pairs of real numbers: what Inductor leaves to ATen takes no constants."""
    graph, module, name = node.graph, node.graph.owning_module, f"{node.target}_in_pairs"
    constant = getattr(module, str(node.target)).detach().resolve_conj()
    module.register_buffer(name, torch.view_as_real(constant), persistent=False)  # type: ignore[union-attr]
    with graph.inserting_after(node):
        pairs = graph.get_attr(name)
    with graph.inserting_after(pairs), value(node).fake_mode as mode:  # type: ignore[attr-defined]
        copy = graph.call_function(aten.clone.default, (pairs,))
        pairs.meta = copy.meta = {**node.meta, "val": mode.from_tensor(getattr(module, name))}
    with graph.inserting_after(copy):
        made = graph.call_function(OF_PAIRS, (copy,))
        made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _is_complex(node: Node) -> bool:
    return any(isinstance(x, Tensor) and x.is_complex() for x in tree_leaves(node.meta.get("val")))
