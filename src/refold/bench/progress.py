"""Progress of a run: the current measurement, how many are left, and which ones a file already has.

A suite asks `wanted` before each measurement. A run first goes through its suites with `wanted` answering no, to count
the measurements. Then it makes those that are missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .rows import Row


@dataclass
class BenchRun:
    """One run of suites.

    Attributes:
        done: Rows that need not be measured again; those that say why something was not run do not count.
        told: Is called with what is measured now; None while measurements are counted.
        suite: The suite that runs.
        ends: The time, by ``time.monotonic``, after which no measurement begins.
        count: Measurements that were asked for and are not done.
        left: Those of them that were not begun in time.
    """

    done: Sequence[Row] = ()
    told: Callable[[str], None] | None = None
    suite: str = ""
    ends: float = math.inf
    count: int = field(default=0, init=False)
    left: int = field(default=0, init=False)

    def wanted(self, what: dict[str, Any]) -> bool:
        """Tell whether a measurement is to be made now."""
        named = {"suite": self.suite, **what}
        made = (row for row in self.done if not isinstance(row.get("not_run"), str))
        if any(all(str(row.get(key)) == str(value) for key, value in named.items()) for row in made):
            return False
        self.count += 1
        if self.told is None:
            return False
        if time.monotonic() > self.ends:
            self.left += 1
            return False
        self.told(f"{self.suite} {' '.join(map(str, what.values()))}")
        return True


_ACTIVE: ContextVar[BenchRun | None] = ContextVar("run", default=None)


def wanted(**what: Any) -> bool:
    """Tell whether a measurement is to be made.

    Args:
        what: Names it: keys and values as its row will have them.
    """
    run = _ACTIVE.get()
    return run is None or run.wanted(what)


@contextmanager
def active(run: BenchRun) -> Iterator[BenchRun]:
    """Let `wanted` ask this run inside of the ``with`` block."""
    token = _ACTIVE.set(run)
    try:
        yield run
    finally:
        _ACTIVE.reset(token)


def count(suites: Iterable[tuple[str, Callable[[], Iterator[Row]]]], done: Sequence[Row]) -> int:
    """Return how many measurements are still to be made."""
    with active(BenchRun(done)) as run:
        for run.suite, rows in suites:
            for _ in rows():
                pass
    return run.count


@contextmanager
def shown(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what is measured now, of how many, and about how long the rest takes.

    A bar on a terminal; a line per measurement elsewhere. Both on standard error.
    """
    console, number = Console(stderr=True), 0
    if quiet or not console.is_terminal:

        def line(text: str) -> None:
            nonlocal number
            number += 1
            if not quiet:
                console.print(f"... {number}/{total} {text}", highlight=False, markup=False, soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)

        def move(text: str) -> None:
            nonlocal number
            bar.update(task, description=text, completed=number)
            number += 1

        yield move
