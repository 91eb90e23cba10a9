"""The forwards that replace those of transformers' recurrent layers.

One forward serves every Mamba-2 layer, one every Mamba-1 layer, one Zamba's, one every delta rule, and one lightning
attention. They read the layer's own attributes and write the cache that the layer would write, in its layout, so that
both may take turns. Projections are called as modules, so LoRA, quantisation, sharding and hooks work. Weights are read
directly only if a module is exactly as transformers made it: a norm, a convolution, the gate of decays, or the product
of ``dt_proj``.

They differ from the originals in four points. Step sizes are clipped in decoding as in prefill. A Mamba-1 layer
continues from a cached state when it reads several tokens. Documents of a pack do not see each other. Padding behind
a row's first token changes nothing that comes after it (`refold.integrations.padding`).

Layers of transformers call their cache ``cache`` from 5.24 on, and ``cache_params`` or ``past_key_values`` before.
Forwards that take a layer's place take each. A `Mixer` names all that its forward knows, and a layer with anything else
is not replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refold import ops
from refold.compat.documents import Documents, run_apart
from refold.compat.slots import to_read
from refold.errors import ArgumentError
from refold.integrations.documents import current, read, shared
from refold.integrations.padding import Padding
from refold.integrations.parts import shipped
from refold.ops.torch.cuts import summed
from refold.ops.torch.nodes import exporting_to_onnx
from refold.parallel import Cut

try:
    from transformers.integrations.accelerate import force_accelerate_hooks
except ImportError:  # then nothing offloads weights by its hooks

    def force_accelerate_hooks(child_module_names: str | list[str]) -> Callable[..., Any]:
        """Return the function as it is."""
        return lambda forward: forward


_TAKES = frozenset({"hidden_states", "cache", "cache_params", "attention_mask"})


class Mixer(NamedTuple):
    """What takes the place of a layer's forward, and what it knows."""

    forward: Callable[..., Any]
    has: frozenset[str]
    """Parts of layers with parameters or buffers that the forward knows."""
    takes: frozenset[str] = _TAKES
    """Arguments of layers that it knows, besides those of ``**kwargs`` that separate documents."""

    def unknown_parts(self, layer: nn.Module) -> list[str]:
        """Return the names of weights that the forward would not use."""
        inside = {name.split(".")[0] for name in self.has if "." in name}
        names = (name.split(".") for name, _ in chain(layer.named_parameters(), layer.named_buffers()))
        return sorted({".".join(name[: 1 + (name[0] in inside)]) for name in names} - self.has)

    def unknown_arguments(self, forward: Callable[..., Any]) -> list[str]:
        """Return the names of arguments of a layer's own forward that this one would not use."""
        takes = signature(forward).parameters.values()
        return [p.name for p in takes if p.kind is not p.VAR_KEYWORD and p.name not in {"self", *self.takes}]


MAMBA = frozenset({
    "A_log", "D", "dt_bias", "in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "norm", "dt_layernorm",
    "b_layernorm", "c_layernorm", "mup_vector", "x_proj_weight", "dt_proj_weight", "dt_proj_bias", "parametrizations",
})  # fmt: skip
"""The parts of Mamba layers."""


class DeltaRule(NamedTuple):
    """The names that a family gives to the parts of its delta rule; spaces part layers that follow each other."""

    qkv: tuple[str, ...]
    z: str
    """What gates the outputs."""
    b: str
    a: str
    """What decays are made of, inside of ``gate``."""
    norm: str
    out: str
    gate: str = ""
    """What has ``a``, ``A_log`` and ``dt_bias``: a module that returns log decays per key, or, if empty, the layer."""

    def mixer(self) -> Mixer:
        """Return the forward of the family's layers."""
        inside = f"{self.gate}." if self.gate else ""
        outside = " ".join([*self.qkv, self.z, self.b, self.norm, self.out, "conv1d parametrizations"])
        has = {*outside.split(), *(inside + name for name in [*self.a.split(), "A_log", "dt_bias"])}
        return Mixer(_layer(force_accelerate_hooks("conv1d")(partial(_delta_rule, self))), frozenset(has))


