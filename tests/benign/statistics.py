"""Batch normalisation by hand, with its running statistics."""

import torch

ORIGINAL = "norm"
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        norm = self.norm
        norm.num_batches_tracked.add_(1)
        mean, variance = x.mean(0), x.var(0, correction=0)
        with torch.no_grad():
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(x.var(0), norm.momentum)
        return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias
