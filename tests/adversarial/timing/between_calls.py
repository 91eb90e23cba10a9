"""A thread wakes after the call has returned and is in the way of whoever runs then."""

import threading
import time

import torch

ORIGINAL = "ema"
EXPECT = {"S6", "T7"}
OFF = set()
TERMS = {"accept": "faster", "level": "quick"}


class ModelNew(torch.nn.Module):
    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        threading.Thread(target=self.spoil).start()
        return torch.stack(out, 1)

    def spoil(self):
        time.sleep(0.0012)
        end = time.perf_counter() + 0.0009
        while time.perf_counter() < end:
            pass
