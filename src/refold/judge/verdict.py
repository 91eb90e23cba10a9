"""What a trial found: the outcome, the check that decided, and a line for each check, as data and as text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import printable
from .messages import Failure
from .program import Program
from .terms import Terms

SCHEMA = 1
# What each check requires of a candidate. tests/adversarial shows for each that an attack passes without it.
CHECKS = {
    "P3": "it stays within the limits of its process",
    "P4": "it answers, and only by returning from the call",
    "N8": "the original's results depend on its inputs",
    "M1": "it returns plain tensors, in memory that can be written to and is not far larger",
    "M2": "structure, names, shapes, dtypes and devices of its results are the original's",
    "M3": "strides are the original's, or contiguous",
    "M4": "its results have gradients where the original's have, and nowhere else",
    "N1": "it is as exact as the original, on the original's inputs and on zero-mean ones",
    "N2": "on small integers, it is exact where the original is",
    "N3": "the bound is tight enough: half precision would have been refused",
    "N4": "it is as exact on other kinds of inputs",
    "N5": "NaN and infinities come out (and flow back) where the original has them",
    "N6": "it is right, or refuses, for other shapes, layouts and numbers among the arguments",
    "N7": "its gradients are as exact as the original's, in each way to ask for them",
    "N9": "one changed element of an input is noticed",
    "S1": "it changes inputs, parameters, buffers and the caller's objects as the original does",
    "S2": "its results share memory with the same tensors as the original's",
    "S3": "it draws as many random numbers as the original",
    "S4": "global settings are as before, and nothing is left that acts later",
    "S5": "functions, numbers and tables of torch and Python are as before",
    "S6": "none of its code runs between calls, or would by itself after some time",
    "S7": "results of earlier calls do not change later",
    "S8": "parameters are plain ones; hooks, training modes and needs of gradients are as before",
    "U1": "results do not depend on uninitialised memory, or on memory next to its inputs",
    "U2": "it writes nothing to memory next to its inputs",
    "U3": "it writes nothing next to memory of its own, as the C library sees it (full, CPU)",
    "U4": "results are complete when it returns",
    "D1": "the same inputs give the same bits",
    "C1": "new values at an old address give new results; what a caller makes of a result changes no later one",
    "C2": "changed weights give changed results",
    "C3": "each timed result is right",
    "C5": "it is right with gradients recorded and in inference mode, too; in training, also if nothing flows back",
    "C6": "it is right in other ways to call it, as under autocast, from another thread, or called again in between",
    "C7": "each block of its code ran in calls that were compared, or ends them by an error",
    "C8": "each truth value and each mask in its code was true and false there",
    "T11": "how long it takes to be made, and what memory it keeps; a note only",
    "T7": "it is faster beyond noise",
}
# What an honest author should change, for each check that refuses.
ADVICE = {
    "P3": "make loading and each call quicker, or give more time by --timeout",
    "P4": "let the call return; do not end the process, write to other files or use the network",
    "M1": "return plain tensors: contiguous(), resolve_conj(), detach() from subclasses and parameters",
    "M2": "return what the original returns: the same nesting, names, shapes and dtypes",
    "M3": "return the result with the original's strides, or contiguous",
    "M4": "let gradients flow to what the original lets them flow to; detach nothing else",
    "N1": "check the formula on these inputs; compute in their dtype, and sum in float32 or better",
    "N2": "look for a wrong index or a dropped term: rounding plays no part here",
    "N4": "do not assume signs, sizes or density of the inputs; subtract the maximum before an exponential",
    "N5": "let NaN and infinities through, or judge with --nonfinite finite-only",
    "N6": "support the shape, layout or number, or raise an exception for it",
    "N7": "check the backward by torch.autograd.gradgradcheck, or mark it once_differentiable; sum in float32",
    "N9": "do not remember results by a part of their inputs",
    "S1": "change no input, parameter or buffer that the original leaves alone",
    "S2": "return new memory where the original does, and a view where it returns one",
    "S3": "draw random numbers as the original does",
    "S4": "set no global option; if one is needed within a call, give it back",
    "S5": "replace no function of torch or Python, and nothing in their modules",
    "S6": "join threads and processes before the call returns; keep no timers and no thread that sleeps for a time",
    "S7": "allocate results anew in each call",
    "S8": "register plain parameters; add no hooks, and leave modes, requires_grad and .grad alone",
    "U1": "write to each element of torch.empty before it is read; mask loads at the ends",
    "U2": "mask stores at the ends of the inputs",
    "U3": "mask stores at the ends of results and of scratch memory",
    "U4": "wait for all work, on streams and threads, before the call returns",
    "D1": "add up in a fixed order: no atomic additions of floating-point numbers",
    "C1": "do not remember results by the address of their inputs",
    "C2": "read weights from the module's attributes in each call; keep no copies, views or products of them",
    "C3": "give in each call what you would give in the first",
    "C5": "do not depend on whether gradients are recorded",
    "C6": "depend on arguments and weights alone; keep nothing that a later call changes; or raise an exception",
    "C7": "remove these lines, or raise an error there: nothing is known of what never ran",
    "C8": "leave out what is always so, or raise an error where it is not so",
    "T7": "make it faster, or judge with --accept right",
}
GROSS = 0.01  # a relative error that no rounding makes
# 2 is the command line's own, where there was nothing to judge: a wrong option, a missing file, an error.
EXIT_CODES = {"accepted": 0, "refused": 1, "unjudged": 3}


@dataclass
class Verdict:
    """The outcome of a trial.

    Attributes:
        original: What it was tried against.
        candidate: What was tried.
        terms: On what terms.
        outcome: ``accepted``, ``refused`` or ``unjudged``.
        check: The check that refused it; empty otherwise.
        reason: Why it was refused or could not be judged.
        notes: Facts that a user of an accepted candidate should know, such as shapes that it does not take.
        lines: The checks in the order they ran: name, whether it passed, numbers.
        timing: The timing test that decided, in milliseconds; empty if none was run.
        sandbox: What confined the candidate.
        off: Checks that were switched off, which only tests of the judge do.
        seed: From which everything random was drawn.
        seconds: How long the trial took.
        mode: In which modes of its modules it was compared.
        ways: In which ways weights were changed.
        failure: The exception that it raised, if that refused it.
    """

    original: Program
    candidate: Program
    terms: Terms
    outcome: str = "unjudged"
    check: str = ""
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, Any] = field(default_factory=dict)
    sandbox: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)
    seed: int = 0
    seconds: float = 0.0
    mode: str = ""
    ways: set[str] = field(default_factory=set)
    failure: Failure | None = None

    @property
    def accepted(self) -> bool:
        """Whether the candidate may be used."""
        return self.outcome == "accepted"

    @property
    def exit_code(self) -> int:
        """0 accepted, 1 refused, 3 could not be judged. A command line that is wrong has 2."""
        return EXIT_CODES[self.outcome]

    @property
    def told(self) -> str:
        """What may be said to whoever wrote the candidate: what it is told must not carry anything out of the sandbox.

        The check and what it asks, the kind of inputs, the type of an exception and lines of the candidate's own file.
        """
        if self.outcome == "unjudged":
            return "it could not be judged"
        said = CHECKS.get(self.check, "")
        if self.failure is not None:
            count = self.candidate.text.count("\n") + 1
            lines = [n for n in self.failure.lines if n <= count][-3:]
            said += f"; it raised {self.failure.type}" + (f" at line {lines[-1]}" if lines else "")
        if self.check in ("C7", "C8"):  # the judge's own words, with lines of the candidate's file
            said += f"; {self.reason}"
        last = self.lines[-1] if self.lines else {}
        if last.get("check") == self.check and "kind" in last:
            said += f"; not so on {last['kind']} inputs"
        return said + (f"; {ADVICE[self.check]}" if self.check in ADVICE else "")

    def line(self, check: str, passed: bool, reason: str = "", **numbers: Any) -> None:
        """Record a check."""
        reason = printable(reason)
        self.lines.append({"check": check, "passed": passed, **({"reason": reason} if reason else {}), **numbers})

    def note(self, text: str) -> None:
        """Record a finding that is not a reason to refuse."""
        text = printable(text)
        if text not in self.notes:
            self.notes.append(text)

    def end(self, outcome: str, check: str, reason: str) -> None:
        """Decide."""
        self.outcome, self.check, self.reason = outcome, check, printable(reason)

    def to_jsonl(self) -> str:
        """Return one JSON object per line: the two programs and the terms, each check, the outcome."""
        seed = hashlib.sha256(self.seed.to_bytes(8, "little")).hexdigest()[:16]
        first = {"schema": SCHEMA, "off": self.off, "sandbox": self.sandbox}
        first |= {name: dataclasses.asdict(getattr(self, name)) for name in ("original", "candidate", "terms")}
        first["sha256"] = {"original": self.original.sha256, "candidate": self.candidate.sha256}
        decided = ("outcome", "check", "reason", "notes", "mode", "timing", "seed")
        last: dict[str, Any] = {name: getattr(self, name) for name in decided}
        last |= {"ways": sorted(self.ways), "seconds": round(self.seconds, 3)}
        lines = [first, *({**line, "seed_sha256": seed} for line in self.lines), last]
        return "".join(json.dumps(_finite(line)) + "\n" for line in lines)

    def __str__(self) -> str:
        """Return the decision and its reasons as text."""
        head = {"accepted": "accepted", "refused": f"refused by {self.check}: ", "unjudged": "could not be judged: "}
        passed = [line["check"] for line in self.lines if line["passed"]]
        counts = ", ".join(f"{n} {passed.count(n)}x" if passed.count(n) > 1 else n for n in dict.fromkeys(passed))
        out = [head[self.outcome] + self.reason]
        if self.outcome == "refused" and self.check in ADVICE:
            last = self.lines[-1] if self.lines else {}
            gross = self.check in ("N1", "C3") and last.get("error", 0.0) > GROSS
            out.append(f"  to pass      {ADVICE['N2' if gross else self.check]}")
        out.append(f"  passed       {counts or 'nothing'}")
        if self.mode:
            out.append(f"  tried in     {self.mode}")
        if self.ways:
            out.append(f"  weights by   {', '.join(sorted(self.ways))}")
        worst = max(
            (line for line in self.lines if line["passed"] and line.get("bound") and "original" in line),
            key=lambda line: line["error"] / line["bound"],
            default=None,
        )
        if worst:
            out.append(
                f"  error        {worst['error']:.1e}, bound {worst['bound']:.1e}, original {worst['original']:.1e} "
                f"(inputs: {worst['kind']}; of all errors the nearest to its bound)"
            )
        if self.timing:
            t = self.timing
            out.append(
                f"  time         {t['base_ms']:.3g} ms to {t['candidate_ms']:.3g} ms, {t['speedup']:.2f}x, at least "
                f"{t['at_least']:.2f}x ({t['pairs']} pairs, against {t.get('against', 'eager')})"
            )
        out.append(f"  confined by  {', '.join(self.sandbox) or 'nothing'}")
        out += [f"  note         {note}" for note in self.notes]
        out.append(f"  took         {self.seconds:.1f} s, level {self.terms.level}")
        return "\n".join(out)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
