"""One trace of a loop's body, by Dynamo's own interpreter, in a graph of its own.

The translator is put at the beginning of the body with the state that a `CarrySpec` assumes, and executes instructions
until it is back at the loop's head. What it left is noted, and everything is put back.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import Instruction
from torch._dynamo.variables import ConstDictVariable, ListVariable, SymNodeVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import DequeVariable
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node, Proxy

from ...ir.source import expression, located
from ..induction_variable import InductionVariable, depends_on_iteration
from .carried import CarrySpec
from .iterators import Calls, Element, Items, Numbers
from .lists import GrowingList, SequenceView
from .locations import (
    LISTS,
    AttributeRecorder,
    DictRecorder,
    ListEnd,
    ListLocation,
    ListRecorder,
    Local,
    Location,
    containers,
)
from .side_effects import rolled_back, snapshot
from .variables import (
    NotCaptured,
    Translator,
    Variable,
    attributes,
    changeable,
    name_of,
    numbers,
    place_of,
    placeholder,
    realized,
    rebuilt,
    tensors,
)

# Shorter loops are cheap to trace, and often loops over layers; more of a list's items are not carried either.
SHORTEST = 16
# How often a body is traced from one head while the form of its state is found.
TRACES = 12
# Instructions that a body must not have.
_LEAVES = {
    "YIELD": ("generator", "it is the loop of a generator"),
    "SEND": ("generator", "it is the loop of a generator"),
    "RETURN": ("early-exit", "the loop can be left early"),
    "DELETE": ("outside-change", "something is deleted in the loop"),
    "STORE_GLOBAL": ("global-state", "a global variable is set in the loop"),
}


@dataclass(frozen=True)
class LoopCode:
    """A loop in a frame's instructions."""

    # Its ``FOR_ITER``; of a ``while``, where its body begins.
    head: int
    # The first instruction that is no longer the loop's.
    end: int
    # What it goes through; None for a ``while``.
    element: Element | None
    # How many of its steps were traced before this attempt.
    done: int = 0
    # Whether it is decided, for a step, on which side of a limit its number is: `min(t, 5)` is arithmetic otherwise.
    decides: bool = False
    # Numbers with a limit that were met.
    limited: list[Any] = field(default_factory=list, compare=False)

    @property
    def begin(self) -> int:
        """The body's first instruction."""
        return self.head if self.element is None else self.head + 1

    def stored(self, instructions: list[Instruction]) -> set[str]:
        """Return the local variables that the body writes."""
        stores = [i for i in instructions[self.begin : self.end] if i.opname.startswith("STORE_FAST")]
        names = [i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in stores]
        return {name for some in names for name in some}


@dataclass
class Trace:
    """What one trace of the body found."""

    graph: Graph
    number: InductionVariable
    # The graph's placeholders: the step's number, what is carried, items, and values from outside.
    step: Node
    carried: dict[Location, list[Node]]
    items: list[tuple[Items, Node]]
    outer: dict[Node, Node]
    # What the body left in the locations that it may have written, and lists that could be appended to.
    after: dict[Location, Variable | None]
    lists: list[GrowingList]

    @property
    def only_reads(self) -> bool:
        """Whether the body does no more than to read parts of tensors, as ``[x[:, t] for t in range(n)]`` does."""
        reads, calls = (torch.select, operator.getitem), [x for x in self.graph.nodes if x.op != "placeholder"]
        return all(x.target in reads or isinstance(x.meta.get("example_value"), torch.SymInt) for x in calls)

    def program(self) -> list[Any]:
        """Return the graph as data: equal for equal programs."""
        # Which sizes are arguments as well depends on the form of the carried values, not on what is computed.
        calls = [node for node in self.graph.nodes if node.op != "placeholder"]
        name: dict[Node, Any] = {node: f"%{i}" for i, node in enumerate(calls)}
        name |= {node: f"carried {i}" for i, node in enumerate(x for some in self.carried.values() for x in some)}
        name |= {node: f"item {i}" for i, (_, node) in enumerate(self.items)}
        name |= {inner: f"outer {id(node)}" for node, inner in self.outer.items()}
        named = functools.partial(torch.fx.node.map_arg, fn=lambda n: name.get(n, n.name))
        return [(n.op, n.target, str(named(n.args)), str(named(n.kwargs))) for n in calls]


