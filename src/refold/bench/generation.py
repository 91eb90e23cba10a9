"""Decoding and prefill of language models with JAX; on the CPU in turns with transformers.

Weights are random. Work and bytes are counted from the configuration (``refold.models.counts``). A row of
decoding also holds what XLA's own cost model says of the compiled step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..generate.jax import Generator
from ..models import counts
from ..models.checkpoint import layout, random_params
from ..models.configs import Config, Mamba2Config
from ..models.jax import take_layers_apart
from .language_models import MODELS, PAST, in_turns, row, seconds
from .options import check_names
from .peers import of_transformers, transformers_decoder
from .progress import wanted
from .rows import Row


def device_params(model: Config, dtype: Any) -> Any:
    """Draw random parameters on the device, one layer at a time, so that no copy of the model is needed."""
    params: dict[str, Any] = {}
    for number, entry in enumerate({entry.path: entry for entry in layout(model)}.values()):
        name, shape = entry.path[-1], entry.stored
        scale = 0.02 if entry.index is None else shape[-1] ** -0.5
        keep = jnp.float32 if entry.exact else dtype

        def draw(key: Any, name: str = name, shape: Any = shape, scale: float = scale, keep: Any = keep) -> Any:
            if name == "A_log":
                return jnp.log(jax.random.uniform(key, shape, minval=1, maxval=16)).astype(keep)
            if name == "dt_bias":
                dt = jnp.exp(jax.random.uniform(key, shape, minval=np.log(1e-3), maxval=np.log(1e-1)))
                return jnp.log(jnp.expm1(dt)).astype(keep)
            if name == "D" or name.endswith("norm"):
                return jnp.ones(shape, keep)
            return (jax.random.normal(key, shape) * scale).astype(keep)

        key = jax.random.key(number)
        place = params if entry.index is None else params.setdefault(entry.path[0], {})
        if entry.index is None:
            place[name] = jax.jit(draw)(key)
        else:
            place[name] = jax.jit(lambda keys, draw=draw: jax.lax.map(draw, keys))(jax.random.split(key, entry.depth))
    return jax.block_until_ready(params)


def decoder(generator: Generator, batch: int, tokens: int) -> Any:
    """Return a call that decodes ``tokens`` tokens per row; a hybrid's cache has room for five such calls."""
    conversation = generator.read([[7] * PAST] * batch)

    def call() -> None:
        for _ in generator.stream(conversation, tokens, stop_tokens=[]):
            pass
        jax.block_until_ready(conversation.logits)

    return call


def reader(generator: Generator, batch: int, seqlen: int) -> Any:
    """Return a call that reads a prompt."""
    prompts = np.random.default_rng(0).integers(0, 50000, (batch, seqlen))

    def call() -> None:
        jax.block_until_ready(generator.read(list(prompts)).logits)

    return call


def xla_counts(generator: Generator, batch: int) -> dict[str, float]:
    """Let XLA count one decoding step."""
    params, state = map(take_layers_apart, (generator.params, generator.read([[7] * PAST] * batch).state))
    step = jax.jit(lambda p, t, s: generator.model.step(generator.config, p, t, s), donate_argnums=2)
    analysis: Any = step.lower(params, jnp.zeros(batch, jnp.int32), state).compile().cost_analysis()
    return {"xla_flops": analysis["flops"], "xla_bytes": analysis["bytes accessed"]}


def generation_cpu(*, tokens: int = 16, seqlen: int = 1024, repeats: int = 6) -> Iterator[Row]:
    """Time decoding and prefill of Mamba-2 130M with JAX on the CPU, float32, in turns with transformers."""
    model, name = MODELS["130M"], "130M fp32"
    assert isinstance(model, Mamba2Config)
    generator = cache(lambda: Generator(model, random_params(model)))
    if wanted(case=f"{name} decode batch 1"):
        peer = transformers_decoder(of_transformers(model), 1, 4, tokens)
        calls = {"jax": decoder(generator(), 1, tokens), "transformers": peer}
        need, xla = counts.decode(model, 1, 4), xla_counts(generator(), 1)
        yield from in_turns(calls, name, "decode batch 1", repeats, tokens, need, xla)
    if wanted(case=f"{name} decode batch 16"):
        many = decoder(generator(), 16, tokens)
        many()
        yield row("jax", name, "decode batch 16", seconds(many, repeats, tokens), counts.decode(model, 16, 4))
    if wanted(case=f"{name} prefill {seqlen}"):
        read = reader(generator(), 1, seqlen)
        read()
        yield row("jax", name, f"prefill {seqlen}", seconds(read, repeats), counts.prefill(model, 1, seqlen, 64, 4))


def generation(
    *,
    models: tuple[str, ...] = ("130M", "2.7B", "mamba1-130M", "hybrid-340M"),
    lengths: tuple[int, ...] = (1024, 8192),
    batches: tuple[int, ...] = (1, 16),
) -> Iterator[Row]:
    """Time decoding and prefill of models with JAX on the default device, bfloat16."""
    check_names("generation: models", models, MODELS)
    ceilings = cache(measure_ceilings)
    for name in models:
        model = MODELS[name]
        generator = cache(lambda model=model: Generator(model, device_params(model, jnp.bfloat16)))
        for batch in batches:
            if not wanted(case=f"{name} decode batch {batch}"):
                continue
            decode = decoder(generator(), batch, 96)
            decode()
            need = counts.decode(model, batch, 2, past=PAST + 3 * 96)
            extra = {**ceilings(), **xla_counts(generator(), batch)}
            yield row("jax", name, f"decode batch {batch}", seconds(decode, 4, 96), need, extra)
        for seqlen in lengths:
            if not wanted(case=f"{name} prefill {seqlen}"):
                continue
            read = reader(generator(), 1, seqlen)
            read()
            need = counts.prefill(model, 1, seqlen, 128, 2)
            yield row("jax", name, f"prefill {seqlen}", seconds(read, 5), need, ceilings())


def measure_ceilings() -> dict[str, float]:
    """Measure the device's copy bandwidth and bfloat16 matrix rate."""
    a = jax.random.normal(jax.random.key(1), (2**28,))
    copy = jax.jit(lambda a: a + 1)
    m = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda m: m @ m)
    rates = {}
    for name, call, work in (("gb_per_s", lambda: copy(a), 2 * 2**30 / 1e9), ("tflop_per_s", lambda: product(m), 1.1)):
        jax.block_until_ready(call())
        times = seconds(lambda call=call: jax.block_until_ready([call() for _ in range(20)]), 5, 20)
        rates[f"ceiling_{name}"] = work / min(times)
    return rates
