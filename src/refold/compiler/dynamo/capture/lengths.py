"""Loops over as many steps as Dynamo knows only as a symbol: one trace and one compile for every length.

Dynamo makes a length a number as soon as ``range`` asks for it, and every other length is then compiled anew. Here
``range`` keeps the symbol until somebody asks. A loop that is captured never does; what it collected is one tensor with
a time axis, which ``torch.stack`` and ``torch.cat`` take for the list. Whoever else looks at such a list makes Dynamo
start over, with numbers for lengths: then each length has a compile of its own, as without this package.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch._dynamo import exc
from torch._dynamo.output_graph import LazyProxy
from torch._dynamo.utils import guard_if_dyn
from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.lists import RangeIteratorVariable, RangeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from ...ir.source import named
from .variables import NotCaptured, Translator, Variable, example, is_constant, realized

# What is set of Dynamo's log, which outlives its attempts at one frame, once lengths are to be numbers.
_KNOWN = "refold_known_lengths"
JOINS = (torch.stack, torch.cat, torch.concat, torch.concatenate)

KEEPS_SYMBOLS = hasattr(RangeVariable, "tp_iter_impl")
"""Whether lengths may stay symbols. Before torch 2.13 iterators are made otherwise: each length has its own compile."""


def variable(tx: Translator, x: Any) -> Variable:
    """Return a number or an expression in Dynamo's symbols as a variable."""
    expression = x if isinstance(x, int) else x.node.expr
    return _variable(tx, sympy.sympify(expression))


def _named(tx: Translator, symbol: Any) -> str:
    """Give the user's name of a size that is a symbol, as ``x.size()[1]``."""
    sources = getattr(tx.output.shape_env, "var_to_sources", {}).get(symbol) or [symbol]
    name = getattr(sources[0], "name", str(symbol))
    return named(name() if callable(name) else name)


def _variable(tx: Translator, x: Any) -> Variable:
    if x.is_Integer:
        return ConstantVariable.create(int(x))
    if x.is_Symbol:
        symbols = tx.output.root_tracer.bound_symbols
        if x not in symbols:
            raise NotCaptured("size-unknown", f"nothing computes the size `{_named(tx, x)}`")
        proxy = symbols[x]() if isinstance(symbols[x], LazyProxy) else symbols[x]
        return SymNodeVariable.create(tx, proxy, proxy.node.meta["example_value"])
    apply = operator.add if x.is_Add else operator.mul if x.is_Mul else None
    if apply is None:
        raise NotCaptured("size-unknown", f"the size `{x}` is neither a sum nor a product of known sizes")
    parts = [_variable(tx, part) for part in x.args]
    while len(parts) > 1:
        a, b = parts[:2]
        proxy = tx.output.create_proxy("call_function", apply, (a.as_proxy(), b.as_proxy()), {})
        parts[:2] = [SymNodeVariable.create(tx, proxy, apply(_number(a), _number(b)))]
    return parts[0]


def _number(x: Variable) -> Any:
    return x.value if is_constant(x) else x.sym_num


class SymbolicRange(RangeVariable):
    """A range with a bound that is a symbol; asked for by anything but a captured loop, it becomes a number."""

    def _known(self, at: int) -> int:
        return int(guard_if_dyn(self.items[at]))

    def start(self) -> int:
        """Return the first bound as a number."""
        return self._known(0)

    def stop(self) -> int:
        """Return the last bound as a number."""
        return self._known(1)

    def step(self) -> int:
        """Return the step as a number."""
        return self._known(2)

    def is_python_constant(self) -> bool:
        """Say no: as long as it is symbolic it is none."""
        return False

    def tp_iter_impl(self, tx: Translator) -> Variable:
        """Return an iterator that is symbolic, too."""
        return self._iterator(tx) or RangeIteratorVariable(self.start(), self.stop(), self.step(), self.range_length())

    def call_method(self, tx: Translator, name: str, args: Any, kwargs: Any) -> Variable:
        """Reverse the range as a symbol, and do all else with numbers."""
        if name == "__reversed__" and (found := self._iterator(tx)) is not None:
            first = found.first + (found.count - 1) * found.step_by
            return SymbolicIterator(first, -found.step_by, found.count)
        return super().call_method(tx, name, args, kwargs)

    def _iterator(self, tx: Translator) -> SymbolicIterator | None:
        start, stop, step = (_number(realized(x)) for x in self.items)
        if not isinstance(step, int) or abs(step) != 1:
            return None
        count = (stop - start) * step
        return None if is_known(count) else SymbolicIterator(start, step, count)


def is_known(x: Any) -> bool:
    """Tell whether a size is a number, or has become one."""
    return isinstance(x, int) or x.node.maybe_as_int() is not None


