"""Mamba-1 scan on GPUs with Triton: plans the launches of `_triton_kernels` and `_gluon_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from refold.ops.selective_scan import _triton_kernels as kernels
from refold.ops.selective_scan.spec import SPEC, STEP
from refold.ops.selective_scan.tables import FORWARD, FORWARD_LANES
from refold.ops.spec import Meta
from refold.ops.torch.launch import (
    PTX,
    Launch,
    current_stream,
    gluon,
    last_contiguous,
    later,
    planned,
    refusal,
    strides,
    wide_rows,
)
from refold.ops.torch.plans import contiguous, fresh, fresh_like
from refold.ops.torch.slots import Places
from refold.ops.torch.step_plans import planned_steps
from refold.ops.torch.tables import device_limits, lookup

__getattr__ = later(selective_scan_backward=f"{__package__}._triton_backward")


def supports(meta: Meta) -> str | None:
    """Return None if the kernels take these arguments, else why not."""
    if meta.sizes["n"] > 256:
        return f"keeps the states of a channel in one thread, at most 256; n={meta.sizes['n']}"
    return refusal(meta)


@planned(
    SPEC, x=last_contiguous, dt=last_contiguous, A=contiguous, B=last_contiguous, C=last_contiguous, D=contiguous,
    z=last_contiguous, dt_bias=contiguous, decay=last_contiguous, initial_state=contiguous, cu_seqlens=contiguous,
)  # fmt: skip
def selective_scan(
    *, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    z: torch.Tensor | None, dt_bias: torch.Tensor | None, decay: torch.Tensor | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, dt_softplus: bool,
    state_dtype: torch.dtype | None, config: dict[str, int] | None = None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Plan `refold.ops.selective_scan`; ``config`` overrides entries of the configuration table."""
    batch, seqlen, channels = x.shape
    dstate = A.shape[1]
    ngroups = max(B.shape[2] if B.dim() == 4 else 1, C.shape[2] if C.dim() == 4 else 1)
    sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    tokens = seqlen if cu_seqlens is None else 0  # Those of packed sequences are not cut into segments.
    sizes = _lanes_sizes(x, dt, B, C, z, decay, dstate, sequences, tokens, ngroups, config or {})
    lanes: Any = gluon("refold.ops.selective_scan._gluon_kernels") if sizes is not None else None
    if sizes is None or lanes is None:
        sizes = _plain_sizes(x, sequences, tokens, ngroups, config or {})
    kernel = kernels._selective_scan_fwd_kernel if lanes is None else lanes._selective_scan_fwd_lanes_kernel
    warps, nsegments, tile = sizes.pop("warps"), sizes.pop("segments"), sizes.get("BLOCK_T", 1)
    segment = triton.cdiv(triton.cdiv(seqlen, nsegments), tile) * tile
    nsegments = triton.cdiv(seqlen, segment)
    blocks = triton.cdiv(channels, sizes["BLOCK_D"])
    consts = {**sizes, "BLOCK_N": triton.next_power_of_2(dstate), "SOFTPLUS": bool(dt_softplus)}
    options = {"num_warps": warps}
    local = None
    if nsegments > 1:
        local = Launch(kernel, (blocks, nsegments - 1, sequences), {**consts, "LOCAL": True}, options)
    scan = Launch(kernel, (blocks, nsegments, sequences), {**consts, "LOCAL": False}, options)
    ints = (
        seqlen, segment, nsegments, channels, dstate, channels // ngroups, *x.stride()[:2], *dt.stride()[:2],
        *grouped(B), *grouped(C), *strides(z, 2), *strides(decay, 2),
    )  # fmt: skip
    rows = sequences * nsegments * channels
    new_y = fresh_like(x)
    new_final = fresh((sequences, *A.shape), state_dtype or torch.float32, x.device)
    new_states = fresh((rows * dstate,), torch.float32, x.device)
    new_steps = fresh((rows if decay is None else rows * dstate,), torch.float32, x.device)

    def run(x, dt, A, B, C, D, z, dt_bias, decay, initial_state, cu_seqlens):
        y, final = new_y(), new_final()
        states = steps = final  # never read where there is one segment
        if local is not None:
            states, steps = new_states(), new_steps()
        arguments = (cu_seqlens, x, dt, A, B, C, D, z, dt_bias, initial_state, states, steps, y, final, decay, *ints)
        stream = current_stream(x.device)
        if local is not None:
            local(stream, *arguments)
        scan(stream, *arguments)
        return y, final

    return run


