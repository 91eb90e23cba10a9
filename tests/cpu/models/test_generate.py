"""What the generators of torch and JAX have in common: streaming, stopping, conversations, bad input."""

import dataclasses
import importlib

import numpy as np
import pytest

from refold.errors import ArgumentError, CheckpointError
from refold.generate.generator import NO_TOKEN
from refold.generate.sampling import Sampling
from refold.models.checkpoint import random_params
from support.models import CONFIGS, GRANITE, MAMBA2
from support.products import few

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
DRAWN = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=7)
GREEDY = Sampling(repetition_penalty=1.5)
FEW = few("name", list(CONFIGS), ["mamba2", "granite"])


@pytest.fixture(scope="module", params=["torch", "jax"])
def make(request):
    """Return the framework's Generator."""
    pytest.importorskip(request.param)
    return importlib.import_module(f"refold.generate.{request.param}").Generator


@pytest.fixture(scope="module")
def generators(make):
    return {name: make(config, random_params(config)) for name, config in CONFIGS.items()}


def collect(parts) -> np.ndarray:
    return np.concatenate(list(parts), axis=1)


@few(
    ("name", "sampling"), [*((name, DRAWN) for name in CONFIGS), ("mamba2", GREEDY)],
    [("mamba2", GREEDY), ("granite", DRAWN)],
)  # fmt: skip
def test_streaming_does_not_change_tokens(name, sampling, generators):
    g = generators[name]
    whole = g.generate(PROMPTS, 11, sampling=sampling)
    parts = list(g.stream(g.read(PROMPTS), 11, sampling=sampling, every=4))
    assert [p.shape[1] for p in parts] == [4, 4, 3]
    assert collect(parts).tolist() == whole


@FEW
def test_a_resumed_conversation_equals_one_that_was_not_interrupted(name, generators, tmp_path):
    g = generators[name]
    once = g.read([[*p, 9, 10] for p in PROMPTS])
    resumed = g.read(PROMPTS)
    resumed.save(tmp_path / "conversation.safetensors")
    resumed = g.read([[9, 10], [9, 10]], g.load(tmp_path / "conversation.safetensors"))
    assert g.lengths(once).tolist() == g.lengths(resumed).tolist()
    assert np.array_equal(np.asarray(once.seen), np.asarray(resumed.seen))
    assert collect(g.stream(once, 12)).tolist() == collect(g.stream(resumed, 12)).tolist()


@FEW
def test_a_fork_is_independent(name, generators):
    g = generators[name]
    trunk = g.read(PROMPTS)
    branch = trunk.fork()
    first = collect(g.stream(trunk, 8))
    g.read([[1], [2]], trunk)
    assert collect(g.stream(branch, 8)).tolist() == first.tolist()


@FEW
def test_a_stopped_row_waits_for_the_others(name, generators):
    g = generators[name]
    free = g.generate(PROMPTS, 10, sampling=DRAWN)
    stop = next(t for t in free[0] if t not in free[1])
    conversation = g.read(PROMPTS)
    tokens = collect(g.stream(conversation, 10, sampling=DRAWN, stop_tokens=[stop]))
    cut = free[0].index(stop) + 1
    assert tokens[0].tolist() == free[0][:cut] + [NO_TOKEN] * (10 - cut)
    assert tokens[1].tolist() == free[1]
    # The stopped row's state is the one it stopped in: going on equals a conversation of its own.
    assert g.lengths(conversation).tolist() == [len(PROMPTS[0]) + cut, len(PROMPTS[1]) + 10]
    alone = g.read([PROMPTS[0] + free[0][:cut]])
    both = g.read([[3], [3]], conversation)
    g.read([[3]], alone)
    expected, found = (np.asarray(c.logits)[0] for c in (alone, both))
    assert np.abs(expected - found).max() <= 256 * np.finfo(np.float32).eps * np.abs(expected).max()


def test_all_rows_stopped_ends_early(generators):
    g = generators["mamba2"]
    first = g.generate([[1, 2, 3]], 1)[0][0]
    assert [p.shape for p in g.stream(g.read([[1, 2, 3]]), 50, stop_tokens=[first], every=5)] == [(1, 1)]


