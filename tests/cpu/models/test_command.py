"""The generate command: text and token ids in, text and token ids out, errors as one line."""

import json
import re
from pathlib import Path

import pytest
import typer
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from refold.errors import ArgumentError
from refold.generate.cli import generate, read_prompt
from refold.generate.text import Text
from refold.generate.torch import Generator
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


def run(*arguments: object, charset: str = "utf-8", **given: object):
    app = typer.Typer()
    app.command()(generate)
    return CliRunner(charset=charset).invoke(app, [str(a) for a in arguments], **given)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_token_ids(framework: str, checkpoint: Path) -> None:
    result = run(checkpoint, "--token-ids", "1,2 3", "--max-new-tokens", 10, "--every", 4, "--framework", framework)
    assert result.exit_code == 0, result.output
    expected = Generator.from_checkpoint(checkpoint).generate([[1, 2, 3]], 10)[0]
    assert [int(t) for t in result.output.split()] == expected


def test_text_streams_the_same_text(checkpoint: Path) -> None:
    options = ["--temperature", "1", "--top-k", "9", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "12"]
    outputs = {run(checkpoint, "--prompt", "w1 w2 w3", *options, "--every", every).output for every in (1, 5, 12)}
    assert len(outputs) == 1
    assert outputs.pop().count("w") == 12


def test_stop_token_is_not_shown(checkpoint: Path) -> None:
    first = Generator.from_checkpoint(checkpoint).generate([[1, 2, 3]], 4)[0]
    result = run(checkpoint, "--prompt", "w1 w2 w3", "--stop", first[0])
    assert result.output.strip() == ""


def test_a_prompt_comes_from_a_file_or_from_standard_input(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("w1 w2 w3")
    expected = run(checkpoint, "--prompt", "w1 w2 w3", "--max-new-tokens", 4).output
    assert run(checkpoint, "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 4).output == expected
    assert run(checkpoint, "--prompt-file", "-", "--max-new-tokens", 4, input="w1 w2 w3").output == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "w1", "--prompt-file", "-"], "either --prompt or --prompt-file"),
        (["--prompt-file", "no-such-file"], "cannot be read: No such file"),
        (["--prompt", "w1", "--token-ids", "1"], "one of --prompt, --prompt-file and --token-ids"),
        (["--token-ids", "one"], "integers"),
        (["--token-ids", ""], "empty"),
        (["--token-ids", "64"], "token id 64"),
        (["--prompt", ""], "no token"),
        (["--token-ids", "1", "--framework", "abacus"], "framework"),
        (["--token-ids", "1", "--top-p", "2"], "top_p"),
        (["--token-ids", "1", "--min-p", "2"], "min_p"),
        (["--token-ids", "1", "--repetition-penalty", "0"], "repetition_penalty"),
        (["--token-ids", "1", "--device", "nowhere"], "nowhere"),
        (["--token-ids", "1", "--framework", "jax", "--device", "cpu"], "JAX_PLATFORMS"),
        (["--token-ids", "1", "--stop-string", "x"], "--stop"),
        (["--prompt", "w1", "--stop-string", ""], "not empty"),
        (["--token-ids", "1", "--dtype", "int8"], "int8"),
        (["--prompt", "w1 \udcff"], "not text in UTF-8"),
        (["--token-ids", "1", "--device", "meta"], "meta"),
    ],
)
def test_bad_input_is_one_line(checkpoint: Path, arguments: list[str], says: str) -> None:
    result = run(checkpoint, *arguments)
    assert result.exit_code == 2
    assert says in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--token-ids", "64"], "token id 64"),
        (["--token-ids", "1", "--stop", "64"], "stop token 64"),
        (["--token-ids", "1", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--token-ids", "1", "--every", "0"], "every must be"),
    ],
)
def test_the_request_is_checked_before_the_weights_are_read(
    checkpoint: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    result = run(tmp_path, *arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_a_folder_without_a_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    result = run(tmp_path, "--prompt", "w1")
    assert result.exit_code == 2
    assert "config.json does not exist; a checkpoint directory needs it" in result.output


def test_standard_input_that_is_closed(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ArgumentError, match="which is closed"):
        read_prompt(Path("-"))


def test_an_output_that_cannot_show_a_character_gets_a_question_mark(checkpoint: Path, monkeypatch) -> None:
    monkeypatch.setattr("refold.generate.cli.generate_text", lambda *a, **k: iter(["a", "é日", "b"]))
    result = run(checkpoint, "--prompt", "w1", charset="ascii")
    assert (result.exit_code, result.output) == (0, "a??b\n")


def test_stop_string(checkpoint: Path) -> None:
    """The text ends before the first stop string, however it is streamed."""
    whole = run(checkpoint, "--prompt", "w1 w2 w3", "--max-new-tokens", 12).output.strip()
    third = re.findall(r"w\d+", whole)[2]
    for every in (1, 3, 12):
        result = run(
            checkpoint, "--prompt", "w1 w2 w3", "--max-new-tokens", 12, "--every", every, "--stop-string", third,
            "--stop-string", "not there",
        )  # fmt: skip
        assert result.output == whole[: whole.index(third)] + "\n"


@pytest.mark.parametrize("pieces", [[7], [1] * 7, [3, 4]])
def test_text_holds_back_what_may_change(pieces: list[int]) -> None:
    letters = "one <stops <stop> more"
    words = [letters[i : i + 4] for i in range(0, len(letters), 4)] + ["!"]
    text = Text(lambda ids: "".join(words[i] for i in ids), ["<stop>", "zzz"])
    shown, begin = [], 0
    for n in pieces:
        shown.append(text.feed(range(begin, min(begin + n, len(words)))))
        begin += n
    assert "".join(shown) + text.feed((), last=True) == "one <stops "
    assert text.ended
    half = Text(lambda ids: ["", "a\ufffd", "aß"][len(ids)])
    assert [half.feed([0]), half.feed([1])] == ["", "aß"]
    open_end = Text(lambda ids: "abc<st"[: len(ids)], ["<stop>"])
    assert open_end.feed(range(6)) + "|" + open_end.feed((), last=True) == "abc|<st"


@pytest.mark.parametrize("pieces", [[5], [1] * 5, [2, 3]])
def test_of_stop_strings_that_overlap_the_one_complete_first_ends_the_text(pieces: list[int]) -> None:
    text, shown, begin = Text(lambda ids: "xabcd"[: len(ids)], ["abcd", "c"]), "", 0
    for n in pieces:
        shown += text.feed(range(begin, begin + n))
        begin += n
    assert shown == "xab"
