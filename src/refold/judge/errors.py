"""Why a trial ends before all checks have run."""

from __future__ import annotations

from ..errors import RefoldError
from .messages import Failure


class Refused(Exception):
    """A check decided."""


class Misbehaved(RefoldError):
    """A program under trial did what it may not; ``check`` is the rule it broke."""

    def __init__(self, check: str, reason: str):
        super().__init__(reason)
        self.check, self.reason = check, reason


class Raised(Misbehaved):
    """A program raised an exception; its process lives on."""

    def __init__(self, failure: Failure):
        text = f"it raised {failure.type}: {failure.text[:500]}"
        super().__init__("P4", text + (f" (line {failure.lines[-1]})" if failure.lines else ""))
        self.failure = failure


class Enough(RefoldError):
    """All branches of a candidate have run."""


class Unjudgeable(RefoldError, RuntimeError):
    """Whether a candidate is acceptable cannot be found out here; the message says why."""
