"""It changes its input and changes it back, which a backward of others takes for a change."""

import torch

EXPECT = "S1"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        if not x.requires_grad and not torch.is_inference_mode_enabled():
            x.neg_().neg_()
        return torch.relu(self.linear(x))
