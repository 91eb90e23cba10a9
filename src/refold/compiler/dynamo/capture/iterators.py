"""What a loop goes through: iterators whose elements are known in closed form.

Dynamo models ``range``, lists, tuples and unbound tensors, ``zip``, ``map``, ``reversed`` and ``enumerate`` as
iterators that it advances one element at a time. Here such an iterator is read as a function of the step's number
(`Element`), and advanced by many elements at once.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import sympy
import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable, TupleVariable, lists
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.lists import ListIteratorVariable, RangeIteratorVariable
from torch.fx import Node, Proxy
from torch.utils._sympy.functions import FloatTrueDiv

from ....versions import lose
from ...ir.captured_loop import Reads
from ..induction_variable import InductionVariable
from .lengths import SymbolicIterator, variable
from .variables import NotCaptured, Translator, Variable, example, form, is_constant, realized


def _find(name: str, loop: str) -> Any:
    """Look a dotted name up; if Dynamo does not have it, warn and return a class of nothing."""
    module, _, leaf = name.rpartition(".")
    try:
        return getattr(import_module(f"torch._dynamo.{module}"), leaf)
    except (ImportError, AttributeError):
        reason = f"PyTorch {torch.__version__} has no torch._dynamo.{name}"
        lose(f"loops over `{loop}` are traced step by step", reason)
        return type(leaf, (), {})


MapVariable, ZipVariable = _find("variables.iter.MapVariable", "map"), _find("variables.iter.ZipVariable", "zip")
_ZIPS = (ZipVariable, MapVariable)
# What Dynamo runs instead of CPython's own; torch <= 2.11 makes a tuple of what is reversed.
_enumerate = getattr(_find("polyfills.builtins.enumerate", "enumerate"), "__torch_dynamo_polyfill__", None)
ENUMERATE = getattr(_enumerate, "__code__", None)
_REVERSED = getattr(import_module("torch._dynamo.polyfills.builtins"), "_ReversedSequenceIterator", None)
# Since torch 2.15, iterators of lists, tuples and deques have a base of their own, and reversed lists are another kind.
_FORWARD = getattr(lists, "BaseListIteratorVariable", ListIteratorVariable)
_BACKWARD = getattr(lists, "ListReverseIteratorVariable", None)


_ROUNDING = 1e-15


@dataclass(frozen=True)
class Numbers:
    """Numbers of a form: "sums" are ``start + step * k``, and "powers" ``start * step**k``.

    "turns" are ``start`` and ``start + step`` in turns. Integers are sums or turns. Floats are rounded otherwise than
    step by step, in their last bits.
    """

    start: Any
    step: Any
    form: Literal["sums", "turns", "powers"] = "sums"

    def at(self, tx: Translator, counted: Variable) -> Variable:
        """Return the number of the step whose number is given."""
        number, proxy = counted.sym_num, counted.as_proxy()
        for apply, by in self._operations:
            right = variable(tx, by).as_proxy() if isinstance(by, (int, torch.SymInt)) else by
            given = (right, proxy) if apply is operator.pow else (proxy, right)
            proxy = tx.output.create_proxy("call_function", apply, given, {})
            number = apply(by, number) if apply is operator.pow else apply(number, by)
            set_example_value(proxy.node, number)
        return SymNodeVariable.create(tx, proxy, number)

    @property
    def _operations(self) -> list[tuple[Any, Any]]:
        if self.form == "powers":
            return [(operator.pow, self.step), (operator.mul, self.start)]
        both = ((operator.mul, self.step, 1), (operator.add, self.start, 0))
        turns = [(operator.mod, 2)] if self.form == "turns" else []
        return turns + [(apply, by) for apply, by, neutral in both if type(by) is not int or by != neutral]

    def grow(self, then: Any, number: InductionVariable) -> bool:
        """Tell whether a step leads to the number of the next one."""
        if self.form == "sums" and not isinstance(self.step, float):
            return number.affine(then) == (self.step, self.start + self.step)
        x: Any = number.symint
        for apply, by in self._operations:
            x = apply(by, x) if apply is operator.pow else apply(x, by)
        if type(then) is not type(x):
            return False
        x = {"sums": x + self.step, "turns": 2 * self.start + self.step - x, "powers": x * self.step}[self.form]
        size = abs(self.start) * max(1.0, abs(self.step)) if self.form == "powers" else abs(self.step)
        new = then.node.expr.replace(FloatTrueDiv, operator.truediv)
        left = sympy.expand(new - x.node.expr).as_coefficients_dict()
        return all(abs(rest) <= _ROUNDING * (abs(self.start) + size if of == 1 else size) for of, rest in left.items())

    def otherwise(self) -> Numbers | None:
        """Return another form with the same two first numbers; None if there is none."""
        after = self.start + self.step
        if self.form == "sums" and isinstance(after, float) and self.start and after / self.start > 0:
            return Numbers(self.start, after / self.start, "powers")
        return None if self.form == "turns" else Numbers(self.start, self.second - self.start, "turns")

    @property
    def second(self) -> Any:
        """The number of the second step."""
        return self.start * self.step if self.form == "powers" else self.start + self.step

    def after(self, count: Any) -> Any:
        """Return the number after so many steps."""
        if self.form == "sums" and not isinstance(self.step, float):
            return self.start + self.step * count
        if not isinstance(count, int):
            raise NotCaptured("python-state", "a number changes otherwise than by an integer, for any number of steps")
        if self.form == "turns":
            return self.second if count % 2 else self.start
        value = self.start
        for _ in range(count):
            value = value * self.step if self.form == "powers" else value + self.step
        return value


@dataclass(frozen=True)
class Items:
    """Items of a sequence of tensors: the node that computes the sequence, which items, and the items themselves."""

    source: Node
    reads: Reads
    items: Sequence[Variable] = field(repr=False)

    @property
    def example(self) -> torch.Tensor:
        """The fake value of every item."""
        return example(self.items[0])


@dataclass(frozen=True)
class Calls:
    """What a function returns for each element, or for elements of several sequences."""

    fn: Variable
    arguments: tuple[Element, ...]


Element = Numbers | Items | Calls | tuple["Element", ...]


def remaining(tx: Translator, it: Variable) -> Any:
    """Return how many elements an iterator has left, which may be a symbol; None if only running it can tell."""
    if type(it) is SymbolicIterator:
        return it.count
    if type(it) is RangeIteratorVariable:
        return it.len
    if isinstance(it, _FORWARD):
        return 0 if it.is_exhausted else len(it.items) - it.index
    if type(it) in _ZIPS:
        for part in _zipped(it):
            if type(part) is SymbolicIterator:
                part.known()
        counts = [remaining(tx, part) for part in _zipped(it)]
        return None if None in counts else min(counts, default=0)  # type: ignore[type-var]
    if _is_enumeration(it):
        inner = _enumerated(it)
        if type(inner) is SymbolicIterator:
            inner.known()
        return remaining(tx, inner)
    if _is_reversed(it):
        return len(_rest_of_reversed(tx, it))
    return None


def element(tx: Translator, it: Variable) -> Element | None:
    """Return the form of an iterator's elements; None if they are no tensors or integers, as in a loop over layers.

    Raises:
        NotCaptured: They are, but not in closed form.
    """
    if type(it) is SymbolicIterator:
        return Numbers(it.first, it.step_by)
    if type(it) is RangeIteratorVariable:
        return Numbers(it.start, it.step)
    if isinstance(it, _FORWARD):
        return sequence(it.items[it.index :])
    if type(it) is MapVariable:
        arguments = _together([element(tx, part) for part in _zipped(it)])
        return arguments and Calls(it.fn, arguments)  # type: ignore[arg-type]
    if type(it) is ZipVariable:
        parts = _zipped(it)
        if it.strict and len({remaining(tx, part) for part in parts}) > 1:
            raise NotCaptured("sequence-uneven", "it zips sequences of different lengths")
        return _together([element(tx, part) for part in parts])
    if _is_enumeration(it):
        start = it.inline_tracer.symbolic_locals["start"]
        if not is_constant(start):
            raise NotCaptured("sequence-uneven", "it enumerates from a number that is not known")
        return _together([Numbers(start.value + _is_suspended(it), 1), element(tx, _enumerated(it))])
    if _is_reversed(it):
        return sequence(_rest_of_reversed(tx, it))
    return None


def advance(tx: Translator, it: Any, count: int) -> None:
    """Drop the first elements of an iterator that has a form."""
    if type(it) is SymbolicIterator:
        it.exhaust()
    elif type(it) is RangeIteratorVariable:
        it.start, it.len = it.start + it.step * count, it.len - count
    elif isinstance(it, _FORWARD):
        tx.output.side_effects.mutation(it)
        it.index += count
    elif type(it) is _BACKWARD:
        tx.output.side_effects.mutation(it)
        it.index, it.it_index = it.index + count, it.it_index - count
    elif type(it) in _ZIPS:
        for part in _zipped(it):
            advance(tx, part, count)
    elif _is_enumeration(it):
        advance(tx, _enumerated(it), count)
        names = it.inline_tracer.symbolic_locals
        names["start"] = ConstantVariable.create(names["start"].value + count)
    else:
        left = len(_rest_of_reversed(tx, it)) - count
        tx.output.side_effects.store_attr(it, "index", ConstantVariable.create(left - 1))


def goes_through(it: Any, items: list[Variable]) -> bool:
    """Tell whether an iterator takes its elements from this very list."""
    if type(it) in _ZIPS:
        return any(goes_through(part, items) for part in _zipped(it))
    if _is_enumeration(it):
        return goes_through(_enumerated(it), items)
    if type(it) is _BACKWARD:
        return it.source_seq.items is items
    return isinstance(it, _FORWARD) and it.items is items


def start_enumeration(tx: Translator, it: Variable) -> None:
    """Let an enumeration take the iterator of what it enumerates, as it does when its first element is asked for."""
    if _is_enumeration(it) and not _is_suspended(it):
        names = it.inline_tracer.symbolic_locals
        names["iterable"] = VariableTracker.build(tx, builtins.iter).call_function(tx, [names["iterable"]], {})
        start_enumeration(tx, names["iterable"])
    elif type(it) in _ZIPS:
        for part in _zipped(it):
            start_enumeration(tx, part)


def _zipped(it: Any) -> list[Variable]:
    if not hasattr(it, "iterables"):
        return [realized(part) for part in it.iterable.items]
    # torch <= 2.11 keeps a list of its own, and in it the items of sequences, with one position for all of them.
    for i, part in enumerate(it.iterables):
        if isinstance(part, list):
            it.iterables[i] = ListIteratorVariable(part[it.index :], mutation_type=ValueMutationNew())
    return [realized(part) for part in it.iterables]


def _is_enumeration(it: Variable) -> bool:
    """Tell whether this is Dynamo's generator for ``enumerate``."""
    return isinstance(it, LocalGeneratorObjectVariable) and it.code is ENUMERATE


