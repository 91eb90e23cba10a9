"""How much memory a check may use, and how much a program used."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from refold.memory import host_bytes


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    return host_bytes()


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the largest number of bytes that a call holds at once, beyond those held before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    # Only the trace lists each allocation; the profiler's tables hold net sums of what code regions kept.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with quiet_profiler():
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            run()
        events = trace_events(profiler)
    held = peak = 0
    for _, change in sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"):
        held += change
        peak = max(peak, held)
    return peak


def trace_events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """List what a profiler saw, in the Chrome trace format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's tracing library from writing its start and stop to the terminal."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "wb") as sink:
        os.dup2(sink.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
