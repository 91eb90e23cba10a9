"""How long Inductor will take, before it is started: it cannot be interrupted.

An unrolled loop is one long chain. When the chain is twice as long, Inductor takes more than twice as long. The
estimate is for one CPU core. It was fitted to loops of 100 to 2400 ATen operations, with 1 to 20 operations per step.
The longest took 5 to 50 s, so the estimate for one loop may be wrong by several times.

Other graphs take as long as they have operations that compute: layers of 97 to 772 of them took 0.03 to 0.04 s for
each, on two quiet cores.
"""

from __future__ import annotations

from torch.fx import GraphModule

from .ir.captured_loop import loop_nodes

# What a program that is only raced against may take to compile, in seconds.
RIVAL_S = 15.0
# What the original may take to compile that is no unrolled loop, if the rewritten graph is clearly less work.
ORIGINAL_S = 5.0
# Operations of a forward with its backward, for each of the forward.
WITH_BACKWARD = 3
# ATen operations that become of one of Dynamo's nodes, without a backward and with one.
_ATEN = {"inference": 1.4, "training": 4.0}


def inductor_seconds(operations: float) -> float:
    """Estimate how long Inductor takes for an unrolled loop of so many ATen operations."""
    return 1.5e-4 * operations**1.7


def layer_seconds(operations: float) -> float:
    """Estimate how long Inductor takes for so many operations that compute and are no unrolled loop."""
    return 0.035 * operations


def unrolled_seconds(gm: GraphModule, mode: str, unrolled: int = 0) -> float:
    """Estimate how long Inductor takes for a Dynamo graph whose loops it would have to unroll; 0 if it has none.

    Args:
        gm: The graph.
        mode: ``"inference"`` or ``"training"``.
        unrolled: How many nodes are of loops that Dynamo has unrolled.
    """
    return inductor_seconds(_ATEN[mode] * (loop_nodes(gm) + unrolled))
