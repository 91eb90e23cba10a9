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

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ...versions import UNTESTED, lose, untested
from . import switch
from .switch import unavailable as unavailable


def captures_loops(backend: Callable[..., Any]) -> Any:
    """Mark a backend of ``torch.compile``: loops in what is compiled for it are captured. Installs the capture."""
    switch.mark(backend)
    if (reason := untested("torch", torch.__version__)) is not None:
        lose(UNTESTED["torch"], reason)
    elif unavailable() is None:
        install()
    return backend


def install() -> None:
    """Let Dynamo capture loops for marked backends; all of it or nothing."""
    if switch.is_on():
        return
    try:
        from . import to_scan as to_scan
        from .capture import hook

        switch.switch_on(hook.install())
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        switch.switch_off(switch.unexpected(error))
        lose(UNTESTED["torch"], switch.unexpected(error))


def uninstall() -> None:
    """Give Dynamo back its own interpreter; loops are executed step by step until `install` is called."""
    switch.switch_off("refold.compiler.dynamo.uninstall() was called")


@cache
def rewriting_before_autograd() -> Any:
    """Return the module that rewrites before autograd; None, with one warning, if PyTorch lacks what it needs."""
    try:
        from . import before_autograd
    except (ImportError, AttributeError) as error:
        lose("recurrences are rewritten less in training", switch.unexpected(error))
        return None
    return before_autograd


def notes() -> list[str]:
    """Say of the compile under way which long loops were executed step by step, and why."""
    if (reason := unavailable()) is not None:
        return [f"loops are traced step by step: {reason}"]
    from .capture import hook

    try:
        return hook.notes()
    except AttributeError as error:
        return [f"loops may be traced step by step: {switch.unexpected(error)}"]
