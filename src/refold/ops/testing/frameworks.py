"""What the contract needs of a framework: arrays from numpy and back, gradients, poisoned memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any, Protocol
from unittest import mock

import numpy as np

from refold.ops.backends import BACKENDS


class Frame(Protocol):
    """A framework on one device."""

    def array(self, values: np.ndarray, dtype: str, strided: bool = False) -> Any:
        """Return values as an array; ``strided``: as a view into a larger one."""

    def numpy(self, array: Any) -> np.ndarray:
        """Return an array as float64."""

    def gradients(
        self, function: Callable[..., tuple[Any, ...]], arrays: dict[str, Any], cotangents: list[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the gradients of the results, weighted by cotangents, in every floating-point array."""

    def poisoned(self) -> AbstractContextManager[Any]:
        """Return a context in which memory that was never written reads as NaN."""

    def surroundings(self) -> list[tuple[str, AbstractContextManager[Any]]]:
        """Return contexts that must change no result, with their names."""


class TorchFrame:
    """Torch tensors on a device."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def array(self, values: np.ndarray, dtype: str, strided: bool = False) -> Any:
        """Return a tensor; strided ones have gaps between rows and an offset."""
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(self.device, getattr(torch, dtype))
        if strided and tensor.ndim > 1:
            shape = [size + 2 for size in tensor.shape]
            base = tensor.new_full(shape, float("nan"))
            view = base[tuple(slice(1, 1 + size) for size in tensor.shape)]
            view.copy_(tensor)
            return view
        return tensor

    def numpy(self, array: Any) -> np.ndarray:
        """Return a tensor as float64 on the host."""
        return array.detach().double().cpu().numpy()

    def gradients(
        self, function: Callable[..., tuple[Any, ...]], arrays: dict[str, Any], cotangents: list[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Run autograd."""
        import torch

        leaves = {k: a.detach().requires_grad_() if a.is_floating_point() else a for k, a in arrays.items()}
        results = function(**leaves)
        weights = [torch.from_numpy(c).to(r.device, r.dtype) for c, r in zip(cotangents, results, strict=True)]
        wanted = {k: a for k, a in leaves.items() if a.requires_grad}
        grads = torch.autograd.grad(results, list(wanted.values()), weights)
        for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
            assert grad.shape == leaf.shape, f"gradient of {name} has shape {grad.shape}, not {leaf.shape}"
            assert grad.dtype == leaf.dtype, f"gradient of {name} is {grad.dtype}, not {leaf.dtype}"
        return {name: self.numpy(grad) for name, grad in zip(wanted, grads, strict=True)}

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """Fill what torch.empty and its kin return with NaN."""
        import torch

        def poison(make: Callable[..., Any]) -> Callable[..., Any]:
            def made(*args: Any, **kwargs: Any) -> Any:
                tensor = make(*args, **kwargs)
                return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

            return made

        with (
            mock.patch.object(torch, "empty", poison(torch.empty)),
            mock.patch.object(torch, "empty_like", poison(torch.empty_like)),
            mock.patch.object(torch, "empty_strided", poison(torch.empty_strided)),
            mock.patch.object(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty)),
        ):
            yield

    def surroundings(self) -> list[tuple[str, AbstractContextManager[Any]]]:
        """Return autocast, another default device, and default dtypes."""
        import torch

        @contextmanager
        def default(dtype: torch.dtype) -> Iterator[None]:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

        found: list[tuple[str, AbstractContextManager[Any]]] = [
            (f"default dtype {dtype}", default(dtype)) for dtype in (torch.float64, torch.bfloat16)
        ]
        found.append(("default device meta", torch.device("meta")))
        return [*found, ("autocast", torch.autocast(self.device, torch.bfloat16))]


