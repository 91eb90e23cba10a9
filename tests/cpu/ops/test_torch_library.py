"""The operators as torch.library ops: one node, no graph break, dynamic lengths, gradients in float64."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import refold.ops as ops
from refold.errors import ArgumentError
from refold.ops.backends import backend_module
from refold.ops.spec import Example, OpSpec, all_specs
from refold.ops.testing import frame_of, problem
from refold.ops.torch import registry

SPECS = [pytest.param(spec, id=spec.name) for spec in all_specs()]


def find(spec: OpSpec, name: str) -> Example:
    return next(case for case in spec.cases() if case.name == name)


def arguments(spec: OpSpec, name: str, dtype: str = "float32", grad: bool = True) -> list[Any]:
    """Return the arguments of the registered op."""
    given, frame = problem(spec, find(spec, name), dtype), frame_of("torch")
    arrays = {n: frame.array(a, given.dtype_of(n)) for n, a in given.arrays.items()}
    ordered = [arrays.get(arg.name) for arg in spec.args]
    for array in ordered:
        if grad and array is not None and array.is_floating_point():
            array.requires_grad_()
    options = [list(v) if isinstance(v, tuple) else v for v in given.all_options().values()]
    return [*ordered, *options, "torch"]


def named(*packs: str) -> list[Any]:
    """List operators, each with its complete case and, if it is a scan, with these packs."""
    pairs = [(spec, name) for spec in all_specs() for name in (spec.complete, *(packs if spec.scans else ()))]
    return [pytest.param(spec, name, id=f"{spec.name}-{name}") for spec, name in pairs]


@pytest.mark.parametrize(("spec", "name"), named("packed"))
def test_opcheck(spec: OpSpec, name: str) -> None:
    report = torch.library.opcheck(registry.OPS[spec.name], tuple(arguments(spec, name)))
    assert set(report.values()) == {"SUCCESS"}


@pytest.mark.parametrize("spec", [p for p in SPECS if p.values[0].updates])
def test_opcheck_in_place(spec: OpSpec) -> None:
    args = tuple(arguments(spec, spec.complete, grad=False))
    report = torch.library.opcheck(registry.OPS[spec.name + "_"], args)
    assert set(report.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("spec", "name"), named("packed", "packed_empty"))
def test_gradcheck(spec: OpSpec, name: str) -> None:
    args = arguments(spec, name, "float64")
    assert torch.autograd.gradcheck(lambda *a: registry.OPS[spec.name](*a), tuple(args), fast_mode=True)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("node", [True, False])
def test_only_inputs_are_saved_for_the_backward(spec: OpSpec, node: bool) -> None:
    args, saved, at = arguments(spec, spec.complete), [], len(spec.args)
    options = [tuple(o) if isinstance(o, list) else o for o in args[at:-1]]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        registry.OPS[spec.name](*args) if node else registry.run(spec.name, args[:at], options, "torch")
    assert saved
    assert {t.data_ptr() for t in saved} <= {a.data_ptr() for a in args if isinstance(a, Tensor)}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_plain_call_has_the_gradients_of_its_node(spec: OpSpec, autocast: bool, monkeypatch: Any) -> None:
    args = arguments(spec, spec.complete)
    arrays = args[: len(spec.args)]
    options = [tuple(o) if isinstance(o, list) else o for o in args[len(spec.args) : -1]]
    leaves = [a for a in arrays if a is not None and a.requires_grad]

    def gradients(call: Callable[[], Any]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results = call()
            results = results if isinstance(results, tuple) else (results,)
            found = torch.autograd.grad([r.sum() for r in results], leaves, allow_unused=True, materialize_grads=True)
        return [*(r.detach() for r in results), *found]

    expected = gradients(lambda: registry.OPS[spec.name](*args))
    monkeypatch.setattr(registry, "OPS", {})  # no node runs
    for _ in range(2):  # the second time its signature is known
        found = gradients(lambda: registry.run(spec.name, arrays, options, "torch"))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    monkeypatch.undo()
    result = registry.run(spec.name, arrays, options, "torch")
    result = result[0] if isinstance(result, tuple) else result
    with pytest.raises(ArgumentError, match=f"{spec.name}: it has no second derivative"):
        torch.autograd.grad(torch.autograd.grad(result.sum(), leaves[0], create_graph=True)[0].sum(), leaves)


@pytest.mark.parametrize("spec", [p for p in SPECS if p.values[0].updates])
def test_in_place_twin_writes_what_the_step_returns(spec: OpSpec) -> None:
    args = arguments(spec, spec.complete, grad=False)
    at = next(i for i, arg in enumerate(spec.args) if arg.name == spec.updates)
    y, state = registry.OPS[spec.name](*args)
    version = args[at]._version
    y_in_place = registry.OPS[spec.name + "_"](*args)
    assert torch.equal(y, y_in_place)
    assert torch.equal(state, args[at])
    assert args[at]._version > version


@pytest.mark.parametrize("spec", [p for p in SPECS if p.values[0].updates])
def test_triton_writes_the_state_itself(spec: OpSpec) -> None:
    """Without a twin of its own, a backend computes a second state, which is copied: twice the bytes."""
    if find_spec(f"{spec.module}._triton") is None:
        pytest.skip(f"{spec.name} has no triton implementation")
    assert callable(getattr(backend_module(spec, "triton"), f"{spec.name}_", None))


def test_in_place_twin_refuses_gradients() -> None:
    x, dt, A, B = torch.ones(1, 2, 3), torch.ones(1, 2), -torch.ones(2), torch.ones(1, 1, 4)
    state = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ArgumentError, match="ssd_step_: it overwrites the state"):
        ops.ssd_step_(x.requires_grad_(), dt, A, B, B, state)
    with torch.no_grad():
        _, updated = ops.ssd_step_(x, dt, A, B, B, state)
    assert updated is state
    assert state.abs().sum() > 0


class Listening(TorchDispatchMode):
    """Keeps the names of the nodes that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    """Doubles what every function returns first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return (out[0] * 2, *out[1:]) if getattr(func, "_opname", "") == "ssd" else out


def test_what_looks_at_calls_sees_the_node() -> None:
    """In plain eager mode there is none; the results are the same."""
    inputs = layer_inputs(9)
    x, dt, A, B = inputs
    expected, _ = ops.ssd(x, dt, A, B, B)
    with Listening() as mode:
        found, _ = ops.ssd(x, dt, A, B, B)
    assert mode.seen == ["refold::ssd"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with Doubling():
        found, _ = ops.ssd(x, dt, A, B, B)
    torch.testing.assert_close(found, expected * 2, rtol=0, atol=0)
    graph = make_fx(lambda *a: ops.ssd(*a, a[3])[0], tracing_mode="real")(*inputs)
    assert "refold.ssd" in graph.code
    leaf = x.clone().requires_grad_()
    found, _ = ops.ssd(leaf, dt, A, B, B)
    assert found.requires_grad
    with torch.no_grad():
        assert not ops.ssd(leaf, dt, A, B, B)[0].requires_grad


def test_equal_options_of_other_types_are_not_taken_for_those_that_were_checked() -> None:
    x, dt, A, B = layer_inputs(9)
    ops.ssd(x, dt, A, B, B, chunk_size=1, dt_softplus=True)
    for wrong in ({"chunk_size": True}, {"chunk_size": 1.0}, {"dt_softplus": 1}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            ops.ssd(x, dt, A, B, B, **wrong)


def ssd_layer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    y, state = ops.ssd(x * 2, dt, A, B, B, dt_softplus=True)
    return y.sum() + state.sum()


def selective_layer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    flat = x.flatten(2)
    y, state = ops.selective_scan(flat, flat, A[:, None].expand(6, 4), B[:, :, 0], B[:, :, 0], z=flat)
    return y.sum() + state.sum()


def linear_layer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    h, state = ops.linear_scan(torch.sigmoid(x), x, reverse=True)
    return h.sum() + state.sum()


def conv_layer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
    y, state = ops.causal_conv1d(x.flatten(2), A[:, None].expand(6, 4), activation="silu")
    return (ops.gated_rmsnorm(y, x.flatten(2), A, eps=1e-5) + state.sum()).sum()


LAYERS = [ssd_layer, selective_layer, linear_layer, conv_layer]


def layer_inputs(seqlen: int) -> tuple[Tensor, ...]:
    torch.manual_seed(seqlen)
    return torch.randn(2, seqlen, 6, 1), torch.randn(2, seqlen, 6), -torch.rand(6), torch.randn(2, seqlen, 1, 4)


@pytest.mark.parametrize("layer", LAYERS)
def test_compiles_to_one_graph_for_all_lengths(layer: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for seqlen in (5, 9, 33):
        inputs = layer_inputs(seqlen)
        torch.testing.assert_close(compiled(*inputs), layer(*inputs))
    assert len(graphs) == 1
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any("refold" in name for name in called), called


@pytest.mark.parametrize("layer", [ssd_layer, conv_layer])
def test_aot_autograd_gives_the_same_gradients(layer: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for seqlen in (5, 9):
        leaves = [a.requires_grad_() for a in layer_inputs(seqlen)]
        expected = torch.autograd.grad(layer(*leaves), leaves, allow_unused=True, materialize_grads=True)
        found = torch.autograd.grad(compiled(*leaves), leaves, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spec", SPECS)
def test_flop_counter_of_torch_knows_the_work(spec: OpSpec) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        registry.OPS[spec.name](*arguments(spec, spec.complete, grad=False))
    assert counter.get_total_flops() == spec.flops(find(spec, spec.complete).sizes)


class Layer(torch.nn.Module):
    def forward(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> Tensor:
        return ssd_layer(x, dt, A, B) + conv_layer(x, dt, A, B) + selective_layer(x, dt, A, B)


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_dynamic_length(tmp_path: Path, strict: bool) -> None:
    length = torch.export.Dim("length", min=4, max=4096)
    shapes = ({1: length}, {1: length}, None, {1: length})
    program = torch.export.export(Layer(), layer_inputs(8), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for seqlen in (8, 21):
        torch.testing.assert_close(loaded(*layer_inputs(seqlen)), Layer()(*layer_inputs(seqlen)))


class Everything(torch.nn.Module):
    """Operators, each with default options wherever there are some, and with one limit that is infinite."""

    def forward(self, arrays: dict[str, dict[str, Tensor]]) -> list[Tensor]:
        found: list[Tensor] = []
        for name, given in arrays.items():
            options = {"eps": 1e-5} if name == "gated_rmsnorm" else {}
            for more in ({}, {"dt_limit": (0.2, torch.inf)}, {"dt_limit": (-torch.inf, 0.3)}):
                if not more or name.startswith("ssd"):
                    result = getattr(ops, name)(**given, **options, **more)
                    found += result if isinstance(result, tuple) else (result,)
        return found


def everything(*names: str) -> tuple[dict[str, dict[str, Tensor]]]:
    given = [(s, arguments(s, s.complete, grad=False)) for s in all_specs() if s.name in names or not names]
    named = {
        s.name: {arg.name: a for arg, a in zip(s.args, found, strict=False) if a is not None} for s, found in given
    }
    return (named,)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [("ssd",), ()], ids=["ssd", "all"])
def test_a_package_of_every_operator_is_compiled_and_loaded(names: tuple[str, ...], tmp_path: Path) -> None:
    """PyTorch's loader reads options as JSON, which has no infinity."""
    inputs = everything(*names)
    program = torch.export.export(Everything(), inputs)
    limits = [n.args[11] for n in program.graph.nodes if "refold.ssd.default" in str(n.target)]
    assert all(abs(v) < torch.inf for pair in limits for v in pair)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "all.pt2"))
    run = torch._inductor.aoti_load_package(path)
    for a, b in zip(run(*inputs), Everything()(*inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_every_operator_is_exported_to_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime, inputs = pytest.importorskip("onnxruntime"), everything()
    given = {"arrays": inputs[0]}  # PyTorch 2.13 takes a dictionary that is last for names
    torch.onnx.export(Everything().eval(), (), kwargs=given, dynamo=True, verbose=False).save(tmp_path / "all.onnx")
    session = runtime.InferenceSession(tmp_path / "all.onnx")
    flat = [a.numpy() for given in inputs[0].values() for a in given.values()]
    found = session.run(None, {i.name: a for i, a in zip(session.get_inputs(), flat, strict=True)})
    for a, b in zip(found, Everything()(*inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_layers_that_write_twice_a_token_are_one_graph() -> None:
    torch._dynamo.reset()
    x, gate = torch.randn(1, 8, 2, 4), -torch.rand(1, 8, 2, 4)
    twice, strength = x.repeat(1, 2, 1, 1), torch.rand(1, 16, 2)
    for op, given in (
        ("rwkv7", (x, gate, x, x, gate, x)),
        ("delta_product", (x, twice, twice, gate[..., 0], strength)),
    ):
        compiled = torch.compile(getattr(ops, op), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given), getattr(ops, op)(*given))


def test_errors_reach_the_caller_of_a_compiled_function() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ssd_layer, backend="eager", fullgraph=True)
    x, dt, A, B = layer_inputs(8)
    with pytest.raises(Exception, match=r"ssd: dt has t=7 but x has t=8"):
        compiled(x, dt[:, :7], A, B)


def test_compiled_decoding_updates_the_state_in_place() -> None:
    torch._dynamo.reset()

    def decode(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, state: Tensor) -> Tensor:
        y, _ = ops.ssd_step_(x, dt, A, B, B, state)
        return y * 2

    x, dt, A, B = torch.randn(1, 2, 3), torch.rand(1, 2), -torch.ones(2), torch.randn(1, 1, 4)
    state, expected_state = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    compiled = torch.compile(decode, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x, dt, A, B, state), decode(x, dt, A, B, expected_state))
    torch.testing.assert_close(state, expected_state)
    assert state.abs().sum() > 0


@pytest.mark.parametrize("spec", SPECS)
def test_the_spec_names_what_one_result_alone_reads(spec: OpSpec) -> None:
    given = problem(spec, find(spec, spec.complete), "float64")
    arrays = {name: torch.from_numpy(array) for name, array in given.arrays.items()}
    leaves = {name: a.requires_grad_() for name, a in arrays.items() if a.is_floating_point()}
    read = []
    for result in given.defined(arrays):
        found = torch.autograd.grad(result.sum(), [*leaves.values()], allow_unused=True, retain_graph=True)
        read.append({name for name, grad in zip(leaves, found, strict=True) if grad is not None})
    for i, output in enumerate(spec.outputs):
        others = set().union(*read[:i], *read[i + 1 :])
        assert {*output.alone} & leaves.keys() == read[i] - others if others else not output.alone


@pytest.mark.parametrize("spec", [each for each in SPECS if any(output.alone for output in each.values[0].outputs)])
@pytest.mark.parametrize("node", [True, False])
def test_what_only_an_unused_result_reads_has_no_gradient(spec: OpSpec, node: bool) -> None:
    """Zero times an infinity of it must not reach the gradients of other arguments."""
    (alone,) = (set(output.alone) for output in spec.outputs if output.alone)

    def gradients(value: float, node: bool) -> dict[str, Tensor | None]:
        args = arguments(spec, spec.complete)
        arrays = {arg.name: a for arg, a in zip(spec.args, args, strict=False) if a is not None and a.requires_grad}
        with torch.no_grad():
            for name in alone & arrays.keys():
                arrays[name].view(-1)[::3] = value
        at = len(spec.args)
        args[at:] = [tuple(o) if isinstance(o, list) else o for o in args[at:]]
        call = registry.OPS[spec.name] if node else lambda *a: registry.run(spec.name, a[:at], a[at:-1], a[-1])
        _, state = call(*args)
        found = torch.autograd.grad(state.sum(), [*arrays.values()], allow_unused=True)
        return dict(zip(arrays, found, strict=True))

    finite, infinite = gradients(1.0, node), gradients(torch.inf, node)
    assert alone & finite.keys()
    for name, grad in infinite.items():
        assert (grad is None) == (name in alone)
        if grad is not None:
            torch.testing.assert_close(grad, finite[name], rtol=0, atol=0)
            assert grad.isfinite().all()
    frozen = [a.detach().requires_grad_(arg.name in alone) if isinstance(a, Tensor) and a.requires_grad else a
              for arg, a in zip(spec.args, arguments(spec, spec.complete), strict=False)]  # fmt: skip
    y, state = registry.OPS[spec.name](*frozen, *arguments(spec, spec.complete)[len(spec.args) :])
    assert (y.requires_grad, state.requires_grad) == (True, False)


@pytest.mark.exhaustive
def test_inductor_pads_rows_without_a_copy():
    """On a GPU, Inductor pads the rows of what it writes; an operator reads them as they are."""
    torch.manual_seed(0)
    u, w, taps = torch.randn(2, 9, 12), torch.randn(12, 37), torch.randn(24, 3)
    arguments = (u.requires_grad_(), w.requires_grad_(), taps.requires_grad_())

    def layer(u, w, taps):
        z, x = (u @ w).sigmoid().split([13, 24], dim=-1)
        y = ops.causal_conv1d(x, taps, activation="silu")[0]
        return ops.gated_rmsnorm(y, x, taps[:, 0], eps=1e-5).sum() + z.sum()

    options = {
        "disable_padding_cpu": False,
        "padding_stride_threshold": 8,
        "padding_alignment_bytes": 64,
        "fx_graph_cache": False,
    }
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, options=options)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        y, code = run_and_get_code(lambda: torch.autograd.grad(compiled(*arguments), arguments))
    # `.default.at_once(` where an earlier test compiled with backend="refold".
    (call,) = (line for line in code[0].splitlines() if "= torch.ops.refold.causal_conv1d.default" in line)
    assert "48, 1), 13)" in call  # 37 columns in rows of 48, read by the operator from column 13
    for got, expected in zip(y, torch.autograd.grad(layer(*arguments), arguments), strict=True):
        torch.testing.assert_close(got, expected)
