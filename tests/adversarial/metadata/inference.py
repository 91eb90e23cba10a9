"""Its result is an inference tensor: what follows it cannot be trained."""

import torch

EXPECT = "M1"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    @torch.inference_mode()
    def forward(self, x):
        return torch.relu(self.linear(x))
