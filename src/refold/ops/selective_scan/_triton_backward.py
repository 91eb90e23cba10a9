"""The backward of the Mamba-1 scan on GPUs with Triton: plans the launches of `_triton_backward_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from refold.ops.selective_scan import _triton_backward_kernels as kernels
from refold.ops.selective_scan._triton import copies_ahead, grouped
from refold.ops.selective_scan.spec import SPEC
from refold.ops.selective_scan.tables import BACKWARD, BACKWARD_LANES
from refold.ops.torch.launch import Launch, current_stream, gluon, last_contiguous, planned, strides, wide_rows
from refold.ops.torch.plans import contiguous, fresh, fresh_like
from refold.ops.torch.row_sums import RowSums
from refold.ops.torch.tables import device_limits, lookup


@planned(
    SPEC, backward=True, dy=contiguous, dstate=contiguous, x=last_contiguous, dt=last_contiguous, A=contiguous,
    B=last_contiguous, C=last_contiguous, D=contiguous, z=last_contiguous, dt_bias=contiguous, decay=last_contiguous,
    initial_state=contiguous, cu_seqlens=contiguous,
)  # fmt: skip
def selective_scan_backward(
    *, dy: torch.Tensor | None, dstate: torch.Tensor | None, needs: frozenset[str], x: torch.Tensor, dt: torch.Tensor,
    A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None,
    dt_bias: torch.Tensor | None, decay: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, dt_softplus: bool, state_dtype: torch.dtype | None,
) -> Callable[..., dict[str, torch.Tensor]]:  # fmt: skip
    """Plan the gradients of all array arguments that are present, whatever ``needs`` says."""
    batch, seqlen, channels = x.shape
    dstate_size, device = A.shape[1], x.device
    ngroups = max(B.shape[2] if B.dim() == 4 else 1, C.shape[2] if C.dim() == 4 else 1)
    group_channels = channels // ngroups
    nseqs = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    given = {"x": x, "dt": dt, "B": B, "C": C, "z": z, "decay": decay, "dy": dy}
    segments_kernel, kernel, sizes, table = _kernels(given, dstate_size, group_channels)
    group_blocks = triton.cdiv(group_channels, sizes["BLOCK_D"])
    tokens = sizes["TOKENS"]
    slots = max(1, device_limits(device)[0] * table["slots"] // (ngroups * group_blocks))
    nrows = nseqs if cu_seqlens is None else min(nseqs, slots)
    segments = 1
    if cu_seqlens is None and batch * 2 <= slots:
        segments = max(1, min(slots // batch, 64, seqlen // 32))
    segment = triton.cdiv(triton.cdiv(seqlen, segments), tokens) * tokens
    nsegments = triton.cdiv(seqlen, segment)
    consts = {**sizes, "BLOCK_N": triton.next_power_of_2(dstate_size), "SOFTPLUS": bool(dt_softplus)}
    options = {"num_warps": table["warps"]}
    local = None
    if nsegments > 1:
        local_consts = {name: value for name, value in consts.items() if name != "GROUP"}
        local = Launch(segments_kernel, (ngroups * group_blocks, nsegments, batch), local_consts, options)
    if "GROUP" in consts:
        consts["FULL"] = cu_seqlens is None and seqlen % tokens == 0
    main = Launch(kernel, (ngroups * group_blocks, nsegments, nrows), consts, options)

    steps = (
        *x.stride()[:2], *dt.stride()[:2], *grouped(B), *grouped(C), *strides(z, 2), *strides(decay, 2),
    )  # fmt: skip
    local_ints = (seqlen, segment, nsegments, channels, dstate_size, group_channels, group_blocks, *steps)
    main_ints = (
        batch, seqlen, nseqs, segment, nsegments, channels, dstate_size, group_channels, group_blocks, *steps
    )  # fmt: skip
    nborders = batch * triton.cdiv(seqlen, tokens) if cu_seqlens is None else nseqs + triton.cdiv(seqlen, tokens)
    nborders *= tokens // sizes.get("GROUP", tokens)  # The other kernel has one for each group of a tile.
    new_borders = fresh((nborders * channels * dstate_size,), torch.float32, device)
    new_segments = fresh((batch * nsegments * channels * dstate_size,), torch.float32, device)
    # A row of dA, dD and the gradient of the bias for each program along time; one of dB, one of dC for each block.
    at_D = channels * dstate_size
    at_bias = at_D + (0 if D is None else channels)
    row_size = at_bias + (0 if dt_bias is None else channels)
    parameters = RowSums(nrows * nsegments, (row_size,), torch.float32, device)
    projected = (batch, seqlen, ngroups, dstate_size)
    sums = [RowSums(group_blocks, projected, p.dtype if _sums_into(p, ngroups) else torch.float32, device)
            for p in (B, C)]  # fmt: skip
    new_dx, new_ddt = fresh_like(x), fresh_like(dt)
    new_dz, new_ddecay, new_dinitial = (None if a is None else fresh_like(a) for a in (z, decay, initial_state))

    def run(dy, dstate, x, dt, A, B, C, D, z, dt_bias, decay, initial_state, cu_seqlens):
        stream = current_stream(device)
        state = adjoint = factor = borders = new_borders()
        if local is not None:
            state, adjoint, factor = new_segments(), new_segments(), new_segments()
            local(stream, x, dt, A, B, C, z, dt_bias, decay, dy, state, adjoint, factor, *local_ints)
        found = {"x": new_dx(), "dt": new_ddt()}
        found |= {n: new() for n, new in (("z", new_dz), ("decay", new_ddecay), ("initial_state", new_dinitial)) if new}
        rows = parameters.rows()
        dA, dD, dbias = rows, rows[0, at_D:], rows[0, at_bias:]
        dB, dC = (part.rows() for part in sums)
        main(
            stream, cu_seqlens, x, dt, A, B, C, D, z, dt_bias, decay, initial_state, dy, dstate, state, adjoint, factor,
            borders, found["x"], found["dt"], found.get("z"), found.get("decay"), found.get("initial_state"), dB, dC,
            dA, dD, dbias, row_size, *main_ints,
        )  # fmt: skip
        for name, given, part, summed in (("B", B, dB, sums[0]), ("C", C, dC, sums[1])):
            total = summed(stream, part)
            found[name] = total.view(given.shape) if _sums_into(given, ngroups) else total.sum(2)
        total = parameters(stream, rows)
        found["A"] = total[:at_D].view(A.shape)
        if D is not None:
            found["D"] = total[at_D:at_bias]
        if dt_bias is not None:
            found["dt_bias"] = total[at_bias:]
        return found

    return run


def _kernels(
    arrays: dict[str, torch.Tensor | None], dstate: int, group_channels: int
) -> tuple[Any, Any, dict[str, int], dict[str, Any]]:
    """Return the kernels that take these arrays, for segments and in all, their sizes, and their row of the tables.

    Those with hand-made layouts copy 16 bytes at a time, so every row has to begin at a multiple of them.
    """
    x, rows = arrays["x"], [a for a in arrays.values() if a is not None]
    assert x is not None
    fits = wide_rows(*rows) and arrays["dy"] is not None and group_channels % 16 == 0
    states = dstate == triton.next_power_of_2(dstate) and 4 <= dstate <= 64
    if fits and states and copies_ahead(x.device):
        lanes_kernels: Any = gluon("refold.ops.selective_scan._gluon_backward_kernels")
        if lanes_kernels is not None:
            table = lookup(BACKWARD_LANES, x.device, x.dtype)
            lanes = dstate // table["states"]
            sizes = {"BLOCK_D": table["warps"] * 32 // lanes * table["own"], "LANES": lanes,
                     "TOKENS": table["tokens"], "GROUP": table["group"]}  # fmt: skip
            local = lanes_kernels._selective_scan_bwd_segments_lanes_kernel
            return local, lanes_kernels._selective_scan_bwd_lanes_kernel, sizes, table
    table = lookup(BACKWARD, x.device, x.dtype)
    sizes = {"BLOCK_D": min(table["block_d"], triton.next_power_of_2(group_channels)), "TOKENS": table["tokens"]}
    return kernels._selective_scan_bwd_segments_kernel, kernels._selective_scan_bwd_kernel, sizes, table


def _sums_into(projection: torch.Tensor, ngroups: int) -> bool:
    """Whether B or C has an axis of groups, or there is one group; else all groups share it."""
    return ngroups == 1 or projection.dim() == 4
