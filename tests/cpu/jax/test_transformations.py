"""The operators are pure functions: each of JAX's transformations gives what the plain calls give, one by one."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from refold import ops
from refold.ops.delta_rule import _jax as delta_jax
from refold.ops.selective_scan import _jax as selective_jax
from refold.ops.spec import CU_SEQLENS, Example, load
from refold.ops.ssd import _jax as ssd_jax
from refold.ops.testing import problem
from refold.ops.testing.contract import relative_error
from refold.ops.testing.problems import Problem
from support.products import covering, others_exhaustive

pytestmark = pytest.mark.rows(6)

Arrays = dict[str, jax.Array]
EVERY = frozenset({"D", "z", "dt_bias", "decay", "bias", "initial_state", "g", "beta", "r", "A_log"})
SSD, DUAL = {"t": 11, "h": 8, "p": 2, "g": 8, "n": 3}, {"dt_softplus": True, "dt_limit": (0.5, 1.2)}
MAMBA, GROUPED = {"t": 11, "d": 16, "n": 3, "g": 8}, {"B": 1, "C": 1}
SOFTPLUS, SILU, GROUPS = {"dt_softplus": True}, {"activation": "silu"}, {"eps": 1e-5, "group_size": 2}
FUSED, PER_KEY = {"normalize": True, "beta_limit": 2.0}, {"g": 1, "dt_bias": 1}
BATCH, PACK, STEP = {"b": 8}, {"b": 1}, {"b": 8, "t": 3}
LENGTHS = (0, 4, 0, 1, 6)

CASES = {
    "ssd": Example("batch", SSD | BATCH, EVERY, DUAL | {"chunk_size": 2}),
    "ssd-one_group": Example("batch", SSD | BATCH | {"g": 1}, EVERY, DUAL | {"chunk_size": 2}),
    "ssd-chunks": Example(
        "chunks", {"b": 1, "t": 35, "h": 4, "p": 5, "g": 2, "n": 6}, EVERY, DUAL | {"chunk_size": 16}
    ),
    "ssd-packed": Example("packed", SSD | PACK, EVERY, DUAL | {"chunk_size": 2}, LENGTHS),
    "ssd_step": Example("token", {k: n for k, n in (SSD | BATCH).items() if k != "t"}, EVERY, DUAL),
    "ssd_step-tokens": Example("tokens", SSD | STEP, EVERY, DUAL),
    "selective_scan": Example("batch", MAMBA | BATCH, EVERY, SOFTPLUS, layout=GROUPED),
    "selective_scan-one_group": Example("batch", MAMBA | BATCH, EVERY, SOFTPLUS),
    "selective_scan-packed": Example("packed", MAMBA | PACK, EVERY, SOFTPLUS, LENGTHS, GROUPED),
    "selective_scan_step": Example("token", {k: n for k, n in (MAMBA | BATCH).items() if k != "t"}, EVERY, SOFTPLUS),
    "selective_scan_step-tokens": Example("tokens", MAMBA | STEP, EVERY, SOFTPLUS),
    "delta_rule": Example("batch", SSD | BATCH, EVERY, FUSED | {"chunk_size": 2}),
    "delta_rule-one_group": Example("batch", SSD | BATCH | {"g": 1}, EVERY, FUSED | {"chunk_size": 2}, layout=PER_KEY),
    "delta_rule-packed": Example("packed", SSD | PACK, EVERY, FUSED | {"chunk_size": 2}, LENGTHS),
    "delta_rule_step": Example("token", {k: n for k, n in (SSD | BATCH).items() if k != "t"}, EVERY, FUSED),
    "delta_rule_step-tokens": Example("tokens", SSD | STEP, EVERY, FUSED, layout=PER_KEY),
    "linear_scan": Example("batch", {"b": 8, "t": 11, "*": (8, 2)}, EVERY),
    "linear_scan-packed": Example("packed", {"b": 1, "t": 11, "*": (8, 2)}, EVERY, {"reverse": True}, LENGTHS),
    "causal_conv1d": Example("batch", {"b": 8, "t": 11, "d": 16, "w": 4}, EVERY, SILU),
    "causal_conv1d-packed": Example("packed", {"b": 1, "t": 11, "d": 16, "w": 4}, EVERY, SILU, LENGTHS),
    "causal_conv1d_step": Example("token", {"b": 8, "d": 16, "w": 4}, EVERY, SILU),
    "gated_rmsnorm": Example("batch", {"*": (8, 3), "d": 16}, EVERY, GROUPS),
}
NAMES = pytest.mark.parametrize("name", CASES)
# One group is another program only where heads that read it are spread over devices.
GROUPED_ALIKE = [name for name in CASES if "one_group" not in name]
FEWER = pytest.mark.parametrize("name", GROUPED_ALIKE)


def few(*names: str) -> pytest.MarkDecorator:
    """Parametrize with all names; those that are not among ``names`` are exhaustive."""
    kept = [i for i, name in enumerate(GROUPED_ALIKE) if name in names]
    return pytest.mark.parametrize("name", others_exhaustive([(name,) for name in GROUPED_ALIKE], kept))


@pytest.fixture(autouse=True, scope="module")
def _many_lanes_and_segments() -> Iterator[None]:
    """Let these short sequences take the ways of long ones: several lanes, blocks and segments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selective_jax, "default_lane_length", lambda seqlen: 5)
        patch.setattr(selective_jax, "CHECKPOINT_STEPS", 2)
        patch.setattr(ssd_jax, "SEGMENT_CHUNKS", 2)
        patch.setattr(delta_jax, "SEGMENT_CHUNKS", 2)
        jax.clear_caches()
        yield
    jax.clear_caches()


