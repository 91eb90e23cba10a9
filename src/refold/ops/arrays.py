"""The framework of an operator's arguments, and their metadata: shape, dtype and device.

The framework follows from the module of an array's type. So finding it imports neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from refold.errors import ArgumentError, DtypeError
from refold.ops.spec import ArrayMeta, Meta, OpSpec, dtype_name


class AnyArray(Protocol):
    """What a torch, jax or numpy array has: how type checkers tell one from a number or a list."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""
        ...

    @property
    def dtype(self) -> Any:
        """Type of the elements."""
        ...


# One kind of array: the arguments of a call have it, and so have its results.
Array = TypeVar("Array", bound=AnyArray)

_FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "numpy": "numpy"}
_FRAMEWORK_OF_TYPE: dict[type, str | None] = {}


def framework_of(spec: OpSpec, arrays: Sequence[Any]) -> str:
    """Return the framework that all arrays share, or raise naming the one that differs."""
    framework = framework_of_type(type(arrays[0]))
    if framework is not None and all(
        framework_of_type(kind) == framework for kind in set(map(type, arrays)) - {type(None)}
    ):
        if framework == "torch":
            _refuse_layouts(spec, arrays)
        elif framework == "numpy":
            _refuse_meanings(spec, arrays)
        return framework
    if framework is None:
        raise DtypeError(
            f"{spec.name}: {spec.args[0].name} must be a torch, jax or numpy array; got {type(arrays[0]).__name__}. "
            "Convert it."
        )
    for arg, array in zip(spec.args, arrays, strict=True):
        if array is not None and framework_of_type(type(array)) != framework:
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


def _refuse_meanings(spec: OpSpec, arrays: Sequence[Any]) -> None:
    """Raise at an array for which arithmetic means something else: masked ones, and matrices."""
    import numpy as np

    for arg, array in zip(spec.args, arrays, strict=True):
        if isinstance(array, np.ma.MaskedArray | np.matrix):
            remedy = f"{arg.name}.filled(...)" if isinstance(array, np.ma.MaskedArray) else f"numpy.asarray({arg.name})"
            raise ArgumentError(
                f"{spec.name}: {arg.name} must be a plain numpy array; it is a {type(array).__name__}. Pass {remedy}."
            )


def framework_of_type(kind: type) -> str | None:
    """Return the framework that a type of arrays belongs to; None if it is no array."""
    if kind not in _FRAMEWORK_OF_TYPE:
        bases = kind.__mro__ if hasattr(kind, "shape") and hasattr(kind, "dtype") else ()
        roots = [base.__module__.partition(".")[0] for base in bases]
        _FRAMEWORK_OF_TYPE[kind] = next((_FRAMEWORKS[root] for root in roots if root in _FRAMEWORKS), None)
    return _FRAMEWORK_OF_TYPE[kind]


# What torch.compiler.assume_constant_result sets, without importing torch: Dynamo asks once and does not trace it.
# Traced, a type that is met for the first time would change the memory that the trace is guarded by.
framework_of_type._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
