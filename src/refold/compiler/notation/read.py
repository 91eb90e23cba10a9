"""Read an ATen graph as a program in index notation, in a normal form in which equal computations look equal.

Views disappear into how values are read; axes of size one fall out; ``mm``, ``bmm``, ``addmm`` and a sum of a product
are all ``contract``; axes that a view merges are separate from where they are first told apart. What the grammar has no
word for (a convolution, a random number) is an input of what comes after it. So a layer may fall into several regions.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir.fx import CASTS, MATMULS, arg, is_tensor, sum_dims, value
from ..ir.moves import Cat, Pad, Slice, View
from ..ir.moves import read as read_moves
from ..ir.symbols import Axis, Label, atoms, extent, resolve, unify
from ..ir.views import is_view, viewed
from .operations import DTYPES, ELEMENTWISE, REDUCTIONS
from .program import MOST_FACTORS, MOST_STEPS, Equation, Equations, Groups, Read

aten = torch.ops.aten

_ELEMENTWISE = {getattr(getattr(aten, name), which.overload): name for name, which in ELEMENTWISE.items()}
# More overloads of the same; not every function has each.
_OVERLOADS: dict[str, tuple[str, ...]] = {
    name: ("Tensor", "Scalar") for name, which in ELEMENTWISE.items() if which.overload == "Tensor"
}
_OVERLOADS |= {"pow": ("Tensor_Tensor", "Scalar"), "clamp_min": ("Tensor",), "clamp_max": ("Tensor",)}
_ELEMENTWISE |= {
    getattr(getattr(aten, name), overload): name
    for name, overloads in _OVERLOADS.items()
    for overload in overloads
    if hasattr(getattr(aten, name), overload)
}
_REDUCTIONS = {getattr(getattr(aten, path.split(".")[0]), path.split(".")[1]): do for do, path in REDUCTIONS.items()}
_REDUCTIONS.pop(aten.var.correction, None)
_REDUCTIONS[aten.mean.default] = "mean"
_SUMS = (aten.sum.dim_IntList, aten.sum.default)
_FILLS = (aten.full.default, aten.scalar_tensor.default)
_FOLDS = {aten.cumsum.default: "cumsum", aten.cumprod.default: "cumprod"}
# Names of axes, the usual ones first.
_LETTERS = "btdhnpkijlmrsuvwxyzqacefg"


class _NotInGrammar(Exception):
    """A node is something that index notation has no word for."""


@dataclass(frozen=True)
class _Operand:
    """A value read by a step: its node, for each of its own axes the symbols, and for each axis of the view as well."""

    base: Node
    own: tuple[Label, ...]
    dims: tuple[Label, ...]


_Given = _Operand | float | int


@dataclass(frozen=True)
class Reading:
    """A whole graph in index notation.

    Attributes:
        graph: The graph.
        program: All steps; its result is of no meaning.
        nodes: The node that holds each value.
        names: The other way round.
    """

    graph: Graph
    program: Equations
    nodes: dict[str, Node]
    names: dict[Node, str]

    def roots(self) -> list[Node]:
        """Return the nodes whose values leave what the grammar can say: results, and what unknown operations read."""
        defined = self.program.defined()
        found: dict[Node, None] = {}
        for node in self.graph.nodes:
            parts = [self.names.get(user) in defined for user in node.users if user.target is operator.getitem]
            if self.names.get(node) in defined or is_view(node) or (parts and all(parts)):
                continue
            for x in node.all_input_nodes:
                while is_view(x) and x not in self.names:
                    x = arg(x, 0)
                if self.names.get(x) in defined:
                    found[x] = None
        return list(found)

    def region(self, root: Node) -> Equations | None:
        """Return the program that computes a node's value from what the grammar has no word for; None if none does."""
        name = self.names.get(root)
        steps = self.program.defined()
        if name is None or name not in steps:
            return None
        needed, stack = set[str](), [name]
        while stack:
            at = stack.pop()
            if at not in needed:
                needed.add(at)
                stack += [read.name for read in steps[at].reads] if at in steps else []
        chosen = tuple(step for step in self.program.steps if step.name in needed)
        if len(chosen) > MOST_STEPS:
            return None
        inputs = {k: v for k, v in self.program.inputs.items() if k in needed}
        used = {letter for step in chosen for letter in (*step.letters, *(x for r in step.reads for x in r.letters))}
        used |= {letter for groups in inputs.values() for group in groups for letter in group}
        sizes = {k: v for k, v in self.program.sizes.items() if k in used}
        flat = iter(steps[name].letters)
        groups = _layout(value(root).shape, [(letter, sizes[letter]) for letter in flat])
        dtypes = {k: v for k, v in self.program.dtypes.items() if k in inputs}
        return lettered(Equations(inputs, sizes, chosen, Read(name, groups), dtypes))


