"""Definitions, solutions, workloads and traces of FlashInfer-Bench: what a computation is, who solves it, and how well.

A definition has a reference in Python, ``run``, and names axes, inputs and outputs; a solution has sources and an entry
point. Both become programs (`program`): the reference is the original, the solution is the candidate. Variable axes
that no workload fixes are drawn anew for each trial, so that a solution for one size alone is found out. The format is
that of https://bench.flashinfer.ai/docs/flashinfer-trace.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import operator
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import ArgumentError, RefoldError, TargetError
from .program import Program, source
from .verdict import Verdict

_Given = ParamSpec("_Given")
_Read = TypeVar("_Read")
_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "bool")
_FLOATS = ("float32", "bfloat16", "float16")
_SIZES = (1, 2, 3, 5, 7, 13, 16, 29, 32, 48, 61, 64)  # of variable axes
_TRIES = 10_000  # to satisfy all constraints
_DEPTH = 100  # of a constraint: what is nested more deeply could end Python's stack
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip

# Calls are by the order of inputs. A float64 process computes in float64; else each input has its own dtype. Where a
# file holds tensors, calls have tensors alone, and numbers are the workload's.
_COMMON = """

import json as _json

import torch as _torch

_SPEC = _json.loads($spec)


def _cast(values):
    left = iter(values)
    for each in _SPEC["inputs"].values():
        x = each["value"] if _SPEC["stored"] and each["size"] is None else next(left)
        real = isinstance(x, _torch.Tensor) and x.is_floating_point() and x.dtype != _torch.float64
        yield x.to(getattr(_torch, each["dtype"])) if real else x


def _named(found):
    names = list(_SPEC["outputs"])
    if isinstance(found, dict):
        return {name: found[name] for name in names}
    return dict(zip(names, found if isinstance(found, (tuple, list)) else [found], strict=True))
"""
_ORIGINAL = """

class Model(_torch.nn.Module):
    def forward(self, *values):
        return _named(run(*_cast(values)))


def get_inputs():
    found = []
    for each in _SPEC["inputs"].values():
        shape, dtype = each["size"], getattr(_torch, each["dtype"])
        if shape is None:
            found.append(each["value"])
        elif dtype.is_floating_point:
            found.append(_torch.randn(shape).to(dtype))
        else:
            found.append(_torch.randint(0, 2 if dtype == _torch.bool else _SPEC["below"], shape).to(dtype))
    return found
"""
_CANDIDATE = """

class ModelNew(_torch.nn.Module):
    def forward(self, *values):
        values = [*_cast(values)]
        if not _SPEC["places"]:
            return _named($entry(*values))
        axes = dict(_SPEC["axes"])
        for x, each in zip(values, _SPEC["inputs"].values()):
            axes.update(zip(each["shape"] or (), getattr(x, "shape", ())))
        device = next((x.device for x in values if isinstance(x, _torch.Tensor)), "cpu")
        places = [
            _torch.empty([axes[a] for a in each["shape"] or ()], dtype=getattr(_torch, each["dtype"]), device=device)
            for each in _SPEC["outputs"].values()
        ]
        $entry(*values, *places)
        return _named(places)
"""
# Several files are a package in the process's own folder.
_PACKAGE = """
import importlib as _importlib
import pathlib as _pathlib
import sys as _sys

_root = _pathlib.Path("solution")
for _path, _text in $files.items():
    _place = _root / _path
    _place.parent.mkdir(parents=True, exist_ok=True)
    _place.write_text(_text, encoding="utf-8")
_sys.path.insert(0, str(_root.resolve()))
try:
    _entry = getattr(_importlib.import_module($module), $function)
finally:
    _sys.path.remove(str(_root.resolve()))
