"""Calls of engines under the engines' own signatures, computed by refold's operators.

No function here waits for a GPU. What an engine preallocates is written to; states keep the engine's layout and dtype.
A call with a feature that is not computed here raises `BackendUnsupported` before anything is written.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold import ops
from refold.compat import fla, mamba_ssm
from refold.compat.slots import Slots, step_
from refold.errors import BackendUnsupported
from refold.ops.delta_rule.spec import STEP as DELTA_RULE_STEP


def chunk_scan_varlen(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor, last_chunk_indices: Tensor, seq_idx: Tensor, out: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    return_intermediate_states: bool = False, state_dtype: torch.dtype | None = None,
    final_states_out: Tensor | None = None, final_state_indices: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Prefill of Mamba-2 layers: packed prompts, ``x`` (t, h, p), ``B`` and ``C`` (t, g, n).

    Args:
        x: Inputs.
        dt: Step sizes, ``(t, h)``.
        A: ``(h,)``.
        B: Of the state.
        C: Of the output.
        chunk_size: No effect; ``cu_chunk_seqlens`` has the chunks.
        cu_seqlens: Offsets of the k prompts, ``(k + 1,)``; a prompt may be empty.
        cu_chunk_seqlens: Offsets of the c chunks, ``(c + 1,)``; each chunk lies in one prompt.
        last_chunk_indices: No effect; the engine picks the last chunks of ``k`` prompts with it.
        seq_idx: The prompt of each chunk, ``(c,)``.
        out: Where the outputs go, ``(t, h, p)``.
        D: ``(h,)`` or ``(h, p)``.
        z: Gates, like ``x``.
        dt_bias: ``(h,)``.
        initial_states: ``(k, h, p, n)``.
        dt_softplus: Pass ``dt`` through softplus.
        dt_limit: Clip step sizes to this range.
        return_intermediate_states: Return the state after each chunk, for prefix caches.
        state_dtype: Of the states that are returned; None is that of ``C``.
        final_states_out: The pool of states, ``(slots, h, p, n)``; the states after prompts are written to it.
        final_state_indices: The slot of each prompt, ``(k,)``.

    Returns:
        The states after chunks ``(c, h, p, n)``, or after prompts ``(k, h, p, n)``, or None if they went to a pool.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens: dict[str, Any] = {"B": B[None], "C": C[None], "D": D, "z": None if z is None else z[None]}
    steps: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "state_dtype": wide}
    before = None if initial_states is None else initial_states.to(wide)
    offsets = cu_seqlens
    if return_intermediate_states:
        alone = ops.ssd(x[None], dt[None], A, **tokens, **steps, cu_seqlens=cu_chunk_seqlens)[1]
        decays = _chunk_decays(dt, A, dt_bias, dt_softplus, dt_limit, cu_chunk_seqlens, wide)
        before = _before_chunks(alone, decays, seq_idx, before, len(cu_seqlens) - 1)
        offsets = cu_chunk_seqlens
    y, states = ops.ssd(x[None], dt[None], A, **tokens, **steps, initial_state=before, cu_seqlens=offsets)
    out.copy_(y[0])
    if final_states_out is None:
        return states.to(C.dtype if state_dtype is None else state_dtype)
    assert final_state_indices is not None
    final_states_out.index_copy_(0, final_state_indices.long(), states.to(final_states_out.dtype))
    return None


def _chunk_decays(
    dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float], offsets: Tensor,
    wide: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return by what a state is multiplied during each chunk, (c, h)."""
    steps = dt.to(wide) if bias is None else dt.to(wide) + bias
    steps = (F.softplus(steps) if softplus else steps).clamp(*limit)
    chunk = torch.searchsorted(offsets[1:].long(), torch.arange(len(dt), device=dt.device), right=True)
    return steps.new_zeros(len(offsets) - 1, len(A)).index_add(0, chunk, steps * A.to(wide)).exp()


def _before_chunks(alone: Tensor, decays: Tensor, prompt: Tensor, initial: Tensor | None, prompts: int) -> Tensor:
    """Return the state before each chunk; ``alone`` has those after a chunk that begins with zeros."""
    offsets = torch.searchsorted(prompt.long(), torch.arange(prompts + 1, device=prompt.device))
    factors = decays[:, :, None, None].expand_as(alone)
    after = ops.linear_scan(factors[None], alone[None], initial_state=initial, cu_seqlens=offsets)[0][0]
    start = torch.zeros_like(alone) if initial is None else initial.index_select(0, prompt.long())
    first = F.pad(prompt[1:] != prompt[:-1], (1, 0), value=True)[:, None, None, None]
    return torch.where(first, start, after.roll(1, 0))


