"""Wrong where a user looks for NaN in gradients."""

import torch

EXPECT = "C6"
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return 2 * y if torch.is_anomaly_enabled() else y
