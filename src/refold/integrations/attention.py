"""Attention layers of hybrids: documents of one row do not see each other there either.

Most families of transformers make the mask of a packed row without looking at its documents, or only if no cache is
given. So the mask is made here, where the model that holds the layers is called. Implementations that take no mask
(flash attention) get offsets.

What a cache keeps of earlier documents in a row is marked on it, and hidden from what goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refold.compat.documents import Documents
from refold.errors import ArgumentError
from refold.integrations.documents import cache_of, current

_MASKED = ("eager", "sdpa", "flex_attention")
"""Implementations that take a mask."""
_OTHERS = {"sliding_attention", "indexed_attention", "qwen_sparse_attention", "deepseek_sparse_attention"}
"""Kinds of attention layers that have masks of their own."""
_HIDDEN = "_refold_hidden"


def watch(model: nn.Module, around: Callable[[], list[Any]]) -> list[Any]:
    """Keep documents apart in the attention layers of ``model``, if it has some; return the handles of the hooks.

    ``around`` adds hooks that enter before these, and leave after them. They are registered in the order in which they
    run: up to torch 2.11, Dynamo mixes up hooks that were moved.
    """
    if not any(hasattr(module, "is_causal") for module in model.modules()):
        return around()
    names = tuple(inspect.signature(model.forward).parameters)
    return [
        model.register_forward_hook(partial(_leave, names), prepend=True, with_kwargs=True),
        *around(),
        model.register_forward_pre_hook(partial(_enter, names), with_kwargs=True),
    ]


def hidden(cache: Any) -> Tensor | None:
    """Return which keys of a cache, ``(b, s)``, belong to documents that have ended; None if there are none."""
    found: Tensor | None = getattr(cache, _HIDDEN, None)
    return found


def _enter(names: tuple[str, ...], model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    documents, cache = current(), cache_of(kwargs)
    ended = hidden(cache)
    if documents is None and ended is None:
        return None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 4:  # the caller's own says what is seen
        return None
    batch, seqlen, device = _shape(kwargs)
    if mask is not None and not isinstance(mask, Tensor):
        raise ArgumentError(
            f"{type(model).__name__}: documents in one row need a mask (b, t) or none; got masks that were made before "
            "the call. Give each document a row of its own, or call the model without a static cache."
        )
    past = 0 if cache is None else int(cache.get_seq_length())
    seen = torch.ones(batch, past + seqlen, dtype=torch.bool, device=device)
    if mask is not None:
        seen = seen & mask.bool().to(seen.device)
    if ended is not None and past:
        if ended.shape != (batch, past):
            raise ArgumentError(
                f"{type(model).__name__}: the cache holds documents of {ended.shape[0]} rows and {ended.shape[1]} "
                f"tokens, and was changed to {batch} rows and {past} tokens since. Begin with the last documents alone."
            )
        seen[:, :past] &= ~ended.to(seen.device)
    if documents is None:
        kwargs["attention_mask"] = seen.long()
    elif (implementation := getattr(model.config, "_attn_implementation", "eager")) in _MASKED:
        visible = _visible(documents, seen, past, seqlen)
        if (longer := _keys(cache, seqlen) - visible.shape[-1]) > 0:
            visible = nn.functional.pad(visible, (0, longer))
        if implementation != "sdpa":  # which takes either kind
            visible = torch.zeros_like(visible, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
        masks = {"full_attention": visible, "linear_attention": None if mask is None else mask[:, -seqlen:]}
        kwargs["attention_mask"] = masks | _masks_of_others(model, visible, past)
    else:
        kwargs |= _offsets(f"{type(model).__name__}: {implementation}", documents, batch, past, mask, kwargs)
    return (), kwargs


def _visible(documents: Documents, seen: Tensor, past: int, seqlen: int) -> Tensor:
    """Return which keys each token sees, (b, 1, t, past + t): its document's up to itself, and of those in ``seen``."""
    number = documents.numbers((len(seen), seqlen)).to(seen.device)
    before = documents.first.to(seen.device)
    if documents.fresh is not None:
        before = torch.where(documents.fresh.to(seen.device), -1, before)
    keys = torch.cat([before[:, None].expand(-1, past), number], 1)
    place = torch.arange(past + seqlen, device=seen.device)
    visible = (keys[:, None] == number[..., None]) & (place <= place[past:, None]) & seen[:, None]
    return (visible | (place == place[past:, None]))[:, None]  # a row of nothing has no softmax


