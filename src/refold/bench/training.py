"""Layers in training: naive code with eager, torch.compile and refold; the same layer with refold.ops, and mamba-ssm.

All programs of a layer share one set of weights. A call is a forward and the gradients of the input and of all weights.
Programs take turns. A turn is a few calls in a row, and the host does not wait between them, as between the layers of a
model; the L2 cache is overwritten before each turn. Results and gradients are compared with the naive layer in float64,
in eager, sequence by sequence. A program is timed only if it is right, and a row is refused if one of ours is not.
Eager is the measure of what the dtype gives, so it is timed whatever its error. Programs that cannot run, or are wrong,
mamba-ssm's kernels among them, are named under ``not_run``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

import refold

from ..errors import ArgumentError
from ..verify.memory import peak_bytes
from ..verify.profile import profiling, take
from .layers import LAYERS, Program
from .options import VERIFY, check_names
from .progress import wanted
from .rows import Row

# Relative L2 error of a result or gradient. A naive layer in bfloat16 is itself that far off, or farther.
BOUND = {"bfloat16": 5e-2, "float32": 1e-4}
# A program that takes longer is called a few times only.
SLOW_MS = 200.0
# The programs that may refuse a row.
OURS = ("refold", "refold.ops")


def gradients(run: Program, u: torch.Tensor, weights: list[torch.nn.Parameter], dy: torch.Tensor) -> list[torch.Tensor]:
    """Return a program's result, and its gradients: of the input, and of the weights."""
    y = run(u)
    return [y.detach(), *torch.autograd.grad(y, [u, *weights], dy)]


def reference(layer: torch.nn.Module, u: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Return the same in float64 by the naive layer, one sequence at a time."""
    narrow = {name: weight.detach().clone() for name, weight in layer.named_parameters()}
    layer.double()
    try:
        weights, rows = list(layer.parameters()), []
        for x, d in zip(u.detach().double(), dy.double(), strict=True):
            rows.append(gradients(layer, x[None].requires_grad_(), weights, d[None]))
        columns = list(zip(*rows, strict=True))
        return [torch.cat(columns[0]), torch.cat(columns[1]), *(sum(column) for column in columns[2:])]
    finally:
        layer.to(u.dtype)
        for name, weight in layer.named_parameters():
            weight.data = narrow[name]


def errors(got: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Return relative L2 errors."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True)]


def take_turns(
    runs: dict[str, Callable[[], object]], rounds: int, device: torch.device, calls: int = 1
) -> dict[str, list[float]]:
    """Return the sorted times of a call, in milliseconds, of programs that take turns; slow ones get fewer of them.

    On a GPU, a turn is ``calls`` calls in a row, and the host does not wait between them. It waits before the first
    call, and the L2 cache is overwritten then.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    flush = torch.empty(1 << 28, dtype=torch.float32, device=device) if device.type == "cuda" else None
    for i in range(rounds + 2):
        for name, run in runs.items():
            if i > 4 and times[name][0] > SLOW_MS:
                continue
            if flush is None:
                start = time.perf_counter()
                run()
                ms = (time.perf_counter() - start) * 1e3
            else:
                flush.zero_()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                many = 1 if times[name] and times[name][0] > SLOW_MS else calls
                begin.record()
                for _ in range(many):
                    run()
                end.record()
                end.synchronize()
                ms = begin.elapsed_time(end) / many
            times[name] += [ms] if i >= 2 else []
    return {name: sorted(found) for name, found in times.items()}


def longest_kernels(run: Callable[[], object], device: torch.device) -> list[tuple[str, float, int]]:
    """Return the kernels that take longest in a call: name, milliseconds, how often."""
    with profiling():
        found = take("call", run, device)
    return [(kernel["name"], kernel["ms"], kernel["count"]) for kernel in found[:25]]


def training(
    *,
    device: str = "cuda",
    layers: tuple[str, ...] = ("mamba1", "mamba2", "granite"),
    dtype: str = "bfloat16",
    batch: int = 8,
    tokens: int = 2048,
    width: int = 0,
    rounds: int = 15,
    eager: bool = True,
    inductor: bool = False,
    verify: str = "quick",
    gate: bool = True,
    kernels: bool = False,
    calls: int = 4,
) -> Iterator[Row]:
    """Time naive layers in training: eager, refold, refold.ops, mamba-ssm, and with inductor=true torch.compile."""
    check_names("training: dtype", [dtype], BOUND)
    check_names("training: layers", layers, LAYERS)
    check_names("training: verify", [verify], VERIFY)
    if width % 32:
        raise ArgumentError(f"training: width is {width}. Give a multiple of 32; 0 is that of the published layer")
    at = torch.device(device)
    for name in layers:
        make, own = LAYERS[name]
        if not wanted(case=name, width=width or own, batch=batch, tokens=tokens, dtype=dtype):
            continue
        torch.manual_seed(0)
        torch.compiler.reset()
        layer, others = make(width or own)
        layer.to(at, getattr(torch, dtype))
        compiled = refold.compile(layer, strict=True, verify=verify, accept="always" if verify == "off" else "faster")
        programs: dict[str, Program] = {"refold": compiled, **others}
        programs |= {"eager": layer} if eager else {}
        programs |= {"torch.compile": torch.compile(layer)} if inductor else {}
        u = torch.randn(batch, tokens, width or own, device=at).to(getattr(torch, dtype)).requires_grad_()
        row = measure(layer, programs, u, BOUND[dtype] if gate else None, rounds, kernels, calls)
        yield {
            "case": name,
            "width": width or own,
            "batch": batch,
            "tokens": tokens,
            "dtype": dtype,
            "calls": calls,
            **row,
            "report": compiled.report.to_dict(),
        }


def measure(
    layer: torch.nn.Module,
    programs: dict[str, Program],
    u: torch.Tensor,
    bound: float | None,
    rounds: int,
    kernels: bool,
    calls: int = 1,
) -> Row:
    """Check the programs of a layer, and time eager and those that are right."""
    dy, weights = torch.randn_like(u), list(layer.parameters())
    expected = None if bound is None else reference(layer, u, dy)
    row: Row = {"first_call_s": {}, "errors": {}, "not_run": {}}
    runs: dict[str, Callable[[], object]] = {}
    for kind, program in programs.items():

        def run(program: Program = program) -> list[torch.Tensor]:
            return gradients(program, u, weights, dy)

        start = time.perf_counter()
        try:
            got = run()
        except (ImportError, torch.OutOfMemoryError) as error:
            row["not_run"][kind] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        row["first_call_s"][kind] = time.perf_counter() - start
        if expected is not None and bound is not None:
            row["errors"][kind] = max(errors(got, expected))
            if kind != "eager" and not row["errors"][kind] <= bound:
                row["not_run"][kind] = f"an error above {bound}"
                if kind in OURS:
                    row["refused"] = f"{kind}: an error above {bound}"
                continue
        del got
        runs[kind] = run
    times = take_turns(runs, rounds, u.device, calls)
    if kernels and u.is_cuda:
        row["kernels"] = {kind: longest_kernels(run, u.device) for kind, run in runs.items() if kind != "eager"}
    return {
        **row,
        "median_ms": {kind: statistics.median(values) for kind, values in times.items()},
        "p20_ms": {kind: values[len(values) // 5] for kind, values in times.items()},
        "p80_ms": {kind: values[len(values) * 4 // 5] for kind, values in times.items()},
        "peak_bytes": {kind: peak_bytes(run, u.device) for kind, run in runs.items()} if u.is_cuda else {},
    }
