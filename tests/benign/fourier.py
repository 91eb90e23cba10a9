"""A moving average as a convolution in frequencies."""

import torch

ORIGINAL = "ema"


class ModelNew(torch.nn.Module):
    def forward(self, x):
        steps = x.shape[1]
        if not x.numel():
            return x.clone()
        decay = (0.9 ** torch.arange(steps, dtype=torch.float64)).to(x.dtype)
        spectrum = torch.fft.rfft(x, 2 * steps, 1) * torch.fft.rfft(decay, 2 * steps)[:, None]
        return torch.fft.irfft(spectrum, 2 * steps, 1)[:, :steps].contiguous()
