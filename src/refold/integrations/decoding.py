"""One token per row on a GPU, without gradients: a Mamba-2 layer in three launches, as in a lean model.

The kernels are those of ``refold.models.torch``: a product with the norm before it and the convolution after it, the
scan's step, and a product with the norm before it and the sum after it. They read weights directly and write to the
tensors of transformers' cache. `ready` says when that gives what the ordinary forward would give; else that one runs.

Several of these kernels may be under way at once, and each reads states before it waits for those before it. So
between two tokens of one layer another kind of kernel must run. In a model, the embedding and the head are such.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from refold.integrations import mixers
from refold.models.torch.layers import kernels
from refold.ops.torch import private

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_any_global_hook = getattr(_modules, "_has_any_global_hook", lambda: True)  # without the name, as if there were one


def mamba2(
    self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Forward of a Mamba-2 layer: in three launches if it is `ready`, else `mixers.mamba2`."""
    held = ready(self, hidden_states, cache_params, attention_mask, kwargs)
    if held is None:
        return mixers.mamba2(self, hidden_states, cache_params, attention_mask, **kwargs)
    return _step_(self, hidden_states[:, 0], *held, dtype=hidden_states.dtype)


def mamba2_block(
    self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Return ``hidden_states + mixer(norm(hidden_states))`` of a ``Mamba2Block``; None if it is not `ready`."""
    norm, mixer = self.norm, self.mixer
    if type(mixer).forward is not mamba2 or not all(map(mixers._untouched, (mixer, norm))):
        return None
    if type(norm).__name__ != "Mamba2RMSNorm" or not type(norm).__module__.startswith("transformers.models."):
        return None
    held = ready(mixer, hidden_states, cache_params, attention_mask, kwargs, norm=norm.weight)
    if held is None:
        return None
    x = hidden_states[:, 0].contiguous()
    dtype = torch.promote_types(x.dtype, torch.float32 if self.residual_in_fp32 else mixer.out_proj.weight.dtype)
    return _step_(mixer, x, *held, dtype=dtype, norm=norm.weight, eps=norm.variance_epsilon, onto=x)


def is_mamba2_block(kind: type) -> bool:
    """Whether blocks of this class run the forward of transformers' ``Mamba2Block``."""
    bases = [base for base in kind.__mro__ if base.__name__ == "Mamba2Block"]
    return any(
        base.__module__.startswith("transformers.models.") and kind.forward is base.forward  # type: ignore[attr-defined]
        for base in bases
    )


def ready(
    self: Any, x: Tensor, cache: Any, mask: Tensor | None, given: dict[str, Any], norm: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return the window and the state of a layer if the kernels can read one token ``x (b, 1, d)`` a row; else None.

    Everything that an ordinary call would do must be what the kernels do: no gradients, nothing that watches or changes
    calls, no padding, no documents, every module as transformers made it, plain tensors where and as the kernels read
    them. ``norm`` is the weight of the norm before the layer, if the kernels are to compute that, too.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or private.watched() or _any_global_hook():
        return None
    fused = kernels(x)
    if fused is None or type(x) is not Tensor or torch.is_autocast_enabled(x.device.type):
        return None
    if x.ndim != 3 or x.shape[1] != 1 or x.numel() == 0 or mask is not None or mixers._documents(given) is not None:
        return None

    before, conv, after = self.in_proj, self.conv1d, self.out_proj
    if type(before) is not nn.Linear or type(conv) is not nn.Conv1d or type(after) is not nn.Linear:
        return None
    if not all(map(mixers._untouched, (before, conv, after))) or self.activation not in ("silu", "swish"):
        return None
    if getattr(self, "ssm_in_multiplier", None) is not None or not getattr(self, "mamba_rms_norm", True):
        return None
    options = mixers._norm_options(self.norm)
    if options is None or options["norm_before_gate"]:
        return None

    states = _states(cache, self.layer_idx)
    if states is None:
        return None
    window, state = states
    heads = (self.A_log, self.D, self.dt_bias)
    biases = [b for b in (before.bias, conv.bias, after.bias) if b is not None]
    weights = [*heads, *biases, conv.weight, self.norm.weight, before.weight, after.weight, window, state]
    if norm is not None:
        weights.append(norm)
    device, dtype = x.device, before.weight.dtype
    for a in weights:  # quantised and sharded weights are of other types
        if type(a) not in (Tensor, nn.Parameter) or a.device != device or a.dtype not in DTYPES:
            return None
        if not a.is_contiguous():
            return None
    if after.weight.dtype != dtype or (x if norm is None else norm).dtype != dtype or x.dtype not in DTYPES:
        return None

    batch, width, inner = len(x), self.conv_kernel_size, self.num_heads * self.head_dim
    groups = self.n_groups * self.ssm_state_size
    shapes = [
        (window, (batch, self.conv_dim, width)),
        (state, (batch, self.num_heads, self.head_dim, self.ssm_state_size)),
        (before.weight, (inner + self.conv_dim + self.num_heads, x.shape[-1])),
        (conv.weight, (inner + 2 * groups, 1, width)),
        (self.norm.weight, (inner,)),
        (after.weight, (x.shape[-1], inner)),
        *((a, (self.num_heads,)) for a in heads),
    ]
    if self.num_heads % self.n_groups or self.conv_dim != inner + 2 * groups:
        return None
    if norm is not None:
        shapes.append((norm, (x.shape[-1],)))
    if any(tuple(a.shape) != shape for a, shape in shapes):
        return None
    taken = fused.takes(x[:, 0], before.weight, None) and fused.takes(x[:, 0], after.weight, options["group_size"])
    return (window, state) if taken else None


def _states(cache: Any, layer: int) -> tuple[Tensor, Tensor] | None:
    """Return the tensors that a cache keeps of a layer, if moving them on in place is all that an update does."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return None
    window, state = mixers._cached(cache, layer)
    held = layers[layer]
    # A cache that can go back grows with each token.
    if window is None or state is None or getattr(held, "record_past", True):
        return None
    return (window, state) if held.conv_states[0] is window and held.recurrent_states[0] is state else None


def _step_(
    self: Any, x: Tensor, window: Tensor, state: Tensor, *, dtype: torch.dtype, norm: Tensor | None = None,
    eps: float = 0.0, onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return a layer's result ``(b, 1, d)`` in ``dtype``, with ``onto`` added, and move its window and state on.

    The window of transformers' cache holds one input more than the convolution needs, and the first is never read.
    """
    fused: Any = kernels(x)
    inner, groups = self.num_heads * self.head_dim, (self.n_groups, self.ssm_state_size)
    taps, options = self.conv1d.weight[:, 0], mixers._norm_options(self.norm)
    assert options is not None
    with torch.cuda.device_of(x):
        projected = fused.project(
            x, self.in_proj.weight, self.in_proj.bias, norm, eps, None, False,
            (window[..., 1:], taps, self.conv1d.bias, None, inner),
        )  # fmt: skip
        z, inputs, B, C, dt = projected.split([inner, inner, *2 * [groups[0] * groups[1]], self.num_heads], -1)
        y = fused.ssd_(
            inputs.unflatten(-1, state.shape[1:3]), B.unflatten(-1, groups), C.unflatten(-1, groups), dt,
            z.unflatten(-1, state.shape[1:3]), self.A_log, self.D, self.dt_bias, tuple(self.time_step_limit), state,
            None,
        )  # fmt: skip
        weight = self.out_proj.weight
        return fused.project(
            y.flatten(-2), weight, self.out_proj.bias, self.norm.weight, options["eps"], options["group_size"], False,
            onto=onto, out=torch.empty(len(x), len(weight), dtype=dtype, device=x.device),
        )[:, None]  # fmt: skip
