"""Wrong under torch.autocast in float16."""

import torch

EXPECT = "C6"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16 else y
