"""How long Inductor will take, before it is started: it cannot be interrupted.

An unrolled loop is one long chain, for which it takes more than twice as long when it is twice as long. The estimate is
for one CPU core, from measurements of such loops of 100 to 2400 ATen operations (an average over steps computed with
1 to 20 operations, 5 to 50 s at the upper end): single loops are off by several times.
"""

from __future__ import annotations

from torch.fx import GraphModule

from .ir.captured_loop import captured_loops, unrolled_size

# What a program that is only raced against may take to compile, in seconds.
RIVAL_S = 15.0
# ATen operations that become of one of Dynamo's nodes, without a backward and with one.
_ATEN = {"inference": 1.4, "training": 4.0}


def inductor_seconds(operations: float) -> float:
    """Estimate how long Inductor takes for an unrolled loop of so many ATen operations."""
    return 1.5e-4 * operations**1.7


def unrolled_seconds(gm: GraphModule, mode: str) -> float:
    """Estimate how long Inductor takes for a Dynamo graph whose loops it would have to unroll; 0 if it has none."""
    loops = captured_loops(gm)
    return inductor_seconds(_ATEN[mode] * (unrolled_size(gm) - len(gm.graph.nodes))) if loops else 0.0