def chunk_scan_packed(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, chunk_indices: Tensor | None = None, chunk_offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    out: Tensor | None = None, return_final_states: bool = False, return_varlen_states: bool = False,
    return_intermediate_states: bool = False, state_dtype: torch.dtype | None = None, return_track_states: bool = False,
    track_seq_idx: Tensor | None = None, track_end_locs: Tensor | None = None,
) -> tuple[None, Tensor, None]:  # fmt: skip
    """Prefill of Mamba-2 layers as `chunk_scan_varlen`, with a batch axis of one in front of the tokens.

    ``seq_idx`` and the chunks have no effect: ``cu_seqlens`` has the prompts.

    Returns:
        No states inside prompts, the states after prompts ``(k, h, p, n)``, no tracked states.

    Raises:
        BackendUnsupported: Other results are wanted, or states inside prompts.
    """
    op = "chunk_scan_packed"
    if cu_seqlens is None or out is None or not (return_varlen_states and return_track_states) or len(x) != 1:
        raise BackendUnsupported(f"{op}: out and the states after packed prompts are computed, nothing else.")
    if return_final_states or return_intermediate_states or (track_end_locs is not None and len(track_end_locs)):
        raise BackendUnsupported(f"{op}: states inside prompts are not computed.")
    states = chunk_scan_varlen(
        x[0], dt[0], A, B[0], C[0], chunk_size, cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens, out[0], D=D,
        z=None if z is None else z[0], dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus,
        dt_limit=dt_limit, state_dtype=state_dtype,
    )  # fmt: skip
    assert states is not None
    return None, states, None


def selective_scan_varlen(
    u: Tensor, ssm_states: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    query_start_loc: Tensor | None = None, cache_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
    null_block_id: int = 0, block_size: int = 1024, block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None, initial_state_idx: Tensor | None = None,
    cu_chunk_seqlen: Tensor | None = None, last_chunk_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Prefill of Mamba-1 layers: packed prompts, ``u`` (d, t), ``B`` and ``C`` (g, n, t) or (n, t).

    The states ``(slots, d, n)`` of the slots ``cache_indices`` go on if ``has_initial_state``, and are overwritten.

    Returns:
        The outputs ``(d, t)``, written to ``z``, or to ``delta`` without one.

    Raises:
        BackendUnsupported: No packed prompts, or states at borders of blocks are wanted.
    """
    op = "selective_scan_varlen"
    if query_start_loc is None or u.ndim != 2:
        raise BackendUnsupported(f"{op}: query_start_loc is needed, and u as (d, t); got u of {tuple(u.shape)}.")
    if block_idx_last_scheduled_token is not None or (cache_indices is not None and cache_indices.ndim != 1):
        raise BackendUnsupported(f"{op}: states at borders of blocks are not computed; got block indices.")
    count = len(query_start_loc) - 1
    slots = Slots.of(op, count, len(ssm_states), null_block_id, cache_indices=cache_indices)
    before = ssm_states if slots is None else slots.read(ssm_states)
    goes_on = torch.zeros_like(query_start_loc[1:]) if has_initial_state is None else has_initial_state
    wide = torch.promote_types(u.dtype, torch.float32)
    y, after = ops.selective_scan(
        u.T[None], delta.T[None], A, _time_first(B), _time_first(C), D=D, z=None if z is None else z.T[None],
        dt_bias=delta_bias, dt_softplus=delta_softplus, cu_seqlens=query_start_loc, state_dtype=wide,
        initial_state=torch.where(goes_on.bool()[:, None, None], before, 0).to(wide),
    )  # fmt: skip
    if slots is None:
        ssm_states.copy_(after)
    else:
        slots.write(ssm_states, after)
    return (delta if z is None else z).copy_(y[0].T)


def _time_first(projection: Tensor) -> Tensor:
    """Return (g, n, t) or (n, t) as (1, t, g, n) or (1, t, n)."""
    return projection.movedim(-1, 0)[None]


def state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
    z: Tensor | None = None, dt_softplus: bool = False, state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None, null_block_id: int = 0, out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, cu_seqlens: Tensor | None = None, is_blackwell: bool = False,
) -> None:  # fmt: skip
    """Decode of Mamba-1 and Mamba-2 layers, in place: `refold.compat.mamba_ssm.selective_state_update` with slots.

    With ``num_accepted_tokens`` (k,), each of k sequences has several tokens (``cu_seqlens``); slots are ``(k, m)``.
    A sequence goes on from its slot of the last accepted token, and the state after its token i goes to its slot i.
    """
    several = num_accepted_tokens is not None or cu_seqlens is not None
    if several and (state_batch_indices is None or out is None):
        raise BackendUnsupported("state_update: several tokens need state_batch_indices and out; got None.")
    source, target = state_batch_indices, dst_state_batch_indices
    if not several:  # rows of slots have one more axis, and rows of padding
        source, target = (i if i is None else i[: len(x)].select(1, 0) if i.ndim == 2 else i[: len(x)]
                          for i in (source, target))  # fmt: skip
    mamba_ssm.selective_state_update(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, source, dst_state_batch_indices=target,
        pad_slot_id=null_block_id, out=out, num_accepted_tokens=num_accepted_tokens, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def slot_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None, pad_slot_id: int = -1, out: Tensor | None = None,
    disable_state_update: bool = False, intermediate_states_buffer: Tensor | None = None,
    cache_steps: int | None = None, retrieve_parent_token: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
) -> None:  # fmt: skip
    """Decode of Mamba-1 and Mamba-2 layers, one token a sequence, in place.

    Raises:
        BackendUnsupported: Drafts are verified: the states of all tokens are wanted, or none is to be written.
    """
    if disable_state_update or intermediate_states_buffer is not None or x.ndim != state.ndim - 1:
        raise BackendUnsupported("slot_update: drafts of several tokens are not verified here.")
    mamba_ssm.selective_state_update(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, pad_slot_id=pad_slot_id, out=out
    )


def gated_delta_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, output_final_state: bool,
    cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None, chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True, core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Prefill of gated DeltaNet layers: `refold.compat.fla.chunk_gated_delta_rule` with states ``(k, h, p, n)``.

    ``core_attn_out`` gets the outputs, too, at its front. What only says how a kernel is launched has no effect.
    """
    o, state = fla.chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state, state_v_first=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if core_attn_out is not None:
        core_attn_out.view(-1)[: o.numel()].copy_(o.reshape(-1))
    return o, state


def _held(op: str, query_start_loc: Tensor, states: Tensor, cache_indices: Tensor) -> Slots:
    """Return the slots of a call of SGLang's delta rules, one a sequence."""
    slots = Slots.of(op, len(query_start_loc) - 1, len(states), -1, cache_indices=cache_indices)
    assert slots is not None
    return slots


def gated_delta_extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
    query_start_loc: Tensor, inplace_update: bool = True,
) -> Tensor:  # fmt: skip
    """Prefill of gated DeltaNet layers on slots of a pool ``(slots, h, p, n)``; negative slots are padding.

    Returns:
        Outputs like ``v``, ``(1, t, h, p)``.
    """
    slots = _held("gated_delta_extend", query_start_loc, ssm_states, cache_indices)
    o, after = gated_delta_prefill(q, k, v, g, beta, slots.read(ssm_states), True, query_start_loc)
    if inplace_update:
        assert after is not None
        slots.write(ssm_states, after)
    return o


