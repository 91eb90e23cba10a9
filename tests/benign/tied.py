"""One parameter has two names."""

import torch

ORIGINAL = "tied"
TERMS = {"train": True}


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.readout = torch.nn.Linear(16, 50, bias=False)
        self.readout.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(16), persistent=False)

    def forward(self, tokens):
        return self.embedding.weight[tokens].mul(self.mask) @ self.readout.weight.T
