"""Tables in a source from which something is chosen by a key, a number, or as the largest: branches by another name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from typing import Any


class Tables:
    """The tables of a source: dictionaries, lists and tuples of which each entry is written there.

    Args:
        tree: The source; it is only read.
        only: Says whether a name is set once and read so often, and in no other way.

    Attributes:
        places: Where those begin and end that have a name and serve only to choose from them.
    """

    def __init__(self, tree: ast.Module, only: Callable[[str, int], bool]):
        every = [found for node in ast.walk(tree) if (found := _lookup(node))]
        often = Counter(_named(held) for held, *_ in every)
        chosen = {_named(held) for held, key, *_ in every if not _is_constant(key)}
        sets = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr))]
        each = {_named(n.targets[0] if isinstance(n, ast.Assign) else n.target): n.value for n in sets}
        self._known = {n: v for n, v in each.items() if v and keys(v) and n in chosen and only(n, often[n])}
        self.places = set(map(span, self._known.values()))

    def lookup(self, node: ast.expr) -> tuple[Any, ...]:
        """Return a table, the expression for it, the key that chooses from it, and what is given for no entry."""
        found = _lookup(node)
        if not found:
            return ()
        written = found[0] if keys(found[0]) and not _is_constant(found[1]) else None
        table = self._known.get(_named(found[0]), written)
        return (table, *found) if table is not None else ()


def keys(table: ast.expr) -> list[ast.expr]:
    """List the keys of a dictionary, or the numbers of the elements of a list, if all are written there."""
    if isinstance(table, ast.Dict):
        return [] if None in table.keys else table.keys  # type: ignore[return-value]
    starred = any(isinstance(each, ast.Starred) for each in values(table))
    return [] if starred else [*map(ast.Constant, range(len(values(table))))]


def values(table: Any) -> list[ast.expr]:
    """List the entries of a table; none of anything else."""
    found: list[ast.expr] = getattr(table, "values" if isinstance(table, ast.Dict) else "elts", [])
    return found


def span(node: ast.expr) -> tuple[int | None, ...]:
    """Say where an expression begins and ends."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def compared(node: ast.Call) -> list[ast.expr]:
    """List tuples and lists of which a call chooses the first, the least or the largest."""
    options = values(node.args[0]) if len(node.args) == 1 else node.args
    chooses = isinstance(node.func, ast.Name) and node.func.id in ("max", "min", "sorted")
    return options if chooses and all(isinstance(each, (ast.Tuple, ast.List)) for each in options) else []


def _named(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def _is_constant(key: ast.expr) -> bool:
    return isinstance(key, (ast.Constant, ast.UnaryOp))


def _lookup(node: ast.AST) -> tuple[Any, ...]:
    """Say of what chooses from a table: the table, the key, and what is given where it is not there."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and not isinstance(node.slice, ast.Slice):
        return node.value, node.slice
    get = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
    if not get or len(node.args) not in (1, 2):  # type: ignore[attr-defined]
        return ()
    none = ast.copy_location(ast.Constant(None), node)
    return node.func.value, node.args[0], [*node.args, none][1]  # type: ignore[attr-defined]
