"""Spec of the delta rule and of its step."""

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
    positive_int,
    step_of,
)

CHUNK = 8  # Of the test cases: small, so that every border is crossed at lengths an interpreter can walk.


def keys(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw vectors of length one; some are equal to those of the token before."""
    drawn = rng.standard_normal(shape)
    drawn /= np.linalg.norm(drawn, axis=-1, keepdims=True)
    for t in range(1, shape[1] if len(shape) == 4 else 0):
        if rng.random() < 0.2:
            drawn[:, t] = drawn[:, t - 1]
    return drawn


def log_decays(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw decays as trained models have them, some of one, some that forget nearly all, some that forget all."""
    weak = -np.exp(rng.normal(-2.0, 1.5, shape))
    return np.where(rng.random(shape) < 0.15, rng.choice([0.0, -5.0, -20.0, -200.0], shape), weak)


def strengths(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw strengths of writing from 0 to 2, the ends and 1 among them."""
    return np.where(rng.random(shape) < 0.2, rng.choice([0.0, 1.0, 2.0], shape), rng.uniform(0.0, 2.0, shape))


def positive(value: Any) -> bool:
    """Whether an optional number is absent or positive and finite."""
    return value is None or (isinstance(value, float) and 0 < value < math.inf)


def negative(value: Any) -> bool:
    """Whether an optional number is absent or negative and finite."""
    return value is None or (isinstance(value, float) and -math.inf < value < 0)


def finite(value: Any) -> bool:
    """Whether an optional number is absent or finite."""
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _bool(name: str, default: bool) -> Option:
    return Option(name, default, "bool", lambda v: isinstance(v, bool), "a bool")


_TOKENS = (Arg("q", ("b t g n",)), Arg("k", ("b t g n",), sample=keys), Arg("v", ("b t h p",)))
_GATES = (
    Arg("g", ("b t h", "b t h n"), optional=True, sample=log_decays),
    Arg("beta", ("b t h",), optional=True, sample=strengths),
    Arg("r", ("b t h n",), optional=True, sample=keys),
    Arg("A_log", ("h",), optional=True, wide=True),
    Arg("dt_bias", ("h", "h n"), optional=True, wide=True),
)
_OPTIONS = (
    Option("scale", None, "float?", finite, "None or a finite number"),
    _bool("normalize", False),
    Option("lower_bound", None, "float?", negative, "None or a negative number"),
    Option("beta_limit", None, "float?", positive, "None or a positive number"),
    _bool("erase", True),
)


def _constraints(meta: Meta) -> Iterator[str]:
    nheads, ngroups = meta.sizes["h"], meta.sizes["g"]
    if nheads % ngroups:
        yield f"the heads must divide into groups; got h={nheads}, g={ngroups}. Repeat or merge heads of q and k."
    bias, gate = meta.arrays.get("dt_bias"), meta.arrays.get("g")
    if gate is None:
        for name in ("A_log", "dt_bias"):
            if name in meta.arrays:
                yield f"{name} shapes the decay g, which is None. Pass g, or no {name}."
        if meta.options["lower_bound"] is not None:
            yield "lower_bound shapes the decay g, which is None. Pass g, or no lower_bound."
    elif bias is not None and len(bias.shape) == 2 and len(gate.shape) < len(meta.arrays["q"].shape):
        yield "dt_bias is one per key, but g is one per head. Pass a dt_bias of (h,)."
    if meta.options["beta_limit"] is not None and "beta" not in meta.arrays:
        yield "beta_limit bounds beta, which is None. Pass beta, or no beta_limit."
    if "r" in meta.arrays and not meta.options["erase"]:
        yield "r says what is erased, and erase is False. Pass erase=True, or no r."


def _carry(meta: Meta) -> Carry:
    # Erasing mixes the rows of a state; without it, each row only decays.
    erase = meta.options["erase"]
    return Carry("matrix" if erase else "factors", ("v",), {"p": meta.sizes["n"] if erase else 1})


def _flops(sizes: Mapping[str, Any]) -> int:
    # A decay, and a product and a sum for each of what is read, written and returned.
    return 7 * sizes["b"] * sizes.get("t", 1) * sizes["h"] * sizes["n"] * sizes["p"]


_GATED = frozenset({"g", "beta"})
_ALL = _GATED | {"A_log", "dt_bias", "initial_state"}
_FUSED = {"normalize": True, "beta_limit": 2.0}
_PER_KEY = {"g": 1, "dt_bias": 1}


def _cases() -> list[Example]:
    def sizes(t: int, **changed: int) -> dict[str, int]:
        return {"b": 2, "t": t, "h": 4, "p": 5, "g": 2, "n": 6, **changed}

    plain, fused = {"chunk_size": CHUNK}, {"chunk_size": CHUNK, **_FUSED}
    bounded = {**fused, "lower_bound": -5.0}
    state = frozenset({"initial_state"})
    cases = []
    for t in (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 1):
        cases.append(Example(f"all_t{t}", sizes(t), _ALL, fused))
    for t in (1, CHUNK + 1, 3 * CHUNK + 1):
        cases.append(Example(f"per_key_t{t}", sizes(t), _ALL, fused, layout=_PER_KEY))
    t = 2 * CHUNK + 1
    return [
        *cases,
        Example("plain", sizes(t), options=plain),
        Example("delta", sizes(t), state | {"beta"}, plain),
        Example("gated", sizes(t), state | _GATED, {**plain, "scale": -0.5}),
        Example("gated_per_key", sizes(t), state | _GATED, plain, layout=_PER_KEY),
        Example("bounded", sizes(t), _ALL, bounded),
        Example("bounded_per_key", sizes(t), _ALL, bounded, layout=_PER_KEY),
        Example("bounded_plain", sizes(t), state | _GATED, {**plain, "lower_bound": -5.0}),
        Example("bias_of_a_head", sizes(t), _ALL, fused, layout={"g": 1}),
        Example("read_keys", sizes(t), _ALL | {"r"}, fused),
        Example("read_keys_per_key", sizes(t), _ALL | {"r"}, plain, layout=_PER_KEY),
        Example("linear", sizes(t), state, {**plain, "erase": False}),
        Example("linear_gated", sizes(t), state | _GATED, {**plain, "erase": False}),
        Example("linear_per_key", sizes(t), state | {"g"}, {**plain, "erase": False}, layout=_PER_KEY),
        Example("one_group", sizes(t, g=1), _ALL, fused),
        Example("group_a_head", sizes(t, g=4), _ALL, fused, layout=_PER_KEY),
        Example("size_one", sizes(t, b=1, h=1, p=1, g=1, n=1), state | _GATED, {**plain, "erase": False}),
        Example("odd_chunk", sizes(20, p=3, n=7), _ALL, {**fused, "chunk_size": 7}, layout=_PER_KEY),
        Example("default_chunk", sizes(150, b=1), _ALL, _FUSED),
        Example("default_chunk_per_key", sizes(150, b=1), _ALL, _FUSED, layout=_PER_KEY),
        Example("strided", sizes(t), _ALL | {"r"}, fused, layout=_PER_KEY, strided=True),
        Example("strided_per_head", sizes(t), _ALL, fused, strided=True),
        Example("packed", sizes(35, b=1), _ALL, fused, lengths=(1, CHUNK + 1, CHUNK, 2 * CHUNK + 1)),
        Example("packed_per_key", sizes(35, b=1), _ALL, fused, (CHUNK, 1, 2 * CHUNK + 1, CHUNK + 1), _PER_KEY),
        Example("packed_empty", sizes(15, b=1), _ALL, fused, lengths=(0, 5, 0, 1, 9)),
        Example("packed_linear", sizes(20, b=1), frozenset({"g"}), {**plain, "erase": False}, lengths=(3, 17)),
    ]


def _step_cases() -> list[Example]:
    sizes = {"b": 3, "h": 4, "p": 5, "g": 2, "n": 6}
    every = _ALL - {"initial_state"}
    return [
        Example("plain", sizes),
        Example("all", sizes, every, _FUSED),
        Example("per_key", sizes, every, {**_FUSED, "lower_bound": -5.0}, layout=_PER_KEY),
        Example("read_keys", sizes, _GATED | {"r"}),
        Example("linear", sizes, frozenset({"g"}), {"erase": False}, layout=_PER_KEY),
        Example("one_group", {**sizes, "g": 1}, every, _FUSED),
        Example("one_token", {**sizes, "t": 1}, every, _FUSED),
        Example("few_tokens", {**sizes, "t": 4}, every | {"r"}, _FUSED, layout=_PER_KEY),
        Example("strided", {**sizes, "t": 3}, every, _FUSED, strided=True),
    ]


SPEC = OpSpec(
    name="delta_rule",
    args=(
        *_TOKENS,
        *_GATES,
        Arg("initial_state", ("k h n p",), optional=True, wide=True),
        Arg(CU_SEQLENS, ("k",), optional=True, dtypes=INTEGERS),
    ),
    options=(*_OPTIONS, Option("chunk_size", None, "int?", positive_int, "None or a positive integer")),
    outputs=(Output("y", "b t h p", like="v", alone=("q",)), Output("state", "k h n p", like="state_dtype")),
    cases=_cases,
    flops=_flops,
    splits=("b", "h"),
    constraints=_constraints,
    scans="forward",
    carry=_carry,
    form="scan with decay and correction, contracted",
    narrowed=(("q", "k", "v"), ("r",)),
    complete="per_key_t9",
    layer=Example(
        "layer",
        {"b": 1, "t": 2048, "h": 4, "p": 64, "g": 2, "n": 64},
        _ALL,
        {**_FUSED, "lower_bound": -5.0},
        layout=_PER_KEY,
    ),
    wide_sizes={"h": 4, "p": 72, "n": 96},
)

STEP = step_of(
    SPEC,
    args=(*_TOKENS, Arg("state", ("k h n p",), wide=True), *_GATES),
    options=_OPTIONS,
    cases=_step_cases,
    updates_strided=True,
    complete="few_tokens",
)
