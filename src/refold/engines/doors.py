"""What all plugins share: the switch, the comparison of signatures, and the way back to the engine's own kernel."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

from refold.errors import ArgumentError, BackendUnsupported

EngineKernel = Callable[..., Any]


def switched(variable: str, value: str | None, parts: Iterable[str]) -> tuple[str, ...]:
    """Return which parts an environment variable asks for: none without it or with 0, all with 1, or those it names.

    Raises:
        ArgumentError: It names something else.
    """
    parts, value = tuple(parts), (value or "0").strip()
    if value in ("0", "1"):
        return parts if value == "1" else ()
    named = tuple(name.strip() for name in value.split(","))
    for name in named:
        if name not in parts:
            raise ArgumentError(f"{variable} must be 0, 1, or names out of {', '.join(parts)}; got {name!r}.")
    return named


def version(engine: str) -> str | None:
    """Return the version of an installed engine, which may be its build for CPUs; None if there is none."""
    for name in (engine, f"{engine}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def log(engine: str) -> logging.Logger:
    """Return a logger whose lines are shown where those of the engine are."""
    return logging.getLogger(f"{engine}.refold")


def differs(theirs: EngineKernel, ours: EngineKernel) -> str | None:
    """Return how an engine's function differs from what an adapter knows; None if calls mean the same.

    A function of an older engine may lack the adapter's last parameters. It may have a default where the adapter has
    none, but no other default.
    """
    there, here = (_parameters(f) for f in (theirs, ours))
    new = [name for name in there if name not in here]
    if new:
        return f"unknown parameters {', '.join(new)}"
    if list(there) != list(here)[: len(there)]:
        return f"other parameters: {', '.join(there)}"
    for name, one in there.items():
        if here[name].kind is one.KEYWORD_ONLY is not one.kind:
            return f"{name} by position"
        if one.default != here[name].default and inspect.Parameter.empty not in (one.default, here[name].default):
            return f"the default {name}={one.default}"
    needed = [name for name in list(here)[len(there) :] if here[name].default is inspect.Parameter.empty]
    return f"no {', '.join(needed)}" if needed else None


def _parameters(kernel: EngineKernel) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(kernel).parameters.values()
    return {p.name: p for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD}


def either(engine: str, part: str, ours: EngineKernel, theirs: EngineKernel, /, *args: Any, **kw: Any) -> Any:
    """Call the adapter; what it does not compute stays with the engine's kernel, and a log line says so once."""
    try:
        return ours(*args, **kw)
    except BackendUnsupported as error:
        kept(engine, part, str(error))
        return theirs(*args, **kw)


@functools.cache
def kept(engine: str, part: str, why: str) -> None:
    """Say once why a kernel of the engine runs."""
    log(engine).warning("refold: %s: the engine's own kernel runs: %s", part, why)
