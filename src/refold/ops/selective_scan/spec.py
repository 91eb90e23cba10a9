"""Spec of the Mamba-1 scan and of its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from refold.ops.spec import CU_SEQLENS, INTEGERS, Arg, Carry, Example, Meta, OpSpec, Output, step_of
from refold.ops.ssd.spec import DT_SOFTPLUS, STATE_DTYPE, decay_rates, step_sizes

BLOCK = 16  # The lengths of the test cases lie around multiples of the time blocks of the implementations.


def signed_decays(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw factors of either sign, some above one, every tenth zero."""
    return rng.uniform(-0.5, 1.5, shape) * (rng.uniform(size=shape) > 0.1)


_INPUTS = (
    Arg("x", ("b t d",)),
    Arg("dt", ("b t d",), sample=step_sizes),
    Arg("A", ("d n",), wide=True, sample=decay_rates),
    Arg("B", ("b t n", "b t g n")),
    Arg("C", ("b t n", "b t g n")),
)
_EXTRAS = (
    Arg("D", ("d",), optional=True, wide=True),
    Arg("z", ("b t d",), optional=True),
    Arg("dt_bias", ("d",), optional=True, wide=True, sample=step_sizes),
    Arg("decay", ("b t d",), optional=True, sample=signed_decays),
)


def _constraints(meta: Meta) -> Iterator[str]:
    channels, ngroups = meta.sizes["d"], meta.sizes.get("g", 1)
    if channels % ngroups:
        yield f"the channels must divide into groups; got d={channels}, g={ngroups}. Repeat or merge groups of B and C."


def _flops(sizes: Mapping[str, Any]) -> int:
    return 7 * sizes["b"] * sizes.get("t", 1) * sizes["d"] * sizes["n"]


def _cases() -> list[Example]:
    def sizes(t: int, **changed: int) -> dict[str, int]:
        return {"b": 2, "t": t, "d": 6, "n": 4, "g": 2, **changed}

    every = frozenset({"D", "z", "dt_bias", "decay", "initial_state"})
    softplus, grouped = {"dt_softplus": True}, {"B": 1, "C": 1}
    cases = [Example(f"plain_t{t}", sizes(t)) for t in (1, BLOCK + 1)]
    for t in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 65):
        cases.append(Example(f"all_t{t}", sizes(t), every, softplus))
    t = BLOCK + 3
    cases += [Example(f"only_{name}", sizes(t), frozenset({name})) for name in sorted(every)]
    cases += [
        Example("only_dt_softplus", sizes(t), options=softplus),
        Example("groups", sizes(t), every, softplus, layout=grouped),
        Example("groups_of_B_only", sizes(t), every, softplus, layout={"B": 1}),
        Example("group_a_channel", sizes(t, g=6), every, softplus, layout=grouped),
        Example("size_one", sizes(t, b=1, d=1, n=1, g=1), every, softplus),
        Example("long", sizes(300, b=1, d=3, n=2), every, softplus),
        Example("strided", sizes(t), every, softplus, layout=grouped, strided=True),
        Example("packed", sizes(51, b=1), every, softplus, lengths=(1, BLOCK + 1, BLOCK, BLOCK + 1)),
        Example("packed_empty", sizes(15, b=1), every, softplus, lengths=(0, 5, 0, 1, 9), layout=grouped),
        Example("packed_plain", sizes(20, b=1), lengths=(3, 17)),
    ]
    return cases


def _step_cases() -> list[Example]:
    sizes = {"b": 3, "d": 6, "n": 4, "g": 2}
    every, softplus, grouped = frozenset({"D", "z", "dt_bias", "decay"}), {"dt_softplus": True}, {"B": 1, "C": 1}
    return [
        Example("plain", sizes),
        Example("all", sizes, every, softplus),
        Example("groups", sizes, every, softplus, layout=grouped),
        Example("few_tokens", {**sizes, "t": 4}, every, softplus),
        Example("few_tokens_groups", {**sizes, "t": 3}, every, softplus, layout=grouped, strided=True),
    ]


SPEC = OpSpec(
    name="selective_scan",
    args=(
        *_INPUTS,
        *_EXTRAS,
        Arg("initial_state", ("k d n",), optional=True, wide=True),
        Arg(CU_SEQLENS, ("k",), optional=True, dtypes=INTEGERS),
    ),
    options=(DT_SOFTPLUS, STATE_DTYPE),
    outputs=(Output("y", "b t d", alone=("C", "D", "z")), Output("state", "k d n", like="state_dtype")),
    cases=_cases,
    flops=_flops,
    splits=("b", "d"),
    constraints=_constraints,
    scans="forward",
    carry=lambda meta: Carry("factors", ("x", "B")),
    form="elementwise scan, contracted",
    narrowed=(("x",), ("B", "C")),
    complete="all_t17",
    layer=Example(
        "layer",
        {"b": 1, "t": 2048, "d": 64, "n": 16},
        frozenset({"D", "z", "dt_bias", "initial_state"}),
        {"dt_softplus": True},
    ),
    wide_sizes={"d": 96, "n": 16, "g": 2},
)

STEP = step_of(
    SPEC,
    args=(*_INPUTS, Arg("state", ("k d n",), wide=True), *_EXTRAS),
    options=(DT_SOFTPLUS,),
    cases=_step_cases,
    complete="all",
)
