"""What the definitions of operators share.

A definition runs on NumPy arrays, and on tensors of PyTorch, which differentiates it: so gradients have the same
definition. It is written in what both have, in float64, one token after the other, and writes to no array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

Array = Any
"""A NumPy array or a tensor."""


def library(x: Array) -> Any:
    """Choose the functions for an array: the module numpy, or torch."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def wide(*arrays: Array) -> Any:
    """Convert arrays to float64; one that is absent stays so."""
    return (a if a is None else a.double() if hasattr(a, "double") else a.astype("float64") for a in arrays)


def per_head(a: Array, count: int) -> Array:
    """Repeat groups, on axis 2, for all heads or channels that read them."""
    return a[:, :, [i // (count // a.shape[2]) for i in range(count)]]


def walk(
    x: Array, cu_seqlens: Array | None, initial: Array | None, shape: tuple[int, ...],
    step: Callable[[int, int, Array], tuple[Array, Array]], reverse: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Run a recurrence over the tokens of each sequence.

    Args:
        x: Its first two axes are batch and time.
        cu_seqlens: Offsets of sequences in a pack, or None.
        initial: The state before each sequence, ``(k, *shape)``; zeros if None.
        shape: That of a state.
        step: ``step(row, t, state)`` gives the output of a token, and the state after it.
        reverse: Begin with the last token.

    Returns:
        The outputs ``(b, t, ...)``, and the last state of each sequence.
    """
    of, (batch, seqlen) = library(x), x.shape[:2]
    spans = [(row, 0, seqlen) for row in range(batch)]
    if cu_seqlens is not None:
        spans = [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    outputs, states = dict[tuple[int, int], Array](), []
    for k, (row, start, end) in enumerate(spans):
        state = of.zeros(shape, dtype=x.dtype) if initial is None else initial[k]
        for t in reversed(range(start, end)) if reverse else range(start, end):
            outputs[row, t], state = step(row, t, state)
        states.append(state)
    rows = [of.stack([outputs[row, t] for t in range(seqlen)]) for row in range(batch)]
    return of.stack(rows), of.stack(states)


def one_token(scan: Callable[..., Any], timed: dict[str, Array | None], one: bool, **rest: Any) -> tuple[Array, Array]:
    """Run a scan over a few tokens, or over one whose arrays have no time axis if ``one``."""
    y, state = scan(**{name: a[:, None] if one and a is not None else a for name, a in timed.items()}, **rest)
    return y[:, 0] if one else y, state


def softplus(v: Array, linear: float = 40.0) -> Array:
    """log(1 + exp(v)); from a number on v itself, which is the same in float64 from 40 on."""
    of = library(v)
    return of.where(v > linear, v, of.log1p(of.exp(of.where(v > linear, linear, v))))


def sigmoid(v: Array) -> Array:
    """Compute the logistic function."""
    return 0.5 + 0.5 * library(v).tanh(0.5 * v)


def silu(v: Array) -> Array:
    """Compute v times its logistic."""
    return v * sigmoid(v)


def step_size(dt: Array, bias: Array | None, is_raw: bool, limit: tuple[float, float]) -> Array:
    """Compute the step of a scan: bias, softplus of what is raw (linear above 20), limits."""
    of, dt = library(dt), dt if bias is None else dt + bias
    dt = softplus(dt, 20.0) if is_raw else dt
    dt = of.where(dt < limit[0], limit[0], dt)  # which keeps the gradient of a NaN
    return of.where(dt > limit[1], limit[1], dt)


def finish(y: Array, x: Array, D: Array | None, z: Array | None) -> Array:
    """Add the skip connection, and multiply by the gate."""
    y = y if D is None else y + D * x
    return y if z is None else y * silu(z)
