"""Spec of the causal depthwise convolution and of its step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refold.ops.spec import CU_SEQLENS, INTEGERS, Arg, Carry, Example, OpSpec, Option, Output, step_of

ACTIVATION = Option(
    "activation", None, "str?", lambda v: v is None or (isinstance(v, str) and v == "silu"), "None or 'silu'"
)


def _flops(sizes: Mapping[str, Any]) -> int:
    return 2 * sizes["b"] * sizes.get("t", 1) * sizes["d"] * sizes["w"]


def _cases() -> list[Example]:
    def sizes(t: int, w: int = 4, b: int = 2) -> dict[str, Any]:
        return {"b": b, "t": t, "d": 5, "w": w}

    every, silu = frozenset({"bias", "initial_state"}), {"activation": "silu"}
    return [
        Example("plain", sizes(17)),
        *(Example(f"all_t{t}", sizes(t), every, silu) for t in (1, 2, 3, 4, 5, 17, 65)),
        *(Example(f"all_w{w}", sizes(9, w), every, silu) for w in (1, 2, 3, 7)),
        Example("only_bias", sizes(9), frozenset({"bias"})),
        Example("only_initial_state", sizes(9), frozenset({"initial_state"})),
        Example("only_silu", sizes(9), options=silu),
        Example("short_without_state", sizes(2), frozenset({"bias"}), silu),
        Example("strided", sizes(17), every, silu, strided=True),
        Example("packed", sizes(22, b=1), every, silu, lengths=(1, 2, 3, 4, 12)),
        Example("packed_empty", sizes(15, b=1), every, silu, lengths=(0, 5, 0, 1, 9)),
        Example("packed_plain", sizes(20, b=1), lengths=(3, 17)),
    ]


def _step_cases() -> list[Example]:
    sizes, silu = {"b": 3, "d": 5, "w": 4}, {"activation": "silu"}
    return [
        Example("plain", sizes),
        Example("all", sizes, frozenset({"bias"}), silu),
        Example("width_two", {**sizes, "w": 2}, frozenset({"bias"}), silu),
        Example("one_token", {**sizes, "t": 1}, frozenset({"bias"}), silu),
        Example("few_tokens", {**sizes, "t": 6}, frozenset({"bias"}), silu),
    ]


SPEC = OpSpec(
    name="causal_conv1d",
    args=(
        Arg("x", ("b t d",)),
        Arg("weight", ("d w",)),
        Arg("bias", ("d",), optional=True),
        Arg("initial_state", ("k d w-1",), optional=True),
        Arg(CU_SEQLENS, ("k",), optional=True, dtypes=INTEGERS),
    ),
    options=(ACTIVATION,),
    outputs=(Output("y", "b t d", alone=("weight", "bias")), Output("state", "k d w-1")),
    cases=_cases,
    flops=_flops,
    splits=("b", "d"),
    scans="forward",
    carry=lambda meta: Carry("window"),
    form="causal convolution",
    complete="all_t5",
    layer=Example(
        "layer", {"b": 1, "t": 2048, "d": 128, "w": 4}, frozenset({"bias", "initial_state"}), {"activation": "silu"}
    ),
    wide_sizes={"d": 192},
)

STEP = step_of(
    SPEC,
    args=(
        Arg("x", ("b t d",)),
        Arg("weight", ("d w",)),
        Arg("state", ("k d w-1",)),
        Arg("bias", ("d",), optional=True),
    ),
    options=(ACTIVATION,),
    cases=_step_cases,
    complete="all",
)
