"""Whole layers on a GPU: the check of the whole graph, training in bfloat16 at real width, loops that are reset."""

import importlib
import math

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import refold  # noqa: E402
from support.scans import operators  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


class Recurrent(torch.nn.Module):
    """A gated average over time after dropout."""

    def __init__(self, width):
        super().__init__()
        self.gate, self.into = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x):
        decay, u = torch.sigmoid(self.gate(x)), self.dropout(self.into(x))
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + u[:, t]
            out.append(state)
        return torch.stack(out, 1)


@pytest.mark.parametrize("training", [False, True])
def test_the_whole_graph_is_checked_with_dropout(training):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Recurrent(64).to(DEVICE).train(training)
    x = torch.randn(2, 96, 64, device=DEVICE)
    compiled = refold.compile(layer, accept="always", strict=True, cache=False)
    compiled(x).square().mean().backward()
    (graph,) = compiled.report.graphs
    assert graph.chosen == "refold"
    assert operators(compiled) == ["linear_scan"]
    compared = [check["kind"] for check in graph.checks]
    assert "output 0" in compared
    assert any(kind.startswith("gradient") for kind in compared)
    assert all(check["passed"] for check in graph.checks)


@pytest.mark.xdist_group("large")  # eager, a tensor alone takes 20 GB
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_mamba2_of_full_width_trains_in_bfloat16():
    """2560 wide, 80 heads, 2048 tokens: no further from float64 than eager bfloat16 is."""
    torch._dynamo.reset()
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    torch.manual_seed(0)
    layer = Mamba2Mixer(transformers.Mamba2Config(hidden_size=2560, num_heads=80, head_dim=64, n_groups=1), 0)
    layer = layer.to(DEVICE, torch.bfloat16)
    x = torch.randn(1, 2048, 2560, device=DEVICE, dtype=torch.bfloat16)

    def step(run, module, x):
        x = x.detach().clone().requires_grad_()
        module.zero_grad()
        y = run(x)
        y.backward(torch.linspace(-1, 1, y.shape[-1], device=y.device, dtype=y.dtype).expand_as(y))
        found = {"y": y, "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
        return {name: value.detach().double().clone() for name, value in found.items()}

    compiled = refold.compile(layer)
    ours, eager = step(compiled, layer, x), step(layer, layer, x)
    layer.float()  # the definition: as wide as the layer's own kernels allow
    truth = step(layer, layer, x.float())
    assert compiled.report.graphs
    for name, exact in truth.items():
        scale = exact.norm()
        mine, theirs = ((values[name] - exact).norm() / scale for values in (ours, eager))
        assert mine <= 2 * theirs + 2**-8, f"{name}: {mine:.1e}, eager {theirs:.1e}, {compiled.report}"


RESETS = importlib.import_module("cpu.compiler.recurrence.test_resets")


@pytest.mark.parametrize("name", RESETS.LOOPS)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_resets(name, bad):
    torch._dynamo.reset()
    loop = RESETS.LOOPS[name]
    given = [x.to(DEVICE) for x in RESETS.inputs(bad)]
    run = refold.compile(loop, accept="always", verify="off", strict=True, cache=False)
    found, expected = RESETS.gradients(run, *given), RESETS.gradients(loop, *given)
    torch.testing.assert_close(found[0].isfinite(), expected[0].isfinite())
    for one, other in zip(found, expected, strict=True):
        finite = other.isfinite()
        assert bool(one[finite].isfinite().all())
        torch.testing.assert_close(one[finite], other[finite])


@pytest.mark.parametrize("seqlen", [300, 4096])
def test_resets_across_segments_of_time(seqlen):
    """Few channels and many tokens: the kernels cut time, and states pass from cut to cut."""
    generator = torch.Generator().manual_seed(0)
    a, x = (torch.rand(1, seqlen, 5, generator=generator).to(DEVICE) for _ in range(2))
    reset = (torch.rand(1, seqlen, 5, generator=generator) < 0.01).to(DEVICE)
    x[:, seqlen // 3] = math.nan

    def both(backend):
        leaves = [a.clone().requires_grad_(), x.clone().requires_grad_()]
        h, state = refold.ops.linear_scan(*leaves, reset=reset, backend=backend)
        weights = torch.linspace(-1, 1, seqlen, device=DEVICE)[:, None].expand(1, seqlen, 5)
        return h.detach(), state.detach(), *torch.autograd.grad(h, leaves, weights)

    for one, other in zip(both("triton"), both("torch"), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-5, atol=1e-5)
