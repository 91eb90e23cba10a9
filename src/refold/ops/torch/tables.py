"""Launch configurations of the Triton kernels: one small table per GPU family, measured, and a default for the rest.

Nothing is tuned on the user's machine. To extend a table, time ``config=`` overrides of a backend's function with
``refold bench``, and add the fastest row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# Keys of "ssd": chunk (tokens), block_p (channels per program), tile (state elements per program), warps and stages of
# the scan, warps of the state pass, slots (programs resident on a multiprocessor), state_cost (time of the state pass
# over that of the scan), launch_cost (a launch, in chunks of a scan), fused_pass (up to how many pieces the scan chains
# the states itself), hopper (whether the kernels in Gluon may run), hopper_stages (chunks that their scan holds),
# precision (of products of float32), narrow (what is different for at most 16 states).
# Keys of "ssd_backward": likewise, block_n (states per program), memory and most_memory (MiB that the states of a block
# of heads may take, and may take where fewer heads would not fill the device), slots of the walks over heads, and of
# the kernels in Gluon the stages, the states per program and, of the first one, the registers per thread.
# Keys of "selective_scan": block_d (channels per program), warps, unroll (tokens), slots (programs per multiprocessor).
# Keys of "selective_scan_backward": block_d, warps, tokens (from border to border), slots. Of those of the kernel with
# Gluon layouts: warps, states (per lane), own (channels per lane), tokens (per tile), group (tokens at a time), slots.
# Keys of "selective_scan_lanes": warps, states (at most, per lane), slots, cut (tokens from which time may be cut).
DEFAULT: dict[str, dict[str, Any]] = {
    "ssd": {"chunk": 64, "block_p": 64, "tile": 8192, "warps": 4, "stages": 2, "state_warps": 4, "slots": 2,
            "state_cost": 0.5, "launch_cost": 4.0, "fused_pass": 4, "hopper": 0, "hopper_stages": 2},
    "ssd_backward": {"chunk": 64, "block_p": 64, "block_n": 128, "tile": 8192, "warps": 8, "stages": 2,
                     "state_warps": 4, "state_stages": 3, "slots": 1, "memory": 160, "most_memory": 8192,
                     "hopper": 0, "hopper_stages": 2, "hopper_block_n": 64, "hopper_state_stages": 3,
                     "hopper_state_registers": 64},
    "selective_scan": {"block_d": 64, "warps": 2, "unroll": 4, "slots": 16},
    "selective_scan_backward": {"block_d": 32, "warps": 1, "tokens": 4, "slots": 16},
    "selective_scan_backward_lanes": {"warps": 4, "states": 4, "own": 1, "tokens": 16, "group": 8, "slots": 2},
    "selective_scan_lanes": {"warps": 2, "states": 8, "slots": 8, "cut": 1024},
    "ssd_backward/float32": {"chunk": 32, "block_p": 64, "block_n": 64, "tile": 4096, "state_stages": 2,
                             "precision": "bf16x6"},
    "ssd/float32": {"chunk": 32, "block_p": 32, "warps": 4, "stages": 1, "precision": "bf16x6",
                    "narrow": {"chunk": 16, "block_p": 64, "warps": 2}},
}  # fmt: skip

# Measured on NVIDIA H200 (compute capability 9.0).
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "hopper": {
        "ssd": {"hopper": 1, "state_cost": 0.4, "launch_cost": 3.0, "fused_pass": 4},
        "ssd_backward": {"hopper": 1},
    },
}


def family(device: torch.device) -> str | None:
    """Return the name of the table for ``device``; None where only the default applies."""
    if device.type != "cuda":
        return None
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "hopper"}.get(major) if torch.version.hip is None else None


@cache
def lookup(op: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the configuration of ``op``: default, then default of the dtype, then the family's, likewise."""
    name = f"{op}/{str(dtype).removeprefix('torch.')}"
    table = FAMILIES.get(family(device) or "", {})
    return DEFAULT[op] | DEFAULT.get(name, {}) | table.get(op, {}) | table.get(name, {})


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors and the shared memory in bytes that one program may take."""
    if device.type != "cuda":
        return 4, 228 * 1024
    props = torch.cuda.get_device_properties(device)
    shared = getattr(props, "shared_memory_per_block_optin", 0) or 64 * 1024
    return props.multi_processor_count, shared - 2048
