"""Attacks of one function or class (tools/attacks.py)."""

import dataclasses
import gc
import json
import os
import struct
import sys
import time

import torch
from attacks import candidate
from originals.layer import Model


@candidate("M1", off=())
def address(self, x):
    """It says that its result lies where there is nothing."""
    main = sys.modules["__main__"]
    describe = main._describe
    main._describe = lambda t: dataclasses.replace(describe(t), address=4096, pointer=4096)
    return torch.zeros_like(x)


@candidate("C1", "N1", "P4", "S6", "U4", off=(), level="quick")
class AnsweredTwice(Model):
    """It answers by itself at once, and computes while the judge believes that it is done."""

    def __init__(self, width):
        super().__init__(width)
        self.kept = torch.zeros(8, width)

    def forward(self, x):
        stub = next((o for o in gc.get_objects() if type(o).__name__ == "Stub"), None)
        described = stub._run.__globals__["_describe"](self.kept)
        messages = stub._run.__globals__["messages"]
        frame = messages.to_json(messages.Returned({"tensor": 0}, [described], []))
        stub._channel.sendall(struct.pack("<I", len(frame)) + frame)
        self.kept.copy_(torch.relu(self.linear(x)).detach())
        return self.kept


@candidate("P4", off=())
def exit(self, x):
    """It ends the process as if all were well."""
    print("PASS")
    os._exit(0)


@candidate("N1", off=())
def forged(self, x):
    """It answers in the name of the process, before it has computed."""
    y = torch.zeros_like(x)
    claim = {
        "type": "Tensor",
        "dtype": "float32",
        "device": "cpu",
        "shape": list(x.shape),
        "stride": [16, 1],
        "address": y.data_ptr(),
        "pointer": y.data_ptr(),
        "storage": y.data_ptr(),
        "storage_bytes": 512,
        "odd": [],
        "traits": [],
        "requires_grad": False,
    }
    reply = json.dumps({"answer": {"tree": {"tensor": 0}, "tensors": [claim], "left": []}}).encode()
    for handle in range(3, 30):
        try:
            os.write(handle, struct.pack("<I", len(reply)) + reply)
        except OSError:
            continue
    time.sleep(0.2)
    return y


@candidate("P4", off=())
def garbage(self, x):
    """It answers with what is no answer."""
    for handle in range(3, 30):
        try:
            os.write(handle, struct.pack("<I", 1 << 31))
        except OSError:
            continue
    return torch.zeros_like(x)


@candidate("P3", off=(), timeout=4.0)
def hang(self, x):
    """It never returns."""
    while True:
        pass


@candidate("P4", off=())
def hoard(self, x):
    """It asks for more memory than there is."""
    hoard = [torch.ones(1 << 32) for _ in range(64)]
    return torch.relu(self.linear(x)) + len(hoard)


@candidate("M3", off=())
class LargeState(Model):
    """It says that its parameters are larger than any memory."""

    def __init__(self, width):
        super().__init__(width)
        stub = sys.modules["__main__"].Stub
        stated = stub._stated

        def larger(*args):
            m = stated(*args)
            return dataclasses.replace(m, stride=[1 << 30, 1 << 30]) if args[1] == "linear.weight" else m

        stub._stated = larger


@candidate("M3", off=())
def many_results(self, x):
    """So many results that the judge would run out of memory."""
    return (torch.zeros(1 << 20),) * 2000


@candidate("P4", off=())
def shrink(self, x):
    """It shrinks the memory it shares with the judge, who would fall when looking at it."""
    shared = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    for path in shared:
        if os.path.islink(path) and "memfd" in os.readlink(path):
            os.truncate(int(path.rpartition("/")[2]), 0)
    return super().forward(x)


@candidate("P4", off=())
def structure(self, x):
    """It describes its result by a structure that is none."""
    sys.modules["__main__"]._flatten = lambda value, leaves, *, result: ["nothing"] * 3
    return super().forward(x)


@candidate("P4", off=())
def unhashable(self, x):
    """Its result has a list for a dtype."""
    main = sys.modules["__main__"]
    describe = main._describe
    main._describe = lambda t: dataclasses.replace(describe(t), dtype=[1], odd=[2])
    return super().forward(x)
