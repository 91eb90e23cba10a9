"""Parameters made in another order, sums in another order: of equal numbers, the variance is not quite zero."""

import torch

ORIGINAL = "block"
TERMS = {"train": True, "level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = torch.nn.Linear(2 * width, width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        mean = x.flip(-1).mean(-1, keepdim=True)
        apart = x - mean
        squares = apart.square().flip(-1).sum(-1)
        scale = torch.rsqrt(squares / x.shape[-1] + 1e-5)[..., None]
        up = torch.relu(self.up(apart * scale * self.norm.weight + self.norm.bias))
        return self.down(up).add_(x), squares / (x.shape[-1] - 1)
