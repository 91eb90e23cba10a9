"""One token per row of a whole layer of a hybrid on a GPU: Mamba-2, attention beside it, and the MLP after them.

The norms are the beginnings of products, and the sums, with the factors that a model has, are their ends. So a layer of
Granite or Bamba is five launches, and one of Falcon-H1, with attention and rotary positions, is thirteen: their own
forwards have about 20 and 40. Everything is checked before anything is written; else the ordinary forward runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from refold.integrations import decoding, mixers, parts
from refold.integrations.documents import cache_of
from refold.integrations.parts import original, shipped


class LayerForm(NamedTuple):
    """Names of a layer's attributes.

    Attributes:
        norm: The norm before the MLP; the one before the mixers is ``input_layernorm``.
        mlp: The gated MLP.
        into: Its products before the activation, or the one that gives both halves.
        activation: Its activation.
        out: Its last product.
        result: Makes what the layer returns.
        scales: Factors of the answers of Mamba-2, attention and MLP; empty names are 1.
    """

    norm: str
    mlp: str
    into: tuple[str, ...]
    activation: str
    out: str
    result: Callable[[Tensor], Any]
    scales: tuple[str, str, str] = ("", "", "")


_GATED = ("gate_proj", "up_proj"), "act_fn", "down_proj"
FORMS = {
    "GraniteMoeHybridDecoderLayer": LayerForm(
        "post_attention_layernorm", "shared_mlp", ("input_linear",), "activation", "output_linear", lambda x: x,
        ("residual_multiplier", "", "residual_multiplier"),
    ),
    "BambaDecoderLayer": LayerForm("pre_ff_layernorm", "feed_forward", *_GATED, lambda x: (x, None)),
    "FalconH1DecoderLayer": LayerForm(
        "pre_ff_layernorm", "feed_forward", *_GATED, lambda x: (x,),
        ("ssm_out_multiplier", "attn_out_multiplier", "feed_forward.down_multiplier"),
    ),
}  # fmt: skip
"""Name of a class of layers in transformers -> how it is put together. Without a Mamba-2 layer, none is changed."""
MLPS = ("GraniteMoeHybridMLP", "BambaMLP", "FalconH1MLP")
ATTENTION = ("FalconH1Attention",)
SILU = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")


def layer(
    self: Any, hidden_states: Tensor, *places: Any, attention_mask: Any = None, position_embeddings: Any = None,
    mamba_attention_mask: Any = None, **given: Any,
) -> Any:  # fmt: skip
    """Give what a layer of one of `FORMS` returns for one token per row; None if the kernels cannot compute it.

    Models of transformers give all arguments but the first by name: those with only ``places`` are not looked at.
    """
    if not parts.quiet(hidden_states):
        return None
    form = FORMS[next(base.__name__ for base in type(self).__mro__ if base.__name__ in FORMS)]
    mamba, attention, mlp = getattr(self, "mamba", None), getattr(self, "self_attn", None), getattr(self, form.mlp)
    first, second = _norm(self.input_layernorm), _norm(getattr(self, form.norm))
    if (
        places
        or mamba is None
        or first is None
        or second is None
        or getattr(self, "block_sparse_moe", None) is not None
    ):
        return None
    if type(mamba).forward is not decoding.mamba2 or not mixers._untouched(mamba):
        return None
    mask, cache = attention_mask if attention is None else mamba_attention_mask, cache_of(given)
    held = decoding.ready(mamba, hidden_states, cache, mask, given, norm=first[0])
    if held is None:
        return None
    x: Any = hidden_states[:, 0].contiguous()
    fused: Any = decoding.kernels(x)
    into, down = [getattr(mlp, name) for name in form.into], getattr(mlp, form.out)
    if not _is(mlp, MLPS) or _path(getattr(mlp, form.activation)) not in SILU:
        return None
    if not decoding.plain(x, second[0]) or not decoding.multiplies(fused, x, [*into, down]):
        return None
    if {second[0].dtype, into[0].weight.dtype, first[0].dtype} != {mamba.in_proj.weight.dtype}:
        return None
    scales = [_scale(self, name) for name in form.scales]
    with torch.cuda.device_of(x):
        u, before = x, cast("tuple[Tensor | None, float]", first)
        if attention is not None and len(x) > 1:  # several products read it
            u, before = fused.normalised(x, *first), (None, 0.0)
        total = x
        if attention is not None:
            y = _attend(self, attention, fused, u, before, cache, attention_mask, position_embeddings)
            if y is None:
                return None
            total = _add(fused, attention.o_proj, y, total, scales[1])
        norm, eps = before
        total = decoding._step_(mamba, u, *held, dtype=x.dtype, norm=norm, eps=eps, onto=total, scale=scales[0])[:, 0]
        return form.result(_feed(fused, mlp, into, down, total, second, scales[2])[:, None])


def _norm(module: Any) -> tuple[Tensor, float] | None:
    """Give the weight and eps of an RMS norm of transformers; None if it is another, or something watches it."""
    options = parts.norm_options(original(module))
    if options is None or options[1] or not mixers._untouched(module):
        return None
    return module.weight, getattr(module, options[0])


def _is(module: Any, names: tuple[str, ...]) -> bool:
    kind = original(module)
    return kind.__name__ in names and shipped(kind) and mixers._untouched(module)


def _path(module: Any) -> str:
    """Give the full name of a module's class; nothing if something watches it."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}" if mixers._untouched(module) else ""


