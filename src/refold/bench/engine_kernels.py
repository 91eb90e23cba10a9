"""The Triton kernels of vLLM and SGLang, from the files of a checkout or an unpacked wheel, without the engines.

Packages of an engine are entered without running their ``__init__``. What the kernels' files import of the rest of the
engine is listed here, with substitutes that answer as the engine does on an NVIDIA GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import ArgumentError
from ..ops.timed import set_aside

Kernels = dict[str, Callable[..., Any]]
KERNELS = {
    "vllm": {
        "chunk_scan": ("model_executor.layers.mamba.ops.ssd_combined", "mamba_chunk_scan_combined_varlen"),
        "state_update": ("model_executor.layers.mamba.ops.mamba_ssm", "selective_state_update"),
        "gated_delta": ("third_party.flash_linear_attention.ops.chunk", "chunk_gated_delta_rule"),
        "gated_delta_update": (
            "third_party.flash_linear_attention.ops.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update"
        ),
    },
    "sglang": {
        "chunk_scan": ("kernels.ops.mamba.triton_ops.ssd_combined", "mamba_chunk_scan_combined"),
        "state_update": ("kernels.ops.mamba.triton_ops.mamba_ssm", "selective_state_update"),
        "gated_delta": ("kernels.ops.attention.fla.chunk", "chunk_gated_delta_rule"),
        "gated_delta_update": (
            "kernels.ops.attention.linear.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"
        ),
        "kimi_delta": ("kernels.ops.attention.fla.kda", "chunk_kda"),
    },
}  # fmt: skip
"""By engine and kernel: the module below the engine's package, and the function."""


class _Quiet:
    """A logger of vLLM, whose messages are not wanted."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kw: None


class _Platform:
    """vLLM's word for an NVIDIA GPU."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kw: name in ("is_cuda", "is_cuda_alike")

    def is_device_capability(self, number: int) -> bool:
        return _capability() == number


def _capability() -> int:
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _no() -> bool:
    return False


def _substitutes(engine: str) -> dict[str, dict[str, Any]]:
    """Return by module what the kernels' files import from it."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    if engine == "vllm":
        device = torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"
        return {
            "vllm.triton_utils": {"HAS_TRITON": True, "triton": triton, "tl": tl, "tldevice": libdevice},
            "vllm.platforms": {"current_platform": _Platform()},
            "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
            "vllm._custom_ops": {},
            "vllm.logger": {"init_logger": lambda name: _Quiet()},
            "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda: device},
            "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
            "vllm.utils.torch_utils": {"async_tensor_h2d": lambda data, device, dtype: data.to(device, dtype)},
            "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
        }
    on_cuda, release = torch.cuda.is_available, tuple(int(part) for part in torch.__version__.split(".")[:2])
    return {
        "sglang.kernels.jit.utils": {
            "is_arch_support_pdl": lambda: _capability() >= 90, "get_jit_cuda_arch": _capability,
        },
        "sglang.srt.utils": {
            "is_cuda": on_cuda, "get_device_sm": _capability, "is_sm90_supported": lambda: _capability() == 90,
            **dict.fromkeys(("is_hip", "is_npu", "is_cpu", "is_xpu", "is_gfx95_supported", "cpu_has_amx_support"), _no),
            "cdiv": triton.cdiv, "next_power_of_2": triton.next_power_of_2,
        },
        "sglang.srt.utils.common": {"torch_release": release},
    }  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of an engine below a folder: substitutes, packages without their code, and files."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.folder, self.substitutes = engine, folder, _substitutes(engine)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != self.engine:
            return None
        file = self.folder.joinpath(*fullname.split("."))
        inner = any(name.startswith(f"{fullname}.") for name in self.substitutes)
        if fullname in self.substitutes or file.is_dir() or inner:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        file = file.with_suffix(".py")
        return importlib.util.spec_from_file_location(fullname, file) if file.is_file() else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.substitutes.get(module.__name__, {}))


@contextlib.contextmanager
def _alone(engine: str, finder: _Finder) -> Iterator[None]:
    """Hide an installed engine while its kernels are imported from elsewhere."""
    with set_aside(engine):
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


def kernels(engine: str, folder: str) -> Kernels:
    """Import the kernels of an engine from a folder that has its package.

    Raises:
        ArgumentError: One cannot be imported.
    """
    found: Kernels = {}
    with _alone(engine, _Finder(engine, Path(folder))):
        for kernel, (module, name) in KERNELS[engine].items():
            try:
                found[kernel] = getattr(importlib.import_module(f"{engine}.{module}"), name)
            except (ImportError, AttributeError) as error:
                raise ArgumentError(
                    f"{folder} has no {engine}.{module}.{name} that can be imported: {error}"
                ) from error
    return found


def version(engine: str, folder: str) -> str:
    """Return the version of an engine in a folder, where pip's folder of its metadata lies beside it."""
    names = sorted(path.stem for path in Path(folder).glob(f"{engine}*.dist-info"))
    return names[0].partition("-")[2] if names else "unknown"
