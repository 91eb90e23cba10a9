"""The judge's end of the channel to a process: frames of bytes, each within a limit of time."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from ..verify.contention import crowding
from . import messages
from .errors import Misbehaved, Raised, Unjudgeable

_REPLY_LIMIT = 64 << 20
_CROWDED = 10.0  # times the limit of an answer, at most, where other programs want the same cores
_SENT_S = 30.0  # in which a process takes what it is sent


class Channel:
    """Sends commands and reads answers.

    Attributes:
        until: When the trial must have ended, by the clock of `time.perf_counter`.
    """

    def __init__(self, channel: socket.socket):
        self._channel, self.until = channel, float("inf")

    def send(self, payload: bytes) -> None:
        """Write one frame: four bytes of length, then the payload."""
        try:
            self._channel.settimeout(_SENT_S)
            self._channel.sendall(struct.pack("<I", len(payload)) + payload)
        except OSError as error:
            raise Misbehaved("P4", f"its process has ended or does not listen ({error})") from error

    def answer(self, timeout: float, kind: Any) -> Any:
        """Read one answer of a kind; what the program raised is raised here."""
        return read(self.frame(timeout), kind)

    def frame(self, timeout: float) -> bytes:
        """Read one frame; where other programs want the same cores, it may take longer."""
        start = time.perf_counter()
        try:
            (size,) = struct.unpack("<I", self._exactly(4, start, timeout))
            if size > _REPLY_LIMIT:
                raise Misbehaved("P4", f"its answer of {size} bytes is longer than any answer is")
            return self._exactly(size, start, timeout)
        except TimeoutError:
            if time.perf_counter() >= self.until:
                raise Unjudgeable("the time of the trial as a whole is over") from None
            raise Misbehaved("P3", f"it did not answer within {time.perf_counter() - start:.0f} s") from None
        except OSError as error:
            raise Misbehaved("P4", f"its process has ended ({error})") from error

    def close(self) -> None:
        """Close it."""
        self._channel.close()

    def _exactly(self, size: int, start: float, timeout: float) -> bytes:
        parts = []
        while size:
            spent = time.perf_counter() - start
            seconds = timeout - spent if spent < timeout else timeout * min(crowding(), _CROWDED) - spent
            seconds = min(seconds, self.until - time.perf_counter())
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


def read(frame: bytes, kind: Any) -> Any:
    """Read a frame as an answer of a kind; raises `Misbehaved` if it is none, or if the program raised."""
    try:
        answer = messages.read(frame, kind)
    except messages.Malformed as error:
        raise Misbehaved("P4", f"its answer is none: {error}") from None
    if isinstance(answer, messages.Failure):
        raise Raised(answer)
    return answer
