"""Operators on the GPU: check against float64, time, and count bytes.

A case is refused if its error against a float64 scan of a slice of it is above the bound of its dtype.

- ``median_ms``: medians of CUDA events around single calls, with 1 GiB overwritten before each. Overwriting
  leaves the L2 cache full of lines to be written back, as the layer before would. It also lets the host run ahead.
- ``hot_ms``: the same without the overwriting. Data that fits into the L2 cache (60 MB) is found there. The host does
  not run ahead, so for short calls its own time shows.
- ``host_us``: the host's time for a call, with the device kept busy; measured only where the device may be faster. The
  least of 20 rounds of 40 calls, because other programs on a shared host can only add time.
- ``graph_ms``: for steps that overwrite their state, the time per layer of one replayed CUDA graph of 16 to 512 layers,
  as in decoding. Each layer has its own copies of all arguments, together 8 times the L2 cache, so no replay finds its
  arguments there. The launch of a single kernel, which ``median_ms`` includes, is hidden.
- ``flops``: operations of the recurrence, counted once; an implementation by matrix products makes more.
- ``bytes``: what any implementation must read and write once. ``share_of_copy``: their rate over that of a device copy
  of 8.6 GB (bytes read plus bytes written). ``copy_ms``: a device copy of as many bytes, timed like ``median_ms``, so
  it includes launch and ramp as the operator does.
- groups named ``..._backward``: ``errors`` of all gradients against float64 on that slice; ``median_ms`` of the
  gradients alone; ``both_ms`` of results and gradients; ``extra_gib``, the memory of a call of both beyond its
  arguments and the gradient of y; both also of other packages' kernels. ``bytes`` are those of arguments, the gradient
  of y, and gradients.
- ``longest`` (of calls that are graded): the kernel in which another package's call spends most time.
- ``accuracy`` (of calls that are graded): of each kernel, the relative L2 error against float64 on that slice, and the
  shares of elements that are within 1e-3 and 1e-2 of the root mean square of the result.
- ``fused_ms``: the published fused kernel in float16 with chunks of 128, if ``--set fused=FOLDER`` names its checkout.
- ``mamba_ssm_ms``: mamba-ssm's kernels in the same run, if ``mamba_ssm`` (for ssd, chunks of 256) or its
  ``selective_scan_cuda`` (in its own layout) can be imported; ``fla_ms``: those of ``fla``, likewise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch

from ..errors import DeviceError, first_line
from ..ops.arrays import meta_of
from ..ops.spec import Meta, OpSpec, load
from ..ops.timed import Timed, operator_suites
from ..verify.profile import longest, profiling, take
from .progress import wanted
from .rows import Row

BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
HEAD = 512  # Tokens, or rows, of the slice that is compared with float64.
GRADIENT_BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}


class TimedCall(Timed):
    """One call, and what is measured of it."""

    @property
    def spec(self) -> OpSpec:
        """The spec of the operator."""
        return load(self.op.rstrip("_"))

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        return getattr(import_module(self.spec.module), self.op)  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first argument."""
        return next(iter(self.arguments.values())).dtype

    def run(self) -> Any:
        """Call the operator."""
        return self.function(**self.arguments)

    def meta(self) -> Meta:
        """Return shapes, dtypes and sizes."""
        arrays = [self.arguments.get(arg.name) for arg in self.spec.args]
        options = [self.arguments.get(option.name, option.default) for option in self.spec.options]
        return self.spec.validate(meta_of(self.spec, "torch", arrays, options))

    def error(self) -> float:
        """Return the relative L2 error of the first tokens of the first row; infinite if anything is not finite."""
        given = dict(self.arguments)
        if self.spec.updates and self.op.endswith("_"):
            given[self.spec.updates] = given[self.spec.updates].clone()
        return self.accuracy(lambda: self.function(**given))["error"]

    def accuracy(self, run: Callable[[], Any]) -> dict[str, float]:
        """Return how near the first tokens of a result are to float64: relative L2 error, and shares of elements."""
        got, want = run(), self.definition()
        y = _head(got[0] if isinstance(got, tuple) else got, (self.spec.outputs[0].axes,))
        if not torch.isfinite(y).all():
            return {"error": math.inf, "within_1e-3": 0.0, "within_1e-2": 0.0}
        off, size = (y.double() - want).abs(), want.square().mean().sqrt()
        shares = {f"within_{bound}": (off <= float(bound) * size).double().mean().item() for bound in ("1e-3", "1e-2")}
        return {"error": (off.norm() / want.norm()).item(), **shares}

    def leaves(self) -> list[torch.Tensor]:
        """Return the arguments that have gradients."""
        return [a for a in self.arguments.values() if isinstance(a, torch.Tensor) and a.is_floating_point()]

    def gradient_errors(self) -> dict[str, float]:
        """Return the relative L2 errors of all gradients of those tokens."""
        axes = {arg.name: arg.axes for arg in self.spec.args}
        short = {k: _head(v, axes[k]) if isinstance(v, torch.Tensor) else v for k, v in self.arguments.items()}
        names = [name for name, value in short.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
        dy, found = None, []
        for wide in (False, True):
            given = {k: v.detach().double() if wide and k in names else v for k, v in short.items()}
            given |= {k: given[k].detach().requires_grad_() for k in names}
            out = self.function(**given, backend="torch" if wide else None)
            y = out[0] if isinstance(out, tuple) else out
            dy = torch.randn_like(y) if dy is None else dy
            found.append(torch.autograd.grad(y, [given[k] for k in names], dy.to(y.dtype)))
        return {k: ((a.double() - b).norm() / b.norm()).item() for k, a, b in zip(names, *found, strict=True)}

    def definition(self) -> torch.Tensor:
        """Return the operator on those tokens in float64."""
        wide = dict(self.arguments)
        for arg in self.spec.args:
            if (array := wide.get(arg.name)) is not None:
                short = _head(array, arg.axes)
                wide[arg.name] = short.double() if short.is_floating_point() else short
        out = self.spec.public(**wide, backend="torch")
        return out[0] if isinstance(out, tuple) else out


def _head(array: torch.Tensor, layouts: tuple[str, ...]) -> torch.Tensor:
    """Return the first batch row and the first tokens, or rows, of an array; steps here have no time axis.

    Offsets of a pack end with these tokens.
    """
    if not array.is_floating_point():
        return array.clamp(max=HEAD)
    lengths = {"b": 1, "k": 1, "t": HEAD, "*": HEAD}
    spellings = [one for layout in layouts for one in (layout, layout.replace("t ", ""))]
    axes = next(one.split() for one in spellings if len(one.split()) == array.dim())
    return array[tuple(slice(lengths.get(letter)) for letter in axes)]


def time_ms(run: Callable[[], Any], count: int = 25, cold: bool = True) -> list[float]:
    """Return the sorted times of single calls, each after the L2 cache was overwritten if ``cold``."""
    flush = torch.empty((256 if cold else 1) << 20, dtype=torch.float32, device="cuda")
    for _ in range(5):  # these do not count
        run()
    events = []
    for _ in range(count):
        flush.zero_()
        events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        events[-1][0].record()
        run()
        events[-1][1].record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)


