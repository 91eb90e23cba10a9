"""The parts of one decoding step, in as few passes over memory as possible: products after a norm, scans, attention.

Each function is defined here in PyTorch and refold's operators. On a GPU, kernels that compute the same replace
them: a layer of Mamba-2 is then three launches, one of Mamba-1 four, each of which reads its weights or its state once.
Attention is two launches next to its products, and reads the past once.
Nothing here has a gradient. ``active`` marks the rows that read a token; the states of the others stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from refold import ops
from refold.models.torch.heads import Heads
from refold.models.torch.layers import few_rows, kernels, linear, rms_norm, rotate, wide
from refold.ops.torch.cuts import summed


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 0.0,
    group_size: int | None = None, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Return ``weight @ norm(x) + bias`` in float32.

    Args:
        x: Inputs, ``(b, size)``; ``(b, 2 size)`` if ``gated``.
        weight: ``(out, size)``.
        bias: ``(out,)``.
        norm: Weight of an RMS norm of x, ``(size,)``.
        eps: Added to its mean squares.
        group_size: Channels that are normalised together; all if None.
        gated: x has two halves, and ``silu(first) * second`` is what is multiplied.
    """
    if (fused := _fused(x, weight, group_size)) is not None:
        return fused.project(x, weight, bias, norm, eps, group_size, gated)
    if gated:
        first, second = x.chunk(2, -1)
        x = F.silu(first) * second
    if norm is not None:
        x = rms_norm(x, norm, eps, group_size)
    if (few := few_rows()) is not None and few.takes(x, weight):
        product = few.product(x, weight)
        return product if bias is None else product.add_(bias)
    return linear(x, weight, bias).to(wide(weight.dtype))


