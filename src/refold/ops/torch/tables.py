"""Launch configurations of the Triton kernels: one small table per GPU family, measured, and a default for the rest.

Nothing is tuned on the user's machine. To extend a table, time ``config=`` overrides of a backend's function with
``refold bench``, and add the fastest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Table:
    """The launch configurations of one kernel; an operator keeps its own in ``tables.py``."""

    default: Mapping[str, Any]
    dtypes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What is different for a dtype."""
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What is different on a family of GPUs, whatever the dtype. ``hopper`` was measured on NVIDIA H200."""


def family(device: torch.device) -> str | None:
    """Return the name of the table for ``device``; None where only the default applies."""
    if device.type != "cuda":
        return None
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "hopper"}.get(major) if torch.version.hip is None else None


@cache
def lookup(table: Table, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Look a configuration up: the default, then what the dtype changes, then what the family changes."""
    of_dtype = table.dtypes.get(str(dtype).removeprefix("torch."), {})
    return {**table.default, **of_dtype, **table.families.get(family(device) or "", {})}


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors and the shared memory in bytes that one program may take."""
    if device.type != "cuda":
        return 4, 228 * 1024
    props = torch.cuda.get_device_properties(device)
    shared = getattr(props, "shared_memory_per_block_optin", 0) or 64 * 1024
    return props.multi_processor_count, shared - 2048
