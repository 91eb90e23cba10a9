"""Generation with PyTorch: choices, gradients of the models, refusals; test_generate.py has the rest."""

import dataclasses

import numpy as np
import pytest
import torch

from refold.errors import CapacityError, DeviceError
from refold.generate.choice import choose, kind_of, settings_of
from refold.generate.sampling import Sampling, uniforms
from refold.generate.torch import Generator
from refold.models.checkpoint import random_params
from refold.models.torch import model_for, take_layers_apart, to_device
from support.models import CONFIGS, GRANITE, MAMBA2

pytestmark = pytest.mark.rows(6)

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
DRAWN = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=7)
GREEDY = Sampling(repetition_penalty=1.5)


@pytest.fixture(scope="module")
def generators() -> dict[str, Generator]:
    return {name: Generator(config, random_params(config)) for name, config in CONFIGS.items()}


def collect(parts) -> np.ndarray:
    return np.concatenate(list(parts), axis=1)


def test_rows_draw_what_they_draw_in_another_batch_of_the_same_place(generators) -> None:
    g = generators["mamba2"]
    assert g.generate(PROMPTS, 9, sampling=DRAWN)[0] == g.generate(PROMPTS[:1], 9, sampling=DRAWN)[0]
    assert g.generate(PROMPTS[:1], 9, sampling=DRAWN) != g.generate(
        PROMPTS[:1], 9, sampling=dataclasses.replace(DRAWN, seed=8)
    )


@pytest.mark.parametrize("name", ["mamba2", "granite"])
def test_conversations_pass_between_torch_and_jax(name: str, generators, tmp_path) -> None:
    pytest.importorskip("jax")
    from refold.generate.jax import Generator as JaxGenerator

    here, there = generators[name], JaxGenerator(CONFIGS[name], random_params(CONFIGS[name]))
    expected = collect(here.stream(here.read(PROMPTS), 12, sampling=GREEDY))
    talk = here.read(PROMPTS)
    first = collect(here.stream(talk, 5, sampling=GREEDY))
    talk.save(tmp_path / "talk")
    talk = there.load(tmp_path / "talk")
    second = collect(there.stream(talk, 4, sampling=GREEDY))
    talk.save(tmp_path / "talk")
    third = collect(here.stream(here.load(tmp_path / "talk"), 3, sampling=GREEDY))
    assert np.concatenate([first, second, third], 1).tolist() == expected.tolist()


def test_attention_in_blocks_of_queries(generators, monkeypatch) -> None:
    g = generators["granite"]
    expected = g.read([list(range(40))], g.read([[9, 8, 7]])).logits
    monkeypatch.setattr("refold.models.torch.hybrid.QUERY_BLOCK", 7)
    found = g.read([list(range(40))], g.read([[9, 8, 7]])).logits
    assert float((found - expected).abs().max()) <= 64 * 2**-23 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["mamba2", "granite"])
def test_a_step_is_one_graph(name: str, generators) -> None:
    g = generators[name]
    states = [g.read(PROMPTS).state for _ in range(2)]
    steps = g.model.step_, torch.compile(g.model.step_, backend="eager", fullgraph=True)
    expected, found = (step(g.config, g.params, torch.tensor([1, 2]), s) for step, s in zip(steps, states, strict=True))
    torch.testing.assert_close([found, states[1]["ssm"]], [expected, states[0]["ssm"]])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["last", "all", "hidden"])
