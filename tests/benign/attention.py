"""Attention in blocks of keys: another layout of gradients, and rounding where all of a gradient vanishes."""

import torch

ORIGINAL = "attention"
TERMS = {"train": True, "level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, q, k, v):
        q, k, v = (x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in (q, k, v))
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        top, weight, total = torch.full_like(q[..., :1], float("-inf")), 0.0, 0.0
        for at in range(0, k.shape[-2], 5):
            scores = (q @ k[..., at : at + 5, :].mT / q.shape[-1] ** 0.5).masked_fill(later[:, at : at + 5], -1e30)
            new = torch.maximum(top, scores.amax(-1, keepdim=True)).detach()
            old, part = (top - new).exp(), (scores - new).exp()
            top, weight = new, weight * old + part.sum(-1, keepdim=True)
            total = total * old + part @ v[..., at : at + 5, :]
        return (total / weight).contiguous()