"""


def _whole(read: Callable[_Given, _Read]) -> Callable[_Given, _Read]:
    """Let what is read from foreign data be all of it, or a refusal, whatever stands where something else should."""

    @functools.wraps(read)
    def reading(*args: _Given.args, **kwargs: _Given.kwargs) -> _Read:
        try:
            return read(*args, **kwargs)
        except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, MemoryError) as error:
            if isinstance(error, RefoldError):
                raise
            said = f"{type(error).__name__}: {str(error)[:200]}"
            raise TargetError(f"a definition, solution or workload is not what it should be: {said}") from error

    return reading


@dataclass(frozen=True)
class Definition:
    """A computation.

    Attributes:
        name: Its name.
        axes: The sizes of constant axes; None for those that vary.
        inputs: The axes and the dtype of each input, by its name; of a number, None and the dtype.
        outputs: The same of results.
        reference: Python that defines ``run``.
        constraints: What must be true of the axes.
    """

    name: str
    axes: dict[str, int | None]
    inputs: dict[str, tuple[list[str] | None, str]]
    outputs: dict[str, tuple[list[str] | None, str]]
    reference: str
    constraints: list[str] = field(default_factory=list)

    @staticmethod
    @_whole
    def read(path: Path) -> Definition:
        """Read a definition from a file.

        Raises:
            TargetError: It is none; says which field is wrong.
        """
        data = _read(path)
        axes: dict[str, int | None] = {}
        for name, axis in _field(data, "axes", dict, path).items():
            kind = axis.get("type") if isinstance(axis, dict) else None
            value = axis.get("value") if kind == "const" else None
            if kind not in ("const", "var") or (kind == "const" and (type(value) is not int or value < 1)):
                raise TargetError(f"{path}: axis {name} must be of type const with a positive value, or of type var")
            axes[name] = value
        inputs, outputs = (_tensors(_field(data, side, dict, path), axes, path) for side in ("inputs", "outputs"))
        constraints = data.get("constraints") or []
        if not isinstance(constraints, list) or not all(isinstance(each, str) for each in constraints):
            raise TargetError(f"{path}: constraints must be a list of expressions")
        name, reference = (_field(data, each, str, path) for each in ("name", "reference"))
        return Definition(name, axes, inputs, outputs, reference, constraints)

    @_whole
    def workload(self, seed: int, turn: int) -> Workload:
        """Draw a workload; whole numbers and truth values among the inputs are others in each turn."""
        values = {n: bool(turn) if dtype == "bool" else turn + 1 for n, (shape, dtype) in self.inputs.items()
                  if shape is None and dtype not in _FLOATS}  # fmt: skip
        inputs = {n: {"type": "scalar", "value": values[n]} if n in values else {"type": "random"} for n in self.inputs}
        return Workload(self.drawn(seed), inputs, f"drawn-{seed:012x}")

    def drawn(self, seed: int) -> dict[str, int]:
        """Draw sizes of variable axes that satisfy all constraints.

        Raises:
            TargetError: None were found; or a constraint speaks of other things than axes.
        """
        g = random.Random(seed)
        constraints = [_parsed(text) for text in self.constraints]
        for _ in range(_TRIES):
            sizes = {name: size or g.choice(_SIZES) for name, size in self.axes.items()}
            for each in constraints:  # an axis that is said to equal something equals it
                match each:
                    case ast.Compare(ast.Name(name), [ast.Eq()], [other]) if self.axes.get(name, 0) is None:
                        sizes[name] = _value(other, sizes)
            if all(_value(each, sizes) for each in constraints) and all(n > 0 for n in sizes.values()):
                return {name: sizes[name] for name, size in self.axes.items() if size is None}
        raise TargetError(f"{self.name}: no sizes satisfy {'; '.join(self.constraints)}; give a workload")


@dataclass(frozen=True)
class Solution:
    """Somebody's implementation of a definition.

    Attributes:
        name: Its name.
        definition: The name of what it solves.
        entry: The file and the function that is called.
        sources: All files.
        places: Whether results are written to tensors that are given after the inputs; None if it does not say.
    """

    name: str
    definition: str
    entry: tuple[str, str]
    sources: dict[str, str]
    places: bool | None

    @staticmethod
    @_whole
    def read(path: Path) -> Solution:
        """Read a solution from a file.

        Raises:
            TargetError: It is none, or in a language that cannot be judged here.
        """
        data = _read(path)
        spec = _field(data, "spec", dict, path)
        language = _field(spec, "language", str, path)
        if language not in ("python", "triton"):
            raise TargetError(f"{path}: solutions in python and triton can be judged, not in {language[:40]!r}")
        file, separator, function = _field(spec, "entry_point", str, path).partition("::")
        sources: dict[str, str] = {}
        for each in _field(data, "sources", list, path):
            if not isinstance(each, dict) or not all(isinstance(each.get(n), str) for n in ("path", "content")):
                raise TargetError(f"{path}: each of sources must have a path and a content")
            if Path(each["path"]).is_absolute() or ".." in Path(each["path"]).parts:
                raise TargetError(f"{path}: the source {each['path']!r} would lie outside of its folder")
            if sources.setdefault(each["path"], each["content"]) != each["content"]:
                raise TargetError(f"{path}: the source {each['path']!r} is there twice")
        if not separator or not function.isidentifier() or file not in sources or not file.endswith(".py"):
            raise TargetError(f"{path}: entry_point must be FILE.py::FUNCTION, and FILE.py one of its sources")
        places = spec.get("destination_passing_style")
        if not isinstance(places, (bool, type(None))):
            raise TargetError(f"{path}: destination_passing_style must be true or false")
        name, definition = (_field(data, each, str, path) for each in ("name", "definition"))
        return Solution(name, definition, (file, function), sources, places)


@dataclass(frozen=True)
class Workload:
    """Sizes of variable axes, and what inputs are: drawn at random, a number, or a tensor of a file."""

    axes: dict[str, int]
    inputs: dict[str, dict[str, Any]]
    uuid: str

    @staticmethod
    @_whole
    def read(path: Path) -> list[Workload]:
        """Read workloads: one, or one in each line, alone or as the workload of a trace.

        Raises:
            TargetError: One of them is none.
        """
        try:
            found = [_parsed_json(line) for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except (ValueError, OSError):
            found = [_read(path)]
        out = []
        for data in found:
            data = data.get("workload", data) if isinstance(data, dict) else {}
            axes, inputs = _field(data, "axes", dict, path), _field(data, "inputs", dict, path)
            if not all(type(n) is int and 0 < n < 1 << 31 for n in axes.values()):
                raise TargetError(f"{path}: axes of a workload must be positive numbers")
            if not all(isinstance(each, dict) for each in inputs.values()):
                raise TargetError(f"{path}: each input of a workload must say its type")
            out.append(Workload(axes, inputs, str(data.get("uuid") or uuid.uuid4())))
        return out


@_whole
def programs(
    definition: Definition, solution: Solution, workload: Workload, root: Path
) -> tuple[Program, Program, list[torch.Tensor] | None, str]:
    """Make the original, the candidate, its inputs if files hold them, and the dtype of a trial.

    Args:
        definition: What is computed.
        solution: By whom.
        workload: On what.
        root: The folder from which a workload names its files.

    Raises:
        TargetError: The three do not fit.
    """
    if solution.definition != definition.name:
        raise TargetError(f"{solution.name} solves {solution.definition}, not {definition.name}")
    sizes = {name: size or workload.axes.get(name, 0) for name, size in definition.axes.items()}
    if missing := [name for name, size in sizes.items() if not size]:
        raise TargetError(f"the workload {workload.uuid} has no size for the axes {', '.join(missing)}")
    inputs: dict[str, dict[str, Any]] = {}
    for name, (shape, dtype) in definition.inputs.items():
        said = workload.inputs.get(name, {"type": "random"})
        size = None if shape is None else [sizes[axis] for axis in shape]
        value = said.get("value", 1 if dtype not in _FLOATS else 0.5) if size is None else None
        if size is None and not isinstance(value, (bool, int, float)):
            raise TargetError(f"the workload {workload.uuid} has no number for {name}")
        inputs[name] = {"shape": shape, "size": size, "dtype": dtype, "value": value}
    outputs = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in definition.outputs.items()}
    entry_text = solution.sources[solution.entry[0]]
    places = _takes_places(solution, entry_text, len(inputs)) if solution.places is None else solution.places
    below = max(min([each["size"][0] for each in inputs.values() if each["size"]], default=2), 1)
    stored = _stored(workload, root, inputs)
    spec = {"axes": sizes, "inputs": inputs, "outputs": outputs, "places": places, "below": below}
    spec["stored"] = stored is not None
    common = Template(_COMMON).substitute(spec=repr(json.dumps(spec)))
    original = source(definition.reference + common + _ORIGINAL, name="reference.py", role="original")
    text, entry, lines = entry_text, solution.entry[1], entry_text.count("\n") + 1
    if len(solution.sources) > 1:
        module = solution.entry[0].removesuffix(".py").replace("/", ".")
        values = {"files": solution.sources, "module": module, "function": entry}
        text, entry = Template(_PACKAGE).substitute({k: repr(v) for k, v in values.items()}), "_entry"
        lines = 0
    candidate = source(text + common + Template(_CANDIDATE).substitute(entry=entry), name=f"{solution.name[:60]}.py")
    candidate = dataclasses.replace(candidate, lines=lines, entry=entry)
    floats = [each["dtype"] for each in (*inputs.values(), *outputs.values()) if each["dtype"] in _FLOATS]
    dtype = next((each for each in _FLOATS if each in floats), "float32")
    return original, candidate, stored, dtype


def trace(
    definition: Definition, solution: Solution, workload: Workload, verdict: Verdict, *, hardware: str
) -> dict[str, Any]:
    """Say what a trial found, as a trace; a trial that decided nothing has no evaluation."""
    libraries = {name: version(name) for name in ("torch", "refold")}
    shown = {name: workload.inputs.get(name, {"type": "random"}) for name in definition.inputs}
    found = {
        "definition": definition.name,
        "workload": {"axes": workload.axes, "inputs": shown, "uuid": workload.uuid},
        "solution": solution.name,
        "evaluation": None,
    }
    if verdict.outcome == "unjudged":
        return found
    status, times = _status(verdict), verdict.timing
    lines = [line for line in verdict.lines if "worst" in line]
    worst = max(lines, key=lambda line: line["error"] / (line["bound"] or 1.0), default={})
    extra = {"relative_l2_error": worst["error"], "bound": worst["bound"]} if worst else {}
    extra |= {"check": verdict.check} if verdict.check else {}
    numbers = {"max_relative_error": worst.get("worst", 0.0), "max_absolute_error": "NaN", "extra": extra}
    named = {"latency_ms": "candidate_ms", "reference_latency_ms": "base_ms", "speedup_factor": "speedup"}
    evaluation = {
        "status": status,
        "environment": {"hardware": hardware or "unknown", "libs": libraries},
        "timestamp": datetime.now(UTC).isoformat(),
        "log": str(verdict),
        "correctness": numbers if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
        "performance": {name: times.get(own, 0.0) for name, own in named.items()} if status == "PASSED" else None,
    }
    return {**found, "evaluation": evaluation}


def _status(verdict: Verdict) -> str:
    passed = "PASSED" if verdict.accepted else "INCORRECT_NUMERICAL"
    return {
        "T7": "PASSED",  # right, and not faster
        "M2": "INCORRECT_DTYPE" if " dtype " in verdict.reason else "INCORRECT_SHAPE",
        "P3": "TIMEOUT",
        "P4": "RUNTIME_ERROR" if verdict.lines else "COMPILE_ERROR",
    }.get(verdict.check, passed)


def _stored(workload: Workload, root: Path, inputs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """Read tensors from files, if a workload names some; other tensors are drawn once."""
    if not any(each.get("type") == "safetensors" for each in workload.inputs.values()):
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found = []
    for name, each in inputs.items():
        if each["size"] is None:
            continue
        said, dtype = workload.inputs.get(name, {}), getattr(torch, each["dtype"])
        tensor = (torch.randn if dtype.is_floating_point else torch.zeros)(each["size"])
        if said.get("type") == "safetensors":
            try:
                tensor = load_file(root / str(said["path"]))[str(said["tensor_key"])]
            except (OSError, KeyError, ValueError, SafetensorError) as error:
                raise TargetError(f"the input {name} cannot be read: {type(error).__name__}: {error}") from error
            if list(tensor.shape) != each["size"]:
                raise TargetError(f"the input {name} has shape {list(tensor.shape)} in its file, not {each['size']}")
        found.append(tensor.to(dtype))
    return found


def _takes_places(solution: Solution, text: str, inputs: int) -> bool:
    """Say whether the entry takes its results, too, by the number of its parameters without a default."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TargetError(f"the source {solution.entry[0]} of {solution.name} cannot be parsed: {error}") from error
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == solution.entry[1]:
            return len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults) > inputs
    return False


