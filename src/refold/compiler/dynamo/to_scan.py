"""Turn a captured loop into a scan: find it, and record it as a rewrite."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir.builder import Builder
from ..ir.captured_loop import step_count
from ..ir.fx import concrete, fix, is_tensor, value
from ..ir.operators import SCAN
from ..ir.source import source_line
from ..recurrence.affine import Loop
from ..recurrence.replace import SCANS, WHY, dualise
from ..recurrence.systems import BOUNDED_SCAN, LINEAR_SYSTEM
from ..recurrence.vectorize import NotALoop
from .body import Body, Traced, differentiable
from .call_site import CallSite, example, storage
from .capture.lengths import JOINS
from .mutation import changed_in_place, memory
from .producers import elementwise_producers, trace_producers
from .read_back import Origin
from .sequential import LoopRewrite, SequentialLoop, calling
from .splice import splice
from .split_carries import splits

aten = torch.ops.aten


@dataclass
class CapturedScan:
    """The scan that a captured loop is.

    Attributes:
        site: The loop's call in Dynamo's graph.
        rewrite: The record of it, which the check and the timing use.
        inputs: The nodes that the scan reads.
        dual: Whether it does not write the states.
        fixed: Why it holds for the sizes at hand only; empty if it holds for all sizes.
    """

    site: CallSite
    rewrite: LoopRewrite
    inputs: Sequence[Node]
    dual: bool
    fixed: str = ""

    @property
    def notes(self) -> list[str]:
        """What a report says of it, in addition."""
        return [f"this compile is for these sizes alone: {self.fixed} [{self.site.call.name}]"] if self.fixed else []

    def splice(self) -> None:
        """Put the scan where the loop was."""
        splice(self.site, self.rewrite.candidate, self.inputs)


def find_scan(gm: GraphModule, call: Node, dual: bool = True) -> CapturedScan:
    """Find the scan that a captured loop is: for all lengths, or else for the one at hand, which then is a guard.

    Args:
        gm: Dynamo's graph.
        call: The call of the loop.
        dual: Whether to prefer an operator that does not write the states, if nothing wants all of them.

    Raises:
        NotALoop: It says why there is none.
    """
    try:
        return _find(gm, call, dual)
    except Exception as error:  # whatever it is, it may be otherwise with numbers for sizes
        if not _make_sizes_known(gm, call):
            raise
        reason = error.advice if isinstance(error, NotALoop) else (str(error).splitlines() or [type(error).__name__])[0]
    found = _find(gm, call, dual)
    found.fixed = reason
    return found


def _find(gm: GraphModule, call: Node, dual: bool) -> CapturedScan:
    site = CallSite(gm, call)
    if not site.operands:
        raise NotALoop("no-scan", "it reads and carries no tensor")
    try:
        return _best(site, site.traced, dual)
    except NotALoop:
        for parts in splits(site.traced, site.training):
            with contextlib.suppress(NotALoop):
                return _best(site, parts, dual)
        raise  # of what the user wrote


def _best(site: CallSite, traced: Traced, dual: bool) -> CapturedScan:
    before: set[Node] = set()
    if dual:
        before = elementwise_producers(site.operands, changed_in_place(site.gm, True, site.call) | site.written())
    found = _rewrite(site, traced, before, dual)
    # What is computed before the loop is of use only to operators that do not write the states.
    return _rewrite(site, traced, set(), dual) if before and not found.dual else found


def describe_loop(gm: GraphModule, call: Node) -> str:
    """Describe a captured loop as `refold.compiler.recurrence.serial_chains.serial_loops` describes an unrolled one.

    Views do not count, as there.
    """
    loop: Any = gm.get_submodule(str(call.target))
    calls = [node for node in loop.body.graph.nodes if node.op.startswith("call")]
    made = [(node, node.meta.get("example_value")) for node in calls]
    lines = [source_line(node) for node, value in made if not (isinstance(value, torch.Tensor) and value._is_view())]
    carried = [x for x in loop.body.graph.output_node().args[0][: loop.carried] if x.op.startswith("call")]
    line = source_line(next(iter([*carried, *reversed(calls)]), call))
    steps = concrete(step_count(loop, call))
    return f"{line} ({steps} steps one after another, {lines.count(line)} operations per step)"


def _make_sizes_known(gm: GraphModule, call: Node) -> bool:
    """Make all sizes that a captured loop depends on numbers; tell whether one was not."""
    examples: list[Any] = [node.meta["example_value"] for node in call.all_input_nodes]
    tensors = [x for x in examples if isinstance(x, torch.Tensor)]
    numbers = [x for x in examples if isinstance(x, torch.SymInt)]
    return fix([*numbers, *(n for x in tensors for n in (*x.shape, *x.stride()))])


def _rewrite(site: CallSite, traced: Traced, before: set[Node], dual: bool) -> CapturedScan:
    """Build the scan.

    Args:
        site: The loop's call.
        traced: Its body, or that with carries split into elements.
        before: Nodes before the loop that become part of the rewrite.
        dual: Whether to look for an operator that does not write the states.
    """
    loop, steps_body = site.loop, site.traced
    inputs, prologue = trace_producers(site.operands, before, traced.mode)
    _all_operands(prologue, loop.carried, steps_body)
    graph, body = _candidate(site, traced, prologue.graph, dual)
    differentiable(prologue.graph)
    prologue.recompile()
    inner_body = _without_writes(steps_body)
    extra = range(len(steps_body.results), len(steps_body.results) + len(traced.writes))
    count = concrete(site.count)  # of the inputs that it is checked and timed on
    steps = SequentialLoop(
        prologue,
        inner_body,
        count,
        steps_body.carried,
        [*(i for i, _ in site.uses), *extra, *(i for _, i in steps_body.finals)],
        site.lists,
    )
    candidate = GraphModule({}, graph)
    detail = _detail(site.count, body.loops)
    rewrite = LoopRewrite(
        name="roll up loop",
        site=site.call.name,
        source=describe_loop(site.gm, site.call).rsplit(" (", 1)[0],
        why=WHY,
        detail=detail,
        original=calling(steps, graph),
        candidate=candidate,
        inputs=tuple(node.name for node in inputs),
        multilinear=False,
        terms=count,
        spread=0.1,
        differentiated=tuple(_has_gradient(example(x)) for x in inputs) if site.training else (),
        coupled=max((len(found.system) for found in body.loops), default=1) or 1,
        steps=steps,
    )
    return CapturedScan(site, rewrite, inputs, dual=any(found.operator != SCAN.name for found in body.loops))


def _candidate(site: CallSite, traced: Traced, prologue: Graph, dual: bool) -> tuple[Graph, Body]:
    """Build the graph of the scan, behind what makes the loop's operands; return it and the body that it computes."""
    graph, copies = Graph(), dict[Node, Node]()
    operands: Any = graph.graph_copy(prologue, copies)
    first = next(x for x in operands if is_tensor(x))
    anchor = graph.call_function(aten.alias.default, (first,))
    anchor.meta = {"val": value(first), "stack_trace": site.call.meta.get("stack_trace", "")}
    own = [*operands, *_begin(Builder(anchor), operands, traced.fixed[len(site.traced.fixed) :])]
    body = Body(site.count, traced, own, anchor, site.training)
    results: dict[int, Node] = {i: body.over_time(traced.results[i]) for i, _ in site.uses if i >= site.lists}
    contents = [body.over_time(write.content) for write in traced.writes]
    for i, _ in site.uses:
        if i < site.lists:
            body.last(traced.results[i])  # the scan after it must be there before any is replaced
    for _, i in traced.finals:
        body.last(traced.results[i])
    output = graph.output((*results.values(), *contents))
    for found in body.loops if dual else []:
        dualise(body, found, output)
    made: Any = output.args[0]
    results = dict(zip(results, made, strict=False))
    contents = made[len(results) :]
    body.emit.settle()
    for i, _ in site.uses:
        if i < site.lists:
            like = traced.results[i]
            build = Builder(anchor)
            results[i] = build.restride(body.last(like), value(like))
    finals = []
    for _, i in traced.finals:
        like = traced.results[i]
        finals.append(Builder(anchor).restride(body.last(like), value(like)))
    results = _apart(Builder(anchor), results, {i for i, use in site.uses if _returned(use)})
    contents = [*_apart(Builder(anchor), dict(enumerate(contents))).values()]
    graph.erase_node(output)
    graph.output((*(results[i] for i, _ in site.uses), *contents, *finals))
    graph.erase_node(anchor)
    graph.eliminate_dead_code()
    differentiable(graph)
    graph.lint()
    if not any(node.target in (*SCANS, LINEAR_SYSTEM, BOUNDED_SCAN) for node in graph.nodes) and body.loops:
        names = " and ".join(dict.fromkeys(f"`{x.variable}`" for x in body.loops))
        raise NotALoop("no-scan", f"nothing that is used depends on {names}")
    if not (site.uses or contents or finals):
        raise NotALoop("no-scan", "nothing that it computes is used")
    return graph, body


