"""What a program must leave of its process as it found it: settings, functions, random states, and what acts later.

The process of a trial makes one `Surroundings` before it loads its program, and asks it later what differs. All of it
is read by code in the program's own process, so it finds accidents and simple tricks. Where an accepted program is
used, it would act on the user's other code: variables of the environment, import hooks, modules under foreign names,
functions that run at exit. Libraries that a program imports may do such things, too. So of finders and functions at
exit, only those count that are not code of an installed package.
"""

from __future__ import annotations

import atexit
import builtins
import codecs
import ctypes
import decimal
import functools
import gc
import hashlib
import itertools
import logging
import operator
import os
import random
import resource
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

try:
    from numpy import geterr as numpy_errors
    from numpy import random as numpy_random
except ImportError:  # then no program draws from it
    numpy_random = numpy_errors = None  # type: ignore[assignment]

_BACKENDS = [torch.backends, *(getattr(getattr(torch.backends, name, None), kind, None) for name in
                               ("cuda", "cudnn", "mkldnn") for kind in ("matmul", "conv", "rnn"))]  # fmt: skip

_INSIDE = operator.attrgetter("__code__"), operator.attrgetter("__defaults__")
_WRAPPED = {staticmethod: "__func__", classmethod: "__func__", property: "fget"}


# Events of Python by which a program reaches beyond its folder, whatever comes of it; of the first, if a path is there.
_PATHS = ("open", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate",
          "shutil.rmtree", "shutil.move")  # fmt: skip
_STARTS = ("subprocess.Popen", "os.posix_spawn")  # which compilers may be
_BEYOND = ("os.system", "os.exec", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
           "urllib.Request", "webbrowser.open")  # fmt: skip
_COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "hipcc", "ninja", "ld", "ldconfig",
              os.path.basename(sys.executable))  # fmt: skip
_HEARD = frozenset((*_PATHS, *_STARTS, *_BEYOND))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_LIBRARY = os.path.dirname(os.__file__) + os.sep


def _is_other(old: Any, new: Any, constant: bool) -> bool:
    """Say whether a number or a text is another; what counts on, or notes that something was done, is as it was."""
    if old is None:
        return isinstance(new, (str, bytes))
    if constant or type(old) in (float, complex, str, bytes):
        return type(old) in (int, bool, float, complex, str, bytes) and (type(new) is not type(old) or new != old)
    return type(old) in (bool, int) and (type(new) is not type(old) or new < old)


def _function(value: Any) -> Any:
    """Return the function of a method, as its class has it."""
    return getattr(value, _WRAPPED[type(value)]) if type(value) in _WRAPPED else value


class _Before(NamedTuple):
    """Modules and classes with what they hold, their tables, and functions with what they do when they are called."""

    owners: list[tuple[Any, dict[str, Any]]]
    tables: list[tuple[str, dict[Any, Any], dict[Any, Any]]]
    known: set[int]
    functions: list[FunctionType]
    codes: list[CodeType]
    defaults: list[Any]
    named: list[tuple[FunctionType, dict[str, Any]]]


@functools.cache
def before() -> _Before:
    """Return all modules, classes and functions as they are when this is first asked.

    The process from which others are forked asks first, so that it takes their time once.
    """
    modules = [m for name, m in list(sys.modules.items())
               if isinstance(m, ModuleType) and name != "__main__" and not name.startswith("refold judge")]  # fmt: skip
    # isinstance would ask values for their class, which some of torch make up then.
    kinds = (v for m in modules for v in vars(m).values() if issubclass(type(v), type))
    classes = {id(v): v for v in kinds if vars(v).get("__module__") != "__main__"}
    owners = [(owner, dict(vars(owner))) for owner in (*modules, *classes.values())]
    tables = {id(v): (f"{owner.__name__}.{name}", v, dict(v)) for owner, held in owners if isinstance(owner, ModuleType)
              for name, v in held.items() if type(v) is dict and not name.startswith("__")}  # fmt: skip
    held = {id(f): f for _, held in owners for f in map(_function, held.values())}
    functions = [f for f in held.values() if type(f) is FunctionType]
    named = [(f, dict(f.__kwdefaults__)) for f in functions if f.__kwdefaults__]
    codes, defaults = (list(map(part, functions)) for part in _INSIDE)
    return _Before(owners, list(tables.values()), set(held), functions, codes, defaults, named)


# Variables that may be set: without a GPU, Triton's kernels need the first; the others, compilers set for themselves.
_VARIABLES = ("TRITON_INTERPRET", "_TORCHINDUCTOR_", "__KMP_", "KMP_")
# Names that code has which C libraries compile, and Python's own.
_INTERNAL = ("<internal>", "<frozen ")


