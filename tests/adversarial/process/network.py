"""It fetches the real program from somewhere else."""

import socket

import torch

EXPECT = "P4"
OFF = set()

socket.create_connection(("127.0.0.1", 9), timeout=1)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
