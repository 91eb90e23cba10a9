"""Operations of torch that do the same, also for large inputs, in training."""

import torch

ORIGINAL = "gated_norm"
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))
        self.linear = torch.nn.Linear(16, 32)

    def forward(self, x):
        value, gate = self.linear(torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)).chunk(2, -1)
        return torch.nn.functional.glu(torch.cat([value, gate * x], -1), -1) * x
