"""How much memory the host has left; for code that must run without PyTorch."""

from pathlib import Path


def host_bytes() -> int:
    """Return the bytes that can still be allocated without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        entries = dict(line.split(":", 1) for line in lines)
        return int(entries["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux: assume a small machine rather than risk its swap
        return 4 << 30
