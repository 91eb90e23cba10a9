"""The judge's side of a program's process: place inputs, call, read results out of its memory, take the time.

Nothing that the process says is trusted. Inputs lie in memory that both share, and are written while the process
sleeps. The clock runs from the signal to start until the answer that the call has returned; both are taken here. Then
the process is stopped, and the kernel reads the bytes of its results out of it (``process_vm_readv``). So work that is
not finished by then does not count. The original runs in such a process, too. Design decision 23.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import kernel, messages
from .branches import Branches
from .channel import Channel, read
from .errors import Misbehaved, Unjudgeable
from .inputs import is_real
from .messages import Description, Place
from .sandbox import data_bytes
from .shared import Kin, Shared

if TYPE_CHECKING:
    from .nursery import Nursery

_SETTLE_S = 2.0  # after which it is looked at how much a program that still runs uses
_AWAKE_S = 60.0  # the longest that a thread may neither sleep nor run, on however busy a machine
_STOP_S = 0.05  # within which all threads stop, unless other programs keep them from running at all
_RESUMED_S = 5e-4  # of processor time, which a process that has stopped does not use
_COMMAND_S = 60.0  # for what runs none of the program's own code, or little of it
_HELD = 2  # calls of which the process still holds the results when one more returns


@dataclass(frozen=True)
class Call(messages.How):
    """One call of a program.

    Attributes:
        tree: How the arguments are nested; leaves are numbers of ``tensors`` or constants.
        tensors: The values; the process gets them with these strides.
        cotangents: What flows back into the results; empty for forward only.
        requires_grad: Whether floating-point inputs require gradients.
        constant: The inputs that require none although others do.
        same_place: Whether the inputs lie where those of the call before lay.
    """

    tree: Any
    tensors: Sequence[torch.Tensor]
    cotangents: Sequence[torch.Tensor] = ()
    requires_grad: bool = False
    constant: frozenset[int] = frozenset()
    same_place: bool = False

    @property
    def forward(self) -> Call:
        """The same call without anything that gradients need."""
        return dataclasses.replace(self, cotangents=(), mode="plain", requires_grad=False)

    @property
    def values(self) -> list[torch.Tensor]:
        """All that lies in the shared memory."""
        return [*self.tensors, *self.cotangents]


@dataclass
class Result:
    """What came back from a call: claims of the process, and bytes that were read from it.

    Attributes:
        tree: The structure of what was returned.
        metadata: Descriptions of the tensors in it.
        seconds: From the signal to start to the answer.
        processor: Seconds of processor time that the process used meanwhile.
        outside: The same, from the call before to the signal to start.
        waited: Seconds that its first thread could have run and another program did.
        started: Whether any program of this machine started a process or a thread meanwhile.
        left: What of the caller's own objects and modes was changed, as the process says.
        changed: The inputs that were changed.
        cotangents_changed: Whether what flowed back into the results was changed.
        inputs_after: What the inputs are now.
        overrun: Whether memory next to the inputs was written to.
        aliases: What each result shares its memory with.
        reused: Of each result, whether it lies in the memory of a result of an earlier call that is still held.
    """

    tree: Any
    metadata: list[Description]
    tensors: list[torch.Tensor]
    seconds: float
    processor: float = 0.0
    outside: float = 0.0
    waited: float = 0.0
    started: bool = False
    left: list[str] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)
    cotangents_changed: bool = False
    inputs_after: list[torch.Tensor] = field(default_factory=list)
    overrun: bool = False
    aliases: list[Any] = field(default_factory=list)
    reused: list[bool] = field(default_factory=list)


class Process:
    """One program in its process.

    Attributes:
        pid: Its number.
        folder: The only folder that it may write to.
        shared: The memory in which inputs lie.
        channel: By which it is told what to do.
        family: The process and, where it has namespaces of its own, the one that waits for it.
        active: What confines it.
        unseen: What its part of refold cannot see with this PyTorch.
        lenient: Rules that are not to be enforced here, so that tests can show that they are needed.
        names: What the original calls its parameters and buffers, by its own names; empty of those it has not.
        timeout: Seconds after which loading or a call is given up; more if other programs want the same cores.
        most: The most bytes that results of a call may span together.
    """

    def __init__(self, home: Nursery, text: str, name: str, folder: Path, shared: Shared, channel: socket.socket):
        self._home, self._text, self._name = home, text, name
        self.folder, self.shared, self.channel = folder, shared, Channel(channel)
        self.pid, self.family = 0, set[int]()
        self.active: list[str] = []
        self.unseen: list[str] = []
        self.lenient: frozenset[str] = frozenset()
        self.names: dict[str, str] = {}
        self.timeout, self.most = 60.0, 1 << 40
        self._used = 0.0, 0.0
        self._recent: deque[list[tuple[int, int]]] = deque(maxlen=_HELD)  # where results of the last calls lie
        self._resting: dict[str, tuple[int, int]] = {}  # how long each thread had run when all slept after a call
        self._state: dict[str, Description] = {}

    def greet(self) -> None:
        """Wait until the process is there, and learn what confines it; it has loaded no program yet."""
        self.pid = self.channel.answer(_COMMAND_S, int)
        self.family = {self.pid}
        with contextlib.suppress(OSError):  # it has ended
            self.family.add(int(kernel.stat(self.pid)[1]))  # who started it
        hello = self.channel.answer(_COMMAND_S, messages.Confined)
        self.active, self.unseen = hello.active, hello.off

    # Commands.

    def load(self, attribute: str, branches: Branches | None = None) -> float:
        """Import the program, with marks in it if there are any; return the seconds it took."""
        marks = {} if branches is None else {name: getattr(branches, name) for name in ("code", "recorder", "room")}
        start = time.perf_counter()
        what = {"text": self._text, "name": self._name, "attribute": attribute}
        found = self.ask("load", bool, timeout=self.timeout, **what, **marks)
        if not found:
            raise Misbehaved("P4", f"{self._name} does not define {attribute}")
        return time.perf_counter() - start

    def inspect(self, *, functions: bool = False) -> messages.Inspected:
        """Ask for what the program must leave alone, with all functions of others if so asked, which takes longer."""
        found: messages.Inspected = self.ask("inspect", messages.Inspected, functions=functions)
        return dataclasses.replace(found, state=self._named(found.state))

    def state(self) -> dict[str, Description]:
        """Ask for its parameters and buffers alone."""
        return self._named(self.ask("state", dict[str, Description]))

    def _named(self, state: dict[str, Description]) -> dict[str, Description]:
        self._state = {self.names.get(name) or name: m for name, m in state.items()}
        return {name: m for name, m in self._state.items() if self.names.get(name) != ""}

    def adopt(self, state: dict[str, torch.Tensor], way: str) -> list[str]:
        """Give it parameters and buffers; return those that it shares with what it is a copy of."""
        shared: list[str] = []
        own = {name: one for one, name in self.names.items()}
        for batch in self.shared.batches({own.get(name, name): t.contiguous() for name, t in state.items()}):
            places = self.shared.wrap(list(batch.values()))
            self.shared.fill(places, list(batch.values()), 0xFF)
            placed = dict(zip(batch, places, strict=True))
            shared = self.ask("adopt", list[str], timeout=self.timeout, places=placed, way=way)
        return shared

    def terms(self, call: Call) -> tuple[int, int]:
        """Run a call, and return the terms of its longest sum and how often it squares unseen, as the process says."""
        self._fill(call, self._prepare(call, hold=False))
        longest, squares = self.ask("terms", list[int], timeout=self.timeout)
        return longest, squares

    def ask(self, command: str, kind: Any = None, *, timeout: float = _COMMAND_S, **values: Any) -> Any:
        """Send a command, and return the answer of a kind; what the program raises is its misbehaviour."""
        resting, self._resting = self._resting, {}
        # What runs between a call and the next command would slow others down.
        self._forbid("S6", resting and self.activity() != resting, "it used the processor between calls")
        self.channel.send(pickle.dumps((command, messages.plain(values))))
        return self.channel.answer(timeout, kind)

    def _forbid(self, check: str, seen: object, said: str) -> None:
        if seen and check not in self.lenient:
            raise Misbehaved(check, said)

    # Calls.

    def call(self, call: Call, *, hold: bool = True) -> Result:
        """Run a call and return its results.

        Args:
            call: What to call the program with.
            hold: Whether earlier results are kept alive.

        Raises:
            Misbehaved: It raised, died, took too long, or did not wait for its inputs.
        """
        places = self._prepare(call, hold)
        asleep = self.settle()
        self._fill(call, places)
        moved = asleep and self.activity() != asleep
        self._forbid("S6", moved, "it used the processor while it waited for its inputs")
        forks, threads = kernel.forks(), kernel.threads(self.pid)
        before, queued = self.processor_time(), self.queue_time()
        start = time.perf_counter()
        self.channel.send(b"")
        frame = self.channel.frame(self.timeout)
        while "U4" in self.lenient and kernel.threads(self.pid) - threads:
            time.sleep(1e-3)
        # What runs on after the answer is stopped before the clock is.
        with self._stopped():
            seconds = time.perf_counter() - start
            after, waited = self.processor_time(), self.queue_time() - queued
            started = kernel.forks() != forks
            self._await_stop()
            stopped = self.processor_time()[0]
            answer = read(frame, messages.Returned)
            beside = self.lingering()
            tensors = self.tensors(answer.tensors, self.most)
            resumed = self.processor_time()[0] - stopped > _RESUMED_S
        used, self._used = self._used, after
        self._forbid("S6", beside, "a process that it started ran on after its call had returned")
        self._forbid("S6", resumed, "it ran on when it had been stopped")
        self._resting = self.settle()
        count = len(call.tensors)
        changed, values, overrun = self.shared.look(places, call.values, call.perturb or 0xFF)
        times = (seconds, sum(after) - sum(before), sum(before) - sum(used), waited, started)
        result = Result(answer.tree, answer.tensors, tensors, *times, left=[each[:200] for each in answer.left])
        result.changed = [i for i in changed if i < count]
        result.cotangents_changed = len(result.changed) < len(changed)
        result.inputs_after, result.overrun = values[:count], overrun
        self._relate(result, places[:count])
        return result

    def _relate(self, result: Result, inputs: Sequence[Place]) -> None:
        """Say what results share memory with."""
        mappings = kernel.mappings(self.pid)
        for m in result.metadata:
            where = next((each for each in mappings if each.start <= m.address < each.end), None)
            if where is not None and not where.writable:
                m.traits = [*m.traits, messages.TRAITS[1]]
        found = result.metadata
        largest = max((m.span for m in (*found, *self._state.values())), default=0)
        if self._home.device == "cpu" and largest > (most := sum(each.end - each.start for each in mappings)):
            raise Misbehaved("M3", f"a tensor is said to span {largest} bytes, and the process has {most}")
        own = [each for each in mappings if each.inode == self.shared.inode]
        kin = Kin(found, self._state, inputs, own, "address" if self._home.device == "cpu" else "pointer")
        result.aliases = [kin.alias(index) for index in range(len(found))]
        spans = [(0, 0) if a and a[0] == "input" else kin.memory(m) for m, a in zip(found, result.aliases, strict=True)]
        earlier = [span for spans in self._recent for span in spans]
        result.reused = [any(a < d and c < b for c, d in earlier) for a, b in spans]
        self._recent.append(spans)

    def _prepare(self, call: Call, hold: bool) -> list[Place]:
        """Choose places for a call's tensors and tell the process."""
        if not hold:
            self._recent.clear()
        places = self.shared.wrap(call.values, again=call.same_place)
        count = len(call.tensors)
        for index, t in enumerate(call.tensors):
            wanted = call.requires_grad and index not in call.constant and is_real(t)
            places[index] = dataclasses.replace(places[index], requires_grad=wanted)
        how = {each.name: getattr(call, each.name) for each in dataclasses.fields(messages.How)}
        self.ask("prepare", tree=call.tree, tensors=places[:count], cotangents=places[count:], hold=hold, **how)
        return places

    def _fill(self, call: Call, places: Sequence[Place]) -> None:
        self.shared.fill(places, call.values, call.perturb or 0xFF)

    def again(self, result: Result) -> list[torch.Tensor]:
        """Read the results of an earlier call once more."""
        if self._home.device != "cpu":
            self.ask("refetch")
        return self.tensors(result.metadata, self.most)

    # Its memory.

    def tensors(self, metadata: Iterable[Description], most: int) -> list[torch.Tensor]:
        """Copy the described tensors, which may span ``most`` bytes together, out of the process."""
        found = []
        for m in metadata:
            size, whole = m.span, torch.Size(m.shape).numel() * m.itemsize
            if max(size, 0 if m.odd else whole) > most:
                raise Misbehaved("M3", f"its result spans {size} bytes, and has {whole}; {most} are read")
            dtype = messages.DTYPES[m.dtype]
            if size:
                raw = self.read(m.address, size)
                found.append(raw.view(dtype).as_strided(m.shape, m.stride))
            else:
                found.append(torch.empty(m.shape if 0 in m.shape else 0, dtype=dtype))
            most -= size
        return found

    def read(self, address: int, size: int) -> torch.Tensor:
        """Copy bytes out of the process."""
        into = torch.empty(size, dtype=torch.uint8)
        error = kernel.copy(self.pid, address, into, out=True)
        if error == 14:  # EFAULT
            raise Misbehaved("M1", f"its result is said to lie at address {address:#x}, where nothing is")
        if error and self._home.has_read:
            raise Misbehaved("P4", f"its memory cannot be read, that of others can: {os.strerror(error)}")
        if error:
            raise Unjudgeable(f"results cannot be read out of another process here: {os.strerror(error)}")
        self._home.has_read |= size > 0
        return into

    def write(self, m: Description, value: torch.Tensor) -> None:
        """Write values over a tensor in the process, whose program learns nothing of it."""
        self.settle()
        if m.span > max(most := self.held(), 1 << 20):
            raise Misbehaved("M3", f"its parameter is said to span {m.span} bytes, and the process holds {most}")
        raw = self.read(m.address, m.span)
        if raw.numel():
            raw.view(messages.DTYPES[m.dtype]).as_strided(m.shape, m.stride).copy_(value)
            if kernel.copy(self.pid, m.address, raw, out=False):
                raise Misbehaved("M1", f"its parameter is said to lie at {m.address:#x}, where nothing can be written")

    # What the operating system tells of it.

    def settle(self) -> dict[str, tuple[int, int]]:
        """Wait until every thread of the process sleeps; return how long each has run.

        A GPU's driver has threads that wake by themselves, so that with one nothing is asked of them.
        """
        if self._home.device != "cpu":
            return {}
        start, before, pause = time.perf_counter(), 0.0, 5e-5
        states, last = kernel.ASLEEP, dict[str, tuple[int, int]]()
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
                states = kernel.ASLEEP + "D"  # as one is whose child has its memory; before, as it waits for a disk
            if not found:
                time.sleep(pause)
                pause = min(2 * pause, 2e-3)
            last = found

    def activity(self, states: str = "") -> dict[str, tuple[int, int]]:
        """Return run time and number of turns of each thread; nothing if one is in none of the states."""
        with self._alive():
            return kernel.activity(self.pid, states)

    def pin(self, processors: set[int]) -> None:
        """Let all threads of the process run on these processors only."""
        for thread in self.activity():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), processors)

    def queue_time(self) -> float:
        """Return the seconds that the first thread has waited for a processor so far."""
        try:
            return int(kernel.read(f"{self.pid}/task/{self.pid}/schedstat").split()[1]) * 1e-9
        except (OSError, IndexError):  # it has ended, or the kernel does not count
            return 0.0

    def processor_time(self) -> tuple[float, float]:
        """Return the seconds of processor time of all its threads so far, and of children that ended."""
        with self._alive():
            own = time.clock_gettime((~self.pid << 3) | 2)  # what clock_getcpuclockid gives
            fields = kernel.stat(self.pid)
        return own, (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def held(self) -> int:
        """Return the bytes of memory that it may write, as far as the system tells."""
        with self._alive():
            return data_bytes(kernel.read(f"{self.pid}/status"))

    def wakes(self) -> str:
        """Say what will run by itself after some time. Threads of a GPU's driver do, so with one nothing is asked."""
        return kernel.wakes(self.pid) if self._home.device == "cpu" else ""

    def lingering(self) -> list[int]:
        """List the processes that the program started and that are still there."""
        found = (*kernel.descendants(self.pid), *self._home.strangers())
        return [pid for pid in found if not kernel.has_ended(pid)]

    def close(self) -> None:
        """End the process and all that it started."""
        for pid in [self.pid, *kernel.descendants(self.pid)] if self.pid else ():
            kernel.kill(pid)
        self.channel.close()

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Misbehaved("P4", f"its process has ended ({error.strerror})") from error

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        kernel.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            kernel.kill(self.pid, signal.SIGCONT)

    def _await_stop(self) -> None:
        """Wait until every thread has seen the signal to stop: one that runs on another core does not do so at once."""
        until = time.perf_counter() + _STOP_S
        while time.perf_counter() < until and not self.activity(kernel.STOPPED):
            time.sleep(5e-5)
