"""What the judge and the process of a program say to one another, spelled once for both sides.

The judge sends commands, and believes them. A process answers; whoever owns it may answer anything. So `read` takes an
answer only if each field is there, has its type and is within its bounds, and no other field is. Nothing is decided by
an answer that was not read so. The process loads this file by its path: it imports nothing of refold.
"""

from __future__ import annotations

import builtins
import functools
import json
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# What a tensor may be that has no plain memory; nothing of it is read.
ODD = ("not strided", "conjugate", "negated", "without memory", "on device meta")
# What matters later to a tensor that has the right values.
TRAITS = ("an inference tensor", "in memory that nobody can write to", "with attributes or hooks of its own")
_LARGEST, _ELEMENTS, _DEPTH, _NODES = 1 << 63, 1 << 48, 50, 100_000
_TEXT = 4 << 20


class Malformed(ValueError):
    """An answer is not what it should be; the message says which field is wrong."""


ERRORS = ("ValueError", "TypeError", "RuntimeError", "NotImplementedError", "AssertionError")
"""Of Python, which a block may raise and do nothing else; the judge lets it do so, and sees if that ends the call."""


# Of commands, whose names are those of methods of `worker.Stub`.


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the shared memory.

    Attributes:
        offset: Bytes from its beginning.
        elements: From the first that is copied to the last; 0 of an empty tensor.
        first: The place of the tensor's first element among them.
    """

    offset: int
    elements: int
    first: int
    shape: list[int]
    stride: list[int]
    dtype: str
    requires_grad: bool = False


WAYS = {
    "loaded": "load_state_dict",
    "assigned": "load_state_dict(assign=True)",
    "within": "load_state_dict of a module that it is a part of",
    "beside": "load_state_dict of one made as it was, before one more is given others",
    "in place": "a change in place, which no version counter counts",
    "data": "another tensor as .data",
    "parameters": "other Parameter and buffer objects",
    "moved": "a move of all of them, as by .to(), and a change in place",
    "cast": "casts to other dtypes and back, and load_state_dict",
    "called": "torch.func.functional_call, with parts of larger tensors",
    "copied": "a change in place before a deep copy, which is called",
    "copied first": "a change in place of it and of a deep copy, which is called",
    "copied alone": "a change in place of a deep copy alone, which is called",
    "pickled": "a change in place before it is saved as a whole and loaded, which is called",
}
"""The ways in which a user's program gives a module other weights."""
COPIES = ("copied", "copied first", "copied alone", "pickled")
"""Those in which a copy is called."""
OPTIONAL = ("cast", "called", "within", "beside", *COPIES)
"""Those that an original may not support, and that a candidate may refuse by an exception."""

USES = {
    "autocast": "under torch.autocast",
    "float64": "with float64 as the default dtype",
    "thread": "called from another thread, with its backward from one more",
    "parts": "for inputs that are parts of one larger tensor",
    "own memory": "for inputs in memory of torch's own",
    "same objects": "for the tensors of the call before, changed in place",
    "between": "if it is called again before its results are used",
    "changed": "if its results are changed in place",
    "compiling": "where torch.compiler.is_compiling() is true",
    "overwritten": "if its arguments are overwritten after the call",
    "keywords": "if its arguments are given by their names",
    "jvp": "under torch.func.jvp",
    "vjp": "under torch.func.vjp",
    "vmap": "under torch.func.vmap over some axes of some inputs",
    "threads": "with another number of threads",
    "overlapping": "for inputs that overlap in memory",
    "conjugate": "for inputs that are conjugate views",
    "forward": "if its forward is called by its name",
    "in a backward": "within a backward, as torch.utils.checkpoint calls it",
    "kept elsewhere": "if what it saves for the backward is kept elsewhere until then",
}
"""The ways in which a user's program calls another one, beside the plain one; `uses` carries them out."""
FORWARD = ("jvp", "vmap", "vjp")
"""Those in which nothing flows back."""


