"""SSD forward on GPUs with Triton: plans the launches of `_triton_kernels` and keeps the plans.

A plan holds everything that does not change while shapes, strides, dtypes and options stay the same: how the time axis is
cut, the grids, the integer arguments. A call allocates its outputs and workspace and launches; nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from refold.ops.configs import device_limits, lookup
from refold.ops.launch import INTERPRETED, Launch, current_stream, tensor_key
from refold.ops.ssd import _triton_kernels as kernels

_PLANS: dict[Any, Any] = {}


def ssd_forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    config: dict[str, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``y`` (b, t, h, p) and the final state (b, h, p, n); inputs were checked by the caller."""
    x, B, C, z = _last_contiguous(x), _last_contiguous(B), _last_contiguous(C), _last_contiguous(z)
    A, dt_bias = _contiguous(A), _contiguous(dt_bias)
    initial_state, cu_seqlens = _contiguous(initial_state), _contiguous(cu_seqlens)
    key = (
        tensor_key(x), tensor_key(dt), tensor_key(A), tensor_key(B), tensor_key(C), tensor_key(D), tensor_key(z),
        tensor_key(dt_bias), dt_softplus, dt_limit, tensor_key(initial_state), tensor_key(cu_seqlens), state_dtype,
        x.device, None if config is None else tuple(config.items()),
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= 4096:
            _PLANS.clear()
        plan = _PLANS[key] = _Plan(x, dt, B, C, D, z, dt_softplus, dt_limit, cu_seqlens, state_dtype, config)
    return plan(x, dt, A, B, C, D, z, dt_bias, initial_state, cu_seqlens)


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def _last_contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def choose_segments(nchunks: int, programs: int, slots: int, state_cost: float) -> int:
    """Return into how many segments to cut ``nchunks`` chunks, for ``programs`` programs a segment on ``slots`` slots.

    Counts the chunks that one slot walks: those of `scan`, and those of `state`, which visits all segments but the last
    at ``state_cost`` of a scan's time. More segments fill the device, fewer save the visits.
    """
    best, best_cost = 1, float("inf")
    for nsegments in range(1, min(nchunks, 128) + 1):
        length = -(-nchunks // nsegments)
        if -(-nchunks // length) != nsegments:
            continue
        cost = -(-programs * nsegments // slots) * length
        if nsegments > 1:
            cost += state_cost * -(-programs * (nsegments - 1) // slots) * length + 2.0
        if cost < best_cost * 0.98:
            best, best_cost = nsegments, cost
    return best


def _hopper_fits(x, B, C, z) -> bool:
    """Say whether the Hopper scan takes these tensors: 16 bits, 64 channels, 64 or 128 states, heads in pairs."""
    nheads, headdim = x.shape[-2:]
    ngroups, dstate = B.shape[-2:]
    if INTERPRETED or x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or B.dtype != x.dtype or C.dtype != x.dtype:
        return False
    if headdim != 64 or dstate not in (64, 128) or (nheads // ngroups) % 2 or x.shape[1] == 0:
        return False
    tiles = [(x, headdim), (B, dstate), (C, dstate)]
    if z is not None:
        if z.dtype != x.dtype:
            return False
        tiles.append((z, headdim))
    return all(
        t.stride(2) == width and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0 and t.data_ptr() % 16 == 0
        for t, width in tiles
    )


class _Plan:
    """How one combination of shapes, strides, dtypes and options runs."""

    def __init__(self, x, dt, B, C, D, z, dt_softplus, dt_limit, cu_seqlens, state_dtype, config) -> None:
        batch, seqlen, nheads, headdim = x.shape
        ngroups, dstate = B.shape[-2:]
        varlen = cu_seqlens is not None
        sms, shared = device_limits(x.device)
        block_n = max(16, triton.next_power_of_2(dstate))
        config = dict(lookup("ssd", x.device, x.dtype)) | (config or {})
        block_p = min(max(16, triton.next_power_of_2(headdim)), config["block_p"])
        chunk = config["chunk"]
        # A tile of the state holds at most `tile` elements; wide states take fewer channels, then shorter chunks.
        while block_p > 16 and block_p * block_n > config["tile"]:
            block_p //= 2
        item = x.element_size()
        stages = config["stages"]
        while chunk > 16 and self._shared(chunk, block_p, block_n, item, 1) > shared:
            chunk //= 2
        while stages > 1 and self._shared(chunk, block_p, block_n, item, stages) > shared:
            stages -= 1
        self.nseqs = nseqs = cu_seqlens.numel() - 1 if varlen else batch
        self.nchunks = nchunks = seqlen // chunk + nseqs if varlen else max(1, triton.cdiv(seqlen, chunk))
        blocks_p = triton.cdiv(headdim, block_p)
        self.hopper = config["hopper"] and not varlen and chunk == 64 and _hopper_fits(x, B, C, z)
        programs, slots = batch * nheads * blocks_p, sms * config["slots"]
        if self.hopper:
            programs, slots = batch * nheads // 2, sms
        nsegments = config.get("segments") or choose_segments(nchunks, programs, slots, config["state_cost"])
        segment_chunks = triton.cdiv(nchunks, nsegments)
        self.nsegments = nsegments = triton.cdiv(nchunks, segment_chunks)
        self.passed = nsegments > config["fused_pass"]
        self.y_shape = (batch, seqlen, nheads, headdim)
        self.y_dtype = x.dtype
        self.state_shape = (nseqs, nheads, headdim, dstate)
        self.state_dtype = state_dtype or torch.float32
        # One float32 workspace, cut into: decay, step, C·Bᵀ, segment states, segment decays.
        rows = batch * nchunks * nheads * chunk
        segments = batch * (nsegments - 1) * nheads
        sizes = [rows, rows, batch * nchunks * ngroups * chunk * chunk, segments * headdim * dstate, segments]
        self.cuts = []
        total = 0
        for size in sizes:
            self.cuts.append((total, total + size))
            total += -(-size // 32) * 32
        self.workspace = max(total, 1)
        self.table = nchunks * 4 if varlen else 0

        precision = "tf32x3" if x.dtype == torch.float32 else "widen" if INTERPRETED else "ieee"
        shape = {"CHUNK": chunk, "BLOCK_P": block_p, "BLOCK_N": block_n}
        block_h = 8
        self.chunks = Launch(kernels._ssd_fwd_chunks_kernel, (nseqs + 1,), {"CHUNK": chunk, "BLOCK": 128}, {})
        self.chunks_ints = (nseqs, nchunks)
        self.prepare = Launch(
            kernels._ssd_fwd_prepare_kernel, (batch * nchunks, ngroups + triton.cdiv(nheads, block_h)),
            {"CHUNK": chunk, "BLOCK_H": block_h, "BLOCK_N": block_n, "SOFTPLUS": bool(dt_softplus), "VARLEN": varlen,
             "PRECISION": precision}, {"num_warps": 4},
        )  # fmt: skip
        self.prepare_ints = (
            seqlen, nchunks, nheads, ngroups, dstate, float(dt_limit[0]), float(dt_limit[1]),
            *dt.stride(), *B.stride()[:3], *C.stride()[:3],
        )  # fmt: skip
        options = {"num_warps": config["state_warps"], "num_stages": stages}
        loop = {"VARLEN": varlen, "PRECISION": precision, "STAGES": stages}
        self.state = Launch(
            kernels._ssd_fwd_state_kernel, (nheads * blocks_p, nsegments - 1, batch), {**shape, **loop}, options
        )
        sizes_ints = (seqlen, nchunks, segment_chunks, nsegments, nheads, ngroups, headdim, dstate)
        self.state_ints = (*sizes_ints, *x.stride()[:3], *B.stride()[:3])
        size = headdim * dstate
        self.pass_ = Launch(
            kernels._ssd_fwd_pass_kernel, (triton.cdiv(size, 1024), nheads, batch),
            {"BLOCK": 1024, "VARLEN": varlen}, {"num_warps": 4},
        )  # fmt: skip
        self.pass_ints = (nsegments, nheads, size)
        z_strides = z.stride()[:3] if z is not None else (0, 0, 0)
        D_strides = (0, 0) if D is None else (D.stride(0), D.stride(1) if D.dim() == 2 else 0)
        self.scan = Launch(
            kernels._ssd_fwd_scan_kernel, (nheads * blocks_p, nsegments, batch),
            {**shape, **loop, "PASSED": self.passed}, {"num_warps": config["warps"], "num_stages": stages},
        )  # fmt: skip
        self.scan_ints = (*sizes_ints, *x.stride()[:3], *B.stride()[:3], *C.stride()[:3], *z_strides, *D_strides)

        if self.hopper:
            self._plan_hopper(x, B, C, z, config)

    def _plan_hopper(self, x, B, C, z, config) -> None:
        """Replace the scan by the Hopper one, and describe its tensors to the copy engine."""
        from refold.ops.ssd import _gluon_kernels as hopper

        batch, seqlen, nheads, headdim = x.shape
        ngroups, dstate = B.shape[-2:]
        half = {torch.bfloat16: hopper.gl.bfloat16, torch.float16: hopper.gl.float16}[x.dtype]
        rows = batch * self.nchunks * ngroups * 64
        y_strides = (seqlen * nheads * headdim, nheads * headdim, headdim)
        views = {
            "x": (nheads * headdim, x.stride(), headdim), "y": (nheads * headdim, y_strides, headdim),
            "B": (ngroups * dstate, B.stride(), dstate), "C": (ngroups * dstate, C.stride(), dstate),
        }  # fmt: skip
        if z is not None:
            views["z"] = (nheads * headdim, z.stride(), headdim)
        tile = hopper.tile_layout(16, 3)
        self.views = {
            name: {"shape": [batch, seqlen, width], "strides": [strides[0], strides[1], 1],
                   "block_shape": [1, 64, block], "layout": tile, "padding": "zero"}
            for name, (width, strides, block) in views.items()
        }  # fmt: skip
        self.views["cb"] = {"shape": [rows, 64], "strides": [64, 1], "block_shape": [64, 64],
                            "layout": hopper.tile_layout(32, 2), "padding": "zero"}  # fmt: skip
        consts = {"CHUNK": 64, "P": headdim, "N": dstate, "STAGES": 2, "PASSED": self.passed, "HAS_Z": z is not None}
        nchunks, segment_chunks = self.scan_ints[1:3]
        self.scan_ints = (nchunks, segment_chunks, self.nsegments, nheads, ngroups, *self.scan_ints[-2:])
        grid = (nheads // 2, self.nsegments, batch)
        self.scan = Launch(hopper._ssd_fwd_scan_hopper_kernel, grid, consts, {"num_warps": 4})
        self.describe = hopper.describe

    @staticmethod
    def _shared(chunk: int, block_p: int, block_n: int, item: int, stages: int) -> int:
        """Shared memory that `scan` may take: the pipelined tiles, and one staging copy of state and C·Bᵀ."""
        tiles = chunk * (2 * block_n + block_p) * item + chunk * chunk * 4
        return tiles * stages + (block_n * block_p + chunk * block_p) * item

    def __call__(self, x, dt, A, B, C, D, z, dt_bias, initial, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
        device = x.device
        y = torch.empty(self.y_shape, dtype=self.y_dtype, device=device)
        final = torch.empty(self.state_shape, dtype=self.state_dtype, device=device)
        workspace = torch.empty(self.workspace, dtype=torch.float32, device=device)
        decay, step, cb, segment_state, segment_decay = [workspace[a:b] for a, b in self.cuts]
        stream = current_stream(device)
        table = None
        if self.table:
            table = torch.empty(self.table, dtype=torch.int32, device=device)
            self.chunks(stream, cu_seqlens, table, *self.chunks_ints)
        self.prepare(stream, table, dt, A, dt_bias, B, C, decay, step, cb, *self.prepare_ints)
        if self.nsegments > 1:
            self.state(stream, table, x, B, decay, step, initial, segment_state, segment_decay, *self.state_ints)
            if self.passed:
                self.pass_(stream, segment_state, segment_decay, initial, *self.pass_ints)
        if self.hopper:
            views, describe = self.views, self.describe
            z_view = None if z is None else describe(z, views["z"])
            self.scan(stream, describe(x, views["x"]), z_view, describe(B, views["B"]), describe(C, views["C"]),
                      describe(cb, views["cb"]), describe(y, views["y"]), decay, step, D, initial, segment_state,
                      segment_decay, final, *self.scan_ints)  # fmt: skip
            return y, final
        self.scan(stream, table, x, B, C, cb, decay, step, D, z, initial, segment_state, segment_decay, y, final,
                  *self.scan_ints)  # fmt: skip
        return y, final
