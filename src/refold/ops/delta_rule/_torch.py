"""The delta rule as matrix products, a few chunks at a time, on any device that torch runs on.

In a chunk of l tokens (rows i, j) with the entering state S, c the running sum of log decays, R the read keys,

    M_ij = Σ_d r_i k_j exp(c_i - c_j)  (i > j)          P_ij = Σ_d q_i k_j exp(c_i - c_j)  (i >= j)
    U  = (I + beta M)⁻¹ beta (V - (R exp(c)) S)         y = (Q exp(c)) S + P U
    S' = exp(c_last) S + (K exp(c_last - c))ᵀ U

The inverse is built from those of its diagonal blocks, level by level: matrix products alone, and no power of M, which
would overflow where keys repeat. With one decay per key, the exponent cannot leave the sum over keys. Then M is built
in levels, too: where rows i and columns j are neighbouring blocks, exp(c_i - c_j) is a product of the decay since the
border of the blocks and of that up to it, both of which are sums of log decays of their own. So no exponent is a
difference of larger numbers, no decay is divided, and no array has the axes (l, l, d_k).

The backward stores the state at the entry of each block of chunks and recomputes the rest. With dU the gradient of U
and W = (I + beta M)⁻ᵀ dU, the gradient of M is -beta strict(W Uᵀ): no other product of matrices of pairs is needed. The
gradient of a log decay is a sum over the pairs of tokens around it. The shorter form, q∘dq + r∘dr - k∘dk summed over
later tokens, cancels where decays are strong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.ops.delta_rule._prologue import (
    log_decay,
    log_decay_gradient,
    normalized,
    normalized_gradient,
    strength,
    strength_gradient,
)
from refold.ops.delta_rule.nonfinite import Bad, spoiled_gradients, spoiled_results
from refold.ops.delta_rule.spec import SPEC, STEP
from refold.ops.lines import Line
from refold.ops.torch.chunks import Chunks, line
from refold.ops.torch.pointwise import accumulator, carefully_if_needed, wide, zeros_for_bad
from refold.ops.torch.short import short_backward, short_scan

CHUNK_SIZE = 64
BLOCK_ELEMENTS = 1 << 19
"""Elements of the largest intermediate of a block; what fits a cache. Sets how many chunks make a block."""
INNER = 16
"""Rows of the diagonal blocks that are inverted as whole matrices."""


def delta_rule(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, r: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float | None, normalize: bool, lower_bound: float | None, beta_limit: float | None, erase: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.delta_rule`."""
    scan = _scan(q, k, v, g, beta, r, A_log, dt_bias, initial_state, cu_seqlens, scale, normalize, lower_bound,
                 beta_limit, erase, chunk_size)  # fmt: skip
    y, final = carefully_if_needed(lambda careful: _results(scan, careful), v.device)
    return y, final


def _results(scan: Scan, careful: bool) -> tuple[Tensor, Tensor]:
    """Compute y and the final states; ``careful``: of inputs that may not be finite."""
    clean, spoiled_y, spoiled_final = scan, None, None
    if careful:
        bad = scan.bad()
        clean = scan.without(bad)
        spoiled_y, spoiled_final = spoiled_results(scan.line(), bad)
    y = torch.empty_like(scan.v, memory_format=torch.contiguous_format)
    final, state = clean.new_final(), None
    for low, high in scan.blocks():
        block = clean.load(low, high)
        entering, state = clean.pass_states(block, low, state, final)
        scan.put(y, low, high, block.read(entering), spoiled_y)
    return y, final if spoiled_final is None else final.masked_fill_(spoiled_final, math.nan)


