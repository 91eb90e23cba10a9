"""A mask that is kept, and made anew where it is too small."""

import torch

ORIGINAL = "masked"


class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("later", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, q, k):
        rows, columns = q.shape[0], k.shape[0]
        if max(rows, columns) > self.later.shape[0]:
            n = max(rows, columns)
            self.later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        return (q @ k.mT).masked_fill(self.later[:rows, :columns], -1e9)
