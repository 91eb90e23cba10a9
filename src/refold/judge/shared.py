"""Memory that the judge and a process share, in which inputs lie between red zones; and which tensors share memory."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import kernel
from .errors import Unjudgeable
from .messages import DTYPES, Description, Place

GUARD = 4096  # bytes of red zone before and after each input
_PAGE = 4096
_ADD_SEALS, _SEAL_SIZE = 1033, 0x1 | 0x2 | 0x4  # fcntl.h: no more seals, no shrinking, no growing


class Shared:
    """A region of memory. The side that owns ``handle`` gives it to the process, and closes it.

    Attributes:
        room: Its bytes.
        inode: Its number, by which the kernel names it among the memory of a process.
    """

    def __init__(self, room: int):
        self.room = -(-room // _PAGE) * _PAGE
        self.handle = os.memfd_create("refold-trial", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.handle, self.room)
        # Shrunk by the other side, it would end this process when it is looked at.
        fcntl.fcntl(self.handle, _ADD_SEALS, _SEAL_SIZE)
        self._region = mmap.mmap(self.handle, self.room)
        self.inode = os.fstat(self.handle).st_ino
        self._next = 0
        self._last: list[Place] = []

    def wrap(self, tensors: Sequence[torch.Tensor], *, again: bool = False) -> list[Place]:
        """Choose places for tensors: fresh ones, or those chosen last."""
        places: list[Place] = []
        need = needed(tensors)
        if need > self.room:
            raise Unjudgeable(f"inputs of {need} bytes do not fit into the {self.room} bytes set aside")
        at = self._last[0].offset - GUARD if again and self._last else self._next
        if at + need > self.room:
            at = 0
        for t in tensors:
            offset, elements = -(-(at + GUARD) // 64) * 64, _extent(t)
            dtype = str(t.dtype).removeprefix("torch.")
            places.append(Place(offset, elements, _first(t), list(t.shape), list(t.stride()), dtype))
            at = offset + elements * t.element_size() + GUARD
        if tensors:
            self._last, self._next = places, at if at + GUARD < self.room else 0
        return places

    def fill(self, places: Sequence[Place], tensors: Sequence[torch.Tensor], guard: int) -> None:
        """Write values into their places, and the red zones around them."""
        for place, t in zip(places, tensors, strict=True):
            for zone in self._zones(place, t):
                zone.fill_(guard)
            if place.elements:
                self._bytes(place, t).copy_(_raw(t))

    def look(
        self, places: Sequence[Place], tensors: Sequence[torch.Tensor], guard: int
    ) -> tuple[list[int], list[torch.Tensor], bool]:
        """Return the numbers of tensors that were changed, what all are now, and if memory next to one was written."""
        changed: list[int] = []
        values: list[torch.Tensor] = []
        overrun = False
        for index, (place, t) in enumerate(zip(places, tensors, strict=True)):
            value = t
            if place.elements:
                now = self._bytes(place, t)
                if not torch.equal(now, _raw(t)):
                    changed.append(index)
                    value = now.clone().view(t.dtype).as_strided(t.shape, t.stride(), place.first)
                overrun |= any(bool((zone != guard).any()) for zone in self._zones(place, t))
            values.append(value)
        return changed, values, overrun

    def batches(self, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Divide tensors so that each part fits."""
        batch: dict[str, torch.Tensor] = {}
        for name, t in tensors.items():
            if batch and needed([*batch.values(), t]) > self.room:
                yield batch
                batch = {}
            batch[name] = t
        if batch:
            yield batch

    def _bytes(self, place: Place, t: torch.Tensor) -> torch.Tensor:
        size = place.elements * t.element_size()
        return torch.frombuffer(self._region, dtype=torch.uint8, count=size, offset=place.offset)

    def _zones(self, place: Place, t: torch.Tensor) -> list[torch.Tensor]:
        ends = (place.offset - GUARD, place.offset + place.elements * t.element_size())
        return [torch.frombuffer(self._region, dtype=torch.uint8, count=GUARD, offset=at) for at in ends]


@dataclass
class Kin:
    """Tensors that may share memory: results, parameters and buffers, and inputs.

    Attributes:
        results: What a call returned,
        state: and what the program keeps.
        inputs: Where inputs lie in the shared memory,
        mappings: and where in the process that is.
        at: What says where a tensor lies: ``address``, or on a device ``pointer``.
    """

    results: Sequence[Description]
    state: Mapping[str, Description]
    inputs: Sequence[Place]
    mappings: Sequence[kernel.Mapping]
    at: str

    def alias(self, index: int) -> Any:
        """Say which input, parameter or earlier result a result shares elements with, by whatever address."""
        m = self.results[index]
        start, end = self._span(m)
        for each in self.mappings:
            if each.start < end and start < each.end:
                at = start - each.start + each.offset
                for number, place in enumerate(self.inputs):
                    size = DTYPES[place.dtype].itemsize * place.elements
                    if at < place.offset + size and place.offset < at + end - start:
                        return ["input", number, at - place.offset]
        for kind, others in (("output", dict(enumerate(self.results[:index]))), ("state", self.state)):
            for name, other in others.items():
                there = self._span(other)[0]
                if overlap(m, start, other, there):
                    return [kind, name, start - there]
        return None

    def memory(self, m: Description) -> tuple[int, int]:
        """Return from where to where the memory goes that a tensor is a part of, as its process says, but all of it."""
        start, end = self._span(m)
        return (min(start, m.storage), max(end, m.storage + m.storage_bytes)) if m.span else (0, 0)

    def _span(self, m: Description) -> tuple[int, int]:
        start = getattr(m, self.at)
        return start, start + m.span


def overlap(a: Description, here: int, b: Description, there: int) -> bool:
    """Say whether an element of one tensor lies in an element of another.

    Args:
        a: The one.
        here: Where it lies.
        b: The other.
        there: Where that lies.
    """
    start, end = min(here, there), max(here + a.span, there + b.span)
    if not (a.span and b.span) or here + a.span <= there or there + b.span <= here:
        return False
    taken = torch.zeros(end - start, dtype=torch.bool)
    for m, at in ((a, here - start), (b, there - start)):
        strides = [s * m.itemsize for s in m.stride]
        bytes_of = taken.as_strided([*m.shape, m.itemsize], [*strides, 1], at)
        if m is b:
            return bool(bytes_of.any())
        bytes_of.fill_(True)
    return False


def needed(tensors: Sequence[torch.Tensor]) -> int:
    """Count the bytes of shared memory that tensors take, with the red zones around them."""
    return sum(_extent(t) * t.element_size() + 2 * GUARD + 128 for t in tensors)


def _first(t: torch.Tensor) -> int:
    return int(t.storage_offset()) % 16


def _extent(t: torch.Tensor) -> int:
    """Count the elements from the first place that is copied to the last."""
    return _first(t) + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def _raw(t: torch.Tensor) -> torch.Tensor:
    flat = t.detach().as_strided((_extent(t),), (1,), t.storage_offset() - _first(t))
    return flat.view(torch.uint8)
