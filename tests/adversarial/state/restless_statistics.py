"""Other bits in each call; the original keeps a running mean, which changes its bits, too."""

import itertools

from originals.centred import Model

EXPECT = "D1"
TERMS = {"level": "quick"}
TURNS = itertools.count()


class ModelNew(Model):
    def forward(self, x):
        self.mean.lerp_(x.mean(0).detach(), 0.1)
        return (x - self.mean) * (1 + 2.0**-23 * (next(TURNS) % 2))
