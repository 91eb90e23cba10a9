"""Launch configurations of the kernels of `selective_scan`. ``slots`` are programs per multiprocessor."""

from __future__ import annotations

from refold.ops.torch.tables import Table

FORWARD = Table({"block_d": 64, "warps": 2, "unroll": 4, "slots": 16})
"""Keys: block_d (channels per program), warps, unroll (tokens), slots."""
FORWARD_LANES = Table({"warps": 2, "states": 8, "slots": 8, "cut": 1024})
"""Keys: warps, states (at most, per lane), slots, cut (tokens from which time may be cut)."""
BACKWARD = Table({"block_d": 32, "warps": 1, "tokens": 4, "slots": 16})
"""Keys: block_d, warps, tokens (from border to border), slots."""
BACKWARD_LANES = Table({"warps": 4, "states": 4, "own": 1, "tokens": 16, "group": 8, "slots": 2})
"""Of the kernel with Gluon layouts: warps, states (per lane), own (channels per lane), tokens (per tile), group (tokens
at a time), slots."""