class Surroundings:
    """A process before its program is loaded.

    Args:
        folder: The program's own folder, which holds its source and all that it writes.
        private: Returns settings that have no public name.
    """

    def __init__(self, folder: Path, private: Callable[[], dict[str, Any]]):
        self._folder, self._private = str(folder.resolve()), private
        self._variables = _variables()
        self._path, self._finders = list(sys.path), [*sys.meta_path, *sys.path_hooks]
        self._modules = dict(sys.modules)
        self._at_exit: list[Callable[..., Any]] = []
        self._audits: list[Callable[..., Any]] = []
        self._finalizers: list[weakref.finalize[..., Any]] = []
        self._reached: list[str] = []
        self._listen()
        self._before, self._settings = before(), self._found()

    def settings(self) -> dict[str, str]:
        """Return settings that are others than before, with their values now."""
        return {n: v for n, v in self._found().items() if n in self._settings and self._settings[n] != v}

    def replaced(self) -> Iterator[str]:
        """Name functions, classes, modules and numbers that are others than before, and methods that hide others."""
        known = self._before
        for owner, held in known.owners:
            now = vars(owner)
            if len(now) == len(held) and all(map(operator.is_, now.values(), held.values())):
                continue
            path = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
            for name, old in held.items():
                made = callable(old) or type(old) in _WRAPPED or issubclass(type(old), ModuleType)
                new = now.get(name)
                if old is None and isinstance(owner, type):
                    continue  # classes of torch note there what they found out
                if new is not old and (not self._is_packages(new) if made else self._is_number(path, name, old, new)):
                    yield f"{path}.{name}"
            for name in now.keys() - held.keys() if isinstance(owner, type) else ():
                hides = callable(now[name]) and any(name in vars(base) for base in owner.__mro__[1:])
                if hides and not self._is_packages(now[name]):
                    yield f"{path}.{name}"
        for path, table, held in known.tables:
            if not (len(table) == len(held) and all(map(operator.is_, table.values(), held.values()))):
                yield from (f"{path}[{key!s:.80}]" for key in held.keys() - table.keys() if isinstance(key, type))
                yield from (f"{path}[{key!s:.80}]" for key, value in list(table.items())
                            if value is not held.get(key) and self._is_registered(key, value, held))  # fmt: skip
        for part, values in zip(_INSIDE, (known.codes, known.defaults), strict=True):
            if not all(map(operator.is_, map(part, known.functions), values)):
                each = zip(known.functions, values, strict=True)
                yield from (f"{f.__module__}.{f.__qualname__}" for f, value in each if part(f) is not value)
        yield from (f"{f.__module__}.{f.__qualname__}" for f, value in known.named if f.__kwdefaults__ != value)

        # What was imported since then is a package's own, but for what the program has put there.
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) if name not in self._modules else None
            if isinstance(file, str) and not file.startswith(self._folder):
                yield from (f"{name}.{n}" for n, f in list(vars(module).items())
                            if type(f) is FunctionType and f.__code__.co_filename.startswith(self._folder))  # fmt: skip

    def _is_number(self, path: str, name: str, old: Any, new: Any) -> bool:
        """Say whether a number or text of a module is another; torch's compiler changes that of distributions."""
        compiled = name == "_validate_args" and "torch._dynamo" in sys.modules
        constant = name.isupper() and "._" not in f"{path}.{name}"
        inside = isinstance(new, str) and new.startswith(self._folder)  # as of temporary files
        return not (name.startswith("__") or compiled or inside) and _is_other(old, new, constant)

    def _is_registered(self, key: Any, value: Any, held: dict[Any, Any]) -> bool:
        """Say whether a table has functions of the program's own for what is not, or others for classes."""
        kinds = key if isinstance(key, tuple) else (key,)
        foreign = all(isinstance(kind, type) and kind.__module__ in self._modules for kind in kinds)
        each = [f for f in map(_function, value if isinstance(value, tuple) else [value]) if type(f) is FunctionType]
        return (key in held or foreign) and any(self.is_own(f) or (key in held and foreign) for f in each)

    def _is_packages(self, new: Any) -> bool:
        """Say whether an installed package wrote what is new, as torch's compiler does when it is imported."""
        new = _function(new)
        listens = getattr(new, "__module__", None) == __name__
        return listens or (id(new) not in self._before.known and not self.is_own(new))

    def _found(self) -> dict[str, str]:
        values = {
            **self._private(),
            "variables of the environment": self._other_variables(),
            "import hooks": self._own_finders(),
            "folders of modules": self._own_folders(),
            "modules": self._own_modules(),
            "functions at exit": [str(f) for f in (*self._at_exit, *self._finalized()) if self.is_own(f)],
            "what it asks of the system": self._reached,
            "hooks of audits": [str(f) for f in self._audits if self.is_own(f)],
            "what torch.load lets run": [str(f) for f in torch.serialization.get_safe_globals() if self.is_own(f)],
            "warnings as errors": [each for each in warnings.filters if each[0] == "error"],
        }
        return _settings() | {name: str(value) for name, value in values.items()}

    def _other_variables(self) -> list[str]:
        now = _variables()
        others = {name for name, _ in self._variables.items() ^ now.items() if not name.startswith(_VARIABLES)}
        return sorted(f"{name}={now.get(name)}" for name in others)

    def _finalized(self) -> list[Any]:
        """List functions that run when an object is gone, and at exit; that a cache forgets the object is no matter."""
        found = [each.peek() for each in self._finalizers if each.atexit]
        functions = [each[1] for each in found if each is not None]
        return [f for f in functions if not isinstance(getattr(f, "__self__", None), (dict, set))]

    def _own_finders(self) -> list[str]:
        now = [*sys.meta_path, *sys.path_hooks]
        kept = [f for f in now if any(f is old for old in self._finders)]
        same = len(kept) == len(self._finders) and all(map(operator.is_, kept, self._finders))
        fresh = [f for f in now if not any(f is old for old in self._finders)]
        own = [str(f) for f in fresh if self.is_own(f if isinstance(f, type) or callable(f) else type(f))]
        return own if same else ["those from before", *own]

    def _own_folders(self) -> list[str]:
        """Folders of an installed package may be added, as a package does with those that it brings along."""
        lost = [path for path in self._path if path not in sys.path]
        fresh = [path for path in sys.path if path not in self._path]
        return lost + [path for path in fresh if not str(path).startswith(tuple(p + os.sep for p in self._path if p))]

    def _own_modules(self) -> list[str]:
        """Modules in the place of others: of those that were imported, and of those that may be imported later."""
        now = dict(sys.modules)
        others = [name for name, old in self._modules.items() if now.get(name, old) is not old]
        for name in now.keys() - self._modules.keys():
            spec = getattr(now[name], "__spec__", None)
            made_up = spec is None or str(getattr(spec, "origin", "")).startswith(self._folder)
            if "." not in name and made_up and PathFinder.find_spec(name, self._path) is not None:
                others.append(name)
        return sorted(others)

    def is_own(self, function: Any) -> bool:
        """Say whether a function or class is written in no installed package and not in Python's library."""
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is None and isinstance(getattr(function, "__self__", None), ModuleType):
            return True  # as os._exit, which says nothing of who wanted it
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        file = code.co_filename if code is not None else getattr(module, "__file__", None)
        return file is None or (file.startswith((self._folder, "<")) and not file.startswith(_INTERNAL))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Write down by what the program reaches beyond its folder."""
        if event not in _HEARD:  # as most are not, of which reading the code of a function is one
            return
        if event in _STARTS:
            started = arguments[1] if isinstance(arguments[1], (list, tuple)) else [arguments[1]]
            if os.path.basename(os.fsdecode(next(iter(started), ""))) not in _COMPILERS:
                self._reach(event, started)
        elif event in _BEYOND or self._is_outside(event, arguments):
            self._reach(event, arguments[0] if arguments else "")

    def _is_outside(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Say whether a file is changed that is neither in its folder, but for the home there, nor a device."""
        if isinstance(arguments[0], int) or (event == "open" and not (arguments[2] or 0) & _WRITES):
            return False
        path, home = os.path.realpath(os.fsdecode(arguments[0])), os.path.join(self._folder, "home")
        inside = path.startswith((self._folder, "/dev/")) and not path.startswith(home)
        return not inside and not path.startswith(os.path.join(home, ".cache"))

    def _reach(self, event: str, what: Any) -> None:
        """Note an event if the program asked for it itself, or by Python's library, and no import did."""
        frame = sys._getframe(2)
        while (file := frame.f_code.co_filename) == __file__ or (file.startswith(_LIBRARY) and "-packages" not in file):
            if frame.f_back is None:
                break
            frame = frame.f_back
        if file.startswith(self._folder):
            self._reached.append(f"{event} {what!s:.80}")

    def _listen(self) -> None:
        """Write down which functions are to run at exit, and at each event; Python does not tell."""
        sys.addaudithook(self._hear)

        def listen(owner: Any, name: str, note: Callable[..., Any]) -> None:
            function = getattr(owner, name)

            def heard(*args: Any, **kwargs: Any) -> Any:
                note(*args, **kwargs)
                return function(*args, **kwargs)

            setattr(owner, name, heard)

        def unregistered(function: Any) -> None:
            self._at_exit = [f for f in self._at_exit if f != function]

        listen(atexit, "register", lambda function, *_, **__: self._at_exit.append(function))
        listen(atexit, "unregister", unregistered)
        listen(sys, "addaudithook", self._audits.append)
        listen(weakref.finalize, "__init__", lambda this, *_, **__: self._finalizers.append(this))
        listen(os, "register_at_fork", lambda **functions: self._reach("os.register_at_fork", sorted(functions)))


