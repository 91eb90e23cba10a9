"""``model.generate`` as users call it: transformers' model unmodified, accelerated with and without graphs.

Next to it the time that transformers' own loop takes around a model that does nothing, and refold's lean model of the
same sizes where there is one. Weights are random; all programs of a case run one after the other on one card.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import Any

import torch

import refold

from ..errors import ArgumentError, first_line
from ..generate.torch import Generator
from ..models import counts
from ..models.configs import Mamba2Config
from . import peers
from .generation_torch import decoder, device_params
from .language_models import MODELS, not_run, row, seconds
from .options import check_names
from .progress import wanted
from .rows import Row


def _granite() -> Any:
    import transformers as t

    return t.GraniteMoeHybridForCausalLM(t.GraniteMoeHybridConfig(
        vocab_size=100352, hidden_size=2048, intermediate_size=8192, shared_intermediate_size=8192,
        num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8, num_local_experts=0,
        num_experts_per_tok=0, mamba_n_heads=64, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
        layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        tie_word_embeddings=True,
    ))  # fmt: skip


def _falcon() -> Any:
    import transformers as t

    return t.FalconH1ForCausalLM(t.FalconH1Config(
        vocab_size=65537, hidden_size=2048, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=2, mamba_d_ssm=3072, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=256,
        mamba_n_groups=1, tie_word_embeddings=False,
    ))  # fmt: skip


USERS: dict[str, Callable[[], Any]] = {
    "130M": lambda: peers.of_transformers(MODELS["130M"]),  # type: ignore[arg-type]
    "2.7B": lambda: peers.of_transformers(MODELS["2.7B"]),  # type: ignore[arg-type]
    "granite-4.0-h-micro": _granite,
    "falcon-h1-1.5b": _falcon,
}
"""Models of published sizes, by the name that rows have."""


def _doing_nothing(model: Any) -> Any:
    """Let a model hand out the logits and the cache of its last prompt, and compute nothing; return its class."""
    kind, last = type(model), list[Any]()

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not last or kwargs["input_ids"].shape[1] > 1:
            last[:] = [kind.__call__(self, *args, **kwargs)]
        return last[0]

    model.__class__ = type(kind.__name__, (kind,), {"__call__": __call__})
    return kind


def _per_token(model: Any, rows: int, past: int, tokens: int, repeats: int) -> list[float]:
    """Seconds per token: the time of a long call less that of a short one, so that the prompt does not count."""
    ids = torch.randint(0, model.config.vocab_size, (rows, past), device=model.device)

    def generating(n: int) -> Callable[[], None]:
        def call() -> None:
            given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
            model.generate(ids, **given, max_new_tokens=n, min_new_tokens=n)
            torch.cuda.synchronize()

        call()
        return call

    short, long = (seconds(generating(n), repeats) for n in (8, 8 + tokens))
    return [(b - a) / tokens for a, b in zip(short, long, strict=True)]


PROGRAMS = ("transformers", "accelerated, no graphs", "accelerated", "a model that does nothing")
"""What is made of a model of transformers, in this order."""


@contextmanager
def _as_program(model: Any, program: str) -> Iterator[None]:
    """Let a model be one of `PROGRAMS` inside of the ``with`` block."""
    if program == "transformers":
        yield
    elif program == "a model that does nothing":
        kind = _doing_nothing(model)
        try:
            yield
        finally:
            model.__class__ = kind
    else:
        summary = refold.accelerate(model, graphs=program == "accelerated")
        try:
            yield
        finally:
            print(summary, flush=True)  # noqa: T201
            summary.undo()


def generate(
    *, models: tuple[str, ...] = tuple(USERS), batches: tuple[int, ...] = (1, 16), past: int = 256, tokens: int = 64,
    repeats: int = 3, eager: bool = True,
) -> Iterator[Row]:  # fmt: skip
    """Time a token of ``model.generate`` on the GPU, bfloat16, greedy, after a prompt of ``past`` tokens."""
    check_names("generate: models", models, tuple(USERS))
    if not torch.cuda.is_available():
        raise ArgumentError("generate needs a GPU, and there is none")
    for name in models:
        config, asked = MODELS.get(name), {rows: f"model.generate batch {rows} past {past}" for rows in batches}
        model = cache(partial(_of_transformers, name))
        for (rows, what), program in product(asked.items(), PROGRAMS if eager else PROGRAMS[2:]):
            if not wanted(backend=program, case=f"{name} {what}"):
                continue
            try:
                with _as_program(model(), program):
                    times = _per_token(model(), rows, past, tokens, repeats)
            except Exception as error:  # whatever a model raises, and memory; the run goes on
                torch.cuda.empty_cache()
                yield not_run(program, name, what, first_line(error, 200))
            else:
                yield row(program, name, what, times, counts.Counts(0, 0))
        _let_go(model)
        if isinstance(config, Mamba2Config):
            lean = cache(partial(_lean, config))
            for rows, what in asked.items():
                if wanted(backend="lean", case=f"{name} {what}"):
                    call, need = decoder(lean(), rows, past, tokens), counts.decode(config, rows, 2, 4, past)
                    call()
                    yield row("lean", name, what, seconds(call, repeats, tokens), need)
                    del call
            _let_go(lean)


def _of_transformers(name: str) -> Any:
    with torch.device("cuda"):
        return USERS[name]().to(torch.bfloat16).eval()


def _lean(config: Mamba2Config) -> Generator:
    return Generator(config, device_params(config, torch.bfloat16, "cuda"), device="cuda")


def _let_go(made: Any) -> None:
    """Give the memory of what was made back."""
    made.cache_clear()
    gc.collect()
    torch.cuda.empty_cache()
