"""Run any PyTorch program, autograd included, in another dtype: operation by operation, below autograd.

`refold.compiler.ir.evaluate` does the same to an ATen graph. A whole program as Dynamo captured it has
loops, mutation and autograd, and is not one graph; here a dispatch mode sees each operation that it runs.

A product that is only summed is not written out: it stays a pair of factors until something else than
a sum asks for it. The tensor that stands for it has no memory of its own, so nothing may write to it.
The gradient of what each step of a loop reads a part of is a sum of one tensor per step, zero but for that part. Such
sums stay lists of parts in the same way: written out, they take as much time as the square of the steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from ...verify.memory import available_bytes
from ..private import TorchDispatchMode, schema, tree_leaves, tree_map
from .evaluate import BLOCK, SINGLE, WIDER, contracted, summed_in_blocks
from .fx import SUMS_OVER_AXES, is_random

aten = torch.ops.aten

# The gradient of a part is that part among zeros; gradients are added.
_PARTS = (aten.select_backward.default, aten.slice_backward.default)
_ADDS = (aten.add.Tensor, aten.add_.Tensor)
# Arguments that are the same in every dtype.
_AS_IS = frozenset((int, float, bool, str, type(None)))
# How many products that were written out are kept for their next use.
KEPT = 2
# What draws random numbers and nothing else. The results of these are recorded, and replayed in another dtype.
_DRAWS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "rand", "random", "uniform")


class Impossible(Exception):
    """A program cannot be run in another dtype; the message says why."""


class NoRoom(Impossible):
    """Memory is too small."""


class _Lazy(Impossible):
    """Something writes to a product that was not written out."""


@dataclass
class _Parts:
    """A tensor, or zeros, with tensors that are added at positions of one axis: the first ones of a list."""

    storage: torch.UntypedStorage
    shape: torch.Size
    axis: int
    base: torch.Tensor | None
    parts: list[tuple[int, torch.Tensor]]
    count: int
    whole: torch.Tensor | None = None

    def written(self) -> torch.Tensor:
        """Return the sum, the same tensor each time."""
        if self.whole is None:
            zero = self.parts[0][1].new_zeros
            self.whole = self.add_to(zero(self.shape) if self.base is None else self.base.clone())
        return self.whole

    def add_to(self, x: torch.Tensor) -> torch.Tensor:
        """Add the parts to a tensor, in place."""
        for start, part in self.parts[: self.count]:
            x.narrow(self.axis, start, part.shape[self.axis]).add_(part)
        return x


class Computing(TorchDispatchMode):
    """Computes in float64 what the program computes in narrower types, or in float32 what it computes in any other.

    Without a dtype it computes in the program's own types. A product that is only summed is then multiplied and summed
    in blocks, as rounded as it would be if it were written out.
    """

    def __init__(self, dtype: torch.dtype | None, draws: Sequence[torch.Tensor] = (), *, lazy: bool = True) -> None:
        super().__init__()
        self.dtype = dtype
        self.into = {torch.float64: WIDER, torch.float32: SINGLE, None: {}}[dtype]
        self.draws = iter(draws)
        self.lazy = lazy
        # By the address of the memory that stands for them; and their shapes, which few other tensors have.
        self.sums: dict[int, _Parts] = {}
        self.shapes: set[torch.Size] = set()
        # By the address of the memory that stands for them: that memory, and the factors.
        self.products: dict[int, tuple[torch.UntypedStorage, torch.Tensor, torch.Tensor]] = {}
        # Those that were written out last, by the same address: each step of a loop may read its part of one.
        self.written: dict[int, torch.Tensor] = {}
        # Where they, their factors, and those written out lie.
        self.in_use: set[int] = set()

    def run(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation in the other dtype; a long loop has a million of them."""
        kwargs = kwargs or {}
        if _is_special(func):
            if func in (aten.view.dtype, aten.view_copy.dtype):
                raise Impossible("it reads the bits of a tensor as another type")
            if kind := _randomness(func, args, kwargs):
                return self._replay(func, args, kind)
        if self.products:
            if func in SUMS_OVER_AXES and not kwargs.get("dtype") and (found := self._find(args[0])):
                return self._sum(func, found, *args[1:], **kwargs)
            self._check_writes(func, (args, kwargs))
            args, kwargs = tree_map(self._written_out, (args, kwargs))
        if self.lazy and self.dtype is not None:
            if func in _PARTS and (stands := self._part(*args)) is not None:
                return stands
            if self.sums and func in _ADDS and not kwargs and (total := self._added(func, *args)) is not None:
                return total
        args = [self._replaced(x) for x in args]
        if kwargs:
            kwargs = self._replaced(kwargs)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if len(tensors) > 1 and _exceed_block(tensors):
            if func is aten.mul.Tensor and self.lazy and (product := self._postponed(*args)) is not None:
                return product
            self._check_room(tensors)
        return func(*args, **kwargs)

    def _replaced(self, x: Any) -> Any:
        if type(x) in _AS_IS:
            return x
        if isinstance(x, torch.Tensor):
            x = x if (found := self._parts_of(x)) is None else found.written()
            return x.to(self.into[x.dtype]) if x.dtype in self.into else x
        if isinstance(x, torch.dtype):
            return self.into.get(x, x)
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._replaced, x))
        return {key: self._replaced(v) for key, v in x.items()} if isinstance(x, dict) else x

    def _replay(self, func: Any, args: Sequence[Any], kind: str) -> Any:
        drawn = next(self.draws, None)
        if drawn is None:
            raise Random
        drawn = self._replaced(drawn)
        if kind == "dropout":
            x, p = args[:2]
            return x * drawn / (1 - p) if p < 1 else x * 0, drawn
        return args[0].copy_(drawn) if schema(func).is_mutable else drawn

    # Sums of parts that are not written out -------------------------------------------------------

    def _parts_of(self, x: Any) -> _Parts | None:
        return self.sums.get(_address(x)) if self.sums and x.shape in self.shapes else None

    def _stand(self, shape: torch.Size, axis: int, base: Any, parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        stands = parts[0][1].new_empty(1)
        self.sums[_address(stands)] = _Parts(stands.untyped_storage(), shape, axis, base, parts, len(parts))
        self.shapes.add(shape)
        return stands.expand(shape)

    def _part(self, grad: Any, shape: Any, axis: int, start: int, *end: int) -> torch.Tensor | None:
        grad, shape, axis = self._replaced(grad), torch.Size(shape), axis % len(shape)
        if end[1:] not in ((), (1,)) or grad.dtype != self.dtype or not shape.numel():
            return None
        start = min(max(start + shape[axis] * (start < 0), 0), shape[axis])
        part = grad.clone()
        return self._stand(shape, axis, None, [(start, part if end else part.unsqueeze(axis))])

    def _added(self, func: Any, a: torch.Tensor, b: Any) -> torch.Tensor | None:
        """Add what stands for parts of nothing to such a sum, or to a tensor."""
        other = self._parts_of(b) if isinstance(b, torch.Tensor) else None
        if other is None or other.whole is not None or other.base is not None or a.shape != b.shape:
            return None
        mine = self._parts_of(a)
        if a.dtype != b.dtype or (mine and (func is aten.add_.Tensor or mine.whole is not None)):
            return None
        if func is aten.add_.Tensor:
            return other.add_to(a)
        if mine is None:
            return self._stand(other.shape, other.axis, a.clone(), other.parts[: other.count])
        if mine.axis != other.axis:
            return None
        parts = mine.parts if len(mine.parts) == mine.count else mine.parts[: mine.count]
        parts += other.parts[: other.count]
        return self._stand(mine.shape, mine.axis, mine.base, parts)

    # Products that are not written out ------------------------------------------------------------

    def _postponed(self, a: Any, b: Any) -> torch.Tensor | None:
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype):
            return None
        if a.dtype != self.dtype and not (self.dtype is None and a.is_floating_point()):
            return None
        shape = torch.broadcast_shapes(a.shape, b.shape)
        stands = a.new_empty(1)
        self.products[_address(stands)] = stands.untyped_storage(), a.expand(shape), b.expand(shape)
        self.in_use |= {_address(stands), _address(a), _address(b)}
        return stands.expand(shape)

    def _find(self, x: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        found = self.products.get(_address(x)) if isinstance(x, torch.Tensor) else None
        return found and found[1:]

    def _sum(
        self, func: Any, product: tuple[torch.Tensor, torch.Tensor], dims: Any, keepdim: bool = False, **_: Any
    ) -> torch.Tensor:
        a, b = product
        dims = [d % a.dim() for d in (dims if dims else range(a.dim()))]
        if self.dtype is None:
            return summed_in_blocks(func, a, b, dims, keepdim).contiguous()
        total = contracted(a, b, dims, keepdim)
        return (total / math.prod(a.shape[d] for d in dims) if func is aten.mean.dim else total).contiguous()

    def _written_out(self, x: Any) -> Any:
        found = self._find(x)
        if found is None:
            return x
        at = _address(x)
        whole = self.written.pop(at, None)
        if whole is None:
            if _exceed_block(found):
                self._check_room(found)
            whole = found[0] * found[1]
            self.in_use.add(_address(whole))
        self.written[at] = whole
        if len(self.written) > KEPT:
            del self.written[next(iter(self.written))]
        return whole

    def _check_writes(self, func: Any, args: Any) -> None:
        """Refuse what writes to such a product or its factors, or relies on how the product lies in memory."""
        strides = any("stride" in argument.name for argument in schema(func).arguments)
        if schema(func).is_mutable or strides:
            tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if any(_address(x) in (self.in_use if schema(func).is_mutable else self.products) for x in tensors):
                raise _Lazy

    def _check_room(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse to broadcast tensors to one that does not fit in memory."""
        if sum(x.dim() > 0 for x in tensors) < 2:
            return
        try:
            shape = torch.broadcast_shapes(*(x.shape for x in tensors))
        except RuntimeError:
            return
        dtype = self.dtype or tensors[0].dtype
        needed = 2 * shape.numel() * dtype.itemsize
        if needed > (free := available_bytes(tensors[0].device)):
            sizes = f"{needed / 2**30:.1f} GiB are needed, and {free / 2**30:.1f} GiB are free"
            raise NoRoom(f"in {str(dtype)[6:]} it does not fit in memory: {sizes}")


def _exceed_block(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether tensors may broadcast to more elements than a block: ``torch.broadcast_shapes`` takes far longer."""
    if math.prod([x.numel() for x in tensors]) <= BLOCK:
        return False
    return math.prod(map(max, zip_longest(*(reversed(x.shape) for x in tensors), [1], fillvalue=1))) > BLOCK


# In the class itself PyTorch would wrap it, to keep Dynamo out; `in_dtype` does so once for all operations.
Computing.__torch_dispatch__ = Computing.run  # type: ignore[assignment]


@functools.cache
def _is_special(func: Any) -> bool:
    """Tell whether an operation may draw random numbers, or reads bits as another type."""
    return func in (aten.view.dtype, aten.view_copy.dtype) or is_random(func)


class Random(Exception):
    """A program drew random numbers that were not recorded."""


class Recording(TorchDispatchMode):
    """Keeps the random numbers that a program draws."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if kind := _randomness(func, args, kwargs):
            self.draws.append((result[1] if kind == "dropout" else result).clone())
        return result


def _randomness(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return how an operation is random: ``draws``, ``dropout``, or not at all.

    Raises:
        Impossible: It is in another way.
    """
    if not is_random(func):
        return ""
    name = schema(func).name.partition("::")[2].rstrip("_")
    if name == "native_dropout":
        return "dropout" if args[2] is not False else ""
    if name.startswith(_DRAWS):
        return "draws"
    names = [argument.name for argument in schema(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    defaults = {argument.name: argument.default_value for argument in schema(func).arguments}
    if "dropout_p" in names and not given.get("dropout_p", defaults["dropout_p"]):
        return ""
    raise Impossible(f"{name} is random in a way that cannot be replayed")


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else 0


def _itself(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


@torch.compiler.disable
def in_dtype(run: Callable[[], Any], dtype: torch.dtype | None, draws: Sequence[torch.Tensor] = ()) -> Any:
    """Call a program with all it computes in another dtype, or with nothing but large products computed otherwise.

    Raises:
        Impossible: It cannot be done.
        Random: It draws more random numbers than were recorded.
    """
    try:
        with Computing(dtype, draws):
            return tree_map(_itself, run())  # what stands for a product or a sum is written out
    except _Lazy:
        with Computing(dtype, draws, lazy=False):
            return run()
