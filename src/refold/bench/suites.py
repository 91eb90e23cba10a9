"""The suites of ``refold bench run``.

A suite is a function with keyword-only options that yields rows. Its first docstring line says what it shows. The
defaults of the options give their types: a tuple takes values separated by commas.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..errors import ArgumentError, MissingDependency
from ..ops.timed import operator_suites
from .options import read_option
from .rows import Row


@dataclass(frozen=True)
class Suite:
    """A function of a module of this package, imported when it is asked for.

    Attributes:
        name: Its name for users.
        module: The module.
        function: The function.
        device: Where it runs, if it has no option ``device``.
        zero: Its options that may be 0, though their default is not.
        named: Whether the function makes the suite of a name: operators list its calls.
        measures: The rooms of the package whose code it measures; of a suite of operators, the row's operator is it.
    """

    name: str
    module: str
    function: str
    device: str = "cuda"
    zero: tuple[str, ...] = ()
    named: bool = False
    measures: tuple[str, ...] = ("ops", "compiler")

    def load(self) -> Callable[..., Iterator[Row]]:
        """Import it.

        Raises:
            MissingDependency: It needs a package that is not installed.
        """
        try:
            found: Any = getattr(import_module(f".{self.module}", __package__), self.function)
        except ImportError as error:
            raise MissingDependency(f"the suite {self.name} needs {error.name}, which is not installed") from error
        return found(self.name) if self.named else found  # type: ignore[no-any-return]

    def about(self) -> str:
        """Say what it shows."""
        return (inspect.getdoc(self.load()) or "").splitlines()[0]

    def options(self) -> dict[str, Any]:
        """Return its options and their defaults."""
        return {name: one.default for name, one in inspect.signature(self.load()).parameters.items()}

    def runs_on(self, settings: Mapping[str, Any]) -> str:
        """Return where it runs with given settings."""
        return str({"device": self.device, **self.options(), **settings}["device"])

    def check_device(self, settings: Mapping[str, Any]) -> None:
        """Refuse given settings whose device is not here. Suites without an option ``device`` check it themselves.

        Raises:
            DeviceError: It cannot be used.
        """
        if "device" in self.options():
            from ..ops.torch.devices import usable

            usable(self.runs_on(settings), f"{self.name}: device")

    def settings(self, given: dict[str, str]) -> dict[str, Any]:
        """Turn texts into values of the options.

        Raises:
            ArgumentError: There is no such option, or its value cannot be used.
        """
        known, found = self.options(), dict[str, Any]()
        for name, text in given.items():
            if name not in known:
                raise ArgumentError(f"{self.name} has no option {name}. It has {', '.join(known) or 'none'}")
            found[name] = read_option(f"{self.name}: {name}", text, known[name], name in self.zero)
        return found


OPERATOR_SUITES = tuple(dict.fromkeys(name for suites in operator_suites() for name in suites))
_TORCH, _JAX = ("ops", "generate", "models/torch"), ("ops", "generate", "models/jax")
SUITES = {
    suite.name: suite
    for suite in (
        *(Suite(name, "operators_gpu", "operator_suite", named=True, measures=()) for name in OPERATOR_SUITES),
        Suite("cpu", "operators_cpu", "cpu", device="cpu"),
        Suite("fusion-example", "fusion_example", "fusion_example"),
        Suite("granite-layer", "granite_layer", "granite_layer"),
        Suite("training", "training", "training"),
        Suite("ssd-jax", "operators_jax", "ssd_jax", measures=("ops/ssd",)),
        Suite("recurrences", "recurrences", "recurrences"),
        Suite("linear-attention", "linear_attention", "linear_attention"),
        Suite("models", "models", "models", zero=("width",), measures=("ops", "compiler", "integrations")),
        Suite("kernelbench", "kernelbench", "kernelbench"),
        Suite("compile-time", "compile_time", "compile_time", device="cpu"),
        Suite("generation", "generation", "generation", measures=_JAX),
        Suite("generation-cpu", "generation", "generation_cpu", device="cpu", measures=_JAX),
        Suite("decode", "generation_torch", "decode", measures=_TORCH),
        Suite("prefill", "generation_torch", "prefill", measures=_TORCH),
        Suite("generate", "generate", "generate", measures=("ops", "integrations")),
        Suite("portable-ssd", "portable_ssd", "portable_ssd", measures=(*_TORCH, *_JAX)),
        Suite("published", "published", "published"),
        Suite("starts", "starts", "starts", measures=("ops",)),
        Suite("scale", "scale", "scale", measures=("ops",)),
        Suite("scale-models", "scale", "scale_models", measures=_TORCH),
        Suite("generation-torch-cpu", "generation_torch", "generation_torch_cpu", device="cpu", measures=_TORCH),
        Suite("engines", "engines", "engines", measures=("ops", "compat", "engines")),
    )
}


GPU: tuple[tuple[str, dict[str, str]], ...] = (
    *((name, {}) for name in OPERATOR_SUITES),
    ("training", {}), ("granite-layer", {}), ("decode", {}), ("prefill", {}), ("generate", {}),
    ("linear-attention", {}), ("linear-attention", {"grad": "true"}), ("fusion-example", {}), ("engines", {}),
    ("starts", {}), ("portable-ssd", {}), ("published", {}),
    ("scale", {"ranks": "1"}), ("scale-models", {"ranks": "1"}),
    ("models", {"device": "cuda", "dtype": "bfloat16", "width": "0", "tokens": "2048"}),
    ("recurrences", {"device": "cuda"}), ("recurrences", {"device": "cuda", "grad": "true"}),
    ("kernelbench", {"device": "cuda"}), ("ssd-jax", {}), ("generation", {}),
    ("fusion-example", {"layers": "1", "dtype": "float32", "inductor": "true"}),
)  # fmt: skip
"""Everything that is stored of a GPU: suites and options. What takes longest comes last."""


def find(name: str) -> Suite:
    """Return a suite by its name; underscores are as good as hyphens.

    Raises:
        ArgumentError: There is none.
    """
    suite = SUITES.get(name.replace("_", "-"))
    if suite is None:
        raise ArgumentError(f"there is no suite {name!r}. There are {', '.join(SUITES)}, and gpu for all that need one")
    return suite


def choose(names: Iterable[str], given: Mapping[str, str]) -> list[tuple[Suite, dict[str, str]]]:
    """Return suites and their options; the name ``gpu`` stands for all of `GPU`.

    Args:
        names: Names of suites.
        given: Options by name, for all suites; or by ``SUITE.NAME``, for one of them.

    Raises:
        ArgumentError: There is no such suite, or it is not among the names, or it has no such option.
    """
    chosen = [one for name in names for one in (GPU if name == "gpu" else ((name, {}),))]
    found = [(find(name), dict(options)) for name, options in chosen]
    for name, text in given.items():
        owner, dot, option = name.rpartition(".")
        meant = [options for suite, options in found if not dot or suite is find(owner)]
        if not meant:
            raise ArgumentError(f"--set {name}={text}: the suite {owner} is not run")
        for options in meant:
            options[option] = text
    return found


def free_memory() -> None:
    """Give the memory of a GPU back that the suite before kept for itself."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
