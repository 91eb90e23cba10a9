"""Which code runs: the arrays decide the framework, ``backend=`` decides within it.

A backend is a file ``ops/<operator>/_<backend>.py`` with a function named like the operator and, next to it,
``supports(meta) -> str | None``: None for yes, else the reason. It is imported when first asked for; a package or a
file that is missing is a reason like any other. Without a name the first backend of the spec's order that says
yes runs; a named one runs or raises. Nothing is substituted silently: `explain` shows the answers `resolve` acts on.

Frameworks are told apart by the module of an array's type, so that asking imports neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from refold.errors import ArgumentError, BackendUnsupported, DtypeError
from refold.ops.spec import CU_SEQLENS, ArrayMeta, Meta, OpSpec, check_cu_seqlens_values, dtype_name, load

BACKENDS = {"triton": "torch", "numba": "torch", "torch": "torch", "jax": "jax", "reference": "numpy"}
"""Backend -> the framework whose arrays it takes. A new kind of backend adds its line here."""

_PACKAGES = {
    "triton": ("torch", "triton"),
    "numba": ("torch", "numba"),
    "torch": ("torch",),
    "jax": ("jax",),
    "reference": ("numpy",),
}
_FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "numpy": "numpy"}
_FRAMEWORK_OF_TYPE: dict[type, str | None] = {}


class Explanation(dict[str, str | None]):
    """Every backend with None for yes or its reason for no, in order of preference; prints as a table."""

    def __init__(self, op: str, reasons: dict[str, str | None]) -> None:
        super().__init__(reasons)
        self.op = op

    @property
    def chosen(self) -> str | None:
        """The backend that would run."""
        return next((name for name, reason in self.items() if reason is None), None)

    def __str__(self) -> str:
        """Return one line a backend."""
        lines = [f"{self.op}:"]
        for name, reason in self.items():
            mark = "runs" if name == self.chosen else "yes" if reason is None else f"no: {reason}"
            lines.append(f"  {name:<10} {mark}")
        return "\n".join(lines)

    __repr__ = __str__


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Say for each backend whether it can run these arguments, and why not.

    Args:
        op: Name of an operator or step, such as ``"ssd"``.
        *args: What one would pass to that operator.
        **kwargs: Its keyword arguments.

    Returns:
        A mapping from backend to None (yes) or the reason; printing it shows a table.

    Example:
        >>> import numpy as np
        >>> x = np.ones((1, 8, 4))
        >>> refold.ops.explain("linear_scan", x, x).chosen
        'reference'
    """
    import inspect

    spec = load(op)
    function = getattr(import_module(spec.module), op)
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    arrays = [bound.arguments[arg.name] for arg in spec.args]
    options = spec.plain_options([bound.arguments[option.name] for option in spec.options])
    framework = framework_of(spec, arrays)
    meta = spec.validate(meta_of(spec, framework, arrays, options))
    return Explanation(op, {backend: refusal(spec, backend, meta) for backend in spec.backends})


def call(spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any], backend: str | None) -> Any:
    """Run an operator: its public function hands over its arguments here, in the order of the spec."""
    if _framework(type(arrays[0])) == "torch":
        # Checks and the choice of backend happen there, once a signature, and out of sight of what traces calls.
        from refold.ops.torch import registry as library

        return library.run(spec.name, arrays, options, backend or "")
    framework, options = framework_of(spec, arrays), spec.plain_options(options)
    meta = spec.validate(meta_of(spec, framework, arrays, options))
    run = getattr(resolve(spec, meta, backend or ""), spec.name)
    keywords = keyword_arguments(spec, arrays, options)
    if 0 in arrays[0].shape:  # of what was checked, only a batch can be empty
        zeros = import_module("jax.numpy" if framework == "jax" else "numpy").zeros
        empty = tuple(zeros(shape, dtype) for shape, dtype in spec.output_metas(meta))
        return empty if len(empty) > 1 else empty[0]
    if framework == "numpy":
        if (offsets := keywords.get(CU_SEQLENS)) is not None:
            check_cu_seqlens_values(spec.name, offsets.tolist(), meta.sizes["t"])
        results = run(**keywords)
        single = not isinstance(results, tuple)
        cast = tuple(
            r.astype(d) for r, (_, d) in zip((results,) if single else results, spec.output_metas(meta), strict=True)
        )
        return cast[0] if single else cast
    return run(**keywords)


def call_in_place(spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any], backend: str | None) -> Any:
    """Run the twin of an operator that overwrites ``spec.updates``, and return the other result."""
    if _framework(type(arrays[0])) == "torch":
        from refold.ops.torch import registry as library

        return library.run(f"{spec.name}_", arrays, options, backend or "")
    if framework_of(spec, arrays) == "jax":
        raise BackendUnsupported(f"{spec.name}_: jax arrays cannot be written. Use {spec.name} and keep its state.")
    y, state = call(spec, arrays, options, backend)
    next(array for arg, array in zip(spec.args, arrays, strict=True) if arg.name == spec.updates)[...] = state
    return y


