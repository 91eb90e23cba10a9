"""One token per row on a GPU, without gradients: a layer of Mamba-2 in three launches, of Mamba-1 in four.

The kernels are those of ``refold.models.torch``: products with the norm before them and the convolution or the sum
after them, and the steps of the scans. They read weights directly and write to the tensors of transformers' cache.
`ready` says when that gives what the ordinary forward would give; else that one runs.

Several of these kernels may be under way at once, and each reads states before it waits for those before it. So
between two tokens of one layer another kind of kernel must run. In a model, the embedding is such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from refold.integrations import mixers
from refold.integrations.documents import cache_of
from refold.integrations.parts import DTYPES, original, quiet, shipped
from refold.models.torch.layers import kernels

BLOCKS = {
    "MambaBlock": "MambaRMSNorm", "FalconMambaBlock": "FalconMambaRMSNorm", "Mamba2Block": "Mamba2RMSNorm",
    "NemotronHBlock": "NemotronHRMSNorm",
}  # fmt: skip
"""Name of a block of transformers that is a norm, a layer and a sum -> the name of its norm."""
any_global_hook = getattr(_modules, "_has_any_global_hook", lambda: True)  # without the name, as if there were one


def _forward(ordinary: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the forward of a layer: by kernels if it is `ready`, else the ordinary one."""

    def forward(
        self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, *,
        cache_params: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        cache = cache if cache_params is None else cache_params
        held = ready(self, hidden_states, cache, attention_mask, kwargs)
        if held is None:
            return ordinary(self, hidden_states, cache, attention_mask, **kwargs)
        return _step_(self, hidden_states[:, 0], *held, dtype=hidden_states.dtype)

    return forward


mamba, mamba2 = _forward(mixers.mamba), _forward(mixers.mamba2)


def block(
    self: Any, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Return ``hidden_states + mixer(norm(hidden_states))`` of one of `BLOCKS`; None if it is not `ready`."""
    norm, mixer = self.norm, self.mixer
    if type(mixer).forward not in (mamba, mamba2) or not all(map(mixers._untouched, (mixer, norm))):
        return None
    kind = original(norm)
    if kind.__name__ not in BLOCKS.values() or not shipped(kind):
        return None
    cache = cache_of(kwargs) if cache is None else cache
    held = ready(mixer, hidden_states, cache, attention_mask, kwargs, norm=norm.weight)
    if held is None:
        return None
    x = hidden_states[:, 0].contiguous()
    dtype = torch.promote_types(
        x.dtype, torch.float32 if getattr(self, "residual_in_fp32", False) else mixer.out_proj.weight.dtype
    )
    return _step_(mixer, x, *held, dtype=dtype, norm=norm.weight, eps=norm.variance_epsilon, onto=x)


def ready(
    self: Any, x: Tensor, cache: Any, mask: Tensor | None, given: dict[str, Any], norm: Tensor | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return the window and the state of a layer if the kernels can read one token ``x (b, 1, d)`` a row; else None.

    Everything that an ordinary call would do must be what the kernels do: no gradients, nothing that watches or changes
    calls, no padding, no documents, every module as transformers made it, plain tensors where and as the kernels read
    them. ``norm`` is the weight of the norm before the layer, if the kernels are to compute that, too.
    """
    fused = None if any_global_hook() or not quiet(x) else kernels(x)
    if fused is None:
        return None
    if x.ndim != 3 or x.shape[1] != 1 or x.numel() == 0 or mask is not None or mixers._documents(given) is not None:
        return None
    if type(self.conv1d) is not nn.Conv1d or self.activation not in ("silu", "swish"):
        return None
    sizes = _mamba1(self) if hasattr(self, "x_proj") else _mamba2(self)
    states = _states(cache, self.layer_idx)
    if sizes is None or states is None:
        return None
    (window, state), dtype, width = states, self.in_proj.weight.dtype, self.conv_kernel_size
    linears = [self.in_proj, self.out_proj, *sizes.linears]
    taken = [module for module in linears if module is not getattr(self, "dt_proj", None)]
    if not mixers._untouched(self.conv1d) or not multiplies(
        fused, x[:, 0], linears, taken, {self.out_proj: sizes.group}
    ):
        return None
    shapes = [
        (window, (len(x), sizes.channels, width)),
        (state, (len(x), *sizes.state)),
        (self.in_proj.weight, (sizes.columns, x.shape[-1])),
        (self.conv1d.weight, (sizes.channels, 1, width)),
        (self.out_proj.weight, (x.shape[-1], sizes.inner)),
        *sizes.parameters,
    ]
    if norm is not None:
        shapes.append((norm, (x.shape[-1],)))
    if any(tuple(a.shape) != shape for a, shape in shapes):
        return None
    if not plain(x, *(a for a, _ in shapes), self.conv1d.bias):
        return None
    return states if (x if norm is None else norm).dtype == dtype and x.dtype in DTYPES else None


def is_head(module: Any) -> bool:
    """Whether a module is the last product of a model, onto so many words that no row of logits begins aligned."""
    return type(module) is nn.Linear and len(module.weight) % 8 != 0


def head(self: Any, x: Tensor) -> Tensor:
    """Forward of such a product ``x (b, 1, d)``: libraries take four times as long for it as to read its weights."""
    fused = kernels(x) if quiet(x) and x.shape[1:-1] == (1,) else None
    rows = x.reshape(-1, x.shape[-1])
    if fused is None or not plain(x, self.weight, self.bias) or not fused.takes(rows, self.weight, None):
        own: Tensor = original(self).forward(self, x)
        return own
    with torch.cuda.device_of(x):
        logits = torch.empty(len(rows), len(self.weight), dtype=x.dtype, device=x.device)
        fused.project(rows, self.weight, self.bias, None, 0.0, None, False, out=logits)
        return logits[:, None]


def plain(x: Tensor, *tensors: Tensor | None) -> bool:
    """Whether kernels can read all of these where ``x`` is: quantised and sharded weights are of other types."""
    return all(
        type(a) in (Tensor, nn.Parameter, nn.Buffer)
        and a.device == x.device
        and a.dtype in DTYPES
        and a.is_contiguous()
        for a in tensors
        if a is not None
    )


def multiplies(
    fused: Any, x: Tensor, linears: Sequence[Any], taken: Sequence[Any] | None = None,
    groups: Mapping[Any, int | None] | None = None,
) -> bool:  # fmt: skip
    """Whether products with rows ``x (b, size)`` are as transformers made them, of one dtype.

    The kernel for products takes those of ``taken``, all if None, with a norm over ``groups`` before them.
    """
    if any(type(module) is not nn.Linear or not mixers._untouched(module) for module in linears):
        return False
    if not plain(x, *(a for module in linears for a in (module.weight, module.bias))):
        return False
    if len({module.weight.dtype for module in linears}) != 1:
        return False
    given = groups or {}
    return all(fused.takes(x, m.weight, given.get(m)) for m in (linears if taken is None else taken))


class _Sizes(NamedTuple):
    """Sizes that the weights and states of a layer must have.

    Attributes:
        inner: Channels of the scan.
        channels: Channels of the convolution.
        columns: Channels of the first product.
        state: Sizes of a row's state.
        group: Channels that the norm before the last product takes together; None without that norm.
        linears: Products between the first and the last.
        parameters: Other parameters, with the shapes that they must have.
    """

    inner: int
    channels: int
    columns: int
    state: tuple[int, ...]
    group: int | None
    linears: tuple[nn.Module, ...]
    parameters: list[tuple[Any, tuple[int, ...]]]


def _mamba1(self: Any) -> _Sizes | None:
    """Return the sizes of a Mamba-1 layer; None if it is not as transformers made it."""
    inner, n, rank = self.intermediate_size, self.ssm_state_size, self.time_step_rank
    norms = _selection_norms(self)
    if norms is None or getattr(self.dt_proj, "bias", None) is None:
        return None
    parameters = [
        (self.A_log, (inner, n)), (self.D, (inner,)), (self.dt_proj.bias, (inner,)),
        (self.x_proj.weight, (rank + 2 * n, inner)), (self.dt_proj.weight, (inner, rank)),
        *zip(norms[1] or (), ((rank,), (n,), (n,)), strict=False),
    ]  # fmt: skip
    return _Sizes(inner, inner, 2 * inner, (inner, n), None, (self.x_proj, self.dt_proj), parameters)


def _mamba2(self: Any) -> _Sizes | None:
    """Return the sizes of a Mamba-2 layer; None if it is not as transformers made it."""
    factors, group = getattr(self, "mup_vector", None), None
    if factors is not None and self.in_proj.bias is not None:
        return None
    normed = getattr(self, "mamba_rms_norm", True)
    if normed:
        options = mixers.norm_options(self.norm)
        if options is None or options["norm_before_gate"]:
            return None
        group = options["group_size"]
    inner, channels = self.num_heads * self.head_dim, self.conv_dim
    if self.num_heads % self.n_groups or channels != inner + 2 * self.n_groups * self.ssm_state_size:
        return None
    state = self.num_heads, self.head_dim, self.ssm_state_size
    parameters: list[Any] = [(a, (self.num_heads,)) for a in (self.A_log, self.D, self.dt_bias)]
    columns = inner + channels + self.num_heads
    parameters += [(self.norm.weight, (inner,))] if normed else []
    parameters += [] if factors is None else [(factors, (1, 1, columns))]
    return _Sizes(inner, channels, columns, state, group, (), parameters)


def _selection_norms(self: Any) -> tuple[float | None, tuple[Tensor, Tensor, Tensor] | None] | None:
    """Return eps and weights of a Mamba-1 layer's norms of dt, B and C, as `steps.selective_scan_` takes them.

    None if the norms must be called: they were changed, or are unknown.
    """
    if not hasattr(self, "dt_layernorm"):
        return None, None
    norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
    kind = original(norms[0])
    if not shipped(kind) or not all(map(mixers._untouched, norms)):
        return None
    name = {"FalconMambaWeightlessRMSNorm": "eps", "JambaRMSNorm": "variance_epsilon"}.get(kind.__name__, "")
    eps = {getattr(norm, name, None) if original(norm) is kind else None for norm in norms}
    if len(eps) != 1 or None in eps:
        return None
    return eps.pop(), None if name == "eps" else tuple(norm.weight for norm in norms)  # type: ignore[return-value]


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
    eps: float = 0.0, onto: Tensor | None = None, scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return ``scale`` times a layer's result ``(b, 1, d)`` in ``dtype``, plus ``onto``; move its states on.

    The window of transformers' cache holds one input more than the convolution needs, and the first is never read.
    """
    fused: Any = kernels(x)
    one, weight = hasattr(self, "x_proj"), self.out_proj.weight
    convolution = (window[..., 1:], self.conv1d.weight[:, 0], self.conv1d.bias, None, 0 if one else weight.shape[1])
    with torch.cuda.device_of(x):
        factors = getattr(self, "mup_vector", None)
        projected = fused.project(
            x, self.in_proj.weight, self.in_proj.bias, norm, eps, None, False, convolution,
            scale=1.0 if factors is None else self.ssm_in_multiplier, factors=factors,
        )  # fmt: skip
        y, *last = (_mamba1_scan_ if one else _mamba2_scan_)(self, fused, projected, state)
        return fused.project(
            y, weight, self.out_proj.bias, *last, False, onto=onto, scale=scale,
            out=torch.empty(len(x), len(weight), dtype=dtype, device=x.device),
        )[:, None]  # fmt: skip


def _mamba1_scan_(
    self: Any, fused: Any, projected: Tensor, state: Tensor
) -> tuple[Tensor, Tensor | None, float, int | None]:
    """Return the gated output ``(b, d)`` of the scan's step, and weight, eps and group of a norm after it: none."""
    found = _selection_norms(self)
    assert found is not None
    x, z = projected.chunk(2, -1)
    sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    dt, B, C = fused.project(x, self.x_proj.weight, self.x_proj.bias, None, 0.0, None, False).split(sizes, -1)
    y = fused.selective_scan_(
        x, dt, B, C, z, self.dt_proj.weight, self.dt_proj.bias, self.A_log, self.D, state, None, *found
    )
    return y, None, 0.0, None


def _mamba2_scan_(
    self: Any, fused: Any, projected: Tensor, state: Tensor
) -> tuple[Tensor, Tensor | None, float, int | None]:
    """Return the gated output ``(b, h p)`` of the scan's step, and weight, eps and group of the norm after it."""
    inner, groups = self.num_heads * self.head_dim, (self.n_groups, self.ssm_state_size)
    z, inputs, B, C, dt = projected.split([inner, inner, *2 * [groups[0] * groups[1]], self.num_heads], -1)
    y = fused.ssd_(
        torch.unflatten(inputs, -1, state.shape[1:3]), torch.unflatten(B, -1, groups), torch.unflatten(C, -1, groups),
        dt, torch.unflatten(z, -1, state.shape[1:3]), self.A_log, self.D, self.dt_bias, tuple(self.time_step_limit),
        state, None,
    )  # fmt: skip
    if not getattr(self, "mamba_rms_norm", True):
        return y.flatten(-2), None, 0.0, None
    options = mixers.norm_options(self.norm)
    assert options is not None
    return y.flatten(-2), self.norm.weight, options["eps"], options["group_size"]
