"""Lift loops over time while Dynamo traces them, so that a loop of any length is traced once.

Dynamo executes a loop's bytecode step by step. Here it is stopped at the head of a long ``for`` and made to trace the
body once in a graph of its own, from a state that stands for every step: the step's number is a symbol, carried tensors
are placeholders, lists that grow can be appended to and not be read. If the body leads from that state to a state of
the same form, that trace is, by induction, the program of every step for which the decisions on the step's number
(`refold.compiler.stepnumber`) are the same. It becomes one `LiftedLoop` in Dynamo's graph, the local variables become
its results, and Dynamo goes on behind the loop, or at the step that decides otherwise.

Whatever else the body does to the world (attributes, dictionaries, closures, random state, graph breaks) Dynamo refuses
in a graph of its own; then the state is put back and the loop is traced step by step, as without this file.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import dis
import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.bytecode_analysis import livevars_analysis
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables import (
    ConstantVariable,
    LazyVariableTracker,
    ListVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
)
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.iter import ZipVariable
from torch._dynamo.variables.lists import ListIteratorVariable, RangeIteratorVariable
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node, Proxy

from .lifted import LiftedLoop, Reads
from .stepnumber import StepNumber

# Shorter loops are cheap to trace, and often loops over layers.
SHORTEST = 16
# The first steps may differ (`if h is None`): so many heads of one loop are tried.
HEADS = 3
# How often a body is traced from one head while the form of its state is found.
TRACES = 8

Translator = Any  # torch._dynamo.symbolic_convert.InstructionTranslatorBase


class Refused(Exception):
    """A loop is not lifted; the message is a reason for a person."""


# Where what a loop iterates over is known in closed form ------------------------------------------


@dataclass(frozen=True)
class Numbers:
    """Integers ``start + step * k``."""

    start: int
    step: int


@dataclass(frozen=True)
class Items:
    """Items of a sequence of tensors: the node that computes the sequence, and one item's value."""

    source: Node
    reads: Reads
    sample: TensorVariable


Element = Numbers | Items | tuple["Element", ...]


def _iterator(it: Any) -> tuple[int, Element] | None:
    """Return how many elements an iterator has left, and their form; None if it is not known without running it."""
    if type(it) is RangeIteratorVariable:
        return it.len, Numbers(it.start, it.step)
    if isinstance(it, ListIteratorVariable):
        if it.is_exhausted:
            return None
        rest = it.items[it.index :]
        if len(rest) < SHORTEST or (element := _sequence(rest)) is None:
            return None
        return len(rest), element
    if type(it) is ZipVariable:
        # torch <= 2.11 keeps a list, later ones a tuple of their own kind.
        iterables = it.iterables if hasattr(it, "iterables") else it.iterable.items
        parts = [_iterator(part.realize()) for part in iterables]
        if not parts or any(part is None for part in parts):
            return None
        counts = [part[0] for part in parts if part]
        if it.strict and len(set(counts)) > 1:
            return None
        return min(counts), tuple(part[1] for part in parts if part)
    return None


def _sequence(items: list[Any]) -> Element | None:
    """Find the form of a list's items: integers or items of one sequence, evenly spaced, or tuples of those."""
    items = [item.realize() if isinstance(item, LazyVariableTracker) else item for item in items]
    first = items[0]
    if any(type(item) is not type(first) for item in items):
        return None
    if type(first) is ConstantVariable:
        spaced = _spaced([item.value for item in items])
        return spaced and Numbers(*spaced)
    if type(first) is TupleVariable and len({len(item.items) for item in items}) == 1:
        columns = [_sequence([item.items[i] for item in items]) for i in range(len(first.items))]
        return tuple(column for column in columns if column is not None) if all(columns) else None
    if type(first) is TensorVariable:
        nodes = [item.as_proxy().node for item in items]
        if any(node.target is not operator.getitem or node.args[0] is not nodes[0].args[0] for node in nodes):
            return None
        spaced = _spaced([node.args[1] for node in nodes])
        if spaced is None or len({_form(node.meta["example_value"]) for node in nodes}) > 1:
            return None
        return Items(nodes[0].args[0], Reads(*spaced), first)
    return None


