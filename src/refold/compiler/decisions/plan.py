"""A plan: decisions that a user pins, so that two runs, or two ranks, run the same programs (design decision 20).

A report is a plan. It says for each graph by name what runs, and which rewrites were applied. Replayed, nothing is
timed: each graph gets what the plan says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ...report import GraphReport, Report


class Plan:
    """Decisions by the names of graphs."""

    def __init__(self, graphs: Mapping[str, GraphReport]) -> None:
        self.graphs = dict(graphs)

    @classmethod
    def read(cls, source: Any) -> Plan:
        """Take a plan from a report, from a report's data, or from a file that one was written to.

        Raises:
            ArgumentError: It is none of these.
        """
        if isinstance(source, Plan):
            return source
        if isinstance(source, (str, os.PathLike)):
            try:
                source = json.loads(Path(source).read_text())
            except OSError as error:
                raise ArgumentError(f"plan {os.fspath(source)!r} cannot be read: {error.strerror}") from None
            except ValueError as error:
                raise ArgumentError(f"plan {os.fspath(source)!r} is not JSON: {error}") from None
        if isinstance(source, Mapping):
            try:
                source = Report.from_dict(source)
            except (KeyError, TypeError, ValueError) as error:
                raise ArgumentError(
                    f"plan is not a report ({error}). Write one with report.save(path) or refold optimize --json"
                ) from None
        if not isinstance(source, Report):
            raise ArgumentError(f"plan must be a report or a path to one, not {type(source).__name__}")
        return cls({graph.program: graph for graph in source.graphs if graph.program})
