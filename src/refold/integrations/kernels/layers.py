"""Layers whose forwards have exactly the parameters of transformers' functions, as ``kernels`` requires.

A caller may pass further keywords. Only those that separate documents have a meaning here, and they are used.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from refold import ops
from refold.compat.causal_conv1d import causal_conv1d_update as update_convolution
from refold.compat.documents import run_apart
from refold.compat.mamba_ssm import selective_scan_fn as scan_selectively
from refold.compat.mamba_ssm import selective_state_update as update_state
from refold.integrations.documents import read

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "mamba_chunk_scan_combined",
    "selective_scan_fn",
    "selective_state_update",
]


class causal_conv1d_fn(nn.Module):
    """The convolution of a prompt."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return the convolution, ``(b, d, t)``."""
        rest: dict[str, Any] = {"weight": weight, "bias": bias, "activation": activation and "silu"}
        return run_apart(ops.causal_conv1d, read(kwargs), {"x": hidden_states.mT}, None, **rest)[0].mT


class causal_conv1d_update(nn.Module):
    """The convolution of a token."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the convolution, ``(b, d, t)``, and keep the inputs."""
        return update_convolution(hidden_states, conv_state, weight, bias, activation)


class selective_state_update(nn.Module):
    """A token of either scan."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self, state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return the token's output, and keep the state."""
        return update_state(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)


class mamba_chunk_scan_combined(nn.Module):
    """The Mamba-2 scan of a prompt."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
        D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
        dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return the output, and the last state if asked for."""
        tokens: dict[str, Any] = {"x": hidden_states, "dt": dt, "B": B, "C": C, "z": kwargs.get("z")}
        rest: dict[str, Any] = {"A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
        rest["dt_limit"] = tuple(dt_limit)
        y, state = run_apart(ops.ssd, read(kwargs), tokens, initial_states, **rest)
        return (y, state) if return_final_states else y


class selective_scan_fn(nn.Module):
    """The Mamba-1 scan of a prompt."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
        return_last_state: bool = False, use_mambapy: bool = False, use_associative_scan: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Return the output, ``(b, d, t)``, and the last state if asked for."""
        return scan_selectively(
            hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state
        )  # fmt: skip


class chunk_gated_delta_rule(nn.Module):
    """The gated delta rule of a prompt."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the output, and the last state, ``(b, h, n, p)``, if asked for."""
        return _delta_rule(
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, kwargs
        )  # fmt: skip


class fused_recurrent_gated_delta_rule(nn.Module):
    """The gated delta rule of a token."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the output, and the last state, ``(b, h, n, p)``, if asked for."""
        return _delta_rule(
            query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, kwargs
        )  # fmt: skip


class chunk_kda(chunk_gated_delta_rule):
    """Kimi delta attention of a prompt: the same with log decays per key."""


class fused_recurrent_kda(fused_recurrent_gated_delta_rule):
    """Kimi delta attention of a token."""


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, keep: bool, normalize: bool,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    tokens: dict[str, Any] = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    y, after = run_apart(ops.delta_rule, read(kwargs), tokens, state, normalize=normalize)
    return y, after if keep else None