def _spaced(numbers: list[Any]) -> tuple[int, int] | None:
    if any(type(number) is not int for number in numbers):
        return None
    step = numbers[1] - numbers[0]
    even = all(number == numbers[0] + step * k for k, number in enumerate(numbers))
    return (numbers[0], step) if even and step else None


def _form(x: torch.Tensor) -> tuple[Any, ...]:
    """Return what a program can ask of a tensor without reading it; sizes must not depend on the step."""
    return (type(x), _fixed(x.shape), _fixed(x.stride()), x.dtype, x.device, x.requires_grad)


def _fixed(sizes: Any) -> tuple[int, ...]:
    known = [size if isinstance(size, int) else size.node.maybe_as_int() for size in sizes]
    if any(size is None for size in known):
        raise Refused("a size is symbolic or depends on the step")
    return tuple(known)  # type: ignore[arg-type]


# The state at a loop's head -----------------------------------------------------------------------


class _Growing:
    """Stands in for a list's items while the body is traced: it can be appended to, and knows if it was read."""

    def __init__(self, owner: ListVariable) -> None:
        self.owner, self.items, self.mutation = owner, owner.items, owner.mutation_type
        self.new: list[Any] = []
        self.read = False
        owner.items, owner.mutation_type = self, ValueMutationNew()  # type: ignore[assignment]
        owner.call_method = self._call_method  # type: ignore[method-assign]

    def restore(self) -> None:
        """Give the list its items back."""
        self.owner.items, self.owner.mutation_type = self.items, self.mutation
        del self.owner.call_method

    def append(self, item: Any) -> None:
        self.new.append(item)

    def extend(self, items: Any) -> None:
        self.new.extend(items)

    def _call_method(self, tx: Translator, name: str, args: Any, kwargs: Any) -> Any:
        # Dynamo asks for the length when it extends.
        if name == "extend" and len(args) == 1 and type(args[0]) in (ListVariable, TupleVariable):
            self.extend(args[0].items)
            return ConstantVariable.create(None)
        return type(self.owner).call_method(self.owner, tx, name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    def _refuse(self, *args: Any) -> Any:
        self.read = True
        raise Refused("the loop reads a list that it appends to")

    __len__ = __iter__ = __getitem__ = __contains__ = __add__ = __reversed__ = _refuse


@dataclass
class _Form:
    """What is assumed of the state at every step's beginning."""

    # Local -> the tensors that it carries, flat.
    carried: dict[str, list[torch.Tensor]]
    # Locals that no step reads before it writes them.
    written: set[str]
    # Integer locals that grow by a constant: value at the first step, growth.
    counters: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Lists that are read: they must not grow.
    plain: set[int] = field(default_factory=set)


@dataclass
class _Trace:
    """One trace of the body."""

    graph: torch.fx.Graph
    locals: dict[str, Any]
    number: StepNumber
    elements: list[Items]
    outer: list[Proxy]
    grown: list[_Growing]

    def program(self) -> list[Any]:
        """Return the graph as data: equal for equal programs."""
        place = {node: i for i, node in enumerate(self.graph.nodes)}
        numbered = functools.partial(torch.fx.node.map_arg, fn=lambda n: f"%{place[n]}")
        return [
            (n.op, n.target if n.op != "placeholder" else "", str(numbered(n.args)), str(numbered(n.kwargs)))
            for n in self.graph.nodes
        ]


class Lift:
    """The attempt to lift one loop at one of its heads."""

    def __init__(self, tx: Translator, inst: Any, count: int, element: Element) -> None:
        self.tx, self.inst, self.count, self.element = tx, inst, count, element
        self.head = tx.instruction_pointer - 1
        self.end = tx.indexof[inst.target]
        body = tx.instructions[self.head + 1 : self.end]
        self.stored = {name for i in body if i.opname.startswith("STORE_FAST") for name in _names(i)}
        self.live = livevars_analysis(tx.instructions, inst)

    def run(self) -> None:
        """Lift the loop, or raise; the translator is unchanged then."""
        form, entry = self._first_form()
        trace, widened = None, False
        for _ in range(TRACES):
            trace = self._trace(form)
            again = self._refine(form, trace)
            if again is None:
                break
            widened |= any(again.carried[name] is not form.carried[name] for name in form.carried)
            form = again
        else:
            raise Refused("the state does not settle")
        if widened:
            # The first step starts from tensors of another form (say, without gradient): it must be the same program.
            first = self._trace(dataclasses.replace(form, carried=entry))
            if first.program() != trace.program():
                raise Refused("the first step is another program than the next")
        count = trace.number.steps(self.count)
        if count < SHORTEST:
            raise Refused("what a step does depends on its number")
        self._emit(form, trace, count)

    def _first_form(self) -> tuple[_Form, dict[str, list[torch.Tensor]]]:
        carried: dict[str, list[torch.Tensor]] = {}
        written: set[str] = set()
        for name in self.stored:
            given = self.tx.symbolic_locals.get(name)
            if given is None or name not in self.live:
                written.add(name)
                continue
            tensors = _tensors(given)
            if tensors:
                carried[name] = [x.as_proxy().node.meta["example_value"] for x in tensors]
        return _Form(carried, written), dict(carried)

    def _refine(self, form: _Form, trace: _Trace) -> _Form | None:
        """Compare the state after the body with the one before it; return a form to try next, None if they agree."""
        new = _Form(dict(form.carried), set(form.written), dict(form.counters), set(form.plain))
        for name in self.stored - form.written:
            before, after = self.tx.symbolic_locals[name], cast(Any, trace.locals.get(name))
            if name in form.carried:
                tensors = _tensors(after)
                if len(tensors) != len(form.carried[name]) or type(before.realize()) is not type(after):
                    raise Refused(f"{name} is not the same kind of thing after a step")
                values = [x.as_proxy().node.meta["example_value"] for x in tensors]
                if [_form(x) for x in values] != [_form(x) for x in form.carried[name]]:
                    new.carried[name] = [_fresh(self.tx, x) for x in values]
            elif name in form.counters:
                start, growth = form.counters[name]
                if not isinstance(after, SymNodeVariable) or trace.number.affine(after.sym_num) != (
                    growth,
                    start + growth,
                ):
                    raise Refused(f"{name} does not grow by the same number at every step")
            elif after is before or (_constant(before) and _constant(after) and before.value is after.value):
                continue
            elif _constant(before) and _constant(after) and type(before.value) is type(after.value) is int:
                new.counters[name] = before.value, after.value - before.value
            else:
                new.written.add(name)
        for growing in trace.grown:
            if growing.read:
                new.plain.add(id(growing.owner))
        same = (new.written, new.counters, new.plain) == (form.written, form.counters, form.plain)
        return None if same and all(new.carried[n] is form.carried[n] for n in form.carried) else new

    # Tracing the body --------------------------------------------------------------------------

    def _trace(self, form: _Form) -> _Trace:
        tx, output = self.tx, self.tx.output
        lists = [x for x in _reachable_lists(tx) if id(x) not in form.plain]
        grown: list[_Growing] = []
        number = StepNumber(output.shape_env)
        with _kept(tx), output.subtracer("refold_loop", None) as tracer:
            tracer.create_proxy = functools.partial(_create_proxy, tx, tracer.create_proxy)
            for owner in lists:
                grown.append(_Growing(owner))
            before = _world(tx)
            try:
                for name in form.written:
                    tx.symbolic_locals.pop(name, None)
                for name, examples in form.carried.items():
                    values = iter([self._placeholder(tracer, name, example) for example in examples])
                    tx.symbolic_locals[name] = _rebuilt(tx.symbolic_locals[name], values)
                step = tracer.create_graph_input("step", int, number.symint)
                counted = SymNodeVariable.create(tx, step, number.symint)
                for name, (start, growth) in form.counters.items():
                    tx.symbolic_locals[name] = self._number(counted, Numbers(start, growth))
                elements: list[Items] = []
                tx.push(self._item(tracer, counted, self.element, elements))
                depth = list(tx.stack[:-1])
                self._steps()
                if len(tx.stack) != len(depth) or any(a is not b for a, b in zip(tx.stack, depth, strict=True)):
                    raise Refused("the loop leaves something on the stack")
                if not before.unchanged(_world(tx)):
                    raise Refused("the loop changes something outside of it")
                _check(tracer.graph)
                left = {name: tx.symbolic_locals[name] for name in self.stored if name in tx.symbolic_locals}
                outer = list(tracer.lifted_freevars)
            except Refused:
                # Another form may do: without a list that is only read.
                for growing in grown:
                    if growing.read and not growing.new:
                        form.plain.add(id(growing.owner))
                        break
                else:
                    raise
                left = None
            finally:
                number.take_guards()
                before.restore()
                for growing in grown:
                    growing.restore()
        if left is None:
            return self._trace(form)
        return _Trace(tracer.graph, left, number, elements, outer, [g for g in grown if g.new])

    def _steps(self) -> None:
        """Let the translator run the body."""
        tx = self.tx
        tx.instruction_pointer = self.head + 1
        while (at := tx.instruction_pointer) != self.head:
            if at is None or not self.head < at < self.end:
                raise Refused("the loop can be left early")
            if tx.instructions[at].opname.startswith(("RETURN", "YIELD", "DELETE", "STORE_GLOBAL", "STORE_DEREF")):
                raise Refused(f"there is a {tx.instructions[at].opname} in the loop")
            if not tx.step():
                raise Refused("the loop ends the function")

    def _placeholder(self, tracer: Any, name: str, example: torch.Tensor) -> Any:
        proxy = tracer.create_graph_input(name, torch.Tensor, example)
        return wrap_fx_proxy(self.tx, proxy, example_value=example)

    def _item(self, tracer: Any, counted: Any, element: Element, found: list[Items]) -> Any:
        if isinstance(element, tuple):
            return TupleVariable([self._item(tracer, counted, part, found) for part in element])
        if isinstance(element, Numbers):
            return self._number(counted, element)
        found.append(element)
        return self._placeholder(tracer, "item", element.sample.as_proxy().node.meta["example_value"])

    def _number(self, counted: Any, numbers: Numbers) -> Any:
        symint, proxy = counted.sym_num, counted.as_proxy()
        for apply, by, neutral in ((operator.mul, numbers.step, 1), (operator.add, numbers.start, 0)):
            if by != neutral:
                symint = apply(symint, by)
                proxy = self.tx.output.create_proxy("call_function", apply, (proxy, by), {})
                set_example_value(proxy.node, symint)
        return SymNodeVariable.create(self.tx, proxy, symint)

    # The loop in Dynamo's graph ----------------------------------------------------------------

    def _emit(self, form: _Form, trace: _Trace, count: int) -> None:
        """Put the loop into the graph and the translator behind it."""
        tx = self.tx
        tracer = trace.graph
        lasts = {n: x for n, x in trace.locals.items() if n in form.written and n in self.live}
        constants: dict[str, Any] = {name: start + growth * count for name, (start, growth) in form.counters.items()}
        for name, x in list(lasts.items()):
            if _tensors(x):
                continue
            affine = trace.number.affine(x.sym_num) if isinstance(x, SymNodeVariable) else None
            if affine is not None:
                constants[name] = affine[0] * (count - 1) + affine[1]
            elif not _constant(x):
                raise Refused(f"{name} is used behind the loop, and is neither a tensor nor an integer")
            else:
                constants[name] = x.value
            del lasts[name]
        if any(growing.items is getattr(tx.stack[-1], "items", None) for growing in trace.grown):
            raise Refused("the loop appends to the list that it goes through")
        collected = [item for growing in trace.grown for item in growing.new]
        if not all(type(item) is TensorVariable for item in collected):
            raise Refused("the loop collects something that is not a tensor")
        results = [x for name in form.carried for x in _tensors(trace.locals[name])]
        carried = len(results)
        results += [x for last in lasts.values() for x in _tensors(last)]
        kept = len(results)
        results += collected
        examples = [x.as_proxy().node.meta["example_value"] for x in results]
        forms = [_form(x) for x in examples]  # raises where a size depends on the step
        del forms
        inner, outer = self._outputs(trace, results)
        tracer.output(tuple(inner))
        body = GraphModule(tx.output.nn_modules, tracer)
        reads = [element.reads for element in trace.elements]
        loop = LiftedLoop(body, count, carried, kept - carried, reads)
        root = tx.output.root_tracer
        operands = [
            *(x.as_proxy().node for name in form.carried for x in _tensors(tx.symbolic_locals[name])),
            *(element.source for element in trace.elements),
            *(proxy.node for proxy in outer),
        ]
        name = tx.output.install_subgraph("loop_over_time", loop)
        call: Any = Proxy(root.graph.call_module(name, tuple(operands)), root)
        lines = [node.meta.get("stack_trace", "") for node in tracer.nodes if node.op.startswith("call")]
        call.node.meta["stack_trace"] = lines[-1] if lines else ""
        values = [_fresh(tx, x) for x in examples[:kept]]
        columns = [[_fresh(tx, x) for _ in range(count)] for x in examples[kept:]]
        set_example_value(call.node, (*values, *columns))
        made = iter([wrap_fx_proxy(tx, call[i], example_value=x) for i, x in enumerate(values)])
        after = {name: _rebuilt(trace.locals[name], made) for name in (*form.carried, *lasts)}
        stacks = []
        for i, column in enumerate(columns):
            proxy: Any = call[kept + i]
            set_example_value(proxy.node, column)
            stacks.append([wrap_fx_proxy(tx, proxy[k], example_value=x) for k, x in enumerate(column)])
        # Now nothing can fail any more.
        for name in form.written:
            tx.symbolic_locals.pop(name, None)
        tx.symbolic_locals.update(after)
        tx.symbolic_locals.update({name: ConstantVariable.create(x) for name, x in constants.items()})
        for growing in trace.grown:
            mine = [stacks.pop(0) for _ in growing.new]
            tx.output.side_effects.mutation(growing.owner)
            growing.owner.items.extend(x for step in zip(*mine, strict=True) for x in step)
        iterator = tx.stack[-1]
        for _ in range(count):
            iterator.next_variable(tx)

    def _outputs(self, trace: _Trace, results: list[Any]) -> tuple[list[Node], list[Proxy]]:
        """Return the body's nodes for the results, and what the body reads from outside, in order."""
        outer = dict.fromkeys(trace.outer)
        placeholders = {}
        nodes = trace.graph.find_nodes(op="placeholder")
        for proxy, node in zip(outer, nodes[len(nodes) - len(outer) :], strict=True):
            placeholders[proxy.node] = node
        inner = []
        for x in results:
            node = x.as_proxy().node
            if node.graph is not trace.graph:  # a value from outside, passed on
                if node not in placeholders:
                    with trace.graph.inserting_after(trace.graph.find_nodes(op="placeholder")[-1]):
                        placeholders[node] = trace.graph.placeholder(node.name)
                    placeholders[node].meta["example_value"] = node.meta["example_value"]
                    outer[x.as_proxy()] = None
                node = placeholders[node]
            inner.append(node)
        return inner, list(outer)


def _create_proxy(
    tx: Translator, create: Callable[..., Any], kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
) -> Any:
    """Create a proxy; positions that depend on the step are selected first, for indexing makes them constants."""
    if (
        kind == "call_function"
        and target in (operator.getitem, operator.setitem)
        and isinstance(_example(args[0]), torch.Tensor)
    ):
        x, key = args[:2]
        entries = key if isinstance(key, tuple) else (key,)
        places = [i for i, entry in enumerate(entries) if isinstance(_example(entry), torch.SymInt)]
        if (
            any(isinstance(_example(entry), torch.Tensor) or isinstance(entry, (bool, list)) for entry in entries)
            and places
        ):
            raise Refused("a tensor is indexed by another and by the step")
        taken = [entry is not None and entry is not Ellipsis for entry in entries]
        for i in reversed(places):
            dim = sum(taken[:i])
            if Ellipsis in entries[:i]:
                dim -= sum(taken)
            x = create("call_function", torch.select, (x, dim, entries[i]), {})
            wrap_fx_proxy(tx, x)
            entries, taken = entries[:i] + entries[i + 1 :], taken[:i] + taken[i + 1 :]
        if places:
            args = (x, entries or Ellipsis, *args[2:])
    return create(kind, target, args, kwargs, *rest, **more)


def _example(x: Any) -> Any:
    return x.node.meta.get("example_value") if isinstance(x, Proxy) else None


def _names(inst: Any) -> tuple[str, ...]:
    return inst.argval if isinstance(inst.argval, tuple) else (inst.argval,)


def _constant(x: Any) -> bool:
    return type(x) is ConstantVariable


def _tensors(x: Any) -> list[Any]:
    """Return the tensors that a variable consists of; none if it consists of anything else."""
    x = x.realize() if isinstance(x, LazyVariableTracker) else x
    if type(x) is TensorVariable:
        return [x]
    if type(x) is TupleVariable:
        parts = [_tensors(item) for item in x.items]
        return [y for part in parts for y in part] if all(parts) else []
    return []


def _rebuilt(x: Any, values: Iterator[Any]) -> Any:
    """Put other tensors into the places of a variable's."""
    x = x.realize() if isinstance(x, LazyVariableTracker) else x
    return TupleVariable([_rebuilt(item, values) for item in x.items]) if type(x) is TupleVariable else next(values)


def _fresh(tx: Translator, like: torch.Tensor) -> torch.Tensor:
    """Make the fake value of a loop's result."""
    _, shape, strides, dtype, device, requires_grad = _form(like)
    with tx.output.fake_mode, torch.enable_grad():
        made = torch.empty_strided(shape, strides, dtype=dtype, device=device, requires_grad=requires_grad)
        return made.view_as(made) if requires_grad else made


def _reachable_lists(tx: Translator) -> list[ListVariable]:
    """Return the lists in the frame's variables and on its stack: those that its code may append to."""
    found = {}
    for x in [*tx.symbolic_locals.values(), *tx.stack]:
        x = x.realize() if isinstance(x, LazyVariableTracker) and x.is_realized() else x
        if type(x) is ListVariable and x.is_mutable():
            found[id(x)] = x
    return list(found.values())


@dataclass
class _World:
    """What the body must not change: containers, attributes and cells, hooks, random state, modes."""

    containers: list[tuple[Any, Any]]
    rest: tuple[Any, ...]

    def restore(self) -> None:
        """Put the containers' contents back: Dynamo may change them before it finds that it must not."""
        _put_back(self.containers)

    def unchanged(self, other: _World) -> bool:
        """Tell whether another look at the world found the same."""
        before = {id(container): content for container, content in self.containers}
        pairs = [(before[id(x)], content) for x, content in other.containers if id(x) in before]
        return self.rest == other.rest and all(_same(a, b) for a, b in pairs)


def _same(a: Any, b: Any) -> bool:
    a, b = (list(x.items()) if isinstance(x, dict) else [(None, y) for y in x] for x in (a, b))
    return len(a) == len(b) and all(k == l and x is y for (k, x), (l, y) in zip(a, b, strict=True))


def _contents(effects: Any) -> list[tuple[Any, Any]]:
    """Return the containers in which Dynamo records side effects, with copies; others hold references to them."""
    found = [x for x in vars(effects).values() if isinstance(x, (dict, list, set))]
    found += [y for x in found if isinstance(x, dict) for y in x.values() if isinstance(y, (dict, list, set))]
    return [(x, copy.copy(x)) for x in found]


def _put_back(contents: list[tuple[Any, Any]]) -> None:
    for container, content in contents:
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def _world(tx: Translator) -> _World:
    output, containers = tx.output, []
    effects = output.side_effects
    stack: list[Any] = [*effects.id_to_variable.values()]

    def watch(container: Any) -> None:
        containers.append((container, copy.copy(container)))
        stack.extend(container.values() if isinstance(container, dict) else container)

    for attributes in effects.store_attr_mutations.values():
        watch(attributes)
    stack += [*tx.stack, *tx.symbolic_locals.values()]
    frame = tx.parent
    while frame is not None:
        watch(frame.stack)
        watch(frame.symbolic_locals)
        frame = frame.parent
    seen: set[int] = set()
    while stack:
        x = stack.pop()
        if type(x) in (TensorVariable, ConstantVariable, SymNodeVariable) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, LazyVariableTracker):
            stack += [x.realize()] if x.is_realized() else []
        elif isinstance(x, VariableTracker):
            for name, part in vars(x).items():
                if name == "items" and isinstance(part, (list, dict)):
                    watch(part)
                elif isinstance(part, VariableTracker):
                    stack.append(part)
                elif isinstance(part, (list, tuple)):
                    stack += [y for y in part if isinstance(y, VariableTracker)]
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    counts = len(effects.tensor_hooks), len(effects.save_for_backward), len(output.random_calls)
    existing = {id(x) for x in effects.store_attr_mutations if isinstance(x.mutation_type, AttributeMutationExisting)}
    return _World(containers, (flags, counts, existing))


