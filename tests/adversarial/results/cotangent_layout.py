"""Its backward reads what flows back as if it were contiguous."""

import torch

ORIGINAL = "tanh"
EXPECT = "N7"
TERMS = {"train": True}


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        there = g.untyped_storage().nbytes() // g.element_size() - g.storage_offset()
        flat = g.as_strided((min(there, g.numel()),), (1,))
        return torch.nn.functional.pad(flat, (0, y.numel() - flat.numel())).view(y.shape) * (1 - y * y)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return Tanh.apply(x)
