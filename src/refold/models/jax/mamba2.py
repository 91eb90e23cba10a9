"""Mamba-2: a stack of equal layers, scanned over, so that compile time does not grow with depth.

A layer is ``h + out_proj(norm(ssd(conv(in_proj(norm(h)))), gate))``. Weights and matrix products have the dtype of the
parameters; step sizes, decays, norms and the residual stream are float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from refold.models.configs import Mamba2Config, Mixer2Config
from refold.models.jax.layers import Array, Tree, embed, last_window, linear, output, rms_norm, select, valid_tokens
from refold.ops._jax_layout import step_sizes
from refold.ops.causal_conv1d._jax import causal_conv1d, causal_conv1d_step
from refold.ops.gated_rmsnorm._jax import gated_rmsnorm
from refold.ops.ssd._jax import ssd, ssd_step


def init_state(config: Mamba2Config, batch: int, dtype: Any = jnp.float32, state_dtype: Any = jnp.float32) -> Tree:
    """Return the state before any token: its size does not depend on how many will be read.

    ``conv (l, b, channels, w-1)`` has the weights' dtype, ``ssm (l, b, h, p, n)`` the state dtype; ``length (b,)``
    counts the tokens read.
    """
    return {"length": jnp.zeros(batch, jnp.int32), **mixer_state(config.mixer, config.nlayers, batch, dtype, state_dtype)}


def mixer_state(c: Mixer2Config, nlayers: int, batch: int, dtype: Any, state_dtype: Any) -> dict[str, Array]:
    """Return the zero states of a stack of mixers."""
    return {
        "conv": jnp.zeros((nlayers, batch, c.conv_dim, c.conv_width - 1), dtype),
        "ssm": jnp.zeros((nlayers, batch, c.nheads, c.headdim, c.dstate), state_dtype),
    }


def forward(
    config: Mamba2Config,
    params: Tree,
    tokens: Array,
    state: Tree | None = None,
    *,
    lengths: Array | None = None,
    kind: str = "last",
    chunk_size: int | None = None,
) -> tuple[Array, Tree]:
    """Read ``tokens (b, t)`` on top of ``state``.

    Args:
        config: The model.
        params: Parameters as ``refold.models.checkpoint`` lays them out.
        tokens: Token ids; rows shorter than ``t`` are padded on the right with any id.
        state: State to go on from; None begins afresh.
        lengths: Valid tokens of each row, ``(b,)``; None when all are.
        kind: ``last``, ``all`` or ``hidden``: see ``layers.output``.
        chunk_size: Chunk of the scan; None picks the device's.

    Returns:
        Logits or hidden states, and the state after each row's last valid token.
    """
    batch, seqlen = tokens.shape
    if state is None:
        state = init_state(config, batch, params["embedding"].dtype)
    valid = valid_tokens(seqlen, lengths)

    def layer(hidden: Array, inputs: Any) -> tuple[Array, Any]:
        weights, conv, ssm = inputs
        normed = rms_norm(hidden, weights["norm"], config.norm_eps)
        mixed, conv, ssm = mixer(config.mixer, weights, normed, conv, ssm, lengths, valid, chunk_size)
        return hidden + mixed, (conv, ssm)

    hidden, (conv, ssm) = jax.lax.scan(layer, embed(params, tokens), (params["layers"], state["conv"], state["ssm"]))
    length = state["length"] + (seqlen if lengths is None else lengths)
    return output(params, hidden, config.norm_eps, lengths, kind), {"length": length, "conv": conv, "ssm": ssm}


def step(
    config: Mamba2Config, params: Tree, token: Array, state: Tree, *, active: Array | None = None
) -> tuple[Array, Tree]:
    """Read one token a row, ``(b,)``; rows that are not ``active`` keep their state. Returns logits ``(b, vocab)``."""

    def layer(hidden: Array, inputs: Any) -> tuple[Array, Any]:
        weights, conv, ssm = inputs
        normed = rms_norm(hidden, weights["norm"], config.norm_eps)
        mixed, conv, ssm = mixer_step(config.mixer, weights, normed, conv, ssm, active)
        return hidden + mixed, (conv, ssm)

    hidden, (conv, ssm) = jax.lax.scan(layer, embed(params, token), (params["layers"], state["conv"], state["ssm"]))
    length = state["length"] + (1 if active is None else active.astype(jnp.int32))
    logits = output(params, hidden[:, None], config.norm_eps, None, "last")
    return logits, {"length": length, "conv": conv, "ssm": ssm}


def mixer(
    c: Mixer2Config,
    weights: Tree,
    u: Array,
    conv: Array,
    ssm: Array,
    lengths: Array | None,
    valid: Array | None,
    chunk_size: int | None = None,
) -> tuple[Array, Array, Array]:
    """Mix ``u (b, t, d)`` over time from the states ``conv`` and ``ssm``; padding leaves both as they are."""
    z, xBC, dt = _project(c, weights, u)
    window, conv = conv, last_window(conv, xBC, lengths)
    xBC, _ = causal_conv1d(xBC, weights["conv_weight"], weights.get("conv_bias"), activation="silu", initial_state=window)
    d = step_sizes(dt, weights["dt_bias"], True, c.dt_limit, jnp.float32)
    if valid is not None:
        d = jnp.where(valid[..., None], d, 0)
    x, B, C = _split(c, xBC)
    y, ssm = ssd(
        x, d, -jnp.exp(weights["A_log"]), B, C,
        D=weights["D"], initial_state=ssm, chunk_size=chunk_size, state_dtype=ssm.dtype,
    )  # fmt: skip
    return _close(c, weights, y, z), conv, ssm


def mixer_step(
    c: Mixer2Config, weights: Tree, u: Array, conv: Array, ssm: Array, active: Array | None
) -> tuple[Array, Array, Array]:
    """Mix one token ``u (b, d)``."""
    z, xBC, dt = _project(c, weights, u)
    xBC, window = causal_conv1d_step(xBC, weights["conv_weight"], conv, weights.get("conv_bias"), activation="silu")
    d = step_sizes(dt, weights["dt_bias"], True, c.dt_limit, jnp.float32)
    if active is not None:
        d = jnp.where(active[:, None], d, 0)
    x, B, C = _split(c, xBC)
    y, ssm = ssd_step(x, d, -jnp.exp(weights["A_log"]), B, C, ssm, D=weights["D"])
    return _close(c, weights, y, z), select(active, window, conv), ssm


def _project(c: Mixer2Config, weights: Tree, u: Array) -> tuple[Array, Array, Array]:
    """Return the gate z, the convolution's input xBC and the raw step sizes dt."""
    projected = linear(u, weights["in_proj"], weights.get("in_bias"))
    z, xBC, dt = jnp.split(projected, [c.d_inner, c.d_inner + c.conv_dim], axis=-1)
    return z, xBC, dt


def _split(c: Mixer2Config, xBC: Array) -> tuple[Array, Array, Array]:
    x, B, C = jnp.split(xBC, [c.d_inner, c.d_inner + c.ngroups * c.dstate], axis=-1)
    lead = xBC.shape[:-1]
    x = x.reshape(*lead, c.nheads, c.headdim)
    return x, B.reshape(*lead, c.ngroups, c.dstate), C.reshape(*lead, c.ngroups, c.dstate)


def _close(c: Mixer2Config, weights: Tree, y: Array, z: Array) -> Array:
    """Gate, normalise and project back to the residual stream."""
    y = y.reshape(z.shape)
    y = gated_rmsnorm(y, weights["gated_norm"], z, eps=c.norm_eps, group_size=c.d_inner // c.norm_groups)
    return linear(y, weights["out_proj"], weights.get("out_bias"))
