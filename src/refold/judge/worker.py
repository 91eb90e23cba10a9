"""The process in which a program under trial runs, and the nursery that forks such processes.

Run as a script: ``python -I worker.py FD``. The nursery imports torch once, and forks a process for each program. It
never runs foreign code, and knows no inputs, expected values or seeds. A forked process confines itself (`sandbox`),
loads one program, and follows the judge's commands: build, place inputs, call, describe. Its answers are only claims.
Decisions rest on the bytes that the judge reads out of it, the judge's clock, and the limits of the operating system.

With a GPU, the shared memory is still the host's. A call begins by copying the inputs, with red zones (guard bytes)
around them, into fresh device memory. It ends by copying back the results, the inputs and the red zones. The copy back
waits for the call's stream and for no other stream. So the judge reads the same bytes as without a GPU, an answer that
comes before its results is wrong, and the time of a call includes both copies, for original and candidate alike.

Original and candidate run in the same way, so that neither is favoured. The only parts of refold imported here are
`messages`, `sandbox`, `private`, `surroundings` and `uses`.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import importlib.util
import inspect
import json
import marshal
import mmap
import operator
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

try:
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # its thread, which torch's compiler would start, runs every ten seconds
except ImportError:
    pass


def _import(path: Path, name: str = "", run: Any = None, **given: Any) -> Any:
    """Import a file as a module of its own name, or of another one; it may have other code, and names of others."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    vars(module).update(given)
    if run is None:
        spec.loader.exec_module(module)
    else:
        exec(run, vars(module))
    return module


def _part(name: str) -> Any:
    """Import a part of refold that this process needs, by its path."""
    return _import(Path(__file__).with_name(f"{name}.py"), f"refold judge: {name}")


messages: Any = _part("messages")
private: Any = _part("private")
surroundings: Any = _part("surroundings")
uses: Any = _part("uses")

# Methods of modules, and those that must be torch's: weights are found, trained and hooked by them.
_METHODS = {name for name, f in vars(torch.nn.Module).items() if callable(f)} - {"forward"}
_REACH = (
    *("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children"),
    *("named_children", "zero_grad", "requires_grad_", "__call__", "register_forward_hook"),
    *("register_forward_pre_hook", "register_full_backward_hook"),
)
_PLAIN = (bool, int, str, float)
ZONE = 4096  # bytes of the red zones around inputs, as the judge writes them
HELD = 3  # results kept alive, so that the judge can look at them again
_M_PERTURB = -6  # of mallopt: the byte with which glibc fills what it allocates, inverted
_FILLS = 0x100  # beside that byte: else glibc would take 0, which stands for 0xFF, for none
_TEXT = 2000
_L2_SET_ASIDE = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE


def _of_modules(module: torch.nn.Module) -> list[Any]:
    """Return training modes and hooks of a module and those in it, and which parameters need or have a gradient."""
    modes = [(m.training, *private.count_hooks(m)) for m in module.modules()]
    return [*modes, *((p.requires_grad, p.grad is not None, private.tensor_hooks(p)) for p in module.parameters())]


def _describe(t: torch.Tensor) -> Any:
    strided = t.layout == torch.strided and not t.is_meta
    # Zeros that a formula stands for, or a storage that was taken away.
    no_memory = strided and t.numel() > 0 and t.data_ptr() == 0
    strided = strided and not no_memory
    storage = t.untyped_storage() if strided else None
    odd = (t.layout != torch.strided, t.is_conj(), t.is_neg(), no_memory, t.is_meta)
    address = t.data_ptr() if strided else 0
    return messages.Description(
        type={torch.Tensor: "Tensor", torch.nn.Parameter: "Parameter"}.get(type(t), f"class {type(t).__qualname__}"),
        dtype=str(t.dtype).removeprefix("torch."),
        device=t.device.type,
        shape=list(t.shape),
        stride=list(t.stride()) if t.layout == torch.strided else [],
        address=address,
        pointer=address,
        storage=storage.data_ptr() if storage is not None else 0,
        storage_bytes=storage.nbytes() if storage is not None else 0,
        odd=[name for name, is_so in zip(messages.ODD, odd, strict=True) if is_so],
        requires_grad=t.requires_grad,
        # Through which no gradients flow later; with methods that may say anything.
        traits=[messages.TRAITS[0]] * t.is_inference()
        + [messages.TRAITS[2]] * (bool(_attributes(t)) or _holds_gradient(t) or any(private.tensor_hooks(t))),
    )


def _attributes(t: torch.Tensor) -> list[str]:
    return [name for name in vars(t) if not name.startswith("_dynamo")]  # of torch's compiler


