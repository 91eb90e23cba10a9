"""The generation loop: streaming, stopping, sampling, conversations, compiled shapes, bad input."""

import dataclasses

import jax
import numpy as np
import pytest

from refold.errors import ArgumentError, CheckpointError
from refold.generate.generator import bucket
from refold.generate.jax import NO_TOKEN, Generator, choose
from refold.generate.sampling import Sampling
from refold.models.checkpoint import random_params
from support.models import CONFIGS, GRANITE, MAMBA2

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
DRAWN = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7)


@pytest.fixture(scope="module")
def generators() -> dict[str, Generator]:
    return {name: Generator(config, random_params(config)) for name, config in CONFIGS.items()}


def collect(parts) -> np.ndarray:
    return np.concatenate(list(parts), axis=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_streaming_does_not_change_tokens(name: str, generators) -> None:
    g = generators[name]
    whole = g.generate(PROMPTS, 11, sampling=DRAWN)
    parts = list(g.stream(g.read(PROMPTS), 11, sampling=DRAWN, every=4))
    assert [p.shape[1] for p in parts] == [4, 4, 3]
    assert collect(parts).tolist() == whole


@pytest.mark.parametrize("name", CONFIGS)
def test_stacked_layers_give_the_same_tokens(name: str, generators) -> None:
    stacked = Generator(CONFIGS[name], generators[name].params, layers_apart=False)
    assert stacked.generate(PROMPTS, 11) == generators[name].generate(PROMPTS, 11)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_conversation_equals_one_that_was_not_interrupted(name: str, generators, tmp_path) -> None:
    g = generators[name]
    once = g.read([[*p, 9, 10] for p in PROMPTS])
    resumed = g.read(PROMPTS)
    resumed.save(tmp_path / "conversation.safetensors")
    resumed = g.read([[9, 10], [9, 10]], g.load(tmp_path / "conversation.safetensors"))
    assert once.state["length"].tolist() == resumed.state["length"].tolist()
    assert collect(g.stream(once, 12)).tolist() == collect(g.stream(resumed, 12)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fork_is_independent(name: str, generators) -> None:
    g = generators[name]
    trunk = g.read(PROMPTS)
    branch = trunk.fork()
    first = collect(g.stream(trunk, 8))
    g.read([[1], [2]], trunk)
    assert collect(g.stream(branch, 8)).tolist() == first.tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stopped_row_waits_for_the_others(name: str, generators) -> None:
    g = generators[name]
    free = g.generate(PROMPTS, 10, sampling=DRAWN)
    stop = next(t for t in free[0] if t not in free[1])
    conversation = g.read(PROMPTS)
    tokens = collect(g.stream(conversation, 10, sampling=DRAWN, stop_tokens=[stop]))
    cut = free[0].index(stop) + 1
    assert tokens[0].tolist() == free[0][:cut] + [NO_TOKEN] * (10 - cut)
    assert tokens[1].tolist() == free[1]
    # The stopped row's state is the one it stopped in: going on equals a conversation of its own.
    assert conversation.state["length"].tolist() == [len(PROMPTS[0]) + cut, len(PROMPTS[1]) + 10]
    alone = g.read([PROMPTS[0] + free[0][:cut]])
    both = g.read([[3], [3]], conversation)
    g.read([[3]], alone)
    scale = float(np.abs(alone.logits).max())
    assert float(np.abs(alone.logits[0] - both.logits[0]).max()) <= 256 * np.finfo(np.float32).eps * scale


def test_all_rows_stopped_ends_early(generators) -> None:
    g = generators["mamba2"]
    first = g.generate([[1, 2, 3]], 1)[0][0]
    assert [p.shape for p in g.stream(g.read([[1, 2, 3]]), 50, stop_tokens=[first], every=5)] == [(1, 1)]


def test_new_lengths_do_not_recompile(generators) -> None:
    g = Generator(MAMBA2, random_params(MAMBA2))
    for length in range(17, 25):
        g.generate([list(range(length))], length)
    assert g._read._cache_size() == 1
    assert g._steps._cache_size() == 1


def test_long_prompts_are_read_in_pieces(generators, monkeypatch) -> None:
    g = generators["granite"]
    prompts = [list(range(1, 60)), [5, 6, 7]]
    expected = g.generate(prompts, 6)
    monkeypatch.setattr("refold.generate.generator.PIECE", 16)
    assert g.generate(prompts, 6) == expected


def test_state_dtype(generators) -> None:
    g = Generator(MAMBA2, random_params(MAMBA2), state_dtype="bfloat16")
    conversation = g.read(PROMPTS)
    collect(g.stream(conversation, 3))
    assert conversation.state["ssm"].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("top_k", "top_p", "allowed"), [(0, None, 6), (3, None, 3), (0, 0.6, 2), (5, 0.9, 3), (1, None, 1)]
)
def test_choice_keeps_to_its_set_and_its_odds(top_k: int, top_p: float | None, allowed: int) -> None:
    odds = np.array([0.4, 0.3, 0.25, 0.03, 0.01, 0.01])
    draws = 4000
    logits = np.tile(np.log(odds)[None, [5, 0, 3, 1, 2, 4]], (draws, 1)).astype(np.float32)
    order = np.array([1, 3, 4, 2, 5, 0])  # positions by falling odds
    keys = jax.random.split(jax.random.key(0), draws)
    drawn = np.asarray(choose(logits, keys, top_k, top_p))
    counts = np.array([(drawn == position).sum() for position in order])
    expected = np.where(np.arange(6) < allowed, odds, 0)
    expected /= expected.sum()
    assert counts[allowed:].sum() == 0
    spread = np.sqrt(draws * expected * (1 - expected))
    assert (np.abs(counts - draws * expected) <= 5 * spread + 1e-9).all()


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 33, 49, 100, 1024, 1025)] == [
        16,
        16,
        24,
        24,
        32,
        48,
        64,
        128,
        1024,
        1536,
    ]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[64]], "token id 64"),
        ([[-1]], "token id -1"),
        ([[1.5]], "integers"),
        ([[[1]]], "flat sequence"),
    ],
)
def test_bad_prompts(prompts, message: str, generators) -> None:
    with pytest.raises(ArgumentError, match=message):
        generators["mamba2"].read(prompts)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1},
                                 {"temperature": float("nan")}])  # fmt: skip
