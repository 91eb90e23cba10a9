"""The forwards that replace those of transformers' Mamba layers.

One forward serves every Mamba-2 layer, one every Mamba-1 layer, one Zamba's. They read the layer's own attributes and
write the cache that the layer would write, in its layout, so that both may take turns. Projections are called as
modules, so LoRA, quantisation, sharding and hooks work. Weights are read directly only if a module is exactly as
transformers made it: a norm, a convolution, or the product of ``dt_proj``.

They differ from the originals in three points. Step sizes are clipped in decoding as in prefill. A Mamba-1 layer
continues from a cached state when it reads several tokens. Documents of a pack do not see each other.

Layers of transformers call their cache ``cache`` from 5.24 on, and ``cache_params`` before. Forwards that take a
layer's place take both. `TAKES` and `HAS` name all that they know, and a layer with anything else is not replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refold import ops
from refold.compat.documents import Documents
from refold.errors import ArgumentError
from refold.integrations.documents import current, read

try:
    from transformers.integrations.accelerate import force_accelerate_hooks
except ImportError:  # then nothing offloads weights by its hooks

    def force_accelerate_hooks(child_module_names: str | list[str]) -> Callable[..., Any]:
        """Return the function as it is."""
        return lambda forward: forward


TAKES = ("self", "hidden_states", "cache", "cache_params", "attention_mask")
"""Arguments of layers that the forwards here know, besides those of ``**kwargs`` that separate documents."""

HAS = frozenset({
    "A_log", "D", "dt_bias", "in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "norm", "dt_layernorm",
    "b_layernorm", "c_layernorm", "mup_vector", "x_proj_weight", "dt_proj_weight", "dt_proj_bias", "parametrizations",
})  # fmt: skip
"""Parts of layers with parameters or buffers that the forwards here know."""


@force_accelerate_hooks("conv1d")
def mamba2(self: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
    """Forward of a Mamba-2 layer."""
    documents, dtype = _documents(kwargs), hidden_states.dtype
    window, state = _cached(cache, self.layer_idx)
    hidden_states = _without_padding(hidden_states, attention_mask)
    if hasattr(self, "mup_vector"):  # Falcon-H1
        projected = self.in_proj(hidden_states * self.ssm_in_multiplier) * self.mup_vector
    else:
        projected = self.in_proj(hidden_states)
    z, xBC, dt = projected.split([self.intermediate_size, self.conv_dim, self.num_heads], -1)
    xBC = _without_padding(_convolve(self, xBC, window, cache, documents), attention_mask)
    states = self.n_groups * self.ssm_state_size
    x, B, C = xBC.split([self.intermediate_size, states, states], -1)

    normed = getattr(self, "mamba_rms_norm", True)  # Falcon-H1 may have no norm; the scan gates then
    y = _scan(
        ops.ssd, ops.ssd_step, ops.ssd_step_,
        {
            "x": x.unflatten(-1, (self.num_heads, self.head_dim)), "dt": dt,
            "B": B.unflatten(-1, (self.n_groups, -1)), "C": C.unflatten(-1, (self.n_groups, -1)),
            "z": None if normed else z.unflatten(-1, (self.num_heads, self.head_dim)),
        },
        state, self.layer_idx, cache, documents,
        A=_rates(self.A_log), D=self.D, dt_bias=self.dt_bias, dt_softplus=True, dt_limit=tuple(self.time_step_limit),
    ).flatten(-2)  # fmt: skip
    return self.out_proj((_gated_norm(self.norm, y, z) if normed else y).to(dtype))


@force_accelerate_hooks("conv1d")
def mamba(self: Any, hidden_states: Tensor, cache: Any, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
    """Forward of a Mamba-1 layer, with norms of B, C and dt where the layer has them (Falcon Mamba, Jamba)."""
    documents, dtype = _documents(kwargs), hidden_states.dtype
    window, state = _cached(cache, self.layer_idx)
    x, z = self.in_proj(_without_padding(hidden_states, attention_mask)).chunk(2, -1)
    x = _without_padding(_convolve(self, x, window, cache, documents), attention_mask)
    dt, B, C = self.x_proj(x).split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], -1)
    if hasattr(self, "dt_layernorm"):
        dt, B, C = self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)
    dt, bias = _apart(self.dt_proj, dt)
    y = _scan(
        ops.selective_scan, ops.selective_scan_step, ops.selective_scan_step_,
        {"x": x, "dt": dt, "B": B, "C": C, "z": z}, state, self.layer_idx, cache, documents,
        A=_rates(self.A_log), D=self.D, dt_bias=bias, dt_softplus=True,
    )  # fmt: skip
    return self.out_proj(y.to(dtype))


@force_accelerate_hooks("conv1d")
def zamba(
    self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, *,
    cache_params: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Forward of Zamba's Mamba-1 layer: heads with projections of their own are groups of one scan."""
    cache = cache if cache_params is None else cache_params
    documents, dtype = _documents(kwargs), hidden_states.dtype
    window, state = _cached(cache, self.layer_idx)
    projected = self.in_proj(_without_padding(hidden_states, attention_mask)).unflatten(-1, (-1, 2))
    x, z = projected[..., 0].contiguous(), projected[..., 1].contiguous()  # they take turns, channel by channel
    x = _without_padding(_convolve(self, x, window, cache, documents), attention_mask)
    heads = x.unflatten(-1, (self.n_mamba_heads, -1))
    parameters = torch.einsum("bthp,hrp->bthr", heads, self.x_proj_weight)
    dt, B, C = parameters.split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], -1)
    dt = torch.einsum("bthr,hpr->bthp", dt, self.dt_proj_weight).flatten(-2)
    y = _scan(
        ops.selective_scan, ops.selective_scan_step, ops.selective_scan_step_,
        {"x": x, "dt": dt, "B": B, "C": C, "z": z},
        None if state is None else state.flatten(1, 2), self.layer_idx, cache, documents,
        A=_rates(self.A_log).flatten(0, 1), D=self.D.flatten(), dt_bias=self.dt_proj_bias.flatten(), dt_softplus=True,
        store=lambda state: state.unflatten(1, (self.n_mamba_heads, -1)),
    )  # fmt: skip
    return self.out_proj(y.to(dtype))


