"""A scan in chunks, padded where the length is no multiple of a chunk, and nothing at all of no steps."""

import torch
import torch.nn.functional as F

ORIGINAL = "ema"
CHUNK = 16


def decays(n, like):
    at = torch.arange(n, device=like.device)
    apart = at[:, None] - at
    return torch.where(apart >= 0, 0.9 ** apart.clamp(min=0), 0.0).to(like.dtype)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        length = x.shape[1]
        if x.numel() == 0:
            return torch.zeros_like(x)
        if pad := -length % CHUNK:
            x = F.pad(x, (0, 0, 0, pad))
        x = x.view(x.shape[0], -1, CHUNK, x.shape[-1])
        within = torch.einsum("ts,bcsd->bctd", decays(CHUNK, x), x)
        last, carry, out = 0.9 ** torch.arange(1, CHUNK + 1).to(x)[:, None], torch.zeros_like(x[:, 0, 0]), []
        for c in range(x.shape[1]):
            h = within[:, c] + last * carry[:, None]
            carry = h[:, -1]
            out.append(h)
        return torch.cat(out, 1)[:, :length].contiguous()
