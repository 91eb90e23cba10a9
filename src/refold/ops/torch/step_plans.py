"""The three forms of a step that launches a kernel: with a new state, in place, and on slots of a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from refold.ops.spec import OpSpec
from refold.ops.torch.launch import planned
from refold.ops.torch.plans import Planned, contiguous, fresh_like
from refold.ops.torch.slots import in_slots, on_slots


def planned_steps(
    spec: OpSpec, plan: Callable[..., Callable[..., Tensor]], **layouts: Any
) -> tuple[Planned, Planned, Planned]:
    """Make ``<op>_step``, ``<op>_step_`` and ``<op>_step_slots`` of what plans a step.

    Args:
        spec: Of the step.
        plan: Returns a function of the arrays, the new state, which may be the state, places and out, that gives y. If
            the state may have any strides, it is given those of the new state, ``new_strides``.
        **layouts: As of `planned`, but for the state, which is contiguous where it may not have any strides.
    """
    at = spec.updates_at
    own: dict[str, Any] = {} if spec.updates_strided else {spec.updates: contiguous}

    def planned_with(arguments: dict[str, Any], new: Tensor) -> Callable[..., Tensor]:
        return plan(**arguments, **({"new_strides": new.stride()} if spec.updates_strided else {}))

    def step(**arguments: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        new_state = fresh_like(arguments[spec.updates])
        run = planned_with(arguments, new_state())

        def run_step(*arrays: Any) -> tuple[Tensor, Tensor]:
            new = new_state()
            return run(*arrays, new), new

        return run_step

    def step_(**arguments: Any) -> Callable[..., Tensor]:
        run = planned_with(arguments, arguments[spec.updates])
        return lambda *arrays: run(*arrays, arrays[at])

    def step_slots(**arguments: Any) -> Callable[..., Tensor]:
        return in_slots(spec, planned_with(arguments, arguments[spec.updates]))

    with_state = layouts | own
    return (
        planned(spec, **with_state)(step),
        planned(spec, **with_state)(step_),
        planned(on_slots(spec), **layouts)(step_slots),
    )
