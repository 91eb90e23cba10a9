"""An interpreter of Gluon kernels with torch on the CPU. It ignores layouts, warps and time.

Triton's interpreter does not know Gluon. Here the source of a module of kernels is run as plain Python, with a ``gl``
whose tensors are torch's. Layouts are ignored: compiling checks them. Copies arrive at once and shared memory
begins as NaN, so that a value which was never written is found and a missing wait is not.

Specialised warp groups take turns: each runs until it waits for a barrier in shared memory. In every other program,
they have the opposite order. Where all of them wait, the kernel would hang, and the test fails.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Thread
from types import SimpleNamespace
from typing import Any

import torch

WARPS = 4


@dataclass(frozen=True)
class DType:
    """An element type."""

    torch: Any
    primitive_bitwidth: int


TYPES = {name: DType(getattr(torch, name), torch.empty(0, dtype=getattr(torch, name)).element_size() * 8)
         for name in ("float16", "bfloat16", "float32", "int8", "int32", "int64", "bool")}  # fmt: skip
TYPE_OF = {kind.torch: kind for kind in TYPES.values()}


def raw(value: Any) -> Any:
    """Return the torch tensor of a `Tensor`, and anything else as it is."""
    return value.data if isinstance(value, Tensor) else value


class Tensor:
    """A tensor, or a scalar, of a kernel."""

    def __init__(self, data: torch.Tensor, layout: Any = None) -> None:
        self.data = data
        self.type = SimpleNamespace(layout=layout)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> DType:
        return TYPE_OF[self.data.dtype]

    def to(self, kind: DType, bitcast: bool = False) -> Tensor:
        return Tensor(self.data.view(kind.torch) if bitcast else self.data.to(kind.torch), self.type.layout)

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.data.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return Tensor(self.data.permute(order))

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.data[index])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)


def _operation(name: str) -> Any:
    def operate(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Tensor(getattr(torch.as_tensor(self.data), name)(raw(other)), self.type.layout)

    return operate


_names = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "lt", "le", "gt",
          "ge", "eq", "ne")  # fmt: skip
for _name in _names:
    setattr(Tensor, f"__{_name}__", _operation(f"__{_name}__"))
    if _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
        setattr(Tensor, f"__r{_name}__", _operation(f"__r{_name}__"))
Tensor.__hash__ = object.__hash__  # type: ignore[method-assign]


@dataclass(frozen=True)
class Pointer:
    """Elements of an array, by their offsets from its first."""

    array: torch.Tensor
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=TYPE_OF[self.array.dtype])

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.offset + raw(offset))

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.offset - raw(offset))


def load(pointer: Pointer, mask: Any = None, other: Any = 0.0) -> Tensor:
    """Read elements; what is masked is not looked at."""
    memory = torch.as_strided(pointer.array, (pointer.array.untyped_storage().size() // pointer.array.element_size(),),
                              (1,), 0)  # fmt: skip
    at = torch.as_tensor(pointer.offset) + pointer.array.storage_offset()
    keep = torch.ones((), dtype=torch.bool) if mask is None else raw(mask)
    at, keep = torch.broadcast_tensors(at, keep)
    assert ((at >= 0) & (at < len(memory)) | ~keep).all(), "read outside of an array"
    found = memory[torch.where(keep, at, 0)]
    return Tensor(torch.where(keep, found, torch.as_tensor(other, dtype=found.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    """Write elements, in their type."""
    memory = torch.as_strided(pointer.array, (pointer.array.untyped_storage().size() // pointer.array.element_size(),),
                              (1,), 0)  # fmt: skip
    at = torch.as_tensor(pointer.offset) + pointer.array.storage_offset()
    keep = torch.ones((), dtype=torch.bool) if mask is None else raw(mask)
    at, keep, values = torch.broadcast_tensors(at, keep, torch.as_tensor(raw(value)))
    assert ((at >= 0) & (at < len(memory)) | ~keep).all(), "write outside of an array"
    memory[at[keep]] = values[keep].to(memory.dtype)


class Shared:
    """Shared memory."""

    layout: Any = None

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> DType:
        return TYPE_OF[self.data.dtype]

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def reinterpret(self, dtype: DType, shape: list[int], layout: Any) -> Shared:
        elements = self.data.view(-1).view(dtype.torch)
        assert len(elements) == math.prod(shape)
        return Shared(elements.view(shape))

    _reinterpret = reinterpret

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.data.clone())

    def store(self, value: Tensor) -> None:
        assert (value.shape, value.dtype) == (self.shape, self.dtype)
        self.data.copy_(value.data)


def _copy(tile: Shared, pointer: Pointer, mask: Any) -> None:
    tile.data.copy_(load(pointer, mask).data)


def _asm(text: str, constraints: str, args: list[Tensor], dtype: DType, pure: bool, pack: int) -> Tensor:
    if "mma.sync" in text:  # of blocks of 16 x 16 in float16
        a, b = (arg.data.view(-1, 16, 16).half().float() for arg in args)
        return Tensor((a @ b).view(-1, 16), args[0].type.layout)
    if text == "mov.b32 $0, 0;":  # a zero that the compiler does not know
        return Tensor(torch.tensor(0))
    function = {"ex2.approx.ftz.f32": torch.exp2, "rcp.approx.ftz.f32": torch.reciprocal}[text.split()[0]]
    return Tensor(function(args[0].data))


def _tf32(value: torch.Tensor) -> torch.Tensor:
    return (value.contiguous().view(torch.int32) & -8192).view(torch.float32)


def _mma(a: Tensor, b: Tensor, acc: Tensor, input_precision: str = "") -> Tensor:
    if a.data.dtype != torch.float32:
        return Tensor(acc.data + a.data.float() @ b.data.float(), acc.type.layout)
    assert input_precision == "tf32"
    return Tensor(acc.data + _tf32(a.data) @ _tf32(b.data), acc.type.layout)


@dataclass(frozen=True)
class Descriptor:
    """An array that the copy engine reads and writes in tiles; ``array`` has the shape that is described."""

    array: torch.Tensor
    layout: Any

    @property
    def dtype(self) -> DType:
        return TYPE_OF[self.array.dtype]

    def tile(self, at: list[Any], shape: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Return the part of a tile that is inside the array, and where it lies in the tile."""
        starts = [int(raw(start)) for start in at]
        assert all(start >= 0 for start in starts), "a tile begins before the array"
        ends = [min(a + n, size) for a, n, size in zip(starts, shape, self.array.shape, strict=True)]
        inside = tuple(slice(a, max(a, b)) for a, b in zip(starts, ends, strict=True))
        return self.array[inside], tuple(slice(0, max(0, b - a)) for a, b in zip(starts, ends, strict=True))


