"""The record of one trial: what was decided, what is secret, how much time is left."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from typing import Any

from .errors import Refused, Unjudgeable
from .terms import LEVELS, Terms
from .verdict import Verdict


class Docket:
    """What all parts of a trial write to.

    Args:
        verdict: What it is going to be.
        seed: Where all that is random comes from; None draws it, once the candidate is loaded.
        off: Checks that decide nothing, so that tests can show that they are needed.

    Attributes:
        terms: On what terms.
        level: How thorough.
        check: The name of the part of the trial that runs.
        until: When it must have ended, by the clock of `time.perf_counter`.
    """

    def __init__(self, verdict: Verdict, seed: int | None, off: frozenset[str]):
        self.verdict, self.off = verdict, off
        self.terms: Terms = verdict.terms
        self.level = LEVELS[self.terms.level]
        self.began = time.perf_counter()
        self.until = self.began + (self.terms.limit or self.level.limit)
        self.check = ""
        self._seed, self._secret = seed, b""
        self._asked: Counter[tuple[object, ...]] = Counter()

    def draw_secret(self) -> None:
        """Draw what nobody knew while the candidate was loaded."""
        self._secret = os.urandom(6) if self._seed is None else self._seed.to_bytes(6, "little")
        self.verdict.seed = int.from_bytes(self._secret, "little")

    def derived(self, *purpose: object) -> int:
        """Return the seed of one purpose; none tells anything of another."""
        return int.from_bytes(hashlib.sha256(self._secret + repr(purpose).encode()).digest()[:6], "little")

    def anew(self, *purpose: object) -> int:
        """Return another seed each time, whatever other parts of the trial have asked for."""
        self._asked[self.check, purpose] += 1
        return self.derived(self.check, *purpose, self._asked[self.check, purpose])

    def step(self, check: str, failure: str = "", **numbers: Any) -> None:
        """Write down the outcome of a check; a failure decides."""
        ignored = check in self.off
        self.verdict.line(check, not failure or ignored, failure, **numbers)
        if failure and not ignored:
            self.verdict.end("refused", check, failure[:1000])
            raise Refused
        if time.perf_counter() >= self.until:
            raise Unjudgeable(f"the trial took longer than its limit of {self.until - self.began:.0f} s")

    def note(self, text: str) -> None:
        """Write down what is no reason to refuse."""
        self.verdict.note(text)