@dataclass(frozen=True, kw_only=True)
class How:
    """How a program is called.

    Attributes:
        seed: Seeds the random state that the program finds.
        mode: ``plain``, ``recorded`` (gradients are) or ``inference``.
        perturb: The byte that new memory is filled with; 0 leaves it.
        keep: Whether the result is kept alive for good.
        flow: How gradients are asked for: ``once``; ``accumulated`` in ``.grad`` by two backwards of one graph;
            ``added`` to what ``.grad`` holds; ``partly``, from one result alone; ``filled``, as once, with zeros for
            those that are none; or ``differentiated`` once more.
        frozen: Which parameters require no gradient: bits in the order in which gradients are given; -1 is all.
        inner: Whether the inputs that require gradients are no leaves, but results of other operations.
        training: The mode of the modules; None leaves it.
        use: The way in which it is called, a name of `USES`; empty for the plain one.
    """

    seed: int = 0
    mode: str = "plain"
    perturb: int = 0
    keep: bool = False
    flow: str = "once"
    frozen: int = 0
    inner: bool = False
    training: bool | None = None
    use: str = ""


@dataclass(frozen=True)
class Prepare(How):
    """Wrap the places where the inputs of the next call, and what flows back, are going to be.

    Attributes:
        tree: How the arguments are nested; leaves are numbers of tensors or constants.
        tensors: Where the inputs lie.
        cotangents: Where what flows back lies; empty for a call without backward.
        hold: Whether earlier results are kept alive.
    """

    tree: Any
    tensors: list[Place]
    cotangents: list[Place] = field(default_factory=list)
    hold: bool = True


# Of answers.


@dataclass
class Description:
    """What a process says of a tensor.

    Attributes:
        stride: In elements; as many as axes, unless it is `odd`.
        address: Where its bytes can be read.
        pointer: Where it lies on its device; the same without a GPU.
        storage: Where the memory that it is a part of begins there.
        storage_bytes: The bytes of that memory.
        odd: Why it has no plain memory; words of `ODD`.
        traits: Words of `TRAITS`.
    """

    type: str
    dtype: str
    device: str
    shape: list[int]
    stride: list[int]
    address: int
    pointer: int
    storage: int
    storage_bytes: int
    odd: list[str]
    traits: list[str]
    requires_grad: bool

    def check(self) -> None:
        """Raise `Malformed` if no tensor is like this."""
        if self.dtype not in DTYPES:
            raise Malformed(f"there is no dtype {self.dtype[:80]!r}")
        if not set(self.odd) <= set(ODD) or not set(self.traits) <= set(TRAITS):
            raise Malformed("a tensor is described by words that say nothing")
        if len(self.stride) != len(self.shape) and "not strided" not in self.odd:
            raise Malformed(f"a tensor of {len(self.shape)} axes is said to have {len(self.stride)} strides")
        if math.prod(max(n, 1) for n in self.shape) >= _ELEMENTS or any(s >= _ELEMENTS for s in self.stride):
            raise Malformed(f"no tensor has the shape {str(self.shape)[:80]}")
        if len(self.type) > 200 or len(self.device) > 20:
            raise Malformed("a tensor has a name that is too long")

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def span(self) -> int:
        """The bytes from the first to the last element; 0 of what has no plain memory."""
        if self.odd or 0 in self.shape:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))) * self.itemsize


@dataclass
class Drawn:
    """The original's own inputs."""

    tree: Any
    tensors: list[Description]

    def check(self) -> None:
        """Raise `Malformed` unless the structure has each tensor once, in order."""
        check_tree(self.tree, len(self.tensors))


@dataclass
class Returned(Drawn):
    """A call has returned: the structure of what it gave, with gradients a pair, and the tensors in it, in order.

    Attributes:
        left: What of the caller's own objects and modes was changed.
    """

    left: list[str]


@dataclass
class Inspected:
    """What a program must leave alone.

    Attributes:
        modes: Training modes, hooks and needs of gradients of its modules.
        settings: Global settings that are others than at first, and their values.
        patched: Functions that were replaced.
        random: A name for the state of all random numbers.
        names: The names by which its arguments can be given.
    """

    state: dict[str, Description]
    modes: str
    settings: dict[str, str]
    patched: list[str]
    random: str
    names: list[str]


@dataclass
class Confined:
    """What confines the process, and what its part of refold cannot see with this PyTorch."""

    active: list[str]
    off: list[str]


