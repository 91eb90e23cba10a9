"""A variable of the environment decides whether it says what it does."""

import os

import torch
from originals.layer import Model

DEBUG = os.environ.get("LAYER_DEBUG", "0") == "1"


class ModelNew(Model):
    def forward(self, x):
        y = torch.relu(self.linear(x))
        if DEBUG:
            print("mean", y.mean())
        return y
