"""What the delta rule does before its recurrence, elementwise, in torch: keys of length one, gates, strengths.

Each has its gradient beside it, because implementations of torch.library run below autograd. All of it is computed in
float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.ops.torch.pointwise import accumulator

NORM_EPS = 1e-6
"""Added to the square of a vector's length before it is divided by."""


def normalized(z: Tensor) -> Tensor:
    """Compute z / sqrt(Σz² + 1e-6) along the last axis."""
    z = z.to(accumulator(z.dtype))
    return z * _inverse_length(z)


def normalized_gradient(dy: Tensor, z: Tensor) -> Tensor:
    """Compute the gradient of z from that of `normalized`: ρ (dy - y⟨y, dy⟩), ρ the inverse length."""
    z = z.to(dy.dtype)
    inverse = _inverse_length(z)
    y = z * inverse
    return inverse * (dy - y * (y * dy).sum(-1, keepdim=True))


def _inverse_length(z: Tensor) -> Tensor:
    return torch.rsqrt(z.square().sum(-1, keepdim=True) + NORM_EPS)


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Compute the log decays, (b, t, h, 1 or n), from gates (b, t, h) or (b, t, h, n)."""
    raw, rate = _raw(g, A_log, dt_bias)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(raw if rate is None else rate * raw)
    return raw if rate is None else -rate * F.softplus(raw)


def log_decay_gradient(
    dlog: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> dict[str, Tensor]:
    """Compute the gradients of the gates, of A_log and of dt_bias from that of the log decays."""
    raw, rate = _raw(g.to(dlog.dtype), A_log, dt_bias)
    drate = None
    if lower_bound is not None:
        share = torch.sigmoid(raw if rate is None else rate * raw)
        draw = torch.ops.aten.sigmoid_backward(dlog, share) * lower_bound
        if rate is not None:
            draw, drate = draw * rate, draw * raw
    elif rate is not None:
        drate = -dlog * F.softplus(raw)
        draw = -rate * torch.ops.aten.softplus_backward(dlog, raw, 1.0, 20.0)
    else:
        draw = dlog
    grads = {"g": draw.reshape(g.shape)}
    if A_log is not None and rate is not None and drate is not None:
        grads["A_log"] = (drate * rate).sum((0, 1, 3))
    if dt_bias is not None:
        grads["dt_bias"] = draw.sum((0, 1)) if dt_bias.ndim == 2 else draw.sum((0, 1, 3))
    return grads


def _raw(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gates with their bias, (b, t, h, 1 or n), and exp(A_log), (h, 1)."""
    raw = g.to(accumulator(g.dtype))
    raw = raw[..., None] if g.ndim == 3 else raw
    if dt_bias is not None:
        raw = raw + dt_bias.to(raw.dtype).reshape(raw.shape[2], -1)
    return raw, None if A_log is None else A_log.to(raw.dtype).exp()[:, None]


def strength(beta: Tensor, beta_limit: float | None) -> Tensor:
    """Compute beta, or beta_limit * sigmoid(beta)."""
    beta = beta.to(accumulator(beta.dtype))
    return beta if beta_limit is None else beta_limit * torch.sigmoid(beta)


def strength_gradient(dstrength: Tensor, beta: Tensor, beta_limit: float | None) -> Tensor:
    """Compute the gradient of beta from that of `strength`."""
    if beta_limit is None:
        return dstrength
    share = torch.sigmoid(beta.to(dstrength.dtype))
    return dstrength * beta_limit * share * (1 - share)