def framework_of(spec: OpSpec, arrays: Sequence[Any]) -> str:
    """Return the framework that all arrays share, or raise naming the one that differs."""
    framework = _framework(type(arrays[0]))
    if framework is not None and all(_framework(kind) == framework for kind in set(map(type, arrays)) - {type(None)}):
        if framework == "torch":
            _refuse_layouts(spec, arrays)
        return framework
    if framework is None:
        raise DtypeError(
            f"{spec.name}: {spec.args[0].name} must be a torch, jax or numpy array; got {type(arrays[0]).__name__}. "
            "Convert it."
        )
    for arg, array in zip(spec.args, arrays, strict=True):
        if array is not None and _framework(type(array)) != framework:
            raise DtypeError(
                f"{spec.name}: {arg.name} is a {type(array).__module__}.{type(array).__name__} but "
                f"{spec.args[0].name} is a {framework} array. Convert {arg.name}."
            )
    return framework


def _refuse_layouts(spec: OpSpec, arrays: Sequence[Any]) -> None:
    """Raise at a tensor that is not dense: it has no strides, and asking for them may end the process."""
    import torch

    for arg, array in zip(spec.args, arrays, strict=True):
        if array is None or (array.layout == torch.strided and not array.is_nested):
            continue
        layout = "nested" if array.is_nested else str(array.layout).removeprefix("torch.")
        remedy = "Pack its sequences along time" if array.is_nested else f"Pass {arg.name}.to_dense()"
        raise ArgumentError(f"{spec.name}: {arg.name} must be a dense tensor; it is {layout}. {remedy}.")


def _framework(kind: type) -> str | None:
    if kind not in _FRAMEWORK_OF_TYPE:
        roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
        _FRAMEWORK_OF_TYPE[kind] = next((_FRAMEWORKS[root] for root in roots if root in _FRAMEWORKS), None)
    return _FRAMEWORK_OF_TYPE[kind]


# What torch.compiler.assume_constant_result sets, without importing torch: Dynamo asks once and does not trace it.
# Traced, a type that is met for the first time would change the memory that the trace is guarded by.
_framework._dynamo_marked_constant = True  # type: ignore[attr-defined]


def meta_of(spec: OpSpec, framework: str, arrays: Sequence[Any], options: Sequence[Any]) -> Meta:
    """Reduce arguments to what may be known without reading a value."""
    metas = {}
    for arg, array in zip(spec.args, arrays, strict=True):
        if array is not None:
            device = {"torch": lambda a: a.device.type, "jax": lambda a: "jax", "numpy": lambda a: "cpu"}[framework]
            metas[arg.name] = ArrayMeta(tuple(array.shape), dtype_name(array.dtype), device(array))
    return Meta(spec.name, framework, metas, {o.name: v for o, v in zip(spec.options, options, strict=True)})


def keyword_arguments(spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
    """Name the arguments as backends take them."""
    return dict(zip([a.name for a in spec.args] + [o.name for o in spec.options], [*arrays, *options], strict=True))


def resolve(spec: OpSpec, meta: Meta, backend: str) -> ModuleType:
    """Return the file of the backend that runs ``meta``; an empty name lets the spec's order decide."""
    if backend and backend not in BACKENDS:
        raise ArgumentError(f"{spec.name}: backend must be one of {', '.join(spec.backends)}; got {backend!r}.")
    candidates = (backend,) if backend else spec.backends
    reasons = {}
    for name in candidates:
        reasons[name] = refusal(spec, name, meta)
        if reasons[name] is None:
            return backend_module(spec, name)
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    remedy = "Pass backend=None to let refold choose." if backend else "Change what the reasons name."
    raise BackendUnsupported(f"{spec.name}: no backend can run this call. {listed}. {remedy}")


def refusal(spec: OpSpec, backend: str, meta: Meta) -> str | None:
    """Return None if ``backend`` can run ``meta``, else why not."""
    if BACKENDS[backend] != meta.framework:
        return f"takes {BACKENDS[backend]} arrays; these are {meta.framework}"
    if (reason := absence(spec, backend)) is not None:
        return reason
    supports = getattr(backend_module(spec, backend), "supports", None)
    return supports(meta) if supports is not None else None


def absence(spec: OpSpec, backend: str) -> str | None:
    """Return why a backend can run nothing at all here: a package or an implementation is missing."""
    for package in _PACKAGES[backend]:
        if not _installed(package):
            return f"the package {package} is not installed; pip install 'refold[{package}]'"
    name = f"{spec.module}.{_file(backend)}"
    if not _exists(name):
        return f"{spec.module} has no file {_file(backend)}.py"
    return None if hasattr(import_module(name), spec.name) else f"{name} does not implement {spec.name}"


def backend_module(spec: OpSpec, backend: str) -> ModuleType:
    """Import the file of a backend."""
    return import_module(f"{spec.module}.{_file(backend)}")


def _file(backend: str) -> str:
    return "reference" if backend == "reference" else f"_{backend}"


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


@cache
def _exists(module: str) -> bool:
    return find_spec(module) is not None
