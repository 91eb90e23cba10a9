"""Programs that take turns: what else the machine does for a while meets all of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Turn = Callable[[], Any]


def take_turns(
    runs: Mapping[str, Turn], rounds: int, sample: Callable[[Turn, Sequence[float]], float],
    enough: Callable[[Sequence[float]], object], order: Callable[[list[str]], list[str]] = list,
) -> dict[str, list[float]]:  # fmt: skip
    """Time programs in turns.

    Args:
        runs: The programs, by name.
        rounds: How often each has its turn.
        sample: Times one turn of a program; it also sees the times of the turns before.
        enough: Whether a program with these times has no more turns.
        order: In which order the names have their turns in a round; each round asks again.

    Returns:
        The times of each program, in the order of its turns.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in order(list(runs)):
            if not enough(times[name]):
                times[name].append(sample(runs[name], times[name]))
    return times
