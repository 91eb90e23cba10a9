"""Hand the gated RMS norm after a scan to the operator that it is, on a GPU.

Forward, such a norm fuses into one kernel, which reads its inputs twice where a row is long. Its backward needs sums
over the channels of a token and over all tokens, and the gradient of the gate, which is then joined with others to the
gradient of the projection that all come from. The operator's backward is one pass.

The norm is ``v * rsqrt(mean(v²) + eps) * weight`` with ``v = x * silu(z)``, over all channels or over groups of them.
It may be widened to float32 between 16-bit values. The operator computes in float32, and so rounds less often.

Shapes. x, z and the result are (..., d), weight is (d,). Source: Zhang & Sennrich 2019 (arXiv:1910.07467); the gate as
in Dao & Gu 2024 (arXiv:2405.21060), section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch.fx import Graph, Node

from ..ir.builder import Builder
from ..ir.cost import has_pointwise_kernels
from ..ir.fx import CONVERT, VIEWS, arg, is_tensor, same, value
from ..ir.operators import NORM
from ..ir.rewrite import Rewrite, replace_node
from ..ir.silu import silu_argument
from ..ir.views import is_view

aten = torch.ops.aten
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def replace_gated_norms(graph: Graph, wanted: Callable[[str], bool]) -> Iterator[Rewrite]:
    """Replace ``v * rsqrt(mean(v²) + eps) * weight``, with ``v = x * silu(z)``, by ``gated_rmsnorm``."""
    for root in graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        norm = _read(root) if has_pointwise_kernels(value(root).device) else None
        if norm is None or not wanted(norm.end.name):
            continue
        build = Builder(norm.end)
        x, z = (_in_dtype(build, given, norm.dtype) for given in (norm.x, norm.z))
        if x is None or z is None:
            build.undo()
            continue
        channels = value(norm.end).shape[-1]
        given = NORM.args(
            x=x, z=z, weight=norm.weight, eps=norm.eps,
            group_size=norm.group_size, norm_before_gate=False,
        )  # fmt: skip
        y = build.call(NORM.target, *given)
        yield replace_node(
            norm.end,
            build.restride(y, value(norm.end)),
            added=build.added,
            name="replace gated norm",
            why="its gradients are sums over channels and over tokens, and its values are written out for them",
            detail=f"{channels} channels" + (f" in groups of {norm.group_size}" if norm.group_size else "")
            + f" as one {NORM.name}",
            multilinear=False,
            terms=channels,
            timed_alone=False,
        )  # fmt: skip
        graph.eliminate_dead_code()


@dataclass
class _Norm:
    """A gated norm: what it reads, and the node that holds its result in the dtype of the operator."""

    x: Node
    z: Node
    weight: Node
    eps: float
    group_size: int | None
    end: Node
    dtype: torch.dtype


def _read(rsqrt: Node) -> _Norm | None:
    """Read a gated norm around the reciprocal of its root; None if it is none."""
    total = arg(rsqrt, 0)
    if total.target is not aten.add.Tensor or not isinstance(eps := arg(total, 1), int | float) or total.kwargs:
        return None
    mean = arg(total, 0)
    if not (is_tensor(mean) and mean.target is aten.mean.dim and arg(mean, 2, "keepdim", False)):
        return None
    squared = arg(mean, 0)
    rank = value(squared).dim()
    power = squared.target is aten.pow.Tensor_Scalar and arg(squared, 1) == 2
    if not (power or (squared.target is aten.mul.Tensor and arg(squared, 0) is arg(squared, 1))):
        return None
    if [dim % rank for dim in arg(mean, 1)] != [rank - 1] or not (isfinite(eps) and eps >= 0):
        return None
    grouped = _before_widening(arg(squared, 0))
    gated, group_size = _ungrouped(grouped)
    scaled = _scaled(rsqrt, grouped)
    if scaled is None:
        return None
    weighted = _weighted(scaled, value(gated))
    product = _product_with_silu(gated)
    if weighted is None or product is None:
        return None
    (node, weight), (x, z) = weighted, product
    end, dtype = _end(node)
    weight = _before_widening(weight)
    if dtype not in _DTYPES or value(weight).dtype not in (dtype, torch.float32):
        return None
    if not all(isinstance(v.shape[-1], int) and v.shape == value(end).shape for v in (value(x), value(z))):
        return None
    return _Norm(x, z, weight, float(eps), group_size, end, dtype)


def _before_widening(node: Node) -> Node:
    """Find the node before its conversion to a wider type."""
    while node.target is CONVERT and value(node).dtype.itemsize > value(arg(node, 0)).dtype.itemsize:
        node = arg(node, 0)
    return node


def _ungrouped(node: Node) -> tuple[Node, int | None]:
    """Return the value whose last axis a node shows in groups, and the size of a group; None if there are none."""
    if node.target in VIEWS:
        whole, shape = value(arg(node, 0)).shape, value(node).shape
        if len(shape) == len(whole) + 1 and all(map(same, shape[:-2], whole[:-1])) and isinstance(shape[-1], int):
            return arg(node, 0), shape[-1]
    return node, None


def _scaled(rsqrt: Node, base: Node) -> Node | None:
    """Return the product of a value and the reciprocal of its root; None if that has other readers."""
    if len(rsqrt.users) != 1:
        return None
    (product,) = rsqrt.users
    other = [x for x in product.args if x is not rsqrt]
    if product.target is not aten.mul.Tensor or len(other) != 1 or not is_tensor(other[0]):
        return None
    return product if _before_widening(other[0]) is base else None  # type: ignore[arg-type]


def _weighted(node: Node, like: torch.Tensor) -> tuple[Node, Node] | None:
    """Follow a normalised value to its product with a weight per channel; return both."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.mul.Tensor:
            other = [x for x in user.args if x is not node]
            if len(other) != 1 or not is_tensor(other[0]) or value(user).shape != like.shape:
                return None
            shape = value(other[0]).shape  # type: ignore[arg-type]
            return (user, other[0]) if [*shape] == [like.shape[-1]] else None  # type: ignore[return-value]
        if user.target is not CONVERT and not (user.target in VIEWS and value(user).shape == like.shape):
            return None
        node = user
    return None


