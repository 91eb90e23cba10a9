"""Layers in training: naive code with eager, torch.compile and refold; the same layer with refold.ops, and mamba-ssm.

All programs of a layer share one set of weights. A call is a forward and the gradients of the input and of all weights.
A turn is a few calls in a row, and the host does not wait between them, as between the layers of a model; the L2 cache
is overwritten before each turn. Results and gradients are compared with the naive layer in float64, in eager, sequence
by sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import refold

from ..errors import ArgumentError
from ..verify import Function
from ..verify.memory import peak_bytes
from ..verify.profile import profiling, take
from .contest import BOUND, contest
from .layers import LAYERS
from .options import VERIFY, check_names
from .progress import wanted
from .rows import Row


def gradients(run: Function, u: torch.Tensor, weights: list[torch.nn.Parameter], dy: Tensor) -> list[torch.Tensor]:
    """Compute a program's result, and its gradients: of the input, and of the weights."""
    y = run(u)
    return [y.detach(), *torch.autograd.grad(y, [u, *weights], dy)]


def reference(layer: torch.nn.Module, u: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Compute the same in float64 by the naive layer, one sequence at a time."""
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


def training(
    *, device: str = "cuda", layers: tuple[str, ...] = ("mamba1", "mamba2", "granite"), dtype: str = "bfloat16",
    batch: int = 8, tokens: int = 2048, width: int = 0, rounds: int = 15, eager: bool = True, inductor: bool = False,
    verify: str = "quick", gate: bool = True, kernels: bool = False, calls: int = 4,
) -> Iterator[Row]:  # fmt: skip
    """Time naive layers in training: eager, refold, refold.ops, mamba-ssm, and with inductor=true torch.compile."""
    check_names("training: dtype", [dtype], BOUND)
    check_names("training: layers", layers, LAYERS)
    check_names("training: verify", [verify], VERIFY)
    if width % 32:
        raise ArgumentError(f"training: width is {width}. Give a multiple of 32; 0 is that of the published layer")
    at = torch.device(device)
    for name in layers:
        make, own = LAYERS[name]
        what: Row = {"case": name, "width": width or own, "batch": batch, "tokens": tokens, "dtype": dtype}
        if not wanted(**what):
            continue
        torch.manual_seed(0)
        torch.compiler.reset()
        layer, others = make(width or own)
        layer.to(at, getattr(torch, dtype))
        compiled = refold.compile(layer, strict=True, verify=verify, accept="always" if verify == "off" else "faster")
        programs: dict[str, Function] = {"refold": compiled, **others}
        programs |= {"eager": layer} if eager else {}
        programs |= {"torch.compile": torch.compile(layer)} if inductor else {}
        u = torch.randn(batch, tokens, width or own, device=at).to(getattr(torch, dtype)).requires_grad_()
        row = measure(layer, programs, u, BOUND[dtype] if gate else None, rounds, kernels, calls)
        yield {**what, "calls": calls, **row, "report": compiled.report.to_dict()}


def measure(
    layer: torch.nn.Module, programs: dict[str, Function], u: torch.Tensor, bound: float | None, rounds: int,
    kernels: bool, calls: int = 1,
) -> Row:  # fmt: skip
    """Check the programs of a layer, and time eager and those that are right."""
    dy, weights = torch.randn_like(u), list(layer.parameters())
    exact = None if bound is None else partial(reference, layer, u, dy)
    calling = {name: partial(gradients, program, u, weights, dy) for name, program in programs.items()}
    row, runs = contest(calling, exact, bound, rounds, u.device, calls=calls, medians="median_ms")
    if kernels and u.is_cuda:
        with profiling():
            found = {name: take("call", run, u.device)[:25] for name, run in runs.items() if name != "eager"}
        row["kernels"] = {name: [(k["name"], k["ms"], k["count"]) for k in most] for name, most in found.items()}
    row["peak_bytes"] = {name: peak_bytes(run, u.device) for name, run in runs.items()} if u.is_cuda else {}
    return row
