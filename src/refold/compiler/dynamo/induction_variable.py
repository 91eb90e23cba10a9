"""The number of a step as a symbol: what a program decides on it, and for which steps it decides the same.

A loop's body is traced once, with the number of the step as a symbolic integer whose hint is 0.
Whatever the program asks about it (a branch, a bounds check, a conversion to a Python number)
PyTorch records as a guard. The trace is the program of every step for which all guards hold.
"""

from __future__ import annotations

import itertools
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


class StepNumber:
    """A symbol that counts steps from 0."""

    _serial = itertools.count()

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        source = ConstantSource(f"refold_step_{next(self._serial)}")
        self.symbol: Any = env.create_unspecified_symbol(0, source, DimDynamic.DYNAMIC)
        self.symint = env.create_symintnode(self.symbol, hint=0, source=source)
        self.guards: list[Any] = []

    def pending(self) -> list[Any]:
        """Return the guards on the symbol that the environment has recorded."""
        return [guard for guard in self.env.guards if self.symbol in guard.expr.free_symbols]

    def take_guards(self) -> None:
        """Move the guards on the symbol out of the environment: they are not guards of the compiled program."""
        mine = self.pending()
        self.env.guards = [guard for guard in self.env.guards if guard not in mine]
        self.guards += [guard.expr for guard in mine]

    def steps(self, most: int, guards: slice = slice(None)) -> int:
        """Return for how many steps, from the first one and at most ``most``, all guards (or some of them) hold."""
        return min((self._first_failure(guard, most) for guard in self.guards[guards]), default=most)

    def affine(self, x: Any) -> tuple[int, int] | None:
        """Read an integer as ``a * step + b``; None if it is something else."""
        if isinstance(x, int):
            return 0, x
        if not isinstance(x, torch.SymInt):
            return None
        return self._coefficients(x.node.expr)

    def _coefficients(self, expr: Any) -> tuple[int, int] | None:
        expr = sympy.expand(expr)
        a, b = expr.coeff(self.symbol, 1), expr.coeff(self.symbol, 0)
        if not (a.is_Integer and b.is_Integer) or sympy.expand(a * self.symbol + b - expr) != 0:
            return None
        return int(a), int(b)

    def _first_failure(self, guard: Any, most: int) -> int:
        if guard in (True, sympy.true):
            return most
        if isinstance(guard, sympy.And):
            return min(self._first_failure(part, most) for part in guard.args)
        if isinstance(guard, sympy.core.relational.Relational):
            found = self._coefficients(guard.lhs - guard.rhs)
            if found is not None:
                return _first_failure(guard.rel_op, *found, most)
        return 1  # all that is known is that it holds where the body was traced


def _first_failure(op: str, a: int, b: int, most: int) -> int:
    """Return the first step at which ``a * step + b <op> 0`` is false, or ``most``."""
    if op == "!=":
        if not a:
            return most if b else 0
        root = -b // a if b % a == 0 else most
        return root if 0 <= root < most else most
    holds = {
        "==": lambda v: v == 0,
        "<": lambda v: v < 0,
        "<=": lambda v: v <= 0,
        ">": lambda v: v > 0,
        ">=": lambda v: v >= 0,
    }[op]
    if not holds(b):
        return 0
    # From a step where it holds, an affine inequality can turn false only once.
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(a * middle + b) else (low, middle)
    return high
