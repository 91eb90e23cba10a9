"""The operators that rewrites emit, by what they compute: see `OpSpec.form`."""

from __future__ import annotations

from ...ops.torch.registry import operation

SCAN = operation("elementwise scan")
"""``h[t] = a[t] h[t-1] + x[t]``: writes all states."""
CONTRACTED = operation("elementwise scan, contracted")
"""``y[t] = sum over n of C[t] h[t]``, with a decay per channel and state; states are not written."""
HEADS = operation("scan with one decay per head, contracted")
"""The same, with a decay per head: matrix products compute it."""
RANK_ONE = operation("scan with decay and correction, contracted")
"""The same, where a step corrects what the decayed state holds under a key: a map of rank one besides the decay."""
CONVOLUTION = operation("causal convolution")
NORM = operation("gated norm")
