"""Each check of the contract refuses a backend with the mistake it is there for, and none refuses the right one."""

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from refold.ops.selective_scan import _torch as selective_scan
from refold.ops.spec import load
from refold.ops.ssd import _torch as ssd
from refold.ops.testing import CHECKS, check, problem
from refold.ops.torch import registry

Results = Any
Calls = dict[str, Callable[..., Results]]
COUNT = itertools.count(1)


def changed(function: Callable[..., Results], after: Callable[..., Results]) -> Callable[..., Results]:
    """Return a function whose results go through ``after``, with the arguments at hand."""
    return lambda **arguments: after(function(**arguments), arguments)


def y_is(change: Callable[..., Any]) -> Callable[..., Results]:
    return lambda results, arguments: (change(results[0], arguments), results[1])


def gradients_are(change: Callable[..., Any]) -> Callable[..., Results]:
    return lambda found, arguments: {name: change(name, g, arguments) for name, g in found.items()}


def without_last_row(y: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    written = torch.empty_like(y)
    written[:, :-1] = y[:, :-1]
    return written


def as_one_sequence(**arguments: Any) -> Results:
    if (offsets := arguments["cu_seqlens"]) is None:
        return selective_scan.selective_scan(**arguments)
    initial = arguments["initial_state"]
    alone = arguments | {"cu_seqlens": None, "initial_state": None if initial is None else initial[:1]}
    y, state = selective_scan.selective_scan(**alone)
    return y, state.expand(len(offsets) - 1, -1, -1).contiguous()


def as_if_contiguous(**arguments: Any) -> Results:
    x = arguments["x"]
    dense = torch.empty(x.shape, device="meta").stride()
    return selective_scan.selective_scan(**arguments | {"x": x.as_strided(x.shape, dense)})


SCAN, BACK, STEP = "selective_scan", "selective_scan_backward", "selective_scan_step"
RIGHT: Calls = {name: getattr(selective_scan, name) for name in (SCAN, BACK, STEP, f"{STEP}_backward")}
scan, back, step = RIGHT[SCAN], RIGHT[BACK], RIGHT[STEP]
# check: case, function, what it does wrong
BUGS: dict[str, tuple[str, str, Callable[..., Results]]] = {
    "values": ("plain_t17", SCAN, changed(scan, y_is(lambda y, _: 1.001 * y))),
    "values, unwritten memory": ("plain_t17", SCAN, changed(scan, y_is(without_last_row))),
    "values, strides": ("strided", SCAN, as_if_contiguous),
    "gradients": (
        "all_t2", BACK, changed(back, gradients_are(lambda name, g, _: 1.01 * g if name == "dt_bias" else g)),
    ),
    "no_worse_than_torch": ("plain_t17", SCAN, changed(scan, y_is(lambda y, _: y + 2e-6 * y.abs().max()))),
    "repeatable": ("plain_t17", SCAN, changed(scan, y_is(lambda y, _: y + 1e-7 * y.abs().max() * next(COUNT)))),
    "repeatable_gradients": (
        "plain_t17", BACK, changed(back, gradients_are(lambda _, g, __: g + 1e-7 * g.abs().max() * next(COUNT))),
    ),
    "split": ("plain_t17", SCAN, changed(scan, lambda results, _: (results[0], 0.999 * results[1]))),
    "split_gradients": ("plain_t17", BACK, lambda **arguments: back(**arguments | {"dstate": None})),
    "packed": ("packed", SCAN, as_one_sequence),
    "causal": ("plain_t17", SCAN, changed(scan, y_is(lambda y, a: y + 1e-2 * a["x"].mean(1, keepdim=True)))),
    "causal_gradients": (
        "plain_t17", BACK,
        changed(back, gradients_are(lambda name, g, _: g + 1e-9 * g.sum(1, keepdim=True) if name == "x" else g)),
    ),
    "steps": ("plain_t17", STEP, changed(step, y_is(lambda y, _: 1.001 * y))),
}  # fmt: skip


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Calls], None]:
    """Return a function that has dispatch run these functions, and forget what it knew."""

    def install(calls: Calls) -> None:
        module = ModuleType("planted")
        module.__dict__.update(calls)
        resolve = registry.resolve
        # Named as a backend of its own: one check compares with the torch backend.
        monkeypatch.setattr(
            registry, "resolve", lambda spec, meta, name: module if name == "numba" else resolve(spec, meta, name)
        )
        for runner in registry.RUNNERS.values():
            monkeypatch.setattr(runner, "found", {})
            monkeypatch.setattr(runner, "known", {})
            monkeypatch.setattr(runner, "recent", ())

    return install


def case_of(op: str, name: str) -> Any:
    return problem(load(op), next(case for case in load(op).cases() if case.name == name))


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_refuses_it(plant: Any, bug: str) -> None:
    case, name, wrong = BUGS[bug]
    plant(RIGHT | {name: wrong})
    with pytest.raises(AssertionError):
        check(bug.partition(",")[0], case_of(SCAN, case), "numba")


def test_strides_are_all_that_is_wrong_with_it(plant: Any) -> None:
    plant(RIGHT | {SCAN: as_if_contiguous})
    check("values", case_of(SCAN, "groups"), "numba")


def test_chunk_sizes_change_rounding_only(plant: Any) -> None:
    def wrong(**arguments: Any) -> Results:
        y, state = ssd.ssd(**arguments)
        return y * (1.001 if arguments["chunk_size"] == 3 else 1.0), state

    plant({"ssd": wrong, "ssd_backward": ssd.ssd_backward})
    with pytest.raises(AssertionError, match="chunk_size=3"):
        check("chunk_size", case_of("ssd", "plain_t9"), "numba")


@pytest.mark.parametrize("case", ["plain_t17", "all_t17", "strided", "packed"])
def test_nothing_is_wrong_with_the_right_one(plant: Any, case: str) -> None:
    plant(RIGHT)
    for name in CHECKS:
        check(name, case_of(SCAN, case), "numba")
