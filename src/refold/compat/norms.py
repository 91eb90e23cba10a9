"""The norms of the package mamba-ssm, under its signatures; `refold.compat.mamba_ssm` offers them.

The package has two modules of them: ``layer_norm``, which adds a residual stream first, and ``layernorm_gated``. Both
define a class ``RMSNorm``; that of the second is `RMSNormGated` here, as most callers name it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refold import ops
from refold.compat.checks import positive, shaped, share, tensors
from refold.errors import ArgumentError
from refold.ops.gated_rmsnorm.spec import EPS

__all__ = ["RMSNorm", "RMSNormGated", "layer_norm_fn", "rms_norm_fn", "rmsnorm_fn"]


@tensors()
def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None, eps: float = 1e-6, dropout_p: float = 0.0,
    rowscale: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:  # fmt: skip
    """Add to a residual stream, then normalise it.

    With the options that are given::

        stream = dropout(rowscale * x) + dropout(x1) + residual
        out = norm(stream) * weight + bias                      norm(v) = (v - mean(v)) / sqrt(var(v) + eps)
        out1 = norm(stream) * weight1 + bias1                   or v / sqrt(mean(v²) + eps) if ``is_rms_norm``

    Arithmetic is float32 (float64 if an input is).

    Args:
        x: ``(..., d)``.
        weight: ``(d,)``.
        bias: ``(d,)``, or None.
        residual: Like ``x``; the stream so far.
        x1: Like ``x``, of a parallel branch; not together with ``rowscale``.
        weight1: ``(d,)``: a second norm of the same stream.
        bias1: ``(d,)``, of the second norm.
        eps: Added to the variance or mean square.
        dropout_p: Share of the elements of ``x`` and ``x1`` that are dropped, in ``[0, 1)``. PyTorch's generator
            chooses them, so they are not the package's for the same seed.
        rowscale: ``x.shape[:-1]``, a factor per row.
        prenorm: Return the stream, too.
        residual_in_fp32: Return the stream in float32 if ``residual`` is None. Else it has the dtype of ``residual``.
        is_rms_norm: Take the RMS norm.
        return_dropout_mask: Return which elements of ``x`` and of ``x1`` were kept; None where nothing can be dropped.

    Returns:
        ``out``, followed by what was asked for in this order: ``out1``, ``stream``, the two masks. ``out`` and ``out1``
        are like ``x``.

    Raises:
        ArgumentError: ``eps`` or ``dropout_p`` is out of range, or arguments exclude each other.
        ShapeError: Axes disagree.
    """
    op = "rms_norm_fn" if is_rms_norm else "layer_norm_fn"
    one = x.shape[-1:]
    shaped(
        op, weight=(weight, one), bias=(bias, one), residual=(residual, x.shape), x1=(x1, x.shape),
        weight1=(weight1, one), bias1=(bias1, one), rowscale=(rowscale, x.shape[:-1]),
    )  # fmt: skip
    share(op, "dropout_p", dropout_p)
    eps = EPS.read(op, eps)
    if rowscale is not None and x1 is not None:
        raise ArgumentError(f"{op}: rowscale and x1 exclude each other. Scale x before the call.")
    if bias1 is not None and weight1 is None:
        raise ArgumentError(f"{op}: bias1 needs weight1; got None.")

    wide = torch.promote_types(x.dtype, torch.float32)
    for value in (residual, x1):
        wide = wide if value is None else torch.promote_types(wide, value.dtype)
    stream = x.to(wide)
    stream = stream if rowscale is None else stream * rowscale[..., None].to(wide)
    stream, mask = _dropout(stream, dropout_p)
    mask1 = None
    if x1 is not None:
        other, mask1 = _dropout(x1.to(wide), dropout_p)
        stream = stream + other
    if residual is not None:
        stream = stream + residual.to(wide)

    def norm(weight: Tensor, bias: Tensor | None) -> Tensor:
        weight, bias = weight.to(wide), None if bias is None else bias.to(wide)
        if not is_rms_norm:
            return F.layer_norm(stream, stream.shape[-1:], weight, bias, eps).to(x.dtype)
        y = ops.gated_rmsnorm(stream, None, weight, eps=eps)
        return (y if bias is None else y + bias).to(x.dtype)

    kept = (torch.float32 if residual_in_fp32 else x.dtype) if residual is None else residual.dtype
    results: list[Tensor | None] = [norm(weight, bias)]
    results += [] if weight1 is None else [norm(weight1, bias1)]
    results += [stream.to(kept)] if prenorm else []
    results += [mask, mask1] if return_dropout_mask else []
    return results[0] if len(results) == 1 else tuple(results)


@tensors()
def rms_norm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, x1: Tensor | None = None,
    weight1: Tensor | None = None, bias1: Tensor | None = None, eps: float = 1e-6, dropout_p: float = 0.0,
    rowscale: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:  # fmt: skip
    """Compute `layer_norm_fn` with ``is_rms_norm=True``; see there."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm,
        residual_in_fp32, True, return_dropout_mask,
    )  # fmt: skip


