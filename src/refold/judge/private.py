"""Names of PyTorch that are not its public interface, as far as the process of a trial uses them.

That process does not import refold, so it loads this file by its path (`worker`). Each name is looked up once. Without
one, a check sees less: `OFF` says what, and the judge notes it in its verdict. Whether results are right is decided
without any of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

_TORCHS = ("/Meta", "/FuncTorchBatched", "/FuncTorchBatchedDecomposition")  # which torch gives later itself

# Functions of torch's core that tell a switch.
_TELLS = re.compile(r"_?(jit_)?((get|is|are)_\w+|\w+_enabled)")
_LONGEST = 200  # what it tells, as text

SWITCHES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "hooks of saved tensors": ("_C._autograd._top_saved_tensors_default_hooks", lambda top: top(False) is not None),
    "function modes": ("_C._len_torch_function_stack", lambda count: count()),
    "dispatch modes": ("_C._len_torch_dispatch_stack", lambda count: count()),
    "how tensors are printed": ("_tensor_str.PRINT_OPTS", lambda options: str(vars(options))),
    "hooks of all modules": ("nn.modules.module._global_forward_hooks", lambda _: _hooks("nn.modules.module")),
    "hooks of all optimizers": ("optim.optimizer._global_optimizer_pre_hooks", lambda _: _hooks("optim.optimizer")),
    "operations of torch that were given another implementation": (
        "library._impls",
        lambda names: sorted(name for name in names if name.startswith("aten/") and not name.endswith(_TORCHS)),
    ),
    "levels of forward mode": ("autograd.forward_ad", lambda module: vars(module).get("_current_level")),
    "fusion of torch.jit": ("_C._jit_set_fusion_strategy", lambda change: [old := change([]), change(old)][0]),
}
"""Global switches: which name of torch tells each, and how."""

COSTS = {name: f"S4 does not see {what}" for what, (name, _) in SWITCHES.items()} | {
    "nn.Module._forward_hooks": "S8 does not count hooks of modules",
    "Tensor._backward_hooks": "S1 and S8 do not count hooks of tensors",
    "Tensor._version": "S1 does not see that an input was changed and changed back",
    "compiler._is_compiling_flag": "C6 does not try what is done while torch compiles",
    "jit._state": "C7 does not see what torch.jit.script compiles",
    "utils._config_module.ConfigModule.get_config_copy": "S4 does not see settings of torch's compiler",
    "utils._python_dispatch.TorchDispatchMode": "sums are not counted, so bounds are those of short ones",
}
"""What is off without a name of torch."""

OFF: list[str] = []
"""What is off with this PyTorch."""


def _find(name: str, default: Any = None) -> Any:
    """Look a name up; of a class whose instances have it, in one of them."""
    path = name.replace("nn.Module.", "")
    module, _, last = name.rpartition(".")
    try:
        if f"torch.{module}" in sys.modules:  # not each is an attribute of torch
            return getattr(sys.modules[f"torch.{module}"], last)
        return operator.attrgetter(path)(torch if path == name else torch.nn.Module())
    except AttributeError:
        OFF.append(f"{COSTS[name]} (PyTorch {torch.__version__} has no torch.{name})")
        return default


@functools.cache
def _switches() -> list[str]:
    """List the functions of torch's core that tell a switch, and need no argument.

    None is what warns that it is old, what is empty or zero at first, as what counts, and what is long, as a table.
    """
    found = []
    for name in filter(_TELLS.fullmatch, dir(torch._C)):
        with contextlib.suppress(Exception), warnings.catch_warnings(action="error"):
            value = getattr(torch._C, name)()
            found += [name] if (value or value is False) and len(str(value)) <= _LONGEST else []
    return found


_told = {what: (_find(name), tell) for what, (name, tell) in SWITCHES.items()}
_module_hooks = _find("nn.Module._forward_hooks")
_tensor_hooks = _find("Tensor._backward_hooks")
_version = _find("Tensor._version")
_compiler: Any = SimpleNamespace() if _find("compiler._is_compiling_flag") is None else torch.compiler
_script = _find("jit._state")
_config = _find("utils._config_module.ConfigModule.get_config_copy")
DispatchMode: Any = _find("utils._python_dispatch.TorchDispatchMode", contextlib.nullcontext)
"""A class whose instances, as context managers, see each operation."""


def settings() -> dict[str, Any]:
    """Return the global switches that have no public name; those of `OFF` never change."""
    found = {what: value is not None and tell(value) for what, (value, tell) in _told.items()}
    for name in _switches():
        with contextlib.suppress(RuntimeError):  # as of one that was set by two names
            found[f"torch._C.{name}"] = getattr(torch._C, name)()
    # Looking them up would import Dynamo, which takes seconds.
    for name in ("_dynamo", "_inductor", "_functorch"):
        config = sys.modules.get(f"torch.{name}.config")
        found[f"settings of torch.{name}"] = {} if config is None or _config is None else _changed(config)
    return found


def _changed(config: Any) -> dict[str, Any]:
    """Return settings of a part of torch's compiler that are not those that it begins with."""
    begun = getattr(config, "_config", {})
    return {n: v for n, v in _config(config).items() if n in begun and v != getattr(begun[n], "default", v)}


def _hooks(module: str) -> int:
    names = vars(sys.modules[f"torch.{module}"])
    return sum(len(hooks) for name, hooks in names.items() if name.startswith("_global") and isinstance(hooks, dict))


def count_hooks(module: torch.nn.Module) -> list[int]:
    """Return how many hooks of each kind a module has itself."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [] if _module_hooks is None else [len(getattr(module, kind, ())) for kind in kinds]


def tensor_hooks(t: torch.Tensor) -> list[int]:
    """Return how many hooks of each kind a tensor has."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [] if _tensor_hooks is None else [len(getattr(t, kind, None) or ()) for kind in kinds]


def version(t: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; of inference tensors nobody counts it."""
    return 0 if _version is None or t.is_inference() else int(t._version)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let programs see what they see while torch compiles or exports them."""
    _compiler._is_compiling_flag = True
    try:
        yield
    finally:
        _compiler._is_compiling_flag = False


def warm_compiler() -> None:
    """Import torch's compiler, and let it find out once which instructions this processor has."""
    with contextlib.suppress(Exception):  # where it cannot, or has other names, each process does so by itself
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list()


def move_compiler() -> None:
    """Let torch's compiler, if it was imported, keep what it compiles in the folder of this process."""
    where: Any
    paths: Any
    where, paths = (sys.modules.get(f"torch._inductor.{name}") for name in ("codecache", "runtime.cache_dir_utils"))
    if hasattr(where, "_HEADER_DIR") and paths is not None:
        where._HEADER_DIR = os.path.join(paths.default_cache_dir(), "precompiled_headers")
        where._HEADER_LOCK_DIR = os.path.join(where._HEADER_DIR, "locks")


def run_eagerly() -> None:
    """Let torch compile nothing, so that all that a program does is Python's."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if _script is not None:
        _script.disable()
