"""JAX models equal transformers' torch models: hidden states to rounding, greedy tokens exactly."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from refold.generate.jax import NO_TOKEN, Generator
from refold.models.checkpoint import load_checkpoint
from refold.models.configs import MambaConfig
from refold.models.jax import model_for, to_device
from support.checkpoints import NAMES, VOCAB, prompt, rounding_bound, saved
from support.products import few

pytestmark = pytest.mark.rows(12)

STEPS = 64


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [5, 75])  # within a chunk, and over several
def test_hidden_states(name: str, length: int) -> None:
    model, directory = saved(name)
    config, params = load_checkpoint(directory)
    ids = prompt(length, rows=2)
    keywords = {} if isinstance(config, MambaConfig) else {"chunk_size": 16}
    hidden, _ = model_for(config).forward(config, to_device(params), jnp.asarray(ids), kind="hidden", **keywords)
    backbone = model.model if hasattr(model, "model") else model.backbone
    with torch.no_grad():
        reference = backbone(torch.tensor(ids)).last_hidden_state.numpy()
        exact = backbone.double()(torch.tensor(ids)).last_hidden_state.numpy()
        backbone.float()
    error = np.abs(np.asarray(hidden) - exact).max()
    assert error <= rounding_bound(reference, exact), (error, np.abs(reference - exact).max())


@pytest.mark.parametrize(("name", "length"), [("mamba", 7), *((name, 80) for name in NAMES), ("granite-moe-rope", 7)])
def test_greedy_tokens(name: str, length: int) -> None:
    model, directory = saved(name)
    generator = Generator.from_checkpoint(directory)
    ids = prompt(length, seed=length)
    tokens = generator.generate(ids, STEPS)[0]
    with torch.no_grad():
        full = torch.tensor(ids)
        out = model.generate(
            full, attention_mask=torch.ones_like(full), max_new_tokens=STEPS, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    assert tokens == out[0, length:].tolist()
    assert len(set(tokens)) > 4  # a model that repeats one token would prove nothing


@pytest.mark.parametrize("length", [7, 80])
def test_step_limits_hold_when_decoding_too(length: int) -> None:
    """transformers clips step sizes when it reads many tokens, not when it reads one; without its cache it always does.

    Clipped always, the state after some tokens does not depend on how many were read at a time.
    """
    model, directory = saved("mamba2-limited")
    generator = Generator.from_checkpoint(directory)
    ids = prompt(length, seed=length)
    tokens = generator.generate(ids, 24)[0]
    full = torch.tensor(ids)
    with torch.no_grad():
        out = model.generate(
            full, attention_mask=torch.ones_like(full), max_new_tokens=24, do_sample=False, eos_token_id=None,
            pad_token_id=0, use_cache=False,
        )  # fmt: skip
    assert tokens == out[0, length:].tolist()
    free = dataclasses.replace(generator.config.mixer, dt_limit=(0.0, float("inf")))
    free = Generator(dataclasses.replace(generator.config, mixer=free), generator.params)
    assert free.generate(ids, 24)[0] != tokens  # the limits cut in


@pytest.mark.exhaustive
@few("name", ["mamba", "mamba2", "granite-moe-rope"], ["granite-moe-rope"])
def test_ragged_rows_equal_single_rows(name: str) -> None:
    _, directory = saved(name)
    generator = Generator.from_checkpoint(directory)
    prompts = [prompt(n, seed=n)[0].tolist() for n in (3, 40)]
    assert generator.generate(prompts, 12) == [generator.generate([p], 12)[0] for p in prompts]


@pytest.mark.parametrize("name", ["mamba", "mamba2-groups", "granite"])
def test_bfloat16_follows_float64(name: str) -> None:
    """The bfloat16 model is no further from float64 than transformers' in bfloat16 is, twice over."""
    model, directory = saved(name, "bfloat16")
    config, params = load_checkpoint(directory)
    assert params["embedding"].dtype.name == "bfloat16"
    ids = prompt(40, rows=2)
    logits, _ = model_for(config).forward(config, to_device(params), jnp.asarray(ids), kind="all")
    with torch.no_grad():
        reference = model(torch.tensor(ids)).logits.float().numpy()
        exact = model.double()(torch.tensor(ids)).logits.numpy()
        model.to(torch.bfloat16)
    assert np.linalg.norm(logits - exact) <= 2 * np.linalg.norm(reference - exact)


@pytest.mark.parametrize("name", ["mamba2", "granite-moe-rope"])
def test_sharded_checkpoint(name: str) -> None:
    _, whole = saved(name)
    _, pieces = saved(name, shard="40KB")
    assert (pieces / "model.safetensors.index.json").exists()
    ids = prompt(9)
    assert Generator.from_checkpoint(whole).generate(ids, 8) == Generator.from_checkpoint(pieces).generate(ids, 8)


@pytest.mark.parametrize(("name", "dtype"), [("mamba", "float32"), ("mamba2", "float32"), ("mamba2", "bfloat16")])
def test_state_spaces_checkpoint(name: str, dtype: str, tmp_path: Path) -> None:
    """The same weights written as state-spaces writes them give the same tokens, padded vocabulary included."""
    import json

    model, directory = saved(name, dtype)
    state = {k.replace("embeddings.", "embedding."): v for k, v in model.state_dict().items()}
    rows = -(-VOCAB // 16) * 16
    for key in ("backbone.embedding.weight", "lm_head.weight"):
        state[key] = torch.nn.functional.pad(state[key], (0, 0, 0, rows - VOCAB))
    torch.save(state, tmp_path / "pytorch_model.bin")
    ssm = {"layer": "Mamba2", "headdim": 16, "d_state": 12} if name == "mamba2" else {"d_state": 8}
    settings = {
        "d_model": 48, "n_layer": 3, "vocab_size": VOCAB, "ssm_cfg": ssm, "rms_norm": True, "tie_embeddings": True,
        "pad_vocab_size_multiple": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ids = prompt(11)
    one, two = Generator.from_checkpoint(directory), Generator.from_checkpoint(tmp_path)
    assert two.config.vocab_size == rows
    logits, padded = one.read(ids).logits, two.read(ids).logits[:, :VOCAB]
    bound = 8 * np.finfo(np.float32).eps * float(jnp.abs(logits).max())  # the last product is blocked by its rows
    assert float(jnp.abs(logits - padded).max()) <= bound


def test_stop_tokens_of_generation_config() -> None:
    _, directory = saved("mamba2")
    generator = Generator.from_checkpoint(directory)
    free = generator.generate(prompt(6), 20, stop_tokens=[])[0]
    stopped = generator.generate(prompt(6), 20, stop_tokens=[free[5]])[0]
    assert stopped == free[: free.index(free[5]) + 1]
    assert NO_TOKEN not in stopped
