"""Count the lines of each room of the house, and compare them with its budget.

    python tools/lines.py           # prints the rooms; fails if one is over its budget
    python tools/lines.py --set     # writes new budgets, for a commit that says why a room grew

A room is a folder of the source or of the tests. Its budget stands in `tools/lines.txt`: the lines that it had when it
was last set, rounded up. So growth is announced, in a line of the commit that it comes with.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

HOME = Path(__file__).parents[1]
BUDGET = HOME / "tools" / "lines.txt"
# Folders whose folders are rooms of their own.
DIVIDED = ("src/refold", "src/refold/compiler", "tests", "tests/cpu")
# Budgets are multiples of this.
STEP = 50


def rooms(home: Path = HOME) -> dict[str, int]:
    """Return the number of lines of Python in each room."""
    found: Counter[str] = Counter()
    for file in sorted([*home.glob("src/**/*.py"), *home.glob("tests/**/*.py")]):
        parts = file.parent.relative_to(home).parts
        depth = next(
            n for n in range(1, len(parts) + 1) if n == len(parts) or "/".join(parts[:n]) not in (*DIVIDED, "src")
        )
        found["/".join(parts[:depth])] += len(file.read_text().splitlines())
    return dict(sorted(found.items()))


def budgets(text: str) -> dict[str, int]:
    """Read the file of budgets: a room and its lines in each line."""
    return {room: int(lines) for room, lines in (line.split() for line in text.splitlines())}


def over(found: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """Say of each room that is over its budget, or has none, by how much."""
    return [
        f"{room} has {lines} lines, and its budget is {allowed.get(room, 0)}"
        for room, lines in found.items()
        if lines > allowed.get(room, 0)
    ]


def main() -> int:
    """Print the rooms, and check or set their budgets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", action="store_true", help="write new budgets")
    found = rooms()
    if parser.parse_args().set:
        BUDGET.write_text("".join(f"{room} {-(-lines // STEP) * STEP}\n" for room, lines in found.items()))
    allowed = budgets(BUDGET.read_text())
    for room, lines in found.items():
        print(f"{lines:7d} of {allowed.get(room, 0):7d}  {room}")
    for part in ("src", "tests"):
        print(f"{sum(lines for room, lines in found.items() if room.startswith(part)):7d}  {part}")
    wrong = over(found, allowed)
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