@dataclass
class Failure:
    """The program raised an exception.

    Attributes:
        type: The class of the exception, if Python or PyTorch defines it; else ``Exception``.
        text: Its message.
        lines: The lines of the program's own file that it came through, the last one last.
    """

    type: str
    text: str
    lines: list[int]

    def check(self) -> None:
        """Raise `Malformed` unless the type is one, because it is told to whoever wrote the program."""
        if known_exception(self.type) is None:
            raise Malformed("it raised what neither Python nor PyTorch has")


def known_exception(name: str) -> type | None:
    """Return the exception of Python or PyTorch that has this name, if one has."""
    found = getattr(builtins, name, getattr(torch, name, None))
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def to_json(answer: Any) -> bytes:
    """Write an answer."""
    return json.dumps({"failure" if isinstance(answer, Failure) else "answer": plain(answer)}).encode()


def plain(message: Any) -> Any:
    """Return a message as what JSON and pickle have."""
    if is_dataclass(message):
        return {f.name: plain(getattr(message, f.name)) for f in fields(message)}
    if isinstance(message, dict):
        return {k: plain(v) for k, v in message.items()}
    return [plain(v) for v in message] if isinstance(message, (list, tuple)) else message


def read(frame: bytes, kind: Any) -> Any:
    """Read an answer of a kind, a type as its fields have them, or a `Failure`.

    Raises:
        Malformed: It is neither; says why.
    """
    try:
        data = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not JSON: {error}") from None
    match data:
        case {"answer": answer, **others} if not others:
            return _typed(kind, answer, "its answer")
        case {"failure": failure, **others} if not others:
            return _typed(Failure, failure, "its failure")
    raise Malformed("it is neither an answer nor a failure")


_hints: Any = functools.cache(typing.get_type_hints)


def _typed(kind: Any, value: Any, where: str) -> Any:
    """Return a value as what a type says; raises `Malformed` if it is not."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        wanted = _hints(kind)
        if not isinstance(value, dict) or value.keys() != wanted.keys():
            raise Malformed(f"{where} has other fields than {', '.join(wanted)}")
        found = typing.cast(Any, kind)(**{n: _typed(t, value[n], f"{where}.{n}") for n, t in wanted.items()})
        if hasattr(found, "check"):
            found.check()
        return found
    if origin is list and isinstance(value, list):
        return [_typed(inner[0], each, where) for each in value]
    if origin is dict and isinstance(value, dict):
        return {_typed(inner[0], k, where): _typed(inner[1], v, where) for k, v in value.items()}
    if origin is types.UnionType:
        return None if value is None else _typed(inner[0], value, where)
    good = {
        None: value is None,
        int: type(value) is int and 0 <= value < _LARGEST,
        float: type(value) in (int, float) and abs(value) < 1e18,
        bool: type(value) is bool,
        str: type(value) is str and len(value) <= _TEXT,
    }
    if not good.get(kind, False):
        raise Malformed(f"{where} has something else where {getattr(kind, '__name__', kind)} is expected")
    return float(value) if kind is float else value


def check_tree(tree: Any, count: int) -> None:
    """Raise `Malformed` unless a structure has so many tensors, each once and in order."""
    leaves = []
    for nodes, leaf in enumerate(_leaves(tree)):
        if nodes > _NODES:
            raise Malformed("a structure is too large")
        leaves += [] if leaf is None else [leaf]
    if leaves != list(range(count)) or any(type(leaf) is not int for leaf in leaves):
        raise Malformed(f"it describes no structure of {count} tensors: {str(tree)[:200]}")


def _leaves(tree: Any, depth: int = 0) -> Iterator[int | None]:
    """Yield the numbers of the tensors in a structure, in order, and None for each other node."""
    yield None
    match tree if depth <= _DEPTH else None:
        case {"tensor": leaf, **more} | {"float": leaf, **more} if not more:
            yield leaf
        case {"sequence": str(), "items": [*items], **more} if not more:
            for item in items:
                yield from _leaves(item, depth + 1)
        case {"dict": str(), "items": [*items], **more} if not more:
            for item in items:
                match item:
                    case [str() | int(), value]:
                        yield from _leaves(value, depth + 1)
                    case _:
                        raise Malformed("something else than a name and a value is in a dictionary")
        case {"value": None | int() | str() | float(), **more} | {"object": str(), **more} if not more:
            pass
        case _:
            raise Malformed(f"it describes no structure: {str(tree)[:200]}")