def _holds_gradient(t: torch.Tensor) -> bool:
    return t.is_leaf and t.grad is not None


def _flatten(value: Any, leaves: list[torch.Tensor], *, result: bool) -> Any:
    """Return the structure of arguments or of a result as data, and collect the tensors, in a result floats too."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return {"tensor": len(leaves) - 1}
    if result and isinstance(value, float) and type(value) is not float:  # of another class, as NumPy's
        inner = _flatten(float.__float__(value), leaves, result=True)
        return {"sequence": f"class {type(value).__qualname__}", "items": [inner]}
    if result and isinstance(value, float):
        leaves.append(torch.tensor(value, dtype=torch.float64))
        return {"float": len(leaves) - 1}
    if isinstance(value, dict):
        # A key that is an argument's stays what JSON has; else it is a text that no other key has.
        items = [[k if not result and isinstance(k, (str, int)) else repr(k), _flatten(v, leaves, result=result)]
                 for k, v in value.items()]  # fmt: skip
        return {"dict": _kind(value), "items": items}
    if isinstance(value, (list, tuple)):
        return {"sequence": _kind(value), "items": [_flatten(v, leaves, result=result) for v in value]}
    if result and dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [getattr(value, each.name) for each in dataclasses.fields(value)]
        return {"sequence": _kind(value), "items": [_flatten(v, leaves, result=True) for v in held]}
    if value is None or (type(value) in _PLAIN if result else isinstance(value, _PLAIN)):
        return {"value": value}
    return {"object": type(value).__qualname__}


def _kind(value: Any) -> str:
    """Name the type of a structure; one of the program's own is not taken for Python's, nor for one of other fields."""
    if type(value) in (dict, list, tuple):
        return type(value).__name__
    fields = getattr(value, "_fields", ())
    if dataclasses.is_dataclass(value):
        fields = [each.name for each in dataclasses.fields(value)]
    module = type(value).__module__.removeprefix("original").removeprefix("candidate")
    name = ".".join(filter(None, (module, type(value).__qualname__)))
    name += f" of {', '.join(map(str, fields))}" if fields else ""
    return f"class {name}" + ("" if _says_one_thing(value) else ", which gives others than it lists")


def _says_one_thing(value: Any) -> bool:
    """Say whether a structure of a class of its own gives by name, by number and in turn the same."""
    if not isinstance(value, (dict, list, tuple)):
        return True
    if isinstance(value, dict):
        return all(value[name] is v for name, v in dict.items(value)) and list(value) == list(dict.keys(value))
    held = list(tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value))
    names = [getattr(value, name) for name in getattr(value, "_fields", ())] or held
    return all(map(operator.is_, value, held)) and all(map(operator.is_, names, held)) and len(value) == len(held)


class _Watch(private.DispatchMode):
    """Counts the terms of the longest sum that an operation forms, and operations that square numbers unseen."""

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "addbmm", "_int_mm")
    ALONG = ("cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax", "sort", "cummax", "cummin")
    SQUARES = ("norm", "var", "std", "dist", "hypot")

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.squares = 1, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for this class, which takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        ins = [a for a in args if isinstance(a, torch.Tensor)]
        outs = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor)]
        terms = 1
        self.squares += any(map(name.__contains__, self.SQUARES)) or (name == "abs" and any(map(torch.is_complex, ins)))
        if name in self.PRODUCTS and len(ins) >= 2:
            terms = ins[-2].shape[-1]
        elif "conv" in name and len(ins) >= 2:
            terms = ins[1].numel() // max(ins[1].shape[0], 1)
        elif "attention" in name and len(ins) >= 2:
            terms = max(ins[1].shape[-2:])
        elif name in self.ALONG and ins and ins[0].dim():
            terms = ins[0].shape[args[1] if len(args) > 1 and isinstance(args[1], int) else -1]
        elif ins and outs and "::view" not in str(func) and not func.is_view:
            sizes = [o.numel() for o in outs if o.numel()]
            terms = max(i.numel() for i in ins) // min(sizes) if sizes else 1
        self.longest = max(self.longest, terms)
        return out


class _Recorder:
    """Writes marks where the judge reads them: which blocks ran, and what truth values and masks were."""

    def __init__(self, room: int):
        self._marks = bytearray(room)
        self._raised: set[tuple[Any, ...]] = set()  # errors, and the ways on which they were raised
        self._held: dict[int, bool] = {}  # conditions of loops, when they were asked last
        self.tensor = torch.frombuffer(self._marks, dtype=torch.uint8)

    def ran(self, at: int, value: Any = None) -> Any:
        """Mark a block, and give its value if it is an expression; raise an error that the judge has asked for."""
        asked = self._marks[at]
        if asked > 1:
            way = at, asked, *((frame.f_code, line) for frame, line in traceback.walk_stack(None))
            if way in self._raised:  # it was seen what follows
                return value
            self._raised.add(way)
        self._marks[at] = 1
        if asked > 1:
            raise getattr(builtins, messages.ERRORS[asked - 2])("the judge asks for it")
        return value

    def truth(self, true: int, false: int, value: Any) -> Any:
        """Mark whether a condition holds."""
        self._marks[true if value else false] = 1
        return value

    def again(self, often: int, value: Any) -> Any:
        """Mark whether a loop has a second turn, or none."""
        before, self._held[often] = self._held.get(often, False), bool(value)
        self._marks[often] |= before == self._held[often]
        return value

    def number(self, other: int, zero: int, value: Any) -> Any:
        """Mark whether a number is zero, or a tensor empty."""
        with contextlib.suppress(RuntimeError):  # as of a batch in torch.func.vmap, of which nothing is known
            one = isinstance(value, torch.Tensor) and value.numel() < 2 and value.dtype != torch.bool
            nothing = not value.any() if one else isinstance(value, (int, float)) and not value
            self._marks[zero if nothing else other] = 1
        return value

    def asked(self, foreign: int, name: str, value: Any) -> Any:
        """Mark what is asked for its device, its dtype or its mode by this name, unless torch itself answers."""
        kind, held = type(value), getattr(value, "__dict__", {})
        tensor = kind in (torch.Tensor, torch.nn.Parameter, torch.device, torch.dtype) and name not in held
        mode = name == "training" and type(held.get(name)) is bool and issubclass(kind, torch.nn.Module)
        plain = kind.__getattribute__ is object.__getattribute__ and not hasattr(kind, name)
        if not (tensor or (mode and plain) or value is torch):
            self._marks[foreign] = 1
        return value

    def chosen(self, places: tuple[int, ...], table: Any, key: Any, *default: Any) -> Any:
        """Mark which entry of a table is chosen, the last for none of them, and return it."""
        if default and key not in table:
            self._marks[places[-1]] = 1
            return default[0]
        found = table[key]
        self._marks[places[list(table).index(key) if isinstance(table, dict) else key]] = 1
        return found

    def first(self, places: tuple[int, ...], choose: Callable[..., Any], options: list[Any], **how: Any) -> Any:
        """Choose the first, the least or the largest of some values, and mark which one it is."""
        found = choose(options, **how)
        chosen = found[0] if type(found) is list and found and any(found[0] is each for each in options) else found
        for place, each in zip(places, options, strict=True):
            self._marks[place] |= each is chosen
        return found

    def kept(self, changes: int, value: Any) -> Any:
        """Mark whether what is true of a value may change while it is the same object, as of a list."""
        asks = hasattr(type(value), "__len__") or hasattr(type(value), "__bool__")
        if asks and value is not None and not isinstance(value, (*_PLAIN, bytes, tuple)):
            self._marks[changes] = 1
        return value

    def seen(self, true: int, false: int, value: Any) -> Any:
        """Mark a truth value, or those that a mask has; leave other values alone."""
        kind = type(value)
        if kind is bool:
            self._marks[true if value else false] = 1
        elif kind is torch.Tensor or hasattr(value, "dtype"):
            with contextlib.suppress(Exception):  # as of a batch in torch.func.vmap
                if value.dtype in (torch.bool, bool):
                    if value.any():
                        self._marks[true] = 1
                    if not value.all():
                        self._marks[false] = 1
        return value


class Stub:
    """Obeys the judge; one method a command."""

    def __init__(self, channel: socket.socket, region: mmap.mmap, folder: Path):
        self._channel, self._region, self._folder = channel, region, folder
        self._file = ""
        self._program: Any = None  # what is called: the module, or a copy of it,
        self._own: Any = None
        self._make: Any = None  # makes another
        self._beside: Any = None
        self._places: list[tuple[int, int]] = []  # of its parameters, where nothing but a call may move them
        self._moved = self._unrecorded = False
        self._given: dict[str, torch.Tensor] = {}  # with these parameters and buffers in place of its own, if any
        self._source: Any = None
        self._inputs: list[torch.Tensor] = []
        self._ready: Any = None
        self._leaves: list[torch.Tensor] = []
        self._back: list[torch.Tensor] = []  # what flows back into the results
        self._held: deque[Any] = deque(maxlen=HELD)
        self._kept: list[Any] = []
        self._surroundings = surroundings.Surroundings(folder, private.settings)
        self._other = torch.nn.Linear(2, 2)  # a module of others
        self._others = str(self._of_other())
        self._order: list[str] = []
        self._recorder: Any = None
        self._device, self._train = "cpu", False
        # Of inputs on a device: the bytes in shared memory, the bytes there, and what lies in them.
        self._placed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._states: dict[str, torch.Tensor] = {}
        self._hosts: deque[list[tuple[torch.Tensor, torch.Tensor]]] = deque(maxlen=HELD)

    def serve(self) -> NoReturn:
        """Answer commands for ever; an empty one is the signal to start."""
        commands = self._channel.makefile("rb")
        while size := commands.read(4):
            frame = commands.read(*struct.unpack("<I", size))
            try:
                command, values = pickle.loads(frame) if frame else ("go", {})
                answer = getattr(self, f"do_{command}")(**values)
            except BaseException as error:
                answer = _failure(error, self._file)
            send(self._channel, messages.to_json(answer))
        os._exit(0)  # the judge is gone

    def do_load(
        self, text: str, name: str, attribute: str, code: bytes = b"", recorder: str = "", room: int = 0
    ) -> bool:
        """Import a program's source as a file of this name, and say whether it defines what it is judged by.

        Args:
            text: The source.
            name: Of the file.
            attribute: The class or function that is judged.
            code: What runs in place of the text, if anything: the same with marks.
            recorder: The name by which it reaches what writes the marks.
            room: How many marks there may be.
        """
        self._file = str(self._folder / name)
        Path(self._file).write_text(text, encoding="utf-8")
        if code:
            private.run_eagerly()
            self._surroundings = surroundings.Surroundings(self._folder, private.settings)
            self._recorder = _Recorder(room)
            self._source = _import(Path(self._file), run=marshal.loads(code), **{recorder: self._recorder})
        else:
            self._source = _import(Path(self._file))
        return hasattr(self._source, attribute)

    def do_marks(self) -> Any:
        """Say where the marks lie."""
        return _describe(self._recorder.tensor)

    def do_seed(self, seed: int) -> None:
        """Seed the random state."""
        surroundings.seed(seed)

    def do_arguments(self) -> str:
        """Read the arguments that the original's class is made with, as text that the judge passes on unread."""
        torch.manual_seed(0)
        arguments: Any = getattr(self._source, "get_init_inputs", list)()
        return base64.b64encode(pickle.dumps(arguments)).decode()

    def do_build(
        self, attribute: str, arguments: str, seed: int, dtype: str, device: str, train: bool, compiled: bool
    ) -> None:
        """Make the program; a class is made with the given arguments after seeding."""
        self._train, self._device = train, device

        def make(seed: int) -> Any:
            found = getattr(self._source, attribute)
            torch.manual_seed(seed)
            if isinstance(found, type):
                values = pickle.loads(base64.b64decode(arguments))
                found = found(**values) if isinstance(values, dict) else found(*values)
            return _put(found.to(device, getattr(torch, dtype)), train) if isinstance(found, torch.nn.Module) else found

        found, self._make = make(seed), lambda keep: make(seed + keep)
        if not callable(found):
            raise TypeError(f"{attribute} is a {type(found).__name__}, which cannot be called")
        self._program = self._own = torch.compile(found) if compiled else found
        self._places = self._where()

    def _another(self, keep: bool) -> Any:
        """Make one more in the same way; one that is kept, with other random numbers."""
        found = self._make(keep)
        self._beside = found if keep else None
        return found

    @property
    def _module(self) -> torch.nn.Module | None:
        return self._program if isinstance(self._program, torch.nn.Module) else None

    def do_inputs(self, seed: int) -> Any:
        """Draw the original's own inputs."""
        surroundings.seed(seed)
        if not hasattr(self._source, "get_inputs"):
            return None
        leaves: list[torch.Tensor] = []
        tree = _flatten(self._source.get_inputs(), leaves, result=False)
        self._inputs = [leaf.detach().cpu().contiguous() for leaf in leaves]
        return messages.Drawn(tree, [_describe(leaf) for leaf in self._inputs])

    def do_inspect(self, functions: bool) -> Any:
        """Describe what the program must leave alone: its state, global settings, the random state, functions."""
        if functions:  # as a user who prints it
            with contextlib.suppress(Exception):
                repr(self._own)
        settings = self._surroundings.settings()
        if others := self._saved_otherwise():
            settings["the memory of what state_dict() gives"] = f"not that of {', '.join(others)}"
        modules = [] if self._module is None else list(torch.nn.Module.modules(self._module))
        found = [(n, f) for n in _REACH for m in modules if callable(f := getattr(m, n))]  # names may be in use
        own = {n for n, f in found if self._surroundings.is_own(f)}
        own |= {n for m in modules for n, f in vars(m).items() if n in _METHODS and callable(f)}
        settings |= {f"{name}(), by which users reach it": "its own" for name in own}
        if self._moved or self._where() != self._places:
            settings["which its parameters are, and where they lie"] = "changed by a call"
        if str(self._of_other()) != self._others:
            settings["what modules of others hold"] = "changed"
        if self._unrecorded:
            settings["whether gradients are recorded"] = "changed by a call that raised an error"
        return messages.Inspected(
            state=self.do_state(),
            modes="" if self._module is None else str(_of_modules(self._module)),
            settings=settings,
            patched=sorted(self._surroundings.replaced()) if functions else [],
            random=surroundings.random_state(),
            names=_names(self._program if self._module is None else self._module.forward),
        )

    def _of_other(self) -> list[Any]:
        return [*_of_modules(self._other), *(p.tolist() for p in self._other.parameters())]

    def _where(self) -> list[tuple[int, int]]:
        """Return which objects its parameters are, and where they lie."""
        own = torch.nn.Module.parameters(self._own) if isinstance(self._own, torch.nn.Module) else ()
        return [(id(p), p.data_ptr()) for p in own]

    def _saved_otherwise(self) -> list[str]:
        """List the parameters and buffers in whose place something else is saved."""
        if self._module is None:
            return []
        outer, prefix = uses.within(self._module)
        saved, inner = self._module.state_dict(), outer.state_dict()
        each = ((name, t) for name, t in self._module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor))
        return [n for n, t in each if not _place(saved.get(n)) == _place(inner.get(prefix + n)) == _place(t)]

    def do_state(self) -> Any:
        """Describe parameters and buffers."""
        state = self._given or ({} if self._module is None else self._module.state_dict(keep_vars=True))
        return {name: self._stated(name, t) for name, t in state.items() if isinstance(t, torch.Tensor)}

    def _stated(self, name: str, t: torch.Tensor) -> Any:
        """Describe a parameter or buffer; of one on a device, a copy on the host that is kept."""
        if t.device.type == "cpu" or t.layout != torch.strided:
            return _describe(t)
        self._states[name] = host = t.detach().contiguous().cpu()
        return _describe(host)

    def do_adopt(self, places: dict[str, Any], way: str) -> list[str]:
        """Take over parameters and buffers in one of the ways in which users do; list those that a copy shares."""
        values = {name: self._tensor(messages.Place(**place)) for name, place in places.items()}
        self._moved |= self._where() != self._places
        self._program, self._given = self._own, self._given if way == "called" else {}
        try:
            if self._module is not None:
                self._program = uses.adopt(way, self._module, values, self._given, self._device, self._another)
        finally:
            self._places = self._where()
        if self._module is None or way not in messages.COPIES:
            return []
        first, copy = (module.state_dict(keep_vars=True) for module in (self._own, self._module))
        return [n for n, t in copy.items() if (place := _place(t)) and t.numel() and place == _place(first.get(n))]

    def do_alive(self) -> int:
        """Count all tensors that are alive."""
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    def do_order(self, names: list[str]) -> None:
        """Give gradients of parameters in this order; others follow as they are defined."""
        self._order = names

    def do_terms(self) -> list[int]:
        """Run the prepared call; count the terms of its longest sum, and what squares numbers unseen."""
        with (watch := _Watch()):
            self.do_go()
        return [int(watch.longest), watch.squares]

    def do_prepare(self, tensors: list[Any], cotangents: list[Any], **values: Any) -> None:
        """Wrap the places where inputs are going to be; the judge fills them afterwards."""
        places, back = ([messages.Place(**place) for place in some] for some in (tensors, cotangents))
        self._ready = ready = messages.Prepare(tensors=places, cotangents=back, **values)
        if not ready.hold:
            self._held.clear()
            self._hosts.clear()
        if self._device != "cpu":
            if ready.perturb:
                self._poison(ready.perturb)
            _reset_cache()
        else:
            self._leaves, self._back = (list(map(self._tensor, some)) for some in (places, back))
            ctypes.CDLL(None).mallopt(_M_PERTURB, _FILLS | ready.perturb ^ 0xFF if ready.perturb else 0)
        surroundings.seed(ready.seed)

    def do_go(self) -> Any:
        """Call the program on the inputs in the prepared places."""
        if self._device != "cpu":  # bring the inputs there, and later results and inputs back
            before = {here.data_ptr(): there for here, there, _ in self._placed}
            self._placed = [self._sent(place, before) for place in self._ready.tensors]
            self._leaves = [there for _, _, there in self._placed]
            self._back = [self._sent(place, {})[2] for place in self._ready.cotangents]
        tree, outputs, left = uses.run(self._ready.use, self._run, self._module, self._given)
        received = list(map(self._received, outputs))
        for here, there, _ in self._placed:
            here.copy_(there)
        self._hosts.append([pair for _, pair in received if pair is not None])
        held = [t.detach() for t in outputs], self._placed, self._hosts[-1]
        # Not the objects themselves: users hold a view of a result, or what autograd saved of it.
        self._held.append(held)
        if self._ready.keep:
            self._kept.append(held)
        return messages.Returned(tree, [each for each, _ in received], left)

    def _run(self) -> tuple[Any, list[torch.Tensor], list[str]]:
        """Call the program; return the structure of what it gave, its tensors, and what it changed of the caller's."""
        outputs: list[torch.Tensor] = []
        ready, use = self._ready, self._ready.use

        def back(result: Any, leaves: list[torch.Tensor]) -> None:
            if self._back:
                found: list[torch.Tensor] = []
                _flatten(result, found, result=True)
                self._gradients(found, self._wanted(leaves))

        with self._in_mode() as left, uses.around(use):
            own = uses.given(use, self._leaves)
            leaves = [t * 1 if ready.inner and t.requires_grad else t for t in own]
            build = partial(_unflatten, ready.tree)
            args = build(leaves)
            before, upstream = _objects(args), _objects(own) if ready.inner else None
            wanted = self._wanted(own) if self._back else []
            if ready.flow == "added":  # to what leaves hold while gradients of several batches are added up
                g = torch.Generator().manual_seed(ready.seed)
                for t in wanted:
                    t.grad = uses.noise(t, g)
            with private.compiling() if use == "compiling" else contextlib.nullcontext():
                result = uses.call(use, self._program, args, build, leaves, self._device, self._train, ready.seed)
            left += _left(args, before) + (_left(own, upstream) if upstream else [])
            tree = _flatten(result, outputs, result=True)
            uses.afterwards(use, self._program, build, own, outputs, back)
            if self._back:
                found = uses.run(use, partial(self._gradients, list(outputs), wanted), None, {})
                gradients = _flatten(found, outputs, result=True)
                tree = {"sequence": "with gradients", "items": [tree, gradients]}
            uses.given_back(own, self._leaves)
        return tree, outputs, left

    @contextlib.contextmanager
    def _in_mode(self) -> Iterator[list[str]]:
        """Record gradients or not, as the call asks for; add to the list if the program has changed that."""
        module = torch.nn.Module() if self._module is None else self._module
        trained = [p for p in self._parameters() if p.requires_grad] if self._ready.frozen else []
        constant = [p for at, p in enumerate(trained) if self._ready.frozen >> at & 1]
        recorded, training = self._ready.mode == "recorded", self._ready.training
        left: list[str] = []
        try:
            for p in constant:
                p.requires_grad_(False)
            if training is not None:
                _put(module, training)
            with torch.inference_mode() if self._ready.mode == "inference" else torch.set_grad_enabled(recorded):
                try:
                    yield left
                except BaseException:
                    self._unrecorded |= torch.is_grad_enabled() != recorded
                    raise
                if torch.is_grad_enabled() != recorded:
                    left.append("whether gradients are recorded")
        finally:
            if training is not None:
                _put(module, self._train)
            for p in constant:
                p.requires_grad_()

    def _poison(self, byte: int) -> None:
        """Let memory of the GPU that is allocated next hold a byte: torch hands out again what was freed."""
        sizes = [1 << n for n in range(9, 27) for _ in range(4)]
        blocks = [torch.full((size,), byte, dtype=torch.uint8, device=self._device) for size in sizes]
        del blocks

    def _sent(self, place: Any, before: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy a place in the shared region, with the zones around it, into memory of the device.

        An input at the address of an earlier input goes to that input's place on the device; others to fresh memory.
        """
        dtype = getattr(torch, place.dtype)
        if not place.elements:
            empty = torch.empty(place.shape, dtype=dtype, device=self._device)
            return empty, empty, empty.requires_grad_(place.requires_grad)
        size = place.elements * dtype.itemsize
        zones = min(ZONE, place.offset)
        here = torch.frombuffer(self._region, dtype=torch.uint8, count=size + 2 * zones, offset=place.offset - zones)
        there = before.get(here.data_ptr())
        if there is None or there.numel() != here.numel():
            there = torch.empty_like(here, device=self._device)
        there.copy_(here)
        flat = there[zones : zones + size].view(dtype)
        value = flat.as_strided(place.shape, place.stride, flat.storage_offset() + place.first).detach()
        return here, there, value.requires_grad_(place.requires_grad)

    def _received(self, t: torch.Tensor) -> tuple[Any, tuple[torch.Tensor, torch.Tensor] | None]:
        """Copy a result to the host. If it shares memory with an input, it is where that input is copied to."""
        described = _describe(t)
        if described.odd or t.device.type == "cpu" or not t.numel():
            return described, None
        for here, there, _ in self._placed:
            start = t.data_ptr() - there.data_ptr()
            if 0 <= start < there.numel():
                described.address = here.data_ptr() + start
                return described, None
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        flat = t.detach().as_strided((span,), (1,))
        host = flat.cpu()
        described.address = host.data_ptr()
        return described, (host, flat)

    def do_refetch(self) -> None:
        """Copy the results that are held from the device once more, to where they were copied before."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for pairs in [*self._hosts, *(kept[2] for kept in self._kept)]:
            for host, flat in pairs:
                host.copy_(flat)

    def _wanted(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """List the leaves of which gradients are asked for: inputs, then parameters."""
        return [t for t in (*leaves, *self._parameters()) if t.requires_grad]

    def _parameters(self) -> list[torch.Tensor]:
        named = {} if self._module is None else dict(self._module.named_parameters())
        named = {name: named[name] for name in [*filter(named.__contains__, self._order), *named]}
        return [self._given.get(name, t) for name, t in named.items()]

    def _gradients(self, outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> Any:
        if [list(t.shape) for t in outputs] != [list(p.shape) for p in self._back]:
            return None
        pairs = [(t, p) for t, p in zip(outputs, self._back, strict=True) if t.requires_grad]
        if not pairs or not wanted:
            return [None for _ in wanted]
        ys, cotangents = zip(*pairs, strict=True)
        flow = self._ready.flow
        if flow == "partly":
            ys, cotangents = zip(pairs[self._ready.seed % len(pairs)], strict=True)
        if flow in ("once", "partly", "filled"):
            fill = flow == "filled"
            return list(torch.autograd.grad(ys, wanted, cotangents, allow_unused=True, materialize_grads=fill))
        if flow in ("accumulated", "added"):
            for turn in range(2 if flow == "accumulated" else 1):
                torch.autograd.backward(ys, cotangents, retain_graph=flow == "accumulated" and turn == 0)
            return _taken(wanted)
        wanted = wanted + [c.requires_grad_() for c in cotangents]
        first = torch.autograd.grad(ys, wanted[: -len(cotangents)], cotangents, allow_unused=True, create_graph=True)
        again = [g for g in first if g is not None and g.requires_grad]
        if not again:
            raise RuntimeError("its gradients cannot be differentiated")
        # Not by torch.autograd.grad, which does not come to what raises an error where it is differentiated.
        try:
            torch.autograd.backward(again, [g.detach() for g in again])
        except BaseException:
            _taken(wanted)  # of what was done until then, nothing may be added to later gradients
            raise
        # Whether a gradient is zero or none depends on how derivatives are written.
        return [torch.zeros_like(t) if g is None else g for g, t in zip(_taken(wanted), wanted, strict=True)]

    def _tensor(self, place: Any) -> torch.Tensor:
        """Wrap a place in the shared region, without a copy."""
        dtype = getattr(torch, place.dtype)
        if not place.elements:
            return torch.empty(place.shape, dtype=dtype).requires_grad_(place.requires_grad)
        flat = torch.frombuffer(self._region, dtype=dtype, count=place.elements, offset=place.offset)
        # detach: a view of a tensor that has a base is no leaf of its own.
        value = flat.as_strided(place.shape, place.stride, place.first).detach()
        return value.requires_grad_(place.requires_grad)


def _put(module: torch.nn.Module, train: bool) -> torch.nn.Module:
    """Put a module into training or evaluation mode, as users do."""
    return module.train() if train else module.eval()


def _reset_cache() -> None:
    """Take back the part of a GPU's L2 cache that a program has set aside for itself, for its next calls."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuCtxResetPersistingL2Cache()
        driver.cuCtxSetLimit(_L2_SET_ASIDE, ctypes.c_size_t(0))


def _names(function: Any) -> list[str]:
    with contextlib.suppress(TypeError, ValueError):  # what is written in C may not tell
        found = inspect.signature(function).parameters.values()
        return [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    return []


def _place(t: Any) -> Any:
    return isinstance(t, torch.Tensor) and (t.shape, t.data_ptr())


def _failure(error: BaseException, file: str) -> Any:
    """Say what a program raised. Only names and messages of Python and PyTorch are taken for such."""
    kind = type(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file and frame.lineno is not None]
    if isinstance(error, SyntaxError) and error.filename == file and error.lineno is not None:
        lines.append(error.lineno)
    try:
        text = str(error)[:_TEXT]
    except Exception:
        text = "and its message cannot be read"
    if messages.known_exception(kind.__name__) is kind:
        return messages.Failure(kind.__name__, text, lines)
    return messages.Failure("Exception", f"{kind.__qualname__}: {text}"[:_TEXT], lines)


def _taken(leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients that leaves have got, and take them away."""
    found = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    return found


_TOLD: dict[str, Callable[[torch.Tensor], Any]] = {
    "memory": torch.Tensor.data_ptr,
    "dtype": lambda t: t.dtype,
    "shape": lambda t: t.shape,
    "strides": torch.Tensor.stride,
    "need of a gradient": lambda t: t.requires_grad,
    "hooks": private.tensor_hooks,
    "version": private.version,
    "gradient": _holds_gradient,
    "attributes": _attributes,
}


def _objects(args: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Note what a call must leave of the caller's own objects: their structure, and what each tensor is."""
    leaves: list[torch.Tensor] = []
    tree = _flatten(args, leaves, result=False)
    return tree, [{name: tell(t) for name, tell in _TOLD.items()} for t in leaves]


def _left(args: Any, before: tuple[Any, list[dict[str, Any]]]) -> list[str]:
    """Say what a call changed of the caller's own objects."""
    after = _objects(args)
    if after[0] != before[0]:
        return ["the structure of its arguments"]
    each = enumerate(zip(before[1], after[1], strict=True))
    return [f"the {name} of input {index}" for index, (old, new) in each for name in _TOLD if old[name] != new[name]]


def _unflatten(tree: Any, leaves: list[torch.Tensor]) -> Any:
    if "tensor" in tree:
        return leaves[tree["tensor"]]
    if "dict" in tree:
        return {key: _unflatten(value, leaves) for key, value in tree["items"]}
    if "sequence" in tree:
        items = [_unflatten(value, leaves) for value in tree["items"]]
        return items if tree["sequence"] == "list" else tuple(items)
    if "object" in tree:
        raise TypeError(
            f"a {tree['object']} cannot be given to another process; give tensors, numbers, texts and lists"
        )
    return tree["value"]


def send(channel: socket.socket, payload: bytes) -> None:
    """Write one frame."""
    channel.sendall(struct.pack("<I", len(payload)) + payload)


def _nursery(control: socket.socket) -> None:
    """Fork a process for each request of the judge, until the judge has ended."""
    sandbox = _part("sandbox")
    for name in ("LD_PRELOAD", "MALLOC_CHECK_", "GLIBC_TUNABLES"):  # of this process, not of what programs start
        os.environ.pop(name, None)
    surroundings.before()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    # Orphans of a candidate become children of this process, where the judge can count them.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    while True:
        message, handles, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not message:
            return
        request = SimpleNamespace(**json.loads(message))
        for name in request.imports:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        if request.compiler:
            private.warm_compiler()
        gc.freeze()  # of what is here by now, forked processes collect nothing
        if os.fork() == 0:
            control.close()
            _born(request, socket.socket(fileno=handles[0]), handles[1], sandbox)
        for handle in handles:
            os.close(handle)


def _born(request: Any, channel: socket.socket, region: int, sandbox: Any) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    active: list[str] = []
    if request.sandboxed:
        active = sandbox.new_namespaces(request.device)
    if "pid namespace" in active:
        start, started = os.pipe()
        child = os.fork()
        if child:
            send(channel, messages.to_json(child))
            os.write(started, b"1")
            channel.close()
            os.close(region)
            os.waitpid(child, 0)
            os._exit(0)
        os.read(start, 1)
        os.close(start)
        os.close(started)
    else:
        send(channel, messages.to_json(os.getpid()))
    folder = Path(request.folder)
    os.environ.update(request.environment)
    tempfile.tempdir = None
    private.move_compiler()
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    if request.sandboxed:
        active = sandbox.enter(folder, request.readable, request.limits, request.device, active)
    torch.set_num_threads(request.threads)
    sys.path[:0] = request.path
    stub = Stub(channel, mmap.mmap(region, 0), folder)
    send(channel, messages.to_json(messages.Confined(active, private.OFF)))
    stub.serve()


if __name__ == "__main__":
    _nursery(socket.socket(fileno=int(sys.argv[1])))
