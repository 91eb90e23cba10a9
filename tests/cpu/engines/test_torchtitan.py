"""The override for torchtitan, in a fake package that has the recorded signatures."""

import functools
import importlib
import sys

import pytest
import torch

from refold.errors import ArgumentError, BackendUnsupported
from refold.ops.delta_rule.reference import delta_rule
from refold.parallel import shard
from support.engines import recorded
from support.ranks import on_ranks

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
    def forward({forward}):
        return "engine"
class GatedDeltaNet(torch.nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.conv = torch.nn.Conv1d(16, 16, 4, groups=16, bias=False)
    def _causal_conv({conv}):
        return "engine"
    def forward(self, x, gates, cu_seqlens):
        q, k, v = self._causal_conv(x, self.conv, cu_seqlens, None).unflatten(-1, (4, 4)).split([1, 1, 2], 2)
        g, beta = gates.chunk(2, -1)
        return self.kernel(q, k, v, -g.exp(), beta.sigmoid(), cu_seqlens=cu_seqlens)
"""


@pytest.fixture
def plugin(engine, tmp_path):
    def install(more="", convolution="", renamed=""):
        of = {place.split(":")[1]: parameters for place, parameters in recorded("torchtitan", "0.3.0").items()}
        forward, conv = of["GatedDeltaKernel.forward"] + more, of["GatedDeltaNet._causal_conv"] + convolution
        model = MODEL.format(forward=forward, conv=conv)
        engine("torchtitan", "0.3.0", {
            "torchtitan.config.override": CONFIG.format(of["override"], of["derive"]),
            "torchtitan.models.qwen3_5.model": model.replace(renamed or "\0", "renamed"),
        })  # fmt: skip
        (tmp_path / "torchtitan/config/__init__.py").write_text("from torchtitan.config.override import *")
        module = importlib.import_module("refold.engines.torchtitan")
        return module, sys.modules["torchtitan.config"].registry

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


@pytest.mark.parametrize("name", ["GatedDeltaKernel", "GatedDeltaNet", "Config", "_causal_conv"])
def test_a_renamed_part_fails_loudly(plugin, name):
    with pytest.raises(BackendUnsupported, match=rf"torchtitan 0\.3\.0 has other names: .*{name}.*use a newer refold"):
        plugin(renamed=name)


OFFSETS = torch.tensor([0, 3, 3, 11])
LENGTH = 11


def layer(module):
    """A layer with refold's kernel, and its tokens and gates."""
    torch.manual_seed(0)
    config = module.gated_delta_rule(module.GatedDeltaKernel.Config())
    made = module.GatedDeltaNet(module.RefoldGatedDeltaKernel(config)).double()
    return made, torch.randn(1, LENGTH, 16).double(), torch.randn(1, LENGTH, 4).double()


def on_rank(folder, rank, size):
    sys.path.insert(0, folder)
    module = importlib.import_module("refold.engines.torchtitan")
    made, x, gates = layer(module)
    own, cut = shard({"x": x, "gates": gates}, torch.distributed.group.WORLD)
    module.share(made, cut)
    own["x"].requires_grad_()
    y = made(own["x"], own["gates"], OFFSETS)
    y.square().sum().backward()
    return y.detach(), own["x"].grad, made.conv.weight.grad


def test_ranks_share_the_sequences_of_a_layer(plugin, tmp_path):
    (tmp_path / "ranks").mkdir()
    module, _ = plugin()
    found = on_ranks(2, functools.partial(on_rank, str(tmp_path)), tmp_path / "ranks")
    made, x, gates = layer(module)
    made._causal_conv = functools.partial(module._causal_conv, None)
    x.requires_grad_()
    y = made(x, gates, OFFSETS)
    y.square().sum().backward()
    ys, dxs, dws = zip(*(found[rank] for rank in range(2)), strict=True)
    for a, b in ((torch.cat(ys, 1), y.detach()), (torch.cat(dxs, 1), x.grad), (sum(dws), made.conv.weight.grad)):
        assert (a - b).abs().max() <= 4096 * torch.finfo(torch.float64).eps * b.abs().max()


def test_what_cannot_be_shared_is_refused(plugin):
    module, _ = plugin(convolution=", surprise=None")
    with pytest.raises(BackendUnsupported, match=r"the convolution of torchtitan .* has unknown parameters surprise"):
        module.share(torch.nn.Linear(2, 2), None)


def test_a_model_without_the_kernel_is_refused(plugin):
    with pytest.raises(ArgumentError, match="no gated DeltaNet layer"):
        plugin()[0].share(torch.nn.Linear(2, 2), None)
