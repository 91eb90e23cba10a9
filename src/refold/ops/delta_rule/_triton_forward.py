"""The delta rule's forward pass and its step on GPUs with Triton: plans the launches of `_triton_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from refold.ops.delta_rule import _triton_kernels as kernels
from refold.ops.delta_rule.spec import SPEC, STEP
from refold.ops.delta_rule.tables import FORWARD
from refold.ops.delta_rule.tables import STEP as STEP_TABLE
from refold.ops.spec import Meta
from refold.ops.torch.launch import (
    INTERPRETED,
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
)
from refold.ops.torch.plans import contiguous, fresh, fresh_like
from refold.ops.torch.slots import Places
from refold.ops.torch.step_plans import planned_steps
from refold.ops.torch.tables import device_limits, lookup

MAX_KEYS = 256


def in_gluon(what: str) -> Any:
    """Return the module of Hopper's kernels of a part; None where this Triton cannot compile them."""
    return gluon(f"refold.ops.delta_rule._gluon_{what}_kernels", "refold.ops.torch.tma_launch")


def supports(meta: Meta) -> str | None:
    """Return None if the kernels take these arguments, else why not."""
    if (reason := refusal(meta)) is not None:
        return reason
    if meta.sizes["n"] > MAX_KEYS:
        return f"holds the keys of a state on chip, at most {MAX_KEYS}; n={meta.sizes['n']}"
    return same_dtype(meta, "q", "k", "r")


def gate_kind(A_log: Any, lower_bound: float | None) -> str:
    """Return which of the kernels' gates the arguments name."""
    if lower_bound is not None:
        return "bounded" if A_log is None else "bounded_A"
    return "log" if A_log is None else "softplus"


def strength_kind(beta: Any, beta_limit: float | None) -> str:
    """Return which of the kernels' strengths the arguments name."""
    return "one" if beta is None else "sigmoid" if beta_limit is not None else "plain"


def precisions(dtype: torch.dtype, *tiles: int) -> tuple[str, str]:
    """Return how products of ``dtype``, and those of the inverse, are formed."""
    precision = products("bf16x6", dtype, *tiles)
    return precision, {torch.bfloat16: "half", torch.float16: "halves"}.get(dtype, precision)


