"""Launch configurations of the Triton kernels of the delta rule."""

from __future__ import annotations

from refold.ops.torch.tables import Table

FORWARD = Table(
    {"chunk": 64, "block_p": 64, "tile": 16384, "warps": 4, "stages": 2, "prepare_warps": 4,
     "keyed_warps": 8, "gather_warps": 4, "hopper": 0, "hopper_stages": 3, "hopper_prepare": 0},
    dtypes={"float32": {"chunk": 32, "block_p": 32, "tile": 4096, "stages": 1}},
    families={"hopper": {"hopper": 1, "hopper_prepare": 1}},
)  # fmt: skip
"""Keys: chunk (tokens), block_p (values per program), tile (state elements per program), warps and stages of the chain,
warps of what prepares the chunks, the same for a decay per key, and of what gathers gradients, hopper (whether the
chain in Gluon may run), hopper_stages (chunks that it holds), hopper_prepare (whether what prepares the chunks may)."""

BACKWARD = Table(
    {"chunk": 64, "block_p": 32, "tile": 16384, "warps": 4, "stages": 2, "prepare_warps": 4, "keyed_warps": 8,
     "pairs_p": 64, "pairs_warps": 8, "pairs_stages": 1, "keyed": 1, "keyed_n": 64,
     "keyed_pairs_warps": 8, "hopper_prepare": 0, "hopper_chains": 0, "hopper_pairs": 0},
    families={"hopper": {"hopper_prepare": 1, "hopper_chains": 1, "hopper_pairs": 1, "keyed_n": 32,
                         "keyed_pairs_warps": 4}},
    dtypes={"float32": {"chunk": 32, "block_p": 32, "tile": 4096, "stages": 1, "pairs_p": 32, "keyed_n": 32}},
)  # fmt: skip
"""Keys: as `FORWARD`, for the walks over chunks in both directions; of what goes over the pairs of tokens of a chunk:
pairs_p (values per step), pairs_stages and pairs_warps; keyed (whether kernels for a decay per key may
run, else the formulas of torch do), keyed_n (keys per program) and keyed_pairs_warps, the same for a decay per key;
hopper_chains and hopper_pairs (whether the kernels in Gluon may run)."""

STEP = Table({"tile": 2048, "warps": 1, "few": 64, "few_tile": 1024, "few_warps": 1})
"""Keys: tile (state elements per program) and warps; the same where there are fewer states than ``few``."""
