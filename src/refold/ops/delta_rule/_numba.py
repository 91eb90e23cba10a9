"""The delta rule on the CPU, one token after the other: compiled by Numba, a block of columns of a state in the cache.

A column of a state meets no other, so threads share out columns. Each token goes over its block twice: once to decay
and read it, once to write and query it. Without the inverse of a chunk, that is fewer operations, and at 128 x 128 no
slower than the products of the torch backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from refold.ops.delta_rule import _torch
from refold.ops.delta_rule._prologue import log_decay, normalized, strength
from refold.ops.numba.blocks import share_out, spans_of, supports, zeros_or_copy
from refold.ops.numba.kernel import kernel
from refold.ops.numba.tiles import read_tile, tile_of, widest_vectors, write_tile

__all__ = ["delta_rule", "delta_rule_step", "delta_rule_step_", "supports"]

COLUMNS = 64
"""Columns of a block: 128 rows of them take 32 KiB."""


def delta_rule(
    *, initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int | None, q: Tensor, v: Tensor,
    **arguments: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `refold.ops.delta_rule`."""
    spans = spans_of("delta_rule", v.shape[0], v.shape[1], cu_seqlens)
    state = zeros_or_copy(initial_state, len(spans), v.shape[2], q.shape[3], v.shape[3])
    return _scan(spans, state, q=q, v=v, **arguments), state


def delta_rule_step(*, state: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute `refold.ops.delta_rule_step`."""
    new = torch.empty(state.shape, dtype=torch.float32).copy_(state)
    return _tokens(state=new, **arguments), new.to(state.dtype)


def delta_rule_step_(*, state: Tensor, **arguments: Any) -> Tensor:
    """Compute `refold.ops.delta_rule_step_`; a state that is not contiguous is updated by PyTorch where it lies."""
    if state.dtype == torch.float32 and state.is_contiguous():
        return _tokens(state=state, **arguments)
    return _torch.delta_rule_step_(state=state, **arguments)


def _tokens(
    *, q: Tensor, k: Tensor, v: Tensor, state: Tensor, g: Tensor | None, beta: Tensor | None, r: Tensor | None,
    **arguments: Any,
) -> Tensor:  # fmt: skip
    """Compute the results of a few tokens, or of one, and overwrite the state."""
    one = v.ndim == 3
    if one:
        q, k, v = q[:, None], k[:, None], v[:, None]
        g, beta, r = (None if a is None else a[:, None] for a in (g, beta, r))
    spans = spans_of("delta_rule_step", v.shape[0], v.shape[1], None)
    y = _scan(spans, state, q=q, k=k, v=v, g=g, beta=beta, r=r, **arguments)
    return y[:, 0] if one else y


def _scan(
    spans: tuple[tuple[int, ...], ...], state: Tensor, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    beta: Tensor | None, r: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, scale: float | None,
    normalize: bool, lower_bound: float | None, beta_limit: float | None, erase: bool,
) -> Tensor:  # fmt: skip
    """Compute y, and overwrite the states (k, h, n, p) of the sequences."""
    nheads, headdim = v.shape[2:]
    dkey = q.shape[3]
    q, k = ((normalized(a) if normalize else a.float()) for a in (q, k))
    q = q * (dkey**-0.5 if scale is None else scale)
    none = q.new_empty(0, 0, 0, 0)
    read = none if not erase else k if r is None else r.float()
    decay = none if g is None else log_decay(g, A_log, dt_bias, lower_bound).exp()
    size = torch.ones(1, 1, 1, dtype=torch.float32).expand(v.shape[:3]) if beta is None else strength(beta, beta_limit)
    arrays = [a.contiguous() for a in (q, k, read, v.float(), size, decay)]
    y = torch.empty(v.shape, dtype=torch.float32)
    edges = tuple(range(0, (nheads + 1) * headdim, headdim))
    given = (*arrays, y, state)
    share_out(_sweep, given, spans, edges, COLUMNS, v.numel() * dkey)(*given)
    return y.to(v.dtype)


@kernel(fastmath={"contract"})
def _sweep(
    q: Any, k: Any, read: Any, v: Any, beta: Any, decay: Any, y: Any, state: Any, blocks: Any
) -> None:  # fmt: skip
    """Scan sequences over blocks of columns, each of one head; ``read`` and ``decay`` may be empty."""
    widest_vectors()
    nheads, dkey, headdim = state.shape[1:]
    S, u = tile_of(dkey, COLUMNS, 0), tile_of(2, COLUMNS, 2)
    for row, start, stop, sequence, low, high in blocks:
        head = low // headdim
        first, width = low - head * headdim, high - low
        group = head * q.shape[2] // nheads
        of_read = head * read.shape[2] // nheads
        read_tile(state[sequence, head], 0, first, first + width, S, dkey)
        for t in range(start, stop):
            for c in range(COLUMNS):
                u[0, c] = 0
                u[1, c] = 0
            for n in range(dkey):
                kept = decay[row, t, head, n if decay.shape[3] > 1 else 0] if decay.size else np.float32(1.0)
                if read.size:
                    key = read[row, t, of_read, n]
                    for c in range(COLUMNS):
                        S[n, c] *= kept
                        u[0, c] += key * S[n, c]
                else:
                    for c in range(COLUMNS):
                        S[n, c] *= kept
            values, size = v[row, t, head, first : first + width], beta[row, t, head]
            for c in range(width):
                u[0, c] = size * (values[c] - u[0, c])
            for n in range(dkey):
                key, query = k[row, t, group, n], q[row, t, group, n]
                for c in range(COLUMNS):
                    S[n, c] += key * u[0, c]
                    u[1, c] += query * S[n, c]
            results = y[row, t, head, first : first + width]
            for c in range(width):
                results[c] = u[1, c]
        write_tile(S, dkey, state[sequence, head], 0, first, first + width)
