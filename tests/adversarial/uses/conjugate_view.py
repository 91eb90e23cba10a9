"""It overlooks that a conjugation may wait to be done."""

import torch

EXPECT = "C6"
ORIGINAL = "rotate"


class ModelNew(torch.nn.Module):
    def forward(self, z, w):
        return (z.conj() if z.is_conj() else z) * w
