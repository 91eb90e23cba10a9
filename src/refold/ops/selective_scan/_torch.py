"""The Mamba-1 scan on torch: blocks of tokens that fit a cache, one fused multiply-add per token.

This recurrence contains no matrix product: each channel and state decays at its own rate, and splitting the decay into
a quotient of two factors overflows. So the work is sequential, but arranged well. For a block of tokens, all decays and
inputs are computed at once as (b, t, n, d). Then each token costs one `addcmul` over the whole state. Then one small
product reads the block. All data of a block stays in cache; nothing of size (t, d, n) is ever stored.

Where a sequence of a pack begins, the loop continues from its initial state. The state of the sequence before it is not
multiplied by zero, because that may give NaN. Offsets are read on the host: on an accelerator, that is one
synchronisation per call, which the Triton backend does not need.

The backward keeps the state at the entry of each block and recomputes the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from refold.ops.selective_scan.spec import SPEC, STEP
from refold.ops.torch.chunks import read_offsets
from refold.ops.torch.pointwise import accumulator, finish, finish_gradient, step_size, step_size_gradient, wide
from refold.ops.torch.short import short_backward, short_scan

BLOCK_ELEMENTS = 1 << 20
"""State elements of a block of tokens. Measured at 2048 x 1536 x 16 on two EPYC cores: 43 ms at 2^17, 31 ms at 2^20."""


def selective_scan(
    *, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, decay: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    dt_softplus: bool, state_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.selective_scan`."""
    scan = _Scan(x, dt, A, B, C, dt_bias, decay, initial_state, cu_seqlens, dt_softplus)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final, state = scan.new_final(), scan.first_state()
    for low, high in scan.blocks():
        _, states = scan.run(low, high, state, final)
        state = states[:, -1].clone()
        part = finish(scan.read(states, low, high), scan.x[:, low:high], D, None if z is None else z[:, low:high])
        y[:, low:high] = part
    return y, final.mT.to(state_dtype or final.dtype).contiguous()


