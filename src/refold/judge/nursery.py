"""Starts a process for each program of a trial, and ends them all."""

from __future__ import annotations

import contextlib
import functools
import getpass
import itertools
import json
import os
import pwd
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from .. import early
from . import kernel
from .errors import Misbehaved, Unjudgeable
from .process import Process
from .shared import Shared

_ROOT = Path(__file__).parents[2]
_HEADERS = "precompiled_headers"
# Of a process; one without a GPU, for which CUDA reserves memory by the terabyte, has one of memory, too.
_LIMITS = {"CORE": 0, "CPU": 1800, "FSIZE": 2 << 30, "NOFILE": 4096, "NPROC": 1024}
_REMOVED_S = 60.0  # in which a folder must be removed, however deep it is


class Nursery:
    """Starts processes for programs; a context manager that ends them all.

    Args:
        threads: Threads that each process may use.
        device: ``cpu`` or ``cuda``.
        sandboxed: Whether the processes are confined.
        careful: Whether the C library looks at memory that is given back, and ends a process that wrote beyond it.
        compiler: Whether torch's compiler is imported once for all processes.

    Attributes:
        imports: What processes are going to import: once here is cheaper than in each.
        has_read: Whether memory of any of them could be read.
    """

    def __init__(
        self,
        *,
        threads: int,
        device: str = "cpu",
        sandboxed: bool = True,
        careful: bool = False,
        compiler: bool = False,
    ):
        if sys.platform != "linux":
            raise Unjudgeable(f"the judge reads results out of another process, which needs Linux, not {sys.platform}")
        self.threads, self.device, self.sandboxed = threads, device, sandboxed
        self.imports: list[str] = []
        self.has_read = False
        self._careful, self._compiler = careful, compiler
        self._processes: list[Process] = []
        self._past: set[int] = set()  # processes of programs that were ended, and may take a moment for it
        self._others: dict[tuple[bool, bool], Nursery] = {}

    @functools.cached_property
    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process that forks others, and the channel to it."""
        return early.take(self.threads, careful=self._careful)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the nursery and all that it started."""
        for other in self._others.values():
            other.close()
        for process in list(self._processes):
            process.close()
        if "_started" not in vars(self):
            return
        nursery, control = self._started
        control.close()
        for pid in kernel.descendants(nursery.pid):
            kernel.kill(pid)
        nursery.kill()
        nursery.wait()

    @contextlib.contextmanager
    def program(
        self, text: str, name: str, *, room: int, path: Sequence[str] = (), beside: Process | None = None
    ) -> Iterator[Process]:
        """Start a process with a program's source, with ``room`` bytes for what is shared; end it on the way out.

        ``beside`` is another process of the same program. The two have one folder, with what compilers left there.
        """
        folder = Path(tempfile.mkdtemp(prefix="refold-trial-")) if beside is None else beside.folder
        process = None
        try:
            process = self._born(text, name, room, path, folder, fresh=beside is None)
            yield process
        finally:
            if process is not None:
                self._processes.remove(process)
                self._past |= process.family
                process.close()
            if beside is None:
                _remove(folder)

    def _born(self, text: str, name: str, room: int, path: Sequence[str], folder: Path, *, fresh: bool) -> Process:
        shared = Shared(room)
        channel, theirs = socket.socketpair()
        request = {
            "folder": str(folder),  # the only one that it may write to
            "readable": [*_packages(), *path, torch.__path__[0], str(_ROOT), *_headers()],  # beside the system
            "path": [str(_ROOT), *path],  # from which it may import, beside Python's
            "limits": _LIMITS | ({"DATA": 32 * shared.room + (4 << 30)} if self.device == "cpu" else {}),
            "device": self.device,
            "sandboxed": self.sandboxed,
            "threads": self.threads,
            "imports": self.imports,  # by the nursery, before it forks
            "compiler": self._compiler,  # and whether that imports torch's compiler
            "environment": _private(folder, fresh=fresh),
        }
        with theirs:
            handles = [theirs.fileno(), shared.handle]
            try:
                socket.send_fds(self._started[1], [json.dumps(request).encode()], handles)
            except OSError as error:
                raise Unjudgeable(f"the process that starts programs has ended ({error.strerror})") from error
            finally:
                os.close(shared.handle)
        process = Process(self, text, name, folder, shared, channel)
        self._processes.append(process)
        try:
            process.greet()
        except Misbehaved as error:  # it runs nothing of the program's yet
            raise Unjudgeable(f"a process for a program cannot be started: {error.reason}") from error
        return process

    def other(self, *, careful: bool = False, compiler: bool = False) -> Nursery:
        """Return a nursery like this one that is also careful, or has torch's compiler; closed with this one."""
        key = careful or self._careful, compiler or self._compiler
        if key == (self._careful, self._compiler):
            return self
        if key not in self._others:
            self._others[key] = Nursery(
                threads=self.threads, device=self.device, sandboxed=self.sandboxed, careful=key[0], compiler=key[1]
            )
        self._others[key].imports = self.imports
        return self._others[key]

    def is_careful(self) -> bool:
        """Say whether the C library has the part that does so; known once it has started a process."""
        return "libc_malloc_debug" in kernel.read(f"{self._started[0].pid}/maps")

    def strangers(self) -> list[int]:
        """List the children of the nursery that it did not fork for a program: what one left running."""
        own = self._past.union(*(process.family for process in self._processes))
        return [pid for pid in kernel.children(self._started[0].pid) if pid not in own]


def _packages() -> list[str]:
    """List the folders of installed packages; other folders of sys.path may hold anything."""
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    return [path for path in sys.path if path in installed or Path(path).name in ("site-packages", "dist-packages")]


def _headers() -> list[str]:
    """Return the folder where Inductor keeps compiled C++ headers of this user, for its path is always the same."""
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}" / _HEADERS
    return [str(folder)] if folder.is_dir() and folder.stat().st_uid == os.getuid() else []


def _private(folder: Path, *, fresh: bool) -> dict[str, str]:
    inside = {"HOME": "home", "TMPDIR": "", "XDG_CACHE_HOME": "cache", "TRITON_CACHE_DIR": "triton"}
    inside |= {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TORCH_EXTENSIONS_DIR": "extensions", "NUMBA_CACHE_DIR": "numba"}
    if fresh:  # else a program may have put anything there
        for name in inside.values():
            (folder / name).mkdir(exist_ok=True)
        here = folder / f"torchinductor_{pwd.getpwuid(os.getuid()).pw_name}" / _HEADERS
        here.mkdir(parents=True)
        for header in itertools.chain.from_iterable(Path(headers).glob("*.gch") for headers in _headers()):
            (here / header.name).symlink_to(header)
    return {name: str(folder / part) for name, part in inside.items()} | early.ALONE


def _remove(folder: Path) -> None:
    """Remove a folder. A program may have made it deep, or closed parts of it; another process walks through it."""
    for command in (["rm", "-rf", str(folder)], ["chmod", "-R", "u+rwx", str(folder)], ["rm", "-rf", str(folder)]):
        if folder.exists():
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, stderr=subprocess.DEVNULL, timeout=_REMOVED_S, check=False)
