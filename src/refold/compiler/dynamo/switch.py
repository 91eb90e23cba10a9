"""Whether loops are captured: for which backends, with which PyTorch, and why not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...versions import lose, untested

SWITCH = "REFOLD_LOOPS"
"""The environment variable that, set to ``unroll``, switches loop capture off; read at each compile."""

_MARK = "refold_captures_loops"
_reason: str | None = None
_remove: Callable[[], None] | None = None


def mark(backend: Callable[..., Any]) -> None:
    """Note that loops are captured for a backend of ``torch.compile``."""
    setattr(backend, _MARK, True)


def is_marked(backend: Any) -> bool:
    """Tell whether loops are captured for a backend, however PyTorch has wrapped it."""
    if unavailable() is not None:
        return False
    for each, options in _layers(backend):
        if options.get("loops") == "unroll":
            return False
        if getattr(each, _MARK, False):
            return True
    return False


def report_of(backend: Any) -> Any:
    """Return the report that a backend writes to, however PyTorch has wrapped it; None if it has none."""
    found = (options.get("report") or getattr(each, "report", None) for each, options in _layers(backend))
    return next(filter(None, found), None)


def _layers(backend: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield a backend and what it wraps, from the outside in, each with the options that it holds."""
    while backend is not None:
        inner = vars(backend) if hasattr(backend, "__dict__") else {}
        yield backend, (inner.get("kwargs") or {}).get("options") or {}
        backend = inner.get("_torchdynamo_orig_backend") or inner.get("compiler_fn") or inner.get("__wrapped__")


def unavailable() -> str | None:
    """Return why loops are not captured; None if they are."""
    if os.environ.get(SWITCH, "capture") == "unroll":
        return f"the environment variable {SWITCH} is set to unroll"
    return _reason or untested("torch", torch.__version__)


def is_on() -> bool:
    """Tell whether something was added to Dynamo's interpreter."""
    return _remove is not None


def switch_on(remove: Callable[[], None]) -> None:
    """Note what was added to Dynamo's interpreter, as a function that removes it."""
    global _reason, _remove
    _reason, _remove = None, remove


def switch_off(reason: str) -> None:
    """Remove what was added to Dynamo's interpreter."""
    global _reason, _remove
    if _remove is not None:
        _remove()
        _remove = None
    _reason = reason


def unexpected(error: Exception) -> str:
    """Say that PyTorch is not as expected, which an error showed."""
    return f"Dynamo of PyTorch {torch.__version__} is not as expected ({type(error).__name__}: {error})"


def lose_loops(error: Exception) -> str:
    """Note that a loop is not captured because Dynamo is not as expected, and return why: others still are."""
    why = unexpected(error)
    lose("some loops over time are not captured, so compile time grows with their length", why)
    return why
