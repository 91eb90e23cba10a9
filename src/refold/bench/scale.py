"""Operators on a sequence that ranks of one host share, one process and one device each.

Weak scaling: the tokens of a rank stay the same. Strong scaling: the tokens of the sequence do. The time is that of
the slowest rank, between two barriers. Inputs are bfloat16. Ranks know how many tokens each has, as in a model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from refold import ops
from refold.parallel import Cut

from ..errors import ArgumentError
from ..ops.timed import shared_calls
from .options import check_names
from .progress import wanted
from .rows import Row

PASSES = ("forward", "training")


def _measure(rank: int, ranks: int, folder: str, cases: list[tuple[str, str, int]], repeats: int) -> None:
    """Time all cases as one rank; the first writes seconds, or why a case did not run, to a file."""
    torch.cuda.set_device(rank)
    meeting, device = f"file://{folder}/meeting{ranks}", torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=ranks, device_id=device)
    found: list[list[float] | str] = []
    for op, kind, tokens in cases:
        torch.manual_seed(rank)
        try:
            group = Cut(dist.group.WORLD, (tokens,) * ranks) if ranks > 1 else None
            found.append(_seconds(op, kind, tokens, group, repeats))
        except torch.OutOfMemoryError as error:
            found.append(str(error).split(". ")[0])
            torch.cuda.empty_cache()
    if rank == 0:
        torch.save(found, f"{folder}/found{ranks}")
    dist.destroy_process_group()


def _seconds(op: str, kind: str, tokens: int, group: Any, repeats: int) -> list[float]:
    """Give the seconds of some calls, each of the slowest rank."""
    operator, options = getattr(ops, op), {} if group is None else {"group": group}
    given = shared_calls()[op](tokens)
    inputs = [a.requires_grad_() for a in given.values() if isinstance(a, Tensor) and kind == "training"]
    times = []
    for turn in range(repeats + 2):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        y = operator(**given, **options)[0]
        if inputs:
            torch.autograd.grad(y, inputs, torch.ones_like(y))
        torch.cuda.synchronize()
        taken = torch.tensor(time.perf_counter() - began, device="cuda")
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if turn > 1:
            times.append(float(taken))
    return times


def scale(
    *,
    operators: tuple[str, ...] = tuple(shared_calls()),
    passes: tuple[str, ...] = PASSES,
    tokens: tuple[int, ...] = (32768, 131072, 524288),
    ranks: tuple[int, ...] = (1, 2),
    repeats: int = 5,
) -> Iterator[Row]:
    """Time operators whose sequence is cut over devices: ``tokens`` of each rank (weak), or of all (strong)."""
    check_names("scale: operators", operators, tuple(shared_calls()))
    check_names("scale: passes", passes, PASSES)
    if (have := torch.cuda.device_count()) < max(ranks):
        raise ArgumentError(f"scale: ranks {max(ranks)} need as many GPUs, and there are {have}. Give --set ranks=1")
    with tempfile.TemporaryDirectory() as folder:
        for count in ranks:
            share = sorted({*tokens, *(n // count for n in tokens)})
            cases = [
                (op, kind, n) for op in operators for kind in passes for n in share
                if wanted(op=op, case=f"{count} ranks")
            ]  # fmt: skip
            mp.spawn(_measure, (count, folder, cases, repeats), nprocs=count)  # type: ignore[no-untyped-call]
            found = torch.load(Path(folder) / f"found{count}")
            for (op, kind, n), result in zip(cases, found, strict=True):
                about: Row = {"op": op, "pass": kind, "backend": f"{count} ranks", "case": f"{n} tokens a rank"}
                about |= {"batch": 1, "tokens": n * count}
                if isinstance(result, str):
                    yield about | {"not_run": result}
                else:
                    yield about | {"median_s": sorted(result)[len(result) // 2], "min_s": min(result), "n": len(result)}
