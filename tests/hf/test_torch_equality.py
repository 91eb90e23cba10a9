"""Lean torch models equal transformers': hidden states to rounding, greedy tokens exactly."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from refold.errors import CheckpointError
from refold.generate.cli import generate_text
from refold.generate.sampling import Sampling
from refold.generate.torch import Generator
from refold.models.configs import _READERS, MambaConfig
from refold.models.torch import load_checkpoint, model_for
from support.checkpoints import NAMES, VOCAB, prompt, rounding_bound, saved
from support.families import EVERY

pytestmark = pytest.mark.rows(12)

STEPS = 64
BIASED = ("mamba-untied", "mamba2-groups", "bamba-biases", "granite-odd")


def reference_tokens(model, ids: torch.Tensor, mask: torch.Tensor | None = None, **keywords) -> list[list[int]]:
    keywords = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | keywords
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, **keywords)[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [5, 75])  # within a chunk, and over several
def test_hidden_states(name: str, length: int) -> None:
    model, directory = saved(name)
    config, params = load_checkpoint(directory)
    ids = torch.tensor(prompt(length, rows=2))
    keywords = {} if isinstance(config, MambaConfig) else {"chunk_size": 16}
    backbone = model.model if hasattr(model, "model") else model.backbone
    with torch.no_grad():
        hidden, _ = model_for(config).forward(config, params, ids, kind="hidden", **keywords)
        logits, _ = model_for(config).forward(config, params, ids, kind="all", **keywords)
        reference = backbone(ids).last_hidden_state, model(ids).logits
        model.double()
        exact = backbone(ids).last_hidden_state, model(ids).logits
        model.float()
    for found, near, right in zip((hidden, logits), reference, exact, strict=True):
        assert float((found - right).abs().max()) <= rounding_bound(near.numpy(), right.numpy())


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str) -> None:
    """One row, then four of different lengths, which transformers pads on the left.

    Where `in_proj` has a bias, transformers' padding is not silent: the bias of the padded tokens enters the
    convolution of the first real ones. There its rows are read one at a time.
    """
    model, directory = saved(name)
    generator = Generator.from_checkpoint(directory, device="cpu")
    ids = torch.tensor(prompt(80, seed=80))
    tokens = generator.generate(ids.tolist(), STEPS)
    assert tokens == reference_tokens(model, ids)
    assert len(set(tokens[0])) > 4  # a model that repeats one token would show nothing
    rows, mask = torch.tensor(prompt(18, rows=4, seed=3)), torch.ones(4, 18, dtype=torch.long)
    for row, padding in enumerate((0, 3, 11, 17)):
        mask[row, :padding] = 0
    prompts = [row[keep.bool()].tolist() for row, keep in zip(rows, mask, strict=True)]
    if name in BIASED:
        expected = [reference_tokens(model, torch.tensor([one]), max_new_tokens=16)[0] for one in prompts]
    else:
        expected = reference_tokens(model, rows, mask, max_new_tokens=16)
    assert generator.generate(prompts, 16) == expected


@pytest.mark.parametrize("name", ["mamba", "mamba2-groups", "granite-moe-rope"])
def test_repetition_penalty(name: str) -> None:
    model, directory = saved(name)
    ids = torch.tensor(prompt(9, seed=2))
    sampling = Sampling(repetition_penalty=1.3)
    found = Generator.from_checkpoint(directory, device="cpu").generate(ids.tolist(), 24, sampling=sampling)
    assert found == reference_tokens(model, ids, max_new_tokens=24, repetition_penalty=1.3)
    assert found != reference_tokens(model, ids, max_new_tokens=24)


@pytest.mark.parametrize("name", NAMES)
def test_reading_then_decoding_equals_reading_all(name: str) -> None:
    _, directory = saved(name)
    generator = Generator.from_checkpoint(directory, device="cpu")
    ids = prompt(60, seed=1)
    talk = generator.read(ids[:, :33].tolist())
    made = np.concatenate(list(generator.stream(talk, 20, stop_tokens=[])), 1)
    whole = generator.read([[*ids[0, :33].tolist(), *made[0].tolist()]])
    assert float((talk.logits - whole.logits).abs().max()) <= 1024 * 2**-23 * float(whole.logits.abs().max())


@pytest.mark.parametrize("length", [7, 80])
def test_step_limits_hold_when_decoding_too(length: int) -> None:
    """transformers clips step sizes when it reads many tokens, not when it reads one; without its cache it always does.

    Clipped always, the state after some tokens does not depend on how many were read at a time.
    """
    model, directory = saved("mamba2-limited")
    generator = Generator.from_checkpoint(directory, device="cpu")
    ids = torch.tensor(prompt(length, seed=length))
    tokens = generator.generate(ids.tolist(), 24)
    assert tokens == reference_tokens(model, ids, max_new_tokens=24, use_cache=False)
    free = dataclasses.replace(generator.config.mixer, dt_limit=(0.0, float("inf")))
    free = Generator(dataclasses.replace(generator.config, mixer=free), generator.params)
    assert free.generate(ids.tolist(), 24) != tokens  # the limits cut in


@pytest.mark.parametrize("name", ["mamba", "mamba2-groups", "granite"])
def test_bfloat16_follows_float64(name: str) -> None:
    """The bfloat16 model is no further from float64 than transformers' in bfloat16 is, twice over."""
    model, directory = saved(name, "bfloat16")
    config, params = load_checkpoint(directory)
    assert params["embedding"].dtype == torch.bfloat16
    ids = torch.tensor(prompt(40, rows=2))
    with torch.no_grad():
        logits, _ = model_for(config).forward(config, params, ids, kind="all")
        reference = model(ids).logits.double()
        exact = model.double()(ids).logits
        model.to(torch.bfloat16)
    assert float((logits - exact).norm()) <= 2 * float((reference - exact).norm())