def read(graph: Graph) -> Reading:
    """Read a graph; nodes in its order. Sizes that are symbols are not read."""
    return _Reader(graph).reading()


class _Values:
    """The values that were read so far, in a notation of which each step defines one."""

    def __init__(self) -> None:
        # For each value the sizes of its own axes, one list an axis of the node.
        self.atoms: dict[Node, list[list[int]]] = {}
        self.names: dict[Node, str] = {}
        self.sizes: dict[str, int] = {}
        self.inputs: dict[str, Groups] = {}
        self.dtypes: dict[str, str] = {}
        self.steps: list[Equation] = []
        self._taken: dict[str, None] = {}
        self._named: list[dict[Any, Any]] = [
            self.atoms, self.names, self.sizes, self.inputs, self.dtypes, self._taken,
        ]  # fmt: skip
        self._unnamed = itertools.count()

    def mark(self) -> list[int]:
        """Count what there is by now, for `undo`."""
        return [len(held) for held in (self.steps, *self._named)]

    def undo(self, mark: list[int]) -> None:
        """Forget what was read since: a node turned out to be none of the grammar."""
        count, *counts = mark
        del self.steps[count:]
        for named, count in zip(self._named, counts, strict=True):
            while len(named) > count:
                named.popitem()

    def _name(self, node: Node) -> str:
        name = str(node.name)
        while name in self._taken:
            name = f"{node.name}_{next(self._unnamed)}"
        self._taken[name] = None
        return name

    def _letter(self, size: int) -> str:
        """Return a letter of its own for an axis; `lettered` gives axes that are one the same."""
        letter = f"_{len(self.sizes)}"
        self.sizes[letter] = size
        return letter

    def _known(self, node: Node) -> None:
        """Make a value of a node that no step defines: an input."""
        if node in self.names:
            return
        if not is_tensor(node) or not _static(node):
            raise _NotInGrammar
        shape = [int(size) for size in value(node).shape]
        dtype = str(value(node).dtype).removeprefix("torch.")
        if dtype not in DTYPES or 0 in shape:
            raise _NotInGrammar
        self.atoms[node] = [[size] if size != 1 else [] for size in shape]
        self.names[node] = name = self._name(node)
        self.inputs[name] = tuple(tuple(map(self._letter, sizes)) for sizes in self.atoms[node])
        self.dtypes[name] = dtype

    def read(self, node: Node) -> _Operand:
        """Read a node through its views, with symbols of its own."""
        chain = []
        while is_view(node) and is_tensor(arg(node, 0)) and node not in self.names:
            chain.append(node)
            node = arg(node, 0)
        self._known(node)
        own = [tuple(Axis(size) for size in sizes) for sizes in self.atoms[node]]
        labels: tuple[Label, ...] = tuple(own)
        for view in reversed(chain):
            seen = viewed(view, labels)
            if seen is None:
                self._flat(view, _Operand(node, tuple((a,) for label in own for a in label), labels))
                return self.read(chain[0])
            labels = seen
        return _Operand(node, tuple((axis,) for label in own for axis in label), labels)

    def _flat(self, view: Node, x: _Operand) -> None:
        """Define a view that is none in index notation: the same elements in order, under other axes."""
        labels = tuple(() if size == 1 else (Axis(int(size)),) for size in value(view).shape)
        if atoms(x.own) != atoms(x.dims):
            raise _NotInGrammar  # permuted or repeated before
        self.define(view, "reshape", [x], labels)

    def define(self, node: Node, do: str, of: Sequence[_Given], dims: Sequence[Label], **options: Any) -> None:
        """Add a step whose result has these symbols, one label an axis of the node."""
        letters: dict[Axis, str] = {}
        reads: list[Read | float | int] = []
        out = [resolve(label) for label in dims]
        operands = [x for x in of if isinstance(x, _Operand)]
        every = [axis for x in operands for axis in atoms(x.own)] + [a for row in out for a in row]
        for axis in every:
            if axis not in letters:
                letters[axis] = self._letter(int(axis.size))
        for x in of:
            if isinstance(x, _Operand):
                groups = tuple(tuple(letters[axis] for axis in resolve(label)) for label in x.own)
                if len({letter for group in groups for letter in group}) != sum(map(len, groups)):
                    raise _NotInGrammar  # a diagonal
                reads.append(Read(self.names[x.base], groups))
            else:
                reads.append(x)
        flat = [letters[axis] for row in out for axis in row]
        if len(set(flat)) != len(flat) or len(reads) > MOST_FACTORS:
            raise _NotInGrammar
        if "along" in options:
            (axis,) = resolve((options["along"],))
            options["along"] = letters[axis]
        self.names[node] = own = self._name(node)
        self.atoms[node] = [[int(axis.size) for axis in row] for row in out]
        self.steps.append(Equation(own, tuple(flat), do, tuple(reads), options))

    def inner(
        self, node: Node, name: str, do: str, of: Sequence[_Given], dims: Sequence[Label], **options: Any
    ) -> _Operand:
        """Add a step for a value inside one node, and read it."""
        inner: Any = _Inner(f"{node.name}_{name}")
        self.define(inner, do, of, dims, **options)
        own = [tuple(Axis(size) for size in sizes) for sizes in self.atoms[inner]]
        return _Operand(inner, tuple((axis,) for label in own for axis in label), tuple(own))


