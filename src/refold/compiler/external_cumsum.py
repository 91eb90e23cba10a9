"""Hand cumulative sums to ATen where Inductor cannot generate code for them.

Inductor of torch 2.11 raises ``TypeError: list indices must be integers`` when it generates code for a split scan on
CUDA that reads a padded or concatenated buffer. The cumulative decay of transformers' Mamba-2 layers is such a scan.
The pipeline does not run this pass by default; the backend asks for it after a failed compile, and says so in the
report.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ..ops.torch.nodes import define
from .ir.cost import numel
from .ir.fx import value

aten = torch.ops.aten


def _cumsum(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.cumsum(x, dim, dtype=dtype)


CUMSUM = define("cumsum", "(Tensor x, int dim, ScalarType? dtype=None) -> Tensor", _cumsum, _cumsum)
"""Cumulative sum as one opaque node."""


def keep_scans_external(graph: Graph, level: int) -> int:
    """Replace the smallest ``aten.cumsum`` calls by opaque ones, in place.

    Args:
        graph: The graph.
        level: How many distinct sizes to hand over, smallest first. An opaque scan costs a round trip through memory.
            So large ones stay with Inductor as long as it can compile them.

    Returns:
        How many distinct sizes there are.
    """
    nodes = graph.find_nodes(op="call_function", target=aten.cumsum.default)
    sizes = sorted({numel(value(node)) for node in nodes})
    for node in nodes:
        if numel(value(node)) in sizes[:level]:
            node.target = CUMSUM
    return len(sizes)