def _apart(build: Builder, results: dict[int, Node], returned: Collection[int] = ()) -> dict[int, Node]:
    """Give results memory of their own: what the loop makes shares none with what it reads, or who called it sees."""
    read = {memory(value(x)) for x in build.graph.find_nodes(op="placeholder") if is_tensor(x)}
    made, found = set[Any](), dict(results)
    for i in sorted(results, key=lambda i: -value(results[i]).dim()):  # rather the last state than all
        own = memory(value(results[i]))
        if own in read or (i in returned and own in made):
            build.settle()  # one node may be several results
            found[i] = build.call(aten.clone.default, results[i])
        elif i in returned:
            made.add(own)
    return found


def _returned(x: Node) -> bool:
    """Tell whether a graph returns memory of a value, or what a scan makes of all its items."""
    return any(
        user.op == "output"
        or ((user.target in (*JOINS, operator.getitem) or storage(user) == storage(x)) and _returned(user))
        for user in x.users
    )


# How many of the scans of one loop are named.
_NAMED = 4


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()


def _detail(count: Any, loops: list[Loop]) -> str:
    if not loops:
        return f"{count if isinstance(count, int) else 'any number of'} steps that carry nothing, all at once"
    return "; ".join(dict.fromkeys(loop.described for loop in loops[:_NAMED]))