def trace(tx: Translator, code: LoopCode, assumed: CarrySpec) -> Trace:
    """Trace the body once.

    Args:
        tx: The frame, at the loop's head; it is unchanged afterwards.
        code: Where the loop is.
        assumed: The state to begin with; ends of lists that turn out to be read, and lists that turn out not to
            grow, are added to it.

    Raises:
        NotCaptured: The body does what no trace can stand for. Dynamo's own exceptions mean the same.
    """
    for _ in range(TRACES):
        found = _Tracing(tx, code, assumed).run()
        if found is not None:
            return found
    names = ", ".join(f"`{location.name}`" for location in assumed.carried) or "the state"
    raise NotCaptured("state-unstable", f"no type, shape and dtype of {names} was found that a step keeps")


class _Tracing:
    def __init__(self, tx: Translator, code: LoopCode, assumed: CarrySpec) -> None:
        self.tx, self.code, self.assumed = tx, code, assumed
        self.number = InductionVariable(tx.output.shape_env)
        self.items: list[tuple[Items, Node]] = []
        self.given = {location: location.now(tx) for location in assumed.carried}
        self.tracer: Any = None
        self.step: Any = None
        # Objects among what is assumed of the state, with what their attributes held.
        self.objects: list[tuple[Variable, dict[str, Variable]]] = []

    def run(self) -> Trace | None:
        """Trace; None if the form was changed for another attempt."""
        tx, lists = self.tx, list[GrowingList]()
        try:
            with (
                rolled_back(tx),
                tx.output.subtracer("refold_loop", None) as self.tracer,
                contextlib.ExitStack() as stand_ins,
            ):
                self.tracer.create_proxy = functools.partial(_create_proxy, tx, self.code, self.tracer.create_proxy)
                made: list[Any] = [AttributeRecorder(tx)]
                stand_ins.callback(made[0].restore)
                for x in containers(tx):
                    if (stand_in := self._stand_in(x)) is not None:
                        stand_ins.callback(stand_in.restore)
                        made.append(stand_in)
                lists += [x for x in made if isinstance(x, GrowingList)]
                return self._trace([x for x in made if not isinstance(x, (GrowingList, SequenceView))], lists)
        except Exception as error:
            learned = [self._learns(growing) for growing in lists]
            if not any(learned) and (isinstance(error, NotCaptured) or not self._learns_of_writes()):
                raise
            return None

    def _stand_in(self, x: Variable) -> Any:
        if type(x) is ConstDictVariable:
            return DictRecorder(x, name_of(self.tx, x)) if x.is_mutable() else None
        if type(x) in LISTS and ListLocation(x) in self.assumed.carried:
            return ListRecorder(x)
        if type(x) is ListVariable and x.is_mutable() and x not in self.assumed.plain:
            return GrowingList(x, self.number, name_of(self.tx, x))
        if x.items and type(realized(x.items[0])) is TensorVariable:
            return SequenceView(x, self.number, self._take)
        return None

    def _trace(self, writable: list[Any], lists: list[GrowingList]) -> Trace:
        tx, number = self.tx, self.number
        before = snapshot(tx)
        try:
            carried = self._begin()
            self._run_body()
            if any(attributes(x) != before for x, before in self.objects):
                raise NotCaptured("python-state", "a step changes an object that the step before made")
            after: dict[Location, Variable | None] = {x: x.now(tx) for x in self._locations()}
            for x in writable:
                after |= x.changed(tx)
            # What may change is taken out before one looks whether anything else did.
            for x in writable:
                x.put_back()
            if not before.unchanged(snapshot(tx)):
                raise NotCaptured("outside-change", "the loop changes something outside of it")
            for growing in lists:
                growing.check()
            _check(self.tracer.graph)
        finally:
            number.take_guards()
            before.restore()
        around: Any = self.tracer.parent
        outer = {
            around.maybe_lift_tracked_freevar_to_input(proxy).node: inner.node
            for proxy, inner in self.tracer.lifted_freevars.items()
        }
        return Trace(self.tracer.graph, number, self.step, carried, self.items, outer, after, lists)

    def _begin(self) -> dict[Location, list[Node]]:
        """Put the assumed state in place."""
        tx, assumed, nodes = self.tx, self.assumed, {}
        step = self.tracer.create_graph_input("step", int, self.number.symint)
        self.step = step.node
        counted = SymNodeVariable.create(tx, step, self.number.symint)
        counts = {x: [*assumed.numbers(tx, x, lambda number: number.at(tx, counted))] for x in assumed.carried}
        for location in assumed.written:
            location.clear(tx)
        for location, examples in assumed.carried.items():
            values = [placeholder(tx, self.tracer, "carried", like) for like in examples]
            nodes[location] = [x.as_proxy().node for x in values]
            state = rebuilt(tx, self.given[location], iter(values), iter(counts[location]), frozen=True)
            self.objects += [(x, dict(attributes(x))) for x in changeable(state)]
            location.put(tx, state)
        for location, counter in assumed.counters.items():
            location.put(tx, counter.at(tx, counted))
        if self.code.element is not None:
            tx.push(self._item(counted, self.code.element))
        return nodes

    def _item(self, counted: Any, element: Element) -> Variable:
        if isinstance(element, tuple):
            return TupleVariable([self._item(counted, part) for part in element])
        if isinstance(element, Numbers):
            return element.at(self.tx, counted)
        if isinstance(element, Calls):
            return element.fn.call_function(self.tx, [self._item(counted, part) for part in element.arguments], {})
        return self._take(element)

    def _take(self, element: Items) -> Variable:
        """Make an item an argument of the body."""
        item = placeholder(self.tx, self.tracer, "item", element.example)
        self.items.append((element, item.as_proxy().node))
        return item

    def _run_body(self) -> None:
        """Let the translator run the body once, until it is back at the loop's head."""
        tx, code = self.tx, self.code
        below = list(tx.stack if code.element is None else tx.stack[:-1])
        tx.instruction_pointer = code.begin
        while True:
            instruction = tx.instructions[tx.instruction_pointer]
            if reason := next((why for name, why in _LEAVES.items() if instruction.opname.startswith(name)), None):
                raise NotCaptured(*reason, *place_of(tx, instruction))
            try:
                going = tx.step()
            except NotCaptured as refusal:
                refusal.found_at(*place_of(tx, instruction))
                raise
            if not going:
                raise NotCaptured("early-exit", "the function returns inside the loop", *place_of(tx, instruction))
            if tx.instruction_pointer is None or not code.head <= tx.instruction_pointer < code.end:
                raise NotCaptured("early-exit", "the loop can be left early", *place_of(tx, instruction))
            if tx.instruction_pointer == code.head:
                break
        if len(tx.stack) != len(below) or any(a is not b for a, b in zip(tx.stack, below, strict=True)):
            raise NotCaptured("early-exit", "the loop leaves a value on the stack of Python")

    def _locations(self) -> set[Location]:
        return self.assumed.locations | {Local(name) for name in self.code.stored(self.tx.instructions)}

    def _learns(self, growing: GrowingList) -> bool:
        """Assume more of a list that was read: that its ends are carried, or that it does not grow."""
        assumed, (front, back) = self.assumed, growing.wants
        end = ListEnd(growing.owner, max(front, back), bool(front), growing.name)
        known = end.now(self.tx) if 0 < end.count < SHORTEST else TupleVariable([])
        if tensors(known) and not numbers(known) and not changeable(known):
            for location in [x for x in assumed.carried if isinstance(x, ListEnd) and x.owner is end.owner]:
                if location.at_front == end.at_front:
                    del assumed.carried[location]
            return assumed.carry(self.tx, end)
        if growing.read and not growing.grown:
            assumed.plain.add(growing.owner)
            return True
        # It may be a window, which loses an item for each that it gets.
        return growing.read and len(growing.items) < SHORTEST and assumed.carry(self.tx, self._location(growing.owner))

    def _location(self, x: Variable) -> ListLocation:
        return ListLocation(x, name_of(self.tx, x))

    def _learns_of_writes(self) -> bool:
        """Assume that short lists of tensors, and deques, do not stay as they are but are written to."""
        deques = [x for x in containers(self.tx) if type(x) is DequeVariable]
        short = [x for x in (*self.assumed.plain, *deques) if len(x.items) < SHORTEST]
        written: list[Any] = []
        for replaced in (False, True):  # what lists and dictionaries hold, before the lists that hold these
            locations = {x: self._location(x) for x in short if not written}
            known = [x for x, location in locations.items() if location in self.assumed.carried]
            written += [
                x
                for x, location in locations.items()
                if x not in known and self.assumed.carry(self.tx, location, replaced)
            ]
        self.assumed.plain -= set(written)
        return bool(written)


