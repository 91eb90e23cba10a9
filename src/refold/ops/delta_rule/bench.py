"""Calls of ``delta_rule`` that `refold bench` measures (`refold.ops.timed`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from refold.ops.timed import Timed, normal, uniform

SUITES: dict[str, Callable[..., Iterator[Timed]]] = {}


def shared(tokens: int) -> dict[str, Any]:
    """Draw inputs of a layer of Qwen3-Next: a state of 2 MiB and a map of the same size."""
    qk, v = (1, tokens, 16, 128), (1, tokens, 32, 128)
    return {
        "q": normal(*qk, dtype="bfloat16"), "k": normal(*qk, dtype="bfloat16"), "v": normal(*v, dtype="bfloat16"),
        "g": -uniform(1, tokens, 32) / 8, "beta": uniform(1, tokens, 32), "normalize": True,
    }  # fmt: skip