def _product_with_silu(node: Node) -> tuple[Node, Node] | None:
    """Return x and z if a node is ``x * silu(z)``."""
    if node.target is not aten.mul.Tensor:
        return None
    for x, gate in (node.args, node.args[::-1]):
        if is_tensor(x) and is_tensor(gate):
            while gate.target is CONVERT:  # type: ignore[union-attr]
                gate = arg(gate, 0)  # type: ignore[arg-type]
            if (z := silu_argument(gate)) is not None:  # type: ignore[arg-type]
                return x, z  # type: ignore[return-value]
    return None


def _end(node: Node) -> tuple[Node, torch.dtype]:
    """Return the node at which a result has its last dtype: the only reader of a wide one may narrow it."""
    if len(node.users) == 1:
        (user,) = node.users
        if user.target is CONVERT and value(user).dtype.itemsize < value(node).dtype.itemsize:
            return user, value(user).dtype
    return node, value(node).dtype


def _in_dtype(build: Builder, node: Node, dtype: torch.dtype) -> Node | None:
    """Return a value as it was before it was widened, moved as it was moved since; None if it was not widened."""
    if value(node).dtype == dtype:
        return node
    if node.target is CONVERT:
        return _in_dtype(build, arg(node, 0), dtype) if value(arg(node, 0)).dtype.itemsize <= dtype.itemsize else None
    if not (is_view(node) or node.target is aten.slice.Tensor):
        return None
    inner = _in_dtype(build, arg(node, 0), dtype)
    if inner is None:
        return None
    if node.target in VIEWS:
        return build.reshape(inner, list(value(node).shape))
    if inner.target is aten.constant_pad_nd.default and value(arg(inner, 0)).shape == value(node).shape:
        first = arg(node, 2, "start") in (0, None) and all(before == 0 for before in arg(inner, 1)[::2])
        if first and arg(node, 4, "step", 1) == 1:
            return arg(inner, 0)  # the zeros at its end are cut off again
    return build.call(node.target, inner, *node.args[1:], **node.kwargs)
