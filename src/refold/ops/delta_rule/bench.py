"""Calls of `delta_rule` that are measured on a GPU, in bfloat16, next to fla's kernels: GDN, KDA and GLA."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from refold.ops.timed import Timed, normal, uniform

# Layer, batch, tokens, heads of queries and keys, heads of values, channels, sequences of a pack (0: no pack).
SHAPES = [
    ("GDN", 1, 8192, 16, 32, 128, 0), ("GDN", 1, 8192, 16, 64, 128, 0), ("GDN", 1, 8192, 16, 32, 128, 8),
    ("GDN", 1, 32768, 2, 8, 128, 0), ("KDA", 1, 8192, 16, 16, 128, 0), ("KDA", 1, 4096, 16, 16, 128, 0),
    ("GLA", 4, 2048, 16, 16, 128, 0),
]  # fmt: skip
TRAINED = [("GDN", 1, 8192, 16, 32, 128, 0), ("KDA", 1, 4096, 16, 16, 128, 0)]
FLA: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GDN": ("gated_delta_rule", "chunk_gated_delta_rule", {"use_qk_l2norm_in_kernel": True}),
    "KDA": (
        "kda", "chunk_kda",
        {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0},
    ),
    "GLA": ("gla", "chunk_gla", {}),
}  # fmt: skip
"""Layer -> module of ``fla.ops``, function and options that compute it."""


def forward() -> Iterator[Timed]:
    """Time the operator delta_rule, forward, as GDN, KDA (bounded gate) and GLA, next to fla's kernels."""
    return _cases(SHAPES)


def backward() -> Iterator[Timed]:
    """Time gradients of delta_rule, next to fla's kernels where these have right gradients."""
    return _cases(TRAINED)


def step() -> Iterator[Timed]:
    """Time one token of 64 rows."""
    given = {name: array[0] for name, array in shared(64).items() if name != "normalize"}
    yield Timed("delta_rule_step_", "64x16/32x128x128", given | {"state": normal(64, 32, 128, 128), "normalize": True})


def _cases(shapes: list[tuple[Any, ...]]) -> Iterator[Timed]:
    for layer, b, t, groups, h, n, packed in shapes:
        q, k, v = (normal(b, t, heads, n, dtype="bfloat16") for heads in (groups, groups, h))
        arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
        g = -uniform(b, t, h, *([] if layer == "GDN" else [n])) / 8
        arrays["g"] = normal(*g.shape, dtype="bfloat16") if layer == "KDA" else g
        if layer != "GLA":
            arrays["beta"] = uniform(b, t, h)
        options: dict[str, Any] = {"erase": False} if layer == "GLA" else {"normalize": True}
        options |= {"lower_bound": -5.0} if layer == "KDA" else {}
        offsets = _offsets(t, packed) if packed else None
        rivals = {"fla": _by_fla(layer, arrays, offsets)}
        name = f"{layer} {b}x{t}, {groups}/{h} heads of {n}" + (f", {packed} sequences" if packed else "")
        yield Timed("delta_rule", name, {**arrays, **options, "cu_seqlens": offsets}, rivals, True)


def _offsets(tokens: int, sequences: int) -> Any:
    import torch

    from refold.ops import timed

    return torch.arange(0, tokens + 1, tokens // sequences, dtype=torch.int32, device=timed.place)


def _by_fla(layer: str, arrays: dict[str, Any], offsets: Any) -> Any:
    """Make a call of fla's kernel, whose packs have offsets of 64 bits; None if fla is not there."""
    module, name, options = FLA[layer]
    try:
        function = getattr(import_module(f"fla.ops.{module}"), name)
    except ImportError:
        return None
    wide, gate = None if offsets is None else offsets.long(), {}
    if layer == "KDA":
        gate = {"A_log": arrays["beta"].new_zeros(arrays["beta"].shape[-1])}
    return lambda: function(**arrays, **options, **gate, cu_seqlens=wide, output_final_state=True)


SUITES = {"delta-rule": forward, "delta-rule-backward": backward, "pointwise": step}


def shared(tokens: int) -> dict[str, Any]:
    """Draw inputs of a layer of Qwen3-Next: a state of 2 MiB and a map of the same size."""
    qk, v = (1, tokens, 16, 128), (1, tokens, 32, 128)
    return {
        "q": normal(*qk, dtype="bfloat16"), "k": normal(*qk, dtype="bfloat16"), "v": normal(*v, dtype="bfloat16"),
        "g": -uniform(1, tokens, 32) / 8, "beta": uniform(1, tokens, 32), "normalize": True,
    }  # fmt: skip
