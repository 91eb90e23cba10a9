"""The plugin for vLLM, in fake packages that have the recorded signatures, registries and keys."""

import importlib
import inspect
import logging
import tomllib
from pathlib import Path

import pytest

from refold.engines import adapters, doors, vllm
from refold.errors import ArgumentError, BackendUnsupported
from support.engines import recorded

VERSIONS = ("0.32.0", "0.33.0")
CUSTOM_OP = """
op_registry_oot = {}
class CustomOp:
    def __new__(cls):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))
    def __init__(self):
        self._forward_method = self.forward_cuda
    def forward(self, *args, **kw):
        return self._forward_method(*args, **kw)
    @classmethod
    def register_oot(cls, name):
        assert name not in op_registry_oot
        return lambda op: op_registry_oot.setdefault(name, op)
"""
BACKENDS = """
import enum
inf = float("inf")
class MambaBackendEnum(enum.Enum):
    TRITON, FLASHINFER, CPU = "triton", "flashinfer", "cpu"
class MambaSSUBackend:
    def __init__(self, mamba_config):
        pass
class TritonSSUBackend(MambaSSUBackend):
    name = "triton"
    def __call__({}):
        return "engine"
_BACKEND_REGISTRY = dict.fromkeys(MambaBackendEnum, TritonSSUBackend)
"""
GDN = """
from vllm.model_executor.custom_op import CustomOp
class ChunkGatedDeltaRule(CustomOp):
    def forward_cuda({}):
        return "engine"
"""


@pytest.fixture
def install(engine):
    def write(version="0.33.0", changed=(), renamed=()):
        rows = recorded("vllm", version) | dict(changed)
        of = {place.split(":")[0]: parameters for place, parameters in rows.items()}
        function = 'inf = float("inf")\ndef {}({}):\n    return "engine"\n'
        modules = {
            "vllm.model_executor.custom_op": CUSTOM_OP,
            f"{vllm.LAYERS}.mamba_mixer2": function.format("mamba_chunk_scan_combined_varlen", of["mamba_mixer2"]),
            f"{vllm.LAYERS}.mamba_mixer": function.format("selective_scan_fn", of["mamba_mixer"]),
            f"{vllm.LAYERS}.ops.ssu_dispatch": BACKENDS.format(of["ops.ssu_dispatch"]),
            f"{vllm.LAYERS}.gdn.qwen_gdn_linear_attn": GDN.format(of["gdn.qwen_gdn_linear_attn"]),
        }
        for old, new in dict(renamed).items():
            modules = {name: source.replace(old, new) for name, source in modules.items()}
        engine("vllm", version, modules)

    return write


@pytest.fixture
def switch(monkeypatch):
    return lambda value: monkeypatch.setenv(vllm.SWITCH, value)


def module(name):
    return importlib.import_module(f"{vllm.LAYERS}.{name}")


class Config:
    enable_stochastic_rounding = False


def stubs(monkeypatch, result):
    for _, _, adapter in vllm.PARTS.values():
        keep = inspect.signature(getattr(adapters, adapter))

        def stub(*args, _keep=keep, **kw):
            return result()

        stub.__signature__ = keep
        monkeypatch.setattr(adapters, adapter, stub)


def calls():
    """Call what layers call, and return what came."""
    backend = module("ops.ssu_dispatch")
    return {
        "ssd": module("mamba_mixer2").mamba_chunk_scan_combined_varlen(*range(11)),
        "selective_scan": module("mamba_mixer").selective_scan_fn(*range(6)),
        "state_update": backend._BACKEND_REGISTRY[backend.MambaBackendEnum.TRITON](Config)(*range(8)),
        "gated_delta_rule": module("gdn.qwen_gdn_linear_attn").ChunkGatedDeltaRule().forward(*range(7)),
    }


def test_the_project_has_the_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"refold": "refold.engines.vllm:register"}


