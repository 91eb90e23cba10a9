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
  arguments and the gradient of y. For ssd, also the same of mamba-ssm's kernels. ``bytes`` are those of arguments, the
  gradient of y, and gradients.
- ``accuracy`` (ssd): of each kernel, the relative L2 error against float64 on that slice, and the shares of elements
  that are within 1e-3 and 1e-2 of the root mean square of the result.
- ``fused_ms``: the published fused kernel in float16 with chunks of 128, if ``--set fused=FOLDER`` names its checkout.
- ``mamba_ssm_ms``: mamba-ssm's kernels in the same run, if ``mamba_ssm`` (for ssd, chunks of 256) or its
  ``selective_scan_cuda`` (in its own layout) can be imported.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

import refold

from ..errors import ArgumentError, DeviceError
from ..ops.arrays import meta_of
from ..ops.spec import Meta, OpSpec, load
from .progress import wanted
from .rows import Row

BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
HEAD = 512  # Tokens, or rows, of the slice that is compared with float64.
SSD = [(1, 1024, 128), (1, 8192, 128), (1, 131072, 128), (1, 1024, 80), (1, 8192, 80), (1, 131072, 80), (8, 4096, 80),
       (1, 2048, 48), (32, 256, 48), (1, 8192, 24)]  # fmt: skip
# Batch, tokens, heads, channels, groups, states.
SSD_SIZES = [
    (2, 16384, 48, 64, 1, 256), (1, 2048, 24, 64, 1, 256), (2, 8192, 32, 64, 1, 192), (2, 8192, 33, 64, 1, 128),
    (2, 8192, 32, 64, 32, 128), (2, 8192, 32, 64, 32, 64), (2, 8192, 64, 64, 8, 64), (2, 8192, 64, 32, 2, 64),
    (2, 8192, 64, 32, 1, 16), (2, 8192, 48, 96, 1, 64), (2, 8192, 32, 128, 1, 128), (2, 8192, 16, 256, 1, 128),
    (2, 8192, 16, 256, 1, 256),
]  # fmt: skip
TRAINED_SELECTIVE = [(2, 4096, 4096, 16), (8, 2048, 5120, 16), (1, 8192, 1536, 16)]
TRAINED_SSD = [(8, 4096, 80), (1, 8192, 128), (1, 65536, 80), (8, 2048, 24)]
GRADIENT_BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
SELECTIVE = [(1, 512, 1024, 32), (4, 512, 1024, 32), (16, 512, 1024, 32), (1, 2048, 5120, 16), (1, 32768, 5120, 16),
             (8, 2048, 5120, 16), (1, 8192, 1536, 16)]  # fmt: skip


@dataclass
class Case:
    """One call to be measured."""

    op: str
    """A public function; a trailing underscore overwrites the state."""
    name: str
    arguments: dict[str, Any]
    peer: Callable[[], Any] | None = None
    fused: Callable[[], Any] | None = None

    @property
    def spec(self) -> OpSpec:
        """The spec of the operator."""
        return load(self.op.rstrip("_"))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first argument."""
        return next(iter(self.arguments.values())).dtype

    def run(self) -> Any:
        """Call the operator."""
        return getattr(refold.ops, self.op)(**self.arguments)

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
        return self.accuracy(lambda: getattr(refold.ops, self.op)(**given))["error"]

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
        names = [name for name, value in short.items() if isinstance(value, torch.Tensor)]
        dy = torch.randn_like(short["x"])
        found = []
        for wide in (False, True):
            given = {k: v.detach().double() if wide and k in names else v for k, v in short.items()}
            given |= {k: given[k].detach().requires_grad_() for k in names}
            out = getattr(refold.ops, self.op)(**given, backend="torch" if wide else None)
            y = out[0] if isinstance(out, tuple) else out
            found.append(torch.autograd.grad(y, [given[k] for k in names], dy.to(y.dtype)))
        return {k: ((a.double() - b).norm() / b.norm()).item() for k, a, b in zip(names, *found, strict=True)}

    def definition(self) -> torch.Tensor:
        """Return the operator on those tokens in float64."""
        wide = dict(self.arguments)
        for arg in self.spec.args:
            if (array := wide.get(arg.name)) is not None:
                wide[arg.name] = _head(array, arg.axes).double()
        out = getattr(refold.ops, self.spec.name)(**wide, backend="torch")
        return out[0] if isinstance(out, tuple) else out


def _head(array: torch.Tensor, layouts: tuple[str, ...]) -> torch.Tensor:
    """Return the first batch row and the first tokens, or rows, of an array; steps here have no time axis."""
    lengths = {"b": 1, "k": 1, "t": HEAD, "*": HEAD}
    spellings = [one for layout in layouts for one in (layout, layout.replace("t ", ""))]
    axes = next(one.split() for one in spellings if len(one.split()) == array.dim())
    return array[tuple(slice(lengths.get(letter)) for letter in axes)]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw inputs on the GPU."""
    return torch.randn(*shape, device="cuda").to(dtype)


