"""Which kernels a program runs, and when: one profiled call of each program, merged into one Chrome trace.

Nothing is profiled unless `profiling` is active; otherwise `take` costs nothing. All programs of a trace start at time
zero, each as a separate process, so Perfetto (https://ui.perfetto.dev) shows them one below the other.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError
from ..ops.torch.private import schema
from .memory import quiet_profiler, trace_events
from .timing import synchronize

Event = dict[str, Any]
# Process identifiers of the programs of a trace, and of the devices within a program.
_APART = 1000
_FLOWS_APART = 1 << 32
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Profiles:
    """The profiled programs, in the order in which they ran.

    Attributes:
        events: For each program the events of one call, in the Chrome trace format.
    """

    events: dict[str, list[Event]] = field(default_factory=dict)

    def take(self, name: str, run: Callable[[], object], device: torch.device) -> None:
        """Profile one call of a program, after one that warms it up."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        run()
        synchronize(device)
        with (
            quiet_profiler(),
            torch.profiler.profile(activities=activities, acc_events=True) as profiler,
            torch.profiler.record_function(name),
        ):
            run()
            synchronize(device)
        self.events[name] = trace_events(profiler)

    def save(self, path: str | PathLike[str]) -> None:
        """Write all programs as one Chrome trace.

        Raises:
            ArgumentError: Nothing was profiled.
        """
        if not self.events:
            raise ArgumentError(f"there is nothing to write to {path}: no program was timed")
        merged = [event for i, item in enumerate(self.events.items()) for event in _moved(*item, i)]
        Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": merged}))


_ACTIVE: ContextVar[Profiles | None] = ContextVar("profiles", default=None)


@contextmanager
def profiling() -> Iterator[Profiles]:
    """Profile what `take` is given inside of the ``with`` block."""
    token = _ACTIVE.set(profiles := Profiles())
    try:
        yield profiles
    finally:
        _ACTIVE.reset(token)


def take(name: str, run: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Profile a program if that is asked for; return its kernels as `kernels` does, else nothing."""
    if (profiles := _ACTIVE.get()) is None:
        return []
    profiles.take(name, run, device)
    return kernels(profiles.events[name])


def named_loops() -> dict[str, Any]:
    """Return the options of Inductor that make the loops of a CPU program show in a profile; it can on Linux."""
    return {"cpp.enable_kernel_profile": True} if sys.platform == "linux" else {}


def kernels(events: Sequence[Event]) -> list[dict[str, Any]]:
    """List what was launched in a profiled call: ``{"name", "count", "ms"}``, the longest first.

    On a GPU these are kernels and copies. On a CPU they are PyTorch's operators that do work, views excluded, and the
    loops that Inductor generated.
    """
    found = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not found:
        found = list(_working(events))
    count, time_ms = Counter[str](), Counter[str]()
    for event in found:
        count[event["name"]] += 1
        time_ms[event["name"]] += event.get("dur", 0) / 1e3
    return [{"name": name, "count": count[name], "ms": round(ms, 6)} for name, ms in time_ms.most_common()]


def longest(found: Sequence[dict[str, Any]]) -> str:
    """Return the name of the kernel that takes longest, shortened; empty if there is none."""
    return str(found[0]["name"])[:120] if found else ""


def _working(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the outermost operators of each thread that do work of their own."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["tid"]].append(event)
    for ops in threads.values():
        end = float("-inf")
        for op in sorted(ops, key=lambda op: (op["ts"], -op["dur"])):
            if op["ts"] >= end and _works(op["name"]):
                end = op["ts"] + op["dur"]
                yield op


@cache
def _works(name: str) -> bool:
    """Tell whether an event is an operator that is no view, or a loop of Inductor's."""
    space, separator, op = name.partition("::")
    if not separator:
        return "_fused_" in name
    if op in ("empty", "empty_strided", "empty_like", "resolve_conj", "resolve_neg", "detach"):
        return False
    try:
        packet = getattr(getattr(torch.ops, space), op)
        schemas = [schema(getattr(packet, overload)) for overload in packet.overloads()]
    except (AttributeError, RuntimeError):
        return True
    returns = [value.alias_info for schema in schemas for value in schema.returns]
    return not any(alias is not None and not alias.is_write for alias in returns)


def _moved(name: str, events: Sequence[Event], index: int) -> Iterator[Event]:
    """Yield the events of a program, from time zero on and in processes of its own."""
    spans = [event for event in events if event.get("ph") == "X" and "ts" in event]
    start = min((event["ts"] for event in spans if event["name"] == name), default=0.0)
    numbers: dict[Any, int] = {}
    for event in events:
        if event.get("ph") == "M" or not isinstance(event.get("pid"), int):
            continue  # names, and what the profiler says of itself
        number = numbers.setdefault(event["pid"], len(numbers))
        moved = {**event, "pid": _APART * (index + 1) + number}
        if "ts" in event:
            moved["ts"] = event["ts"] - start
        if isinstance(event.get("id"), int):
            moved["id"] = event["id"] + _FLOWS_APART * (index + 1)
        yield moved
    for pid, number in numbers.items():
        where = "" if number == 0 else f" (device {pid})"
        yield _named(index, number, "process_name", {"name": name + where})
        yield _named(index, number, "process_sort_index", {"sort_index": _APART * index + number})


def _named(index: int, number: int, what: str, arguments: Mapping[str, Any]) -> Event:
    return {"ph": "M", "pid": _APART * (index + 1) + number, "tid": 0, "name": what, "args": dict(arguments)}
