"""Lean models, in PyTorch and in JAX, equal transformers': hidden states to rounding, greedy tokens exactly."""

import dataclasses
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refold.errors import CheckpointError
from refold.generate.sampling import Sampling
from refold.generate.torch import Generator
from refold.models.checkpoint import load_checkpoint
from refold.models.configs import _READERS, MambaConfig
from support.checkpoints import NAMES, VOCAB, prompt, rounding_bound, saved
from support.families import EVERY

pytestmark = pytest.mark.rows(12)

STEPS = 64
BIASED = ("mamba-untied", "mamba2-groups", "bamba-biases", "granite-odd")


def numbers(array: Any) -> np.ndarray:
    return np.asarray(array.detach().double() if isinstance(array, torch.Tensor) else array, np.float64)


@pytest.fixture(params=["torch", "jax"])
def framework(request) -> str:
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture
def generator_of(framework: str) -> Callable[[Path], Any]:
    """Return a function that reads the generator of a checkpoint."""
    options = {"device": "cpu"} if framework == "torch" else {}
    made = import_module(f"refold.generate.{framework}").Generator
    return lambda directory: made.from_checkpoint(directory, **options)


@pytest.fixture
def computed(framework: str) -> Callable[..., np.ndarray]:
    """Return a function that computes what the model of a checkpoint makes of token ids."""
    models = import_module(f"refold.models.{framework}")
    array = torch.from_numpy if framework == "torch" else import_module("jax.numpy").asarray

    def forward(directory: Path, ids: np.ndarray, kind: str, **options: Any) -> np.ndarray:
        config, params = load_checkpoint(directory)
        options = {} if isinstance(config, MambaConfig) else options
        with torch.no_grad():
            placed = models.to_device(params)
            placed = models.take_layers_apart(placed) if framework == "torch" else placed
            return numbers(models.model_for(config).forward(config, placed, array(ids), kind=kind, **options)[0])

    return forward


def reference_tokens(model, ids: torch.Tensor, mask: torch.Tensor | None = None, **keywords) -> list[list[int]]:
    keywords = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | keywords
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, **keywords)[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [5, 75])  # within a chunk, and over several
def test_hidden_states(name: str, length: int, computed) -> None:
    model, directory = saved(name)
    ids = prompt(length, rows=2)
    found = [computed(directory, ids, kind, chunk_size=16) for kind in ("hidden", "all")]
    backbone, tokens = model.model if hasattr(model, "model") else model.backbone, torch.tensor(ids)
    with torch.no_grad():
        reference = backbone(tokens).last_hidden_state, model(tokens).logits
        model.double()
        exact = backbone(tokens).last_hidden_state, model(tokens).logits
        model.float()
    for own, near, right in zip(found, reference, exact, strict=True):
        assert np.abs(own - right.numpy()).max() <= rounding_bound(near.numpy(), right.numpy())


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str, generator_of) -> None:
    model, directory = saved(name)
    ids = torch.tensor(prompt(80, seed=80))
    tokens = generator_of(directory).generate(ids.tolist(), STEPS)
    assert tokens == reference_tokens(model, ids)
    assert len(set(tokens[0])) > 4  # a model that repeats one token would show nothing


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_of_rows(name: str, generator_of) -> None:
    """Four of different lengths, which transformers pads on the left.

    Where `in_proj` has a bias, transformers' padding is not silent: the bias of the padded tokens enters the
    convolution of the first real ones. There its rows are read one at a time.
    """
    model, directory = saved(name)
    rows, mask = torch.tensor(prompt(18, rows=4, seed=3)), torch.ones(4, 18, dtype=torch.long)
    for row, padding in enumerate((0, 3, 11, 17)):
        mask[row, :padding] = 0
    prompts = [row[keep.bool()].tolist() for row, keep in zip(rows, mask, strict=True)]
    if name in BIASED:
        expected = [reference_tokens(model, torch.tensor([one]), max_new_tokens=16)[0] for one in prompts]
    else:
        expected = reference_tokens(model, rows, mask, max_new_tokens=16)
    assert generator_of(directory).generate(prompts, 16) == expected


