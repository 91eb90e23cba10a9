"""A program on trial: Python source with a class or function in it.

A file in the KernelBench convention (``Model``, ``get_inputs()``, ``get_init_inputs()``; a candidate defines
``ModelNew``), ``file.py:function``, or a function. Foreign source is read here as text and never run; the process of
the program imports it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import math
import operator
import re
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, TargetError

DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FOLDED: dict[type, Callable[[float, float], float]] = {
    ast.Pow: math.pow, ast.Mult: operator.mul, ast.LShift: lambda n, by: n * 2.0**by, ast.Div: operator.truediv,
    ast.Add: operator.add, ast.Sub: operator.sub,
}  # fmt: skip
Target = str | Path | Callable[..., Any]
_LARGEST = 4 << 20  # bytes of source; more than that is a payload
_ENCODING = re.compile(r"^([ \t\f]*#.*?coding[:=][ \t]*)([-\w.]+)", re.MULTILINE)  # as Python finds it (PEP 263)


@dataclass(frozen=True)
class Program:
    """A program's source, and the name of what is judged in it.

    Attributes:
        text: The source of one file.
        name: The file's name.
        attribute: The class or function in it.
        lines: How many lines are its author's; those after them call ``entry``, which is one of these. None: all.
    """

    text: str
    name: str
    attribute: str
    lines: int | None = None
    entry: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "name", "attribute"):
            if not isinstance(getattr(self, name), str):
                raise TargetError(f"the {name} of a program must be text, not {getattr(self, name)!r:.80}")

    @property
    def sha256(self) -> str:
        """A name for this very program."""
        return hashlib.sha256(f"{self.attribute}\n{self.text}".encode()).hexdigest()

    @cached_property
    def numbers(self) -> list[float]:
        """Sizes of the numbers that stand in the source, also as powers, products and sums of others, in order."""
        found = set[float]()
        with contextlib.suppress(RecursionError):
            for node in ast.walk(ast.parse(self.text)):
                with contextlib.suppress(ArithmeticError, ValueError):
                    found.add(abs(_folded(node)))
        return sorted(n for n in found if 0 < n < math.inf)

    @property
    def defines(self) -> set[str]:
        """Names that the source may define outside of functions and classes, in whatever branch; ``*`` for any."""
        found: set[str] = set()
        try:
            left: list[ast.AST] = [ast.parse(self.text)]
        except RecursionError:  # Python itself may run it
            return {"*"}
        while left:
            node = left.pop()
            if isinstance(node, DEFINES):
                found.add(node.name)  # what is inside of it is not defined here
                continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            left += ast.iter_child_nodes(node)
        return found


def _folded(node: ast.AST) -> float:
    """Compute a number that is written in a source; zero of anything else."""
    if isinstance(node, ast.BinOp) and (fold := _FOLDED.get(type(node.op))):
        left, right = _folded(node.left), _folded(node.right)
        return float(fold(left, right)) if left and right else 0.0
    number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return float(node.value) if number else 0.0  # type: ignore[attr-defined]


def program(target: Target, *, role: str) -> Program:
    """Read a program.

    Args:
        target: A file, ``file.py:name``, or a function that is defined at the top level of a file.
        role: ``original`` or ``candidate``; of a file without a name, the first is ``Model``, the second ``ModelNew``.

    Raises:
        TargetError: There is no such file, it is no Python, or it does not define what is judged.
        ArgumentError: The function is not defined at the top level of a file.
    """
    if callable(target):
        return _function(target)
    path, _, attribute = str(target).partition(".py:")
    file = Path(path + ".py" if attribute else path)
    if file.suffix != ".py":
        raise TargetError(f"{role} {target} is neither a Python file nor file.py:name")
    if file.is_dir():
        raise TargetError(f"{role} {file} is a directory, not a Python file")
    if not file.is_file():
        raise TargetError(f"{role} {file} does not exist")
    return source(_text(file, role), name=file.name, attribute=attribute, role=role)


def source(text: str, *, name: str = "candidate.py", attribute: str = "", role: str = "candidate") -> Program:
    """Make a program of source text; raises TargetError as `program` does."""
    if len(text) > _LARGEST:
        raise TargetError(f"{role} {name} has {len(text)} characters; at most {_LARGEST} are read")
    text = text.removeprefix("\ufeff")  # a byte order mark
    for line in text.split("\n", 2)[:2]:
        said = _ENCODING.match(line)
        if said and said[2].lower().replace("_", "-") not in ("utf-8", "utf8", "ascii", "us-ascii"):
            raise TargetError(f"{role} {name} would be read as {said[2][:40]}, and is text; let it declare utf-8")
    attribute = attribute or ("Model" if role == "original" else "ModelNew")
    found = Program(text, name, attribute)
    try:
        defined = found.defines
    except (SyntaxError, ValueError, MemoryError) as error:
        raise TargetError(f"{role} {name} is not Python: {error}") from error
    if not {attribute, "*"} & defined:
        raise TargetError(f"{role} {name} does not define {attribute}; define it, or name another with file.py:name")
    return found


def _text(file: Path, role: str) -> str:
    """Read a file as Python does, which knows byte order marks and declared encodings."""
    try:
        if file.stat().st_size > _LARGEST:
            raise TargetError(f"{role} {file} has {file.stat().st_size} bytes; at most {_LARGEST} are read")
        with file.open("rb") as lines:
            encoding, _ = tokenize.detect_encoding(lines.readline)
        if bytes(range(128)).decode(encoding, "replace") != bytes(range(128)).decode():
            raise TargetError(f"{role} {file} is in {encoding}, in which code can look like a comment; use utf-8")
        text = file.read_text(encoding=encoding, errors="replace")
        first, rest = text.split("\n", 2)[:2], text.split("\n", 2)[2:]
        return "\n".join([*(_ENCODING.sub(r"\1utf-8", line) for line in first), *rest])
    except OSError as error:
        raise TargetError(f"{role} {file} cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        raise TargetError(f"{role} {file} is not Python: {error}") from error


def _function(target: Callable[..., Any]) -> Program:
    name = getattr(target, "__qualname__", "")
    try:
        file = inspect.getsourcefile(target)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise ArgumentError(
            f"{target!r} cannot be run in a process of its own, because it is not a function or class at the top "
            "level of a file; move it there, or give the file"
        )
    return Program(_text(Path(file), "file"), Path(file).name, name)
