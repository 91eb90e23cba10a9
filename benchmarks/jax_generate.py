"""Time decoding and prefill of language models with JAX; on CPU side by side with transformers.

    python benchmarks/jax_generate.py cpu --out results.jsonl      # 130M float32, interleaved with transformers (torch)
    python benchmarks/jax_generate.py device --out results.jsonl   # bfloat16 on the default device

Weights are random. Work and bytes are counted from the configuration (``refold.models.counts``); what XLA's own cost
model says of the compiled program stands beside them. Each row names its environment.
"""

import argparse
import dataclasses
import json
import platform
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import refold
from refold.generate.jax import Generator
from refold.models import counts
from refold.models.checkpoint import layout, random_params
from refold.models.configs import Config, GraniteHybridConfig, Mamba2Config, MambaConfig, Mixer2Config
from refold.models.jax import take_layers_apart


def mamba2(d_model: int, nlayers: int) -> Mamba2Config:
    """Return the configuration of the published sizes: heads of 64, state 128, one group, tied head."""
    mixer = Mixer2Config(d_model=d_model, nheads=d_model // 32, headdim=64, ngroups=1, dstate=128)
    return Mamba2Config(vocab_size=50288, nlayers=nlayers, mixer=mixer)


MODELS: dict[str, Config] = {
    "130M": mamba2(768, 24), "370M": mamba2(1024, 48), "1.3B": mamba2(2048, 48), "2.7B": mamba2(2560, 64),
    "mamba1-130M": MambaConfig(vocab_size=50280, d_model=768, nlayers=24, d_inner=1536, dstate=16, dt_rank=48),
    "hybrid-340M": GraniteHybridConfig(
        vocab_size=100352, kinds=(("mamba",) * 7 + ("attention",)) * 4, nheads=12, nkvheads=4, headdim=64,
        mixer=Mixer2Config(d_model=768, nheads=48, headdim=32, ngroups=1, dstate=128), attention_bias=False,
        rope_theta=None, shared_dim=2048, expert_dim=0, nexperts=0, experts_per_token=0, embedding_multiplier=12.0,
        residual_multiplier=0.246, attention_multiplier=0.015625, logits_divisor=3.0, max_positions=32768,
        norm_eps=1e-5, tied=True,
    ),
}  # fmt: skip


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


def seconds(call: Any, repeats: int, rounds: int = 1) -> list[float]:
    """Time ``repeats`` calls, each of which runs ``rounds`` units of work."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) / rounds)
    return times


def decoder(generator: Generator, batch: int, tokens: int) -> Any:
    """Return a call that decodes ``tokens`` tokens a row; a hybrid's cache has room for five such calls."""
    conversation = generator.read([[7] * PAST] * batch)

    def call() -> None:
        for _ in generator.stream(conversation, tokens, stop_tokens=[]):
            pass
        jax.block_until_ready(conversation.logits)

    return call


PAST = 1024
"""Tokens read before decoding is timed; attention reads them at each step."""


def reader(generator: Generator, batch: int, seqlen: int) -> Any:
    """Return a call that reads a prompt."""
    prompts = np.random.default_rng(0).integers(0, 50000, (batch, seqlen))

    def call() -> None:
        jax.block_until_ready(generator.read(list(prompts)).logits)

    return call


def xla_counts(generator: Generator, batch: int) -> dict[str, float]:
    """Return what XLA counts for one decoding step."""
    params, state = map(take_layers_apart, (generator.params, generator.read([[7] * PAST] * batch).state))
    step = jax.jit(lambda p, t, s: generator.model.step(generator.config, p, t, s), donate_argnums=2)
    analysis = step.lower(params, jnp.zeros(batch, jnp.int32), state).compile().cost_analysis()
    return {"xla_flops": analysis["flops"], "xla_bytes": analysis["bytes accessed"]}


def xla_prefill_counts(generator: Generator, seqlen: int) -> dict[str, float]:
    """Return what XLA counts for a prefill of Mamba-2: it counts a loop's body once, so a layer is counted apart."""
    config = generator.config
    if not isinstance(config, Mamba2Config):
        return {}

    def cost(nlayers: int) -> np.ndarray:
        layers = jax.tree.map(lambda a: a[:nlayers], generator.params["layers"])
        few = dataclasses.replace(config, nlayers=nlayers)
        read = jax.jit(lambda params, tokens: generator.model.forward(few, params, tokens))
        tokens = jax.ShapeDtypeStruct((1, seqlen), jnp.int32)
        analysis = read.lower({**generator.params, "layers": layers}, tokens).compile().cost_analysis()
        return np.array([analysis["flops"], analysis["bytes accessed"]])

    none, one = cost(0), cost(1)
    flops, moved = none + config.nlayers * (one - none)
    return {"xla_flops": float(flops), "xla_bytes": float(moved)}


def environment() -> dict[str, Any]:
    """Describe where this runs."""
    device = jax.devices()[0]
    return {"device": device.device_kind, "jax": jax.__version__, "python": platform.python_version(),
            "refold": refold.__version__}  # fmt: skip


def row(name: str, what: str, times: list[float], need: counts.Counts, extra: dict[str, Any]) -> dict[str, Any]:
    """Return one measurement: times in seconds a unit, operations and bytes a unit."""
    best, median = min(times), float(np.median(times))
    return {"schema": 1, "op": "generate", "backend": "jax", "case": f"{name} {what}", "median_s": median,
            "min_s": best, "n": len(times), "flops": need.flops, "bytes": need.bytes,
            "tflop_per_s": need.flops / median / 1e12, "gb_per_s": need.bytes / median / 1e9,
            "env": environment(), **extra}  # fmt: skip


def run_cpu() -> list[dict[str, Any]]:
    """Time the 130M model in float32, interleaved with transformers."""
    import torch
    from transformers import Mamba2Config as TorchConfig
    from transformers import Mamba2ForCausalLM

    model = MODELS["130M"]
    generator = Generator(model, random_params(model))
    torch_config = TorchConfig(hidden_size=768, num_hidden_layers=24, vocab_size=50288, num_heads=24, head_dim=64,
                               state_size=128, n_groups=1, tie_word_embeddings=True)  # fmt: skip
    peer = Mamba2ForCausalLM(torch_config).eval()
    steps = 16

    @torch.no_grad()
    def peer_decode() -> None:
        token = torch.ones(1, 1, dtype=torch.long)
        for _ in range(steps):
            token = peer(token, cache_params=cache, use_cache=True).logits[:, -1:].argmax(-1)

    with torch.no_grad():
        cache = peer(torch.ones(1, 4, dtype=torch.long), use_cache=True).cache_params
    one = decoder(generator, 1, steps)
    one(), peer_decode()
    ours, theirs = [], []
    for _ in range(6):
        ours += seconds(one, 1, steps)
        theirs += seconds(peer_decode, 1, steps)
    need = counts.decode(model, 1, 4)
    rows = [row("130M fp32", "decode batch 1", ours, need, xla_counts(generator, 1))]
    rows.append({**row("130M fp32", "decode batch 1", theirs, need, {}), "backend": "transformers"})
    many = decoder(generator, 16, steps)
    many()
    rows.append(row("130M fp32", "decode batch 16", seconds(many, 4, steps), counts.decode(model, 16, 4), {}))
    read = reader(generator, 1, 1024)
    read()
    rows.append(row("130M fp32", "prefill 1024", seconds(read, 5), counts.prefill(model, 1, 1024, 64, 4), {}))
    return rows


def run_device(names: list[str], lengths: list[int], batches: list[int]) -> list[dict[str, Any]]:
    """Time models in bfloat16 on the default device; shares are of what the device itself reaches."""
    ceilings = measure_ceilings()
    rows = []
    for name in names:
        model = MODELS[name]
        generator = Generator(model, device_params(model, jnp.bfloat16))
        for batch in batches:
            decode = decoder(generator, batch, 96)
            decode()
            need = counts.decode(model, batch, 2, past=PAST + 3 * 96)
            times = seconds(decode, 4, 96)
            rows.append(row(name, f"decode batch {batch}", times, need, {**ceilings, **xla_counts(generator, batch)}))
            print_row(rows[-1])
        for seqlen in lengths:
            read = reader(generator, 1, seqlen)
            read()
            need = counts.prefill(model, 1, seqlen, 128, 2)
            extra = {**ceilings, **xla_prefill_counts(generator, seqlen)}
            rows.append(row(name, f"prefill {seqlen}", seconds(read, 5), need, extra))
            print_row(rows[-1])
    return rows


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


def print_row(r: dict[str, Any]) -> None:
    """Print one measurement for people."""
    unit = r["median_s"] * 1e3
    shares = ""
    if "ceiling_gb_per_s" in r:
        shares = f"  {r['tflop_per_s'] / r['ceiling_tflop_per_s']:6.1%} of matrix rate"
        shares += f"  {r['gb_per_s'] / r['ceiling_gb_per_s']:6.1%} of bandwidth"
    if "xla_flops" in r:
        shares += (
            f"  XLA counts {r['xla_flops'] / r['flops']:.2f} of the work, {r['xla_bytes'] / r['bytes']:.2f} of bytes"
        )
    print(f"{r['backend']:<13}{r['case']:<28}{unit:10.3f} ms  {r['tflop_per_s']:8.3f} TFLOP/s  "
          f"{r['gb_per_s']:8.1f} GB/s{shares}", flush=True)  # fmt: skip


def main() -> None:
    """Run, print a table, append JSONL; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["cpu", "device"])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--models", nargs="+", default=["130M", "2.7B", "mamba1-130M", "hybrid-340M"], choices=list(MODELS)
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    options = parser.parse_args()
    if options.where == "cpu":
        rows = run_cpu()
        for r in rows:
            print_row(r)
    else:
        rows = run_device(options.models, options.lengths, options.batches)
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in rows)
    print(json.dumps({r["backend"] + " " + r["case"]: round(r["median_s"] * 1e3, 4) for r in rows}))


if __name__ == "__main__":
    main()
