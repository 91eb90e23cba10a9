"""Decoding and prefill of language models with PyTorch, next to transformers, and mamba-ssm if it can be imported.

Weights are random. Work and bytes are counted from the configuration (``refold.models.counts``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError
from ..generate.torch import Generator
from ..models import counts
from ..models.checkpoint import layout, random_params
from ..models.configs import Config, Mamba2Config
from .language_models import MODELS, PAST, row, seconds
from .progress import wanted
from .rows import Row

STEPS = 256


def device_params(model: Config, dtype: torch.dtype, device: str) -> Any:
    """Draw random parameters on a device, one layer at a time, scaled as ``random_params`` does."""
    params: dict[str, Any] = {}
    for entry in {entry.path: entry for entry in layout(model)}.values():
        name = entry.path[-1]
        keep = torch.float32 if entry.exact else dtype
        place = params if entry.index is None else params.setdefault(entry.path[0], {})
        stack = torch.empty(max(entry.depth, 1), *entry.stored, dtype=keep, device=device)
        for part in stack:
            if name == "A_log":
                part.uniform_(1, 16).log_()
            elif name == "dt_bias":
                part.uniform_(np.log(1e-3), np.log(1e-1)).exp_().expm1_().log_()
            elif name == "D" or name.endswith("norm"):
                part.fill_(1)
            else:
                scale = 0.02 if entry.index is None else entry.stored[-1] ** -0.5
                part.copy_(torch.randn(entry.stored, device=device).mul_(scale))
        place[name] = stack[0] if entry.index is None else stack
    return params


def done(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decoder(generator: Generator, batch: int, past: int, steps: int) -> Callable[[], None]:
    """Return a call that decodes ``steps`` tokens per row after ``past`` tokens, the choice of each one included."""
    conversation = generator.read([[7] * past] * batch)

    def call() -> None:
        for _ in generator.stream(conversation, steps, stop_tokens=[]):
            pass
        done(generator.device)

    return call


def reader(generator: Generator, seqlen: int) -> Callable[[], None]:
    """Return a call that reads a prompt."""
    prompt = np.random.default_rng(0).integers(0, 50000, (1, seqlen))

    def call() -> None:
        generator.read(list(prompt))
        done(generator.device)

    return call


@cache
def ceilings() -> dict[str, float]:
    """Measure the GPU's copy bandwidth and bfloat16 matrix rate."""
    a, m = torch.randn(2**28, device="cuda"), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    found = {}
    for name, call, work in (("gb_per_s", lambda: b.copy_(a), 2 * 2**30 / 1e9), ("tflop_per_s", lambda: m @ m, 1.1)):

        def many(call: Callable[[], Any] = call) -> None:
            for _ in range(20):
                call()
            torch.cuda.synchronize()

        many()
        found[f"ceiling_{name}"] = work / min(seconds(many, 5, 20))
    return found


def _models(suite: str, names: tuple[str, ...]) -> Iterator[tuple[str, Config, Callable[[], Generator]]]:
    if unknown := sorted(set(names) - set(MODELS)):
        raise ArgumentError(f"{suite}: models has {unknown[0]!r}. Give some of {', '.join(MODELS)}")
    if not torch.cuda.is_available():
        raise ArgumentError(f"{suite} needs a GPU, and there is none. The suite generation-torch-cpu needs none")
    for name in names:
        model = MODELS[name]
        yield (
            name,
            model,
            cache(lambda model=model: Generator(model, device_params(model, torch.bfloat16, "cuda"), device="cuda")),
        )


def decode(
    *,
    models: tuple[str, ...] = ("130M", "2.7B", "mamba1-130M", "hybrid-340M"),
    batches: tuple[int, ...] = (1, 16),
    pasts: tuple[int, ...] = (PAST, 131072),
    peers: bool = True,
) -> Iterator[Row]:
    """Time decoding with PyTorch on the GPU, bfloat16, after short and long prompts, next to transformers."""
    for name, model, generator in _models("decode", models):
        for batch in batches:
            for past in pasts:
                case = f"{name} decode batch {batch} past {past}"
                fits = batch * past <= 2**18 and past + 5 * STEPS <= getattr(model, "max_positions", past + 5 * STEPS)
                if not fits or not wanted(backend="torch", case=case):
                    continue
                call = decoder(generator(), batch, past, STEPS)
                call()
                need = counts.decode(model, batch, 2, past=past + 3 * STEPS)
                yield row("torch", name, case.removeprefix(f"{name} "), seconds(call, 4, STEPS), need, ceilings())
        if peers and isinstance(model, Mamba2Config):
            yield from _transformers_decoding(name, model, batches)


