"""A moving average as one product with the powers of its decay, kept for each length."""

import torch

ORIGINAL = "long_ema"
TERMS = {"accept": "faster"}


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.powers = {}

    def forward(self, x):
        steps = x.shape[1]
        if steps not in self.powers:
            t = torch.arange(steps, dtype=torch.float64)
            self.powers[steps] = (0.9 ** (t[:, None] - t)).tril().float()
        return self.powers[steps] @ x
