"""Triton's hash of its own files, remembered from one process to the next.

Triton names what it compiles by a hash of the files that compiled it, some 400 MB. So the first launch of every process
waited 0.3 seconds. Sizes and times of the same files are read in three milliseconds, and say whether one has changed.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import cache

import triton
from triton.runtime import cache as names

from refold.cache import default_folder, write_whole
from refold.errors import ArgumentError
from refold.versions import is_tested


def remember() -> None:
    """Have Triton take its hash from refold's folder where no file of Triton has changed."""
    hashed = getattr(names, "triton_key", None)
    if hashed is None or not is_tested("triton", triton.__version__):
        return

    @cache
    def triton_key() -> str:
        path = None
        with suppress(ArgumentError, OSError, ValueError):  # no such home, a file that cannot be read, or is no text
            if folder := default_folder():
                path = folder / "triton" / f"{stamp(os.path.dirname(triton.__file__))}.key"
                if path.exists() and (found := path.read_text()).startswith(triton.__version__):
                    return found
        found = str(hashed())
        if path is not None:
            with suppress(OSError):
                write_whole(path, found)
        return found

    names.triton_key = triton_key


def stamp(folder: str) -> str:
    """Return a name for the state of all Python and machine code below a folder."""
    found = hashlib.sha256(folder.encode())
    for place, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        for path in [os.path.join(place, name) for name in sorted(files) if name.endswith((".py", ".so"))]:
            state = os.stat(path)
            found.update(f"{path} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}\n".encode())
    return found.hexdigest()
