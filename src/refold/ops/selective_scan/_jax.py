"""The Mamba-1 scan as ``lax.scan``, with one state per lane in memory.

The state differs for every channel, so there is no matrix product. On CPU, one lane goes over the sequence: that is the
least work, and the state stays in cache. On an accelerator, ``t`` small steps are bound by launches. So the sequence is
cut into lanes that advance together, several steps per launch. A first pass computes the state that each lane adds. A
second pass starts from the states that enter the lanes, and computes the outputs. For the backward, steps are
checkpointed in blocks.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from refold.ops.jax.layout import (
    Array,
    accumulator,
    finish,
    finite_rates,
    is_known,
    over_time,
    pack_chunks,
    pad_time,
    read_state,
    step_sizes,
    vary_like,
)

CHECKPOINT_STEPS = 32
"""Steps whose states are recomputed, not stored, by the backward pass."""


def default_lane_length(seqlen: int) -> int:
    """Return the steps one lane walks: all on CPU, about half the square root of the length elsewhere.

    Where the length is a symbol, it is all, in whole blocks, on CPU, and one block elsewhere.
    """
    if not is_known(seqlen):
        return CHECKPOINT_STEPS * (-(-seqlen // CHECKPOINT_STEPS) if jax.default_backend() == "cpu" else 1)
    return seqlen if jax.default_backend() == "cpu" else max(16, 1 << math.isqrt(seqlen).bit_length() - 2)


def steps_per_launch() -> int:
    """Return the steps to write out as one: 16 on an accelerator, where a step is shorter than its launch."""
    return 1 if jax.default_backend() == "cpu" else 16


@partial(jax.jit, static_argnames=("dt_softplus", "state_dtype"))
def selective_scan(
    x: Array, dt: Array, A: Array, B: Array, C: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, decay: Array | None = None, dt_softplus: bool = False,
    initial_state: Array | None = None, cu_seqlens: Array | None = None, state_dtype: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`refold.ops.selective_scan` on JAX arrays; see there for the equations and the arguments."""
    batch, seqlen, dim = x.shape
    dstate = A.shape[1]
    acc = accumulator(x.dtype)
    d = step_sizes(dt, dt_bias, dt_softplus, (-math.inf, math.inf), acc)
    ngroups = max(a.shape[2] if a.ndim == 4 else 1 for a in (B, C))
    inputs = [x.astype(acc), d]
    for a in (B, C):  # one of them may be grouped and the other not
        a = a.astype(acc).reshape(batch, seqlen, -1, dstate)
        inputs.append(jnp.broadcast_to(a, (batch, seqlen, ngroups, dstate)))
    if decay is not None:
        inputs.append(decay.astype(acc))
    shape = (ngroups, dim // ngroups)
    rates = finite_rates(A, acc).reshape(*shape, dstate)

    if cu_seqlens is None:
        length = default_lane_length(seqlen)
        nlanes = -(-seqlen // length)
        state = jnp.zeros((batch, dim, dstate), acc) if initial_state is None else initial_state.astype(acc)
        first = last = jnp.zeros(nlanes, bool)
        sequence = jnp.zeros(nlanes, int)
        own = finals = jnp.zeros((1, *shape, dstate), acc)
    else:
        nseq = cu_seqlens.shape[0] - 1
        known = is_known(seqlen) and is_known(nseq)
        length = max(1, min(default_lane_length(seqlen), seqlen // nseq)) if known else CHECKPOINT_STEPS
        pack = pack_chunks(cu_seqlens, seqlen, length)
        nlanes, sequence, first, last = pack.sequence.shape[0], pack.sequence, pack.first, pack.last
        fillers = (0, 0, 0, 0, 1)  # of all of them: what is not finite would reach the states even so
        inputs = [
            jnp.where(pack.filled.reshape(1, -1, *[1] * (a.ndim - 2)), a[:, pack.source], filler)
            for a, filler in zip(inputs, fillers, strict=False)
        ]
        own = jnp.zeros((nseq, dim, dstate), acc) if initial_state is None else initial_state.astype(acc)
        own = finals = own.reshape(nseq, *shape, dstate)
        state = jnp.zeros((batch, dim, dstate), acc)
    decides = (x, dt, A, B, dt_bias, decay, initial_state, cu_seqlens)
    state = vary_like(state.reshape(batch, *shape, dstate), *decides)

    def lanes(a: Array, *tail: int, filler: int = 0) -> Array:
        """Cut (b, t, ...) to (l, c, b, ...): a step takes one token of every lane."""
        a = pad_time(a, nlanes * length, filler).reshape(batch, nlanes, length, *tail)
        return a.transpose(2, 1, 0, *range(3, a.ndim))

    walked: tuple[Any, ...] = (
        lanes(inputs[0], *shape),
        lanes(inputs[1], *shape),
        *(lanes(a, ngroups, dstate) for a in inputs[2:4]),
        None if decay is None else lanes(inputs[4], *shape, filler=1),
    )

    def factor(d: Array, decay: Array | None) -> Array:
        power = jnp.exp(d[..., None] * rates)
        return power if decay is None else decay[..., None] * power

    def step(h: Array, inputs: Any) -> tuple[Array, Array]:
        x, d, B, C, decay = inputs
        h = factor(d, decay) * h + (d * x)[..., None] * B[..., None, :]
        return h, read_state(h, C)

    if is_known(nlanes) and nlanes == 1 and cu_seqlens is None:
        entering = state[None]
    else:
        zero = vary_like(jnp.zeros((nlanes, *state.shape), acc), *decides)
        finals = vary_like(finals, *decides)
        added, _ = _blocked_scan(lambda h, inputs: (step(h, inputs)[0], ()), zero, walked)
        if decay is None:
            product = jnp.exp(walked[1].sum(0)[..., None] * rates)  # (c, b, g, r, n)
        else:  # neither a logarithm of decays, which may be zero, nor products that could overflow apart
            grow = lambda product, inputs: (factor(inputs[1], inputs[4]) * product, ())  # noqa: E731
            product, _ = _blocked_scan(grow, jnp.ones_like(zero), walked)

        def pass_on(carry: Any, lane: Any) -> tuple[Any, Array]:
            h, finals = carry
            added, product, sequence, first, last = lane
            h = jnp.where(first, own[jnp.minimum(sequence, own.shape[0] - 1)], h)
            leaving = product * h + added
            finals = finals.at[jnp.where(last, sequence, finals.shape[0])].set(leaving[0], mode="drop")
            return (leaving, finals), h

        per_lane = added, product, sequence, first, last
        (_, finals), entering = jax.lax.scan(pass_on, (state, finals), per_lane, unroll=steps_per_launch())
    end, y = _blocked_scan(step, entering, walked)
    y = y.transpose(2, 1, 0, 3, 4).reshape(batch, nlanes * length, dim)
    y = y[:, :seqlen] if cu_seqlens is None else y[:, pack.target]
    final = end[-1] if cu_seqlens is None else finals
    final = final.reshape(-1, dim, dstate).astype(state_dtype or acc)
    return finish(y, x, D, z).astype(x.dtype), final


def _blocked_scan(step: Any, carry: Array, inputs: Any) -> tuple[Array, Any]:
    """Scan ``step`` over axis 0; the backward pass stores the carry of every 32nd step only."""
    nsteps = inputs[0].shape[0]
    blocks, rest = divmod(nsteps, CHECKPOINT_STEPS)  # no rest where their number is a symbol

    def scan(carry: Array, inputs: Any) -> tuple[Array, Any]:
        return jax.lax.scan(step, carry, inputs, unroll=steps_per_launch())

    outputs = []
    if not is_known(blocks) or blocks:
        head = jax.tree.map(
            lambda a: a[: blocks * CHECKPOINT_STEPS].reshape(blocks, CHECKPOINT_STEPS, *a.shape[1:]), inputs
        )
        carry, out = jax.lax.scan(jax.checkpoint(scan), carry, head)
        outputs.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out))
    if rest:
        carry, out = scan(carry, jax.tree.map(lambda a: a[blocks * CHECKPOINT_STEPS :], inputs))
        outputs.append(out)
    return carry, jax.tree.map(lambda *a: jnp.concatenate(a), *outputs)


@partial(jax.jit, static_argnames=("dt_softplus",))
def selective_scan_step(
    x: Array, dt: Array, A: Array, B: Array, C: Array, state: Array, *, D: Array | None = None, z: Array | None = None,
    dt_bias: Array | None = None, decay: Array | None = None, dt_softplus: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Compute :func:`refold.ops.selective_scan_step`: ``x (b, d)`` or a short run ``(b, t, d)``."""
    if x.ndim == 3:
        step = partial(selective_scan_step, A=A, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus)
        state = vary_like(state, x, dt, A, B, dt_bias, decay)
        return over_time(step, state, {"x": x, "dt": dt, "B": B, "C": C, "z": z, "decay": decay})

    acc = accumulator(x.dtype)
    d = step_sizes(dt, dt_bias, dt_softplus, (-math.inf, math.inf), acc)
    B, C = B.astype(acc), C.astype(acc)
    B = jnp.repeat(B, x.shape[1] // B.shape[1], axis=1) if B.ndim == 3 else B[:, None]  # (b, d or 1, n)
    factor = jnp.exp(d[..., None] * finite_rates(A, acc))
    if decay is not None:
        factor = decay.astype(acc)[..., None] * factor
    new = factor * state.astype(acc) + (d * x.astype(acc))[..., None] * B
    y = read_state(new.reshape(*C.shape[:-1], -1, C.shape[-1]), C).reshape(x.shape)
    return finish(y, x, D, z).astype(x.dtype), new.astype(state.dtype)
