"""The Mamba-2 scan as matrix products, a few chunks at a time, on any device that torch runs on.

With c the running sum of log decays inside a chunk and X = d x, a chunk computes (i, j positions, H the entering state)

    y_i = Σ_{j≤i} (C_i·B_j) exp(c_i - c_j) X_j + exp(c_i) H C_i
    H'  = exp(c_last) H + Σ_j exp(c_last - c_j) X_j ⊗ B_j

C·Bᵀ is computed once per group, and the heads of a group share one product where states are read and written. Sums c
are kept in float64 (for float64 inputs in two parts), because differences of float32 sums lose small decays after large
ones. Decays are never divided, and an exponent is clamped only where its decay is 0 or infinite anyway. So rates of
either sign are right.

The backward stores the state at the entry of each block of chunks and recomputes the rest, so its memory is that of one
block. The gradient of a log decay is a sum over the pairs of tokens around it, computed by a triangular product. The
difference of row and column sums would be shorter, but cancels where decays are strong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.ops.lines import Line
from refold.ops.ssd.nonfinite import Bad, spoiled_gradients, spoiled_results
from refold.ops.ssd.spec import SPEC, STEP
from refold.ops.torch.chunks import Chunks, line
from refold.ops.torch.pointwise import (
    accumulator,
    carefully_if_needed,
    finish,
    finish_gradient,
    step_size,
    step_size_gradient,
    wide,
    zeros_for_bad,
)
from refold.ops.torch.short import short_backward, short_scan

CHUNK_SIZE = 64
BLOCK_ELEMENTS = 1 << 19
"""Elements of the largest intermediate of a block; what fits a cache. Sets how many chunks make a block."""


def ssd(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, dt_softplus: bool,
    dt_limit: tuple[float, float], chunk_size: int | None, state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.ssd`."""
    scan = _Scan(x, dt, A, B, C, dt_bias, initial_state, cu_seqlens, dt_softplus, dt_limit, chunk_size)
    y, final = carefully_if_needed(lambda careful: _results(scan, D, z, careful), x.device)
    return y, final.to(state_dtype or final.dtype)


def _results(scan: _Scan, D: Tensor | None, z: Tensor | None, careful: bool) -> tuple[Tensor, Tensor]:
    """Return y and the final states; ``careful``: of inputs that may not be finite."""
    clean, spoiled_y, spoiled_final = scan, None, None
    if careful:
        bad = scan.bad()
        clean = scan.without(bad)
        spoiled_y, spoiled_final = spoiled_results(scan.line(), bad)
    y = torch.empty_like(scan.x, memory_format=torch.contiguous_format)
    final, state = clean.new_final(), None
    skip = None if D is None else D.view(scan.x.shape[2], -1)
    for low, high in scan.blocks():
        block = clean.load(low, high)
        entering, state = clean.pass_states(block, low, state, final)
        read = scan.spoil(block.read(entering), spoiled_y, low, high)
        x = scan.take(scan.x, low, high) if careful else block.x
        part = finish(read, x, skip, None if z is None else scan.take(z, low, high))
        scan.chunks.put(y, low, high, part)
    return y, final if spoiled_final is None else final.masked_fill_(spoiled_final, math.nan)