def _tensors(data: dict[str, Any], axes: Mapping[str, Any], path: Path) -> dict[str, tuple[list[str] | None, str]]:
    found: dict[str, tuple[list[str] | None, str]] = {}
    for name, each in data.items():
        shape, dtype = (each.get("shape"), each.get("dtype")) if isinstance(each, dict) else ("", None)
        dtype = "float8_e4m3fn" if dtype == "float8_e4m3" else dtype  # its former name
        if dtype not in _DTYPES:
            raise TargetError(f"{path}: {name} must have a dtype of {', '.join(_DTYPES)}, not {dtype!r:.40}")
        if shape is not None and not (isinstance(shape, list) and all(axis in axes for axis in shape)):
            raise TargetError(f"{path}: the shape of {name} must be a list of axes, or null for a number")
        found[name] = shape, dtype
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        data = _parsed_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TargetError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise TargetError(f"{path} must hold an object")
    return data


def _parsed_json(text: str) -> Any:
    """Parse JSON in which no name stands twice: another reader could take the other value."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"a name stands twice among {', '.join(found)[:200]}")
        return found

    return json.loads(text, object_pairs_hook=once)


def _field(data: dict[str, Any], name: str, kind: type, path: Path) -> Any:
    if not isinstance(data.get(name), kind) or not data[name]:
        raise TargetError(f"{path}: {name} must be a {kind.__name__} that is not empty")
    return data[name]


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TargetError(f"the constraint {text[:80]!r} is no expression") from error


def _value(node: ast.expr, sizes: Mapping[str, int], depth: int = 0) -> Any:
    """Evaluate an expression of sizes; raises TargetError if it is of anything else, or nested too deeply."""
    if depth > _DEPTH:
        raise TargetError(f"a constraint is nested more than {_DEPTH} times; write it with fewer parentheses")
    value = functools.partial(_value, sizes=sizes, depth=depth + 1)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name) and node.id in sizes:
        return sizes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        try:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        except ZeroDivisionError:
            return 0
    if isinstance(node, ast.BoolOp):
        found: Sequence[Any] = [value(each) for each in node.values]
        return all(found) if isinstance(node.op, ast.And) else any(found)
    if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
        values = [value(each) for each in (node.left, *node.comparators)]
        return all(_OPERATORS[type(op)](a, b) for op, a, b in zip(node.ops, values, values[1:], strict=False))
    said = ast.unparse(node)
    raise TargetError(f"the constraint {said[:80]!r} is not one of sizes alone; give a workload that satisfies it")


def is_exchange(original: str, candidate: str) -> bool:
    """Say whether two targets of the command line are a definition and a solution; raises ArgumentError if one is."""
    kinds = [str(each).endswith(".json") for each in (original, candidate)]
    if any(kinds) and not all(kinds):
        raise ArgumentError("a definition in JSON goes with a solution in JSON")
    return all(kinds)