def _variables() -> dict[str, str]:
    """Return the variables of the environment, as Python and as the C library have them, where these differ."""
    found = dict(os.environ)
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    for entry in itertools.takewhile(bool, map(entries.__getitem__, itertools.count() if entries else ())):
        name, _, value = os.fsdecode(entry).partition("=")
        if found.get(name) != value:
            found[f"{name} of the C library"] = value
    return found


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


# Global switches of torch that change what other code computes or how fast: values, or functions that tell them.
_SWITCHES = """
    backends.opt_einsum.enabled backends.opt_einsum.strategy get_default_device get_deterministic_debug_mode
    backends.mha.get_fastpath_enabled backends.cudnn.benchmark_limit sparse.check_sparse_tensor_invariants.is_enabled
    __future__.get_overwrite_module_params_on_conversion __future__.get_swap_module_params_on_conversion
"""


_LIBM = ctypes.CDLL("libm.so.6") if "libm.so.6" in Path("/proc/self/maps").read_text() else None


def _settings() -> dict[str, str]:
    """Return the global switches that change what other code computes or how fast."""
    switches = ((name, operator.attrgetter(name)(torch)) for name in _SWITCHES.split())
    values: dict[str, Any] = {f"torch.{name}": value() if callable(value) else value for name, value in switches}
    values |= {
        # That none is set means the same, unless one is set for all.
        "precision of backends": [str(getattr(at, "fp32_precision", "")).replace("none", "ieee") for at in _BACKENDS],
        "autocast": [(torch.is_autocast_enabled(at), torch.get_autocast_dtype(at)) for at in ("cpu", "cuda")],
        "arithmetic": _arithmetic(),
        "logging": (logging.root.manager.disable, logging.root.level, logging.root.filters),
        "numpy's errors": None if numpy_random is None else numpy_errors(),
        "decimal numbers": [getattr(decimal.getcontext(), name) for name in ("prec", "rounding", "Emax", "Emin")],
        # Torch's compiler raises the first.
        "interpreter": (
            min(sys.getrecursionlimit(), 1000),
            sys.get_int_max_str_digits(),
            sys.getdlopenflags(),
            sys.getswitchinterval(),
        ),
        "streams": [id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "errors of codecs": [codecs.lookup_error(name) for name in ("strict", "ignore", "replace", "surrogateescape")],
        "opener of addresses": getattr(sys.modules.get("urllib.request"), "_opener", None) is not None,
        "names of builtins": sorted(vars(builtins).keys() - {"_"}),
        "threads and sockets": (threading.stack_size(), socket.getdefaulttimeout()),
        "signals that wait": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "folder": os.getcwd(),
        "processors": sorted(os.sched_getaffinity(0)),
        "priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        "timers": [signal.getitimer(kind)[0] > 0 for kind in (0, 1, 2)],
        "signal handlers": {n: str(signal.getsignal(n)) for n in signal.valid_signals()},
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "hooks of the interpreter": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook),
        "rights of new files": _umask(),
        "limits": [resource.getrlimit(kind) for name, kind in vars(resource).items() if name.startswith("RLIMIT_")],
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
    }
    return {name: str(value) for name, value in values.items()}


def _arithmetic() -> tuple[bool, int, int]:
    """Say whether denormal numbers count as zero, how is rounded, and what ends the process (of glibc)."""
    zero = float(torch.tensor([1e-39]).mul_(1.0)) == 0.0
    rounding, traps = (int(getattr(_LIBM, name, int)()) for name in ("fegetround", "fegetexcept"))
    return zero, rounding, traps


def seed(number: int) -> None:
    """Seed the random numbers of torch, Python and NumPy."""
    torch.manual_seed(number)
    torch.rand(())  # the state is not what torch.initial_seed() tells of it
    random.seed(number)
    if numpy_random is not None:
        numpy_random.seed(number % 2**32)


def random_state() -> str:
    """Return a name of the state of all random numbers."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    if numpy_random is not None:
        _, keys, *rest = numpy_random.get_state()
        digest.update(repr((list(keys), rest)).encode())
    if torch.cuda.is_initialized():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()