class _Reader:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.values = graph, _Values()
        self.constants: dict[Node, float | int] = {}

    def reading(self) -> Reading:
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "call_function", "get_attr") or not _static(node):
                continue
            if node.op != "call_function" or (is_view(node) and is_tensor(arg(node, 0))):
                continue
            mark = self.values.mark()
            try:
                if node.target in _FILLS and not value(node).shape:
                    self.constants[node] = _constant(node)
                else:
                    self._step(node)
            except (_NotInGrammar, KeyError, IndexError, TypeError, ValueError):
                self.values.undo(mark)
        found = self.values
        program = Equations(found.inputs, found.sizes, tuple(found.steps), Read("", ()), found.dtypes)
        return Reading(self.graph, program, {name: node for node, name in found.names.items()}, found.names)

    def _step(self, node: Node) -> None:
        target = node.target
        if target is operator.getitem:
            return self._part(node)
        if not is_tensor(node) or any(size == 0 for size in value(node).shape):
            raise _NotInGrammar
        if target in MATMULS:
            return self._product(node)
        if target in (aten.addmm.default, aten.baddbmm.default):
            return self._added(node)
        if target in _SUMS:
            return self._sum(node)
        if target in _REDUCTIONS:
            return self._reduction(node, _REDUCTIONS[target])
        if target in _ELEMENTWISE:
            return self._elementwise(node, _ELEMENTWISE[target])
        if target in CASTS:
            dtype = node.kwargs.get("dtype", arg(node, 1)) if target is CASTS[0] else arg(node, 1)
            others = {k: v for k, v in node.kwargs.items() if k != "dtype" and v not in (None, False, torch.strided)}
            if set(others) - {"memory_format", "device"}:
                raise _NotInGrammar
            x = self.values.read(arg(node, 0))
            return self.values.define(node, "cast", [x], x.dims, dtype=_dtype(dtype))
        if target is aten.full.default:
            labels = [() if size == 1 else (Axis(int(size)),) for size in value(node).shape]
            return self.values.define(node, "fill", [_number(arg(node, 1))], labels, dtype=_dtype(value(node).dtype))
        if target is torch.ops.prims.iota.default:
            start, stride = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
            if (start, stride, value(node).dtype) != (0, 1, torch.int64) or value(node).shape[0] == 1:
                raise _NotInGrammar
            label = (Axis(int(value(node).shape[0])),)
            return self.values.define(node, "position", [], [label], along=label[0])
        if target in _FOLDS:
            return self._fold(node, _FOLDS[target])
        moved = read_moves(node)
        if type(moved) is View and type(moved.of[0]) is Slice and moved.of[0].of == node.args[:1]:
            return self._slice(node, moved.of[0], [])
        if moved is None or not all(isinstance(x, Node) for x in moved.of):
            raise _NotInGrammar
        if type(moved) is Slice:
            size = moved.shape[moved.dim]
            return self._slice(node, moved, [() if size == 1 else (Axis(size),)])
        if type(moved) is Pad:
            return self._pad(node, moved)
        if type(moved) is Cat:
            return self._cat(node, moved)
        raise _NotInGrammar

    def _product(self, node: Node) -> None:
        of, dims = self._contraction(arg(node, 0), arg(node, 1))
        self.values.define(node, "contract", of, dims)

    def _contraction(self, left: Node, right: Node) -> tuple[list[_Given], list[Label]]:
        a, b = self.values.read(left), self.values.read(right)
        *batch, summed = _aligned([[*a.dims[:-2], a.dims[-1]], b.dims[:-1]])
        return self._counted([a, b], summed), [*batch, a.dims[-2], b.dims[-1]]

    def _counted(self, factors: list[_Operand], summed: Label, scale: float = 1) -> list[_Given]:
        """Add the number of equal terms, where symbols are summed over that no factor has."""
        own = {axis for factor in factors for axis in atoms(factor.own)}
        scale *= extent(axis for axis in resolve(summed) if axis not in own)
        return [*factors] if scale == 1 else [*factors, scale]

    def _added(self, node: Node) -> None:
        """Read ``bias + a @ b``: two steps, of which the first has no node of its own."""
        if any(v != 1 for v in node.kwargs.values()) or len(node.args) > 3:
            raise _NotInGrammar
        of, dims = self._contraction(arg(node, 1), arg(node, 2))
        product = self.values.inner(node, "product", "contract", of, dims)
        self._pointwise(node, "add", [self.values.read(arg(node, 0)), product])

    def _sum(self, node: Node) -> None:
        x = arg(node, 0)
        if not is_tensor(x) or value(x).dtype != value(node).dtype:
            raise _NotInGrammar
        dims, keep = set(sum_dims(node)), bool(arg(node, 2, "keepdim", False))
        factors, labels, scale = self._factors(x)
        kept = [() if d in dims else label for d, label in enumerate(labels) if keep or d not in dims]
        of = self._counted(factors, tuple(axis for d in sorted(dims) for axis in labels[d]), scale)
        if len(of) > len(factors) and not value(node).dtype.is_floating_point:
            raise _NotInGrammar
        self.values.define(node, "contract", of, kept)

    def _factors(self, x: Node) -> tuple[list[_Operand], tuple[Label, ...], float]:
        """Read a value as a product, as far as multiplications serve nothing but this sum."""
        inner, chain = x, []
        while is_view(inner) and is_tensor(arg(inner, 0)) and len(inner.users) == 1:
            chain.append(inner)
            inner = arg(inner, 0)
        plain = inner.target is aten.mul.Tensor and len(inner.users) == 1 and value(inner).dtype.is_floating_point
        tensors = [v for v in inner.args if isinstance(v, Node) and is_tensor(v)]
        if not plain or any(value(v).dtype != value(inner).dtype for v in tensors):
            only = self.values.read(x)
            return [only], only.dims, 1
        factors: list[_Operand] = []
        dims: list[Sequence[Label]] = [[()] * value(inner).dim()]
        scale: float = 1
        for v in inner.args:
            if not isinstance(v, Node) or v in self.constants:
                scale *= _number(self.constants.get(v, v) if isinstance(v, Node) else v)
                continue
            found, labels, own = self._factors(v)
            factors, scale = factors + found, scale * own
            dims.append(labels)
        if not factors or len(factors) > MOST_FACTORS - 1:
            raise _NotInGrammar
        out = tuple(_aligned(dims))
        for view in reversed(chain):
            seen = viewed(view, out)
            if seen is None:
                raise _NotInGrammar
            out = seen
        return factors, out, scale

    def _reduction(self, node: Node, do: str) -> None:
        x = self.values.read(arg(node, 0))
        if value(arg(node, 0)).dtype != value(node).dtype:
            raise _NotInGrammar
        dims = set(sum_dims(node))
        keep = bool(arg(node, 2, "keepdim", False))
        self._one(node, do, x, dims, keep)

    def _one(self, node: Node, do: str, x: _Operand, dims: set[int], keep: bool) -> None:
        if not {*atoms(x.dims)} <= {*atoms(x.own)}:
            raise _NotInGrammar  # repeated
        kept = [() if d in dims else label for d, label in enumerate(x.dims) if keep or d not in dims]
        self.values.define(node, do, [x], kept)

    def _part(self, node: Node) -> None:
        """Read one result of several: variance or mean."""
        call, which = node.args
        if not isinstance(call, Node) or call.target is not aten.var_mean.correction:
            raise _NotInGrammar
        if call.kwargs.get("correction", 1) != 0 and which == 0:
            raise _NotInGrammar
        dims = arg(call, 1, "dim")
        rank = value(call.args[0]).dim()  # type: ignore[arg-type]
        chosen = {d % rank for d in (range(rank) if dims is None else dims)}
        x = self.values.read(call.args[0])  # type: ignore[arg-type]
        self._one(node, "mean" if which == 1 else "var", x, chosen, bool(call.kwargs.get("keepdim", False)))

    def _elementwise(self, node: Node, do: str) -> None:
        if any(v != 1 for k, v in node.kwargs.items() if k == "alpha") or set(node.kwargs) - {"alpha"}:
            raise _NotInGrammar
        if do == "div" and "rounding_mode" in node.kwargs:
            raise _NotInGrammar
        of: list[_Given] = []
        for v in node.args:
            if isinstance(v, Node) and v in self.constants:
                of.append(self.constants[v])
            elif isinstance(v, Node):
                of.append(self.values.read(v))
            else:
                of.append(_number(v))
        self._pointwise(node, do, self._promoted(node, of))

    def _promoted(self, node: Node, of: list[_Given]) -> list[_Given]:
        """Cast what would be computed in another dtype here.

        PyTorch lets a tensor without axes, and a number, not widen one with axes. Here axes of size one are none, and
        tensors without axes that are constants are numbers.
        """
        of = list(of)
        first = int(node.target == aten.where.self)  # a condition widens nothing
        given: list[Any] = [value(v) if isinstance(v, Node) else v for v in node.args[first:]]
        if len(given) != 2:
            return of
        here: list[Any] = [
            torch.empty((1,) * len(x.own), dtype=v.dtype, device="meta") if isinstance(x, _Operand) else x
            for v, x in zip(given, of[first:], strict=True)
        ]
        dtype = torch.result_type(*given)
        if dtype != torch.result_type(*here):
            for at, v in enumerate(given, first):
                x = of[at]
                if isinstance(x, _Operand) and v.dtype != dtype:
                    of[at] = self.values.inner(node, f"cast{at}", "cast", [x], x.dims, dtype=_dtype(dtype))
        return of

    def _pointwise(self, node: Node, do: str, of: list[_Given]) -> None:
        operands = [x.dims for x in of if isinstance(x, _Operand)]
        if not operands:
            raise _NotInGrammar
        self.values.define(node, do, of, _aligned([[()] * value(node).dim(), *operands]))

    def _fold(self, node: Node, do: str) -> None:
        x = self.values.read(arg(node, 0))
        label = resolve(x.dims[arg(node, 1) % len(x.dims)])
        own = [resolve(part) for part in x.own]
        if len(label) != 1 or label not in own or set(node.kwargs) - {"dtype"} or node.kwargs.get("dtype"):
            raise _NotInGrammar
        self.values.define(node, do, [x], x.dims, along=label[0])

    def _resized(self, x: _Operand, dim: int) -> Label:
        """Return the one symbol of an axis that is to change its size; nothing for an axis of size one."""
        label = resolve(x.dims[dim])
        if len(label) > 1 or (label and label not in [resolve(part) for part in x.own]):
            raise _NotInGrammar
        return label

    def _slice(self, node: Node, move: Slice, new: list[Label]) -> None:
        """Cut an axis, in whose place are new ones."""
        x = self.values.read(move.of[0])
        label = self._resized(x, move.dim)
        if not label:
            raise _NotInGrammar
        self._in_order(x)
        dims = [*x.dims[: move.dim], *new, *x.dims[move.dim + 1 :]]
        options = {"start": move.start, "stop": move.stop} | ({"step": move.step} if move.step != 1 else {})
        self.values.define(node, "slice", [x], dims, along=label[0], **options)

    def _in_order(self, x: _Operand) -> None:
        """Require that a value is read with its own axes in order: what changes sizes has no other reading."""
        if atoms(x.dims) != atoms(x.own):
            raise _NotInGrammar

    def _pad(self, node: Node, move: Pad) -> None:
        x, new = self.values.read(move.of[0]), Axis(move.shape[move.dim])
        self._in_order(x)
        label = self._resized(x, move.dim)
        dims = [*x.dims[: move.dim], (new,), *x.dims[move.dim + 1 :]]
        options = {"before": move.before, "after": move.after, "value": _number(move.value)}
        self.values.define(node, "pad", [x], dims, along=label[0] if label else new, **options)

    def _cat(self, node: Node, move: Cat) -> None:
        dim, new = move.dim, Axis(move.shape[move.dim])
        parts = [self.values.read(x) for x in move.of]
        for x in parts:
            self._resized(x, dim)
            self._in_order(x)
        dims = _aligned([[*x.dims[:dim], (), *x.dims[dim + 1 :]] for x in parts])
        dims[dim] = (new,)
        self.values.define(node, "concat", parts, dims, along=new)


