"""Operators and models on a sequence that ranks of one host share, one process and one device each.

Weak scaling: the tokens of a rank stay the same. Strong scaling: the tokens of the sequence do. Times are those of the
slowest rank. Where fewer ranks share a sequence than there are, each group of them computes a sequence of its own at
the same time, as with data parallelism. Inputs are bfloat16. Ranks know how many tokens each has, as in a model.
"""

from __future__ import annotations

import queue
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from refold import ops
from refold.parallel import Cut

from ..errors import ArgumentError
from ..models.configs import Mamba2Config
from ..models.torch import mamba2, stack, take_layers_apart
from ..models.torch.layers import embed, rms_norm
from ..ops import timed
from ..ops.torch import cuts
from ..verify.profile import profiling, take
from ..verify.timing import synchronize
from .all_to_all import all_to_all
from .generation_torch import device_params
from .language_models import MODELS
from .options import check_names
from .progress import wanted
from .rows import Row

PASSES = ("forward", "training")
WAYS = ("states", "all-to-all")
CALLS = 16
"""Calls of an operator in a row on a GPU; the host does not wait between them, as between the layers of a model."""


class Task(NamedTuple):
    """What is measured: an operator, or some layers of a model."""

    op: str
    kind: str
    tokens: int
    ranks: int
    way: str = "states"
    layers: int = 0

    def about(self) -> Row:
        """Describe it for a row."""
        backend = f"{self.ranks} ranks" + (f", {self.way}" if self.way != "states" else "")
        found: Row = {"op": self.op, "pass": self.kind, "backend": backend, "case": f"{self.tokens} tokens a rank"}
        return (
            found | {"batch": 1, "tokens": self.tokens * self.ranks} | ({"layers": self.layers} if self.layers else {})
        )


def _operator(case: Task, cut: Cut | None) -> Callable[[], object]:
    """Return a call of an operator on the tokens of this rank."""
    operator, given = getattr(ops, case.op), timed.shared_calls()[case.op](case.tokens)
    inputs = [a.requires_grad_() for a in given.values() if isinstance(a, Tensor) and case.kind == "training"]

    def call() -> object:
        if case.way == "states":
            y = operator(**given, **({} if cut is None else {"group": cut}))[0]
        else:
            assert cut is not None
            y = all_to_all(operator, given, cut)
        return torch.autograd.grad(y, inputs, torch.ones_like(y)) if inputs else y

    return call


def _model(case: Task, cut: Cut | None, device: str) -> Callable[[], object]:
    """Return a call of a model: its last logits; or gradients of all weights but the head's, layer by layer again."""
    found = MODELS[case.op.removeprefix("mamba2-")]
    assert isinstance(found, Mamba2Config)
    config = replace(found, nlayers=case.layers)
    params = take_layers_apart(device_params(config, torch.bfloat16, device))
    ids = torch.randint(config.vocab_size, (1, case.tokens), device=device)
    if case.kind == "forward":
        return torch.inference_mode()(lambda: stack.forward(config, params, ids, group=cut)[0])
    layers = [{name: a.detach().requires_grad_() for name, a in layer.items()} for layer in params["layers"]]
    weights = [a for layer in layers for a in layer.values()]
    state = stack.init_state(replace(config, nlayers=1), 1, torch.bfloat16, device=device)

    def layer(hidden: Tensor, layer: dict[str, Tensor]) -> Tensor:
        normed = rms_norm(hidden, layer["norm"], config.norm_eps)
        mixed = mamba2.mixer(config.mixer, layer, normed, state["conv"][0], state["ssm"][0], None, group=cut)[0]
        return hidden + mixed

    def call() -> object:
        hidden = embed(params, ids)
        for each in layers:
            hidden = checkpoint(layer, hidden, each, use_reentrant=False)
        return torch.autograd.grad(hidden, weights, torch.ones_like(hidden))

    return call


