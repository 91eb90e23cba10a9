"""Options of suites: texts become values, and values that a suite cannot use are refused in one sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..errors import ArgumentError

DTYPES = ("float32", "bfloat16", "float16")
VERIFY = ("quick", "off")
LARGEST = 2**31 - 1
LONGEST = 1e6  # Seconds; what waits for a process takes no more than about twice of that.


def read_option(what: str, text: str, default: Any, zero: bool = False) -> Any:
    """Return the value of a text, of the type of the default; a tuple takes values separated by commas.

    Args:
        what: The suite and its option, for the error.
        text: What was given.
        default: The option's default. A whole number may be 0 only if its default is 0; a number of seconds may be
            infinite only if its default is.
        zero: A whole number may be 0 in any case.

    Raises:
        ArgumentError: It is not of that type, or outside its range.
    """
    if isinstance(default, tuple):
        return tuple(read_option(what, part, default[0], zero) for part in text.split(","))
    kind = type(default)
    if kind is bool:
        if text not in ("true", "false"):
            raise ArgumentError(f"{what} is {text!r}. Give true or false")
        return text == "true"
    try:
        found = kind(text)
    except ValueError as error:
        raise ArgumentError(f"{what} is {text!r}. Give a value like {default!r}") from error
    if kind is int:
        least = 0 if zero or default == 0 else 1
        if not least <= found <= LARGEST:
            raise ArgumentError(f"{what} is {text!r}. Give {least} to {LARGEST}")
    if kind is float and not (0 <= found <= LONGEST or found == default == math.inf):
        raise ArgumentError(f"{what} is {text!r}. Give 0 to {LONGEST:.0f} seconds")
    return found


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that a suite does not know.

    Args:
        what: The suite and its option, for the error.
        given: The names.
        known: Those that there are.

    Raises:
        ArgumentError: One of them is unknown.
    """
    known = list(known)
    for name in given:
        if name not in known:
            raise ArgumentError(f"{what} is {name!r}. Give one of {', '.join(known)}")
