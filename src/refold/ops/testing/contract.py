"""The contract: what every backend of every operator must satisfy on every case of the spec (design decision 13).

A check is a function of a problem and a backend that raises AssertionError. Errors are relative to the largest value of
the definition in float64. They may not exceed what `Problem.tolerance` computes from the dtype and the sizes. Also, no
backend may err more than twice as much as the torch backend on the same inputs, plus one rounding of the inputs' dtype.
To both is added what `roundings_of_inputs` returns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from refold.ops.spec import all_specs
from refold.ops.testing.frameworks import Frame, frame_of
from refold.ops.testing.problems import EPS, Problem, round_to

Results = list[np.ndarray]
Error = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Measurement:
    """The largest error of one result or gradient, relative to its largest value in float64."""

    name: str
    error: float
    tolerance: float


def check(name: str, problem: Problem, backend: str, device: str = "cpu") -> None:
    """Run one check of the contract by name."""
    CHECKS[name](problem, backend, frame_of(backend, device))


def run(problem: Problem, backend: str, frame: Frame) -> tuple[Any, ...]:
    """Return the results of a backend as arrays of its framework."""
    return _function(problem, backend)(**_arrays(problem, frame))


def measure(problem: Problem, backend: str, device: str = "cpu") -> list[Measurement]:
    """Return the errors of all results and gradients against float64."""
    frame = frame_of(backend, device)
    found = [frame.numpy(r) for r in run(problem, backend, frame)]
    names = [out.name for out in problem.spec.outputs]
    errors = dict(zip(names, zip(found, problem.reference(), strict=True), strict=True))
    gradients, expected = _both_gradients(problem, backend, frame)
    errors |= {f"d{name}": (gradients[name], expected[name]) for name in expected}
    return [
        Measurement(name, relative_error(value, truth), problem.tolerance()) for name, (value, truth) in errors.items()
    ]


def relative_error(value: np.ndarray, truth: np.ndarray) -> float:
    """Return the largest difference over the largest true value; infinite where a value is not finite."""
    if value.shape != truth.shape:
        return float("inf")
    if truth.size == 0:
        return 0.0
    difference = np.abs(value - truth)
    worst = float(difference.max()) if np.isfinite(difference).all() else float("inf")
    return worst / max(float(np.abs(truth).max()), 1e-30)


def check_values(problem: Problem, backend: str, frame: Frame) -> None:
    """Values, final state, shapes and dtypes are those of the definition."""
    with frame.poisoned():
        results = run(problem, backend, frame)
    spec = problem.spec
    for out, result, (shape, dtype) in zip(spec.outputs, results, spec.output_metas(problem.meta()), strict=True):
        assert tuple(result.shape) == shape, f"{out.name} has shape {tuple(result.shape)}, not {shape}"
        assert str(result.dtype).removeprefix("torch.") == dtype, f"{out.name} is {result.dtype}, not {dtype}"
    _results_close(problem, [frame.numpy(r) for r in results], dict.fromkeys(problem.results(), problem.tolerance()))


def check_gradients(problem: Problem, backend: str, frame: Frame) -> None:
    """Gradients of every array, through every result, are those of the definition."""
    with frame.poisoned():
        found, expected = _both_gradients(problem, backend, frame)
    assert found.keys() == expected.keys(), f"gradients of {sorted(found)}, not of {sorted(expected)}"
    allowed = dict.fromkeys(expected, problem.tolerance())
    _gradients_close(problem, found, expected, allowed, 2 if problem.half else 1)


def check_no_worse_than_torch(problem: Problem, backend: str, frame: Frame) -> None:
    """No result errs more than twice as much as that of the torch backend, and a rounding of the inputs."""
    plain = frame_of("torch")
    expected, theirs = problem.results(), run(problem, "torch", plain)
    bounds = {n: relative_error(plain.numpy(r), expected[n]) for n, r in zip(expected, theirs, strict=True)}
    allowed = {n: max(2 * bound + EPS[problem.dtype], 2 * EPS[problem.dtype]) for n, bound in bounds.items()}
    _results_close(problem, [frame.numpy(r) for r in run(problem, backend, frame)], allowed)


def check_raw_steps(problem: Problem, backend: str, frame: Frame) -> None:
    """Step sizes of either sign, and on a limit, give what the definition gives."""
    if "dt" not in problem.arrays or problem.all_options()["dt_softplus"]:
        return
    rng = np.random.default_rng(1)
    low, high = problem.all_options().get("dt_limit", (0.0, np.inf))
    given = problem.arrays["dt"]
    dt = rng.standard_normal(given.shape)
    dt = np.where(rng.random(given.shape) < 0.1, rng.choice([low, min(high, 1.0)], given.shape), dt)
    raw = problem.with_arrays(dt=round_to(dt, problem.dtype_of("dt")))
    check_values(raw, backend, frame)
    check_gradients(raw, backend, frame)


def check_strong_decays(problem: Problem, backend: str, frame: Frame) -> None:
    """Where states are forgotten at once, wholly at some tokens, results and gradients stay as exact as torch's."""
    if "A" not in problem.arrays:
        return
    rng = np.random.default_rng(2)
    wipe = np.where(rng.random(problem.arrays["dt"].shape) < 0.1, 1e4, 1.0)
    A = round_to(8 * problem.arrays["A"], problem.dtype_of("A"))
    strong = problem.with_arrays(A=A, dt=round_to(problem.arrays["dt"] * wipe, problem.dtype_of("dt")))
    check_values(strong, backend, frame)
    check_gradients(strong, backend, frame)
    if backend == "torch":
        return
    theirs, expected = _both_gradients(strong, "torch", frame_of("torch"))
    ours, _ = _both_gradients(strong, backend, frame)
    allowed = {n: max(2 * relative_error(theirs[n], truth), 16 * EPS[problem.dtype]) for n, truth in expected.items()}
    _gradients_close(strong, ours, expected, allowed, 4)  # a term is a product of several factors


