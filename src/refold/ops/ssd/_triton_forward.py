"""SSD forward on GPUs with Triton: plans the launches of `_triton_kernels`.

A plan holds everything that depends only on shapes, strides, dtypes and options: how the time axis is cut, the grids,
the integer arguments. A call only allocates its outputs and workspace, and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from refold.ops.spec import Meta
from refold.ops.ssd import _triton_kernels as kernels
from refold.ops.ssd.spec import SPEC, STEP
from refold.ops.ssd.tables import FORWARD
from refold.ops.ssd.tables import STEP as STEP_TABLE
from refold.ops.torch.launch import (
    Launch,
    TileView,
    block_of,
    copyable,
    current_stream,
    gluon,
    last_contiguous,
    on_hopper,
    planned,
    products,
    refusal,
    same_dtype,
    strides,
    tile_view,
    wide_rows,
)
from refold.ops.torch.plans import contiguous, fresh, fresh_like
from refold.ops.torch.slots import Places
from refold.ops.torch.step_plans import planned_steps
from refold.ops.torch.tables import device_limits, family, lookup

HOPPER = ("refold.ops.ssd._gluon_kernels", "refold.ops.torch.tma_launch")


def supports(meta: Meta) -> str | None:
    """Return None if the kernels take these arguments, else why not."""
    if (reason := refusal(meta)) is not None:
        return reason
    return same_dtype(meta, "B", "C", "z")


@planned(
    SPEC, x=last_contiguous, A=contiguous, B=last_contiguous, C=last_contiguous, z=last_contiguous, dt_bias=contiguous,
    initial_state=contiguous, cu_seqlens=contiguous,
)  # fmt: skip
def ssd(
    *, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None,
    z: torch.Tensor | None, dt_bias: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], chunk_size: int | None,
    state_dtype: torch.dtype | None, config: dict[str, int] | None = None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Plan `refold.ops.ssd`; ``config`` overrides entries of the configuration table."""
    if chunk_size is not None:
        # A smaller chunk than the table's is granted; a larger one would not fit. The result is the same.
        config = {"chunk": chunk_size, **(config or {})}
    return _Plan(x, dt, B, C, D, z, initial_state, dt_softplus, dt_limit, cu_seqlens, state_dtype, config)


