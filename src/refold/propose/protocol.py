"""The request to a proposer, and its possible answers.

A proposer takes a `Request` and returns proposals. It is not trusted: a proposal is text, and `refold.verify` decides.
There are three kinds, safest first. A *program* in index notation and a *plan* of choices are data, which refold lowers
itself. A *source* is code, and is tried in a sandbox. The request holds the layer's source and regions, the shapes and
dtypes of its inputs, facts of the machine and earlier verdicts; never a seed, an input or an expected value. Both have
a form in JSON, so that a proposer can be any program.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import ProposerError

SCHEMA = 2
KINDS = ("program", "plan", "source")


@dataclass(frozen=True)
class Attempt:
    """An earlier proposal and what came of it.

    Attributes:
        source: The proposal.
        outcome: ``accepted``, ``refused`` or ``unjudged``.
        check: The check that refused it.
        reason: Why.
        speedup: The measured speed-up, if it was timed: the median, and its lower bound.
        at_least: See ``speedup``.
        kind: Of the proposal.
        against: The baseline of the timing.
        told: What may be said of the reason to whoever proposed it, who might read files through it; if empty, all.
    """

    source: str
    outcome: str
    check: str = ""
    reason: str = ""
    speedup: float = 0.0
    at_least: float = 0.0
    kind: str = "source"
    against: str = ""
    told: str = ""


@dataclass(frozen=True)
class Request:
    """What a proposer is asked.

    Attributes:
        source: The file that defines ``Model`` and ``get_inputs()``.
        dtype: What inputs and parameters are cast to.
        train: Whether gradients count as well.
        inputs: Shape and dtype of each tensor among the inputs, ``value`` of what is none.
        machine: Facts of the device: name, cores, threads, versions.
        attempts: Earlier proposals, the best first; of why a source was refused, only what it could know itself.
        wanted: How many proposals are asked for.
        regions: What of the layer index notation can say: name, user's line, program, FLOPs, bytes, and the time that
            the least bytes take. Empty if nothing is known.
        choices: What a plan may choose: passes, places, operators, knobs of Inductor.
        times_ms: Of the layer as it is: eager, ``torch.compile``, and refold where that is faster.
        roofline: The measured limits of this machine: operations and bytes per second.
        seconds: What is left of the time of the run; None if nothing is said of it.
    """

    source: str
    dtype: str
    train: bool
    inputs: tuple[dict[str, Any], ...]
    machine: dict[str, Any]
    attempts: tuple[Attempt, ...] = ()
    wanted: int = 1
    regions: tuple[dict[str, Any], ...] = ()
    choices: dict[str, Any] = field(default_factory=dict)
    times_ms: dict[str, float] = field(default_factory=dict)
    roofline: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None

    def to_json(self) -> str:
        """Return the form that a command reads."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)})


@dataclass(frozen=True)
class Proposal:
    """A replacement.

    Attributes:
        text: A source that defines ``ModelNew``; or a program or a plan as JSON. What is no Unicode in it is replaced,
            as no file and no later request could hold it.
        note: What its author says of it; shown, and not believed.
        kind: ``program``, ``plan`` or ``source``.
    """

    text: str
    note: str = ""
    kind: str = "source"

    def __post_init__(self) -> None:
        for name in ("text", "note"):
            object.__setattr__(self, name, getattr(self, name).encode(errors="replace").decode())


def speed(speedup: float | None, at_least: float | None, against: str = "") -> str:
    """Say how fast something accepted is; what was not timed was only checked."""
    if not speedup:
        return "right, not timed"
    return f"{speedup:.2f}x{f' as fast as {against}' if against else ''}, at least {at_least:.2f}x"


class Proposer(Protocol):
    """Somebody who proposes.

    Attributes:
        name: Who it is.
        destination: Where the user's code goes; empty if it stays on this machine.
        facts: Whether requests are to say what is known of the layer, which takes a compile of it.
    """

    name: str
    destination: str = ""
    facts: bool = True

    def propose(self, request: Request) -> Sequence[Proposal]:
        """Return proposals, none if there are no more; raises ProposerError if it cannot."""
        ...

    def spent(self) -> dict[str, float]:
        """Count what was used so far, as ``tokens`` and ``money``; empty if nothing is counted."""
        return {}


def proposals(text: str, *, origin: str) -> list[Proposal]:
    """Read proposals from JSON: ``{"proposals": [{"kind": "source", "text": ..., "note": ...}]}``.

    A program or a plan may be given as an object under the name of its kind, instead of ``text``.

    Raises:
        ProposerError: The text has another form; says where.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProposerError(f"{origin} did not answer with JSON ({error}): {text[:200]!r}") from error
    found = answer.get("proposals") if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise ProposerError(f'{origin} must answer {{"proposals": [...]}}, not {text[:200]!r}')
    return [proposal(each, origin=f"{origin}: proposal {index}") for index, each in enumerate(found)]


def proposal(data: Any, *, origin: str) -> Proposal:
    """Read one proposal from data; raises ProposerError as `proposals` does."""
    kind = data.get("kind", "source") if isinstance(data, dict) else None
    if kind is not None and kind not in KINDS:
        raise ProposerError(f"{origin} is a {kind!r:.80}; kinds that are taken: {', '.join(KINDS)}")
    text = data.get("text") if isinstance(data, dict) else None
    if text is None and kind in ("program", "plan") and isinstance(data.get(kind), dict):
        text = json.dumps({name: data[name] for name in ("region", kind) if name in data})
    if not isinstance(text, str):
        raise ProposerError(f"{origin} has no text")
    return Proposal(text, str(data.get("note", "")), kind or "source")
