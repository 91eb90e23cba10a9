"""The measured limits of a device: the two lines of a roofline (Williams, Waterman, Patterson, 2009)."""

from __future__ import annotations

import torch

from .timing import median_ms

# Bytes of the array that is copied: more than any cache. Sides of the square matrices that are multiplied.
_COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}
_SIDE = {"cpu": 2048, "cuda": 8192}


def ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure a copy and a matrix product.

    Returns:
        ``bytes_per_s`` (read plus written) and ``flops_per_s`` in ``dtype``.
    """
    kind = device.type if device.type in _SIDE else "cpu"
    source = torch.zeros(_COPIED[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied_ms = median_ms(lambda: target.copy_(source), device, budget_s=0.5)
    side = _SIDE[kind]
    matrix = torch.rand(side, side, device=device).to(dtype)
    product_ms = median_ms(lambda: matrix @ matrix, device, budget_s=0.5)
    return {"bytes_per_s": 2e3 * source.nbytes / copied_ms, "flops_per_s": 2e3 * side**3 / product_ms}