def grouped(projection: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of batch, time and group of B or C; without a group axis the last is 0."""
    strides = projection.stride()[:-1]
    return strides if len(strides) == 3 else (*strides, 0)


def copies_ahead(device: torch.device) -> bool:
    """Whether a device copies to shared memory asynchronously, as kernels with hand-made layouts do."""
    return PTX and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def _lanes_sizes(
    x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None,
    decay: torch.Tensor | None, dstate: int, sequences: int, tokens: int, ngroups: int, config: dict[str, int],
) -> dict[str, int] | None:  # fmt: skip
    """Return the sizes of the kernel with hand-made layouts; None where it does not take these arrays.

    It copies 16 bytes at a time asynchronously, so every row has to begin at a multiple of them. A token costs a warp
    about its states per lane plus one, and the fullest scheduler sets the pace: lanes own few states where schedulers
    would else be idle or uneven. One warp alone cannot hide its waits. Where even few states do not fill the device,
    long sequences are cut.
    """
    if not copies_ahead(x.device):
        return None
    channels, rows = x.shape[2], [a for a in (x, dt, B, C, z, decay) if a is not None]
    if not wide_rows(*rows) or channels % 16 or dstate < 4 or dstate != triton.next_power_of_2(dstate):
        return None
    table = lookup(FORWARD_LANES, x.device, x.dtype) | config
    multiprocessors, warps = device_limits(x.device)[0], table["warps"]
    lanes = multiprocessors * 128  # Those that run at a time.
    total = sequences * channels * dstate
    cut = total < 2 * lanes and tokens >= table["cut"]
    few, most = max(2, dstate // 32), max(min(table["states"], dstate), dstate // 32)
    powers = [2**i for i in range(10) if few <= 2**i <= most]
    states = most if cut else min(powers[::-1], key=lambda own: (own + 1) * max(2, triton.cdiv(total, lanes * own)))
    block_d = warps * 32 * states // dstate
    if channels // ngroups % block_d and ngroups > 1:
        return None
    slots = multiprocessors * table["slots"] // (sequences * triton.cdiv(channels, block_d))
    return {"warps": warps, "segments": table.get("segments", max(1, min(slots, 64, tokens // 64)) if cut else 1),
            "BLOCK_D": block_d, "LANES": dstate // states, "BLOCK_T": min(32, 128 // states),
            "GROUP": max(2, 16 // states)}  # fmt: skip


def _plain_sizes(
    x: torch.Tensor, sequences: int, tokens: int, ngroups: int, config: dict[str, int]
) -> dict[str, int]:  # fmt: skip
    """Return the sizes of the plain kernel: segments fill the device where that gains more than their pass costs."""
    table = lookup(FORWARD, x.device, x.dtype) | config
    channels, block_d, slots = x.shape[2], table["block_d"], device_limits(x.device)[0] * table["slots"]
    programs = sequences * triton.cdiv(channels, block_d)
    segments = 1
    if programs * 3 < slots * 2:
        segments = max(1, min(triton.cdiv(slots, programs), 64, tokens // 32))
    return {"warps": table["warps"], "segments": table.get("segments", segments), "BLOCK_D": block_d,
            "UNROLL": table["unroll"], "GROUPED": ngroups > 1 and channels // ngroups % block_d != 0}  # fmt: skip


def _plan_step(
    *, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    D: torch.Tensor | None, z: torch.Tensor | None, dt_bias: torch.Tensor | None, decay: torch.Tensor | None,
    dt_softplus: bool, out: torch.Tensor | None = None, **slots: Any,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Return a function of the arrays, the new state, which may be the state, places and out, that returns y."""
    slot_count, channels, dstate = state.shape
    one, places, new_y = x.dim() == 2, Places(**slots), fresh_like(x)

    def strides(tensor: torch.Tensor | None) -> tuple[int, ...]:
        return places.strides(tensor, one)[:2]

    def groups(tensor: torch.Tensor) -> int:
        return tensor.shape[-2] if tensor.dim() == (3 if one else 4) else 1

    def projection(tensor: torch.Tensor) -> tuple[int, ...]:
        return (*strides(tensor), tensor.stride(-2) if groups(tensor) > 1 else 0)

    ngroups = max(groups(B), groups(C))
    block_n = triton.next_power_of_2(dstate)
    block_d = min(triton.next_power_of_2(channels), max(1, 1024 // block_n))
    ints = (
        1 if one else x.shape[1], channels, dstate, channels // ngroups, *strides(x), *strides(dt),
        *projection(B), *projection(C), *strides(z), *strides(decay),
        *strides(new_y() if out is None else out), *state.stride(), *places.ints(len(x), slot_count),
    )  # fmt: skip
    consts = {"BLOCK_D": block_d, "BLOCK_N": block_n, "SOFTPLUS": bool(dt_softplus)}
    grid = (triton.cdiv(channels, block_d), places.count(len(x)))
    launch = Launch(kernels._selective_scan_step_kernel, grid, consts, {"num_warps": 4})

    def run(x, dt, A, B, C, state, D, z, dt_bias, decay, new_state, source=None, target=None, accepted=None,
            offsets=None, out=None):  # fmt: skip
        y = new_y() if out is None else out
        launch(current_stream(x.device), x, dt, A, B, C, D, z, dt_bias, decay, state, new_state, y, source, target,
               accepted, offsets, *ints)  # fmt: skip
        return y

    return run


selective_scan_step, selective_scan_step_, selective_scan_step_slots = planned_steps(
    STEP, _plan_step, x=last_contiguous, dt=last_contiguous, A=contiguous, B=last_contiguous, C=last_contiguous,
    D=contiguous, z=last_contiguous, dt_bias=contiguous, decay=last_contiguous,
)  # fmt: skip