def percentiles(times: list[float]) -> dict[str, float]:
    """Name the median, the 20th and the 80th percentile of sorted times."""
    return {name: times[len(times) * part // 10] for name, part in (("median_ms", 5), ("p20_ms", 2), ("p80_ms", 8))}


def copy_ms(moved: int) -> float:
    """Return the time of a device copy that reads and writes ``moved`` bytes in all."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return statistics.median(time_ms(lambda: target.copy_(source), 9))


def host_us(run: Callable[[], Any]) -> float:
    """Return the least host time of a call, of 20 rounds, while the device is kept busy after it."""
    busy = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        for _ in range(10):
            busy.zero_()
        start = time.perf_counter()
        for _ in range(40):
            run()
        times.append((time.perf_counter() - start) / 40 * 1e6)
    return min(times)


def graph_ms(case: TimedCall) -> float:
    """Return the time per layer of a CUDA graph that calls the operator once for each of many layers."""
    given, run = case.arguments, case.function
    size = sum(a.nbytes for a in given.values() if isinstance(a, torch.Tensor))
    count = min(512, max(16, math.ceil(8 * torch.cuda.get_device_properties().L2_cache_size / size)))
    layers = [{k: a.clone() if isinstance(a, torch.Tensor) else a for k, a in given.items()} for _ in range(count)]
    run(**layers[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            run(**layer)
    return statistics.median(time_ms(graph.replay, cold=False)) / count


def measure(case: TimedCall, copy_rate: float) -> Row:
    """Return the row of a case."""
    error, meta = case.error(), case.meta()
    moved = case.spec.bytes_moved(meta)
    row: Row = {"op": case.op, "case": case.name, "dtype": str(case.dtype)[6:], "error": error}
    if not error <= BOUND[case.dtype]:
        return row | {"refused": f"error above {BOUND[case.dtype]}"}
    times = percentiles(time_ms(case.run))
    median = times["median_ms"]
    return row | {
        "bytes": moved,
        "flops": case.spec.flops(meta.sizes),
        **times,
        "hot_ms": statistics.median(time_ms(case.run, cold=False)),
        "share_of_copy": moved / median / copy_rate,
        "copy_ms": copy_ms(moved),
        "host_us": host_us(case.run) if median < 0.2 else None,
        "graph_ms": graph_ms(case) if case.op.endswith("_") else None,
        **rivals(case),
    }


MISSING = "not run: no checkout of it was given, or it cannot be imported, or has no such function"


def rivals(case: TimedCall) -> Row:
    """Return the times of other packages' kernels, and how near all results are to float64 if the call is graded."""
    row: Row = {"accuracy": {"refold": case.accuracy(case.run)}} if case.graded else {}
    device = next(x.device for x in case.arguments.values() if isinstance(x, torch.Tensor))
    for name, run in case.rivals.items():
        if run is None:
            row[f"{name}_ms"] = MISSING
            continue
        try:
            row[f"{name}_ms"] = statistics.median(time_ms(run, 9))
            if case.graded:
                row["accuracy"][name] = case.accuracy(run)
                with profiling():
                    row.setdefault("longest", {})[name] = longest(take(name, run, device))
        except Exception as error:  # whatever another package raises; the run goes on
            row[f"{name}_ms"] = f"not run: {first_line(error, 200)}"
    return row


def measure_backward(case: TimedCall, copy_rate: float) -> Row:
    """Return the row of a case's gradients."""
    row: Row = {"op": case.op, "pass": "backward", "case": case.name, "dtype": str(case.dtype)[6:]}
    row["errors"] = case.gradient_errors()
    if not max(row["errors"].values()) <= GRADIENT_BOUND[case.dtype]:
        return row | {"refused": f"error above {GRADIENT_BOUND[case.dtype]}"}
    leaves = [a.requires_grad_() for a in case.leaves()]

    def y(run: Callable[[], Any]) -> torch.Tensor:
        out = run()
        return out[0] if isinstance(out, tuple) else out

    dy = torch.randn_like(y(case.run))

    def both(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y(run), leaves, dy)

    times = percentiles(time_ms(partial(torch.autograd.grad, y(case.run), leaves, dy, retain_graph=True), 15))
    moved = dy.nbytes + 2 * sum(leaf.nbytes for leaf in leaves)
    row |= {
        "bytes": moved,
        **times,
        "share_of_copy": moved / times["median_ms"] / copy_rate,
        "both_ms": statistics.median(time_ms(both(case.run), 15)),
        "extra_gib": extra_gib(lambda: (y(case.run), dy), leaves),
    }
    for name, run in case.rivals.items():
        if run is None:
            row[f"{name}_both_ms"] = MISSING
            continue
        try:
            row[f"{name}_both_ms"] = statistics.median(time_ms(both(run), 9))
            row[f"{name}_extra_gib"] = extra_gib(partial(lambda run: (y(run), dy), run), leaves)
        except Exception as error:  # whatever another package raises; the run goes on
            row[f"{name}_both_ms"] = f"not run: {first_line(error, 200)}"
    return row


def extra_gib(run: Callable[[], tuple[torch.Tensor, torch.Tensor]], leaves: list[torch.Tensor]) -> float:
    """Return the GiB that are allocated at most in a call and its gradients, beyond what was before."""
    for _ in range(2):  # the first time compiles
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y, dy = run()
        torch.autograd.grad(y, leaves, dy)
        del y
        torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _suite(cases: Iterator[TimedCall], measured: Callable[[TimedCall, float], Row] | None = None) -> Iterator[Row]:
    if not torch.cuda.is_available():
        raise DeviceError("this suite needs a CUDA device, and there is none. The suite cpu needs none")
    copy_rate = None
    for case in cases:
        what = {"op": case.op, "case": case.name, "dtype": str(case.dtype)[6:]}
        if wanted(**what, **({} if measured is None else {"pass": "backward"})):
            copy_rate = copy_rate or 2**33 / copy_ms(2**33)
            yield (measured or measure)(case, copy_rate)


def operator_suite(name: str) -> Callable[..., Iterator[Row]]:
    """Make the suite of a name from what operators list under it; the first of them says what it shows."""
    listed = [suites[name] for suites in operator_suites() if name in suites]
    measured = measure_backward if name.endswith("-backward") else None

    @wraps(listed[0])
    def suite(**options: Any) -> Iterator[Row]:
        return _suite((TimedCall(**vars(case)) for cases in listed for case in cases(**options)), measured)

    return suite
