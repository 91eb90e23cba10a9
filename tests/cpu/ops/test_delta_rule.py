"""The delta rule where kernels are easily wrong: repeated keys, strong decays, odd lengths, gradients of states."""

import os
import re
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import refold.ops as ops
from refold.errors import ArgumentError, ShapeError
from refold.ops.backends import absence
from refold.ops.delta_rule import _torch as right
from refold.ops.delta_rule.nonfinite import spoiled_results
from refold.ops.spec import Example, load
from refold.ops.testing import CHECKS, Problem, check, frame_of, oracle, problem
from refold.ops.torch import registry
from support.products import covering, each_pair, others_exhaustive, pairs

pytestmark = pytest.mark.rows(6)

SPEC = load("delta_rule")
NAMES = ["torch", "numba", "jax", *(["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [])]
BACKENDS = [
    pytest.param(b, marks=[pytest.mark.skip(reason=reason)] if (reason := absence(SPEC, b)) else []) for b in NAMES
]
BOTH = pytest.mark.parametrize(
    ("backend", "per_key"),
    [
        pytest.param(
            *each.values,
            per_key,
            marks=[*each.marks, *[pytest.mark.exhaustive] * (each.values[0] == "jax")],
        )
        for each in BACKENDS
        for per_key in (False, True)
    ],
)
LENGTHS = (1, 15, 0, 16, 17, 63, 64, 65)
GATED = frozenset({"g", "beta", "initial_state"})
PER_KEY = {"g": 1}


def case(t: int, per_key: bool = False, lengths: tuple[int, ...] = (), **sizes: int) -> Example:
    sizes = {"b": 1, "t": t, "h": 2, "p": 3, "g": 1, "n": 4, **sizes}
    return Example(f"t{t}", sizes, GATED, lengths=lengths, layout=PER_KEY if per_key else {})


def drawn(t: int, per_key: bool = False, lengths: tuple[int, ...] = (), **changed: Any) -> Problem:
    """A problem whose arrays are replaced by values that broadcast to their shapes."""
    given = problem(SPEC, case(t, per_key, lengths))
    return given.with_arrays(
        **{n: np.ascontiguousarray(np.broadcast_to(a, given.arrays[n].shape)) for n, a in changed.items()}
    )


def gradients(
    given: Problem, backend: str, result: int | None = None, fixed: tuple[str, ...] = ()
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the gradients of a backend and by definition, of both results or of one of them."""
    frame, rng = frame_of(backend), np.random.default_rng(0)
    cotangents = [rng.standard_normal(r.shape).astype(np.float32).astype(np.float64) for r in given.reference()]
    arrays = {n: frame.array(a, given.dtype_of(n)) for n, a in given.arrays.items()}
    held = {n: arrays.pop(n) for n in fixed}
    chosen = slice(None) if result is None else slice(result, result + 1)
    found = frame.gradients(
        lambda **a: ops.delta_rule(**a, **held, backend=backend)[chosen], arrays, cotangents[chosen]
    )
    weighted = [c if result in (None, i) else 0 * c for i, c in enumerate(cotangents)]
    return found, {n: g for n, g in oracle.gradients(given, weighted).items() if n in found}


def close(found: dict[str, np.ndarray], truths: dict[str, np.ndarray], tolerance: float) -> None:
    """Compare gradients with the largest of them: one that is zero but for roundings has no size of its own."""
    assert found.keys() == truths.keys()
    size = max(float(np.abs(truth).max()) for truth in truths.values())
    for name, truth in truths.items():
        assert np.abs(found[name] - truth).max() <= tolerance * size, f"gradient of {name}"


def holds(given: Problem, backend: str) -> None:
    check("values", given, backend)
    close(*gradients(given, backend), given.tolerance())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("per_key", [False, True])
def test_equal_keys(backend: str, per_key: bool) -> None:
    """Each write replaces the one before, so that a state is its last value; powers of the pairs would reach 10^18."""
    key = np.array([0.5, -0.5, 0.5, 0.5])
    given = drawn(64, per_key, k=key, beta=1.0, g=0.0, initial_state=0.0)
    _, state = given.reference()
    np.testing.assert_allclose(state[0, 0], key[:, None] * given.arrays["v"][0, -1, 0], atol=1e-12)
    holds(given, backend)


@each_pair(
    backend=NAMES, per_key=[False, True], g=[0.0, -5.0, -20.0, -200.0, "one"], beta=[0.0, 1.0, 2.0],
)  # fmt: skip
def test_ends_of_strengths_and_decays(backend: str, per_key: bool, g: Any, beta: float) -> None:
    if reason := absence(SPEC, backend):
        pytest.skip(reason)
    if g == "one":  # forgets all, among tokens that forget nothing or little
        g = np.full((1, 37, 1, *([1] if per_key else [])), -0.001)
        g[0, 20], g[0, 5:9] = -200.0, 0.0
    given = drawn(37, per_key, g=g, beta=beta)
    holds(given, backend)


ROWS = list(product(NAMES, [False, True], [n for n in LENGTHS if n]))
# JAX compiles for each length: without exhaustive tests, for the last.
KEPT = covering(ROWS, lambda row: pairs(row) if row[0] != "jax" else [row] if row[2] == LENGTHS[-1] else [])


@pytest.mark.parametrize(("backend", "per_key", "length"), others_exhaustive(ROWS, KEPT))
def test_lengths(backend: str, per_key: bool, length: int) -> None:
    if reason := absence(SPEC, backend):
        pytest.skip(reason)
    holds(problem(SPEC, case(length, per_key)), backend)


@BOTH
def test_lengths_in_a_pack(backend: str, per_key: bool) -> None:
    given = problem(SPEC, case(sum(LENGTHS), per_key, LENGTHS))
    holds(given, backend)
    check("packed", given, backend)


@BOTH
def test_cut_at_any_token(backend: str, per_key: bool) -> None:
    given, frame = problem(SPEC, case(19, per_key)), frame_of(backend)
    whole, last = given.reference()
    arrays = {n: frame.array(a, "float32") for n, a in given.arrays.items()}
    timed = [n for n in arrays if given.time_axis(n) is not None]
    for cut in (1, 15, 16, 17) if backend == "jax" else range(1, 19):  # JAX compiles for each length
        state, parts = arrays["initial_state"], []
        for low, high in pairwise((0, cut, 19)):
            part = {n: a[:, low:high] if n in timed else a for n, a in arrays.items()}
            y, state = ops.delta_rule(**{**part, "initial_state": state}, backend=backend)
            parts.append(frame.numpy(y))
        scale = np.abs(whole).max()
        assert np.abs(np.concatenate(parts, 1) - whole).max() <= given.tolerance() * scale
        assert np.abs(frame.numpy(state) - last).max() <= given.tolerance() * np.abs(last).max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("result", [0, 1])
@pytest.mark.parametrize("per_key", [False, True])
def test_gradient_of_one_result_alone(backend: str, result: int, per_key: bool) -> None:
    """The final state's gradient is all that a piece of a sequence gets from the next one."""
    given = problem(SPEC, case(21, per_key))
    # The final state does not depend on queries.
    close(*gradients(given, backend, result, fixed=("q",) if result else ()), given.tolerance())


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_the_initial_state_alone(backend: str) -> None:
    given = problem(SPEC, case(21))
    others = tuple(n for n in given.arrays if n != "initial_state")
    close(*gradients(given, backend, fixed=others), given.tolerance())


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("per_key", [False, True])
def test_each_bad_token_and_state_of_a_pack(backend: str, per_key: bool) -> None:
    """A bad initial state spoils its column from the first token of its sequence on, not from token 0."""
    if reason := absence(SPEC, backend):
        pytest.skip(reason)
    given = problem(SPEC, case(6, per_key, (2, 0, 1, 3), n=3))
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        array = given.arrays[name]
        for i in range(len(array) if name == "initial_state" else 6):
            bad = array.copy()
            bad[i if name == "initial_state" else (0, i)].flat[0] = np.nan
            spoiled = given.with_arrays(**{name: bad})
            found, truths = gradients(spoiled, backend)
            for of, truth in truths.items():
                assert (np.isfinite(found[of]) == np.isfinite(truth)).all(), f"{name} {i}: gradient of {of}"


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("per_key", [False, True])
def test_states_stored_transposed(backend: str, per_key: bool) -> None:
    """A state (d_v, d_k) is passed as a view; a step writes it where it lies."""
    if reason := absence(SPEC, backend):
        pytest.skip(reason)
    given = problem(SPEC, case(9, per_key, n=4, p=6))
    arrays = {n: torch.from_numpy(a).float() for n, a in given.arrays.items()}
    y, state = ops.delta_rule(**arrays, backend=backend)
    stored = arrays["initial_state"].mT.contiguous()
    y_view, state_view = ops.delta_rule(**{**arrays, "initial_state": stored.mT}, backend=backend)
    torch.testing.assert_close((y_view, state_view), (y, state), rtol=0, atol=1e-6)
    token = {n: a[:, 0] if given.time_axis(n) is not None else a for n, a in arrays.items() if n != "initial_state"}
    expected = ops.delta_rule_step(**token, state=stored.mT, backend=backend)
    where = stored.data_ptr()
    y_step, written = ops.delta_rule_step_(**token, state=stored.mT, backend=backend)
    assert written.data_ptr() == where
    torch.testing.assert_close((y_step, stored), (expected[0], expected[1].mT), rtol=0, atol=1e-6)


def rank_one(w: Tensor, a: Tensor, b: Tensor, k: Tensor, v: Tensor, q: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    ys = []
    for t in range(q.shape[1]):
        found = torch.einsum("bhnp,bhn->bhp", state, a[:, t])
        state = w[:, t].exp()[..., None] * state + b[:, t, :, :, None] * found[:, :, None]
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        ys.append(torch.einsum("bhnp,bhn->bhp", state, q[:, t]))
    return torch.stack(ys, 1), state


def test_rwkv7_is_its_recurrence() -> None:
    torch.manual_seed(0)
    q, k, a, b = (torch.randn(2, 11, 2, 4, dtype=torch.float64) / 2 for _ in range(4))
    v, w = torch.randn(2, 11, 2, 3, dtype=torch.float64), -0.6 * torch.rand(2, 11, 2, 4, dtype=torch.float64)
    state = torch.randn(2, 2, 4, 3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, w, k, v, a, b, state)]
    found = ops.rwkv7(*leaves[:-1], initial_state=state)
    truth = rank_one(w, a, b, k, v, q, state)
    torch.testing.assert_close(found, truth)
    grads = [torch.autograd.grad(sum(r.sin().sum() for r in results), leaves) for results in (found, truth)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("writes", [1, 2, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_delta_product_writes_several_times_per_token(writes: int, gated: bool) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 7, 1, 4, dtype=torch.float64), torch.randn(1, 7 * writes, 1, 4, dtype=torch.float64)
    v, beta = torch.randn(1, 7 * writes, 2, 3, dtype=torch.float64), torch.rand(1, 7 * writes, 2, dtype=torch.float64)
    g = -torch.rand(1, 7, 2, dtype=torch.float64) if gated else None
    y, last = ops.delta_product(q, k, v, g, beta, normalize=True)
    state, unit = torch.zeros(2, 4, 3, dtype=torch.float64), right.normalized(k)[0, :, 0]
    for t in range(7):
        state = state if g is None else g[0, t].exp()[:, None, None] * state
        for i in range(t * writes, (t + 1) * writes):
            state = state + unit[i, :, None] * (beta[0, i, :, None] * (v[0, i] - unit[i] @ state))[:, None]
        torch.testing.assert_close(y[0, t], right.normalized(q)[0, t, 0] @ state / 2)
    torch.testing.assert_close(last[0], state)
    offsets = torch.tensor([0, 3, 7])
    y_packed, _ = ops.delta_product(q, k, v, g, beta, normalize=True, cu_seqlens=offsets)
    alone, _ = ops.delta_product(
        q[:, 3:], k[:, 3 * writes :], v[:, 3 * writes :], None if g is None else g[:, 3:], beta[:, 3 * writes :],
        normalize=True,
    )  # fmt: skip
    torch.testing.assert_close(y_packed[:, 3:], alone)


@pytest.mark.parametrize("length", [1, 2, 8, 16, 32, 64, 128])
def test_inverse_by_levels(length: int) -> None:
    torch.manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(3, length, 4, dtype=torch.float64), dim=-1)
    k[0] = k[0, :1]  # all equal
    L = (torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)[:, None, None] * (k @ k.mT)).tril(-1)
    eye = torch.eye(length, dtype=torch.float64)
    torch.testing.assert_close(right.unit_lower_inverse(L) @ (eye + L), eye.expand(3, -1, -1), atol=1e-10, rtol=0)


WRONG = {
    "r without erase": ({"r": np.ones((1, 9, 2, 4)), "erase": False}, "r says what is erased"),
    "A_log without g": ({"A_log": np.ones(2), "g": None}, "A_log shapes the decay g, which is None"),
    "bound without g": ({"lower_bound": -5.0, "g": None}, "lower_bound shapes the decay g"),
    "limit without beta": ({"beta_limit": 2.0, "beta": None}, "beta_limit bounds beta"),
    "bias per key": ({"dt_bias": np.ones((2, 4))}, "dt_bias is one per key, but g is one per head"),
    "positive bound": ({"lower_bound": 5.0}, "lower_bound must be None or a negative number; got 5.0"),
    "limit zero": ({"beta_limit": 0.0}, "beta_limit must be None or a positive number; got 0.0"),
    "scale NaN": ({"scale": float("nan")}, "scale must be None or a finite number; got nan"),
    "state transposed": ({"initial_state": np.ones((1, 2, 3, 4))}, "initial_state has n=3 but q has n=4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    changed, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        ops.delta_rule(**{**problem(SPEC, case(9)).arrays, **changed})


def test_layers_of_the_family_take_their_own_gates() -> None:
    x, gate = np.ones((1, 3, 2, 4)), np.zeros((1, 3, 2))
    with pytest.raises(ShapeError, match=r"kda: g must have the axes \(b, t, h, n\); got shape \(1, 3, 2\)"):
        ops.kda(x, x, x, gate, gate)
    with pytest.raises(ShapeError, match=r"gated_delta_rule: g must have the axes \(b, t, h\)"):
        ops.gated_delta_rule(x, x, x, x, gate)
    with pytest.raises(ShapeError, match=r"gated_delta_rule: g must have the axes \(b, t, h\); got NoneType"):
        ops.gated_delta_rule(x, x, x, None, gate)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"rwkv7: w must have the axes \(b, t, h, n\); got shape"):
        ops.rwkv7(x, gate, x, x, x, x)
    wide = np.ones((1, 4, 2, 4))
    with pytest.raises(ShapeError, match=r"delta_product: k must have a multiple of the t=3 tokens"):
        ops.delta_product(x, wide, wide, None, wide[..., 0])


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "lower_bound", "normalize"])
def test_layers_of_several_writes_refuse_gates_of_tokens(name: str) -> None:
    """A gate of a write that decays nothing would be no decay of one."""
    x, gate = np.ones((1, 6, 2, 4)), np.zeros((1, 3, 2))
    option = {name: {"lower_bound": -5.0, "normalize": True}.get(name, np.zeros(2))}
    with pytest.raises(ArgumentError, match=rf"rwkv7: {name} is not taken"):
        ops.rwkv7(x, x, x, x, x, x, **option)
    if name != "normalize":
        with pytest.raises(ArgumentError, match=rf"delta_product: {name} is not taken"):
            ops.delta_product(x[:, :3], x, x, gate, np.ones((1, 6, 2)), **option)


def test_a_decay_per_key_needs_no_array_of_pairs_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right, "BLOCK_ELEMENTS", 1)  # one chunk at a time
    given = problem(SPEC, case(128, True, n=32, p=32, h=1))
    arrays = {n: torch.from_numpy(a).float() for n, a in given.arrays.items()}
    rest = {a.name: None for a in SPEC.args if a.name not in arrays} | given.all_options() | arrays
    with Largest() as record:
        right.delta_rule_backward(dy=arrays["v"], dstate=None, needs=frozenset(arrays), **rest)
    assert record.elements <= 128 * 32 < 64 * 64 * 32


Patch = Callable[[pytest.MonkeyPatch], None]


def neumann(patch: pytest.MonkeyPatch) -> None:
    """The inverse from powers, in the precision of fp16."""

    def inverse(L: Tensor) -> Tensor:
        eye, power = torch.eye(L.shape[-1], dtype=L.dtype), -L
        product = eye + power
        for _ in range(L.shape[-1].bit_length()):
            power = (power @ power).half().to(L.dtype)
            product = product @ (eye + power)
        return product

    patch.setattr(right, "unit_lower_inverse", inverse)


def last_level(patch: pytest.MonkeyPatch) -> None:
    """The pairs of the two halves of a chunk are left out."""
    init = right._PerKey.__init__

    def forgetful(self: Any, g: Tensor) -> None:
        init(self, g)
        for size, since, until in self.levels[-1:]:
            self.levels[-1] = size, torch.zeros_like(since), until

    patch.setattr(right._PerKey, "__init__", forgetful)


def difference(patch: pytest.MonkeyPatch) -> None:
    """Decays as differences of running sums, which lose small ones behind large ones."""

    def init(self: Any, g: Tensor) -> None:
        c = g.cumsum(-2)
        self.within = (c - c.mT).tril().exp().tril()

    patch.setattr(right._PerHead, "__init__", init)


def gradient(name: str, factor: float) -> Patch:
    def install(patch: pytest.MonkeyPatch) -> None:
        found = right._Block.gradients

        def scaled(grads: dict[str, Tensor]) -> dict[str, Tensor]:
            return grads | {name: factor * grads[name]} if name in grads else grads

        patch.setattr(right._Block, "gradients", lambda *a: scaled(found(*a)))

    return install


def interleaved_groups(patch: pytest.MonkeyPatch) -> None:
    """Head i reads group i % g."""
    take = right.Scan.take

    def wrong(self: Any, array: Tensor, low: int, high: int) -> Tensor:
        part = take(self, array, low, high)
        return part if part.shape[3] == 1 else part.transpose(2, 3).reshape(part.shape)

    patch.setattr(right.Scan, "take", wrong)


def first_state(patch: pytest.MonkeyPatch) -> None:
    """States run on from one sequence of a pack into the next."""
    passed = right.Scan.pass_states

    def run_on(self: Any, block: Any, low: int, state: Any, final: Tensor) -> Any:
        self.chunks.begins = {0: self.chunks.begins[0]} if 0 in self.chunks.begins else {}
        return passed(self, block, low, state, final)

    patch.setattr(right.Scan, "pass_states", run_on)


def unfinished(name: str) -> Patch:
    def install(patch: pytest.MonkeyPatch) -> None:
        function = getattr(right, name)
        patch.setattr(right, name, lambda *a: function(*a) * 1.0001)

    return install


def narrow(name: str) -> Patch:
    """What one of the functions computes is rounded to bfloat16."""

    def install(patch: pytest.MonkeyPatch) -> None:
        function = getattr(right, name)
        patch.setattr(right, name, lambda *a: function(*a).bfloat16().to(torch.float32))

    return install


BUGS: dict[str, tuple[Patch, str]] = {
    "Neumann series": (neumann, "values"),
    "a level is left out": (last_level, "values"),
    "differences of sums": (difference, "values"),
    "groups take turns": (interleaved_groups, "values"),
    "sequences share a state": (first_state, "values"),
    "normalisation": (unfinished("normalized"), "values"),
    "strengths": (unfinished("strength"), "values"),
    "gates": (unfinished("log_decay"), "values"),
    "gradient of normalisation": (unfinished("normalized_gradient"), "gradients"),
    "gradient of strengths": (unfinished("strength_gradient"), "gradients"),
    **{f"gradient of {name}": (gradient(name, 1.0001), "gradients") for name in ("q", "k", "v", "r", "beta", "g")},
    "marks of bad keys": (lambda patch: patch.setattr(right, "spoiled_results", nothing_spoiled), "nonfinite"),
}


def nothing_spoiled(line: Any, bad: Any) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(mark) for mark in spoiled_results(line, bad))


@pytest.mark.parametrize("bug", BUGS)
def test_the_contract_refuses_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = BUGS[bug]
    assert name in CHECKS
    plant(monkeypatch)
    extra = [case(64), Example("repeated", case(64).sizes, GATED, {"chunk_size": 64})]
    refused(name, [*SPEC.cases(), *extra], "float32", monkeypatch)


HALF_BUGS: dict[str, tuple[Patch, str]] = {
    "an inverse in bfloat16": (narrow("unit_lower_inverse"), "float16"),
    "keys in bfloat16": (narrow("normalized"), "float16"),
    **{
        bug: (BUGS[bug][0], "bfloat16")
        for bug in ("a level is left out", "groups take turns", "sequences share a state")
    },
}


@pytest.mark.parametrize("bug", HALF_BUGS)
def test_the_contract_refuses_them_in_16_bits(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, dtype = HALF_BUGS[bug]
    plant(monkeypatch)
    refused("values", SPEC.cases(), dtype, monkeypatch)


def refused(name: str, cases: list[Example], dtype: str, patch: pytest.MonkeyPatch) -> None:
    for runner in registry.RUNNERS.values():
        for memory, empty in (("found", {}), ("known", {}), ("recent", ())):
            patch.setattr(runner, memory, empty)
    for one in cases:
        given = problem(SPEC, one, dtype)
        if one.name == "repeated":
            given = given.with_arrays(k=np.full_like(given.arrays["k"], 0.5), beta=np.ones_like(given.arrays["beta"]))
        try:
            check(name, given, "torch")
        except AssertionError:
            return
    raise AssertionError(f"the check {name} let the bug pass")


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize(
    ("longest", "strongest", "options", "fades"),
    [
        (9.0, 2.0, {"normalize": True}, True),
        (1.0, 2.0, {}, True),
        (1.5, 2.0, {}, False),  # I - beta k kᵀ makes some states larger
        (9.0, 2.5, {"normalize": True}, False),
        (9.0, 2.5, {"normalize": True, "beta_limit": 2.0}, True),
        (9.0, 2.5, {"erase": False}, True),
    ],
)
def test_what_is_said_to_be_left_of_a_state_is_no_less_than_what_is(longest, strongest, options, fades, per_key):
    torch.manual_seed(0)
    t, h, n = 24, 2, 4
    k = torch.nn.functional.normalize(torch.randn(1, t, h, n, dtype=torch.float64), dim=-1) * longest
    given = {
        "k": k, "g": -torch.rand(1, t, h, *[n] * per_key, dtype=torch.float64) / 8,
        "beta": strongest * torch.ones(1, t, h, dtype=torch.float64),
    }  # fmt: skip
    all_options = {"normalize": False, "lower_bound": None, "beta_limit": None, "erase": True} | options
    others = {"r": None, "A_log": None, "dt_bias": None}
    log = right.fading(t, **given, **others, **all_options).cumsum(1)
    assert bool(log[:, -1].max() < 0) == fades
    grown = given | {"g": given["g"] + 0.5}
    assert (right.fading(t, **grown, **others, **all_options) == 0).all()
    for end in (1, 5, t) if fades else ():
        some = {name: a[:, :end] for name, a in given.items()}
        zero, start = torch.zeros_like(some["k"]), torch.eye(n, dtype=torch.float64).expand(1, h, n, n)
        left = ops.delta_rule(**{**some, "q": zero, "v": zero}, initial_state=start, **options)[1]
        sizes = torch.linalg.matrix_norm(left, 2) if all_options["erase"] else left.abs().amax(-1)
        assert (sizes <= log[:, end - 1].exp() * (1 + 1e-9)).all()


def _layers(numpy: bool) -> dict[str, dict[str, Any]]:
    def new(*shape: int) -> Any:
        return np.full(shape, 0.5) if numpy else torch.full(shape, 0.5)

    keys, twice = new(1, 6, 2, 4), new(1, 12, 2, 4)
    return {
        "rwkv7": {"q": keys, "w": -keys, "k": keys, "v": new(1, 6, 2, 3), "a": keys, "b": keys},
        "delta_product": {
            "q": keys, "k": twice, "v": new(1, 12, 2, 3), "g": -new(1, 6, 2), "beta": new(1, 12, 2), "r": twice,
        },
    }  # fmt: skip


@pytest.mark.parametrize("numpy", [True, False], ids=["numpy", "torch"])
@pytest.mark.parametrize("layer", ["rwkv7", "delta_product"])
def test_wrong_arguments_of_layers_are_named(layer: str, numpy: bool) -> None:
    good, call = _layers(numpy)[layer], getattr(ops, layer)
    assert call(**good, scale=1)[0].tolist() == call(**good, scale=1.0)[0].tolist()
    for name, x in good.items():
        wrongs = [
            x[:, :-1], x[:, :0], x[:, :, :1], x[..., 0], x[..., None], x[0, 0, 0], x.sum(), x > 0, [1.0], "x", 1.0,
            x[:, :, [0, 1, 1]],
        ]  # fmt: skip
        for wrong in [*wrongs, x[..., :-1]] if x.ndim == 4 and name != "v" else wrongs:
            with pytest.raises(ArgumentError) as caught:
                call(**{**good, name: wrong})
            said = str(caught.value)
            other = name == "v" or getattr(wrong, "ndim", 0) >= 3  # two arguments disagree
            assert said.startswith(f"{layer}: {name}" if not other else f"{layer}: "), said
            assert re.search(rf"\b{name}\b", said) or "has h=" in said or "g=3" in said, said
    for backend in ("cuda", 3, b"torch", [], False, torch):
        with pytest.raises(ArgumentError, match=r"backend must be one of .* got .* Pass one of them"):
            call(**good, backend=backend)
