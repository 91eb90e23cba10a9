"""The terms of a trial, and how thorough each level is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..early import SINGLE
from ..errors import ArgumentError
from ..verify.timing import LOOKS

DTYPES = ("float32", "float16", "bfloat16", "float64")
_CHOICES = {
    "dtype": DTYPES,
    "device": ("cpu", "cuda"),
    "accept": ("faster", "right"),
    "rival": ("best", "eager"),
    "nonfinite": ("finite-only", "strict"),
}
_MOST = {"tried": 10**9, "threads": 4096, "timeout": 86400, "limit": 604800}


@dataclass(frozen=True)
class Level:
    """How thorough a trial is.

    Attributes:
        kinds_s: About the seconds that kinds of random inputs may take; normal ones and integers are always tried.
        shapes_s: The same for other shapes, of which two are always tried; with 0, none is.
        deep: Whether layouts and special values are checked.
        seconds: The longest that timing may take.
        looks: After how many pairs of calls the timing test is applied.
        confirmations: Timing tests repeated in fresh processes with fresh seeds.
        repeats: Calls that must give the same bits.
        sandbox: Whether there must be one, whatever the caller allows.
        rival: Whether the original compiled by ``torch.compile`` is a baseline, too.
        limit: Seconds that the trial as a whole may take.
    """

    kinds_s: float
    shapes_s: float
    deep: bool
    seconds: float
    looks: tuple[int, ...]
    confirmations: int
    repeats: int
    sandbox: bool = False
    rival: bool = False
    limit: float = 600.0


LEVELS = {
    "quick": Level(0.3, 0.0, False, 1.0, LOOKS, 0, 2, limit=180.0),
    "full": Level(20.0, 10.0, True, 20.0, (9, 30, 60, 120), 0, 3, rival=True),
    "paranoid": Level(20.0, 10.0, True, 60.0, (30, 60, 120), 2, 20, sandbox=True, rival=True, limit=3600.0),
}


def threads(level: str) -> int:
    """Return the threads of a trial of a level: those that torch uses, and one at level quick."""
    return 1 if level in SINGLE else torch.get_num_threads()


@dataclass(frozen=True)
class Terms:
    """The terms of a trial.

    Attributes:
        level: ``quick`` (seconds), ``full`` (up to a minute) or ``paranoid`` (minutes).
        dtype: What floating-point inputs and parameters are cast to.
        device: ``cpu`` or ``cuda``.
        train: Whether gradients are compared and timed as well, with modules in training mode.
        accept: ``faster``: only what is faster than the original beyond noise; ``right``: whatever is right.
        nonfinite: ``strict`` refuses a candidate that returns NaN or infinities elsewhere than the original when an
            input holds one; ``finite-only`` notes it.
        tried: How many candidates were tried for this original. Each timing test then errs with 1 % divided by it.
        threads: Threads of either side. `judge` takes one at level quick, and else those that torch uses.
        timeout: Seconds that loading or one call may take.
        rival: ``best``: the candidate must be faster than the original, and than the original under ``torch.compile``,
            from level full on; ``eager``: the original.
        limit: Seconds that the trial as a whole may take; 0 is the level's own (180 s, 10 minutes, an hour).

    Raises:
        ArgumentError: One has a value that it cannot have.
    """

    level: str = "full"
    dtype: str = "float32"
    device: str = "cpu"
    train: bool = False
    accept: str = "faster"
    nonfinite: str = "finite-only"
    tried: int = 1
    threads: int = 1
    timeout: float = 60.0
    rival: str = "best"
    limit: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in {"level": tuple(LEVELS), **_CHOICES}.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if not isinstance(self.train, bool):
            raise ArgumentError(f"train must be true or false, not {self.train!r:.80}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            whole = name in ("tried", "threads")
            right = type(value) is int or (type(value) is float and not whole)
            if not right or not (0 < value <= most or (name == "limit" and value == 0)) or not math.isfinite(value):
                raise ArgumentError(f"{name} must be positive and at most {most}, not {value!r:.80}")
