"""Models whose sequence is cut over the ranks of a process group: what a call needs besides operators with ``group=``.

The ranks agree once per call of the model (`share`); after that, layers send only states. Attention layers gather keys
and values of all ranks, and see those that are not later than their own tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from torch.nn.attention.bias import causal_lower_right

from refold.compat.documents import Documents
from refold.errors import ArgumentError, RefoldError
from refold.integrations import documents as borders
from refold.integrations.attention import window
from refold.ops.torch.cuts import Cut, agree, pieces, whole
from refold.parallel import shard

IMPLEMENTATION = "refold_ranks"
"""The name of `attend` among the attention functions of transformers."""

_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention functions that change results, and that `attend` does not know."""


_eager = torch.compiler.disable(reason="ranks agree, and gather keys and values, between the graphs")


def refuse_others(model: nn.Module, replaced: Mapping[str, str], kept: Mapping[str, str]) -> None:
    """Refuse a model with layers that would not see the tokens of other ranks.

    Args:
        model: The model.
        replaced: Names of recurrent layers that are replaced.
        kept: Names of those that are not, with reasons.

    Raises:
        ArgumentError: It has such a layer; the message names it. Or no layer is replaced.
    """
    alone = dict(kept)
    if not replaced:
        alone.setdefault("the model", f"{type(model).__name__} has no layer that refold can replace")
    for name, module in model.named_modules():
        if not hasattr(module, "is_causal"):
            continue
        if "ALL_ATTENTION_FUNCTIONS" not in inspect.unwrap(type(module).forward).__code__.co_names:
            alone[name] = f"{type(module).__name__} does not call the attention functions of transformers"
        elif not module.is_causal:
            alone[name] = f"{type(module).__name__} is not causal"
        elif any(type(child).__name__.endswith("Indexer") for child in module.children()):
            alone[name] = f"{type(module).__name__} has an indexer, which chooses among its own tokens"
    if alone:
        name, reason = next(iter(alone.items()))
        more = f", and {len(alone) - 1} more" if len(alone) > 1 else ""
        raise ArgumentError(
            f"accelerate: with group, every layer that mixes tokens must know the ranks; {name} does not{more}: "
            f"{reason}. Pass the part of the model without such layers, or no group."
        )


def share(cut: Cut, model: nn.Module, given: dict[str, Any], positions: bool) -> tuple[Documents | None, Cut]:
    """Agree with the other ranks on the call of a model.

    Args:
        cut: The ranks and their layout; lengths are asked for.
        model: The model that is called.
        given: Its arguments by name. A mask that hides nothing is taken out.
        positions: Whether ``position_ids`` that start again begin a document.

    Returns:
        The documents of the whole sequence, and the cut with the lengths of this call.

    Raises:
        ArgumentError: A rank cannot take its arguments, or ranks disagree. All ranks raise.
    """
    tokens = next((given[n] for n in ("input_ids", "inputs_embeds") if isinstance(given.get(n), Tensor)), None)
    who, device = type(model).__name__, next(model.parameters()).device
    try:
        found = _checked(who, model, given, tokens, positions)
    except RefoldError:
        agree(cut, who, {}, 0, device, refused=True)
        raise
    assert tokens is not None
    facts = {
        "the names of arguments": sorted(name for name, value in given.items() if value is not None),
        "rows": len(tokens),
        "training, gradients": (model.training, torch.is_grad_enabled()),
        "use_cache": given.get("use_cache"),
        "documents": None if found is None or found.cu_seqlens.is_cuda else found.cu_seqlens.tolist(),
    }
    lengths = agree(cut, who, facts, tokens.shape[1], device, refused=False)
    if 0 in lengths:
        raise ArgumentError(f"{who}: each rank must have tokens; they have {lengths}. Use fewer ranks or more tokens.")
    cut = Cut(cut.group, tuple(lengths), cut.layout)
    if found is None and (name := _marks(given, positions)) is not None:
        found = borders.read({name: whole(cut, given[name].contiguous())}, positions)
        if found is not None and len(tokens) > 1:
            raise ArgumentError(
                f"{who}: documents over ranks must lie in one row; got {len(tokens)} rows. Put those of all rows one "
                "after the other."
            )
    elif found is not None and not found.cu_seqlens.is_cuda and (end := int(found.cu_seqlens[-1])) != sum(lengths):
        raise ArgumentError(
            f"{who}: offsets are those of the whole sequence, {sum(lengths)} tokens on all ranks; they end at {end}."
        )
    if found is not None and given.get("use_cache"):
        raise ArgumentError(f"{who}: a cache over ranks holds one document per row; got several. Read each alone.")
    return found, cut


