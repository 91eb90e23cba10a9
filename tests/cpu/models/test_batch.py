"""Rows that come and go decode as they would alone; prompts can be kept at some of their tokens."""

import asyncio
import json
import random
import runpy
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from refold.errors import ArgumentError, CapacityError
from refold.generate.sampling import Sampling
from refold.generate.torch import Generator
from refold.models.checkpoint import random_params
from refold.models.torch import steps
from refold.ops.torch import graphs
from support.models import CONFIGS
from support.recorder import record

pytestmark = pytest.mark.rows(6)

EXAMPLES = Path(__file__).parents[3] / "examples"
SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.4),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.2, top_k=7, seed=4),
    Sampling(temperature=0.8, top_k=9, top_p=0.8, min_p=0.02, repetition_penalty=1.2, seed=5),
]


@pytest.fixture(scope="module", params=list(CONFIGS))
def generator(request) -> Generator:
    config = CONFIGS[request.param]
    return Generator(config, random_params(config))


def work(g: Generator, rows: int, fixed: bool, seed: int) -> None:
    """Let random rows come and go; each must get the tokens that it gets alone."""
    draw, batch = random.Random(seed), g.batch(rows, fixed=fixed)
    asked, there = {}, set()
    for _ in range(24):
        if len(there) < rows and draw.random() < 0.4:
            prompt = [draw.randrange(g.config.vocab_size) for _ in range(draw.randrange(1, 12))]
            options = {"sampling": draw.choice(SAMPLINGS), "stop_tokens": draw.sample(range(g.config.vocab_size), 2)}
            limit = draw.randrange(1, 9)
            given = g.read([prompt]) if draw.random() < 0.3 else prompt
            row = batch.add(given, limit, **options, keep=draw.random() < 0.5)
            asked[row] = (prompt, limit, options)
            there.add(row)
        elif there and draw.random() < 0.1:
            row = draw.choice([*there])
            assert g.lengths(batch.remove(row)).tolist() == [len(asked.pop(row)[0]) + len(row.tokens)]
            there.remove(row)
        made = batch.step()
        assert (
            batch._lengths.tolist() == g.lengths(batch._held).tolist()
        )  # on the host, so that no token waits for them
        assert made.keys() == there
        assert [row.tokens[-1] for row in made] == [*made.values()]
        there = {row for row in there if not row.done}
        assert len(batch) == len(there)
    for row, (prompt, limit, options) in asked.items():
        (alone,) = g.generate([prompt], limit, **options)
        assert row.tokens == (alone[: len(row.tokens)] if row in there else alone)
        if row.conversation is not None:
            assert goes_on(g, row.conversation) == goes_on(g, g.read([prompt + alone]))


def goes_on(g: Generator, talk) -> list[int]:
    return np.concatenate(list(g.stream(talk, 4, stop_tokens=[])), 1).tolist()


@pytest.mark.parametrize("fixed", [False, True])
def test_rows_come_and_go_as_if_alone(generator, fixed) -> None:
    work(generator, 5, fixed, 1 + fixed)


def test_graphs_of_several_numbers_of_rows(generator, monkeypatch) -> None:
    """As on a GPU, but recorded by a stand-in. Attention on the CPU reads as many keys as there are: not recorded."""
    if "k" in generator.start(1).state:
        return
    monkeypatch.setitem(graphs.recorders, "cpu", record)
    monkeypatch.setattr(steps, "few_rows", lambda: None)  # the stand-in records operations of PyTorch only
    work(generator, 4, False, 7)


def test_a_long_row_makes_room_for_all(generator) -> None:
    """The store of keys and values grows while others are in it."""
    batch = generator.batch(3)
    first = batch.add([1, 2, 3], 20, stop_tokens=[])
    batch.step()
    second = batch.add(list(range(30)), 20, stop_tokens=[])
    while len(batch):
        batch.step()
    for row, prompt in ((first, [1, 2, 3]), (second, list(range(30)))):
        assert [row.tokens] == generator.generate([prompt], 20, stop_tokens=[])


