"""Pieces that the models share. Weights are ``(out, in)``, as checkpoints store them."""

from typing import Any

import jax
import jax.numpy as jnp

from refold.models.configs import Config
from refold.models.counts import state_shapes
from refold.ops.jax.layout import is_known, product

Array = jax.Array
Tree = Any


def init_state(
    config: Config, batch: int, dtype: Any = jnp.float32, state_dtype: Any = jnp.float32, capacity: int = 0
) -> Tree:
    """Make the state before any token: zeros, of the shapes of `state_shapes`, for weights and states of two dtypes."""
    dtypes = {"int32": jnp.int32, "weights": dtype, "states": state_dtype}
    return {name: jnp.zeros(s, dtypes[kind]) for name, (s, kind) in state_shapes(config, batch, capacity).items()}


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Return ``x @ weight.T + bias`` in the weight's dtype, summed in float32."""
    y = _times(x.astype(weight.dtype), weight).astype(weight.dtype)
    return y if bias is None else y + bias


def _times(x: Array, weight: Array) -> Array:
    """Return ``x @ weight.T`` in float32.

    One or two rows are bound by the reading of the weights. On a GPU, XLA fuses a multiply and sum with the slice that
    takes a layer out of its stack, where a matrix product would first copy the layer (2.7B, bfloat16, H200: 2.75
    against 6.4 ms per token).
    """

    def matrix_product(x: Array, weight: Array) -> Array:
        return product("...i,oi->...o", x, weight)

    def multiply_and_sum(x: Array, weight: Array) -> Array:
        return jnp.sum(x.astype(jnp.float32)[..., None, :] * weight.astype(jnp.float32), axis=-1)

    if not is_known(x.size) or x.size > 2 * x.shape[-1]:
        return matrix_product(x, weight)
    return jax.lax.platform_dependent(x, weight, cuda=multiply_and_sum, rocm=multiply_and_sum, default=matrix_product)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Normalise float32 ``x`` over its last axis; the result has the weight's dtype."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale * weight.astype(jnp.float32)).astype(weight.dtype)


def embed(params: Tree, tokens: Array) -> Array:
    """Look tokens up; the residual stream is float32 whatever the weights are."""
    return params["embedding"][tokens].astype(jnp.float32)


def head(params: Tree, hidden: Array) -> Array:
    """Return float32 logits ``(..., vocab)`` of normalised hidden states."""
    weight = params.get("head", params["embedding"])
    return _times(hidden.astype(weight.dtype), weight)


def output(params: Tree, hidden: Array, eps: float, lengths: Array | None, kind: str) -> Array:
    """Turn the residual stream ``(b, t, d)`` into what the caller asked for.

    ``last``: logits after each row's last valid token, ``(b, vocab)``; ``all``: logits ``(b, t, vocab)``; ``hidden``:
    normalised hidden states ``(b, t, d)``.
    """
    if kind == "last":
        if lengths is None:
            hidden = hidden[:, -1]
        else:
            hidden = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    hidden = rms_norm(hidden, params["norm"], eps)
    return hidden if kind == "hidden" else head(params, hidden)


def valid_tokens(seqlen: int, lengths: Array | None) -> Array | None:
    """Return the mask ``(b, t)`` of the tokens that are no padding; None when all are."""
    return None if lengths is None else jnp.arange(seqlen) < lengths[:, None]


def last_window(window: Array, x: Array, lengths: Array | None) -> Array:
    """Return the last ``w - 1`` valid inputs of each row: of ``window (b, d, w-1)`` followed by ``x (b, t, d)``."""
    before, seqlen = window.shape[2], x.shape[1]
    if lengths is None and is_known(seqlen) and seqlen >= before:
        return x[:, seqlen - before :].swapaxes(1, 2).astype(window.dtype)
    extended = jnp.concatenate([window.swapaxes(1, 2), x.astype(window.dtype)], axis=1)
    starts = jnp.full(x.shape[0], seqlen) if lengths is None else lengths
    last = jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, before))(extended, starts)
    return last.swapaxes(1, 2)


def select(active: Array | None, new: Array, old: Array) -> Array:
    """Return ``new`` in the rows that are active and ``old`` in the others."""
    return new if active is None else jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def layer_of(stack: Tree, index: Array | int) -> Tree:
    """Return one layer of a stack of parameters."""
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), stack)


_STACKS = {"layers", "mixer", "attention", "conv", "ssm", "k", "v"}


def take_layers_apart(tree: Tree) -> Tree:
    """Return parameters or a state in which every stack of layers is a tuple of layers instead."""

    def split(stack: Tree) -> Tree:
        arrays, structure = jax.tree.flatten(stack)
        return tuple(jax.tree.unflatten(structure, layer) for layer in zip(*arrays, strict=True)) or stack

    return {name: split(part) if name in _STACKS else part for name, part in tree.items()}


def stack_layers(tree: Tree) -> Tree:
    """Undo :func:`take_layers_apart`; what is stacked already stays."""

    def join(*layers: Array) -> Array:
        return jnp.stack(layers)

    return {name: jax.tree.map(join, *part) if isinstance(part, tuple) else part for name, part in tree.items()}


def over_layers(layer: Any, hidden: Array, weights: Tree, states: tuple[Tree, ...]) -> tuple[Array, Any]:
    """Run ``layer(hidden, (weights, *states)) -> hidden, states`` over all layers of weights and states.

    Stacks are scanned over, so compile time does not grow with depth. But XLA first copies each layer out of its
    stack, which moves three times the bytes. Separate layers are written out one after the other. A matrix product
    then reads its weights in place, but compile time grows (64 layers of 2.7B on an H200: 2.8 against 0.8 s).
    """
    if not isinstance(weights, tuple):
        return jax.lax.scan(layer, hidden, (weights, *states))
    new = []
    for inputs in zip(weights, *states, strict=True):
        hidden, state = layer(hidden, inputs)
        new.append(state)
    return hidden, tuple(zip(*new, strict=True))
