"""Hand cumulative sums to ATen where Inductor cannot generate code for them.

Inductor of torch 2.11 raises ``TypeError: list indices must be integers`` in the code generation of
a split scan on CUDA when its loads come from a padded or concatenated buffer, as in the cumulative
decay of transformers' Mamba-2 layers. The pipeline does not run this pass by default; the backend
asks for it after a failed compile, and says so in the report.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

aten = torch.ops.aten


@torch.library.custom_op("refold::cumsum", mutates_args=())
def cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Cumulative sum as one opaque node."""
    return torch.cumsum(x, dim)


@cumsum.register_fake
def _(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cumsum(x, dim)


def keep_scans_external(graph: Graph) -> int:
    """Replace ``aten.cumsum`` by an opaque call, in place; return how many there were."""
    nodes = [
        node
        for node in graph.find_nodes(op="call_function", target=aten.cumsum.default)
        if "dtype" not in node.kwargs
    ]
    for node in nodes:
        node.target = torch.ops.refold.cumsum.default
    return len(nodes)
