"""It lowers the priority of what runs in its process later."""

import os

from originals.layer import Model

EXPECT = "S4"

os.nice(5)


class ModelNew(Model):
    pass
