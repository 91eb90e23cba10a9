"""Proposers of replacements: files, commands, recorded runs, models over HTTP. `refold.verify` decides on them.

A proposer returns programs in index notation, plans, or source. `search` tries each proposal against the original
(source in a sandbox), tells the proposer the outcome, and keeps the best accepted one. docs/proposers.md has the
protocol.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from ..errors import ArgumentError
from . import local
from .applied import Guarded as Guarded
from .applied import guarded as guarded
from .chat import STYLES, Chat
from .loop import Budget as Budget
from .loop import Run as Run
from .loop import search as search
from .protocol import Attempt as Attempt
from .protocol import Proposal as Proposal
from .protocol import Proposer as Proposer
from .protocol import Request as Request
from .systematic import Systematic as Systematic

FORMS = "rules, search, file:PATH, command:COMMAND, replay:FOLDER, openai:MODEL or anthropic:MODEL"


def proposer(spec: str, *, base_url: str = "", prices: tuple[float, float] = (0.0, 0.0)) -> Proposer:
    """Make a proposer from what the command line says.

    Args:
        spec: ``search``, ``file:PATH``, ``command:COMMAND``, ``replay:FOLDER``, ``openai:MODEL`` or
            ``anthropic:MODEL``.
        base_url: The endpoint of a model; ``openai`` has no other.
        prices: Money for a million tokens, in and out.

    Raises:
        ArgumentError: There is no such kind, or it lacks what follows the colon.
    """
    if spec == "search":
        return Systematic()
    kind, _, rest = spec.partition(":")
    if not rest or kind not in ("file", "command", "replay", *STYLES):
        raise ArgumentError(f"--propose must be {FORMS}, not {spec!r}")
    if kind in STYLES:
        return Chat(kind, rest, base_url=base_url, prices=prices)
    if base_url:
        raise ArgumentError(f"--base-url goes with openai:MODEL or anthropic:MODEL, not with {spec!r}")
    if kind == "command":
        return local.Command(shlex.split(rest))
    return local.from_files(Path(rest)) if kind == "file" else local.from_run(Path(rest))
