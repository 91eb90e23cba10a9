"""The plugin for SGLang, in a fake package that has the recorded signatures, registries and keys."""

import importlib
import logging
import tomllib
from pathlib import Path

import pytest
import torch

from refold.engines import adapters, doors, sglang
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
            @functools.wraps(original)
            def wrapper(*args, original=original, hook=hook, **kw):
                return hook(original, *args, **kw)
            setattr(owner, name, wrapper)
"""
KERNEL = """
class {name}:
    supports_packed_decode = True
    def decode({decode}):
        return "engine"
    def extend({extend}):
        return "engine"
"""
DISPATCHER = """
import enum
from sglang.srt.layers.attention.linear.kernels.{module} import {kernel}
class Backend(enum.Enum):
    TRITON, CUSTOM = "triton", "custom"
    def is_custom(self):
        return self is Backend.CUSTOM
class {name}:
    def __init__({parameters}):
        if Backend.CUSTOM in (decode_backend, prefill_backend):
            raise ValueError("Unsupported backend")
        self.decode_kernel = self.extend_kernel = self.verify_kernel = {kernel}()
        self.supports_packed_decode = True
"""
CONTEXT = """
from types import SimpleNamespace
mamba = SimpleNamespace(linear_attn_backend="refold", linear_attn_decode_backend=None, linear_attn_prefill_backend=None,
    enable_mamba_extra_buffer=False)
def get_exec():
    return SimpleNamespace(mamba=mamba)
"""
CHOICES = """
LINEAR_ATTN_KERNEL_BACKEND_CHOICES = ["triton"]
add_linear_attn_kernel_backend_choices = LINEAR_ATTN_KERNEL_BACKEND_CHOICES.extend
"""
SCAN = 'inf = float("inf")\ndef mamba_chunk_scan_combined({}):\n    return "engine"\n'
UPDATE = """
class TritonSSUBackend:
    _enable_stochastic_rounding = False
    def __call__({}):
        return "engine"