def project_all(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, norm: Tensor, eps: float
) -> list[Tensor]:
    """Return `project` for each of several weights; where the norm is a pass of its own, it is computed once."""
    fused = _fused(x, weights[0])
    if fused is not None and len(x) == 1:
        return [project(x, weight, bias, norm=norm, eps=eps) for weight, bias in zip(weights, biases, strict=True)]
    x = rms_norm(x, norm, eps) if fused is None else fused.normalised(x, norm, eps)
    return [project(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def project_and_convolve_(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, norm: Tensor, eps: float, window: Tensor, taps: Tensor,
    taps_bias: Tensor | None, first: int, active: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return `project` with a step of the causal convolution, and SiLU, on the channels from ``first`` on.

    Args:
        x: Inputs, ``(b, size)``.
        weight: ``(out, size)``.
        bias: ``(out,)``.
        norm: Weight of the RMS norm of x.
        eps: Added to its mean square.
        window: Last inputs of the convolution, ``(b, channels, w-1)``; moved on.
        taps: ``(channels, w)``.
        taps_bias: ``(channels,)``.
        first: Channel of the product where the convolution begins.
        active: Rows whose window is moved on, ``(b,)``; all if None.
    """
    if (fused := _fused(x, weight)) is not None:
        convolution = (window, taps, taps_bias, active, first)
        return fused.project(x, weight, bias, norm, eps, None, False, convolution)
    projected = project(x, weight, bias, norm=norm, eps=eps)
    channels = projected[:, first : first + len(taps)]
    y, moved = ops.causal_conv1d_step(channels, taps, window, taps_bias, activation="silu")
    window.copy_(moved if active is None else torch.where(active[:, None, None], moved, window))
    channels.copy_(y)
    return projected


def add_projected_(
    hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Tensor | None = None,
    eps: float = 0.0, group_size: int | None = None, gated: bool = False, scale: float = 1.0,
    heads: Heads | None = None,
) -> None:  # fmt: skip
    """Add ``scale`` times `project` to ``hidden (b, out)``; with ``heads``, the sum of the products of all ranks."""
    if heads is not None:
        y = summed(heads.cut, project(x, weight, norm=norm, eps=eps, group_size=group_size, gated=gated))
        hidden.add_(y if bias is None else y + bias, alpha=scale)
        return
    if (fused := _fused(x, weight, group_size)) is not None:
        fused.project(x, weight, bias, norm, eps, group_size, gated, onto=hidden, scale=scale, out=hidden)
        return
    hidden.add_(project(x, weight, bias, norm=norm, eps=eps, group_size=group_size, gated=gated), alpha=scale)


def ssd_(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, z: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor,
    dt_limit: tuple[float, float], state: Tensor, active: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the gated output ``(b, h, p)`` of a step of `ops.ssd`, and overwrite ``state``."""
    if (fused := kernels(x)) is not None:
        return fused.ssd_(x, B, C, dt, z, A_log, D, dt_bias, dt_limit, state, active)
    dt, A = step_sizes(dt, dt_bias, active, dt_limit), -A_log.exp()
    if (few := few_rows()) is not None and few.takes_state(x, state) and D.ndim == 1:
        return few.ssd_(x, dt, A, B, C, state).addcmul_(x, D[:, None]).mul_(F.silu(z))
    return ops.ssd_step_(x, dt, A, B, C, state, D=D, z=z)[0]


def selective_scan_(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, dt_proj: Tensor, dt_bias: Tensor, A_log: Tensor, D: Tensor,
    state: Tensor, active: Tensor | None, *, eps: float | None = None,
    norms: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Return the gated output ``(b, d)`` of a step of `ops.selective_scan`, and overwrite ``state (b, d, n)``.

    Args:
        x: Inputs, ``(b, d)``.
        dt: Step sizes before their product with ``dt_proj``, ``(b, r)``.
        B: Input weights, ``(b, n)``.
        C: Output weights, ``(b, n)``.
        z: Gate, ``(b, d)``.
        dt_proj: ``(d, r)``.
        dt_bias: Added to the product, before the softplus, ``(d,)``.
        A_log: ``log(-A)``, ``(d, n)``.
        D: ``(d,)``.
        state: Moved on.
        active: Rows whose state is moved on, ``(b,)``; all if None.
        eps: Added to the mean squares of RMS norms of dt, B and C; None where they are not normalised.
        norms: The weights of these norms; ones if None.
    """
    if (fused := kernels(x)) is not None:
        return fused.selective_scan_(x, dt, B, C, z, dt_proj, dt_bias, A_log, D, state, active, eps, norms)
    if eps is not None:
        ones = 3 * (dt_proj.new_ones(()),)
        dt, B, C = (rms_norm(a, weight, eps) for a, weight in zip((dt, B, C), norms or ones, strict=True))
    dt = step_sizes(linear(dt, dt_proj), dt_bias, active)
    B, C = B.to(x.dtype), C.to(x.dtype)
    return ops.selective_scan_step_(x, dt, -A_log.exp(), B, C, state, D=D, z=z)[0]


def attend_(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, length: Tensor, *, scale: float,
    theta: float | None = None, rope_dim: int | None = None,
) -> Tensor:  # fmt: skip
    """Attend from one token per row, ``(b, h e)``, and write its key and value into the caches.

    Args:
        q: Queries, ``(b, h, e)``.
        k: Keys, ``(b, g, e)``; ``h / g`` query heads read the same ones.
        v: Values, ``(b, g, e)``.
        k_cache: Keys of the past, ``(b, capacity, g, e)``; it must have room.
        v_cache: Values of the past, likewise.
        length: Tokens of each row's past, ``(b,)``; what the caches hold beyond is not read.
        scale: Factor of the scores.
        theta: Base of the rotary positions of q and k; None if they have none.
        rope_dim: How many numbers of a head are rotated; all if None.
    """
    if (fused := kernels(q)) is not None and fused.takes_cache(q, k_cache, v_cache):
        return fused.attend_(q, k, v, k_cache, v_cache, length, scale, theta, rope_dim)
    q, k = rotate(q, length, theta, rope_dim), rotate(k, length, theta, rope_dim)
    row, slot = torch.arange(len(q), device=q.device), length.long()
    k_cache[row, slot], v_cache[row, slot] = k.to(k_cache.dtype), v.to(v_cache.dtype)
    seen = torch.arange(k_cache.shape[1], device=q.device) <= length[:, None]  # (b, capacity)
    q = q.to(k_cache.dtype).unflatten(1, (k_cache.shape[2], -1))
    scores = torch.einsum("bkre,bske->bkrs", q, k_cache).to(wide(q.dtype)) * scale
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bkrs,bske->bkre", shares, v_cache).flatten(1)


def step_sizes(dt: Tensor, bias: Tensor, active: Tensor | None, limit: tuple[float, float] = (0.0, math.inf)) -> Tensor:
    """Return float32 step sizes; zero, which leaves a state as it is, in rows that are not active."""
    sizes = F.softplus(dt.to(wide(dt.dtype)) + bias).clamp(*limit)
    return sizes if active is None else sizes * active[:, None]


def _fused(x: Tensor, weight: Tensor, group_size: int | None = None) -> ModuleType | None:
    """Return the kernels if they take a product of this size."""
    fused = kernels(x)
    return fused if fused is not None and fused.takes(x, weight, group_size) else None