def test_bad_sampling(bad) -> None:
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        Sampling(**bad)


def test_lengths_that_cannot_fit(generators) -> None:
    with pytest.raises(ArgumentError, match="max_position_embeddings"):
        generators["granite"].generate([list(range(20))], GRANITE.max_positions)
    with pytest.raises(ArgumentError, match="max_new_tokens"):
        generators["mamba2"].generate([[1]], 0)
    conversation = generators["mamba2"].read([[1]])
    for bad in ({"max_new_tokens": 2.5}, {"max_new_tokens": 4, "every": 0}):
        with pytest.raises(ArgumentError, match="positive integers"):
            next(generators["mamba2"].stream(conversation, **bad))
    for token in (64, -1, "a"):
        with pytest.raises(ArgumentError, match="stop token"):
            next(generators["mamba2"].stream(conversation, 4, stop_tokens=[token]))
    with pytest.raises(ArgumentError, match="read nothing"):
        next(generators["mamba2"].stream(generators["mamba2"].start(1), 1))


def test_conversation_of_another_model(generators, tmp_path) -> None:
    generators["mamba2"].read([[1]]).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match="another model"):
        generators["mamba"].load(tmp_path / "c")
    other = dataclasses.replace(MAMBA2, nlayers=1)
    with pytest.raises(CheckpointError, match="another model"):
        Generator(other, random_params(other)).load(tmp_path / "c")
    (tmp_path / "broken").write_bytes((tmp_path / "c").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a saved conversation"):
        generators["mamba2"].load(tmp_path / "broken")
    with pytest.raises(ArgumentError, match="rows"):
        generators["mamba2"].read([[1], [2]], generators["mamba2"].read([[1]]))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("temperature", 1e-39), ("temperature", "x"), ("temperature", float("inf")), ("temperature", True), ("top_k", 2.5),
     ("top_k", True), ("top_p", "x"), ("top_p", None), ("seed", 1.5), ("seed", -1)],
)  # fmt: skip
def test_sampling_refuses_by_name(setting: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{setting} must be"):
        Sampling(**{setting: value})


def test_stop_tokens_that_are_no_sequence(generators) -> None:
    g = generators["mamba2"]
    with pytest.raises(ArgumentError, match="stop_tokens must be a sequence of token ids; it is 54"):
        next(g.stream(g.read([[1]]), 4, stop_tokens=54))


@pytest.mark.parametrize("name", ["mamba2", "granite"])
def test_a_damaged_conversation_is_refused(name: str, generators, tmp_path) -> None:
    from safetensors.numpy import load_file, save_file

    generators[name].read([[1, 2]]).save(tmp_path / "c")
    whole = load_file(tmp_path / "c")
    damaged = {"length": whole["length"] * 0 - 1, "logits": whole["logits"][:, 1:]}
    if "k" in whole:
        damaged |= {"k": whole["k"][:, :, 1:], "v": whole["v"][..., 1:]}
    for part, array in damaged.items():
        save_file({**whole, part: np.ascontiguousarray(array)}, tmp_path / "d")
        with pytest.raises(CheckpointError, match=r"is damaged|another model"):
            generators[name].load(tmp_path / "d")
    for length in (np.zeros(0, np.int32), np.int32(1)):
        save_file({**whole, "length": np.asarray(length)}, tmp_path / "d")
        with pytest.raises(CheckpointError, match="it has no rows"):
            generators[name].load(tmp_path / "d")
