"""A hook on the modules of all others."""

import torch

EXPECT = "S4"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.hook = None

    def forward(self, x):
        if self.hook is None:
            self.hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: None)
        return torch.relu(self.linear(x))
