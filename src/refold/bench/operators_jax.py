"""`refold.ops.ssd` on JAX: forward, and with the gradients of all arguments.

Times are taken by the host's clock, of whole compiled calls. A row is refused if the result of the first tokens differs
from the torch backend's in float64 by more than its dtype allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import refold

from .language_models import seconds
from .progress import wanted
from .rows import Row

# Relative L2 error of the result.
BOUND = 4e-3
HEAD = 256  # tokens of the first row that are compared


def ssd_jax(
    *, batch: int = 8, tokens: int = 4096, heads: int = 80, channels: int = 64, states: int = 128, rounds: int = 15
) -> Iterator[Row]:
    """Time ssd on JAX in bfloat16, one group, D, bias and softplus: forward, and with all gradients."""
    case = f"{batch}x{tokens}x{heads}, {channels}x{states}"
    if not wanted(case=case):
        return
    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    x, dy = (normal(batch, tokens, heads, channels) for _ in range(2))
    dt = normal(batch, tokens, heads)
    A = -2 * jnp.asarray(rng.uniform(size=heads), jnp.float32)
    B, C = (normal(batch, tokens, 1, states) for _ in range(2))
    D, bias = normal(heads, dtype=jnp.float32), normal(heads, dtype=jnp.float32) - 2
    given = (x, dt, A, B, C, D, bias)

    def forward(*arrays: jax.Array) -> jax.Array:
        *first, D, bias = arrays
        return refold.ops.ssd(*first, D=D, dt_bias=bias, dt_softplus=True)[0]

    def both(dy: jax.Array, *arrays: jax.Array) -> Any:
        y, gradients = jax.vjp(forward, *arrays)
        return y, gradients(dy)

    row: Row = {"op": refold.ops.ssd.__name__, "backend": "jax", "case": case, "dtype": "bfloat16"}
    row["device"], row["error"] = jax.devices()[0].device_kind, _error(forward(*given), given)
    if not row["error"] <= BOUND:
        yield row | {"refused": f"error above {BOUND}"}
        return
    for name, fn, arrays in (("forward", forward, given), ("both", both, (dy, *given))):
        start = time.perf_counter()
        compiled = jax.jit(fn).lower(*arrays).compile()
        row[f"{name}_compile_s"] = time.perf_counter() - start
        times = seconds(lambda: jax.block_until_ready(compiled(*arrays)), rounds + 2)  # noqa: B023
        row[f"{name}_ms"] = 1e3 * statistics.median(times[2:])
        row[f"{name}_temporary_bytes"] = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    yield row


def _error(y: jax.Array, given: tuple[jax.Array, ...]) -> float:
    """Return the error of the first tokens of the first row."""
    x, dt, A, B, C, D, bias = (torch.from_numpy(np.array(v, np.float32)).double() for v in given)
    x, dt, B, C = (v[:1, :HEAD] for v in (x, dt, B, C))
    want = refold.ops.ssd(x, dt, A, B, C, D=D, dt_bias=bias, dt_softplus=True, backend="torch")[0]
    got = torch.from_numpy(np.array(y[:1, :HEAD], np.float32)).double()
    return float((got - want).norm() / want.norm())