def _begin(build: Builder, operands: Sequence[Node], origins: Sequence[Origin]) -> list[Node]:
    """Make the operands that a body has in addition to the loop's own."""

    def begin(origin: Origin) -> Node:
        x, dim, at = operands[origin.operand], origin.dim, origin.at
        if dim is None:
            return x
        return (
            build.call(aten.slice.Tensor, x, dim, at, at + 1)
            if origin.keep
            else build.call(aten.select.int, x, dim, at)
        )

    return [begin(origin) for origin in origins]


def _all_operands(prologue: GraphModule, carried: int, traced: Traced) -> None:
    """Let a function that returns a loop's operands return those that its body has in addition, too."""
    output: Any = prologue.graph.output_node()
    own = list(output.args[0])
    build = Builder(output, like=next(x for x in own if is_tensor(x)))
    added, fixed = (_begin(build, own, origins) for origins in (traced.added, traced.fixed))
    output.args = ((*own[:carried], *added, *own[carried:], *fixed),)
    prologue.recompile()


def _without_writes(traced: Traced) -> GraphModule:
    """Return the body as a function: what it writes is returned after the results."""
    graph = copy.deepcopy(traced.module.graph)
    twins = dict(zip(traced.module.graph.nodes, graph.nodes, strict=True))
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        graph.erase_node(node)
    output: Any = graph.output_node()
    output.args = ((*output.args[0], *(twins[write.content] for write in traced.writes)),)
    graph.eliminate_dead_code()
    differentiable(graph)
    return GraphModule(traced.module, graph)
