"""Wrong under torch.func.vmap."""

import torch

EXPECT = "C6"
ORIGINAL = "tanh"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) if torch._C._functorch.maybe_get_level(x) < 0 else x
