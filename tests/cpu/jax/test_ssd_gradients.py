"""Gradients of ``ssd`` in chunks of several blocks of tokens, against the torch backend in float64."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import refold  # noqa: E402
from refold.ops.ssd import _jax  # noqa: E402
from support.products import few  # noqa: E402


@few(("tokens", "chunk"), [(130, 64), (48, 48), (33, 33)], [(130, 64)])
def test_gradients_across_blocks(tokens, chunk):
    """33 tokens are no multiple of a block: they are one."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(2, tokens, 4, 8)), "dt": rng.uniform(0.1, 3, size=(2, tokens, 4)),
        "A": -rng.uniform(0.1, 2, size=4), "B": rng.normal(size=(2, tokens, 2, 8)),
        "C": rng.normal(size=(2, tokens, 2, 8)),
    }  # fmt: skip
    dy = rng.normal(size=arrays["x"].shape)
    leaves = {name: torch.tensor(v, requires_grad=True) for name, v in arrays.items()}
    y = refold.ops.ssd(**leaves, backend="torch")[0]
    want = torch.autograd.grad(y, list(leaves.values()), torch.tensor(dy))

    def loss(*given):
        return (_jax.ssd(*given, chunk_size=chunk)[0] * dy.astype(np.float32)).sum()

    got = jax.grad(loss, argnums=range(5))(*(v.astype(np.float32) for v in arrays.values()))
    for g, w in zip(got, want, strict=True):
        assert np.linalg.norm(np.asarray(g, np.float64) - w.numpy()) < 2e-6 * np.linalg.norm(w.numpy())
