"""What the numbers of a report depend on: versions, device, threads."""

from __future__ import annotations

import platform

import torch

from .. import __version__


def environment() -> dict[str, str]:
    """Return versions, the device, and how many threads there are."""
    versions = {"refold": __version__, "torch": torch.__version__}
    versions["python"] = platform.python_version()
    versions["device"] = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else _threads(torch.get_num_threads())
    )
    return versions


def _threads(count: int) -> str:
    return f"CPU, {count} thread" + ("s" if count != 1 else "")