@functools.cache
def given(name: str) -> Problem:
    spec = load(name.partition("-")[0])
    return problem(spec, replace(CASES[name], given=EVERY & {arg.name for arg in spec.args}))


def operator(name: str) -> Callable[[Arrays], tuple[jax.Array, ...]]:
    """Return the operator as a function of its arrays alone."""
    problem = given(name)

    def function(arrays: Arrays) -> tuple[jax.Array, ...]:
        found = getattr(ops, problem.spec.name)(**arrays, **problem.options)
        return found if isinstance(found, tuple) else (found,)

    return function


@functools.cache
def examples(name: str) -> tuple[Arrays, ...]:
    """Return the arrays of three calls: permuted, so that every pack is cut elsewhere."""
    arrays = given(name).arrays

    def turned(key: str, array: np.ndarray, by: int) -> jax.Array:
        if key != CU_SEQLENS:
            return jnp.asarray(np.roll(array, by), jnp.float32)
        return jnp.asarray(np.cumsum([0, *np.roll(LENGTHS, by)]), jnp.int32)

    return tuple({key: turned(key, array, by) for key, array in arrays.items()} for by in range(3))


@functools.cache
def plain(name: str, call: int = 0) -> tuple[tuple[jax.Array, ...], Arrays]:
    """Return the results and the gradients of a plain call."""
    return value_and_gradients(name)(examples(name)[call])


def all_plain(name: str) -> Any:
    """Return those of all three calls, stacked."""
    return stack(plain(name, call) for call in range(3))


def value_and_gradients(name: str, function: Any = None) -> Callable[[Arrays], tuple[tuple[jax.Array, ...], Arrays]]:
    """Return a function that gives the results, and the gradients of the sum of their squares."""
    function = function or operator(name)

    def loss(floating: Arrays, others: Arrays) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        results = function(floating | others)
        return sum((r * r).sum() for r in results), results

    def both(arrays: Arrays) -> tuple[tuple[jax.Array, ...], Arrays]:
        floating = {key: a for key, a in arrays.items() if key != CU_SEQLENS}
        others = {key: a for key, a in arrays.items() if key == CU_SEQLENS}
        gradients, results = jax.grad(loss, has_aux=True)(floating, others)
        return results, gradients

    return both


