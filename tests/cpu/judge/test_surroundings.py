"""What the process of a trial sees of its surroundings: each thing that a program may leave behind, by its name."""

import atexit
import builtins
import contextlib
import copyreg
import ctypes
import decimal
import functools
import gc
import importlib.util
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import types
import warnings
from unittest import mock

import pytest
import torch

from refold.judge.surroundings import Surroundings, before

pytestmark = pytest.mark.rows(3)
FINDER = type("Finder", (), {"find_spec": staticmethod(lambda name, path=None, target=None: None), "__module__": "x"})


@pytest.fixture(autouse=True)
def _without_collections():
    """Hypothesis, which other tests of this process may have imported, counts their time in its modules."""
    gc.disable()
    yield
    gc.enable()


@contextlib.contextmanager
def in_folder(name):
    """Import a module from the program's own folder, as a program would that writes one there."""
    with open(f"{name}.py", "w") as file:
        file.write("x = 1\n")
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(f"{name}.py"))
    with mock.patch.dict(sys.modules, {name: importlib.util.module_from_spec(spec)}):
        yield


@contextlib.contextmanager
def at_exit(function, *args):
    atexit.register(function, *args)
    yield
    atexit.unregister(function)


@contextlib.contextmanager
def changed(owner, name, value):
    old = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, old)


@contextlib.contextmanager
def for_a_while(function, value, old):
    function(value)
    yield
    function(old)


def blocked(number):
    return for_a_while(lambda how: signal.pthread_sigmask(how, [number]), signal.SIG_BLOCK, signal.SIG_UNBLOCK)


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(atexit, "register", atexit.register)
    monkeypatch.setattr(atexit, "unregister", atexit.unregister)
    monkeypatch.setattr(os, "register_at_fork", os.register_at_fork)
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)  # none could be taken away again
    before.cache_clear()
    return lambda: Surroundings(tmp_path, dict)  # in the test: pytest has a variable for each part of one


SEEN = {
    "variables of the environment": lambda: mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "64"}),
    "variables of the environment, gone": lambda: mock.patch.dict(os.environ, clear=True),
    "import hooks": lambda: mock.patch.object(sys, "meta_path", [FINDER, *sys.meta_path]),
    "import hooks, of paths": lambda: mock.patch.object(sys, "path_hooks", [FINDER, *sys.path_hooks]),
    "import hooks, in another order": lambda: mock.patch.object(sys, "meta_path", sys.meta_path[::-1]),
    "folders of modules": lambda: mock.patch.object(sys, "path", [os.getcwd(), *sys.path]),
    "modules": lambda: in_folder("yaml"),
    "modules, made up": lambda: mock.patch.dict(sys.modules, {"yaml": types.ModuleType("yaml")}),
    "modules, replaced": lambda: mock.patch.dict(sys.modules, {"json": types.ModuleType("json")}),
    "functions at exit": lambda: at_exit(os._exit, 0),
    "functions at exit, in pieces": lambda: at_exit(functools.partial(eval("lambda: None"))),
    "warnings as errors": lambda: mock.patch.object(warnings, "filters", [("error", None, BytesWarning, None, 7)]),
    "hooks of the interpreter": lambda: mock.patch.object(sys, "excepthook", print),
    "logging": lambda: changed(logging.root.manager, "disable", 50),
    "what torch.load lets run": lambda: torch.serialization.safe_globals([os.system]),
    "decimal numbers": lambda: changed(decimal.getcontext(), "prec", 1),
    "names of builtins": lambda: mock.patch.object(builtins, "zeros", 0, create=True),
    "streams": lambda: contextlib.redirect_stdout(None),
    "signals that wait": lambda: blocked(signal.SIGINT),
    "interpreter": lambda: for_a_while(sys.setrecursionlimit, 500, sys.getrecursionlimit()),
    "threads and sockets": lambda: for_a_while(socket.setdefaulttimeout, 1.0, None),
    "arithmetic, rounded up": lambda: for_a_while(ctypes.CDLL("libm.so.6").fesetround, 0x800, 0),
    "torch.backends.opt_einsum.enabled": lambda: mock.patch.object(torch.backends.opt_einsum, "enabled", False),
    "precision of backends": lambda: changed(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
}


