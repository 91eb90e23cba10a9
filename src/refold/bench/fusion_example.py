"""The language model of the published kernel-fusion example: eager, torch.compile and refold in one run.

Default sizes are the published ones: 8 layers, width 1024, 32 states, 512 tokens, a vocabulary of 16384. A row has
interleaved times, peak memory beyond the weights, and the difference of the logits. float32 runs without TF32.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import refold

from ..errors import ArgumentError
from ..verify import race
from ..verify.memory import peak_bytes
from ..verify.timing import median_ms
from .options import DTYPES, VERIFY, check_names
from .progress import wanted
from .rows import Row

VOCABULARY = 16384


def first_call(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes which compiles."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def source(file: str) -> ModuleType:
    """Import a file with ``Model`` and ``get_inputs``.

    Raises:
        ArgumentError: There is no such file.
    """
    if not Path(file).is_file():
        raise ArgumentError(f"{file} is not a file. Run in the root of the repository, or give --set file=PATH")
    spec: Any = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fusion_example(
    *,
    file: str = "examples/fused_mamba.py",
    device: str = "cuda",
    dtype: tuple[str, ...] = ("float32", "bfloat16"),
    batch: tuple[int, ...] = (1, 4, 16),
    layers: int = 8,
    tokens: int = 512,
    width: int = 1024,
    state: int = 32,
    seconds: float = 10.0,
    inductor: bool = False,
    verify: str = "quick",
) -> Iterator[Row]:
    """Time the published kernel-fusion example: eager, refold, and with inductor=true (minutes) torch.compile."""
    check_names("fusion-example: dtype", dtype, DTYPES)
    check_names("fusion-example: verify", [verify], VERIFY)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    module = source(file)
    sizes = {"layers": layers, "width": width, "state": state, "vocabulary": VOCABULARY}
    options = {"strict": True, "verify": verify, "accept": "always" if verify == "off" else "faster"}
    for name in dtype:
        for rows in batch:
            if not wanted(case=Path(file).stem, layers=layers, dtype=name, batch=rows):
                continue
            at = torch.device(device)
            torch.manual_seed(0)
            model = module.Model(**sizes).to(at, getattr(torch, name)).eval()
            (ids,) = (x.to(at) for x in module.get_inputs(rows, tokens, VOCABULARY))
            torch.compiler.reset()
            programs: dict[str, Callable[..., Any]] = {
                "eager": model,
                "refold": refold.compile(model, **dict[str, Any](options)),
                **({"torch.compile": torch.compile(model)} if inductor else {}),
            }
            given = {"case": Path(file).stem, **sizes, "tokens": tokens, "dtype": name, "batch": rows}
            yield given | measure({key: partial(program, ids) for key, program in programs.items()}, at, seconds)


@torch.no_grad()
def measure(runs: dict[str, Callable[[], torch.Tensor]], device: torch.device, seconds: float) -> Row:
    """Time programs, compare their results with eager's, and return a row."""
    first_call_s = {name: first_call(run) for name, run in runs.items()}
    times_ms = {name: median_ms(run, device, budget_s=2.0) for name, run in runs.items()}
    result = race(runs["eager"], runs["refold"], device, budget_s=seconds)
    expected, found = runs["eager"]().double(), runs["refold"]().double()
    return {
        "first_call_s": first_call_s,
        "times_ms": {**times_ms, "eager": result.base_ms, "refold": result.candidate_ms},
        "speedup_over_eager": result.speedup,
        "speedup_at_least": result.at_least,
        "peak_bytes": {name: peak_bytes(run, device) for name, run in runs.items()},
        "difference": float((found - expected).norm() / expected.norm()),
    }
