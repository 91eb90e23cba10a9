"""Checks of arguments that several functions of other packages take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from refold.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from refold.ops.spec import float_dtype

Function = TypeVar("Function", bound=Callable[..., Any])

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_INTEGERS = frozenset({torch.int32, torch.int64})
_INDICES = frozenset({
    "seq_idx", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "state_batch_indices", "dst_state_batch_indices",
    "num_accepted_tokens", "cache_seqlens", "conv_state_indices",
})  # fmt: skip
"""Arguments that are integers; they may lie on another device."""


def tensors(**ranks: tuple[int, ...]) -> Callable[[Function], Function]:
    """Let a function refuse what is no tensor where one is meant, other dtypes and devices, and ranks that differ."""

    def decorate(function: Function) -> Function:
        op, kinds = function.__name__, {n: k for n, k in function.__annotations__.items() if k.startswith("Tensor")}
        names = function.__code__.co_varnames

        @wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            device = None
            for name, value in (*zip(names, args, strict=False), *given.items()):
                if name not in kinds and isinstance(value, Tensor) and value.numel() != 1:
                    raise ArgumentError(f"{op}: {name} must not be a tensor; got the shape {tuple(value.shape)}.")
                if name not in kinds or (value is None and kinds[name] != "Tensor"):
                    continue
                if not isinstance(value, Tensor):
                    raise DtypeError(f"{op}: {name} must be a torch.Tensor; got {type(value).__name__}. Convert it.")
                index = name in _INDICES
                if value.dtype not in (_INTEGERS if index else _FLOATS) or value.layout is not torch.strided:
                    wanted = "int32 or int64" if index else "float32, bfloat16, float16 or float64"
                    got = value.dtype if value.layout is torch.strided else value.layout
                    raise DtypeError(f"{op}: {name} must be dense, and {wanted}; got {got}. Convert {name}.")
                if name in ranks and value.ndim not in ranks[name]:
                    expected = " or ".join(map(str, ranks[name]))
                    raise ShapeError(
                        f"{op}: {name} must have {expected} axes; got the shape {tuple(value.shape)}. Reshape {name}."
                    )
                if index:
                    continue
                device = value.device if device is None else device
                if value.device != device:
                    raise DeviceError(f"{op}: {name} is on {value.device}, others are on {device}. Move {name}.")
            return function(*args, **given)

        return checked  # type: ignore[return-value]

    return decorate


def shaped(op: str, **given: tuple[Tensor | None, Sequence[int]]) -> None:
    """Refuse tensors that do not have the shape that stands next to them."""
    for name, (value, wanted) in given.items():
        if value is not None and value.shape != tuple(wanted):
            raise ShapeError(f"{op}: {name} must have the shape {tuple(wanted)}; got {tuple(value.shape)}.")


def positive(op: str, name: str, value: Any) -> None:
    """Refuse what is no positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{op}: {name} must be a positive integer; got {value!r}.")


def share(op: str, name: str, value: Any) -> None:
    """Refuse what is no share of elements that may be dropped."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ArgumentError(f"{op}: {name} must be 0 or more and below 1; got {value!r}.")


def states_dtype(op: str, name: str, value: Any) -> None:
    """Refuse what is neither None nor a dtype that states may have."""
    if value is not None and not (isinstance(value, torch.dtype) and float_dtype(value)):
        raise ArgumentError(f"{op}: {name} must be None or a float torch.dtype; got {value!r}.")
