"""Wrong for inputs that are parts of one tensor."""

import torch

EXPECT = "C6"
ORIGINAL = "product"


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return a @ b * (1 + (a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()))
