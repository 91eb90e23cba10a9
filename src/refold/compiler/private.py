"""Names of PyTorch that are not its public interface, as far as the compiler uses them outside of `dynamo`.

Each is looked up once, at import. The compiler cannot do without those that are imported here: then this import fails,
and `refold.compiler.backend` lets Inductor compile graphs as they are. Without one of the others something is off, with
one `RefoldWarning`, and results are the same.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from ..ops.torch.private import schema as schema
from ..versions import lose

# The hook for passes, and what tells whether an operation writes to its arguments: both are read at each compile.
_NEEDED = inductor_config.joint_custom_pre_pass, schema(torch.ops.aten.add.Tensor).is_mutable
_MISSING: Any = object()


def _find(name: str, cost: str) -> Any:
    """Look a dotted name up; if it is missing, warn of the cost and return `_MISSING`."""
    module, _, leaf = name.rpartition(".")
    try:
        return getattr(import_module(module), leaf)
    except (ImportError, AttributeError):
        lose(cost, f"PyTorch {torch.__version__} has no {name}")
        return _MISSING


# Without these, single things are off.

_list_options = _find("torch._inductor.list_options", "names of options are not checked")
_list_modes = _find("torch._inductor.list_mode_options", "modes of torch.compile are not passed to Inductor")
_portable = _find("torch._inductor.config.save_config_portable", "decisions are not stored")
_known_true = _find(
    "torch.fx.experimental.symbolic_shapes.statically_known_true", "graphs with symbolic sizes are rewritten less"
)
_no_modes = _find("torch.utils._python_dispatch._disable_current_modes", "chunked scans are not found")
_tracing = _find("torch._guards.tracing", "programs that compile within a compile may fail, and then are not timed")
_metrics = _find(
    "torch._dynamo.metrics_context.MetricsContext",
    "programs that compile within a compile may fail, and then are not timed",
)
_compile_context = _find("torch._guards.CompileContext", "reports do not say which compile was the last")
_again = _find("torch._dynamo.exc.TensorifyScalarRestartAnalysis", "graphs with numbers from outside may run eagerly")
_registry = "torch._inductor.codegen.custom_extern_kernel_codegen"
_written = _find(f"{_registry}.CUSTOM_EXTERN_KERNEL_CODEGEN", "each operator in a compiled program takes 8 us more")
_Written = _find(f"{_registry}.CustomCodegen", "each operator in a compiled program takes 8 us more")
_ARITHMETIC = {"FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod}
_symbolic = {
    _find(f"torch.utils._sympy.functions.{name}", "graphs with symbolic sizes are rewritten less"): function
    for name, function in _ARITHMETIC.items()
}
SYMBOLIC_ARITHMETIC = {kind: function for kind, function in _symbolic.items() if kind is not _MISSING}
"""Operations in the expressions of symbolic sizes, and the same on numbers."""


class _Never(Exception):
    """Stands for an exception that PyTorch does not have."""


TraceAgain: Any = _Never if _again is _MISSING else _again
"""What a compile raises so that Dynamo traces the function again, with numbers of Python as constants."""


def inductor_options() -> list[str] | None:
    """Return the names of Inductor's options; None if they are not known."""
    return None if _list_options is _MISSING else _list_options()


def inductor_modes() -> dict[str, dict[str, Any]] | None:
    """Return Inductor's options by mode of ``torch.compile``; None if they are not known."""
    return None if _list_modes is _MISSING else _list_modes()


def inductor_configuration() -> str | None:
    """Return all of Inductor's settings as text; None if they cannot be had."""
    return None if _portable is _MISSING else repr(sorted(_portable().items()))


def recompile_limit() -> int | None:
    """Return how often Dynamo compiles one function; None if that is not known."""
    return getattr(torch._dynamo.config, "recompile_limit", None)


def recompile_limits(limit: int) -> AbstractContextManager[Any]:
    """Let Dynamo compile one function so often for a while, if there is such a limit."""
    try:
        return torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=limit)
    except AttributeError:
        return contextlib.nullcontext()


def statically_known_true(condition: Any) -> bool:
    """Tell whether a condition on sizes holds for certain; adds no guard."""
    if isinstance(condition, bool):
        return condition
    return _known_true is not _MISSING and bool(_known_true(condition))


def without_modes() -> AbstractContextManager[None] | None:
    """Leave all dispatch modes for a while; None if that is not possible."""
    return None if _no_modes is _MISSING else _no_modes()


def write_calls_at_once(names: Iterable[str]) -> None:
    """Have Inductor's code call what ``at_once`` of these nodes of refold is, not the dispatcher."""
    if _written is _MISSING or _Written is _MISSING:
        return

    def write(kernel: Any, writeline: Callable[[str], None]) -> None:
        own, named = kernel.codegen_args(), kernel.codegen_kwargs()
        call = kernel.python_kernel_name + ("" if named else ".at_once")
        writeline(f"{kernel.get_name()} = {call}({', '.join([*own, *named])})")

    for name in names:
        _written.setdefault(f"torch.ops.refold.{name}.default", _Written(python=write))


def without_autograd_cache() -> AbstractContextManager[Any]:
    """Switch AOTAutograd's cache off for a while, if there is one."""
    try:
        return torch._functorch.config.patch(enable_autograd_cache=False)
    except AttributeError:
        return contextlib.nullcontext()


def with_backward() -> AbstractContextManager[Any]:
    """Let AOTAutograd compile a backward with its forward, not when it first runs: then its failures are known, too."""
    try:
        return torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    except AttributeError:
        return contextlib.nullcontext()


def compile_number() -> int | None:
    """Return how many times Dynamo has compiled the function under way; None if that is not known."""
    if _compile_context is _MISSING:
        return None
    return getattr(_compile_context.current_compile_id(), "frame_compile_id", None)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Hide the compile under way, so that another one, or a backward that compiles lazily, can run inside it."""
    if any(found is _MISSING for found in (_metrics, _tracing, _no_modes)):
        yield
        return
    dynamo: Any = import_module("torch._dynamo.utils")
    # One metric may be set once per compile. torch <= 2.11 keeps them in a global, later ones in one per thread.
    local = getattr(dynamo, "_metrics_context_tls", None)
    holder, name = (dynamo, "_METRICS_CONTEXT") if local is None else (local, "metrics_context")
    outer = dynamo.get_metrics_context()
    setattr(holder, name, _metrics(on_exit=lambda *_: None))
    try:
        with _tracing(None), _no_modes():
            yield
    finally:
        setattr(holder, name, outer)
