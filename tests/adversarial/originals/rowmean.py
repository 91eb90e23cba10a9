"""The mean of a row in each of its places."""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x.mean(-1, keepdim=True).expand(x.shape).contiguous()


def get_inputs():
    return [torch.randn(6, 10)]