def delta_rule_backward(
    *, dy: Tensor | None, dstate: Tensor | None, needs: frozenset[str], q: Tensor, k: Tensor, v: Tensor,
    g: Tensor | None, beta: Tensor | None, r: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float | None, normalize: bool,
    lower_bound: float | None, beta_limit: float | None, erase: bool, chunk_size: int | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Compute the gradients of all array arguments that are present, whatever ``needs`` says."""
    scan = _scan(q, k, v, g, beta, r, A_log, dt_bias, initial_state, cu_seqlens, scale, normalize, lower_bound,
                 beta_limit, erase, chunk_size)  # fmt: skip
    dy = torch.zeros_like(v) if dy is None else dy
    grads = carefully_if_needed(lambda careful: _gradients(scan, dy, dstate, careful), v.device)
    if normalize:
        grads["q"], grads["k"] = normalized_gradient(grads["q"], q), normalized_gradient(grads["k"], k)
    if g is not None:
        grads |= log_decay_gradient(grads.pop("g"), g, A_log, dt_bias, lower_bound)
    if beta is not None:
        grads["beta"] = strength_gradient(grads["beta"], beta, beta_limit)
    return grads


def _gradients(scan: Scan, dy: Tensor, dstate: Tensor | None, careful: bool) -> dict[str, Tensor]:
    """Compute the gradients of the operands of the recurrence; that of ``g`` is one of the log decay."""
    clean, spoiled = scan, None
    if careful:
        bad = scan.bad(dy, dstate)
        clean = scan.without(bad)
        spoiled = scan.spoiled_gradients(bad)
        dy = zeros_for_bad(dy)

    # Forward over the states alone, keeping one per block.
    starts: list[Tensor | None] = []
    final, state = clean.new_final(), None
    for low, high in scan.blocks():
        starts.append(state)
        if high < scan.chunks.count:
            state = clean.pass_states(clean.load(low, high), low, state, final)[1]

    operands = {"q": scan.q, "k": scan.k, "v": scan.v, "r": scan.r, "beta": scan.beta, "g": scan.g}
    grads = {n: torch.empty(a.shape, dtype=scan.dtype, device=a.device) for n, a in operands.items() if a is not None}
    dfinal = torch.zeros_like(final) if dstate is None else dstate.to(final.dtype)
    dfinal = zeros_for_bad(dfinal) if careful else dfinal
    dinitial, carried = dfinal.clone(memory_format=torch.contiguous_format), None  # that of an empty sequence stays
    for (low, high), start in zip(reversed(list(scan.blocks())), reversed(starts), strict=True):
        block = clean.load(low, high)
        entering, _ = clean.pass_states(block, low, start, final)
        dY = scan.take(dy, low, high)
        dU, leaving, carried = clean.pass_gradients(block, dY, low, carried, dfinal, dinitial)
        found = block.gradients(dY, dU, entering, leaving, scan.scale)
        for name in grads:
            scan.put(grads[name], low, high, found[name], None if spoiled is None else spoiled[name])
    if scan.initial is not None:
        spoiled_initial = None if spoiled is None else spoiled["initial_state"]
        grads["initial_state"] = (
            dinitial if spoiled_initial is None else dinitial.masked_fill_(spoiled_initial, math.nan)
        )
    return grads


def fading(
    tokens: int, *, k: Tensor, g: Tensor | None, beta: Tensor | None, r: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, normalize: bool, lower_bound: float | None, beta_limit: float | None, erase: bool,
    **others: Any,
) -> Tensor | None:  # fmt: skip
    """Return the log of what each of the first tokens leaves of a state; 0 where a later one could bring it back.

    It is a bound: with keys of length l and 0 <= beta l² <= 2, the norm of I - beta k kᵀ is at most 1.
    """
    if g is None or (erase and r is not None):
        return None
    log = log_decay(g[:, :tokens], A_log, dt_bias, lower_bound)
    falls = torch.ones((), dtype=torch.bool, device=g.device)
    if A_log is None and lower_bound is None:
        falls = g.amax() + (0.0 if dt_bias is None else dt_bias.amax()) <= 0
    if erase:
        lengths = k.new_ones(()) if normalize else torch.linalg.vector_norm(k, dim=-1, dtype=log.dtype).amax()
        written = k.new_ones((), dtype=log.dtype) if beta is None else strength(beta, beta_limit)
        falls = falls & (written.amin() >= 0) & (written.amax() * lengths.square() <= 2)
        log = log.amax(-1)
    return torch.where(falls, log, 0.0)


_few_tokens = short_scan(SPEC, STEP, delta_rule)


def delta_rule_step(*, v: Tensor, state: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute `refold.ops.delta_rule_step`: a few tokens are a chunk, one is the recurrence as it is written."""
    if v.ndim == 4:
        return _few_tokens(v=v, state=state, **arguments)
    new = state.to(accumulator(v.dtype), copy=True)
    return _one_token(v=v, state=new, **arguments), new.to(state.dtype).contiguous()


def delta_rule_step_(*, state: Tensor, **arguments: Any) -> Tensor:
    """Compute `refold.ops.delta_rule_step_`, on a state of any strides."""
    if arguments["v"].ndim == 3 and state.dtype == accumulator(arguments["v"].dtype):
        return _one_token(state=state, **arguments)
    y, new = delta_rule_step(state=state, **arguments)
    state.copy_(new)
    return y


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, g: Tensor | None, beta: Tensor | None, r: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, scale: float | None, normalize: bool, lower_bound: float | None,
    beta_limit: float | None, erase: bool,
) -> Tensor:  # fmt: skip
    """Update a state in accumulator precision where it lies, and compute y."""
    heads = (v.shape[0], q.shape[1], v.shape[1] // q.shape[1])  # (b, g, r)
    q, k, g, beta = wide(q, v), wide(k, v), wide(g, v), wide(beta, v)
    q, k = (normalized(a) if normalize else a.to(state.dtype) for a in (q, k))
    q, k = (a[:, :, None, :, None] for a in (q, k))  # (b, g, 1, n, 1)
    S = state.unflatten(1, heads[1:])  # (b, g, r, n, p)
    if g is not None:
        S.mul_(log_decay(g[:, None], A_log, dt_bias, lower_bound).exp().view(*heads, -1, 1))
    u = v.to(S.dtype).view(*heads, 1, -1)
    if erase:
        u = u - ((k if r is None else r.to(S.dtype).reshape(*heads, -1, 1)) * S).sum(3, keepdim=True)
    if beta is not None:
        u = u * strength(beta, beta_limit).reshape(*heads, 1, 1)
    S.addcmul_(k, u)
    y = (q * S).sum(3).mul_(q.shape[3] ** -0.5 if scale is None else scale)
    return y.flatten(1, 2).to(v.dtype)


delta_rule_step_backward = short_backward(SPEC, STEP, delta_rule_backward)


def _scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, r: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, scale: float | None,
    normalize: bool, lower_bound: float | None, beta_limit: float | None, erase: bool, chunk_size: int | None,
) -> Scan:  # fmt: skip
    """Compute what comes before the recurrence, and cut the tokens into chunks of a power of two."""
    batch, seqlen = v.shape[:2]
    q, k, g, beta = wide(q, v), wide(k, v), wide(g, v), wide(beta, v)
    length = 1 << (min(chunk_size or CHUNK_SIZE, seqlen) - 1).bit_length()
    return Scan(
        q=normalized(q) if normalize else q,
        k=normalized(k) if normalize else k,
        v=v,
        r=r,
        beta=None if beta is None else strength(beta, beta_limit),
        g=None if g is None else log_decay(g, A_log, dt_bias, lower_bound),
        initial=initial_state,
        erase=erase,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        chunks=Chunks("delta_rule", seqlen, batch, length, cu_seqlens),
    )


