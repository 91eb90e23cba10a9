"""Language models of published sizes, and the row of a measurement; shared by the frameworks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..models import counts
from ..models.configs import Config, HybridConfig, Mamba2Config, MambaConfig, Mixer2Config
from .rows import Row
from .turns import take_turns


def mamba2(d_model: int, nlayers: int) -> Mamba2Config:
    """Return the configuration of the published sizes: heads of 64, state 128, one group, tied head."""
    mixer = Mixer2Config(d_model=d_model, nheads=d_model // 32, headdim=64, ngroups=1, dstate=128)
    return Mamba2Config(vocab_size=50288, nlayers=nlayers, mixer=mixer)


MODELS: dict[str, Config] = {
    "130M": mamba2(768, 24), "370M": mamba2(1024, 48), "1.3B": mamba2(2048, 48), "2.7B": mamba2(2560, 64),
    "mamba1-130M": MambaConfig(vocab_size=50280, d_model=768, nlayers=24, d_inner=1536, dstate=16, dt_rank=48),
    "hybrid-340M": HybridConfig(
        vocab_size=100352, kinds=(("mixer",) * 7 + ("attention",)) * 4, nheads=12, nkvheads=4, headdim=64,
        mixer=Mixer2Config(d_model=768, nheads=48, headdim=32, ngroups=1, dstate=128), attention_bias=False,
        rope_theta=None, shared_dim=2048, embedding_multiplier=12.0, residual_multiplier=0.246,
        attention_multiplier=0.015625, logits_divisor=3.0, max_positions=32768, norm_eps=1e-5, tied=True,
    ),
}  # fmt: skip


SLOW_S = 10.0
"""Seconds of a call from which on it is not repeated."""

PAST = 1024
"""Tokens read before decoding is timed; attention reads them at each step."""


def seconds(call: Any, repeats: int, rounds: int = 1) -> list[float]:
    """Time ``repeats`` calls, each of which runs ``rounds`` units of work."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) / rounds)
    return times


def row(
    backend: str, name: str, what: str, times: list[float], need: counts.Counts, extra: dict[str, Any] | None = None
) -> Row:
    """Return one measurement: times in seconds per unit, operations and bytes per unit."""
    best, median = min(times), float(np.median(times))
    return {"op": "generate", "backend": backend, "case": f"{name} {what}", "median_s": median,
            "min_s": best, "n": len(times), "flops": need.flops, "bytes": need.bytes,
            "tflop_per_s": need.flops / median / 1e12, "gb_per_s": need.bytes / median / 1e9,
            **(extra or {})}  # fmt: skip


def turns(calls: Mapping[str, Callable[[], Any]], repeats: int, rounds: int) -> dict[str, list[float]]:
    """Time calls turn by turn: seconds per unit of work.

    The first call of each, which may compile, does not count. If it takes longer than `SLOW_S`, it is the only one.
    """

    def slow(found: Sequence[float]) -> bool:
        return bool(found) and found[0] * rounds > SLOW_S

    times = take_turns(calls, 1 + repeats, lambda call, _: seconds(call, 1, rounds)[0], slow)
    return {name: found[1:] or found for name, found in times.items()}


def in_turns(
    calls: Mapping[str, Callable[[], Any]], name: str, what: str, repeats: int, rounds: int, need: counts.Counts,
    extra: dict[str, Any] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """Time calls turn by turn, by their backends; ``extra`` belongs to the first row."""
    for backend, found in turns(calls, repeats, rounds).items():
        yield row(backend, name, what, found, need, extra)
        extra = None


def not_run(backend: str, name: str, what: str, why: str) -> Row:
    """Return the row of a measurement that could not be made."""
    return {"op": "generate", "backend": backend, "case": f"{name} {what}", "not_run": why}
