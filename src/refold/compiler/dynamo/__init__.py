"""The one door to Dynamo's insides: loops over time become one node of its graph (`capture`), and then one scan.

Dynamo's interpreter is not PyTorch's public interface, and it changes. So everything that knows it is in this folder,
and is imported here alone, when a backend is first marked. `install` adds one function to Dynamo's interpreter, which
does nothing for backends that are not marked; `uninstall` removes it. Without loop capture all else of refold works:
Dynamo then executes loops step by step, and they are recognised after that, with a compile time that grows with their
length.

`unavailable` tells why loops are not captured, if so: switched off, another PyTorch than was tested, or a name that it
no longer has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ...errors import warn

TESTED_TORCH = ((2, 11), (2, 13))
"""The PyTorch releases, first and last, whose loops are captured."""

SWITCH = "REFOLD_LOOPS"
"""The environment variable that, set to ``unroll``, switches loop capture off; read at each compile."""

_MARK = "refold_captures_loops"
_reason: str | None = None
_installed: Callable[[], None] | None = None


def captures_loops(backend: Callable[..., Any]) -> Any:
    """Mark a backend of ``torch.compile``: loops in what is compiled for it are captured. Installs the capture."""
    setattr(backend, _MARK, True)
    if unavailable() is None:
        install()
    return backend


def unavailable() -> str | None:
    """Return why loops are not captured; None if they are."""
    if os.environ.get(SWITCH, "capture") == "unroll":
        return f"the environment variable {SWITCH} is set to unroll"
    if _reason is not None:
        return _reason
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not TESTED_TORCH[0] <= release <= TESTED_TORCH[1]:
        first, last = (".".join(map(str, tested)) for tested in TESTED_TORCH)
        return f"PyTorch {torch.__version__} is not one of the tested versions, {first} to {last}"
    return None


def install() -> None:
    """Let Dynamo capture loops for marked backends; all of it or nothing."""
    global _installed, _reason
    if _installed is not None:
        return
    _reason = None
    try:
        from . import to_scan as to_scan
        from .capture import hook

        _installed = hook.install()
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        switch_off(error)


def uninstall() -> None:
    """Give Dynamo back its own interpreter; loops are executed step by step until `install` is called."""
    global _reason
    _remove()
    _reason = "refold.compiler.dynamo.uninstall() was called"


def switch_off(error: Exception) -> None:
    """Stop capturing loops in this process, because Dynamo is not as expected, and warn."""
    global _reason
    _remove()
    _reason = f"Dynamo of PyTorch {torch.__version__} is not as expected ({type(error).__name__}: {error})"
    warn(
        f"loops over time are not captured, so compile time grows with their length: {_reason}. Results are the same. "
        "Use a tested version of PyTorch, or a newer refold."
    )


def _remove() -> None:
    global _installed
    if _installed is not None:
        _installed()
        _installed = None


def is_marked(backend: Any) -> bool:
    """Tell whether loops are captured for a backend, however PyTorch has wrapped it."""
    if unavailable() is not None:
        return False
    while backend is not None:
        inner = vars(backend) if hasattr(backend, "__dict__") else {}
        if (inner.get("kwargs") or {}).get("options", {}).get("loops") == "unroll":
            return False
        if getattr(backend, _MARK, False):
            return True
        backend = inner.get("_torchdynamo_orig_backend") or inner.get("compiler_fn") or inner.get("__wrapped__")
    return False


def notes() -> list[str]:
    """Say of the compile under way which long loops were executed step by step, and why."""
    if (reason := unavailable()) is not None:
        return [f"loops are traced step by step: {reason}"]
    from .capture import hook

    return hook.notes()