def from_checkout(folder: str, module: str, name: str) -> Any:
    """Import a function from a checkout of a package, next to an installed package of the same name.

    Raises:
        ArgumentError: It cannot be imported.
    """
    package = module.partition(".")[0]

    def take_out() -> dict[str, Any]:
        return {key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] == package}

    installed = take_out()
    sys.path.insert(0, folder)
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{folder} has no {module}.{name} that can be imported: {error}") from error
    finally:
        sys.path.remove(folder)
        take_out()
        sys.modules.update(installed)


def ssd_cases(shapes: Sequence[tuple[int, ...]] = SSD, fused: str = "") -> Iterator[Case]:
    """Yield the SSD cases with a final state, and each once more with every option on.

    Heads have 64 channels and 128 states in one group, where a shape does not say otherwise. ``fused`` is a checkout of
    the published fused kernel (github.com/RishiAstra/mamba), which runs in float16.
    """
    one_kernel: Any = (
        from_checkout(fused, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined") if fused else None
    )
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as official
    except ImportError:
        official = None
    dtype = torch.bfloat16
    for b, t, h, *sizes in shapes:
        p, g, n = sizes or (64, 1, 128)
        x, dt, z = normal(b, t, h, p, dtype=dtype), normal(b, t, h, dtype=dtype), normal(b, t, h, p, dtype=dtype)
        A = -torch.rand(h, device="cuda") * 2
        B, C = normal(b, t, g, n, dtype=dtype), normal(b, t, g, n, dtype=dtype)
        arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
        plain = {"D": normal(h), "dt_bias": normal(h) - 2, "dt_softplus": True}
        limit, initial = (1e-3, 10.0), normal(b, h, p, n)
        every = {**plain, "z": z, "dt_limit": limit}

        def peer(
            arrays: dict[str, Any] = arrays, options: dict[str, Any] = plain, initial: torch.Tensor | None = None
        ) -> Any:
            return official(
                *arrays.values(), chunk_size=256, **options, initial_states=initial, return_final_states=True
            )

        def peer_with_all(arrays: Any = arrays, every: Any = every, initial: Any = initial, peer: Any = peer) -> Any:
            return peer(arrays, every, initial)

        half = (x.half(), dt.half(), A, B.half(), C.half()) if one_kernel else ()

        def by_one_kernel(half: Any = half, more: Any = plain) -> Any:
            return one_kernel(*half, chunk_size=128, **more, return_final_states=True, mamba2_fusion_type="medium")

        name = f"{b}x{t}x{h}" + (f", {p}x{n}, groups {g}" if sizes else "")
        yield Case("ssd", name, arrays | plain, peer if official else None, by_one_kernel if one_kernel else None)
        yield Case(
            "ssd", f"{name}, all options", arrays | every | {"initial_state": initial},
            peer_with_all if official else None,
        )  # fmt: skip


def selective_scan_cases(
    shapes: list[tuple[int, int, int, int]] = SELECTIVE,
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32),
) -> Iterator[Case]:
    """Yield the selective scan cases: D, z, bias, softplus, final state; mamba-ssm's kernel in its own layout."""
    try:
        from selective_scan_cuda import fwd as official
    except ImportError:
        official = None
    for b, t, d, n in shapes:
        for dtype in dtypes:
            x, dt, z = (normal(b, t, d, dtype=dtype) for _ in range(3))
            A, B, C = -torch.rand(d, n, device="cuda") * 4, normal(b, t, n, dtype=dtype), normal(b, t, n, dtype=dtype)
            arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": normal(d), "z": z, "dt_bias": normal(d) - 2}
            peer = None
            if official is not None:
                rows = [arrays[name].mT.contiguous() for name in ("x", "dt", "B", "C", "z")]
                peer = lambda: official(rows[0], rows[1], A, rows[2][:, None], rows[3][:, None], arrays["D"],  # noqa: B023, E731
                                        rows[4], arrays["dt_bias"], True)  # noqa: B023  # fmt: skip
            yield Case("selective_scan", f"{b}x{t}x{d}x{n}", arrays | {"dt_softplus": True}, peer)