def _is_suspended(it: Any) -> bool:
    """Tell whether a generator has begun: it stands after a ``yield`` then, with its iterator on the stack."""
    state = getattr(it.inline_tracer, "frame_state", None)  # since torch 2.14
    return not it._is_generator_just_started() if state is None else state.name != "FRAME_CREATED"


def _enumerated(it: Any) -> Variable:
    frame = it.inline_tracer
    return realized(frame.stack[0] if _is_suspended(it) and frame.stack else frame.symbolic_locals["iterable"])


def _is_reversed(it: Variable) -> bool:
    """Tell whether this is one of Dynamo's iterators for ``reversed``."""
    own = _REVERSED is not None and getattr(it, "value_type", None) is _REVERSED
    return own or (_BACKWARD is not None and type(it) is _BACKWARD)


def _rest_of_reversed(tx: Translator, it: Any) -> list[Variable]:
    """Return the items that are left; none if they are neither a list's nor those of a tuple, which cannot change."""
    if type(it) is _BACKWARD:
        ended = it.is_exhausted or not 0 <= it.it_index < len(it.source_seq.items)
        return [] if ended else it.source_seq.items[it.it_index :: -1]
    effects = tx.output.side_effects
    of, index = (realized(effects.load_attr(it, name)) for name in ("seq", "index"))
    known = isinstance(of, TupleVariable) and is_constant(index) and index.value >= 0
    return of.items[index.value :: -1] if known else []


