"""Language models as functions of a configuration, parameters and a state, on refold's operators, for torch.

Every model has the same three functions: ``init_state(config, batch)``, ``forward(config, params, tokens, state)``
for any number of tokens, and ``step_(config, params, token, state)``, which reads one token per row and overwrites the
state. Parameters are those of ``refold.models.checkpoint`` with separate layers: ``params["layers"]`` is a tuple with
one dictionary per layer, whose tensors are views of the stacks.

``forward`` has gradients; ``step_`` has none, and may run inside a CUDA graph.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from refold.models.checkpoint import Arrays, Params
from refold.models.checkpoint import load_checkpoint as _load
from refold.models.configs import Config, HybridConfig
from refold.ops.torch.devices import usable

__all__ = ["load_checkpoint", "model_for", "take_layers_apart", "to_device"]

_STACKS = ("layers", "mixer", "attention")


def model_for(config: Config) -> ModuleType:
    """Return the module that computes a configuration's model."""
    from refold.models.torch import hybrid, stack

    return hybrid if isinstance(config, HybridConfig) else stack


def load_checkpoint(
    model: str | Path, dtype: str | None = None, device: str | torch.device = "cpu"
) -> tuple[Config, Params]:
    """Read a checkpoint tensor by tensor onto a device; see :func:`refold.models.checkpoint.load_checkpoint`."""
    place = usable(device)
    arrays = Arrays("pt", lambda shape, name: torch.empty(shape, dtype=getattr(torch, name), device=place))
    config, params = _load(model, dtype, arrays)
    return config, take_layers_apart(params)


def to_device(params: Any, device: str | torch.device = "cpu") -> Any:
    """Put NumPy or torch parameters on a device, array by array."""
    if isinstance(params, dict):
        return {name: to_device(part, device) for name, part in params.items()}
    if isinstance(params, tuple):
        return tuple(to_device(part, device) for part in params)
    return (params if isinstance(params, Tensor) else _from_numpy(params)).to(device)


def _from_numpy(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def take_layers_apart(params: Params) -> Params:
    """Return parameters in which every stack of layers is a tuple of layers; tuples stay as they are."""

    def split(stack: Any) -> Any:
        if not isinstance(stack, dict):
            return stack
        depth = len(next(iter(stack.values())))
        return tuple({name: array[i] for name, array in stack.items()} for i in range(depth))

    return {name: split(part) if name in _STACKS else part for name, part in params.items()}
