"""Names of PyTorch and Triton that are not their public interface: without one of them refold is slower, and right."""

import subprocess
import sys
import warnings

import pytest
import torch

import refold
from refold.compiler import backend, dynamo
from refold.compiler.dynamo.capture import hook
from refold.errors import ArgumentError, RefoldWarning

STEPS = 20

# Deleted before refold is imported. Dynamo itself imports these by name, and keeps them.
DYNAMO = [
    "torch._dynamo.source:ConstantSource",
    "torch._functorch.compile_utils:fx_graph_cse",
    "torch._dynamo.bytecode_analysis:livevars_analysis",
    "torch._dynamo.variables.builder:wrap_fx_proxy",
    "torch._dynamo.variables.iter:ZipVariable",
    "torch._dynamo.variables.misc:CellVariable",
    "torch._dynamo.polyfills.builtins:enumerate",
    "torch._dynamo.current_scope_id:current_scope_id",
    "torch._dynamo.symbolic_convert:InliningGeneratorInstructionTranslator",
    "torch._dynamo.utils:set_example_value",
]
OPERATORS = [
    "torch._C._dynamo.guards:TensorGuards",
    "torch._C:_len_torch_dispatch_stack",
    "torch._C:_len_torch_function_stack",
    "torch._C._functorch:peek_interpreter_stack",
    "torch.autograd.forward_ad:_current_level",
]

# Without the first three refold rewrites nothing; without the others one thing is off.
COMPILER = {
    "torch._inductor.compile_fx:compile_fx": True,
    "torch._inductor.custom_graph_pass:CustomGraphPass": True,
    "torch._inductor:list_options": False,
    "torch._inductor:list_mode_options": False,
    "torch.fx.experimental.symbolic_shapes:statically_known_true": False,
    "torch.utils._python_dispatch:_disable_current_modes": False,
    "torch._guards:tracing": False,
    "torch._guards:CompileContext": False,
    "torch._dynamo.metrics_context:MetricsContext": False,
    "torch.utils._sympy.functions:PythonMod": False,
}

# A process that has imported PyTorch, and forks itself for every name.
PROGRAM = """
import importlib, os, sys, types, warnings
import torch, torch._dynamo.symbolic_convert, torch._inductor.compile_fx

def loop(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)

def look(module, name, what):
    found = importlib.import_module(module)
    twin = types.ModuleType(found.__name__)
    vars(twin).update({key: entry for key, entry in vars(found).items() if key != name})
    parent, _, leaf = module.rpartition(".")
    sys.modules[module] = twin
    setattr(sys.modules[parent], leaf, twin)
    import refold
    import refold.ops.torch.registry
    if what != "operators":
        import refold.compiler.backend
    sys.modules[module] = found  # PyTorch itself imports some of the names when it needs them
    setattr(sys.modules[parent], leaf, found)
    x, a = torch.randn(2, 20, 3), torch.rand(2, 20, 3)
    if what == "operators":
        for _ in range(3):
            y, _ = refold.ops.linear_scan(a, x)
        torch.testing.assert_close(y, refold.ops.linear_scan(a, x, backend="torch")[0])
        a.requires_grad_()
        refold.ops.linear_scan(a, x)[0].sum().backward()
        assert a.grad.isfinite().all()
    if what == "explain":
        (graph,) = refold.explain(loop, x).graphs
        print("note", *graph.notes)
        print("names", *[row.name for row in graph.rewrites])
    if what == "compile":
        compiled = refold.compile(loop, accept="always", verify="off", strict=True)
        torch.testing.assert_close(compiled(x), loop(x))
        print("note", *compiled.report.graphs[0].notes)
        print("names", *[row.name for row in compiled.report.rewrites])

for symbol in sys.argv[2:]:
    print("symbol", symbol, flush=True)
    if os.fork() == 0:
        failed = 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                look(*symbol.split(":"), sys.argv[1])
                failed = 0
            except BaseException as error:
                print("failed", repr(error))
        for entry in caught:
            if entry.category.__name__ == "RefoldWarning":
                print("warning", entry.message)
        sys.stdout.flush()
        os._exit(failed)
    os.wait()
"""


def without(what, symbols):
    """Return what is printed without each name."""
    command = [sys.executable, "-c", PROGRAM, what, *symbols]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = dict(part.split("\n", 1) for part in done.stdout.split("symbol ")[1:])
    assert printed.keys() == set(symbols)
    assert not any("failed" in lines for lines in printed.values()), done.stdout
    return printed.items()


def test_loops_are_unrolled_without_a_name_of_dynamo():
    for symbol, printed in without("compile", DYNAMO):
        assert printed.count("warning loops over time are not captured") == 1, symbol
        assert "note loops are traced step by step: Dynamo of PyTorch" in printed, symbol
        assert "names roll up loop" in printed, symbol  # found after AOTAutograd


