"""The definition of the causal depthwise convolution."""

from __future__ import annotations

from refold.ops.definition import Array, library, one_token, silu, walk, wide


def causal_conv1d(
    x: Array, weight: Array, bias: Array | None = None, initial_state: Array | None = None,
    cu_seqlens: Array | None = None, activation: str | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Return ``y`` and the last ``w - 1`` inputs of each sequence."""
    x, weight, bias, initial_state = wide(x, weight, bias, initial_state)

    def step(row: int, t: int, before: Array) -> tuple[Array, Array]:
        window = library(x).concatenate([before, x[row, t][:, None]], 1)  # (d, w)
        return (window * weight).sum(1), window[:, 1:]

    y, states = walk(x, cu_seqlens, initial_state, (x.shape[2], weight.shape[1] - 1), step)
    y = y if bias is None else y + bias
    return silu(y) if activation == "silu" else y, states


def causal_conv1d_step(x, weight, state, bias=None, activation=None):
    """Return ``y`` and the window after one token, or a few if ``x`` has a time axis."""
    rest = {"weight": weight, "bias": bias, "initial_state": state, "activation": activation}
    return one_token(causal_conv1d, {"x": x}, x.ndim == 2, **rest)
