"""``python -m refold.bench run ssd [selective_scan ...] [--out FILE]``: gate, time, and write JSON lines.

A case is refused if its error against a float64 scan of a slice of it is above the bound of its dtype. Times are
medians of CUDA events around single calls, with 1 GiB overwritten before each: that clears the L2 cache and lets the
host run ahead, whose own time is given apart. mamba-ssm's Triton kernels are timed in the same run if ``mamba_ssm`` can
be imported, else marked as not run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

import refold

BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
SSD = [(1, 1024, 128), (1, 8192, 128), (1, 131072, 128), (1, 1024, 80), (1, 8192, 80), (1, 131072, 80), (8, 4096, 80),
       (1, 2048, 48), (32, 256, 48), (1, 8192, 24)]  # fmt: skip
SELECTIVE = [(1, 512, 1024, 32), (4, 512, 1024, 32), (16, 512, 1024, 32), (1, 2048, 5120, 16), (1, 32768, 5120, 16),
             (8, 2048, 5120, 16), (1, 8192, 1536, 16)]  # fmt: skip
Case = tuple[str, str, torch.dtype, Callable[[], Any], Callable[[], Any] | None, int, float]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw inputs on the GPU."""
    return torch.randn(*shape, device="cuda").to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative L2 error, infinite if anything is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got.double() - want).norm() / want.norm()).item()


