"""A convolution whose inputs and weights have the channels last; its result is contiguous again."""

import torch

ORIGINAL = "image"
TERMS = {"level": "quick"}


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, self.conv.weight))
        return torch.relu(torch.nn.functional.conv2d(x, weight, self.conv.bias, padding=1)).contiguous()
