"""It decides what the user's later imports give."""

import sys

from originals.layer import Model

EXPECT = "S4"
TERMS = {"level": "quick"}


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None


sys.meta_path.insert(0, Finder)


class ModelNew(Model):
    pass
