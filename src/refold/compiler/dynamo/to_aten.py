"""Functions of fake values as ATen graphs, as autograd is to see them, or to be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta

from ..ir.fx import known

aten = torch.ops.aten
prims = torch.ops.prims

# Spellings of arithmetic. Nothing else may be decomposed before autograd: the derivative of a decomposition can be
# another than PyTorch's own where an intermediate value is infinite.
_SPELLINGS = (
    "_to_copy", "addcdiv", "addmv", "lerp", "mul", "new_zeros", "rsub", "sub", "unsafe_split",
    "zeros_like", "ones_like", "full_like", "zeros", "ones",
)  # fmt: skip


# Torch's own spelling of a stack joins the parts and splits the axis again, which is hard to read by elements. With a
# factor that depends on the step, Dynamo itself spells addcdiv by a product and a sum in one.
def _added_product(product: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Spell a sum of a matrix and a product, if the matrix may be a state: one of the shape of the product."""

    def spelled(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        rank = max(2, a.dim())
        if x.dim() < rank or not x.is_floating_point():
            return NotImplemented
        out = product(a, b)
        out = out if alpha == 1 else alpha * out
        return out.expand(x.shape) if beta == 0 else (x if beta == 1 else beta * x) + out

    return spelled


def _replaced(x: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, accumulate: bool = False) -> Any:
    """Spell ``x[mask] = values`` as a choice, if each of the elements gets the same values."""
    mask, before = indices[-1], indices[:-1]
    if mask is None or mask.dtype != torch.bool or any(i is not None for i in before) or accumulate:
        return NotImplemented
    rest = x.dim() - len(before) - mask.dim()
    if values.dim() > rest and not all(isinstance(size, int) and size == 1 for size in values.shape):
        return NotImplemented
    values = values.reshape(()) if values.dim() > rest else values
    return torch.where(mask.reshape([*mask.shape, *[1] * rest]), values, x)


def _filled(x: torch.Tensor, mask: torch.Tensor, fill: Any) -> torch.Tensor:
    """Spell ``masked_fill`` as a choice, whose derivatives are the same; torch 2.15 spells ``x[mask] = 0`` by it."""
    fill = fill.to(x.dtype) if isinstance(fill, torch.Tensor) else torch.full((), fill, dtype=x.dtype, device=x.device)
    return torch.where(mask, fill, x)


def _mixed(x: torch.Tensor, y: torch.Tensor, weight: float) -> torch.Tensor:
    """Spell ``lerp``; torch 2.11 makes a tensor of the factor, of the state's kind."""
    far = weight >= 0.5 or weight <= -0.5
    return torch.add(y, y - x, alpha=weight - 1) if far else torch.add(x, y - x, alpha=weight)


def _one_by_one(name: str) -> Callable[..., Any]:
    """Spell an operation on lists of tensors tensor by tensor."""
    plain = getattr(torch, name)

    def spelled(xs: Sequence[torch.Tensor], *rest: Any, **kwargs: Any) -> list[torch.Tensor]:
        lists = [y if isinstance(y, (list, tuple)) else [y] * len(xs) for y in rest]
        if name.startswith("addc"):  # whose factor may come last
            factors = lists[2] if len(lists) > 2 else [1] * len(xs)
            return [plain(x, a, b, value=v) for x, a, b, v in zip(xs, *lists[:2], factors, strict=True)]
        return [plain(*row, **kwargs) for row in zip(xs, *lists, strict=True)]

    return spelled


_ON_LISTS = ("add", "sub", "mul", "div", "lerp", "neg", "sqrt", "addcmul", "addcdiv")

_OWN_SPELLINGS: dict[Any, Callable[..., Any]] = {
    aten.stack.default: lambda xs, dim=0: torch.cat([x.unsqueeze(dim) for x in xs], dim),
    **({prims.fma.default: lambda a, b, c: a * b + c} if hasattr(prims, "fma") else {}),
    aten.addmm.default: _added_product(torch.mm),
    aten.baddbmm.default: _added_product(torch.bmm),
    aten.addbmm.default: _added_product(lambda a, b: torch.bmm(a, b).sum(0)),
    aten.addr.default: _added_product(lambda a, b: a.unsqueeze(1) * b),
    aten.addcmul.default: lambda x, a, b, value=1: torch.add(x, a * b, alpha=value),
    aten.mv.default: lambda a, b: (a * b).sum(1),
    aten.index_put.default: _replaced,
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _filled),
    aten.lerp.Scalar: _mixed,
    **{
        getattr(packet, kind): _one_by_one(name)
        for name in _ON_LISTS
        for packet in [getattr(aten, f"_foreach_{name}")]
        for kind in {"default", "Scalar", "List", "ScalarList"} & {*packet.overloads()}
    },
}
# Views that a tensor is given in place, as products of vectors do within.
_VIEWS_IN_PLACE = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
}


def environment(values: Sequence[Any]) -> Any:
    """Return the shape environment of the symbols among sizes, or a new one."""
    sizes = [n for x in values for n in ((*x.shape, *x.stride()) if isinstance(x, torch.Tensor) else (x,))]
    symbols = [n for n in sizes if not isinstance(known(n), int)]
    return symbols[0].node.shape_env if symbols else ShapeEnv()


def to_aten(mode: FakeTensorMode, fn: Callable[..., Any], *inputs: Any, to_read: bool = False) -> GraphModule:
    """Trace a function of fake values to ATen, as autograd is to see it; changes in place become new values.

    Args:
        mode: Where the fake values live.
        fn: The function.
        inputs: Its arguments.
        to_read: Whether the graph is only read: then all is decomposed as Inductor does it, but for sums of complex
            values, which it adds as the bits of real ones: those have no derivative.
    """
    chosen = {
        op: rule
        for op, rule in select_decomp_table().items()
        if (_packet(op) != "add" if to_read else _packet(op) in _SPELLINGS)
    }
    if not to_read:
        chosen |= _OWN_SPELLINGS
    with mode, torch.no_grad(), preserve_node_meta():
        fn = functionalize(fn, remove="mutations")
        try:
            module = make_fx(fn, decomposition_table=chosen)(*inputs)
        except RuntimeError as error:
            if "symbolic sizes" not in str(error):
                raise
            with enable_python_dispatcher():  # what torch 2.11 decomposes in C++ knows no symbols
                module = make_fx(fn, decomposition_table=chosen)(*inputs)
    for node in module.graph.nodes:
        node.target = _VIEWS_IN_PLACE.get(node.target, node.target)
    return module


def _packet(op: Any) -> str:
    name = str(op)
    return name.removeprefix("aten.").split(".")[0] if name.startswith("aten.") else ""