def selective_scan_backward(
    *, dy: Tensor | None, dstate: Tensor | None, needs: frozenset[str], x: Tensor, dt: Tensor, A: Tensor, B: Tensor,
    C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, decay: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, dt_softplus: bool, state_dtype: torch.dtype | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the gradients of all array arguments that are present, whatever ``needs`` says."""
    scan = _Scan(x, dt, A, B, C, dt_bias, decay, initial_state, cu_seqlens, dt_softplus)
    dy = torch.zeros_like(x) if dy is None else dy

    # Forward over the states alone, keeping one per block.
    final, state, starts = scan.new_final(), scan.first_state(), []
    for low, high in scan.blocks():
        starts.append(state)
        if high < scan.seqlen:
            state = scan.run(low, high, state, final)[1][:, -1].clone()

    grads = {name: torch.empty_like(a, dtype=scan.dtype) for name, a in (("x", x), ("dt", dt), ("B", B), ("C", C))}
    grads |= {n: torch.empty_like(a, dtype=scan.dtype) for n, a in (("z", z), ("decay", decay)) if a is not None}
    dA = torch.zeros_like(scan.A)
    dD = None if D is None else torch.zeros_like(D, dtype=scan.dtype)
    dfinal = torch.zeros_like(final) if dstate is None else dstate.to(final.dtype).mT
    dinitial = dfinal.clone()  # an empty sequence hands its gradient through
    workspace = torch.empty_like(scan.buffers[0])
    carried = nothing = scan.first_state()  # decay of the next token times its adjoint

    for (low, high), start in zip(reversed(list(scan.blocks())), reversed(starts), strict=True):
        decays, states = scan.run(low, high, start, scan.new_final())
        xb, step = scan.x[:, low:high], scan.step[:, low:high]
        y = None if z is None else scan.read(states, low, high)
        zb = None if z is None else z[:, low:high].to(scan.dtype)
        dyb, dD_tokens, dz = finish_gradient(dy[:, low:high].to(scan.dtype), y, xb, D, zb)
        # Adjoints λ[t] = C[t] dy[t] + decay[t+1] λ[t+1], and the gradient of the final state where a sequence ends.
        adjoints = scan.outer(scan.C, low, high, dyb, out=workspace[:, : high - low])
        for t, rows in scan.ends_in(low, high):
            adjoints[:, t - low] += dfinal[rows]
        adjoints[:, -1] += carried
        begins = dict(scan.begins_in(low, high))
        for t in range(high - low - 2, -1, -1):
            if low + t + 1 not in begins:
                adjoints[:, t].addcmul_(decays[:, t + 1], adjoints[:, t + 1])
        carried = nothing if low in begins else decays[:, 0] * adjoints[:, 0]
        # What each decay multiplied: the state before it, or the initial state where a sequence begins.
        before = torch.cat([start[:, None], states[:, :-1]], 1)
        for t, rows in begins.items():
            before[:, t - low] = 0.0 if scan.initial is None else scan.initial[rows]
            dinitial[rows] = decays[:, t - low] * adjoints[:, t - low]
        powers = decays if scan.decay is None else scan.powers(low, high, out=decays)
        dlog = before.mul_(powers).mul_(adjoints)  # (b, t, n, d)
        if scan.decay is not None:
            grads["decay"][:, low:high] = dlog.sum(2)
            dlog.mul_(scan.decay[:, low:high, None])
        dA += (dlog * step[:, :, None]).sum((0, 1))  # einsum would make a small product for each channel
        dinput = scan.sum_over_states(scan.B, low, high, adjoints)  # (b, t, d): gradient of step * x
        grads["B"][:, low:high] = scan.sum_over_channels(adjoints, step * xb, B.shape)
        grads["C"][:, low:high] = scan.sum_over_channels(states, dyb, C.shape)
        grads["dt"][:, low:high] = (dlog * scan.A).sum(2).addcmul_(dinput, xb)
        dx = dinput * step
        if D is not None and dD is not None and dD_tokens is not None:
            dx.addcmul_(dyb, D.to(dx.dtype).expand_as(dyb))
            dD += dD_tokens.sum((0, 1))
        grads["x"][:, low:high] = dx
        if dz is not None:
            grads["z"][:, low:high] = dz

    grads["dt"] = step_size_gradient(grads["dt"], dt, dt_bias, dt_softplus, None)
    grads["A"] = dA.mT
    if dD is not None:
        grads["D"] = dD
    if dt_bias is not None:
        grads["dt_bias"] = grads["dt"].sum((0, 1))
    if initial_state is not None:
        grads["initial_state"] = dinitial.mT
    return grads


def fading(
    tokens: int, *, dt: Tensor, A: Tensor, dt_bias: Tensor | None, decay: Tensor | None, dt_softplus: bool,
    **others: Any,
) -> Tensor | None:  # fmt: skip
    """Return the log of what each of the first tokens leaves of a state; 0 where a later one could bring it back."""
    step = step_size(dt, dt_bias, dt_softplus, None)
    falls = step.amin() >= 0
    if decay is not None:
        falls = falls & (decay.abs().amax() <= 1)
    log = step[:, :tokens] * A.amax(1)
    return torch.where(falls, log if decay is None else log + decay[:, :tokens].abs().log(), 0.0)


selective_scan_step = short_scan(SPEC, STEP, selective_scan)
selective_scan_step_backward = short_backward(SPEC, STEP, selective_scan_backward)


class _Scan:
    """The inputs of one call in accumulator precision; states are (b, n, d), channels last for long inner loops."""

    def __init__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor | None, decay: Tensor | None,
        initial_state: Tensor | None, cu_seqlens: Tensor | None, dt_softplus: bool,
    ) -> None:  # fmt: skip
        self.batch, self.seqlen, self.channels = x.shape
        self.dtype = accumulator(x.dtype)
        # A rate of -inf forgets everything; its product with a gradient of zero must not be NaN.
        least = torch.finfo(self.dtype).min
        self.x, self.A = x.to(self.dtype), A.to(self.dtype).mT.clamp(min=least).contiguous()  # (n, d)
        # exp2 because torch.exp takes 0.60 ns per element where it takes 0.14 (one EPYC core, torch 2.13).
        self.A_log2 = (self.A.double() * math.log2(math.e)).clamp(min=least).to(self.dtype)
        self.step = step_size(wide(dt, x), dt_bias, dt_softplus, None).to(self.dtype)
        self.decay = None if decay is None else decay.to(self.dtype)
        # (b, t, g, n)
        self.B, self.C = (p.to(self.dtype) if p.ndim == 4 else p.to(self.dtype)[:, :, None] for p in (B, C))
        self.initial = None if initial_state is None else initial_state.to(self.dtype).mT
        self.per_block = max(1, BLOCK_ELEMENTS // (self.batch * self.A.numel()))
        shape = (self.batch, min(self.per_block, self.seqlen), *self.A.shape)
        self.buffers = [torch.empty(shape, dtype=self.dtype, device=x.device) for _ in range(2)]
        self.tokens = list(zip(*(buffer.unbind(1) for buffer in self.buffers), strict=True))
        self.pack: list[tuple[int, int]] | None = None
        if cu_seqlens is not None:
            self.pack = list(itertools.pairwise(read_offsets("selective_scan", cu_seqlens, self.seqlen)))

    def blocks(self) -> Iterator[tuple[int, int]]:
        for low in range(0, self.seqlen, self.per_block):
            yield low, min(low + self.per_block, self.seqlen)

    def begins_in(self, low: int, high: int) -> list[tuple[int, slice]]:
        """First tokens of sequences in a block, with the rows of their initial states."""
        if self.pack is None:
            return [(0, slice(0, self.batch))] if low == 0 else []
        return [(s, slice(k, k + 1)) for k, (s, e) in enumerate(self.pack) if low <= s < high and e > s]

    def ends_in(self, low: int, high: int) -> list[tuple[int, slice]]:
        """Last tokens of sequences in a block, with the rows of their final states."""
        if self.pack is None:
            return [(self.seqlen - 1, slice(0, self.batch))] if high == self.seqlen else []
        return [(e - 1, slice(k, k + 1)) for k, (s, e) in enumerate(self.pack) if low < e <= high and e > s]

    def first_state(self) -> Tensor:
        """Return the state of a sequence that has none to begin with."""
        return torch.zeros(self.batch, *self.A.shape, dtype=self.dtype, device=self.x.device)

    def new_final(self) -> Tensor:
        """Return the final states as they are if no token comes."""
        if self.initial is not None:
            return self.initial.clone(memory_format=torch.contiguous_format)
        rows = self.batch if self.pack is None else len(self.pack)
        return torch.zeros(rows, *self.A.shape, dtype=self.dtype, device=self.x.device)

    def run(self, low: int, high: int, state: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Return decays and states of a block, (b, t, n, d), writing the final states of sequences that end in it.

        Both lie in buffers that the next block overwrites: fresh memory of this size would cost more than filling it.
        """
        decays, states = (buffer[:, : high - low] for buffer in self.buffers)
        self.powers(low, high, out=decays)
        if self.decay is not None:
            decays.mul_(self.decay[:, low:high, None])
        self.outer(self.B, low, high, self.step[:, low:high] * self.x[:, low:high], out=states)
        begins = dict(self.begins_in(low, high))
        for t, (decay, after) in enumerate(itertools.islice(self.tokens, high - low), low):
            if (rows := begins.get(t)) is not None:
                state = self.first_state() if self.initial is None else self.initial[rows]
            state = after.addcmul_(decay, state)
        for t, rows in self.ends_in(low, high):
            final[rows] = states[:, t - low]
        return decays, states

    def powers(self, low: int, high: int, out: Tensor) -> Tensor:
        """Write exp(step * A), (b, t, n, d), into ``out`` and return it."""
        return torch.mul(self.step[:, low:high, None], self.A_log2, out=out).exp2_()

    def outer(self, projection: Tensor, low: int, high: int, values: Tensor, out: Tensor) -> Tensor:
        """Write projection ⊗ values, (b, t, n, d), into ``out`` and return it."""
        ngroups = projection.shape[2]
        part = projection[:, low:high].mT[..., None]  # (b, t, n, g, 1)
        torch.mul(part, values.unflatten(2, (1, ngroups, -1)), out=out.unflatten(3, (ngroups, -1)))
        return out

    def read(self, states: Tensor, low: int, high: int) -> Tensor:
        """Return y before skip and gate, (b, t, d)."""
        return self.sum_over_states(self.C, low, high, states)

    def sum_over_states(self, projection: Tensor, low: int, high: int, values: Tensor) -> Tensor:
        """Return Σₙ projection[n] values[n, d], (b, t, d)."""
        part = projection[:, low:high]
        if part.shape[2] == 1:
            return (part @ values).squeeze(2)
        by_group = values.unflatten(3, (part.shape[2], -1)).transpose(2, 3)  # (b, t, g, n, r)
        return (part[:, :, :, None] @ by_group).flatten(2)

    def sum_over_channels(self, states: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
        """Return Σ_d states[n, d] values[d] over each group, in the layout (b, t, n) or (b, t, g, n) of ``shape``."""
        ngroups = shape[2] if len(shape) == 4 else 1
        by_group = states.unflatten(3, (ngroups, -1)).transpose(2, 3)  # (b, t, g, n, r)
        sums = (by_group @ values.unflatten(2, (ngroups, -1))[..., None]).squeeze(4)
        return sums if len(shape) == 4 else sums.squeeze(2)
