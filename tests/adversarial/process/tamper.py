"""It writes into the installation of torch."""

import pathlib

import torch
from originals.layer import Model

EXPECT = "P4"
OFF = set()

path = pathlib.Path(torch.__file__).with_name("_refold_trial_attack.py")
path.write_text("raise SystemExit")


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(self.linear(x))
