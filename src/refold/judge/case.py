"""What a check is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .comparison import Comparison
from .docket import Docket
from .sides import Sides


@dataclass(frozen=True)
class Case:
    """One candidate beside its original.

    Attributes:
        docket: The record of the trial.
        sides: The programs in their processes.
        comparison: Compares calls.
    """

    docket: Docket
    sides: Sides
    comparison: Comparison


Check = Callable[[Case], None]
"""A part of a trial: it makes calls, and writes down what they show."""
