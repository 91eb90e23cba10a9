"""What the operating system tells of another process, and its memory: nothing here is said by the process itself."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import signal
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from .sandbox import RESTART

LIBC = ctypes.CDLL(None, use_errno=True)
# States of threads, as proc(5) names them.
STOPPED = "TtZX"
ASLEEP = STOPPED + "S"
_ENDED = "ZX"
# Where a thread may sleep when its program is done with a call (asm/unistd.h). What could wake it is another thread or
# process, or a limit of time: one of milliseconds, which is negative if there is none, or one that is pointed to. In
# any other call, time may wake it.
_MILLISECONDS = {"x86_64": {7: 2, 232: 3, 281: 3}, "aarch64": {22: 3}}  # poll, epoll_wait, epoll_pwait
_POINTERS = {"x86_64": {202: 3, 271: 2, 23: 4, 270: 4, 128: 2}, "aarch64": {98: 3, 73: 2, 72: 4, 137: 2}}  # futex, ...
_UNLIMITED = {"x86_64": {0, 34, 45, 47, 61, 130, 247}, "aarch64": {63, 95, 133, 207, 212, 260}}  # read, wait4, ...
# Of a line of /proc/PID/maps: from where to where, whether it can be written to, the offset in the file, the file.
_MAPPING = re.compile(r"^(\w+)-(\w+) .(.)\S* (\w+) \S+ (\d+)", re.MULTILINE)


def read(name: str) -> str:
    """Read a file of /proc; not by a Path, which takes longer to make than the file to read."""
    with open(f"/proc/{name}", errors="replace") as file:
        return file.read()


class Mapping(NamedTuple):
    """A part of a process's memory, and the file that is there."""

    start: int
    end: int
    writable: bool
    offset: int
    inode: int


def mappings(pid: int) -> list[Mapping]:
    """List the memory of a process; nothing if it has ended, which others notice."""
    with contextlib.suppress(OSError):
        return _mappings(read(f"{pid}/maps"))
    return []


@functools.lru_cache(8)
def _mappings(text: str) -> list[Mapping]:
    parts = _MAPPING.findall(text)
    return [Mapping(int(a, 16), int(b, 16), w == "w", int(at, 16), int(inode)) for a, b, w, at, inode in parts]


def copy(pid: int, address: int, here: torch.Tensor, *, out: bool) -> int:
    """Copy bytes out of a process's memory, or into it; return the number of the error, 0 if there was none."""
    move = LIBC.process_vm_readv if out else LIBC.process_vm_writev
    size, done = here.numel(), 0
    while done < size:
        local = struct.pack("QQ", here.data_ptr() + done, size - done)
        remote = struct.pack("QQ", address + done, size - done)
        got = move(pid, local, 1, remote, 1, 0)
        if got <= 0:
            return ctypes.get_errno() or 14
        done += got
    return 0


def stat(process: int | str) -> list[str]:
    """Read what /proc tells of a process, or of a thread ``process/task/thread``, from its state on."""
    return read(f"{process}/stat").rpartition(")")[2].split()


def threads(pid: int) -> set[str]:
    """List the threads of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return set(os.listdir(f"/proc/{pid}/task"))
    return set()


def states(pid: int) -> Iterator[str]:
    """Yield the state of each thread, as proc(5) names it."""
    for thread in threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            yield stat(f"{pid}/task/{thread}")[0]


def has_ended(pid: int) -> bool:
    """Say whether all threads of a process have ended. The first may end, and others go on."""
    return all(state in _ENDED for state in states(pid))


def children(pid: int) -> list[int]:
    """List the processes that a process has started, as far as they are still there."""
    found: list[int] = []
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            found += map(int, read(f"{pid}/task/{thread}/children").split())
    return found


def descendants(pid: int) -> list[int]:
    """List a process's children, and theirs."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def forks() -> int:
    """Count the processes and threads that this machine has started so far."""
    return next((int(line.split()[1]) for line in read("stat").splitlines() if line.startswith("processes")), 0)


def activity(pid: int, wanted: str = "") -> dict[str, tuple[int, int]]:
    """Return run time and number of turns of each thread; nothing if one is in none of the wanted states.

    A thread is in a state before it has left its processor; the host of a virtual machine can stretch that moment to
    milliseconds, and run time is added at its end. So a thread in a wanted state must also have left its processor as
    often as it was given one. It may have left more often: Linux does not count a turn that follows on being
    interrupted between the change of state and the leaving, which a thread of many turns meets.

    Raises:
        OSError: The process has ended.
    """
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            if wanted and stat(f"{pid}/task/{thread}")[0] not in wanted:
                return {}
            left, ran, turns = _turns(f"{pid}/task/{thread}")
            if wanted and _counts_turns() and left < turns:
                return {}
            found[thread] = (ran, turns)
    return found


def _turns(thread: str) -> tuple[int, int, int]:
    """Return how often a thread has left a processor, its run time, and how often it was given one, in this order."""
    switches = [line.split()[1] for line in read(f"{thread}/status").splitlines() if "voluntary_ctxt_switches:" in line]
    ran, _, turns = read(f"{thread}/schedstat").split()
    return sum(map(int, switches[-2:])), int(ran), int(turns)  # before them stands its name, which it can choose


@functools.cache
def _counts_turns() -> bool:
    """Tell whether this kernel counts turns of a thread, as seen by a new one, none of whose turns was left out yet."""

    def looks() -> bool:
        seen = (_turns(f"self/task/{threading.get_native_id()}") for _ in range(100))
        return any(turns == left + 1 for left, _, turns in seen)  # unless it changes between two files

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(looks).result()


def wakes(pid: int) -> str:
    """Say what of a process will run by itself after some time; empty if nothing, or if the system does not tell."""
    known = platform.machine() in _UNLIMITED
    with contextlib.suppress(OSError):
        for thread in threads(pid) if known else ():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
                fields = read(f"{pid}/task/{thread}/syscall").split()
                if fields and fields[0].isdigit() and not _waits_for_ever(int(fields[0]), fields[1:7]):
                    return f"a thread of it sleeps in a call of the kernel that time may end (number {fields[0]})"
        if any("[timerfd]" in os.readlink(entry) for entry in os.scandir(f"/proc/{pid}/fd")) or read(f"{pid}/timers"):
            return "it has a timer"
    return ""


def _waits_for_ever(number: int, arguments: list[str]) -> bool:
    machine, values = platform.machine(), [int(value, 16) for value in arguments]
    milliseconds = {**_MILLISECONDS[machine], RESTART[machine]: 2}
    if number in milliseconds:
        return values[milliseconds[number]] & 0xFFFFFFFF >= 1 << 31
    if number in _POINTERS[machine]:
        return values[_POINTERS[machine][number]] == 0
    return number in _UNLIMITED[machine]


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """End a process that may have ended, or send it another signal."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)
