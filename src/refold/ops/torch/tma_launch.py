"""Launching kernels that read and write through the copy engine, without describing their tensors anew each time.

Triton encodes a tensor map for every descriptor at every launch, 1.2 microseconds each; a call of `ssd` has seven or
eight. A `MappedLaunch` lays a kernel's parameters out in memory once, in the form that ``cuLaunchKernelEx`` of the
driver reads. A call fills in addresses, points the maps of moved tensors to their new addresses
(``cuTensorMapReplaceAddress``), and launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from threading import Lock, local
from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from refold.ops.torch.launch import Launch, TileView, lose_speed

_NUMBERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
# Of the driver's interface (cuda.h): bytes of a tensor map, element types, swizzle and prefetch of 128 bytes.
_MAP_BYTES = 128
_ELEMENTS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLE, _PREFETCH = 3, 2
# The launch attribute that lets a kernel start early.
_EARLY = 6


class MappedLaunch(Launch):
    """A `Launch` whose first arguments are tensors, or None, that the kernel takes as descriptors.

    ``views`` describe them. The kernel may start before the one before it on
    the stream ends, and has to wait (``griddepcontrol.wait``) before it reads what that one writes.
    """

    __slots__ = ("lock", "parameters", "views")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], consts: dict[str, Any], options: dict[str, Any],
        views: Sequence[TileView | None],
    ) -> None:  # fmt: skip
        super().__init__(kernel, grid, consts, options)
        self.views: list[Any] = [
            v and {"shape": v.shape, "strides": v.strides, "block_shape": v.tile,
                   "layout": NVMMASharedLayout(128, v.bits, len(v.tile))} for v in views
        ]  # fmt: skip
        self.parameters: _Parameters | None = None
        self.lock = Lock()

    @property
    def takes_addresses(self) -> bool:
        """Whether tensors may be given by their addresses."""
        return self.parameters is not None

    def __call__(self, stream: int, *args: Any) -> None:
        """Launch with ``args``, the kernel's arguments before its constants, on the raw stream handle."""
        if not hasattr(_here, "bound") and (self.parameters is not None or torch.cuda.is_initialized()):
            _bind()
        if self.parameters is not None:
            with self.lock:  # other threads use the same memory
                self.parameters.launch(stream, args)
            return
        described = [None if a is None else TensorDescriptor(a, **v) for a, v in zip(args, self.views, strict=False)]
        args = (*described, *args[len(described) :])
        compiles = self.compiled is None
        super().__call__(stream, *args)
        if compiles and self.compiled is not None and self.direct is None:
            self.parameters = self._laid_out(args)

    def _laid_out(self, args: tuple[Any, ...]) -> _Parameters | None:
        """Return the parameters in memory; None, with a warning, if this kernel's are not what is expected."""
        try:
            parameters = _Parameters(self.compiled, self.grid, (*args, *self.tail))
            if parameters.confirmed():
                return parameters
            why = "the driver reports other parameters"
        except Exception as error:  # whatever Triton has changed; nothing has been launched
            why = f"{type(error).__name__}: {error}"
        lose_speed(f"tensor maps cannot be kept from launch to launch ({why})")
        return None


