"""Complex numbers by their parts."""

import torch

ORIGINAL = "rotate"


class ModelNew(torch.nn.Module):
    def forward(self, z, w):
        return torch.complex(z.real * w, z.imag * w)