def _documents(given: dict[str, Any]) -> Documents | None:
    """Return the documents of the call of the model; of a layer that is called by itself, its own."""
    found = current()
    return read(given, positions=False) if found is None else found


def _without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else (x * mask[:, -x.shape[1] :, None]).to(x.dtype)


def _rates(A_log: Tensor) -> Tensor:
    return -torch.exp(A_log.to(torch.promote_types(A_log.dtype, torch.float32)))


def _gated_norm(norm: Any, y: Tensor, z: Tensor) -> Tensor:
    """Return ``norm(y, z)``, in one operator where the norm is one of transformers' own, as it was made."""
    options = _norm_options(norm)
    return norm(y, z) if options is None else ops.gated_rmsnorm(y, z, norm.weight, **options)


def _norm_options(norm: Any) -> dict[str, Any] | None:
    """Return the options with which `ops.gated_rmsnorm` is this norm; None if the norm must be called."""
    kind = type(norm)
    if not (kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("RMSNormGated")):
        return None
    if not _untouched(norm):
        return None
    groups = getattr(norm, "n_groups", None)
    size = getattr(norm, "group_size", None if groups is None else norm.weight.shape[-1] // groups)
    before = getattr(norm, "norm_before_gate", False)
    return {"eps": norm.variance_epsilon, "group_size": size, "norm_before_gate": before}


def _apart(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ``linear(x)`` in two parts: the product, and a bias that is still to be added, in float32 by the scan.

    Only a plain layer's weight is used directly; anything else (LoRA, quantised, sharded, hooked) is called.
    """
    if type(linear) is not nn.Linear or not _untouched(linear):
        return linear(x), None
    return F.linear(x, linear.weight), linear.bias


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _untouched(module: nn.Module) -> bool:
    """Whether calling a module runs the forward of its class and nothing else."""
    # A PyTorch without one of these names may have hooks elsewhere.
    return "forward" not in vars(module) and not any(getattr(module, name, True) for name in _HOOKS)


def _cached(cache: Any, layer: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the inputs of the convolution and the state that a cache holds; None of each if it holds nothing yet."""
    if cache is None:
        return None, None
    if hasattr(cache, "get_conv_state"):  # from 5.21 on
        return cache.get_conv_state(layer), cache.get_recurrent_state(layer)
    if not cache.has_previous_state(layer):
        return None, None
    held = cache.layers[layer]
    return held.conv_states[0], held.recurrent_states[0]


def _convolve(self: Any, x: Tensor, window: Tensor | None, cache: Any, documents: Documents | None) -> Tensor:
    """Return the activated convolution of ``x`` (b, t, d) after the inputs in ``window``, and keep its last inputs.

    ``window`` holds as many inputs as the convolution is wide, one more than it needs.
    """
    conv, fused = self.conv1d, self.activation in ("silu", "swish")
    before = None if window is None else window[..., 1 - self.conv_kernel_size :]
    if before is not None and torch.is_grad_enabled():
        before = before.clone()  # what is overwritten below may be needed for gradients
    # Weights that accelerate's hooks move are there: force_accelerate_hooks has run them.
    if type(conv).forward is nn.Conv1d.forward and (_untouched(conv) or "_old_forward" in vars(conv)):
        rest: dict[str, Any] = {"weight": conv.weight.squeeze(1), "bias": conv.bias}
        rest["activation"] = "silu" if fused else None
        if documents is None:
            y, _ = ops.causal_conv1d(x, initial_state=before, **rest)
        else:
            y, _ = documents.run(ops.causal_conv1d, {"x": x}, before, **rest)
    else:
        y, fused = _call_convolution(conv, x, before, documents), False
    if cache is not None:
        if documents is not None:
            x = documents.last_document(x)
            if window is not None:
                documents.forget(window)
        cache.update_conv_state(x.mT, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
    return y if fused else self.act(y)


def _call_convolution(conv: nn.Module, x: Tensor, before: Tensor | None, documents: Documents | None) -> Tensor:
    """Call a convolution that is more than its weight; it pads both ends by its width - 1."""
    if documents is not None:
        raise ArgumentError(
            f"conv1d is a {type(conv).__name__} that must be called (an adapter, hooks, shards of its own), and a call "
            "takes no documents: they would see each other. Merge or remove that, or give each document its own row."
        )
    if before is not None:
        x = torch.cat([before.mT.to(x.dtype), x], 1)
    return conv(x.mT)[..., : x.shape[1]].mT[:, 0 if before is None else before.shape[-1] :]


def _scan(
    operator: Callable[..., Any], step: Callable[..., Any], step_: Callable[..., Any],
    tokens: dict[str, Tensor | None], state: Tensor | None, layer: int, cache: Any, documents: Documents | None,
    store: Callable[[Tensor], Tensor] = lambda state: state, **parameters: Any,
) -> Tensor:  # fmt: skip
    """Return ``y`` of a scan after ``state``, and keep the state that it ends with; ``store`` gives it its layout."""
    x = tokens["x"]
    assert x is not None
    if state is not None and x.shape[1] == 1 and documents is None:
        one = {name: None if v is None else v[:, 0] for name, v in tokens.items()}
        if not torch.is_grad_enabled():
            return step_(**one, state=state, **parameters)[0][:, None]
        y, after = step(**one, state=state.clone(), **parameters)
        state.copy_(after)
        return y[:, None]
    if documents is None:
        y, after = operator(**tokens, initial_state=state, **parameters)
    else:
        y, states = documents.run(operator, tokens, state, **parameters)
        after = documents.ends(states)
    if cache is not None:
        cache.update_recurrent_state(store(after), layer)
    return y
