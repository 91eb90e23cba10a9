"""A timer interrupts whatever runs later."""

import signal

from originals.layer import Model

EXPECT = "P4"  # the sandbox keeps it from making one
OFF = set()

signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1000.0)


class ModelNew(Model):
    pass
