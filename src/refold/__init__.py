"""refold: a backend of ``torch.compile`` and operators for recurrent sequence layers.

Names are resolved on first use, so that ``import refold`` imports neither torch nor jax.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> (module, attribute); None means the module itself.
_EXPORTS: dict[str, tuple[str, str | None]] = {
    "errors": ("refold.errors", None),
    "ops": ("refold.ops", None),
    "compile": ("refold.compiler.backend", "compile"),
    "accelerate": ("refold.integrations.transformers", "accelerate"),
    "explain": ("refold.compiler.backend", "explain"),
}

_WITHOUT_TORCH = ("errors", "ops")


def _has_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except ImportError:  # something in this process keeps it out
        return False


# What ``from refold import *`` can give here.
__all__ = ["__version__", *(name for name in _EXPORTS if name in _WITHOUT_TORCH or _has_torch())]


if TYPE_CHECKING:  # what type checkers read; a test compares it with _EXPORTS
    from refold import errors as errors
    from refold import ops as ops
    from refold.compiler.engine import compile as compile
    from refold.compiler.engine import explain as explain
    from refold.integrations.transformers import accelerate as accelerate
else:

    def __getattr__(name: str) -> Any:
        """Import the module that holds a public name when it is first asked for (PEP 562)."""
        if name not in _EXPORTS:
            raise AttributeError(f"module 'refold' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
        module, attribute = _EXPORTS[name]
        try:
            value = import_module(module)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "torch":
                raise
            from refold.errors import MissingDependency

            raise MissingDependency(
                f"refold.{name} needs PyTorch, which is not installed (pip install 'refold[torch]')."
            ) from error
        return value if attribute is None else getattr(value, attribute)


def __dir__() -> list[str]:
    return sorted(["__version__", *_EXPORTS])