class _Classes:
    """Axes that are one: joined where a step reads one as another, unless that would make two axes of a value one."""

    def __init__(self) -> None:
        self.parent: dict[tuple[object, object], tuple[object, object]] = {}
        self.owners: dict[tuple[object, object], dict[object, object]] = {}

    def find(self, axis: tuple[object, object]) -> tuple[object, object]:
        """Find the axis that stands for all that are one with this; an axis is an owner and a place there."""
        if axis not in self.parent:
            self.parent[axis], self.owners[axis] = axis, {axis[0]: axis[1]}
        while self.parent[axis] != axis:
            self.parent[axis] = self.parent[self.parent[axis]]
            axis = self.parent[axis]
        return axis

    def join(self, a: tuple[object, object], b: tuple[object, object]) -> None:
        """Make two axes one."""
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        if len(self.owners[a]) < len(self.owners[b]):
            a, b = b, a
        if any(self.owners[a].get(owner, place) != place for owner, place in self.owners[b].items()):
            return
        self.owners[a] |= self.owners.pop(b)
        self.parent[b] = a


def lettered(program: Equations) -> Equations:
    """Give axes that are one all over a program the same letter, and different letters to all others."""
    classes = _Classes()
    for number, step in enumerate(program.steps):
        for x in step.reads:
            for at, group in enumerate(group for group in x.axes if group):
                if len(group) == 1:
                    classes.join((x.name, at), (number, group[0]))
        for at, letter in enumerate(step.letters):
            classes.join((step.name, at), (number, letter))
    names = itertools.chain(_LETTERS, (f"{a}{n}" for n in itertools.count(1) for a in _LETTERS))
    known: dict[tuple[object, object], str] = {}
    sizes: dict[str, int] = {}

    def called(axis: tuple[object, object], old: str) -> str:
        own = classes.find(axis)
        if own not in known:
            known[own] = next(names)
            sizes[known[own]] = program.sizes[old]
        return known[own]

    inputs: dict[str, Groups] = {}
    for name, groups in program.inputs.items():
        places = itertools.count()
        inputs[name] = tuple(tuple(called((name, next(places)), letter) for letter in group) for group in groups)
    steps = []
    for number, step in enumerate(program.steps):
        of = tuple(
            Read(x.name, tuple(tuple(called((number, letter), letter) for letter in group) for group in x.axes))
            if isinstance(x, Read)
            else x
            for x in step.of
        )
        letters = tuple(called((number, letter), letter) for letter in step.letters)
        options = dict(step.options)
        if "along" in options:
            options["along"] = called((number, options["along"]), options["along"])
        steps.append(Equation(step.name, letters, step.do, of, options))
    result = program.result
    if result.name in (own := {step.name: step for step in steps}):
        flat = iter(own[result.name].letters)
        result = Read(result.name, tuple(tuple(next(flat) for _ in group) for group in result.axes))
    return Equations(inputs, sizes, tuple(steps), result, program.dtypes)


