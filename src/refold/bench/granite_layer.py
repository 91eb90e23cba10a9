"""transformers' own GraniteMoeHybridMambaLayer, unmodified: eager, torch.compile, refold, and other layers, in one run.

Sizes are those of granite-4.0-h-tiny. A row holds times in turns, peak memory, how many kernels a call launches, and
the full report with the checks of every rewrite. The case "multiply-sum" is the line of the layer that takes most of
its memory, alone. float32 runs without TF32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import transformers

import refold

from ..verify.memory import peak_bytes
from ..verify.profile import profiling, take
from .layers import Program, granite
from .options import check_names
from .progress import wanted
from .rows import Row
from .training import BOUND, take_turns

WIDTH = 1536
CASES = ("granite-4.0-h-tiny", "multiply-sum")


def multiply_sum(C: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Multiply each query of a chunk with each key, and sum: (b, t, h, n) twice to (b, t, t, h), as written in 5.17."""
    return (C[:, :, None] * B[:, None]).sum(dim=-1)


@torch.no_grad()
def granite_layer(
    *,
    device: str = "cuda",
    dtype: tuple[str, ...] = ("float32", "bfloat16"),
    batch: int = 32,
    tokens: int = 256,
    rounds: int = 15,
) -> Iterator[Row]:
    """Time transformers' Granite hybrid layer, unmodified: eager, torch.compile, refold, refold.ops, mamba-ssm."""
    check_names("granite-layer: dtype", dtype, BOUND)
    for name in dtype:
        kind = getattr(torch, name)
        for case in CASES:
            what = {"case": case, "transformers": transformers.__version__, "dtype": name, "batch": batch}
            if not wanted(**what, tokens=tokens):
                continue
            torch.manual_seed(0)
            others: dict[str, Program] = {}
            program: Program = multiply_sum
            if case == CASES[0]:
                program, others = granite(WIDTH)
                program.to(device, kind).eval()
                inputs = [torch.randn(batch, tokens, WIDTH, device=device, dtype=kind)]
            else:
                shape = (batch, tokens, 2 * WIDTH // 64, 128)
                inputs = [torch.randn(shape, device=device, dtype=kind) for _ in range(2)]
            yield {**what, "tokens": tokens, **compared(program, others, inputs, rounds)}


def compared(program: Program, others: dict[str, Program], inputs: list[torch.Tensor], rounds: int) -> Row:
    """Compile a program, compare all others with it, and time those that give the same; return the row."""
    device, bound = inputs[0].device, BOUND[str(inputs[0].dtype)[6:]]
    torch.compiler.reset()
    compiled = refold.compile(program, cache=False)
    start = time.perf_counter()
    with profiling():
        compiled(*inputs)
        first_call_s = time.perf_counter() - start
        graph = compiled.report.graphs[0]
        kernels = dict(graph.kernels)
        programs: dict[str, Program] = {
            "eager": program,
            "torch.compile": torch.compile(program),
            "refold": compiled,
            **others,
        }
        row: Row = {"first_call_s": first_call_s, "errors": {}, "not_run": {}}
        runs: dict[str, Callable[[], object]] = {}
        expected = program(*inputs).double()
        for who, one in programs.items():

            def run(one: Program = one) -> torch.Tensor:
                return one(*inputs)

            try:
                off = float((run().double() - expected).norm() / expected.norm())
            except Exception as error:  # whatever another package raises; the run goes on
                row["not_run"][who] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                continue
            row["errors"][who] = off
            if off <= bound:
                runs[who] = run
                kernels[who] = kernels.get(who) or take(who, run, device)
            else:
                row["not_run"][who] = f"an error above {bound}"
                row |= {"refused": row["not_run"][who]} if who == "refold" else {}
        del expected
    times = take_turns(runs, rounds, device)
    return {
        **row,
        "times_ms": {who: statistics.median(found) for who, found in times.items()},
        "p20_ms": {who: found[len(found) // 5] for who, found in times.items()},
        "p80_ms": {who: found[len(found) * 4 // 5] for who, found in times.items()},
        "peak_bytes": {who: graph.peak_bytes.get(who) or peak_bytes(run, device) for who, run in runs.items()},
        "kernels": {who: sum(one["count"] for one in found) for who, found in kernels.items() if found},
        "report": compiled.report.to_dict(),
    }