def ssd_backward(
    *, dy: Tensor | None, dstate: Tensor | None, needs: frozenset[str], x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], chunk_size: int | None,
    state_dtype: torch.dtype | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of all array arguments that are present, whatever ``needs`` says."""
    scan = _Scan(x, dt, A, B, C, dt_bias, initial_state, cu_seqlens, dt_softplus, dt_limit, chunk_size)
    dy = torch.zeros_like(x) if dy is None else dy
    grads = carefully_if_needed(lambda careful: _gradients(scan, dy, dstate, D, z, careful), x.device)
    grads["dt"] = step_size_gradient(grads["dt"], dt, dt_bias, dt_softplus, dt_limit)
    if dt_bias is not None:
        grads["dt_bias"] = grads["dt"].sum((0, 1))
    return grads


def _gradients(
    scan: _Scan, dy: Tensor, dstate: Tensor | None, D: Tensor | None, z: Tensor | None, careful: bool
) -> dict[str, Tensor]:
    """Return the gradients of inputs, D and z; that of ``dt`` is one of the step size."""
    x, B, C = scan.x, scan.B, scan.C
    clean, spoiled = scan, None
    if careful:
        gated = (
            dy.to(scan.dtype) if z is None else finish_gradient(dy.to(scan.dtype), None, x, None, z.to(scan.dtype))[0]
        )
        bad = scan.bad(gated, dstate)
        clean, spoiled = scan.without(bad), spoiled_gradients(scan.line(), bad)
    skip = None if D is None else D.view(x.shape[2], -1)

    # Forward over the states alone, keeping one per block.
    starts: list[Tensor | None] = []
    final, state = clean.new_final(), None
    for low, high in scan.blocks():
        starts.append(state)
        if high < scan.chunks.count:
            state = clean.pass_states(clean.load(low, high), low, state, final)[1]

    def gradient_like(array: Tensor) -> Tensor:
        return torch.empty(array.shape, dtype=array.dtype, device=array.device)

    grads = {name: gradient_like(array) for name, array in (("x", x), ("B", B), ("C", C))}
    grads["dt"] = gradient_like(scan.step)
    if z is not None:
        grads["z"] = gradient_like(z)
    dA, dD = torch.zeros_like(scan.A), None if skip is None else torch.zeros_like(skip, dtype=scan.dtype)
    dfinal = torch.zeros_like(final) if dstate is None else dstate.to(final.dtype)
    dfinal = zeros_for_bad(dfinal) if careful else dfinal
    dinitial, carried = dfinal.clone(), None  # an empty sequence hands its gradient through

    for (low, high), start in zip(reversed(list(scan.blocks())), reversed(starts), strict=True):
        block = clean.load(low, high)
        entering, _ = clean.pass_states(block, low, start, final)
        x_, d = (scan.take(a, low, high) for a in (x, scan.step)) if careful else (block.x, block.d)
        dout, zc = scan.take(dy, low, high), None if z is None else scan.take(z, low, high)
        y = None
        if z is not None:
            y = scan.spoil(block.read(entering), None if spoiled is None else spoiled["y"], low, high)
        dY, dD_tokens, dz = finish_gradient(dout, y, x_, skip, zc)
        dY_ = zeros_for_bad(dY) if careful else dY
        leaving, carried = clean.pass_gradients(block, dY_, low, carried, dfinal, dinitial)
        dX, dB, dC, dlog = block.gradients(dY_, entering, leaving)
        if spoiled is not None:
            parts = (("X", dX), ("B", dB), ("C", dC), ("log_decay", dlog))
            dX, dB, dC, dlog = (scan.spoil(part, spoiled[name], low, high) for name, part in parts)
        dx = dX * d[..., None]
        if skip is not None and dD is not None and dD_tokens is not None:
            dD += dD_tokens.sum((0, 1, 2)).sum_to_size(dD.shape)
            dx.addcmul_(dY, skip.to(dY.dtype).expand_as(dY))
        dA += (dlog * d).sum((0, 1, 2))
        dstep = dlog * scan.A + (dX * x_).sum(-1)
        for name, part in (("x", dx), ("B", dB), ("C", dC), ("dt", dstep), ("z", dz)):
            if part is not None:
                scan.chunks.put(grads[name], low, high, part)

    grads["A"] = dA
    if D is not None and dD is not None:
        grads["D"] = dD.view(D.shape)
    if scan.initial is not None:
        grads["initial_state"] = (
            dinitial if spoiled is None else dinitial.masked_fill_(spoiled["initial_state"], math.nan)
        )
    return grads


def fading(
    tokens: int, *, dt: Tensor, A: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float],
    **others: Any,
) -> Tensor | None:  # fmt: skip
    """Return the log of what each of the first tokens leaves of a state; None where a later one could bring it back."""
    if dt_limit[0] < 0 and not dt_softplus:
        return None
    return step_size(dt[:, :tokens], dt_bias, dt_softplus, dt_limit) * A


_few_tokens = short_scan(SPEC, STEP, ssd)


def ssd_step(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.ssd_step`: a few tokens are a chunk, one is the recurrence as it is written."""
    if x.ndim == 4:
        return _few_tokens(
            x=x, dt=dt, A=A, B=B, C=C, state=state, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
            dt_limit=dt_limit,
        )  # fmt: skip
    dtype, groups = accumulator(x.dtype), (B.shape[1], -1)
    d = step_size(wide(dt, x), dt_bias, dt_softplus, dt_limit).to(dtype)  # (b, h)
    decay = torch.exp(d * A.to(dtype))[..., None, None]
    inputs = (x.to(dtype) * d[..., None]).unflatten(1, groups)[..., None]  # (b, g, r, p, 1)
    written = (inputs * B.to(dtype)[:, :, None, None]).flatten(1, 2)  # (b, h, p, n)
    new = torch.addcmul(written, decay, state.to(dtype))
    y = (new.unflatten(1, groups).flatten(2, 3) @ C.to(dtype)[..., None]).reshape(x.shape)
    y = finish(y, x.to(dtype), None if D is None else D.view(x.shape[1], -1), z)
    return y.to(x.dtype), new.to(state.dtype)