def equal(name: str, found: Any, expected: Any) -> None:
    """Compare trees of arrays within the rounding that the contract allows this problem."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        error = relative_error(np.asarray(one, np.float64), np.asarray(other, np.float64))
        assert error <= given(name).tolerance(), (jax.tree_util.keystr(path), error)


def stack(trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@NAMES
def test_plain_call_is_the_definition(name: str) -> None:
    """What the others are compared with; the contract test does this for other cases."""
    equal(name, plain(name)[0], given(name).reference())


@few("ssd_step", "causal_conv1d-packed", "gated_rmsnorm")
def test_jit_of_gradients(name: str) -> None:
    equal(name, jax.jit(value_and_gradients(name))(examples(name)[1]), plain(name, 1))


@few("ssd_step", "selective_scan-packed", "linear_scan-packed", "causal_conv1d-packed", "gated_rmsnorm")
def test_vmap_of_values_and_gradients(name: str) -> None:
    """Over every array at once; packs are cut in other places in each example."""
    equal(name, jax.vmap(value_and_gradients(name))(stack(examples(name))), all_plain(name))


@FEWER
def test_vmap_over_one_array(name: str) -> None:
    """The other arrays are shared, and results vary with ``x``, or the values, alone."""
    first = examples(name)[0]
    one = "x" if "x" in first else "v"
    xs = stack([arrays[one] for arrays in examples(name)])
    found = jax.vmap(lambda x: operator(name)({**first, one: x}))(xs)
    equal(name, found, stack([operator(name)({**first, one: x}) for x in xs]))


IN_A_SCAN = few("ssd-packed", "linear_scan-packed", "causal_conv1d_step", "gated_rmsnorm")


@IN_A_SCAN
def test_gradients_inside_a_scan(name: str) -> None:
    inside = jax.lax.scan(lambda _, arrays: (None, value_and_gradients(name)(arrays)), None, stack(examples(name)))[1]
    equal(name, inside, all_plain(name))


@IN_A_SCAN
def test_gradients_through_a_scan(name: str) -> None:
    def scanned(arrays: Arrays) -> tuple[jax.Array, ...]:
        return jax.lax.scan(lambda _, arrays: (None, operator(name)(arrays)), None, arrays)[1]

    equal(name, value_and_gradients(name, scanned)(stack(examples(name))), all_plain(name))


@few("selective_scan", "linear_scan", "causal_conv1d-packed")
def test_checkpoint(name: str) -> None:
    checkpointed = value_and_gradients(name, jax.checkpoint(operator(name)))
    equal(name, checkpointed(examples(name)[0]), plain(name))


@few(
    "ssd",
    "ssd_step",
    "selective_scan",
    "selective_scan_step-tokens",
    "linear_scan-packed",
    "causal_conv1d",
    "gated_rmsnorm",
)
def test_jvp_is_the_transpose_of_the_gradient(name: str) -> None:
    """With results r and their squares summed: ``2 r · J v`` equals ``gradients · v``."""
    arrays = examples(name)[0]
    results, gradients = plain(name)
    tangents = {key: examples(name)[1][key] for key in gradients}
    others = {key: a for key, a in arrays.items() if key not in gradients}
    function = operator(name)
    floating = {key: arrays[key] for key in gradients}
    found, moved = jax.jvp(lambda floating: function(floating | others), (floating,), (tangents,))
    equal(name, found, results)
    terms = [np.asarray(g, np.float64) * np.asarray(tangents[key]) for key, g in gradients.items()]
    forward = sum((2 * np.asarray(r, np.float64) * np.asarray(m)).sum() for r, m in zip(results, moved, strict=True))
    size = sum(np.abs(term).sum() for term in terms)
    assert abs(forward - sum(term.sum() for term in terms)) <= given(name).tolerance() * size


@pytest.mark.parametrize("name", [name for name in CASES if "step" in name])
def test_donated_state(name: str) -> None:
    arrays = dict(examples(name)[0])
    state = jnp.copy(arrays.pop("state"))
    step = jax.jit(lambda state, arrays: operator(name)({**arrays, "state": state}), donate_argnums=0)
    equal(name, step(state, arrays), plain(name)[0])
    assert state.is_deleted()


def placed(axes: str, cut: str) -> PartitionSpec:
    """Return the partition of an array whose axes named in ``cut`` lie over the devices."""
    return PartitionSpec(*["devices" if letter in cut.split() else None for letter in axes.split()])


def axes_of(problem: Problem) -> tuple[dict[str, str], list[str]]:
    """Return the axes of arguments and of results; of the two axes that ``*`` stands for here, only the first is so."""
    spec, case = problem.spec, problem.case

    def letters(axes: str) -> str:
        axes = axes.replace("*", "* _")
        return axes.replace("t ", "") if spec.time_optional and "t" not in case.sizes else axes

    named = {arg.name: letters(arg.axes[case.layout.get(arg.name, 0)]) for arg in spec.args}
    return named, [letters(out.axes) for out in spec.outputs]


SPREAD = [name for name in CASES if name != "ssd-chunks"]  # whose sizes are those of all of eight devices
ROWS = {name: "*" if name == "gated_rmsnorm" else "b k" for name in SPREAD if "packed" not in name}
HEADS = {name: "*" if "linear" in name else "h d" if "one_group" in name else "h d g" for name in SPREAD}


def recurrence(name: str) -> str:
    return name.partition("-")[0].removesuffix("_step")


SHARDS = [*ROWS.items(), *HEADS.items()]


@pytest.mark.parametrize(
    ("name", "cut"), others_exhaustive(SHARDS, covering(SHARDS, lambda row: (recurrence(row[0]), row[1])))
)
def test_shard_map(name: str, cut: str) -> None:
    """Batch or heads over eight devices, with JAX's default checks; gradients of what all devices share are summed."""
    axes, outputs = axes_of(given(name))
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    assert mesh.size == 8
    arrays = examples(name)[0]
    specs = {key: placed(axes[key], cut) for key in arrays}
    spread = jax.shard_map(
        operator(name), mesh=mesh, in_specs=(specs,), out_specs=tuple(placed(a, cut) for a in outputs)
    )
    found = jax.jit(value_and_gradients(name, spread))(arrays)
    equal(name, found, plain(name))


