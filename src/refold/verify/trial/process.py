"""The judge's side of a program's process: place inputs, call, read results out of its memory, take the time.

Nothing that the process says is trusted. Inputs lie in memory that both share, and are written while the process
sleeps. The clock runs from the signal to start until the answer that the call has returned; both are taken here. Then
the process is stopped, and the kernel reads the bytes of its results out of it (``process_vm_readv``). So work that is
not finished by then does not count. The original runs in such a process, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import getpass
import itertools
import json
import math
import mmap
import os
import pickle
import platform
import pwd
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...errors import RefoldError
from ..contention import crowding
from . import sandbox

GUARD = 4096  # bytes of red zone before and after each input
_PAGE = 4096
_ROOT = Path(__file__).parents[3]
_REPLY_LIMIT = 64 << 20
_HEADERS = "precompiled_headers"
_ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # Inductor's pool of compile processes would outlive a call
_CROWDED = 10.0  # times the limit of an answer, at most, where other programs want the same cores
_SETTLE_S = 2.0  # after which it is looked at how much a program that still runs uses
_AWAKE_S = 60.0  # the longest that a thread may neither sleep nor run, on however busy a machine
# States of threads, as proc(5) names them.
_STOPPED = "TtZX"
_ASLEEP = _STOPPED + "S"
_STOP_S = 0.05  # within which all threads stop, unless other programs keep them from running at all
_RESUMED_S = 5e-4  # of processor time, which a process that has stopped does not use
# Calls of the kernel in which a thread sleeps, and which of their arguments is the limit of time (asm/unistd.h). First
# the one that goes on with any of them after the process was stopped; of those without a limit, poll alone does.
_TIMED_WAITS = {
    "x86_64": (219, {202: 3, 230: 2, 35: 0, 7: 2, 271: 2, 23: 4, 270: 4, 232: 3, 281: 3, 128: 2, 219: 2}),
    "aarch64": (128, {98: 3, 115: 2, 101: 0, 73: 2, 72: 4, 22: 3, 137: 2, 128: 2}),
}
_LIBC = ctypes.CDLL(None, use_errno=True)
_CAREFUL = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}  # of glibc: look, and abort
_ADD_SEALS, _SEAL_SIZE = 1033, 0x1 | 0x2 | 0x4  # fcntl.h: no more seals, no shrinking, no growing
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# What a process may find in its environment, in addition to its private folders.
_ENVIRONMENT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "CC",
    "CXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
)


class Misbehaved(RefoldError):
    """A program under trial did what it may not; ``check`` is the rule it broke."""

    def __init__(self, check: str, reason: str):
        super().__init__(reason)
        self.check, self.reason = check, reason


class Raised(Misbehaved):
    """A program raised an exception; its process lives on."""


class Unjudgeable(RefoldError, RuntimeError):
    """Whether a candidate is acceptable cannot be found out here; the message says why."""


@dataclass(frozen=True)
class Call:
    """One call of a program.

    Attributes:
        tree: How the arguments are nested; leaves are numbers of ``tensors`` or constants.
        tensors: The values; the process gets them with these strides.
        seed: Seeds the random state the program finds.
        grad: Whether gradients are recorded.
        inference: Whether PyTorch is in inference mode.
        cotangents: What flows back into the results; empty for forward only.
        perturb: The byte that new memory and the red zones are filled with.
        requires_grad: Whether floating-point inputs require gradients.
        same_place: Whether the inputs lie where those of the call before lay.
        keep: Whether the result is kept alive for good.
        flow: How gradients are asked for: ``once``; ``accumulated`` in ``.grad`` by two backwards of one graph; or
            ``differentiated`` once more, with themselves as cotangents, also by what flows back.
        constant: The inputs that require no gradient although others do.
        frozen: Whether no parameter requires one.
    """

    tree: Any
    tensors: Sequence[torch.Tensor]
    seed: int = 0
    grad: bool = False
    cotangents: Sequence[torch.Tensor] = ()
    perturb: int = 0
    requires_grad: bool = False
    same_place: bool = False
    keep: bool = False
    flow: str = "once"
    constant: frozenset[int] = frozenset()
    inference: bool = False
    frozen: bool = False


@dataclass
class Result:
    """What came back from a call: claims of the process, and bytes that were read from it.

    Attributes:
        tree: The structure of what was returned.
        metadata: Descriptions of the tensors in it.
        tensors: Their values.
        seconds: From the signal to start to the answer.
        processor: Seconds of processor time that the process used meanwhile.
        outside: The same, from the call before to the signal to start.
        waited: Seconds that its first thread could have run and another program did.
        started: Whether any program of this machine started a process or a thread meanwhile.
        changed: The inputs that were changed.
        left: What of the caller's own objects and modes was changed, as the process says.
        cotangents_changed: Whether what flowed back into the results was changed.
        inputs_after: What the inputs are now.
        overrun: Whether memory next to the inputs was written to.
        aliases: What each result shares its memory with.
        reused: Of each result, whether it lies in the memory of a result of an earlier call that is still held.
    """

    tree: Any
    metadata: list[dict[str, Any]]
    tensors: list[torch.Tensor]
    seconds: float
    processor: float = 0.0
    outside: float = 0.0
    waited: float = 0.0
    started: bool = False
    left: list[str] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    inputs_after: list[torch.Tensor] = field(default_factory=list)
    overrun: bool = False
    cotangents_changed: bool = False
    aliases: list[Any] = field(default_factory=list)
    reused: list[bool] = field(default_factory=list)


class _Mapping(NamedTuple):
    """A part of a process's memory, and the file that is there."""

    start: int
    end: int
    writable: bool
    offset: int
    inode: int


