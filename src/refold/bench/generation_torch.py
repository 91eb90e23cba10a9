"""Decoding and prefill of language models with PyTorch, next to mamba-ssm's own generation and transformers' models.

mamba-ssm decodes with its own CUDA graph. Its rows say so if its convolution is not the fast one. transformers' models
run with mamba-ssm's kernels, and accelerated by refold. A package that cannot be imported, or fails, has a row
"not run". Rows "host loop" are of the same steps as ours, without a CUDA graph.

Weights are random. Work and bytes are counted from the configuration (``refold.models.counts``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

import refold

from ..errors import ArgumentError, first_line
from ..generate.torch import Generator
from ..models import counts
from ..models.checkpoint import layout, random_params
from ..models.configs import Config, Mamba2Config, MambaConfig
from ..verify.timing import synchronize
from . import peers
from .language_models import MODELS, PAST, in_turns, not_run, row, seconds
from .options import DTYPES, check_names
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


def decoder(generator: Generator, batch: int, past: int, steps: int) -> Callable[[], None]:
    """Return a call that decodes ``steps`` tokens per row after ``past`` tokens, the choice of each one included."""
    conversation = generator.read([[7] * past] * batch)

    def call() -> None:
        for _ in generator.stream(conversation, steps, stop_tokens=[]):
            pass
        synchronize(generator.device)

    return peers.with_state_dtype(call, conversation.state["ssm"])


def host_decoder(generator: Generator, batch: int, past: int, steps: int) -> Callable[[], None]:
    """Return the same by a loop of the host, which launches each kernel of each token; greedy."""
    conversation = generator.read([[7] * past] * batch)
    model, config, params = generator.model, generator.config, generator.params
    active = torch.ones(batch, dtype=torch.bool, device=generator.device)

    @torch.no_grad()
    def call() -> None:
        for _ in range(steps):
            token = conversation.logits.argmax(-1)
            conversation.logits = model.step_(config, params, token, conversation.state, active=active)
        synchronize(generator.device)

    return peers.with_state_dtype(call, conversation.state["ssm"])


def reader(generator: Generator, seqlen: int) -> Callable[[], None]:
    """Return a call that reads a prompt."""
    prompt = np.random.default_rng(0).integers(0, 50000, (1, seqlen))

    def call() -> None:
        generator.read(list(prompt))
        synchronize(generator.device)

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


def measured(
    backend: str, name: str, what: str, call: Callable[[], None], need: counts.Counts, repeats: int, rounds: int = 1
) -> Row:
    """Time a call that runs ``rounds`` units of work, with the GPU's memory that it takes beyond what was held."""
    call()
    extra = {"state_dtype": dtype} if (dtype := vars(call).get("state_dtype")) else {}
    if not torch.cuda.is_available():
        return row(backend, name, what, seconds(call, repeats, rounds), need, extra)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = seconds(call, repeats, rounds)
    extra |= {"extra_gib": (torch.cuda.max_memory_allocated() - held) / 2**30, **ceilings()}
    return row(backend, name, what, times, need, extra)


def _models(suite: str, names: tuple[str, ...]) -> Iterator[tuple[str, Config, Callable[..., Generator]]]:
    """Yield models, with what makes their generator for a dtype of states; the weights are drawn once."""
    check_names(f"{suite}: models", names, MODELS)
    if not torch.cuda.is_available():
        raise ArgumentError(f"{suite} needs a GPU, and there is none. The suite generation-torch-cpu needs none")
    for name in names:
        model = MODELS[name]
        weights = cache(partial(device_params, model, torch.bfloat16, "cuda"))

        def make(states: str = "float32", model: Config = model, weights: Any = weights) -> Generator:
            return Generator(model, weights(), device="cuda", state_dtype=states)

        yield name, model, cache(make)


@dataclass(frozen=True)
class Peer:
    """A model of another package.

    Attributes:
        backend: Its name in rows.
        missing: Why it cannot run; None if it can.
        make: Returns the model.
        decoder: Returns a call that decodes: of the model, batch, tokens before, and steps.
        reader: Returns a call that reads a prompt: of the model and its length.
    """

    backend: str
    missing: str | None
    make: Callable[[], Any]
    decoder: Callable[[Any, int, int, int], Callable[[], None]]
    reader: Callable[[Any, int], Callable[[], None]]


