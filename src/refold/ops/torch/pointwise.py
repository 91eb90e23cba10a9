"""What scans do before and after the recurrence, elementwise: step sizes, skip, gate; and their gradients.

Hand-written gradients, because torch.library implementations run below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Optional = TypeVar("Optional", Tensor, Tensor | None)


def wide(array: Optional, x: Tensor) -> Optional:
    """Return an array in float64 if x is float64; None stays None."""
    return array.double() if array is not None and x.dtype == torch.float64 else array


Results = TypeVar("Results", bound=Iterable[Tensor] | dict[str, Tensor])


def carefully_if_needed(compute: Callable[[bool], Results], device: torch.device) -> Results:
    """Return ``compute(False)`` where that is finite, else ``compute(True)``, which minds what is not.

    Whatever is not finite in the inputs shows in the results. Asking takes one pass over them; on an accelerator it
    would wait for the device, and a graph does not know: there the careful way is always taken.
    """
    if device.type == "cpu" and not torch.compiler.is_compiling():
        results = compute(False)
        found = results.values() if isinstance(results, dict) else results
        sums = [r.sum(dtype=accumulator(r.dtype)) for r in found]
        if torch.stack([s.double() for s in sums]).isfinite().all():
            return results
    return compute(True)


def zeros_for_bad(array: Tensor) -> Tensor:
    """Return an array with zeros for what is not finite."""
    return torch.nan_to_num(array, 0.0, 0.0, 0.0)


def step_size(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] | None) -> Tensor:
    """Return the step that the recurrence takes, in accumulator precision."""
    dt = dt.to(accumulator(dt.dtype))
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt if limit is None else dt.clamp(*limit)


def step_size_gradient(
    dstep: Tensor, dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] | None
) -> Tensor:
    """Return the gradient of ``dt`` (its sum over tokens is that of the bias) from that of the step size."""
    raw = dt.to(dstep.dtype) if bias is None else dt.to(dstep.dtype) + bias.to(dstep.dtype)
    step = F.softplus(raw) if softplus else raw
    if limit is not None:
        dstep = dstep.masked_fill((step < limit[0]) | (step > limit[1]), 0.0)  # which keeps that of a NaN
    return dstep * torch.where(raw > 20, 1.0, torch.sigmoid(raw)) if softplus else dstep


def finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Add the skip connection and gate; ``D`` broadcasts against ``x``. May write into ``y``."""
    if D is not None:
        y = y.addcmul_(x, D.to(y.dtype).expand_as(y))
    return y if z is None else y.mul_(F.silu(z.to(y.dtype)))


def finish_gradient(
    dout: Tensor, y: Tensor | None, x: Tensor, D: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of ``y`` before skip and gate, of ``D`` token by token, and of ``z``.

    ``y`` is the result before skip and gate; only the gradient of ``z`` needs it.
    """
    dz = None
    if z is not None:
        gate = torch.sigmoid(z)
        silu = z * gate
        if y is not None:
            total = y if D is None else torch.addcmul(y, x, D.to(y.dtype).expand_as(y))
            dz = dout * total * (gate + silu * (1 - gate))
        dout = dout * silu
    return dout, None if D is None else dout * x, dz
