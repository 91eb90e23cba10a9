"""Granite 4, Bamba and Qwen3.5: Mamba-2 or the delta rule, and attention, each followed by an MLP or experts.

Consecutive layers of one kind are scanned over, and so is the shortest period of the layer order. So compile time grows
with the period, not with depth. Weights are sliced from the stacks inside
the innermost loop, where they are used. The key-value cache is carried and written in place.
"""

import itertools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from refold.models.configs import DeltaConfig, HybridConfig
from refold.models.counts import check_state
from refold.models.jax import delta, mamba2
from refold.models.jax.layers import Array, Tree, embed, init_state, layer_of, linear, output, rms_norm, valid_tokens
from refold.models.jax.sharding import time as time_shards
from refold.ops.jax.layout import is_known, product

QUERY_BLOCK = 512
"""Queries whose scores against the whole cache are held at one time."""


def _mixer(config: HybridConfig) -> ModuleType:
    """Choose the module that computes the layers that are not attention."""
    return delta if isinstance(config.mixer, DeltaConfig) else mamba2


def grow_state(state: Tree, capacity: int) -> Tree:
    """Return the state with room for ``capacity`` tokens in its key-value cache."""
    missing = max(0, capacity - state["k"].shape[2])
    pad = [(0, 0), (0, 0), (0, missing), (0, 0), (0, 0)]
    return {**state, "k": jnp.pad(state["k"], pad), "v": jnp.pad(state["v"], pad)}


def forward(
    config: HybridConfig, params: Tree, tokens: Array, state: Tree | None = None, *, lengths: Array | None = None,
    kind: str = "last", chunk_size: int | None = None, time_axis: str | None = None,
) -> tuple[Array, Tree]:  # fmt: skip
    """Read ``tokens (b, t)`` on top of ``state``, whose cache must have room; otherwise as ``stack.forward``."""
    batch, seqlen = tokens.shape
    if state is None:
        state = init_state(config, batch, params["embedding"].dtype, capacity=time_shards.whole(seqlen, time_axis))
    valid = valid_tokens(seqlen, lengths)

    def mix(weights: Tree, u: Array, conv: Array, ssm: Array) -> tuple[Array, Array, Array]:
        mixer = _mixer(config).mixer
        return mixer(config.mixer, weights, u, conv, ssm, lengths, valid, chunk_size, time_axis)  # type: ignore[no-any-return]

    hidden, state = _layers(config, params, embed(params, tokens), state, mix, valid, time_axis)
    state["length"] = state["length"] + (time_shards.whole(seqlen, time_axis) if lengths is None else lengths)
    if time_axis is not None and kind == "last":
        hidden = time_shards.from_last(hidden[:, -1:], time_axis)
    out = output(params, hidden, config.norm_eps, lengths, kind)
    return out if kind == "hidden" else out / config.logits_divisor, state


def step(
    config: HybridConfig, params: Tree, token: Array, state: Tree, *, active: Array | None = None
) -> tuple[Array, Tree]:
    """Read one token per row, ``(b,)``; rows that are not ``active`` keep their state. Returns logits ``(b, vocab)``.

    The layers of ``params`` and ``state`` are both stacked or both separate.
    """

    def mix(weights: Tree, u: Array, conv: Array, ssm: Array) -> tuple[Array, Array, Array]:
        y, conv, ssm = _mixer(config).mixer_step(config.mixer, weights, u[:, 0], conv, ssm, active)
        return y[:, None], conv, ssm

    valid = None if active is None else active[:, None]
    hidden, state = _layers(config, params, embed(params, token[:, None]), state, mix, valid)
    state["length"] = state["length"] + (1 if active is None else active.astype(jnp.int32))
    return output(params, hidden, config.norm_eps, None, "last") / config.logits_divisor, state


def periods(kinds: tuple[str, ...]) -> tuple[int, list[tuple[str, int]]]:
    """Return how often the shortest period of ``kinds`` repeats, and the runs ``(kind, count)`` of one period."""
    depth = len(kinds)
    period = next(p for p in range(1, depth + 1) if depth % p == 0 and kinds[:p] * (depth // p) == kinds)
    return depth // period, [(kind, len(list(run))) for kind, run in itertools.groupby(kinds[:period])]


def _layers(
    config: HybridConfig, params: Tree, hidden: Array, state: Tree, mix: Any, valid: Array | None,
    time_axis: str | None = None,
) -> tuple[Array, Tree]:  # fmt: skip
    """Run all layers on ``hidden (b, t, d)``; ``mix`` is the Mamba mixer to use."""
    check_state(config, hidden.shape[0], state)
    length = state["length"]

    def mamba_layer(hidden: Array, common: Tree, weights: Tree, conv: Array, ssm: Array) -> tuple[Array, ...]:
        mixed, conv, ssm = mix(weights, rms_norm(hidden, common["norm"], config.norm_eps), conv, ssm)
        return _close(config, common, hidden, mixed), conv, ssm

    def attention_layer(
        hidden: Array, common: Tree, weights: Tree, k: Array, v: Array, index: Any
    ) -> tuple[Array, ...]:
        normed = rms_norm(hidden, common["norm"], config.norm_eps)
        mixed, k, v = _attention(config, weights, normed, k, v, index, length, valid, time_axis)
        return _close(config, common, hidden, mixed), k, v

    run = _written_out if isinstance(params["layers"], tuple) else _scanned
    hidden, new = run(config, params, hidden * config.embedding_multiplier, state, mamba_layer, attention_layer)
    return hidden, {**state, **new}


def _written_out(
    config: HybridConfig, params: Tree, hidden: Array, state: Tree, mamba_layer: Any, attention_layer: Any
) -> tuple[Array, Tree]:
    """Run separate layers, one after the other; see ``layers.over_layers``."""
    new: dict[str, list[Array]] = {name: [] for name in ("conv", "ssm", "k", "v")}
    for common, kind in zip(params["layers"], config.kinds, strict=True):
        i, j = len(new["ssm"]), len(new["k"])
        if kind == "mixer":
            hidden, conv, ssm = mamba_layer(hidden, common, params[kind][i], state["conv"][i], state["ssm"][i])
            new["conv"].append(conv)
            new["ssm"].append(ssm)
        else:
            k, v = state["k"][j][None], state["v"][j][None]
            hidden, k, v = attention_layer(hidden, common, params[kind][j], k, v, 0)
            new["k"].append(k[0])
            new["v"].append(v[0])
    return hidden, {name: tuple(arrays) for name, arrays in new.items() if arrays}


def _scanned(
    config: HybridConfig, params: Tree, hidden: Array, state: Tree, mamba_layer: Any, attention_layer: Any
) -> tuple[Array, Tree]:
    """Scan over the repeats of the period of layers, and in each over its runs."""
    repeats, runs = periods(config.kinds)
    in_period = {kind: sum(n for k, n in runs if k == kind) for kind in ("mixer", "attention")}

    def period(carry: Any, inputs: Any) -> tuple[Any, Any]:
        repeat, conv, ssm = inputs
        states: list[Any] = []
        done = dict.fromkeys(in_period, 0)
        for kind, count in runs:
            first = repeat * in_period[kind] + done[kind]
            base = repeat * sum(in_period.values()) + sum(done.values())

            def mamba_run(carry: Any, inputs: Any, first: Any = first, base: Any = base) -> tuple[Any, Any]:
                hidden, k, v = carry
                i, conv, ssm = inputs
                common, weights = layer_of(params["layers"], base + i), layer_of(params["mixer"], first + i)
                hidden, conv, ssm = mamba_layer(hidden, common, weights, conv, ssm)
                return (hidden, k, v), (conv, ssm)

            def attention_run(carry: Any, i: Array, first: Any = first, base: Any = base) -> tuple[Any, None]:
                hidden, k, v = carry
                common, weights = layer_of(params["layers"], base + i), layer_of(params["attention"], first + i)
                return attention_layer(hidden, common, weights, k, v, first + i), None

            if kind == "mixer":
                here = slice(done[kind], done[kind] + count)
                carry, new = jax.lax.scan(mamba_run, carry, (jnp.arange(count), conv[here], ssm[here]))
                states.append(new)
            else:
                carry, _ = jax.lax.scan(attention_run, carry, jnp.arange(count))
            done[kind] += count
        if not states:
            return carry, (conv, ssm)
        return carry, jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *states)

    def by_period(a: Array) -> Array:
        return a.reshape(repeats, in_period["mixer"], *a.shape[1:])

    inputs = jnp.arange(repeats), by_period(state["conv"]), by_period(state["ssm"])
    (hidden, k, v), (conv, ssm) = jax.lax.scan(period, (hidden, state["k"], state["v"]), inputs)
    return hidden, {
        "conv": conv.reshape(state["conv"].shape), "ssm": ssm.reshape(state["ssm"].shape), "k": k, "v": v
    }  # fmt: skip


def _close(config: HybridConfig, common: Tree, hidden: Array, mixed: Array) -> Array:
    """Add what was mixed to the residual stream, then the answer of the MLP and of the experts."""
    hidden = hidden + mixed.astype(jnp.float32) * config.residual_multiplier
    normed = rms_norm(hidden, common["mlp_norm"], config.norm_eps)
    fed = _mlp(common, normed) + (_experts(config, common, normed) if config.nexperts else 0)
    return hidden + fed.astype(jnp.float32) * config.residual_multiplier


def _attention(
    config: HybridConfig, weights: Tree, u: Array, k_cache: Array, v_cache: Array, index: Any, length: Array,
    valid: Array | None, time_axis: str | None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Attend from ``u (b, t, d)`` to what the caches hold of layer ``index`` and to itself, causally.

    Where time is cut over devices, each has its own queries and gathers everyone's keys and values.
    """
    batch, seqlen = u.shape[:2]
    capacity = k_cache.shape[2]
    q, k, v, gate = _heads(config, weights, u)
    offset = 0 if time_axis is None else jax.lax.axis_index(time_axis) * seqlen
    position = length[:, None] + offset + jnp.arange(seqlen)  # (b, t)
    if config.rope_theta is not None:
        dim = config.headdim if config.rope_dim is None else config.rope_dim
        q, k = (_rotate(a, position, config.rope_theta, dim) for a in (q, k))
    written = position
    if time_axis is not None:
        k, v, written = (jax.lax.all_gather(a, time_axis, axis=1, tiled=True) for a in (k, v, position))
    slot = written if valid is None else jnp.where(valid, written, capacity)  # padding is written nowhere
    row = jnp.arange(batch)[:, None]
    k_cache = k_cache.at[index, row, slot].set(k.astype(k_cache.dtype), mode="drop")
    v_cache = v_cache.at[index, row, slot].set(v.astype(v_cache.dtype), mode="drop")
    keys, values = layer_of(k_cache, index), layer_of(v_cache, index)  # (b, capacity, kv, e)
    q = q.reshape(batch, seqlen, config.nkvheads, -1, config.headdim)

    def attend(q: Array, position: Array) -> Array:
        scores = product("btkre,bske->bkrts", q, keys) * config.attention_multiplier
        seen = jnp.arange(capacity) <= position[..., None]  # (b, t, s)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        return product("bkrts,bske->btkre", jax.nn.softmax(scores, axis=-1).astype(q.dtype), values).astype(q.dtype)

    if not is_known(seqlen) or seqlen <= QUERY_BLOCK:
        y = attend(q, position)
    else:
        blocks = -(-seqlen // QUERY_BLOCK)
        pad = blocks * QUERY_BLOCK - seqlen
        q = jnp.pad(q, [(0, 0), (0, pad), (0, 0), (0, 0), (0, 0)])
        position = jnp.pad(position, [(0, 0), (0, pad)])
        q = jnp.moveaxis(q.reshape(batch, blocks, QUERY_BLOCK, *q.shape[2:]), 1, 0)
        position = jnp.moveaxis(position.reshape(batch, blocks, QUERY_BLOCK), 1, 0)
        y = jnp.moveaxis(jax.lax.map(lambda block: attend(*block), (q, position)), 0, 1)
        y = y.reshape(batch, blocks * QUERY_BLOCK, -1)[:, :seqlen]
    y = y.reshape(batch, seqlen, -1)
    return linear(y if gate is None else y * gate, weights["o"], weights.get("o_bias")), k_cache, v_cache


def _heads(config: HybridConfig, weights: Tree, u: Array) -> tuple[Array, Array, Array, Array | None]:
    """Project to queries, keys and values by heads; return them with the gate of the answers."""
    heads = {"q": config.nheads, "k": config.nkvheads, "v": config.nkvheads}
    q, k, v = (
        linear(u, weights[name], weights.get(f"{name}_bias")).reshape(*u.shape[:2], n, -1) for name, n in heads.items()
    )
    if not config.gated:
        return q, k, v, None
    q, gate = jnp.split(q, 2, axis=-1)
    q, k = (rms_norm(x, weights[n], config.norm_eps).astype(x.dtype) for x, n in ((q, "q_norm"), (k, "k_norm")))
    return q, k, v, jax.nn.sigmoid(gate.reshape(*u.shape[:2], -1))


def _rotate(x: Array, position: Array, theta: float, dim: int) -> Array:
    """Rotate the halves of the first ``dim`` of ``x (b, t, h, e)`` by angles that grow with ``position (b, t)``."""
    x, rest = x[..., :dim], x[..., dim:]
    half = dim // 2
    frequency = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = (position[..., None] * frequency)[:, :, None]  # (b, t, 1, e/2)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([a.astype(x.dtype) for a in (*turned, rest)], axis=-1)


def _mlp(common: Tree, x: Array) -> Array:
    if "mlp_in" in common:
        gate, up = jnp.split(linear(x, common["mlp_in"]), 2, axis=-1)
    else:
        gate, up = (linear(x, common[name], common.get(f"{name}_bias")) for name in ("mlp_gate", "mlp_up"))
    return linear(jax.nn.silu(gate) * up, common["mlp_out"], common.get("mlp_out_bias"))


def _experts(config: HybridConfig, common: Tree, x: Array) -> Array:
    """Send each token to its ``experts_per_token`` best experts and sum their answers by the softmax of the scores.

    Few tokens gather their experts' weights; many are sorted by expert and multiplied group by group.
    """
    tokens = x.reshape(-1, x.shape[-1])
    top = config.experts_per_token
    scores, chosen = jax.lax.top_k(linear(tokens, common["router"]).astype(jnp.float32), top)  # (m, k)
    share = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    if len(tokens) * top <= config.nexperts:
        hidden = product("mi,mkoi->mko", tokens, common["expert_in"][chosen]).astype(x.dtype)
        gate, up = jnp.split(hidden, 2, axis=-1)
        answers = product("mkf,mkif->mki", jax.nn.silu(gate) * up, common["expert_out"][chosen]).astype(x.dtype)
    else:
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=config.nexperts).astype(jnp.int32)
        hidden = jax.lax.ragged_dot(tokens[order // top], common["expert_in"].transpose(0, 2, 1), sizes)
        gate, up = jnp.split(hidden, 2, axis=-1)
        sorted_answers = jax.lax.ragged_dot(jax.nn.silu(gate) * up, common["expert_out"].transpose(0, 2, 1), sizes)
        answers = jnp.zeros_like(sorted_answers).at[order].set(sorted_answers).reshape(len(tokens), top, -1)
    return jnp.einsum("mk,mki->mi", share, answers).reshape(x.shape)
