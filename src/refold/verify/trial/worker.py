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
`sandbox`, `private` and `surroundings`.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

try:
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # its thread, which torch's compiler would start, runs every ten seconds
except ImportError:
    pass


def _import(path: Path, name: str = "") -> Any:
    """Import a file as a module of its own name, or of another one that no program can mean."""
    name = name or path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


private: Any = _import(Path(__file__).with_name("private.py"), "refold trial: private")
surroundings: Any = _import(Path(__file__).with_name("surroundings.py"), "refold trial: surroundings")

ZONE = 4096  # bytes of the red zones around inputs, as the judge writes them
HELD = 3  # results kept alive, so that the judge can look at them again
_M_PERTURB = -6  # of mallopt: the byte with which glibc fills what it allocates, inverted
_TEXT = 2000


def _of_modules(module: torch.nn.Module) -> list[Any]:
    """Return training modes and hooks of a module and those in it, and which parameters need or have a gradient."""
    modes = [(m.training, *private.count_hooks(m)) for m in module.modules()]
    return [*modes, *((p.requires_grad, p.grad is not None) for p in module.parameters())]


def _describe(t: torch.Tensor) -> dict[str, Any]:
    strided = t.layout == torch.strided and not t.is_meta
    # Zeros that a formula stands for, or a storage that was taken away.
    no_memory = strided and t.numel() > 0 and t.data_ptr() == 0
    strided = strided and not no_memory
    storage = t.untyped_storage() if strided else None
    return {
        "type": "Tensor" if type(t) in (torch.Tensor, torch.nn.Parameter) else type(t).__qualname__,
        "dtype": str(t.dtype).removeprefix("torch."),
        "device": t.device.type,
        "shape": list(t.shape),
        "stride": list(t.stride()) if t.layout == torch.strided else [],
        "address": t.data_ptr() if strided else 0,
        "storage": storage.data_ptr() if storage is not None else 0,
        "pointer": t.data_ptr() if strided else 0,
        "storage_bytes": storage.nbytes() if storage is not None else 0,
        "odd": [
            name
            for name, odd in (
                ("not strided", t.layout != torch.strided),
                ("conjugate", t.is_conj()),
                ("negated", t.is_neg()),
                ("without memory", no_memory),
                ("on device meta", t.is_meta),
            )
            if odd
        ],
        "requires_grad": t.requires_grad,
        "traits": ["an inference tensor"] if t.is_inference() else [],  # through which no gradients flow later
    }


def _flatten(value: Any, leaves: list[torch.Tensor], *, result: bool) -> Any:
    """Return the structure of arguments or of a result as data, and collect the tensors, in a result floats too."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return {"tensor": len(leaves) - 1}
    if result and isinstance(value, float):
        leaves.append(torch.tensor(value, dtype=torch.float64))
        return {"float": len(leaves) - 1}
    if isinstance(value, dict):
        items = [[_key(k, result), _flatten(v, leaves, result=result)] for k, v in value.items()]
        return {"dict": _kind(value), "items": items}
    if isinstance(value, (list, tuple)):
        return {"sequence": _kind(value), "items": [_flatten(v, leaves, result=result) for v in value]}
    if value is None or isinstance(value, (bool, int, str, float)):
        return {"value": value}
    return {"object": type(value).__qualname__}


def _kind(value: Any) -> str:
    """Name the type of a structure; one of the program's own is not taken for Python's, nor for one of other fields."""
    if type(value) in (dict, list, tuple):
        return type(value).__name__
    fields = getattr(value, "_fields", ())
    return f"class {type(value).__qualname__}" + (f" of {', '.join(map(str, fields))}" if fields else "")


def _key(key: Any, result: bool) -> Any:
    """Return a key as what JSON has, if it is an argument's, or as text that no other key has."""
    return key if not result and isinstance(key, (str, int)) else repr(key)


class _Terms(private.DispatchMode):
    """Counts the terms of the longest sum that one operation forms."""

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "addbmm", "_int_mm")
    ALONG = ("cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax", "sort", "cummax", "cummin")

    def __init__(self) -> None:
        super().__init__()
        self.longest = 1

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