def _scale(self: Any, name: str) -> float:
    for part in filter(None, name.split(".")):
        self = getattr(self, part)
    return float(self) if name else 1.0


def _add(fused: Any, module: Any, y: Tensor, onto: Tensor, scale: float, gated: bool = False) -> Tensor:
    """Give ``onto + scale * module(y)``."""
    out = torch.empty_like(onto)
    total: Tensor = fused.project(y, module.weight, module.bias, None, 0.0, None, gated, None, onto, scale, out)
    return total


def _feed(
    fused: Any, mlp: Any, into: list[Any], down: Any, x: Tensor, norm: tuple[Tensor, float], scale: float
) -> Tensor:
    """Give ``x (b, d)`` with the answer of the MLP added."""
    u, (weight, eps) = x, cast("tuple[Tensor | None, float]", norm)
    if len(x) > 1 and len(into) > 1:
        u, weight, eps = fused.normalised(x, *norm), None, 0.0
    factors = [float(getattr(mlp, "gate_multiplier", 1.0)), 1.0][: len(into)]
    size = sum(len(module.weight) for module in into)
    halves = torch.empty(len(into), len(x), size // len(into), dtype=torch.float32, device=x.device)
    for module, factor, half in zip(into, factors, halves, strict=True):
        fused.project(u, module.weight, module.bias, weight, eps, None, False, scale=factor, out=half)
    fed = halves.view(1, size) if len(x) == 1 else halves.transpose(0, 1).reshape(len(x), size)
    return _add(fused, down, fed, x, scale, gated=True)


def _attend(
    self: Any,
    attention: Any,
    fused: Any,
    u: Tensor,
    norm: tuple[Tensor | None, float],
    held: Any,
    mask: Any,
    angles: Any,
) -> Tensor | None:
    """Give what attention reads before its last product, ``(b, h e)``; None if the kernel cannot compute it."""
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    layer = parts.held(held, attention.layer_idx)
    if layer is None or not _is(attention, ATTENTION) or not rotates(original(attention)):
        return None
    if not decoding.multiplies(fused, u, linears):
        return None
    cos, sin = (a[:, 0].expand(len(u), -1) for a in angles)
    factor = float(self.attention_in_multiplier)
    if cos.shape[-1] != attention.head_dim or (factor != 1.0 and any(m.bias is not None for m in linears[:3])):
        return None
    if layer.keys.dtype != linears[0].weight.dtype or cos.stride(-1) != 1 or sin.stride() != cos.stride():
        return None
    q = torch.empty(len(u), len(attention.q_proj.weight), dtype=layer.keys.dtype, device=u.device)
    if not parts.takes_cache(torch.unflatten(q, 1, (-1, attention.head_dim)), layer, mask):
        return None
    k, v = (torch.empty(len(u), len(m.weight), dtype=q.dtype, device=u.device) for m in linears[1:3])
    for module, out, scale in zip(
        linears, (q, k, v), (factor, factor * attention.key_multiplier, factor), strict=False
    ):
        fused.project(u, module.weight, module.bias, *norm, None, False, scale=scale, out=out)
    q, k, v = (torch.unflatten(a, 1, (-1, attention.head_dim)) for a in (q, k, v))
    return parts.attend_(q, k, v, layer, mask, attention.scaling, (cos, sin))


@functools.cache
def rotates(kind: type) -> bool:
    """Whether the file of a class of attention rotates halves of heads: tried on numbers, as `parts.norm_options`."""
    rotate = getattr(sys.modules[kind.__module__], "apply_rotary_pos_emb", None)
    x, cos, sin = torch.tensor([1.0, -2.0, 3.0, 0.5]), torch.tensor([0.5, 2.0, -1.0, 3.0]), torch.arange(4.0)
    turned = x * cos + torch.tensor([-3.0, -0.5, 1.0, -2.0]) * sin
    with torch.no_grad():
        found = () if rotate is None else rotate(*2 * (x.view(1, 1, 1, 4),), *(a.view(1, 1, 4) for a in (cos, sin)))
    return len(found) == 2 and all(torch.equal(a.flatten(), turned) for a in found)
