"""A mask that is kept, and made anew where it is too small."""

import torch

ORIGINAL = "masked"


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("later", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)

    def mask(self, rows, columns, device):
        n = max(rows, columns)
        if n > self.later.shape[0] or self.later.device != device:
            self.later = torch.ones(n, n, dtype=torch.bool, device=device).triu(1)
        return self.later[:rows, :columns]

    def forward(self, q, k):
        return (q @ k.mT).masked_fill(self.mask(q.shape[0], k.shape[0], q.device), -1e9)
