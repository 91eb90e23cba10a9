"""What Triton does once, before it compiles a first kernel: begun in threads, while Python reads the files of kernels.

Triton names what it compiles by a hash of the files that compiled it, some 400 MB: 0.4 seconds. The hash is remembered
from one process to the next. Sizes and times of the same files are read in three milliseconds, and say whether one has
changed. Triton 3.6 also has a C compiler write what talks to the driver, and each launch of a kernel: 0.3 seconds each.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import triton
from triton.runtime import cache as names
from triton.runtime.driver import driver

from refold.cache import default_folder, write_whole
from refold.errors import ArgumentError
from refold.versions import is_tested


def begin(function: Callable[[], Any]) -> Callable[[], Any]:
    """Begin to call a function in a thread, if the GPU is in use, and make what waits for its result."""
    if not torch.cuda.is_initialized():
        return function
    process, threads = os.getpid(), ThreadPoolExecutor(1, "refold")
    future = threads.submit(function)
    threads.shutdown(wait=False)
    # A fork has no such thread.
    return lambda: future.result() if os.getpid() == process else function()


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

    names.triton_key = begin(triton_key)


def stamp(folder: str) -> str:
    """Return a name for the state of all Python and machine code below a folder."""
    found = hashlib.sha256(folder.encode())
    for place, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        for path in [os.path.join(place, name) for name in sorted(files) if name.endswith((".py", ".so"))]:
            state = os.stat(path)
            found.update(f"{path} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}\n".encode())
    return found.hexdigest()


def _have_driver() -> None:
    with suppress(Exception):  # the first launch raises then
        _ = driver.active


start = begin(_have_driver)
"""Waits until Triton's driver is there."""

remember()
