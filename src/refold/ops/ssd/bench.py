"""Calls of `ssd` that are measured on a GPU, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from refold.ops.timed import Timed, from_checkout, normal, uniform

# Batch, tokens, heads.
LENGTHS = [
    (1, 1024, 128), (1, 8192, 128), (1, 131072, 128), (1, 1024, 80), (1, 8192, 80), (1, 131072, 80), (8, 4096, 80),
    (1, 2048, 48), (32, 256, 48), (1, 8192, 24),
]  # fmt: skip
# Batch, tokens, heads, channels, groups, states.
SIZES = [
    (2, 16384, 48, 64, 1, 256), (1, 2048, 24, 64, 1, 256), (2, 8192, 32, 64, 1, 192), (2, 8192, 33, 64, 1, 128),
    (2, 8192, 32, 64, 32, 128), (2, 8192, 32, 64, 32, 64), (2, 8192, 64, 64, 8, 64), (2, 8192, 64, 32, 2, 64),
    (2, 8192, 64, 32, 1, 16), (2, 8192, 48, 96, 1, 64), (2, 8192, 32, 128, 1, 128), (2, 8192, 16, 256, 1, 128),
    (2, 8192, 16, 256, 1, 256),
]  # fmt: skip
TRAINED = [(8, 4096, 80), (1, 8192, 128), (1, 65536, 80), (8, 2048, 24)]


def _named(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape[:3]))


def lengths(*, fused: str = "", shapes: tuple[str, ...] = tuple(map(_named, LENGTHS))) -> Iterator[Timed]:
    """Time the operator ssd, forward, 256 to 131072 tokens, next to mamba-ssm's kernels and a published fused one."""
    return _cases([shape for shape in LENGTHS if _named(shape) in shapes], fused)


def sizes(*, fused: str = "") -> Iterator[Timed]:
    """Time the operator ssd, forward, with 32 to 256 channels and 16 to 256 states, next to the same kernels."""
    return _cases(SIZES, fused)


def backward() -> Iterator[Timed]:
    """Time gradients of ssd, next to mamba-ssm's kernels."""
    return _cases(TRAINED)


def step() -> Iterator[Timed]:
    """Time one token of 64 rows."""
    x, B = normal(64, 80, 64, dtype="bfloat16"), normal(64, 1, 128, dtype="bfloat16")
    arrays = {"x": x, "dt": normal(64, 80, dtype="bfloat16"), "A": -uniform(80), "B": B, "C": B}
    yield Timed("ssd_step_", "64x80x64x128", arrays | {"state": normal(64, 80, 64, 128), "dt_softplus": True})


def _cases(shapes: Sequence[tuple[int, ...]], fused: str = "") -> Iterator[Timed]:
    """Yield calls with a final state, and each once more with every option on.

    Heads have 64 channels and 128 states in one group, where a shape does not say otherwise. ``fused`` is a checkout of
    the published fused kernel (github.com/RishiAstra/mamba), which runs in float16.
    """
    one_kernel: Any = (
        from_checkout(fused, "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined") if fused else None
    )
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as official
    except ImportError:
        official = None
    dtype = "bfloat16"
    for b, t, h, *sizes in shapes:
        p, g, n = sizes or (64, 1, 128)
        x, dt, z = normal(b, t, h, p, dtype=dtype), normal(b, t, h, dtype=dtype), normal(b, t, h, p, dtype=dtype)
        A = -uniform(h) * 2
        B, C = normal(b, t, g, n, dtype=dtype), normal(b, t, g, n, dtype=dtype)
        arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
        plain = {"D": normal(h), "dt_bias": normal(h) - 2, "dt_softplus": True}
        limit, initial = (1e-3, 10.0), normal(b, h, p, n)
        every = {**plain, "z": z, "dt_limit": limit}

        def peer(arrays: dict[str, Any] = arrays, options: dict[str, Any] = plain, initial: Any = None) -> Any:
            return official(
                *arrays.values(), chunk_size=256, **options, initial_states=initial, return_final_states=True
            )

        half = (x.half(), dt.half(), A, B.half(), C.half()) if one_kernel else ()

        def by_one_kernel(half: Any = half, more: Any = plain) -> Any:
            return one_kernel(*half, chunk_size=128, **more, return_final_states=True, mamba2_fusion_type="medium")

        halves = {"z": z.half(), "initial_states": initial.half()} if one_kernel else {}
        name = _named((b, t, h)) + (f", {p}x{n}, groups {g}" if sizes else "")
        with_all = arrays | every | {"initial_state": initial}
        for kind, given, by_package, by_kernel in (
            ("", arrays | plain, peer, by_one_kernel),
            (", all options", with_all, partial(peer, arrays, every, initial),
             partial(by_one_kernel, half, every | halves)),
        ):  # fmt: skip
            rivals = {"mamba_ssm": by_package if official else None, "fused": by_kernel if one_kernel else None}
            yield Timed("ssd", name + kind, given, rivals, True)


SUITES = {"ssd": lengths, "ssd-sizes": sizes, "ssd-backward": backward, "pointwise": step}


def shared(tokens: int) -> dict[str, Any]:
    """Draw inputs of a layer of Granite 4 or of Mamba-2 with 2.7 billion parameters."""
    return {
        "x": normal(1, tokens, 64, 64, dtype="bfloat16"), "dt": uniform(1, tokens, 64) / 8, "A": -uniform(64) - 0.1,
        "B": normal(1, tokens, 1, 128, dtype="bfloat16"), "C": normal(1, tokens, 1, 128, dtype="bfloat16"),
    }  # fmt: skip
