"""How the next token is chosen; shared by the backends."""

import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np

from refold.errors import ArgumentError

COLDEST = 1e-6
"""Least temperature but 0, and least repetition penalty: logits divided by less overflow."""

LEAST_SHARE = 1e-30
"""Least ``top_p``: float32 takes smaller numbers for 0, and no token would be left."""


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice, applied in this order: penalty, temperature, ``top_k``, ``top_p``, ``min_p``.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: Number of tokens to choose from; 0 means all.
        top_p: Choose from the smallest set of likeliest tokens whose probabilities sum to at least this.
        min_p: Choose from the tokens that are at least this times as probable as the likeliest; 0 means all.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of every token that the row has read,
            its prompt included (Keskar et al., 2019, arXiv:1909.05858); 1 changes nothing.
        seed: The same seed, prompts and settings give the same tokens, however they are streamed.

    Raises:
        ArgumentError: a setting is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is(Real, self.temperature) or not (self.temperature == 0 or COLDEST <= self.temperature < math.inf):
            raise ArgumentError(
                f"temperature must be 0 (greedy) or a finite number of {COLDEST} or more; it is {self.temperature!r}."
            )
        if not _is(Integral, self.top_k) or self.top_k < 0:
            raise ArgumentError(f"top_k must be 0 (all tokens) or a positive integer; it is {self.top_k!r}.")
        if not _is(Real, self.top_p) or not LEAST_SHARE <= self.top_p <= 1:
            raise ArgumentError(f"top_p must be a number in (0, 1], {LEAST_SHARE} or more; it is {self.top_p!r}.")
        if not _is(Real, self.min_p) or not 0 <= self.min_p <= 1:
            raise ArgumentError(f"min_p must be a number in [0, 1]; it is {self.min_p!r}.")
        if not _is(Real, self.repetition_penalty) or not COLDEST <= self.repetition_penalty <= 1 / COLDEST:
            raise ArgumentError(
                f"repetition_penalty must be a number from {COLDEST} to {1 / COLDEST:.0f}; "
                f"it is {self.repetition_penalty!r}."
            )
        if not _is(Integral, self.seed) or not 0 <= self.seed < 2**32:
            raise ArgumentError(f"seed must be an integer in [0, 2**32); it is {self.seed!r}.")


def uniforms(seed: int, lengths: np.ndarray, steps: int) -> np.ndarray:
    """Draw numbers in [0, 1) for the next ``steps`` tokens of rows that have read ``lengths`` tokens, ``(b, steps)``.

    A number depends on seed, row and position alone, so that streaming changes nothing: the hash is SplitMix64's
    (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    rows = np.arange(len(lengths), dtype=np.uint64)[:, None]
    positions = lengths.astype(np.uint64)[:, None] + np.arange(steps, dtype=np.uint64)
    state = _mixed(_mixed(_mixed(np.full(positions.shape, seed, np.uint64)) ^ rows) ^ positions)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