def test_what_forward_returns_of_padded_rows(name: str, kind: str, generators) -> None:
    g = generators[name]
    tokens = torch.tensor([[1, 2, 3, 63, 62], [4, 5, 6, 7, 8]])
    found, state = g.model.forward(g.config, g.params, tokens, lengths=[3, 5], kind=kind)
    for row, n in enumerate((3, 5)):
        expected, alone = g.model.forward(g.config, g.params, tokens[row : row + 1, :n], kind=kind)
        part = found[row] if kind == "last" else found[row, :n]
        assert float((part - expected[0]).abs().max()) <= 64 * 2**-23 * float(expected.abs().max())
        assert kind == "last" or not found[row, n:].any()
        assert state["length"][row] == n
        assert torch.allclose(state["ssm"][:, row], alone["ssm"][:, 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [*CONFIGS, "experts"])
def test_gradients(name: str) -> None:
    """The change of a loss along a random direction is what the gradients say, in float64."""
    experts = dataclasses.replace(GRANITE, nexperts=3, experts_per_token=2, rope_theta=100.0, tied=False)
    config = experts if name == "experts" else CONFIGS[name]
    params = take_layers_apart(to_device(random_params(config)))
    leaves, wide = [], {}

    def widen(tree):
        if isinstance(tree, dict):
            return {k: widen(v) for k, v in tree.items()}
        if isinstance(tree, tuple):
            return tuple(map(widen, tree))
        leaves.append(tree.double().requires_grad_())
        return leaves[-1]

    wide = widen(params)
    tokens = torch.randint(0, config.vocab_size, (2, 9))
    target = torch.randn(2, 9, config.d_model, dtype=torch.float64)

    def loss():
        hidden, _ = model_for(config).forward(config, wide, tokens, lengths=[9, 6], kind="hidden", state=state())
        return (hidden * target).sum()

    def state():
        room = {"capacity": 9} if "k" in model_for(config).init_state(config, 1) else {}
        return model_for(config).init_state(config, 2, torch.float64, torch.float64, **room)

    gradients = torch.autograd.grad(loss(), leaves, allow_unused=True)  # a head that is not tied is not used
    directions = [torch.randn_like(leaf) for leaf in leaves]
    expected = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf += sign * (1 if sign > 0 else 2) * 1e-7 * direction
            values.append(float(loss()))
    assert abs((values[0] - values[1]) / 2e-7 - expected) <= 1e-4 * abs(expected)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_p=0.6),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=2.0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.7),
    ],
    ids=str,
)
def test_odds_are_those_of_transformers(sampling: Sampling) -> None:
    """Numbers spread evenly over [0, 1) draw each token as often as the warped distribution says."""
    t = pytest.importorskip("transformers")
    draws, seen_tokens = 20_000, [0, 2, 4]
    logits = torch.randn(1, 11) * 2
    scores = t.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(torch.tensor([seen_tokens]), logits)
    warpers = [t.TemperatureLogitsWarper(sampling.temperature)]
    warpers += [t.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [t.TopPLogitsWarper(sampling.top_p), t.MinPLogitsWarper(sampling.min_p)]
    for warp in warpers:
        scores = warp(None, scores)
    odds = scores.softmax(-1)[0].double()
    seen = torch.zeros(1, 11, dtype=torch.bool)
    seen[0, seen_tokens] = True
    drawn = (torch.arange(draws) + 0.5) / draws
    settings = settings_of(sampling, torch.device("cpu"))
    tokens = choose(logits.expand(draws, -1), seen.expand(draws, -1), drawn, settings, kind_of(sampling, 11))
    shares = tokens.bincount(minlength=11) / draws
    assert float((shares - odds).abs().max()) <= 2 / draws
    assert not shares[odds == 0].any()


def test_numbers_that_are_drawn() -> None:
    lengths = np.array([3, 70], np.int32)
    drawn = uniforms(5, lengths, 4000)
    assert drawn.shape == (2, 4000)
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert np.array_equal(drawn[:, 100:], uniforms(5, lengths + 100, 3900))  # position counts, not the call
    assert not np.isin(drawn, uniforms(6, lengths, 4000)).any()
    counts = np.histogram(drawn, 16, (0, 1))[0]
    assert (np.abs(counts - 500) <= 5 * 500**0.5).all()


def test_what_memory_cannot_hold_is_refused_before_any_work(generators, monkeypatch) -> None:
    g = generators["granite"]
    talk = g.read([[1, 2, 3]])
    monkeypatch.setattr("refold.generate.torch.available_bytes", lambda device: 1_000)
    monkeypatch.setattr(g.model, "forward", lambda *a, **k: pytest.fail("work was begun"))
    for ask in (
        lambda: g.read([list(range(60))] * 8),
        lambda: g.read([list(range(60))], talk),
        lambda: next(g.stream(talk, 100)),
    ):
        with pytest.raises(CapacityError, match=r"GiB, and 0\.0 GiB are free"):
            ask()
    with pytest.raises(MemoryError):
        generators["mamba2"].read([[1]] * 10_000)


def test_places_and_dtypes_that_are_not_there() -> None:
    params = random_params(MAMBA2)
    for device in ("nowhere", "meta", "cuda:99", "cuda" if not torch.cuda.is_available() else "cuda:98"):
        with pytest.raises(DeviceError, match="cannot be used"):
            Generator(MAMBA2, params, device=device)


def test_a_conversation_with_float64_weights_is_saved_and_loaded(tmp_path) -> None:
    params = take_layers_apart(to_device(random_params(MAMBA2)))
    layers = tuple({name: a.double() for name, a in layer.items()} for layer in params.pop("layers"))
    g = Generator(MAMBA2, {name: a.double() for name, a in params.items()} | {"layers": layers})
    talk = g.read([[1, 2, 3]])
    talk.save(tmp_path / "c")
    again = g.load(tmp_path / "c")
    assert again.logits.dtype == torch.float64
    assert [*map(np.ndarray.tolist, g.stream(again, 4))] == [*map(np.ndarray.tolist, g.stream(talk, 4))]


@pytest.mark.parametrize("name", CONFIGS)
def test_states_in_16_bits(name: str, generators) -> None:
    """Only what is kept is rounded: logits stay near those with float32 states."""
    wide = generators[name]
    narrow = Generator(wide.config, wide.params, state_dtype="bfloat16")
    found = []
    for g in (wide, narrow):
        talk = g.read([[1, 2, 3], [4, 5, 6, 7, 8]])
        with torch.no_grad():
            for token in (9, 10, 11):
                talk.logits = g.model.step_(g.config, g.params, torch.tensor([token, token + 1]), talk.state)
        assert talk.state["ssm"].dtype == g.state_dtype
        found.append(talk.logits)
    error = (found[1] - found[0]).norm() / found[0].norm()
    assert 0 < error < 1e-2
