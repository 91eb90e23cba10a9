"""Run one operation for all time steps at once: how each ATen operation takes a leading time axis.

A `Value` is what an argument is over all steps: the same node every time, or a node whose axis 0 is
time. `vectorize_node` gives a call the time axis: a step's (...) becomes (t, ...). The fake value of what it emits must
have that shape, so a wrong rule is noticed. These are batching rules, as of ``vmap``, with time as the batch.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functionalize
from torch.fx import Node

from ..ir.builder import Builder
from ..ir.fx import CASTS, is_pointwise, is_tensor, value
from ..ir.moves import insert, read
from ..ir.source import CALLED, expression, located, name_of
from ..private import OpOverload, make_fx, tree_flatten, tree_unflatten
from ..refusals import Refusal

aten = torch.ops.aten


class NotALoop(Refusal):
    """Steps cannot be merged."""

    def __init__(self, reason: str, message: str, node: Node | None = None) -> None:
        """Refuse, because of a node if one is given."""
        super().__init__(reason, message, *(located(node) if node is not None else ()))


@dataclass(frozen=True)
class Value:
    """An argument over all steps: a node or a number; ``has_time`` if axis 0 of the node is time."""

    node: Any
    has_time: bool = False

    def padded(self, emit: Builder, rank: int) -> Any:
        """Return an operand for broadcasting against steps of this rank: ones go after the time axis."""
        if not (self.has_time and is_tensor(self.node)):
            return self.node
        shape = list(value(self.node).shape)
        return emit.reshape(self.node, [shape[0], *([1] * (rank + 1 - len(shape))), *shape[1:]])

    def with_time(self, emit: Builder, steps: int, like: Node | None = None) -> Node:
        """Return a tensor (t, ...), repeating what is the same at every step."""
        if self.has_time:
            return self.node
        if not isinstance(self.node, Node):
            assert like is not None
            return emit.full(self.node, like, [steps, *value(like).shape])
        return emit.call(aten.expand.default, self.node, [steps, *value(self.node).shape])


# Operations that one operation of a step may be over all steps, if no rule here has it.
_MAPPED = 24

# A rule: (emitter, a step's node, its arguments with `Value`s for nodes, steps) -> node with time in front.
BatchRule = Callable[[Builder, Node, list[Any], int], Node]


def _dim(d: int, rank: int) -> int:
    if not rank:
        raise ValueError("a number has no axis")
    return d % rank + 1


def _rank(args: list[Any]) -> int:
    """Return the rank of a step's first argument."""
    first: Value = args[0]
    return value(first.node).dim() - first.has_time


