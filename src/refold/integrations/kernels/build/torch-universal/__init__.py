"""What the package ``kernels`` loads from this folder."""

from refold.integrations.kernels import layers

__all__ = ["layers"]