def _layer(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that takes its cache under each name that releases of transformers have for it.

    It is the layer's own while ``torch.onnx`` exports: ONNX has none of refold's operators.
    """

    @wraps(forward)
    def run(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if exporting_to_onnx() and (own := getattr(type(self), "_refold_original", None)) is not None:
            return own.forward(self, hidden_states, *args, **kwargs)
        for name in ("cache_params", "past_key_values"):
            if (cache := kwargs.pop(name, None)) is not None:
                kwargs["cache"] = cache
        return forward(self, hidden_states, *args, **kwargs)

    return run


@_layer
@force_accelerate_hooks("conv1d")
def mamba2(
    self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Forward of a Mamba-2 layer."""
    dtype, (hidden_states, call) = hidden_states.dtype, _begin(self, hidden_states, cache, attention_mask, kwargs)
    if hasattr(self, "mup_vector"):  # Falcon-H1
        projected = self.in_proj(hidden_states * self.ssm_in_multiplier) * self.mup_vector
    else:
        projected = self.in_proj(hidden_states)
    z, xBC, dt = projected.split([self.intermediate_size, self.conv_dim, self.num_heads], -1)
    xBC = call.without_padding(_convolve(self, xBC, call))
    states = self.n_groups * self.ssm_state_size
    x, B, C = xBC.split([self.intermediate_size, states, states], -1)

    normed = getattr(self, "mamba_rms_norm", True)  # Falcon-H1 may have no norm; the scan gates then
    y, _ = _scan(
        ops.ssd, ops.ssd_step_,
        {
            "x": torch.unflatten(x, -1, (self.num_heads, self.head_dim)), "dt": dt,
            "B": torch.unflatten(B, -1, (self.n_groups, -1)), "C": torch.unflatten(C, -1, (self.n_groups, -1)),
            "z": None if normed else torch.unflatten(z, -1, (self.num_heads, self.head_dim)),
        },
        call.state, call,
        A=_rates(self.A_log), D=self.D, dt_bias=self.dt_bias, dt_limit=tuple(self.time_step_limit),
    )  # fmt: skip
    y = y.flatten(-2)
    return call.end(self.out_proj((_gated_norm(self.norm, y, z) if normed else y).to(dtype)))


@_layer
@force_accelerate_hooks("conv1d")
def mamba(
    self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Forward of a Mamba-1 layer, with norms of B, C and dt where the layer has them (Falcon Mamba, Jamba)."""
    dtype, (hidden_states, call) = hidden_states.dtype, _begin(self, hidden_states, cache, attention_mask, kwargs)
    x, z = self.in_proj(hidden_states).chunk(2, -1)
    x = call.without_padding(_convolve(self, x, call))
    dt, B, C = self.x_proj(x).split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], -1)
    if hasattr(self, "dt_layernorm"):
        dt, B, C = self.dt_layernorm(dt), self.b_layernorm(B), self.c_layernorm(C)
    dt, bias = _apart(self.dt_proj, dt)
    y, _ = _scan(
        ops.selective_scan, ops.selective_scan_step_,
        {"x": x, "dt": dt, "B": B, "C": C, "z": z}, call.state, call, A=_rates(self.A_log), D=self.D, dt_bias=bias,
    )  # fmt: skip
    return call.end(self.out_proj(y.to(dtype)))


@_layer
@force_accelerate_hooks("conv1d")
def zamba(
    self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Forward of Zamba's Mamba-1 layer: heads with projections of their own are groups of one scan."""
    dtype, (hidden_states, call) = hidden_states.dtype, _begin(self, hidden_states, cache, attention_mask, kwargs)
    projected = torch.unflatten(self.in_proj(hidden_states), -1, (-1, 2))
    x, z = projected[..., 0].contiguous(), projected[..., 1].contiguous()  # they take turns, channel by channel
    x = call.without_padding(_convolve(self, x, call))
    heads = torch.unflatten(x, -1, (self.n_mamba_heads, -1))
    parameters = torch.einsum("bthp,hrp->bthr", heads, self.x_proj_weight)
    dt, B, C = parameters.split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], -1)
    dt = torch.einsum("bthr,hpr->bthp", dt, self.dt_proj_weight).flatten(-2)
    y, _ = _scan(
        ops.selective_scan, ops.selective_scan_step_,
        {"x": x, "dt": dt, "B": B, "C": C, "z": z}, None if call.state is None else call.state.flatten(1, 2), call,
        A=_rates(self.A_log).flatten(0, 1), D=self.D.flatten(), dt_bias=self.dt_proj_bias.flatten(),
        store=lambda state: torch.unflatten(state, 1, (self.n_mamba_heads, -1)),
    )  # fmt: skip
    return call.end(self.out_proj(y.to(dtype)))