def ssd_cases() -> Iterator[Case]:
    """Yield the SSD cases: 64 channels a head, 128 states, one group, D, bias, softplus, final state."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as official
    except ImportError:
        official = None
    dtype = torch.bfloat16
    for b, t, h in SSD:
        x, dt = normal(b, t, h, 64, dtype=dtype), normal(b, t, h, dtype=dtype)
        A = -torch.rand(h, device="cuda") * 2
        B, C = normal(b, t, 1, 128, dtype=dtype), normal(b, t, 1, 128, dtype=dtype)
        D, bias = normal(h), normal(h) - 2
        kw = {"D": D, "dt_bias": bias, "dt_softplus": True}
        head = min(t, 512)
        y = refold.ops.ssd(x, dt, A, B, C, **kw)[0][:1, :head]
        wide = [a[:1, :head].double() for a in (x, dt, B, C)]
        want = refold.ops.ssd(wide[0], wide[1], A.double(), wide[2], wide[3], D=D.double(), dt_bias=bias.double(),
                              dt_softplus=True, backend="torch")[0]  # fmt: skip
        moved = (2 * x.numel() + B.numel() * 2 + dt.numel()) * 2 + b * h * 64 * 128 * 4
        peer = None
        if official is not None:
            peer = lambda: official(x, dt, A, B, C, 256, D=D, dt_bias=bias, dt_softplus=True,  # noqa: B023, E731
                                    return_final_states=True)  # fmt: skip
        run = lambda: refold.ops.ssd(x, dt, A, B, C, **kw)  # noqa: B023, E731
        yield "ssd", f"{b}x{t}x{h}", dtype, run, peer, moved, relative_error(y, want)


def selective_scan_cases() -> Iterator[Case]:
    """Yield the selective scan cases: D, z, bias, softplus, final state."""
    for b, t, d, n in SELECTIVE:
        for dtype in (torch.bfloat16, torch.float32):
            x, dt, z = (normal(b, t, d, dtype=dtype) for _ in range(3))
            A, B, C = -torch.rand(d, n, device="cuda") * 4, normal(b, t, n, dtype=dtype), normal(b, t, n, dtype=dtype)
            kw = {"D": normal(d), "dt_bias": normal(d) - 2}
            head = min(t, 512)
            y = refold.ops.selective_scan(x, dt, A, B, C, z=z, dt_softplus=True, **kw)[0][:1, :head]
            wide = [a[:1, :head].double() for a in (x, dt, B, C, z)]
            want = refold.ops.selective_scan(
                wide[0], wide[1], A.double(), wide[2], wide[3], z=wide[4], dt_softplus=True, backend="torch",
                **{k: v.double() for k, v in kw.items()})[0]  # fmt: skip
            run = lambda: refold.ops.selective_scan(x, dt, A, B, C, z=z, dt_softplus=True, **kw)  # noqa: B023, E731
            moved = (4 * x.numel() + 2 * B.numel()) * x.element_size() + b * d * n * 4
            yield "selective_scan", f"{b}x{t}x{d}x{n}", dtype, run, None, moved, relative_error(y, want)


def pointwise_cases() -> Iterator[Case]:
    """Yield causal_conv1d, gated_rmsnorm and the steps at batch 64."""
    dtype = torch.bfloat16
    for b, t in ((1, 8192), (8, 4096)):
        x, w = normal(b, t, 5376, dtype=dtype), normal(5376, 4)
        run = lambda: refold.ops.causal_conv1d(x, w, w[:, 0], activation="silu")  # noqa: B023, E731
        want = torch.nn.functional.silu(torch.nn.functional.conv1d(
            x[:1, :512].double().mT, w.double()[:, None], w[:, 0].double(), padding=3, groups=5376,
        )[..., :512].mT)  # fmt: skip
        error = relative_error(run()[0][:1, :512], want)
        yield "causal_conv1d", f"{b}x{t}x5376", dtype, run, None, x.numel() * 4, error
        x, z, w = normal(b, t, 5120, dtype=dtype), normal(b, t, 5120, dtype=dtype), normal(5120)
        run = lambda: refold.ops.gated_rmsnorm(x, z, w, eps=1e-5)  # noqa: B023, E731
        v = x[:1, :512].double() * torch.nn.functional.silu(z[:1, :512].double())
        want = v / (v.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()
        yield "gated_rmsnorm", f"{b}x{t}x5120", dtype, run, None, x.numel() * 6, relative_error(run()[:1, :512], want)
    state, x, B, dt = normal(64, 80, 64, 128), normal(64, 80, 64, dtype=dtype), normal(64, 1, 128), normal(64, 80)
    A, B = -torch.rand(80, device="cuda"), B.to(dtype)
    arrays = (x, dt.to(dtype), A, B, B, state)
    y = refold.ops.ssd_step(*arrays, dt_softplus=True)[0]
    want = refold.ops.ssd_step(*(a.double() for a in arrays), dt_softplus=True, backend="torch")[0]
    run = lambda: refold.ops.ssd_step_(*arrays, dt_softplus=True)  # noqa: E731
    yield "ssd_step_", "64x80x64x128", dtype, run, None, state.numel() * 8 + x.numel() * 4, relative_error(y, want)
    state, x, B = normal(64, 5120, 16), normal(64, 5120, dtype=dtype), normal(64, 16, dtype=dtype)
    more = (x, x, -torch.rand(5120, 16, device="cuda"), B, B, state)
    y = refold.ops.selective_scan_step(*more, dt_softplus=True)[0]
    want = refold.ops.selective_scan_step(*(a.double() for a in more), dt_softplus=True, backend="torch")[0]
    run = lambda: refold.ops.selective_scan_step_(*more, dt_softplus=True)  # noqa: E731
    moved = state.numel() * 8 + x.numel() * 6
    yield "selective_scan_step_", "64x5120x16", dtype, run, None, moved, relative_error(y, want)


CASES = {"ssd": ssd_cases, "selective_scan": selective_scan_cases, "pointwise": pointwise_cases}


def time_ms(run: Callable[[], Any], count: int = 25, warmup: int = 5) -> list[float]:
    """Return the sorted times of single calls, each after the L2 cache was overwritten."""
    flush = torch.empty(256 << 20, dtype=torch.float32, device="cuda")
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


def host_us(run: Callable[[], Any]) -> float:
    """Return the host time of a call while the device is kept busy behind it."""
    busy = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        for _ in range(10):
            busy.zero_()
        start = time.perf_counter()
        for _ in range(40):
            run()
        times.append((time.perf_counter() - start) / 40 * 1e6)
    return statistics.median(times)


def environment() -> dict[str, Any]:
    """Say where the numbers come from."""
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda, "sha": os.environ.get("REFOLD_SHA", "unknown"),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")}  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the named groups of cases."""
    parser = argparse.ArgumentParser(prog="python -m refold.bench", description=__doc__)
    parser.add_argument("command", choices=["run"])
    parser.add_argument("groups", nargs="*", default=list(CASES))
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    copy_rate = 2 * source.numel() * 4 / statistics.median(time_ms(source.clone, 9)) * 1e3
    del source
    env, red, lines = environment(), 0, []
    for group in args.groups:
        for op, case, dtype, run, peer, moved, error in CASES[group]():
            row = {"schema": 1, "op": op, "backend": "triton", "case": case, "dtype": str(dtype)[6:], "error": error,
                   "bytes": moved, "env": env}  # fmt: skip
            if not error <= BOUND[dtype]:
                red += 1
                row["refused"] = f"error above {BOUND[dtype]}"
            else:
                times = time_ms(run)
                row["median_ms"] = median = times[len(times) // 2]
                row["p20_ms"], row["p80_ms"] = times[len(times) // 5], times[len(times) * 4 // 5]
                row["host_us"] = host_us(run) if median < 0.2 else None
                row["share_of_copy"] = moved / median * 1e3 / copy_rate
                row["mamba_ssm_ms"] = "not run" if peer is None else statistics.median(time_ms(peer, 9))
            lines.append(json.dumps(row))
            wanted = ("median_ms", "host_us", "share_of_copy", "mamba_ssm_ms", "refused")
            shown = {k: row[k] for k in wanted if k in row}
            print(op, case, row["dtype"], f"error {error:.1e}", shown, flush=True)  # noqa: T201
    if args.out:
        with open(args.out, "a") as file:
            file.write("\n".join(lines) + "\n")
    return red


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
