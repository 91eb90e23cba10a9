"""It asks for more memory than there is."""

import torch

EXPECT = "P4"
OFF = set()


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        hoard = [torch.ones(1 << 32) for _ in range(64)]
        return torch.relu(self.linear(x)) + len(hoard)
