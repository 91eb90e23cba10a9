"""Launch configurations of the kernels of `ssd`."""

from __future__ import annotations

from refold.ops.torch.tables import Table

FORWARD = Table(
    {"chunk": 64, "block_p": 64, "tile": 8192, "warps": 4, "stages": 2, "state_warps": 4, "slots": 2,
     "state_cost": 0.5, "launch_cost": 4.0, "fused_pass": 4, "hopper": 0, "hopper_stages": 2},
    dtypes={"float32": {"chunk": 32, "block_p": 32, "warps": 4, "stages": 1, "precision": "bf16x6",
                        "narrow": {"chunk": 16, "block_p": 64, "warps": 2}}},
    families={"hopper": {"hopper": 1, "state_cost": 0.4, "launch_cost": 3.0, "fused_pass": 4}},
)  # fmt: skip
"""Keys: chunk (tokens), block_p (channels per program), tile (state elements per program), warps and stages of the
scan, warps of the state pass, slots (programs resident on a multiprocessor), state_cost (time of the state pass over
that of the scan), launch_cost (a launch, in chunks of a scan), fused_pass (up to how many pieces the scan chains the
states itself), hopper (whether the kernels in Gluon may run), hopper_stages (chunks that their scan holds), precision
(of products of float32), narrow (what is different for at most 16 states)."""

BACKWARD = Table(
    {"chunk": 64, "block_p": 64, "block_n": 128, "tile": 8192, "warps": 8, "stages": 2, "state_warps": 4,
     "state_stages": 3, "slots": 1, "memory": 160, "most_memory": 8192, "hopper": 0, "hopper_stages": 2,
     "hopper_block_n": 64, "hopper_state_stages": 3, "hopper_state_registers": 64},
    dtypes={"float32": {"chunk": 32, "block_p": 64, "block_n": 64, "tile": 4096, "state_stages": 2,
                        "precision": "bf16x6"}},
    families={"hopper": {"hopper": 1}},
)  # fmt: skip
"""Keys: as of the forward; block_n (states per program), memory and most_memory (MiB that the states of a block of
heads may take, and may take where fewer heads would not fill the device), slots of the walks over heads, and of the
kernels in Gluon the stages, the states per program and, of the first one, the registers per thread."""

STEP = Table({"tile": 2048, "warps": 4, "few": 256, "few_tile": 1024, "few_warps": 1})
"""Keys: tile (state elements per program) and warps; the same where there are fewer states than ``few``."""

ENTER = Table(
    {"block": 32, "block_p": 32, "tile": 8192, "walkers": 32, "slots": 32, "warps": 4},
    dtypes={"float32": {"precision": "bf16x6"}},
    families={"hopper": {"registers": 128}},
)
"""Keys: as of the forward; block (tokens), walkers (at most, of a head and its block of channels), registers (of a
thread, at most, for 16 bits: four programs share a multiprocessor). Products of 32 rows are not the asynchronous ones,
whose tiles must be copied ahead."""
