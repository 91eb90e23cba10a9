"""The versions and devices of this machine, and which parts of refold it can run."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .engines import COMPARED, REPLACED, RUN
from .engines.doors import version
from .versions import TESTED, is_tested, losses, tested, untested

NONE = "not installed"
PACKAGES = ("refold", "numpy", "torch", "triton", "numba", "jax", "transformers", "opt_einsum")


def examine() -> dict[str, dict[str, str]]:
    """Return versions, devices, usable parts, each with a reason where the answer is no, and what versions cost."""
    versions = {"python": platform.python_version()} | dict.fromkeys(PACKAGES, NONE) | installed(PACKAGES)
    with ThreadPoolExecutor(1) as pool:
        jax = pool.submit(_jax_elsewhere)  # meanwhile this process asks PyTorch
        return {
            "versions": _judged(versions) | {"python": f"{_judged(versions)['python']} on {platform.platform()}"},
            "devices": _devices(),
            "parts": _parts(jax),
            "engines": _engines(),
            "off with these versions": _losses(versions),
        }


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages, as far as they are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _judged(versions: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text
        if text == NONE or name not in TESTED or is_tested(name, text)
        else f"{text} (tested: {tested(name)})"
        for name, text in versions.items()
    }


def _losses(versions: Mapping[str, str]) -> dict[str, str]:
    """List what is off. Tests show that tested releases have all names; with others, each door is opened to see."""
    installed = {name: text for name, text in versions.items() if text != NONE}
    off: list[str] = []
    if "torch" in installed and untested("torch", installed["torch"]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from .compiler import backend as backend
            from .compiler import dynamo
            from .judge.private import OFF
            from .ops.torch import private as private

            dynamo.rewriting_before_autograd()
        off = [f"refold verify: {text}" for text in OFF]
    found = [*losses(installed.items()), *off]
    return {str(number): text for number, text in enumerate(found, 1)} or {"nothing": ""}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _missing(*packages: str, extra: str = "") -> str:
    """Say which package is not installed, and how to get it; nothing if all are."""
    found = (f"no: {name} is not installed (pip install 'refold[{extra or name}]')" for name in packages
             if not _installed(name))  # fmt: skip
    return next(found, "")


def _cuda() -> Any:
    """Return ``torch.cuda`` where a GPU may be; else None, for to import PyTorch takes longer than all the rest."""
    drivers = map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
    if not _installed("torch") or (sys.platform == "linux" and not any(drivers)):
        return None
    import torch

    return torch.cuda


def _devices() -> dict[str, str]:
    found = {"cpu": f"{os.cpu_count()} cores"}
    cuda = _cuda()
    for index in range(cuda.device_count() if cuda else 0):
        properties = cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        found[f"cuda:{index}"] = f"{properties.name}, {memory:.0f} GiB, sm_{properties.major}{properties.minor}"
    if len(found) == 1 and (spec := importlib.util.find_spec("torch")):
        built = runpy.run_path(str(Path(spec.origin or "").with_name("version.py")))
        found["cuda"] = "none: " + (
            "no NVIDIA or AMD GPU is visible" if built.get("cuda") or built.get("hip") else "CPU build of torch"
        )
    return found


def _parts(jax: Future[str]) -> dict[str, str]:
    return {
        "compiler": _compiler(),
        "triton": _triton(),
        "numba": _numba(),
        "jax": jax.result(),
        "transformers": _missing("transformers", extra="hf") or "yes: refold.accelerate(model)",
    }


def _engines() -> dict[str, str]:
    found = {}
    for name, compared in COMPARED.items():
        if (installed := version(name)) is None:
            found[name] = NONE
            continue
        known = "signatures compared" if installed in compared else f"not compared; {', '.join(compared)} were"
        found[name] = f"{installed} ({known}; {RUN.get(name, 'no test runs it')}): {REPLACED[name]}"
    return found


def _compiler() -> str:
    if missing := _missing("torch"):
        return missing
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        return "GPU only: Inductor needs a C++ compiler for the CPU, and neither g++ nor clang++ is on the PATH"
    return 'yes: torch.compile(..., backend="refold")'


def _triton() -> str:
    if missing := _missing("torch", "triton"):
        return missing
    if (cuda := _cuda()) and cuda.is_available():
        if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
            return "no: Triton needs a C compiler, and neither gcc nor clang is on the PATH"
        return "yes"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted on the CPU, for tests (TRITON_INTERPRET=1)"
    return "no: no GPU; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly"


def _numba() -> str:
    if missing := _missing("torch", "numba"):
        return missing + ("; the torch backend runs the scans instead" if _installed("torch") else "")
    from .ops.spec import all_specs

    files = [(spec.name, importlib.util.find_spec(f"{spec.module}._numba")) for spec in all_specs()]
    names = [name for name, file in files if file and f"\ndef {name}(" in Path(file.origin or "").read_text()]
    return f"yes: {', '.join(names)} on the CPU"


def _jax_elsewhere() -> str:
    """Ask another process about JAX, which is as long to import as torch; this one, if none can be started."""
    if not _installed("jax"):
        return _jax()
    code = "from refold import doctor; print(doctor._jax())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.splitlines()[-1]
    except (OSError, subprocess.SubprocessError, IndexError):
        return _jax()


def _jax() -> str:
    if missing := _missing("jax"):
        return missing
    import jax

    return "yes: " + ", ".join(f"{device.device_kind} ({device.platform}:{device.id})" for device in jax.devices())