def _dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """Return ``x`` without a random share of its elements, scaled to the same mean, and which were kept."""
    if p == 0:
        return x, None
    kept = torch.rand(x.shape, device=x.device) >= p
    return torch.where(kept, x / (1 - p), 0), kept


class _Scaled(nn.Module):
    """What both norms hold: ``eps`` and one parameter, ``weight``."""

    bias: None

    def __init__(
        self, hidden_size: int, eps: float, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        positive(type(self).__name__, "hidden_size", hidden_size)
        self.eps = EPS.read(type(self).__name__, eps)
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)


class RMSNorm(_Scaled):
    """An RMS norm that may add to a residual stream first, by `rms_norm_fn`; one parameter, ``weight``.

    Args:
        hidden_size: Channels.
        eps: Added to the mean square.
        dropout_p: Share of the inputs that is dropped in training.
        device: Of the weight.
        dtype: Of the weight.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        share("RMSNorm", "dropout_p", dropout_p)
        super().__init__(hidden_size, eps, device, dtype)
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        """Return the norm of ``x + residual``, and that sum if ``prenorm``; see `layer_norm_fn`."""
        return rms_norm_fn(
            x, self.weight, self.bias, residual=residual, eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )  # fmt: skip


@tensors()
def rmsnorm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6,
    group_size: int | None = None, norm_before_gate: bool = True,
) -> Tensor:  # fmt: skip
    """Normalise groups of channels by their RMS, with a gate, by `refold.ops.gated_rmsnorm`.

    Args:
        x: ``(..., d)``.
        weight: ``(d,)``.
        bias: ``(d,)``, added to the scaled norm, or None.
        z: Gate, like ``x``.
        eps: Added to the mean square.
        group_size: Channels normalised together; None is all.
        norm_before_gate: Gate the normalised values rather than the inputs.

    Returns:
        Like ``x``.

    Raises:
        ShapeError: Axes disagree.
    """
    shaped("rmsnorm_fn", weight=(weight, x.shape[-1:]), bias=(bias, x.shape[-1:]), z=(z, x.shape))
    if bias is None:
        return ops.gated_rmsnorm(x, z, weight, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate)
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, values = None if z is None else z.to(wide), x.to(wide)
    inside = None if norm_before_gate else gate
    y = ops.gated_rmsnorm(values, inside, weight, eps=eps, group_size=group_size) + bias.to(wide)
    return (y if gate is None or not norm_before_gate else y * F.silu(gate)).to(x.dtype)


class RMSNormGated(_Scaled):
    """An RMS norm over groups of channels, with a gate, by `rmsnorm_fn`; one parameter, ``weight``.

    Args:
        hidden_size: Channels.
        eps: Added to the mean square.
        group_size: Channels normalised together; None is all.
        norm_before_gate: Gate the normalised values rather than the inputs.
        device: Of the weight.
        dtype: Of the weight.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, norm_before_gate: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if group_size is not None:
            positive("RMSNormGated", "group_size", group_size)
        super().__init__(hidden_size, eps, device, dtype)
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the norm of ``x`` (..., d) with the gate ``z``, or without one."""
        return rmsnorm_fn(
            x, self.weight, self.bias, z=z, eps=self.eps, group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )  # fmt: skip