def _pointwise(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    rank = value(node).dim()
    plain = [a.padded(emit, rank) if isinstance(a, Value) else a for a in args]
    return emit.call(node.target, *plain, **node.kwargs)


def _pointwise_pair(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    """Elementwise, with a second result that only its backward reads."""
    return emit.call(node.target, args[0].node, **node.kwargs)


def _along_dim(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    """Operations whose second argument is an axis of the input."""
    dim = args[1] if len(args) > 1 else 0
    rank = _rank(args)
    return emit.call(node.target, args[0].node, _dim(dim, rank), *args[2:], **node.kwargs)


def _sized_split(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    dim = args[2] if len(args) > 2 else 0
    return emit.call(node.target, args[0].node, args[1], _dim(dim, _rank(args)))


def _parts(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    """Real and imaginary parts: an axis at the end, or none."""
    return emit.call(node.target, args[0].node)


def _reduce(emit: Builder, node: Any, args: list[Any], steps: int) -> Node:
    rank = _rank(args)
    given = args[1] if len(args) > 1 else node.kwargs.get("dim")
    dims = [given] if isinstance(given, int) else list(given or range(rank))
    kwargs = {k: v for k, v in node.kwargs.items() if k != "dim"}
    return emit.call(node.target, args[0].node, [_dim(d, rank) for d in dims], *args[2:], **kwargs)


def _reduce_all(emit: Builder, node: Any, args: list[Any], steps: int) -> Node:
    target = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}[node.target]
    return emit.call(target, args[0].node, list(range(1, _rank(args) + 1)), **node.kwargs)


def _moved(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    """Move the axes of all steps, time in front."""
    found, leaves = read(node), (tree_flatten(x)[0] for x in (list(node.args), args))
    if found is None:
        return _mapped(emit, node, args, steps)
    given = {x: v for x, v in zip(*leaves, strict=True) if isinstance(v, Value)}
    return insert(emit, found, lambda x: given[x].with_time(emit, steps), [steps])


def _layer_norm(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    if any(isinstance(a, Value) and a.has_time for a in args[1:]):
        raise NotALoop("no-iteration-form", f"`{expression(node)}` uses other weights at each step", node)
    plain = [a.node if isinstance(a, Value) else a for a in args]
    return emit.call(node.target, *plain, **node.kwargs)


def _merged(emit: Builder, node: Any, args: list[Any], steps: int) -> Any:
    """Operations on a batch, with the same weights at every step: batches of all steps under one another."""
    if not args[0].has_time or any(isinstance(a, Value) and a.has_time for a in args[1:]):
        raise NotALoop("no-iteration-form", f"`{expression(node)}` uses other weights at each step", node)
    rows, *rest = value(args[0].node).shape[1:]
    plain = [a.node if isinstance(a, Value) else a for a in args[1:]]
    if node.target is aten.native_group_norm.default:
        plain[2] = steps * rows
    out = emit.call(node.target, emit.reshape(args[0].node, [steps * rows, *rest]), *plain, **node.kwargs)
    val = node.meta["val"]
    if isinstance(val, torch.Tensor):
        return emit.reshape(out, [steps, *val.shape])
    return tuple(emit.reshape(emit.call(operator.getitem, out, i), [steps, *x.shape]) for i, x in enumerate(val))


def _looked_up(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    """Rows of one table."""
    if args[0].has_time:
        raise NotALoop("no-iteration-form", f"`{expression(node)}` uses another table at each step", node)
    return emit.call(node.target, args[0].node, args[1].node, *args[2:], **node.kwargs)


def _norm(emit: Builder, node: Any, args: list[Any], steps: int) -> Node:
    """Norms, whose axes come third."""
    rank, given = _rank(args), args[2] if len(args) > 2 else None
    dims = [_dim(d, rank) for d in (range(rank) if given is None else given)]
    return emit.call(node.target, args[0].node, args[1] if len(args) > 1 else 2, dims, *args[3:], **node.kwargs)


def _getitem(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    several = args[0].node
    return several[args[1]] if isinstance(several, tuple) else emit.call(operator.getitem, several, args[1])


def _mm(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    """``(r, k) @ (k, c)`` of each step: (t r, k) @ (k, c) if the second is always the same, else with t as batch."""
    a, b = args[-2:]
    if a.has_time and not b.has_time:  # rows of all steps under one another
        rows = emit.reshape(a.node, [math.prod(value(a.node).shape[:2]), value(a.node).shape[2]])
        out = emit.reshape(emit.call(aten.mm.default, rows, b.node), [steps, *value(node).shape])
    else:
        out = emit.call(aten.bmm.default, a.with_time(emit, steps), b.with_time(emit, steps))
    if node.target is aten.addmm.default:
        if node.kwargs:
            message = f"`{expression(node)}` scales its operands ({', '.join(node.kwargs)})"
            raise NotALoop("no-iteration-form", f"{message}, for which no rule computes all steps at once", node)
        out = emit.call(aten.add.Tensor, args[0].padded(emit, 2), out)
    return out


def _bmm(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    """``(b, r, k) @ (b, k, c)`` of each step: one product with the batch (t b)."""
    merged = []
    for v in args:
        x = v.with_time(emit, steps)
        merged.append(emit.reshape(x, [steps * value(x).shape[1], *value(x).shape[2:]]))
    return emit.reshape(emit.call(aten.bmm.default, *merged), [steps, *value(node).shape])


def _contract(emit: Builder, node: Node, args: list[Any], steps: int) -> Node:
    """``mv``, (r, k) and (k), and ``dot``, (k) and (k): their matrix products with the time axis as batch."""
    a, b = (v.with_time(emit, steps) for v in args)
    vector = [*value(b).shape, 1]
    left = a if node.target is aten.mv.default else emit.reshape(a, [steps, 1, value(a).shape[1]])
    return emit.reshape(emit.call(aten.bmm.default, left, emit.reshape(b, vector)), [steps, *value(node).shape])


def _mapped(emit: Builder, node: Node, args: list[Any], steps: int) -> Any:
    """All other operations: as ``torch.vmap`` maps them over the time axis."""
    leaves, spec = tree_flatten(args)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Value)]
    given = [leaves[i] for i in at]
    no_rule = f"{node.target} has no rule that computes all steps at once: `{expression(node)}`"
    if not isinstance(node.target, OpOverload) or not all(isinstance(x.node, Node) for x in given):
        raise NotALoop("no-iteration-form", no_rule, node)

    def step(*xs: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, x in zip(at, xs, strict=True):
            filled[i] = x
        return node.target(*tree_unflatten(filled, spec), **node.kwargs)  # type: ignore[operator]

    every = functionalize(torch.vmap(step, in_dims=tuple(0 if x.has_time else None for x in given)))
    inputs = [value(x.node) for x in given]
    with inputs[0].fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        graph = make_fx(every)(*inputs).graph
    copies: dict[Node, Any] = {}
    if len(graph.nodes) > _MAPPED + len(given):  # one step after the other
        raise NotALoop("no-iteration-form", no_rule, node)
    for one, x in zip(graph.find_nodes(op="placeholder"), given, strict=True):
        copies[one] = x.node
    for one in graph.nodes:
        if one.op == "get_attr":
            raise NotALoop("no-iteration-form", no_rule, node)
        if one.op == "call_function":
            its_args, its_kwargs = torch.fx.node.map_arg((one.args, one.kwargs), copies.__getitem__)
            copies[one] = emit.call(one.target, *its_args, **its_kwargs)
    results: Any = torch.fx.node.map_arg(graph.output_node().args, copies.__getitem__)
    (out,) = results
    return out if isinstance(out, Node) else tuple(out)


BATCHING_RULES: dict[Any, BatchRule] = {
    **dict.fromkeys((*CASTS, aten.clone.default, aten.alias.default, aten.detach.default), _pointwise),
    aten.unbind.int: _along_dim,
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default, aten.cumsum.default), _along_dim),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _sized_split),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), _reduce),
    **dict.fromkeys((aten.max.dim, aten.min.dim, aten.cumprod.default, aten._logcumsumexp.default), _along_dim),
    **dict.fromkeys((aten.var.correction, aten.logsumexp.default), _reduce),
    **dict.fromkeys((aten.sum.default, aten.mean.default), _reduce_all),
    **dict.fromkeys((aten.mm.default, aten.addmm.default), _mm),
    aten.log_sigmoid_forward.default: _pointwise_pair,
    **dict.fromkeys((aten.mv.default, aten.dot.default), _contract),
    **dict.fromkeys((aten.view_as_real.default, aten.view_as_complex.default, aten._conj.default), _parts),
    **dict.fromkeys((aten.real.default, aten.imag.default, aten.resolve_conj.default), _parts),
    aten.bmm.default: _bmm,
    aten.native_layer_norm.default: _layer_norm,
    aten._fused_rms_norm.default: _layer_norm,
    **dict.fromkeys((aten.native_group_norm.default, aten.convolution.default), _merged),
    aten.embedding.default: _looked_up,
    aten.linalg_vector_norm.default: _norm,
    operator.getitem: _getitem,
}


def described(node: Node) -> str:
    """Name a tensor to a person: as the source does, and by its shape."""
    # An ATen graph numbers its inputs.
    unnamed = CALLED not in node.meta and re.fullmatch(r"(arg|primals_|tangents_)\d+(_\d+)?", node.name)
    name = "a tensor" if unnamed else f"`{name_of(node)}`"
    return f"{name} ({' x '.join(map(str, node.meta['val'].shape))})"


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Tell whether a tensor can be expanded to a shape."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


def vectorize_node(emit: Builder, node: Node, args: list[Any], steps: int) -> Value:
    """Emit a step's operation for all steps.

    Args:
        emit: Where to.
        node: The operation at one of the steps.
        args: Its arguments, with a `Value` for each node.
        steps: How many steps there are.

    Raises:
        NotALoop: There is no rule for this operation.
    """
    otherwise = _pointwise if is_pointwise(node.target) else _moved
    rule = BATCHING_RULES.get(node.target, otherwise)
    try:
        new = rule(emit, node, args, steps)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise NotALoop(
            "no-iteration-form", f"`{expression(node)}` fails when it computes all steps at once ({error})", node
        ) from error
    made = [value(x) for x in new] if isinstance(new, tuple) else _tensors(new)
    for own, step in zip(made, _tensors(node), strict=False):
        if step.numel() and (tuple(own.shape) != (steps, *step.shape) or own.dtype != step.dtype):
            raise NotALoop(
                "no-iteration-form",
                f"`{expression(node)}` over all steps has another shape or dtype than its steps",
                node,
            )
    return Value(new, True)


def _tensors(node: Node) -> list[torch.Tensor]:
    val = node.meta["val"]
    return list(val) if isinstance(val, (list, tuple)) else [val]
