"""Kinds of layers that their class knows, and a class that nobody needs, with a number that is worked out."""

from typing import ClassVar

import torch
from originals.layer import Model

TERMS = {"level": "quick"}


class Kind:
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls):
        Kind.known.append(cls)


class Positive(Kind):
    def __call__(self, y):
        return torch.relu(y)


def start():
    return 3


class Unused:
    first = start()


class ModelNew(Model):
    def forward(self, x):
        return Kind.known[0]()(self.linear(x))
