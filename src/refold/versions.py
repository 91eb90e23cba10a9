"""The releases of other packages that refold was tested with, and what a release takes away.

refold uses some names of other packages that are not public. Where a release lacks one, a feature is off, or slower:
`lose` says so once, and ``refold doctor`` lists it. Results are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import warn

TESTED = {
    "python": ("3.11", "3.13"),
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "transformers": ("5.17", "5.24"),
    "jax": ("0.10", "0.12"),
}
"""The first and the last of the tested releases, by package. Older ones are refused, newer ones are tried."""

UNTESTED = {
    "torch": "loops over time are not captured, so compile time grows with their length",
    "triton": "kernels are launched by Triton itself, 15 to 30 microseconds slower per launch",
}
"""What is off with a release that was not tested, by package."""

LESS = (
    ("torch", "2.13", "each length of a captured loop has a compile of its own"),
    ("torch", "2.13", "loops of functions that register a hook are traced step by step"),
)
"""What is off before a release that was tested: package, release, what."""

_losses: dict[str, None] = {}


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: ``(2, 15)`` of ``2.15.0+cu130``."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def is_tested(package: str, version: str) -> bool:
    """Tell whether a version belongs to the tested releases of a package."""
    first, last = TESTED[package]
    return release(first) <= release(version) <= release(last)


def tested(package: str) -> str:
    """Return the tested releases of a package, for a person: ``torch 2.11 to 2.15``."""
    return f"{package} {' to '.join(TESTED[package])}"


def untested(package: str, version: str) -> str | None:
    """Return why what was not tested is off; None with a tested release."""
    return None if is_tested(package, version) else f"{package} {version} was not tested, {tested(package)} were"


def lose(cost: str, reason: str, package: str = "torch") -> None:
    """Note what is off, and warn once with a `refold.errors.RefoldWarning`.

    Args:
        cost: What is off, or slower.
        reason: Why: the package, its version, and what it lacks.
        package: The package.
    """
    text = f"{cost}: {reason}"
    if text not in _losses:
        _losses[text] = None
        warn(f"{text}. Results are the same. Use {tested(package)}, or a newer refold.")


def forget() -> None:
    """Forget what was noted in this process, so that it is said again."""
    _losses.clear()


def losses(versions: Iterable[tuple[str, str]] = ()) -> list[str]:
    """List what is off: what was noted in this process, and what is known of these packages and versions."""
    versions = list(versions)
    new = [
        f"{UNTESTED[package]}: {why}"
        for package, version in versions
        if package in UNTESTED and (why := untested(package, version)) is not None
    ]
    old = [
        f"{what}: {package} {version} is older than {since}"
        for package, version in versions
        for name, since, what in LESS
        if name == package and release(version) < release(since)
    ]
    return list(dict.fromkeys([*_losses, *new, *old]))