def _check(graph: torch.fx.Graph) -> None:
    """Raise if a node does more than compute tensors from tensors."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if isinstance(node.target, HigherOrderOperator) or node.op == "call_module":
            raise Refused(f"there is a {node.target} in the loop")
        if node.meta.get("example_value") is None and node.target is not operator.setitem:
            raise Refused(f"{node.target} in the loop computes no tensor")


@contextlib.contextmanager
def _kept(tx: Translator) -> Iterator[None]:
    """Put a translator's state back afterwards."""
    kept = {
        name: copy.copy(getattr(tx, name))
        for name in ("stack", "symbolic_locals", "block_stack", "instruction_pointer", "current_instruction")
    }
    kept |= {name: getattr(tx, name) for name in ("current_speculation", "kw_names", "lineno") if hasattr(tx, name)}
    log, mode = tx.speculation_log, tx.output.fake_mode
    entries, index, cached = log.entries, log.index, mode.cache_enabled
    effects = _contents(tx.output.side_effects)
    tx.current_speculation = None
    # Speculations in the body must not be found in the log when Dynamo starts over.
    log.entries, log.index = [], 0
    # Fake values are cached by expressions; those of the step's number mean something else in every trace.
    mode.cache_enabled = False
    try:
        yield
    except BaseException:
        _put_back(effects)
        raise
    finally:
        for name, x in kept.items():
            setattr(tx, name, x)
        log.entries, log.index, mode.cache_enabled = entries, index, cached