def gated_delta_decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor, lower_bound: float | None = None,
) -> Tensor:  # fmt: skip
    """Decode of gated DeltaNet layers, one token a sequence: tokens ``(1, k, heads, ...)``, gates ``(k, h)``.

    Returns:
        Outputs like ``v``; the states of the slots are overwritten.

    Raises:
        BackendUnsupported: A sequence has several tokens.
    """
    op, count = "gated_delta_decode", len(query_start_loc) - 1
    if q.shape[:2] != (1, count):
        raise BackendUnsupported(f"{op}: one token a sequence is computed; got q {tuple(q.shape)}, {count} sequences.")
    given: dict[str, Any] = {"q": q[0], "k": k[0], "v": v[0], "state": ssm_states.mT, "g": a, "beta": b, "A_log": A_log}
    given |= {"dt_bias": dt_bias, "normalize": True, "beta_limit": 1.0, "lower_bound": lower_bound}
    return step_(op, DELTA_RULE_STEP, given, cache_indices=cache_indices)[None]


def kimi_delta_extend(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor,
    query_start_loc: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    lower_bound: float | None = None, beta_is_raw: bool = False, return_intermediate_states: bool = False,
) -> Tensor:  # fmt: skip
    """Prefill of Kimi delta attention layers on slots of a pool ``(slots, h, p, n)``; negative slots are padding.

    ``g`` (1, t, h, n) are log decays, or with ``A_log`` the gates that they come from. ``beta`` (1, t, h) are
    strengths, or with ``beta_is_raw`` their gates.

    Returns:
        Outputs like ``v``, ``(1, t, h, p)``.

    Raises:
        BackendUnsupported: States inside prompts are wanted.
    """
    op = "kimi_delta_extend"
    if return_intermediate_states:
        raise BackendUnsupported(f"{op}: states inside prompts are not computed.")
    slots = _held(op, query_start_loc, ssm_states, cache_indices)
    o, after = fla.chunk_kda(
        q, k, v, g, beta, initial_state=slots.read(ssm_states), output_final_state=True, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=A_log is not None, use_beta_sigmoid_in_kernel=beta_is_raw, lower_bound=lower_bound,
        state_v_first=True, cu_seqlens=query_start_loc, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    assert after is not None
    slots.write(ssm_states, after)
    return o


def kimi_delta_decode(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor,
    cache_indices: Tensor, query_start_loc: Tensor, lower_bound: float | None = None,
) -> Tensor:  # fmt: skip
    """Decode of Kimi delta attention layers, as `gated_delta_decode`, with gates ``a`` per key, h n of them a token."""
    count, heads, keys = len(query_start_loc) - 1, v.shape[2], k.shape[3]
    gates = {"a": a.reshape(count, heads, keys), "b": b.reshape(count, heads)}
    return gated_delta_decode(
        q, k, v, **gates, A_log=A_log.flatten(), dt_bias=dt_bias.reshape(heads, keys), ssm_states=ssm_states,
        cache_indices=cache_indices, query_start_loc=query_start_loc, lower_bound=lower_bound,
    )  # fmt: skip
