"""Five published results, each next to its own code where that runs.

A result has parts. A part names a suite and its options, the program that was published, and ours as a user calls it.
What is measured, and how, is in the suites. ``ratio`` of a row is the published program's time over ours, and
``of_fastest`` that of the fastest other program. ``longest`` shows which path a program took: the kernel in which its
call spends most time. ``not_run`` says why a program did not run. Rows of the fifth result count: launches, equal
tokens and shares of elements, of the calls that were timed for the other four.

Its code is taken from checkouts in the folder ``peers``: ``mamba-llm-fused-kernel`` (github.com/TimoSaemann), ``mamba``
(github.com/RishiAstra, branch main) and ``mamba2-jax`` (github.com/CosmoNaught). On a CPU, smaller sizes run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from ..errors import first_line
from ..ops.timed import operator_suites
from .options import check_names
from .progress import BenchRun, active, wanted
from .rows import LIMITS, Row, by_program

_EXAMPLE, _KERNEL, _JAX = "mamba-llm-fused-kernel", "mamba", "mamba2-jax"
PEERS = {_EXAMPLE: "checkout", _KERNEL: "fused", _JAX: "checkout"}
"""Checkouts, and the options of suites that take them."""


@dataclass(frozen=True)
class Publication:
    """What was published.

    Attributes:
        what: The claim, in the numbers of its authors.
        on: The device that they measured on.
        closed: What it cannot be compared with, and why.
    """

    what: str
    on: str
    closed: Mapping[str, str] = field(default_factory=dict)


RESULTS = {
    "fused scan": Publication(
        "an eager Mamba model whose loop over time is one CUDA kernel: faster than torch.compile at most batches",
        "RTX 5090",
    ),
    "fused SSD": Publication(
        "one Triton kernel in place of five: 1.50x to 2.51x; over 99.7 % of elements within 0.1 %",
        "A100 and H100",
    ),
    "Granite layer": Publication(
        "a multiply and a sum rewritten to a batched product: 22.6 to 0.65 ms alone, the layer 6.25x of Inductor",
        "H200", {"yasp.compile": "not run: it is not public; the rewrite that it found is written out"},
    ),
    "portable SSD": Publication(
        "prefill and decoding with a cache of constant size in plain JAX: 15 % of peak, up to 64 % of the bandwidth",
        "TPU v6e",
    ),
    "correctness and traces": Publication(
        "traces of few launches in place of thousands; logits within 1e-2; 64 greedy tokens equal to the reference",
        "RTX 5090, H100, TPU v6e",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One comparison.

    Attributes:
        result: The published result.
        suite: The suite that measures it.
        options: Its options.
        rival: The published program's name there.
        ours: Ours.
        peer: The checkout that the suite is given.
    """

    result: str
    suite: str
    options: Mapping[str, Any]
    rival: str
    ours: str = "refold"
    peer: str | None = None


def _with(option: str) -> str:
    """Return the suite of operators that has an option."""
    found = {name: calls for suites in operator_suites() for name, calls in suites.items()}
    return next(name for name, calls in found.items() if option in signature(calls).parameters)


_FUSION = {"dtype": ("float32",), "rounds": 7}
_LAYER = {"case": ("granite-4.0-h-tiny",), "rounds": 7}
_LINE = {"case": ("multiply-sum",), "dtype": ("float32",), "rounds": 7}
_SHAPES = {"shapes": ("1x1024x80", "1x8192x80", "1x131072x80", "8x4096x80")}
_SMALL = {"device": "cpu", "batch": 1, "dtype": ("float32",), "rounds": 3}
PARTS = {
    "cuda": (
        Part("fused SSD", _with(*_SHAPES), _SHAPES, "fused", peer=_KERNEL),
        Part("Granite layer", "granite-layer", _LINE, "published rewrite"),
        Part("Granite layer", "granite-layer", {**_LAYER, "dtype": ("bfloat16",)}, "mamba_ssm"),
        Part("portable SSD", "portable-ssd", {}, "mamba2-jax", peer=_JAX),
        Part("fused scan", "fusion-example", {**_FUSION, "batch": (1,)}, "published CUDA", peer=_EXAMPLE),
        Part("fused scan", "fusion-example", {**_FUSION, "batch": (16,)}, "published CUDA", peer=_EXAMPLE),
        Part("Granite layer", "granite-layer", {**_LAYER, "dtype": ("float32",)}, "torch.compile"),
        Part("portable SSD", "portable-ssd", {"models": ("2.7B",), "exact": False}, "mamba2-jax", peer=_JAX),
    ),
    "cpu": (
        Part("fused scan", "fusion-example", {**_FUSION, "device": "cpu", "batch": (1,), "layers": 1, "rounds": 3},
             "published CUDA", peer=_EXAMPLE),
        Part("Granite layer", "granite-layer", {**_LINE, **_SMALL}, "published rewrite"),
        Part("Granite layer", "granite-layer", {**_LAYER, **_SMALL}, "torch.compile"),
        Part("portable SSD", "portable-ssd", {"device": "cpu", "past": 256, "repeats": 2}, "mamba2-jax", "refold, JAX",
             peer=_JAX),
    ),
}  # fmt: skip
"""By device; what matters most comes first."""