def rivals(model: Mamba2Config | MambaConfig, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> list[Peer]:
    """Return mamba-ssm with its CUDA graph, transformers with its kernels, and transformers accelerated by refold."""

    def transformers(accelerated: bool) -> Any:
        with torch.device(device):
            found = peers.of_transformers(model).to(dtype)
        if accelerated:
            refold.accelerate(found)
        return found

    graph = device == "cuda"
    official = "mamba_ssm.models.mixer_seq_simple", *(() if isinstance(model, Mamba2Config) else _MAMBA1)
    read = peers.transformers_reader
    return [
        Peer(
            f"{peers.name_of_mamba_ssm()}{', CUDA graph' if graph else ''}",
            peers.absent(*official),
            cache(lambda: peers.of_mamba_ssm(model, device, dtype)),
            partial(peers.mamba_ssm_decoder, graph=graph),
            peers.mamba_ssm_reader,
        ),
        Peer(
            "transformers, mamba-ssm's kernels",
            peers.absent("mamba_ssm.ops.triton.selective_state_update", "causal_conv1d_cuda", *official[1:]),
            cache(lambda: transformers(False)),
            peers.transformers_decoder,
            read,
        ),
        Peer(
            f"transformers, accelerated{', CUDA graph' if graph else ''}",
            None,
            cache(lambda: transformers(True)),
            partial(peers.transformers_decoder, graph=graph),
            read,
        ),
    ]


_MAMBA1 = ("selective_scan_cuda",)


def decode(
    *, models: tuple[str, ...] = ("130M", "2.7B", "mamba1-130M", "hybrid-340M"), batches: tuple[int, ...] = (1, 16),
    pasts: tuple[int, ...] = (PAST, 131072), states: tuple[str, ...] = ("float32", "bfloat16"), others: bool = True,
) -> Iterator[Row]:  # fmt: skip
    """Time decoding with PyTorch on the GPU, bfloat16, after short and long prompts, next to other packages.

    Rows say in which dtype states are kept: ours in float32, and in bfloat16 after short prompts.
    """
    check_names("decode: states", states, DTYPES)
    for name, model, generator in _models("decode", models):
        for batch in batches:
            for past, dtype in itertools.product(pasts, states):
                what, backend = (
                    f"decode batch {batch} past {past}",
                    "torch" if dtype == "float32" else f"torch, {dtype}",
                )
                fits = batch * past <= 2**18 and past + 5 * STEPS <= getattr(model, "max_positions", past + 5 * STEPS)
                more = dtype != "float32" and past != PAST
                if not fits or more or not wanted(backend=backend, case=f"{name} {what}"):
                    continue
                call = decoder(generator(dtype), batch, past, STEPS)
                yield measured(backend, name, what, call, needed(model, batch, past + 3 * STEPS)(call), 4, STEPS)
            what = f"decode batch {batch} past {PAST}"
            if not hasattr(model, "max_positions") and wanted(backend="torch, host loop", case=f"{name} {what}"):
                call = host_decoder(generator(), batch, PAST, 32)
                yield measured("torch, host loop", name, what, call, needed(model, batch)(call), 3, 32)
        if others and isinstance(model, Mamba2Config | MambaConfig):
            for rival in rivals(model):
                for batch in batches:
                    what, need = f"decode batch {batch} past {PAST}", needed(model, batch)
                    yield from rival_rows(rival, name, what, rival.decoder, (batch, PAST, STEPS), need, 4, STEPS)


def needed(model: Config, batch: int, past: int = 0) -> Callable[[Callable[[], None]], counts.Counts]:
    """Make a counter of the work of a call that decodes, whose states have the dtype that it names."""
    return lambda call: counts.decode(model, batch, 2, getattr(torch, vars(call)["state_dtype"]).itemsize, past)


def prefill(
    *,
    models: tuple[str, ...] = ("130M", "2.7B", "mamba1-130M", "hybrid-340M"),
    lengths: tuple[int, ...] = (1024, 8192, 131072),
    others: bool = True,
) -> Iterator[Row]:
    """Time the reading of a prompt with PyTorch on the GPU, bfloat16, and its memory, next to other packages."""
    for name, model, generator in _models("prefill", models):
        for seqlen in lengths:
            fits = seqlen <= getattr(model, "max_positions", seqlen)
            if not fits or not wanted(backend="torch", case=f"{name} prefill {seqlen}"):
                continue
            need = counts.prefill(model, 1, seqlen, 64, 2)
            yield measured("torch", name, f"prefill {seqlen}", reader(generator(), seqlen), need, 5)
        if others and isinstance(model, Mamba2Config | MambaConfig):
            for rival in rivals(model):
                for seqlen in lengths:
                    what, need = f"prefill {seqlen}", counts.prefill(model, 1, seqlen, 64, 2)
                    yield from rival_rows(rival, name, what, rival.reader, (seqlen,), need, 5)


def rival_rows(
    rival: Peer, name: str, what: str, how: Callable[..., Callable[[], None]], sizes: tuple[int, ...],
    need: counts.Counts | Callable[[Callable[[], None]], counts.Counts], repeats: int, rounds: int = 1,
) -> Iterator[Row]:  # fmt: skip
    """Time what ``how`` returns for another package's model and sizes, or say why it is not run.

    ``need`` is the work of a call, or what counts it.
    """
    if not wanted(backend=rival.backend, case=f"{name} {what}"):
        return
    if rival.missing is not None:
        yield not_run(rival.backend, name, what, rival.missing)
        return
    try:
        call = how(rival.make(), *sizes)
        work = need if isinstance(need, counts.Counts) else need(call)
        yield measured(rival.backend, name, what, call, work, repeats, rounds)
    except Exception as error:  # whatever another package raises; the run goes on
        yield not_run(rival.backend, name, what, first_line(error, 200))


def generation_torch_cpu(*, tokens: int = 16, seqlen: int = 256, repeats: int = 6) -> Iterator[Row]:
    """Time decoding and prefill of Mamba-2 130M with PyTorch on the CPU, float32, in turns with transformers."""
    model, name = MODELS["130M"], "130M fp32"
    assert isinstance(model, Mamba2Config)
    generator = cache(lambda: Generator(model, random_params(model)))
    peer = cache(lambda: peers.of_transformers(model))
    if wanted(case=f"{name} decode batch 1"):
        other = peers.transformers_decoder(peer(), 1, 4, tokens)
        calls = {"torch": decoder(generator(), 1, 4, tokens), "transformers": other}
        yield from in_turns(calls, name, "decode batch 1", repeats, tokens, counts.decode(model, 1, 4))
    if wanted(case=f"{name} prefill {seqlen}"):
        need = counts.prefill(model, 1, seqlen, 64, 4)
        calls = {"torch": reader(generator(), seqlen), "transformers": peers.transformers_reader(peer(), seqlen)}
        yield from in_turns(calls, name, f"prefill {seqlen}", min(repeats, 3), 1, need)
