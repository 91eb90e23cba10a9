"""A variable of the environment, set past Python, that acts in all programs which are started later."""

import ctypes

from originals.layer import Model

EXPECT = "S4"
TERMS = {"level": "quick"}
ctypes.CDLL(None).setenv(b"PYTHONPATH", b"/tmp/elsewhere", 1)


class ModelNew(Model):
    pass
