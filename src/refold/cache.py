"""The folder for what the next process can use again: decisions of the compiler, machine code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import ArgumentError

VARIABLE = "REFOLD_CACHE"


def default_folder() -> Path | None:
    """Return the folder unless an option says otherwise; None if nothing is kept.

    That is ``$REFOLD_CACHE``, which may be ``off``, else ``$XDG_CACHE_HOME/refold``, else ``~/.cache/refold``. A user
    without a home keeps nothing.

    Raises:
        ArgumentError: A variable names the home of somebody unknown.
    """
    if named := os.environ.get(VARIABLE):
        return None if named.lower() in ("off", "0") else at_home(named, VARIABLE)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return at_home(base, "XDG_CACHE_HOME") / "refold"
    try:
        return Path.home() / ".cache" / "refold"
    except RuntimeError:
        return None


def at_home(folder: str | os.PathLike[str], name: str) -> Path:
    """Return a folder whose name may begin with ``~`` or ``~user``.

    Args:
        folder: Its name.
        name: Who named it: an option or a variable.

    Raises:
        ArgumentError: There is no such home.
    """
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise ArgumentError(f"{name} names {str(folder)!r}, a home that is not known. Give an absolute path.") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that other processes see all of it or none.

    Raises:
        OSError: The folder cannot be made, or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise
