"""The user's source that a node comes from: the line, the expression, the variable that gets its value.

A tracer keeps a stack trace with each node: file, line, and, since Python 3.11, marks below the code that begin where
the expression does. The expression itself is read from the file. Where there is no file, its operation is named.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

CALLED = "refold_called"
"""The key of a node's metadata for the name that its value has in the user's code, where the node has another."""

# Longer expressions are cut.
_WIDEST = 72
# What Python's operators are called in graphs.
_OPERATORS = {
    ast.Add: {"add"}, ast.Sub: {"sub"}, ast.Mult: {"mul"}, ast.Div: {"truediv", "div"}, ast.Pow: {"pow"},
    ast.MatMult: {"matmul", "mm", "bmm", "mv", "dot"}, ast.Mod: {"mod", "remainder"},
    ast.FloorDiv: {"floordiv", "floor_divide"}, ast.USub: {"neg"},
}  # fmt: skip
_ITEMS = {"getitem", "select", "slice", "index"}


def source_line(node: Node) -> str:
    """Return the innermost line of the user's code that made a node, as ``file:line: code``; empty if unknown."""
    file, number, code, _ = _traced(node)
    return f"{file}:{number}: {code}".rstrip(": ") if file else ""


def expression(node: Node) -> str:
    """Return the user's expression that a node computes; the name of its operation if the source is not known."""
    found = _expression(node)
    return segment(_traced(node)[0], found) if found is not None else str(node.target)


def name_of(node: Node) -> str:
    """Give the user's name of a node's value: the variable that gets it, or an argument; else the expression."""
    if CALLED in node.meta:
        return node.meta[CALLED]
    if node.op == "placeholder":
        return _argument(node)
    found, (file, number, *_) = _expression(node), _traced(node)
    if isinstance(found, ast.AugAssign):
        return segment(file, found.target)
    for statement in _at(file, number, ast.Assign, ast.AnnAssign, ast.NamedExpr):
        for target, given in _pairs(statement):
            if given is found and found is not None:
                return segment(file, target)
    return expression(node)


def operator_calls(graph: Graph) -> str:
    """Return the calls of refold's operators in a graph, with the tensors that they get; empty if there are none."""
    calls = []
    for node in graph.nodes:
        library, _, name = str(node.target).partition(".")
        if node.op == "call_function" and library == "refold":
            given = (name_of(x) if x.op == "placeholder" or CALLED in x.meta else "..." for x in node.all_input_nodes)
            calls.append(f"{name.partition('.')[0]}({', '.join(given)})")
    return "; ".join(calls)


def located(node: Node) -> tuple[str, str]:
    """Return line and expression of a node, for a refusal."""
    line = source_line(node)
    return line, expression(node) if line else ""


def _pairs(statement: Any) -> Iterator[tuple[ast.expr, Any]]:
    """Return which parts of an assignment get which."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        given = statement.value
        if isinstance(target, ast.Tuple) and isinstance(given, ast.Tuple) and len(target.elts) == len(given.elts):
            yield from zip(target.elts, given.elts, strict=True)
        else:
            yield target, given


def _argument(node: Node) -> str:
    """Return the user's name of a graph's input, such as ``x`` or ``self.lin.weight``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    given = getattr(source, "name", node.name)
    return named(given() if callable(given) else given)


def named(source: str) -> str:
    """Write what Dynamo calls the source of a value, ``L['self']._modules['a'].b`` or ``l_x_``, as a user does."""
    text = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source)
    text = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", text)
    return text if re.search(r"\W", text) else plain_name(text)


def plain_name(name: str) -> str:
    """Return the user's name from Dynamo's, such as ``l_self_modules_proj_parameters_weight_``."""
    name = re.sub(r"^[Ll]_+", "", name).strip("_")
    name = re.sub(r"(^|_)self_", r"\1", name)
    name = re.sub(r"(modules|parameters|buffers)_+", "", name)
    return re.sub(r"__+", "_", name).strip("_")


def _traced(node: Node) -> tuple[str, int, str, int | None]:
    """Return file, line number, code, and the column in the code where the expression begins, if it is known.

    A mode for torch's functions, such as a default device, calls each of them in a frame of its own, which is left out.
    """
    lines = [line for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if line.strip().startswith("File ")]
    frames = [i for i in frames if not lines[i].endswith(" in __torch_function__")] or frames
    match = re.match(r'\s*File "(.*)", line (\d+)', lines[frames[-1]]) if frames else None
    if match is None:
        return "", 0, "", None
    code, marks = (*lines[frames[-1] + 1 :], "", "")[:2]
    return match[1], int(match[2]), code.strip(), _column(code, marks)


def _column(code: str, marks: str) -> int | None:
    found = re.match(r" *(?=[~^])[~^ ]*$", marks)
    return None if found is None else len(marks) - len(marks.lstrip()) - (len(code) - len(code.lstrip()))


def _expression(node: Node) -> Any:
    """Return the expression, or the assignment in place, that a node computes."""
    file, number, _, column = _traced(node)
    found = [x for x in _at(file, number, ast.expr, ast.AugAssign) if not isinstance(x, (ast.Name, ast.Constant))]
    names = _names(node)
    fitting = [x for x in found if _computes(x, names)]
    if column is not None:
        line = linecache.getline(file, number)
        column += len(line) - len(line.lstrip())
        begins = [x for x in found if x.col_offset == column]
        fitting = [x for x in fitting if x in begins] or begins[:1] or fitting
    whole = [x.value for x in _at(file, number, ast.Assign, ast.AnnAssign, ast.Return, ast.Expr) if x.value is not None]
    return (fitting or whole or found or [None])[0]


def _names(node: Node) -> set[str]:
    """List the names that a node's operation may have in the source."""
    written = [node.target, *(fn for _, fn in node.meta.get("source_fn_stack") or ())]
    names = (str(getattr(x, "__name__", x)).removeprefix("aten.").split(".")[0] for x in written)
    return {y for x in names for y in (x, x.rstrip("_"), x.removeprefix("i"))}


def _computes(x: Any, names: set[str]) -> bool:
    if isinstance(x, (ast.BinOp, ast.UnaryOp, ast.AugAssign)):
        return not _OPERATORS.get(type(x.op), set()).isdisjoint(names)
    if isinstance(x, ast.Subscript):
        return not _ITEMS.isdisjoint(names)
    return isinstance(x, ast.Call) and getattr(x.func, "attr", getattr(x.func, "id", "")).rstrip("_") in names


def _at(file: str, number: int, *kinds: Any) -> list[Any]:
    """Return the parts of a file of these kinds that begin at a line, outer ones first."""
    lines = linecache.getlines(file)
    known = _FILES.get(file)
    if known is None or known[0] is not lines:
        known = _FILES[file] = lines, _parsed("".join(lines))
    return [x for x in known[1].get(number, ()) if isinstance(x, kinds)]


# The lines of files as linecache has them, and what begins at each line.
_FILES: dict[str, tuple[list[str], dict[int, list[Any]]]] = {}


def _parsed(text: str) -> dict[int, list[Any]]:
    """Return the statements and expressions of a source by the line where they begin."""
    found: dict[int, list[Any]] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # no Python, such as a template's line
        return found
    for x in ast.walk(tree):
        if isinstance(x, (ast.stmt, ast.expr)):
            found.setdefault(x.lineno, []).append(x)
    return found


def iterated(file: str, number: int) -> str:
    """Read which expression the ``for`` at a line of a file goes through; empty if there is none."""
    loops = _at(file, number, ast.For)
    return segment(file, loops[0].iter) if loops else ""


def segment(file: str, place: Any) -> str:
    """Return the source between two positions of a file, as ``ast`` and ``dis`` give them; one line, not too long."""
    if None in (place.col_offset, place.end_lineno, place.end_col_offset):
        return ""
    lines = [linecache.getline(file, n).encode() for n in range(place.lineno, place.end_lineno + 1)]
    if not all(lines):
        return ""
    lines[-1] = lines[-1][: place.end_col_offset]
    lines[0] = lines[0][place.col_offset :]
    line = " ".join(b"".join(lines).decode(errors="replace").split())
    return line if len(line) <= _WIDEST else f"{line[: _WIDEST - 3]}..."
