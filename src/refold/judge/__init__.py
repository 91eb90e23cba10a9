"""Candidates from anywhere, judged so that none can cheat.

`judge` tries a candidate that may be hostile. The candidate runs in a process of its own, in a sandbox, and without any
information that would help it to cheat. Its results are compared and timed from outside. docs/verification.md lists the
checks; docs/threat-model.md says what is not claimed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, TargetError
from . import exchange
from .errors import Misbehaved
from .errors import Unjudgeable as Unjudgeable
from .messages import Drawn
from .nursery import Nursery as Nursery
from .program import Program as Program
from .program import Target
from .program import program as program
from .program import source as source
from .results import leaves
from .sides import Tensors
from .terms import DTYPES, LEVELS
from .terms import Terms as Terms
from .terms import threads as threads
from .trial import decide as decide
from .verdict import Verdict as Verdict


def judge(
    original: Target | Program,
    candidate: Target | Program,
    inputs: Tensors | None = None,
    *,
    allow_unsandboxed: bool = False,
    nursery: Nursery | None = None,
    **terms: Any,
) -> Verdict:
    """Decide whether a candidate may take the place of the original.

    Args:
        original: A file in the KernelBench convention (``Model``), ``file.py:function``, or a function.
        candidate: The same; of a file, ``ModelNew`` is judged.
        inputs: Example inputs; None takes them from ``get_inputs()`` in the original's file.
        allow_unsandboxed: Run the candidate although nothing confines it.
        nursery: Where to start its process, if several candidates are tried: starting torch takes a second or two.
        terms: What `Terms` has; threads are those of the level (`threads`), unless said.

    Returns:
        The verdict, with the check that decided and its numbers.

    Raises:
        TargetError: A file does not exist or does not define what is judged.
        ArgumentError: An option has a value that it cannot have.
    """
    chosen = Terms(**{"threads": threads(terms.get("level", Terms.level)), **terms})
    if inputs is not None and (not inputs or not all(isinstance(x, torch.Tensor) for x in inputs)):
        raise ArgumentError(f"inputs must be a non-empty sequence of tensors, not {inputs!r:.80}")
    if allow_unsandboxed and LEVELS[chosen.level].sandbox:
        raise ArgumentError(f"level {chosen.level} needs a sandbox; allow_unsandboxed goes with quick and full")
    first = original if isinstance(original, Program) else program(original, role="original")
    second = candidate if isinstance(candidate, Program) else program(candidate, role="candidate")
    if nursery is not None:
        return decide(nursery, first, second, inputs, chosen)
    with Nursery(threads=chosen.threads, device=chosen.device, sandboxed=not allow_unsandboxed) as nursery:
        return decide(nursery, first, second, inputs, chosen)


def judge_solution(
    definition: str | Path,
    solution: str | Path,
    workloads: str | Path | None = None,
    *,
    nursery: Nursery | None = None,
    **options: Any,
) -> Iterator[tuple[Verdict, dict[str, Any]]]:
    """Try a solution of a definition, in the format of FlashInfer-Bench, on each of its workloads.

    Args:
        definition: The file of the definition.
        solution: The file of the solution.
        workloads: A file with one in each line; None draws variable axes anew, once for the numbers alone and once
            for the speed, too.
        nursery: Where to start processes.
        options: As `judge` takes them, but for ``dtype``, which is the definition's.

    Yields:
        The verdict and the trace for each workload, up to the first that is not accepted.

    Raises:
        TargetError: A file cannot be read, or is none of these.
        ArgumentError: An option has a value that it cannot have.
    """
    what, how = exchange.Definition.read(Path(definition)), exchange.Solution.read(Path(solution))
    if workloads is None:
        seeds = [int.from_bytes(os.urandom(6), "little") for _ in range(2)]
        given = [what.workload(seed, turn) for turn, seed in enumerate(seeds)]
        accept = ["right", options.get("accept", "faster")]
    else:
        given = exchange.Workload.read(Path(workloads))
        accept = [options.get("accept", "faster")] * len(given)
    root = Path(workloads or definition).parent
    for workload, faster in zip(given, accept, strict=True):
        original, candidate, inputs, dtype = exchange.programs(what, how, workload, root)
        chosen = {**options, "dtype": dtype, "accept": faster}
        verdict = judge(original, candidate, inputs, **chosen, nursery=nursery)
        gpu = options.get("device", "cpu") != "cpu" and torch.cuda.is_available()
        hardware = torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine()
        yield verdict, exchange.trace(what, how, workload, verdict, hardware=hardware)
        if not verdict.accepted:
            return


def describe_inputs(original: Program, terms: Terms, nursery: Nursery) -> list[dict[str, Any]]:
    """Return shape and dtype of each of the original's tensors, and the value of each other input.

    Raises:
        TargetError: The original has no inputs or cannot draw them.
    """
    try:
        with nursery.program(original.text, "original.py", room=4096) as process:
            process.timeout = terms.timeout
            process.load(original.attribute)
            answer = process.ask("inputs", Drawn | None, timeout=terms.timeout, seed=0)
    except Misbehaved as error:
        raise TargetError(f"{original.name}: {error.reason}") from error
    if answer is None:
        raise TargetError(f"{original.name} does not define get_inputs()")
    drawn = answer.tensors

    def described(leaf: Any) -> dict[str, Any]:
        if "tensor" not in leaf:
            return {"value": leaf.get("value")}
        m = drawn[leaf["tensor"]]
        return {"shape": m.shape, "dtype": terms.dtype if m.dtype in DTYPES else m.dtype}

    return list(map(described, leaves(answer.tree)))


def replay(log: Path, *, allow_unsandboxed: bool = False) -> tuple[Verdict, Verdict | None]:
    """Repeat a trial from its log: the same programs, terms and seed.

    Returns:
        The verdict of now, and the outcome, check and reason of then.

    Raises:
        TargetError: The file is no log of a trial, or one that was cut short.
    """
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
        head, last = lines[0], lines[-1]
        original, candidate = Program(**head["original"]), Program(**head["candidate"])
        chosen = Terms(**head["terms"])
        seed = last["seed"]
        if type(seed) is not int or not 0 <= seed < 1 << 48:
            raise ValueError(f"seed {str(seed)[:40]} is not from 0 to 2^48")
        outcome, check, reason = (str(last[name]) for name in ("outcome", "check", "reason"))
        then = Verdict(original, candidate, chosen, outcome, check, reason, seed=seed)
    except OSError as error:
        raise TargetError(f"{log} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError) as error:
        raise TargetError(f"{log} is not the whole log of a trial: {type(error).__name__}: {error}") from error
    with Nursery(threads=chosen.threads, device=chosen.device, sandboxed=not allow_unsandboxed) as nursery:
        return decide(nursery, original, candidate, None, chosen, seed=then.seed), then