def test_a_shared_beginning_is_read_once(generator) -> None:
    prompt = list(range(20))
    talk = generator.read([prompt], checkpoint_every=7)
    assert [generator.lengths(kept).tolist() for kept in talk.kept] == [[7], [14]]
    for kept, n in zip(talk.kept, (7, 14), strict=True):
        again = generator.read([[9, 8]], kept.fork())
        assert again.kept == []
        assert goes_on(generator, again) == goes_on(generator, generator.read([[*prompt[:n], 9, 8]]))
    batch = generator.batch(2)
    rows = [batch.add(talk.kept[1], 5, sampling=sampling, stop_tokens=[]) for sampling in SAMPLINGS[1:3]]
    while len(batch):
        batch.step()
    for row, sampling in zip(rows, SAMPLINGS[1:3], strict=True):
        assert [row.tokens] == generator.generate([prompt[:14]], 5, sampling=sampling, stop_tokens=[])


def test_rows_of_several_lengths_are_kept(generator) -> None:
    talk = generator.read([[1, 2, 3], [4] * 9], checkpoint_every=4)
    assert [generator.lengths(kept).tolist() for kept in talk.kept] == [[3, 4], [3, 8]]
    assert goes_on(generator, talk.kept[0]) == goes_on(generator, generator.read([[1, 2, 3], [4] * 4]))


def test_jax_keeps_prompts_as_well() -> None:
    pytest.importorskip("jax")
    from refold.generate.jax import Generator as JaxGenerator

    g = JaxGenerator(CONFIGS["mamba2"], random_params(CONFIGS["mamba2"]))
    talk = g.read([list(range(9))], checkpoint_every=4)
    assert [g.lengths(kept).tolist() for kept in talk.kept] == [[4], [8]]
    assert goes_on(g, talk.kept[0]) == goes_on(g, g.read([list(range(4))]))


def test_refusals(generator, monkeypatch) -> None:
    batch = generator.batch(1)
    row = batch.add([1], 3, stop_tokens=[])
    with pytest.raises(CapacityError, match="all 1 rows are taken"):
        batch.add([1], 3)
    batch.remove(row)
    assert row.done
    assert batch.step() == {}
    for gone in (row, None):
        with pytest.raises(ArgumentError, match="row is not in this batch"):
            batch.remove(gone)
    other = CONFIGS["mamba2" if "k" in batch._held.state else "qwen"]
    with pytest.raises(ArgumentError, match="conversation belongs to another model"):
        batch.add(Generator(other, random_params(other)).read([[1]]), 3)
    with pytest.raises(ArgumentError, match="prompt 0 is empty"):
        batch.add([], 3)
    with pytest.raises(ArgumentError, match="conversation of one row"):
        batch.add(generator.read([[1], [2]]), 3)
    with pytest.raises(ArgumentError, match="max_new_tokens must be"):
        batch.add([1], 0)
    assert not len(batch)
    with pytest.raises(ArgumentError, match="rows must be"):
        generator.batch(0)
    with pytest.raises(ArgumentError, match="checkpoint_every must be"):
        generator.read([[1]], checkpoint_every=0)


def test_copies_that_memory_cannot_hold_are_refused(generator, monkeypatch) -> None:
    for free in (2**n for n in range(10, 40)):
        monkeypatch.setattr(Generator, "_free_bytes", lambda self, free=free: free)
        with suppress(CapacityError):
            generator.read([[1] * 100])
            break
    with pytest.raises(CapacityError):
        generator.read([[1] * 100], checkpoint_every=1)


def test_the_example_serves_two_clients_at_once() -> None:
    pytest.importorskip("starlette")
    httpx = pytest.importorskip("httpx")
    serve = runpy.run_path(str(EXAMPLES / "serve.py"))
    g = Generator(CONFIGS["mamba2"], random_params(CONFIGS["mamba2"]))
    app = serve["application"](g, 2)

    async def ask(client, **asked):
        async with client.stream("POST", "/generate", json=asked) as answer:
            return answer.status_code, [json.loads(line) async for line in answer.aiter_lines()]

    async def talk():
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as c:
            good = [{"prompt": [1 + i, 2, 3], "max_new_tokens": 4 + i, "seed": i} for i in range(3)]
            answers = await asyncio.gather(*(ask(c, temperature=0.8, **one) for one in good))
            bad = await ask(c, prompt=[-1])
        return good, answers, bad

    good, answers, (status, (error,)) = asyncio.run(talk())
    for one, (ok, lines) in zip(good, answers, strict=True):
        sampling = Sampling(temperature=0.8, seed=one["seed"])
        assert ok == 200
        assert [[line["token"] for line in lines]] == g.generate(
            [one["prompt"]], one["max_new_tokens"], sampling=sampling
        )
    assert status == 400
    assert "token id -1" in error["error"]
