"""Layers of public code, each changed at random in a place or two: programs that no reader of loops was written for."""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import textwrap
from collections.abc import Callable
from random import Random

from . import layers

Changed = Callable[[layers.Sizes], layers.Layer]

# What an expression becomes; x stands for it.
_BECOMES = (
    "x.tanh()", "x.abs()", "x.clamp(min=-0.5)", "x.detach()", "x.sigmoid()", "0.5 * x", "x + 0.25", "-x", "x.relu()",
    "x.exp().clamp(max=2.0)", "torch.where(x > 0, x, 0.3)", "x.clone()", "x * x", "x.cumsum(-1)", "x.flip(-1)",
    "x.roll(1, -1)", "x.softmax(-1)", "x.nan_to_num()", "x.mean(-1, keepdim=True) + 0 * x", "x.float().to(x.dtype)",
)  # fmt: skip
_WHEN = ("t % 2", "t > 2", "t != 3")
_STEPS = ("t - 1", "-t - 1", "t // 2", "max(t - 1, 0)", "t % 3")


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


class _Put(ast.NodeTransformer):
    """Puts an expression in the place of another, or in that of all names of a kind."""

    def __init__(self, old: ast.AST | str, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old or (isinstance(node, ast.Name) and node.id == self.old):
            return copy.deepcopy(self.new)
        return self.generic_visit(node)


def _operator(tree: ast.AST, r: Random) -> None:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    r.choice(found).op = r.choice([ast.Add(), ast.Sub(), ast.Mult()])


def _number(tree: ast.AST, r: Random) -> None:
    found = [x for x in ast.walk(tree) if isinstance(x, ast.Constant) and type(x.value) in (int, float)]
    node = r.choice(found)
    node.value = r.choice([node.value + 1, node.value - 1, -node.value, 0, 1, 2 * node.value])


def _value(tree: ast.AST, r: Random) -> None:
    kinds = (ast.BinOp, ast.Call, ast.Name, ast.Subscript)
    found = [x for x in ast.walk(tree) if isinstance(x, kinds) and not isinstance(getattr(x, "ctx", None), ast.Store)]
    old = r.choice(found)
    _Put(old, _Put("x", copy.deepcopy(old)).visit(_parsed(r.choice(_BECOMES)))).visit(tree)


def _statement(tree: ast.AST, r: Random) -> None:
    body = r.choice([node for node in ast.walk(tree) if isinstance(node, ast.For)]).body
    at, kind = r.randrange(len(body)), r.choice(["swap", "twice", "when"])
    if kind == "swap":
        body[at], body[at - 1] = body[at - 1], body[at]
    elif kind == "twice":
        body.insert(at, copy.deepcopy(body[at]))
    else:
        body[at] = ast.If(_parsed(r.choice(_WHEN)), [body[at]], [])


def _name(tree: ast.AST, r: Random) -> None:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    r.choice(found).id = r.choice(found).id


def _step(tree: ast.AST, r: Random) -> None:
    found = [x for x in ast.walk(tree) if isinstance(x, ast.Name) and x.id == "t" and isinstance(x.ctx, ast.Load)]
    _Put(r.choice(found), _parsed(r.choice(_STEPS))).visit(tree)


def mutant(name: str, r: Random) -> tuple[Changed, str]:
    """Change a layer; most of what comes out still runs. Also returns its text."""
    source = textwrap.dedent(inspect.getsource(layers.LAYERS[name]))
    tree = ast.parse(source.replace("empty", "zeros"))  # a changed layer may read what it has not written
    inner = next(x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name != name)
    inner.returns = None
    for each in inner.args.args:
        each.annotation = None  # no name to put somewhere
    for _ in range(r.choice([1, 1, 2])):
        change = r.choice([_operator, _number, _value, _value, _value, _statement, _name, _step])
        try:
            change(inner, r)
        except IndexError:  # there is nothing of the kind
            continue
    text = ast.unparse(ast.fix_missing_locations(tree))
    path = f"<changed {name} {r.randrange(2**30)}>"
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    scope = dict(vars(layers))
    exec(compile(text, path, "exec"), scope)
    return scope[name], ast.unparse(inner)