def _marks(given: Mapping[str, Any], positions: bool) -> str | None:
    """Return the argument that marks documents token by token."""
    names = ("seq_idx", "position_ids") if positions else ("seq_idx",)
    return next((name for name in names if given.get(name) is not None), None)


def _checked(
    who: str, model: nn.Module, given: dict[str, Any], tokens: Tensor | None, positions: bool
) -> Documents | None:
    """Return the documents that offsets describe, once it is known that this rank can take the arguments."""
    if tokens is None:
        raise ArgumentError(f"{who}: over ranks, a call has input_ids or inputs_embeds.")
    if borders.cache_of(given) is not None or (given.get("use_cache") and torch.is_grad_enabled()):
        raise ArgumentError(
            f"{who}: ranks read a prompt at once, without gradients. Pass use_cache=True under torch.no_grad(), and no "
            "cache: the model makes one. To go on from it, undo() first."
        )
    if given.get("use_cache") and window(model) is not None:
        raise ArgumentError(
            f"{who}: a cache of sliding windows does not hold the tokens of all ranks. Read the prompt on one device."
        )
    if (mask := given.get("attention_mask")) is not None:
        if not (isinstance(mask, Tensor) and mask.shape == tokens.shape[:2] and bool(mask.all())):
            raise ArgumentError(
                f"{who}: over ranks, attention_mask must be None or ones {tuple(tokens.shape[:2])}. Padding at the end "
                "of rows needs no mask: no token sees it. Let its labels be -100."
            )
        given["attention_mask"] = None
    if given.get("labels") is not None and any(given.get(n) is None for n in ("shift_labels", "num_items_in_batch")):
        raise ArgumentError(
            f"{who}: the target of a rank's last token is on another rank. Pass shift_labels and num_items_in_batch "
            "with labels, as refold.parallel.shard makes them."
        )
    experts = getattr(getattr(model, "config", None), "output_router_logits", False)
    if given.get("output_router_logits", experts):
        raise ArgumentError(
            f"{who}: the auxiliary loss of experts needs the tokens of all ranks at once. Pass "
            "output_router_logits=False."
        )
    if (name := _marks(given, positions)) is not None:
        borders.check_tokens(name, given[name], given)
        if len(given[name]) != len(tokens):
            given[name] = given[name].expand(len(tokens), -1)
    return borders.read({n: v for n, v in given.items() if n != "seq_idx"}, positions=False)


def watch(model: nn.Module, positions: bool, cut: Cut) -> list[Any]:
    """Let every call of ``model`` be one of all ranks; return the handles of the hooks that do."""
    parameters = inspect.signature(model.forward).parameters.values()
    names, anything = tuple(p.name for p in parameters), any(p.kind is p.VAR_KEYWORD for p in parameters)
    enter = partial(_enter, names, anything, positions, cut)
    return [
        model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        model.register_forward_hook(_leave, always_call=True),
    ]


@_eager
def _enter(
    names: tuple[str, ...], anything: bool, positions: bool, cut: Cut, model: nn.Module, args: Any, kwargs: Any
) -> Any:
    given = dict(zip(names, args, strict=False)) | kwargs
    documents, call = borders.current(), borders.shared()
    if call is None:  # else it is a model inside of another
        documents, call = share(cut, model, given, positions)
    borders.enter(documents, call)
    if given.get("use_cache") is None and (anything or "use_cache" in names):
        given["use_cache"] = False
    if given.get("position_ids") is None and "position_ids" in names:
        tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        given["position_ids"] = call.positions(tokens.device).expand(len(tokens), -1)
    return (), given


@_eager
def _leave(model: nn.Module, args: Any, output: Any) -> None:
    cut = borders.shared()
    borders.leave(model, args, output)
    if cut is None or borders.shared() is not None:  # it is inside of another
        return
    for cache in output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ():
        for layer in getattr(cache, "layers", ()):  # the keys and values of attention; other layers have theirs
            if isinstance(keys := getattr(layer, "keys", None), Tensor) and keys.ndim == 4:
                layer.keys, layer.values = whole(cut, keys, 2), whole(cut, layer.values, 2)