def ssd_step_(*, state: Tensor, **arguments: Any) -> Tensor:
    """Compute `refold.ops.ssd_step_`; for one token, a state of float32 is read and written twice, and nothing else."""
    x, dt, A, B, C, D, z = (arguments[name] for name in ("x", "dt", "A", "B", "C", "D", "z"))
    dtype = accumulator(x.dtype)
    if x.ndim == 4 or state.dtype != dtype:
        y, new = ssd_step(state=state, **arguments)
        state.copy_(new)
        return y
    d = step_size(wide(dt, x), arguments["dt_bias"], arguments["dt_softplus"], arguments["dt_limit"]).to(
        dtype
    )  # (b, h)
    state.mul_(torch.exp(d * A.to(dtype))[..., None, None])
    groups = state.view(x.shape[0] * B.shape[1], -1, state.shape[-1])  # (b g, r p, n)
    inputs = (x.to(dtype) * d[..., None]).reshape(*groups.shape[:2], 1)
    groups.baddbmm_(inputs, B.to(dtype).reshape(len(groups), 1, -1))
    y = (groups @ C.to(dtype).reshape(len(groups), -1, 1)).reshape(x.shape)
    return finish(y, x.to(dtype), None if D is None else D.view(x.shape[1], -1), z).to(x.dtype)


ssd_step_backward = short_backward(SPEC, STEP, ssd_backward)