class SymbolicIterator(RangeIteratorVariable):
    """The iterator of such a range: ``first + step_by * k``, as many times as the symbol ``count`` says."""

    def __init__(self, first: Any, step_by: int, count: Any) -> None:
        super().__init__(0, 0, step_by, 0)
        self.first, self.step_by, self.count = first, step_by, count

    def known(self) -> None:
        """Become an ordinary iterator, whose length is a guard of the compiled program."""
        self.start, self.len = int(self.first), max(0, int(self.count))
        self.stop = self.start + self.step_by * self.len
        self.__class__ = RangeIteratorVariable  # type: ignore[assignment]

    def exhaust(self) -> None:
        """Stand after the last step."""
        self.start = self.stop = self.len = 0
        self.__class__ = RangeIteratorVariable  # type: ignore[assignment]

    def tp_iternext_impl(self, tx: Translator) -> Variable:
        """Go step by step."""
        self.known()
        return self.tp_iternext_impl(tx)

    def reconstruct(self, codegen: Any) -> None:
        """Leave the iterator to Python."""
        self.known()
        self.reconstruct(codegen)


class Stacked(list[Any]):
    """Stands in for the items of a list to which a loop of unknown length has appended one tensor per step.

    It is a list because Dynamo's variables ask for one, and holds nothing: whoever looks at it starts over.
    """

    def __init__(self, tx: Translator, before: list[Variable], rows: TensorVariable) -> None:
        super().__init__()
        self.log, self.before, self.rows = tx.speculation_log, before, rows

    def joined(self, tx: Translator, fn: Any, dim: int) -> Variable:
        """Stack or concatenate the items."""
        rank = example(self.rows).dim()
        dim %= rank if fn is torch.stack else rank - 1
        whole = _call(tx, torch.movedim, self.rows, 0, dim)
        if fn is not torch.stack:
            whole = _call(tx, torch.flatten, whole, dim, dim + 1)
        whole = _call(tx, torch.clone, whole, memory_format=torch.contiguous_format)
        return _call(tx, torch.cat, [_call(tx, fn, self.before, dim), whole], dim) if self.before else whole

    def refuse(self, *args: Any) -> Any:
        """Start over with numbers for lengths."""
        raise start_over(self.log)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__  # type: ignore[assignment]
    __repr__ = object.__repr__
    __radd__ = __bool__ = __copy__ = __deepcopy__ = __reduce_ex__ = refuse


for _name in (
    "len",
    "iter",
    "getitem",
    "setitem",
    "delitem",
    "contains",
    "reversed",
    "add",
    "iadd",
    "mul",
    "imul",
    "rmul",
):
    setattr(Stacked, f"__{_name}__", Stacked.refuse)
for _name in [name for name in vars(list) if not name.startswith("_")]:
    setattr(Stacked, _name, Stacked.refuse)


def _call(tx: Translator, fn: Any, x: Any, *rest: Any, **options: Any) -> Variable:
    given = [y.as_proxy() for y in x] if isinstance(x, list) else x.as_proxy()
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", fn, (given, *rest), options))


def start_over(log: Any) -> exc.RestartAnalysis:
    """Make the exception that lets Dynamo trace the frame again, with numbers for lengths."""
    setattr(log, _KNOWN, True)
    return exc.RestartAnalysis(restart_reason="a list of unknown length was looked at")


def watch(tx: Translator) -> None:
    """Let ``range`` keep symbols, and joins take lists of unknown length, in one frame."""
    call: Any = tx.call_function

    def call_function(fn: Variable, args: Any, kwargs: Any) -> None:
        found, function = None, realized(fn)
        if isinstance(function, BuiltinVariable) and function.fn is range and not kwargs:
            found = _symbolic_range(tx, [realized(x) for x in args])
        elif isinstance(function, TorchInGraphFunctionVariable) and function.value in JOINS:
            found = _joined(tx, function.value, args, kwargs)
        if found is None:
            call(fn, args, kwargs)
        else:
            tx.push(found)

    if KEEPS_SYMBOLS:
        tx.call_function = call_function


def _symbolic_range(tx: Translator, bounds: list[Variable]) -> Variable | None:
    symbols = [x for x in bounds if isinstance(x, SymNodeVariable)]
    if not symbols or not all(is_constant(x) or x in symbols for x in bounds):
        return None
    if not all(isinstance(x.sym_num, torch.SymInt) and not is_known(x.sym_num) for x in symbols):
        return None
    return None if getattr(tx.speculation_log, _KNOWN, False) else SymbolicRange(bounds)


def _joined(tx: Translator, fn: Any, args: Any, kwargs: Any) -> Variable | None:
    given = {**dict(zip(("tensors", "dim"), args, strict=False)), **kwargs}
    items = getattr(realized(given["tensors"]), "items", None) if "tensors" in given else None
    if not isinstance(items, Stacked):
        return None
    dim = realized(given.get("dim", ConstantVariable.create(0)))
    if len(args) > 2 or not given.keys() <= {"tensors", "dim"} or not is_constant(dim):
        items.refuse()
    return items.joined(tx, fn, dim.value)
