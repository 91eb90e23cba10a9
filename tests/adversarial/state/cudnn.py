"""It lets cuDNN search for faster kernels, for itself only."""

import torch
from originals.layer import Model

EXPECT = "S4"

torch.backends.cudnn.benchmark = True


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(self.linear(x))
