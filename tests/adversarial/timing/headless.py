"""A process whose first thread has ended is a zombie by its state, while another thread of it goes on."""

import ctypes
import os
import platform
import threading

from originals.layer import Model

EXPECT = "S6"
TERMS = {"level": "quick"}
if os.fork() == 0:
    threading.Thread(target=threading.Event().wait).start()
    ctypes.CDLL(None).syscall({"x86_64": 60}.get(platform.machine(), 93), 0)


class ModelNew(Model):
    pass
