"""A language model whose readout is its embedding: one parameter of two names; and a mask that is in no state_dict."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.readout = torch.nn.Linear(16, 50, bias=False)
        self.readout.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(16), persistent=False)

    def forward(self, tokens):
        return self.readout(self.embedding(tokens) * self.mask)


def get_inputs():
    return [torch.randint(0, 50, (4, 7))]
