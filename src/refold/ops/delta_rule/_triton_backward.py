"""The delta rule's backward pass on GPUs with Triton: plans the launches of `_triton_backward_kernels`.

Where not all that is read is erased, `_prologue` computes in torch what comes before the recurrence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton

from refold.ops.delta_rule import _torch
from refold.ops.delta_rule import _triton_backward_kernels as kernels
from refold.ops.delta_rule import _triton_kernels as forward
from refold.ops.delta_rule._prologue import log_decay, strength
from refold.ops.delta_rule._triton_forward import (
    ChunkPlan,
    bias_strides,
    gate_kind,
    gate_strides,
    in_gluon,
    keyed_view,
    precisions,
    strength_kind,
)
from refold.ops.delta_rule.spec import SPEC
from refold.ops.delta_rule.tables import BACKWARD
from refold.ops.torch import chunks as torch_chunks
from refold.ops.torch.launch import (
    Launch,
    TileView,
    block_of,
    current_stream,
    last_contiguous,
    planned,
    strides,
    tile_view,
)
from refold.ops.torch.plans import contiguous, fresh, fresh_like
from refold.ops.torch.pointwise import zeros_for_bad
from refold.ops.torch.tables import device_limits, lookup


@planned(
    SPEC, backward=True, dy=last_contiguous, dstate=contiguous, q=last_contiguous, k=last_contiguous,
    v=last_contiguous, r=last_contiguous, A_log=contiguous, dt_bias=contiguous, cu_seqlens=contiguous,
)  # fmt: skip
def delta_rule_backward(
    *, lower_bound: float | None, beta_limit: float | None, normalize: bool, erase: bool, **options: Any
) -> Callable[..., dict[str, torch.Tensor]]:
    """Plan the gradients of `refold.ops.delta_rule`; ``config`` overrides entries of the configuration table.

    Where all that is read is erased, the kernels say which gradients are not finite. Else they get finite operands, and
    `nonfinite` says that. Both without a look at values on the host.
    """
    if options["g"] is not None and options["g"].ndim == 4:
        table = lookup(BACKWARD, options["v"].device, options["v"].dtype) | (options.get("config") or {})
        if not table["keyed"]:
            return _of_torch(lower_bound=lower_bound, beta_limit=beta_limit, normalize=normalize, erase=erase,
                             scale=options["scale"], chunk_size=options["chunk_size"])  # fmt: skip
    more = {name: options.get(name) for name in ("scale", "chunk_size", "config")}
    limits: dict[str, Any] = {"lower_bound": lower_bound, "beta_limit": beta_limit}
    more |= limits if erase else dict.fromkeys(limits)
    plan: Backward | None = None
    gates: Gates | None = None

    def run(dy, dstate, q, k, v, g, beta, r, A_log, dt_bias, initial, cu_seqlens):
        nonlocal plan, gates
        dy = torch.zeros_like(v) if dy is None else dy  # the final state alone was read
        spoiled: dict[str, torch.Tensor] = {}
        operands = [q, k, v, g, beta, r, initial, cu_seqlens, A_log, dt_bias]
        if not erase:
            log = None if g is None else log_decay(g, A_log, dt_bias, lower_bound)
            strengths = None if beta is None else strength(beta, beta_limit)
            chunks = torch_chunks.Chunks("delta_rule", v.shape[1], v.shape[0], max(1, v.shape[1]), cu_seqlens)
            scan = _torch.Scan(q, k, v, r, strengths, log, initial, erase, 1.0, chunks)
            spoiled, read = _of_bad_values(scan, dy, dstate, normalize)
            dy, dstate = (None if a is None else zeros_for_bad(a).contiguous() for a in (dy, dstate))
            operands = [*(None if a is None else last_contiguous(a) for a in read), cu_seqlens, None, None]
        if plan is None or gates is None:
            plan = Backward(dy, *operands, normalize=normalize, erase=erase, **more)
            gates = Gates(v, g, beta, A_log, dt_bias, plan.slices, **limits)
        grads = plan(dy, dstate, *operands)
        for name in grads.keys() & spoiled.keys():
            mask = spoiled[name]
            grads[name].masked_fill_(mask[..., None] if name == "beta" else mask, math.nan)
        return gates(grads, g, beta, A_log, dt_bias)

    return run


def _of_bad_values(
    scan: _torch.Scan, dy: torch.Tensor, dstate: torch.Tensor | None, normalize: bool
) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor | None, ...]]:
    """Mark the gradients that are not finite; and return the operands with zeros for what is not."""
    bad = scan.bad(dy, dstate)
    rows = {name: getattr(bad, name).any(-1, keepdim=True) for name in ("q", "k")}
    if normalize:  # divided by its length, a vector with a NaN is NaN; one with infinities is zero but for these
        bad.q = bad.q | scan.q.isnan().any(-1, keepdim=True)
        bad.k = bad.k | scan.k.isnan().any(-1, keepdim=True)
    spoiled, clean = scan.spoiled_gradients(bad), scan.without(bad)
    if normalize:
        clean.q, clean.k = clean.q.masked_fill(rows["q"], 0.0), clean.k.masked_fill(rows["k"], 0.0)
        spoiled |= {name: spoiled[name].any(-1, keepdim=True) | row for name, row in rows.items()}
    g = clean.g if clean.g is None or clean.g.shape[-1] > 1 else clean.g[..., 0]
    return spoiled, (clean.q, clean.k, clean.v, g, clean.beta, clean.r, clean.initial)


def _of_torch(**options: Any) -> Callable[..., dict[str, torch.Tensor]]:
    names = ("dy", "dstate", *(arg.name for arg in SPEC.args))

    def run(*arrays):
        return _torch.delta_rule_backward(**dict(zip(names, arrays, strict=True)), needs=frozenset(), **options)

    return run


class Gates:
    """How gradients of log decays and strengths become those of the gates that they came from.

    Log decays have the gradient (b, t, h, 1 or n), strengths (b, t, h, slices), of which the sum is meant.
    """

    def __init__(
        self, v, g, beta, A_log, dt_bias, slices: int, *, lower_bound: float | None, beta_limit: float | None
    ) -> None:
        batch, seqlen, nheads, _ = v.shape
        nkeys = g.shape[3] if g is not None and g.ndim == 4 else 1
        gate, strength = gate_kind(A_log, lower_bound), strength_kind(beta, beta_limit)
        self.device = v.device
        block_n = triton.next_power_of_2(nkeys)
        block_t = min(1024, max(1, 4096 // block_n))
        blocks = triton.cdiv(batch * seqlen, block_t)
        self.launch = Launch(
            kernels._delta_bwd_gates_kernel, (blocks, nheads),
            {"BLOCK_T": block_t, "BLOCK_N": block_n, "SLICES": slices, "GATE": gate, "BETA": strength},
            {"num_warps": 4},
        )  # fmt: skip
        self.ints = (
            batch * seqlen, seqlen, nheads, nkeys, float(lower_bound or 0.0), float(beta_limit or 0.0),
            *gate_strides(g, nkeys > 1), *bias_strides(dt_bias), *strides(beta, 3),
        )  # fmt: skip
        shaped = g is not None and (gate != "log" or dt_bias is not None)
        self.made = (
            fresh_like(g) if shaped else None,
            fresh_like(beta) if beta is not None and (beta_limit is not None or slices > 1) else None,
            None if A_log is None else fresh((blocks, nheads), torch.float32, v.device),
            None if dt_bias is None else fresh((blocks, nheads, nkeys), torch.float32, v.device),
        )  # fmt: skip

    def __call__(self, grads: dict[str, torch.Tensor], g, beta, A_log, dt_bias) -> dict[str, torch.Tensor]:
        """Launch."""
        dlog, dstrength = grads.get("g"), grads.get("beta")
        dg, dbeta, dA, dbias = (None if make is None else make() for make in self.made)
        if dg is not None or dbeta is not None:
            self.launch(current_stream(self.device), None if dg is None else g, A_log, dt_bias,
                        None if dbeta is None else beta, dlog, dstrength, dg, dbeta, dA, dbias, *self.ints)  # fmt: skip
        if dlog is not None:
            grads["g"] = dlog.view(g.shape) if dg is None else dg
        if dstrength is not None:
            grads["beta"] = dstrength.view(beta.shape) if dbeta is None else dbeta
        if dA is not None:
            grads["A_log"] = dA.sum(0)
        if dbias is not None:
            grads["dt_bias"] = dbias.sum(0 if dt_bias.ndim == 2 else (0, 2))
        return grads


class Backward:
    """How one combination of shapes, strides, dtypes and options runs backward."""

    maps: Launch
    states: Launch
    own: Launch

    def __init__(
        self, dy, q, k, v, g, beta, r, initial_state, cu_seqlens, A_log, dt_bias, *, scale, normalize, erase,
        chunk_size, config, lower_bound, beta_limit,
    ) -> None:  # fmt: skip
        config = lookup(BACKWARD, v.device, v.dtype) | (config or {})
        self.chunks = chunks = ChunkPlan(q, k, v, g, beta, r, A_log, dt_bias, cu_seqlens, scale, normalize, lower_bound,
                                         beta_limit, erase, chunk_size, config)  # fmt: skip
        self.keyed, self.erase, self.slices = chunks.keyed, erase, 1
        batch, seqlen, nheads, nvalues = v.shape
        ngroups, nkeys = q.shape[2:]
        chunk, nseqs, nslots = chunks.chunk, chunks.nseqs, chunks.nslots
        cells = nslots * nheads
        initial = strides(initial_state, 4)
        tiles = (*strides(q, 3), *strides(r, 3), *strides(k, 3))
        sizes = (nheads, ngroups, nkeys, nvalues)
        self.hopper_chains = bool(config["hopper_chains"] and chunks.hopper_chain(q, k, v, r, dy))
        self._plan_chains(v.device, config, nseqs, sizes, erase)
        if self.hopper_chains:
            self._plan_hopper_chains(q, k, v, dy, erase)
        segments = self.nsegments
        self.state_ints = (seqlen, chunks.nchunks, segments, *sizes, *tiles, *v.stride()[:3], *initial)
        self.chain_ints = (seqlen, chunks.nchunks, segments, *sizes, *tiles, *dy.stride()[:3])
        self.sizes = (seqlen, chunks.nchunks, segments, *sizes)
        self.hopper_state_ints = (*self.sizes, *initial)
        self.pass_ints = (segments, nheads, nkeys, nvalues)
        self.initial_strides = initial

        self.ints = (seqlen, chunks.nchunks, nseqs, *sizes)
        self.scale = nkeys**-0.5 if scale is None else scale
        self.lower, self.gate = float(lower_bound or 0.0), gate_kind(A_log, lower_bound)
        self._plan_pairs(config, q, k, v, tiles, dy, normalize, erase)
        self.strides += (*gate_strides(g, chunks.keyed), *bias_strides(dt_bias))
        self.new_dg = fresh((batch, seqlen, nheads, nkeys if chunks.keyed else 1), torch.float32, v.device)
        self.new_states = fresh((2, cells * nvalues, nkeys), v.dtype, v.device)
        self.new_values = fresh((2, cells * chunk, nvalues), v.dtype, v.device)
        self.new_dr = fresh((batch, seqlen, nheads, nkeys), v.dtype, v.device)
        self.new = {"q": fresh_like(q), "k": fresh_like(k), "v": fresh_like(v)}
        shape = (nseqs, nheads, nkeys, nvalues)
        self.new_initial = None if initial_state is None else fresh(shape, torch.float32, v.device)

    def _plan_pairs(self, config: dict[str, Any], q, k, v, tiles: tuple[int, ...], dy, normalize: bool, erase: bool):
        """Plan what goes over pairs of tokens of a chunk: twice, for chunks that turn out to have bad values."""
        chunks = self.chunks
        batch, seqlen, nheads, nvalues = v.shape
        ngroups, nkeys = q.shape[2:]
        nslots, block_n, device = chunks.nslots, chunks.block_n, v.device
        self.strides = (*tiles, *v.stride()[:3], *dy.stride()[:3])
        block_n = min(block_n, config["keyed_n"]) if chunks.keyed else block_n
        # Triton 3.6 gives wrong results on Hopper where the first is larger.
        block_p = max(16, min(triton.next_power_of_2(nvalues), config["pairs_p"], block_n))
        precision, _ = precisions(v.dtype, chunks.chunk, block_n, block_p)
        blocks_p = triton.cdiv(nvalues, block_p)
        consts = {"CHUNK": chunks.chunk, "BLOCK_N": block_n, "BLOCK_P": block_p, "BLOCKS_P": blocks_p,
                  "GATE": self.gate, "VARLEN": chunks.varlen, "PRECISION": precision}  # fmt: skip
        careful = [{"CAREFUL": careful} for careful in ((False, True) if erase else (False,))]
        if chunks.keyed:
            self.slices = slices = triton.cdiv(nkeys, block_n)
            consts |= {"LEVELS": chunks.chunk.bit_length() - 1, "ERASE": erase}
            options = {"num_warps": config["keyed_pairs_warps"], "num_stages": config["pairs_stages"]}
            self.pairs = [Launch(kernels._delta_bwd_keyed_kernel, (nslots, nheads, slices),
                                 consts | {"LATER": later} | c, options)
                          for c in careful for later in (True, False)]  # fmt: skip
            block_t = max(1, 4096 // chunks.block_n)
            consts = {"CHUNK": chunks.chunk, "SLICES": slices, "BLOCK_T": block_t, "BLOCK_N": chunks.block_n,
                      "NORMALIZE": normalize}  # fmt: skip
            self.finish = [Launch(kernels._delta_bwd_finish_kernel, (triton.cdiv(batch * seqlen, block_t), ngroups),
                                  consts, {"num_warps": 4}) for _ in "qk"]  # fmt: skip
            self.finish_ints = (batch * seqlen, seqlen, nheads, ngroups, nkeys)
            self.new_part = fresh((batch, seqlen, nheads, nkeys), torch.float32, device)
            self.new_dbeta = fresh((batch, seqlen, nheads, slices), torch.float32, device)
            self.new_flags = fresh((nslots * nheads * slices,), torch.int32, device)
            self.hopper = self._pairs_in_gluon("keyed_pairs", config, q, v, erase) and nvalues > 64
            if self.hopper:
                self._plan_hopper("keyed_pairs", q, k, v, dy, normalize)
                del self.pairs[:2]
            return
        consts |= {"NORMALIZE": normalize, "TWO": v.dtype == torch.float32}
        options = {"num_warps": config["pairs_warps"], "num_stages": config["pairs_stages"]}
        self.pairs = [Launch(kernels._delta_bwd_pairs_kernel, (nslots, ngroups), consts | {"ERASE": erase} | c, options)
                      for c in careful]  # fmt: skip
        self.new_dbeta = fresh((batch, seqlen, nheads, 1), torch.float32, device)
        self.new_flags = fresh((nslots * ngroups,), torch.int32, device)
        self.hopper = self._pairs_in_gluon("pairs", config, q, v, erase)
        if self.hopper:
            self._plan_hopper("pairs", q, k, v, dy, normalize)
            del self.pairs[0]

    def _pairs_in_gluon(self, part: str, config: dict[str, Any], q, v, erase: bool) -> bool:
        """Say whether a kernel of pairs in Gluon takes what the walks in Gluon take."""
        return bool(config["hopper_pairs"] and self.hopper_chains and erase and v.dtype == torch.bfloat16
                    and not self.chunks.varlen and q.shape[3] > 64 and v.shape[3] <= 128
                    and in_gluon(part) is not None)  # fmt: skip

    def _views(self, v, nkeys: int) -> tuple[TileView, TileView]:
        """Describe to the copy engine the states of chunks, and u and w."""
        nvalues, cells = v.shape[3], self.chunks.cells
        tile = [1, 1, 64, 64 if nkeys <= 64 else 128]
        states = TileView([1, cells, nvalues, nkeys], [8, nvalues * nkeys, nkeys, 1], tile)
        return states, keyed_view(cells, nvalues, 64)

    def _plan_hopper_chains(self, q, k, v, dy, erase: bool) -> None:
        """Plan what walks over chunks in Gluon; where a flag is up, the plain walk back goes again."""
        from refold.ops.torch.tma_launch import MappedLaunch

        there, back, chunks = in_gluon("chain"), in_gluon("chain_back"), self.chunks
        (nheads, nvalues), nkeys = v.shape[2:], q.shape[3]
        (q_view, r_view, k_view), square, consts = chunks.chain(q, k, erase)
        states, tiles = self._views(v, nkeys)
        v_view, dy_view = tile_view(v, 64), tile_view(dy, 64)
        dv_view = tile_view(torch.empty(v.shape, device="meta"), 64)
        blocks, segments, nseqs = triton.cdiv(nvalues, 64), self.nsegments, chunks.nseqs
        grid, options = (nheads * blocks, segments, nseqs), {"num_warps": 4, "maxnreg": 168}
        self.maps = MappedLaunch(
            there._delta_chain_hopper_kernel, (nheads * (blocks + triton.cdiv(nkeys, 64)), segments, nseqs),
            consts | {"GIVES": "maps"}, options, [None, r_view, k_view, v_view, square],
        )  # fmt: skip
        self.states = MappedLaunch(
            there._delta_chain_hopper_kernel, grid, consts | {"GIVES": "states"}, options,
            [None, r_view, k_view, v_view, square, None, None, states, tiles],
        )  # fmt: skip
        views = [q_view, r_view, k_view, dy_view, square if erase else None, square]
        consts |= {"STAGES": 2}  # results in two tiles each take the place of the third
        self.own = MappedLaunch(back._delta_chain_back_hopper_kernel, (nheads * blocks, segments - 1, nseqs),
                                consts | {"OUTPUT": False}, options, views)  # fmt: skip
        self.first_chain = MappedLaunch(back._delta_chain_back_hopper_kernel, grid, consts | {"OUTPUT": True}, options,
                                        [*views, states, tiles, dv_view])  # fmt: skip
        self.new_chain_flags = fresh((nseqs * nheads * segments * blocks,), torch.int32, v.device)

    def _plan_hopper(self, part: str, q, k, v, dy, normalize: bool) -> None:
        """Plan a kernel of pairs in Gluon, and describe its tensors to the copy engine."""
        from refold.ops.torch.tma_launch import MappedLaunch

        hopper: Any = in_gluon(part)
        (_, seqlen, nheads, nvalues), (ngroups, nkeys), chunks = v.shape, q.shape[2:], self.chunks
        states, tiles = self._views(v, nkeys)
        read, values = [tile_view(a, 128) for a in (q, k)], [tile_view(a, 64) for a in (v, dy)]
        results = [tile_view(torch.empty(a.shape, device="meta"), 128) for a in (q, k)]
        items = chunks.nslots * ngroups
        consts = {"C": 64, "N": 128, "P": 64, "NORMALIZE": normalize, "EPS": forward.NORM_EPS.value}
        ints = (seqlen, chunks.nchunks, items, ngroups, nheads // ngroups)
        if chunks.keyed:
            sums = keyed_view(chunks.cells, nkeys, 128, bits=32)
            kernel, consts = hopper._delta_keyed_pairs_hopper_kernel, consts | {"NEAR": forward.NEAR.value}
            views = [*read, values[1], sums, tiles, tiles, states, states, *results]
            self.hopper_ints = (*ints, nkeys, nvalues, self.slices, self.scale, *v.stride()[:3])
        else:
            kernel, consts = hopper._delta_pairs_hopper_kernel, consts | {"BLOCKS": triton.cdiv(nvalues, 64)}
            views = [*read, *values, tiles, tiles, states, states, *results]
            self.hopper_ints = (*ints, self.scale)
        self.pairs_hopper = MappedLaunch(kernel, (min(items, device_limits(v.device)[0]),), consts, {"num_warps": 8},
                                         views)  # fmt: skip

    def _plan_chains(self, device, config: dict[str, Any], nseqs: int, sizes: tuple[int, ...], erase: bool) -> None:
        """Plan what walks over chunks, in both directions of time."""
        chunks = self.chunks
        nheads, _, nkeys, nvalues = sizes
        block_p = block_of(nvalues, chunks.block_n, config["block_p"], config["tile"])
        sms, _ = device_limits(device)
        if chunks.dtype.itemsize == 2:  # few programs: more of them, which spill less
            while block_p > 16 and nseqs * nheads * triton.cdiv(nvalues, block_p) < 2 * sms:
                block_p //= 2
        blocks, maps = triton.cdiv(nvalues, block_p), triton.cdiv(nkeys, block_p)
        programs = nseqs * nheads * (triton.cdiv(nvalues, 64) if self.hopper_chains else blocks)
        self.nsegments = segments = config.get("segments") or chunks.segments(programs)
        precision, _ = precisions(chunks.dtype, chunks.chunk, chunks.block_n, block_p)
        consts = {
            "CHUNK": chunks.chunk, "BLOCK_N": chunks.block_n, "BLOCK_P": block_p, "KEYED": chunks.keyed,
            "ERASE": erase, "VARLEN": chunks.varlen, "PRECISION": precision, "STAGES": config["stages"],
        }  # fmt: skip
        options = {"num_warps": config["warps"], "num_stages": config["stages"]}

        def walk(kernel: Any, programs: int, pieces: int, output: bool) -> Launch:
            return Launch(kernel, (nheads * programs, pieces, nseqs), {**consts, "OUTPUT": output}, options)

        self.maps = walk(forward._delta_chain_kernel, blocks + maps, segments, False)
        self.states = walk(forward._delta_chain_kernel, blocks, segments, True)
        self.own = walk(kernels._delta_bwd_chain_kernel, blocks, segments - 1, False)
        self.chain = walk(kernels._delta_bwd_chain_kernel, blocks, segments, True)
        half = chunks.dtype.itemsize == 2
        rows = 16 if half else 32
        consts = {"BLOCK_N": chunks.block_n, "BLOCK_P": rows,
                  "PRECISION": "tf32" if precision == "ieee" and half else precision}  # fmt: skip
        grid = (triton.cdiv(nvalues, rows), nheads, nseqs)
        self.pass_ = Launch(forward._delta_pass_kernel, grid, consts, {"num_warps": 4})
        self.pass_back = Launch(kernels._delta_bwd_pass_kernel, grid, consts, {"num_warps": 4})
        cells = nseqs * nheads * segments
        self.new_after = fresh((cells * (nvalues + nkeys), nkeys), torch.float32, device)
        self.new_before = fresh((cells * nvalues, nkeys), torch.float32, device)

    def __call__(
        self, dy, dstate, q, k, v, g, beta, r, initial, cu_seqlens, A_log, dt_bias
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Launch."""
        stream = current_stream(v.device)
        X, more = self.chunks.new_T(), self.chunks.new_more()
        q_tile, r_tile, k_tile, T, P, rows, decay, c = self.chunks(
            stream, q, k, g, beta, r, A_log, dt_bias, cu_seqlens, X, more
        )
        entering, leaving = self.new_states()
        u, w = self.new_values()
        grads = {name: make() for name, make in self.new.items()}
        dinitial = None if self.new_initial is None else self.new_initial()
        after = own = before = before_back = flags = None
        if self.nsegments > 1:
            after, own, before, before_back = self.new_after(), self.new_before(), self.new_before(), self.new_before()
        if self.hopper_chains:
            flags, r_read = self.new_chain_flags(), r_tile if self.erase else None
            read = (r_read, k_tile, v, T)
            back = (q_tile, r_read, k_tile, dy, X if self.erase else None, P)
            factors = (rows, more, decay)
            if self.nsegments > 1:
                self.maps(stream, None, *read, None, None, None, None, rows, decay, None, None, cu_seqlens, None, None,
                          after, *self.hopper_state_ints)  # fmt: skip
                self.pass_(stream, after, initial, before, *self.pass_ints, *self.initial_strides)
                self.own(stream, *back, None, None, None, *factors, None, None, cu_seqlens, None, None, own, None,
                         *self.sizes)  # fmt: skip
                self.pass_back(stream, own, after, dstate, before_back, *self.pass_ints)
            self.states(stream, None, *read, None, None, entering, u, rows, decay, initial, before, cu_seqlens, None,
                        None, None, *self.hopper_state_ints)  # fmt: skip
            self.first_chain(stream, *back, leaving, w, grads["v"], *factors, dstate, before_back, cu_seqlens,
                             grads["v"], dinitial, None, flags, *self.sizes)  # fmt: skip
        else:
            if self.nsegments > 1:
                self.maps(stream, q_tile, r_tile, k_tile, v, T, P, rows, decay, None, None, cu_seqlens, None, None,
                          after, None, None, *self.state_ints)  # fmt: skip
                self.pass_(stream, after, initial, before, *self.pass_ints, *self.initial_strides)
                self.own(stream, q_tile, r_tile, k_tile, dy, X, P, rows, more, decay, None, None, cu_seqlens, None,
                         None, None, None, own, None, *self.chain_ints)  # fmt: skip
                self.pass_back(stream, own, after, dstate, before_back, *self.pass_ints)
            self.states(stream, q_tile, r_tile, k_tile, v, T, P, rows, decay, initial, before, cu_seqlens, None, None,
                        None, entering, u, *self.state_ints)  # fmt: skip
        self.chain(stream, q_tile, r_tile, k_tile, dy, X, P, rows, more, decay, dstate, before_back, cu_seqlens,
                   leaving, w, grads["v"], dinitial, None, flags, *self.chain_ints)  # fmt: skip
        dg = None if g is None else self.new_dg()
        dbeta = None if beta is None else self.new_dbeta()
        dr = None if r is None else self.new_dr()
        flags = self.new_flags() if self.erase else None
        dgq = None if g is None else self.new_dg()
        if self.keyed:
            dq_part, dk_part = self.new_part(), self.new_part()
            read_part = self.new_part() if dr is None and self.erase else dr
            if self.hopper:
                self.pairs_hopper(stream, q, k, dy, c, u, w, entering, leaving, grads["q"], grads["k"], c, v, more, dg,
                                  dbeta, flags, *self.hopper_ints)  # fmt: skip
            for pairs in self.pairs:
                pairs(stream, q, r, k, v, g, A_log, dt_bias, dy, c, more, entering, leaving, u, w, cu_seqlens, flags,
                      dq_part, dk_part, read_part, dgq, dg, dbeta, *self.ints, self.lower, *self.strides)  # fmt: skip
            finish_q, finish_k = self.finish
            again = flags if self.hopper else None
            finish_q(stream, dq_part, q, grads["q"], again, *self.finish_ints, self.scale, *q.stride()[:3])
            finish_k(stream, dk_part, k, grads["k"], again, *self.finish_ints, 1.0, *k.stride()[:3])
        else:
            if self.hopper:
                self.pairs_hopper(stream, q, k, v, dy, u, w, entering, leaving, grads["q"], grads["k"], more, dg, dbeta,
                                  flags, *self.hopper_ints)  # fmt: skip
            for pairs in self.pairs:
                pairs(stream, q, r, k, v, g, A_log, dt_bias, dy, P, rows, more, entering, leaving, u, w, cu_seqlens,
                      flags, grads["q"], dgq, grads["k"], dr, dg, dbeta, *self.ints, self.scale, self.lower,
                      *self.strides)  # fmt: skip
        if dr is not None:
            grads["r"] = dr
        if dg is not None:
            grads["g"] = dg
        if dbeta is not None:
            grads["beta"] = dbeta
        if dinitial is not None:
            grads["initial_state"] = dinitial
        return grads
