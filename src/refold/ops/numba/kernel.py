"""Functions that Numba compiles. It keeps their machine code on disk: compiling takes seconds, loading 0.1 s or less.

Numba compares the file of a function with the stored code's, but not the files of functions that it calls. So the
folder is named after the text of all of them. Numba itself separates its versions and kinds of processors. If no folder
can be written to, or if Numba's setting for the folder is missing, each process compiles anew.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from refold.cache import default_folder

if find_spec("numba") is None:  # who imports this file asks so whether Numba is there
    raise ModuleNotFoundError("No module named 'numba'", name="numba")

_SHARED = sorted(Path(__file__).parent.glob("*.py"))


class Kernel:
    """A compiled function; the first call compiles it, or loads it.

    Args:
        function: What to compile.
        options: Those of ``numba.njit``.
    """

    def __init__(self, function: Callable[..., None], options: dict[str, Any]) -> None:
        self.function, self.options = function, options

    def __call__(self, *given: Any) -> None:
        """Call it with what Numba takes: arrays and numbers."""
        try:
            self.run(*given)
        except (OSError, EOFError, pickle.PickleError):  # a file that is damaged, or a full disk, before it ran
            self.run = self.compiled()
            self.run(*given)

    @cached_property
    def run(self) -> Any:
        """Numba's function."""
        return self.kept() or self.compiled()

    def compiled(self, **more: Any) -> Any:
        """Return Numba's function, to be compiled at its first call."""
        import numba

        return numba.njit(nogil=True, **self.options, **more)(self.function)

    def kept(self) -> Any:
        """Return Numba's function, to be loaded from disk if it is there; None if there is no folder for it."""
        import numba

        folder, before = self._folder(), getattr(numba.config, "CACHE_DIR", None)
        if folder is None or before is None:
            return None
        try:
            numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
            found = self.compiled(cache=True)
            return found if Path(found.stats.cache_path).is_relative_to(folder) else None
        except (OSError, RuntimeError, AttributeError):
            return None
        finally:
            numba.config.CACHE_DIR = before  # type: ignore[attr-defined]

    def _folder(self) -> Path | None:
        """Return the folder for the machine code of functions with this text; None if nothing is kept."""
        base = default_folder()
        if base is None:
            return None
        texts = [path.read_bytes() for path in (*_SHARED, Path(self.function.__code__.co_filename))]
        folder = base / "numba" / hashlib.sha256(b"".join(texts)).hexdigest()[:16]
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return None
        return folder if os.access(folder, os.W_OK) else None


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Compile the function below without Python's lock; see `Kernel`, and ``numba.njit`` for the options."""
    return lambda function: Kernel(function, options)
