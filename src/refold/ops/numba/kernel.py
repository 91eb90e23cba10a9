"""Functions that Numba compiles. Their machine code is kept on disk: compiling takes seconds, loading 0.1 s or less.

What a function needs of Numba decides how. One that allocates nothing and raises nothing is kept as an object file, and
later processes run it without Numba (`refold.ops.numba.machine`). Of any other, Numba itself keeps the code. It
compares the file of a function with the stored code's, but not the files of functions that it calls. So the folder is
named after the text of all of them. Numba separates its versions and kinds of processors, and so do the names of object
files. If no folder can be written to, or if the private names of Numba that this needs are missing, each process
compiles anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import threading
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from refold.cache import default_folder
from refold.ops.numba.machine import Code, Kinds, NotApart, Slot, kinds_of, machine, named, read, translated, write

if find_spec("numba") is None:  # who imports this file asks so whether Numba is there
    raise ModuleNotFoundError("No module named 'numba'", name="numba")

_ONE_AT_A_TIME = threading.Lock()
_SHARED = sorted(Path(__file__).parent.glob("*.py"))


class Kernel:
    """A compiled function; the first call compiles it, or loads it.

    Args:
        function: What to compile.
        options: Those of ``numba.njit``.
        apart: Whether it needs nothing of Numba while it runs. Then it is given contiguous arrays and truth values.
    """

    def __init__(self, function: Callable[..., None], options: dict[str, Any], apart: bool = False) -> None:
        self.function, self.options, self.apart = function, options, apart
        self.codes: dict[Kinds, Code] = {}

    def __call__(self, *given: Any) -> None:
        """Call it by Numba, with whatever that takes."""
        try:
            self.run(*given)
        except (OSError, EOFError, pickle.PickleError):  # a file that is damaged, or a full disk, before it ran
            self.run = self.compiled()
            self.run(*given)

    def prepared(self, *given: Any) -> Callable[..., None]:
        """Return a call that takes tensors for slots.

        Args:
            *given: Its arguments: slots, arrays of NumPy, truth values; without ``apart``, whatever Numba takes.

        Returns:
            A function of as many contiguous tensors as there are slots.
        """
        if self.apart:
            kinds = kinds_of(given)
            code = self.codes.get(kinds)
            if code is None:
                with _ONE_AT_A_TIME:
                    code = self.codes.get(kinds) or self._code(kinds)
            if code is not None:
                return code.prepared(given)
        places = [i for i, x in enumerate(given) if isinstance(x, Slot)]

        def call(*tensors: Tensor) -> None:
            views = list(given)
            for i, x in zip(places, tensors, strict=True):
                views[i] = x.detach().numpy().reshape(given[i].shape)
            self(*views)

        return call

    def _code(self, kinds: Kinds) -> Code | None:
        """Load machine code for these kinds of arguments, or make it; None if it needs Numba after all."""
        try:
            folder = self._folder()
            name = hashlib.sha256(f"{self.function.__qualname__} {named(kinds)} {self.options} {machine()}".encode())
            path = None if folder is None else folder / f"{name.hexdigest()[:24]}.o"
            kept = None if path is None else read(path)
            made = kept or translated(self.function, self.options, kinds)
            self.codes[kinds] = Code(made, kinds)
        except (NotApart, ImportError, AttributeError, TypeError, RuntimeError):
            self.apart = False
            return None
        if path is not None and kept is None:
            with contextlib.suppress(OSError):  # a full disk
                write(path, made)
        return self.codes[kinds]

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


def kernel(*, apart: bool = False, **options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Compile the function below without Python's lock; see `Kernel`, and ``numba.njit`` for the options."""
    return lambda function: Kernel(function, options, apart)