"""
LAYERS = "sglang.srt.layers.attention"
FAMILIES = {"gdn": ("TritonGDNKernel", "GDNKernelDispatcher"), "kda": ("TritonKDAKernel", "KDAKernelDispatcher")}


@pytest.fixture
def install(engine):
    """Write SGLang; parameters of a place may be changed, and names in its sources."""

    def write(version="0.5.23", changed=(), renamed=()):
        of = {place.split(":")[1]: parameters for place, parameters in recorded("sglang", "0.5.23").items()}
        of |= {name: of[name].replace(", **kwargs", "") + more for name, more in dict(changed).items()}
        register = of["HookRegistry.register"]
        modules = {
            "sglang.srt.plugins.hook_registry": HOOKS.replace("def register({})", f"def register({register})"),
            "sglang.srt.runtime_context": CONTEXT,
            "sglang.srt.arg_groups.choices": CHOICES,
            f"{LAYERS}.mamba.mamba": SCAN.format(of["mamba_chunk_scan_combined"]),
            "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch": UPDATE.format(of["TritonSSUBackend.__call__"]),
        }
        for family, (kernel, dispatcher) in FAMILIES.items():
            methods = {phase: of[f"{kernel}.{phase}"] for phase in sglang.PHASES}
            modules[f"{LAYERS}.linear.kernels.{family}_triton"] = KERNEL.format(name=kernel, **methods)
            modules[f"{LAYERS}.linear.{family}_backend"] = DISPATCHER.format(
                module=f"{family}_triton", kernel=kernel, name=dispatcher, parameters=of[f"{dispatcher}.__init__"]
            )
        for old, new in dict(renamed).items():
            modules = {name: source.replace(old, new) for name, source in modules.items()}
        engine("sglang", version, modules)
        for cached in (doors.kept, sglang._said, sglang._mamba_differs):
            cached.cache_clear()

    return write


def module(name):
    return importlib.import_module(f"sglang.{name}")


def hooked():
    sglang.register()
    module("srt.plugins.hook_registry").HookRegistry.apply()
    return module("srt.runtime_context").mamba


def dispatcher(family, decode="CUSTOM", prefill="CUSTOM"):
    backend = module(f"srt.layers.attention.linear.{family}_backend")
    rest = (backend.Backend.TRITON,) if family == "kda" else ()
    return getattr(backend, FAMILIES[family][1])(backend.Backend[decode], backend.Backend[prefill], *rest)


def scan(**more):
    given = dict.fromkeys(("x", "dt", "A", "B", "C", "chunk_size"), 1)
    return module("srt.layers.attention.mamba.mamba").mamba_chunk_scan_combined(**given, **more)


def update(**more):
    backend = module("kernels.ops.mamba.triton_ops.ssu_dispatch").TritonSSUBackend()
    return backend(*range(6), **more)


def test_the_project_has_the_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"refold": "refold.engines.sglang:register"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_name_is_a_choice_once_and_its_kernel_is_a_kernel_of_sglang(install, caplog, family):
    install()
    with caplog.at_level(logging.INFO, "sglang.refold"):
        sglang.register()
        hooked()
        found = dispatcher(family)
    assert module("srt.arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES == ["triton", "refold"]
    assert len(module("srt.plugins.hook_registry").HookRegistry.hooks) == len(sglang.DOORS) + len(sglang.MAMBA)
    base = type(found.verify_kernel)
    assert issubclass(type(found.decode_kernel), base)
    assert type(found.decode_kernel) is not base
    assert found.extend_kernel is found.decode_kernel
    assert not found.supports_packed_decode
    assert [record.getMessage().split(" ")[1] for record in caplog.records] == ["sglang", "decode", "extend"]


@pytest.mark.parametrize("family", FAMILIES)
def test_other_backends_stay_as_they_are(install, family):
    install()
    hooked().linear_attn_backend = "other"
    with pytest.raises(ValueError, match="Unsupported backend"):
        dispatcher(family)
    found = dispatcher(family, "TRITON", "TRITON")
    assert found.decode_kernel is found.extend_kernel is found.verify_kernel
    assert scan() == update() == "engine"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_phase_alone_may_ask_for_refold(install, monkeypatch, family):
    install()
    monkeypatch.setattr(adapters, "slot_update", lambda *args: "refold")
    mamba = hooked()
    mamba.linear_attn_backend, mamba.linear_attn_prefill_backend = "triton", "refold"
    found = dispatcher(family, "TRITON")
    assert found.decode_kernel is found.verify_kernel is not found.extend_kernel
    assert found.supports_packed_decode
    assert update() == "engine"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("phase", sglang.PHASES)
@pytest.mark.parametrize("more", [", surprise=None", ", surprise"])
def test_a_new_parameter_of_a_kernel_is_an_error_at_the_start(install, family, phase, more):
    install(changed={f"{FAMILIES[family][0]}.{phase}": more})
    hooked()
    with pytest.raises(BackendUnsupported, match=rf"sglang 0\.5\.23 has {phase} with unknown parameters surprise"):
        dispatcher(family)


@pytest.mark.parametrize(
    ("place", "call"), [("mamba_chunk_scan_combined", scan), ("TritonSSUBackend.__call__", update)]
)
def test_a_new_parameter_of_a_mamba_kernel_is_an_error(install, place, call):
    install(changed={place: ", surprise=None"})
    mamba = hooked()
    with pytest.raises(BackendUnsupported, match=r"sglang 0\.5\.23 has unknown parameters surprise"):
        call()
    mamba.linear_attn_backend = "triton"
    assert call() == "engine"


@pytest.mark.parametrize("old", ["decode_backend", "decode_kernel", "TRITON", "is_custom", "TritonKDAKernel"])
def test_a_renamed_part_is_an_error_for_who_asks_for_refold_and_nothing_for_others(install, old):
    install(renamed={old: "renamed"})
    mamba = hooked()
    backend = module("srt.layers.attention.linear.kda_backend")
    triton, custom = list(backend.Backend)
    with pytest.raises((BackendUnsupported, AttributeError), match=r"sglang 0\.5\.23|linear_attn"):
        backend.KDAKernelDispatcher(custom, custom, triton)
    mamba.linear_attn_backend = mamba.linear_attn_decode_backend = "triton"
    backend.KDAKernelDispatcher(triton, triton, triton)


def test_renamed_flags_leave_all_to_sglang_and_say_so(install, caplog):
    install(renamed={"linear_attn_backend": "attn_backend"})
    hooked()
    assert scan() == update() == "engine"
    assert "the flags of sglang 0.5.23 are not known" in caplog.text
    with pytest.raises(ValueError, match="Unsupported backend"):
        dispatcher("gdn")


@pytest.mark.parametrize(
    "old", ["LINEAR_ATTN_KERNEL_BACKEND_CHOICES", "HookRegistry", "AROUND", "hook_type=HookType.AFTER, *"]
)
def test_a_version_without_a_registry_is_said_and_nothing_else(install, caplog, old):
    install(renamed={old: "*, hook_type=HookType.AFTER" if "," in old else "renamed"})
    sglang.register()
    assert "there is no backend refold in sglang 0.5.23" in caplog.text
    assert module("srt.arg_groups.choices").add_linear_attn_kernel_backend_choices.__self__ == ["triton"]


STATES = {"ssm_states": 6, "cache_indices": None, "query_start_loc": None}


def test_calls_reach_the_adapter_or_stay(install, monkeypatch, caplog):
    install()
    mamba, seen = hooked(), []
    found = dispatcher("gdn").extend_kernel
    monkeypatch.setattr(adapters, "gated_delta_extend", lambda q, k, v, g, beta, *, ssm_states: seen.append(q) or v)
    assert found.extend(1, 2, 3, 4, 5, **STATES, layer_id=7, track_state=None) == (3, None, None)
    assert seen == [1]
    assert found.extend(1, 2, 3, 4, 5, **STATES, track_state=torch.zeros(1)) == "engine"
    mamba.enable_mamba_extra_buffer = True
    assert found.extend(1, 2, 3, 4, 5, **STATES) == "engine"
    assert "--mamba-radix-cache-strategy no_buffer" in caplog.text


def test_kimi_layers_get_outputs_alone_and_keep_what_is_tracked(install, monkeypatch):
    install()
    hooked()
    found = dispatcher("kda").extend_kernel
    monkeypatch.setattr(
        adapters, "kimi_delta_extend",
        lambda q, k, v, g, beta, *, ssm_states, beta_is_raw=False, A_log=None: (q, beta_is_raw, A_log),
    )  # fmt: skip
    gates = {"A_log": 8, "dt_bias": None, "lower_bound": None, "beta_is_raw": True}
    launch = {"is_spec_decode": False, "chunk_indices": 1, "extend_seq_lens_cpu": [3], "track_ssm_h_src": 4}
    assert found.extend(1, 2, 3, 4, 5, **STATES, **gates, **launch) == (1, True, 8)
    assert found.extend(1, 2, 3, 4, 5, **STATES, **gates, track_state=torch.zeros(1)) == "engine"
    monkeypatch.undo()
    assert found.extend(1, 2, 3, 4, 5, **dict.fromkeys(STATES, 6), return_intermediate_states=True) == "engine"


def test_mamba_layers_reach_the_adapters_or_stay(install, monkeypatch, caplog):
    install()
    mamba = hooked()
    assert scan() == "engine"  # not what the layer asks for
    assert update(disable_state_update=True) == "engine"
    monkeypatch.setattr(sglang, "_mamba_differs", lambda theirs, ours: None)
    for name in ("chunk_scan_packed", "slot_update"):
        monkeypatch.setattr(adapters, name, lambda *args, **kw: "refold")
    assert scan() == update() == "refold"
    mamba.enable_mamba_extra_buffer = True
    assert scan() == "engine"
    module("kernels.ops.mamba.triton_ops.ssu_dispatch").TritonSSUBackend._enable_stochastic_rounding = True
    assert update() == "engine"
    assert "states are rounded at random" in caplog.text


def test_defaults_are_those_that_were_recorded(install):
    install()
    for door in sglang.DOORS:
        assert sglang.kernel(door)
    for target, adapter in sglang.MAMBA.values():
        owner, _, name = target.removeprefix("sglang.").rpartition(".")
        owner, *inner = owner.split(".TritonSSU")
        theirs = getattr(module(owner).TritonSSUBackend if inner else module(owner), name)
        assert doors.differs(theirs, getattr(adapters, adapter)) is None
