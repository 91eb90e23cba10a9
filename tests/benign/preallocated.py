"""A new buffer for each call, filled by operations that write into it."""

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        y = torch.empty(*x.shape[:-1], self.linear.out_features, dtype=x.dtype)
        torch.matmul(x, self.linear.weight.detach().T, out=y)
        return y.add_(self.linear.bias.detach()).clamp_min_(0)