def check_nonfinite(problem: Problem, backend: str, frame: Frame) -> None:
    """Values that are not finite spoil the results that the definition spoils, and no others."""
    for where, bad in _with_bad_values(problem):
        with np.errstate(invalid="ignore", over="ignore"):  # the definition and Triton's interpreter are NumPy
            expected = bad.reference()
            found = [frame.numpy(r) for r in run(bad, backend, frame)]
        _same_class(bad, [out.name for out in problem.spec.outputs], found, expected, where)


def check_nonfinite_gradients(problem: Problem, backend: str, frame: Frame) -> None:
    """So do gradients, of bad arguments and of bad gradients of results."""
    spoiled: tuple[int, ...] | None
    for where, bad in [*_with_bad_values(problem), ("a result's gradient", problem)]:
        spoiled = None
        if bad is problem:
            shape = problem.reference()[0].shape
            spoiled = tuple(np.random.default_rng(3).integers(shape))
        with np.errstate(invalid="ignore", over="ignore"):
            found, expected = _both_gradients(bad, backend, frame, spoiled)
        names = list(expected)
        _same_class(bad, [f"d{n}" for n in names], [found[n] for n in names], [expected[n] for n in names], where)


def check_zero_decay(problem: Problem, backend: str, frame: Frame) -> None:
    """Results and gradients stay finite and right where a rate of -inf forgets everything at each token."""
    if "A" not in problem.arrays:
        return
    A = problem.arrays["A"].copy()
    A[0] = -np.inf
    zero = problem.with_arrays(A=A)
    names = [out.name for out in problem.spec.outputs]
    _close(zero, names, [frame.numpy(r) for r in run(zero, backend, frame)], zero.reference())
    found, expected = _both_gradients(zero, backend, frame)
    for name, truth in expected.items():
        # In the definition the gradient of a step is 0 * -inf there.
        assert np.isfinite(found[name]).all(), f"d{name} is not finite"
        finite = np.isfinite(truth)
        _close(zero, [f"d{name}"], [np.where(finite, found[name], 0.0)], [np.where(finite, truth, 0.0)])


