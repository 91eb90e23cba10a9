"""The terms of a trial, and how thorough each level is."""

from __future__ import annotations

from dataclasses import dataclass

from ..timing import LOOKS


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
        hashed: Whether the files of refold, torch and triton are compared before and after.
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
    hashed: bool = False


LEVELS = {
    "quick": Level(0.3, 0.0, False, 1.0, LOOKS, 0, 2),
    "full": Level(20.0, 10.0, True, 20.0, (9, 30, 60, 120), 0, 3, rival=True),
    "paranoid": Level(20.0, 10.0, True, 60.0, (30, 60, 120), 2, 20, sandbox=True, rival=True, hashed=True),
}


@dataclass(frozen=True)
class Terms:
    """The terms of a trial.

    Attributes:
        level: ``quick``, ``full`` or ``paranoid``.
        dtype: What floating-point inputs and parameters are cast to.
        device: ``cpu`` or ``cuda``.
        train: Whether gradients are asked for, and modules are in training mode.
        accept: ``faster``, or ``right``: speed does not count.
        nonfinite: ``finite-only``, or ``strict``: NaN and infinities must come out where the original has them.
        tried: Candidates tried for the same original; they share the chance of error.
        threads: Threads that either side may use.
        timeout: Seconds that one call may take, or loading.
        rival: ``best``: the baseline is the faster of eager and ``torch.compile``, from level full on; or ``eager``.
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
