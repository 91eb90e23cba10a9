"""A moving average, one step at a time: slow, and the same in fewer steps."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        return torch.stack(out, 1)


def get_inputs():
    return [torch.randn(2, 600, 4)]
