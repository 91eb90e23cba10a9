"""SSD backward on GPUs with Triton: plans the launches of `_triton_backward_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from refold.ops.ssd import _triton_backward_kernels as kernels
from refold.ops.ssd import _triton_kernels as forward
from refold.ops.ssd._triton_forward import ssd
from refold.ops.ssd.spec import SPEC
from refold.ops.ssd.tables import BACKWARD
from refold.ops.torch.launch import (
    Launch,
    TileView,
    block_of,
    current_stream,
    gluon,
    last_contiguous,
    on_hopper,
    planned,
    products,
    wide_rows,
)
from refold.ops.torch.plans import contiguous, fresh, fresh_like
from refold.ops.torch.row_sums import RowSums
from refold.ops.torch.tables import device_limits, lookup

HOPPER = (
    "refold.ops.ssd._gluon_backward_kernels", "refold.ops.ssd._gluon_kernels", "refold.ops.torch.tma_launch"
)  # fmt: skip


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
    new_dy = fresh_like(x)
    if dy is None:  # the final state alone was read
        dy = new_dy()
        plan = _Plan(dy, x, dt, B, C, D, initial_state, cu_seqlens, dt_softplus, dt_limit, config)

        def without_y(_dy, dstate, x, dt, A, B, C, D, z, *rest):
            found = plan(new_dy().zero_(), dstate, x, dt, A, B, C, D, *rest)
            return found if z is None else found | {"z": new_dy().zero_()}

        return without_y
    if z is None:
        plan = _Plan(dy, x, dt, B, C, D, initial_state, cu_seqlens, dt_softplus, dt_limit, config)
        return lambda dy, dstate, x, dt, A, B, C, D, z, *rest: plan(dy, dstate, x, dt, A, B, C, D, *rest)

    before_gate = ssd.make(
        x=x, dt=dt, A=A, B=B, C=C, D=D, z=None, dt_bias=dt_bias, initial_state=initial_state, cu_seqlens=cu_seqlens,
        dt_softplus=dt_softplus, dt_limit=dt_limit, chunk_size=chunk_size, state_dtype=None,
    )  # fmt: skip
    plan = _Plan(new_dy(), x, dt, B, C, D, initial_state, cu_seqlens, dt_softplus, dt_limit, config)
    batch, seqlen, nheads, headdim = x.shape
    gate = Launch(
        kernels._ssd_bwd_gate_kernel, (batch * seqlen, triton.cdiv(nheads * headdim, 1024)), {"BLOCK": 1024},
        {"num_warps": 4},
    )  # fmt: skip
    ints = (seqlen, nheads * headdim, headdim, *dy.stride()[:3], *z.stride()[:3])

    def gated(dout, dstate, x, dt, A, B, C, D, z, *rest):
        dy, _ = before_gate(x, dt, A, B, C, D, None, *rest)
        dz = new_dy()
        gate(current_stream(x.device), dout, dy, z, dz, *ints)
        return plan(dy, dstate, x, dt, A, B, C, D, *rest) | {"z": dz}

    return gated


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


def _hopper_fits(x, dy, B, C) -> bool:
    """Say whether the Hopper kernel takes these tensors: 16 bits, 64 channels, 64 or 128 states."""
    headdim, dstate = x.shape[-1], B.shape[-1]
    if not on_hopper(x.device) or x.element_size() != 2 or headdim != 64 or dstate not in (64, 128):
        return False
    return all(
        t.stride(2) == width and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0 and t.data_ptr() % 16 == 0
        for t, width in ((x, headdim), (dy, headdim), (B, dstate), (C, dstate))
    )


class _Plan:
    """How one combination of shapes, strides, dtypes and options runs backward."""

    def __init__(self, dy, x, dt, B, C, D, initial, cu_seqlens, dt_softplus, dt_limit, config) -> None:
        batch, seqlen, nheads, headdim = x.shape
        ngroups, dstate = B.shape[-2:]
        heads = nheads // ngroups  # of a group
        varlen = cu_seqlens is not None
        sms, shared = device_limits(x.device)
        table = lookup(BACKWARD, x.device, x.dtype)
        config = table | (config or {})
        chunk = min(table["chunk"], max(16, triton.next_power_of_2(config["chunk"])))
        wide_n = max(16, triton.next_power_of_2(dstate))
        block_n, tile = min(wide_n, config["block_n"]), config["tile"]
        hopper = config["hopper"] and not varlen and chunk == 64 and (dt_softplus or dt_limit[0] >= 0)
        self.hopper = hopper and _hopper_fits(x, dy, B, C) and gluon(*HOPPER) is not None
        small = headdim <= 64 and dstate <= 128 and headdim % 16 == dstate % 16 == 0
        if not self.hopper and not (small and wide_rows(x, dy, B, C)):
            # Tiles that are not copied ahead go through registers. Triton 3.6 may then fence what it writes for
            # asynchronous products after the barrier, not before it; products of 32 rows are none of these.
            chunk, tile = min(chunk, 32), min(tile, 32 * wide_n)
            block_n = min(wide_n, 2 * config["block_n"] if x.dtype != torch.float32 else config["block_n"])
        block_p = min(max(16, triton.next_power_of_2(headdim)), config["block_p"])
        state_p = block_of(headdim, wide_n, config["block_p"], tile)
        # Shared memory of a walk over heads: the tiles that are copied ahead, and two matrices of pairs of tokens.
        ahead = 2 * (chunk * (block_p + block_n) + block_p * block_n) * x.element_size()
        stages = config["stages"]
        while stages > 1 and ahead * (stages - 1) + 2 * chunk * chunk * x.element_size() > shared:
            stages -= 1
        nseqs = cu_seqlens.numel() - 1 if varlen else batch
        nchunks = seqlen // chunk + nseqs if varlen else max(1, triton.cdiv(seqlen, chunk))
        rows = batch * nchunks
        parts = 2 if x.dtype == torch.float32 else 1
        size = headdim * dstate

        # Blocks of heads, so that their states take at most `memory` MiB. At least as many heads as fill the device:
        # otherwise long sequences take one pass over all chunks per block.
        head_bytes = 2 * rows * ngroups * size * x.element_size()
        most = max(1, int(config["memory"] * 2**20) // head_bytes)
        least = min(triton.cdiv(sms, 4 * batch * ngroups), int(config["most_memory"] * 2**20) // head_bytes)
        nblocks = triton.cdiv(heads, max(most, least))
        count = triton.cdiv(heads, nblocks)
        slots = sms * config["slots"]
        nsplits = min(config.get("splits") or choose_splits(rows * ngroups, count, slots), count)
        split_heads = triton.cdiv(count, nsplits)
        nsplits = triton.cdiv(count, split_heads)

        precision = products(config.get("precision", "ieee"), x.dtype, chunk, block_p, block_n)
        limits = float(dt_limit[0]), float(dt_limit[1])
        block_h = min(16, max(4, triton.next_power_of_2(nheads)))
        self.chunks = Launch(forward._ssd_fwd_chunks_kernel, (nseqs + 1,), {"CHUNK": chunk, "BLOCK": 128}, {})
        self.chunks_ints = (nseqs, nchunks, seqlen)
        # No groups: C·Bᵀ is formed where it is used.
        self.prepare = Launch(
            forward._ssd_fwd_prepare_kernel, (rows, triton.cdiv(nheads, block_h)),
            {"CHUNK": chunk, "BLOCK_H": block_h, "BLOCK_N": block_n, "SOFTPLUS": bool(dt_softplus), "VARLEN": varlen,
             "SHIFT": False, "SIGNED": False, "PARTS": parts, "PRECISION": precision}, {"num_warps": 4},
        )  # fmt: skip
        self.prepare_ints = (
            seqlen, nchunks, nheads, 0, dstate, *limits, *dt.stride(), *B.stride()[:3], *C.stride()[:3],
        )  # fmt: skip

        sizes = (seqlen, nchunks, nheads, ngroups, headdim, dstate)
        x_strides, dy_strides, B_strides, C_strides = (a.stride()[:3] for a in (x, dy, B, C))
        strides = (*x_strides, *dy_strides, *B_strides, *C_strides)
        D_strides = (0, 0) if D is None else (D.stride(0), D.stride(1) if D.dim() == 2 else 0)
        self.D_channels = D is not None and D.dim() == 2
        columns = 2 * nheads + (0 if D is None else D.numel())
        blocks_n = triton.cdiv(dstate, block_n)
        loop = {"VARLEN": varlen, "PARTS": parts, "PRECISION": precision}
        state_consts = {"CHUNK": chunk, "BLOCK_P": state_p, "BLOCK_N": wide_n, **loop, "STAGES": config["state_stages"]}
        state_options = {"num_warps": config["state_warps"], "num_stages": config["state_stages"]}
        walk_consts = {"CHUNK": chunk, "BLOCK_P": block_p, "BLOCKS_P": triton.cdiv(headdim, block_p),
                       "BLOCK_N": block_n, "BLOCKS_N": blocks_n, **loop, "STAGES": stages}  # fmt: skip
        walk_options = {"num_warps": config["warps"], "num_stages": stages}
        exact_consts = {name: value for name, value in walk_consts.items() if name != "STAGES"}
        exact_consts |= {"LEAD": True, "D_CHANNELS": self.D_channels}
        exact_options = {"num_warps": 8, "num_stages": 1}
        self.blocks: list[tuple[Any, ...]] = []
        for first in range(0, heads, count):
            held = min(count, heads - first)
            if self.hopper:
                states, walk = self._hopper(x, dy, B, C, nchunks, held, nsplits, config, self.D_channels)
                state_ints = (nchunks, nheads, ngroups, first, held)
                ints = (*state_ints, split_heads, columns, *D_strides)
                exact_ints = (*sizes, first, held, split_heads, 0, columns, *strides, *D_strides)
                exact = Launch(kernels._ssd_bwd_exact_kernel, (rows, ngroups * nsplits, 1), exact_consts, exact_options)
                self.blocks.append((states, state_ints, [(walk, ints, exact, exact_ints)]))
                continue
            grid = (2 * triton.cdiv(headdim, state_p) * ngroups * held, batch)
            states = Launch(kernels._ssd_bwd_states_kernel, grid, state_consts, state_options)
            walks: list[tuple[Any, ...]] = []
            for lead in (True, False)[: min(blocks_n, 2)]:
                grid3 = (rows, ngroups * nsplits, 1 if lead else blocks_n - 1)
                ints = (*sizes, first, held, split_heads, 0 if lead else 1)
                consts = {**walk_consts, "LEAD": lead}
                keys = Launch(
                    kernels._ssd_bwd_keys_kernel, grid3, {**consts, "D_CHANNELS": self.D_channels}, walk_options
                )
                queries = Launch(kernels._ssd_bwd_queries_kernel, grid3, consts, walk_options)
                exact = Launch(kernels._ssd_bwd_exact_kernel, grid3, {**exact_consts, "LEAD": lead}, exact_options)
                keys_ints = (*ints, columns, *strides, *D_strides)
                walks.append((keys, keys_ints, queries, (*ints, *strides), exact))
            self.blocks.append((states, (*sizes, first, held, *strides), walks))
        self.tokens = Launch(
            kernels._ssd_bwd_tokens_kernel, (rows, ngroups + triton.cdiv(nheads, block_h)),
            {"CHUNK": chunk, "BLOCK_H": block_h, "BLOCK_N": min(block_n, 64), "SOFTPLUS": bool(dt_softplus),
             "VARLEN": varlen}, {"num_warps": 4},
        )  # fmt: skip
        self.tokens_ints = (seqlen, nchunks, nheads, ngroups, dstate, nsplits, columns, *limits, *dt.stride())
        self.sums = RowSums(rows, (columns,), torch.float32, x.device)

        # One float32 workspace, cut into: decay, step, late, kept, direct, skip, through, parts of dB, of dC.
        per_token, keyed = rows * nheads * chunk, nsplits * rows * ngroups * chunk * dstate
        skips = 0 if D is None or self.D_channels else per_token
        through = rows * nheads * 16 if self.hopper else 0
        self.cuts, total = [], 0
        for length in (per_token * parts, *[per_token] * 4, skips, through, keyed, keyed):
            self.cuts.append(total)
            total += -(-length // 32) * 32
        self.new_workspace = fresh((total,), torch.float32, x.device)
        self.new_flags = fresh((2 * blocks_n * rows * ngroups * nsplits,), torch.int32, x.device)
        self.new_states = fresh((2, rows * ngroups * count * size), x.dtype, x.device)
        self.new_table = fresh((nchunks * 4,), torch.int32, x.device) if varlen else None
        self.new = {"x": fresh_like(x), "dt": fresh_like(dt), "B": fresh_like(B), "C": fresh_like(C)}
        state_shape = (nseqs, nheads, headdim, dstate)
        self.new_initial = None if initial is None else fresh(state_shape, torch.float32, x.device)
        self.D_shape = None if D is None else D.shape
        self.nheads = nheads

    @staticmethod
    def _hopper(
        x, dy, B, C, nchunks: int, held: int, nsplits: int, config: dict[str, Any], D_channels: bool
    ) -> tuple[Launch, Launch]:
        """Plan the Hopper kernels for ``held`` heads of each group, and describe their tensors to the copy engine."""
        hopper: Any = gluon(*HOPPER)
        from refold.ops.torch.tma_launch import MappedLaunch

        batch, seqlen, nheads, headdim = x.shape
        ngroups, dstate = B.shape[-2:]
        heads, keys = nheads * headdim, ngroups * dstate
        rows = batch * nchunks * ngroups * held * headdim

        def tokens_view(width: int, strides: tuple[int, ...], block: int) -> TileView:
            return TileView([batch, seqlen, width], [*strides[:2], 1], [1, 64, block])

        def state_view(block_n: int) -> TileView:
            return TileView([rows, dstate], [dstate, 1], [headdim, block_n])

        tokens = [tokens_view(heads, a.stride(), headdim) for a in (x, dy)]
        dx = tokens_view(heads, (seqlen * heads, heads), headdim)
        consts = {"CHUNK": 64, "P": headdim, "N": dstate}
        # A walk over chunks is short of programs rather than of bytes: half of the states each.
        block_n = config["hopper_block_n"]
        views = [*tokens, *[tokens_view(keys, a.stride(), block_n) for a in (B, C)], *[state_view(block_n)] * 2]
        states = MappedLaunch(
            hopper._ssd_bwd_states_hopper_kernel, (2 * dstate // block_n * ngroups * held, batch),
            {**consts, "BLOCK_N": block_n, "STAGES": config["hopper_state_stages"]},
            {"num_warps": 4, "maxnreg": config["hopper_state_registers"]}, views,
        )  # fmt: skip
        views = [*tokens, *[state_view(dstate)] * 2, *[tokens_view(keys, a.stride(), dstate) for a in (B, C)], dx]
        walk = MappedLaunch(
            hopper._ssd_bwd_walk_hopper_kernel, (batch * nchunks, ngroups * nsplits),
            {**consts, "STAGES": config["hopper_stages"], "D_CHANNELS": D_channels}, {"num_warps": 4}, views,
        )  # fmt: skip
        return states, walk

    def __call__(self, dy, dstate, x, dt, A, B, C, D, dt_bias, initial, cu_seqlens) -> dict[str, torch.Tensor]:
        stream = current_stream(x.device)
        workspace, states, flags = self.new_workspace(), self.new_states(), self.new_flags()
        parts: list[Any] = [workspace[cut:] for cut in self.cuts]
        decay, step, late, kept, direct, skip, through, dB_part, dC_part = parts
        sums_part = self.sums.rows()
        if D is None or self.D_channels:
            skip = None
        if not self.hopper:
            through = None
        entering, leaving = states
        grads = {name: make() for name, make in self.new.items()}
        dinitial = None if self.new_initial is None else self.new_initial()
        table = None
        if self.new_table is not None:
            table = self.new_table()
            self.chunks(stream, cu_seqlens, table, *self.chunks_ints)
        self.prepare(stream, table, dt, A, dt_bias, B, C, decay, step, workspace, *self.prepare_ints)
        for walk_states, states_ints, walks in self.blocks:
            if self.hopper:
                walk_states(stream, x, dy, B, C, entering, leaving, decay, step, initial, dstate, dinitial,
                            *states_ints)  # fmt: skip
                [(walk, ints, exact, exact_ints)] = walks
                walk(stream, x, dy, entering, leaving, B, C, grads["x"], decay, step, D, dB_part, dC_part, late, kept,
                     direct, skip, through, sums_part, flags, *ints)  # fmt: skip
                exact(stream, table, x, dy, A, B, C, D, decay, step, entering, leaving, grads["x"], dB_part, dC_part,
                      kept, direct, skip, late, through, sums_part, flags, *exact_ints)  # fmt: skip
                continue
            walk_states(stream, table, x, dy, B, C, decay, step, initial, dstate, entering, leaving, dinitial,
                        *states_ints)  # fmt: skip
            for keys, keys_ints, queries, queries_ints, exact in walks:
                keys(stream, table, x, dy, B, C, D, decay, step, leaving, grads["x"], dB_part, kept, direct, skip,
                     sums_part, flags, *keys_ints)  # fmt: skip
                queries(stream, table, x, dy, B, C, decay, step, entering, leaving, dC_part, late, flags, *queries_ints)
                exact(stream, table, x, dy, A, B, C, D, decay, step, entering, leaving, grads["x"], dB_part, dC_part,
                      kept, direct, skip, late, None, sums_part, flags, *keys_ints)  # fmt: skip
        self.tokens(stream, table, dt, A, dt_bias, step, late, kept, direct, skip, through, dB_part, dC_part,
                    grads["dt"], grads["B"], grads["C"], sums_part, *self.tokens_ints)  # fmt: skip
        sums, nheads = self.sums(stream, sums_part), self.nheads
        grads["A"], grads["dt_bias"] = sums[:nheads], sums[nheads : 2 * nheads]
        if self.D_shape is not None:
            grads["D"] = sums[2 * nheads :].view(self.D_shape)
        if dinitial is not None:
            grads["initial_state"] = dinitial
        return grads
