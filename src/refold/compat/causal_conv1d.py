"""The functions of the package causal-conv1d, under its signatures.

Layouts, defaults and the number of results are that package's. The package refuses or ignores some arguments that have
a meaning, such as initial states in a pack; here they have that meaning. A value without a meaning raises an error that
names it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from refold import ops
from refold.compat.checks import positive, shaped, tensors
from refold.compat.documents import Documents
from refold.compat.slots import Slots, to_read
from refold.errors import ArgumentError, ShapeError
from refold.ops.spec import check_cu_seqlens_values

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]


@tensors(x=(3,))
def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:  # fmt: skip
    """Causal depthwise convolution along time, `refold.ops.causal_conv1d` in this package's layout.

    Args:
        x: Inputs, ``(b, d, t)``, contiguous along time or along channels.
        weight: ``(d, w)``, any width.
        bias: ``(d,)``.
        seq_idx: ``(b, t)``, the number of each token's document; documents do not see each other. Tokens with a
            negative number are padding: their outputs are zero. Reading it waits for a GPU.
        initial_states: ``(b, d, w-1)``, the inputs before each row; its first document goes on from them.
        return_final_states: Return the last ``w - 1`` inputs of each row's last document, too.
        final_states_out: ``(b, d, w-1)``, where to write them.
        activation: None, ``"silu"`` or ``"swish"``, which are one.

    Returns:
        ``out`` like ``x``, or ``(out, final_states)``.

    Raises:
        ArgumentError: An argument has no meaning here; the message names it.
        ShapeError: Axes disagree.
    """
    op = "causal_conv1d_fn"
    fused = _silu(op, activation)
    if final_states_out is not None and not return_final_states:
        raise ArgumentError(f"{op}: final_states_out needs return_final_states=True; got False.")
    tokens = x.mT
    if final_states_out is not None and initial_states is not None:
        initial_states = to_read(initial_states)  # they may be one
    if seq_idx is None:
        y, states = ops.causal_conv1d(tokens, weight, bias, activation=fused, initial_state=initial_states)
    else:
        shaped(op, seq_idx=(seq_idx, tokens.shape[:2]))
        documents = Documents.from_index(seq_idx)
        rest = {"weight": weight, "bias": bias, "activation": fused}
        y, ends = documents.run(ops.causal_conv1d, {"x": tokens}, initial_states, **rest)
        y, states = torch.where((seq_idx < 0)[..., None], 0, y), documents.ends(ends)
    out = time_last(y, x)
    if not return_final_states:
        return out
    return out, into(op, final_states_out, states, "final_states_out")


@tensors(x=(2, 3), conv_state=(3,), weight=(2,))
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    cache_seqlens: Tensor | None = None, conv_state_indices: Tensor | None = None, *, pad_slot_id: int = -1,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Convolve one token or a few, and keep the last inputs in ``conv_state``, in place.

    Args:
        x: ``(b, d)``, or ``(b, d, t)`` for a few tokens.
        conv_state: The last inputs, ``(b, d, s)`` with ``s >= w - 1``, oldest first; with ``conv_state_indices``
            ``(slots, d, s)``.
        weight: ``(d, w)``.
        bias: ``(d,)``.
        activation: None, ``"silu"`` or ``"swish"``.
        cache_seqlens: ``(b,)``, how many tokens were read before: ``conv_state`` is then a ring, and the next token's
            place in it is that number modulo s.
        conv_state_indices: ``(b,)``, the slot of each row. Rows with a negative slot are padding: zeros are returned
            for them and nothing is written.
        pad_slot_id: A slot that means padding, too. (Not in the package.)
        out: Where to write the result, like ``x``. (Not in the package.)

    Returns:
        ``out``, like ``x``.

    Raises:
        ArgumentError: An argument has no meaning here, or a slot does not exist (on the CPU); the message names it.
        ShapeError: Axes disagree.
    """
    op = "causal_conv1d_update"
    fused, width = _silu(op, activation), weight.shape[-1]
    tokens = (x[..., None] if x.ndim == 2 else x).mT
    length = conv_state.shape[-1]
    if length < width - 1:
        raise ShapeError(
            f"{op}: conv_state must be (b, d, s) with s >= {width - 1}, one less than the width of weight; got "
            f"{tuple(conv_state.shape)}."
        )
    shaped(op, cache_seqlens=(cache_seqlens, (len(x),)), weight=(weight, (conv_state.shape[1], width)))
    if tokens.shape[2] != len(weight):
        raise ShapeError(f"{op}: x must have the {len(weight)} channels of weight; got {tokens.shape[2]}.")

    def step(state: Tensor) -> tuple[Tensor, Tensor]:
        if cache_seqlens is None:
            before, after = state, torch.cat([state, tokens.mT.to(state.dtype)], -1)[..., -length:]
        else:
            place = (cache_seqlens[:, None] + torch.arange(-length, 0, device=state.device)) % length
            before = state.gather(2, place[:, None].expand_as(state))
            count = min(tokens.shape[1], length)  # of more tokens than there are places, the last are kept
            place = cache_seqlens[:, None] + torch.arange(tokens.shape[1], device=state.device)
            kept = place[:, None, -count:].expand(*state.shape[:2], -1) % length
            after = state.scatter(2, kept.long(), tokens.mT[..., -count:].to(state.dtype))
        window = before[..., before.shape[-1] - (width - 1) :]
        return ops.causal_conv1d_step(tokens, weight, window, bias, activation=fused)[0], after

    slots = Slots.of(op, len(x), len(conv_state), pad_slot_id, conv_state_indices=conv_state_indices)
    if slots is not None:
        y = slots.update(conv_state, step)
    else:
        shaped(op, conv_state=(conv_state, (len(x), len(weight), length)))
        y, after = step(to_read(conv_state))
        conv_state.copy_(after)
    return into(op, out, y[:, 0] if x.ndim == 2 else time_last(y, x))