def test_the_compiler_runs_without_a_name_of_inductor():
    for symbol, printed in without("explain", list(COMPILER)):
        name = symbol.replace(":", ".")
        assert printed.count(f"has no {name}") == 1, printed
        assert ("nothing can be rewritten" in printed) == COMPILER[symbol], printed
        assert ("names roll up loop" in printed) != COMPILER[symbol], printed


def test_inductor_compiles_where_nothing_can_be_rewritten():
    ((_, printed),) = without("compile", ["torch._inductor.compile_fx:compile_fx"])
    assert "note nothing can be rewritten" in printed


def test_operators_run_without_a_name_of_pytorch():
    for symbol, printed in without("operators", OPERATORS):
        assert printed.count("warning PyTorch") == 1, symbol
        assert symbol.rpartition(":")[2] in printed


def loop(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)


@pytest.fixture
def capture():
    """Have loop capture as in a new process, and leave it so."""
    torch._dynamo.reset()
    dynamo.uninstall()
    dynamo.install()
    yield
    dynamo.uninstall()
    dynamo.install()
    torch._dynamo.reset()


def broken(*_):
    raise AttributeError("'RangeIteratorVariable' object has no attribute 'len'")


@pytest.mark.usefixtures("capture")
@pytest.mark.parametrize("name", ["remaining", "_state", "_meet_for"])
def test_a_change_in_dynamo_switches_capture_off_with_one_warning(monkeypatch, name):
    monkeypatch.setattr(hook, name, broken)
    x = torch.randn(2, STEPS, 3)
    compiled = refold.compile(loop, accept="always", verify="off", strict=True)
    with pytest.warns(RefoldWarning, match="not captured") as caught:
        torch.testing.assert_close(compiled(x), loop(x))
    assert len(caught) == 1
    assert "has no attribute 'len'" in dynamo.unavailable()


@pytest.mark.usefixtures("capture")
def test_a_capture_that_fails_inside_is_a_note(monkeypatch):
    monkeypatch.setattr(hook, "capture_loop", broken)
    x = torch.randn(2, STEPS, 3)
    compiled = refold.compile(loop, accept="always", verify="off", strict=True)
    torch.testing.assert_close(compiled(x), loop(x))
    assert any("has no attribute 'len'" in note for note in compiled.report.graphs[0].notes)
    assert dynamo.unavailable() is None


@pytest.mark.usefixtures("capture")
def test_other_backends_never_reach_the_capture(monkeypatch):
    for name in ("_meet_for", "_check_identity", "_attempt"):
        monkeypatch.setattr(hook, name, broken)
    x = torch.randn(2, STEPS, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(torch.compile(loop, backend="eager")(x), loop(x))


@pytest.mark.usefixtures("capture")
def test_another_backend_runs_even_where_marks_cannot_be_read(monkeypatch):
    monkeypatch.setattr(dynamo, "is_marked", broken)
    x = torch.randn(2, STEPS, 3)
    with pytest.warns(RefoldWarning, match="not captured"):
        torch.testing.assert_close(torch.compile(loop, backend="eager")(x), loop(x))


@pytest.mark.usefixtures("capture")
def test_uninstalling_gives_dynamo_back_its_interpreter():
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    patched = InstructionTranslatorBase.run
    dynamo.uninstall()
    assert InstructionTranslatorBase.run is not patched
    assert InstructionTranslatorBase.run.__module__ == "torch._dynamo.symbolic_convert"
    assert "uninstall() was called" in dynamo.unavailable()


def captured(**options):
    torch._dynamo.reset()
    compiled = refold.compile(loop, accept="always", verify="off", strict=True, **options)
    compiled(torch.randn(2, STEPS, 3))
    return any("loop_over_time" in row.site for row in compiled.report.rewrites), compiled.report.graphs[0].notes


@pytest.mark.usefixtures("capture")
def test_capture_can_be_switched_off(monkeypatch):
    assert captured()[0]
    assert not captured(loops="unroll")[0]
    x = torch.randn(2, STEPS, 3)
    report = refold.report.Report()
    options = {"loops": "unroll", "accept": "always", "verify": "off", "report": report}
    torch._dynamo.reset()
    torch.compile(loop, backend=backend.refold, options=options)(x)
    assert not any("loop_over_time" in row.site for row in report.rewrites)
    monkeypatch.setenv(dynamo.SWITCH, "unroll")
    found, notes = captured()
    assert not found
    assert any("REFOLD_LOOPS is set to unroll" in note for note in notes)
    with pytest.raises(ArgumentError, match="loops must be one of 'capture', 'unroll', not 'no'"):
        refold.compile(loop, loops="no")


@pytest.mark.usefixtures("capture")
@pytest.mark.parametrize("version", ["2.10.1", "2.14.0", "3.0.0+cu130"])
def test_other_versions_of_pytorch_are_not_touched(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert f"PyTorch {version} is not one of the tested versions, 2.11 to 2.13" in dynamo.unavailable()
    assert not dynamo.is_marked(dynamo.captures_loops(lambda gm, inputs: gm))