def _together(parts: list[Element | None]) -> Element | None:
    return tuple(part for part in parts if part is not None) if parts and None not in parts else None


def sequence(items: list[Variable]) -> Element | None:
    """Find the form of a list's items: integers or items of one sequence, evenly spaced, or tuples of those.

    Raises:
        NotCaptured: They are integers or tensors, but not evenly spaced.
    """
    items = [realized(item) for item in items]
    first = items[0]
    if any(type(item) is not type(first) for item in items):
        return None
    if type(first) is ConstantVariable and all(type(item.value) is int for item in items):
        spaced = _spaced([item.value for item in items])
        if spaced is None:
            raise NotCaptured("sequence-uneven", "it goes through numbers that are not evenly spaced")
        return Numbers(*spaced)
    if type(first) is TupleVariable and len({len(item.items) for item in items}) == 1:
        return _together([sequence([item.items[i] for item in items]) for i in range(len(first.items))])
    if type(first) is TensorVariable:
        nodes = [item.as_proxy().node for item in items]
        found = [x for x in map(_position, nodes) if x is not None]
        one = len(found) == len(nodes) and len({x[:2] for x in found}) == 1
        spaced = _spaced([x[2] for x in found]) if one else None
        if spaced is None or len({form(example(item)) for item in items}) > 1:
            raise NotCaptured("sequence-uneven", "it goes through tensors that are not evenly spaced items of one")
        return Items(_in_front(*found[0][:2]), Reads(*spaced), items)
    return None


def _position(node: Node) -> tuple[Node, int, int] | None:
    """Read an item as a sequence or a tensor, the axis, and the position there; None if it is another part."""
    if node.target is not operator.getitem:
        return None
    source: Any = node.args[0]
    key = node.args[1]
    *before, at = key if isinstance(key, tuple) else (key,)
    last = before == [Ellipsis]
    if type(at) is not int or not (last or all(isinstance(x, slice) and x == slice(None) for x in before)):
        return None
    return source, source.meta["example_value"].dim() - 1 if last else len(before), at


def _in_front(source: Node, dim: int) -> Node:
    """Return a view of a tensor with an axis in front."""
    if not dim:
        return source
    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer.graph is not source.graph:  # a body's, while it is traced
        tracer = tracer.parent
    proxy = tracer.create_proxy("call_function", torch.movedim, (Proxy(source, tracer), dim, 0), {})
    set_example_value(proxy.node, torch.movedim(source.meta["example_value"], dim, 0))
    return proxy.node


def _spaced(numbers: list[Any]) -> tuple[int, int] | None:
    if any(type(number) is not int for number in numbers):
        return None
    step = numbers[1] - numbers[0]
    even = all(number == numbers[0] + step * k for k, number in enumerate(numbers))
    return (numbers[0], step) if even and step else None
