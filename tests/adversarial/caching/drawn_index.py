"""An index that it keeps is another after it is loaded."""

import torch

EXPECT = "C2"
ORIGINAL = "permuted"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("order", torch.randperm(width))
        self.kept = self.order.tolist()

    def forward(self, x):
        return x[:, self.kept]
