"""It takes more threads than it was given."""

import torch

EXPECT = "S4"
TERMS = {"threads": 1}

torch.set_num_threads(3)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