def test_long_prompts_are_read_in_pieces(generators, monkeypatch):
    g = generators["granite"]
    prompts = [list(range(1, 60)), [5, 6, 7], list(range(3, 36))]
    expected = g.generate(prompts, 6)
    monkeypatch.setattr("refold.generate.generator.PIECE", 16)
    assert g.generate(prompts, 6) == expected


def test_state_dtype(make):
    g = make(MAMBA2, random_params(MAMBA2), state_dtype="bfloat16")
    conversation = g.read(PROMPTS)
    collect(g.stream(conversation, 3))
    assert str(conversation.state["ssm"].dtype).endswith("bfloat16")
    for wrong in ("int8", "float64", None):
        with pytest.raises(ArgumentError, match="state_dtype must be"):
            make(MAMBA2, g.params, state_dtype=wrong)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[64]], "token id 64"),
        ([[-1]], "token id -1"),
        ([[1.5]], "integers"),
        ([[[1]]], "flat sequence"),
        ([[[1], [2, 3]]], "flat sequence"),
        (None, "sequence of rows"),
        (3, "sequence of rows"),
    ],
)
def test_bad_prompts(prompts, message, generators):
    with pytest.raises(ArgumentError, match=message):
        generators["mamba2"].read(prompts)


def test_lengths_that_cannot_fit(generators):
    with pytest.raises(ArgumentError, match="max_position_embeddings"):
        generators["granite"].generate([list(range(20))], GRANITE.max_positions)
    g = generators["mamba2"]
    conversation = g.read([[1]])
    for bad in (
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": True},
        {"every": 0},
        {"every": True},
    ):
        with pytest.raises(ArgumentError, match="must be a positive integer"):
            next(g.stream(conversation, **{"max_new_tokens": 4, **bad}))
    with pytest.raises(ArgumentError, match="sampling must be a Sampling"):
        next(g.stream(conversation, 4, sampling={"temperature": 1}))
    for rows in (0, -1):
        with pytest.raises(ArgumentError, match="batch must be a positive integer"):
            g.start(rows)
    for tokens in ([64], [-1], ["a"], [True]):
        with pytest.raises(ArgumentError, match="stop token"):
            next(g.stream(conversation, 4, stop_tokens=tokens))
    with pytest.raises(ArgumentError, match="stop_tokens must be a sequence of token ids; it is 54"):
        next(g.stream(conversation, 4, stop_tokens=54))
    with pytest.raises(ArgumentError, match="read nothing"):
        next(g.stream(g.start(1), 1))


def test_nothing_is_read_for_a_request_that_cannot_be_honoured(generators, monkeypatch):
    g = generators["granite"]
    monkeypatch.setattr(g, "read", lambda *a: pytest.fail("work was begun"))
    for ask in ({"max_new_tokens": GRANITE.max_positions}, {"max_new_tokens": 0}, {"stop_tokens": [64]}):
        with pytest.raises(ArgumentError):
            g.generate([[1]], **{"max_new_tokens": 4, **ask})


def test_a_checkpoint_whose_end_is_outside_its_vocabulary_never_ends(make, generators):
    g = generators["mamba2"]
    ends = make(dataclasses.replace(MAMBA2, stop_tokens=(64,)), g.params)
    assert ends.generate([[1, 2, 3]], 4) == g.generate([[1, 2, 3]], 4)


def test_conversation_of_another_model(make, generators, tmp_path):
    generators["mamba2"].read([[1]]).save(tmp_path / "c")
    other = dataclasses.replace(MAMBA2, nlayers=1)
    for there in (generators["mamba"], make(other, random_params(other))):
        with pytest.raises(CheckpointError, match="another model"):
            there.load(tmp_path / "c")
    with pytest.raises(CheckpointError, match="None is not a saved conversation"):
        generators["mamba2"].load(None)
    with pytest.raises(ArgumentError, match="rows"):
        generators["mamba2"].read([[1], [2]], generators["mamba2"].read([[1]]))


