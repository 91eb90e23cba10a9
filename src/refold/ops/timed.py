"""Calls of operators that `refold bench` measures: each operator lists its own in ``bench.py``.

Such a file has ``SUITES``: for each name of a suite a function that yields calls. Several operators may share a suite.
Of a name that ends with ``-backward``, gradients are measured. Options of the function are options of the suite, and
the first line of its docstring says what it shows. Nothing here imports torch before a call is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from refold.errors import ArgumentError
from refold.ops.spec import load, operators


@dataclass
class Timed:
    """One call to be measured.

    Attributes:
        op: A public function; a trailing underscore overwrites the state.
        name: Its sizes, for a person.
        arguments: What it is given, by name.
        rivals: The same by other packages' kernels, by name; None where a package is not there.
        graded: Whether rows hold how near all results are to float64.
    """

    op: str
    name: str
    arguments: dict[str, Any]
    rivals: Mapping[str, Callable[[], Any] | None] = field(default_factory=dict)
    graded: bool = False


def operator_suites() -> list[dict[str, Callable[..., Iterator[Timed]]]]:
    """List what each operator lists in its ``bench.py``."""
    return [bench.SUITES for bench in _benches().values()]


def shared_calls() -> dict[str, Callable[[int], dict[str, Any]]]:
    """Give for each operator that has ``shared`` in its ``bench.py`` a call of some tokens that ranks can share."""
    return {name: bench.shared for name, bench in _benches().items() if hasattr(bench, "shared")}


def _benches() -> dict[str, Any]:
    """Import the ``bench.py`` of each operator that has one."""
    modules = {name: f"{load(name).module}.bench" for name in operators()}
    return {name: import_module(module) for name, module in modules.items() if find_spec(module) is not None}


place = "cuda"
"""Where inputs are drawn."""


def normal(*shape: int, dtype: str = "float32") -> Any:
    """Draw inputs."""
    import torch

    return torch.randn(*shape, device=place).to(getattr(torch, dtype))


def uniform(*shape: int) -> Any:
    """Draw numbers between 0 and 1."""
    import torch

    return torch.rand(*shape, device=place)


@contextmanager
def set_aside(*packages: str) -> Iterator[None]:
    """Take packages out of what is imported meanwhile, so that others can have their names."""

    def take_out() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in packages}

    installed = take_out()
    try:
        yield
    finally:
        take_out()
        sys.modules.update(installed)


def from_checkout(folder: str, module: str, name: str) -> Any:
    """Import a function from a checkout of a package, next to an installed package of the same name.

    The package's own ``__init__`` does not run: it may want extensions that were not built.

    Raises:
        ArgumentError: It cannot be imported.
    """
    package = module.partition(".")[0]
    with set_aside(package):
        sys.modules[package] = bare = ModuleType(package)
        bare.__path__ = [str(Path(folder) / package)]
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ArgumentError(f"{folder} has no {module}.{name} that can be imported: {error}") from error
