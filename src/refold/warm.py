"""Compile beforehand what a model of transformers needs, so that the first calls of later processes load it.

The model is made with random weights and as few layers as hold each kind, and put through what users do: training,
prompts, and generation, also by the lean model where there is one. What is compiled stays in the caches of Triton
(``TRITON_CACHE_DIR``) and of refold (``REFOLD_CACHE``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from refold.errors import ArgumentError, CheckpointError, MissingDependency
from refold.integrations.transformers import accelerate
from refold.ops.torch.devices import usable

ROWS = (1, 4)
PROMPTS = (256, 250)
"""Lengths that kernels tell apart: a multiple of 16, and none."""


def warm(what: str, device: str | None = None) -> Iterator[str]:
    """Compile what a model needs, and say what was done.

    Args:
        what: A folder with ``config.json``, a name on the hub, or sizes: ``mamba2:hidden_size=768,num_heads=24``.
        device: Where; None is a GPU if there is one.

    Raises:
        ArgumentError: There is no such model, or transformers cannot make it.
        MissingDependency: transformers is not installed.
    """
    place = usable(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = _few_layers(_config(what))
    given = getattr(config, "dtype", None)
    dtype = given if isinstance(given, torch.dtype) else torch.float32 if place.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    model = _model(config).to(place, dtype)
    accelerate(model)
    vocabulary = config.get_text_config().vocab_size
    for rows in ROWS:
        for length in PROMPTS:
            ids = torch.randint(vocabulary, (rows, length), device=place)
            model.train()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()
            mask = torch.ones_like(ids)
            mask[1:, :3] = 0
            model.eval().generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        yield f"{config.model_type}, {rows} rows, {dtype} on {place}: training, prompts, generation"
    with suppress(CheckpointError):
        yield _lean(config, str(dtype).removeprefix("torch."), place)


def _config(what: str) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingDependency("--warm needs transformers (pip install refold[hf])") from error
    kind, colon, settings = what.partition(":")
    try:
        if not colon or Path(what).exists():
            with suppress(OSError, ValueError):
                return AutoConfig.from_pretrained(what, local_files_only=True)
            _reach_the_hub()
            return AutoConfig.from_pretrained(what)
        pairs = [pair.split("=", 1) for pair in filter(None, settings.split(","))]
        return AutoConfig.for_model(kind, **{name: _value(text) for name, text in pairs})
    except (ValueError, OSError) as error:
        raise ArgumentError(
            f"--warm {what}: {str(error).splitlines()[0]} Give a folder with config.json, a name on the hub, or sizes "
            "such as mamba2:hidden_size=768,num_heads=24,head_dim=64,state_size=128,n_groups=1."
        ) from error


def _reach_the_hub() -> None:
    """Ask the hub once, for it tries again for a minute where there is no network.

    Raises:
        OSError: It does not answer.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # its class depends on the version of the hub's package
        raise OSError(f"It is not on this machine, and {constants.ENDPOINT} does not answer ({error}).") from error


def _value(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _few_layers(config: Any) -> Any:
    """Give the same configuration with as few layers as hold each kind that it has."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    kinds = next((kinds for name in ("layers_block_type", "layer_types") if (kinds := getattr(text, name, None))), None)
    count = 1 if kinds is None else 1 + max(kinds.index(kind) for kind in set(kinds))
    for name, value in vars(text).items():
        if name in ("layers_block_type", "layer_types"):
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    try:
        with torch.device("meta"):
            _model(found)
    except Exception:  # what a family wants of its layers is its own; then all of them are made
        return config
    return found


def _model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ArgumentError(f"--warm: {str(error).splitlines()[0]}") from error


def _lean(config: Any, dtype: str, place: torch.device) -> str:
    """Generate with the lean model.

    Raises:
        CheckpointError: There is none for this configuration.
    """
    from refold.generate.torch import Generator
    from refold.models.checkpoint import random_params
    from refold.models.configs import config_of

    lean = config_of(config.to_dict(), Path(config.model_type))
    generator = Generator(lean, random_params(lean, dtype=dtype), device=place)
    for rows in ROWS:
        for length in PROMPTS:
            prompts = np.ones((rows, length), int).tolist()
            generator.generate(prompts, 4)
    return f"{config.model_type}, the lean model: prompts, generation"
