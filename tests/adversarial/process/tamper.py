"""It writes into the installation of torch."""

import pathlib

import torch

EXPECT = "P4"
OFF = set()

path = pathlib.Path(torch.__file__).with_name("_refold_trial_attack.py")
path.write_text("raise SystemExit")


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.linear(x))
