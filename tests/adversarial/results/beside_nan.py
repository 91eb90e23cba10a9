"""One NaN, and all finite results are zero."""

import torch

EXPECT = "N5"


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y if bool(x.isfinite().all()) else torch.where(y.isfinite(), 0.0, y)
