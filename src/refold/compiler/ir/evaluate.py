"""Run ATen graphs on real tensors: the values inside a graph, and a float64 reference that fits in memory.

A naive layer may multiply two tensors into one of 48 GiB only to sum it. Run node by node, in float64, that needs twice
as much. So a multiplication that only feeds a sum is done in blocks along an axis that the sum keeps. In the float64
reference, it becomes a product of matrices over the axes by their position. Both are purely positional: they rely on
nothing that `refold.compiler.ir.index` concluded, which is what the reference is there to check.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .builder import walk
from .fx import HALF, SUMS_OVER_AXES, registers_hook, sum_dims

aten = torch.ops.aten

# Products up to this many elements are written out as they are.
BLOCK = 1 << 24
# In float64 there is no rounding to imitate, and from this many elements on a product of matrices is quicker.
WRITTEN_OUT = 1 << 16


@dataclass
class _Product:
    """A multiplication not carried out yet, of two tensors of one rank."""

    a: torch.Tensor
    b: torch.Tensor


# What is computed in a type instead: all that is narrower than the reference, and what float32 is to be tried for.
WIDER = {
    **dict.fromkeys((torch.float32, *HALF), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
_SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
SINGLE = {**_SINGLE, **dict.fromkeys(HALF, torch.float32)}
_REPLACED = {torch.float64: WIDER, torch.float32: _SINGLE}


class Evaluator(torch.fx.Interpreter):
    """Runs a graph on real tensors: as it is, with everything narrower in float64, or with float64 in float32."""

    def __init__(self, gm: GraphModule, dtype: torch.dtype | None = None) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.dtype = dtype

    def run_node(self, n: Node) -> Any:
        """Run one node; large products wait for the sum that reads them."""
        if n.op == "call_module" and (run := getattr(self.fetch_attr(str(n.target)), "in_dtype", None)):
            return run(self.dtype, *self.fetch_args_kwargs_from_env(n)[0])
        if n.op == "call_function":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            if registers_hook(n) and not args[0].requires_grad:  # values are asked for, and no gradients
                return args[0]
            if n.target is aten.mul.Tensor and _only_summed(n):
                a, b = args
                if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype:
                    shape = torch.broadcast_shapes(a.shape, b.shape)
                    exact = a.dtype == self.dtype == torch.float64
                    if shape.numel() > (WRITTEN_OUT if exact else BLOCK):
                        # Not expanded: the gradient of a part of what was expanded is as large as the product.
                        return _Product(*(x[(None,) * (len(shape) - x.dim())] for x in (a, b)))
            if args and isinstance(args[0], _Product):
                return self._sum(n, args[0], kwargs)
            # Blocked sums and float64 may lay values out otherwise than the traced graph did.
            if n.target is aten.view.default:
                return args[0].reshape(args[1])
            if self.dtype is not None:
                args, kwargs = _replaced((args, kwargs), self.dtype)
            return n.target(*args, **kwargs)  # type: ignore[operator]
        return _as(super().run_node(n), self.dtype if n.op == "get_attr" else None)

    def _sum(self, n: Node, product: _Product, kwargs: dict[str, Any]) -> torch.Tensor:
        dims = sum_dims(n)
        keepdim = bool(n.args[2] if len(n.args) > 2 else kwargs.get("keepdim", False))
        if self.dtype == product.a.dtype == torch.float64:
            total = contracted(product.a, product.b, dims, keepdim)
            shape = torch.broadcast_shapes(product.a.shape, product.b.shape)
            return total / math.prod(shape[d] for d in dims) if n.target is aten.mean.dim else total
        return summed_in_blocks(n.target, product.a, product.b, dims, keepdim, kwargs.get("dtype"))


def summed_in_blocks(
    run: Any, a: torch.Tensor, b: torch.Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``run(a * b, dims, keepdim)``, a sum or mean, in blocks along the longest axis that it keeps.

    Args:
        run: The sum or mean.
        a: A tensor.
        b: One of the same rank.
        dims: The axes that are summed.
        keepdim: Whether they are kept, with size one.
        dtype: What it is summed in, if not in the dtype of the product.
    """
    shape = torch.broadcast_shapes(a.shape, b.shape)
    kept = [d for d in range(len(shape)) if d not in dims]
    axis = max(kept, key=lambda d: shape[d], default=None)
    if axis is None:
        return run(a * b, dims, keepdim, dtype=dtype)
    size = shape[axis]
    width = max(1, BLOCK * size // shape.numel())
    out_axis = axis if keepdim else axis - sum(d < axis for d in dims)

    def part(x: torch.Tensor, start: int) -> torch.Tensor:
        return x if x.shape[axis] == 1 else x.narrow(axis, start, min(width, size - start))

    blocks = [run(part(a, start) * part(b, start), dims, keepdim, dtype=dtype) for start in range(0, size, width)]
    return torch.cat(blocks, out_axis)


def contracted(a: torch.Tensor, b: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Return ``(a * b).sum(dims, keepdim)`` of two tensors of one rank, without writing the product out.

    An axis along which an operand was expanded is left out of this operand, so ``torch.einsum`` gets the operands as
    they were. If neither operand has a summed axis, the total is multiplied by the size of that axis.
    """
    shape, every = torch.broadcast_shapes(a.shape, b.shape), range(a.dim())
    axes = [[d for d in every if x.shape[d] > 1 and x.stride(d) != 0] for x in (a, b)]
    small = [x[tuple(slice(None) if d in own else 0 for d in every)] for x, own in zip((a, b), axes, strict=True)]
    out = [d for d in every if d not in dims and (d in axes[0] or d in axes[1])]
    total = torch.einsum(small[0], axes[0], small[1], axes[1], out)
    counted = math.prod(shape[d] for d in dims if d not in axes[0] and d not in axes[1])
    total = total * counted if counted != 1 else total
    for d in every:
        if d not in out and (d not in dims or keepdim):
            total = total.unsqueeze(d if keepdim else d - sum(other < d for other in dims))
    kept = [d for d in every if d not in dims or keepdim]
    return total.expand([1 if d in dims else shape[d] for d in kept])


def _only_summed(n: Node) -> bool:
    return bool(n.users) and all(user.target in SUMS_OVER_AXES for user in n.users)


def _replaced(values: Any, dtype: torch.dtype) -> Any:
    """Replace the dtypes among arguments that are to be computed in another."""
    if isinstance(values, torch.dtype):
        return _REPLACED[dtype].get(values, values)
    if isinstance(values, (list, tuple)):
        return type(values)(_replaced(v, dtype) for v in values)
    if isinstance(values, dict):
        return {key: _replaced(v, dtype) for key, v in values.items()}
    return values


def _as(x: Any, dtype: torch.dtype | None) -> Any:
    """Convert a tensor that is to be computed in another dtype."""
    return x.to(_REPLACED[dtype].get(x.dtype, x.dtype)) if dtype and isinstance(x, torch.Tensor) else x


def computing_in(gm: GraphModule, dtype: torch.dtype) -> GraphModule:
    """Copy a graph so that it computes in a dtype what it computes in those that this one replaces."""
    graph = copy.deepcopy(gm.graph)
    for node in graph.nodes:
        node.args, node.kwargs = _replaced(node.args, dtype), _replaced(node.kwargs, dtype)
    twin = GraphModule(gm, graph)
    for node in graph.find_nodes(op="get_attr"):
        setattr(twin, str(node.target), _as(getattr(gm, str(node.target)), dtype))
    return twin


def with_gradients(
    gm: GraphModule, inputs: Sequence[Any], needed: Sequence[bool], dtype: torch.dtype | None = None
) -> Any:
    """Run a graph and return its results, followed by the gradients of the inputs that need one.

    The gradients are those of a sum of all results with fixed random weights.
    """
    xs = [_as(x, dtype) for x in inputs]
    xs = [
        x.detach().requires_grad_(need) if isinstance(x, torch.Tensor) else x
        for x, need in zip(xs, needed, strict=True)
    ]
    with torch.enable_grad():
        results = Evaluator(gm, dtype).run(*xs)
        results = results if isinstance(results, (tuple, list)) else (results,)
        roots = [y for y in results if y.requires_grad]
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(y.shape, generator=generator).to(y) for y in roots]
        leaves = [x for x, need in zip(xs, needed, strict=True) if need]
        gradients = torch.autograd.grad(roots, leaves, weights, allow_unused=True, materialize_grads=True)
    return tuple(y.detach() for y in (*results, *gradients))


def evaluate(gm: GraphModule, inputs: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """Run a graph as it is, or in another dtype: float64 stands in for all narrower ones, float32 for float64."""
    with torch.no_grad():
        return Evaluator(gm, dtype).run(*(_as(x, dtype) for x in inputs))


_NESTING = ("_vmap_increment_nesting", "_vmap_decrement_nesting")


def values_at(graph: Graph, names: Sequence[str], inputs: Sequence[Any]) -> dict[str, Any]:
    """Run the part of a graph that some of its nodes depend on, and return their values.

    Args:
        graph: The graph.
        names: Nodes whose values are wanted.
        inputs: One value a placeholder of the whole graph.
    """
    wanted = [node for node in graph.nodes if node.name in set(names)]
    # No value says that what is between these two runs under ``vmap``, as Dynamo writes it out.
    nesting = [node for node in graph.nodes if getattr(node.target, "__name__", "") in _NESTING]
    needed = set(walk([*wanted, *nesting]))
    part = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(tuple(copies[node] for node in wanted))
    gm = GraphModule(graph.owning_module or {}, part)
    return dict(zip((node.name for node in wanted), evaluate(gm, inputs), strict=True))
