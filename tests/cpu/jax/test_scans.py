"""Parts of the scans that the contract does not reach: several segments, several lanes, JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refold import ops
from refold.ops.selective_scan import _jax as selective_jax
from refold.ops.ssd import _jax as ssd_jax
from support.products import few

PACKS = [None, [0, 0, 13, 14, 29, 40, 40]]
EPS = np.finfo(np.float32).eps


def problem(op: str, pack, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    batch, rows = (2, 2) if pack is None else (1, len(pack) - 1)
    t, h, p, g, n = 40, 4, 3, 2, 5
    if op == "ssd":
        shapes = {"x": (batch, t, h, p), "dt": (batch, t, h), "B": (batch, t, g, n), "C": (batch, t, g, n)}
        shapes |= {"initial_state": (rows, h, p, n)}
        rates = rng.uniform(-2, -0.1, h)
    else:
        shapes = {"x": (batch, t, h), "dt": (batch, t, h), "B": (batch, t, n), "C": (batch, t, n)}
        shapes |= {"initial_state": (rows, h, n)}
        rates = rng.uniform(-2, -0.1, (h, n))
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["dt"] = np.abs(arrays["dt"]) * 0.3
    return arrays | {"A": rates}


def close(found, expected, terms: int) -> None:
    """Allow the rounding of a sum of ``terms`` float32 products, relative to the largest value."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert np.abs(found - expected).max() <= 8 * EPS * np.sqrt(terms) * np.abs(expected).max()


def gradients(function, op: str, packed: bool, **options):
    """Return the gradients of the sum of the results' squares, and the results, as one program."""
    given = {name: jnp.asarray(a, jnp.float32) for name, a in problem(op, PACKS[packed]).items()}
    offsets = {"cu_seqlens": jnp.asarray(PACKS[packed])} if packed else {}

    def loss(given):
        y, state = function(**given, **offsets, **options)
        return (y * y).sum() + (state * state).sum(), (y, state)

    return jax.jit(jax.grad(loss, has_aux=True))(given)


@functools.cache
def plain(op: str, packed: bool):
    """Return the gradients as the operator computes them, and the results of the definition."""
    offsets = {"cu_seqlens": np.array(PACKS[packed])} if packed else {}
    return gradients(getattr(ops, op), op, packed)[0], getattr(ops, op)(**problem(op, PACKS[packed]), **offsets)


def compare(function, op: str, packed: bool, **options) -> None:
    of_gradients, expected = plain(op, packed)
    given, found = gradients(function, op, packed, **options)
    for one, other in zip(found, expected, strict=True):
        close(one, other, 40 * 5)
    for name, gradient in given.items():
        close(gradient, of_gradients[name], 40 * 5 * 8)


@pytest.mark.slow
@few(("segment", "packed"), [(1, True), (2, False), (3, True)], [(3, True)])
def test_segments(segment: int, packed: bool, monkeypatch) -> None:
    """Ten chunks: in segments of one, in segments that divide them, and in others."""
    plain("ssd", packed)  # before anything is changed
    monkeypatch.setattr(ssd_jax, "SEGMENT_CHUNKS", segment)
    compare(ssd_jax.ssd.__wrapped__, "ssd", packed, chunk_size=4)


@few(("lane", "packed"), [(1, False), (7, False), (7, True), (40, True)], [(7, True)])
def test_lanes(lane: int, packed: bool, monkeypatch) -> None:
    plain("selective_scan", packed)  # before anything is changed
    monkeypatch.setattr(selective_jax, "default_lane_length", lambda seqlen: lane)
    monkeypatch.setattr(selective_jax, "CHECKPOINT_STEPS", 3)
    compare(selective_jax.selective_scan.__wrapped__, "selective_scan", packed)


@pytest.mark.parametrize("lane", [7, 40])
def test_lanes_of_decays_that_overflow_apart_from_their_powers(lane: int, monkeypatch) -> None:
    monkeypatch.setattr(selective_jax, "default_lane_length", lambda seqlen: lane)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, 40, 3)) for name in "xBC"} | {"dt": np.ones((1, 40, 3))}
    decay = rng.choice([-1e8, 0.0, 1e8, 2e8], (1, 40, 3), p=[0.1, 0.05, 0.45, 0.4])
    expected = ops.selective_scan(**arrays, A=np.full((3, 3), -18.5), decay=decay)
    given = {name: jnp.asarray(a, jnp.float32) for name, a in (arrays | {"decay": decay}).items()}
    y, state = selective_jax.selective_scan(**given, A=jnp.full((3, 3), -18.5, jnp.float32))
    close(y, expected[0], 40 * 18.5**2)  # a rounding of an exponent is an absolute one of its power
    close(state, expected[1], 40 * 18.5**2)


@pytest.mark.parametrize("op", ["ssd", "selective_scan"])
def test_vmap_equals_a_loop(op: str) -> None:
    many = [problem(op, None, seed) for seed in range(3)]
    stacked = {name: jnp.stack([jnp.asarray(one[name], jnp.float32) for one in many]) for name in many[0]}
    y, state = jax.vmap(lambda given: getattr(ops, op)(**given))(stacked)
    for i in range(3):
        one = getattr(ops, op)(**{name: a[i] for name, a in stacked.items()})
        close(y[i], one[0], 200)
        close(state[i], one[1], 200)


def test_cumulative_decay_does_not_cancel_over_many_chunks() -> None:
    """Strong decay early must not blur weak decay late: log decays of a segment are summed, never subtracted."""
    t = 2048
    rng = np.random.default_rng(0)
    dt = np.where(np.arange(t) < t - 300, 50.0, 1e-4)[None, :, None]
    arrays = {"x": rng.standard_normal((1, t, 1, 2)), "dt": dt, "A": np.array([-1.0])}
    arrays |= {name: rng.standard_normal((1, t, 1, 3)) for name in "BC"}
    expected = ops.ssd(**arrays)
    found = ops.ssd(**{name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()})
    assert np.isfinite(found[0]).all()
    close(found[1], expected[1], t)
