"""The contract must refuse deliberately wrong scans, with the mistakes that kernels make."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from refold.ops.backends import BACKENDS
from refold.ops.linear_scan import _torch as scan
from refold.ops.spec import Example, load
from refold.ops.ssd import _torch as right
from refold.ops.testing import CHECKS, check, problem
from refold.ops.torch import registry

CHUNK = 8


def loop(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, *, bug: str = ""
) -> tuple[Tensor, Tensor]:
    """Walk over the tokens of a batch, wrongly if asked to; the step sizes are final."""
    repeat = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeat, 2), C.repeat_interleave(repeat, 2)
    y = torch.empty_like(x)
    for t in range(x.shape[1]):
        before = state
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        if bug == "chunk border" and t % CHUNK == 0 and t > 0:
            decay = torch.exp(dt[:, t - 1] * A)[..., None, None]  # the neighbour's decay
        state = decay * before + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        if bug == "low precision":
            state = state.bfloat16().float()
        y[:, t] = (state @ C[:, t, :, :, None])[..., 0]
    if bug == "tail mask":  # the tokens that pad the last chunk decay the state once more
        missing = -x.shape[1] % CHUNK
        state = state * torch.exp(missing * 0.1 * A)[:, None, None]
    return y, state


def planted(bug: str) -> Any:
    def ssd(**inputs: Any) -> tuple[Tensor, Tensor]:
        plain = inputs["cu_seqlens"] is None
        if not plain or inputs["x"].dtype != torch.float32:
            return right.ssd(**inputs)
        x, A, B, C = inputs["x"], inputs["A"], inputs["B"], inputs["C"]
        step = right.step_size(inputs["dt"], inputs["dt_bias"], inputs["dt_softplus"], inputs["dt_limit"])
        state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])
        if inputs["initial_state"] is not None and bug != "initial state":
            state = inputs["initial_state"]
        y, state = loop(x, step, A, B, C, state, bug=bug)
        skip = None if inputs["D"] is None else inputs["D"].view(x.shape[2], -1)
        y = right.finish(y, x, skip, inputs["z"])
        if bug == "transposed state":
            state = state.mT.reshape(state.shape)
        return y, state.contiguous()

    return ssd


Gradients = dict[str, Tensor]


def wrong_gradient(found: Gradients) -> Gradients:
    return {**found, "B": 1.001 * found["B"]}


def cancelling(found: Gradients) -> Gradients:
    return {**found, "A": found["A"] + 1e-5 * found["A"].abs().max()}


def leaking(found: Gradients) -> Gradients:
    """Every token's gradient sees every other's, times zero."""
    return {**found, "x": found["x"] + 0 * found["x"].sum(1, keepdim=True)}


def backward(change: Callable[[Gradients], Gradients]) -> Any:
    return lambda **inputs: change(right.ssd_backward(**inputs))


def forward(change: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    return lambda **inputs: change(*right.ssd(**inputs), **inputs)


def unlike_itself() -> Any:
    """Return a scan whose result depends on how often it ran."""
    counter = itertools.count()
    return forward(lambda y, state, **_: (y * (1 + 1e-7 * next(counter)), state))


def writing(y: Tensor, state: Tensor, x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    x[0, 0] = 0.0
    return y, state


def gradients_unlike_themselves() -> Any:
    counter = itertools.count()
    return backward(lambda found: {name: g * (1 + 1e-6 * next(counter)) for name, g in found.items()})


def seeing_later_gradients(found: Gradients) -> Gradients:
    """A share of the later tokens' gradients, as of an adjoint that walks in both directions."""
    return {**found, "x": found["x"] + 1e-9 * found["x"].sum(1, keepdim=True)}


def without_last_token(y: Tensor, state: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The last token's row is never written."""
    written = torch.empty_like(y)
    written[:, :-1] = y[:, :-1]
    return written, state


def as_if_contiguous(**inputs: Any) -> tuple[Tensor, Tensor]:
    x = inputs["x"]
    return right.ssd(**{**inputs, "x": x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())})


def looking_ahead(y: Tensor, state: Tensor, x: Tensor, cu_seqlens: Tensor | None, **_: Any) -> tuple[Tensor, Tensor]:
    y = y.clone()
    y[:, :-1] += 1e-2 * x[:, 1:]
    return y, state


def of_first_sequence(**inputs: Any) -> tuple[Tensor, Tensor]:
    """Every sequence of a pack begins with the first one's state."""
    initial = inputs["initial_state"]
    if inputs["cu_seqlens"] is None or initial is None:
        return right.ssd(**inputs)
    return right.ssd(**{**inputs, "initial_state": initial[:1].expand_as(initial)})


def of_chunk(**inputs: Any) -> tuple[Tensor, Tensor]:
    """Chunks of three tokens lose a digit."""
    y, state = right.ssd(**inputs)
    return (y * 1.001, state) if inputs["chunk_size"] == 3 else (y, state)


def without_limits(**inputs: Any) -> tuple[Tensor, Tensor]:
    low, high = inputs["dt_limit"]
    return right.ssd(**{**inputs, "dt_limit": (low if low > 0 else -float("inf"), high)})


def padded_with_zeros(**inputs: Any) -> tuple[Tensor, Tensor]:
    """Tokens that fill a chunk have the rate too: -inf times a step of zero."""
    y, state = right.ssd(**inputs)
    return y, state + (0 * inputs["A"])[:, None, None]


