"""How long the first call of an operator takes on a GPU: in a process with empty caches, and in the next one.

Each process imports PyTorch and refold, starts the GPU, makes its inputs, and calls backward of a product with PyTorch
alone before the clock starts: the first backward that is given a gradient imports SymPy (in torch.autograd). It then
calls the operator once and its backward once. Rows also hold how many kernels Triton compiled, from the folder of its
cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from compileall import compile_dir
from pathlib import Path

from ..errors import ArgumentError
from .options import check_names
from .progress import wanted
from .rows import Row

CALLS = {
    "ssd bfloat16": "bfloat16", "ssd float32": "float32", "selective_scan bfloat16": "bfloat16",
    "delta_rule bfloat16": "bfloat16",
}  # fmt: skip

_CHILD = """
import json, sys, time
import torch, refold
from refold import ops
name, dtype = sys.argv[1], getattr(torch, sys.argv[2])
def normal(*shape): return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
b, t, h, p, n = 1, 2048, 24, 64, 128
if name == "ssd":
    given = {"x": normal(b, t, h, p), "dt": normal(b, t, h), "A": -torch.rand(h, device="cuda"),
             "B": normal(b, t, 1, n), "C": normal(b, t, 1, n), "dt_softplus": True}
elif name == "delta_rule":
    given = {"v": normal(b, t, 16, 128), "q": normal(b, t, 16, 128), "k": normal(b, t, 16, 128),
             "g": -torch.rand(b, t, 16, device="cuda"), "beta": torch.rand(b, t, 16, device="cuda").to(dtype),
             "normalize": True}
else:
    given = {"x": normal(b, t, 1536), "dt": normal(b, t, 1536), "A": -torch.rand(1536, 16, device="cuda"),
             "B": normal(b, t, 16), "C": normal(b, t, 16), "dt_softplus": True}
grad = torch.ones_like(next(iter(given.values())))
(torch.ones_like(grad, requires_grad=True) * 2).backward(grad)
def clock(call):
    torch.cuda.synchronize(); begin = time.perf_counter(); found = call(); torch.cuda.synchronize()
    return time.perf_counter() - begin, found
def both():
    forward, found = clock(lambda: getattr(ops, name)(**given)[0])
    backward, _ = clock(lambda: found.backward(grad))
    return forward, backward
print(json.dumps([*both(), *both()]))
"""


def first_calls(call: str, folder: Path) -> tuple[float, float, float, float]:
    """Run a call and its backward twice in a new process whose caches are in ``folder``; seconds of each.

    Raises:
        ArgumentError: The process failed.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton"), "REFOLD_CACHE": str(folder / "refold")}
    command = [sys.executable, "-c", _CHILD, *call.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ArgumentError(f"starts: {call} failed: {done.stderr[-300:]}")
    found: tuple[float, float, float, float] = tuple(json.loads(done.stdout.splitlines()[-1]))
    return found


def starts(*, calls: tuple[str, ...] = tuple(CALLS), processes: int = 2) -> Iterator[Row]:
    """Time the first call of scans and of their gradients on a GPU, with empty caches and in later processes."""
    import torch

    check_names("starts: calls", calls, tuple(CALLS))
    if not torch.cuda.is_available():
        raise ArgumentError("starts needs a GPU, and there is none")
    cold = True
    for call in calls:
        if not wanted(case=call):
            continue
        if cold:
            compile_dir(Path(__file__).parents[1], quiet=2)  # to bytecode, as an installation does
            with tempfile.TemporaryDirectory() as name:
                first_calls(call, Path(name))  # not counted: it waits for a disk that nobody has read from
            cold = False
        with tempfile.TemporaryDirectory() as name:
            found = [first_calls(call, Path(name)) for _ in range(processes + 1)]
            kernels = len(list(Path(name).glob("triton/*/*.cubin")))
        for what, first in (("forward", 0), ("backward", 1)):
            times = [each[first] for each in found[1:]]
            yield {
                "op": call.split()[0], "case": call, "dtype": CALLS[call], "pass": what, "empty_s": found[0][first],
                "full_s": min(times), "median_s": sorted(times)[len(times) // 2], "again_s": found[-1][first + 2],
                "kernels": kernels,
            }  # fmt: skip
