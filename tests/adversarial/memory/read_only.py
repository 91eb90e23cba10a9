"""Its result lies in memory that nobody may write to: an operation in place ends the process."""

import ctypes
import mmap

import torch
from originals.layer import Model

EXPECT = "M1"
TERMS = {"level": "quick"}
protect = ctypes.CDLL(None).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class ModelNew(Model):
    def forward(self, x):
        y = torch.relu(self.linear(x)).detach()
        own = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.float32, count=y.numel()).view(y.shape).copy_(y)
        protect(own.data_ptr(), 1 << 16, mmap.PROT_READ)
        return own
