"""Checks of arguments that several functions of other packages take."""

from __future__ import annotations

from typing import Any

import torch

from refold.errors import ArgumentError
from refold.ops.spec import float_dtype


def positive(op: str, name: str, value: Any) -> None:
    """Refuse what is no positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{op}: {name} must be a positive integer; got {value!r}.")


def share(op: str, name: str, value: Any) -> None:
    """Refuse what is no share of elements that may be dropped."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ArgumentError(f"{op}: {name} must be 0 or more and below 1; got {value!r}.")


def states_dtype(op: str, name: str, value: Any) -> None:
    """Refuse what is neither None nor a dtype that states may have."""
    if value is not None and not (isinstance(value, torch.dtype) and float_dtype(value)):
        raise ArgumentError(f"{op}: {name} must be None or a float torch.dtype; got {value!r}.")