def check_surroundings(problem: Problem, backend: str, frame: Frame) -> None:
    """Autocast and defaults of dtype and device around a call change no bit: the arguments decide."""
    function, arrays = _function(problem, backend), _arrays(problem, frame)
    cotangents = [np.ones(truth.shape) for truth in problem.reference()]

    def everything() -> list[Any]:
        gradients = frame.gradients(function, arrays, cotangents)
        return [*function(**arrays), *gradients.values()]

    plain = everything()
    for name, context in frame.surroundings():
        with context:
            found = everything()
        for one, other in zip(plain, found, strict=True):
            assert one.dtype == other.dtype, f"under {name}, {one.dtype} becomes {other.dtype}"
            same = one is other or np.array_equal(_bits(frame, one), _bits(frame, other))
            assert same, f"{name} changes results"


def check_repeatable(problem: Problem, backend: str, frame: Frame) -> None:
    """Two runs agree in every bit and leave their inputs as they were."""
    arrays = _arrays(problem, frame)
    before = {name: frame.numpy(a).copy() for name, a in arrays.items()}
    function = _function(problem, backend)
    first = [frame.numpy(r).copy() for r in function(**arrays)]
    second = [frame.numpy(r) for r in function(**arrays)]
    for out, one, two in zip(problem.spec.outputs, first, second, strict=True):
        assert np.array_equal(one, two), f"{out.name} differs between two runs"
    for name, array in arrays.items():
        assert np.array_equal(frame.numpy(array), before[name]), f"{name} was written to"


def check_repeatable_gradients(problem: Problem, backend: str, frame: Frame) -> None:
    """Two backward runs agree in every bit and leave their inputs as they were."""
    arrays, cotangents = _arrays(problem, frame), _cotangents(problem)
    before = {name: frame.numpy(a).copy() for name, a in arrays.items()}
    function = _function(problem, backend)
    first, second = (frame.gradients(function, arrays, cotangents) for _ in range(2))
    for name in first:
        assert np.array_equal(first[name], second[name], equal_nan=True), f"gradient of {name} differs between two runs"
    for name, array in arrays.items():
        assert np.array_equal(frame.numpy(array), before[name]), f"the backward wrote to {name}"