COUNTED = "correctness and traces"


def published(
    *, device: str = "cuda", results: tuple[str, ...] = tuple(RESULTS), peers: str = "peers"
) -> Iterator[Row]:
    """Compare refold with five published results, by their own code in the same run where that can run."""
    check_names("published: device", [device], PARTS)
    check_names("published: results", results, RESULTS)
    import torch

    from .suites import find, free_memory

    for part in PARTS[device]:
        folder = Path(peers) / (part.peer or "")
        options = {**part.options, **({PEERS[part.peer]: str(folder)} if part.peer and folder.is_dir() else {})}
        name = f"{part.suite} {' '.join(f'{key}={_text(value)}' for key, value in part.options.items())}".strip()
        if not {part.result, COUNTED} & {*results} or not wanted(part=name):
            continue
        free_memory()
        try:
            with active(BenchRun(told=lambda _: None)):
                for row in find(part.suite).load()(**options):
                    for found in (judged(part, row), counted(row)):
                        if found and found["result"] in results:
                            yield {"part": name, **found}
        except torch.OutOfMemoryError as error:  # the other parts are measured
            why = f"not run: {first_line(error, 200)}"
            lacks = {"case": name, "times_ms": {}, "not_run": dict.fromkeys((part.ours, part.rival), why)}
            yield {"part": name, **judged(part, lacks)}


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def judged(part: Part, row: Row) -> Row:
    """Return the row of a comparison: of a suite's row, its times, errors and reasons, and the ratios."""
    result, times = RESULTS[part.result], by_program(row)
    timed = {name: ms for name, ms in times.items() if isinstance(ms, float)}
    others = [ms for name, ms in timed.items() if not name.startswith("refold") and name not in LIMITS]
    reasons = {name: why for name, why in times.items() if isinstance(why, str)} | row.get("not_run", {})
    if part.rival not in timed:
        reasons.setdefault(part.rival, f"not run: no checkout of it ({part.peer}) was given")
    ours = timed.get(part.ours)
    return {
        "result": part.result, "published": result.what, "published_on": result.on, "rival": part.rival,
        "ours": part.ours, **_same(row), "times_ms": timed, "errors": errors(row),
        "ratio": timed[part.rival] / ours if ours and part.rival in timed else None,
        "of_fastest": min(others) / ours if ours and others else None, "not_run": {**result.closed, **reasons},
        **{key: row[key] for key in ("longest", "peak_bytes", "refused") if key in row},
    }  # fmt: skip


def counted(row: Row) -> Row | None:
    """Take what a suite's row counts: launches, greedy tokens equal to float64's, or elements near float64."""
    for what, counts in (
        ("launches", row.get("launches") or row.get("kernels")),
        (f"of {row.get('steps')} greedy tokens equal", row.get("equal")),
        ("share within 0.1 %", {who: one["within_1e-3"] for who, one in row.get("accuracy", {}).items()}),
    ):
        if counts:
            on = {"published": RESULTS[COUNTED].what, "published_on": RESULTS[COUNTED].on}
            return {"result": COUNTED, **on, **_same(row), "what": what, "counts": counts, "errors": errors(row)}
    return None


def _same(row: Row) -> Row:
    return {key: row[key] for key in ("case", "dtype", "batch", "tokens", "layers", "transformers") if key in row}


def errors(row: Row) -> dict[str, float]:
    """Return the relative errors against float64 of a suite's row, by program."""
    return row.get("errors") or {name: one["error"] for name, one in row.get("accuracy", {}).items()}
