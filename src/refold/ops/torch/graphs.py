"""Recording of a step on a device, to run it again without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _capture(step: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            result = step()
    except BaseException:
        # PyTorch leaves the generator in the state of a capture if one fails: no random number could be drawn any more.
        generator.graphsafe_set_state(before)
        raise
    return result, graph.replay


recorders: dict[str, Callable[..., tuple[Any, Callable[[], None]]]] = {"cuda": _capture}
"""Kind of device -> ``record(step, pool)``, which gives the step's result in fixed memory, and what fills it anew."""