# The hook -----------------------------------------------------------------------------------------


def lifts(backend: Callable[..., Any]) -> Any:
    """Mark a backend: loops in what is compiled for it are lifted."""
    backend.lifts_loops = True  # type: ignore[attr-defined]
    return backend


def _is_marked(backend: Any) -> bool:
    while backend is not None:
        if getattr(backend, "lifts_loops", False):
            return True
        inner = vars(backend) if hasattr(backend, "__dict__") else {}
        backend = inner.get("_torchdynamo_orig_backend") or inner.get("compiler_fn") or inner.get("__wrapped__")
    return False


def _visit(tx: Translator, inst: Any) -> None:
    state = _state()
    if state is None or (len(tx.output.tracers) > 1 and not state.busy):
        return
    where = f"{tx.f_code.co_filename}:{tx.lineno}"
    try:
        iterator = tx.stack[-1].realize()
        found = _iterator(iterator)
        if torch._C._is_any_autocast_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            raise Refused("autocast or a function transform is active")
    except Exception as error:
        state.refused[where] = _first_line(error)
        return
    if found is None or found[0] < SHORTEST:
        return
    if state.busy:
        raise Refused("there is a long loop in the loop")
    _, tries = state.seen.get(id(iterator), (iterator, 0))
    state.seen[id(iterator)] = iterator, tries + 1
    if tries >= HEADS:
        return
    state.busy = True
    try:
        Lift(tx, inst, *found).run()
        state.refused.pop(where, None)
    except Exception as error:  # whatever it is: the loop is traced step by step
        state.refused[where] = _first_line(error)
    finally:
        state.busy = False


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@dataclass
class _State:
    """What one compile knows of its loops: iterators seen and how often, and why loops were not lifted."""

    busy: bool = False
    seen: dict[int, tuple[Any, int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def _state() -> _State | None:
    context = TracingContext.try_get()
    return None if context is None else vars(context).setdefault("refold_loops", _State())


def notes() -> list[str]:
    """Say of the compile under way which long loops were traced step by step, and why."""
    state = _state()
    return [f"a loop is traced step by step: {why} [{at}]" for at, why in state.refused.items()] if state else []


def install() -> None:
    """Make Dynamo's translators try to lift loops, for marked backends."""
    opcode = dis.opmap["FOR_ITER"]
    for name in ("InstructionTranslator", "InliningInstructionTranslator"):
        table = getattr(symbolic_convert, name).dispatch_table
        original = table[opcode]

        def for_iter(tx: Translator, inst: Any, original: Any = original) -> None:
            if _is_marked(tx.output.compiler_fn):
                _visit(tx, inst)
            original(tx, inst)

        table[opcode] = for_iter


install()
