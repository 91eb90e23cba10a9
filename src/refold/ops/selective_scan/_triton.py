"""Mamba-1 scan on GPUs with Triton: plans the launches of `_triton_kernels` and keeps the plans."""

from __future__ import annotations

from typing import Any

import torch
import triton

from refold.ops.configs import device_limits, lookup
from refold.ops.launch import PTX, Launch, contiguous, current_stream, last_contiguous, refusal, tensor_key
from refold.ops.selective_scan import _triton_kernels as kernels
from refold.ops.spec import Meta

_PLANS: dict[Any, Any] = {}


def supports(meta: Meta) -> str | None:
    """Return None if the kernels take these arguments, else why not."""
    if meta.sizes["n"] > 256:
        return f"keeps the states of a channel in one thread, at most 256; n={meta.sizes['n']}"
    return refusal(meta)


def selective_scan(
    *, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    z: torch.Tensor | None, dt_bias: torch.Tensor | None, decay: torch.Tensor | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, dt_softplus: bool,
    state_dtype: torch.dtype | None, config: dict[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `refold.ops.selective_scan`; ``config`` overrides entries of the configuration table."""
    x, dt, z, decay, B, C = (last_contiguous(a) for a in (x, dt, z, decay, B, C))
    A, D, dt_bias, initial_state, cu_seqlens = (contiguous(a) for a in (A, D, dt_bias, initial_state, cu_seqlens))
    key = (
        tensor_key(x), tensor_key(dt), tensor_key(A), tensor_key(B), tensor_key(C), tensor_key(D), tensor_key(z),
        tensor_key(dt_bias), tensor_key(decay), tensor_key(initial_state), tensor_key(cu_seqlens), dt_softplus,
        state_dtype, x.device, None if config is None else tuple(config.items()),
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS[key] = _Plan(x, dt, A, B, C, z, decay, cu_seqlens, dt_softplus, config)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty((plan.sequences, *A.shape), dtype=state_dtype or torch.float32, device=x.device)
    stream = current_stream(x.device)
    states = steps = final  # never read where there is one segment
    if plan.local is not None:
        states = torch.empty(plan.rows * A.shape[1], dtype=torch.float32, device=x.device)
        steps = torch.empty(plan.rows if decay is None else states.numel(), dtype=torch.float32, device=x.device)
    arrays: tuple[Any, ...] = (cu_seqlens, x, dt, A, B, C, D, z, dt_bias, initial_state, states, steps, y, final)
    if not plan.lanes:
        arrays += (decay,)
    if plan.local is not None:
        plan.local(stream, *arrays, *plan.ints)
    plan.scan(stream, *arrays, *plan.ints)
    return y, final


def _grouped(projection: torch.Tensor, at: int) -> tuple[int, ...]:
    """Return the strides of batch, (time) and group of B or C; without a group axis the last is 0."""
    strides = projection.stride()[:-1]
    return strides if len(strides) == at + 1 else (*strides, 0)


class _Plan:
    """How one combination of shapes, strides, dtypes and options runs."""

    def __init__(self, x, dt, A, B, C, z, decay, cu_seqlens, dt_softplus, config) -> None:
        batch, seqlen, channels = x.shape
        dstate = A.shape[1]
        ngroups = max(B.shape[2] if B.dim() == 4 else 1, C.shape[2] if C.dim() == 4 else 1)
        config = lookup("selective_scan", x.device, x.dtype) | (config or {})
        self.sequences = sequences = batch if cu_seqlens is None else cu_seqlens.numel() - 1
        block_n = triton.next_power_of_2(dstate)
        grouped = (channels // ngroups) % config["block_d"] != 0 and ngroups > 1
        plain = decay is not None or grouped or block_n != dstate or not 2 <= dstate <= 64
        self.lanes = lanes = PTX and x.device.type == "cuda" and not plain
        block_d, warps = config["block_d"], config["warps"]
        blocks = triton.cdiv(channels, block_d)
        nsegments = 1
        if cu_seqlens is None:
            slots = device_limits(x.device)[0] * config["slots"]
            nsegments = config.get("segments") or _choose_segments(seqlen, batch * blocks, slots)
        segment = triton.cdiv(seqlen, nsegments)
        nsegments = triton.cdiv(seqlen, segment)
        self.rows = sequences * nsegments * channels
        B_strides, C_strides = _grouped(B, 2), _grouped(C, 2)
        self.ints = (
            seqlen, segment, nsegments, channels, dstate, channels // ngroups, *x.stride()[:2], *dt.stride()[:2],
            *B_strides, *C_strides, *((0, 0) if z is None else z.stride()[:2]),
        )  # fmt: skip
        consts = {"BLOCK_D": block_d, "BLOCK_N": block_n, "SOFTPLUS": bool(dt_softplus)}
        kernel = kernels._selective_scan_fwd_kernel
        if lanes:
            from refold.ops.selective_scan._gluon_kernels import _selective_scan_fwd_lanes_kernel as kernel
        else:
            consts |= {"UNROLL": config["unroll"], "GROUPED": grouped}
            self.ints += (0, 0) if decay is None else decay.stride()[:2]
        options = {"num_warps": warps}
        self.local = None
        if nsegments > 1:
            grid = (blocks, nsegments - 1, sequences)
            self.local = Launch(kernel, grid, {**consts, "LOCAL": True}, options)
        grid = (blocks, nsegments, sequences)
        self.scan = Launch(kernel, grid, {**consts, "LOCAL": False}, options)


def _choose_segments(seqlen: int, programs: int, slots: int) -> int:
    """Return the number of segments: enough to fill ``slots``, where that gains more than the state pass costs."""
    if programs * 3 >= slots * 2:
        return 1
    return max(1, min(-(-slots // programs), 64, seqlen // 32))


def selective_scan_step(
    *, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    D: torch.Tensor | None, z: torch.Tensor | None, dt_bias: torch.Tensor | None, decay: torch.Tensor | None,
    dt_softplus: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `refold.ops.selective_scan_step`."""
    new_state = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    return _step(x, dt, A, B, C, contiguous(state), new_state, D, z, dt_bias, decay, dt_softplus), new_state


def selective_scan_step_(*, state: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Compute `refold.ops.selective_scan_step_`: the state is overwritten, the outputs are returned."""
    own = contiguous(state)
    y = _step(state=own, new_state=own, **inputs)
    if own is not state:
        state.copy_(own)
    return y


def _step(x, dt, A, B, C, state, new_state, D, z, dt_bias, decay, dt_softplus) -> torch.Tensor:
    x, dt, z, decay, B, C = (last_contiguous(a) for a in (x, dt, z, decay, B, C))
    A, D, dt_bias = contiguous(A), contiguous(D), contiguous(dt_bias)
    key = (
        tensor_key(x), tensor_key(dt), tensor_key(A), tensor_key(B), tensor_key(C), tensor_key(state),
        tensor_key(new_state), tensor_key(D), tensor_key(z), tensor_key(dt_bias), tensor_key(decay), dt_softplus,
        x.device,
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        batch, channels, dstate = state.shape
        one = x.dim() == 2

        def strides(tensor: torch.Tensor | None) -> tuple[int, int]:
            if tensor is None:
                return 0, 0
            return tensor.stride(0), 0 if one else tensor.stride(1)

        def projection(tensor: torch.Tensor) -> tuple[int, int, int]:
            grouped = tensor.dim() == (3 if one else 4)
            return (*strides(tensor), tensor.stride(-2) if grouped else 0)

        grouped = B.dim() == (3 if one else 4)
        ngroups = B.shape[-2] if grouped else 1
        block_n = triton.next_power_of_2(dstate)
        block_d = min(triton.next_power_of_2(channels), max(1, 2048 // block_n))
        ints = (
            1 if one else x.shape[1], channels, dstate, channels // ngroups, *strides(x), *strides(dt),
            *projection(B), *projection(C), *strides(z), *strides(decay),
        )  # fmt: skip
        consts = {"BLOCK_D": block_d, "BLOCK_N": block_n, "SOFTPLUS": bool(dt_softplus)}
        grid = (triton.cdiv(channels, block_d), batch)
        plan = _PLANS[key] = (Launch(kernels._selective_scan_step_kernel, grid, consts, {"num_warps": 4}), ints)
    launch, ints = plan
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(current_stream(x.device), x, dt, A, B, C, D, z, dt_bias, decay, state, new_state, y, *ints)
    return y
