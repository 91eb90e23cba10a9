"""The plugin for vLLM (`vllm.general_plugins`).

The gated delta rule has an official registry, that of custom ops. The table of backends of the state update is not
public. The two scans are functions that a layer's module imports by name; they are replaced there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from refold.engines import doors

ENGINE, SWITCH = "vllm", "REFOLD_VLLM"
LAYERS = "vllm.model_executor.layers.mamba"
PARTS = {
    "ssd": ("mamba_mixer2", "mamba_chunk_scan_combined_varlen", "chunk_scan_varlen"),
    "selective_scan": ("mamba_mixer", "selective_scan_fn", "selective_scan_varlen"),
    "state_update": ("ops.ssu_dispatch", "TritonSSUBackend.__call__", "state_update"),
    "gated_delta_rule": ("gdn.qwen_gdn_linear_attn", "ChunkGatedDeltaRule.forward_cuda", "gated_delta_prefill"),
}
"""By part: the module below LAYERS, what it has, and the adapter in its place."""


def register() -> None:
    """Put the parts that REFOLD_VLLM asks for into vLLM, and log each; again, nothing. Nothing, too, without vLLM."""
    wanted = doors.switched(SWITCH, os.environ.get(SWITCH), PARTS)
    if not wanted or importlib.util.find_spec(ENGINE) is None:
        return
    from refold.engines import adapters

    log, version = doors.log(ENGINE), doors.version(ENGINE)
    for part in wanted:
        name, path, adapter = PARTS[part]
        ours: Callable[..., Any] = getattr(adapters, adapter)
        try:
            module = importlib.import_module(f"{LAYERS}.{name}")
            theirs: Any = functools.reduce(getattr, path.split("."), module)
            if isinstance(theirs, functools.partial) and theirs.func is doors.either:
                continue
            why = doors.differs(theirs, ours)
            new = why is None and _replace(part, module, path, functools.partial(doors.either, ENGINE, part, ours))
        except Exception as error:  # another version: vLLM goes on with its own kernel
            why, new = f"{type(error).__name__}: {error}", False
        if why is not None:
            log.warning("refold: %s of vllm %s is kept: %s", path, version, why)
        elif new:
            log.info("refold: %s of vllm %s is replaced by refold.engines.adapters.%s", path, version, adapter)


def _replace(part: str, module: Any, path: str, either: functools.partial[Any]) -> bool:
    """Put an adapter in its place; ``either(theirs, *args)`` calls it. Return whether it was not there before."""
    if part == "state_update":
        return _update_backends(module, either)
    if part == "gated_delta_rule":
        return _custom_op(module, either)
    setattr(module, path, functools.partial(either, getattr(module, path)))
    return True


def _update_backends(module: Any, either: Callable[..., Any]) -> bool:
    backends = module._BACKEND_REGISTRY
    ours = [key for key in backends if getattr(key, "name", key) in ("TRITON", "CPU", "triton", "cpu")]
    if not ours:
        raise KeyError(f"the table of backends has no TRITON; it has {', '.join(map(str, backends))}")
    new = [key for key in ours if not hasattr(backends[key], "refold_ours")]
    for key in new:
        backends[key] = _update_backend(backends[key], either)
    return bool(new)


def _update_backend(base: type, either: Callable[..., Any]) -> type:
    class RefoldSSUBackend(base):  # type: ignore[misc]
        refold_ours = True

        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            self.refold_kernel = functools.partial(either, super().__call__)
            config = next(iter((*args, *kw.values())), None)
            if getattr(config, "enable_stochastic_rounding", True):
                doors.kept(ENGINE, "state_update", "states are rounded at random, or that is not known")
                self.refold_kernel = super().__call__

        @property
        def name(self) -> str:
            return "refold"

        def __call__(self, *args: Any, **kw: Any) -> None:
            return self.refold_kernel(*args, **kw)

    return RefoldSSUBackend


def _custom_op(module: Any, either: functools.partial[Any]) -> bool:
    ops = importlib.import_module("vllm.model_executor.custom_op")
    name = module.ChunkGatedDeltaRule.__name__
    if (there := ops.op_registry_oot.get(name)) is not None:
        if hasattr(there, "refold_ours"):
            return False
        raise KeyError(f"{there.__module__} has replaced it before")

    class RefoldChunkGatedDeltaRule(module.ChunkGatedDeltaRule):  # type: ignore[misc]
        refold_ours = True

        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)  # chooses the kernel that runs what the adapter does not compute
            theirs = getattr(self, "_forward_method", None)
            why = "there is no _forward_method" if theirs is None else doors.differs(theirs, either.args[-1])
            if why is None:
                self._forward_method = functools.partial(either, theirs)
            else:
                doors.kept(ENGINE, "gated_delta_rule", why)

    ops.CustomOp.register_oot(name=name)(RefoldChunkGatedDeltaRule)
    return True
