"""Trials of programs in index notation and of choices: in this process, because they are data, not code.

The layer is the user's own. A proposal for it is parsed, lowered and compiled by refold alone, and checked against
float64 like the compiler's own rewrites. It is timed against eager, ``torch.compile``, and refold without the proposal.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .. import targets
from ..compiler.backend import compile as refold_compile
from ..compiler.choices import INDUCTOR, Choices, tuned_options
from ..compiler.compile_time import RIVAL_S
from ..compiler.environment import environment
from ..compiler.notation.rules import Rule, replacement
from ..compiler.pipeline import NAMES
from ..compiler.private import recompile_limits, tree_leaves
from ..compiler.regions import Region, regions
from ..errors import ArgumentError, CompileError, ProgramError, RefoldError, TargetError, first_line
from ..judge import Program, Terms
from ..ops.spec import operators
from ..report import Report
from ..verify import Function, Timing, check, race
from ..verify.ceilings import ceilings
from ..verify.timing import median_ms
from .protocol import Attempt, Proposal

_COMPILES = 1 << 14


class Workshop:
    """A layer with its inputs, and what is known of it.

    Args:
        original: The layer's source.
        terms: Its dtype, device, and whether gradients count.
        folder: Where the source is written to, to be imported.
    """

    def __init__(self, original: Program, terms: Terms, folder: Path) -> None:
        if original.attribute != "Model":
            raise TargetError(f"programs and plans are for a file that defines Model, not {original.attribute}")
        path = folder / "original.py"
        path.write_text(original.text)
        self.terms = terms
        self.module, self.inputs = targets.load(str(path), device=terms.device, dtype=terms.dtype, seed=0)
        self.module.train(terms.train)
        self.device = torch.device(terms.device)
        with self._mode():
            targets.check_runs(original.name, self.module, self.inputs)

    # What is known of the layer

    @property
    def regions(self) -> list[Region]:
        """Its regions in index notation."""
        return self._looked[0]

    @cached_property
    def _looked(self) -> tuple[list[Region], float]:
        with self._mode():
            return regions(self.module, self.inputs)

    @cached_property
    def default(self) -> tuple[Function, Report]:
        """What refold makes of it by itself."""
        return self._compiled()

    @cached_property
    def rivals(self) -> dict[str, tuple[Function, float]]:
        """What there is without any proposal, with a first time of each."""
        found: dict[str, Function] = {"eager": self._call(self.module)}
        with contextlib.suppress(Exception):  # Inductor's failures have no common type
            if self._looked[1] > RIVAL_S:
                raise CompileError(f"Inductor would take about {self._looked[1]:.0f} s for it")
            found["torch.compile"] = self._call(torch.compile(self.module))
            found["torch.compile"]()
        mine, report = self.default
        if any(graph.chosen == "refold" for graph in report.graphs):
            found["refold"] = self._call(mine)
        return {name: (run, median_ms(run, self.device, budget_s=0.3, most=5)) for name, run in found.items()}

    def describe(self) -> dict[str, Any]:
        """Describe the layer for a request, except its source."""
        report = self.default[1]
        rows = [row for graph in report.graphs for row in graph.rewrites]
        moved = self.roofline["bytes_per_s"]
        return {
            # With the least time that a region's bytes take.
            "regions": [{**each.to_dict(), "least_ms": each.least_bytes / moved * 1e3} for each in self.regions],
            "choices": {
                "passes": list(NAMES),
                "places": [
                    {"key": row.key, "pass": row.name, "detail": row.detail, "status": row.status} for row in rows
                ],
                "operators": {name: tuned_options(name) for name in operators()},
                "inductor": {name: list(values) for name, values in INDUCTOR.items()},
            },
            "times_ms": {name: round(ms, 6) for name, (_, ms) in self.rivals.items()},
            "roofline": self.roofline,
        }

    @cached_property
    def roofline(self) -> dict[str, float]:
        """What this machine does at best, measured: operations of a matrix product and bytes of a copy, a second."""
        return ceilings(self.device, getattr(torch, self.terms.dtype))

    # Trials

    def tried(self, proposal: Proposal, number: int) -> tuple[Attempt, dict[str, Any]]:
        """Try a program or a plan.

        Args:
            proposal: Of kind ``program`` or ``plan``.
            number: How many were tried before; the chance of error is shared among all.

        Returns:
            What came of it, and the evidence; of an accepted program that holds its rule.
        """
        start = time.perf_counter()
        text, kind = proposal.text, proposal.kind
        evidence: dict[str, Any] = {"kind": kind, "environment": environment(), "terms": asdict(self.terms)}
        try:
            if kind == "program":
                rule = self.rule(text, f"proposal {number}")
                evidence["rule"] = rule.to_dict()
                if str(rule.program) == str(rule.region):
                    raise ProgramError("it is the region as it is")
                run, report = self._compiled(rules=(rule,))
            else:
                choices = self.choices(text)
                evidence["choices"] = choices.to_dict()
                run, report = self._compiled(choose=choices)
        except (ArgumentError, CompileError) as error:
            return Attempt(text, "refused", "grammar", str(error), kind=kind), evidence
        evidence["report"] = report.to_dict()
        attempt = self._judged(proposal, number, run, report)
        evidence |= {"outcome": attempt.outcome, "check": attempt.check, "reason": attempt.reason,
                     "speedup": attempt.speedup, "at_least": attempt.at_least, "against": attempt.against,
                     "seconds": round(time.perf_counter() - start, 3)}  # fmt: skip
        return attempt, evidence

    def _judged(self, proposal: Proposal, number: int, run: Function, report: Report) -> Attempt:
        def refused(check: str, reason: str, timed: Timing | None = None, against: str = "") -> Attempt:
            numbers = (timed.speedup, timed.at_least) if timed else (0.0, 0.0)
            return Attempt(proposal.text, "refused", check, reason, *numbers, kind=proposal.kind, against=against)

        if proposal.kind == "program":
            rows = [row for row in report.rewrites if ":proposal " in row.site]
            if not rows:
                notes = [note for graph in report.graphs for note in graph.notes if note.startswith("rule ")]
                return refused("grammar", notes[0] if notes else "its region is not found in the compiled graph")
            if not any(row.status == "applied" for row in rows):
                reason = rows[0].reason
                return refused("T7" if "faster" in reason else "N1", reason)
        if failure := self._wrong(run):
            return refused("N1", failure)
        if self.terms.accept == "right":
            return Attempt(proposal.text, "accepted", kind=proposal.kind)
        ours = self._call(run)
        # Against the best of what needs no refold, which gives the figure; and against refold by itself.
        plain = {name: found for name, found in self.rivals.items() if name != "refold"}
        against = min(plain, key=lambda name: plain[name][1])
        result = None
        for name in (against, *(["refold"] if "refold" in self.rivals else [])):
            timed = race(self.rivals[name][0], ours, self.device, tried=number + 1)
            result = result or timed
            if not timed.faster:
                words = f"{timed.speedup:.3f}x of {name}, at least {timed.at_least:.3f}x, after {timed.pairs} pairs"
                busy = f" ({timed.busy})" if timed.busy else ""
                return refused("T7", f"not shown to be more than 2% faster: {words}{busy}", timed, name)
        numbers = (result.speedup, result.at_least) if result else (0.0, 0.0)
        return Attempt(proposal.text, "accepted", "", "", *numbers, kind=proposal.kind, against=against)

    def rule(self, text: str, name: str) -> Rule:
        """Read a proposed program as a rule for the region it names.

        Raises:
            ProgramError: It is outside the grammar or does not fit the region.
        """
        data = _object(text)
        named = data.pop("region", None)
        if not self.regions:
            raise ProgramError("no region of this layer can be written in index notation; propose a source")
        known = {region.name: region for region in self.regions}
        region = self.regions[-1] if named is None else known.get(named)
        if region is None:
            raise ProgramError(f"region must be one of {', '.join(known)}, not {named!r:.80}")
        return Rule(name, region.program, replacement(region.program, data.get("program", data)))

    def choices(self, text: str) -> Choices:
        """Read proposed choices.

        Raises:
            ArgumentError: Something in them is not to be chosen.
        """
        data = _object(text)
        return Choices.read(data.get("plan", data))

    def _compiled(self, **options: Any) -> tuple[Function, Report]:
        accept = "always" if self.terms.accept == "right" else "faster"
        compiled = refold_compile(
            self.module, accept=accept, cache=False, strict=bool(options), dynamic=False, **options
        )
        try:
            with self._mode():
                compiled(*self.inputs)
        except RefoldError:
            raise
        except Exception as error:
            raise CompileError(first_line(error)) from error
        return compiled, compiled.report

    def _wrong(self, run: Function) -> str:
        """Compare a program as a whole with the original against float64; say what is wrong."""
        wide = copy.deepcopy(self.module).double()
        terms = max([1, *(region.program.terms() for region in self.regions)])

        def flat(module: Function) -> Callable[..., Any]:
            return lambda *inputs: _tensors(module(*inputs))

        def reference(*inputs: Any) -> list[torch.Tensor]:
            wider = (x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)
            return _tensors(wide(*wider))

        programs = flat(self.module), flat(run), reference
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return check(*programs, self.inputs, self.inputs, terms=terms, multilinear=False).reason

    def _call(self, run: Function) -> Function:
        """Return one call on the layer's inputs, with its gradients if they count."""

        def call() -> object:
            with self._mode():
                out = run(*self.inputs)
                roots = [y for y in _tensors(out) if y.requires_grad]
                if self.terms.train and roots:
                    leaves = [p for p in self.module.parameters() if p.requires_grad]
                    torch.autograd.grad(roots, leaves, [torch.ones_like(y) for y in roots], allow_unused=True)
                return out

        return call

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        # Each proposal compiles the same code once more, and all that were compiled stay in use.
        limits = recompile_limits(_COMPILES)
        with torch.set_grad_enabled(self.terms.train), limits:
            yield


def _object(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"it is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProgramError(f"it must be an object, not {text[:80]!r}")
    return {name: value for name, value in data.items() if name != "kind"}  # which is known by now


def _tensors(out: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
