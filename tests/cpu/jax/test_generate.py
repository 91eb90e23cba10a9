"""Generation with JAX: stacked layers, compiled shapes, choice; tests/cpu/models/test_generate.py has the rest."""

import jax
import numpy as np
import pytest

from refold.generate.generator import bucket
from refold.generate.jax import Generator, choose
from refold.models.checkpoint import random_params
from support.models import CONFIGS, MAMBA2
from support.products import few

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]


@pytest.fixture(scope="module")
def generators() -> dict[str, Generator]:
    return {name: Generator(config, random_params(config)) for name, config in CONFIGS.items()}


@few("name", list(CONFIGS), ["mamba"])
def test_stacked_layers_give_the_same_tokens(name: str, generators) -> None:
    stacked = Generator(CONFIGS[name], generators[name].params, layers_apart=False)
    assert stacked.generate(PROMPTS, 11) == generators[name].generate(PROMPTS, 11)


def test_new_lengths_do_not_recompile(generators) -> None:
    g = Generator(MAMBA2, random_params(MAMBA2))
    for length in range(17, 25):
        g.generate([list(range(length))], length)
    assert g._read._cache_size() == 1
    assert g._steps._cache_size() == 1


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
