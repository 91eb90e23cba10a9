"""The contract must catch what goes wrong in kernels: deliberately wrong scans, each of which it has to refuse."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from refold.ops.spec import load
from refold.ops.ssd import _torch as right
from refold.ops.testing import CHECKS, check, problem
from refold.ops.torch import registry as library

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


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a bug into a copy of the torch backend and has dispatch run it."""

    def install(bug: str) -> None:
        module = ModuleType("planted")
        module.__dict__.update({"ssd": planted(bug), "ssd_backward": right.ssd_backward, "ssd_step": right.ssd_step})
        monkeypatch.setattr(library, "resolve", lambda *args: module)
        for spec_runner in library.RUNNERS.values():
            monkeypatch.setattr(spec_runner, "found", {})
            monkeypatch.setattr(spec_runner, "known", {})
            monkeypatch.setattr(spec_runner, "recent", ())

    return install


def refusals() -> list[str]:
    """Return the checks and cases on which the contract refuses what runs as the torch backend."""
    spec, found = load("ssd"), []
    for case in spec.cases():
        for name in ("values", "split", "steps"):
            try:
                check(name, problem(spec, case), "torch")
            except AssertionError:
                found.append(f"{name}[{case.name}]")
    return found


BUGS = ["chunk border", "tail mask", "transposed state", "low precision", "initial state"]


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_refused(plant: Any, bug: str) -> None:
    plant(bug)
    assert refusals(), f"the contract let {bug!r} pass"


def test_the_same_loop_without_a_bug_passes(plant: Any) -> None:
    plant("")
    assert refusals() == []


def test_checks_are_all_run_by_the_contract() -> None:
    assert {"values", "split", "steps"} <= set(CHECKS)
