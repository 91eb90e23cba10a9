"""The override for torchtitan, in a fake package that has the recorded signatures."""

import importlib
import sys

import pytest
import torch

from refold.errors import BackendUnsupported
from refold.ops.delta_rule.reference import delta_rule
from support.engines import recorded

CONFIG = """
registry = {{}}
def override({}):
    return lambda factory: registry.setdefault(f"{{factory.__module__}}.{{factory.__name__}}", factory)
def derive({}):
    return target_cls(backend=source.backend)
"""
MODEL = """
from dataclasses import dataclass
import torch
class GatedDeltaKernel(torch.nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        backend: str = "fla_chunked"
    def __init__(self, config):
        super().__init__()
        self.backend = config.backend
    def forward({}):
        return "engine"
"""


@pytest.fixture
def plugin(engine):
    def install(more=""):
        of = {place.split(":")[1]: parameters for place, parameters in recorded("torchtitan", "0.3.0").items()}
        modules = {"torchtitan.config.override": "", "torchtitan.models.qwen3_5.model": MODEL}
        modules["torchtitan.models.qwen3_5.model"] = MODEL.format(of["GatedDeltaKernel.forward"] + more)
        engine("torchtitan", "0.3.0", modules)
        package = importlib.import_module("torchtitan.config")
        exec(CONFIG.format(of["override"], of["derive"]), package.__dict__)
        return importlib.import_module("refold.engines.torchtitan"), package.registry

    yield install
    sys.modules.pop("refold.engines.torchtitan", None)


def test_the_override_computes_the_gated_delta_rule_with_gradients(plugin):
    module, registry = plugin()
    assert list(registry) == ["refold.engines.torchtitan.gated_delta_rule"]
    theirs = module.GatedDeltaKernel
    config = registry["refold.engines.torchtitan.gated_delta_rule"](theirs.Config(backend="fla_fused_recurrent"))
    assert isinstance(config, theirs.Config)
    assert config.backend == "fla_fused_recurrent"
    kernel = module.RefoldGatedDeltaKernel(config)
    assert isinstance(kernel, theirs)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 7, heads, 3, dtype=torch.float64) for heads in (2, 2, 4))
    g, beta = -torch.rand(1, 7, 4, dtype=torch.float64), torch.rand(1, 7, 4, dtype=torch.float64)
    v.requires_grad_()
    offsets = torch.tensor([0, 3, 3, 7])
    y = kernel(q, k, v, g, beta, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    for start, end in ((0, 3), (3, 7)):
        part = (x[:, start:end].detach().numpy() for x in (q, k, v))
        gates = {name: x[:, start:end].numpy() for name, x in (("g", g), ("beta", beta))}
        expected = torch.as_tensor(delta_rule(*part, **gates, normalize=True)[0])
        assert (y[:, start:end] - expected).abs().max() <= 4096 * torch.finfo(torch.float64).eps
    y.sum().backward()
    assert v.grad.abs().sum() > 0


def test_a_new_parameter_fails_loudly(plugin):
    module, registry = plugin(", surprise=None")
    with pytest.raises(BackendUnsupported, match=r"torchtitan 0\.3\.0 has unknown parameters surprise"):
        registry["refold.engines.torchtitan.gated_delta_rule"](module.GatedDeltaKernel.Config())