def _create_proxy(
    tx: Translator, code: LoopCode, create: Callable[..., Any], kind: str, target: Any, args: Any, kwargs: Any,
    *rest: Any, **more: Any,
) -> Any:  # fmt: skip
    """Create a proxy; positions that depend on the step are selected first, for indexing makes them constants.

    A number that the function is called with is read from its tensor outside of the loop: Dynamo reads it once.
    """
    if kind == "call_method" and target == "item" and args[0].node.graph is tx.output.root_tracer.graph:
        return tx.output.root_tracer.create_proxy(kind, target, args, kwargs, *rest, **more)
    if target in (torch.sym_min, torch.sym_max):
        code.limited.append(target)
        if code.decides and (chosen := _chosen(target, args)) is not None:
            return chosen
    if (
        kind == "call_function"
        and target in (operator.getitem, operator.setitem)
        and isinstance(_example(args[0]), torch.Tensor)
    ):
        x, key = args[:2]
        entries = key if isinstance(key, tuple) else (key,)
        locations = [i for i, entry in enumerate(entries) if isinstance(_example(entry), torch.SymInt)]
        if (
            any(isinstance(_example(entry), torch.Tensor) or isinstance(entry, (bool, list)) for entry in entries)
            and locations
        ):
            raise NotCaptured("step-number", "a tensor is indexed by another tensor and by the number of the step")
        taken = [entry is not None and entry is not Ellipsis for entry in entries]
        for i in reversed(locations):
            dim = sum(taken[:i])
            if Ellipsis in entries[:i]:
                dim -= sum(taken)
            x = create("call_function", torch.select, (x, dim, entries[i]), {})
            wrap_fx_proxy(tx, x)
            entries, taken = entries[:i] + entries[i + 1 :], taken[:i] + taken[i + 1 :]
        if locations:
            args = (x, entries or Ellipsis, *args[2:])
    return create(kind, target, args, kwargs, *rest, **more)


def _chosen(target: Any, args: Any) -> Any:
    """Decide on which side of a limit a number is that moves with the step, as for the last chunk of a sequence.

    What it decides is a guard on the step's number. None stands for nothing to decide.
    """
    moving = [x for x in args if isinstance(_example(x), torch.SymInt) and depends_on_iteration(_example(x))]
    if len(args) != 2 or len(moving) != 1 or moving[0].node.op != "call_function":
        return None
    (own,), limit = moving, args[args[0] is moving[0]]
    value, end = _example(own), _example(limit) if isinstance(limit, Proxy) else limit
    return own if bool(value <= end if target is torch.sym_min else value >= end) else None


def _example(x: Any) -> Any:
    return x.node.meta.get("example_value") if isinstance(x, Proxy) else None


def _check(graph: Graph) -> None:
    """Raise if a node does more than compute tensors from tensors."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in calls:
        if isinstance(node.target, HigherOrderOperator) or node.op == "call_module":
            raise NotCaptured(
                "higher-order", f"`{expression(node)}` takes a function, as {node.target}", *located(node)
            )
    for node in calls:
        if node.meta.get("example_value") is None and node.target is not operator.setitem:
            raise NotCaptured("python-state", f"`{expression(node)}` computes no tensor", *located(node))