@pytest.mark.parametrize("version", VERSIONS)
def test_all_parts_are_replaced_once(install, switch, monkeypatch, caplog, version):
    install(version)
    switch("1")
    stubs(monkeypatch, lambda: "refold")
    with caplog.at_level(logging.INFO, "vllm.refold"):
        vllm.register()
        vllm.register()
    assert calls() == dict.fromkeys(vllm.PARTS, "refold")
    assert len(caplog.records) == len(vllm.PARTS)
    assert all(f"vllm {version} is replaced" in record.getMessage() for record in caplog.records)
    backends = module("ops.ssu_dispatch")
    found = backends._BACKEND_REGISTRY[backends.MambaBackendEnum.TRITON]
    assert issubclass(found, backends.TritonSSUBackend)
    assert found(Config).name == "refold"
    assert backends._BACKEND_REGISTRY[backends.MambaBackendEnum.FLASHINFER] is backends.TritonSSUBackend
    rule = module("gdn.qwen_gdn_linear_attn").ChunkGatedDeltaRule
    assert isinstance(rule(), rule)
    assert type(rule()) is not rule


@pytest.mark.parametrize("value", [None, "0", "ssd, state_update"])
def test_parts_that_are_not_switched_on_stay(install, monkeypatch, value):
    install()
    if value is not None:
        monkeypatch.setenv(vllm.SWITCH, value)
    stubs(monkeypatch, lambda: "refold")
    vllm.register()
    assert calls() == {part: "refold" if part in (value or "") else "engine" for part in vllm.PARTS}


def test_an_unknown_part_is_refused(switch):
    switch("ssd,attention")
    with pytest.raises(ArgumentError, match=r"REFOLD_VLLM must be 0, 1, or names out of ssd, .*; got 'attention'"):
        vllm.register()


