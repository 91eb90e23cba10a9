"""Turn a request into a prompt for a model, and its answer into proposals.

The prompts are in ``prompts/``, one file per version, so a record names exactly what was asked.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from string import Template

from ..compiler.notation.program import STEPS as WORDS
from .protocol import Attempt, Proposal, Request

VERSION = "three-kinds-1"
_FENCE = re.compile(r"```(\w*)[ \t]*\r?\n(.*?)\n[ \t]*```", re.DOTALL)
_SHOWN = 3  # earlier attempts
_REGIONS = 6
_LENGTH = 20_000  # characters of an earlier attempt


@cache
def _parts() -> dict[str, Template]:
    text = (files(__package__) / "prompts" / f"{VERSION}.md").read_text()
    pieces = re.split(r"^# (system|request|region|attempt)\n", text, flags=re.MULTILINE)[1:]
    return {name: Template(body.strip()) for name, body in zip(pieces[::2], pieces[1::2], strict=True)}


def system() -> str:
    """Write what the model is told once."""
    return _parts()["system"].substitute(words=", ".join(WORDS))


def question(request: Request) -> str:
    """Write what the model is asked."""
    attempts = "\n\n".join(_attempt(attempt) for attempt in request.attempts[:_SHOWN])
    return _parts()["request"].substitute(
        dtype=request.dtype,
        training=", forward and backward," if request.train else "",
        machine=", ".join(f"{name} {value}" for name, value in request.machine.items()),
        source=request.source,
        inputs=", ".join(
            repr(each["value"]) if "value" in each else f"{tuple(each['shape'])} {each['dtype']}"
            for each in request.inputs
        ),
        facts=_facts(request),
        attempts=attempts,
    )


def _facts(request: Request) -> str:
    """Write what is known of the layer on this machine."""
    parts = []
    if request.times_ms:
        parts.append("It takes " + ", ".join(f"{ms:.4g} ms by {name}" for name, ms in request.times_ms.items()) + ".")
    if request.roofline:
        flops, moved = request.roofline["flops_per_s"], request.roofline["bytes_per_s"]
        parts.append(f"At best this machine does {flops:.3g} operations of a matrix product and {moved:.3g} bytes of a "
                     "copy a second.")  # fmt: skip
    for region in request.regions[:_REGIONS]:
        program = json.dumps(region["program"])
        numbers = {name: f"{region[name]:.3g}" for name in ("flops", "bytes", "least_bytes", "least_ms")}
        shown = {"name": region["name"], "line": region["line"], "program": program, **numbers}
        parts.append(_parts()["region"].substitute(shown))
    if request.choices:
        parts.append(f"A plan may choose: {json.dumps(request.choices)}")
    return "\n\n".join(["", *parts, ""]) if parts else ""


def _attempt(attempt: Attempt) -> str:
    timing = f", {attempt.speedup:.2f}x as fast (at least {attempt.at_least:.2f}x)" if attempt.speedup else ""
    reason = f" by check {attempt.check}: {attempt.reason}" if attempt.reason else ""
    return _parts()["attempt"].substitute(
        kind="answer" if attempt.kind == "source" else attempt.kind,
        language="python" if attempt.kind == "source" else "json",
        outcome=attempt.outcome,
        reason=reason,
        timing=timing,
        source=attempt.source if len(attempt.source) <= _LENGTH else f"{attempt.source[:_LENGTH]}\n(cut off here)",
    )


def answers(text: str) -> list[Proposal]:
    """Return the fenced blocks that are proposals; what is said around them is the note.

    A block of source defines ModelNew. A block of JSON says its kind; one that does not is proposed as a program, so
    that whoever wrote it is told what is wrong with it.
    """
    note = _FENCE.sub("", text).strip()[:1000]
    found = []
    for language, block in _FENCE.findall(text):
        if language.lower() == "json" or (not language and block.lstrip().startswith("{")):
            found.append(_from_json(block, note))
        elif "ModelNew" in block:
            found.append(Proposal(block, note))
    return found


def _from_json(block: str, note: str) -> Proposal:
    try:
        data = json.loads(block)
        kind = data.get("kind", "program")
    except (ValueError, RecursionError, AttributeError):
        return Proposal(block, note, "program")
    return Proposal(block, note, kind if kind in ("program", "plan") else "program")
