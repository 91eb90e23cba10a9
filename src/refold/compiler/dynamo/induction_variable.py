"""The number of a step as a symbol: what a program decides on it, and for which steps it decides the same.

A loop's body is traced once, with the number of the step as a symbolic integer whose hint is 0.
Whatever the program asks about it (a branch, a bounds check, a conversion to a Python number)
PyTorch records as a guard. The trace is the program of every step for which all guards hold.

Source: compilers analyse loops by guards that hold for a range of values of an induction variable (Aho et al. 2006,
section 9.6). Numbers that are linear in it are the simplest chains of recurrences (Bachmann et al. 1994).
Design decision 11.
"""

from __future__ import annotations

import itertools
import operator
import re
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import ToFloat

_REMAINDERS = ("Mod", "PythonMod")
"""Names of what PyTorch makes of ``t % n``."""
# Where an environment keeps its symbols that count steps.
_STEPS = "refold_steps"


def depends_on_iteration(x: Any) -> bool:
    """Tell whether a symbolic number depends on the number of a step."""
    return not x.node.expr.free_symbols.isdisjoint(vars(x.node.shape_env).get(_STEPS, ()))


class InductionVariable:
    """A symbol that counts steps from 0, up to ``count`` if that is a number."""

    _serial = itertools.count()

    def __init__(self, env: ShapeEnv, count: Any = None) -> None:
        self.env, self.count = env, count
        source = ConstantSource(f"refold_step_{next(self._serial)}")
        self.symbol: Any = env.create_unspecified_symbol(0, source, DimDynamic.DYNAMIC)
        vars(env).setdefault(_STEPS, set()).add(self.symbol)
        self.symint = env.create_symintnode(self.symbol, hint=0, source=source)
        self.guards: list[Any] = []
        # What is decided about a step must not narrow what is known of sizes.
        self._ranges = dict(env.var_to_range)

    def take_guards(self) -> None:
        """Move the guards on the symbol out of the environment: they are not guards of the compiled program."""
        env = self.env
        mine = [guard for guard in env.guards if self.symbol in guard.expr.free_symbols]
        env.guards = [guard for guard in env.guards if guard not in mine]
        self.guards += [guard.expr for guard in mine]
        for symbol, stands_for in list(env.replacements.items()):
            if self.symbol in (symbol, *stands_for.free_symbols):
                del env.replacements[symbol]
        env.var_to_range |= {x: r for x, r in self._ranges.items() if x not in env.replacements}
        env._update_version_counter()
        env._replacements_version_counter = getattr(env, "_replacements_version_counter", 0) + 1

    def steps(self, most: int) -> int:
        """Return for how many steps, from the first one and at most ``most``, all guards hold."""
        # A number of steps that is known holds for known sizes only.
        sizes = {x for guard in self.guards for x in self.env.replace(guard).free_symbols} - {self.symbol}
        for size in sizes:
            self.env.evaluate_expr(size)
        known = [self.env.replace(guard) for guard in self.guards]
        return min((self._first_failure(guard, most) for guard in known), default=most)

    def decided(self, count: Any, before: int = 0) -> str:
        """Say which step decides otherwise than those before it, and on what, for a person.

        Args:
            count: How many steps there are; a number, or a symbol.
            before: How many steps of the loop ran before the one that is number 0 here.
        """
        known = [self.env.replace(guard) for guard in self.guards]
        if not isinstance(count, int):
            return "what a step does depends on its number, for some lengths"
        at, guard = min(((self._first_failure(guard, count), guard) for guard in known), key=lambda pair: pair[0])
        decision = _exact(guard).subs(self.symbol, sympy.Symbol("step", integer=True) - before)
        if isinstance(decision, sympy.core.relational.Relational):
            text = f"{decision.lhs} {decision.rel_op} {decision.rhs}"
            text = re.sub(r"\bPythonMod\((.+?), (\w+)\)", r"\1 % \2", text)
            decision = re.sub(r"\b(?:Int|Float)TrueDiv\((\w+), (\w+)\)", r"\1 / \2", text)
        if guard.subs(self.symbol, at) != sympy.false:
            return f"a step decides on its number by `{decision}`, of which the next step is not known"
        return f"step {before + at}, counted from 0, is the first for which `{decision}` is not true"

    def hold(self, count: Any) -> bool:
        """Tell whether all guards hold at ``count`` steps, a symbol; what that asks of sizes is guarded then."""
        return all(self._holds(self.env.replace(guard), count) for guard in self.guards)

    def _holds(self, guard: Any, count: Any) -> bool:
        if guard in (True, sympy.true):
            return True
        if isinstance(guard, sympy.And):
            return all(self._holds(part, count) for part in guard.args)
        if not isinstance(guard, sympy.core.relational.Relational):
            return False
        difference = sympy.expand(guard.lhs - guard.rhs)
        a, b = difference.coeff(self.symbol, 1), difference.coeff(self.symbol, 0)
        if not a.is_Integer or sympy.expand(a * self.symbol + b - difference) != 0:
            return False
        asked, last = self._asked, b + a * (count.node.expr - 1)
        if a == 0 or guard.rel_op in ("<", "<=", ">", ">="):  # then it holds in between if it holds at both ends
            return all(asked(guard.func(end, 0)) for end in ({b} if a == 0 else (b, last)))
        if guard.rel_op != "!=" or abs(a) != 1:
            return False
        root = -b / a
        return asked(sympy.Lt(root, 0)) or asked(sympy.Ge(root, count.node.expr))

    def _asked(self, question: Any) -> bool:
        """Decide on sizes as they are; unless it is so for all sizes, the decision becomes a guard."""
        return bool(question) if question in (sympy.true, sympy.false) else bool(self.env.evaluate_expr(question))

    def affine(self, x: Any) -> tuple[int, Any] | None:
        """Read an integer as ``a * step + b``, where b may hold other symbols; None if it is something else."""
        if isinstance(x, int):
            return 0, x
        if not isinstance(x, torch.SymInt):
            return None
        if (expr := x.node.expr.replace(lambda e: type(e).__name__ in _REMAINDERS, self._within)) != x.node.expr:
            return self._coefficients(expr)  # type: ignore[return-value]  # integers have integers
        a = sympy.expand(x.node.expr).coeff(self.symbol, 1)
        rest = x - int(a) * self.symint if a.is_Integer else x
        if isinstance(rest, torch.SymInt) and depends_on_iteration(rest):
            return None
        known = rest if isinstance(rest, int) else rest.node.maybe_as_int()
        return int(a), rest if known is None else known

    def _within(self, remainder: Any) -> Any:
        """Give what is divided, if it is its own remainder in all steps."""
        divided, by = remainder.args
        found = self._coefficients(divided) if by.is_Integer and isinstance(self.count, int) else None
        ends = [] if found is None else [found[1], found[1] + found[0] * (self.count - 1)]
        return divided if ends and all(0 <= end < by for end in ends) else remainder

    def _coefficients(self, expr: Any) -> tuple[int, int | float] | None:
        expr = sympy.expand(_exact(expr))
        a, b = expr.coeff(self.symbol, 1), expr.coeff(self.symbol, 0)
        if not (a.is_Integer and (b.is_Integer or b.is_Float)) or sympy.expand(a * self.symbol + b - expr) != 0:
            return None
        return int(a), int(b) if b.is_Integer else float(b)

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


def _exact(expr: Any) -> Any:
    """Return an expression with integers in place of floats that are made of them."""
    return expr.replace(ToFloat, lambda x: x)


def _first_failure(op: str, a: int, b: int | float, most: int) -> int:
    """Return the first step at which ``a * step + b <op> 0`` is false, or ``most``."""
    if op == "!=":
        if not a:
            return most if b else 0
        root = int(-b // a) if b % a == 0 else most
        return root if 0 <= root < most else most
    holds = {"==": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[op]
    if not holds(b, 0):
        return 0
    # From a step where it holds, an affine inequality can turn false only once.
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(a * middle + b, 0) else (low, middle)
    return high
