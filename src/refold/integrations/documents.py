"""Documents that share a row of a batch: how their borders reach every layer of a model (design decision 26).

Models take the borders in one of three forms, and most of them drop all three before their recurrent layers. So the
borders are read where the model is called (`watch`), and kept during that call. Blocks also get them as an argument: if
a block runs again for its gradients (gradient checkpointing), it gets the borders of its own call.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from refold.compat.documents import Documents
from refold.errors import ArgumentError, DtypeError, ShapeError
from refold.ops.torch.graphs import recorders
from refold.parallel import Cut

_Value = TypeVar("_Value")

_OFFSETS = ("cu_seq_lens_q", "cu_seqlens")
_INDEX = "seq_idx"
_POSITIONS = "position_ids"
CACHES = ("past_key_values", "cache_params", "cache")
"""Names under which models and their layers take their cache."""


def cache_of(arguments: Mapping[str, Any]) -> Any:
    """Give the cache among the arguments of a model or a layer; None if there is none."""
    return next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)


def read(arguments: Mapping[str, Any], positions: bool = True) -> Documents | None:
    """Return the documents that the arguments of a model's forward describe; None if each row is one.

    Args:
        arguments: The caller's arguments by name. The first of these is used: ``cu_seq_lens_q``, ``cu_seqlens``,
            ``seq_idx``, else ``position_ids``: where a position does not follow the one before it, a document begins.
        positions: Whether to read ``position_ids``.

    Raises:
        ShapeError: One of them does not have the shape that it must have.
        DtypeError: One is no tensor, or ``seq_idx`` does not hold integers.
        ArgumentError: ``cu_seq_lens_k`` differs from ``cu_seq_lens_q``.
    """
    for name in (*_OFFSETS, _INDEX, _POSITIONS):
        given = arguments.get(name)
        if given is not None and not (isinstance(given, Tensor) and (name != _INDEX or not given.is_floating_point())):
            got = getattr(given, "dtype", type(given).__name__)
            raise DtypeError(f"{name} must be a tensor of integers; got {got}. Convert it.")
    for name in _OFFSETS:
        if (offsets := arguments.get(name)) is not None:
            return _from_offsets(name, offsets, arguments)
    if (index := arguments.get(_INDEX)) is not None:
        check_tokens(_INDEX, index, arguments)
        return Documents.from_index(index)
    ids = arguments.get(_POSITIONS) if positions else None
    if ids is not None and ids.ndim == 3:  # in an image by time, height and width; the first of four are of tokens
        ids = ids[0] if len(ids) == 4 else None
    return None if ids is None or ids.shape[-1] == 1 else _from_positions(ids, arguments)


def _from_offsets(name: str, offsets: Tensor, arguments: Mapping[str, Any]) -> Documents:
    if offsets.ndim != 1 or offsets.numel() < 2:
        raise ShapeError(f"{name} must be 1-D with at least two offsets; got shape {tuple(offsets.shape)}.")
    keys = arguments.get("cu_seq_lens_k")
    if name == "cu_seq_lens_q" and keys is not None and keys is not offsets and keys.shape != offsets.shape:
        raise ArgumentError(
            f"cu_seq_lens_k must be cu_seq_lens_q; got {keys.numel()} and {offsets.numel()} offsets. A recurrent layer "
            "has one length a document. Pass one of them twice."
        )
    if (size := _batch_size(arguments)) is not None and size[0] != 1:
        raise ShapeError(f"{name} needs a batch of one row; got {size[0]}. Put the documents one after the other.")
    return Documents.from_offsets(offsets)


@torch.compiler.disable(
    reason="whether position_ids begin documents is in their values. Pass cu_seq_lens_q instead, or call "
    "refold.accelerate with positions=False."
)
def _from_positions(ids: Tensor, arguments: Mapping[str, Any]) -> Documents | None:
    check_tokens(_POSITIONS, ids, arguments)
    size, mask = _batch_size(arguments), arguments.get("attention_mask")
    attended: Any = None
    if isinstance(mask, Mapping):  # with a static cache, `generate` makes one per kind of layer
        attended = mask.get("full_attention")
        mask = mask.get("linear_attention")
    if size is not None and ids.shape[0] == 1:
        ids = ids.expand(size)
    seqlen = ids.shape[1]
    starts = torch.zeros_like(ids, dtype=torch.bool)
    begun = torch.ones_like(starts[:, 0])
    if isinstance(mask, Tensor) and mask.ndim == 2:
        # Padding has positions that mean nothing: each token is compared with the last one that is not padding.
        real = mask[:, -seqlen:].bool().expand(ids.shape).to(ids.device)
        place = torch.where(real, torch.arange(seqlen, device=ids.device), -1).cummax(1).values
        before = place[:, :-1]
        follows = ids[:, 1:] == ids.gather(1, before.clamp(min=0)) + 1
        starts[:, 1:] = real[:, 1:] & (before >= 0) & ~follows
        first = real.int().argmax(1)
        head = ids.gather(1, first[:, None])[:, 0]
        begun = real.any(1)
        if mask.shape[1] > seqlen:  # A row that has read nothing but padding is at no border.
            begun &= mask[:, :-seqlen].bool().any(1).to(ids.device)
        elif isinstance(attended, Tensor) and attended.ndim == 4:  # and this one has lost what was before the piece
            rows = torch.arange(len(first), device=attended.device)
            visible = attended.expand(len(first), -1, -1, -1)[rows, 0, first.to(attended.device)]
            visible = visible if visible.dtype == torch.bool else visible == 0
            begun &= visible.sum(1).to(ids.device) > 1  # its first token sees more than itself
    else:
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1] + 1
        head = ids[:, 0]
    fresh = (head == 0) & begun if _continues(arguments) else None
    borders = starts if fresh is None else starts | fresh[:, None]
    if not bool(borders.any()):
        return None
    return Documents.from_starts(starts, fresh)


def check_tokens(name: str, values: Tensor, arguments: Mapping[str, Any]) -> None:
    """Refuse values that are not one per token."""
    size = _batch_size(arguments)
    wanted = "(batch, tokens)" if size is None else f"{tuple(size)}"
    if values.ndim != 2 or (size is not None and (values.shape[0] not in (1, size[0]) or values.shape[1] != size[1])):
        raise ShapeError(f"{name} must have the shape {wanted}; got {tuple(values.shape)}. One entry per token.")


def _check_one_token(arguments: Mapping[str, Any]) -> None:
    """Refuse a row that is to pause for a call of one token, in which layers of transformers get no mask.

    Nothing is checked where one would have to wait for the mask, token by token (on a GPU, and where steps are
    recorded), or while a graph is traced.
    """
    size, mask = _batch_size(arguments), arguments.get("attention_mask")
    if size is None or size[1] != 1 or torch.compiler.is_compiling():
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2 or not _continues(arguments):
        return
    if (kind := mask.device.type) != "cpu" or kind in recorders:
        return
    paused = ~mask[:, -1].bool()
    if mask.shape[1] > 1:
        paused &= mask[:, :-1].bool().any(1)
    if paused.any():
        raise ArgumentError(
            f"attention_mask is 0 for the one token of row {int(paused.int().argmax())}, and a row cannot pause for a "
            "single token. Call the rows that go on, or give each row a token, or two tokens at a time."
        )


def _batch_size(arguments: Mapping[str, Any]) -> torch.Size | None:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(tokens := arguments.get(name), Tensor):
            return tokens.shape[:2]
    return None


def _continues(arguments: Mapping[str, Any]) -> bool:
    """Whether a cache is given that has read tokens before."""
    # Models name it cache, cache_params or past_key_values. MiniMax has one of its own.
    held = [getattr(cache, "linear_cache", None) or cache for cache in arguments.values()]
    return any(isinstance(c, list) or c.has_previous_state() for c in held if hasattr(c, "has_previous_state"))


class _Call(NamedTuple):
    """A call of a model."""

    documents: Documents | None = None
    named: bool = False
    """Whether its arguments named documents."""
    found: list[tuple[Tensor, tuple[Any, ...], Any]] = []  # noqa: RUF012  # each call is given its own
    """What was found of tensors, next to these; see `once`."""
    cut: Cut | None = None
    """The ranks that share its tokens."""


class _Calls(threading.local):
    """The calls of models that this thread is inside of."""

    def __init__(self) -> None:
        self.stack: list[_Call] = []


_CALLS = _Calls()


def current() -> Documents | None:
    """Return the documents of the call that this thread is inside of."""
    return _CALLS.stack[-1].documents if _CALLS.stack else None


def shared() -> Cut | None:
    """Return the ranks that share the tokens of the call that this thread is inside of."""
    return _CALLS.stack[-1].cut if _CALLS.stack else None


def once(given: Tensor, key: tuple[Any, ...], find: Callable[[], _Value]) -> _Value:
    """Return ``find()`` of a tensor that layers are given, called once for it and a key in the call of a model."""
    found: list[Any] = _CALLS.stack[-1].found if _CALLS.stack else []
    for other, name, value in found:
        if other is given and name == key:
            return value  # type: ignore[no-any-return]
    found.append((given, key, value := find()))
    return value


@contextmanager
def reading(documents: Documents | None, cut: Cut | None) -> Iterator[None]:
    """Make ``documents`` the current ones, and a cut the one that is `shared`."""
    enter(documents, cut)
    try:
        yield
    finally:
        _CALLS.stack.pop()


def enter(documents: Documents | None, cut: Cut | None) -> None:
    """Begin a call of a model with these documents on these ranks; `leave` ends it."""
    _CALLS.stack.append(_Call(documents, True, [], cut))


def watch(model: nn.Module, positions: bool) -> list[Any]:
    """Read the documents of every call of ``model``; return the handles of the hooks that do."""
    names = tuple(inspect.signature(model.forward).parameters)
    return [
        model.register_forward_pre_hook(partial(_enter, names, positions), prepend=True, with_kwargs=True),
        model.register_forward_hook(leave, always_call=True),
    ]


def _enter(names: tuple[str, ...], positions: bool, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if _CALLS.stack and _CALLS.stack[-1].named:  # A model inside of another: what was given there holds.
        _CALLS.stack.append(_CALLS.stack[-1])
        return
    given = dict(zip(names, args, strict=False)) | kwargs
    _check_one_token(given)
    asked = any(given.get(name) is not None for name in (*_OFFSETS, _INDEX, _POSITIONS))
    _CALLS.stack.append(_Call(read(given, positions), asked, []))


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """End the call of a model: a hook after its forward."""
    if _CALLS.stack:  # Empty if what was given could not be read, and raised.
        _CALLS.stack.pop()
