"""What is known of the rewrites of a graph: which are wanted, what was found out of each, which are made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from ..report import RewriteReport
from .decisions import Store, digest
from .ir.rewrite import Rewrite
from .ir.source import operator_calls
from .options import Options
from .validate.region import Judgement, undisturbed_rng, validate_region

Judge = Callable[[Rewrite, Callable[[], Sequence[Any] | None]], Judgement | None]
"""Judges a rewrite, whose inputs the second argument gives (None if they could not be had)."""


def no_verdict(*_: Any) -> None:
    """Judge nothing: rewrites are made as they are found."""


class Misfit(Exception):
    """A decision does not fit the program that it is to be executed on; the message says where."""


@dataclass(frozen=True)
class Decided:
    """What is known of a graph's rewrites before its compile.

    Attributes:
        rows: The rewrites to apply, by their keys.
        refused: The keys of those that are not to be applied.
        external_scans: How many sizes of cumulative sums are handed to ATen.
        trusted: Whether the rewrites were checked.
    """

    rows: Mapping[str, RewriteReport]
    refused: frozenset[str]
    external_scans: int
    trusted: bool


class Record:
    """Which rewrites of a graph are wanted, and those that are made or refused.

    Args:
        options: How the graph is compiled.
        decided: What was decided of its rewrites; None if that is to be found out.

    Attributes:
        rows: What is known of each rewrite, by its key.
        refused: The keys of those that are not to be made.
        terms: The number of terms in the longest sum that was rewritten.
    """

    def __init__(self, options: Options, decided: Decided | None) -> None:
        self._options, self.decided = options, decided
        self.refused: set[str] = set() if decided is None else set(decided.refused)
        self.rows: dict[str, RewriteReport] = {}
        self.terms = 1

    @property
    def applied(self) -> list[RewriteReport]:
        """The rewrites that are made."""
        return [row for row in self.rows.values() if row.status == "applied"]

    @property
    def known(self) -> bool:
        """Whether it is known that the rewrites fit although the graph was not seen."""
        return self.decided is not None and self.decided.trusted

    @property
    def unjudged(self) -> bool:
        """Whether rewrites are made without a verdict, but for those that are guessed."""
        return self.known or (self._options.verify == "off" and self._options.accept == "always")

    def asks(self, rewrite: Rewrite) -> bool:
        """Tell whether a rewrite is not made without a verdict."""
        return not self.unjudged or (rewrite.guessed and not self.known)

    def wants(self, key: str) -> bool:
        """Tell whether a rewrite may be made."""
        if self.decided is not None:
            return key in self.decided.rows
        return key not in self.refused and key not in self._options.choose.skip

    def note(self, key: str, rewrite: Rewrite, verdict: Judgement | None) -> RewriteReport:
        """Write down a rewrite and what is known of it.

        Raises:
            Misfit: It is not the one that was decided on.
        """
        wrong = "" if verdict is None else verdict.reason
        row = row_of(rewrite, key, verdict) if self.decided is None else self.decided.rows[key]
        if row.signature != rewrite.signature:
            raise Misfit(f"{rewrite.name} [{rewrite.site}] is another one")
        if wrong and self.decided is not None:
            raise Misfit(f"{rewrite.name} [{rewrite.site}] is {wrong}")
        if wrong:
            row = row.refused(wrong)
            self.refused.add(key)
        self.rows[key] = row
        return row

    def apply(self, key: str, rewrite: Rewrite) -> None:
        """Write down that a rewrite is made."""
        self.rows[key] = replace(self.rows[key], status="applied")
        self.terms = max(self.terms, rewrite.terms)


class Judgements:
    """What was found out of rewrites; each is judged once in its place.

    Args:
        options: How the graph is compiled.
        store: Where decisions are kept.
        notes: What is to be told of them, which grows.
        earlier: What the compile found out whose rewrites lost the race together. It holds; each region is now timed
            alone.
        lost: Rewrites (pass, line) that are known to lose the race.

    Attributes:
        found: The judgements, by the signatures of the rewrites.
    """

    def __init__(
        self, options: Options, store: Store, notes: list[str], earlier: Judgements | None, lost: Set[tuple[str, str]]
    ) -> None:
        self._options, self._store, self._notes = options, store, notes
        self._earlier, self._lost = earlier, lost
        self.found: dict[str, Judgement] = {}

    def of(self, rewrite: Rewrite, actual: Callable[[], Sequence[Any] | None]) -> Judgement:
        """Judge a rewrite; ``actual`` are its inputs as the user's data make them, None if they could not be had."""
        if rewrite.signature not in self.found:
            with undisturbed_rng():
                self.found[rewrite.signature] = self._judged(rewrite, actual())
        return self.found[rewrite.signature]

    def _judged(self, rewrite: Rewrite, actual: Sequence[Any] | None) -> Judgement:
        """Judge a rewrite, unless it was judged before in this place."""
        if (rewrite.name, rewrite.source) in self._lost:
            return Judgement("not faster at sizes between the same powers of two")
        before = None if self._earlier is None else self._earlier.found.get(rewrite.signature)
        if before is not None and not before.postponed:
            return before
        facts = [rewrite.signature, str(rewrite.differentiated), str(rewrite.spread), str(rewrite.terms)]
        each = self._earlier is not None
        options = json.dumps(dict(self._options.inductor), sort_keys=True, default=repr)
        key = digest([*facts, self._options.verify, self._options.accept, options, str(each)])
        evidence = None if before is None else before.evidence
        if (found := self._store.get("region", key)) is not None:
            try:
                stored = Judgement.from_dict(found[0])
            except (KeyError, TypeError) as error:
                self._notes.append(
                    f"the stored decision on a region ({found[1]}) cannot be read, so it is checked again: {error}"
                )
            else:
                if not stored.hurried or found[1] != "the disk":
                    return stored
                evidence = stored.evidence  # what a check found does not depend on the load; times do
        verdict = validate_region(rewrite, actual, self._options, each, evidence)
        self._store.put("region", key, dataclasses.asdict(verdict))
        return verdict


def row_of(rewrite: Rewrite, key: str = "", verdict: Judgement | None = None) -> RewriteReport:
    """Describe a rewrite, and what was found out of it."""
    row = RewriteReport(
        key=key,
        signature=rewrite.signature,
        name=rewrite.name,
        site=rewrite.site,
        source=rewrite.source,
        why=rewrite.why,
        detail=rewrite.detail,
        becomes=operator_calls(rewrite.candidate.graph),
        flops_before=rewrite.before.flops,
        flops_after=rewrite.after.flops,
        bytes_before=rewrite.before.bytes,
        bytes_after=rewrite.after.bytes,
        largest_before=rewrite.before.largest,
        largest_after=rewrite.after.largest,
    )
    if verdict is not None:
        row = replace(row, reason=verdict.reason)
        if verdict.evidence is not None:
            row = replace(row, errors=tuple(vars(kind) for kind in verdict.evidence.kinds))
        if (race := verdict.race) is not None:
            row = replace(
                row,
                original_ms=race.base_ms,
                candidate_ms=race.candidate_ms,
                original_by=verdict.original_by,
                speedup=race.speedup,
                at_least=race.at_least,
            )
    return row