def pointwise_cases() -> Iterator[Case]:
    """Yield causal_conv1d, gated_rmsnorm, linear_scan, and the steps at batch 64."""
    dtype = torch.bfloat16
    for b, t in ((1, 8192), (8, 4096)):
        arrays = {"x": normal(b, t, 5376, dtype=dtype), "weight": normal(5376, 4), "bias": normal(5376)}
        yield Case("causal_conv1d", f"{b}x{t}x5376", arrays | {"activation": "silu"})
        arrays = {name: normal(b * t, 5120, dtype=dtype) for name in ("x", "z")}
        yield Case("gated_rmsnorm", f"{b}x{t}x5120", arrays | {"weight": normal(5120), "eps": 1e-5})
    arrays = {"a": torch.rand(1, 2048, 5120, device="cuda").to(dtype), "x": normal(1, 2048, 5120, dtype=dtype)}
    yield Case("linear_scan", "1x2048x5120", arrays)
    x, B = normal(64, 80, 64, dtype=dtype), normal(64, 1, 128, dtype=dtype)
    arrays = {"x": x, "dt": normal(64, 80, dtype=dtype), "A": -torch.rand(80, device="cuda"), "B": B, "C": B}
    yield Case("ssd_step_", "64x80x64x128", arrays | {"state": normal(64, 80, 64, 128), "dt_softplus": True})
    x, B = normal(64, 5120, dtype=dtype), normal(64, 16, dtype=dtype)
    arrays = {"x": x, "dt": x, "A": -torch.rand(5120, 16, device="cuda"), "B": B, "C": B}
    yield Case("selective_scan_step_", "64x5120x16", arrays | {"state": normal(64, 5120, 16), "dt_softplus": True})
    arrays = {"x": normal(64, 5376, dtype=dtype), "weight": normal(5376, 4), "state": normal(64, 5376, 3, dtype=dtype)}
    yield Case("causal_conv1d_step_", "64x5376", arrays | {"activation": "silu"})


def ssd_backward_cases() -> Iterator[Case]:
    """Yield the cases of `ssd_cases` whose gradients are measured."""
    yield from ssd_cases(TRAINED_SSD)


def selective_scan_backward_cases() -> Iterator[Case]:
    """Yield the cases of `selective_scan_cases` whose gradients are measured."""
    for case in selective_scan_cases(TRAINED_SELECTIVE, (torch.bfloat16,)):
        case.peer = None  # the forward alone
        yield case


def pointwise_backward_cases() -> Iterator[Case]:
    """Yield the cases of `pointwise_cases` that are no steps and fill the device."""
    for case in pointwise_cases():
        if case.op in ("causal_conv1d", "gated_rmsnorm", "linear_scan") and not case.name.startswith("1x8192"):
            yield case


def time_ms(run: Callable[[], Any], count: int = 25, warmup: int = 5, cold: bool = True) -> list[float]:
    """Return the sorted times of single calls, each after the L2 cache was overwritten if ``cold``."""
    flush = torch.empty((256 if cold else 1) << 20, dtype=torch.float32, device="cuda")
    for _ in range(warmup):
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


