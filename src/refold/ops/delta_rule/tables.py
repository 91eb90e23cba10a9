"""Launch configurations of the Triton kernels of the delta rule."""

from __future__ import annotations

from refold.ops.torch.tables import Table

FORWARD = Table(
    {"chunk": 64, "block_p": 64, "tile": 16384, "warps": 4, "stages": 2, "prepare_warps": 4,
     "keyed_warps": 8, "gather_warps": 4, "hopper": 0, "hopper_stages": 3},
    dtypes={"float32": {"chunk": 32, "block_p": 32, "tile": 4096, "stages": 1}},
    families={"hopper": {"hopper": 1}},
)  # fmt: skip
"""Keys: chunk (tokens), block_p (values per program), tile (state elements per program), warps and stages of the chain,
warps of what prepares the chunks, the same for a decay per key, and of what gathers gradients, hopper (whether the
kernel in Gluon may run), hopper_stages (chunks that it holds)."""

STEP = Table({"tile": 8192, "warps": 4, "few": 64, "few_tile": 2048, "few_warps": 1})
"""Keys: tile (state elements per program) and warps; the same where there are fewer states than ``few``."""
