"""The inputs of a recurrent mixer: a projection, some of whose parts pass a convolution.

Parameters spread over devices hold the projection in parts (`refold.models.jax.sharding`).
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from refold import ops
from refold.models.configs import Mixer2Config
from refold.models.jax.layers import Array, Tree, last_window, linear, select
from refold.models.jax.sharding import time as time_shards

Convolve = Callable[[Array, Array, Array, Array | None], tuple[Array, Array]]
"""``(x, window, weight, bias)`` -> the convolution, and the window after it."""


def of_tokens(lengths: Array | None, time_axis: str | None) -> Convolve:
    """Make the convolution of several tokens a row, of which the last may be padding."""

    def convolve(x: Array, window: Array, weight: Array, bias: Array | None) -> tuple[Array, Array]:
        last = last_window(window, x, lengths)
        if time_axis is not None:
            window, last = time_shards.window_before(x, window, time_axis), time_shards.from_last(last, time_axis)
        y, _ = ops.causal_conv1d(x, weight, bias, activation="silu", initial_state=window)
        return y, last

    return convolve


def of_a_token(active: Array | None) -> Convolve:
    """Make the convolution of one token a row; rows that are not ``active`` keep their window."""

    def convolve(x: Array, window: Array, weight: Array, bias: Array | None) -> tuple[Array, Array]:
        y, new = ops.causal_conv1d_step(x, weight, window, bias, activation="silu")
        return y, select(active, new, window)

    return convolve


def project(c: Mixer2Config, weights: Tree, u: Array, window: Array, convolve: Convolve) -> tuple[Any, Array]:
    """Project ``u`` and convolve; the parts by name, as ``c.parts`` has them, and the window after them."""
    sizes, weight, bias = c.parts, weights["conv_weight"], weights.get("conv_bias")
    names = list(sizes)[1:4]  # what passes the convolution
    if "in_proj" in weights:
        projected = linear(u, weights["in_proj"], weights.get("in_bias"))
        first, x, rest = jnp.split(projected, [c.d_inner, c.d_inner + c.conv_dim], axis=-1)
        x, window = convolve(x, window, weight, bias)
        found = [first, *_split(x, [sizes[name] for name in names]), *_split(rest, [*sizes.values()][4:])]
        return dict(zip(sizes, found, strict=True)), window
    biases, windows, begin = weights.get("in_bias_parts", {}), [], 0
    parts = {name: linear(u, weights["in_parts"][name], biases.get(name)) for name in sizes}
    for name in names:
        rows = slice(begin, begin := begin + sizes[name])
        part = None if bias is None else bias[rows]
        parts[name], new = convolve(parts[name], window[:, rows], weight[rows], part)
        windows.append(new)
    return parts, jnp.concatenate(windows, axis=1)


def _split(x: Array, sizes: list[int]) -> list[Array]:
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis=-1)
