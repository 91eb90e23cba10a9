"""Take a process's rights away before it runs untrusted code (Linux).

Four means, each used if the kernel has it:

- *namespaces*: no network, no view of other processes; all processes of the candidate end with its first one;
- *Landlock*: read the system and Python, write one private folder; no signals or abstract sockets to the outside;
- *seccomp*: no sockets but pairs, no timers, no tracing, no mounts, no kernel loading;
- *rlimits*: memory, processor time, file size.

`enter` applies them to the calling process for good, and returns the names of those that are in force. `enough` says
whether these make a sandbox. Only the standard library is imported, because this file runs in the candidate's process.

CUDA does not start without two things, which a process with a GPU may do: name its threads (write under its own
/proc/self/task), and make a local socket by which other processes could ask for its memory. It may not connect one.

Not done: cgroups (they need a delegation that few users have) and escapes through bugs of the kernel or of a driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

_NEW_NAMESPACES = {"ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000, "network": 0x40000000, "mount": 0x00020000}
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 38, 22, 1, 24

# linux/landlock.h; the access rights that each version of the interface added.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _EXECUTE, _WRITE_FILE, _TRUNCATE, _IOCTL = 1 << 2, 1 << 3, 1 << 0, 1 << 1, 1 << 14, 1 << 15
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11  # bind and connect TCP; abstract sockets and signals

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Calls that no numerical program needs and an attack may. Numbers from asm/unistd.h; of newer ones, all machines' own.
_NEWER = {"io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
          "pidfd_getfd": 438, "mount_setattr": 442}  # fmt: skip
_DENIED = {
    "x86_64": {
        "socket": 41, "ptrace": 101, "pivot_root": 155, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169,
        "init_module": 175, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "sched_setaffinity": 203, "connect": 42,
        "setsockopt": 54, "alarm": 37, "setitimer": 38, "timer_create": 222, "timerfd_create": 283, **_NEWER,
    },
    "aarch64": {
        "socket": 198, "ptrace": 117, "pivot_root": 41, "mount": 40, "umount2": 39, "swapon": 224, "reboot": 142,
        "init_module": 105, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97, "perf_event_open": 241,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273,
        "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282, "sched_setaffinity": 122, "connect": 203,
        "setsockopt": 208, "setitimer": 103, "timer_create": 107, "timerfd_create": 85, **_NEWER,
    },
}  # fmt: skip
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
# By which a wait goes on after the process was stopped. It ends instead (EINTR), so that the call is seen that waits.
RESTART = {"x86_64": 219, "aarch64": 128}

# Programs and libraries, how they are found, the time zone, and what processors there are; nothing of users.
SYSTEM = (
    "/usr", "/lib", "/lib64", "/bin", "/sbin", "/nix/store", "/gnu/store", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/etc/localtime", "/sys/devices/system",
)  # fmt: skip
# Of a /proc that shows other processes, too.
_OWN_PROC = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm/overcommit_memory")
# The driver of a GPU has more of both.
_OF_A_GPU = ("/opt", "/etc", "/sys", "/proc")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def enough(active: Iterable[str]) -> str:
    """Say what is missing for a sandbox; empty if nothing is."""
    active = set(active)
    missing = []
    if "landlock" not in active:
        missing.append("no Landlock (Linux 5.13 or later with landlock in its LSMs), so files are not protected")
    if not active & {"network namespace", "seccomp"}:
        missing.append("neither a network namespace nor seccomp, so the network is open")
    return "; ".join(missing)


def new_namespaces(device: str) -> list[str]:
    """Leave the namespaces of the caller as far as the kernel allows; the next fork is the first of its own.

    CUDA shares memory between processes by their numbers, so with a GPU these stay the caller's.
    """
    user, group = os.getuid(), os.getgid()
    wanted = [kind for kind in _NEW_NAMESPACES if device == "cpu" or kind in ("user", "network", "mount")]
    if _LIBC.unshare(sum(_NEW_NAMESPACES[kind] for kind in wanted)) != 0:
        return []
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{name}").write_text(text)
    return [f"{kind} namespace" for kind in wanted]


def enter(folder: Path, readable: Iterable[str], limits: dict[str, int], device: str, active: list[str]) -> list[str]:
    """Confine this process for good.

    Args:
        folder: The only folder it may write.
        readable: Files and folders that it may read, in addition to the system's.
        limits: Values by the names of rlimits, as ``CPU``; ``DATA`` counts from what the process holds now.
        device: ``cpu`` or ``cuda``.
        active: The namespaces that hold already.

    Returns:
        The names of what holds.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if "pid namespace" in active:
        # Its own /proc, so that no other process is seen; where that is masked, Landlock still keeps their memory.
        _LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        if _LIBC.mount(b"proc", b"/proc", b"proc", 0, None) == 0:
            readable = [*readable, "/proc"]
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        if name == "DATA":  # beside what torch holds already
            value += data_bytes(Path("/proc/self/status").read_text())
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    _drop_capabilities()
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return active
    found = [*active, "rlimits"]
    if _landlock(folder, readable, device):
        found.append("landlock")
    if _seccomp(device):
        found.append("seccomp")
    return found