@dataclass
class Scan:
    """The operands of one recurrence, how they are cut, and how states travel from chunk to chunk."""

    q: Tensor  # (b, t, g, n)
    k: Tensor  # (b, t, g, n)
    v: Tensor  # (b, t, h, p)
    r: Tensor | None  # (b, t, h, n); k if None
    beta: Tensor | None  # (b, t, h)
    g: Tensor | None  # (b, t, h, 1 or n), log decays
    initial: Tensor | None  # (k, h, n, p)
    erase: bool
    scale: float
    chunks: Chunks

    @property
    def dtype(self) -> torch.dtype:
        return accumulator(self.v.dtype)

    def blocks(self) -> Iterator[tuple[int, int]]:
        batch, _, nheads, headdim = self.v.shape
        length, dkey = self.chunks.length, self.q.shape[3]
        widest = batch * nheads * max(length * max(length, headdim, dkey), headdim * dkey)
        per_block = max(1, BLOCK_ELEMENTS // widest)
        for low in range(0, self.chunks.count, per_block):
            yield low, min(low + per_block, self.chunks.count)

    def take(self, array: Tensor, low: int, high: int) -> Tensor:
        """Cut (b, t, heads, ...) to (c, b, g, r, l, ...): chunks first, r heads to a group."""
        part = self.chunks.take(array, low, high, self.dtype)  # (b, c, l, heads, ...)
        return part.unflatten(3, (self.q.shape[2], -1)).movedim((1, 0, 3, 4), (0, 1, 2, 3))

    def put(self, out: Tensor, low: int, high: int, values: Tensor, spoiled: Tensor | None) -> None:
        """Write (c, b, g, r, l, ...) into (b, t, heads, ...), with NaN where the definition has it."""
        values = values.movedim((0, 1, 2, 3), (1, 0, 3, 4)).flatten(3, 4)
        if spoiled is not None:
            values = values.masked_fill(self.chunks.take(spoiled, low, high, torch.bool), math.nan)
        self.chunks.put(out, low, high, values)

    def load(self, low: int, high: int) -> _Block:
        q, k, v = (self.take(a, low, high) for a in (self.q, self.k, self.v))
        r = k if self.r is None else self.take(self.r, low, high)
        g = v.new_zeros(()).expand(*v.shape[:5], 1) if self.g is None else self.take(self.g, low, high)
        beta = v.new_ones(()).expand(v.shape[:5]) if self.beta is None else self.take(self.beta, low, high)
        return _Block(q * self.scale, k, v, r, beta[..., None], g, self.erase)

    def bad(self, dy: Tensor | None = None, dfinal: Tensor | None = None) -> Bad:
        """Mark where the operands are not finite."""

        def bad(array: Tensor | None) -> Tensor | None:
            return None if array is None else ~torch.isfinite(array)

        g = None if self.g is None else self.g.isnan() | (self.g == math.inf)
        q, k, v = (~torch.isfinite(a) for a in (self.q, self.k, self.v))
        return Bad(q, k, bad(self.r), v, bad(self.beta), g, bad(self.initial), self.erase, bad(dy), bad(dfinal))

    def without(self, bad: Bad) -> Scan:
        """Copy the scan with finite operands."""
        clean = copy(self)
        clean.q, clean.k, clean.v = (zeros_for_bad(a) for a in (self.q, self.k, self.v))
        clean.r, clean.beta, clean.initial = (
            None if a is None else zeros_for_bad(a) for a in (self.r, self.beta, self.initial)
        )
        clean.g = None if self.g is None or bad.g is None else self.g.masked_fill(bad.g, 0.0)
        return clean

    def line(self) -> Line:
        """Describe how tokens lie in sequences."""
        return line(self.v.shape[1], self.chunks.offsets, self.v.device)

    def spoiled_gradients(self, bad: Bad) -> dict[str, Tensor]:
        """Mark the gradients of operands that are not finite, in the shapes of the operands."""
        spoiled = spoiled_gradients(self.line(), bad)
        if self.r is None and self.erase:
            spoiled["k"] = spoiled["k"] | spoiled["r"]
        for name in ("q", "k"):  # a sum over the heads of a group
            spoiled[name] = spoiled[name].unflatten(2, (self.q.shape[2], -1)).any(3)
        if self.g is not None and self.g.shape[-1] == 1:
            spoiled["g"] = spoiled["g"].any(-1, keepdim=True)
        return spoiled

    def new_final(self) -> Tensor:
        """Make the final states as they are if no token comes."""
        batch, _, nheads, headdim = self.v.shape
        sequences = batch if self.chunks.offsets is None else len(self.chunks.offsets) - 1
        shape = (sequences, nheads, self.q.shape[3], headdim)
        if self.initial is None:
            return torch.zeros(shape, dtype=self.dtype, device=self.v.device)
        return torch.empty(shape, dtype=self.dtype, device=self.v.device).copy_(self.initial)

    def pass_states(self, block: _Block, low: int, state: Tensor | None, final: Tensor) -> tuple[Tensor, Tensor]:
        """Compute ``block.U``; return the states that enter its chunks, (c, b, g, r, n, p), and the one that leaves."""
        nchunks, batch, ngroups, repeat, _, headdim = block.v.shape
        states = block.v.new_empty(nchunks + 1, batch * ngroups * repeat, block.q.shape[-1], headdim)
        if state is not None:
            states[0] = state
        U, writes, total = (a.flatten(1, 3) for a in (block.U, block.writes, block.total.mT))
        if self.erase:
            V, reads, solve = (a.flatten(1, 3) for a in (block.v, block.reads, block.solve))
        for c in range(nchunks):
            if (rows := self.chunks.begins.get(low + c)) is not None:
                states[c] = 0.0 if self.initial is None else self.initial[rows].flatten(0, 1)
            if self.erase:
                torch.bmm(solve[c], torch.baddbmm(V[c], reads[c], states[c], alpha=-1), out=U[c])
            torch.baddbmm(total[c] * states[c], writes[c].mT, U[c], out=states[c + 1])
            if (rows := self.chunks.ends.get(low + c)) is not None:
                final[rows] = states[c + 1].view(-1, ngroups * repeat, *states.shape[2:])
        return states[:-1].view(nchunks, batch, ngroups, repeat, *states.shape[2:]), states[-1]

    def pass_gradients(
        self, block: _Block, dY: Tensor, low: int, carried: Tensor | None, dfinal: Tensor, dinitial: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of U, of the states that leave the block's chunks, and of the one that enters it."""
        dU = block.mixing.mT @ dY
        read = block.queries.mT @ dY  # (c, b, g, r, n, p)
        nchunks, batch, ngroups, repeat, dkey, headdim = read.shape
        states = read.new_empty(nchunks + 1, batch * ngroups * repeat, dkey, headdim)
        if carried is not None:
            states[-1] = carried
        flat, read, writes, total = (a.flatten(1, 3) for a in (dU, read, block.writes, block.total.mT))
        if self.erase:
            reads, solve = block.reads.flatten(1, 3), block.solve.flatten(1, 3)
        for c in reversed(range(nchunks)):
            if (rows := self.chunks.ends.get(low + c)) is not None:
                states[c + 1] = dfinal[rows].flatten(0, 1)
            flat[c].baddbmm_(writes[c], states[c + 1])
            torch.addcmul(read[c], total[c], states[c + 1], out=states[c])
            if self.erase:
                states[c].baddbmm_(reads[c].mT, solve[c].mT @ flat[c], alpha=-1)
            if (rows := self.chunks.begins.get(low + c)) is not None:
                dinitial[rows] = states[c].view(-1, ngroups * repeat, dkey, headdim)
        return dU, states[1:].view(nchunks, batch, ngroups, repeat, dkey, headdim), states[0]


class _Block:
    """Consecutive chunks in accumulator precision. Arrays are (c, b, g, r, l, ...), with r = 1 where a group shares."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, r: Tensor, beta: Tensor, g: Tensor, erase: bool
    ) -> None:  # fmt: skip
        self.q, self.k, self.r, self.beta, self.erase = q, k, r, beta, erase
        self.v = v.contiguous()
        since = g.cumsum(-2).exp()  # what is left of the entering state
        self.since, self.until = since, _sum_after(g).exp()  # and what of a token reaches the end of its chunk
        self.total = since[..., -1:, :]
        self.pairs = _PerHead(g) if g.shape[-1] == 1 else _PerKey(g)
        self.queries, self.writes = q * since, k * self.until
        self.mixing = self.pairs.products(q, k, own=True)
        if erase:
            self.reads = (r * since).expand(*v.shape[:4], -1, -1)
            self.overlaps = self.pairs.products(r, k)  # M
            self.inverse = unit_lower_inverse(beta * self.overlaps)
            self.solve = self.inverse * beta.mT
            self.U = torch.empty_like(self.v)  # `Scan.pass_states` fills it
        else:
            self.U = self.v * beta

    def read(self, entering: Tensor) -> Tensor:
        """Compute y, (c, b, g, r, l, p)."""
        return self.queries @ entering + self.mixing @ self.U

    def gradients(
        self, dY: Tensor, dU: Tensor, entering: Tensor, leaving: Tensor, scale: float
    ) -> dict[str, Tensor]:  # fmt: skip
        """Compute the gradients of the operands, from those of y, of U and of the states that leave the chunks."""
        dmixing = dY @ self.U.mT
        own = dmixing.diagonal(dim1=-2, dim2=-1)[..., None]
        dq, dk, dg = self.pairs.gradients(dmixing.tril(-1), self.mixing, self.q, self.k)
        dq_state, dk_state = self.since * (dY @ entering.mT), self.until * (self.U @ leaving.mT)
        dq = _shared(dq) + _shared(dq_state + own * self.k)
        dk = _shared(dk) + _shared(dk_state + own * self.q)
        from_state = self.q * dq_state
        found = {"q": dq * scale}
        if self.erase:
            W = self.inverse.mT @ dU
            dL = (W @ self.U.mT).tril_(-1).neg_()  # of beta M
            dZ = self.beta * W  # of V - (R exp(c)) S
            found["beta"] = (W * (self.v - self.reads @ entering)).sum(-1) + (dL * self.overlaps).sum(-1)
            dr, dk_read, dg_read = self.pairs.gradients(self.beta * dL, self.overlaps, self.r, self.k)
            dr_state = -self.since * (dZ @ entering.mT)
            from_state = from_state + self.r * dr_state
            dk, dg = dk + _shared(dk_read), dg + dg_read
            if self.r is self.k:
                dk = dk + _shared(dr) + _shared(dr_state)
            else:
                found["r"] = dr + dr_state
            found["v"] = dZ
        else:
            found["v"], found["beta"] = self.beta * dU, (self.v * dU).sum(-1)
        kept = self.total.mT * (entering * leaving).sum(-1, keepdim=True)
        through = _sum_from(from_state) + _sum_before(self.k * dk_state) + kept.mT
        found["g"] = dg + (through.sum(-1, keepdim=True) if dg.shape[-1] == 1 else through)
        found["k"] = dk
        return found


class _PerHead:
    """Products of pairs of tokens whose decay is one number per head."""

    def __init__(self, g: Tensor) -> None:
        # [i, j] sums the log decays after j up to i; no sum is a difference of larger ones.
        steps = g.expand(*g.shape[:-1], g.shape[-2]).tril(-1)
        self.within = steps.cumsum(-2).exp_().tril_()

    def products(self, left: Tensor, k: Tensor, own: bool = False) -> Tensor:
        """Compute Σ_d left_i k_j exp(c_i - c_j) for i > j, and with ``own`` for i = j, (c, b, g, r, l, l)."""
        return (left @ k.mT).tril_(0 if own else -1) * self.within

    def gradients(self, dM: Tensor, M: Tensor, left: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of left, of k and of the log decays; ``dM`` is zero where not i > j."""
        dproducts = dM * self.within
        if left.shape[3] == k.shape[3] == 1:
            dproducts = _shared(dproducts)
        # A log decay at t multiplies the pairs with i >= t > j.
        length = M.shape[-1]
        ones = torch.ones(length, length, dtype=M.dtype, device=M.device)
        crossing = (ones.triu() @ (dM * M)).tril_(-1).sum(-1, keepdim=True)
        return dproducts @ k, dproducts.mT @ left, crossing


class _PerKey:
    """Products of pairs of tokens with one decay per key: level by level, of neighbouring blocks."""

    def __init__(self, g: Tensor) -> None:
        self.levels: list[tuple[int, Tensor, Tensor]] = []
        """Rows of a block, the decays since the border of a later block, and up to that of an earlier one."""
        size = 1
        while size < g.shape[-2]:
            earlier, later = g.unflatten(-2, (-1, 2, size)).unbind(-3)
            self.levels.append((size, later.cumsum(-2).exp(), _sum_after(earlier).exp()))
            size *= 2

    def products(self, left: Tensor, k: Tensor, own: bool = False) -> Tensor:
        """Compute Σ_d left_i k_j exp(c_i - c_j) for i > j, and with ``own`` for i = j, (c, b, g, r, l, l)."""
        batch = torch.broadcast_shapes(left.shape[:4], self.levels[0][1].shape[:4]) if self.levels else left.shape[:4]
        blocks = (left * k).sum(-1) if own else left.new_zeros(())
        blocks = blocks.expand(*batch, left.shape[4])[..., None, None]
        for size, since, until in self.levels:
            later, earlier = _later(left, size) * since, _earlier(k, size) * until
            blocks = _twice(blocks, later @ earlier.mT)
        return blocks[..., 0, :, :]

    def gradients(self, dM: Tensor, M: Tensor, left: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of left, of k and of the log decays; ``dM`` is zero where not i > j."""
        shape = (*dM.shape[:-1], k.shape[-1])
        dleft, dk, dg = (dM.new_zeros(shape) for _ in range(3))
        for size, since, until in self.levels:
            later, earlier = _later(left, size) * since, _earlier(k, size) * until
            block = _below_diagonal(dM, size)
            dlater, dearlier = block @ earlier, block.mT @ later
            _later(dleft, size).addcmul_(dlater, since)
            _earlier(dk, size).addcmul_(dearlier, until)
            _later(dg, size).add_(_sum_from(later * dlater))
            _earlier(dg, size).add_(_sum_before(earlier * dearlier))
        return dleft, dk, dg


def unit_lower_inverse(L: Tensor) -> Tensor:
    """Compute the inverse of I + L; L is zero where not i > j, (..., l, l), and l a power of two.

    If X inverts the diagonal blocks of one size, X - X L' X inverts those of twice the size, L' being L between the two
    blocks.
    """
    length = L.shape[-1]
    size = min(INNER, length)
    blocks = L.unflatten(-2, (-1, size)).unflatten(-1, (-1, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    number = torch.arange(size, device=L.device)
    X, width = torch.eye(size, dtype=L.dtype, device=L.device).expand_as(blocks), 1
    while width < size:
        row, column = number[:, None] // width, number // width
        X = X - X @ torch.where((row == column + 1) & (row % 2 == 1), blocks, 0.0) @ X
        width *= 2
    while size < length:
        first, second = X.unflatten(-3, (-1, 2)).unbind(-3)
        X = _twice(X, -(second @ _below_diagonal(L, size) @ first))
        size *= 2
    return X[..., 0, :, :]


def _twice(blocks: Tensor, below: Tensor) -> Tensor:
    """Return lower triangles of twice the size, (..., m / 2, 2 s, 2 s), of those on the diagonal and what is below."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([below, second], -1)], -2)


def _below_diagonal(M: Tensor, size: int) -> Tensor:
    """View the blocks of later rows and of the columns just before them, (..., m, size, size), in (..., l, l)."""
    blocks = M.unflatten(-2, (-1, 2, size)).unflatten(-1, (-1, 2, size))
    return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _later(rows: Tensor, size: int) -> Tensor:
    """View every second block of rows, (..., m, size, n), in (..., l, n)."""
    return rows.unflatten(-2, (-1, 2, size))[..., 1, :, :]


def _earlier(rows: Tensor, size: int) -> Tensor:
    return rows.unflatten(-2, (-1, 2, size))[..., 0, :, :]


def _shared(heads: Tensor) -> Tensor:
    """Sum over the heads of a group, (c, b, g, 1, l, ...)."""
    return heads.sum(3, keepdim=True)


def _sum_from(rows: Tensor) -> Tensor:
    """Sum each row and all later ones, (..., l, n)."""
    return rows.flip(-2).cumsum(-2).flip(-2)


def _sum_after(rows: Tensor) -> Tensor:
    """Sum all later rows. A difference to the sum with the row itself would cancel."""
    return F.pad(_sum_from(rows[..., 1:, :]), (0, 0, 0, 1))


def _sum_before(rows: Tensor) -> Tensor:
    """Sum all earlier rows."""
    return F.pad(rows[..., :-1, :].cumsum(-2), (0, 0, 1, 0))
