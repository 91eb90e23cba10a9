"""Generation by the published portable SSD in JAX, and by refold's generators with JAX and PyTorch: the same weights.

Weights are random: float32 on a CPU, bfloat16 on a GPU, where states are float32 in refold's, and where the products of
mamba2-jax are float32, because its normalisations return that. Times are of whole calls, in turns. ``errors`` are of
the logits after the prompt, against the same weights in float64; ``equal`` counts the tokens, of those decoded
greedily, that are those of float64. With ``exact=false`` there is neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import DeviceError, first_line
from ..models.configs import Mamba2Config
from .language_models import MODELS, turns
from .options import check_names
from .progress import wanted
from .rows import Row

OURS_JAX, OURS, PEER = "refold, JAX", "refold", "mamba2-jax"
SIZES = [name for name, config in MODELS.items() if isinstance(config, Mamba2Config)]


def portable_ssd(
    *, models: tuple[str, ...] = ("130M",), device: str = "cuda", past: int = 1024, steps: int = 64, repeats: int = 4,
    exact: bool = True, checkout: str = "",
) -> Iterator[Row]:  # fmt: skip
    """Time decoding and prefill by a checkout of mamba2-jax, and by refold with JAX and with PyTorch."""
    check_names("portable-ssd: models", models, SIZES)
    for name in models:
        what = {"decode": f"{name} decode batch 1 past {past}", "prefill": f"{name} prefill {past}"}
        if [case for case in what.values() if wanted(case=case)]:
            yield from compared(MODELS[name], what, device, past, steps, repeats, exact, checkout)


def compared(
    config: Any, what: dict[str, str], device: str, past: int, steps: int, repeats: int, exact: bool, checkout: str
) -> Iterator[Row]:
    """Yield the rows of a model: each program reads a prompt and decodes."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch takes memory, too
    import jax
    import jax.numpy as jnp

    from ..generate.jax import Generator as JaxGenerator
    from ..generate.torch import Generator
    from .generation import device_params
    from .peers_jax import Published

    if (jax.default_backend() == "cpu") != (device == "cpu"):
        raise DeviceError(f"portable-ssd: device is {device!r}, but JAX runs on {jax.default_backend()!r}")
    params = device_params(config, jnp.bfloat16 if device == "cuda" else jnp.float32)
    plain = jax.tree.map(np.array, params)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, past).tolist()
    makers: dict[str, Callable[[], Any]] = {
        OURS_JAX: lambda: _Ours(JaxGenerator(config, params), prompt, steps),
        OURS: lambda: _Ours(Generator(config, plain, device=device), prompt, steps),
        PEER: lambda: _Peer(Published(checkout, config, params), prompt, steps),
    }
    programs, not_run = {}, dict[str, str]()
    for who, make in makers.items():
        if who == PEER and not checkout:
            not_run[who] = "not run: no checkout was given"
            continue
        try:
            programs[who] = make()
        except Exception as error:  # whatever another package raises; the others run
            if who != PEER:
                raise
            not_run[who] = first_line(error, 200)
    more: dict[str, Row] = {"decode": {}, "prefill": {}}
    if exact:
        wide = jax.tree.map(lambda x: x.astype(np.float64), plain)
        judge = _Ours(Generator(config, wide, device=device), prompt, steps)
        right, tokens = judge.logits(), judge.decode()
        more["prefill"]["errors"] = {
            who: float(np.linalg.norm(one.logits() - right) / np.linalg.norm(right)) for who, one in programs.items()
        }
        more["decode"]["equal"] = {who: int((one.decode() == tokens).sum()) for who, one in programs.items()}
        more["decode"]["steps"] = steps
    for kind, case in what.items():
        calls = {who: getattr(one, kind) for who, one in programs.items()}
        times = turns(calls, repeats, steps if kind == "decode" else 1)
        yield {
            "case": case, "dtype": str(params["embedding"].dtype), "batch": 1, "tokens": past,
            "times_ms": {who: 1e3 * float(np.median(found)) for who, found in times.items()},
            "best_ms": {who: 1e3 * min(found) for who, found in times.items()}, "not_run": not_run, **more[kind],
            **({"longest": {PEER: "one loop on the device"}} if kind == "decode" and PEER in programs else {}),
        }  # fmt: skip


class _Ours:
    """A generator of refold after a prompt."""

    def __init__(self, generator: Any, prompt: list[int], steps: int) -> None:
        self.generator, self.prompt, self.steps = generator, prompt, steps
        self.conversation = generator.read([prompt])

    def logits(self) -> np.ndarray:
        found = self.generator.read([self.prompt]).logits
        return np.asarray(found.double().cpu() if hasattr(found, "double") else found, np.float64)

    def prefill(self) -> None:
        self.logits()

    def decode(self) -> np.ndarray:
        """Go on from where the call before ended."""
        return np.concatenate(list(self.generator.stream(self.conversation, self.steps, stop_tokens=[])), axis=1)


class _Peer:
    """The published model after a prompt."""

    def __init__(self, model: Any, prompt: list[int], steps: int) -> None:
        self.model, self.prompt = model, prompt
        self.decode = model.decoder([prompt], steps)

    def logits(self) -> np.ndarray:
        return np.asarray(self.model.read([self.prompt])[0], np.float64)

    def prefill(self) -> None:
        self.logits()
