"""Gradients in memory of their own, where those of the original are one tensor."""

import torch

ORIGINAL = "added"
TERMS = {"train": True}


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone(), gradient.clone()


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return Add.apply(a, b) if a.shape == b.shape else a + b