def check_split(problem: Problem, backend: str, frame: Frame) -> None:
    """Cutting the tokens anywhere and passing the state on changes nothing."""
    if not problem.spec.scans or problem.case.lengths or problem.case.sizes["t"] < 2:
        return
    seqlen, reverse = problem.case.sizes["t"], problem.options.get("reverse", False)
    for cut in sorted({1, seqlen // 2, seqlen - 1}):
        parts = [problem.slice_time(0, cut), problem.slice_time(cut, seqlen)]
        ys: list[np.ndarray] = []
        state = problem.arrays.get("initial_state")
        for part in reversed(parts) if reverse else parts:
            y, state = (frame.numpy(r) for r in run(part.with_arrays(initial_state=state), backend, frame))
            ys.append(y)
        whole = np.concatenate(ys[::-1] if reverse else ys, 1)
        _close(problem, ["y", "state"], [whole, state], problem.reference(), f"cut at {cut}")


def check_split_gradients(problem: Problem, backend: str, frame: Frame) -> None:
    """Gradients flow through the state where the tokens are cut as they flow inside."""
    if not problem.spec.scans or problem.case.lengths or problem.case.sizes["t"] < 2:
        return
    from refold.ops.testing import oracle

    cut, reverse = problem.case.sizes["t"] // 2, problem.options.get("reverse", False)
    spans = [slice(0, cut), slice(cut, None)]
    function = _function(problem, backend)

    def in_two(**arrays: Any) -> tuple[Any, ...]:
        state, ys = arrays.get("initial_state"), {}
        for span in reversed(spans) if reverse else spans:
            part = dict(arrays)
            for name, array in arrays.items():
                if (axis := problem.time_axis(name)) is not None:
                    part[name] = array[(slice(None),) * axis + (span,)]
            ys[span.start], state = function(**(part | {"initial_state": state}))
        return ys[0], ys[cut], state

    dy, dstate = _cotangents(problem)
    found = frame.gradients(in_two, _arrays(problem, frame), [*(dy[:, span] for span in spans), dstate])
    expected = oracle.gradients(problem, [dy, dstate])
    names = [f"d{name}" for name in expected]
    _close(problem, names, [found[name] for name in expected], expected.values(), f"cut at {cut}")


def check_packed(problem: Problem, backend: str, frame: Frame) -> None:
    """Packs give what their sequences give one by one."""
    lengths = problem.case.lengths
    offsets = np.cumsum([0, *lengths])
    initial = problem.arrays.get("initial_state")
    if not lengths:
        return
    y, states = (frame.numpy(r) for r in run(problem, backend, frame))
    for k, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start == end:
            expected = np.zeros_like(states[k]) if initial is None else initial[k]
            assert np.array_equal(states[k], expected), f"empty sequence {k} changed its state"
            continue
        alone = problem.slice_time(start, end)
        alone = alone.with_arrays(cu_seqlens=None, initial_state=None if initial is None else initial[k : k + 1])
        y_alone, state_alone = (frame.numpy(r) for r in run(alone, backend, frame))
        _close(
            problem,
            ["y", "state"],
            [y[:, start:end], states[k : k + 1]],
            [y_alone, state_alone],
            f"sequence {k}",
            alone,
        )


def check_causal(problem: Problem, backend: str, frame: Frame) -> None:
    """Tokens change no result of earlier ones."""
    if not problem.spec.scans or problem.case.lengths:
        return
    seqlen, reverse = problem.case.sizes["t"], problem.options.get("reverse", False)
    y = frame.numpy(run(problem, backend, frame)[0])
    for token in sorted({0, seqlen // 2, seqlen - 1}):
        changed = {}
        for name, array in problem.arrays.items():
            if (axis := problem.time_axis(name)) is not None:
                index = (slice(None),) * axis + (token,)
                changed[name] = array.copy()
                changed[name][index] = ~array[index] if array.dtype == np.bool_ else array[index] + 1.0
        y_changed = frame.numpy(run(problem.with_arrays(**changed), backend, frame)[0])
        earlier = slice(token + 1, None) if reverse else slice(0, token)
        scale = max(np.abs(y).max(), 1e-30)
        worst = np.abs(y - y_changed)[:, earlier].max(initial=0.0) / scale
        assert worst <= problem.tolerance(), f"token {token} changes earlier results by {worst:.2e}"
        assert np.abs(y - y_changed)[:, token].max() > 0, f"token {token} does not change its own result"


def check_causal_gradients(problem: Problem, backend: str, frame: Frame) -> None:
    """No result has a gradient in later tokens."""
    if not problem.spec.scans or problem.case.lengths or problem.case.sizes["t"] < 2:
        return
    cut, reverse = problem.case.sizes["t"] // 2, problem.options.get("reverse", False)
    dy, dstate = _cotangents(problem)
    earlier, later = (slice(cut, None), slice(0, cut)) if reverse else (slice(0, cut), slice(cut, None))
    dy[:, later] = 0.0
    found = frame.gradients(_function(problem, backend), _arrays(problem, frame), [dy, 0.0 * dstate])
    for name, gradient in found.items():
        if (axis := problem.time_axis(name)) is not None:
            late, early = (np.abs(gradient[(slice(None),) * axis + (span,)]) for span in (later, earlier))
            assert not late.any(), f"gradients of {name} at later tokens up to {late.max():.2e}"
            assert early.any(), f"no gradient of {name} at its own tokens"


def check_chunk_size(problem: Problem, backend: str, frame: Frame) -> None:
    """Chunk sizes change rounding only."""
    if "chunk_size" not in problem.all_options():
        return
    for chunk_size in (1, 3, 16, None):
        options = {**problem.options, "chunk_size": chunk_size}
        other = Problem(problem.spec, problem.case, problem.dtype, problem.arrays, options)
        results = [frame.numpy(r) for r in run(other, backend, frame)]
        _close(problem, ["y", "state"], results, problem.reference(), f"chunk_size={chunk_size}")


def check_steps(problem: Problem, backend: str, frame: Frame) -> None:
    """Token by token through the step gives what the scan gives."""
    step = next((spec for spec in all_specs() if spec.name == f"{problem.spec.name}_step"), None)
    if problem.case.lengths or step is None:
        return
    y, final = problem.reference()
    state = problem.arrays.get("initial_state")
    state = np.zeros(final.shape) if state is None else state
    options = {o.name: problem.all_options()[o.name] for o in step.options}
    case = problem.case
    passed = {name: array for name, array in problem.arrays.items() if name != "initial_state"}
    ys = []
    for t in range(min(case.sizes["t"], 20)):
        token = {n: a.take(t, ax) if (ax := problem.time_axis(n)) is not None else a for n, a in passed.items()}
        sizes = {letter: size for letter, size in case.sizes.items() if letter != "t"}
        own = replace(case, sizes=sizes, given=frozenset(), strided=False)
        one = Problem(step, own, problem.dtype, {**token, "state": state}, options)
        results = [frame.numpy(r) for r in run(one, backend, frame)]
        ys.append(results[0])
        state = round_to(results[1], problem.dtype_of("initial_state"))
    _close(problem, ["y"], [np.stack(ys, 1)], [y[:, : len(ys)]], "steps")
    if len(ys) == case.sizes["t"]:
        _close(problem, ["state"], [state], [final], "steps")


CHECKS: dict[str, Callable[[Problem, str, Frame], None]] = {
    "values": check_values,
    "gradients": check_gradients,
    "no_worse_than_torch": check_no_worse_than_torch,
    "raw_steps": check_raw_steps,
    "strong_decays": check_strong_decays,
    "zero_decay": check_zero_decay,
    "nonfinite": check_nonfinite,
    "nonfinite_gradients": check_nonfinite_gradients,
    "surroundings": check_surroundings,
    "repeatable": check_repeatable,
    "repeatable_gradients": check_repeatable_gradients,
    "split": check_split,
    "split_gradients": check_split_gradients,
    "packed": check_packed,
    "causal": check_causal,
    "causal_gradients": check_causal_gradients,
    "chunk_size": check_chunk_size,
    "steps": check_steps,
}


def _function(problem: Problem, backend: str) -> Callable[..., tuple[Any, ...]]:
    public = problem.spec.public
    absent = {arg.name: None for arg in problem.spec.args if arg.name not in problem.arrays}

    def function(**arrays: Any) -> tuple[Any, ...]:
        results = public(**(absent | arrays), **problem.options, backend=backend)
        return results if isinstance(results, tuple) else (results,)

    return function


def _arrays(problem: Problem, frame: Frame) -> dict[str, Any]:
    return {
        name: frame.array(a, problem.dtype_of(name), problem.case.strided and a.dtype == np.float64)
        for name, a in problem.arrays.items()
    }


def _bits(frame: Frame, array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else frame.numpy(array)


def _with_bad_values(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield the problem with one value that is not finite, in some of the arguments of tokens and states."""
    rng = np.random.default_rng(zlib.crc32(problem.case.name.encode()))
    given = [n for n, array in problem.arrays.items() if array.size and array.dtype == np.float64]
    names = [n for n in given if problem.time_axis(n) is not None or "state" in n]
    for name in rng.permutation(names)[:3]:
        array, value = problem.arrays[name].copy(), rng.choice([np.nan, np.inf, -np.inf])
        array[tuple(rng.integers(array.shape))] = value
        yield f"{value} in {name}", problem.with_arrays(**{str(name): array})


def _same_class(problem: Problem, names: list[str], values: Any, truths: Any, where: str) -> None:
    for name, value, truth in zip(names, values, truths, strict=True):
        finite = np.isfinite(truth)
        wrong = np.argwhere(np.isfinite(value) != finite)
        assert not len(wrong), (
            f"{problem.spec.name}[{problem.case.name}] {where}: {name} is {value[tuple(wrong[0])]}, in the definition "
            f"{truth[tuple(wrong[0])]}, at {wrong[0].tolist()}; likewise at {len(wrong)} places"
        )
        _close(problem, [name], [np.where(finite, value, 0.0)], [np.where(finite, truth, 0.0)], where)


def _both_gradients(
    problem: Problem, backend: str, frame: Frame, spoiled: tuple[int, ...] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    from refold.ops.testing import oracle

    cotangents = _cotangents(problem)
    if spoiled is not None:
        cotangents[0][spoiled] = np.nan
    found = frame.gradients(_function(problem, backend), _arrays(problem, frame), cotangents)
    return found, oracle.gradients(problem, cotangents)


def roundings_of_inputs(problem: Problem, error: Error = relative_error) -> dict[str, float]:
    """Return by how much results may err beyond the tolerance, for which a rounding of an input is one of a result.

    Where tokens mix the state, results are differences of larger numbers, and a rounding of inputs moves them by more:
    by so much may a kernel for 16 bits err, which rounds the factors of its products.
    """
    expected = problem.results()
    if not (problem.half and problem.mixes()):
        return dict.fromkeys(expected, 0.0)
    return _moved(problem, expected, lambda other, _: other.results(), error)


def _results_close(problem: Problem, results: Results, allowed: dict[str, float]) -> None:
    """Compare results: each may err by what is allowed, and by roundings of inputs."""
    expected = problem.results()
    errors = {n: relative_error(r, truth) for (n, truth), r in zip(expected.items(), results, strict=True)}
    if any(error > allowed[name] for name, error in errors.items()):
        more = roundings_of_inputs(problem)
        allowed = {name: allowed[name] + more[name] for name in expected}
    _within(problem, errors, allowed)


def _within(problem: Problem, errors: dict[str, float], allowed: dict[str, float], prefix: str = "") -> None:
    for name, error in errors.items():
        assert error <= allowed[name], (
            f"{problem.spec.name}[{problem.case.name}, {problem.dtype}] {prefix}{name}: relative error {error:.2e}, "
            f"allowed {allowed[name]:.2e}"
        )


def _gradients_close(
    problem: Problem,
    found: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
    allowed: dict[str, float],
    moves: int,
) -> None:
    """Compare gradients: each may err by what is allowed, and ``moves`` times what a rounding of inputs moves it by."""
    errors = {name: relative_error(found[name], truth) for name, truth in expected.items()}
    if moves and any(errors[name] > allowed[name] for name in expected):
        from refold.ops.testing import oracle

        cotangents = _cotangents(problem)
        moved = _moved(problem, expected, lambda other, move: oracle.gradients(other, [move(c) for c in cotangents]))
        allowed = {name: allowed[name] + moves * moved[name] for name in expected}
    _within(problem, errors, allowed, "d")


def _moved(
    problem: Problem,
    expected: dict[str, np.ndarray],
    compute: Callable[[Problem, Callable[[np.ndarray], np.ndarray]], dict[str, np.ndarray]],
    error: Error = relative_error,
    draws: int = 4,
) -> dict[str, float]:
    """Return the errors of what is computed from a problem, or from what `move` makes of an array, moved by a rounding.

    Kernels for 16 bits round the factors of their products; in float32, exponentials of large decays lose as much. A
    gradient that is a sum of products of either sign may lose much more by that than a rounding of its own size.
    """
    rng, most = np.random.default_rng(3), dict.fromkeys(expected, 0.0)
    names = [name for name in problem.arrays if problem.dtype_of(name) == problem.dtype]

    def move(array: np.ndarray) -> np.ndarray:
        return array * (1 + EPS[problem.dtype] / 2 * rng.uniform(-1, 1, array.shape))

    for _ in range(draws):
        other = problem.with_arrays(**{name: move(problem.arrays[name]) for name in names})
        for name, value in compute(other, move).items():
            most[name] = max(most[name], error(value, expected[name]))
    return most


def _cotangents(problem: Problem) -> list[np.ndarray]:
    """Return weights of the results, in values that their dtypes hold; the same ones every time."""
    rng = np.random.default_rng(0)
    outputs = zip(problem.spec.outputs, problem.reference(), strict=True)
    return [
        round_to(rng.standard_normal(truth.shape), "float32" if "state" in out.like else problem.dtype)
        for out, truth in outputs
    ]


def _close(
    problem: Problem, names: list[str], values: Any, truths: Any, where: str = "", part: Problem | None = None
) -> None:
    """Compare results. Those of a part of the problem may be small differences: each may err as a rounding moves it."""
    for i, (name, value, truth) in enumerate(zip(names, values, truths, strict=True)):
        error, allowed = relative_error(value, truth), problem.tolerance()
        if part is not None and error > allowed:
            allowed += [*_moved(part, part.results(), lambda other, _: other.results()).values()][i]
        assert error <= allowed, (
            f"{problem.spec.name}[{problem.case.name}, {problem.dtype}] {where} {name}: relative error {error:.2e}, "
            f"allowed {allowed:.2e}"
        )