def data_bytes(status: str) -> int:
    """Return the bytes of memory that a process may write, by its /proc/PID/status. Its name is a line there, too."""
    lines = (line.split() for line in status.splitlines() if line.startswith("VmData:"))
    return next((int(words[1]) << 10 for words in lines), 0)


def _drop_capabilities() -> None:
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    header = struct.pack("Ii", 0x20080522, 0)
    _LIBC.capset(header, struct.pack("6I", *[0] * 6))


def _landlock(folder: Path, readable: Iterable[str], device: str) -> bool:
    version = _LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = next(_FILE_RIGHTS[v] for v in sorted(_FILE_RIGHTS, reverse=True) if v <= version)
    handled = rights & ~_IOCTL if device != "cpu" else rights  # a GPU's driver is spoken to by ioctl alone
    attributes = struct.pack("QQQ", handled, _NETWORK_RIGHTS * (version >= 4), _SCOPES * (version >= 6))
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return False
    read = _READ_FILE | _READ_DIR | _EXECUTE
    allowed = [(str(folder), handled)]
    system = (*SYSTEM, *(_OWN_PROC if device == "cpu" else _OF_A_GPU))
    allowed += [(path, read) for path in [*system, sys.prefix, sys.base_prefix, *readable]]
    devices = list(_DEVICES)
    if device != "cpu":
        devices += [str(p) for p in Path("/dev").glob("nvidia*")] + ["/dev/dri", "/dev/kfd", "/dev/shm"]
        allowed += [("/dev", _READ_DIR), ("/proc/self/task", read | _WRITE_FILE | _TRUNCATE)]
    allowed += [(path, read | _WRITE_FILE | (_TRUNCATE & rights)) for path in devices]
    try:
        for path, access in allowed:
            if not _allow(ruleset, path, access & rights):
                return False
        return _LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> bool:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True  # what does not exist needs no right
    try:
        if not os.path.isdir(path):
            access &= _READ_FILE | _EXECUTE | _WRITE_FILE | _TRUNCATE | _IOCTL
        return _LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access, handle), 0) == 0
    finally:
        os.close(handle)


def _seccomp(device: str) -> bool:
    machine = platform.machine()
    if machine not in _DENIED:
        return False
    code = b"".join(struct.pack("HBBI", *line) for line in _filter(machine, device))
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    return _LIBC.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) == 0


def _filter(machine: str, device: str) -> list[tuple[int, int, int, int]]:
    """Return the program that decides on each call of the kernel: operation, two jumps, and a value."""
    load, equal, at_least, both, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, deny, end, kill = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 4, 0x80000000  # EPERM, EINTR
    first, second = 16, 24  # where the arguments of a call lie

    # Datagrams can be sent to any named socket without connecting, so only streams and packets in order are left.
    kinds = [(load, 0, 0, second), (both, 0, 0, 0xF), (equal, 1, 0, 1), (equal, 0, 1, 5), (give, 0, 0, allow)]
    kinds.append((give, 0, 0, deny))
    rules = {number: [(give, 0, 0, deny)] for number in _DENIED[machine].values()}
    rules[_SOCKETPAIR[machine]] = kinds
    rules[RESTART[machine]] = [(give, 0, 0, end)]
    if device != "cpu":  # whose driver has timers and timed waits of its own
        for name in ("setsockopt", "alarm", "setitimer", "timer_create", "timerfd_create"):
            rules.pop(_DENIED[machine].get(name, -1), None)
        del rules[RESTART[machine]]
        local = [(load, 0, 0, first), (equal, 1, 0, 1), (give, 0, 0, deny)]
        rules[_DENIED[machine]["socket"]] = [*local, *kinds]

    program = [(load, 0, 0, 4), (equal, 1, 0, _AUDIT_ARCH[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, deny)]  # the x32 calls, another door to the same rooms
    for number, rule in rules.items():
        program += [(equal, 0, len(rule), number), *rule]
    return [*program, (give, 0, 0, allow)]
