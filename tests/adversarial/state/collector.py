"""It runs whenever garbage is collected."""

import gc

from originals.layer import Model

EXPECT = "S4"
TERMS = {"level": "quick"}
gc.callbacks.append(lambda phase, info: None)


class ModelNew(Model):
    pass
