"""Functions that Numba compiles. Their machine code is kept on disk: compiling takes seconds, loading 0.1 s.

Numba compares the file of a function with the stored code's, but not the files of functions that it calls. So the
folder is named after the text of all of them. Numba itself separates its versions and kinds of processors. If no
folder can be written to, or if the private names of Numba that this needs are missing, each process compiles anew.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from refold.cache import default_folder

_SHARED = sorted(Path(__file__).parent.glob("*.py"))


class Kernel:
    """A compiled function; the first call compiles it, or loads it."""

    def __init__(self, function: Callable[..., None], options: dict[str, Any]) -> None:
        self.function, self.options = function, options
        self.run = self.kept() or self.compiled()

    def __call__(self, *arrays: Any) -> None:
        """Call it."""
        try:
            self.run(*arrays)
        except (OSError, EOFError, pickle.PickleError):  # a file that is damaged, or a full disk, before it ran
            self.run = self.compiled()
            self.run(*arrays)

    def compiled(self, **more: Any) -> Any:
        """Return Numba's function, to be compiled at its first call."""
        return numba.njit(nogil=True, **self.options, **more)(self.function)

    def kept(self) -> Any:
        """Return Numba's function, to be loaded from disk if it is there; None if there is no folder for it."""
        base = default_folder()
        if base is None:
            return None
        texts = [path.read_bytes() for path in (*_SHARED, Path(self.function.__code__.co_filename))]
        folder = base / "numba" / hashlib.sha256(b"".join(texts)).hexdigest()[:16]
        before = getattr(numba.config, "CACHE_DIR", None)
        if before is None:
            return None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                return None
            numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
            found = self.compiled(cache=True)
            return found if Path(found.stats.cache_path).is_relative_to(folder) else None
        except (OSError, RuntimeError, AttributeError):
            return None
        finally:
            numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Compile the function below without Python's lock; see ``numba.njit`` for the options."""
    return lambda function: Kernel(function, options)
