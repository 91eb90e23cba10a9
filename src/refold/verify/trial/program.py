"""A program on trial: Python source with a class or function in it.

A file in the KernelBench convention (``Model``, ``get_inputs()``, ``get_init_inputs()``; a candidate defines
``ModelNew``), ``file.py:function``, or a function. Foreign source is read here as text and never run; the process of
the program imports it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, TargetError

Target = str | Path | Callable[..., Any]
_LARGEST = 4 << 20  # bytes of source; more than that is a payload


@dataclass(frozen=True)
class Program:
    """A program's source, and the name of what is judged in it.

    Attributes:
        text: The source of one file.
        name: The file's name.
        attribute: The class or function in it.
    """

    text: str
    name: str
    attribute: str

    @property
    def sha256(self) -> str:
        """A name for this very program."""
        return hashlib.sha256(f"{self.attribute}\n{self.text}".encode()).hexdigest()

    @property
    def defines(self) -> set[str]:
        """Names that the source defines at its top level."""
        found: set[str] = set()
        for node in ast.parse(self.text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        return found


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
    return source(file.read_text(errors="replace"), name=file.name, attribute=attribute, role=role)


def source(text: str, *, name: str = "candidate.py", attribute: str = "", role: str = "candidate") -> Program:
    """Make a program of source text; raises TargetError as `program` does."""
    if len(text) > _LARGEST:
        raise TargetError(f"{role} {name} has {len(text)} characters; at most {_LARGEST} are read")
    attribute = attribute or ("Model" if role == "original" else "ModelNew")
    found = Program(text, name, attribute)
    try:
        defined = found.defines
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TargetError(f"{role} {name} is not Python: {error}") from error
    if attribute not in defined:
        raise TargetError(f"{role} {name} does not define {attribute}; define it, or name another with file.py:name")
    return found


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
    return Program(Path(file).read_text(), Path(file).name, name)
