"""The delta rule's backward pass on GPUs with Triton: plans the launches of `_triton_backward_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from refold.ops.delta_rule import _prologue as prologue
from refold.ops.delta_rule import _torch
from refold.ops.delta_rule import _triton_backward_kernels as kernels
from refold.ops.delta_rule import _triton_kernels as forward_kernels
from refold.ops.delta_rule._triton_forward import Chunks, precisions, strides
from refold.ops.delta_rule.spec import SPEC
from refold.ops.torch.launch import Launch, current_stream, last_contiguous, planned
from refold.ops.torch.plans import contiguous, fresh

Gradients = dict[str, torch.Tensor]
MAX_WIDTH = 128
"""Keys, and values, of a head of which one program holds a chunk."""


@planned(
    SPEC, backward=True, dy=contiguous, dstate=contiguous, q=last_contiguous, k=last_contiguous, v=last_contiguous,
    A_log=contiguous, cu_seqlens=contiguous,
)  # fmt: skip
def delta_rule_backward(**arguments: Any) -> Callable[..., Gradients]:
    """Plan the gradients of `refold.ops.delta_rule`; ``config`` overrides entries of the configuration table.

    A decay per key, read keys and wide heads go to the matrix products of `_torch`.
    """
    g, wide = arguments["g"], max(arguments["q"].shape[3], arguments["v"].shape[3]) > MAX_WIDTH
    if wide or arguments["r"] is not None or (g is not None and g.dim() == 4):
        arguments.pop("config", None)
        arrays = ["dy", "dstate", *(arg.name for arg in SPEC.args)]
        rest = {name: value for name, value in arguments.items() if name not in arrays}
        return lambda *given: _torch.delta_rule_backward(**dict(zip(arrays, given, strict=True)), **rest)
    return Backward(**arguments)


class Backward:
    """How the gradients of one combination of shapes, strides, dtypes and options are computed."""

    def __init__(
        self, *, dy, dstate, needs, q, k, v, g, beta, r, A_log, dt_bias, initial_state, cu_seqlens, scale, normalize,
        lower_bound, beta_limit, erase, chunk_size, config=None,
    ) -> None:  # fmt: skip
        self.chunks = chunks = Chunks(q, k, v, g, beta, None, A_log, dt_bias, cu_seqlens, scale, normalize,
                                      lower_bound, beta_limit, erase, chunk_size, config, rows=8)  # fmt: skip
        self.needs, self.options = needs, (lower_bound, beta_limit)
        batch, seqlen, nheads, nvalues = v.shape
        ngroups, nkeys = q.shape[2:]
        config, nseqs, chunk = chunks.config, chunks.nseqs, chunks.chunk
        block_p = min(max(16, triton.next_power_of_2(nvalues)), config["block_p"])
        while block_p > 16 and block_p * chunks.block_n > config["tile"]:
            block_p //= 2
        blocks = triton.cdiv(nvalues, block_p)
        precision, _ = precisions(v.dtype, chunk, chunks.block_n, block_p)
        sizes = {"CHUNK": chunk, "BLOCK_N": chunks.block_n, "ERASE": erase, "VARLEN": chunks.varlen}
        options = {"num_warps": config["warps"], "num_stages": config["stages"]}
        chain = {**sizes, "BLOCK_P": block_p, "PRECISION": precision, "STAGES": config["stages"]}
        self.forward = Launch(
            forward_kernels._delta_chain_kernel, (nheads * blocks, 1, nseqs),
            {**chain, "KEYED": False, "OUTPUT": True, "ROWS": 8}, options,
        )  # fmt: skip
        initial = strides(initial_state, 4)
        self.forward_ints = (seqlen, chunks.nchunks, 1, nheads, ngroups, nkeys, nvalues, *strides(q, 3), 0, 0, 0,
                             *strides(k, 3), *strides(v, 3), *initial)  # fmt: skip
        y_strides = (seqlen * nheads * nvalues, nheads * nvalues, nvalues)
        self.chain = Launch(kernels._delta_chain_bwd_kernel, (nheads * blocks, nseqs), chain, options)
        self.chain_ints = (seqlen, chunks.nchunks, nheads, ngroups, nkeys, nvalues, *strides(q, 3), *strides(k, 3),
                           *y_strides)  # fmt: skip
        block_v = max(16, triton.next_power_of_2(nvalues))
        precision, _ = precisions(v.dtype, chunk, chunks.block_n, block_v)
        gather = {"CHUNK": chunk, "BLOCK_N": chunks.block_n, "VARLEN": chunks.varlen, "BLOCK_P": block_v,
                  "NORMALIZE": normalize, "PRECISION": precision}  # fmt: skip
        grid, options = (chunks.nslots, ngroups), {"num_warps": config["gather_warps"], "num_stages": 1}
        self.queries = Launch(kernels._delta_queries_bwd_kernel, grid, gather, options)
        self.keys = Launch(kernels._delta_keys_bwd_kernel, grid, {**gather, "ERASE": erase}, options)
        sizes_ints = (seqlen, chunks.nchunks, nseqs, nheads, ngroups, nkeys, nvalues)
        sizes_ints += (nkeys**-0.5 if scale is None else scale, *strides(q, 3), *strides(k, 3))
        self.queries_ints = (*sizes_ints, *y_strides)
        self.keys_ints = (*sizes_ints, *strides(v, 3), *y_strides)
        cells = chunks.nslots * nheads
        self.new_states = fresh((cells, nvalues, nkeys), v.dtype, v.device)
        self.new_values = fresh((cells * chunk, nvalues), v.dtype, v.device)
        self.new = {
            "q": fresh(q.shape, q.dtype, v.device), "k": fresh(k.shape, k.dtype, v.device),
            "v": fresh(v.shape, v.dtype, v.device), "gate": fresh((batch, seqlen, nheads), torch.float32, v.device),
            "state": fresh((nseqs, nheads, nkeys, nvalues), torch.float32, v.device),
        }  # fmt: skip

    def __call__(self, dy, dstate, q, k, v, g, beta, r, A_log, dt_bias, initial, cu_seqlens) -> Gradients:
        """Launch."""
        stream, new = current_stream(v.device), self.new
        _, _, _, T, P, rows, _ = self.chunks(stream, q, k, g, beta, None, A_log, dt_bias, cu_seqlens)
        states, dstates, u, w = self.new_states(), self.new_states(), self.new_values(), self.new_values()
        self.forward(stream, q, None, k, v, T, P, rows, None, initial, None, cu_seqlens, None, None, None, states, u,
                     *self.forward_ints)  # fmt: skip
        dinitial = None if initial is None else new["state"]()
        self.chain(stream, q, k, T, P, rows, dy, dstate, cu_seqlens, w, dstates, dinitial, *self.chain_ints)
        dq, dk, dv, dbeta = new["q"](), new["k"](), new["v"](), new["gate"]()
        dg = None if g is None else new["gate"]()
        if dy is None:
            dq.zero_()
        else:
            self.queries(stream, q, k, dy, u, states, rows, cu_seqlens, dq, dg, *self.queries_ints)
        self.keys(stream, q, k, v, dy, u, w, states, dstates, rows, cu_seqlens, dk, dv, dg, dbeta, *self.keys_ints)
        lower_bound, beta_limit = self.options
        found: dict[str, Any] = {"q": dq, "k": dk, "v": dv, "initial_state": dinitial}
        if beta is not None:
            found["beta"] = prologue.strength_gradient(dbeta, beta, beta_limit)
        if g is not None and dg is not None:
            found |= prologue.log_decay_gradient(dg[..., None], g, A_log, dt_bias, lower_bound)
        return {name: found[name] for name in self.needs}