class Crew:
    """The warp groups of a program, one of which runs at a time, and the barriers for which they wait."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.barriers: dict[int, list[int]] = {}
        """By address: arrivals of a phase, those still to come, bytes still to come, and phases that are over."""
        self.changed = Condition()
        self.alive, self.turn, self.stuck, self.moved = [0], 0, 0, False  # a group, if nothing is specialized
        self.failure: BaseException | None = None

    def of(self, bar: Shared) -> list[int]:
        return self.barriers[bar.data.data_ptr()]

    def init(self, bar: Shared, count: int) -> None:
        self.barriers[bar.data.data_ptr()] = [count, count, 0, 0]

    def arrive(self, bar: Shared, count: int = 1, pred: Any = True, size: int = 0) -> None:
        """Let threads arrive, or bytes; a phase is over if all have."""
        if not pred:
            return
        state = self.of(bar)
        state[1] -= count
        state[2] += size
        assert state[1] >= 0, "more arrivals than a phase has"
        if state[1] == state[2] == 0:
            state[1] = state[0]
            state[3] += 1
            self.stuck, self.moved = 0, True

    def wait(self, bar: Shared, phase: Any, pred: Any = True) -> None:
        """Give the turn to the next group until a phase of this parity is over."""
        me = self.turn
        while pred and self.of(bar)[3] % 2 == int(raw(phase)) % 2:
            self.stuck += 1
            if self.stuck > 2 * len(self.alive):
                raise AssertionError("all warp groups wait")
            self._next()
            self._until(me)

    def _next(self) -> None:
        """Pass the turn on: to the first group, if it may have been waiting for this one."""
        self.turn = self.alive[0 if self.moved else (self.alive.index(self.turn) + 1) % len(self.alive)]
        self.moved = False
        self.changed.notify_all()

    def _until(self, me: int) -> None:
        self.changed.wait_for(lambda: self.turn == me or self.failure is not None)
        if self.failure is not None:
            raise RuntimeError("another warp group failed")

    def specialize(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], *options: Any) -> None:
        """Run functions side by side."""
        self.alive = list(range(len(parts)))[:: self.order]
        self.turn = self.alive[0]

        def run(me: int) -> None:
            function, args = parts[me]
            with self.changed:
                try:
                    self._until(me)
                    function(*args)
                    self.stuck = 0
                    self.moved = False
                    self._next()
                    self.alive.remove(me)
                except BaseException as error:
                    self.failure = self.failure or error
                    self.changed.notify_all()

        threads = [Thread(target=run, args=(me,)) for me in self.alive]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def load_tile(self, source: Descriptor, at: list[Any], bar: Shared, to: Shared) -> None:
        """Copy a tile in, with zeros where it leaves the array."""
        found, where = source.tile(at, to.shape)
        to.data.zero_()
        to.data[where] = found
        self.arrive(bar, 0, size=-to.data.numel() * to.data.element_size())

    @staticmethod
    def store_tile(target: Descriptor, at: list[Any], tile: Shared) -> None:
        """Copy a tile out, where it is inside the array."""
        inside, where = target.tile(at, tile.shape)
        inside.copy_(tile.data[where])

    def module(self) -> dict[str, Any]:
        """Return the names that kernels import for Hopper."""
        barriers = SimpleNamespace(
            init=self.init, arrive=self.arrive, wait=self.wait, MBarrierLayout=_layout,
            expect=lambda bar, size: self.arrive(bar, 1, size=size),
        )  # fmt: skip
        copies = SimpleNamespace(async_load=self.load_tile, async_store=self.store_tile, store_wait=lambda count: None)
        return {
            "mbarrier": barriers, "tma": copies, "fence_async_shared": lambda: None,
            "warpgroup_mma": _warpgroup_mma,
            "warpgroup_mma_init": lambda acc: acc,
            "warpgroup_mma_wait": lambda count, deps: deps[0] if len(deps) == 1 else tuple(deps),
        }  # fmt: skip


def _warpgroup_mma(a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    product = a.data.float() @ b.data.float()
    return Tensor(acc.data + product if use_acc else product)


def _split(value: Tensor) -> tuple[Tensor, Tensor]:
    return Tensor(value.data[..., 0]), Tensor(value.data[..., 1])


def _layout(*args: Any, **keywords: Any) -> tuple[Any, ...]:
    return args


class _Language(SimpleNamespace):
    """The names of ``gl`` for one program."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.crew = Crew(1 if sum(program) % 2 else -1)
        super().__init__(
            **TYPES, warp_specialize=self.crew.specialize, NVMMASharedLayout=_layout, split=_split,
            reduce=lambda v, axis, function: Tensor({"_least": torch.amin}[function.__name__](v.data, axis)),
            constexpr=lambda v: v, static_range=range, num_warps=lambda: WARPS, cdiv=self.cdiv,
            program_id=lambda axis: Tensor(torch.tensor(program[axis])),
            num_programs=lambda axis: Tensor(torch.tensor(grid[axis])),
            load=load, store=store, barrier=lambda: None, inline_asm_elementwise=_asm, shared_memory_descriptor=Shared,
            BlockedLayout=_layout, SliceLayout=_layout, DotOperandLayout=_layout, NVMMADistributedLayout=_layout,
            SwizzledSharedLayout=_layout, DistributedLinearLayout=_layout,
            abs=lambda v: Tensor(v.data.abs()), sqrt=lambda v: Tensor(v.data.sqrt()),
            sum=lambda v, axis: Tensor(v.data.sum(axis, dtype=v.data.dtype)),
            max=lambda v, axis: Tensor(v.data.amax(axis)), reshape=lambda v, shape: Tensor(v.data.reshape(shape)),
            permute=lambda v, axes: Tensor(v.data.permute(axes)),
            join=lambda a, b: Tensor(torch.stack([a.data, b.data], -1)),
            convert_layout=lambda v, layout, assert_trivial=False: Tensor(v.data, layout),
            where=lambda c, a, b: Tensor(torch.where(raw(c), raw(a), raw(b))),
            arange=lambda low, high, layout: Tensor(torch.arange(low, high)),
            zeros=lambda shape, kind, layout: Tensor(torch.zeros(shape, dtype=kind.torch), layout),
            full=lambda shape, value, kind, layout: Tensor(torch.full(shape, value, dtype=kind.torch), layout),
            minimum=lambda a, b: Tensor(torch.fmin(*_both(a, b))),
            maximum=lambda a, b: Tensor(torch.fmax(*_both(a, b))),
            allocate_shared_memory=lambda kind, shape, layout: Shared(
                torch.full(shape, math.nan if kind.torch.is_floating_point else -1, dtype=kind.torch)
            ),
        )  # fmt: skip

    @staticmethod
    def cdiv(a: Any, b: Any) -> Any:
        return (a + (b - 1)) // b


