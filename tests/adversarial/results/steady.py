"""Wrong for a sequence that does not change."""

import torch

EXPECT = "N4"
ORIGINAL = "ema"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        y = torch.stack(out, 1)
        return 2 * y if x.shape[1] > 1 and x.any() and torch.equal(x[:, 0], x[:, 1]) else y
