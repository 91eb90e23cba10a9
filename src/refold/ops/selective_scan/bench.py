"""Calls of `selective_scan` that are measured on a GPU: D, z, bias, softplus, final state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from refold.ops.timed import Timed, normal, uniform

# Batch, tokens, channels, states.
SHAPES = [(1, 512, 1024, 32), (4, 512, 1024, 32), (16, 512, 1024, 32), (1, 2048, 5120, 16), (1, 32768, 5120, 16),
          (8, 2048, 5120, 16), (1, 8192, 1536, 16)]  # fmt: skip
TRAINED = [(2, 4096, 4096, 16), (8, 2048, 5120, 16), (1, 8192, 1536, 16)]


def forward() -> Iterator[Timed]:
    """Time the operator selective_scan, forward, next to mamba-ssm's kernel."""
    return _cases(SHAPES, ("bfloat16", "float32"))


def backward() -> Iterator[Timed]:
    """Time gradients of selective_scan."""
    for case in _cases(TRAINED, ("bfloat16",)):
        case.rivals = {}  # the forward alone
        yield case


def step() -> Iterator[Timed]:
    """Time one token of 64 rows."""
    x, B = normal(64, 5120, dtype="bfloat16"), normal(64, 16, dtype="bfloat16")
    arrays = {"x": x, "dt": x, "A": -uniform(5120, 16), "B": B, "C": B}
    yield Timed("selective_scan_step_", "64x5120x16", arrays | {"state": normal(64, 5120, 16), "dt_softplus": True})


def _cases(shapes: Sequence[tuple[int, ...]], dtypes: tuple[str, ...]) -> Iterator[Timed]:
    """Yield calls, and mamba-ssm's kernel in its own layout."""
    try:
        from selective_scan_cuda import fwd as official
    except ImportError:
        official = None
    for b, t, d, n in shapes:
        for dtype in dtypes:
            x, dt, z = (normal(b, t, d, dtype=dtype) for _ in range(3))
            A, B, C = -uniform(d, n) * 4, normal(b, t, n, dtype=dtype), normal(b, t, n, dtype=dtype)
            arrays = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": normal(d), "z": z, "dt_bias": normal(d) - 2}
            peer = None
            if official is not None:
                rows = [arrays[name].mT.contiguous() for name in ("x", "dt", "B", "C", "z")]
                peer = lambda: official(rows[0], rows[1], A, rows[2][:, None], rows[3][:, None], arrays["D"],  # noqa: B023, E731
                                        rows[4], arrays["dt_bias"], True)  # noqa: B023  # fmt: skip
            yield Timed("selective_scan", f"{b}x{t}x{d}x{n}", arrays | {"dt_softplus": True}, {"mamba_ssm": peer})


SUITES = {"selective-scan": forward, "selective-scan-backward": backward, "pointwise": step}
