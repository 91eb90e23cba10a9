"""The short causal convolution as a sum of shifted inputs, which XLA fuses into one pass."""

from functools import partial

import jax
import jax.numpy as jnp

from refold.ops.jax.layout import Array, accumulator, sequence_of_token


@partial(jax.jit, static_argnames=("activation",))
def causal_conv1d(
    x: Array, weight: Array, bias: Array | None = None, *, activation: str | None = None,
    initial_state: Array | None = None, cu_seqlens: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`refold.ops.causal_conv1d` on JAX arrays; see there for the equations and the arguments.

    Inside, windows are ``(b, w - 1, d)``, like inputs; the caller's are ``(b, d, w - 1)``.
    """
    batch, seqlen, _ = x.shape
    before = weight.shape[1] - 1
    if cu_seqlens is None:
        window = _window(initial_state, batch, before, x)
        extended = jnp.concatenate([window, x], axis=1)
        shifted = [extended[:, k : k + seqlen] for k in range(before + 1)]
        final = extended[:, seqlen:]
    else:
        nseq = cu_seqlens.shape[0] - 1
        window = _window(initial_state, nseq, before, x)
        starts, sequence = cu_seqlens[:-1], sequence_of_token(cu_seqlens, seqlen)

        def read(position: Array, sequence: Array) -> Array:
            """Input at ``position`` after its sequence's start; negative positions lie in the initial window."""
            token = jnp.clip(starts[sequence] + position, 0, seqlen - 1)
            held = window[sequence, jnp.clip(before + position, 0, before - 1)]
            return jnp.where((position < 0)[..., None], held, x[0, token])

        position = jnp.arange(seqlen) - starts[sequence]
        shifted = [read(position - before + k, sequence)[None] for k in range(before)] + [x]
        lengths = cu_seqlens[1:] - starts
        final = read(lengths[:, None] + jnp.arange(-before, 0), jnp.arange(nseq)[:, None])
    return _combine(shifted, weight, bias, activation).astype(x.dtype), final.swapaxes(1, 2)


def _window(state: Array | None, rows: int, before: int, x: Array) -> Array:
    """Return the initial window as inputs, ``(rows, w - 1, d)``."""
    return jnp.zeros((rows, before, x.shape[2]), x.dtype) if state is None else state.astype(x.dtype).swapaxes(1, 2)


def _combine(shifted: list[Array], weight: Array, bias: Array | None, activation: str | None) -> Array:
    """Return ``activation(sum over k of weight[:, k] * shifted[k] + bias)`` in the accumulator's dtype."""
    acc = accumulator(shifted[0].dtype)
    taps = weight.astype(acc).T
    y = sum((tap * a.astype(acc) for tap, a in zip(taps, shifted, strict=True)), start=jnp.zeros((), acc))
    if bias is not None:
        y = y + bias.astype(acc)
    return jax.nn.silu(y) if activation == "silu" else y


@partial(jax.jit, static_argnames=("activation",))
def causal_conv1d_step(
    x: Array, weight: Array, state: Array, bias: Array | None = None, *, activation: str | None = None
) -> tuple[Array, Array]:
    """Compute :func:`refold.ops.causal_conv1d_step`: one token ``x (b, d)``, or a short run ``(b, t, d)``."""
    if x.ndim == 3:
        y, final = causal_conv1d(x, weight, bias, activation=activation, initial_state=state)
        return y, final.astype(state.dtype)
    window = jnp.concatenate([state.astype(x.dtype), x[:, :, None]], axis=2)
    y = _combine([window[:, :, k] for k in range(weight.shape[1])], weight, bias, activation)
    return y.astype(x.dtype), window[:, :, 1:].astype(state.dtype)
