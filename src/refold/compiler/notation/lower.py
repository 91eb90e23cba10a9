"""Lower a program in index notation to ATen nodes: the only thing that is ever done with one.

Nodes are inserted by `refold.compiler.ir.builder`, which computes their shapes and dtypes on fake tensors. Contractions
become matrix products as the passes make them. If more than two values are multiplied at a time, the order of least
work is taken. A program that wants another order writes more steps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...errors import ProgramError, RefoldError
from ...ops.spec import load
from ...ops.torch.registry import Operation
from ..ir.builder import Builder
from ..ir.contract import Operand, aligned, contract_in_order, least_work, spread
from ..ir.fx import value
from ..ir.operators import SCAN
from ..ir.symbols import Axis
from .operations import ELEMENTWISE, OPERATORS, REDUCTIONS
from .program import Equation, Equations, Read

aten = torch.ops.aten

# Their second argument is a number by another overload.
_OF_NUMBERS = ("eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "remainder", "fmod")


def lower(program: Equations, build: Builder, inputs: Mapping[str, Node]) -> Node:
    """Insert a program's nodes and return the one that holds its result.

    Args:
        program: The program, as `parse` or a reader made it.
        build: Inserts nodes.
        inputs: A node for each of its inputs, of the shape that the program says.

    Raises:
        ProgramError: Dtypes, or an operator's arguments, do not go together; the builder's nodes are removed.
    """
    lowering = _Lowering(program, build, inputs)
    try:
        return lowering.run()
    except ProgramError:
        build.undo()
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, RefoldError) as error:
        build.undo()
        raise ProgramError(f"{lowering.where}: {(str(error).splitlines() or [''])[0]}") from None


class _Lowering:
    def __init__(self, program: Equations, build: Builder, inputs: Mapping[str, Node]) -> None:
        self.program, self.build = program, build
        self.axes = {letter: Axis(size) for letter, size in program.sizes.items()}
        self.values: dict[str, tuple[Operand, tuple[str, ...]]] = {}
        self.device = value(next(iter(inputs.values()), build.anchor)).device
        self.where = "the program"
        for name, groups in program.inputs.items():
            letters = [letter for group in groups for letter in group]
            axes = [self.axes[letter] for letter in letters]
            node = build.reshape(inputs[name], [axis.size for axis in axes])
            self.values[name] = Operand(node, axes), tuple(letters)

    def run(self) -> Node:
        for number, step in enumerate(self.program.steps):
            self.where = f"step {number} ({step.do})"
            self.values[step.name] = self._aligned(self._step(step), step.letters), step.letters
        self.where = "result"
        read = self.program.result
        x = self._aligned(self.values[read.name][0], read.letters)
        return self.build.reshape(x.node, [math.prod(self._sizes(group)) for group in read.axes])

    def _sizes(self, letters: Sequence[str]) -> list[int]:
        return [self.program.sizes[letter] for letter in letters]

    def _read(self, read: Read) -> Operand:
        """Return a value with the axes that it is read with."""
        own, letters = self.values[read.name]
        groups = [group for group in read.axes if group]
        meant = dict(zip(letters, groups, strict=True))
        backwards = {self.axes[letter]: letter for letter in letters}
        order = [group for axis in own.axes for group in [meant[backwards[axis]]]]
        flat = [letter for group in order for letter in group]
        node = self.build.reshape(own.node, self._sizes(flat))
        return Operand(node, [self.axes[letter] for letter in flat])

    def _aligned(self, x: Operand, letters: Sequence[str]) -> Operand:
        """Permute, and repeat where an axis is missing."""
        axes = self._all(letters)
        return Operand(spread(self.build, x, axes), axes)

    def _broadcast(self, x: Operand, letters: Sequence[str]) -> Node:
        """Permute, with axes of size one where some are missing; what has no axes stays so, and widens nothing."""
        return aligned(self.build, x, self._all(letters)) if x.axes else x.node

    def _step(self, step: Equation) -> Operand:
        do = step.do
        if do == "contract":
            return self._contract(step)
        if do in REDUCTIONS:
            return self._reduce(step)
        if do in OPERATORS:
            return self._operator(step)
        if do == SCAN.name:
            return self._scan(step)
        special = getattr(self, f"_{do}", None)
        return special(step) if special is not None else self._elementwise(step)

    def _contract(self, step: Equation) -> Operand:
        operands = [self._read(x) for x in step.reads]
        out = [self.axes[letter] for letter in step.letters]
        scale: Any = 1
        for number in step.of:
            if not isinstance(number, Read):
                scale = scale * number
        path = [tuple(range(len(operands)))]
        if len(operands) > 2:
            present = {axis for x in operands for axis in x.axes}
            kept = [axis for axis in out if axis in present]
            path = least_work([x.axes for x in operands], kept, lambda axis: axis.size)
        x = contract_in_order(self.build, operands, path, out)
        return Operand(self.build.times(x.node, scale), x.axes)

    def _elementwise(self, step: Equation) -> Operand:
        which = ELEMENTWISE[step.do]
        present = [letter for letter in step.letters if any(letter in x.letters for x in step.reads)]
        nodes = [self._broadcast(self._read(x), present) if isinstance(x, Read) else x for x in step.of]
        overload = which.overload
        tensor = [isinstance(x, Node) for x in nodes]
        if step.do == "pow":
            overload = f"Tensor_{'Tensor' if tensor[1] else 'Scalar'}" if tensor[0] else "Scalar"
        elif step.do in ("clamp_min", "clamp_max"):
            overload = "Tensor" if tensor[1] else "default"
        else:
            # These take tensors in all places; others a number in any but the first.
            every = step.do == "where" or overload == "default"
            like = [value(x).dtype for x in nodes[step.do == "where" :] if isinstance(x, Node)]
            nodes = [x if tensor[i] or (i and not every) else self._number(x, like) for i, x in enumerate(nodes)]
            if step.do in _OF_NUMBERS and not isinstance(nodes[1], Node):
                overload = "Scalar"
        target = getattr(getattr(aten, step.do), overload)
        return Operand(self.build.call(target, *nodes), self._all(present))

    def _number(self, number: Any, like: Sequence[torch.dtype]) -> Node:
        """Return a number as a tensor without axes, which does not widen the values that it is used with."""
        floats = [dtype for dtype in like if dtype.is_floating_point]
        if isinstance(number, float):
            return self._scalar(number, floats[0] if floats else torch.get_default_dtype())
        return self._scalar(number, like[0] if like and like[0] != torch.bool else torch.int64)

    def _scalar(self, number: Any, dtype: torch.dtype) -> Node:
        return self.build.call(aten.full.default, [], number, dtype=dtype, device=self.device)

    def _cast(self, step: Equation) -> Operand:
        x = self._read(step.reads[0])
        dtype = getattr(torch, step.options["dtype"])
        return Operand(self.build.cast(x.node, dtype), x.axes)

    def _fill(self, step: Equation) -> Operand:
        dtype = getattr(torch, step.options["dtype"])
        return Operand(self._scalar(step.of[0], dtype), [])

    def _position(self, step: Equation) -> Operand:
        (size,) = self._sizes(step.letters) or [1]
        node = self.build.positions(size, self.device)
        return Operand(self.build.reshape(node, self._sizes(step.letters)), self._all(step.letters))

    def _all(self, letters: Sequence[str]) -> list[Axis]:
        return [self.axes[letter] for letter in letters]

    def _reduce(self, step: Equation) -> Operand:
        x = self._read(step.reads[0])
        keep = set(self._all(step.letters))
        dims = [i for i, axis in enumerate(x.axes) if axis not in keep]
        packet, overload = REDUCTIONS[step.do].split(".")
        options = {"correction": 0} if step.do == "var" else {}
        node = x.node
        if dims:
            node = self.build.call(getattr(getattr(aten, packet), overload), node, dims, **options)
        elif step.do == "var":
            node = self.build.call(aten.mul.Tensor, node, 0)
        return Operand(node, [axis for axis in x.axes if axis in keep])

    def _cumsum(self, step: Equation) -> Operand:
        x = self._read(step.reads[0])
        at = x.axes.index(self.axes[step.options["along"]])
        return Operand(self.build.call(getattr(aten, step.do).default, x.node, at), x.axes)

    _cumprod = _cumsum

    def _scan(self, step: Equation) -> Operand:
        along = step.options["along"]
        rest = [letter for letter in step.letters if letter != along]
        batch, others = rest[:1], rest[1:]
        order = [*batch, along, *others]
        given = {}
        for name, read in zip(("a", "x", "initial_state"), step.of, strict=False):
            letters = order if name != "initial_state" else [*batch, *others]
            if not isinstance(read, Read):
                raise ProgramError(f"{self.where}: it reads values; make a constant with fill")
            node = self._aligned(self._read(read), letters).node
            given[name] = node if batch else self.build.call(aten.unsqueeze.default, node, 0)
        args = SCAN.args(**given, reverse=bool(step.options.get("reverse", False)))
        scan = self.build.call(SCAN.target, *args)
        node = self.build.call(operator.getitem, scan, 0)
        if not batch:
            node = self.build.call(aten.squeeze.dims, node, [0])
        return Operand(node, self._all(order))

    def _reshape(self, step: Equation) -> Operand:
        x = self._aligned(self._read(step.reads[0]), step.reads[0].letters)
        return Operand(self.build.reshape(x.node, self._sizes(step.letters)), self._all(step.letters))

    def _place(self, step: Equation, x: Read) -> tuple[int, bool]:
        """Return where the axis lies that changes its size, and whether the value that is read has it."""
        fresh = [i for i, letter in enumerate(step.letters) if letter not in x.letters]
        if fresh:
            return fresh[0], len(x.letters) == len(step.letters)
        along = step.options["along"]
        return (x.letters if along in x.letters else step.letters).index(along), along in x.letters

    def _slice(self, step: Equation) -> Operand:
        (read,) = step.reads
        at, _ = self._place(step, read)
        x = self._aligned(self._read(read), read.letters)
        o = step.options
        size = value(x.node).shape[at]
        start, stop, stride = slice(o.get("start", 0), o.get("stop"), o.get("step", 1)).indices(size)
        node = self.build.call(aten.slice.Tensor, x.node, at, start, stop, stride)
        return Operand(self.build.reshape(node, self._sizes(step.letters)), self._all(step.letters))

    def _pad(self, step: Equation) -> Operand:
        (read,) = step.reads
        at, there = self._place(step, read)
        node = self._aligned(self._read(read), read.letters).node
        node = node if there else self.build.call(aten.unsqueeze.default, node, at)
        o, rank = step.options, value(node).dim()
        pad = [0] * (2 * (rank - 1 - at)) + [o.get("before", 0), o.get("after", 0)]
        node = self.build.call(aten.constant_pad_nd.default, node, pad, float(o.get("value", 0)))
        return Operand(node, self._all(step.letters))

    def _concat(self, step: Equation) -> Operand:
        parts = []
        at = step.letters.index(step.options["along"])
        for read in step.reads:
            node = self._aligned(self._read(read), read.letters).node
            there = len(read.letters) == len(step.letters)
            parts.append(node if there else self.build.call(aten.unsqueeze.default, node, at))
        return Operand(self.build.call(aten.cat.default, parts, at), self._all(step.letters))

    def _operator(self, step: Equation) -> Operand:
        given: dict[str, Any] = {}
        for name, read in zip(step.options["arguments"], step.reads, strict=True):
            node = self._aligned(self._read(read), read.letters).node
            for dim, group in enumerate(read.axes):
                if not group:
                    node = self.build.call(aten.unsqueeze.default, node, dim)
            given[name] = node
        own = {k: tuple(v) if isinstance(v, list) else v for k, v in step.options.get("options", {}).items()}
        called = Operation(load(step.do))
        node = self.build.call(called.target, *called.args(**given, **own))
        results = OPERATORS[step.do].results
        if len(results) > 1:
            node = self.build.call(operator.getitem, node, results.index(step.options.get("result", results[0])))
        shape = [size for size in value(node).shape if size != 1]
        if shape != self._sizes(step.letters):
            raise ProgramError(f"{self.where}: its result has shape {tuple(value(node).shape)}, not that of let")
        return Operand(self.build.reshape(node, shape), self._all(step.letters))
