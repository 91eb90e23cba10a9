"""The process that imports torch beside the judge is started before, and is the one that the judge uses."""

import subprocess
import sys

from refold import early
from refold.judge import Nursery


def test_the_command_line_starts_it_before_torch_is_imported():
    code = (
        "import sys\nfrom refold import cli, early\n"
        "early.start = lambda level: sys.exit(7 if 'torch' not in sys.modules else 8)\n"
        "cli.app(['verify', 'a.py', 'b.py'], standalone_mode=False)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 7


def test_a_nursery_takes_the_process_that_waits(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(early, "_waiting", {})
    early.start("full")
    early.start("full")
    (waiting,) = early._waiting.values()
    other, careful = early.take(2), early.take(3, careful=True)
    assert other is not waiting
    assert careful is not waiting
    for process, channel in (other, careful):
        channel.close()
        process.kill()
        process.wait()
    with Nursery(threads=3) as nursery:
        assert nursery._started is waiting
    assert waiting[0].poll() is not None
    assert early._waiting == {}
