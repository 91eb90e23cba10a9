"""transformers' own GraniteMoeHybridMambaLayer, unmodified: eager, torch.compile and refold in one run.

Sizes are those of granite-4.0-h-tiny. A row holds the full report, with interleaved times, peak memory, and the
checks of every rewrite. float32 runs without TF32.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import transformers
from transformers import GraniteMoeHybridConfig

import refold

from . import peers
from .progress import wanted
from .rows import Row

# transformers takes the kernels of these packages where it finds them; the layer here is its PyTorch code.
with peers.hidden("mamba_ssm", "causal_conv1d"):
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

WIDTH = 1536


def layer(width: int) -> torch.nn.Module:
    """Return the layer at granite-4.0-h-tiny's proportions, random weights."""
    config = GraniteMoeHybridConfig(
        hidden_size=width,
        mamba_n_heads=2 * width // 64,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_chunk_size=256,
        mamba_expand=2,
    )
    return GraniteMoeHybridMambaLayer(config, 0)


@torch.no_grad()
def granite_layer(
    *, device: str = "cuda", dtype: tuple[str, ...] = ("float32", "bfloat16"), batch: int = 32, tokens: int = 256
) -> Iterator[Row]:
    """Time transformers' Granite hybrid layer, unmodified: eager, torch.compile and refold."""
    for name in dtype:
        if not wanted(dtype=name, batch=batch, tokens=tokens):
            continue
        torch.manual_seed(0)
        module = layer(WIDTH).to(device, getattr(torch, name)).eval()
        x = torch.randn(batch, tokens, WIDTH, device=device, dtype=getattr(torch, name))
        compiled = refold.compile(module)
        start = time.perf_counter()
        compiled(x)
        first_call_s = time.perf_counter() - start
        report = compiled.report.to_dict()
        yield {
            "case": "granite-4.0-h-tiny",
            "transformers": transformers.__version__,
            "dtype": name,
            "batch": batch,
            "tokens": tokens,
            "first_call_s": first_call_s,
            "times_ms": report["graphs"][0]["times_ms"],
            "peak_bytes": report["graphs"][0]["peak_bytes"],
            "report": report,
        }
