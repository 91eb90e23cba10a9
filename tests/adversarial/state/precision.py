"""It lets all matrix products round more."""

import torch
from originals.layer import Model

EXPECT = "S4"
OFF = set()

torch.set_float32_matmul_precision("medium")


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(self.linear(x))