def test_files_of_every_kind_give_the_same_tokens(tmp_path: Path) -> None:
    """One file, several, and state-spaces' own with its padded vocabulary."""
    model, whole = saved("mamba2")
    _, pieces = saved("mamba2", shard="40KB")
    assert (pieces / "model.safetensors.index.json").exists()
    state = {k.replace("embeddings.", "embedding."): v for k, v in model.state_dict().items()}
    rows = -(-VOCAB // 16) * 16
    for key in ("backbone.embedding.weight", "lm_head.weight"):
        state[key] = torch.nn.functional.pad(state[key], (0, 0, 0, rows - VOCAB), value=-1.0)
    torch.save(state, tmp_path / "pytorch_model.bin")
    settings = {
        "d_model": 48, "n_layer": 3, "vocab_size": VOCAB, "rms_norm": True, "tie_embeddings": True,
        "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 12}, "pad_vocab_size_multiple": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ids = prompt(9).tolist()
    one, *others = (
        Generator.from_checkpoint(path, device="cpu").read(ids).logits for path in (whole, pieces, tmp_path)
    )
    for other in others:
        assert float((one - other[:, :VOCAB]).abs().max()) <= 8 * 2**-23 * float(one.abs().max())


@pytest.mark.parametrize("family", [name for name in EVERY if "-" not in name and name not in _READERS])
def test_a_family_without_a_model_says_what_to_do(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(CheckpointError, match=r"unknown architecture.*refold\.accelerate\(model\)"):
        Generator.from_checkpoint(tmp_path)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    """A pickle that would create a file when it is loaded is refused, and creates none."""
    _, directory = saved("mamba")

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    torch.save({"backbone.norm_f.weight": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a torch file of tensors alone"):
        Generator.from_checkpoint(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_frameworks_say_the_same() -> None:
    pytest.importorskip("jax")
    _, directory = saved("mamba2")
    texts = ["".join(generate_text(directory, token_ids="3 1 4", framework=f)) for f in ("torch", "jax")]
    assert texts[0] == texts[1]