@_eager
def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of the tokens of this rank to those of all ranks; an attention function of transformers.

    Args:
        module: The layer.
        query: ``(b, h, t, d)``.
        key: ``(b, hk, t, d)``; that of other ranks is gathered.
        value: ``(b, hk, t, dv)``.
        attention_mask: None: the call of the model says what is seen.
        dropout: The probability that a weight is dropped.
        scaling: The factor of scores.
        sliding_window: How many tokens a token sees, itself included; None for all before it.
        **options: What transformers passes besides.

    Returns:
        ``(y, None)``: ``(b, t, h, dv)``, and no weights.

    Raises:
        ArgumentError: An option changes results, and is not known; or the layer is called outside of its model.
    """
    who, cut = type(module).__name__, borders.shared()
    if cut is None:
        raise ArgumentError(f"{who}: over ranks, it must be called by its model.")
    unknown = [name for name in _UNKNOWN if options.get(name) is not None]
    if unknown or attention_mask is not None:
        raise ArgumentError(
            f"{who}: {', '.join(unknown) or 'a mask of its own'} is not known over ranks. Train it without group."
        )
    key, value = whole(cut, torch.cat([key, value], -1), 2).split([key.shape[-1], value.shape[-1]], -1)
    own = [p for p in pieces(cut.lengths or (), cut.layout) if p.rank == cut.rank]
    parts = []
    for piece in sorted(own, key=lambda p: p.at):
        part = query[:, :, piece.at : piece.at + piece.end - piece.begin]
        if not part.shape[2]:
            continue
        first = 0 if sliding_window is None else max(0, piece.begin + 1 - sliding_window)
        keys, values = key[:, :, first : piece.end], value[:, :, first : piece.end]
        mask = _visible(borders.current(), first, piece.begin, piece.end, sliding_window, query.device)
        shared = query.shape[1] != key.shape[1]
        more: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout, "scale": scaling, "enable_gqa": shared}
        parts.append(F.scaled_dot_product_attention(part, keys, values, **more))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _visible(
    documents: Documents | None, first: int, begin: int, end: int, window: int | None, device: torch.device
) -> Any:
    """Return which of the tokens ``first`` to ``end`` of the sequence each from ``begin`` on sees."""
    if documents is None and window is None:
        return causal_lower_right(end - begin, end)

    def find() -> Tensor:
        back = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        if documents is None:
            return seen
        number = documents.numbers((1, end))[0].to(device)
        return seen & (number[begin:, None] == number[first:])

    return find() if documents is None else borders.once(documents.cu_seqlens, ("visible", begin, end, window), find)


def registered() -> str:
    """Register `attend` with transformers, and return its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)
    return IMPLEMENTATION


def differences(one: nn.Module, many: nn.Module, batch: Mapping[str, Any], cut: Cut) -> dict[str, float]:
    """Compare a model on one device with its copy over ranks; all ranks get the same result.

    Returns:
        ``"loss"``, and the name of each parameter that is trained -> the largest difference of its gradient, as a part
        of the largest gradient of it, or of a thousandth of the largest of all, if that is more.
    """
    own, cut = shard(batch, cut.group, layout=cut.layout)
    whole_loss, wanted = _gradients(one, batch)
    loss, found = _gradients(many, own)
    for value in (loss, *found.values()):
        all_reduce(value, group=cut.group)
    least = 1e-3 * max((float(g.abs().max()) for g in wanted.values()), default=0.0)
    errors = {"loss": (loss - whole_loss).abs() / whole_loss.abs()}
    errors |= {n: (found[n] - g).abs().max() / g.abs().max().clamp(min=least) for n, g in wanted.items()}
    told = torch.stack(list(errors.values())).nan_to_num(torch.inf)
    all_reduce(told, ReduceOp.MAX, group=cut.group)
    return dict(zip(errors, told.tolist(), strict=True))


def _gradients(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a model, and the gradient of each parameter that is trained."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()  # not autograd.grad: checkpointing of the first kind knows only this
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return loss.detach().clone(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()}