@dataclass(eq=False)
class _Inner:
    """Stands for a value inside one node, such as the product in ``addmm``."""

    name: str


def _aligned(operands: Sequence[Sequence[Label]]) -> list[Label]:
    """Return the symbols of axes that are aligned at the last one; where several operands have some, they are one."""
    dims: list[Label] = [()] * len(operands[0])
    for labels in operands:
        for at, label in enumerate(labels, len(dims) - len(labels)):
            if dims[at] and label and not unify(dims[at], label):
                raise _NotInGrammar
            dims[at] = dims[at] or label
    return dims


def _layout(shape: Sequence[Any], letters: Sequence[tuple[str, int]]) -> Groups:
    """Divide letters over the axes of a shape, in order."""
    groups: list[tuple[str, ...]] = []
    rest = list(letters)
    for size in shape:
        group: list[str] = []
        count = 1
        while count < size:
            letter, own = rest.pop(0)
            group.append(letter)
            count *= own
        if count != size:
            raise AssertionError(f"{letters} do not divide into {tuple(shape)}")
        groups.append(tuple(group))
    return tuple(groups)


def _static(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and all(isinstance(size, int) for size in val.shape)


def _constant(node: Node) -> float | int:
    number = arg(node, 1) if node.target is aten.full.default else arg(node, 0)
    if node.target is aten.full.default and not value(node).dtype.is_floating_point:
        raise _NotInGrammar
    return _number(number)


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or abs(value) == 1 << 53:
        raise _NotInGrammar
    return value


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise _NotInGrammar
    return name
