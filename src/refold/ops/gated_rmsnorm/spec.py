"""Spec of the gated RMS norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from refold.ops.spec import Arg, Example, Meta, OpSpec, Option, Output, positive_int


def _constraints(meta: Meta) -> Iterator[str]:
    channels, group_size = meta.sizes["d"], meta.options["group_size"]
    if group_size is not None and channels % group_size:
        yield f"group_size must divide the channels; got d={channels}, group_size={group_size}. Pass a divisor."


def _flops(sizes: Mapping[str, Any]) -> int:
    return 8 * math.prod(sizes["*"]) * sizes["d"]


def _cases() -> list[Example]:
    sizes, gate, eps = {"*": (2, 7), "d": 12}, frozenset({"z"}), {"eps": 1e-5}
    return [
        Example("plain", sizes, options=eps),
        Example("gate", sizes, gate, eps),
        Example("norm_before_gate", sizes, gate, {**eps, "norm_before_gate": True}),
        Example("groups", sizes, gate, {**eps, "group_size": 4}),
        Example("groups_norm_before_gate", sizes, gate, {**eps, "group_size": 3, "norm_before_gate": True}),
        Example("large_eps", sizes, gate, {"eps": 0.5}),
        Example("no_leading", {"*": (), "d": 7}, gate, eps),
        Example("size_one", {"*": (3,), "d": 1}, gate, {"eps": 0.5}),  # with less, dx is nothing but what cancels
        Example("wide", {"*": (3,), "d": 1030}, gate, eps),
        Example("strided", sizes, gate, eps, strided=True),
    ]


EPS = Option("eps", None, "float", lambda v: isinstance(v, float) and 0 <= v < math.inf, "a finite float >= 0")

SPEC = OpSpec(
    name="gated_rmsnorm",
    args=(Arg("x", ("* d",)), Arg("z", ("* d",), optional=True), Arg("weight", ("d",), wide=True)),
    options=(
        EPS,
        Option("group_size", None, "int?", positive_int, "None or a positive integer"),
        Option("norm_before_gate", False, "bool", lambda v: isinstance(v, bool), "a bool"),
    ),
    outputs=(Output("y", "* d"),),
    cases=_cases,
    flops=_flops,
    splits=("*",),
    constraints=_constraints,
    form="gated norm",
    complete="gate",
    layer=Example("layer", {"*": (1024,), "d": 1024}, frozenset({"z"}), {"eps": 1e-5}),
    wide_sizes={"d": 1536},
)
