"""One token per row on the CPU by refold's lean model, on transformers' own weights and cache.

A layer's own calls cost as much there as half of its arithmetic, and the lean model's products read weights twice as
fast. It takes the place of a call where `graphs.refusal` finds no reason against it. Its first token for a model is
computed by both, and compared: a setting that the lean model does not know shows there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from refold.errors import CheckpointError
from refold.integrations.parts import original, shipped
from refold.models.checkpoint import layout
from refold.models.configs import config_of
from refold.models.torch import model_for

MODELS = ("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM")
"""Classes of transformers with no more than recurrent layers between embedding and head."""
CLOSE = 1e-3
"""Largest difference from the model's own logits, of the largest logit: a thousand roundings of float32."""


def known(model: Any) -> bool:
    """Whether a lean model may compute this one."""
    kind = original(model)
    return kind.__name__ in MODELS and shipped(kind)


class Lean:
    """The lean model of a model; its parameters are views of the model's."""

    def __init__(self, model: Any) -> None:
        self.config = config_of(model.config.to_dict(), Path(type(model).__name__))
        self.model = model_for(self.config)
        self.params = _views(model, list(layout(self.config)))
        self.result: Any = None
        """Makes a result of logits and a cache; None until the first token has been compared."""

    def step_(self, ids: Tensor, held: Any) -> Tensor:
        """Read one token per row ``(b, 1)``, and move a cache on; logits ``(b, 1, vocab)``."""
        states = [(layer.conv_states[0][..., 1:], layer.recurrent_states[0]) for layer in held.layers]
        windows, recurrent = zip(*states, strict=True)  # of a window, transformers' layers never read the first
        state = {"conv": windows, "ssm": recurrent, "length": ids.new_zeros(len(ids))}
        logits: Tensor = self.model.step_(self.config, self.params, ids[:, 0], state)[:, None]
        return logits

    def compare(self, found: Tensor, result: Any, held: Any) -> str | None:
        """Look at the model's own result for a token that was read twice; say why the lean model may not go on."""
        others = dict(result) if isinstance(result, Mapping) else {}
        if [name for name, value in others.items() if value is not None and value is not held] != ["logits"]:
            return "the model returns more than logits and a cache"
        logits = result["logits"]
        if found.shape != logits.shape or not (found - logits).abs().max() <= CLOSE * logits.abs().max():
            return "the lean model gives other logits"
        kind, names = type(result), [name for name, value in result.items() if value is held]
        self.result = lambda logits, held: kind(logits=logits, **dict.fromkeys(names, held))
        return None


def of(model: Any) -> Lean | str:
    """Make the lean model, or say why there is none."""
    tensors = [*model.parameters(), *model.buffers()]
    if {(tensor.dtype, tensor.device.type) for tensor in tensors} != {(torch.float32, "cpu")}:
        return "its weights are not all float32"
    try:
        return Lean(model)
    except (CheckpointError, KeyError) as error:
        return f"there is no lean model of it ({error})"


def refusal(held: Any) -> str | None:
    """Say why a cache cannot be moved on in place."""
    parts = [part for layer in held.layers for part in (layer.conv_states, layer.recurrent_states)]
    tensors = [tensor for part in parts for tensor in part.values()]
    if len(tensors) != 2 * len(held.layers) or not all(type(t) is Tensor and t.dtype == torch.float32 for t in tensors):
        return "the cache holds something else than a window and a state of float32 in each layer"
    if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in tensors):
        return "the cache was made in inference mode"
    return None


def _views(model: nn.Module, entries: list[Any]) -> Any:
    """Give the parameters of a model as its lean model takes them, without copies.

    Raises:
        KeyError: The model has others.
    """
    held = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
    params: dict[str, Any] = {}
    for entry in entries:
        tensor = held.pop(entry.key)
        if tuple(tensor.shape) != entry.shape:
            raise KeyError(f"{entry.key} has the shape {tuple(tensor.shape)}")
        place = params
        if entry.index is not None:
            layers = params.setdefault(entry.path[0], [{} for _ in range(entry.depth)])
            place = layers[entry.index]
        place[entry.path[-1]] = tensor.view(entry.stored)
    if (head := held.pop("lm_head.weight", None)) is not None:
        params["head"] = head  # whether it is the embedding or not
    if held:
        raise KeyError(f"{next(iter(held))} is unknown")
    return params