@pytest.mark.parametrize("what", SEEN)
def test_what_acts_later_is_seen(what, surroundings, monkeypatch):
    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    surroundings = surroundings()
    assert (surroundings.settings(), sorted(surroundings.replaced())) == ({}, [])
    with SEEN[what]():
        assert list(surroundings.settings()) == [what.partition(",")[0]]
    assert (surroundings.settings(), sorted(surroundings.replaced())) == ({}, [])


REPLACED = """builtins.sum numpy.mean statistics.median random.Random.shuffle torch.optim.sgd.SGD.step
    torch.nn.modules.linear.Linear.forward torch.nn.modules.linear.Linear.__call__"""


@pytest.mark.parametrize("path", REPLACED.split())
@pytest.mark.parametrize("value", [print, torch.nn.functional.relu])
def test_what_is_replaced_is_seen(path, value, surroundings):
    surroundings = surroundings()
    assert sorted(surroundings.replaced()) == []
    with mock.patch(path, value):
        assert sorted(surroundings.replaced()) == [path]
    assert sorted(surroundings.replaced()) == []


@pytest.mark.parametrize(("path", "value"), [("math.pi", 3.0), ("sys.maxsize", 7), ("string.digits", "01")])
def test_a_number_that_is_another_is_seen(path, value, surroundings):
    surroundings = surroundings()
    with mock.patch(path, value):
        assert sorted(surroundings.replaced()) == [path]
    assert sorted(surroundings.replaced()) == []


def test_what_is_registered_for_others_is_seen(surroundings):
    own, other = type("Own", (), {"__module__": "candidate"}), eval("lambda x: 0")
    surroundings = surroundings()
    with mock.patch.dict(copyreg.dispatch_table, {own: other}):
        assert sorted(surroundings.replaced()) == []
    with mock.patch.dict(copyreg.dispatch_table, {int: other}):
        (found,) = sorted(surroundings.replaced())
        assert found.endswith("dispatch_table[<class 'int'>]")


@pytest.mark.parametrize(
    ("name", "value"), [("__code__", (lambda: 0).__code__), ("__kwdefaults__", {"rtol": 1e9}), ("__defaults__", (0,))]
)
def test_a_function_that_does_something_else_is_seen(name, value, surroundings):
    surroundings = surroundings()
    with changed(torch.testing.assert_close, name, value):
        assert sorted(surroundings.replaced()) == ["torch.testing._comparison.assert_close"]
    assert sorted(surroundings.replaced()) == []


def test_what_is_replaced_in_a_later_import_is_seen(surroundings, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    surroundings = surroundings()
    import colorsys

    assert sorted(surroundings.replaced()) == []
    exec(compile("def own(*_): pass", str(tmp_path / "candidate.py"), "exec"), names := {})
    monkeypatch.setattr(colorsys, "rgb_to_hsv", names["own"])
    assert sorted(surroundings.replaced()) == ["colorsys.rgb_to_hsv"]


def test_what_packages_do_is_left_to_them(surroundings, tmp_path):
    """A folder is removed at exit by Python's own function; a package finds its own modules; Triton is interpreted."""
    surroundings = surroundings()
    package = next(path for path in sys.path if path.endswith("site-packages"))
    finder = type("Finder", (), {"find_spec": FINDER.find_spec, "__module__": "torch"})
    with (
        at_exit(shutil.rmtree, tmp_path / "folder", True),
        mock.patch.object(sys, "path", [*sys.path, f"{package}/setuptools/_vendor"]),
        mock.patch.object(sys, "meta_path", [*sys.meta_path, finder]),
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        in_folder("of_its_own"),
    ):
        assert (surroundings.settings(), sorted(surroundings.replaced())) == ({}, [])


def test_all_variables_are_seen_also_those_of_the_c_library():
    code = (
        "import ctypes, pathlib; from refold.judge.surroundings import Surroundings;"
        "found = Surroundings(pathlib.Path('.'), dict); ctypes.CDLL(None).setenv(b'LD_PRELOAD', b'x.so', 1);"
        "print(found.settings())"
    )
    assert "LD_PRELOAD" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
