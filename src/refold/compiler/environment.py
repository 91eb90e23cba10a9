"""What the numbers of a report depend on: versions, processor, threads, GPU; and the day."""

from __future__ import annotations

import datetime
import platform
from functools import cache
from pathlib import Path

import torch

from .. import __version__


def environment() -> dict[str, str]:
    """Return versions, what this machine has, and the day."""
    count = torch.get_num_threads()
    found = {
        "refold": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{processor()}, {count} thread{'s' * (count != 1)}",
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")}


@cache
def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