class JaxFrame:
    """JAX arrays; gradients through jax.vjp, calls under jit."""

    def array(self, values: np.ndarray, dtype: str, strided: bool = False) -> Any:
        """Return an array; JAX has no strides."""
        import jax.numpy as jnp

        return jnp.asarray(values, dtype=dtype)

    def numpy(self, array: Any) -> np.ndarray:
        """Return an array as float64."""
        return np.asarray(array.astype("float32") if str(array.dtype) == "bfloat16" else array).astype(np.float64)

    def gradients(
        self, function: Callable[..., tuple[Any, ...]], arrays: dict[str, Any], cotangents: list[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Run jax.vjp."""
        import jax
        import jax.numpy as jnp

        floating = {k: a for k, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        others = {k: a for k, a in arrays.items() if k not in floating}
        results, pull = jax.vjp(lambda leaves: function(**leaves, **others), floating)
        weights = tuple(jnp.asarray(c, dtype=r.dtype) for c, r in zip(cotangents, results, strict=True))
        return {name: self.numpy(grad) for name, grad in pull(weights)[0].items()}

    def poisoned(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: JAX hands out no memory that was not written."""
        return nullcontext()

    def surroundings(self) -> list[tuple[str, AbstractContextManager[Any]]]:
        """Return none: a default dtype of JAX does not exist."""
        return []


class NumpyFrame:
    """NumPy arrays, for the reference itself; no gradients."""

    def array(self, values: np.ndarray, dtype: str, strided: bool = False) -> Any:
        """Return values in a dtype."""
        return values.astype(dtype)

    def numpy(self, array: Any) -> np.ndarray:
        """Return an array as float64."""
        return array.astype(np.float64)

    def gradients(
        self, function: Callable[..., tuple[Any, ...]], arrays: dict[str, Any], cotangents: list[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Raise: NumPy has no gradients."""
        raise NotImplementedError("the reference is not differentiated")

    def poisoned(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def surroundings(self) -> list[tuple[str, AbstractContextManager[Any]]]:
        """Return none."""
        return []


def round_to_nearest_when_interpreted() -> None:
    """Let Triton's interpreter round float32 to bfloat16 as devices do; it cuts the low bits off, twice the error."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if getattr(builder, "rounds_to_nearest", False):
        return
    builder.rounds_to_nearest = True
    cast = builder.cast_impl

    def rounded(self: Any, src: Any, dst_type: Any) -> Any:
        name = str(dst_type.scalar)
        if name != "bf16" or str(src.dtype.scalar) != "fp32":
            return cast(self, src, dst_type)
        values = np.asarray(src.data, np.float32)
        bits = values.view(np.uint32)
        # Adding half of the last kept bit (less one where that bit is even) carries exactly where rounding goes up.
        nearest = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
        nearest = np.where(np.isnan(values), np.uint16(0x7FC0), nearest)
        return interpreter.TensorHandle(nearest, dst_type.scalar)

    builder.cast_impl = rounded


def interpret_quickly() -> None:
    """Let Triton's interpreter replace its language once a launch, not again for each call of a device function.

    A launch takes back what it replaced, and a device function that finds all replaced has nothing to do. Dtypes are
    looked up in a table that is made once. Where the interpreter has other names, it stays as it is.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton import language
    from triton.runtime import interpreter

    @cache
    def seen_by(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is language or value is language.core]

    def is_replaced(lang: Any) -> bool:
        return lang.range.__module__ == lang.tensor.__str__.__module__ == interpreter.__name__

    def once(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda function: None if all(map(is_replaced, seen_by(function))) else replace(function)

    def by_name(look: Callable[[Any], Any]) -> Callable[[Any], Any]:
        known: dict[str, Any] = {}
        return lambda dtype: known[dtype.name] if dtype.name in known else known.setdefault(dtype.name, look(dtype))

    for name, quicker in (("_patch_lang", once), ("_get_np_dtype", by_name)):
        function = getattr(interpreter, name, None)
        if isinstance(function, FunctionType) and function.__module__ == interpreter.__name__:
            setattr(interpreter, name, quicker(function))


def frame_of(backend: str, device: str = "cpu") -> Frame:
    """Return the framework whose arrays a backend takes."""
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        round_to_nearest_when_interpreted()
    frames: dict[str, Callable[[], Frame]] = {
        "torch": lambda: TorchFrame(device), "jax": JaxFrame, "numpy": NumpyFrame,
    }  # fmt: skip
    return frames[BACKENDS[backend]]()