def choose_cut(nchunks: int, rows: int, slots: int, states: int, state_slots: int, cost: dict) -> tuple[int, int]:
    """Return (segments, pieces per segment): how to cut ``nchunks`` chunks.

    ``rows`` programs per segment of `scan` run on ``slots`` slots, ``states`` programs per piece of `state` on
    ``state_slots``. The unit of cost is the time of a chunk in `scan`: `state` takes cost["state_cost"] per chunk, and
    launching it costs cost["launch_cost"]; the other numbers come from a fit to 1150 measured cuts of 16 shapes on an
    H200 (benchmarks/LOG.md). More segments fill the device; fewer have less to compute twice.
    """
    best, best_cost = (1, 1), float("inf")
    for nsegments in range(1, min(nchunks, 256) + 1):
        for pieces in (1, 2, 4, 8):
            length = -(-nchunks // (nsegments * pieces)) * pieces
            if -(-nchunks // length) != nsegments or (nsegments == 1 and pieces > 1):
                continue
            total = -(-rows * nsegments // slots) * (length + 4.0)
            if nsegments > 1:
                npieces = (nsegments - 1) * pieces
                waves = -(-states * npieces // state_slots)
                total += cost["state_cost"] * waves * (length // pieces + 2.0) + cost["launch_cost"]
                total += cost["launch_cost"] + 0.3 * npieces if npieces > cost["fused_pass"] else 0.75 * npieces
            if total < best_cost * 0.99:
                best, best_cost = (nsegments, pieces), total
    return best


@dataclass(frozen=True)
class _Tiles:
    """How the Hopper kernels cut heads and states into tiles, and how many tiles a program takes.

    Attributes:
        channels: Of a tile.
        states: Of a tile, or of half of one.
        halves: 2 for more states than that.
        scan: Tiles of a program of `scan`, neighbours in a group.
        state: Likewise of `state`.
        blocks: Tiles of a head.
        own_cb: Whether a program of `scan` forms C·Bᵀ: where at most one other tile reads it.
    """

    channels: int
    states: int
    halves: int
    scan: int
    state: int
    blocks: int
    own_cb: bool

    @classmethod
    def of(cls, nheads: int, ngroups: int, headdim: int, dstate: int) -> _Tiles:
        """Return the tiles of a problem."""
        channels, states = 64, 64 if dstate <= 64 else 128
        halves, blocks = triton.cdiv(dstate, states), triton.cdiv(headdim, channels)
        group = nheads // ngroups * blocks
        own_cb = group == 1 or (group == 2 and halves == 1)
        scan = 2 if halves == 1 and group % 2 == 0 and not own_cb else 1
        state = next(tiles for tiles in (4, 2, 1) if tiles * halves <= 4 and group % tiles == 0)
        return cls(channels, states, halves, scan, state, blocks, own_cb)

    def registers(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the options of `scan` and of `state` that let two small programs share a multiprocessor."""
        scan, state = self.scan * self.states == 64, self.state * self.halves == 1
        return {"maxnreg": 80} if scan else {}, {"maxnreg": 128} if state else {}

    def slots(self, gate: bool) -> tuple[int, int]:
        """Return how many programs of `scan` and of `state` a multiprocessor holds; a gate takes shared memory."""
        scan, state = self.registers()
        return 2 if scan and (self.own_cb or not gate) else 1, 2 if state else 1


def _hopper_fits(x, B, C, z, initial) -> bool:
    """Say whether the Hopper kernels take these tensors."""
    return on_hopper(x.device) and x.element_size() == 2 and _fits_copy_engine(x, B, C, z, initial)


def _fits_copy_engine(x, B, C, z, initial) -> bool:
    """Say whether the tiles of these tensors can be copied: at most 256 states, rows of one dtype on 16 bytes."""
    if B.shape[-1] > 256 or (initial is not None and initial.data_ptr() % 16):
        return False
    return all(t.dtype == x.dtype and copyable(t) for t in (x, B, C, z) if t is not None)


class _Plan:
    """How one combination of shapes, strides, dtypes and options runs."""

    def __init__(self, x, dt, B, C, D, z, initial, dt_softplus, dt_limit, cu_seqlens, state_dtype, config) -> None:
        batch, seqlen, nheads, headdim = x.shape
        ngroups, dstate = B.shape[-2:]
        varlen = cu_seqlens is not None
        sms, shared = device_limits(x.device)
        block_n = max(16, triton.next_power_of_2(dstate))
        table = lookup(FORWARD, x.device, x.dtype)
        if block_n < 32:
            table = table | table.get("narrow", {})
        config = table | (config or {})
        chunk = min(table["chunk"], max(16, triton.next_power_of_2(config["chunk"])))
        # A tile of the state holds at most `tile` elements; wide states take fewer channels, then shorter chunks.
        block_p = block_of(headdim, block_n, config["block_p"], config["tile"])
        hopper = config["hopper"] and not varlen and chunk == 64
        self.hopper = bool(hopper and _hopper_fits(x, B, C, z, initial) and gluon(*HOPPER) is not None)
        signed = self.hopper and not dt_softplus and dt_limit[0] < 0
        stages = config["stages"]
        if not self.hopper and chunk == 64 and x.element_size() == 2 and family(x.device) == "hopper":
            # Triton's asynchronous products want 64 tokens. Where rows are not known to lie on 16 bytes, Triton 3.6
            # then accesses memory that is not its own; there, and for more states, 32 tokens are faster, too.
            if not wide_rows(x, B, C):
                chunk, stages = 32, 1
            elif block_n > 128:
                chunk = 32
        # Products of float32 keep the tile and its three bfloat16 parts.
        item = 10 if x.dtype == torch.float32 else x.element_size()
        while chunk > 16 and self._shared(chunk, block_p, block_n, item, 1) > shared:
            chunk //= 2
        while stages > 1 and self._shared(chunk, block_p, block_n, item, stages) > shared:
            stages -= 1
        self.nseqs = nseqs = cu_seqlens.numel() - 1 if varlen else batch
        self.nchunks = nchunks = seqlen // chunk + nseqs if varlen else max(1, triton.cdiv(seqlen, chunk))
        blocks_p = triton.cdiv(headdim, block_p)
        rows, slots = batch * nheads * blocks_p, sms * config["slots"]
        states, state_slots = rows, slots
        if self.hopper:
            tiles = _Tiles.of(nheads, ngroups, headdim, dstate)
            chosen = {"own_cb": bool(config.get("own_cb", tiles.own_cb)), "scan": config.get("scan_tiles", tiles.scan)}
            self.tiles = tiles = replace(tiles, **chosen)
            rows, states = (batch * nheads * tiles.blocks // each for each in (tiles.scan, tiles.state))
            slots, state_slots = (sms * each for each in tiles.slots(z is not None))
        if "segments" in config:
            nsegments, pieces = config["segments"], config.get("pieces", 1)
        else:
            nsegments, pieces = choose_cut(nchunks, rows, slots, states, state_slots, config)
        piece_chunks = triton.cdiv(nchunks, nsegments * pieces)
        segment_chunks = piece_chunks * pieces
        self.nsegments = nsegments = triton.cdiv(nchunks, segment_chunks)
        npieces = (nsegments - 1) * pieces
        self.passed = npieces > config["fused_pass"]
        self.warm = False
        self.new_y = fresh_like(x)
        self.new_final = fresh((nseqs, nheads, headdim, dstate), state_dtype or torch.float32, x.device)
        # C·Bᵀ that one head alone reads is formed where it is read. (Measured for float32 only.)
        own_cb = x.dtype == torch.float32 and nheads == ngroups and blocks_p <= 2
        if self.hopper:
            own_cb = self.tiles.own_cb
        prepared = 0 if own_cb else ngroups
        # One float32 workspace, cut into: C·Bᵀ, decay, step, piece states, piece decays.
        rows = batch * nchunks * nheads * chunk
        states = batch * npieces * nheads
        parts = 2 if x.dtype == torch.float32 else 1
        sizes = [batch * nchunks * prepared * chunk * chunk, rows * parts, rows, states * headdim * dstate, states]
        self.cuts = []
        total = 0
        for size in sizes:
            self.cuts.append(total * 4)
            total += -(-size // 32) * 32
        self.new_workspace = fresh((max(total, 1),), torch.float32, x.device)
        self.new_table = fresh((nchunks * 4,), torch.int32, x.device) if varlen else None

        precision = products(config.get("precision", "ieee"), x.dtype, chunk, block_p, block_n)
        shape = {"CHUNK": chunk, "BLOCK_P": block_p, "BLOCK_N": block_n}
        block_h = min(16, max(4, triton.next_power_of_2(nheads)))
        self.chunks = Launch(kernels._ssd_fwd_chunks_kernel, (nseqs + 1,), {"CHUNK": chunk, "BLOCK": 128}, {})
        self.chunks_ints = (nseqs, nchunks, seqlen)
        self.prepare = Launch(
            kernels._ssd_fwd_prepare_kernel, (batch * nchunks, prepared + triton.cdiv(nheads, block_h)),
            {"CHUNK": chunk, "BLOCK_H": block_h, "BLOCK_N": block_n, "SOFTPLUS": bool(dt_softplus), "VARLEN": varlen,
             "SHIFT": self.hopper, "SIGNED": signed, "PARTS": parts, "PRECISION": precision},
            {"num_warps": 4},
        )  # fmt: skip
        self.prepare_ints = (
            seqlen, nchunks, nheads, prepared, dstate, float(dt_limit[0]), float(dt_limit[1]),
            *dt.stride(), *B.stride()[:3], *C.stride()[:3],
        )  # fmt: skip
        size = headdim * dstate
        self.pass_ints = (npieces, nheads, size)
        self.pass_ = Launch(
            kernels._ssd_fwd_pass_kernel, (triton.cdiv(size, 1024), nheads, batch),
            {"BLOCK": 1024, "VARLEN": varlen, "HOPPER": self.hopper}, {"num_warps": 4},
        )  # fmt: skip
        D_strides = (0, 0) if D is None else (D.stride(0), D.stride(1) if D.dim() == 2 else 0)
        if self.hopper:
            cut = (segment_chunks, piece_chunks, pieces, npieces)
            self._plan_hopper(x, B, C, z, initial, D_strides, cut, config["hopper_stages"], signed)
            return
        loop = {"VARLEN": varlen, "PARTS": parts, "PRECISION": precision, "STAGES": stages}
        sizes_ints = (nheads, ngroups, headdim, dstate)
        x_strides, B_strides, C_strides = x.stride()[:3], B.stride()[:3], C.stride()[:3]
        self.state_ints = (seqlen, nchunks, piece_chunks, npieces, *sizes_ints, *x_strides, *B_strides)
        self.state = Launch(
            kernels._ssd_fwd_state_kernel, (nheads * blocks_p, npieces, batch), {**shape, **loop},
            {"num_warps": config["state_warps"], "num_stages": stages},
        )  # fmt: skip
        self.scan_ints = (seqlen, nchunks, segment_chunks, pieces, npieces, *sizes_ints,
                          *x_strides, *B_strides, *C_strides, *strides(z, 3), *D_strides)  # fmt: skip
        self.scan = Launch(
            kernels._ssd_fwd_scan_kernel, (nheads * blocks_p, nsegments, batch),
            {**shape, **loop, "PASSED": self.passed, "OWN_CB": own_cb},
            {"num_warps": config["warps"], "num_stages": stages},
        )  # fmt: skip

    def _plan_hopper(self, x, B, C, z, initial, D_strides, cut, stages, signed) -> None:
        """Plan the Hopper kernels, and describe their tensors to the copy engine."""
        from refold.ops.torch.tma_launch import MappedLaunch

        hopper: Any = gluon(*HOPPER)

        batch, _, nheads, headdim = x.shape
        ngroups, dstate = B.shape[-2:]
        nchunks, tiles = self.nchunks, self.tiles
        segment_chunks, piece_chunks, pieces, npieces = cut

        x_view, y_view = tile_view(x, tiles.channels), tile_view(torch.empty(x.shape, device="meta"), tiles.channels)
        z_view = None if z is None else tile_view(z, tiles.channels)
        B_view, C_view = tile_view(B, tiles.states), tile_view(C, tiles.states)
        cb_view = None if tiles.own_cb else TileView([batch * nchunks * ngroups * 64, 64], [64, 1], [64, 64], 32)
        self.initial_described = initial is not None and tiles.halves == 1
        initial_view = None if not self.initial_described else TileView(
            [batch * nheads, headdim, dstate], [headdim * dstate, dstate, 1], [1, tiles.channels, tiles.states],
            8 * initial.element_size(),
        )  # fmt: skip
        sizes = {"HEADDIM": headdim, "DSTATE": dstate, "HALVES": tiles.halves, "CHUNK": 64, "P": tiles.channels,
                 "N": tiles.states}  # fmt: skip
        ntiles = nheads * tiles.blocks
        scan_registers, state_registers = tiles.registers()
        self.state_ints = (nchunks, piece_chunks, npieces, nheads, ngroups)
        self.state = MappedLaunch(
            hopper._ssd_fwd_state_hopper_kernel, (ntiles // tiles.state, npieces, batch),
            {**sizes, "TILES": tiles.state, "STAGES": 4, "SIGNED": signed},
            {"num_warps": 4, **state_registers}, [x_view, B_view],
        )  # fmt: skip
        self.scan_ints = (nchunks, segment_chunks, self.nsegments, pieces, npieces, nheads, ngroups, *D_strides)
        self.scan = MappedLaunch(
            hopper._ssd_fwd_scan_hopper_kernel, (ntiles // tiles.scan, self.nsegments, batch),
            {**sizes, "TILES": tiles.scan, "PASSED": self.passed, "HAS_Z": z is not None, "STAGES": stages,
             "OWN_CB": tiles.own_cb, "SIGNED": signed},
            {"num_warps": 4, **scan_registers},
            [x_view, z_view, B_view, C_view, cb_view, y_view, initial_view],
        )  # fmt: skip

    @staticmethod
    def _shared(chunk: int, block_p: int, block_n: int, item: int, stages: int) -> int:
        """Shared memory that `scan` may take: the pipelined tiles, and one staging copy of state and C·Bᵀ."""
        tiles = chunk * (2 * block_n + block_p) * item + chunk * chunk * 4
        return tiles * stages + (block_n * block_p + chunk * block_p) * item

    def __call__(self, x, dt, A, B, C, D, z, dt_bias, initial, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
        device = x.device
        y, final, workspace = self.new_y(), self.new_final(), self.new_workspace()
        arrays: list[Any] = [x, dt, A, B, C, D, z, dt_bias, initial, y, final]
        if self.warm:  # addresses save views of the workspace, and the driver a look at every tensor
            base = workspace.data_ptr()
            parts: list[Any] = [base + cut for cut in self.cuts]
            arrays = [a if a is None else a.data_ptr() for a in arrays]
        else:
            parts = [workspace[cut // 4 :] for cut in self.cuts]
        cb, decay, step, piece_state, piece_decay = parts
        results = y, final
        x, dt, A, B, C, D, z, dt_bias, initial, y, final = arrays
        stream = current_stream(device)
        table = None
        if self.new_table is not None:
            table = self.new_table()
            self.chunks(stream, cu_seqlens, table, *self.chunks_ints)
        self.prepare(stream, table, dt, A, dt_bias, B, C, decay, step, cb, *self.prepare_ints)
        if self.nsegments > 1:
            if self.hopper:
                self.state(stream, x, B, decay, step, piece_state, piece_decay, *self.state_ints)
            else:
                self.state(stream, table, x, B, decay, step, initial, piece_state, piece_decay, *self.state_ints)
            if self.passed:
                self.pass_(stream, piece_state, piece_decay, initial, *self.pass_ints)
        if self.hopper:
            described, plain = (initial, None) if self.initial_described else (None, initial)
            cb = None if self.tiles.own_cb else cb
            self.scan(stream, x, z, B, C, cb, y, described, decay, step, D, plain, piece_state, piece_decay, final,
                      *self.scan_ints)  # fmt: skip
        else:
            self.scan(stream, table, x, B, C, cb, decay, step, D, z, initial, piece_state, piece_decay, y, final,
                      *self.scan_ints)  # fmt: skip
        if not self.warm:
            launches = [self.prepare, self.scan]
            launches += [self.state] if self.nsegments > 1 else []
            launches += [self.pass_] if self.nsegments > 1 and self.passed else []
            launches += [self.chunks] if table is not None else []
            self.warm = all(launch.takes_addresses for launch in launches)
        return results


def _plan_step(
    *, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor,
    D: torch.Tensor | None, z: torch.Tensor | None, dt_bias: torch.Tensor | None, dt_softplus: bool,
    dt_limit: tuple[float, float], out: torch.Tensor | None = None, **slots: Any,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Return a function of the arrays, the new state, which may be the state, places and out, that returns y."""
    slot_count, nheads, headdim, dstate = state.shape
    one, places, new_y = x.dim() == 3, Places(**slots), fresh_like(x)

    def strides(tensor: torch.Tensor | None) -> tuple[int, int, int]:
        return places.strides(tensor, one)

    block_n = triton.next_power_of_2(dstate)
    table, batch = lookup(STEP_TABLE, x.device, x.dtype), places.count(len(x))
    few = "few_" if batch * nheads < table["few"] else ""
    block_p = min(triton.next_power_of_2(headdim), max(1, table[f"{few}tile"] // block_n))
    D_strides = (0, 0) if D is None else (D.stride(0), D.stride(1) if D.dim() == 2 else 0)
    ints = (
        1 if one else x.shape[1], nheads, B.shape[-2], headdim, dstate, float(dt_limit[0]), float(dt_limit[1]),
        *strides(x), *strides(dt), *strides(B), *strides(C), *strides(z), *D_strides,
        *strides(new_y() if out is None else out), *state.stride(), *places.ints(len(x), slot_count),
    )  # fmt: skip
    launch = Launch(
        kernels._ssd_step_kernel, (triton.cdiv(headdim, block_p), nheads, batch),
        {"BLOCK_P": block_p, "BLOCK_N": block_n, "SOFTPLUS": bool(dt_softplus)}, {"num_warps": table[f"{few}warps"]},
    )  # fmt: skip

    def run(x, dt, A, B, C, state, D, z, dt_bias, new_state, source=None, target=None, accepted=None, offsets=None,
            out=None):  # fmt: skip
        y = new_y() if out is None else out
        launch(current_stream(x.device), x, dt, A, B, C, D, z, dt_bias, state, new_state, y, source, target, accepted,
               offsets, *ints)  # fmt: skip
        return y

    return run


ssd_step, ssd_step_, ssd_step_slots = planned_steps(
    STEP, _plan_step, x=last_contiguous, A=contiguous, B=last_contiguous, C=last_contiguous, z=last_contiguous,
    dt_bias=contiguous,
)  # fmt: skip
