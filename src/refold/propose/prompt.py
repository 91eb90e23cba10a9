"""Turn a request into the words that a model is asked with, and its answer into proposals.

The words lie in ``prompts/``, one file a version, so that a record names exactly what was asked.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from string import Template

from .protocol import Attempt, Proposal, Request

VERSION = "source-1"
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)\n[ \t]*```", re.DOTALL)
_SHOWN = 3  # earlier attempts


@cache
def _parts() -> dict[str, Template]:
    text = (files(__package__) / "prompts" / f"{VERSION}.md").read_text()
    pieces = re.split(r"^# (system|request|attempt)\n", text, flags=re.MULTILINE)[1:]
    return {name: Template(body.strip()) for name, body in zip(pieces[::2], pieces[1::2], strict=True)}


def system() -> str:
    """Return what the model is told once."""
    return _parts()["system"].substitute()


def question(request: Request) -> str:
    """Return what the model is asked."""
    attempts = "\n\n".join(_attempt(attempt) for attempt in request.attempts[:_SHOWN])
    return _parts()["request"].substitute(
        dtype=request.dtype,
        training=", forward and backward," if request.train else "",
        machine=", ".join(f"{name} {value}" for name, value in request.machine.items()),
        source=request.source,
        inputs=", ".join(f"{tuple(each['shape'])} {each['dtype']}" for each in request.inputs),
        attempts=attempts,
    )


def _attempt(attempt: Attempt) -> str:
    timing = f", {attempt.speedup:.2f}x as fast (at least {attempt.at_least:.2f}x)" if attempt.speedup else ""
    reason = f" by check {attempt.check}: {attempt.reason}" if attempt.reason else ""
    return _parts()["attempt"].substitute(outcome=attempt.outcome, reason=reason, timing=timing, source=attempt.source)


def answers(text: str) -> list[Proposal]:
    """Return the fenced blocks that define ModelNew; what is said around them is the note."""
    note = _FENCE.sub("", text).strip()[:1000]
    return [Proposal(block, note) for block in _FENCE.findall(text) if "ModelNew" in block]