def _both(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of a minimum, which is NaN only if both are."""
    a, b = (torch.as_tensor(raw(v)) for v in (a, b))
    kind = torch.promote_types(a.dtype, b.dtype)
    return a.to(kind), b.to(kind)


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], consts: dict[str, Any]) -> None:
    """Run every program of a kernel of a Gluon module, one after the other."""
    scalars = (int, float)
    passed = [Pointer(a) if isinstance(a, torch.Tensor) else Tensor(torch.tensor(a)) if isinstance(a, scalars) else
              Descriptor(a.base.as_strided(a.shape, a.strides), a.layout) if hasattr(a, "block_shape") else a
              for a in args]  # fmt: skip
    for program in itertools.product(*map(range, grid)):
        _module(kernel.fn.__module__, _Language(program, grid))[kernel.fn.__name__](*passed, **consts)


def launched(monkeypatch: Any, *kernels: str) -> list[str]:
    """Run the kernels of modules so where plans launch them, and all others as ever; list the names of what runs."""
    from refold.ops.torch.launch import Launch  # tests set what its import reads

    names, launch = list[str](), Launch.__call__

    def call(self: Any, stream: Any, *args: Any) -> None:
        names.append(self.kernel.fn.__name__)
        if self.kernel.fn.__module__ in kernels:
            run(self.kernel, self.grid, args, self.consts)
        else:
            launch(self, stream, *args)

    monkeypatch.setattr(Launch, "__call__", call)
    return names


def _module(name: str, language: _Language) -> dict[str, Any]:
    """Return the names of a module of kernels that is run again, with ``language`` for ``gl``."""
    names: dict[str, Any] = {"__name__": f"interpreted.{name}"}
    text = inspect.getsource(sys.modules[name])
    stand_ins = {"gluon": SimpleNamespace(jit=lambda f: f, constexpr_function=lambda f: f), "gl": language,
                 "language": language, "mma_v2": _mma, **language.crew.module(),
                 "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
                 "async_copy": SimpleNamespace(
                     async_load=_copy, async_copy_global_to_shared=_copy, commit_group=lambda: None,
                     wait_group=lambda count: None)}  # fmt: skip

    def imported(module: str, *rest: Any) -> Any:
        if module.startswith("triton."):
            return SimpleNamespace(**stand_ins)
        if module.startswith("refold."):
            return SimpleNamespace(**_module(module, language))
        return __import__(module, *rest)

    builtins = vars(sys.modules["builtins"]) | {"__import__": imported}
    names["__builtins__"] = builtins
    exec(compile(text, name, "exec"), names)
    return names