def test_what_is_no_conversation_of_this_generator(make, generators):
    g = generators["mamba2"]
    smaller = dataclasses.replace(MAMBA2, vocab_size=32)
    others = [make(smaller, random_params(smaller)), generators["mamba"], generators["qwen"]]
    others = [(other.read([[1]]), "belongs to another model") for other in others]
    for wrong, says in (([[1, 2]], "must be a .*Conversation; got list"), *others):
        with pytest.raises(ArgumentError, match=says):
            next(g.stream(wrong, 4))
        with pytest.raises(ArgumentError, match=says):
            g.read([[1]], wrong)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_state_of_other_shapes(name, generators):
    """States of fewer rows were written to outside of their memory."""
    g = generators[name]
    tokens, state = g.start(3).logits.argmax(-1), g.read([[1, 2]] * 3).state
    step = getattr(g.model, "step_", None) or g.model.step
    for part, a in state.items():
        fewer = a[:2] if part == "length" else a[:, :2]
        without = {name: other for name, other in state.items() if name != part}
        for given in ({**state, part: fewer}, {**state, f"{part}s": a}, without):
            with pytest.raises(ArgumentError, match=rf"state\['{part}s?'\] must have the shape .* 3 rows; got"):
                step(g.config, g.params, tokens, given)
            with pytest.raises(ArgumentError, match=rf"state\['{part}s?'\] must have the shape .* 3 rows; got"):
                g.model.forward(g.config, g.params, tokens[:, None], given)


def test_saving_where_nothing_can_be_written(generators, tmp_path):
    talk = generators["mamba2"].read([[1]])
    for path in (tmp_path / "missing" / "c", tmp_path, None):
        with pytest.raises(ArgumentError, match=f"save: {path} cannot be written"):
            talk.save(path)


@pytest.mark.parametrize("name", ["mamba2", "granite"])
def test_a_damaged_conversation_is_refused(name, generators, tmp_path):
    from safetensors.numpy import load_file, save_file

    g = generators[name]
    g.read([[1, 2]]).save(tmp_path / "c")
    (tmp_path / "broken").write_bytes((tmp_path / "c").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a saved conversation"):
        g.load(tmp_path / "broken")
    whole = load_file(tmp_path / "c")
    damaged = {"length": whole["length"] * 0 - 1, "logits": whole["logits"][:, 1:]}
    damaged["seen"] = whole["seen"].astype(np.int32)
    if "k" in whole:
        damaged |= {"k": whole["k"][:, :, 1:], "v": whole["v"][..., 1:]}
    for part, array in damaged.items():
        save_file({**whole, part: np.ascontiguousarray(array)}, tmp_path / "d")
        with pytest.raises(CheckpointError, match=r"is damaged|another model"):
            g.load(tmp_path / "d")
    for missing in ("length", "seen"):
        save_file({key: a for key, a in whole.items() if key != missing}, tmp_path / "d")
        with pytest.raises(CheckpointError, match=r"no rows|another model"):
            g.load(tmp_path / "d")
    for length in (np.zeros(0, np.int32), np.int32(1)):
        save_file({**whole, "length": np.asarray(length)}, tmp_path / "d")
        with pytest.raises(CheckpointError, match="it has no rows"):
            g.load(tmp_path / "d")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("temperature", -1.0), ("temperature", 1e-39), ("temperature", "x"), ("temperature", float("inf")),
     ("temperature", float("nan")), ("temperature", True), ("top_k", -1), ("top_k", 2.5), ("top_k", True),
     ("top_p", 0.0), ("top_p", 1.5), ("top_p", "x"), ("top_p", None), ("min_p", 1.5), ("min_p", "x"),
     ("top_p", 1e-40), ("repetition_penalty", 0.0), ("repetition_penalty", float("inf")), ("repetition_penalty", 1e-40),
     ("seed", 1.5), ("seed", -1)],
)  # fmt: skip
def test_sampling_refuses_by_name(setting, value):
    with pytest.raises(ArgumentError, match=f"^{setting} must be"):
        Sampling(**{setting: value})
