"""The loop around any proposer: ask, try, report the outcome, until the budget is spent.

Everything goes into a run folder as it happens: ``run.jsonl`` (requests, proposals, verdicts), a log for each trial
that ``refold verify --replay`` repeats, and at the end the best accepted source with its evidence. A run that was cut
short is resumed from there. Nothing is tried twice, and earlier candidates still count as tried.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..doctor import installed
from ..errors import ArgumentError, ProposerError, TargetError, first_line
from ..judge import LEVELS, Nursery, Program, Terms, Verdict, describe_inputs, judge, source
from .protocol import SCHEMA, Attempt, Proposal, Proposer, Request, speed

log = logging.getLogger("refold")

# Where an accepted proposal of each kind is written to.
NAMES = {"source": "accepted.py", "program": "accepted.rule.json", "plan": "accepted.plan.json"}
COMPUTING = ("torch", "numba", "triton")  # The packages that compute.


@dataclass(frozen=True)
class Budget:
    """When a run ends, whatever it has found.

    Attributes:
        rounds: Requests to the proposer.
        seconds: Time for all of it. A trial that does not end by then is not judged.
        tokens: Counted by the endpoint.
        money: By the prices that the user gave.

    Raises:
        ArgumentError: A limit is negative, not a number, or no round is allowed.
    """

    rounds: int = 4
    seconds: float = 1800.0
    tokens: float = float("inf")
    money: float = float("inf")

    def __post_init__(self) -> None:
        """Refuse limits that are none."""
        for name, least in (("rounds", 1), ("seconds", 0), ("tokens", 0), ("money", 0)):
            if not getattr(self, name) >= least:
                raise ArgumentError(f"{name} must be {least} or more, not {getattr(self, name)}")

    def spent(self, rounds: int, seconds: float, used: dict[str, float]) -> str:
        """Say what is used up; empty if nothing is."""
        pairs = {
            "rounds": (rounds, self.rounds),
            "seconds": (seconds, self.seconds),
            "tokens": (used.get("tokens", 0.0), self.tokens),
            "money": (used.get("money", 0.0), self.money),
        }
        return ", ".join(f"all {most:g} {name}" for name, (value, most) in pairs.items() if value >= most)


@dataclass
class Run:
    """What a run has found so far.

    Attributes:
        folder: The folder of its record.
        tried: Every proposal with what came of it, in order.
        best: The number of the best accepted one, or None.
        ended: Why the run ended.
        spent: Tokens and money, where they are counted.
    """

    folder: Path
    tried: list[Attempt] = field(default_factory=list)
    best: int | None = None
    ended: str = ""
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def accepted(self) -> Attempt | None:
        """The best accepted proposal."""
        return None if self.best is None else self.tried[self.best]

    @property
    def file(self) -> Path | None:
        """The file of the best accepted proposal: a source, a rule, or choices."""
        return None if self.accepted is None else self.folder / NAMES[self.accepted.kind]

    def keep(self) -> None:
        """Write the best accepted proposal with its evidence, and replace an earlier one."""
        if self.accepted is None or self.file is None:
            return
        for old in self.folder.glob("accepted.*"):
            old.unlink()
        trial = self.folder / "trials" / f"{self.best:03}.jsonl"
        (self.folder / "accepted.jsonl").write_text(trial.read_text())
        if self.accepted.kind == "source":
            self.file.write_text(self.accepted.source)
            return
        evidence = json.loads(trial.read_text())
        if self.accepted.kind == "plan":
            self.file.write_text(json.dumps(evidence["choices"], indent=1) + "\n")
            return
        names = ("environment", "terms", "speedup", "at_least", "against")
        facts = {name: evidence[name] for name in names}
        name = re.sub(r"[^\w .+-]", "-", f"{self.folder.resolve().name[:40]} {self.best}")
        self.file.write_text(json.dumps({**evidence["rule"], "name": name, "evidence": facts}, indent=1) + "\n")

    def __str__(self) -> str:
        """Say what was tried and what is best."""
        lines = []
        for number, attempt in enumerate(self.tried):
            times = f"  {speed(attempt.speedup, attempt.at_least)}" if attempt.speedup else ""
            why = "  " + ": ".join(filter(None, (attempt.check, attempt.reason))) if attempt.reason else ""
            lines.append(f"  {number:3}  {attempt.kind:7}  {attempt.outcome}{times}{why}")
        if self.accepted is None:
            lines.append(f"nothing was accepted; ended after {self.ended}")
        else:
            best = self.accepted
            said = speed(best.speedup, best.at_least, best.against)
            lines.append(f"proposal {self.best} is accepted, {said}: {self.file}; ended after {self.ended}")
            lines += ["", self.accepted.source.rstrip()]
        return "\n".join(lines)


def search(
    original: Program, proposer: Proposer, folder: Path, terms: Terms, *, budget: Budget | None = None,
    parallel: int = 1, keep: int = 3, resume: bool = False, allow_unsandboxed: bool = False,
) -> Run:  # fmt: skip
    """Ask a proposer for replacements of a program, and find the best that is accepted.

    Args:
        original: The program, with its inputs.
        proposer: Whom to ask.
        folder: Where to keep the record; must not exist, or hold a run that is resumed.
        terms: How candidates are tried.
        budget: When to stop.
        parallel: Proposals asked for at a time. They are tried one after the other: timing needs the machine.
        keep: Accepted proposals that later requests show, the best first.
        resume: Go on with the run in the folder.
        allow_unsandboxed: Try candidates although nothing confines them.

    Raises:
        ArgumentError: The folder holds something else, or another original's run.
        ProposerError: The proposer failed before it proposed anything.
    """
    budget = budget or Budget()
    for name, value, least in (("parallel", parallel, 1), ("keep", keep, 0)):
        if value < least:
            raise ArgumentError(f"{name} must be {least} or more, not {value}")
    run, seen = _opened(original, folder, terms, resume)
    record = _Record(folder / "run.jsonl")
    record("start", schema=SCHEMA, original=asdict(original), sha256=original.sha256, terms=asdict(terms),
           proposer=proposer.name, destination=proposer.destination, resumed=len(run.tried))  # fmt: skip
    began, rounds = time.monotonic(), 0
    with Nursery(threads=terms.threads, device=terms.device, sandboxed=not allow_unsandboxed) as nursery:
        inputs = tuple(describe_inputs(original, terms, nursery))
        workshop = functools.cache(functools.partial(_workshop, original, terms, folder, record))
        known = _described(workshop(), record) if proposer.facts else {}
        plain = Request(original.text, terms.dtype, terms.train, inputs, _machine(terms), wanted=parallel, **known)
        try:
            while not run.ended:
                run.spent = proposer.spent()
                run.ended = budget.spent(rounds, time.monotonic() - began, run.spent)
                if run.ended:
                    break
                left = round(budget.seconds - (time.monotonic() - began), 1)
                request = replace(plain, attempts=_shown(run, keep), seconds=left if left < math.inf else None)
                rounds += 1
                log.info("round %d: asking %s", rounds, proposer.name)
                record("request", round=rounds, request=json.loads(request.to_json()))
                try:
                    proposals = proposer.propose(request)
                except ProposerError as error:
                    record("error", reason=str(error))
                    if not run.tried:
                        raise
                    out = budget.spent(rounds, time.monotonic() - began, {})  # it may have had no more time
                    run.ended = out if "seconds" in out else f"an error: {error}"
                    break
                if not proposals:
                    run.ended = "all proposals"
                for proposal in proposals:
                    number = len(run.tried)
                    record("proposal", number=number, kind=proposal.kind, text=proposal.text, note=proposal.note)
                    again = proposal.text in seen and bool(proposal.text)
                    seen.add(proposal.text)
                    if again:
                        attempt = Attempt(proposal.text, "refused", "", "it was proposed before", kind=proposal.kind)
                    elif proposal.kind == "source":
                        attempt = _tried(original, proposal.text, number, folder, terms, allow_unsandboxed, nursery,
                                         began + budget.seconds)  # fmt: skip
                    else:
                        attempt = _made(workshop(), proposal, number, folder)
                    run.tried.append(attempt)
                    if attempt.outcome == "accepted" and (
                        run.accepted is None or attempt.at_least > run.accepted.at_least
                    ):
                        run.best = number
                    record("verdict", number=number, **{k: v for k, v in asdict(attempt).items() if k != "source"})
                    log.info("proposal %d: %s %s", number, attempt.outcome, attempt.reason)
        except KeyboardInterrupt:  # what was found so far is kept, and the run can be resumed
            run.ended = "an interruption"
    run.keep()
    record("end", reason=run.ended, best=run.best, spent=run.spent)
    return run


def _tried(
    original: Program, text: str, number: int, folder: Path, terms: Terms, allow_unsandboxed: bool, nursery: Nursery,
    until: float,
) -> Attempt:  # fmt: skip
    if not text:
        return Attempt(text, "refused", "", "the answer holds no fenced block with a program, a plan or ModelNew")
    try:
        candidate = source(text)
    except TargetError as error:
        return Attempt(text, "refused", "", str(error))
    left = max(until - time.monotonic(), 1.0)
    if left < math.inf:  # of the run; a trial has a limit of its own besides
        terms = replace(terms, limit=min(left, terms.limit or LEVELS[terms.level].limit))
    options: dict[str, Any] = asdict(replace(terms, tried=number + 1))
    verdict: Verdict = judge(original, candidate, **options, allow_unsandboxed=allow_unsandboxed, nursery=nursery)
    (folder / "trials" / f"{number:03}.jsonl").write_text(verdict.to_jsonl())
    race = verdict.timing
    speed = race.get("speedup", 0.0), race.get("at_least", 0.0)
    said = {"against": race.get("against", ""), "told": verdict.told}
    return Attempt(text, verdict.outcome, verdict.check, verdict.reason, *speed, **said)


def _workshop(original: Program, terms: Terms, folder: Path, record: _Record) -> Any:
    """Return where programs and plans are tried; None if this layer cannot be compiled."""
    from .workshop import Workshop

    try:
        return Workshop(original, terms, folder)
    except Exception as error:  # the user's layer, and compilers, fail in any way
        record("note", text=f"programs and plans cannot be tried: {first_line(error)}")
        return None


def _described(workshop: Any, record: _Record) -> dict[str, Any]:
    if workshop is None:
        return {}
    log.info("reading the layer")
    try:
        found = workshop.describe()
    except Exception as error:
        record("note", text=f"the layer cannot be described: {first_line(error)}")
        return {}
    return {**found, "regions": tuple(found["regions"])}


def _made(workshop: Any, proposal: Proposal, number: int, folder: Path) -> Attempt:
    """Try a program or a plan, and write down its evidence."""
    if workshop is None:
        reason = "programs and plans cannot be tried: the layer cannot be compiled here"
        return Attempt(proposal.text, "unjudged", "", reason, kind=proposal.kind)
    try:
        attempt, evidence = workshop.tried(proposal, number)
    except Exception as error:  # compilers fail in any way; the run goes on
        reason = f"it could not be tried: {first_line(error)}"
        attempt, evidence = Attempt(proposal.text, "unjudged", "", reason, kind=proposal.kind), {}
    (folder / "trials" / f"{number:03}.jsonl").write_text(json.dumps(evidence, default=str) + "\n")
    return attempt


def _shown(run: Run, keep: int) -> tuple[Attempt, ...]:
    """Return the best accepted proposals, and after them what was refused last."""
    good = sorted((a for a in run.tried if a.outcome == "accepted"), key=lambda a: -a.at_least)[:keep]
    bad = [a for a in reversed(run.tried) if a.outcome != "accepted" and a.source][:2]
    return tuple(replace(a, reason=a.told or a.reason, told="") for a in (*good[:1], *bad, *good[1:]))


class _Record:
    """Appends events to a file, each whole before the next begins."""

    def __init__(self, path: Path):
        self._path = path

    def __call__(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values})
        with self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def _opened(original: Program, folder: Path, terms: Terms, resume: bool) -> tuple[Run, set[str]]:
    """Make the folder of a run, or read what a run that is resumed has tried."""
    path = folder / "run.jsonl"
    if not resume:
        try:
            if folder.exists() and any(folder.iterdir()):
                raise ArgumentError(f"{folder} is not empty; name another folder, or resume the run in it")
            (folder / "trials").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"the folder {folder} of a run cannot be made: {error.strerror}") from error
        return Run(folder), set()
    run, texts = Run(folder), {}
    try:
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the run was cut short while it wrote
            path.write_text(whole)
        for event in map(json.loads, whole.splitlines()):
            if event["event"] == "start":
                if event["sha256"] != original.sha256:
                    raise ArgumentError(f"{folder} holds a run for another original")
                if event["terms"] != asdict(terms):
                    raise ArgumentError(f"{folder} holds a run on other terms: {event['terms']}")
            elif event["event"] == "proposal":
                texts[event["number"]] = event["text"]
            elif event["event"] == "verdict":
                names = ("outcome", "check", "reason", "speedup", "at_least", "kind", "against", "told")
                run.tried.append(Attempt(texts[event["number"]], **{n: event[n] for n in names if n in event}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{path} is not the record of a run: {type(error).__name__}: {error}") from error
    good = [n for n, attempt in enumerate(run.tried) if attempt.outcome == "accepted"]
    run.best = max(good, key=lambda n: run.tried[n].at_least, default=None)
    return run, {attempt.source for attempt in run.tried}


def _machine(terms: Terms) -> dict[str, Any]:
    """Describe the machine."""
    from ..compiler.environment import processor

    return {"processor": processor(), "threads": terms.threads, **installed(COMPUTING)}