class _Scan:
    """The inputs of one call, how they are cut, and how states travel from chunk to chunk."""

    def __init__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None,
        initial_state: Tensor | None, cu_seqlens: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float],
        chunk_size: int | None,
    ) -> None:  # fmt: skip
        batch, seqlen, nheads, headdim = x.shape
        self.dtype = accumulator(x.dtype)
        # A rate of -inf must not make NaN of the tokens that fill a chunk, whose step is zero.
        self.x, self.B, self.C, self.A = x, B, C, A.to(self.dtype).clamp(min=torch.finfo(self.dtype).min)
        self.step = step_size(wide(dt, x), dt_bias, dt_softplus, dt_limit).to(self.dtype)
        self.log_decay: Tensor | None = None  # where it is not step times A
        self.chunks = Chunks("ssd", seqlen, batch, min(chunk_size or CHUNK_SIZE, seqlen), cu_seqlens)
        nsequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
        self.state_shape = (nsequences, nheads, headdim, B.shape[-1])
        self.initial = None if initial_state is None else initial_state.to(self.dtype)
        widest = nheads * self.chunks.length * max(self.chunks.length, headdim)
        self.per_block = max(1, BLOCK_ELEMENTS // (batch * max(widest, nheads * headdim * B.shape[-1])))

    def blocks(self) -> Iterator[tuple[int, int]]:
        for low in range(0, self.chunks.count, self.per_block):
            yield low, min(low + self.per_block, self.chunks.count)

    def take(self, array: Tensor, low: int, high: int) -> Tensor:
        return self.chunks.take(array, low, high, self.dtype)

    def load(self, low: int, high: int) -> _Block:
        x, d, B, C = (self.take(a, low, high) for a in (self.x, self.step, self.B, self.C))
        log_decay = d * self.A if self.log_decay is None else self.take(self.log_decay, low, high)
        return _Block.of(x, d, log_decay, B, C)

    def bad(self, dy: Tensor | None = None, dfinal: Tensor | None = None) -> Bad:
        """Return where the operands are not finite."""

        def bad(array: Tensor | None) -> Tensor | None:
            return None if array is None else ~torch.isfinite(array)

        log_decay = self.step * self.A
        X, decay = bad(self.x * self.step[..., None]), log_decay.isnan() | (log_decay == math.inf)
        return Bad(X, decay, bad(self.B), bad(self.C), bad(self.initial), bad(dy), bad(dfinal))

    def without(self, bad: Bad) -> _Scan:
        """Return the scan of finite operands."""
        clean = copy(self)
        clean.x = self.x.masked_fill(bad.X, 0.0)
        # An infinite step with a rate below zero leaves nothing of the state: that decay is no bad one.
        clean.log_decay = (self.step * self.A).masked_fill(bad.decay, 0.0)
        clean.step, clean.B, clean.C = (zeros_for_bad(a) for a in (self.step, self.B, self.C))
        clean.initial = None if self.initial is None else zeros_for_bad(self.initial)
        return clean

    def line(self) -> Line:
        """Return how tokens lie in sequences."""
        return line(self.x.shape[1], self.chunks.offsets, self.x.device)

    def spoil(self, values: Tensor, spoiled: Tensor | None, low: int, high: int) -> Tensor:
        """Put NaN where the definition has it; ``values`` are those of chunks."""
        if spoiled is None:
            return values
        return values.masked_fill_(self.chunks.take(spoiled, low, high, torch.bool), math.nan)

    def new_final(self) -> Tensor:
        """Return the final states as they are if no token comes."""
        if self.initial is not None:
            return self.initial.clone(memory_format=torch.contiguous_format)
        return torch.zeros(self.state_shape, dtype=self.dtype, device=self.x.device)

    def pass_states(self, block: _Block, low: int, state: Tensor | None, final: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that enter the block's chunks, (b, c, h, p, n), and the one that leaves it."""
        written = block.written()
        batch, nchunks, *shape = written.shape
        states = written.new_empty(batch, nchunks + 1, *shape)
        if state is not None:
            states[:, 0] = state
        for c, decay in enumerate(block.total.unbind(1)):
            if (rows := self.chunks.begins.get(low + c)) is not None:
                states[:, c] = 0.0 if self.initial is None else self.initial[rows]
            torch.addcmul(written[:, c], states[:, c], decay[..., None, None], out=states[:, c + 1])
            if (rows := self.chunks.ends.get(low + c)) is not None:
                final[rows] = states[:, c + 1]
        return states[:, :-1], states[:, -1]

    def pass_gradients(
        self, block: _Block, dY: Tensor, low: int, carried: Tensor | None, dfinal: Tensor, dinitial: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states that leave the block's chunks, and of the one that enters it."""
        read = block.read_gradient(dY)
        batch, nchunks, *shape = read.shape
        states = read.new_empty(batch, nchunks + 1, *shape)
        if carried is not None:
            states[:, -1] = carried
        for c, decay in reversed(list(enumerate(block.total.unbind(1)))):
            if (rows := self.chunks.ends.get(low + c)) is not None:
                states[:, c + 1] = dfinal[rows]
            torch.addcmul(read[:, c], states[:, c + 1], decay[..., None, None], out=states[:, c])
            if (rows := self.chunks.begins.get(low + c)) is not None:
                dinitial[rows] = states[:, c]
        return states[:, 1:], states[:, 0]


@dataclass
class _Block:
    """Consecutive chunks in accumulator precision, with their decays. r heads read one group."""

    x: Tensor  # (b, c, l, h, p)
    d: Tensor  # (b, c, l, h), step sizes
    B: Tensor  # (b, c, g, l, n)
    C: Tensor  # (b, c, g, l, n)
    within: Tensor  # (b, c, h, l, l), exp(c_i - c_j), zero above the diagonal
    since: Tensor  # (b, c, l, h), exp(c_i): what is left of the entering state
    until: Tensor  # (b, c, l, h), exp(c_last - c_j): the share of a token that reaches the end of its chunk
    total: Tensor  # (b, c, h), exp(c_last)

    @staticmethod
    def of(x: Tensor, d: Tensor, log_decay: Tensor, B: Tensor, C: Tensor) -> _Block:
        # In units of log 2: torch.exp2 is four times as fast as torch.exp on a CPU (0.14 and 0.60 ns per element).
        # A token that decays by 2^-2048 leaves nothing; the sum with a larger one would lose what comes after it.
        steps = (log_decay.double() * math.log2(math.e)).clamp(-2048.0, 2048.0)
        sums = [steps.cumsum(2)]  # (b, c, l, h)
        if d.dtype == torch.float64:  # there is no wider type, so the rounding errors are summed, too
            sums.append((steps - sums[0].diff(dim=2, prepend=torch.zeros_like(steps[:, :, :1]))).cumsum(2))
        by_head = [part.transpose(2, 3).contiguous() for part in sums]
        within = reduce(torch.add, (part[..., :, None] - part[..., None, :] for part in by_head))
        within = within.to(d.dtype).exp2_().tril_()
        until = reduce(torch.add, (part[:, :, -1:] - part for part in sums)).exp2().to(d.dtype)
        since = reduce(torch.add, sums).exp2().to(d.dtype)
        return _Block(x, d, B.transpose(2, 3), C.transpose(2, 3), within, since, until, since[:, :, -1])

    @property
    def ngroups(self) -> int:
        return self.B.shape[2]

    def grouped(self, heads: Tensor) -> Tensor:
        """(b, c, l, h, p) -> (b, c, g, l, r p)."""
        return heads.unflatten(3, (self.ngroups, -1)).flatten(4).transpose(2, 3)

    def by_head(self, groups: Tensor) -> Tensor:
        """(b, c, g, l, r p) -> (b, c, l, h, p)."""
        return groups.transpose(2, 3).reshape(self.x.shape)

    def mixing(self) -> Tensor:
        """Compute the matrix that multiplies X: (C_i·B_j) exp(c_i - c_j), (b, c, h, l, l)."""
        # Without the upper triangle, which may overflow although no token asks for it.
        products = (self.C @ self.B.mT).tril_()  # (b, c, g, l, l)
        return (self.within.unflatten(2, (self.ngroups, -1)) * products[:, :, :, None]).flatten(2, 3)

    def inputs(self) -> Tensor:
        """Return X by head, (b, c, h, l, p)."""
        x = self.x.transpose(2, 3)
        # A product follows the layout of its factors; by head is the one that the matrix products want.
        return torch.mul(x, self.d.transpose(2, 3)[..., None], out=torch.empty(x.shape, dtype=x.dtype, device=x.device))

    def written(self) -> Tensor:
        """Sum what each chunk adds to the state, (b, c, h, p, n)."""
        weighted = self.x * (self.until * self.d)[..., None]
        return (self.grouped(weighted).mT @ self.B).reshape(*self.total.shape, self.x.shape[-1], -1)

    def read(self, entering: Tensor) -> Tensor:
        """Return y, (b, c, l, h, p)."""
        from_state = self.by_head(self.C @ self.grouped_state(entering).mT)
        from_chunk = (self.mixing() @ self.inputs()).transpose(2, 3)
        return from_chunk.addcmul_(from_state, self.since[..., None])

    def grouped_state(self, state: Tensor) -> Tensor:
        """(b, c, h, p, n) -> (b, c, g, r p, n)."""
        return state.unflatten(2, (self.ngroups, -1)).flatten(3, 4)

    def read_gradient(self, dY: Tensor) -> Tensor:
        """Sum what each chunk adds to the gradient of the state that enters it, (b, c, h, p, n)."""
        weighted = self.grouped(dY * self.since[..., None])
        return (weighted.mT @ self.C).reshape(*self.total.shape, self.x.shape[-1], -1)

    def gradients(self, dY: Tensor, entering: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of X (b, c, l, h, p), B and C (b, c, l, g, n), and of the log decays (b, c, l, h)."""
        entering_g, leaving_g = self.grouped_state(entering), self.grouped_state(leaving)
        X, dY_head = self.inputs(), dY.transpose(2, 3)
        mixing = self.mixing()
        # Through the state at the end of a chunk.
        dX_state = self.by_head(self.B @ leaving_g.mT) * self.until[..., None]  # (b, c, l, h, p)
        dB = self.grouped(self.x * (self.until * self.d)[..., None]) @ leaving_g  # (b, c, g, l, n)
        # Through the state that it reads.
        dY_since = dY * self.since[..., None]
        dC = self.grouped(dY_since) @ entering_g
        read = self.by_head(self.C @ entering_g.mT)
        # Through the pairs of its tokens.
        dmixing = dY_head @ X.mT  # (b, c, h, l, l)
        dX = dX_state + (mixing.mT @ dY_head).transpose(2, 3)
        dproducts = (dmixing * self.within).unflatten(2, (self.ngroups, -1)).sum(3)
        dC = dC + dproducts @ self.B
        dB = dB + dproducts.mT @ self.C
        # A log decay at k multiplies what goes from before k to k or later.
        length = self.d.shape[2]
        ones = torch.ones(length, length, dtype=dY.dtype, device=dY.device)
        crossing = ((ones.triu() @ dmixing.mul_(mixing)) * ones.tril(-1)).sum(-1).transpose(2, 3)  # (b, c, l, h)
        reads = (dY_since * read).sum(-1).flip(2).cumsum(2).flip(2)
        kept = (X.transpose(2, 3) * dX_state).sum(-1)
        # Of the tokens before: shifted, because a difference to the sum with the token itself would cancel.
        writes = F.pad(kept[:, :, :-1].cumsum(2), (0, 0, 1, 0))
        through = (entering * leaving).sum((-1, -2)) * self.total  # (b, c, h)
        return dX, dB.transpose(2, 3), dC.transpose(2, 3), crossing + reads + writes + through[:, :, None]
