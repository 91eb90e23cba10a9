"""Put a traced body into Dynamo's graph as a `CapturedLoop`, and the translator after all of its steps."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.current_scope_id import current_scope_id
from torch._dynamo.utils import set_example_value
from torch._dynamo.variables import ConstantVariable, ListVariable, SymNodeVariable, TensorVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch.fx import GraphModule, Node, Proxy

from ...ir.captured_loop import CapturedLoop
from ...ir.fx import add_argument
from .carried import CarrySpec
from .lengths import Stacked, variable
from .lists import GrowingList
from .locations import ListEnd, Local, Location
from .trace import Trace
from .variables import (
    NotCaptured,
    Translator,
    Variable,
    changeable,
    every_fresh,
    example,
    form,
    fresh,
    is_constant,
    numbers,
    realized,
    rebuilt,
    tensors,
)


@dataclass
class _Results:
    """What is known of the state after the loop, location by location."""

    # Places whose tensors each step takes from the step before.
    carried: list[Location]
    # Places whose tensors only the last step decides.
    lasts: list[Location] = field(default_factory=list)
    # Places of numbers.
    constants: dict[Location, Any] = field(default_factory=dict)


def emit(tx: Translator, assumed: CarrySpec, found: Trace, count: Any, live: set[str]) -> None:
    """Emit a loop.

    Args:
        tx: The frame, at the loop's head; after ``count`` steps afterwards.
        assumed: The form that the body leads from and to.
        found: The trace that shows it.
        count: For how many steps; where it is a symbol, lists get one tensor of all steps' values.
        live: Local variables that are read after the loop.

    Raises:
        NotCaptured: Something that is needed after the loop is no tensor and no number; nothing is changed then.
    """
    collected = [item for growing in found.lists for item in growing.taken]
    for growing in found.lists:
        if not all(tensors(item) and not numbers(item) for item in growing.taken):
            raise NotCaptured("list-kind", f"the loop puts something that is not a tensor into `{growing.name}`")
    columns = [x for item in collected for x in tensors(item)]
    known = isinstance(count, int)
    if not known and (found.items or not all(map(_is_column, found.lists))):
        names = " and ".join(f"`{growing.name}`" for growing in found.lists if growing.grown) or "its lists"
        raise NotCaptured("list-kind", f"the loop makes {names} longer by other things than one tensor per step")
    results = _results(assumed, found, count, live, columns)
    # What the last step only passes on is known without the loop.
    last = {node: items.items[count - 1] for items, node in found.items}
    last |= {node: x for location in results.lasts for node, x in _passed_on(tx, found, location)}
    lasts = {_node(x): x for location in results.lasts for x in tensors(found.after[location])}
    wanted = [x for node, x in lasts.items() if node not in last and node.graph is found.graph]
    outputs = [x for location in results.carried for x in tensors(found.after[location])]
    split = len(outputs), len(outputs) + len(wanted)
    outputs += [*wanted, *columns]
    examples = [example(x) for x in outputs]
    for x in examples:
        form(x)  # raises where a size depends on the step
    call = _call(tx, found, results.carried, outputs, split, count)
    values = [fresh(tx, x) for x in examples[: split[1]]]
    rest = examples[split[1] :]
    stacks: list[Any] = [every_fresh(tx, x, count) if known else fresh(tx, x, count) for x in rest]
    set_example_value(call.node, (*values, *stacks))
    made = [wrap_fx_proxy(tx, call[i], example_value=x) for i, x in enumerate(values)]
    last |= {_node(x): y for x, y in zip(wanted, made[split[0] :], strict=True)}
    taken = iter(made[: split[0]])
    after: dict[Location, Variable] = {}
    for location in (*results.carried, *results.lasts):
        then = found.after[location]
        own: Iterator[Any] = taken
        if location in results.lasts:
            own = iter([last.get(_node(x), x) for x in tensors(then)])
        counted = None
        if location in assumed.carried:
            counted = assumed.numbers(tx, location, lambda x: _constant(tx, x.after(count)))
        after[location] = rebuilt(tx, then, own, counted)
    after |= {location: _constant(tx, x) for location, x in results.constants.items()}
    collect = _items if known else _rows_together
    filled: Iterator[Any] = iter([collect(tx, call[i], column) for i, column in enumerate(stacks, split[1])])
    # Now nothing can fail any more.
    for location in assumed.written - after.keys():
        location.clear(tx)
    for location, x in after.items():
        location.put(tx, x)
    for growing in found.lists:
        if not known:
            if growing.grown:
                growing.owner.items = Stacked(tx, growing.items, next(filled))  # type: ignore[assignment]
                tx.output.side_effects.mutation(growing.owner)
            continue
        front, back = ([_rows(tx, item, filled) for item in items] for items in (growing.front, growing.back))
        if growing.grown:
            tx.output.side_effects.mutation(growing.owner)
        if growing.stored is not None:
            every, first, item = growing.stored
            for k, row in enumerate(_rows(tx, item, filled)):
                growing.owner.items[first + every * k] = row
        growing.owner.items[:0] = [x for step in reversed(list(zip(*front, strict=True))) for x in step]
        growing.owner.items.extend(x for step in zip(*back, strict=True) for x in step)


def _is_column(growing: GrowingList) -> bool:
    """Tell whether each step appends one tensor, or nothing, to a list."""
    taken = growing.taken
    return taken == growing.back[:1] and all(type(realized(x)) is TensorVariable for x in taken)


def _constant(tx: Translator, x: Any) -> Variable:
    return variable(tx, x) if isinstance(x, (int, torch.SymInt)) else ConstantVariable.create(x)


def _rows_together(tx: Translator, proxy: Any, rows: torch.Tensor) -> Variable:
    return wrap_fx_proxy(tx, proxy, example_value=rows)


def _results(assumed: CarrySpec, found: Trace, count: Any, live: set[str], columns: list[Variable]) -> _Results:
    results = _Results(list(assumed.carried))
    results.constants = {location: numbers.after(count) for location, numbers in assumed.counters.items()}
    for location in assumed.written:
        then = found.after[location]
        if then is None or (isinstance(location, Local) and location.name not in live):
            continue
        affine = found.number.affine(then.sym_num) if isinstance(then, SymNodeVariable) else None
        if tensors(then) and all(map(is_constant, numbers(then).values())):
            results.lasts.append(location)
        elif affine is not None:
            results.constants[location] = affine[0] * (count - 1) + affine[1]
        elif is_constant(then):
            results.constants[location] = then.value  # type: ignore[attr-defined]
        else:
            raise NotCaptured(
                "python-state", f"`{location.name}` is used after the loop, and is neither a tensor nor an integer"
            )
    while unread := [location for location in results.carried if not _is_read(location, results, found, columns)]:
        # Only what the last step leaves in such a location counts; the end of a list is kept with the list.
        results.carried = [location for location in results.carried if location not in unread]
        results.lasts += [location for location in unread if not isinstance(location, ListEnd)]
    met: set[int] = set()
    for location in (*results.carried, *results.lasts):
        for x in changeable(found.after[location]):
            mutation = x.mutation_type
            new = isinstance(mutation, (ValueMutationNew, AttributeMutationNew))
            if id(x) in met or not new or mutation.scope <= current_scope_id():
                what = "a list" if type(x) is ListVariable else "an object"
                raise NotCaptured(
                    "python-state", f"`{location.name}` is {what} that another variable, or a step before, has"
                )
            met.add(id(x))
    return results


def _is_read(location: Location, results: _Results, found: Trace, columns: list[Variable]) -> bool:
    """Tell whether a step takes anything from a location but to leave it there."""
    own = found.carried[location]
    others = [x for x in (*results.carried, *results.lasts) if x != location]
    passed = {_node(x) for x in [*columns, *(x for other in others for x in tensors(found.after[other]))]}
    # A tensor that moves to another place of the same location is what the step before left: a shift register.
    moved = {
        left for left, given in zip(map(_node, tensors(found.after[location])), own, strict=False) if left != given
    }
    return any(node.users or node in passed | moved for node in own)


def _passed_on(tx: Translator, found: Trace, location: Location) -> list[tuple[Node, Variable]]:
    """List the values before the loop, where steps take them from."""
    return list(zip(found.carried.get(location, []), tensors(location.now(tx)), strict=False))


def _call(
    tx: Translator, found: Trace, carried: list[Location], outputs: list[Variable], split: tuple[int, int], count: Any
) -> Any:
    """Make the traced graph a module of Dynamo's graph, and call it."""
    graph, outer, tracer = found.graph, dict(found.outer), tx.output.current_tracer
    states = [x for location in carried for x in tensors(location.now(tx))]
    inner = [_node(x) for x in outputs]
    for node in dict.fromkeys(node for node in inner if node.graph is not graph and node not in outer):
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            outer[node] = add_argument(graph, node.name)
        outer[node].meta["example_value"] = node.meta["example_value"]
    inner = [node if node.graph is graph else outer[node] for node in inner]
    unread = [node for location in found.carried if location not in carried for node in found.carried[location]]
    items = [(items, node) for items, node in found.items if node.users or node in inner]
    for node in [*unread, *(node for _, node in found.items if not node.users and node not in inner)]:
        graph.erase_node(node)
    graph.output(tuple(inner))
    # Sizes of what is carried have become arguments where they were met.
    order = [
        *(x for location in carried for x in found.carried[location]),
        found.step,
        *(x for _, x in items),
        *outer.values(),
    ]
    for node in reversed(order):
        next(iter(graph.nodes)).prepend(node)
    assert graph.find_nodes(op="placeholder") == order, "an argument of the body comes from nowhere"
    body = GraphModule(tx.output.nn_modules, graph)
    reads = [element.reads for element, _ in items]
    known = isinstance(count, int)
    names = [location.name for location in carried for _ in found.carried[location]]
    loop = CapturedLoop(body, count if known else None, names, split[1] - split[0], reads)
    operands = [
        *(tracer.maybe_lift_tracked_freevar_to_input(x.as_proxy()).node for x in states),
        *(element.source for element, _ in items),
        *outer,
        *([] if known else [_node(variable(tx, count))]),
    ]
    if any(node.graph is not tracer.graph for node in operands):
        raise NotCaptured(
            "higher-order", "it is in a checkpointed function, and reads a list or a length of its caller"
        )
    name = tx.output.install_subgraph("loop_over_time", loop)
    call: Any = Proxy(tracer.graph.call_module(name, tuple(operands)), tracer)
    lines = [node.meta.get("stack_trace", "") for node in graph.nodes if node.op.startswith("call")]
    call.node.meta["stack_trace"] = lines[-1] if lines else ""
    return call


def _rows(tx: Translator, item: Variable, filled: Iterator[list[Variable]]) -> list[Variable]:
    """Stack what one step collects, for all steps."""
    steps = zip(*[next(filled) for _ in tensors(item)], strict=True)
    return [rebuilt(tx, item, iter(row)) for row in steps]


def _items(tx: Translator, proxy: Any, column: list[torch.Tensor]) -> list[Variable]:
    """Return the variables for all steps' values of one that is collected.

    They differ in their node alone, so Dynamo makes the first and the others are copies: it takes a millisecond each.
    """
    set_example_value(proxy.node, column)
    variables = [wrap_fx_proxy(tx, proxy[0], example_value=column[0])]
    first = _node(variables[0])
    for k, x in enumerate(column[1:], 1):
        node = first.graph.call_function(operator.getitem, (proxy.node, k))
        node.meta |= {**first.meta, "example_value": x}
        variables.append(variables[0].clone(proxy=Proxy(node, proxy.tracer)))
    return variables


def _node(x: Variable) -> Node:
    return x.as_proxy().node