@pytest.mark.parametrize("name", ["mamba", "mamba2-groups", "granite-moe-rope"])
def test_repetition_penalty(name: str, generator_of) -> None:
    model, directory = saved(name)
    ids = torch.tensor(prompt(9, seed=2))
    found = generator_of(directory).generate(ids.tolist(), 24, sampling=Sampling(repetition_penalty=1.3))
    assert found == reference_tokens(model, ids, max_new_tokens=24, repetition_penalty=1.3)
    assert found != reference_tokens(model, ids, max_new_tokens=24)


@pytest.mark.parametrize("length", [7, 80])
def test_step_limits_hold_when_decoding_too(length: int, generator_of) -> None:
    """transformers clips step sizes when it reads many tokens, not when it reads one; without its cache it always does.

    Clipped always, the state after some tokens does not depend on how many were read at a time.
    """
    model, directory = saved("mamba2-limited")
    generator = generator_of(directory)
    ids = torch.tensor(prompt(length, seed=length))
    tokens = generator.generate(ids.tolist(), 24)
    assert tokens == reference_tokens(model, ids, max_new_tokens=24, use_cache=False)
    free = dataclasses.replace(generator.config.mixer, dt_limit=(0.0, float("inf")))
    free = type(generator)(dataclasses.replace(generator.config, mixer=free), generator.params)
    assert free.generate(ids.tolist(), 24) != tokens  # the limits cut in


@pytest.mark.parametrize("name", ["mamba", "mamba2-groups", "granite"])
def test_bfloat16_follows_float64(name: str, computed) -> None:
    """The bfloat16 model is no further from float64 than transformers' in bfloat16 is, twice over."""
    model, directory = saved(name, "bfloat16")
    assert load_checkpoint(directory)[1]["embedding"].dtype.name == "bfloat16"
    ids = prompt(40, rows=2)
    logits = computed(directory, ids, "all")
    with torch.no_grad():
        reference = numbers(model(torch.tensor(ids)).logits)
        exact = numbers(model.double()(torch.tensor(ids)).logits)
        model.to(torch.bfloat16)
    assert np.linalg.norm(logits - exact) <= 2 * np.linalg.norm(reference - exact)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("mamba", "float32"), ("mamba2", "float32"), ("mamba2", "bfloat16"), ("granite-moe-rope", "float32")],
)
def test_files_of_every_kind_give_the_same_logits(name: str, dtype: str, generator_of, tmp_path: Path) -> None:
    """One file, several, and state-spaces' own with its padded vocabulary."""
    model, whole = saved(name, dtype)
    _, pieces = saved(name, dtype, shard="40KB")
    assert (pieces / "model.safetensors.index.json").exists()
    ids, kinds = prompt(9).tolist(), [whole, pieces]
    if name in ("mamba", "mamba2"):
        state = {k.replace("embeddings.", "embedding."): v for k, v in model.state_dict().items()}
        rows = -(-VOCAB // 16) * 16
        for key in ("backbone.embedding.weight", "lm_head.weight"):
            state[key] = torch.nn.functional.pad(state[key], (0, 0, 0, rows - VOCAB), value=-1.0)
        torch.save(state, tmp_path / "pytorch_model.bin")
        ssm = {"layer": "Mamba2", "headdim": 16, "d_state": 12} if name == "mamba2" else {"d_state": 8}
        settings = {
            "d_model": 48, "n_layer": 3, "vocab_size": VOCAB, "rms_norm": True, "tie_embeddings": True,
            "ssm_cfg": ssm, "pad_vocab_size_multiple": 16,
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(settings))
        kinds.append(tmp_path)
    one, *others = (numbers(generator_of(path).read(ids).logits) for path in kinds)
    for other in others:  # the last product is blocked by its rows
        assert np.abs(one - other[:, :VOCAB]).max() <= 8 * 2**-23 * np.abs(one).max()


@pytest.mark.parametrize("family", [name for name in EVERY if "-" not in name and name not in _READERS])
def test_a_family_without_a_model_says_what_to_do(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(CheckpointError, match=r"unknown architecture.*refold\.accelerate\(model\)"):
        Generator.from_checkpoint(tmp_path)