@tensors(x=(2,), cu_seqlens=(1,))
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Return the last inputs of each document of a pack, from which `causal_conv1d_update` goes on.

    Args:
        x: Inputs of all documents, one after the other, ``(t, d)``.
        cu_seqlens: ``(k + 1,)``, their offsets.
        state_len: How many inputs to keep; zeros stand before a document that is shorter.

    Returns:
        ``(k, d, state_len)``, with channels next to each other in memory.

    Raises:
        ArgumentError: ``state_len`` is not a positive integer, or offsets (on the CPU) are not those of documents in x.
        ShapeError: ``x`` or ``cu_seqlens`` does not have the axes above.
    """
    op = "causal_conv1d_varlen_states"
    positive(op, "state_len", state_len)
    if len(cu_seqlens) < 2:
        raise ShapeError(f"{op}: cu_seqlens must be (k + 1,) with k >= 1; got shape {tuple(cu_seqlens.shape)}.")
    if cu_seqlens.device.type == "cpu":
        check_cu_seqlens_values(op, [*cu_seqlens.tolist(), len(x)], len(x))  # tokens may follow the last document
    offsets = cu_seqlens.to(x.device).long()
    place = offsets[1:, None] + torch.arange(-state_len, 0, device=x.device)
    inside = (place >= offsets[:-1, None])[..., None]
    return torch.where(inside, x[place.clamp(0, len(x) - 1)], 0).mT


def into(op: str, out: Tensor | None, y: Tensor, name: str = "out") -> Tensor:
    """Return ``y``, written to ``out`` if that is given."""
    if out is None:
        return y
    shaped(op, **{name: (out, y.shape)})
    return out.copy_(y)


def time_last(y: Tensor, like: Tensor) -> Tensor:
    """Return ``y`` (b, t, d) as (b, d, t), with time or channels next to each other in memory as in ``like``."""
    return y.mT if like.stride(1) == 1 and like.stride(-1) != 1 else y.mT.contiguous()


def _silu(op: str, activation: str | None) -> str | None:
    if activation not in (None, "silu", "swish"):
        raise ArgumentError(f"{op}: activation must be None, 'silu' or 'swish'; got {activation!r}.")
    return None if activation is None else "silu"
