"""A busy machine is noticed, a quiet one is not called busy; on a fake clock."""

import math

import pytest
import torch

from refold.verify import contention as module
from refold.verify import timing
from refold.verify.contention import Usage, contention, usage

EVEN = [[1.0, 1.1, 1.05, 0.98, 1.02, 1.0]]


@pytest.mark.parametrize(
    ("used", "cores", "busy"),
    [
        (Usage(2.0, 2.0, 2.1), 2, False),  # alone, one thread of two
        (Usage(2.0, 4.0, 4.1), 2, False),  # alone, both threads
        (Usage(2.0, 2.0, 3.2), 2, False),  # others use a core that is free
        (Usage(2.0, 2.0, 4.0), 2, True),  # others use all that is left
        (Usage(2.0, 1.0, 4.0), 2, True),  # this process waits
        (Usage(2.0, 8.0, 20.0), 64, False),
        (Usage(2.0, 60.0, 128.0), 64, True),
        (Usage(0.05, 0.01, 0.10), 2, False),  # too short to tell
    ],
)
def test_cores_that_others_use(used, cores, busy):
    found = contention(used, EVEN, cores)
    assert bool(found) == busy
    if busy:
        assert "other programs used" in found
        assert f"of {cores} cores" in found


def test_without_such_counts_the_load_is_asked(monkeypatch):
    monkeypatch.setattr(module, "_load", lambda: 5.0)
    assert contention(Usage(1.0, 1.0, None), EVEN, 2) == "the load average was 5.0 on 2 cores"
    assert not contention(Usage(1.0, 1.0, None), EVEN, 8)
    monkeypatch.setattr(module, "_load", lambda: None)
    assert not contention(Usage(1.0, 1.0, None), EVEN, 2)


def test_cores_of_others_are_counted_if_the_system_tells():
    assert module.others(Usage(2.0, 2.0, 3.0)) == 0.5
    assert module.others(Usage(2.0, 2.0, 1.9)) == 0.0  # counts of different precision
    assert math.isnan(module.others(Usage(2.0, 2.0, None)))
    assert math.isnan(module.others(Usage(0.1, 0.1, 0.2)))


@pytest.mark.parametrize(("load", "times"), [(0.3, 1.0), (2.0, 1.0), (5.0, 2.5), (None, 1.0)])
def test_how_much_longer_a_program_may_take(monkeypatch, load, times):
    monkeypatch.setattr(module, "_load", lambda: load)
    monkeypatch.setattr(module, "cores", lambda: 2)
    assert module.crowding() == times


def test_times_that_spread():
    times = [1.0, 1.0, 1.1, 3.0, 1.0, 4.0, 5.0, 1.0, 3.5]
    assert "differed by a factor" in contention(Usage(0.0, 0.0, None), [EVEN[0], times], 2)
    assert not contention(Usage(0.0, 0.0, None), [times[:4]], 2)  # too few to tell


@pytest.mark.parametrize("ratio", [2, 10])
@pytest.mark.parametrize("others", [0.0, 1.0])
def test_a_race_says_that_it_was_held_on_a_busy_machine(monkeypatch, others, ratio):
    clock = {"wall": 0.0, "own": 0.0, "everybody": 0.0}

    def call(seconds):
        clock["wall"] += seconds
        clock["own"] += seconds
        clock["everybody"] += seconds + others * seconds
        return seconds * 1e3

    monkeypatch.setattr(timing, "once_ms", lambda run, device: run())
    monkeypatch.setattr(timing, "usage", lambda: Usage(**clock))
    monkeypatch.setattr(module, "cores", lambda: 2)
    race = timing.race(lambda: call(0.1 * ratio), lambda: call(0.1), torch.device("cpu"))
    assert race.faster
    assert bool(race.busy) == (others > 0)


def test_the_system_is_asked():
    start = usage()
    deadline = start.wall + 0.05
    while usage().wall < deadline:
        pass
    used = usage() - start
    assert used.wall >= 0.05
    assert used.own > 0
    assert used.everybody is None or used.everybody >= 0
