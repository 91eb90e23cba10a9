"""The report as data. Times are milliseconds, sizes bytes; None means not measured."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

SCHEMA = 2


@dataclass(frozen=True)
class RewriteReport:
    """One rewrite: what was recognised, what it saves, how it was judged.

    ``detail`` says what was found, for a product in index notation, and ``becomes`` which operators are called instead.
    ``key`` names its place in the graph, ``signature`` is a digest of both versions of its region.
    """

    name: str
    site: str
    source: str
    why: str
    detail: str
    flops_before: int
    flops_after: int
    bytes_before: int
    bytes_after: int
    largest_before: int
    largest_after: int
    status: str = "found"
    reason: str = ""
    errors: tuple[dict[str, Any], ...] = ()
    original_ms: float | None = None
    original_by: str = ""
    candidate_ms: float | None = None
    speedup: float | None = None
    at_least: float | None = None
    key: str = ""
    signature: str = ""
    becomes: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RewriteReport:
        """Return the row that ``dataclasses.asdict`` wrote; see `GraphReport.from_dict`."""
        return cls(**{**data, "errors": tuple(data["errors"])})

    def refused(self, reason: str) -> RewriteReport:
        """Return this row as that of a rewrite which is not to run."""
        return dataclasses.replace(self, status="refused", reason=reason)


@dataclass(frozen=True)
class GraphReport:
    """One graph that Dynamo handed over, and what was decided: a value, which is executed as it stands.

    ``chosen`` is what runs from now on: ``refold``, ``inductor`` or ``eager``. ``checks`` has an entry for each output,
    gradient and written input of the whole graph, and ``checked_against`` says with what they were compared.
    ``program`` names the graph, see docs/compiler.md; ``remembered`` says who knew all this already: ``this process``,
    ``the disk``, ``a plan``, or empty. ``busy`` says how the machine was busy while times were taken, and
    ``provisional`` that they left open what is faster.
    ``compile_s``, ``checks_s`` (checks and timing) and ``inductor_compile_s`` (torch.compile of the original, if that
    was timed, too) are parts of the first call, in seconds, and share nothing.
    ``kernels`` has, for each program that was profiled, what one call launches: name, count and milliseconds.
    """

    index: int
    mode: str = "inference"
    chosen: str = "inductor"
    reason: str = ""
    rewrites: tuple[RewriteReport, ...] = ()
    loops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    flops_before: int = 0
    flops_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    times_ms: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    speedup: float | None = None
    speedup_at_least: float | None = None
    speedup_at_most: float | None = None
    checked_against: str = ""
    checks: tuple[dict[str, Any], ...] = ()
    difference_from_eager: float | None = None
    compile_s: float = 0.0
    inductor_compile_s: float | None = None
    checks_s: float = 0.0
    program: str = ""
    remembered: str = ""
    busy: str = ""
    provisional: bool = False
    external_scans: int = 0
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GraphReport:
        """Return the entry that ``dataclasses.asdict`` wrote.

        Raises:
            KeyError or TypeError: The data is not that of an entry.
        """
        rows = tuple(RewriteReport.from_dict(row) for row in data["rewrites"])
        lists = {name: tuple(data[name]) for name in ("loops", "notes", "checks")}
        return cls(**{**data, **lists, "rewrites": rows})

    @property
    def runs(self) -> str:
        """What runs from now on, as the times name it."""
        return "torch.compile" if self.chosen == "inductor" else self.chosen

    @property
    def applied(self) -> list[RewriteReport]:
        """The rewrites that run from now on."""
        return [rewrite for rewrite in self.rewrites if rewrite.status == "applied"]

    def saying(self, *notes: str) -> GraphReport:
        """Return this entry with further notes, each told once."""
        return dataclasses.replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def without(self, reason: str) -> GraphReport:
        """Return this entry with no rewrite applied, for a reason."""
        rows = (row.refused(reason) if row.status == "applied" else row for row in self.rewrites)
        return dataclasses.replace(self, rewrites=tuple(rows))


@dataclass
class Contents:
    """Everything that happened in the compiles of one callable, one entry per graph.

    ``notes`` is about what became no graph: functions that Dynamo skipped.
    ``ceilings`` holds the measured limits of the device, if they were measured: ``bytes_per_s`` and ``flops_per_s``.
    """

    target: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    graphs: list[GraphReport] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def rewrites(self) -> list[RewriteReport]:
        """All rewrites of all graphs, applied or not."""
        return [rewrite for graph in self.graphs for rewrite in graph.rewrites]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data; None stands for numbers that are not finite."""
        return {"schema": SCHEMA, **_finite(dataclasses.asdict(self))}

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that `to_dict` wrote.

        Raises:
            KeyError, TypeError or ValueError: The data is not that of a report.
        """
        if data["schema"] != SCHEMA:
            written = data["schema"]
            raise ValueError(f"another version of refold wrote it: its schema is {written!r}, this version's {SCHEMA}")
        graphs = [GraphReport.from_dict(graph) for graph in data["graphs"]]
        notes = list(data.get("notes", []))
        return cls(str(data["target"]), dict(data["environment"]), graphs, dict(data.get("ceilings", {})), notes)


def _finite(data: Any) -> Any:
    """Put None in place of infinities and NaN."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
