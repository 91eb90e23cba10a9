"""Launching Triton kernels with little host time.

A Triton launch through ``kernel[grid](...)`` binds, specialises and hashes every argument: 15 to 30 microseconds for a
kernel with thirty of them. A `Launch` does that once, and then calls the compiled kernel directly. It is part of a
plan. A plan is valid while everything that Triton specialises on stays the same (dtypes, integers, 16-byte alignment of
pointers). So an operator is planned once per signature (`refold.ops.torch.plans`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton

from refold.ops.spec import Meta
from refold.ops.torch import plans, private
from refold.ops.torch.compiles import compile_together, compiling
from refold.ops.torch.plans import Planned
from refold.ops.torch.tables import family
from refold.versions import UNTESTED, lose, untested

PTX = os.environ.get("TRITON_INTERPRET", "0") != "1" and torch.version.hip is None
"""Whether kernels may hold PTX: the plain exp2 spends two more instructions per value on denormal results."""

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def _directly() -> bool:
    """Whether this Triton's compiled kernels may be launched directly; warns once if not."""
    if (why := untested("triton", triton.__version__)) is not None:
        lose_speed(why)
    return why is None


def lose_speed(why: str) -> None:
    """Note that Triton's own launch runs."""
    lose(UNTESTED["triton"], why, "triton")


def later(**places: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module that has names of others, imported when they are first asked for.

    A file of kernels takes 20 to 60 ms, of which Triton reads the source of each.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"no {name}")
        return getattr(import_module(places[name]), name)

    return find


@cache
def gluon(*modules: str) -> ModuleType | None:
    """Import kernels in Gluon and what they need; the first is returned.

    Gluon is an experimental part of Triton, and its names change. Without one of them the plain kernels run, and a
    `RefoldWarning` says so once.
    """
    try:
        first, *_ = map(import_module, modules)
    except (ImportError, AttributeError) as error:
        reason = f"Triton {triton.__version__} has not all of Gluon that {modules[0]} needs ({error})"
        lose("the plain Triton kernels run, slower", reason, "triton")
        return None
    return first


class Launch:
    """One kernel at one grid with fixed integers and constants; only its tensors change from call to call.

    The first call goes through Triton and compiles. The second is the first direct one: if it fails before the kernel
    starts, Triton's own launch is used from then on, and a `RefoldWarning` says so.
    """

    __slots__ = ("compiled", "consts", "direct", "grid", "kernel", "options", "tail")

    def __init__(self, kernel: Any, grid: tuple[int, ...], consts: dict[str, Any], options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.consts = consts
        self.options = options
        self.compiled: Any = None
        self.direct: bool | None = None
        """Whether a direct launch has worked; None before the first one."""
        self.tail: tuple[Any, ...] = ()

    @property
    def takes_addresses(self) -> bool:
        """Whether tensors may be given by their addresses, for which the driver is asked less."""
        return bool(self.direct)

    def __call__(self, stream: int, *args: Any) -> None:
        """Launch with ``args``, the kernel's arguments before its constants, on the raw stream handle."""
        if self.direct:
            self._launch(stream, args)
        elif self.compiled is None or self.direct is False:
            self._through_triton(args)
        else:
            try:
                self._launch(stream, args)
                self.direct = True
            except (AttributeError, TypeError, ValueError) as error:  # another interface, seen before the kernel starts
                lose_speed(f"a direct launch failed ({error})")
                self.direct = False
                self._through_triton(args)

    def _through_triton(self, args: tuple[Any, ...]) -> None:
        if compiling.get():
            self.kernel.warmup(*args, grid=self.grid, **self.consts, **self.options)
            return
        compiled = self.kernel[self.grid](*args, **self.consts, **self.options)
        if INTERPRETED or self.compiled is not None:
            return
        names = [p.name for p in self.kernel.params[len(args) :]]
        self.tail = tuple(self.consts[name] for name in names)
        self.compiled = compiled
        if not _directly():
            self.direct = False

    def _launch(self, stream: int, args: tuple[Any, ...]) -> None:
        compiled, hooks = self.compiled, triton.knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        x, y, z = self.grid
        # Triton would call its chains of hooks even where they are empty.
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None,
                     enter if getattr(enter, "calls", enter) else None,
                     leave if getattr(leave, "calls", leave) else None, *args, *self.tail)  # fmt: skip


class TileView(NamedTuple):
    """What the copy engine reads or writes of a tensor: tiles, whose rows are swizzled over 128 bytes on chip."""

    shape: list[int]
    strides: list[int]
    tile: list[int]
    bits: int = 16


