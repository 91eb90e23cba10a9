"""Which backend runs a call.

A backend is a file ``ops/<operator>/_<backend>.py`` with a function named like the operator and, next to it,
``supports(meta) -> str | None``: None for yes, else the reason. The file is imported at its first use. A missing
package or file is a reason, too. Without ``backend=``, the first backend in the spec's order that can run is used. A
named backend runs or raises. Nothing is substituted silently.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from refold.errors import ArgumentError, BackendUnsupported
from refold.ops.spec import Meta, OpSpec

BACKENDS = {"triton": "torch", "numba": "torch", "torch": "torch", "jax": "jax", "reference": "numpy"}
"""Backend -> the framework whose arrays it takes. A new kind of backend adds its line here."""

_PACKAGES = {
    "triton": ("torch", "triton"),
    "numba": ("torch", "numba"),
    "torch": ("torch",),
    "jax": ("jax",),
    "reference": ("numpy",),
}


def named(spec: OpSpec, backend: str | None) -> str:
    """Return the name of a backend as nodes of graphs hold it: empty if none is given.

    Raises:
        ArgumentError: There is no such backend.
    """
    if backend is None:
        return ""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ArgumentError(
            f"{spec.name}: backend must be one of {', '.join(spec.backends)}; got {backend!r}. Pass one of them, or "
            "None to let refold choose."
        )
    return backend


def resolve(spec: OpSpec, meta: Meta, backend: str) -> ModuleType:
    """Return the file of the backend that runs ``meta``; an empty name lets the spec's order decide."""
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
    if (reason := _missing(spec, backend)) is not None:
        return reason
    if backend == "triton" and meta.device != "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        # Its files say the same, but to import Triton and all kernels takes a tenth of a second.
        return f"needs a GPU; these arrays are on {meta.device}"
    if (reason := absence(spec, backend)) is not None:
        return reason
    supports = getattr(backend_module(spec, backend), "supports", None)
    return supports(meta) if supports is not None else None


def absence(spec: OpSpec, backend: str) -> str | None:
    """Return why a backend can run nothing at all here: a package or an implementation is missing."""
    if (reason := _missing(spec, backend)) is not None:
        return reason
    name = f"{spec.module}.{_file(backend)}"
    return None if hasattr(import_module(name), spec.name) else f"{name} does not implement {spec.name}"


def _missing(spec: OpSpec, backend: str) -> str | None:
    """Return which package or file of a backend is not there."""
    for package in _PACKAGES[backend]:
        if not _installed(package):
            return f"the package {package} is not installed; pip install 'refold[{package}]'"
    if not _exists(f"{spec.module}.{_file(backend)}"):
        return f"{spec.name} has no {backend} implementation"
    return None


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
