"""Spec of the elementwise linear recurrence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from refold.ops.spec import BOOL, CU_SEQLENS, INTEGERS, Arg, Carry, Example, OpSpec, Option, Output


def decays(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw factors of both signs, most of them near one as gates are, some zero."""
    return np.where(rng.random(shape) < 0.05, 0.0, rng.choice([1.0, 1.0, -1.0], shape) * rng.uniform(0.5, 1.02, shape))


def resets(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw where states are forgotten, more often than a decay of zero is drawn."""
    return rng.random(shape) < 0.15


def _flops(sizes: Mapping[str, Any]) -> int:
    return 2 * sizes["b"] * sizes["t"] * math.prod(sizes["*"])


def _cases() -> list[Example]:
    def sizes(t: int, rest: tuple[int, ...] = (3, 5), b: int = 2) -> dict[str, Any]:
        return {"b": b, "t": t, "*": rest}

    initial, reverse = frozenset({"initial_state"}), {"reverse": True}
    resetting = initial | {"reset"}
    cases = []
    for t in (1, 2, 15, 16, 17, 33, 300):
        cases += [Example(f"t{t}", sizes(t), initial), Example(f"reverse_t{t}", sizes(t), initial, reverse)]
    return [
        *cases,
        Example("plain", sizes(19)),
        Example("no_trailing", sizes(19, ()), initial),
        Example("one_trailing", sizes(19, (7,)), initial),
        Example("wide", sizes(40, (4100,), b=1), initial),
        Example("strided", sizes(19), initial, strided=True),
        Example("reset", sizes(33), resetting),
        Example("reset_reverse", sizes(33), resetting, reverse),
        Example("reset_long", sizes(300), resetting),
        Example("reset_wide", sizes(12, (4100,), b=1), resetting),
        Example("reset_strided", sizes(19), resetting, strided=True),
        Example("reset_packed", sizes(35, b=1), resetting, lengths=(1, 9, 8, 17)),
        Example("reset_packed_reverse", sizes(35, b=1), resetting, reverse, lengths=(1, 9, 8, 17)),
        Example("packed", sizes(35, b=1), initial, lengths=(1, 9, 8, 17)),
        Example("packed_reverse", sizes(35, b=1), initial, reverse, lengths=(1, 9, 8, 17)),
        Example("packed_empty", sizes(15, b=1), initial, lengths=(0, 5, 0, 1, 9)),
        Example("packed_plain", sizes(20, b=1), lengths=(3, 17)),
    ]


SPEC = OpSpec(
    name="linear_scan",
    args=(
        Arg("a", ("b t *",), sample=decays),
        Arg("x", ("b t *",)),
        Arg("initial_state", ("k *",), optional=True, wide=True),
        Arg(CU_SEQLENS, ("k",), optional=True, dtypes=INTEGERS),
        Arg("reset", ("b t *",), optional=True, dtypes=BOOL, sample=resets),
    ),
    options=(Option("reverse", False, "bool", lambda v: isinstance(v, bool), "a bool"),),
    outputs=(Output("h", "b t *"), Output("state", "k *", like="state_dtype")),
    cases=_cases,
    flops=_flops,
    splits=("b", "*"),
    scans="forward",
    carry=lambda meta: Carry("factors", ("x",), forgets="reset"),
    form="elementwise scan",
    narrowed=(("x",), ("a",)),
    complete="t17",
    layer=Example("layer", {"b": 1, "t": 4096, "*": (64,)}, frozenset({"initial_state"})),
    wide_sizes={"*": (96,)},
)
