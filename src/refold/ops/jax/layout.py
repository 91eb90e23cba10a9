"""What the JAX operators share: matrix products, step sizes, the layout of packed sequences.

A pack of sequences is computed as one sequence of chunks, in which every sequence begins on a chunk border. No chunk
then needs a mask inside. There are at most ``t // l + k`` chunks, whatever the lengths are, so shapes stay static under
``jit``. Slots without a token have ``dt = 0``, which leaves the state unchanged.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from refold.ops.lines import NEVER_AFTER, NEVER_BEFORE, Line

Array = jax.Array


def is_known(size: Any) -> bool:
    """Tell whether a size is a number; in ``jax.export`` it may be a symbol, and one program serves all sizes."""
    return isinstance(size, int)


def accumulator(dtype: Any) -> Any:
    """Return the dtype in which sums of ``dtype`` are kept: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def product(subscripts: str, *operands: Array) -> Array:
    """Einsum in the operands' dtype with a float32 (float64) accumulator and result.

    float32 operands are multiplied as float32, not TensorFloat-32, unless the user chose otherwise through
    ``jax.default_matmul_precision``.
    """
    exact = operands[0].dtype == jnp.float32 and getattr(jax.config, "jax_default_matmul_precision", None) is None
    return jnp.einsum(
        subscripts,
        *operands,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=accumulator(operands[0].dtype),
    )


def read_state(state: Array, C: Array) -> Array:
    """Return ``sum over n of state (..., p, n) * C (..., n)``.

    The update that precedes it should write the state once, in place. On an accelerator XLA fuses a multiply and sum
    with it; on CPU that becomes a scalar loop, and a product goes to a vectorised routine. No axis is reshaped on the
    way: XLA would then compute the update twice, once in each shape, and copy the state.
    """
    return jax.lax.platform_dependent(
        state,
        C,
        cpu=lambda state, C: product("...pn,...n->...p", state, C),
        default=lambda state, C: jnp.sum(state * C[..., None, :], axis=-1),
    )


def over_time(
    step: Callable[..., tuple[Array, Array]], state: Array, tokens: dict[str, Array | None]
) -> tuple[Array, Array]:
    """Run a step over arrays ``(b, t, ...)``, token by token; give its outputs, ``(b, t, ...)``, and the last state."""

    def body(state: Array, token: Any) -> tuple[Array, Array]:
        y, state = step(**token, state=state)
        return state, y

    time_first = {name: None if a is None else jnp.moveaxis(a, 1, 0) for name, a in tokens.items()}
    state, y = jax.lax.scan(body, state, time_first)
    return jnp.moveaxis(y, 0, 1), state


def finish(y: Array, x: Array, D: Array | None, z: Array | None) -> Array:
    """Add the skip ``D x`` and multiply by ``silu(z)``, in y's dtype."""
    if D is not None:
        y = y + D.astype(y.dtype) * x.astype(y.dtype)
    return y if z is None else y * jax.nn.silu(z.astype(y.dtype))