def _seconds(run: Callable[[], object], repeats: int, calls: int, device: torch.device) -> list[float]:
    """Return the sorted seconds of a call of the slowest rank, of several calls in a row."""
    times, warm = [], 2 if calls == CALLS else 1
    for turn in range(warm + repeats):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        taken = torch.tensor((time.perf_counter() - began) / calls, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times += [float(taken)] if turn >= warm else []
    return sorted(times)


def _sent(run: Callable[[], object]) -> int:
    """Return the bytes that this rank sends to others in a call."""
    sent, gather, exchange = [0], cuts._ALL_GATHER, dist.all_to_all_single

    def gathered(told: Tensor, own: Tensor, **options: Any) -> Any:
        sent[0] += own.nbytes * (len(told) // len(own) - 1)
        return gather(told, own, **options)

    def exchanged(told: Tensor, given: Tensor, group: Any) -> Any:
        sent[0] += given.nbytes * (group.size() - 1) // group.size()
        return exchange(told, given, group=group)

    with mock.patch.object(cuts, "_ALL_GATHER", gathered), mock.patch.object(dist, "all_to_all_single", exchanged):
        run()
    return sent[0]


def timeline(run: Callable[[], object], device: torch.device) -> list[tuple[float, float, str]]:
    """Return begin and end, in microseconds, and the name of what a GPU does in a call that all ranks begin at once."""

    def together() -> None:
        dist.barrier()
        synchronize(device)
        run()

    with profiling() as profiles:
        take("call", together, device)
    events = [e for e in profiles.events["call"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events)
    first = next((i for i, (*_, name) in enumerate(found) if "AllReduce" in name), -1)  # the barrier
    zero = found[first][1] if first >= 0 else 0.0
    return [(begin - zero, end - zero, name) for begin, end, name in found[first + 1 :]]


def overlap(line: list[tuple[float, float, str]]) -> Row:
    """Return seconds of collectives; the part that computation hides; and when the GPU did nothing."""
    sums, last, running = {"collective_s": 0.0, "hidden_s": 0.0, "idle_s": 0.0}, 0.0, Counter[bool]()
    changes = [(at, name.startswith("nccl"), step) for begin, end, name in line for at, step in ((begin, 1), (end, -1))]
    for at, collective, step in sorted(changes):
        took = (at - last) / 1e6
        sums["collective_s"] += took * (running[True] > 0)
        sums["hidden_s"] += took * (running[True] > 0 and running[False] > 0)
        sums["idle_s"] += took * (not running.total())
        running[collective] += step
        last = at
    return sums


def _measure(case: Task, group: Any, device: torch.device, repeats: int) -> Row:
    """Measure one case, as each rank does; ``group`` shares a sequence."""
    torch.manual_seed(dist.get_rank())
    cut = None if case.ranks == 1 else Cut(group, (case.tokens,) * case.ranks)
    run = _model(case, cut, device.type) if case.layers else _operator(case, cut)
    calls = 1 if case.layers or device.type == "cpu" else CALLS
    times = _seconds(run, repeats, calls, device)
    found: Row = {"median_s": times[len(times) // 2], "min_s": times[0], "n": len(times)}
    if calls > 1:
        found["alone_s"] = _seconds(run, repeats, 1, device)[repeats // 2]
    if case.ranks > 1:
        found["sent_bytes"] = _sent(run)
        each: list[Any] = [None] * dist.get_world_size()
        seen = device.type == "cuda" and not (case.layers and case.kind == "training")  # it would take minutes
        line = timeline(run, device) if seen else []
        dist.all_gather_object(each, overlap(line))
        found |= {name: [rank[name] for rank in each[: case.ranks]] for name in each[0]} if seen else {}
    return found


def _work(rank: int, ranks: int, device: str, folder: str, cases: list[Task], repeats: int, told: Any) -> None:
    """Measure all cases as one rank; the first tells what it finds, or why a case did not run."""
    timed.place = device
    at = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(at)
    options: dict[str, Any] = {"device_id": at} if device == "cuda" else {}
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, **options)
    groups = {}
    for count in sorted({case.ranks for case in cases}):  # all ranks make all groups, and each keeps its own
        made = [dist.new_group(list(range(first, first + count))) for first in range(0, ranks, count)]
        groups[count] = made[rank // count]
    for case in cases:
        try:
            found = _measure(case, groups[case.ranks], at, repeats)
        except torch.OutOfMemoryError as error:
            found = {"not_run": str(error).split(". ")[0]}
        if rank == 0:
            told.put(found)
        if device == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def _tokens(tokens: tuple[int, ...], ranks: tuple[int, ...], count: int) -> list[int]:
    """Return the tokens of each of ``count`` ranks: the same for all counts, and those of the same whole sequences."""
    return sorted({*tokens, *(n * max(ranks) // count for n in tokens)})


def _rows(cases: list[Task], device: str, repeats: int) -> Iterator[Row]:
    """Yield the rows of cases; if a process ends with an error, those before it."""
    ranks = max(case.ranks for case in cases)
    if uneven := sorted({case.ranks for case in cases if ranks % case.ranks}):
        raise ArgumentError(f"scale: ranks {uneven} must divide the most ranks, {ranks}")
    cases = [
        case
        for case in cases
        if wanted(**{k: v for k, v in case.about().items() if k in ("op", "pass", "backend", "case")})
    ]
    if device == "cuda" and (have := torch.cuda.device_count()) < ranks:
        raise ArgumentError(f"scale: ranks {ranks} need as many GPUs, and there are {have}. Give --set ranks=1")
    if not cases:
        return
    told = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = ranks, device, folder, cases, repeats, told
        processes: Any = mp.spawn(_work, given, nprocs=ranks, join=False)  # type: ignore[no-untyped-call]
        for case in cases:
            while True:
                try:
                    found = told.get(timeout=0.5)
                    break
                except queue.Empty:
                    processes.join(timeout=0)
            yield case.about() | found
        while not processes.join():
            pass


def scale(
    *, operators: tuple[str, ...] = tuple(timed.shared_calls()), passes: tuple[str, ...] = PASSES,
    tokens: tuple[int, ...] = (32768, 131072, 524288), ranks: tuple[int, ...] = (1, 2), ways: tuple[str, ...] = WAYS,
    repeats: int = 5, device: str = "cuda",
) -> Iterator[Row]:  # fmt: skip
    """Time operators whose sequence is cut over devices: ``tokens`` of each rank (weak), or of all (strong)."""
    check_names("scale: operators", operators, tuple(timed.shared_calls()))
    check_names("scale: passes", passes, PASSES)
    check_names("scale: ways", ways, WAYS)
    cases = [
        Task(op, kind, n, count, way)
        for op in operators for kind in passes for count in sorted(ranks) for n in _tokens(tokens, ranks, count)
        for way in (ways if count > 1 else WAYS[:1])
    ]  # fmt: skip
    yield from _rows(cases, device, repeats)


def scale_models(
    *, model: str = "2.7B", passes: tuple[str, ...] = PASSES, tokens: tuple[int, ...] = (32768, 131072),
    ranks: tuple[int, ...] = (1, 2), layers: int = 64, repeats: int = 2, device: str = "cuda",
) -> Iterator[Row]:  # fmt: skip
    """Time a Mamba-2 model whose sequence is cut over devices; training without the head, each layer computed again."""
    check_names("scale-models: model", [model], [name for name in MODELS if name[0].isdigit()])
    check_names("scale-models: passes", passes, PASSES)
    cases = [
        Task(f"mamba2-{model}", kind, n, count, layers=layers)
        for kind in passes for count in sorted(ranks) for n in _tokens(tokens, ranks, count)
    ]  # fmt: skip
    yield from _rows(cases, device, repeats)
