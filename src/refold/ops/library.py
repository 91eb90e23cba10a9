"""Registers every operator with ``torch.library``: import it before a program that `torch.export` saved is loaded."""

from refold.ops.torch.registry import OPS as OPS
