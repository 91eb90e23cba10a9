"""A class of its own by the name of Python's, which gives others than it lists."""

import torch

EXPECT = "M2"
ORIGINAL = "ordered_dict"


class OrderedDict(dict):
    def __getitem__(self, name):
        return torch.zeros(())


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return OrderedDict(y=torch.cos(x))
