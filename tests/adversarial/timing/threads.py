"""It takes more threads than it was given."""

import torch
from originals.layer import Model

EXPECT = "S4"
TERMS = {"threads": 1}

torch.set_num_threads(3)


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(self.linear(x))
