"""One line for a user who waits: the first call of a compiled function may take a minute.

All steps are logged with level INFO by ``logging.getLogger("refold")``, which Python does not show unless it is asked
to. A compile that takes longer than `PATIENCE_S` says so once with level WARNING, which Python shows on standard error.
There is at most one such line in `PAUSE_S` seconds, for any number of graphs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("refold")

PATIENCE_S = 5.0
PAUSE_S = 60.0

_last = -PAUSE_S


@contextmanager
def patience() -> Iterator[None]:
    """Say that a compile takes long, when it does."""
    timer = threading.Timer(PATIENCE_S, _say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say() -> None:
    global _last
    if log.isEnabledFor(logging.INFO) or time.monotonic() < _last + PAUSE_S:
        return  # who sees every step needs no such line
    _last = time.monotonic()
    log.warning(
        "refold: this call compiles for more than %.0f s. A program is checked and timed once, and then remembered. "
        'logging.basicConfig(); logging.getLogger("refold").setLevel(logging.INFO) shows each step.',
        PATIENCE_S,
    )