class _Census(private.DispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for this class, which takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Stub:
    """Obeys the judge; one method a command."""

    def __init__(self, channel: socket.socket, region: mmap.mmap, folder: Path, active: list[str]):
        self._channel, self._region, self._folder, self._active = channel, region, folder, active
        self._program: Any = None
        self._inputs_of: Any = None
        self._source: Any = None
        self._held: deque[Any] = deque(maxlen=HELD)
        self._kept: list[Any] = []
        self._surroundings = surroundings.Surroundings(folder, private.settings)
        self._ready: tuple[Any, ...] | None = None
        self._mode = "plain", False
        self._order: list[str] = []
        self._device = "cpu"
        # Of inputs on a device: the bytes in shared memory, the bytes there, and what lies in them.
        self._placed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._states: dict[str, torch.Tensor] = {}
        self._hosts: deque[list[tuple[torch.Tensor, torch.Tensor]]] = deque(maxlen=HELD)

    def serve(self) -> NoReturn:
        """Answer commands for ever; an empty one is the signal to start."""
        while True:
            frame = receive(self._channel)
            try:
                answer = self.go() if not frame else self._obey(pickle.loads(frame))
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:_TEXT], "where": traceback.format_exc()[-_TEXT:]}
            send(self._channel, json.dumps(answer).encode())

    def _obey(self, request: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, "do_" + request.pop("do"))(**request)

    def do_load(self, text: str, name: str, attribute: str) -> dict[str, Any]:
        """Import a program's source and find the class or function it is judged by."""
        path = self._folder / name
        path.write_text(text)
        start = time.perf_counter()
        self._source = _import(path)
        if not hasattr(self._source, attribute):
            return {"missing": attribute}
        return {"seconds": time.perf_counter() - start}

    def do_hello(self) -> dict[str, Any]:
        """Say what confines this process, and what it cannot see with this PyTorch."""
        return {"active": self._active, "off": private.OFF}

    def do_seed(self, seed: int) -> dict[str, Any]:
        """Seed the random state."""
        surroundings.seed(seed)
        return {}

    def do_arguments(self, seed: int) -> dict[str, Any]:
        """Return what the original's class is made with, unread by the judge."""
        torch.manual_seed(seed)
        arguments: Any = getattr(self._source, "get_init_inputs", list)()
        return {"arguments": base64.b64encode(pickle.dumps(arguments)).decode()}

    def do_build(
        self, attribute: str, arguments: str, seed: int, dtype: str, device: str, train: bool, compiled: bool = False
    ) -> dict[str, Any]:
        """Make the program; a class is made with the given arguments after seeding."""
        found = getattr(self._source, attribute)
        self._train, self._device = train, device
        torch.manual_seed(seed)
        if isinstance(found, type):
            values = pickle.loads(base64.b64decode(arguments))
            found = found(**values) if isinstance(values, dict) else found(*values)
        if isinstance(found, torch.nn.Module):
            found = found.to(device, getattr(torch, dtype)).train(train)
        if not callable(found):
            raise TypeError(f"{attribute} is a {type(found).__name__}, which cannot be called")
        self._program = torch.compile(found) if compiled else found
        return self.do_inspect()

    def do_inputs(self, seed: int) -> dict[str, Any]:
        """Draw the original's own inputs."""
        surroundings.seed(seed)
        if not hasattr(self._source, "get_inputs"):
            return {"missing": "get_inputs"}
        leaves: list[torch.Tensor] = []
        self._inputs_of = self._source.get_inputs()
        tree = _flatten(self._inputs_of, leaves, result=False)
        self._inputs_of = [leaf.detach().cpu().contiguous() for leaf in leaves]
        return {"tree": tree, "tensors": [_describe(leaf) for leaf in self._inputs_of]}

    def do_inspect(self) -> dict[str, Any]:
        """Describe what the program must leave alone: its state, global settings, the random state, functions."""
        settings, functions = self._surroundings.changes()
        module = self._program if isinstance(self._program, torch.nn.Module) else None
        state = {} if module is None else module.state_dict(keep_vars=True)
        return {
            "state": [[name, self._stated(name, t)] for name, t in state.items() if isinstance(t, torch.Tensor)],
            "modes": "" if module is None else str(_of_modules(module)),
            "settings": settings,
            "patched": functions,
            "random": surroundings.random_state(),
        }

    def _stated(self, name: str, t: torch.Tensor) -> dict[str, Any]:
        """Describe a parameter or buffer; of one on a device, a copy on the host that is kept."""
        if t.device.type == "cpu" or t.layout != torch.strided:
            return _describe(t)
        self._states[name] = host = t.detach().contiguous().cpu()
        return _describe(host)

    def do_adopt(self, tensors: dict[str, Any], steps: bool) -> dict[str, Any]:
        """Take over parameters and buffers: by load_state_dict, or changed in place as an optimizer does."""
        values = {name: self._tensor(spec) for name, spec in tensors.items()}
        if steps:
            own = self._program.state_dict(keep_vars=True)
            for name, value in values.items():
                own[name].data.copy_(value)  # which no version counter counts, and trainers of large models do
        else:
            self._program.load_state_dict(values, strict=False)
        return {}

    def do_order(self, names: list[str]) -> dict[str, Any]:
        """Give gradients of parameters in this order; others follow as they are defined."""
        self._order = names
        return {}

    def do_census(self) -> dict[str, Any]:
        """Run the prepared call and count the operations and kernels that run in it."""
        if self._device == "cpu" and not private.imported_dynamo():  # else loading the profiler takes seconds
            with _Census() as census:
                self.go()
            return {"operations": census.counts}
        with torch.profiler.profile() as profile:
            self.go()
        return {"operations": {event.key: event.count for event in profile.key_averages()}}

    def do_terms(self) -> dict[str, Any]:
        """Run the prepared call and count the terms of its longest sum."""
        with _Terms() as terms:
            self.go()
        return {"terms": terms.longest}

    def do_prepare(
        self,
        tree: Any,
        tensors: Any,
        seed: int,
        mode: str,
        perturb: int,
        cotangents: Any,
        hold: bool,
        keep: bool,
        flow: str,
        frozen: bool,
    ) -> dict[str, Any]:
        """Wrap the places where inputs are going to be; the judge fills them afterwards."""
        if not hold:
            self._held.clear()
            self._hosts.clear()
        if self._device != "cpu":
            if perturb:
                self._poison(perturb)
            surroundings.seed(seed)
            self._ready = tree, tensors, cotangents, keep, flow
            self._mode = mode, frozen
            return {}
        leaves = [self._tensor(spec) for spec in tensors]
        places = [self._tensor(spec) for spec in cotangents]
        args = _unflatten(tree, leaves)
        if sys.platform == "linux":
            ctypes.CDLL(None).mallopt(_M_PERTURB, perturb ^ 0xFF if perturb else 0)
        surroundings.seed(seed)
        self._ready = args, leaves, places, keep, flow
        self._mode = mode, frozen
        return {}

    def go(self) -> dict[str, Any]:
        """Call the program on the inputs in the prepared places."""
        assert self._ready is not None
        args, leaves, places, keep, flow = self._ready
        if self._device != "cpu":
            return self._go_on_device(args, leaves, places, keep, flow)
        before = _objects(args)
        with self._in_mode() as left:
            result = self._program(*args)
            outputs: list[torch.Tensor] = []
            tree = _flatten(result, outputs, result=True)
            if places:
                gradients = _flatten(self._gradients(list(outputs), leaves, places, flow), outputs, result=True)
                tree = {"sequence": "with gradients", "items": [tree, gradients]}
        self._held.append((result, outputs))
        if keep:
            self._kept.append((result, outputs))
        return {"tree": tree, "tensors": [_describe(t) for t in outputs], "left": left + _left(args, before)}

    @contextlib.contextmanager
    def _in_mode(self) -> Iterator[list[str]]:
        """Record gradients or not, as the call asks for; add to the list if the program has changed that."""
        mode, frozen = self._mode
        module = self._program if frozen and isinstance(self._program, torch.nn.Module) else torch.nn.Module()
        constant = [p for p in module.parameters() if p.requires_grad]
        left: list[str] = []
        try:
            for p in constant:
                p.requires_grad_(False)
            with torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(mode == "recorded"):
                yield left
                if torch.is_grad_enabled() != (mode == "recorded"):
                    left.append("whether gradients are recorded")
        finally:
            for p in constant:
                p.requires_grad_()

    def _go_on_device(self, tree: Any, specs: Any, places: Any, keep: bool, flow: str) -> dict[str, Any]:
        """Bring the inputs to the device, call, and bring results and inputs back."""
        before = {here.data_ptr(): there for here, there, _ in self._placed}
        self._placed = [self._sent(spec, before) for spec in specs]
        leaves = [there for _, _, there in self._placed]
        cotangents = [self._sent(spec, {})[2] for spec in places]
        args = _unflatten(tree, leaves)
        objects = _objects(args)
        with self._in_mode() as left:
            result = self._program(*args)
            outputs: list[torch.Tensor] = []
            shape = _flatten(result, outputs, result=True)
            if cotangents:
                gradients = _flatten(self._gradients(list(outputs), leaves, cotangents, flow), outputs, result=True)
                shape = {"sequence": "with gradients", "items": [shape, gradients]}
        described = [self._received(t) for t in outputs]
        for here, there, _ in self._placed:
            here.copy_(there)
        self._held.append((result, outputs, self._placed))
        self._hosts.append([pair for _, pair in described if pair is not None])
        if keep:
            self._kept.append((result, outputs, self._placed, self._hosts[-1]))
        return {
            "tree": shape,
            "tensors": [described for described, _ in described],
            "left": left + _left(args, objects),
        }

    def _poison(self, byte: int) -> None:
        """Let memory that is allocated next hold a byte; torch hands out again what was freed."""
        sizes = [1 << n for n in range(9, 27) for _ in range(4)]
        blocks = [torch.full((size,), byte, dtype=torch.uint8, device=self._device) for size in sizes]
        del blocks

    def _sent(
        self, spec: dict[str, Any], before: dict[int, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy a place in the shared region, with the zones around it, into memory of the device.

        An input at the address of an earlier input goes to that input's place on the device; others to fresh memory.
        """
        dtype = getattr(torch, spec["dtype"])
        if not spec["elements"]:
            empty = torch.empty(spec["shape"], dtype=dtype, device=self._device)
            return empty, empty, empty.requires_grad_(spec["requires_grad"])
        size = spec["elements"] * dtype.itemsize
        zones = min(ZONE, spec["offset"])
        here = torch.frombuffer(self._region, dtype=torch.uint8, count=size + 2 * zones, offset=spec["offset"] - zones)
        there = before.get(here.data_ptr())
        if there is None or there.numel() != here.numel():
            there = torch.empty_like(here, device=self._device)
        there.copy_(here)
        flat = there[zones : zones + size].view(dtype)
        value = flat.as_strided(spec["shape"], spec["stride"], flat.storage_offset() + spec["first"]).detach()
        return here, there, value.requires_grad_(spec["requires_grad"])

    def _received(self, t: torch.Tensor) -> tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor] | None]:
        """Copy a result to the host. If it shares memory with an input, it is where that input is copied to."""
        described = _describe(t)
        if described["odd"] or t.device.type == "cpu" or not t.numel():
            return described, None
        for here, there, _ in self._placed:
            start = t.data_ptr() - there.data_ptr()
            if 0 <= start < there.numel():
                return {**described, "address": here.data_ptr() + start}, None
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        flat = t.detach().as_strided((span,), (1,))
        host = flat.cpu()
        return {**described, "address": host.data_ptr()}, (host, flat)

    def do_refetch(self) -> dict[str, Any]:
        """Copy the results that are held from the device once more, to where they were copied before."""
        if self._device != "cpu":
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            for pairs in [*self._hosts, *(kept[3] for kept in self._kept)]:
                for host, flat in pairs:
                    host.copy_(flat)
        return {}

    def _gradients(self, outputs: Any, leaves: Any, places: Any, flow: str) -> Any:
        if [list(t.shape) for t in outputs] != [list(p.shape) for p in places]:
            return None
        module = self._program if isinstance(self._program, torch.nn.Module) else None
        wanted = [t for t in leaves if t.requires_grad]
        named = {} if module is None else dict(module.named_parameters())
        named = {name: named[name] for name in [*filter(named.__contains__, self._order), *named]}
        wanted += [p for p in named.values() if p.requires_grad]
        pairs = [(t, p) for t, p in zip(outputs, places, strict=True) if t.requires_grad]
        if not pairs or not wanted:
            return [None for _ in wanted]
        ys, cotangents = zip(*pairs, strict=True)
        if flow == "once":
            return list(torch.autograd.grad(ys, wanted, cotangents, allow_unused=True))
        if flow == "accumulated":
            torch.autograd.backward(ys, cotangents, retain_graph=True)
            torch.autograd.backward(ys, cotangents)
            return _taken(wanted)
        wanted += [c.requires_grad_() for c in cotangents]
        first = torch.autograd.grad(ys, wanted[: -len(cotangents)], cotangents, allow_unused=True, create_graph=True)
        again = [g for g in first if g is not None and g.requires_grad]
        if not again:
            raise RuntimeError("its gradients cannot be differentiated")
        # Not by torch.autograd.grad, which does not come to what raises an error where it is differentiated.
        torch.autograd.backward(again, [g.detach() for g in again])
        # Whether a gradient is zero or none depends on how derivatives are written.
        return [torch.zeros_like(t) if g is None else g for g, t in zip(_taken(wanted), wanted, strict=True)]

    def _tensor(self, spec: dict[str, Any]) -> torch.Tensor:
        """Wrap a place in the shared region, without a copy."""
        dtype = getattr(torch, spec["dtype"])
        if not spec["elements"]:
            return torch.empty(spec["shape"], dtype=dtype).requires_grad_(spec["requires_grad"])
        flat = torch.frombuffer(self._region, dtype=dtype, count=spec["elements"], offset=spec["offset"])
        # detach: a view of a tensor that has a base is no leaf of its own.
        return (
            flat.as_strided(spec["shape"], spec["stride"], spec["first"]).detach().requires_grad_(spec["requires_grad"])
        )


def _taken(leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients that leaves have got, and take them away."""
    found = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    return found


def _objects(args: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return what a call must leave of the caller's own objects: their structure, and what each tensor is."""
    leaves: list[torch.Tensor] = []
    tree = _flatten(args, leaves, result=False)
    return tree, [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.requires_grad) for t in leaves]


def _left(args: Any, before: tuple[Any, list[tuple[Any, ...]]]) -> list[str]:
    """Say what a call changed of the caller's own objects."""
    after = _objects(args)
    if after == before:
        return []
    if after[0] != before[0]:
        return ["the structure of its arguments"]
    names = ("memory", "dtype", "shape", "strides", "need of a gradient")
    return [
        f"the {name} of input {index}"
        for index, (old, new) in enumerate(zip(before[1], after[1], strict=True))
        for name, a, b in zip(names, old, new, strict=True)
        if a != b
    ]


def _unflatten(tree: Any, leaves: list[torch.Tensor]) -> Any:
    if "tensor" in tree:
        return leaves[tree["tensor"]]
    if "dict" in tree:
        return {key: _unflatten(value, leaves) for key, value in tree["items"]}
    if "sequence" in tree:
        items = [_unflatten(value, leaves) for value in tree["items"]]
        return items if tree["sequence"] == "list" else tuple(items)
    return tree["value"]


def receive(channel: socket.socket) -> bytes:
    """Read one frame: four bytes of length, then the payload."""
    (size,) = struct.unpack("<I", _exactly(channel, 4))
    return _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            os._exit(0)  # the judge is gone
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(channel: socket.socket, payload: bytes) -> None:
    """Write one frame."""
    channel.sendall(struct.pack("<I", len(payload)) + payload)


def _nursery(control: socket.socket) -> None:
    """Fork a process for each request of the judge, until the judge has ended."""
    sandbox = _import(Path(__file__).with_name("sandbox.py"), "refold trial: sandbox")
    for name in ("LD_PRELOAD", "MALLOC_CHECK_"):  # of this process, not of what programs start
        os.environ.pop(name, None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    # Orphans of a candidate become children of this process, where the judge can count them.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    while True:
        message, handles, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not message:
            return
        request = json.loads(message)
        for name in request["imports"]:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        if request["compiler"]:
            private.warm_compiler()
        if os.fork() == 0:
            control.close()
            channel, guard = (socket.socket(fileno=handle) for handle in handles[:2])
            _born(request, channel, guard, handles[2], sandbox)
        for handle in handles:
            os.close(handle)


def _born(request: dict[str, Any], channel: socket.socket, guard: socket.socket, region: int, sandbox: Any) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    active: list[str] = []
    if request["sandboxed"]:
        active = sandbox.new_namespaces(request["device"])
    if "pid namespace" in active:
        start, started = os.pipe()
        child = os.fork()
        if child:
            send(channel, json.dumps({"pid": child}).encode())
            os.write(started, b"1")
            channel.close()
            os.close(region)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            while guard.recv(1):  # until the judge is done with it
                if os.fork() == 0:
                    guard.sendall(os.getpid().to_bytes(4, "little"))
                    os._exit(0)
            os._exit(0)
        os.read(start, 1)
        os.close(start)
        os.close(started)
    else:
        send(channel, json.dumps({"pid": os.getpid()}).encode())
    guard.close()
    folder = Path(request["folder"])
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    private.move_compiler()
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    if request["sandboxed"]:
        active = sandbox.enter(folder, request["readable"], request["limits"], request["device"], active)
    torch.set_num_threads(request["threads"])
    sys.path[:0] = request["path"]
    Stub(channel, mmap.mmap(region, 0), folder, active).serve()


if __name__ == "__main__":
    _nursery(socket.socket(fileno=int(sys.argv[1])))