def by_default(**inputs: Any) -> tuple[Tensor, Tensor]:
    y, state = right.ssd(**inputs)
    return y, state.to(torch.get_default_dtype())


def once_more(**inputs: Any) -> tuple[Tensor, Tensor]:
    y, state = right.ssd_step(**inputs)
    return y, 1.001 * state


def multiplying(**inputs: Any) -> Any:
    """A reset is a factor of zero: zero times NaN."""
    reset = inputs["reset"]
    a = inputs["a"] if reset is None else inputs["a"].masked_fill(reset, 0.0)
    return scan.linear_scan(**{**inputs, "a": a, "reset": None})


WRONG: dict[str, dict[str, Any]] = {
    "chunk border": {"ssd": planted("chunk border")},
    "tail mask": {"ssd": planted("tail mask")},
    "transposed state": {"ssd": planted("transposed state")},
    "low precision": {"ssd": planted("low precision")},
    "initial state": {"ssd": planted("initial state")},
    "wrong gradient": {"ssd_backward": backward(wrong_gradient)},
    "ten roundings": {"ssd": forward(lambda y, state, **_: (y * (1 + 1e-6), state))},
    "cancelling gradient": {"ssd_backward": backward(cancelling)},
    "lower limit": {"ssd": without_limits},
    "zero times -inf": {"ssd": padded_with_zeros},
    "zero times NaN": {"ssd": forward(lambda y, state, **_: (y + 0 * y.sum(1, keepdim=True), state))},
    "zero times NaN in a gradient": {"ssd_backward": backward(leaking)},
    "default dtype": {"ssd": by_default},
    "another time another result": {"ssd": unlike_itself()},
    "another time another gradient": {"ssd_backward": gradients_unlike_themselves()},
    "a row is not written": {"ssd": forward(without_last_token)},
    "strides are ignored": {"ssd": as_if_contiguous},
    "no gradient through the state": {"ssd_backward": lambda **i: right.ssd_backward(**{**i, "dstate": None})},
    "gradients look ahead": {"ssd_backward": backward(seeing_later_gradients)},
    "inputs are written": {"ssd": forward(writing)},
    "sequences share a state": {"ssd": of_first_sequence},
    "looks ahead": {"ssd": forward(looking_ahead)},
    "chunk size": {"ssd": of_chunk},
    "step": {"ssd_step": once_more},
}
REFUSES = {
    "values": [
        "chunk border",
        "tail mask",
        "transposed state",
        "low precision",
        "initial state",
        "a row is not written",
        "strides are ignored",
    ],
    "gradients": ["wrong gradient"],
    "no_worse_than_torch": ["ten roundings"],
    "raw_steps": ["lower limit"],
    "strong_decays": ["cancelling gradient"],
    "zero_decay": ["zero times -inf"],
    "nonfinite": ["zero times NaN"],
    "nonfinite_gradients": ["zero times NaN in a gradient"],
    "surroundings": ["default dtype"],
    "repeatable": ["another time another result", "inputs are written"],
    "repeatable_gradients": ["another time another gradient"],
    "split": ["initial state"],
    "split_gradients": ["no gradient through the state"],
    "packed": ["sequences share a state"],
    "causal": ["looks ahead"],
    "causal_gradients": ["gradients look ahead"],
    "chunk_size": ["chunk size"],
    "steps": ["step"],
}
"""Every check of the contract, and what it must refuse."""


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that offers a copy of the torch backend with a bug in it as the backend ``planted``."""

    def install(bug: str) -> None:
        module, resolve = ModuleType("planted"), registry.resolve
        module.__dict__.update({name: getattr(right, name) for name in ("ssd", "ssd_backward", "ssd_step")})
        module.__dict__.update(WRONG.get(bug, {"ssd": planted("")}))
        monkeypatch.setitem(BACKENDS, "planted", "torch")
        monkeypatch.setattr(
            registry, "resolve", lambda spec, meta, name: module if name == "planted" else resolve(spec, meta, name)
        )
        for spec_runner in registry.RUNNERS.values():
            monkeypatch.setattr(spec_runner, "found", {})
            monkeypatch.setattr(spec_runner, "known", {})
            monkeypatch.setattr(spec_runner, "recent", ())

    return install


def refusals(name: str, cases: Iterable[Example], operator: str = "ssd") -> Iterator[str]:
    """Yield the cases on which a check refuses the planted backend."""
    for case in cases:
        try:
            check(name, problem(load(operator), case), "planted")
        except AssertionError:
            yield case.name


@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name, bugs in REFUSES.items() for bug in bugs])
def test_planted_bug_is_refused(plant: Callable[[str], None], name: str, bug: str) -> None:
    plant(bug)
    assert next(refusals(name, load("ssd").cases()), None), f"the check {name} let {bug!r} pass"


def test_a_reset_that_multiplies_is_refused(plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in load("linear_scan").cases() if "reset" in case.given]
    for function, refused in ((scan.linear_scan, False), (multiplying, True)):
        monkeypatch.setitem(WRONG, "reset", {"linear_scan": function})
        plant("reset")
        assert bool(list(refusals("nonfinite", cases, "linear_scan"))) == refused


def test_the_same_loop_without_a_bug_passes(plant: Callable[[str], None]) -> None:
    plant("")
    for name in ("values", "split", "steps"):
        assert not list(refusals(name, load("ssd").cases()))


def test_every_check_refuses_something() -> None:
    assert set(REFUSES) == set(CHECKS)
    assert {bug for bugs in REFUSES.values() for bug in bugs} == set(WRONG)
