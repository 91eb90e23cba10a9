"""Names of PyTorch that are not its public interface: without any one of them refold is slower, and right."""

import functools
import re
import subprocess
import sys
import warnings

import pytest
import torch

import refold
from refold import versions
from refold.compiler import backend, dynamo
from refold.compiler.dynamo import switch
from refold.compiler.dynamo.capture import hook
from refold.errors import ArgumentError, RefoldWarning
from refold.integrations import mixers
from support.private_names import ROOT, imported

STEPS = 20

COMPILER = ROOT / "compiler"
# All that the files of each door import, and what they look up there.
DYNAMO = {f"{module}:{name}" for path in (COMPILER / "dynamo").rglob("*.py") for module, name in imported(path)} | {
    "torch._dynamo.symbolic_convert:InliningGeneratorInstructionTranslator",
}
NEEDED = {f"{module}:{name}" for module, name in imported(COMPILER / "private.py")} | {
    "torch._inductor.config:joint_custom_pre_pass"
}
LOOPS = {
    "torch._dynamo.polyfills.builtins:enumerate",
    "torch._dynamo.variables.iter:MapVariable",
    "torch._dynamo.variables.iter:ZipVariable",
}
OPTIONAL = {
    "torch._inductor:list_options",
    "torch._inductor:list_mode_options",
    "torch._inductor.config:save_config_portable",
    "torch.fx.experimental.symbolic_shapes:statically_known_true",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch._guards:tracing",
    "torch._inductor.codegen.custom_extern_kernel_codegen:CustomCodegen",
    "torch._guards:CompileContext",
    "torch._dynamo.exc:TensorifyScalarRestartAnalysis",
    "torch._dynamo.metrics_context:MetricsContext",
    "torch.utils._sympy.functions:PythonMod",
}
OPERATORS = {
    "torch._C._dynamo.guards:TensorGuards",
    "torch._C:_len_torch_dispatch_stack",
    "torch._C:_len_torch_function_stack",
    "torch._C:_get_function_stack_at",
    "torch._C._functorch:peek_interpreter_stack",
    "torch.autograd.forward_ad:_current_level",
    "torch._C:_after_autograd_keyset",
    "torch._C._autograd:_profiler_enabled",
    "torch._C:DispatchKeySet",
}