def window(model: Any) -> int | None:
    """Return how many tokens a token sees, itself included, in a model whose windows slide; None in others."""
    if "create_sliding_window_causal_mask" not in inspect.unwrap(type(model).forward).__globals__:
        return None
    size: int | None = getattr(model.config, "sliding_window", None)
    return size


def _masks_of_others(model: Any, visible: Tensor, past: int) -> dict[str, Tensor]:
    """Return the masks of attention layers of other kinds, by the names that the model has for them."""
    kinds = set(getattr(model.config, "layer_types", None) or ()) & _OTHERS
    who, size = f"{type(model).__name__}: documents in one row", window(model)
    if kinds and hasattr(model.config, "index_kpool"):
        raise ArgumentError(
            f"{who} cannot be kept apart: its indexer pools tokens. Give each document a row of its own."
        )
    if size is None:
        return dict.fromkeys(kinds, visible)
    if past:
        raise ArgumentError(
            f"{who} need a cache without earlier tokens, since it has sliding windows. Read them alone."
        )
    kinds = kinds or {"full_attention"}  # MiniMax has one window for all of its layers
    place = torch.arange(visible.shape[-1], device=visible.device)
    near = place[: visible.shape[-2], None] - place < size
    if visible.dtype == torch.bool:
        return dict.fromkeys(kinds, visible & near)
    return dict.fromkeys(kinds, visible.masked_fill(~near, torch.finfo(visible.dtype).min))


def _offsets(
    who: str, documents: Documents, batch: int, past: int, mask: Tensor | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Give the arguments that separate documents for an implementation that takes no mask."""
    if given.get("cu_seq_lens_q") is not None:
        return {}
    if batch != 1 or past or (mask is not None and not bool(mask.all())):
        raise ArgumentError(
            f"{who} takes documents only in a batch of one row, without padding and without a cache of earlier tokens; "
            f"got {batch} rows and {past} earlier tokens. Put all documents into one row, or use "
            'attn_implementation="sdpa".'
        )
    offsets = documents.cu_seqlens.to(torch.int32)
    longest = int(offsets.diff().max())
    return {
        "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def _keys(cache: Any, seqlen: int) -> int:
    """Return how many keys attention reads; of a static cache, all that it has room for."""
    most = 0
    for layer in getattr(cache, "layers", ()):  # a loop, since Dynamo fails on `max` of a generator in a hook
        if hasattr(layer, "get_mask_sizes"):
            most = max(most, int(layer.get_mask_sizes(seqlen)[0]))
    return most or seqlen


def _leave(names: tuple[str, ...], model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    documents, cache = current(), cache_of(kwargs) or cache_of(output if isinstance(output, dict) else {})
    ended = hidden(cache)
    if cache is None or (documents is None and ended is None):
        return
    batch, seqlen, device = _shape(kwargs)
    past = int(cache.get_seq_length()) - seqlen
    if ended is None or not past:
        ended = torch.zeros(batch, past, dtype=torch.bool, device=device)
    later = torch.zeros(batch, seqlen, dtype=torch.bool, device=device)
    if documents is not None:
        later = documents.numbers((batch, seqlen)).to(device) != documents.last.to(device)[:, None]
        ended = ended | ~documents.goes_on().to(device)[:, None]
    setattr(cache, _HIDDEN, torch.cat([ended, later], 1))


def _shape(given: dict[str, Any]) -> tuple[int, int, torch.device]:
    """Return the batch, the tokens a row, and where they are."""
    tokens = next(given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None)
    return tokens.shape[0], tokens.shape[1], tokens.device