class _Parameters:
    """The parameters of a compiled kernel in memory.

    Triton compiles the arguments that are not constants in their order, a descriptor into map, shape and strides, and
    adds two pointers to scratch memory. The driver is asked whether that holds; if not, Triton's own launch is used.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        warps, _, shared = compiled.packed_metadata
        if any(getattr(compiled.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")):
            raise ValueError("the kernel needs scratch memory")
        self.maps: list[_TensorMap] = []
        kinds = list(compiled.src.signature.values())
        pointers = [i for i, kind in enumerate(kinds) if kind.startswith("*")]
        self.gather = itemgetter(*[i for i, kind in enumerate(kinds) if kind.startswith("tensordesc")], *pointers)
        self.addresses = (ctypes.c_uint64 * len(pointers))()
        self.values: list[Any] = []
        boxes = iter(compiled.metadata.tensordesc_meta)
        for i, (kind, arg) in enumerate(zip(kinds, args, strict=True)):
            if kind.startswith("tensordesc"):
                self.maps.append(_TensorMap(arg, next(boxes)["block_size"]))
                self.values.append(self.maps[-1])
                self.values += [ctypes.c_int32(n) for n in arg.shape] + [ctypes.c_int64(n) for n in arg.strides]
            elif kind.startswith("*"):
                self.values.append(ctypes.c_uint64.from_buffer(self.addresses, 8 * pointers.index(i)))
            elif kind != "constexpr":
                self.values.append(_NUMBERS[kind](arg))
        self.values += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        places = [v.at if isinstance(v, _TensorMap) else ctypes.addressof(v) for v in self.values]
        self.table = (ctypes.c_void_p * len(places))(*places)
        self.early = _Attribute(_EARLY, 0, 1)
        self.config = _Config(grid, (warps * 32, 1, 1), shared, None, ctypes.pointer(self.early), 1)
        self.function = ctypes.c_void_p(compiled.function)
        # Converted once: what the driver is given at each launch.
        front, table = (ctypes.c_void_p(ctypes.addressof(memory)) for memory in (self.config, self.table))
        self.given = (front, self.function, table, None)
        self.start = _driver().cuLaunchKernelEx
        self.mapped = tuple(m.address for m in self.maps)

    def confirmed(self) -> bool:
        """Whether the driver knows the kernel with parameters of these sizes, and no more of them."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        known = []
        for i in range(len(self.values) + 1):
            failed = _driver().cuFuncGetParamInfo(self.function, i, ctypes.byref(offset), ctypes.byref(size))
            known.append(0 if failed else size.value)
        return known == [*(_MAP_BYTES if isinstance(v, _TensorMap) else ctypes.sizeof(v) for v in self.values), 0]

    def launch(self, stream: int, args: tuple[Any, ...]) -> None:
        """Put in the addresses and launch; ``args`` has tensors, or has addresses."""
        given = self.gather(args)
        if type(given[0]) is not int:
            given = tuple(a.data_ptr() for a in given)
        split = len(self.maps)
        if given[:split] != self.mapped:
            self.mapped = given[:split]
            for tensor_map, address in zip(self.maps, self.mapped, strict=True):
                tensor_map.turn(address)
        self.addresses[:] = given[split:]
        self.config.stream = stream
        _check(self.start(*self.given))


class _Attribute(ctypes.Structure):
    """A launch attribute whose value is a number."""

    _fields_ = (("name", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """A launch configuration."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class _TensorMap:
    """A tensor map in memory, aligned as the driver wants it."""

    def __init__(self, descriptor: TensorDescriptor, box: list[int]) -> None:
        self.memory = ctypes.create_string_buffer(2 * _MAP_BYTES)
        self.at = -(-ctypes.addressof(self.memory) // _MAP_BYTES) * _MAP_BYTES
        base, rank = descriptor.base, len(descriptor.shape)
        self.address = base.data_ptr()
        # The driver counts axes from the last, and strides in bytes.
        sizes, steps, numbers = ctypes.c_uint64 * rank, ctypes.c_uint64 * (rank - 1), ctypes.c_uint32 * rank
        strides = [stride * base.element_size() for stride in descriptor.strides[-2::-1]]
        _check(
            _driver().cuTensorMapEncodeTiled(
                self.at, _ELEMENTS[base.dtype], rank, self.address, sizes(*descriptor.shape[::-1]), steps(*strides),
                numbers(*box[::-1]), numbers(*[1] * rank), 0, _SWIZZLE, _PREFETCH, 0,
            )
        )  # fmt: skip

    def turn(self, address: int) -> None:
        """Describe the same view of another tensor."""
        if address != self.address:
            _check(_driver().cuTensorMapReplaceAddress(self.at, address))
            self.address = address


_here = local()


def _bind() -> None:
    """Let this thread have a context, as Triton's own launch does: one that autograd starts has none at first."""
    context, device = ctypes.c_void_p(), ctypes.c_int(torch.cuda.current_device())
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(_driver().cuCtxSetCurrent(context))
    _here.bound = True


@cache
def _driver() -> ctypes.CDLL:
    """Return the driver; its calls here are too short to be worth letting other threads in."""
    driver = ctypes.PyDLL("libcuda.so.1")
    address, number = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernelEx.argtypes = [address] * 4
    driver.cuTensorMapReplaceAddress.argtypes = [address, address]
    driver.cuTensorMapEncodeTiled.argtypes = [address, number, number, *[address] * 5, *[number] * 4]
    driver.cuCtxGetCurrent.argtypes = driver.cuCtxSetCurrent.argtypes = [address]
    driver.cuDevicePrimaryCtxRetain.argtypes = [address, ctypes.c_int]
    driver.cuFuncGetParamInfo.argtypes = [address, ctypes.c_size_t, address, address]
    return driver


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refused a launch with status {status}. Report it.")
