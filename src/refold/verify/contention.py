"""Tell whether the machine was busy with something else while times were taken.

If a program waits for a core, its time includes the wait, and a program of several threads waits for the slowest of
them. So on a busy machine, the better of two programs may look ten times slower. While programs are timed, two numbers
are compared: the processor time that all programs used on the cores of this process, and what this process used itself.
If the system does not count processor time, the load average is used. A large spread of the times of one program also
counts as busy.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Others must have used this share of one core, and all together this share of all cores.
OTHERS = 0.15
FULL = 0.85
# The upper fifth of one program's times may be so many times its lower fifth.
SPREAD = 2.0
# The system counts processor time in hundredths of a second: shorter timings are too short to tell.
LEAST_S = 0.2


@dataclass(frozen=True)
class Usage:
    """Seconds since some start: on the clock, of this process on all cores, and of everybody on the same cores.

    ``everybody`` is None if the system does not tell.
    """

    wall: float
    own: float
    everybody: float | None

    def __sub__(self, start: Usage) -> Usage:
        """Subtract: what was used since then."""
        told = None if self.everybody is None or start.everybody is None else self.everybody - start.everybody
        return Usage(self.wall - start.wall, self.own - start.own, told)


def usage() -> Usage:
    """Read what was used until now."""
    return Usage(time.perf_counter(), time.process_time(), _everybody())


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def others(used: Usage) -> float:
    """Return how many cores other programs kept busy; nan if the system does not tell, or the time was too short."""
    if used.everybody is None or used.wall < LEAST_S:
        return math.nan
    return max(0.0, used.everybody - used.own) / used.wall


def crowding() -> float:
    """Return how many times as long a program may take here because others want the same cores; at least 1."""
    return max(1.0, (_load() or 0.0) / cores())


def contention(used: Usage, samples: Sequence[Sequence[float]], available: int | None = None) -> str:
    """Say how the machine was busy with something else; empty if it was not.

    Args:
        used: What was used while times were taken.
        samples: The times of each program.
        available: How many cores this process may use; None asks the system.
    """
    count = cores() if available is None else available
    if used.wall >= LEAST_S:
        if used.everybody is not None:
            if others(used) > OTHERS and used.everybody > FULL * count * used.wall:
                return f"other programs used {others(used):.1f} of {count} cores"
        elif (load := _load()) is not None and load > count + 1:
            return f"the load average was {load:.1f} on {count} cores"
    for times in samples:
        if len(times) >= 5:
            fifths = statistics.quantiles(times, n=5)
            if fifths[-1] > SPREAD * fifths[0]:
                return f"times of one program differed by a factor of {fifths[-1] / fifths[0]:.1f}"
    return ""


def _everybody() -> float | None:
    """Return the seconds of processor time that were used on this process's cores since the machine started."""
    try:
        ours = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        ticks = os.sysconf("SC_CLK_TCK")
        # user, nice, system, then idle and iowait; then interrupts, and what a hypervisor gave to others.
        used = [sum(map(int, [*row[1:4], *row[6:9]])) for row in rows if row and row[0] in ours]
    except (OSError, AttributeError, ValueError):
        return None
    return sum(used) / ticks if used else None


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