def step_sizes(dt: Array, dt_bias: Array | None, softplus: bool, limit: tuple[float, float], dtype: Any) -> Array:
    """Return ``clip(softplus(dt + dt_bias), *limit)`` in ``dtype``; each part only where asked for."""
    dt = dt.astype(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.astype(dtype)
    if softplus:
        # The inner where keeps the gradient of the branch that is not taken finite.
        dt = jnp.where(dt > 20, dt, jnp.log1p(jnp.exp(jnp.where(dt > 20, 0, dt))))
    low, high = limit
    # Not maximum and minimum, whose gradient is half where a step lies on a limit, as those of padding do.
    if low > (0 if softplus else -float("inf")):
        dt = jnp.where(dt < low, low, dt)
    if high < float("inf"):
        dt = jnp.where(dt > high, high, dt)
    return dt


def finite_rates(A: Array, dtype: Any) -> Array:
    """Return rates, the lowest number for -inf: its product with zero, a step of padding or a gradient, is no NaN."""
    return jnp.maximum(A.astype(dtype), jnp.finfo(dtype).min)


def vary_like(a: Array, *inputs: Array | None) -> Array:
    """Return ``a``, known to vary over every mesh axis over which an input does.

    Inside ``shard_map``, the carry that a scan begins with must vary like the one its body returns; zeros do not.
    """
    nothing = [jnp.zeros_like(i, a.dtype, shape=()) for i in inputs if i is not None]
    return sum(nothing, start=a)


class Pack(NamedTuple):
    """Where the tokens of a pack go in a row of chunks; ``nchunks = t // l + k`` of ``l`` slots each.

    Attributes:
        source: token of each slot, ``(nchunks * l,)``; unfilled slots read token 0.
        filled: whether a token fills the slot, ``(nchunks * l,)``.
        target: slot of each token, ``(t,)``.
        sequence: sequence of each chunk, ``(nchunks,)``; ``k`` for chunks after the last sequence.
        first: whether the chunk begins its sequence, ``(nchunks,)``.
        last: whether the chunk ends its sequence, ``(nchunks,)``.
        nsequences: ``k``.
    """

    source: Array
    filled: Array
    target: Array
    sequence: Array
    first: Array
    last: Array
    nsequences: int


def pack_chunks(cu_seqlens: Array, seqlen: int, chunk_size: int) -> Pack:
    """Lay a pack of sequences out so that each begins on a chunk border. Pure in ``cu_seqlens``."""
    nseq = cu_seqlens.shape[0] - 1
    nchunks = seqlen // chunk_size + nseq
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    chunk_ends = jnp.cumsum(-(-(ends - starts) // chunk_size))  # (k,)
    chunk_starts = jnp.concatenate([jnp.zeros_like(chunk_ends[:1]), chunk_ends[:-1]])

    chunk = jnp.arange(nchunks)
    sequence = _ends_before(chunk_ends, chunk)
    inside = jnp.minimum(sequence, nseq - 1)
    first = (sequence < nseq) & (chunk == chunk_starts[inside])
    last = (sequence < nseq) & (chunk == chunk_ends[inside] - 1)

    offset = (chunk - chunk_starts[inside]) * chunk_size
    token = (starts[inside] + offset)[:, None] + jnp.arange(chunk_size)  # (c, l)
    filled = (token < ends[inside][:, None]) & (sequence < nseq)[:, None]
    source = jnp.where(filled, token, 0).reshape(-1)

    token_sequence = _ends_before(ends, jnp.arange(seqlen))
    target = chunk_starts[token_sequence] * chunk_size + jnp.arange(seqlen) - starts[token_sequence]
    return Pack(source, filled.reshape(-1), target, sequence, first, last, nseq)


def sequence_of_token(cu_seqlens: Array, seqlen: int) -> Array:
    """Return the sequence that each of ``seqlen`` tokens belongs to, ``(t,)``."""
    return _ends_before(cu_seqlens[1:], jnp.arange(seqlen))


def _ends_before(ends: Array, places: Array) -> Array:
    """Return how many of the ends are not after each place."""
    if is_known(ends.shape[0]):
        return jnp.searchsorted(ends, places, side="right")
    return jnp.sum(ends <= places[:, None], axis=1, dtype=jnp.int32)  # a search takes as many steps as a number says


def line(seqlen: int, cu_seqlens: Array | None) -> Line:
    """Describe how tokens lie in sequences: a sequence a batch row, or a pack with these offsets."""
    token = jnp.arange(seqlen)[None]
    if cu_seqlens is None:
        return Line(jnp, token, lambda a: a.min(1), lambda a: a.max(1), lambda a: a[:, None])
    sequence, count = sequence_of_token(cu_seqlens, seqlen), cu_seqlens.shape[0] - 1
    return Line(
        jnp,
        token,
        lambda a: jnp.minimum(jax.ops.segment_min(a[0], sequence, count), NEVER_AFTER),
        lambda a: jnp.maximum(jax.ops.segment_max(a[0], sequence, count), NEVER_BEFORE),
        lambda a: a[sequence][None],
    )


def pad_time(a: Array, length: int, filler: int = 0) -> Array:
    """Append a number on axis 1 up to ``length``."""
    missing = length - a.shape[1]
    if missing == 0:
        return a
    return jnp.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2), constant_values=filler)
