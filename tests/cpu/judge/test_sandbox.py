"""The sandbox: what a candidate cannot do, and could do without it."""

import os
import socket
import time

import pytest

from refold.judge import Nursery
from refold.judge.errors import Misbehaved
from refold.judge.sandbox import enough


@pytest.fixture(scope="module")
def confined():
    with Nursery(threads=1) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def free():
    with Nursery(threads=1, sandboxed=False) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def with_a_gpu():
    """Confined as with a GPU, which is not needed to load a program."""
    with Nursery(threads=1, device="cuda") as nursery:
        yield nursery


@pytest.fixture(scope="module")
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def mailbox(tmp_path):
    """A named socket of this machine, as system services have."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "mailbox"))
        yield server.getsockname()


ATTEMPTS = {
    "write a file": "open({path!r}, 'a').close()",
    "read a file": "open({path!r}).read()",
    "list a folder": "import os; os.listdir({folder!r})",
    "delete a file": "import os; os.unlink({path!r})",
    "connect": "import socket; socket.create_connection(('127.0.0.1', {port}), 5)",
    "send to a named socket": "import socket; socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'!', {mailbox!r})",
    "signal the judge": "import os; os.kill({pid}, 0)",
    "read the judge's environment": "open('/proc/{pid}/environ', 'rb').read()",
    "raise its limits": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (1, 1))",
    "choose its processors": "import os; os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "write a large file": "open('large', 'wb').truncate(3 << 30)",
}


def _try(nursery, code):
    with nursery.program(f"{code}\nModelNew = None\n", "candidate.py", room=4096) as worker:
        worker.load("ModelNew")


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_a_sandbox_keeps_a_candidate_from(attempt, confined, free, listener, mailbox, tmp_path):
    path = tmp_path / "private"
    path.write_text("private")
    places = {"path": str(path), "folder": str(tmp_path), "mailbox": mailbox}
    code = ATTEMPTS[attempt].format(**places, port=listener, pid=os.getpid())
    _try(free, code)
    path.write_text("private")
    with pytest.raises(Misbehaved, match="it raised"):
        _try(confined, code)
    assert path.read_text() == "private"


# What the driver of a GPU does as it starts, with the name it gives to its socket.
STARTS_CUDA = """
import os, socket, threading
inside, done = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (inside.set(), done.wait()))
thread.start()
inside.wait()
with open(f"/proc/self/task/{thread.native_id}/comm", "w") as comm:
    comm.write("driver")
done.set()
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
listener.bind(f"\\0cuda-uvmfd-4026531836-{os.getpid()}")
listener.listen(16)
"""


def test_the_driver_of_a_gpu_can_start(with_a_gpu, confined):
    _try(with_a_gpu, STARTS_CUDA)
    with pytest.raises(Misbehaved, match="it raised"):
        _try(confined, STARTS_CUDA)


@pytest.mark.parametrize(
    "code",
    [
        "socket.socket(socket.AF_INET)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_UNIX).connect({mailbox!r})",
        "open('/proc/sys/kernel/core_pattern', 'a')",
        "open('/proc/{pid}/comm', 'a')",
    ],
)
def test_no_more_is_allowed_with_a_gpu(code, with_a_gpu, mailbox):
    with pytest.raises(Misbehaved, match=r"Permission|not permitted"):
        _try(with_a_gpu, "import socket\n" + code.format(mailbox=mailbox, pid=os.getpid()))


def test_a_sandbox_says_what_it_is_made_of(confined, free):
    with confined.program("ModelNew = None", "candidate.py", room=4096) as worker:
        assert {"landlock", "seccomp", "rlimits"} <= set(worker.active)
        assert enough(worker.active) == ""
    with free.program("ModelNew = None", "candidate.py", room=4096) as worker:
        assert worker.active == []


@pytest.mark.parametrize(
    ("active", "missing"),
    [
        ([], "no Landlock"),
        (["landlock", "rlimits"], "network is open"),
        (["network namespace", "seccomp"], "files are not protected"),
    ],
)
def test_half_a_sandbox_is_none(active, missing):
    assert missing in enough(active)


def test_the_environment_is_not_passed_on(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with Nursery(threads=1) as nursery:
        code = "import os\nassert 'OPENAI_API_KEY' not in os.environ\n"
        _try(nursery, f"{code}assert os.environ['HOME'] == os.path.join(os.getcwd(), 'home')")


def test_what_a_candidate_started_ends_with_it(confined):
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nModelNew = None"
    with confined.program(code, "candidate.py", room=4096) as worker:
        worker.load("ModelNew")
        left = worker.lingering()
        assert len(left) == 1
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{left[0]}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{left[0]}")


def test_private_folders_are_removed(confined):
    with confined.program("ModelNew = None", "candidate.py", room=4096) as worker:
        folder = worker.folder
        assert folder.is_dir()
    assert not folder.exists()