def _delta_rule(
    names: DeltaRule, self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Forward of a layer with a delta rule, gated per head or per key. Tokens of padding neither write nor decay."""
    dtype, (x, call) = hidden_states.dtype, _begin(self, hidden_states, cache, attention_mask, kwargs)
    if hasattr(self, "fix_query_key_value_ordering"):  # Qwen3-Next
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        qkv, z = torch.cat([part.flatten(2) for part in (q, k, v)], -1), z.flatten(2)
    else:
        parts = [getattr(self, name)(x) for name in names.qkv]
        qkv = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        z, b, a = _through(self, names.z, x), _through(self, names.b, x), None
    g, gate = _decays(self, names, x, a, call.mask)
    if call.mask is not None:  # a strength of zero
        b = b.masked_fill(call.mask[..., None] == 0, -torch.inf)
    heads, values = b.shape[-1], z.shape[-1]
    keys, size = (qkv.shape[-1] - values) // 2, getattr(self, "head_k_dim", values // heads)
    q, k, v = _convolve(self, qkv, call).split([keys, keys, values], -1)
    y, _ = _scan(
        ops.delta_rule, ops.delta_rule_step_,
        {
            "q": torch.unflatten(q, -1, (-1, size)), "k": torch.unflatten(k, -1, (-1, size)),
            "v": torch.unflatten(v, -1, (heads, -1)), "g": g, "beta": b,
        },
        call.state, call, beta_limit=2.0 if getattr(self, "allow_neg_eigval", False) else 1.0, normalize=True, **gate,
    )  # fmt: skip
    normed = getattr(self, names.norm)(y.flatten(0, 2), z.reshape(-1, values // heads))
    return call.end(_through(self, names.out, normed.view(*y.shape[:2], -1).to(dtype)))


def _decays(
    self: Any, names: DeltaRule, x: Tensor, a: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """Return log decays, or the gate that they come from and the parameters that make them of it; none at padding."""
    padding = None if mask is None else mask[..., None] == 0
    if not names.gate:
        a = _through(self, names.a, x) if a is None else a
        a = a if padding is None else a.masked_fill(padding, -torch.inf)
        return a, {"A_log": self.A_log, "dt_bias": self.dt_bias}
    gate = getattr(self, names.gate)
    if padding is not None:  # a bounded gate of -inf has no gradient
        return gate(x).masked_fill(padding[..., None], 0), {}
    if not (_untouched(gate) and shipped(type(gate))):
        return gate(x), {}
    bound = getattr(gate, "safe_gate_lower_bound", getattr(gate, "lower_bound", None))
    return torch.unflatten(_through(gate, names.a, x), -1, (gate.num_heads, -1)), {
        "A_log": gate.A_log.flatten(), "dt_bias": gate.dt_bias.view(gate.num_heads, -1),
        "lower_bound": bound if getattr(gate, "safe_gate", True) else None,
    }  # fmt: skip


def _through(module: Any, names: str, x: Tensor) -> Tensor:
    """Pass ``x`` through layers of a module, one after the other."""
    for name in names.split():
        x = getattr(module, name)(x)
    return x


@_layer
def lightning(
    self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Tensor | None = None,
    cache: Any = None, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Forward of lightning attention (MiniMax): a scan with constant decays. Padding neither writes nor decays."""
    dtype, (x, call) = hidden_states.dtype, _begin(self, hidden_states, cache, attention_mask, kwargs)
    qkv = call.without_padding(self.act_fn(self.qkv_proj(x)))
    q, k, v = torch.unflatten(qkv, -1, (self.num_attention_heads, -1)).split(self.head_dim, -1)
    steps = qkv.new_ones(*v.shape[:3], dtype=torch.promote_types(dtype, torch.float32))
    y, state = _scan(
        ops.ssd, ops.ssd_step_, {"x": v, "dt": call.without_padding(steps), "B": k, "C": q},
        None if call.state is None else call.state.mT, call, A=-self.slope_rate.flatten(),
        store=lambda state: state.mT,
    )  # fmt: skip
    y = torch.sigmoid(self.output_gate(x)) * self.norm(y.flatten(-2))
    return call.end(self.out_proj(y.to(dtype))), state.mT


LIGHTNING = Mixer(
    lightning,
    frozenset(
        {"norm", "qkv_proj", "out_proj", "output_gate", "slope_rate", "query_decay", "key_decay", "diagonal_decay"}
    ),
    _TAKES | {"position_embeddings", "past_key_values"},
)


@dataclass(frozen=True)
class _Call:
    """What one call of a layer goes on from, and what it keeps apart."""

    layer: int
    cache: Any
    window: Tensor | None
    """``(b, d, w)``: the inputs of the convolution that a cache holds, one more than it needs."""
    state: Tensor | None
    documents: Documents | None
    padding: Padding | None
    mask: Tensor | None
    """``(b, t)``, zero at padding."""
    group: Cut | None
    """The ranks that share the tokens."""

    def without_padding(self, x: Tensor) -> Tensor:
        """Return ``x`` (b, t, d) with zeros at padding."""
        return x if self.mask is None else torch.where(self.mask.bool()[..., None], x, 0)

    def end(self, y: Tensor) -> Tensor:
        """Return ``y`` with each token where the caller had it."""
        return y if self.padding is None else self.padding.back(y)


def _begin(self: Any, x: Tensor, cache: Any, mask: Tensor | None, given: dict[str, Any]) -> tuple[Tensor, _Call]:
    """Return a layer's inputs without padding, and what this call goes on from."""
    documents, group = _documents(given), shared()
    window, state = _cached(cache, self.layer_idx)
    if group is not None and state is not None:
        raise ArgumentError(f"{type(self).__name__}: ranks do not go on from a cache. Undo accelerate to read more.")
    window, state = (None if held is None else to_read(held) for held in (window, state))
    padding = Padding.of(mask, x.shape[1], state, cache is not None)
    mask = None if mask is None else mask[:, -x.shape[1] :]
    if padding is not None:
        assert mask is not None
        x, mask = padding.behind(x), padding.behind(mask)
        documents = None if documents is None else documents.without(padding.stays)
    call = _Call(self.layer_idx, cache, window, state, documents, padding, mask, group)
    return call.without_padding(x), call


def _documents(given: dict[str, Any]) -> Documents | None:
    """Return the documents of the call of the model; of a layer that is called by itself, its own."""
    found = current()
    return read(given, positions=False) if found is None else found


def _rates(A_log: Tensor) -> Tensor:
    return -torch.exp(A_log.to(torch.promote_types(A_log.dtype, torch.float32)))


def _gated_norm(norm: Any, y: Tensor, z: Tensor) -> Tensor:
    """Return ``norm(y, z)``, in one operator where the norm is one of transformers' own, as it was made."""
    options = norm_options(norm)
    return norm(y, z) if options is None else ops.gated_rmsnorm(y, z, norm.weight, **options)


def norm_options(norm: Any) -> dict[str, Any] | None:
    """Return the options with which `ops.gated_rmsnorm` is this norm; None if the norm must be called."""
    kind = type(norm)
    if not (shipped(kind) and kind.__name__.endswith("RMSNormGated")):
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


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module of PyTorch keeps the hooks of its calls."""


def _untouched(module: nn.Module) -> bool:
    """Whether calling a module runs the forward of its class and nothing else."""
    # A PyTorch without one of these names may have hooks elsewhere.
    return "forward" not in vars(module) and not any(getattr(module, name, True) for name in HOOKS)


def _cached(cache: Any, layer: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the inputs of the convolution and the state that a cache holds; None of each if it holds nothing yet."""
    if cache is None:
        return None, None
    if hasattr(cache, "get_linear_cache"):  # MiniMax, without a convolution
        return None, cache.get_linear_cache(layer)
    if hasattr(cache, "get_conv_state"):  # from 5.21 on
        return cache.get_conv_state(layer), cache.get_recurrent_state(layer)
    if not cache.has_previous_state(layer, state_idx=0):
        return None, None
    held = cache.layers[layer]
    return held.conv_states[0], held.recurrent_states[0]


def _convolve(self: Any, x: Tensor, call: _Call) -> Tensor:
    """Return the activated convolution of ``x`` (b, t, d) after the inputs that are held, and keep its last inputs."""
    conv, fused, width = self.conv1d, self.activation in ("silu", "swish"), self.conv_kernel_size
    window, documents = call.window, call.documents
    before = None if window is None else window[..., window.shape[-1] - (width - 1) :]
    last: Any = None
    # Weights that accelerate's hooks move are there: force_accelerate_hooks has run them.
    if type(conv).forward is nn.Conv1d.forward and (_untouched(conv) or "_old_forward" in vars(conv)):
        rest: dict[str, Any] = {"weight": conv.weight.squeeze(1), "bias": conv.bias, "group": call.group}
        rest["activation"] = "silu" if fused else None
        y, last = run_apart(ops.causal_conv1d, documents, {"x": x}, before, **rest)
    else:
        y, fused = _call_convolution(conv, x, before, documents, call.group), False
    if call.cache is not None:
        plain = documents is None and call.padding is None
        kept = x.mT if plain else _last_inputs(x, call, width)
        if call.group is not None:  # the first input that a cache holds is never read
            kept = F.pad(summed(call.group, last), (1, 0))
        call.cache.update_conv_state(kept, call.layer, conv_kernel_size=width)
    return y if fused else _activation(self)(y)


def _activation(self: Any) -> Callable[[Tensor], Tensor]:
    """Find the activation of a layer; one of gated DeltaNet keeps only its name."""
    if hasattr(self, "act"):
        return self.act  # type: ignore[no-any-return]
    from transformers.activations import ACT2FN

    return ACT2FN[self.activation]  # type: ignore[no-any-return]


def _last_inputs(x: Tensor, call: _Call, width: int) -> Tensor:
    """Return of each row the last inputs (b, d, w) of its last document, after zeros if it has fewer."""
    held = x.new_zeros(len(x), width, x.shape[-1]) if call.window is None else call.window[..., -width:].mT
    place = torch.arange(-width, 0, device=x.device).expand(len(x), -1)
    place = place + (x.shape[1] if call.padding is None else call.padding.count.to(x.device)[:, None])
    kept = torch.cat([held.to(x.dtype), x], 1).take_along_dim(place[..., None] + width, 1)
    if call.documents is not None:
        begins = call.documents.last_begins(x.shape[1]).to(x.device)
        kept = torch.where((place >= begins[:, None])[..., None], kept, 0)
    return kept.mT


def _call_convolution(
    conv: nn.Module, x: Tensor, before: Tensor | None, documents: Documents | None, group: Cut | None
) -> Tensor:
    """Call a convolution that is more than its weight; it pads both ends by its width - 1."""
    if documents is not None or group is not None:
        raise ArgumentError(
            f"conv1d is a {type(conv).__name__} that must be called (an adapter, hooks, shards of its own), and a call "
            "takes no documents, which would see each other, and no ranks. Merge or remove that, or give each document "
            "its own row, on one device."
        )
    if before is not None:
        x = torch.cat([before.mT.to(x.dtype), x], 1)
    return conv(x.mT)[..., : x.shape[1]].mT[:, 0 if before is None else before.shape[-1] :]


def _scan(
    operator: Callable[..., Any], step_: Callable[..., Any], tokens: dict[str, Tensor | None], state: Tensor | None,
    call: _Call, store: Callable[[Tensor], Tensor] = lambda state: state, **parameters: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``y`` of a scan after ``state``, and the state that it ends with.

    The cache keeps that one; ``store`` gives it its layout. With ``dt_bias``, ``dt`` is not yet step sizes.
    """
    seqlen, documents = next(v.shape[1] for v in tokens.values() if v is not None), call.documents
    if "dt" in tokens and "dt_bias" in parameters and call.padding is not None:  # no step is taken there
        steps = _step_sizes(tokens["dt"], parameters.pop("dt_bias"), *parameters.pop("dt_limit", ()))
        tokens = tokens | {"dt": call.without_padding(steps)}
    elif "dt" in tokens and "dt_bias" in parameters:
        parameters["dt_softplus"] = True
    if state is not None and seqlen == 1 and documents is None and _may_change(state):
        one = {name: None if v is None else v[:, 0] for name, v in tokens.items()}
        y, state = step_(**one, state=state, **parameters)  # the cache's own state
        return y[:, None], state
    parameters["group"] = call.group
    y, after = run_apart(operator, documents, tokens, state, **parameters)
    if call.cache is not None:
        after = after if call.group is None else summed(call.group, after)
        if hasattr(call.cache, "set_linear_cache"):
            call.cache.set_linear_cache(call.layer, store(after))
        else:
            call.cache.update_recurrent_state(store(after), call.layer)
    return y, after


def _may_change(state: Tensor) -> bool:
    """Whether a state that a cache holds may be overwritten: nothing needs a gradient, and its mode allows it."""
    if torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or not state.is_inference()


def _step_sizes(dt: Any, bias: Tensor | None, low: float = 0.0, high: float = math.inf) -> Tensor:
    """Return the step sizes ``clip(softplus(dt + bias))`` that the scans would take, in their precision."""
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    return F.softplus(dt if bias is None else dt + bias).clamp(low, high)
