"""Launching kernels that read and write through the copy engine, without describing their tensors anew each time.

Triton encodes a tensor map for every descriptor at every launch, 1.2 microseconds each; a call of `ssd` has seven or
eight. A `MappedLaunch` lays a kernel's parameters out in memory once, in the form that the driver's ``cuLaunchKernel``
reads; a call puts in addresses, turns maps to tensors that have moved (``cuTensorMapReplaceAddress``) and launches.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from threading import Lock
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from refold.ops.launch import Launch

# Of the driver's interface (cuda.h): element types of a tensor map, 128-byte swizzling, prefetching 128 bytes into L2.
_ELEMENTS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_SWIZZLE, _PREFETCH = 3, 2
_MAP_BYTES = 128
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}


class MappedLaunch(Launch):
    """A `Launch` whose first arguments are tensors, or None, that the kernel takes as descriptors.

    ``views`` holds what each descriptor says beside its tensor.
    """

    __slots__ = ("frame", "lock", "views")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], consts: dict[str, Any], options: dict[str, Any],
        views: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        super().__init__(kernel, grid, consts, options)
        self.views = views
        self.frame: _Frame | None = None
        self.lock = Lock()

    def __call__(self, stream: int, *args: Any) -> None:
        """Launch with ``args``, the kernel's arguments in front of its constants, on the raw stream handle."""
        if self.frame is not None:
            with self.lock:  # the frame is one piece of memory
                self.frame.launch(stream, args)
            return
        compiled = self.compiled
        described = [None if a is None else TensorDescriptor(a, **v) for a, v in zip(args, self.views, strict=False)]
        args = (*described, *args[len(described) :])
        super().__call__(stream, *args)
        if compiled is None:
            frame = _Frame(self.compiled, self.grid, (*args, *self.tail))
            self.frame = frame if frame.confirmed() else None


class _Frame:
    """The parameters of a compiled kernel: maps, then the others in slots of 8 bytes.

    Triton compiles the arguments that are not constants in their order, a descriptor into map, shape and strides, and
    adds two pointers to scratch memory. The driver is asked whether that holds; if not, Triton's own launch is used.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        threads = compiled.packed_metadata[0] * 32
        self.prefix = (compiled.function, *grid, threads, 1, 1, compiled.packed_metadata[2])
        self.maps: list[int] = []  # positions among the arguments
        self.pointers: list[int] = []
        self.sizes: list[int] = []
        fields: list[tuple[str, Any]] = []
        for i, (kind, arg) in enumerate(zip(compiled.src.signature.values(), args, strict=False)):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                fields += [("map", len(self.maps)), *(("i", n) for n in arg.shape), *(("q", n) for n in arg.strides)]
                self.maps.append(i)
            elif kind.startswith("*"):
                fields.append(("Q", len(self.pointers)))
                self.pointers.append(i)
            else:
                fields.append((_FORMATS[kind], arg))
        self.memory = ctypes.create_string_buffer(_MAP_BYTES * (len(self.maps) + 1) + 8 * (len(fields) + 2))
        base = -(-ctypes.addressof(self.memory) // _MAP_BYTES) * _MAP_BYTES
        self.base, self.at = base, base - ctypes.addressof(self.memory) + _MAP_BYTES * len(self.maps)
        self.pack = struct.Struct(f"{len(self.pointers)}Q").pack_into
        slots, free = [], len(self.pointers)
        for kind, value in [*fields, ("scratch", 0), ("scratch", 0)]:
            if kind == "map":
                slots.append(base + _MAP_BYTES * value)
            elif kind == "Q":
                slots.append(base + _MAP_BYTES * len(self.maps) + 8 * value)
            else:
                if kind != "scratch":
                    struct.pack_into(kind, self.memory, self.at + 8 * free, value)
                slots.append(base + _MAP_BYTES * len(self.maps) + 8 * free)
                free += 1
            self.sizes.append(_MAP_BYTES if kind == "map" else 8 if kind == "scratch" else struct.calcsize(kind))
        self.slots = (ctypes.c_void_p * len(slots))(*slots)
        self.aimed = [args[i].base.data_ptr() for i in self.maps]
        for n, (i, meta) in enumerate(zip(self.maps, compiled.metadata.tensordesc_meta, strict=True)):
            _encode(base + _MAP_BYTES * n, args[i], meta["block_size"])

    def confirmed(self) -> bool:
        """Whether the driver knows the kernel with parameters of these sizes."""
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        sizes: list[int] = []
        function = ctypes.c_void_p(self.prefix[0])
        while not _driver().cuFuncGetParamInfo(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
            sizes.append(size.value)
        return sizes == self.sizes

    def launch(self, stream: int, args: tuple[Any, ...]) -> None:
        """Put in the addresses and launch."""
        driver = _driver()
        for n, i in enumerate(self.maps):
            address = args[i].data_ptr()
            if address != self.aimed[n]:
                _check(driver.cuTensorMapReplaceAddress(self.base + _MAP_BYTES * n, address))
                self.aimed[n] = address
        addresses = [a if isinstance(a := args[i], int) else a.data_ptr() for i in self.pointers]
        self.pack(self.memory, self.at, *addresses)
        _check(driver.cuLaunchKernel(*self.prefix, stream, self.slots, None))


def _encode(at: int, descriptor: TensorDescriptor, box: list[int]) -> None:
    """Write the tensor map of ``descriptor`` to the address ``at``; the driver counts axes from the last."""
    rank, base = len(descriptor.shape), descriptor.base
    axes, strides, boxes = ctypes.c_uint64 * rank, ctypes.c_uint64 * (rank - 1), ctypes.c_uint32 * rank
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), _ELEMENTS[base.dtype], rank, ctypes.c_void_p(base.data_ptr()),
            axes(*descriptor.shape[::-1]), strides(*[s * base.element_size() for s in descriptor.strides[-2::-1]]),
            boxes(*box[::-1]), boxes(*[1] * rank), 0, _SWIZZLE, _PREFETCH, 0,
        )
    )  # fmt: skip


@cache
def _driver() -> ctypes.CDLL:
    """Return the driver; its calls here are too short to be worth letting other threads in."""
    driver = ctypes.PyDLL("libcuda.so.1")
    address, number = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernel.argtypes = [address, *[number] * 7, address, address, address]
    driver.cuTensorMapReplaceAddress.argtypes = [address, address]
    return driver


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refused a launch with status {status}. Report it.")
