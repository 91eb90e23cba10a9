"""Wrong for short sequences."""

import torch

EXPECT = "N6"
ORIGINAL = "ema"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        y = torch.stack(out, 1)
        return 2 * y if 1 < x.shape[1] < 17 else y
