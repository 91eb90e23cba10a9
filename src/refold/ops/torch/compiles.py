"""Compiling the kernels of a plan together, in threads, before the first of them is launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from inspect import getclosurevars
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from refold.ops.torch.triton_start import start

compiling: ContextVar[bool] = ContextVar("compiling", default=False)
"""Whether launches only compile."""

_reads = Lock()


def compile_together(plan: Callable[..., Any], arrays: Sequence[Any]) -> None:
    """Compile and load the kernels that ``plan`` launches for ``arrays``, in threads, and launch none.

    Triton frees the interpreter's lock in its passes, in LLVM and in ptxas. The plan runs once, and its results, which
    nothing has written, are dropped. A kernel that fails to compile, or to load, does so once more at its launch, which
    raises. Without `triton.AsyncCompileMode`, nothing happens.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return

    def run() -> None:
        compiling.set(True)
        with mode(compiles := _Compiles(), ignore_errors=True):
            try:
                plan(*arrays)
            finally:
                compiles.run()

    start()
    Context().run(run)  # so that this mode and one of the caller do not see each other


class _Compiles(Executor):
    """Compiles that begin together, the longest first, and load what they made on the device of the current thread.

    Triton reads a kernel in Python. Threads that read together would take turns, and the longest would be read last.
    In Python 3.11 they may even fail: all threads share one count of how deep an ``ast`` is. So one reads at a time.
    What launches a kernel is written meanwhile: that needs no more than the kernel's arguments.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, Callable[[], Any], Future[Any]]] = []

    def submit(self, compile: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self.waiting.append((getclosurevars(compile).nonlocals.get("src"), compile, future := Future[Any]()))
        return future

    def run(self) -> None:
        """Compile what was submitted."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        with suppress(AttributeError):
            self.waiting.sort(key=lambda one: -_length(one[0].fn))
        with ThreadPoolExecutor(min(20, os.cpu_count() or 1), "refold") as threads:
            for source, compile, future in self.waiting:
                reads = Event()
                with suppress(AttributeError):  # of another Triton; the next kernel waits for this one's end then
                    source.make_ir = partial(_alone, reads, source.make_ir)
                threads.submit(_load, compile, future, device, reads)
                threads.submit(_write_launch, source)
                reads.wait()


def _alone(begins: Event, read: Callable[..., Any], *args: Any) -> Any:
    with _reads:
        begins.set()
        return read(*args)


def _length(kernel: Any, within: tuple[Any, ...] = ()) -> int:
    """Count the characters of a kernel with the functions that it calls: its compile takes about as long."""
    within, names = (*within, kernel), kernel.fn.__globals__
    called = [names.get(name) for name in kernel.fn.__code__.co_names]  # attributes, too, which may have such a name
    return len(kernel.src) + sum(_length(f, within) for f in called if hasattr(f, "src") and f not in within)


def _load(compile: Callable[[], Any], future: Future[Any], device: int | None, reads: Event) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        kernel = compile()
        # Triton loads a kernel when this is read. If that fails, the kernel is not fit for use, and not returned.
        getattr(kernel, "run", None)
        future.set_result(kernel)
    except BaseException as error:  # whoever waits for the future would wait forever
        future.set_exception(error)
    finally:
        reads.set()  # which it may have had no need to


def _write_launch(source: Any) -> None:
    """Have a kernel's launch written to Triton's cache, where its load finds it."""
    with suppress(Exception):  # what a launch needs is then written, or fails, in the load
        maps: list[Any] = [{} for kind in source.signature.values() if str(kind).startswith("tensordesc")]
        driver.active.launcher_cls(source, SimpleNamespace(tensordesc_meta=maps))
