"""Private names of PyTorch that the operators use.

Each has a substitute that is slower and equally right. So a PyTorch that renames one costs only time. A substitute says
so once, by a `RefoldWarning`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from refold.versions import lose


def _without(name: str, cost: str) -> None:
    lose(cost, f"PyTorch {torch.__version__} has no {name}")


def _find_guards() -> Any:
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        _without("torch._C._dynamo.guards.TensorGuards", "each call of an operator takes some microseconds more")
        return None
    return TensorGuards


def _find_default_device() -> Callable[[], Any]:
    """Find the getter of the mode that a default device is; it gives None if there is none, or another mode, too."""
    if not hasattr(torch._C, "_len_torch_function_stack"):  # `watched` says what that costs
        return lambda: None
    try:
        from torch.utils._device import DeviceContext

        modes, mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
        _ = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack
    except (ImportError, AttributeError) as error:
        _without(str(error), "with a default device, each call of an operator takes 100 microseconds more")
        return lambda: None

    def default_device() -> Any:
        mode = mode_at(0) if modes() == 1 else None
        return mode if type(mode) is DeviceContext else None

    return default_device


def _find_watched() -> Callable[..., bool]:
    """Find the test whether calls are traced, or go through modes or transforms.

    A default device is a mode, too. It changes nothing for what happens ``at`` this device.
    """
    try:
        from torch.autograd import forward_ad

        dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
        transforms = torch._C._functorch.peek_interpreter_stack
        if not isinstance(forward_ad._current_level, int):
            raise AttributeError("torch.autograd.forward_ad._current_level")
    except (ImportError, AttributeError) as error:
        _without(str(error), "each call of an operator goes through the dispatcher, 20 microseconds more")
        return lambda at=None: True

    def is_default(at: torch.device | None) -> bool:
        mode = default_device()
        return at is not None and mode is not None and mode.device in (at, torch.device(at.type))

    def watched(at: torch.device | None = None) -> bool:
        return (
            torch.compiler.is_compiling()
            or dispatch_modes() > 0
            or (function_modes() > 0 and not is_default(at))
            or transforms() is not None
            or torch.jit.is_tracing()
            or forward_ad._current_level >= 0
        )

    return watched


def apart_from_default_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that says where it makes tensors run without a default device.

    That is a mode, which takes three microseconds of each use of a tensor, were it only of its shape.
    """

    def call(*args: Any) -> Any:
        mode = default_device()
        if mode is None:
            return run(*args)
        torch._C._pop_torch_function_stack()
        try:
            return run(*args)
        finally:
            torch._C._push_on_torch_function_stack(mode)

    return call


def _find_profiled() -> Callable[[], bool]:
    """Find the test whether a profiler lists calls."""
    try:
        found: Callable[[], bool] = torch._C._autograd._profiler_enabled
    except AttributeError as error:
        _without(str(error), "each node in a compiled program goes through the dispatcher, 8 microseconds more")
        return lambda: True
    return found


def _find_transformed() -> Callable[[torch.Tensor], bool]:
    """Find the test whether ``torch.func`` follows a tensor to differentiate."""
    try:
        found: Callable[[torch.Tensor], bool] = torch._C._functorch.is_gradtrackingtensor
    except AttributeError:
        return lambda x: False  # then PyTorch raises an error of its own
    return found


def has_no_memory(x: torch.Tensor) -> bool:
    """Tell whether a tensor has elements that are nowhere: PyTorch has zeros without memory."""
    return hasattr(x, "_is_zerotensor") and bool(x._is_zerotensor())


def _find_stream() -> Callable[[int], int]:
    """Find the getter of the raw handle of a device's current stream."""
    try:
        return torch._C._cuda_getCurrentRawStream
    except AttributeError:
        # A PyTorch without CUDA lacks the name too, and never asks.
        if torch.cuda.is_available():
            _without("torch._C._cuda_getCurrentRawStream", "each launch takes a microsecond more")
        return lambda index: torch.cuda.current_stream(index).cuda_stream


def _find_gradient() -> Callable[..., Callable[..., Any]] | None:
    """Find how a node gets a gradient as ``torch.library.register_autograd`` gives it, at no cost without one."""
    try:
        from torch._library.autograd import Info, make_autograd_impl

        keys, key = torch._C.DispatchKeySet, torch._C.DispatchKey
        # What is left if a tensor is memory of a device, and nothing looks at calls; the last two are for other nodes.
        plain = [keys(k).raw_repr() for k in (key.CPU, key.CUDA, key.BackendSelect, key.ADInplaceOrView)]
        others = torch._C._after_autograd_keyset.raw_repr()
    except (ImportError, AttributeError) as error:
        _without(str(error), "each node in a compiled program takes 10 microseconds or more longer")
        return None
    for bits in plain:
        others &= ~bits

    def gradient(op: Any, run: Callable[..., Any], backward: Any, setup: Any) -> Callable[..., Any]:
        full = cache(lambda: make_autograd_impl(op, Info(backward, setup)))  # 2 ms, for which most never ask

        def kernel(keys: Any, *args: Any) -> Any:
            # The dispatcher would come back with the same arguments to run the function.
            if torch.is_grad_enabled() or keys.raw_repr() & others:
                return full()(keys, *args)
            return run(*args)

        return kernel

    return gradient


def register_fake(library: torch.library.Library, name: str, fake: Callable[..., Any]) -> None:
    """Register what gives the shapes of a node's results.

    ``torch.library.register_fake`` also looks for the caller's file among those of all modules, for 0.05 seconds.
    """
    try:
        holder = torch._library.simple_registry.singleton.find(name).fake_impl
        library._registration_handles.append(holder.register(fake, __name__, lib=library))
    except (AttributeError, TypeError):
        torch.library.register_fake(name, fake, lib=library)


def schema(op: Any) -> Any:
    """Give the schema of an operation of PyTorch: what it takes, writes to and returns.

    Raises:
        AttributeError: This PyTorch does not say. The compiler looks at import, and is off then.
    """
    return op._schema


TensorGuards: Any = _find_guards()
"""Dynamo's comparison of tensors with those of an earlier call; None where PyTorch has none."""

default_device = _find_default_device()
watched = _find_watched()
profiled = _find_profiled()
is_transformed = _find_transformed()
raw_stream = _find_stream()
gradient = _find_gradient()
"""Makes the function that runs a node under autograd, of the node, its function, its backward and what saves for it."""
