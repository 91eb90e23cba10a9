"""What a model of transformers has around its recurrent layers, in fewer launches on a GPU: norms, and attention.

A norm of transformers is seven launches, and here one, for any number of tokens. Attention of one token copies the keys
once for each query head; here it reads what the cache holds. Both run only where nothing needs a gradient, nothing
watches calls, and every tensor is plain. Else what the class does runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from refold.models.torch.layers import kernels
from refold.ops.torch import private

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MARK = "_refold_attention"
_reading: ContextVar[Any] = ContextVar("refold_reading", default=None)
"""The cache with fixed memory that one token is read on top of."""


def shipped(kind: type) -> bool:
    """Whether a class is of one of transformers' own models, whose names mean what refold knows of them."""
    return kind.__module__.startswith("transformers.models.")


def keeps_forward(kind: type, names: Container[str]) -> bool:
    """Whether a class has the forward of one of transformers' own classes of these names."""
    bases = [base for base in kind.__mro__ if base.__name__ in names]
    return any(shipped(base) and kind.forward is base.forward for base in bases)  # type: ignore[attr-defined]


def original(module: Any) -> Any:
    """Give the class that a module had before `accelerate`."""
    return getattr(type(module), "_refold_original", type(module))


def quiet(x: Tensor) -> bool:
    """Whether nothing needs or watches what is computed from ``x``, so that only values count."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or private.watched(x.device):
        return False
    return type(x) is Tensor and not torch.is_autocast_enabled(x.device.type)


def is_norm(module: nn.Module) -> bool:
    """Whether `norm` knows what a module computes."""
    names = {name for name in vars(module) if name != "training" and not name.startswith("_")}
    options = norm_options(original(module))
    return options is not None and names == {options[0]}  # private names are transformers' marks


def norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Forward of an RMS norm: one launch where it can be, else that of its class."""
    x, weight, kind = hidden_states, self.weight, original(self)
    fused = kernels(x) if quiet(x) else None
    options = None if fused is None else norm_options(kind)
    plain = type(weight) in (nn.Parameter, Tensor) and weight.device == x.device and weight.shape == x.shape[-1:]
    if options is None or not plain or x.dtype != weight.dtype or x.dtype not in DTYPES or x.numel() == 0:
        own: Tensor = kind.forward(self, hidden_states)
        return own
    eps, offset = options
    with torch.cuda.device_of(x):
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        return fused.normalised(rows, weight, getattr(self, eps), offset).view(x.shape)  # type: ignore[union-attr]


@cache
def norm_options(kind: Any) -> tuple[str, float] | None:
    """Give the name of eps in an RMS norm of transformers and what is added to its weight; None of any other class.

    The class is tried on numbers, since two formulas have the same name: ``weight`` or ``1 + weight`` times the norm.
    """
    if not (shipped(kind) and kind.__name__.endswith("RMSNorm")):
        return None
    weight, x, value = torch.tensor([0.5, -1.5, 2.0, 3.0]), torch.tensor([[1.0, 2.0, -3.0, 0.5]]), 0.25
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + value)
    for eps in ("variance_epsilon", "eps"):
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        module.weight = nn.Parameter(weight)
        setattr(module, eps, value)
        with torch.no_grad(), suppress(Exception):  # it needs something else
            found = module(x)
            for offset in (0.0, 1.0):
                if torch.allclose(found, normed * (weight + offset), rtol=1e-6, atol=1e-6):
                    return eps, offset
    return None


@contextmanager
def reading(cache: Any) -> Iterator[None]:
    """Let attention of one token read from ``cache``, whose layers hold keys and values of a fixed capacity."""
    from transformers import AttentionInterface

    if not hasattr(own := AttentionInterface()["sdpa"], _MARK):
        AttentionInterface.register("sdpa", _sdpa(own))
    token = _reading.set(cache)
    try:
        yield
    finally:
        _reading.reset(token)


def _sdpa(own: Callable[..., Any]) -> Callable[..., Any]:
    """Give transformers' function of attention with a shorter way for one token within `reading`."""

    @wraps(own)
    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any) -> Any:
        if torch.compiler.is_compiling() or _reading.get() is None:  # Dynamo knows no context variables
            return own(module, query, key, value, attention_mask, **given)
        if (y := _attend(query, key, value, attention_mask, given)) is not None:
            return y, None
        return own(module, query, key, value, attention_mask, **given)

    setattr(attend, _MARK, own)
    return attend


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, given: dict[str, Any]) -> Tensor | None:
    """Give what one token a row reads, ``(b, 1, h, e)``; None if the kernel does not compute what was asked for.

    ``query (b, h, 1, e)``, ``key`` and ``value (b, g, capacity, e)``, ``mask (b or 1, 1, 1, capacity)``.
    """
    layer = next((layer for layer in _reading.get().layers if getattr(layer, "keys", None) is key), None)
    if layer is None or layer.values is not value:
        return None
    if given.get("dropout") or given.get("position_bias") is not None or given.get("output_attentions"):
        return None
    rows, heads, tokens, size = query.shape
    if tokens != 1 or query.dtype != key.dtype or not takes_cache(query[:, :, 0], layer, mask):
        return None
    q = query[:, :, 0]
    q = q if q.stride()[1:] == (size, 1) else q.contiguous()
    scale = size**-0.5 if given.get("scaling") is None else given["scaling"]
    return attend_(q, None, None, layer, mask, scale).view(rows, 1, heads, size)


def held(cache: Any, layer: int) -> Any:
    """Give a layer of ``cache`` whose keys and values have a fixed capacity, if that cache is read now; else None."""
    found = cache.layers[layer] if cache is not None and cache is _reading.get() else None
    return found if hasattr(found, "position") and getattr(found, "keys", None) is not None else None


def takes_cache(q: Tensor, layer: Any, mask: Any) -> bool:
    """Whether `attend_` takes queries ``(b, h, e)`` on a layer of a cache with a mask ``(b or 1, 1, 1, capacity)``."""
    fused = kernels(q) if quiet(q) else None
    if fused is None or q.shape[1] % layer.keys.shape[1]:
        return False
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape[1:] != (1, 1, layer.keys.shape[2]):
        return False
    caches = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
    return mask.stride(-1) == 1 and bool(fused.takes_cache(q, *caches))


def attend_(
    q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, mask: Tensor, scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Give what one token a row reads of a cache's layer, ``(b, h e)``; `takes_cache` says whether it can.

    ``k`` and ``v (b, g, e)`` are written first, if the layer does not have them yet. ``angles``: cosines and sines
    ``(b, e)`` of the positions, by which ``q`` and ``k`` are rotated before.
    """
    caches = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
    seen, length = mask[:, 0, 0].expand(len(q), -1), layer.position.expand(len(q))
    with torch.cuda.device_of(q):
        y = kernels(q).attend_(q, k, v, *caches, length, scale, None, None, seen, angles)  # type: ignore[union-attr]
    return y  # type: ignore[no-any-return]
