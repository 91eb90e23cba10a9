"""Graphs with complex values: Inductor can generate code for a GPU, and the layouts are those of eager."""

import types

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import refold
from refold.compiler.complex_values import AS_TRACED, CAST, OF_PAIRS, lay_out_complex_values
from refold.compiler.inductor import inductor


def cast(x):
    return torch.exp(x.t().to(torch.complex64))


def pairs(x):
    return torch.view_as_complex(torch.stack([x.sin(), x], -1).transpose(0, 1)).exp()


def constants(x):
    return x.t().to(torch.complex64) * torch.tensor([1 + 2j, 3.0]) + x.t() * (1 - 1j)


def gaps(x):
    return torch.view_as_complex(x.unflatten(1, (-1, 2))[:, 1:]) * x[:, :3] + x.new_zeros(1, 1).expand(2, 3) * 1j


@pytest.fixture
def for_a_gpu(monkeypatch):
    """Let Inductor generate Triton's code on this machine, and stop before it is compiled."""
    triton = pytest.importorskip("triton")
    from torch._inductor.graph import GraphLowering
    from triton.backends.compiler import GPUTarget

    target = types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    monkeypatch.setattr(triton.runtime.driver, "_active", target)
    code = []

    def generate(self):
        code.append(self.codegen()[0].value)
        return types.SimpleNamespace(call=None, __file__="", key="")

    monkeypatch.setattr(GraphLowering, "compile_to_module", generate)
    with torch._inductor.config.patch(cpu_backend="triton", fx_graph_cache=False):
        yield code


@pytest.mark.codegen
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation")
@pytest.mark.parametrize("fn", [cast, pairs, constants])
def test_inductor_generates_code_for_a_gpu(fn, for_a_gpu):
    def back(gm, inputs):
        inductor(gm, inputs)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=back)(torch.randn(2, 8, requires_grad=True))
    assert len(for_a_gpu) >= 2  # forward and backward
    assert "refold" in for_a_gpu[-2] + for_a_gpu[-1]


@pytest.mark.parametrize("fn", [cast, pairs, constants, gaps])
def test_values_and_layouts_stay(fn):
    x = torch.randn(2, 8)
    gm = make_fx(fn, tracing_mode="fake")(x)
    lay_out_complex_values(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert {node.target for node in gm.graph.nodes} & {AS_TRACED, CAST, OF_PAIRS}
    got, want = gm(x), fn(x)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    for node in gm.graph.nodes:
        assert node.op == "output" or isinstance(node.meta["val"], torch.Tensor)


def gated_loop(q, k, gates):
    """GateLoop (Katsch 2023, arXiv:2311.01927)."""
    size, angle = gates.chunk(2, -1)
    a = torch.polar(torch.sigmoid(size), angle)
    h, out = torch.zeros_like(a[:, 0]), []
    for t in range(q.shape[1]):
        h = a[:, t] * h + k[:, t]
        out.append((q[:, t] * h).real)
    return torch.stack(out, 1)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation")
def test_gradients_of_a_loop_whose_decays_are_laid_out_as_the_gates():
    """Where Inductor leaves complex values to ATen, it must expect the strides that they have."""
    run = refold.compile(gated_loop, accept="always", verify="off", strict=True, cache=False)
    inputs = [torch.randn(2, 20, n, requires_grad=True) for n in (6, 6, 12)]
    got, want = (torch.autograd.grad(fn(*inputs).square().sum(), inputs) for fn in (run, gated_loop))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert "complex scan" in run.report.graphs[0].applied[0].detail
