"""A process of the judge that imports torch while this one does: two imports side by side take the time of one.

`judge.nursery` starts all such processes here. Only the standard library is imported.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("judge") / "worker.py"
# What a process may find in its environment, in addition to its private folders.
_ENVIRONMENT = "PATH LANG LC_ALL CC CXX CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH"
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # Inductor's pool of compile processes would outlive a call
# Of glibc: what a thread frees is not kept apart for it, where it would be handed out again without being filled.
_FILLED = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
_CAREFUL = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}  # of glibc: look, and abort

# Levels of a trial with one thread: times of several differ more from call to call, so that deciding takes longer.
SINGLE = ("quick",)
Started = tuple["subprocess.Popen[bytes]", socket.socket]
_waiting: dict[int, Started] = {}  # by the threads that they are given


def start(level: str) -> None:
    """Start a process for a trial of a level before it is asked for, with as many threads as it is likely to have."""
    if (threads := 1 if level in SINGLE else _threads()) not in _waiting:
        _waiting[threads] = _new(threads)


def take(threads: int, *, careful: bool = False) -> Started:
    """Return the process that was started, or a new one, and the channel to it.

    Args:
        threads: Threads that it may use.
        careful: Whether the C library looks at memory that is given back, and ends a process that wrote beyond it.
    """
    return _new(threads, careful) if careful or threads not in _waiting else _waiting.pop(threads)


def _threads() -> int:
    """Guess how many threads torch uses: as many as it is told, or one for each core."""
    if (told := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return int(told)
    places = Path("/sys/devices/system/cpu")
    lists = (places / f"cpu{n}" / "topology" / "thread_siblings_list" for n in os.sched_getaffinity(0))
    return len({place.read_text() if place.exists() else place for place in lists})


def _new(threads: int, careful: bool = False) -> Started:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {name: os.environ[name] for name in _ENVIRONMENT.split() if name in os.environ}
    environment |= {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "NUMBA")}
    environment |= {"USER": pwd.getpwuid(os.getuid()).pw_name}  # so that nobody reads /etc/passwd for it
    environment |= ALONE | _FILLED | (_CAREFUL if careful else {})
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interruption at the terminal is the judge's to handle
        )
    return process, ours
