"""Gradients by hand, which say that they have none themselves."""

import torch

ORIGINAL = "cross_entropy"
TERMS = {"train": True, "level": "quick"}


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        logp = logits - logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logp, target)
        return -logp.gather(-1, target[:, None]).mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        logp, target = ctx.saved_tensors
        d = logp.exp()
        d[torch.arange(len(d)), target] -= 1
        return d * (gradient / len(d)), None


class ModelNew(torch.nn.Module):
    def forward(self, logits, target):
        return Loss.apply(logits, target)
