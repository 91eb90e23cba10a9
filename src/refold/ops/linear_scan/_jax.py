"""The elementwise linear recurrence as an associative scan of pairs ``(a1, x1)(a2, x2) = (a2 a1, a2 x1 + x2)``."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from refold.ops.jax.layout import Array, accumulator, is_known, pad_time

BLOCK = 128
"""Steps that are scanned together where the length is a symbol."""


def _solve(a: Array, x: Array, first: Array | None, reverse: bool) -> Array:
    """Solve ``h[t] - a[t] h[t - 1] = x[t]`` (with ``reverse``, ``t + 1``), where h is zero outside of the sequence.

    ``first``, shaped like x, marks where the state before does not count: where sequences of a pack begin, and where
    the state is reset. A factor of zero would not do there: zero times a state that is not finite is NaN.

    JAX is told that this is a linear system. So its derivatives are scans as well: that of x is the transposed
    system, solved the other way round, and that of a follows from the equation. Derived step by step, the scan would
    keep all of its levels for the gradient, and XLA 0.11 crashes on the CPU when it compiles that under ``shard_map``.
    """

    def neighbour(h: Array, later: bool) -> Array:
        edge = jnp.zeros_like(h[:, :1])
        return jnp.concatenate([h[:, 1:], edge] if later else [edge, h[:, :-1]], axis=1)

    def before(h: Array) -> Array:
        h = neighbour(h, reverse)
        return h if first is None else jnp.where(first, 0, h)

    def combine(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        if first is None:
            return left[0] * right[0], right[0] * left[1] + right[1]
        factor, value = jnp.where(right[2], 0, left[0] * right[0]), jnp.where(right[2], 0, right[0] * left[1])
        return factor, value + right[1], left[2] | right[2]

    def scan(a: Array, x: Array, first: Array | None, reverse: bool) -> Array:
        parts = (a, x) if first is None else (a, x, first)
        if is_known(x.shape[1]):
            return jax.lax.associative_scan(combine, parts, reverse=reverse, axis=1)[1]
        count = -(-x.shape[1] // BLOCK)

        def block(state: Array, parts: Any) -> tuple[Array, Array]:
            factor, value, *marks = jax.lax.associative_scan(combine, parts, reverse=reverse, axis=1)
            entering = factor * state[:, None]
            h = value + (jnp.where(marks[0], 0, entering) if marks else entering)
            return h[:, 0 if reverse else -1], h

        def blocks(a: Array) -> Array:
            a = pad_time(a, count * BLOCK)
            return jnp.moveaxis(a.reshape(a.shape[0], count, BLOCK, *a.shape[2:]), 1, 0)

        h = jax.lax.scan(block, jnp.zeros_like(x[:, 0]), tuple(map(blocks, parts)), reverse=reverse)[1]
        return jnp.moveaxis(h, 0, 1).reshape(x.shape[0], -1, *x.shape[2:])[:, : x.shape[1]]

    return jax.lax.custom_linear_solve(
        lambda h: h - a * before(h),
        x,
        lambda _, x: scan(a, x, first, reverse),
        lambda _, x: scan(
            neighbour(a, not reverse), x, None if first is None else neighbour(first, not reverse), not reverse
        ),
    )


@partial(jax.jit, static_argnames=("reverse",))
def linear_scan(
    a: Array, x: Array, *, initial_state: Array | None = None, reverse: bool = False, cu_seqlens: Array | None = None,
    reset: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`refold.ops.linear_scan` on JAX arrays; see there for the equations and the arguments.

    A state enters where a sequence begins: it is added to the first input there.
    """
    acc = accumulator(x.dtype)
    seqlen = x.shape[1]
    factors, values = (jnp.broadcast_to(v, jnp.broadcast_shapes(a.shape, x.shape)).astype(acc) for v in (a, x))
    first = None
    if reset is not None:
        first = jnp.broadcast_to(reset, values.shape)
        factors = jnp.where(first, 0, factors)

    def kept(place: Any, state: Any) -> Array:
        return factors[place] * (state if reset is None else jnp.where(reset[place], 0, state))

    if cu_seqlens is None:
        begin: Any = -1 if reverse else 0
        end: Any = 0 if reverse else -1
        state: Any = 0 if initial_state is None else initial_state.astype(acc)
        values = values.at[:, begin].add(kept((slice(None), begin), state))
    else:
        starts, stops = cu_seqlens[:-1], cu_seqlens[1:]
        begin, end = (stops - 1, starts) if reverse else (starts, stops - 1)
        nonempty = (stops > starts).reshape(-1, *[1] * (x.ndim - 2))
        begin = jnp.where(stops > starts, begin, seqlen)  # an empty sequence begins nowhere
        state = jnp.zeros((starts.shape[0], *x.shape[2:]), acc) if initial_state is None else initial_state.astype(acc)
        values = values.at[0, begin].add(kept((0, jnp.minimum(begin, seqlen - 1)), state), mode="drop")
        begins = (
            jnp.zeros((1, seqlen), bool).at[0, begin].set(True, mode="drop").reshape(1, seqlen, *[1] * (x.ndim - 2))
        )
        first = begins if first is None else first | begins
        first |= jnp.zeros_like(values, bool)  # under `shard_map` the marks must vary over devices as the values do

    h = _solve(factors, values, first, reverse)
    final = h[:, end] if cu_seqlens is None else jnp.where(nonempty, h[0, end], state)
    return h.astype(x.dtype), final
