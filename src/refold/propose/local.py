"""Proposers that need no network: files, a command, and the record of an earlier run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..errors import ProposerError
from .protocol import KINDS, Proposal, Proposer, Request, proposal, proposals

_ANSWER_LIMIT = 16 << 20


class _Once(Proposer):
    """Hands out a fixed list of proposals, as many at a time as are wanted."""

    facts = False

    def __init__(self, name: str, found: Sequence[Proposal]):
        self.name = name
        self._left = list(found)

    def propose(self, request: Request) -> Sequence[Proposal]:
        """Return the next proposals."""
        taken, self._left = self._left[: request.wanted], self._left[request.wanted :]
        return taken


def from_files(path: Path) -> _Once:
    """Propose a file, or each file of a folder in the order of their names: sources, or programs and plans in JSON.

    A JSON file says its kind, ``{"kind": "program", "program": {...}}``; a rule is a program.
    """
    files = sorted([*path.glob("*.py"), *path.glob("*.json")]) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ProposerError(f"{path} is neither a file nor a folder with Python or JSON files")
    return _Once(f"file:{path}", [_from_file(file) for file in files])


def _from_file(file: Path) -> Proposal:
    text = file.read_text(errors="replace")
    if file.suffix != ".json":
        return Proposal(text, file.name)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProposerError(f"{file} is not JSON: {error}") from error
    if isinstance(data, dict) and "kind" not in data and {"region", "program"} <= data.keys():
        data = {"kind": "program", "program": data["program"]}
    if not isinstance(data, dict) or data.get("kind") not in KINDS:
        raise ProposerError(f'{file} must be an object that says its kind, {{"kind": "program", "program": ...}}')
    return proposal({**data, "note": data.get("note", file.name)}, origin=str(file))


def from_run(folder: Path) -> _Once:
    """Propose again what was proposed in a run that left its record in a folder."""
    record = folder / "run.jsonl"
    try:
        events = [json.loads(line) for line in record.read_text().splitlines()]
        found = [
            Proposal(event["text"], event["note"], event.get("kind", "source"))
            for event in events
            if event["event"] == "proposal"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProposerError(f"{record} is not the record of a run: {type(error).__name__}: {error}") from error
    return _Once(f"replay:{folder}", found)


class Command(Proposer):
    """Any program: it reads a request as JSON from its standard input and writes proposals to its standard output.

    It is the user's own program and runs with the user's rights; what it proposes does not.
    """

    def __init__(self, arguments: Sequence[str], *, timeout: float = 600.0):
        self.name = "command:" + " ".join(arguments)
        self._arguments, self._timeout = list(arguments), timeout

    def propose(self, request: Request) -> Sequence[Proposal]:
        """Run the command once."""
        timeout = min(self._timeout, request.seconds or self._timeout)
        try:
            done = subprocess.run(
                self._arguments,
                input=request.to_json(),
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ProposerError(f"{self.name} did not answer within {timeout:.0f} s") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ProposerError(f"{self.name} cannot be run: {error}") from error
        if done.returncode != 0:
            said = done.stderr.strip()[-500:] or "it wrote nothing to its standard error"
            raise ProposerError(f"{self.name} ended with exit code {done.returncode}: {said}")
        if len(done.stdout) > _ANSWER_LIMIT:
            raise ProposerError(
                f"{self.name} answered with {len(done.stdout)} characters; at most {_ANSWER_LIMIT} are read"
            )
        return proposals(done.stdout, origin=self.name)