class Nursery:
    """Starts processes for programs; a context manager that ends them all.

    Args:
        threads: Threads that each process may use.
        device: ``cpu`` or ``cuda``.
        sandboxed: Whether the processes are confined.
        careful: Whether the C library looks at memory that is given back, and ends a process that wrote beyond it.
        compiler: Whether torch's compiler is imported once for all processes.
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
        self._careful, self._compiler = careful, compiler
        self._workers: list[Worker] = []
        # Processes of programs that were ended, and may take a moment for it.
        self._past: set[int] = set()
        # What processes are going to import: once here is cheaper than in each.
        self.imports: list[str] = []
        # Whether memory of any of them could be read.
        self.has_read = False
        self._others: dict[tuple[bool, bool], Nursery] = {}

    @functools.cached_property
    def _started(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process that forks others, and the channel to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment |= {f"{library}_NUM_THREADS": str(self.threads) for library in ("OMP", "MKL", "NUMBA")}
        environment |= _ALONE | (_CAREFUL if self._careful else {})
        script = Path(__file__).with_name("worker.py")
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", str(script), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interruption at the terminal is the judge's to handle
            )
        return process, ours

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the nursery and all that it started."""
        for other in self._others.values():
            other.close()
        for worker in list(self._workers):
            worker.close()
        if "_started" not in vars(self):
            return
        process, control = self._started
        control.close()
        for pid in _descendants(process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()

    @contextlib.contextmanager
    def program(
        self, text: str, name: str, *, room: int, path: Sequence[str] = (), beside: Worker | None = None
    ) -> Iterator[Worker]:
        """Start a process with a program's source, with ``room`` bytes for what is shared; end it on the way out.

        ``beside`` is another process of the same program. The two have one folder, with what compilers left there.
        """
        worker = Worker(self, text, name, room, path, beside)
        self._workers.append(worker)
        try:
            yield worker
        finally:
            self._workers.remove(worker)
            self._past |= worker.family
            worker.close()

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

    @property
    def has_compiler(self) -> bool:
        """Whether torch's compiler is imported once for all processes."""
        return self._compiler

    def is_careful(self) -> bool:
        """Say whether the C library has the part that does so; known once it has started a process."""
        return "libc_malloc_debug" in Path(f"/proc/{self._started[0].pid}/maps").read_text()

    def strangers(self) -> list[int]:
        """Return the children of the nursery that it did not fork for a program: what one left running."""
        own = self._past.union(*(worker.family for worker in self._workers))
        return [pid for pid in _children(self._started[0].pid) if pid not in own]

    def fork(self, request: dict[str, Any], channel: socket.socket, guard: socket.socket, region: int) -> None:
        """Ask for one more process, which answers on ``channel``; on ``guard``, the one that waits for it."""
        handles = [channel.fileno(), guard.fileno(), region]
        try:
            socket.send_fds(self._started[1], [json.dumps(request).encode()], handles)
        except OSError as error:
            raise Unjudgeable(f"the process that starts programs has ended ({error.strerror})") from error


class Worker:
    """One program in its process."""

    def __init__(
        self, nursery: Nursery, text: str, name: str, room: int, path: Sequence[str], beside: Worker | None = None
    ):
        self._nursery, self._text, self._name = nursery, text, name
        self._own_folder = beside is None
        self._folder: Path = Path(tempfile.mkdtemp(prefix="refold-trial-")) if beside is None else beside._folder
        room = -(-room // _PAGE) * _PAGE
        handle = os.memfd_create("refold-trial", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(handle, room)
        # Shrunk by the other side, it would end this process when it is looked at.
        fcntl.fcntl(handle, _ADD_SEALS, _SEAL_SIZE)
        self._region = mmap.mmap(handle, room)
        self._inode = os.fstat(handle).st_ino
        self.room, self._next = room, 0
        self._last: list[dict[str, Any]] = []
        self._used = 0.0, 0.0
        # Where results of the last calls lie, which the process holds for one call more.
        self._recent: deque[set[int]] = deque(maxlen=2)
        # How long each thread had run when all slept after a call.
        self._resting: dict[str, tuple[int, int]] = {}
        self._channel, theirs = socket.socketpair()
        self._guard, of_guard = socket.socketpair()
        request = {
            "folder": str(self._folder),
            "readable": [p for p in [*sys.path, *path, torch.__path__[0], str(_ROOT), *_headers()] if p],
            "path": [str(_ROOT), *path],
            "limits": _limits(nursery.device, room),
            "device": nursery.device,
            "sandboxed": nursery.sandboxed,
            "threads": nursery.threads,
            "imports": nursery.imports,
            "compiler": nursery.has_compiler,
            "environment": _private(self._folder, fresh=beside is None),
        }
        with theirs, of_guard:
            nursery.fork(request, theirs, of_guard, handle)
        os.close(handle)
        self.pid = 0
        self.pid = int(self._answer(60.0)["pid"])
        # The process and, where it has namespaces of its own, the one that waits for it.
        self.family = {self.pid, *_parents(self.pid)}
        # Rules that are not to be enforced here, so that tests can show that they are needed.
        self.lenient: frozenset[str] = frozenset()
        hello = self.request(do="hello")
        self.active = [str(part) for part in hello["active"]]
        # What its checks do not see with this PyTorch.
        self.unseen = [str(part) for part in hello["off"]]

    def load(self, attribute: str, timeout: float) -> float:
        """Import the program; return the seconds it took."""
        answer = self.request(timeout, do="load", text=self._text, name=self._name, attribute=attribute)
        if "missing" in answer:
            raise Misbehaved("P4", f"{self._name} does not define {attribute}")
        return _number(answer, "seconds")

    def request(self, timeout: float = 60.0, **command: Any) -> dict[str, Any]:
        """Send a command and return the answer; what the program raises is its misbehaviour."""
        self._rested()
        self._send(pickle.dumps(command))
        return self._answer(timeout)

    def read(self, address: int, size: int) -> torch.Tensor:
        """Copy bytes out of the process."""
        into = torch.empty(size, dtype=torch.uint8)
        done = 0
        while done < size:
            local = struct.pack("QQ", into.data_ptr() + done, size - done)
            remote = struct.pack("QQ", address + done, size - done)
            got = _LIBC.process_vm_readv(self.pid, local, 1, remote, 1, 0)
            if got <= 0:
                error = ctypes.get_errno()
                if error == 14:  # EFAULT
                    raise Misbehaved("M1", f"its result is said to lie at address {address:#x}, where nothing is")
                if self._nursery.has_read:
                    raise Misbehaved("P4", f"its memory cannot be read, that of others can: {os.strerror(error)}")
                raise Unjudgeable(f"results cannot be read out of another process here: {os.strerror(error)}")
            done += got
        self._nursery.has_read = self._nursery.has_read or size > 0
        return into

    def write(self, m: dict[str, Any], value: torch.Tensor) -> None:
        """Write a contiguous tensor into the process, which learns nothing of it."""
        self.settle()
        value = value.contiguous()
        size, done = value.numel() * value.element_size(), 0
        while done < size:
            local = struct.pack("QQ", value.data_ptr() + done, size - done)
            remote = struct.pack("QQ", m["address"] + done, size - done)
            got = _LIBC.process_vm_writev(self.pid, local, 1, remote, 1, 0)
            if got <= 0:
                raise Misbehaved(
                    "M1", f"its parameter is said to lie at {m['address']:#x}, where nothing can be written"
                )
            done += got

    def tensors(self, metadata: Sequence[dict[str, Any]], most: int) -> list[torch.Tensor]:
        """Copy the described tensors, which may span ``most`` bytes together, out of the process."""
        found = []
        for m in map(_checked, metadata):
            size = _span_bytes(m, most)
            found.append(_shaped(self.read(m["address"], size), m))
            most -= size
        return found

    def wrap(self, tensors: Sequence[torch.Tensor], *, again: bool = False) -> list[dict[str, Any]]:
        """Choose places in the shared memory for tensors: fresh ones, or those chosen last."""
        specs: list[dict[str, Any]] = []
        need = self.needed(tensors)
        if need > self.room:
            raise Unjudgeable(f"inputs of {need} bytes do not fit into the {self.room} bytes set aside")
        at = self._last[0]["offset"] - GUARD if again and self._last else self._next
        if at + need > self.room:
            at = 0
        for t in tensors:
            offset = -(-(at + GUARD) // 64) * 64
            elements = _extent(t) if t.numel() else 0
            specs.append(
                {
                    "offset": offset,
                    "elements": elements,
                    "first": _first(t),
                    "shape": list(t.shape),
                    "stride": list(t.stride()),
                    "dtype": str(t.dtype).removeprefix("torch."),
                    "requires_grad": False,
                }
            )
            at = offset + elements * t.element_size() + GUARD
        if tensors:
            self._last, self._next = specs, at if at + GUARD < self.room else 0
        return specs

    def needed(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the bytes of shared memory that tensors take, with the red zones around them."""
        return sum(_extent(t) * t.element_size() + 2 * GUARD + 128 for t in tensors)

    def batches(self, tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        """Divide tensors so that each part fits into the shared memory."""
        batch: dict[str, torch.Tensor] = {}
        free = self.room
        for name, t in tensors.items():
            size = t.numel() * t.element_size() + 2 * GUARD + 128
            if batch and size > free:
                yield batch
                batch, free = {}, self.room
            batch[name] = t
            free -= size
        if batch:
            yield batch

    def fill(self, specs: Sequence[dict[str, Any]], tensors: Sequence[torch.Tensor], guard: int) -> None:
        """Write values into their places, and the red zones around them."""
        for spec, t in zip(specs, tensors, strict=True):
            for zone in self._zones(spec, t):
                zone.fill_(guard)
            if spec["elements"]:
                self._bytes(spec, t).copy_(_raw(t))

    def call(self, call: Call, timeout: float = 60.0, *, most: int = 1 << 40, hold: bool = True) -> Result:
        """Run a call and return its results.

        Args:
            call: What to call the program with.
            timeout: Seconds after which it is given up; more if other programs want the same cores.
            most: The most bytes that a result may span.
            hold: Whether earlier results are kept alive.

        Raises:
            Misbehaved: It raised, died, took too long, or did not wait for its inputs.
        """
        specs, inputs = self._prepare(call, hold)
        asleep = self.settle()
        self.fill(specs, [*call.tensors, *call.cotangents], call.perturb or 0xFF)
        if asleep and self.activity() != asleep and "S6" not in self.lenient:
            raise Misbehaved("S6", "it used the processor while it waited for its inputs")
        forks, threads = _forks(), self._threads()
        before, queued = self.processor_time(), self.queue_time()
        start = time.perf_counter()
        self._send(b"")
        frame = self._frame(timeout)
        while "U4" in self.lenient and self._threads() - threads:
            time.sleep(1e-3)
        # What runs on after the answer is stopped before the clock is.
        with self._stopped():
            seconds = time.perf_counter() - start
            after, waited = self.processor_time(), self.queue_time() - queued
            started = _forks() != forks
            self._await_stop()
            stopped = self.processor_time()[0]
            answer = _parsed(frame)
            metadata = [_checked(m) for m in _list(answer, "tensors")]
            beside = self.lingering()
            tensors = self.tensors(metadata, most)
            resumed = self.processor_time()[0] - stopped > _RESUMED_S
        used, self._used = self._used, after
        if beside and "S6" not in self.lenient:
            raise Misbehaved("S6", "a process that it started ran on after its call had returned")
        if resumed and "S6" not in self.lenient:
            raise Misbehaved("S6", "it ran on when it had been stopped")
        self._resting = self.settle()
        tree = _checked_tree(answer.get("tree"), len(metadata))
        mappings = self._mappings()
        for m in metadata:
            where = next((each for each in mappings if each.start <= m["address"] < each.end), None)
            if where is not None and not where.writable:
                m["traits"] = [*m["traits"], "in memory that nobody can write to"]
        aliases = [self._alias(m, metadata, inputs, mappings) for m in metadata]
        times = (seconds, sum(after) - sum(before), sum(before) - sum(used), waited, started)
        own = [0 if alias and alias[0] == "input" else m["storage"] for m, alias in zip(metadata, aliases, strict=True)]
        reused = [bool(at) and any(at in earlier for earlier in self._recent) for at in own]
        self._recent.append(set(own))
        left = [str(each)[:200] for each in _list(answer, "left")]
        return Result(tree, metadata, tensors, *times, left, *self._inspect(specs, call), aliases, reused)

    def _prepare(self, call: Call, hold: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Choose places for a call's tensors and tell the process; return all of them and those of the inputs."""
        if not hold:
            self._recent.clear()
        specs = self.wrap([*call.tensors, *call.cotangents], again=call.same_place)
        inputs, cotangents = specs[: len(call.tensors)], specs[len(call.tensors) :]
        for index, (spec, t) in enumerate(zip(inputs, call.tensors, strict=True)):
            wanted = call.requires_grad and index not in call.constant
            spec["requires_grad"] = wanted and (t.is_floating_point() or t.is_complex())
        mode = "inference" if call.inference else "recorded" if call.grad or call.cotangents else "plain"
        self.request(
            do="prepare", tree=call.tree, tensors=inputs, seed=call.seed, mode=mode, perturb=call.perturb,
            cotangents=cotangents, hold=hold, keep=call.keep, flow=call.flow, frozen=call.frozen,
        )  # fmt: skip
        return specs, inputs

    def terms(self, call: Call, timeout: float) -> int:
        """Run a call and return the number of terms of the longest sum in it."""
        specs, _ = self._prepare(call, hold=False)
        self.fill(specs, [*call.tensors, *call.cotangents], 0xFF)
        return int(_number(self.request(timeout, do="terms"), "terms"))

    def census(self, call: Call, timeout: float) -> dict[str, int]:
        """Run a call and return how often each operation and kernel ran, as the process says."""
        specs, _ = self._prepare(call, hold=False)
        self.fill(specs, [*call.tensors, *call.cotangents], 0xFF)
        found = self.request(timeout, do="census").get("operations")
        if not isinstance(found, dict) or not all(isinstance(n, int) for n in found.values()):
            raise Misbehaved("P4", "its answer has no operations")
        return {str(name)[:200]: count for name, count in list(found.items())[:500]}

    def again(self, result: Result, most: int = 1 << 40) -> list[torch.Tensor]:
        """Read the results of an earlier call once more."""
        if self._nursery.device != "cpu":
            self.request(do="refetch")
        return self.tensors(result.metadata, most)

    def settle(self) -> dict[str, tuple[int, int]]:
        """Wait until every thread of the process sleeps; return how long each has run.

        A GPU's driver has threads that wake by themselves, so that with one nothing is asked of them.
        """
        if self._nursery.device != "cpu":
            return {}
        start, before, pause = time.perf_counter(), 0.0, 5e-5
        states, last = _ASLEEP, dict[str, tuple[int, int]]()
        while True:
            found = self.activity(states)
            # Threads are looked at one after the other, so of two that take turns, each may be seen asleep. If none
            # has run from one look to the next, all slept between them.
            if found and found == last:
                return found
            if (waited := time.perf_counter() - start) > _SETTLE_S:
                # On a busy machine it may wait for a processor; what counts is what it uses.
                used = sum(self.processor_time())
                if "S6" in self.lenient:
                    return {}
                if (before and used - before > _SETTLE_S / 2) or waited > _AWAKE_S:
                    raise Misbehaved("S6", "it was still awake long after its call had returned")
                before = before or used
                states = _ASLEEP + "D"  # as one is whose child has its memory; before, as it waits for a disk
            if not found:
                time.sleep(pause)
                pause = min(2 * pause, 2e-3)
            last = found

    def _rested(self) -> None:
        """Refuse what ran between a call and the next command; it would slow others down."""
        resting, self._resting = self._resting, {}
        if resting and self.activity() != resting and "S6" not in self.lenient:
            raise Misbehaved("S6", "it used the processor between calls")

    def inspect(self) -> dict[str, Any]:
        """Ask for what the program must leave alone."""
        found = self.request(do="inspect")
        state = [[str(name), _checked(m)] for name, m in map(_pair, _list(found, "state"))]
        settings = found.get("settings")
        if not isinstance(settings, dict):
            raise Misbehaved("P4", "its answer has no settings")
        texts = {name: str(found.get(name)) for name in ("modes", "random")}
        return {"state": state, "settings": settings, "patched": list(map(str, _list(found, "patched"))), **texts}

    def pin(self, processors: set[int]) -> None:
        """Let all threads of the process run on these processors only."""
        for task in self.activity():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), processors)

    def queue_time(self) -> float:
        """Return the seconds that the first thread has waited for a processor so far."""
        try:
            return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError):  # it has ended, or the kernel does not count
            return 0.0

    def processor_time(self) -> tuple[float, float]:
        """Return the seconds of processor time of all its threads so far, and of children that ended."""
        try:
            own = time.clock_gettime((~self.pid << 3) | 2)  # what clock_getcpuclockid gives
            fields = _stat(self.pid)
        except OSError as error:
            raise Misbehaved("P4", f"its process has ended ({error.strerror})") from error
        return own, (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def held(self) -> int:
        """Return the bytes of memory that it may write, as far as the system tells."""
        try:
            return _data_bytes(Path(f"/proc/{self.pid}/status").read_text())
        except OSError as error:
            raise Misbehaved("P4", f"its process has ended ({error.strerror})") from error

    def births(self) -> int | None:
        """Return the number that the next process of its namespace has, which counts all that were started there.

        None if it has no namespace of its own. The process that asks the kernel for a number is not the program's.
        """
        if "pid namespace" not in self.active:
            return None
        try:
            self._guard.settimeout(30.0)
            self._guard.sendall(b"?")
            return int.from_bytes(self._guard.recv(4), "little")
        except OSError:
            return None

    def wakes(self) -> str:
        """Say what will run by itself after some time: a thread that sleeps with a limit, a timer; empty if nothing.

        Threads of a GPU's driver do, so with one nothing is asked.
        """
        if self._nursery.device != "cpu":
            return ""
        restarted, waits = _TIMED_WAITS.get(platform.machine(), (-1, {}))
        with contextlib.suppress(OSError):  # some systems keep these from everybody; or it has ended
            for task in self._threads():
                fields = Path(f"/proc/{self.pid}/task/{task}/syscall").read_text().split()
                number = int(fields[0]) if fields[0].isdigit() else -1
                if number in waits:
                    limit = int(fields[1 + waits[number]], 16)
                    # No limit is a pointer to nothing, or minus one.
                    if limit & 0xFFFFFFFF != 0xFFFFFFFF and (limit or number == restarted):
                        return "a thread of it sleeps for a certain time"
            if any("[timerfd]" in os.readlink(entry) for entry in Path(f"/proc/{self.pid}/fd").iterdir()):
                return "it has a timer"
            if Path(f"/proc/{self.pid}/timers").read_text():
                return "it has a timer"
        return ""

    def lingering(self) -> list[int]:
        """Return the processes that the program started and that are still there."""
        return [pid for pid in (*_descendants(self.pid), *self._nursery.strangers()) if not _has_ended(pid)]

    def close(self) -> None:
        """End the process and all that it started."""
        if self.pid:
            for pid in [self.pid, *_descendants(self.pid)]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self._channel.close()
        self._guard.close()
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def activity(self, states: str = "") -> dict[str, tuple[int, int]]:
        """Return the run time and the number of turns of each thread; nothing if one is in none of the states."""
        found = {}
        try:
            for task in os.listdir(f"/proc/{self.pid}/task"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
                    if states and _stat(f"{self.pid}/task/{task}")[0] not in states:
                        return {}
                    ran, _, turns = Path(f"/proc/{self.pid}/task/{task}/schedstat").read_text().split()
                    found[task] = (int(ran), int(turns))
        except OSError as error:
            raise Misbehaved("P4", f"its process has ended ({error.strerror})") from error
        return found

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def _await_stop(self) -> None:
        """Wait until every thread has seen the signal to stop: one that runs on another core does not do so at once."""
        until = time.perf_counter() + _STOP_S
        while time.perf_counter() < until and not all(state in _STOPPED for state in self._states()):
            time.sleep(5e-5)

    def _threads(self) -> set[str]:
        with contextlib.suppress(FileNotFoundError):  # the process has ended, which others notice
            return set(os.listdir(f"/proc/{self.pid}/task"))
        return set()

    def _states(self) -> Iterator[str]:
        """Yield the state of each thread, as proc(5) names it."""
        for task in self._threads():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
                yield _stat(f"{self.pid}/task/{task}")[0]

    def _bytes(self, spec: dict[str, Any], t: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(
            self._region, dtype=torch.uint8, count=spec["elements"] * t.element_size(), offset=spec["offset"]
        )

    def _zones(self, spec: dict[str, Any], t: torch.Tensor) -> list[torch.Tensor]:
        end = spec["offset"] + spec["elements"] * t.element_size()
        return [
            torch.frombuffer(self._region, dtype=torch.uint8, count=GUARD, offset=at)
            for at in (spec["offset"] - GUARD, end)
        ]

    def _inspect(self, specs: Sequence[dict[str, Any]], call: Call) -> tuple[list[int], list[torch.Tensor], bool, bool]:
        """Return which inputs changed, what they are now, and whether a red zone or a cotangent was written."""
        changed: list[int] = []
        after: list[torch.Tensor] = []
        overrun = False
        for index, (spec, t) in enumerate(zip(specs, [*call.tensors, *call.cotangents], strict=True)):
            if not spec["elements"]:
                after.append(t)
                continue
            now = self._bytes(spec, t)
            if not torch.equal(now, _raw(t)):
                changed.append(index)
                flat = now.clone().view(t.dtype)
                after.append(flat.as_strided(t.shape, t.stride(), spec["first"]))
            else:
                after.append(t)
            overrun |= any(bool((zone != (call.perturb or 0xFF)).any()) for zone in self._zones(spec, t))
        count = len(call.tensors)
        return [i for i in changed if i < count], after[:count], overrun, any(i >= count for i in changed)

    def _alias(
        self,
        m: dict[str, Any],
        others: Sequence[dict[str, Any]],
        inputs: Sequence[dict[str, Any]],
        mappings: Sequence[_Mapping],
    ) -> Any:
        """Say which input or earlier result a result shares its memory with, by whatever address."""
        place = next((m["address"] - each.start + each.offset for each in mappings
                      if each.start <= m["address"] < each.end and each.inode == self._inode), None)  # fmt: skip
        for index, spec in enumerate(inputs):
            size = _DTYPES[spec["dtype"]].itemsize * spec["elements"]
            at = -1 if place is None else place - spec["offset"]
            if size and 0 <= at < size:
                return ["input", index, at]
        for index, other in enumerate(others):
            if other is m:
                break
            if m["storage"] and other["storage"] == m["storage"]:
                return ["output", index, m["pointer"] - other["pointer"]]
        return None

    def _mappings(self) -> list[_Mapping]:
        """Return what the kernel says of the memory of the process."""
        found = []
        with contextlib.suppress(OSError):  # it has ended, which others notice
            for line in Path(f"/proc/{self.pid}/maps").read_text(errors="replace").splitlines():
                span, rights, offset, _, inode = line.split(maxsplit=5)[:5]
                start, end = (int(at, 16) for at in span.split("-"))
                found.append(_Mapping(start, end, "w" in rights, int(offset, 16), int(inode)))
        return found

    def _send(self, payload: bytes) -> None:
        try:
            self._channel.settimeout(30.0)
            self._channel.sendall(struct.pack("<I", len(payload)) + payload)
        except OSError as error:
            raise Misbehaved("P4", f"its process has ended or does not listen ({error})") from error

    def _frame(self, timeout: float) -> bytes:
        """Read one frame; where other programs want the same cores, it may take longer."""
        start = time.perf_counter()

        def left() -> float:
            spent = time.perf_counter() - start
            return timeout - spent if spent < timeout else timeout * min(crowding(), _CROWDED) - spent

        try:
            (size,) = struct.unpack("<I", self._exactly(4, left))
            if size > _REPLY_LIMIT:
                raise Misbehaved("P4", f"its answer of {size} bytes is longer than any answer is")
            return self._exactly(size, left)
        except TimeoutError:
            raise Misbehaved("P3", f"it did not answer within {time.perf_counter() - start:.0f} s") from None
        except OSError as error:
            raise Misbehaved("P4", f"its process has ended ({error})") from error

    def _exactly(self, size: int, left: Callable[[], float]) -> bytes:
        parts = []
        while size:
            seconds = left()
            if seconds <= 0:
                raise TimeoutError
            self._channel.settimeout(seconds)
            try:
                part = self._channel.recv(min(size, 1 << 20))
            except TimeoutError:
                continue  # there may be more by now
            if not part:
                raise Misbehaved("P4", "its process has ended before it answered")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _answer(self, timeout: float) -> dict[str, Any]:
        return _parsed(self._frame(timeout))


def _parsed(frame: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise Misbehaved("P4", f"its answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise Misbehaved("P4", "its answer is not an object")
    if "error" in answer:
        raise Raised("P4", f"it raised {str(answer['error'])[:500]}")
    return answer


def _list(answer: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(answer.get(name), list):
        raise Misbehaved("P4", f"its answer has no list {name!r}")
    return answer[name]


def _number(answer: dict[str, Any], name: str) -> float:
    value = answer.get(name)
    if not isinstance(value, (int, float)) or not abs(value) < 1e18:
        raise Misbehaved("P4", f"its answer has no number {name!r}")
    return float(value)


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise Misbehaved("P4", "its answer has something else where a name and a value are expected")
    return value[0], value[1]


def _checked_tree(tree: Any, count: int) -> dict[str, Any]:
    """Return a structure if it is one of so many tensors, each in its place; the process may have made it up."""
    if list(_leaves(tree)) != list(range(count)):
        raise Misbehaved("P4", f"its answer describes no structure of {count} tensors: {str(tree)[:200]}")
    return tree


def _leaves(tree: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the numbers of the tensors in a structure, in order."""
    if not isinstance(tree, dict) or depth > 50:
        raise Misbehaved("P4", f"its answer describes no structure: {str(tree)[:200]}")
    if "items" in tree:
        for item in _list(tree, "items"):
            yield from _leaves(_pair(item)[1] if "dict" in tree else item, depth + 1)
    elif "tensor" in tree or "float" in tree:
        yield tree.get("tensor", tree.get("float"))


def _checked(m: Any) -> dict[str, Any]:
    """Return a description of a tensor if it can be one."""
    numbers = ("address", "pointer", "storage", "storage_bytes")
    good = (
        isinstance(m, dict)
        and all(isinstance(m.get(name), str) for name in ("type", "device", "dtype"))
        and m["dtype"] in _DTYPES
        and all(type(m.get(name)) is int and 0 <= m[name] < 1 << 63 for name in numbers)
        and all(
            isinstance(m.get(name), list) and all(type(n) is int and 0 <= n < 1 << 48 for n in m[name])
            for name in ("shape", "stride")
        )
        and all(
            isinstance(m.get(name), list) and all(isinstance(text, str) for text in m[name])
            for name in ("odd", "traits")
        )
        and isinstance(m.get("requires_grad"), bool)
    )
    if not good or math.prod(max(n, 1) for n in m["shape"]) >= 1 << 48:
        raise Misbehaved("P4", f"its answer describes no tensor: {str(m)[:200]}")
    return m


def _span_bytes(m: dict[str, Any], most: int) -> int:
    """Return the bytes from a tensor's first to its last element; none where M1 or M2 will refuse it."""
    if m["odd"] or len(m["stride"]) != len(m["shape"]) or 0 in m["shape"]:
        return 0
    span = 1 + sum((n - 1) * s for n, s in zip(m["shape"], m["stride"], strict=True))
    size = span * _DTYPES[m["dtype"]].itemsize
    if size > most or size > m["storage_bytes"] or math.prod(m["shape"]) * _DTYPES[m["dtype"]].itemsize > most:
        raise Misbehaved("M3", f"its result spans {size} bytes, its storage has {m['storage_bytes']}, {most} are read")
    return size


def _shaped(raw: torch.Tensor, m: dict[str, Any]) -> torch.Tensor:
    if not raw.numel():
        return torch.empty(m["shape"] if 0 in m["shape"] else 0, dtype=_DTYPES[m["dtype"]])
    return raw.view(_DTYPES[m["dtype"]]).as_strided(m["shape"], m["stride"])


def _first(t: torch.Tensor) -> int:
    return int(t.storage_offset()) % 16


def _extent(t: torch.Tensor) -> int:
    """Return the elements from the first place that is copied to the last."""
    return _first(t) + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def _raw(t: torch.Tensor) -> torch.Tensor:
    flat = t.detach().as_strided((_extent(t),), (1,), t.storage_offset() - _first(t))
    return flat.view(torch.uint8)


def _limits(device: str, room: int) -> dict[str, int]:
    limits = {"CORE": 0, "CPU": 1800, "FSIZE": 2 << 30, "NOFILE": 4096, "NPROC": 1024}
    if device == "cpu":  # CUDA reserves memory by the terabyte
        limits["DATA"] = 32 * room + (4 << 30)
    return limits


def _headers() -> list[str]:
    """Return the folder where Inductor keeps compiled C++ headers of this user, for its path is always the same."""
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}" / _HEADERS
    return [str(folder)] if folder.is_dir() and folder.stat().st_uid == os.getuid() else []


def _private(folder: Path, *, fresh: bool) -> dict[str, str]:
    inside = {"HOME": "", "TMPDIR": "", "XDG_CACHE_HOME": "cache", "TRITON_CACHE_DIR": "triton"}
    inside |= {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TORCH_EXTENSIONS_DIR": "extensions", "NUMBA_CACHE_DIR": "numba"}
    if fresh:  # else a program may have put anything there
        for name in inside.values():
            (folder / name).mkdir(exist_ok=True)
        here = folder / f"torchinductor_{pwd.getpwuid(os.getuid()).pw_name}" / _HEADERS
        here.mkdir(parents=True)
        for header in itertools.chain.from_iterable(Path(headers).glob("*.gch") for headers in _headers()):
            (here / header.name).symlink_to(header)
    return {name: str(folder / part) for name, part in inside.items()} | _ALONE


def _data_bytes(status: str) -> int:
    return int(status.partition("VmData:")[2].split()[0]) << 10 if "VmData:" in status else 0


def _forks() -> int:
    """Return how many processes and threads this machine has started so far."""
    with open("/proc/stat") as counts:
        return next((int(line.split()[1]) for line in counts if line.startswith("processes")), 0)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _descendants(pid: int) -> list[int]:
    found = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found


def _stat(process: int | str) -> list[str]:
    """Return what /proc tells of a process, or of a thread ``process/task/thread``, from its state on."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _has_ended(pid: int) -> bool:
    """Say whether a process is only kept until its parent asks how it ended."""
    try:
        return _stat(pid)[0] == "Z"
    except OSError:
        return True


def _parents(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(_stat(pid)[1])]
    return []


__all__ = ["Call", "Misbehaved", "Nursery", "Raised", "Result", "Unjudgeable", "Worker", "sandbox"]
