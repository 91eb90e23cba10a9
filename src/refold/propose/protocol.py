"""What a proposer is asked, and what it may answer.

A proposer takes a `Request` and returns proposals. It is trusted in nothing: a proposal is text, and `refold.verify`
decides. The request holds the layer's source, the shapes and dtypes of its inputs, facts of the machine and earlier
verdicts; never a seed, an input or an expected value. Both have a form in JSON, so that a proposer can be any program.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ProposerError

SCHEMA = 1


@dataclass(frozen=True)
class Attempt:
    """An earlier proposal and what came of it.

    Attributes:
        source: The proposal.
        outcome: ``accepted``, ``refused`` or ``unjudged``.
        check: The check that refused it.
        reason: Why.
        speedup: Of the race, if there was one: the median, and what it is at least.
        at_least: See ``speedup``.
    """

    source: str
    outcome: str
    check: str = ""
    reason: str = ""
    speedup: float = 0.0
    at_least: float = 0.0


@dataclass(frozen=True)
class Request:
    """What a proposer is asked.

    Attributes:
        source: The file that defines ``Model`` and ``get_inputs()``.
        dtype: What inputs and parameters are cast to.
        train: Whether gradients count as well.
        inputs: Shape and dtype of each input.
        machine: Facts of the device: name, cores, threads, versions.
        attempts: Earlier proposals, the best first.
        wanted: How many proposals are asked for.
    """

    source: str
    dtype: str
    train: bool
    inputs: tuple[dict[str, Any], ...]
    machine: dict[str, Any]
    attempts: tuple[Attempt, ...] = ()
    wanted: int = 1

    def to_json(self) -> str:
        """Return the form that a command reads."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)})


@dataclass(frozen=True)
class Proposal:
    """A replacement: source that defines ``ModelNew``.

    Attributes:
        text: The source.
        note: What its author says of it; shown, and not believed.
    """

    text: str
    note: str = ""


class Proposer(Protocol):
    """Somebody who proposes."""

    name: str
    #: Where the user's code goes; empty if it stays on this machine.
    destination: str

    def propose(self, request: Request) -> Sequence[Proposal]:
        """Return proposals, none if there are no more; raises ProposerError if it cannot."""
        ...

    def spent(self) -> dict[str, float]:
        """Return what was used so far, as ``tokens`` and ``money``; empty if nothing is counted."""
        ...


def proposals(text: str, *, origin: str) -> list[Proposal]:
    """Read proposals from JSON: ``{"proposals": [{"kind": "source", "text": ..., "note": ...}]}``.

    Raises:
        ProposerError: The text has another form; says where.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProposerError(f"{origin} answered with what is no JSON ({error}): {text[:200]!r}") from error
    found = answer.get("proposals") if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise ProposerError(f'{origin} must answer {{"proposals": [...]}}, not {text[:200]!r}')
    result = []
    for index, each in enumerate(found):
        if not isinstance(each, dict) or not isinstance(each.get("text"), str):
            raise ProposerError(f"{origin}: proposal {index} has no text")
        if each.get("kind", "source") != "source":
            raise ProposerError(f"{origin}: proposal {index} is a {each['kind']!r}; kinds that are taken: 'source'")
        result.append(Proposal(each["text"], str(each.get("note", ""))))
    return result