# A process that has imported PyTorch and what comes before the compiler, and forks itself for every set of names.
# They are deleted before the rest is imported. PyTorch itself imports some when it needs them, so they come back.
PROGRAM = """
import importlib, os, sys, types, warnings
import torch, torch._dynamo.symbolic_convert, torch._inductor.compile_fx
import refold.report

def loop(x):
    h, ys = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        ys.append(h)
    return torch.stack(ys, 1)

def operators():
    import refold.ops.torch.registry
    yield
    x, a = torch.randn(2, 20, 3), torch.rand(2, 20, 3)
    first, *others = (refold.ops.linear_scan(a, x, backend="torch")[0] for _ in range(3))
    for y in others:
        torch.testing.assert_close(y, first, rtol=0, atol=0)
    a.requires_grad_()
    refold.ops.linear_scan(a, x, backend="torch")[0].sum().backward()
    assert a.grad.isfinite().all()

def door():
    from refold.compiler import dynamo
    dynamo.install()
    dynamo.rewriting_before_autograd()
    yield
    print("loops", dynamo.unavailable())
    print("training", dynamo.rewriting_before_autograd())

def private():
    import refold.compiler.private
    yield

def entry():
    import refold.compiler.backend
    yield
    print("entries of", refold.compiler.backend.compile.__module__)

def schemas():
    import refold.ops.torch.private

    class Operation:  # of a PyTorch that keeps it elsewhere
        pass

    read = refold.ops.torch.private.schema
    refold.ops.torch.private.schema = lambda op: read(Operation())
    import refold.compiler.backend
    yield
    print("entries of", refold.compiler.backend.compile.__module__)

def explain():
    import refold.compiler.backend
    yield
    (graph,) = refold.explain(loop, torch.randn(2, 20, 3)).graphs
    print("note", *graph.notes)
    print("names", *[row.name for row in graph.rewrites])

def train():
    import refold.compiler.backend, refold.compiler.dynamo
    refold.compiler.dynamo.rewriting_before_autograd()
    yield
    compiled = refold.compile(loop, accept="always", verify="off", strict=True)
    x = torch.randn(2, 20, 3, requires_grad=True)
    y = compiled(x)
    torch.testing.assert_close(y, loop(x))
    (got,), (want,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(loop(x).sum(), x)
    torch.testing.assert_close(got, want)
    print("note", *compiled.report.graphs[0].notes)
    print("names", *[row.name for row in compiled.report.rewrites])

class Twin(types.ModuleType):
    def __init__(self, original):
        super().__init__(original.__name__)
        self.original, self.without = original, set()

    def __getattr__(self, name):
        if name in self.without:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.original, name)

def look(symbols, check):
    twins, modules = {}, {}
    for symbol in symbols:
        module, name = symbol.split(":")
        if module not in twins:
            twins[module] = Twin(importlib.import_module(module))
            put(module, twins[module])
        twins[module].without.add(name)
        if symbol.replace(":", ".") in sys.modules:
            modules[symbol.replace(":", ".")] = sys.modules[symbol.replace(":", ".")]
            sys.modules[symbol.replace(":", ".")] = None
    steps = check()
    next(steps)
    sys.modules.update(modules)
    for module, twin in twins.items():
        put(module, twin.original)
    next(steps, None)

def put(module, found):
    parent, _, leaf = module.rpartition(".")
    sys.modules[module] = found
    setattr(sys.modules[parent], leaf, found)

for name, symbols in (pair.split("=") for pair in sys.argv[1:]):
    print("symbol", f"{name}={symbols}", flush=True)
    check = globals()[name]
    if check is door:
        import refold.compiler.pipeline
    if os.fork() == 0:
        failed = 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                look(symbols.split(","), check)
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


def without(**checks):
    """Return for each check what it prints without each set of names."""
    pairs = [f"{name}={','.join(sorted(symbols))}" for name, sets in checks.items() for symbols in sets]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *pairs], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = dict(part.split("\n", 1) for part in done.stdout.split("symbol ")[1:])
    assert printed.keys() == set(pairs)
    assert not any("failed" in lines for lines in printed.values()), done.stdout
    return [
        {pair.partition("=")[2]: lines for pair, lines in printed.items() if pair.startswith(f"{name}=")}
        for name in checks
    ]


# Of names, one in so many; each is a process.
SHARES = pytest.mark.parametrize("share", [48, pytest.param(1, marks=[pytest.mark.exhaustive, pytest.mark.slow])])


def each(symbols):
    return [[symbol] for symbol in symbols]


TRAIN = ["torch._inductor.compile_fx:compile_fx", "torch._functorch.compile_utils:fx_graph_cse"]


@functools.cache
def some(share):
    """Return the output of all checks, by one process that forks; `door` is last: it imports what others must not."""
    names = {"entry": each(sorted(NEEDED)[::share]), "train": each(TRAIN), "schemas": [["torch._guards:tracing"]]}
    names |= {"private": each(sorted(OPTIONAL)[::share]), "explain": [OPTIONAL]}
    names |= {"operators": each(sorted(OPERATORS)[::share])}
    names |= {"door": each(sorted(DYNAMO)[::share]) + each(LOOPS)}
    return dict(zip(names, without(**names), strict=True))


@pytest.mark.slow
@SHARES
def test_the_door_to_dynamo_shuts_without_any_name_behind_it(share):
    door = some(share)["door"]
    for symbol in sorted(DYNAMO)[::share]:
        printed = door[symbol]
        shut = [line for line in printed.splitlines() if line.startswith(("loops Dynamo of", "training None"))]
        assert shut, symbol
        assert printed.count("warning ") == len(shut), printed
        assert symbol.rpartition(":")[2] in printed, printed


@pytest.mark.slow
@SHARES
def test_one_kind_of_loop_is_off_without_a_name_of_its_iterator(share):
    for symbol, printed in some(share)["door"].items():
        if symbol not in LOOPS:
            continue
        assert "loops None" in printed, printed
        assert printed.count("warning loops over") == printed.count("warning ") == 1, printed
        assert symbol.rpartition(":")[2] in printed, printed


@pytest.mark.slow
@SHARES
def test_programs_are_compiled_without_any_name_that_the_compiler_needs(share):
    entry, train, schemas = (some(share)[name] for name in ("entry", "train", "schemas"))
    for symbol, printed in entry.items():
        assert "entries of refold.compiler.without" in printed, symbol
        assert printed.count("warning refold rewrites nothing") == printed.count("warning ") == 1, printed
        assert symbol.rpartition(":")[2] in printed, printed
    nothing, unrolled = (train[symbol] for symbol in TRAIN)
    assert "note nothing can be rewritten" in nothing
    assert unrolled.count("warning loops over time are not captured") == 1
    assert unrolled.count("warning recurrences are rewritten less in training") == 1
    assert "note loops are traced step by step: Dynamo of PyTorch" in unrolled
    assert "names roll up loop" in unrolled  # found after AOTAutograd
    (printed,) = schemas.values()
    assert "entries of refold.compiler.without" in printed
    assert "'Operation' object has no attribute '_schema'" in printed
    assert printed.count("warning refold rewrites nothing") == printed.count("warning ") == 1


def test_a_layer_is_called_if_its_hooks_may_be_elsewhere(monkeypatch):
    layer, x = torch.nn.Linear(3, 4), torch.randn(2, 3)
    product, bias = mixers._apart(layer, x)
    torch.testing.assert_close(product + bias, layer(x))
    monkeypatch.setattr(mixers, "HOOKS", ("_hooks_of_a_later_version",))
    whole, none = mixers._apart(layer, x)
    torch.testing.assert_close(whole, layer(x))
    assert none is None


@pytest.mark.slow
@SHARES
def test_one_thing_is_off_without_a_name_that_the_compiler_can_do_without(share):
    private, explain = (some(share)[name] for name in ("private", "explain"))
    for symbol, printed in private.items():
        assert printed.count(f"has no {symbol.replace(':', '.')}") == printed.count("warning ") == 1, printed
    (printed,) = explain.values()
    assert "names roll up loop" in printed
    assert printed.count("warning ") == len(OPTIONAL)


@pytest.mark.slow
@SHARES
def test_operators_run_without_a_name_of_pytorch(share):
    for symbol, printed in some(share)["operators"].items():
        assert printed.count(": PyTorch") == printed.count("warning ") == 1, symbol
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
def test_a_change_in_dynamo_costs_the_loops_that_meet_it_with_one_warning(monkeypatch, name):
    x = torch.randn(2, STEPS, 3)
    with monkeypatch.context() as changed:
        changed.setattr(hook, name, broken)
        compiled = refold.compile(loop, accept="always", verify="off", strict=True)
        with pytest.warns(RefoldWarning, match="not captured") as caught:
            torch.testing.assert_close(compiled(x), loop(x))
        assert len(caught) == 1
        assert not any("loop_over_time" in row.site for row in compiled.report.rewrites)
        assert any("has no attribute 'len'" in line for line in versions.losses())
    assert dynamo.unavailable() is None
    assert captured()[0]


@pytest.mark.usefixtures("capture")
def test_a_check_that_cannot_be_made_in_a_body_refuses_the_loop(monkeypatch):
    def compares(x):
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = h if x[:, t] is h else 0.5 * h + x[:, t]
        return h

    monkeypatch.setattr(hook, "_check_identity", broken)
    x = torch.randn(2, STEPS, 3)
    compiled = refold.compile(compares, accept="always", verify="off", strict=True)
    with pytest.warns(RefoldWarning, match="not captured"):
        torch.testing.assert_close(compiled(x), compares(x))
    assert not any("loop_over_time" in row.site for row in compiled.report.rewrites)
    assert any("has no attribute 'len'" in note for note in compiled.report.graphs[0].notes)


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
    monkeypatch.setattr(switch, "is_marked", broken)
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
    monkeypatch.setenv(switch.SWITCH, "unroll")
    found, notes = captured()
    assert not found
    assert any("REFOLD_LOOPS is set to unroll" in note for note in notes)
    with pytest.raises(ArgumentError, match="loops must be one of 'capture', 'unroll', not 'no'"):
        refold.compile(loop, loops="no")


@pytest.mark.usefixtures("capture")
@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0+cu130"])
def test_other_versions_of_pytorch_are_not_touched_and_one_warning_says_so(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert f"torch {version} was not tested, torch 2.11 to 2.15 were" in dynamo.unavailable()
    with pytest.warns(RefoldWarning, match=f"not captured.*{re.escape(version)} was not tested"):
        marked = dynamo.captures_loops(lambda gm, inputs: gm)
    assert not switch.is_marked(marked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dynamo.captures_loops(lambda gm, inputs: gm)
