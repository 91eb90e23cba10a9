"""The language model of the published kernel-fusion example: eager, torch.compile and refold in one run.

Default sizes are the published ones: 8 layers, width 1024, 32 states, 512 tokens, a vocabulary of 16384. A row has
times in turns, and peak memory beyond the weights. float32 runs without TF32.

With ``checkout``, a folder of the published code (github.com/TimoSaemann/mamba-llm-fused-kernel), the model is its own
baseline, which has 1024 channels, and its own CUDA program runs next to it with the same weights. ``errors`` are
against the model in float64; ``launches`` counts what each program launches in a call, and ``longest`` is the longest
of these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import refold

from ..errors import ArgumentError, DeviceError, MissingDependency, TargetError, first_line
from ..targets import import_file
from ..verify.memory import peak_bytes
from ..verify.profile import longest, profiling, take
from .contest import contest
from .options import DTYPES, VERIFY, check_names
from .progress import wanted
from .rows import Row

VOCABULARY = 16384


def source(file: str) -> Any:
    """Import a file with ``Model`` and ``get_inputs``.

    Raises:
        ArgumentError: There is no such file.
        MissingDependency: It imports a package that is not installed.
        TargetError: It is no Python file, or raises something else.
    """
    if not Path(file).is_file():
        raise ArgumentError(f"{file} is not a file. Run in the root of the repository, or give --set file=PATH")
    try:
        return import_file(Path(file))
    except TargetError as error:
        if not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        name = error.__cause__.name
        raise MissingDependency(
            f"{file} needs {name}, which is not installed. Install it: pip install {name}"
        ) from error


def fusion_example(
    *, file: str = "examples/fused_mamba.py", device: str = "cuda", dtype: tuple[str, ...] = ("float32", "bfloat16"),
    batch: tuple[int, ...] = (1, 4, 16), layers: int = 8, tokens: int = 512, width: int = 1024, state: int = 32,
    rounds: int = 15, inductor: bool = False, verify: str = "quick", checkout: str = "",
) -> Iterator[Row]:  # fmt: skip
    """Time the published kernel-fusion example: eager, refold, and with inductor=true (minutes) torch.compile."""
    check_names("fusion-example: dtype", dtype, DTYPES)
    check_names("fusion-example: verify", [verify], VERIFY)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    module = source(f"{checkout}/mamba_baseline.py" if checkout else file)
    sizes = {"layers": layers, "width": width, "state": state, "vocabulary": VOCABULARY}
    made = sizes if not checkout else {"num_layers": layers, "d_model": width, "d_state": state}
    what = "published code" if checkout else Path(file).stem
    options = {"strict": True, "verify": verify, "accept": "always" if verify == "off" else "faster"}
    for name in dtype:
        for rows in batch:
            if not wanted(case=what, layers=layers, dtype=name, batch=rows):
                continue
            at = torch.device(device)
            torch.manual_seed(0)
            model = module.Model(**made).to(at, getattr(torch, name)).eval()
            ids = torch.randint(0, VOCABULARY, (rows, tokens)).to(at)
            torch.compiler.reset()
            programs: dict[str, Callable[..., Any]] = {
                "eager": model,
                "refold": refold.compile(model, **dict[str, Any](options)),
                **({"torch.compile": torch.compile(model)} if inductor else {}),
            }
            given: Row = {"case": what, **sizes, "tokens": tokens, "dtype": name, "batch": rows}
            with torch.device(at):  # where the published code makes its norms in each call
                not_run = {}
                if checkout:
                    try:
                        programs |= {"published CUDA": published(checkout, model, made, at)}
                    except Exception as error:  # no device, no compiler, other versions: the others run
                        not_run["published CUDA"] = f"not run: {first_line(error, 200)}"
                row = measure(programs, model, ids, rounds)
                yield given | row | {"not_run": not_run | row["not_run"]}


def published(checkout: str, model: Any, sizes: dict[str, int], device: torch.device) -> Any:
    """Build the published CUDA program, with the weights of the published baseline."""
    if device.type != "cuda":
        raise DeviceError("it is written in CUDA, and this run has no GPU")
    program = source(f"{checkout}/mamba_cuda.py").Model(**sizes, dtype=next(model.parameters()).dtype).to(device).eval()
    weights = model.state_dict()
    for name in list(weights):
        if name.endswith("s_dt.weight"):  # its three projections are one
            weights[name.replace("s_dt", "s_BCD")] = torch.cat(
                [weights.pop(name.replace("s_dt", part)) for part in ("s_dt", "s_B", "s_C")]
            )
    program.load_state_dict(weights)
    return program


class _Wide(TorchFunctionMode):
    """Code that says ``float()`` makes float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].double() if function is torch.Tensor.float else function(*args, **(kwargs or {}))


@torch.no_grad()
def measure(programs: dict[str, Callable[..., Any]], model: torch.nn.Module, ids: torch.Tensor, rounds: int) -> Row:
    """Compare programs with the model in float64, time them, and list what they launch."""

    def exact() -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            with _Wide():
                found: torch.Tensor = copy.deepcopy(model).double()(ids)
                return found
        finally:
            torch.set_default_dtype(torch.float32)

    calling = {name: partial(program, ids) for name, program in programs.items()}
    row, runs = contest(calling, exact, None, rounds, ids.device)
    with profiling():
        kernels = {name: take(name, run, ids.device) for name, run in runs.items()}
    return row | {
        "peak_bytes": {name: peak_bytes(run, ids.device) for name, run in runs.items()},
        "launches": {name: sum(one["count"] for one in found) for name, found in kernels.items()},
        "longest": {name: longest(found) for name, found in kernels.items()},
    }
