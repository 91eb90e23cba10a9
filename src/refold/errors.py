"""Every error that refold raises on purpose.

A message says what was expected (with names and values), what came, and what to do:
``ssd: B has t=128 but x has t=130 (b=2, h=4, p=64, g=1, n=16). Slice or pad B.``
Each error also has a built-in base class, so callers can catch it without importing refold.
"""

import sys
import warnings


class RefoldError(Exception):
    """Base of all errors of this package."""


class ArgumentError(RefoldError, ValueError):
    """An argument has a value that the callee cannot accept."""


class ShapeError(ArgumentError):
    """Axes of two arguments disagree, or an argument has the wrong number of them."""


class DtypeError(ArgumentError, TypeError):
    """An argument has a dtype that the callee does not compute in."""


class DeviceError(ArgumentError):
    """Arguments live on different devices, or on one that does not exist."""


class CapacityError(ArgumentError, MemoryError):
    """What is asked for does not fit into the memory that is free; the message says how much is needed."""


class BackendUnsupported(RefoldError, RuntimeError):
    """A backend was named, but cannot run these arguments; the message lists the reasons."""


class MissingDependency(RefoldError, ImportError):
    """An optional package is needed and not installed; the message names the extra that brings it."""


class CompileError(RefoldError, RuntimeError):
    """The compiler failed on a graph; raised only with ``strict=True``, else reported with a warning."""


class PlanError(CompileError):
    """A plan does not fit the program; raised only with ``strict=True``, else reported with a warning."""


class TargetError(RefoldError, ValueError):
    """A command-line target does not name a module with inputs."""


class ProgramError(ArgumentError):
    """A program in index notation is outside the grammar, or its axes do not fit; the message names the step."""


class ProposerError(RefoldError, RuntimeError):
    """A proposer cannot be reached, refuses, or has nothing that can be used."""


class CheckpointError(RefoldError, ValueError):
    """A checkpoint is missing, truncated, of unknown architecture, or its keys and shapes do not fit."""


class RefoldWarning(UserWarning):
    """refold could not do its work and something slower, but right, runs instead."""


def first_line(error: BaseException, most: int = 500) -> str:
    """Name an error's kind, and give the first line of its message, shortened."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:most]}"


def printable(text: str, *, lines: bool = False) -> str:
    """Write out what is no printable character, before text that others chose reaches a terminal.

    Args:
        text: The text.
        lines: Whether it may have several lines.
    """
    if lines:
        return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))
    return "".join(c if c.isprintable() else " | " if c == "\n" else repr(c)[1:-1] for c in text)


def warn(text: str) -> None:
    """Warn with a `RefoldWarning` at the line of the user's code that led here, past refold's and PyTorch's own."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RefoldWarning, stacklevel=level)


_NOT_THE_USERS = ("refold", "torch", "contextlib", "functools")