def cut(nchunks: int, programs: int, slots: int) -> int:
    """Return into how many segments ``nchunks`` chunks of ``programs`` programs are cut, which run ``slots`` at once.

    The unit is the time of a chunk that writes y; without y it takes 0.7. A state and its map are twice the programs.
    """
    best, best_cost = 1, float(-(-programs // slots) * nchunks)
    for segments in range(2, min(nchunks // 4, 64) + 1):
        length = -(-nchunks // segments)
        cost = -(-programs * segments // slots) * (length + 3.0) + 10.0 + 2.0 * segments
        cost += -(-2 * programs * (segments - 1) // slots) * (0.7 * length + 3.0)
        if cost < best_cost:
            best, best_cost = segments, cost
    return best


def square_view(cells: int) -> TileView:
    """Return the view of matrices of the pairs of tokens of chunks."""
    return TileView([cells * 64, 64], [64, 1], [64, 64])


def keyed_view(cells: int, nkeys: int, width: int, bits: int = 16) -> TileView:
    """Return the view of tiles of chunks, (tokens, keys): what is scaled by decays, or their sums."""
    return TileView([1, 1, cells * 64, nkeys], [8, 8, nkeys, 1], [1, 1, 64, width], bits)


def gate_strides(g: torch.Tensor | None, keyed: bool) -> tuple[int, ...]:
    """Return the strides of batch, time, heads and keys of gates; that of keys is zero where they share them."""
    return *strides(g, 3), g.stride(3) if g is not None and keyed else 0


def bias_strides(dt_bias: torch.Tensor | None) -> tuple[int, ...]:
    """Return the strides of heads and keys of a bias; that of keys is zero where they share it."""
    return (*strides(dt_bias, 2), 0)[:2]


@planned(
    SPEC, q=last_contiguous, k=last_contiguous, v=last_contiguous, r=last_contiguous, A_log=contiguous,
    dt_bias=contiguous, cu_seqlens=contiguous,
)  # fmt: skip
def delta_rule(**arguments: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Plan `refold.ops.delta_rule`; ``config`` overrides entries of the configuration table."""
    return Forward(**arguments)


class ChunkPlan:
    """How one signature is cut into chunks, and the launches that prepare them."""

    def __init__(
        self, q, k, v, g, beta, r, A_log, dt_bias, cu_seqlens, scale, normalize, lower_bound, beta_limit, erase,
        chunk_size, config,
    ) -> None:  # fmt: skip
        batch, seqlen, nheads, self.nvalues = v.shape
        ngroups, nkeys = q.shape[2:]
        self.varlen = varlen = cu_seqlens is not None
        self.config = config = lookup(FORWARD, v.device, v.dtype) | (config or {})
        chunk = config["chunk"]
        self.chunk = chunk = chunk if chunk_size is None else min(chunk, max(16, triton.next_power_of_2(chunk_size)))
        self.block_n = block_n = max(16, triton.next_power_of_2(nkeys))
        self.nseqs = nseqs = cu_seqlens.numel() - 1 if varlen else batch
        self.nchunks = nchunks = max(1, triton.cdiv(seqlen, chunk))
        self.nslots = nslots = seqlen // chunk + nseqs if varlen else batch * nchunks
        self.keyed = keyed = g is not None and g.dim() == 4
        self.precision, inverse = precisions(v.dtype, chunk, block_n)
        self.dtype, self.device = v.dtype, v.device
        scale = nkeys**-0.5 if scale is None else scale
        lower, limit = float(lower_bound or 0.0), float(beta_limit or 0.0)
        self.cells = cells = nslots * nheads
        self.new_T = fresh((cells * chunk, chunk), v.dtype, v.device)
        self.new_rows = fresh((cells * 4, chunk), torch.float32, v.device)
        self.new_more = fresh((cells * 5, chunk), torch.float32, v.device)
        self.new_tiles = fresh((cells * chunk, nkeys), v.dtype, v.device)
        self.new_c = fresh((cells * chunk, nkeys), torch.float32 if v.element_size() == 2 else torch.float64, v.device)
        self.new_decay = fresh((cells, nkeys), torch.float32, v.device)
        consts = {
            "CHUNK": chunk, "LEVELS": chunk.bit_length() - 1, "BLOCK_N": block_n, "NORMALIZE": normalize,
            "ERASE": erase, "VARLEN": varlen, "PRECISION": self.precision, "INVERSE": inverse,
        }  # fmt: skip
        sizes = (seqlen, nchunks, nseqs, nheads, ngroups, nkeys)
        gate, strength = gate_kind(A_log, lower_bound), strength_kind(beta, beta_limit)
        tiles = (*strides(q, 3), *strides(k, 3), *strides(r, 3))
        takes = bool(config["hopper_prepare"] and v.dtype == torch.bfloat16 and chunk == 64 and nkeys <= 128
                     and r is None and hopper_fits(q, k))  # fmt: skip
        self.part = "keyed" if keyed else "prepare"
        self.hopper = takes and in_gluon(self.part) is not None
        if self.hopper:
            self._plan_hopper(q, k, nheads, consts | {"GATE": gate, "BETA": strength})
        if keyed and self.hopper:
            self.ints = (*sizes, scale, lower, limit, *g.stride(), *bias_strides(dt_bias), *strides(beta, 3))
        elif keyed:
            self.decay = Launch(
                kernels._delta_decay_kernel, (nslots, nheads),
                {"CHUNK": chunk, "BLOCK_N": block_n, "GATE": gate, "VARLEN": varlen}, {"num_warps": 4},
            )  # fmt: skip
            self.decay_ints = (seqlen, nchunks, nseqs, nheads, nkeys, lower, *g.stride(), *bias_strides(dt_bias))
            self.prepare = Launch(kernels._delta_prepare_keyed_kernel, (nslots, nheads), consts | {"BETA": strength},
                                  {"num_warps": config["keyed_warps"]})  # fmt: skip
            self.ints = (*sizes, scale, limit, *tiles, *strides(beta, 3))
        else:
            block_h = min(16, triton.next_power_of_2(nheads))
            self.gates = Launch(
                kernels._delta_gates_kernel, (nslots, triton.cdiv(nheads, block_h)),
                {"CHUNK": chunk, "BLOCK_H": block_h, "GATE": gate, "BETA": strength, "VARLEN": varlen,
                 "EARLY": self.hopper and not INTERPRETED},
                {"num_warps": 4},
            )  # fmt: skip
            self.gate_ints = (seqlen, nchunks, nseqs, nheads, lower, limit, *strides(g, 3), *strides(beta, 3))
            self.new_flags = fresh((cells + 2 * nslots * varlen,), torch.int32, v.device)
            if self.hopper:
                self.ints = (seqlen, nchunks, nheads, ngroups, scale)
            else:
                self.prepare = Launch(kernels._delta_prepare_kernel, (nslots, nheads), consts,
                                      {"num_warps": config["prepare_warps"]})  # fmt: skip
                self.ints = (*sizes, scale, *tiles)

    def _plan_hopper(self, q, k, nheads: int, consts: dict[str, Any]) -> None:
        """Plan the kernel in Gluon, and describe its tensors to the copy engine."""
        from refold.ops.torch.tma_launch import MappedLaunch

        hopper: Any = in_gluon(self.part)
        block = max(64, self.block_n)
        square, options = square_view(self.cells), {"num_warps": 4}
        views = [tile_view(q, block), tile_view(k, block), square, square, square]
        names = ["NORMALIZE", "ERASE", "VARLEN"]
        more = {"C": 64, "N": block, "EPS": kernels.NORM_EPS.value}
        if self.keyed:
            kernel = hopper._delta_prepare_keyed_hopper_kernel
            views += [keyed_view(self.cells, q.shape[3], block)] * 3
            names += ["GATE", "BETA"]
            more |= {"FLOOR": kernels.FLOOR.value, "NEAR": kernels.NEAR.value}
        else:
            kernel, options = hopper._delta_prepare_hopper_kernel, options | {"maxnreg": 168}
        consts = more | {name: consts[name] for name in names}
        self.prepare = MappedLaunch(kernel, (self.nslots, nheads), consts, options, views)

    def segments(self, programs: int) -> int:
        """Return into how many segments a sequence is cut: one, where the map of more than 128 keys is too large."""
        sms, _ = device_limits(self.device)
        return 1 if self.block_n > 128 else cut(self.nslots // max(self.nseqs, 1), programs, sms)

    def hopper_chain(self, q, k, v, r, dy=None) -> bool:
        """Say whether the walks over chunks in Gluon take these tensors."""
        return bool(self.chunk == 64 and q.shape[3] <= 128 and r is None
                    and hopper_fits(q, k, v, v if dy is None else dy) and in_gluon("chain") is not None)  # fmt: skip

    def chain(self, q, k, erase: bool) -> tuple[list[TileView | None], TileView, dict[str, Any]]:
        """Describe to the copy engine q, r and k, and what is of pairs of tokens; and return the kernels' constants."""
        nkeys = q.shape[3]
        block = 64 if nkeys <= 64 else 128
        consts = {"C": 64, "N": block, "P": 64, "STAGES": 2 if self.keyed else self.config["hopper_stages"],
                  "KEYED": self.keyed, "ERASE": erase, "VARLEN": self.varlen}  # fmt: skip
        if self.keyed:
            view = keyed_view(self.cells, nkeys, block)
            views = [view, view if erase else None, view]
        else:
            views = [tile_view(q, block), None, tile_view(k, block)]
        return views, square_view(self.cells), consts

    def __call__(self, stream, q, k, g, beta, r, A_log, dt_bias, cu_seqlens, X=None, more=None) -> tuple[Any, ...]:
        """Prepare `chain`: queries, read keys, keys, T, P, rows, decays; and the sums of decays per key.

        ``X`` and ``more`` get what a backward reads, see `_delta_prepare_kernel`.
        """
        T, P, rows = self.new_T(), self.new_T(), self.new_rows()
        if not self.keyed:
            more, flags = self.new_more() if more is None else more, self.new_flags()
            self.gates(stream, g, beta, A_log, dt_bias, cu_seqlens, rows, more, flags, *self.gate_ints)
            if self.hopper:
                self.prepare(stream, q, k, T, P, X, rows, more, flags, *self.ints)
            else:
                self.prepare(stream, q, k, r, cu_seqlens, T, P, rows, X, more, *self.ints)
            return q, r, k, T, P, rows, None, None
        c, Q, R, K, decay = self.new_c(), self.new_tiles(), self.new_tiles(), self.new_tiles(), self.new_decay()
        if self.hopper:
            self.prepare(stream, q, k, T, P, X, Q, R, K, g, A_log, dt_bias, beta, cu_seqlens, c, rows, decay, more,
                         *self.ints)  # fmt: skip
            return Q, R, K, T, P, rows, decay, c
        self.decay(stream, g, A_log, dt_bias, cu_seqlens, c, rows, *self.decay_ints)
        self.prepare(stream, q, k, r, c, beta, cu_seqlens, T, P, rows, Q, R, K, decay, X, more, *self.ints)
        return Q, R, K, T, P, rows, decay, c


class Forward:
    """How one combination of shapes, strides, dtypes and options runs."""

    def __init__(
        self, *, q, k, v, g, beta, r, A_log, dt_bias, initial_state, cu_seqlens, scale, normalize, lower_bound,
        beta_limit, erase, chunk_size, config=None,
    ) -> None:  # fmt: skip
        self.chunks = chunks = ChunkPlan(q, k, v, g, beta, r, A_log, dt_bias, cu_seqlens, scale, normalize, lower_bound,
                                      beta_limit, erase, chunk_size, config)  # fmt: skip
        _, seqlen, nheads, nvalues = v.shape
        ngroups, nkeys = q.shape[2:]
        config, nseqs, self.erase = chunks.config, chunks.nseqs, erase
        block_p = block_of(nvalues, chunks.block_n, config["block_p"], config["tile"])
        blocks, maps = triton.cdiv(nvalues, block_p), triton.cdiv(nkeys, block_p)
        self.nsegments = config.get("segments") or chunks.segments(nseqs * nheads * blocks)
        precision, _ = precisions(v.dtype, chunks.chunk, chunks.block_n, block_p)
        consts = {
            "CHUNK": chunks.chunk, "BLOCK_N": chunks.block_n, "BLOCK_P": block_p, "KEYED": chunks.keyed,
            "ERASE": erase, "VARLEN": chunks.varlen, "PRECISION": precision, "STAGES": config["stages"],
        }  # fmt: skip
        options = {"num_warps": config["warps"], "num_stages": config["stages"]}
        segments = self.nsegments
        self.hopper = bool(config["hopper"] and block_p == 64 and chunks.hopper_chain(q, k, v, r))
        if self.hopper:
            self._plan_hopper(q, k, v, erase, blocks, maps)
        else:
            self.scan = Launch(kernels._delta_chain_kernel, (nheads * blocks, segments, nseqs),
                               {**consts, "OUTPUT": True}, options)  # fmt: skip
            self.state = Launch(kernels._delta_chain_kernel, (nheads * (blocks + maps), segments - 1, nseqs),
                                {**consts, "OUTPUT": False}, options)  # fmt: skip
        # Of 16 bits, the map is as exact in TF32 as the chain is.
        map_precision = "tf32" if precision == "ieee" and v.element_size() == 2 else precision
        rows = 16 if v.element_size() == 2 else 32
        self.pass_ = Launch(kernels._delta_pass_kernel, (triton.cdiv(nvalues, rows), nheads, nseqs),
                            {"BLOCK_N": chunks.block_n, "BLOCK_P": rows, "PRECISION": map_precision},
                            {"num_warps": 4})  # fmt: skip
        initial = strides(initial_state, 4)
        tiles = () if self.hopper else (*strides(q, 3), *strides(r, 3), *strides(k, 3), *v.stride()[:3])
        self.ints = (seqlen, chunks.nchunks, segments, nheads, ngroups, nkeys, nvalues, *tiles, *initial)
        self.pass_ints = (segments, nheads, nkeys, nvalues, *initial)
        self.new_y = fresh(v.shape, v.dtype, v.device)
        self.new_final = fresh((nseqs, nheads, nkeys, nvalues), torch.float32, v.device)
        cells = nseqs * nheads * segments
        self.new_after = fresh((cells * (nvalues + nkeys), nkeys), torch.float32, v.device)
        self.new_before = fresh((cells * nvalues, nkeys), torch.float32, v.device)

    def _plan_hopper(self, q, k, v, erase: bool, blocks: int, maps: int) -> None:
        """Plan the kernel in Gluon, and describe its tensors to the copy engine."""
        from refold.ops.torch.tma_launch import MappedLaunch

        hopper: Any = in_gluon("chain")
        chunks, nheads = self.chunks, v.shape[2]
        (q_view, r_view, k_view), square, consts = chunks.chain(q, k, erase)
        v_view, y_view = tile_view(v, 64), tile_view(torch.empty(v.shape, device="meta"), 64)
        self.scan = MappedLaunch(
            hopper._delta_chain_hopper_kernel, (nheads * blocks, self.nsegments, chunks.nseqs),
            {**consts, "GIVES": "outputs"}, {"num_warps": 4}, [q_view, r_view, k_view, v_view, square, square, y_view],
        )  # fmt: skip
        self.state = MappedLaunch(
            hopper._delta_chain_hopper_kernel, (nheads * (blocks + maps), self.nsegments - 1, chunks.nseqs),
            {**consts, "GIVES": "maps"}, {"num_warps": 4, "maxnreg": 168}, [None, r_view, k_view, v_view, square],
        )  # fmt: skip

    def __call__(self, q, k, v, g, beta, r, A_log, dt_bias, initial, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch."""
        stream = current_stream(v.device)
        q, r, k, T, P, rows, decay, _ = self.chunks(stream, q, k, g, beta, r, A_log, dt_bias, cu_seqlens)
        r = None if self.hopper and not self.erase else r
        y, final, before = self.new_y(), self.new_final(), None
        if self.nsegments > 1:
            after, before = self.new_after(), self.new_before()
            if self.hopper:
                self.state(stream, None, r, k, v, T, None, None, None, None, rows, decay, None, None, cu_seqlens, None,
                           None, after, *self.ints)  # fmt: skip
            else:
                self.state(stream, q, r, k, v, T, P, rows, decay, None, None, cu_seqlens, y, final, after, None, None,
                           *self.ints)  # fmt: skip
            self.pass_(stream, after, initial, before, *self.pass_ints)
        if self.hopper:
            self.scan(stream, q, r, k, v, T, P, y, None, None, rows, decay, initial, before, cu_seqlens, y, final, None,
                      *self.ints)  # fmt: skip
        else:
            self.scan(stream, q, r, k, v, T, P, rows, decay, initial, before, cu_seqlens, y, final, None, None, None,
                      *self.ints)  # fmt: skip
        return y, final


def hopper_fits(*tensors: torch.Tensor) -> bool:
    """Say whether the Hopper kernels take these tensors."""
    return on_hopper(tensors[0].device) and tensors[0].element_size() == 2 and all(map(copyable, tensors))


def _plan_step(
    *, q, k, v, state, g, beta, r, A_log, dt_bias, scale, normalize, lower_bound, beta_limit, erase,
    new_strides: tuple[int, ...], out: torch.Tensor | None = None, **slots: Any,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Return a function of the arrays, the new state, which may be the state, places and out, that returns y."""
    slot_count, nheads, nkeys, nvalues = state.shape
    one, places, new_y = v.dim() == 3, Places(**slots), fresh_like(v)
    batch = places.count(len(v))

    def of(tensor: torch.Tensor | None) -> tuple[int, int, int]:
        return places.strides(tensor, one)

    keyed = g is not None and g.dim() == v.dim()
    block_n = triton.next_power_of_2(nkeys)
    table = lookup(STEP_TABLE, v.device, v.dtype)
    few = "few_" if batch * nheads < table["few"] else ""
    block_p = min(triton.next_power_of_2(nvalues), max(1, table[f"{few}tile"] // block_n))
    ints = (
        1 if one else v.shape[1], nheads, q.shape[-2], nkeys, nvalues, nkeys**-0.5 if scale is None else scale,
        float(lower_bound or 0.0), float(beta_limit or 0.0), *of(q), *of(k), *of(r), *of(v), *of(g),
        g.stride(-1) if keyed else 0, *of(beta), *bias_strides(dt_bias), *state.stride(), *new_strides,
        *of(new_y() if out is None else out), *places.ints(len(v), slot_count),
    )  # fmt: skip
    launch = Launch(
        kernels._delta_step_kernel, (triton.cdiv(nvalues, block_p), nheads, batch),
        {"BLOCK_N": block_n, "BLOCK_P": block_p, "GATE": gate_kind(A_log, lower_bound),
         "BETA": strength_kind(beta, beta_limit), "NORMALIZE": normalize, "ERASE": erase, "KEYED": keyed},
        {"num_warps": table[f"{few}warps"]},
    )  # fmt: skip

    def run(q, k, v, state, g, beta, r, A_log, dt_bias, new_state, source=None, target=None, accepted=None,
            offsets=None, out=None):  # fmt: skip
        y = new_y() if out is None else out
        launch(current_stream(v.device), q, k, r, v, g, beta, A_log, dt_bias, state, new_state, y, source, target,
               accepted, offsets, *ints)  # fmt: skip
        return y

    return run


delta_rule_step, delta_rule_step_, delta_rule_step_slots = planned_steps(
    STEP, _plan_step, q=last_contiguous, k=last_contiguous, v=last_contiguous, r=last_contiguous, A_log=contiguous
)  # fmt: skip