# What is cut over eight devices: rows, heads or channels, or time; or rows and heads over two axes of the mesh.
TIMED = {
    f"{name}-cut": replace(CASES[name], sizes={**CASES[name].sizes, "t": 16})
    for name in SPREAD
    if "t" in CASES[name].sizes and "packed" not in name
}
CASES |= TIMED
CUTS = [
    *((name, {cut: "rows heads"}) for name, cut in [*ROWS.items(), *HEADS.items()]),
    *((name, {ROWS[name]: "rows", HEADS[name]: "heads"}) for name in ROWS if name != "gated_rmsnorm"),
    *((name, {"t": "rows heads"}) for name in TIMED),
]


MESHES = [(name, cuts, kind) for name, cuts in CUTS for kind in (AxisType.Auto, AxisType.Explicit)]


def facts(row: tuple[str, dict[str, str], AxisType]) -> Iterator[Any]:
    """Yield each recurrence, each way to be cut, and each kind of mesh."""
    name, cuts, kind = row
    ways = tuple("t" if letters == "t" else "rows" if letters == ROWS.get(name) else "heads" for letters in cuts)
    yield from (recurrence(name), ways, kind)


@pytest.mark.parametrize(
    ("name", "cuts", "kind"),
    others_exhaustive(
        MESHES, covering(MESHES, facts), [f"{name}-{'-'.join(cuts)}-{kind.name}" for name, cuts, kind in MESHES]
    ),
)
def test_meshes(name: str, cuts: dict[str, str], kind: AxisType) -> None:
    """Arrays that are spread over a mesh of 2 x 4 devices; results are spread as they are."""
    axes, outputs = axes_of(given(name))
    mesh = jax.make_mesh((2, 4), ("rows", "heads"), axis_types=(kind, kind))
    over = {letter: tuple(devices.split()) for letters, devices in cuts.items() for letter in letters.split()}

    def spec(letters: str) -> PartitionSpec:
        return PartitionSpec(*(over.get(letter) for letter in letters.split()))

    arrays = {key: jax.device_put(a, NamedSharding(mesh, spec(axes[key]))) for key, a in examples(name)[0].items()}
    with jax.set_mesh(mesh):
        found = jax.jit(value_and_gradients(name))(arrays)
        equal(name, found, plain(name))
        if kind is AxisType.Explicit:
            for result, letters in zip(operator(name)(arrays), outputs, strict=True):
                assert result.sharding.spec == spec(letters), (result.sharding.spec, letters)