def tile_view(tensor: torch.Tensor, width: int) -> TileView:
    """Return the view of tiles of 64 tokens of one head or group of ``tensor (b, t, h, n)``."""
    b, t, h, size = tensor.shape
    # The copy engine wants the stride of an axis of one element, too, to be one that it could take.
    steps = [tensor.stride(i) if tensor.shape[i] > 1 else 8 for i in (0, 2, 1)]
    return TileView([b, h, t, size], [*steps, 1], [1, 1, 64, width])


def on_hopper(device: torch.device) -> bool:
    """Whether kernels run on a GPU of NVIDIA's Hopper generation."""
    return not INTERPRETED and family(device) == "hopper"


def copyable(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can copy tiles of ``tensor (b, t, h, n)``: its rows lie on 16 bytes, for 16 bits."""
    steps = zip(tensor.shape[:3], tensor.stride(), strict=False)
    return (
        0 not in tensor.shape and tensor.data_ptr() % 16 == 0 and tensor.shape[3] % 8 == 0
        and all(size == 1 or (step > 0 and step % 8 == 0) for size, step in steps)
    )  # fmt: skip


class LaunchPlanned(Planned):
    """An operator whose plan launches kernels, on the device of the arrays; a signature's are compiled together."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compiled: set[str] = set()
        """The dtypes and options for which kernels have been compiled together."""

    def plan(self, **arguments: Any) -> Callable[..., Any]:
        """Return the plan for calls with this signature: a function of the arrays in the order of the spec."""
        device = next(a.device for a in arguments.values() if isinstance(a, torch.Tensor))
        if device.type != "cuda" or torch.cuda.device_count() == 1:
            return super().plan(**arguments)
        # Kernels are loaded on, and launched on, the current device.
        with torch.cuda.device(device):
            plan = super().plan(**arguments)

        def there(*arrays: Any) -> Any:
            if torch.cuda.current_device() == device.index:
                return plan(*arrays)
            with torch.cuda.device(device):
                return plan(*arrays)

        return there

    def made(self, arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the plan, whose kernels have been compiled."""
        plan = super().made(arguments)
        kinds = str([getattr(argument, "dtype", argument) for argument in arguments.values()])
        if not INTERPRETED and kinds not in self.compiled:
            self.compiled.add(kinds)
            compile_together(plan, [arguments[name] for name in self.names])
        return plan


planned = partial(plans.planned, kind=LaunchPlanned)


def current_stream(device: torch.device) -> int:
    """Return the raw handle of the current stream of ``device`` (0 under the interpreter)."""
    return 0 if INTERPRETED else private.raw_stream(device.index)


def last_contiguous(tensor: torch.Tensor | None) -> Any:
    """Return the tensor itself where its last axis is contiguous, else a copy."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def products(precision: str, dtype: torch.dtype, *tiles: int) -> str:
    """Say how kernels form products (`refold.ops.triton.math.dot`) of tiles; of float32, in ``precision``.

    Triton 3.6 does not compile chains of bfloat16 products of 16 x 16 tiles: they are formed in float32.
    """
    if INTERPRETED:
        return "widen"
    return "ieee" if dtype != torch.float32 or (precision == "bf16x6" and min(tiles) < 32) else precision


def block_of(size: int, states: int, most: int, tile: int) -> int:
    """Return how many of ``size`` channels a program takes, at most ``most``, whose states fit into ``tile``."""
    block = min(max(16, triton.next_power_of_2(size)), most)
    while block > 16 and block * states > tile:
        block //= 2
    return block


def strides(tensor: torch.Tensor | None, axes: int) -> tuple[int, ...]:
    """Return the strides of the first axes; zeros if there is no tensor."""
    return (0,) * axes if tensor is None else tensor.stride()[:axes]


def wide_rows(*tensors: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes, and are multiples of 16 elements apart."""
    return all(t.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in t.stride()[:-1]) for t in tensors)


def refusal(meta: Meta) -> str | None:
    """Say why no Triton kernel can run on this device or dtype; None if one can."""
    if meta.device != "cuda" and not INTERPRETED:
        return f"needs a GPU; these arrays are on {meta.device}"
    wide = [name for name, array in meta.arrays.items() if array.dtype == "float64"]
    return f"takes no float64; {wide[0]} is float64" if wide else None


def same_dtype(meta: Meta, *names: str) -> str | None:
    """Say which of the named arrays has another dtype than x; None if none has."""
    for name in names:
        if name in meta.arrays and meta.arrays[name].dtype != meta.dtype:
            return f"{name} must have the dtype of x, {meta.dtype}; it is {meta.arrays[name].dtype}"
    return None
