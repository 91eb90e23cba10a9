"""A step of one token, or of a few, as a scan as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from refold.ops.spec import OpSpec


class _Short:
    """How the arguments of a step become those of its scan."""

    def __init__(self, scan: OpSpec, step: OpSpec) -> None:
        self.axes = step.args[0].axes[0].split()
        self.first = step.args[0].name
        self.timed = [arg.name for arg in step.args if "t" in arg.axes[0].split()]
        absent = {arg.name: None for arg in scan.args} | {option.name: option.default for option in scan.options}
        known = {*(arg.name for arg in step.args), *(option.name for option in step.options)}
        self.absent = {name: default for name, default in absent.items() if name not in known}

    def read(self, given: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Say whether there is no time axis, and return the scan's arguments."""
        one = given[self.first].ndim < len(self.axes)
        if one:
            given |= {name: given[name][:, None] for name in self.timed if given[name] is not None}
        given |= {**self.absent, "initial_state": given.pop("state")}
        if "chunk_size" in given:
            given["chunk_size"] = given[self.first].shape[1]
        return one, given


def short_scan(
    scan: OpSpec, step: OpSpec, run: Callable[..., tuple[Tensor, Tensor]]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make a step of what runs its scan; the new state has the dtype of the old one."""
    short = _Short(scan, step)

    def run_step(**given: Any) -> tuple[Tensor, Tensor]:
        dtype = given["state"].dtype
        one, arguments = short.read(given)
        if "state_dtype" in arguments:
            arguments["state_dtype"] = dtype
        y, state = run(**arguments)
        return y[:, 0] if one else y, state.to(dtype)

    return run_step


def short_backward(
    scan: OpSpec, step: OpSpec, backward: Callable[..., dict[str, Tensor]]
) -> Callable[..., dict[str, Tensor]]:
    """Make the backward of a step of that of its scan."""
    short = _Short(scan, step)

    def run(*, dy: Tensor | None, dstate: Tensor | None, needs: frozenset[str], **given: Any) -> dict[str, Tensor]:
        one, arguments = short.read(given)
        dy = dy[:, None] if one and dy is not None else dy
        grads = backward(dy=dy, dstate=dstate, needs=needs, **arguments)
        grads["state"] = grads.pop("initial_state")
        return {name: grad[:, 0] if one and name in short.timed else grad for name, grad in grads.items()}

    return run
