"""Turn a command-line target into a module and its inputs.

A target is a Python file in the KernelBench convention (``Model``, ``get_inputs()``,
``get_init_inputs()``), or ``package.module:factory`` where the factory returns ``(module, inputs)``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import torch

from .errors import DeviceError, TargetError
from .ops.torch.devices import usable

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}

# Where frames of a traceback are not the user's: this package, PyTorch and what is installed beside it, Python itself.
_LIBRARIES = (str(Path(__file__).parent), str(Path(torch.__file__).parents[1]), sysconfig.get_path("stdlib"), "<")


def load(target: str, *, device: str, dtype: str, seed: int) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Load a target, seeded, on a device, in a dtype.

    Args:
        target: See the module's docstring.
        device: A torch device.
        dtype: ``float32``, ``float16``, ``bfloat16`` or ``float64``; floating-point inputs,
            parameters and buffers are cast to it.
        seed: Seeds parameters and inputs.

    Returns:
        The module in evaluation mode, and its positional inputs.

    Raises:
        TargetError: The target, the device or the dtype cannot be used; says why.
    """
    if dtype not in DTYPES:
        raise TargetError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if not 0 <= seed < 2**64:
        raise TargetError(f"--seed must be between 0 and 2**64 - 1, not {seed}")
    try:
        where = usable(device, "--device")
    except DeviceError as error:
        raise TargetError(str(error)) from error
    torch.manual_seed(seed)
    module, inputs = _from_factory(target) if ":" in target else _from_file(target)
    if not isinstance(module, torch.nn.Module):
        raise TargetError(f"{target} gives a {type(module).__name__} where a torch.nn.Module is expected")
    if not isinstance(inputs, (list, tuple)) or not inputs:
        raise TargetError(f"{target} must give a non-empty list or tuple of inputs, not {inputs!r:.80}")
    return module.to(where, DTYPES[dtype]).eval(), tuple(_place(x, where, DTYPES[dtype]) for x in inputs)


def _place(x: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(device, dtype if x.is_floating_point() else None)


def import_file(path: Path) -> Any:
    """Import a Python file as a module that no package and no other file shares its name with.

    Raises:
        TargetError: It is no Python file, or importing it raises something.
    """
    name = f"{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _run(str(path), "importing it", spec.loader.exec_module, module)
    return module


def _from_file(target: str) -> tuple[Any, Any]:
    path = Path(target)
    if path.is_dir():
        raise TargetError(f"{target} is a directory; name a Python file, or package.module:factory")
    if path.suffix != ".py":
        raise TargetError(f"{target or repr(target)} is neither a Python file nor package.module:factory")
    if not path.is_file():
        raise TargetError(f"{target} does not exist")
    sys.path.insert(0, str(path.parent.resolve()))  # as for ``python layer.py``, for all that the file imports
    source = import_file(path)
    missing = [name for name in ("Model", "get_inputs") if not hasattr(source, name)]
    if missing:
        raise TargetError(
            f"{target} does not define {' or '.join(missing)}; a file needs a class Model and a function get_inputs()"
        )
    arguments = _run(target, "get_init_inputs()", getattr(source, "get_init_inputs", list))
    if isinstance(arguments, dict):
        module = _run(target, "Model(...)", source.Model, **arguments)
    else:
        module = _run(target, "Model(...)", source.Model, *arguments)
    return module, _run(target, "get_inputs()", source.get_inputs)


def _from_factory(target: str) -> tuple[Any, Any]:
    name, _, factory = target.partition(":")
    if not name or name.startswith(".") or "/" in name or name.endswith(".py"):
        raise TargetError(f"{target}: {name!r} is no module; give package.module:factory, or a Python file alone")
    sys.path.insert(0, "")
    try:
        source = importlib.import_module(name)
    except ImportError as error:
        raise TargetError(f"{target}: module {name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise TargetError(f"{target}: importing {name} raised {_said(error)}") from error
    finally:
        sys.path.remove("")
    if not callable(getattr(source, factory, None)):
        raise TargetError(f"{target}: module {name} has no function {factory!r}")
    made = _run(target, f"{factory}()", getattr(source, factory))
    if not isinstance(made, tuple) or len(made) != 2:
        raise TargetError(f"{target}: {factory}() must return (module, inputs), not {made!r:.80}")
    return made


def check_runs(target: str, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    """Run a target's module once as it is: what fails then is not the compiler's fault, which would log at length.

    Raises:
        TargetError: It fails.
    """
    _run(target, "forward", module, *inputs)


def _run(target: str, what: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the user's code; whatever it raises becomes one sentence."""
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:  # a script that ends by sys.exit() has no layer to return
        raise TargetError(f"{target}: {what} raised {_said(error)}") from error


def _said(error: BaseException) -> str:
    """Return an exception as a part of a sentence, with the last line of the user's own code that led to it."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    at = f" ({own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split(chr(10) * 2)[0].split())}{at}"
