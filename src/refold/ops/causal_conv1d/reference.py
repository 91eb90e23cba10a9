"""The definition of the causal depthwise convolution: NumPy, float64, one token after the other."""

from __future__ import annotations

import numpy as np
from numpy import ndarray

from refold.ops.ssd.reference import silu


def causal_conv1d(
    x: ndarray, weight: ndarray, bias: ndarray | None = None, initial_state: ndarray | None = None,
    cu_seqlens: ndarray | None = None, activation: str | None = None,
) -> tuple[ndarray, ndarray]:  # fmt: skip
    """Return ``y`` and the last ``w - 1`` inputs of each sequence."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    batch, seqlen, channels = x.shape
    ends = [seqlen] * batch if cu_seqlens is None else cu_seqlens[1:].tolist()
    starts = [0] * batch if cu_seqlens is None else cu_seqlens[:-1].tolist()

    y = np.zeros_like(x)
    states = np.zeros((len(starts), channels, weight.shape[1] - 1))
    if initial_state is not None:
        states[:] = initial_state
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row = k if cu_seqlens is None else 0
        for t in range(start, end):
            window = np.concatenate([states[k], x[row, t][:, None]], axis=1)  # (d, w)
            y[row, t] = np.sum(window * weight, axis=1)
            states[k] = window[:, 1:]
    if bias is not None:
        y += bias.astype(np.float64)
    return silu(y) if activation == "silu" else y, states


def causal_conv1d_step(x, weight, state, bias=None, activation=None):
    """Return ``y`` and the window after one token, or a few if ``x`` has a time axis."""
    one = x.ndim == 2
    y, state = causal_conv1d(x[:, None] if one else x, weight, bias, state, activation=activation)
    return y[:, 0] if one else y, state
