"""Wrong for another number of threads."""

import torch

EXPECT = "C6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if torch.get_num_threads() > 2 else y
