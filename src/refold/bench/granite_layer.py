"""transformers' own GraniteMoeHybridMambaLayer, unmodified: eager, torch.compile, refold, and other layers, in one run.

Sizes are those of granite-4.0-h-tiny. A row holds times in turns, peak memory, how many kernels a call launches, and
the full report with the checks of every rewrite. The case "multiply-sum" is the line of the layer that takes most of
its memory, alone; next to it runs the rewrite that was published for it, by hand. float32 runs without TF32. Errors are
against float64: of the layer sequence by sequence, of the line as a product of matrices, since neither would fit
otherwise.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from functools import partial

import torch
import transformers

import refold

from ..verify import Function
from ..verify.memory import peak_bytes
from ..verify.profile import longest, profiling, take
from .contest import BOUND, contest
from .layers import granite
from .options import check_names
from .progress import wanted
from .rows import Row

WIDTH = 1536
CASES = ("granite-4.0-h-tiny", "multiply-sum")


def batched_product(C: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Return the same as one batched product of matrices, the rewrite that was published for it."""
    return (C.transpose(1, 2) @ B.permute(0, 2, 3, 1)).permute(0, 2, 3, 1)


def multiply_sum(C: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Multiply each query of a chunk with each key, and sum: (b, t, h, n) twice to (b, t, t, h), as written in 5.17."""
    return (C[:, :, None] * B[:, None]).sum(dim=-1)


@torch.no_grad()
def granite_layer(
    *, device: str = "cuda", dtype: tuple[str, ...] = ("float32", "bfloat16"), case: tuple[str, ...] = CASES,
    batch: int = 32, tokens: int = 256, rounds: int = 15,
) -> Iterator[Row]:  # fmt: skip
    """Time transformers' Granite hybrid layer, unmodified: eager, torch.compile, refold, refold.ops, mamba-ssm."""
    check_names("granite-layer: dtype", dtype, BOUND)
    check_names("granite-layer: case", case, CASES)
    for name in dtype:
        kind = getattr(torch, name)
        for one in case:
            what = {"case": one, "transformers": transformers.__version__, "dtype": name, "batch": batch}
            if not wanted(**what, tokens=tokens):
                continue
            torch.manual_seed(0)
            others: dict[str, Function] = {"published rewrite": batched_product}
            program: Function = multiply_sum
            if one == CASES[0]:
                program, others = granite(WIDTH)
                program.to(device, kind).eval()
                inputs = [torch.randn(batch, tokens, WIDTH, device=device, dtype=kind)]
            else:
                shape = (batch, tokens, 2 * WIDTH // 64, 128)
                inputs = [torch.randn(shape, device=device, dtype=kind) for _ in range(2)]
            yield {**what, "tokens": tokens, **compared(program, others, inputs, rounds)}


def reference(program: Function, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return the result in float64."""
    wide = [x.double() for x in inputs]
    if not isinstance(program, torch.nn.Module):
        return batched_product(*wide)
    layer = copy.deepcopy(program).double()
    return torch.cat([layer(x[None]) for x in wide[0]])


def compared(program: Function, others: dict[str, Function], inputs: list[torch.Tensor], rounds: int) -> Row:
    """Compile a program, and time it, eager and others."""
    device, bound = inputs[0].device, BOUND[str(inputs[0].dtype)[6:]]
    torch.compiler.reset()
    compiled = refold.compile(program, cache=False)
    start = time.perf_counter()
    with profiling():
        compiled(*inputs)
    first_call_s = time.perf_counter() - start
    graph = compiled.report.graphs[0]
    programs: dict[str, Function] = {"eager": program, "refold": compiled, **others}
    programs["torch.compile"] = torch.compile(program)
    calling = {name: partial(one, *inputs) for name, one in programs.items()}
    row, runs = contest(calling, partial(reference, program, inputs), bound, rounds, device)
    with profiling():
        kernels = {name: graph.kernels.get(name) or take(name, run, device) for name, run in runs.items()}
    return {
        **row,
        "first_call_s": first_call_s,
        "peak_bytes": {name: graph.peak_bytes.get(name) or peak_bytes(run, device) for name, run in runs.items()},
        "longest": {name: longest(found) for name, found in kernels.items() if found},
        "kernels": {name: sum(one["count"] for one in found) for name, found in kernels.items() if found},
        "report": compiled.report.to_dict(),
    }
