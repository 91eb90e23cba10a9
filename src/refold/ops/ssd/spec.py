"""Spec of the Mamba-2 scan and of its step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from refold.ops.spec import (
    CU_SEQLENS,
    INTEGERS,
    Arg,
    Carry,
    Example,
    Meta,
    OpSpec,
    Option,
    Output,
    float_dtype,
    positive_int,
    step_of,
)

CHUNK = 8  # Of the test cases: small, so that every border is crossed at lengths an interpreter can walk.


def decay_rates(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw negative rates, spread as trained models spread them."""
    return -np.exp(rng.normal(0.0, 0.7, shape))


def step_sizes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw values that are useful step sizes with and without softplus."""
    return rng.uniform(0.01, 0.7, shape)


def valid_limits(value: Any) -> bool:
    """Whether ``value`` is an ordered pair of floats that leaves finite steps."""
    pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, float) for v in value)
    return pair and value[0] <= value[1] and value[0] < math.inf and value[1] > -math.inf


DT_SOFTPLUS = Option("dt_softplus", False, "bool", lambda v: isinstance(v, bool), "a bool")
DT_LIMIT = Option(
    "dt_limit", (0.0, math.inf), "float[]", valid_limits,
    "a pair of numbers (low, high), low <= high, of which only low may be -inf and only high inf",
)  # fmt: skip
STATE_DTYPE = Option("state_dtype", None, "ScalarType?", float_dtype, "None or a float dtype")
CHUNK_SIZE = Option("chunk_size", None, "int?", positive_int, "None or a positive integer")

_INPUTS = (
    Arg("x", ("b t h p",)),
    Arg("dt", ("b t h",), sample=step_sizes),
    Arg("A", ("h",), wide=True, sample=decay_rates),
    Arg("B", ("b t g n",)),
    Arg("C", ("b t g n",)),
)
_EXTRAS = (
    Arg("D", ("h", "h p"), optional=True, wide=True),
    Arg("z", ("b t h p",), optional=True),
    Arg("dt_bias", ("h",), optional=True, wide=True, sample=step_sizes),
)

EVERY = frozenset({"D", "z", "dt_bias", "initial_state"})
"""The optional arguments of a scan, less offsets."""


def _constraints(meta: Meta) -> Iterator[str]:
    nheads, ngroups = meta.sizes["h"], meta.sizes["g"]
    if nheads % ngroups:
        yield f"the heads must divide into groups; got h={nheads}, g={ngroups}. Repeat or merge groups of B and C."


def _flops(sizes: Mapping[str, Any]) -> int:
    return 5 * sizes["b"] * sizes.get("t", 1) * sizes["h"] * sizes["p"] * sizes["n"]


def _cases() -> list[Example]:
    def sizes(t: int, **changed: int) -> dict[str, int]:
        return {"b": 2, "t": t, "h": 4, "p": 5, "g": 2, "n": 6, **changed}

    every = EVERY
    options = {"dt_softplus": True, "dt_limit": (0.55, 1.0), "chunk_size": CHUNK}
    plain = {"chunk_size": CHUNK}
    cases = [Example(f"plain_t{t}", sizes(t), options=plain) for t in (1, CHUNK + 1)]
    for t in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 1, 3 * CHUNK):
        cases.append(Example(f"all_t{t}", sizes(t), every, options))
    t = 2 * CHUNK + 1
    cases += [Example(f"only_{name}", sizes(t), frozenset({name}), plain) for name in sorted(every)]
    cases += [
        Example("only_dt_softplus", sizes(t), options={"dt_softplus": True, **plain}),
        Example("only_dt_limit", sizes(t), options={"dt_limit": (0.2, 0.5), **plain}),
        Example("D_per_channel", sizes(t), frozenset({"D"}), plain, layout={"D": 1}),
        Example("one_group", sizes(t, g=1), every, options),
        Example("group_a_head", sizes(t, g=4), every, options),
        Example("size_one", sizes(t, b=1, h=1, p=1, g=1, n=1), every, options),
        Example("odd_chunk", sizes(20, p=3, n=7), every, {**options, "chunk_size": 7}),
        Example("default_chunk", sizes(150, b=1), every, {"dt_softplus": True}),
        Example("strided", sizes(t), every, options, strided=True),
        Example("packed", sizes(35, b=1), every, options, lengths=(1, CHUNK + 1, CHUNK, 2 * CHUNK + 1)),
        Example("packed_empty", sizes(15, b=1), every, options, lengths=(0, 5, 0, 1, 9)),
        Example("packed_plain", sizes(20, b=1), options=plain, lengths=(3, 17)),
        Example("packed_one", sizes(t, b=1), every, {"dt_softplus": True}, lengths=(t,)),
    ]
    return cases


def _step_cases() -> list[Example]:
    sizes = {"b": 3, "h": 4, "p": 5, "g": 2, "n": 6}
    every, options = frozenset({"D", "z", "dt_bias"}), {"dt_softplus": True, "dt_limit": (0.55, 1.0)}
    return [
        Example("plain", sizes),
        Example("all", sizes, every, options),
        Example("one_group", {**sizes, "g": 1}, every, options),
        Example("D_per_channel", sizes, frozenset({"D"}), layout={"D": 1}),
        Example("one_token", {**sizes, "t": 1}, every, options),
        Example("few_tokens", {**sizes, "t": 4}, every, options),
        Example("strided", {**sizes, "t": 3}, every, options, strided=True),
    ]


SPEC = OpSpec(
    name="ssd",
    args=(
        *_INPUTS,
        *_EXTRAS,
        Arg("initial_state", ("k h p n",), optional=True, wide=True),
        Arg(CU_SEQLENS, ("k",), optional=True, dtypes=INTEGERS),
    ),
    options=(DT_SOFTPLUS, DT_LIMIT, CHUNK_SIZE, STATE_DTYPE),
    outputs=(Output("y", "b t h p", alone=("C", "D", "z")), Output("state", "k h p n", like="state_dtype")),
    cases=_cases,
    flops=_flops,
    splits=("b", "h"),
    constraints=_constraints,
    scans="forward",
    carry=lambda meta: Carry("factors", ("x", "B"), {"p": 1, "g": 1, "n": 1}),
    form="scan with one decay per head, contracted",
    narrowed=(("x", "B", "C"), ()),
    complete="all_t9",
    layer=Example("layer", {"b": 1, "t": 2048, "h": 4, "p": 64, "g": 1, "n": 64}, EVERY, {"dt_softplus": True}),
    wide_sizes={"h": 4, "p": 64, "n": 128},
)

STEP = step_of(
    SPEC,
    args=(*_INPUTS, Arg("state", ("k h p n",), wide=True), *_EXTRAS),
    options=(DT_SOFTPLUS, DT_LIMIT),
    cases=_step_cases,
    complete="few_tokens",
)
