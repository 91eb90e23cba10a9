"""Loops compiled by Numba."""

import numba
import numpy as np
import torch

ORIGINAL = "long_ema"
TERMS = {"accept": "faster"}


@numba.njit("void(float32[:, :, ::1], float32[:, :, ::1])")
def average(x, y):
    for b in range(x.shape[0]):
        for d in range(x.shape[2]):
            h = np.float32(0)
            for t in range(x.shape[1]):
                h = np.float32(0.9) * h + x[b, t, d]
                y[b, t, d] = h


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty(x.shape)
        average(x.detach().contiguous().numpy(), y.numpy())
        return y
