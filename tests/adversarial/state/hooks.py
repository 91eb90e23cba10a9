"""It leaves a hook on a layer."""

import torch

EXPECT = "S8"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        if not self.linear._forward_hooks:
            self.linear.register_forward_hook(lambda *_: None)
        return torch.relu(self.linear(x))
