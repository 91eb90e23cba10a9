"""Functions as nodes: Dynamo, export and AOTAutograd do not look into them, and Inductor calls them as they are.

They are registered at the low level of ``torch.library``. ``torch.library.custom_op`` takes 3 to 10 microseconds of
every call for what no node here needs: it compares the memory of all results and arguments, for example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from refold.errors import ArgumentError
from refold.ops.torch import private

_LIBRARY = torch.library.Library("refold", "FRAGMENT")
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
AT_ONCE: set[str] = set()
"""Nodes with a function ``at_once``, which compiled code calls in their place. One that writes to an argument has none:
the dispatcher counts how often a tensor was written to."""


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *, padded: bool = False) -> Any:
    """Register ``refold::<name>``, without a gradient, and return it.

    Args:
        name: The name.
        schema: Arguments and results, as ``torch.library`` writes them.
        run: The function. Under ``torch.autocast`` it runs without: arguments decide what it computes in.
        fake: Returns the results' shapes, strides and dtypes.
        padded: Whether rows of arguments may be farther apart in memory than when the node was traced. On a GPU,
            Inductor pads rows to a multiple of 128 bytes, and copies what must have exact strides.
    """
    strides = torch.Tag.needs_fixed_stride_order if padded else torch.Tag.needs_exact_strides
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, strides))
    _FUNCTIONS[name] = apart_from_autocast(run)
    _LIBRARY.impl(name, _FUNCTIONS[name], "CompositeExplicitAutograd")
    private.register_fake(_LIBRARY, f"refold::{name}", fake)
    node = getattr(torch.ops.refold, name).default
    if "!" not in schema:
        node.at_once = _at_once(node, _FUNCTIONS[name])
        AT_ONCE.add(name)
    return node


def _at_once(node: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Make a caller of a node's function; of the node, if the dispatcher, which takes 8 us, has something to do.

    That is to show the call to someone, and to apply conjugation and signs that PyTorch left for later.
    """

    def call(*args: Any) -> Any:
        later = True in [x.is_neg() or x.is_conj() for x in args if isinstance(x, Tensor)]
        return node(*args) if later or private.watched() or private.profiled() else run(*args)

    return private.apart_from_default_device(call)


def differentiate(name: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    """Give a node a gradient: see ``torch.library.register_autograd``.

    In a compiled program gradients are off, and nodes run many times: there the node's function is called at once.
    """
    if private.gradient is None:
        torch.library.register_autograd(f"refold::{name}", backward, setup_context=setup, lib=_LIBRARY)
        return
    node = getattr(torch.ops.refold, name).default
    kernel = private.gradient(node, _FUNCTIONS[name], backward, setup)
    _LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)


def refuse_derivative(name: str) -> None:
    """Let a node, which is the gradient of another, raise where it would be differentiated."""

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op = name.removesuffix("_backward")  # the name that users know

    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArgumentError(f"{ctx.op}: it has no second derivative. Differentiate it once, without create_graph.")

    differentiate(name, backward, setup)


def exporting_to_onnx() -> bool:
    """Tell whether ``torch.onnx`` exports what runs now."""
    # The first look imports a second's worth of modules, so only calls that are traced look.
    return (torch.compiler.is_compiling() or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export()


def apart_from_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs without ``torch.autocast``, also where that is on."""

    def implementation(*args: Any) -> Any:
        device = next(a for a in args if isinstance(a, Tensor)).device.type
        cast = device != "meta" and torch.is_autocast_enabled(device)
        return without_autocast(device, run, *args) if cast else run(*args)

    return implementation


def without_autocast(device: str, run: Callable[..., Any], *args: Any) -> Any:
    """Run what an operator is made of in the dtypes that it chose itself: those of its arguments decide."""
    with torch.autocast(device, enabled=False):
        return run(*args)
