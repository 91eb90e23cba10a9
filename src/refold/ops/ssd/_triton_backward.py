"""SSD backward on GPUs with Triton: plans the launches of `_triton_backward_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from refold.ops.configs import device_limits, lookup
from refold.ops.launch import (
    INTERPRETED,
    Launch,
    contiguous,
    current_stream,
    fresh,
    fresh_like,
    last_contiguous,
    planned,
)
from refold.ops.ssd import _triton_backward_kernels as kernels
from refold.ops.ssd import _triton_kernels as forward
from refold.ops.ssd.spec import SPEC


@planned(
    SPEC, backward=True, dy=last_contiguous, dstate=contiguous, x=last_contiguous, A=contiguous, B=last_contiguous,
    C=last_contiguous, z=last_contiguous, dt_bias=contiguous, initial_state=contiguous, cu_seqlens=contiguous,
)  # fmt: skip
def ssd_backward(
    *, dy: torch.Tensor | None, dstate: torch.Tensor | None, needs: frozenset[str], x: torch.Tensor, dt: torch.Tensor,
    A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None,
    dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    dt_softplus: bool, dt_limit: tuple[float, float], chunk_size: int | None, state_dtype: torch.dtype | None,
    config: dict[str, int] | None = None,
) -> Callable[..., dict[str, torch.Tensor]]:  # fmt: skip
    """Plan the gradients of `refold.ops.ssd`; ``config`` overrides entries of the configuration table."""
    if chunk_size is not None:
        config = {"chunk": chunk_size, **(config or {})}
    if dy is None:
        new_dy = fresh_like(x)
        plan = _Plan(new_dy(), x, dt, B, C, D, z, initial_state, cu_seqlens, dt_softplus, dt_limit, config)
        return lambda _, *arrays: plan(new_dy().zero_(), *arrays)
    return _Plan(dy, x, dt, B, C, D, z, initial_state, cu_seqlens, dt_softplus, dt_limit, config)


def choose_splits(rows: int, heads: int, slots: int) -> int:
    """Return in how many parts the heads of a group are cut, where ``rows`` programs walk over each part.

    A program spends the time of 3 heads before and after its walk, and what a part has summed up is read once more.
    """
    best, best_cost = 1, float("inf")
    for nsplits in range(1, heads + 1):
        cost = -(-rows * nsplits // slots) * (-(-heads // nsplits) + 3.0) + 0.25 * nsplits * rows / slots
        if cost < best_cost * 0.99:
            best, best_cost = nsplits, cost
    return best


class _Plan:
    """How one combination of shapes, strides, dtypes and options runs backward."""

    def __init__(self, dy, x, dt, B, C, D, z, initial, cu_seqlens, dt_softplus, dt_limit, config) -> None:
        batch, seqlen, nheads, headdim = x.shape
        ngroups, dstate = B.shape[-2:]
        heads = nheads // ngroups  # of a group
        varlen = cu_seqlens is not None
        sms, shared = device_limits(x.device)
        table = lookup("ssd_backward", x.device, x.dtype)
        config = table | (config or {})
        chunk = min(table["chunk"], max(16, triton.next_power_of_2(config["chunk"])))
        block_p = min(max(16, triton.next_power_of_2(headdim)), config["block_p"])
        block_n = min(max(16, triton.next_power_of_2(dstate)), config["block_n"])
        wide_n = max(16, triton.next_power_of_2(dstate))
        state_p = block_p
        while state_p > 16 and state_p * wide_n > config["tile"]:
            state_p //= 2
        self.nseqs = nseqs = cu_seqlens.numel() - 1 if varlen else batch
        nchunks = seqlen // chunk + nseqs if varlen else max(1, triton.cdiv(seqlen, chunk))
        rows = batch * nchunks
        parts = 2 if x.dtype == torch.float32 else 1
        size = headdim * dstate

        # Blocks of heads, so that their states take at most `memory` bytes.
        most = max(1, int(config["memory"] * 2**20) // (2 * rows * ngroups * size * x.element_size()))
        nblocks = triton.cdiv(heads, most)
        self.count = count = triton.cdiv(heads, nblocks)
        self.firsts = list(range(0, heads, count))
        slots = sms * config["slots"]
        nsplits = min(config.get("splits") or choose_splits(rows * ngroups, count, slots), count)
        split_heads = triton.cdiv(count, nsplits)
        nsplits = triton.cdiv(count, split_heads)

        precision = "ieee"
        if INTERPRETED:
            precision = "widen"
        elif x.dtype == torch.float32 and (config["precision"] != "bf16x6" or min(chunk, block_p, block_n) >= 32):
            precision = config["precision"]
        limits = float(dt_limit[0]), float(dt_limit[1])
        block_h = min(16, max(4, triton.next_power_of_2(nheads)))
        self.chunks = Launch(forward._ssd_fwd_chunks_kernel, (nseqs + 1,), {"CHUNK": chunk, "BLOCK": 128}, {})
        self.chunks_ints = (nseqs, nchunks, seqlen)
        # No groups: C·Bᵀ is formed where it is used.
        self.prepare = Launch(
            forward._ssd_fwd_prepare_kernel, (rows, triton.cdiv(nheads, block_h)),
            {"CHUNK": chunk, "BLOCK_H": block_h, "BLOCK_N": block_n, "SOFTPLUS": bool(dt_softplus), "VARLEN": varlen,
             "SHIFT": False, "PARTS": parts, "PRECISION": precision}, {"num_warps": 4},
        )  # fmt: skip
        self.prepare_ints = (seqlen, nchunks, nheads, 0, dstate, *limits, *dt.stride(), *B.stride()[:3], *C.stride()[:3])

        sizes = (seqlen, nchunks, nheads, ngroups, headdim, dstate)
        z_strides = (0, 0, 0) if z is None else z.stride()[:3]
        x_strides, dy_strides, B_strides, C_strides = (a.stride()[:3] for a in (x, dy, B, C))
        strides = (*x_strides, *dy_strides, *z_strides, *B_strides, *C_strides)
        loop = {"VARLEN": varlen, "PARTS": parts, "PRECISION": precision}
        self.states_ints = [(*sizes, first, min(count, heads - first), *strides) for first in self.firsts]
        self.states = [
            Launch(
                kernels._ssd_bwd_states_kernel,
                (2 * triton.cdiv(headdim, state_p) * ngroups * min(count, heads - first), batch),
                {"CHUNK": chunk, "BLOCK_P": state_p, "BLOCK_N": wide_n, **loop, "STAGES": config["state_stages"]},
                {"num_warps": config["state_warps"], "num_stages": config["state_stages"]},
            )
            for first in self.firsts
        ]
        D_strides = (0, 0) if D is None else (D.stride(0), D.stride(1) if D.dim() == 2 else 0)
        channels = D is not None and D.dim() == 2
        skips = 0 if D is None else D.numel()
        columns = 2 * nheads + skips
        blocks_n = triton.cdiv(dstate, block_n)
        self.gradients = []
        for first in self.firsts:
            held = min(count, heads - first)
            for lead in (True, False)[: min(blocks_n, 2)]:
                ints = (*sizes, first, held, split_heads, 0 if lead else 1, columns, *limits, *strides, *dt.stride(),
                        *D_strides)  # fmt: skip
                launch = Launch(
                    kernels._ssd_bwd_gradients_kernel, (rows, ngroups * nsplits, 1 if lead else blocks_n - 1),
                    {"CHUNK": chunk, "BLOCK_P": block_p, "BLOCKS_P": triton.cdiv(headdim, block_p), "BLOCK_N": block_n,
                     "BLOCKS_N": blocks_n, "LEAD": lead, "D_CHANNELS": channels, "SOFTPLUS": bool(dt_softplus), **loop,
                     "STAGES": config["stages"]},
                    {"num_warps": config["warps"], "num_stages": config["stages"]},
                )  # fmt: skip
                self.gradients.append((first, launch, ints))
        finish_n, block_s = min(block_n, 64), 16
        self.finish = Launch(
            kernels._ssd_bwd_finish_kernel, (triton.cdiv(columns, block_s) + rows * ngroups,),
            {"CHUNK": chunk, "BLOCK_N": finish_n, "BLOCK_R": 128, "BLOCK_S": block_s, "VARLEN": varlen},
            {"num_warps": 4},
        )  # fmt: skip
        self.finish_ints = (seqlen, nchunks, rows, ngroups, dstate, nsplits, columns)

        # One float32 workspace, cut into: decay, step, parts of dB, of dC, of sums over tokens.
        tokens, parts_size = rows * nheads * chunk, nsplits * rows * ngroups * chunk * dstate
        self.cuts, total = [], 0
        for length in (tokens * parts, tokens, parts_size, parts_size, rows * columns):
            self.cuts.append(total)
            total += -(-length // 32) * 32
        self.new_workspace = fresh((total,), torch.float32, x.device)
        self.new_states = fresh((2, rows * ngroups * count * size), x.dtype, x.device)
        self.new_table = fresh((nchunks * 4,), torch.int32, x.device) if varlen else None
        self.new_sums = fresh((columns,), torch.float32, x.device)
        self.new = {"x": fresh_like(x), "dt": fresh_like(dt), "B": fresh_like(B), "C": fresh_like(C)}
        self.new_z = None if z is None else fresh_like(z)
        state_shape = (nseqs, nheads, headdim, dstate)
        self.new_initial = None if initial is None else fresh(state_shape, torch.float32, x.device)
        self.D_shape = None if D is None else D.shape
        self.nheads = nheads

    def __call__(self, dy, dstate, x, dt, A, B, C, D, z, dt_bias, initial, cu_seqlens) -> dict[str, torch.Tensor]:
        stream = current_stream(x.device)
        workspace, states = self.new_workspace(), self.new_states()
        decay, step, dB_part, dC_part, sums_part = (workspace[cut:] for cut in self.cuts)
        entering, leaving = states
        grads = {name: make() for name, make in self.new.items()}
        dz = grads["z"] = None if self.new_z is None else self.new_z()
        dinitial = grads["initial_state"] = None if self.new_initial is None else self.new_initial()
        sums, table = self.new_sums(), None
        if self.new_table is not None:
            table = self.new_table()
            self.chunks(stream, cu_seqlens, table, *self.chunks_ints)
        self.prepare(stream, table, dt, A, dt_bias, B, C, decay, step, workspace, *self.prepare_ints)
        gradients = iter(self.gradients)
        per_block = len(self.gradients) // len(self.firsts)
        for launch, ints in zip(self.states, self.states_ints, strict=True):
            launch(stream, table, x, dy, z, B, C, decay, step, initial, dstate, entering, leaving, dinitial, *ints)
            for _ in range(per_block):
                _, gradient, ints = next(gradients)
                gradient(stream, table, x, dt, A, B, C, D, z, dt_bias, dy, decay, step, entering, leaving, grads["x"],
                         grads["dt"], dz, dB_part, dC_part, sums_part, *ints)  # fmt: skip
        self.finish(stream, table, dB_part, dC_part, sums_part, grads["B"], grads["C"], sums, *self.finish_ints)
        nheads = self.nheads
        grads["A"], grads["dt_bias"] = sums[:nheads], sums[nheads : 2 * nheads]
        if self.D_shape is not None:
            grads["D"] = sums[2 * nheads :].view(self.D_shape)
        return grads
