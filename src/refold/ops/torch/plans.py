"""Plans: what an operator decides once for all calls with the same signature.

A plan has decided whatever does not change while shapes, strides, dtypes, devices, alignment and options stay the same:
how work is cut, grids, integer arguments. `refold.ops.torch.registry` keeps the plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from refold.ops.spec import OpSpec


class Planned:
    """An operator made of a function that takes all arguments and returns a function of the arrays, the plan.

    ``layouts`` gives, for some arrays, what makes their layout one that can be read.
    """

    def __init__(
        self, spec: OpSpec, backward: bool, layouts: dict[str, Callable[[Any], Any]], make: Callable[..., Any]
    ) -> None:
        self.names = [f"d{output.name}" for output in spec.outputs] if backward else []
        self.names += [arg.name for arg in spec.args]
        self.layouts = layouts
        self.make = make
        self.__doc__ = make.__doc__

    def plan(self, **arguments: Any) -> Callable[..., Any]:
        """Return the plan for calls with this signature: a function of the arrays in the order of the spec."""
        readable = {name: make(arguments[name]) for name, make in self.layouts.items()}
        plan = self.made(arguments | readable)
        if all(array is arguments[name] for name, array in readable.items()):
            return plan
        layouts = [self.layouts.get(name, _as_it_is) for name in self.names]
        return lambda *arrays: plan(*[make(array) for make, array in zip(layouts, arrays, strict=True)])

    def made(self, arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the plan for arguments whose layouts can be read."""
        plan: Callable[..., Any] = self.make(**arguments)
        return plan

    def __call__(self, **arguments: Any) -> Any:
        """Plan and run."""
        return self.plan(**arguments)(*[arguments[name] for name in self.names])


def planned(
    spec: OpSpec, backward: bool = False, *, kind: type[Planned] = Planned, **layouts: Callable[[Any], Any]
) -> Callable[[Callable[..., Any]], Planned]:
    """Make an operator, or its backward, of the function that plans it; see `Planned`.

    The arrays of a backward are the gradients of the results and then the arguments.
    """
    return lambda make: kind(spec, backward, layouts, make)


def _as_it_is(array: Any) -> Any:
    return array


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """Make a maker of contiguous tensors: with the strides known, in two thirds of the time of ``torch.empty``."""
    shape, strides = tuple(shape), torch.empty(shape, device="meta").stride()
    # Looked up at each call, so that tests can hand out memory full of NaN.
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def fresh_like(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Make a maker of contiguous tensors of the shape, dtype and device of another."""
    return fresh(tensor.shape, tensor.dtype, tensor.device)


def contiguous(tensor: torch.Tensor | None) -> Any:
    """Return the tensor itself where its layout is that of a fresh one, else a copy."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()
