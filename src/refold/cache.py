"""The folder for what the next process can use again: decisions of the compiler, machine code."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "REFOLD_CACHE"


def default_folder() -> Path | None:
    """Return the folder unless an option says otherwise; None if nothing is kept.

    That is ``$REFOLD_CACHE``, which may be ``off``, else ``$XDG_CACHE_HOME/refold``, else ``~/.cache/refold``.
    """
    if named := os.environ.get(VARIABLE):
        return None if named.lower() in ("off", "0") else Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or "~/.cache").expanduser() / "refold"
