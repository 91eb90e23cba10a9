"""Scans with time sharded over the devices of a mesh axis; they run inside ``shard_map``.

Each device scans its part from a zero state, which gives the state that the part adds. These states and the parts'
total decays are gathered once. From them, every device gets the state that enters its part, and computes its outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from refold import ops
from refold.ops.jax.layout import product

Array = jax.Array


def whole(seqlen: int, axis: str | None) -> int:
    """Return the length of the whole sequence if each device has ``seqlen`` tokens; without an axis, ``seqlen``."""
    return seqlen if axis is None else seqlen * jax.lax.axis_size(axis)


def window_before(x: Array, window: Array, axis: str) -> Array:
    """Return the inputs just before this device's part of ``x (b, t, d)``; on the first, ``window (b, d, w-1)``."""
    before = window.shape[2]
    tail = x[:, x.shape[1] - before :].swapaxes(1, 2).astype(window.dtype)
    size = jax.lax.axis_size(axis)
    left = jax.lax.ppermute(tail, axis, [(i, i + 1) for i in range(size - 1)])
    return jnp.where(jax.lax.axis_index(axis) == 0, window, left)


def from_last(a: Array, axis: str) -> Array:
    """Return the last device's ``a`` on every device."""
    last = jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
    return jax.lax.psum(jnp.where(last, a, 0), axis)


def pass_states(
    added: Array, kept: Array, initial: Array, axis: str, through: Callable[[Array, Array], Array] = jnp.multiply
) -> tuple[Array, Array]:
    """Pass states from part to part: the state that enters this device's part, and the one that leaves the last.

    Args:
        added: State that this part adds, float32.
        kept: What this part keeps of a state: factors, broadcasting against it, or a map.
        initial: State that enters the first part.
        axis: Mesh axis of time.
        through: Gives what is kept of a state: ``through(kept, state)``.
    """
    states, keeps = jax.lax.all_gather((added, kept), axis)
    state = entering = initial.astype(added.dtype)
    for i in range(states.shape[0]):
        entering = jnp.where(jax.lax.axis_index(axis) == i, state, entering)
        state = through(keeps[i], state) + states[i]
    return entering, state


def ssd(x: Array, dt: Array, A: Array, B: Array, C: Array, *, initial_state: Array, axis: str, **options: Any) -> Any:
    """Compute ``refold.ops.ssd`` of a sequence cut over ``axis``; ``dt`` are final step sizes."""
    _, added = ops.ssd(x, dt, A, B, C, **{**options, "state_dtype": None})
    decay = jnp.exp((dt.sum(1) * A)[..., None, None])
    entering, final = pass_states(added, decay, initial_state, axis)
    y, _ = ops.ssd(x, dt, A, B, C, initial_state=entering, **options)
    return y, final.astype(initial_state.dtype)


def selective_scan(
    x: Array, dt: Array, A: Array, B: Array, C: Array, *, initial_state: Array, axis: str, **options: Any
) -> Any:
    """Compute ``refold.ops.selective_scan`` of a sequence cut over ``axis``; ``dt`` are final step sizes, no decay."""
    _, added = ops.selective_scan(x, dt, A, B, C, **{**options, "state_dtype": None})
    decay = jnp.exp(dt.sum(1)[..., None] * A)
    entering, final = pass_states(added, decay, initial_state, axis)
    y, _ = ops.selective_scan(x, dt, A, B, C, initial_state=entering, **options)
    return y, final.astype(initial_state.dtype)


def delta_rule(q: Array, k: Array, v: Array, *, initial_state: Array, axis: str, **options: Any) -> Any:
    """Compute ``refold.ops.delta_rule`` of a sequence cut over ``axis``; what a part keeps is a map of its keys."""
    _, added = ops.delta_rule(q, k, v, **options)
    keys = k.shape[-1]
    every = jnp.broadcast_to(jnp.eye(keys, dtype=added.dtype), (*added.shape[:-2], keys, keys))
    _, kept = ops.delta_rule(q, k, jnp.zeros((*v.shape[:-1], keys), v.dtype), initial_state=every, **options)
    entering, final = pass_states(added, kept, initial_state, axis, partial(product, "...kj,...jp->...kp"))
    y, _ = ops.delta_rule(q, k, v, initial_state=entering, **options)
    return y, final.astype(initial_state.dtype)