def prefill(
    *,
    models: tuple[str, ...] = ("130M", "2.7B", "mamba1-130M", "hybrid-340M"),
    lengths: tuple[int, ...] = (1024, 8192, 131072),
) -> Iterator[Row]:
    """Time the reading of a prompt with PyTorch on the GPU, bfloat16, and the memory that it takes."""
    for name, model, generator in _models("prefill", models):
        for seqlen in lengths:
            fits = seqlen <= getattr(model, "max_positions", seqlen)
            if not fits or not wanted(backend="torch", case=f"{name} prefill {seqlen}"):
                continue
            call = reader(generator(), seqlen)
            call()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            times = seconds(call, 5)
            extra = {"extra_gib": (torch.cuda.max_memory_allocated() - held) / 2**30, **ceilings()}
            need = counts.prefill(model, 1, seqlen, 64, 2)
            yield row("torch", name, f"prefill {seqlen}", times, need, extra)


def _transformers(model: Mamba2Config) -> Any:
    """Return transformers' model of the same sizes, random."""
    from transformers import Mamba2Config as Settings
    from transformers import Mamba2ForCausalLM

    m = model.mixer
    settings = Settings(
        hidden_size=m.d_model, num_hidden_layers=model.nlayers, vocab_size=model.vocab_size, num_heads=m.nheads,
        head_dim=m.headdim, state_size=m.dstate, n_groups=m.ngroups, tie_word_embeddings=True,
    )  # fmt: skip
    return Mamba2ForCausalLM(settings).eval()


@torch.no_grad()
def _transformers_decoding(name: str, model: Mamba2Config, batches: tuple[int, ...]) -> Iterator[Row]:
    """Time transformers' model, accelerated, whose one-token forward is captured in a CUDA graph as well."""
    from .. import accelerate

    @cache
    def peer() -> Any:
        with torch.device("cuda"):
            found = _transformers(model).to(torch.bfloat16)
        accelerate(found)
        return found

    for batch in batches:
        what = f"decode batch {batch} past {PAST}"
        if not wanted(backend="transformers, accelerated, CUDA graph", case=f"{name} {what}"):
            continue
        token = torch.full((batch, 1), 7, device="cuda")
        cache_ = peer()(token.expand(-1, PAST), use_cache=True).cache_params

        def step(token: torch.Tensor = token, cache_: Any = cache_) -> None:
            token.copy_(peer()(token, cache_params=cache_, use_cache=True).logits[:, -1:].argmax(-1))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()

        def call(graph: Any = graph) -> None:
            for _ in range(STEPS):
                graph.replay()
            torch.cuda.synchronize()

        call()
        need = counts.decode(model, batch, 2)
        backend = "transformers, accelerated, CUDA graph"
        yield row(backend, name, what, seconds(call, 4, STEPS), need, ceilings())


def generation_torch_cpu(*, tokens: int = 16, seqlen: int = 256, repeats: int = 6) -> Iterator[Row]:
    """Time decoding and prefill of Mamba-2 130M with PyTorch on the CPU, float32, in turns with transformers."""
    model, name = MODELS["130M"], "130M fp32"
    assert isinstance(model, Mamba2Config)
    generator = cache(lambda: Generator(model, random_params(model)))
    peer = cache(lambda: _transformers(model))
    if wanted(case=f"{name} decode batch 1"):
        with torch.no_grad():
            held = peer()(torch.ones(1, 4, dtype=torch.long), use_cache=True).cache_params

        @torch.no_grad()
        def step() -> None:
            token = torch.ones(1, 1, dtype=torch.long)
            for _ in range(tokens):
                token = peer()(token, cache_params=held, use_cache=True).logits[:, -1:].argmax(-1)

        one = decoder(generator(), 1, 4, tokens)
        yield from _in_turns(name, "decode batch 1", one, step, repeats, tokens, counts.decode(model, 1, 4))
    if wanted(case=f"{name} prefill {seqlen}"):
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 50000, (1, seqlen)))

        @torch.no_grad()
        def read() -> None:
            peer()(ids, use_cache=True, logits_to_keep=1)

        need = counts.prefill(model, 1, seqlen, 64, 4)
        yield from _in_turns(name, f"prefill {seqlen}", reader(generator(), seqlen), read, min(repeats, 3), 1, need)


def _in_turns(
    name: str,
    what: str,
    ours: Callable[[], None],
    theirs: Callable[[], None],
    repeats: int,
    rounds: int,
    need: counts.Counts,
) -> Iterator[Row]:
    """Time two calls turn by turn."""
    ours()
    theirs()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for call, found in zip((ours, theirs), times, strict=True):
            found += seconds(call, 1, rounds)
    for backend, found in zip(("torch", "transformers"), times, strict=True):
        yield row(backend, name, what, found, need)
