"""Wrong where its caller looks at each operation."""

import torch

EXPECT = "C6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if torch._C._len_torch_dispatch_stack() else y
