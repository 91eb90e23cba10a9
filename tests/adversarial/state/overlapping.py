"""Two results over one piece of memory, by two storages."""

import numpy as np
import torch

ORIGINAL = "two"
EXPECT = "S2"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        memory = np.cos(x.numpy())
        y = torch.from_numpy(memory)
        y.copy_(torch.cos(x))
        return y, torch.from_numpy(memory.reshape(-1)[64:])
