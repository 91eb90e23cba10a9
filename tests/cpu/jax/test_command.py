"""The generate command: text and token ids in, text and token ids out, errors as one line."""

import json
from pathlib import Path

import pytest
import typer
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from refold.generate.cli import generate, jax_devices
from refold.generate.jax import Generator
from refold.models.checkpoint import layout, random_params
from support.models import MAMBA2

SETTINGS = {
    "model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
    "state_size": 8, "n_groups": 2, "tie_word_embeddings": True, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    params = random_params(MAMBA2)
    tensors = {}
    for entry in layout(MAMBA2):
        place = params[entry.path[0]] if entry.index is None else params[entry.path[0]][entry.path[1]][entry.index]
        tensors[entry.key] = place.reshape(entry.shape)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(SETTINGS))
    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def run(*arguments: object):
    app = typer.Typer()
    app.command()(generate)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_token_ids(checkpoint: Path) -> None:
    result = run(checkpoint, "--token-ids", "1,2 3", "--max-new-tokens", 10, "--every", 4)
    assert result.exit_code == 0, result.output
    expected = Generator.from_checkpoint(checkpoint).generate([[1, 2, 3]], 10)[0]
    assert [int(t) for t in result.output.split()] == expected


def test_text_streams_the_same_text(checkpoint: Path) -> None:
    options = (
        "--prompt",
        "w1 w2 w3",
        "--temperature",
        1,
        "--top-k",
        9,
        "--top-p",
        0.9,
        "--seed",
        3,
        "--max-new-tokens",
        12,
    )
    outputs = {run(checkpoint, *options, "--every", every).output for every in (1, 5, 12)}
    assert len(outputs) == 1
    assert outputs.pop().count("w") == 12


def test_stop_token_is_not_shown(checkpoint: Path) -> None:
    first = Generator.from_checkpoint(checkpoint).generate([[1, 2, 3]], 4)[0]
    result = run(checkpoint, "--prompt", "w1 w2 w3", "--stop", first[0])
    assert result.output.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "w1", "--token-ids", "1"], "either --prompt or --token-ids"),
        (["--token-ids", "one"], "integers"),
        (["--token-ids", ""], "empty"),
        (["--token-ids", "64"], "token id 64"),
        (["--prompt", ""], "no token"),
        (["--token-ids", "1", "--framework", "abacus"], "framework"),
        (["--token-ids", "1", "--top-p", "2"], "top_p"),
        (["--token-ids", "1", "--dtype", "int8"], "int8"),
    ],
)
def test_bad_input_is_one_line(checkpoint: Path, arguments: list[str], says: str) -> None:
    result = run(checkpoint, *arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert result.output.count("\n") == 1


def test_doctor_lists_devices() -> None:
    found = jax_devices()
    assert found["devices"]
    assert found["version"]