def graph_ms(case: Case) -> float:
    """Return the time per layer of a CUDA graph that calls the operator once for each of many layers."""
    given, run = case.arguments, getattr(refold.ops, case.op)
    size = sum(a.nbytes for a in given.values() if isinstance(a, torch.Tensor))
    count = min(512, max(16, math.ceil(8 * torch.cuda.get_device_properties().L2_cache_size / size)))
    layers = [{k: a.clone() if isinstance(a, torch.Tensor) else a for k, a in given.items()} for _ in range(count)]
    run(**layers[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            run(**layer)
    return statistics.median(time_ms(graph.replay, cold=False)) / count


def measure(case: Case, copy_rate: float) -> Row:
    """Return the row of a case."""
    error, meta = case.error(), case.meta()
    moved = case.spec.bytes_moved(meta)
    row: Row = {"op": case.op, "case": case.name, "dtype": str(case.dtype)[6:], "error": error}
    if not error <= BOUND[case.dtype]:
        return row | {"refused": f"error above {BOUND[case.dtype]}"}
    times = time_ms(case.run)
    median = times[len(times) // 2]
    return row | {
        "bytes": moved,
        "flops": case.spec.flops(meta.sizes),
        "median_ms": median,
        "p20_ms": times[len(times) // 5],
        "p80_ms": times[len(times) * 4 // 5],
        "hot_ms": statistics.median(time_ms(case.run, cold=False)),
        "share_of_copy": moved / median / copy_rate,
        "copy_ms": copy_ms(moved),
        "host_us": host_us(case.run) if median < 0.2 else None,
        "graph_ms": graph_ms(case) if case.op.endswith("_") else None,
        **rivals(case),
    }


def rivals(case: Case) -> Row:
    """Return the times of other packages' kernels, and for ssd how near all results are to float64."""
    row: Row = {"accuracy": {"refold": case.accuracy(case.run)}} if case.op == "ssd" else {}
    for name, run in (("mamba_ssm", case.peer), ("fused", case.fused)):
        row[f"{name}_ms"] = "not run"
        if run is None:
            continue
        try:
            row[f"{name}_ms"] = statistics.median(time_ms(run, 9))
            if case.op == "ssd":
                row["accuracy"][name] = case.accuracy(run)
        except Exception as error:  # whatever another package raises; the run goes on
            row[f"{name}_ms"] = f"not run: {type(error).__name__}: {str(error)[:200]}"
    return row


def measure_backward(case: Case, copy_rate: float) -> Row:
    """Return the row of a case's gradients."""
    row: Row = {"op": case.op, "pass": "backward", "case": case.name, "dtype": str(case.dtype)[6:]}
    row["errors"] = case.gradient_errors()
    if not max(row["errors"].values()) <= GRADIENT_BOUND[case.dtype]:
        return row | {"refused": f"error above {GRADIENT_BOUND[case.dtype]}"}
    leaves = [a.requires_grad_() for a in case.leaves()]
    dy = torch.randn_like(case.arguments["x"])

    def y(run: Callable[[], Any]) -> torch.Tensor:
        out = run()
        return out[0] if isinstance(out, tuple) else out

    def both(run: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(y(run), leaves, dy)

    times = backward_ms(y(case.run), leaves, dy)
    moved = dy.nbytes + 2 * sum(leaf.nbytes for leaf in leaves)
    row |= {
        "bytes": moved,
        "median_ms": times[len(times) // 2],
        "share_of_copy": moved / times[len(times) // 2] / copy_rate,
        "p20_ms": times[len(times) // 5],
        "p80_ms": times[len(times) * 4 // 5],
        "both_ms": statistics.median(time_ms(both(case.run), 15)),
        "extra_gib": extra_gib(lambda: (y(case.run), dy), leaves),
    }
    if (peer := case.peer) is None:
        return row | {"mamba_ssm_both_ms": "not run"}
    return row | {
        "mamba_ssm_both_ms": statistics.median(time_ms(both(peer), 9)),
        "mamba_ssm_extra_gib": extra_gib(lambda: (y(peer), dy), leaves),
    }


def backward_ms(y: torch.Tensor, leaves: list[torch.Tensor], dy: torch.Tensor) -> list[float]:
    """Return the sorted times of the gradients of one result."""
    return time_ms(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), 15)


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


def _suite(cases: Iterator[Case], measured: Callable[[Case, float], Row] | None = None) -> Iterator[Row]:
    if not torch.cuda.is_available():
        raise DeviceError("this suite needs a CUDA device, and there is none. The suite cpu needs none")
    copy_rate = None
    for case in cases:
        what = {"op": case.op, "case": case.name, "dtype": str(case.dtype)[6:]}
        if wanted(**what, **({} if measured is None else {"pass": "backward"})):
            copy_rate = copy_rate or 2**33 / copy_ms(2**33)
            yield (measured or measure)(case, copy_rate)


def ssd(*, fused: str = "") -> Iterator[Row]:
    """Time the operator ssd, forward, 256 to 131072 tokens, next to mamba-ssm's kernels and a published fused one."""
    return _suite(ssd_cases(fused=fused))


def ssd_sizes(*, fused: str = "") -> Iterator[Row]:
    """Time the operator ssd, forward, with 32 to 256 channels and 16 to 256 states, next to the same kernels."""
    return _suite(ssd_cases(SSD_SIZES, fused))


def ssd_backward() -> Iterator[Row]:
    """Time gradients of ssd, next to mamba-ssm's kernels."""
    return _suite(ssd_backward_cases(), measure_backward)


def selective_scan() -> Iterator[Row]:
    """Time the operator selective_scan, forward, next to mamba-ssm's kernel."""
    return _suite(selective_scan_cases())


def selective_scan_backward() -> Iterator[Row]:
    """Time gradients of selective_scan."""
    return _suite(selective_scan_backward_cases(), measure_backward)


def pointwise() -> Iterator[Row]:
    """Time causal_conv1d, gated_rmsnorm, linear_scan, and the one-token steps."""
    return _suite(pointwise_cases())


def pointwise_backward() -> Iterator[Row]:
    """Time gradients of causal_conv1d, gated_rmsnorm and linear_scan."""
    return _suite(pointwise_backward_cases(), measure_backward)
