"""The plugin for SGLang, in a fake package that has the recorded signatures, registries and keys."""

import importlib
import logging
import tomllib
from pathlib import Path

import pytest
import torch

from refold.engines import adapters, sglang
from refold.errors import BackendUnsupported
from support.engines import recorded

HOOKS = """
import enum, functools, pkgutil
class HookType(enum.Enum):
    AFTER, AROUND = "after", "around"
class HookRegistry:
    hooks = []
    @classmethod
    def register({}):
        cls.hooks.append((target, hook, hook_type))
    @classmethod
    def apply(cls):
        for target, hook, kind in cls.hooks:
            assert kind is HookType.AROUND
            owner, name = target.rsplit(".", 1)
            owner, original = pkgutil.resolve_name(owner), pkgutil.resolve_name(target)
            setattr(owner, name, lambda *args, original=original, hook=hook, **kw: hook(original, *args, **kw))
"""
KERNEL = """
class TritonGDNKernel:
    supports_packed_decode = True
    def decode({}):
        return "engine"
    def extend({}):
        return "engine", None, "states"
"""
DISPATCHER = """
import enum
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
class Backend(enum.Enum):
    TRITON, CUSTOM = "triton", "custom"
    def is_custom(self):
        return self is Backend.CUSTOM
class GDNKernelDispatcher:
    def __init__({}):
        if decode_backend.is_custom() or prefill_backend.is_custom():
            raise ValueError("Unsupported GDN backend")
        self.decode_kernel = self.extend_kernel = self.verify_kernel = TritonGDNKernel()
        self.supports_packed_decode = True
"""
CONTEXT = """
from types import SimpleNamespace
mamba = SimpleNamespace(linear_attn_backend="refold", linear_attn_decode_backend=None, linear_attn_prefill_backend=None)
def get_exec():
    return SimpleNamespace(mamba=mamba)
"""
CHOICES = """
LINEAR_ATTN_KERNEL_BACKEND_CHOICES = ["triton"]
add_linear_attn_kernel_backend_choices = LINEAR_ATTN_KERNEL_BACKEND_CHOICES.extend
"""


@pytest.fixture
def install(engine):
    def write(version="0.5.23", more=""):
        of = {place.split(":")[1]: parameters for place, parameters in recorded("sglang", "0.5.23").items()}
        decode = of["TritonGDNKernel.decode"].replace(", **kwargs", f"{more}, **kwargs")
        dispatcher, register = of["GDNKernelDispatcher.__init__"], of["HookRegistry.register"]
        modules = {
            "sglang.srt.plugins.hook_registry": HOOKS.replace("def register({})", f"def register({register})"),
            sglang.KERNELS: KERNEL.format(decode, of["TritonGDNKernel.extend"]),
            "sglang.srt.layers.attention.linear.gdn_backend": DISPATCHER.format(dispatcher),
            "sglang.srt.runtime_context": CONTEXT,
            "sglang.srt.arg_groups.choices": CHOICES,
        }
        engine("sglang", version, modules)

    return write


def module(name):
    return importlib.import_module(f"sglang.srt.{name}")


def dispatcher(decode="CUSTOM", prefill="CUSTOM"):
    module("plugins.hook_registry").HookRegistry.apply()
    backend = module("layers.attention.linear.gdn_backend")
    return backend.GDNKernelDispatcher(backend.Backend[decode], backend.Backend[prefill])


def test_the_project_has_the_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"refold": "refold.engines.sglang:register"}


def test_the_name_is_a_choice_once_and_its_kernel_is_a_kernel_of_sglang(install, caplog):
    install()
    with caplog.at_level(logging.INFO, "sglang.refold"):
        sglang.register()
        sglang.register()
        found = dispatcher()
    assert module("arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES == ["triton", "refold"]
    assert len(module("plugins.hook_registry").HookRegistry.hooks) == 1
    base = type(found.verify_kernel)
    assert issubclass(type(found.decode_kernel), base)
    assert type(found.decode_kernel) is not base
    assert found.extend_kernel is found.decode_kernel
    assert not found.supports_packed_decode
    assert [record.getMessage().split(" ")[1] for record in caplog.records] == ["sglang", "decode", "extend"]


def test_other_backends_stay_as_they_are(install):
    install()
    sglang.register()
    module("runtime_context").mamba.linear_attn_backend = "other"
    with pytest.raises(ValueError, match="Unsupported GDN backend"):
        dispatcher()


def test_one_phase_alone_may_ask_for_refold(install):
    install()
    sglang.register()
    mamba = module("runtime_context").mamba
    mamba.linear_attn_backend, mamba.linear_attn_prefill_backend = "triton", "refold"
    found = dispatcher("TRITON")
    assert found.decode_kernel is found.verify_kernel is not found.extend_kernel
    assert found.supports_packed_decode


def test_a_new_parameter_fails_loudly(install):
    install(more=", surprise=None")
    sglang.register()
    with pytest.raises(BackendUnsupported, match=r"decode of sglang 0\.5\.23 has unknown parameters surprise"):
        dispatcher()


def test_a_version_without_the_registry_is_said(install, caplog):
    install()
    del module("arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    sglang.register()
    assert "there is no backend refold in sglang 0.5.23" in caplog.text


def test_calls_reach_the_adapter_or_stay(install, monkeypatch):
    install()
    sglang.register()
    found, seen = dispatcher().extend_kernel, []
    monkeypatch.setattr(adapters, "gated_delta_extend", lambda q, k, v, g, beta, *, ssm_states: seen.append(q) or v)
    states = {"ssm_states": 6, "cache_indices": None, "query_start_loc": None}
    o, final, inside = found.extend(1, 2, 3, 4, 5, **states, layer_id=7, track_state=None)
    assert (o, final, seen) == (3, None, [1])
    with pytest.raises(BackendUnsupported, match="--linear-attn-prefill-backend triton"):
        inside.squeeze(0)
    assert found.extend(1, 2, 3, 4, 5, **states, track_state=torch.zeros(1)) == ("engine", None, "states")
