"""The rule that accepts a candidate as faster, on a fake clock."""

import math
import random

import pytest
import torch

from refold.verify import timing

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Replace measured times by drawn ones: a callable is its own distribution."""
    monkeypatch.setattr(timing, "once_ms", lambda run, device: run())


def noisy(mean, seed, noise=0.015, outliers=0.03):
    rng = random.Random(seed)
    return lambda: mean * (1 + rng.gauss(0, noise)) * (3 if rng.random() < outliers else 1)


@pytest.mark.parametrize("seed", range(20))
def test_equal_programs_are_never_accepted(clock, seed):
    assert not timing.race(noisy(1.0, seed), noisy(1.0, seed + 1000), CPU).faster


@pytest.mark.parametrize("seed", range(20))
def test_ten_percent_is_always_seen(clock, seed):
    outcome = timing.race(noisy(1.1, seed), noisy(1.0, seed + 1000), CPU)
    assert outcome.faster
    assert 1.02 < outcome.at_least <= outcome.speedup <= outcome.at_most


def test_a_clear_win_needs_nine_pairs(clock):
    assert timing.race(noisy(2.0, 0), noisy(1.0, 1), CPU).pairs == 9


def test_an_overwhelming_win_needs_three_runs_of_the_baseline(clock):
    calls = []
    slow = noisy(10.0, 0)
    outcome = timing.race(lambda: calls.append(1) or slow(), noisy(1.0, 1), CPU, budget_s=0.0)
    assert len(calls) == 4  # one warms up
    assert outcome.faster
    assert 3 < outcome.at_least <= outcome.speedup <= outcome.at_most < 40


def test_a_slow_first_call_decides_nothing(clock):
    first = iter([100.0])
    equal = noisy(1.0, 0)
    assert not timing.race(lambda: next(first, None) or equal(), noisy(1.0, 1), CPU).faster


def test_equal_programs_seldom_separate(clock):
    assert 1 / math.comb(timing.FEW + timing.MANY, timing.FEW) <= timing.SHARE
    rng = random.Random(0)
    draws = [timing._few_among_many(rng.random, rng.random, CPU, rng, timing.usage()) for _ in range(4000)]
    assert sum(race.at_least > 1 for race in draws) / len(draws) <= 2 * timing.SHARE


def test_a_hopeless_race_ends_early(clock):
    outcome = timing.race(noisy(1.0, 0), noisy(2.0, 1), CPU)
    assert not outcome.faster
    assert outcome.pairs == 9
    assert outcome.at_most < 1


def test_a_race_of_one_look_ends_with_it(clock):
    equal = timing.race(noisy(1.0, 0), noisy(1.0, 1), CPU, looks=timing.LOOKS[:1])
    assert (equal.pairs, equal.faster) == (9, False)
    slower = timing.race(noisy(1.0, 0), noisy(1.2, 1), CPU, looks=timing.LOOKS[:1])
    assert slower.pairs == 9
    assert slower.at_most < 1 + timing.DELTA


def test_a_race_out_of_time_accepts_nothing(clock):
    outcome = timing.race(noisy(2.0, 0), noisy(1.0, 1), CPU, budget_s=0.0)
    assert outcome.pairs < 9
    assert not outcome.faster


def test_median_bounds_cover_the_median():
    rng = random.Random(0)
    misses = 0
    for _ in range(2000):
        sample = sorted(rng.gauss(0, 1) for _ in range(30))
        lower, _ = timing.median_bounds(sample, 0.05)
        misses += lower > 0
    assert misses / 2000 <= 0.05


def test_peak_memory_counts_what_is_held_at_once():
    from refold.verify.memory import peak_bytes

    def hold_two():
        x = torch.ones(1000, 1000)
        y = x + 1
        del x
        return (y * 2).sum()

    peak = peak_bytes(hold_two, CPU)
    assert 8_000_000 <= peak < 8_100_000
