"""Other values for parameters and buffers: what a trained layer, or one that was scaled or set to zero, may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .inputs import cast, generator, is_real

State = Mapping[str, torch.Tensor]


def _grown(value: torch.Tensor, n: torch.Tensor, spread: float) -> torch.Tensor:
    return value * (1 + spread * n.abs())


def _moved(value: torch.Tensor, n: torch.Tensor, spread: float) -> torch.Tensor:
    return _grown(value, n, spread) + spread * _size(value) * (n.flip(0) if n.dim() else n)


def _positive(value: torch.Tensor, n: torch.Tensor, spread: float) -> torch.Tensor:
    return _size(value) * (n.abs() + 0.1)


def _size(value: torch.Tensor) -> float:
    finite = value[value.isfinite()].abs()
    return (float(finite.square().mean().sqrt()) if finite.numel() else 0.0) or 1.0


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "grown": _grown,  # signs and zeros stay
    "moved": _moved,  # nothing stays
    "positive": _positive,
    "negative": lambda value, n, spread: -_positive(value, n, spread),
    "unlike scales": lambda value, n, spread: value * 2.0 ** (3 * n.reshape(-1)[:1].clamp(-1, 1)).sum(),  # 1/8 to 8
    "zero": lambda value, n, spread: torch.zeros_like(value),
}
RARE: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "minute": lambda value, n, spread: 2.0**-40 * _moved(value, n, spread),
    "large": lambda value, n, spread: 64 * _moved(value, n, spread),
    "rows apart": lambda value, n, spread: value * 2.0 ** (-12 * (n[..., :1] if n.dim() else n).abs()),
    "one far": lambda value, n, spread: value + 2.0**16 * _size(value) * (n == n.reshape(-1)[:1].sum()),
}
"""As weights seldom are, so that a threshold or one scale for all of them shows."""


def drawn(kind: str, state: State, parameters: set[str], seed: int, spread: float = 0.3) -> dict[str, torch.Tensor]:
    """Draw values of a kind for all floating-point parameters.

    Of buffers, what is not zero is multiplied by a number above one, because signs may have a meaning there, as of a
    variance, and zeros, as of a mask. Only a buffer of zeros alone gets other values. Integers stay.
    """
    g = generator(seed)
    kinds, new = KINDS | RARE, {}
    for name, value in state.items():
        new[name] = value
        if is_real(value):
            n = torch.randn(value.shape, generator=g).double()
            own = kind if name in parameters else "grown" if bool(value.any()) else "moved"
            new[name] = kinds[own](cast(value, torch.float64), n, spread).to(value.dtype)
    return new


def whole(state: State, seed: int) -> dict[str, torch.Tensor]:
    """Draw weights with which sums of products of small integers are integers."""
    g = generator(seed)
    return {
        name: torch.randint(-1, 2, value.shape, generator=g).to(value.dtype) if value.is_floating_point() else value
        for name, value in state.items()
    }