def test_nothing_happens_without_vllm(switch, monkeypatch, caplog):
    switch("1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    vllm.register()
    assert not caplog.records


@pytest.mark.parametrize("place", recorded("vllm", "0.33.0"))
def test_a_new_parameter_keeps_the_kernel_and_says_so(install, switch, monkeypatch, caplog, place):
    parameters = recorded("vllm", "0.33.0")[place]
    install(changed={place: f"{parameters}, surprise=None"})
    switch("1")
    stubs(monkeypatch, lambda: "refold")
    vllm.register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{place.split(':')[1]} of vllm 0.33.0 is kept: unknown parameters surprise" in record.getMessage()
    assert list(calls().values()).count("engine") == 1


def test_a_renamed_function_or_table_is_said(install, switch, caplog):
    install()
    switch("1")
    del module("mamba_mixer").selective_scan_fn
    del module("ops.ssu_dispatch")._BACKEND_REGISTRY
    vllm.register()
    lines = [record.getMessage() for record in caplog.records]
    kept = [line.split(" of ")[0].removeprefix("refold: ") for line in lines]
    assert kept == ["selective_scan_fn", "TritonSSUBackend.__call__"]


CHANGES = {
    "TRITON, FLASHINFER, CPU =": ("TRITON_SSU, FLASHINFER, HOST =", "state_update", "has no TRITON"),
    "op_registry_oot": ("ops_from_outside", "gated_delta_rule", "op_registry_oot"),
    "def register_oot(cls, name)": ("def register_oot(cls, *, key)", "gated_delta_rule", "unexpected keyword"),
    "self._forward_method = self.forward_cuda": ("self.method = self.forward_cuda", "gated_delta_rule", "no _forward"),
    "null_block_id=0": ("null_block_id=-1", "state_update", "the default null_block_id=-1"),
    "def __init__(self, mamba_config):": ("def __init__(self, mamba_config, layer=None):", None, ""),
    "dt_softplus=False": ("*, dt_softplus=False", None, ""),
}
"""What another version may have in place of a line; the part that stays with vLLM, and what the log says."""


@pytest.mark.parametrize("old", CHANGES)
def test_another_version_never_breaks_and_is_said(install, switch, monkeypatch, caplog, old):
    new, kept, said = CHANGES[old]
    install(renamed={old: new, **({"self._forward_method(": "self.method("} if "self.method" in new else {})})
    switch("1")
    doors.kept.cache_clear()
    stubs(monkeypatch, lambda: "refold")
    vllm.register()
    backends = module("ops.ssu_dispatch")
    made = next(iter(backends._BACKEND_REGISTRY.values()))
    found = {
        "ssd": module("mamba_mixer2").mamba_chunk_scan_combined_varlen(*range(11)),
        "state_update": made(Config)(*range(8)),
        "gated_delta_rule": module("gdn.qwen_gdn_linear_attn").ChunkGatedDeltaRule().forward(*range(7)),
    }
    if kept is not None:
        assert found.pop(kept) == "engine"
        assert said in caplog.text
    assert set(found.values()) == {"refold"}


def test_a_configuration_without_the_flag_of_rounding_stays(install, switch, monkeypatch, caplog):
    install()
    switch("1")
    stubs(monkeypatch, lambda: "refold")
    doors.kept.cache_clear()
    monkeypatch.delattr(Config, "enable_stochastic_rounding")
    vllm.register()
    assert calls()["state_update"] == "engine"
    assert "or that is not known" in caplog.text


def test_the_method_that_vllm_chooses_is_compared_too(install, switch, monkeypatch, caplog):
    other = "def forward_new(self, surprise):\n        return 'engine'\n    def forward_cuda"
    install(renamed={"def forward_cuda": other, "method = self.forward_cuda": "method = self.forward_new"})
    switch("gated_delta_rule")
    stubs(monkeypatch, lambda: "refold")
    doors.kept.cache_clear()
    vllm.register()
    assert module("gdn.qwen_gdn_linear_attn").ChunkGatedDeltaRule().forward(1) == "engine"
    assert "unknown parameters surprise" in caplog.text


def test_what_another_plugin_replaced_stays(install, switch, caplog):
    install()
    switch("gated_delta_rule")
    other = type("Other", (), {})
    importlib.import_module("vllm.model_executor.custom_op").op_registry_oot["ChunkGatedDeltaRule"] = other
    vllm.register()
    assert "has replaced it before" in caplog.text


def test_what_an_adapter_does_not_compute_stays_with_the_engine(install, switch, monkeypatch, caplog):
    def refuse():
        raise BackendUnsupported("not this one")

    install()
    switch("1")
    doors.kept.cache_clear()
    stubs(monkeypatch, refuse)
    vllm.register()
    for _ in range(2):
        assert calls() == dict.fromkeys(vllm.PARTS, "engine")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"refold: {part}: the engine's own kernel runs: not this one" for part in vllm.PARTS]


def test_stochastic_rounding_stays_with_the_engine(install, switch, monkeypatch, caplog):
    install()
    switch("1")
    stubs(monkeypatch, lambda: "refold")
    monkeypatch.setattr(Config, "enable_stochastic_rounding", True)
    doors.kept.cache_clear()
    vllm.register()
    assert calls()["state_update"] == "engine"
    assert "state_update: the engine's own kernel runs: states are rounded at random" in caplog.text


@pytest.mark.parametrize("version", VERSIONS)
def test_defaults_are_those_that_were_recorded(version):
    for _, path, adapter in vllm.PARTS.values():
        (parameters,) = (text for place, text in recorded("vllm", version).items() if place.endswith(f":{path}"))
        scope = {"inf": float("inf")}
        exec(f"def recorded({parameters}): pass", scope)
        theirs, ours = (inspect.signature(f).parameters for f in (scope["recorded"], getattr(adapters, adapter)))
        for name, parameter in theirs.items():
            if name != "self":
                assert ours[name].default == parameter.default
