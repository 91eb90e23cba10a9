"""One exported program computes all lengths, batches and packs by definition: `jax.export` with symbols for sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from refold import ops
from refold.models.checkpoint import random_params
from refold.models.jax import model_for, to_device
from refold.ops.spec import CU_SEQLENS, Example, load
from refold.ops.testing import oracle, problem
from refold.ops.testing.contract import relative_error
from support.models import CONFIGS
from support.products import few

EVERY = frozenset({"D", "z", "dt_bias", "decay", "bias", "initial_state", "reset", "g", "beta", "r", "A_log"})
SIZES = {
    "ssd": ({"h": 4, "p": 2, "g": 2, "n": 3}, {"dt_softplus": True, "chunk_size": 8}),
    "ssd_step": ({"h": 4, "p": 2, "g": 2, "n": 3}, {"dt_softplus": True}),
    "selective_scan": ({"d": 4, "n": 3}, {"dt_softplus": True}),
    "selective_scan_step": ({"d": 4, "n": 3}, {"dt_softplus": True}),
    "delta_rule": ({"h": 4, "p": 2, "g": 2, "n": 3}, {"chunk_size": 8, "normalize": True, "beta_limit": 2.0}),
    "delta_rule_step": ({"h": 4, "p": 2, "g": 2, "n": 3}, {"normalize": True, "beta_limit": 2.0}),
    "linear_scan": ({"*": (4, 2)}, {}),
    "linear_scan-reverse": ({"*": (4, 2)}, {"reverse": True}),
    "causal_conv1d": ({"d": 4, "w": 4}, {"activation": "silu"}),
    "causal_conv1d_step": ({"d": 4, "w": 4}, {"activation": "silu"}),
    "gated_rmsnorm": ({"d": 4}, {"eps": 1e-5}),
}
PACKED = [name for name in SIZES if "step" not in name and "norm" not in name]
# Rows and tokens; of packs, the lengths. The program is exported for symbols, and called with these.
BATCHES = [(2, 5), (1, 1), (3, 131)]
PACKS = [(5,), (70, 3, 0, 1, 60)]


def given(name, rows, tokens, lengths=()):
    spec = load(name.partition("-")[0])
    sizes, options = SIZES[name]
    sizes = sizes | ({"*": (rows, tokens)} if "norm" in name else {"b": rows, "t": tokens})
    names = EVERY & {arg.name for arg in spec.args}
    return problem(spec, Example("export", sizes, names, options, lengths))


def arrays_of(one):
    as_jax = {key: jnp.asarray(a, jnp.float32 if a.dtype.kind == "f" else a.dtype) for key, a in one.arrays.items()}
    return {key: a.astype(jnp.int32) if key == CU_SEQLENS else a for key, a in as_jax.items()}


def values_and_gradients(name, options, arrays):
    """Return the results, and the gradients of half the sum of their squares."""
    fixed = {key: a for key, a in arrays.items() if a.dtype != jnp.float32}

    def loss(floating):
        found = getattr(ops, name.partition("-")[0])(**floating, **fixed, **options)
        results = found if isinstance(found, tuple) else (found,)
        return sum((r * r).sum() / 2 for r in results), results

    gradients, results = jax.grad(loss, has_aux=True)({key: a for key, a in arrays.items() if key not in fixed})
    return results, gradients


def symbols(one):
    """Return the sizes of an export: symbols for rows, tokens and sequences."""
    b, t, k = export.symbolic_shape("b, t, k")
    if one.case.lengths:
        b = 1
    sizes = {"b": b, "t": t, "k": k if one.case.lengths else b}
    shapes = {}
    for arg in one.spec.args:
        if arg.name in one.arrays:
            a = one.arrays[arg.name]
            letters = arg.axes[0].split()
            letters = ["b", "t", "d"][-a.ndim :] if letters == ["*", "d"] else letters
            shape = [sizes.get(letter, n) for letter, n in zip(letters, a.shape, strict=False)]
            shapes[arg.name] = (k + 1,) if arg.name == CU_SEQLENS else (*shape, *a.shape[len(letters) :])
    return shapes


@pytest.mark.slow
@few(
    ("name", "packed"),
    [*((n, False) for n in SIZES), *((n, True) for n in PACKED)],
    [("ssd_step", False), ("selective_scan", True), ("gated_rmsnorm", False)],
)
def test_one_program_serves_all_lengths(name, packed):
    calls = [given(name, 1, sum(lengths), lengths) for lengths in PACKS] if packed else None
    calls = calls or [given(name, *sizes) for sizes in BATCHES]
    run = jax.jit(partial(values_and_gradients, name, calls[0].options))
    shapes, first = symbols(calls[0]), arrays_of(calls[0])
    program = export.export(run)({key: jax.ShapeDtypeStruct(shape, first[key].dtype) for key, shape in shapes.items()})
    for one in calls:
        results = one.reference()
        defined = results, oracle.gradients(one, [*results])
        for found, expected in zip(*map(jax.tree.leaves, (program.call(arrays_of(one)), defined)), strict=True):
            error = relative_error(np.asarray(found, np.float64), np.asarray(expected, np.float64))
            assert error <= one.tolerance(), (one.case, error)


@pytest.mark.slow
@few("name", list(CONFIGS), ["granite"])
def test_one_program_of_a_model_serves_all_lengths(name):
    config = CONFIGS[name]
    run = partial(model_for(config).forward, config, to_device(random_params(config)))
    program = export.export(jax.jit(run))(jax.ShapeDtypeStruct(export.symbolic_shape("b, t"), jnp.int32))
    for rows, length in ((2, 9), (1, 1), (3, 2)):
        tokens = jnp.arange(rows * length, dtype=jnp.int32).reshape(rows, length)
        for found, expected in zip(*(jax.tree.leaves(call(tokens)) for call in (program.call, run)), strict=True):
            assert found.shape == expected.shape
            assert relative_error(np.asarray(found, np.float64), np.asarray(expected, np.float64)) <= 64 * 2**-23
