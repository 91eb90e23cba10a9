"""Generation on a GPU: CUDA graphs give the same tokens as the plain loop, and lend memory to one conversation."""

import gc
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cpu.models.test_batch import work
from refold.generate.sampling import Sampling
from refold.generate.torch import NO_TOKEN, Generator
from refold.models.checkpoint import random_params
from support.models import CONFIGS

kernels = pytest.importorskip("refold.models.torch.kernels")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]
DRAWN = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=7)


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Generator, Generator]]:
    """Return the same model on the GPU and on the CPU, float32."""
    made = {name: random_params(config) for name, config in CONFIGS.items()}
    return {
        name: (Generator(config, made[name], device="cuda"), Generator(config, made[name]))
        for name, config in CONFIGS.items()
    }


def collect(parts) -> np.ndarray:
    return np.concatenate(list(parts), axis=1)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.5), DRAWN], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_are_those_of_the_cpu(name: str, sampling: Sampling, rows: int, pairs) -> None:
    there, here = pairs[name]
    expected = here.generate(PROMPTS[:rows], 40, sampling=sampling)
    assert there.generate(PROMPTS[:rows], 40, sampling=sampling) == expected
    parts = list(there.stream(there.read(PROMPTS[:rows]), 40, sampling=sampling, every=7))
    assert collect(parts).tolist() == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_conversations_take_turns_in_one_graph(name: str, pairs) -> None:
    g, _ = pairs[name]
    one, two = g.read(PROMPTS), g.read(PROMPTS[::-1])
    expected = [collect(g.stream(talk.fork(), 12)).tolist() for talk in (one, two)]
    found: list[list[np.ndarray]] = [[], []]
    for _ in range(4):
        for talk, parts in zip((one, two), found, strict=True):
            parts.append(collect(g.stream(talk, 3)))
    assert [np.concatenate(parts, 1).tolist() for parts in found] == expected
    g.read([[9], [9]], one)  # reads on, in memory that was lent
    whole = g.read([[*p, *t, 9] for p, t in zip(PROMPTS, expected[0], strict=True)])
    assert collect(g.stream(one, 6)).tolist() == collect(g.stream(whole, 6)).tolist()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fixed", [False, True])
def test_rows_come_and_go_as_if_alone(name: str, fixed: bool, pairs) -> None:
    """With one graph for each number of rows, as in tests/cpu/models/test_batch.py."""
    work(pairs[name][0], 5, fixed, 1 + fixed)


@pytest.mark.parametrize("name", CONFIGS)
def test_stopped_rows_wait(name: str, pairs) -> None:
    there, here = pairs[name]
    free = here.generate(PROMPTS, 10, sampling=DRAWN)
    stop = next(t for t in free[0][:-1] if t not in free[1])
    talks = [g.read(PROMPTS) for g in (there, here)]
    options = {"sampling": DRAWN, "stop_tokens": [stop]}
    found, expected = (collect(g.stream(talk, 10, **options)) for g, talk in zip((there, here), talks, strict=True))
    assert found.tolist() == expected.tolist()
    assert NO_TOKEN in found[0]
    for part in ("conv", "ssm"):
        a, b = talks[0].state[part].cpu(), talks[1].state[part]
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("theta", [None, 10000.0], ids=["no positions", "rotary"])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_with_and_without_the_kernels_of_attention(theta: float | None, rows: int, monkeypatch) -> None:
    """Greedy tokens in a CUDA graph, on pasts of several lengths that are no multiple of a tile."""
    config = replace(CONFIGS["granite"], rope_theta=theta, max_positions=2048)
    params, calls = random_params(config), []
    prompts = [[(11 * i + r) % 64 for i in range(n)] for r, n in enumerate((701, 3, 317))][:rows]
    attend_ = kernels.attend_
    monkeypatch.setattr(kernels, "attend_", lambda *arguments: calls.append(1) or attend_(*arguments))
    found = Generator(config, params, device="cuda").generate(prompts, 80)
    assert calls
    monkeypatch.setattr(kernels, "takes_cache", lambda *_: False)
    calls.clear()
    assert Generator(config, params, device="cuda").generate(prompts, 80) == found
    assert not calls


def test_reading_then_decoding_equals_reading_all_in_bfloat16(pairs) -> None:
    """As far from float32 as reading all is, at most."""
    config = CONFIGS["mamba2"]
    rounded = random_params(config, dtype="bfloat16")
    wide = {
        k: {n: a.astype("float32") for n, a in v.items()} if isinstance(v, dict) else v.astype("float32")
        for k, v in rounded.items()
    }
    g, exact = Generator(config, rounded, device="cuda"), Generator(config, wide)
    for rows in (1, 2):
        talk = g.read(PROMPTS[:rows])
        made = collect(g.stream(talk, 24))
        whole = [p + t.tolist() for p, t in zip(PROMPTS, made, strict=False)]
        right = exact.read(whole).logits
        read = (g.read(whole).logits.cpu() - right).norm()
        assert (talk.logits.cpu() - right).norm() <= 1.5 * read


def test_graphs_give_memory_back(pairs) -> None:
    config = CONFIGS["mamba2"]
    g = Generator(config, random_params(config), device="cuda")
    for rows in range(1, 8):
        g.generate([[1, 2]] * rows, 3)
    assert len(g._graphs) <= 4
    del g
    gc.collect()


def test_kernels_equal_their_definition() -> None:
    """The tests of the kernels that run interpreted elsewhere."""
    file = Path(__file__).parents[1] / "cpu" / "models" / "test_step_kernels.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(file),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-p",
        "no:xdist",
    ]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=file.parents[3], env=alone, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
