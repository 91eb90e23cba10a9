"""Turn a captured loop into a scan: the rewrite, its record, and its place in Dynamo's graph."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir.builder import Builder
from ..ir.index import concrete, is_tensor, known, value
from ..ir.rewrite import source_line
from ..passes.reroll_loops import SCANS, dualise
from ..recurrence.affine import Loop
from ..recurrence.vectorize import NotALoop
from .body import Body, Slices, Traced, differentiable, trace
from .loop import step_count
from .mutation import changed_in_place
from .producers import formed, split_off
from .sequential import LoopRewrite, Stepwise, calling

aten = torch.ops.aten


def serial(gm: GraphModule, call: Node) -> str:
    """Describe a captured loop as `refold.compiler.recurrence.serial_chains.serial_loops` describes an unrolled one."""
    loop: Any = gm.get_submodule(str(call.target))
    lines = [source_line(node) for node in loop.body.graph.nodes if node.op.startswith("call")]
    carried = [x for x in loop.body.graph.output_node().args[0][: loop.carried] if x.op.startswith("call")]
    line = source_line(carried[0]) if carried else lines[-1]
    return f"{line} ({concrete(step_count(loop, call))} steps one after another, {lines.count(line)} operations a step)"


def lowering(gm: GraphModule, call: Node, dual: bool = True) -> Lowering:
    """Find the scan that a captured loop is: for all lengths, or else for the one at hand, which then is a guard.

    Raises:
        NotALoop: It says why there is none.
    """
    try:
        return Lowering(gm, call, dual)
    except Exception as error:  # whatever it is, it may be otherwise with numbers for sizes
        if not _make_sizes_known(gm, call):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    found = Lowering(gm, call, dual)
    found.fixed = reason
    return found


def _make_sizes_known(gm: GraphModule, call: Node) -> bool:
    """Make all sizes that a captured loop depends on numbers; tell whether one was not."""
    examples: list[Any] = [node.meta["example_value"] for node in call.all_input_nodes]
    tensors = [x for x in examples if isinstance(x, torch.Tensor)]
    sizes = [n for x in tensors for n in (*x.shape, *x.stride())] + [x for x in examples if isinstance(x, torch.SymInt)]
    symbols = [size for size in sizes if not isinstance(known(size), int)]
    for size in symbols:
        int(size)  # a guard of the compiled program
    return bool(symbols)


class Lowering:
    """One captured loop of a Dynamo graph, as a scan."""

    def __init__(self, gm: GraphModule, call: Node, dual: bool = True) -> None:
        """Find the scan, and unless all its states are wanted its ``dual`` that does not write them.

        Raises:
            NotALoop: It says why there is none.
        """
        self.gm, self.call, self.dual = gm, call, dual
        # Why there is a scan for the sizes at hand only, if so.
        self.fixed = ""
        self.loop: Any = gm.get_submodule(str(call.target))
        loop: Any = self.loop
        self.count = step_count(loop, call)
        self.sequences: list[Slices] = []
        self.operands: list[Node] = []
        self._read_operands()
        examples = [_example(node) for node in self.operands]
        self.traced = trace(loop, self.count, examples, self.sequences)
        self._check_writes()
        # Which results anything uses: (index in the body's results, the node of the loop's result).
        self.lists = loop.carried + loop.lasts
        self.uses = sorted((int(user.args[1]), user) for user in call.users if user.users)  # type: ignore[arg-type, call-overload]
        results = torch.utils._pytree.tree_leaves(call.meta["example_value"])
        self.training = any(x.requires_grad for x in results)
        self._check_aliases()
        before = formed(self.operands, changed_in_place(gm, True, call) | self._written()) if dual else set()
        self.rewrite = self._rewrite(before)
        if before and not self.dual:  # what is before the loop is not needed to keep the states
            self.dual = dual
            self.rewrite = self._rewrite(set())

    def _read_operands(self) -> None:
        loop: Any = self.loop
        args: list[Any] = list(self.call.args if loop.count is not None else self.call.args[:-1])
        for at, read in enumerate(loop.reads, loop.carried):
            source: Any = args[at]
            given = source.meta["example_value"]
            dim = 0
            if isinstance(given, torch.Tensor):
                pass
            elif source.target in _UNBINDS:
                source, dim = _unbound(source)
            else:
                raise NotALoop("it reads a list of tensors that are not slices of one")
            rank, size = _example(source).dim(), _example(source).shape[dim]
            start = read.start + size if read.start < 0 else read.start
            args[at] = source
            self.sequences.append(Slices(dim % rank, start, read.step))
        kinds = (torch.Tensor, torch.SymInt, int)
        if not all(isinstance(x, Node) and isinstance(x.meta.get("example_value"), kinds) for x in args):
            raise NotALoop("it reads something that is neither a tensor nor a size")
        self.operands = args

    def _written(self) -> set[Any]:
        """Return the storages that the loop itself writes to."""
        return {_storage(self.operands[write.operand]) for write in self.traced.writes}

    def _check_writes(self) -> None:
        """Refuse writes that anything else could see in between."""
        for write in self.traced.writes:
            written = self.operands[write.operand]
            storage = _storage(written)
            others = [x for i, x in enumerate(self.operands) if i != write.operand]
            outside = [x for x in self.gm.graph.nodes if x.op in ("placeholder", "get_attr")]
            if any(_storage(x) == storage for x in others + outside):
                raise NotALoop("it writes to a tensor that is also read, or that comes from outside")
            if write.operand < self.loop.carried or abs(write.step) != write.width:
                raise NotALoop("the steps do not write next to one another")
            whole = (0, known(_example(written).shape[write.dim]))
            if not isinstance(self.count, int) and self._bounds(write) != whole:
                raise NotALoop("it writes to a part of a tensor whose size is not known")

    def _check_aliases(self) -> None:
        """Refuse results of which anybody could see that they are no longer the user's own tensors."""
        changed = changed_in_place(self.gm)
        inner: Any = self.loop.body.graph.output_node().args[0]
        escaping = []
        for i, use in self.uses:
            tensors = torch.utils._pytree.tree_leaves(use.meta.get("example_value", self.call.meta["example_value"][i]))
            if any(x.untyped_storage()._cdata in changed for x in tensors):
                raise NotALoop("a result is changed in place after the loop")
            together = isinstance(self.call.meta["example_value"][i], torch.Tensor)
            if i < self.lists or (
                not together and any(user.target not in _JOINS for item in use.users for user in item.users)
            ):
                escaping.append(_storage(inner[i]))
        shared = [_storage(node) for node in self.loop.body.graph.find_nodes(op="placeholder")] + escaping
        if any(shared.count(storage) > 1 for storage in escaping):
            raise NotALoop("a result shares memory with another or with what the loop reads")

    def _rewrite(self, before: set[Node]) -> LoopRewrite:
        loop, traced = self.loop, self.traced
        self.inputs, prologue = split_off(self.operands, before, traced.mode)
        graph, copies = Graph(), dict[Node, Node]()
        operands: Any = graph.graph_copy(prologue.graph, copies)
        first = next(x for x in operands if is_tensor(x))
        anchor = graph.call_function(aten.alias.default, (first,))
        anchor.meta = {"val": value(first), "stack_trace": self.call.meta.get("stack_trace", "")}
        body = Body(loop, self.count, traced, operands, anchor, self.training)
        results: dict[int, Node] = {i: body.over_time(traced.results[i]) for i, _ in self.uses if i >= self.lists}
        contents = [body.over_time(write.content) for write in traced.writes]
        for i, _ in self.uses:
            if i < self.lists:
                body.last(traced.results[i])  # the scan after it must be there before any is replaced
        output = graph.output((*results.values(), *contents))
        for found in body.loops if self.dual else []:
            dualise(body, found, output)
        self.dual = any(found.operator != "linear_scan" for found in body.loops)
        made: Any = output.args[0]
        results = dict(zip(results, made, strict=False))
        contents = made[len(results) :]
        body.emit.settle()
        for i, _ in self.uses:
            if i < self.lists:
                like = traced.results[i]
                build = Builder(anchor)
                results[i] = build.restride(body.last(like), value(like))
        wanted = [i for i, _ in self.uses]
        graph.erase_node(output)
        graph.output((*(results[i] for i in wanted), *contents))
        graph.erase_node(anchor)
        graph.eliminate_dead_code()
        differentiable(graph)
        graph.lint()
        if not any(node.target in SCANS for node in graph.nodes) and body.loops:
            raise NotALoop("nothing that is used depends on the carry")
        inner_body = _without_writes(traced)
        extra = range(len(traced.results), len(traced.results) + len(contents))
        count = concrete(self.count)  # of the inputs that it is checked and timed on
        steps = Stepwise(prologue, inner_body, count, loop.carried, [*wanted, *extra], self.lists)
        candidate = GraphModule({}, graph)
        detail = _detail(self.count, body.loops)
        return LoopRewrite(
            name="roll up loop",
            site=self.call.name,
            source=serial(self.gm, self.call).rsplit(" (", 1)[0],
            why="its steps wait for one another, one launch after the other",
            detail=detail,
            original=calling(steps, graph),
            candidate=candidate,
            inputs=tuple(node.name for node in self.inputs),
            multilinear=False,
            terms=count,
            spread=0.1,
            differentiated=tuple(_has_gradient(_example(x)) for x in self.inputs) if self.training else (),
            steps=steps,
        )

    # Into Dynamo's graph -----------------------------------------------------------------------

    def splice(self) -> None:
        """Put the scan where the loop was."""
        graph, call = self.gm.graph, self.call
        copies: dict[Any, Node] = {}
        source = self.rewrite.candidate.graph
        for placeholder, node in zip(source.find_nodes(op="placeholder"), self.inputs, strict=True):
            copies[placeholder] = node
        with graph.inserting_before(call):
            for node in source.nodes:
                if node.op == "call_function":
                    copies[node] = graph.node_copy(node, lambda n: copies[n])
                    copies[node].meta = {
                        "example_value": node.meta["val"],
                        "stack_trace": call.meta.get("stack_trace", ""),
                    }
            results = [copies[node] for node in source.output_node().args[0]]  # type: ignore[union-attr]
            for write, content in zip(self.traced.writes, results[len(self.uses) :], strict=True):
                self._write(write, content)
        for (i, use), new in zip(self.uses, results, strict=False):
            if i < self.lists:
                use.replace_all_uses_with(new)
            else:
                self._replace_list(use, new)
        sequences = call.all_input_nodes  # of which an erased node knows nothing
        for use in list(call.users):
            graph.erase_node(use)
        graph.erase_node(call)
        _drop_items(graph, sequences)

    def _write(self, write: Any, content: Node) -> None:
        """Write all steps' values at once."""
        graph, dim = self.gm.graph, write.dim
        target = self.operands[write.operand]
        # What reads the tensor after this loop must see that it has changed.
        written, sliced = _example(target), _example(content).dim() > _example(target).dim()
        low, high = self._bounds(write)
        if isinstance(self.count, int):
            target = graph.call_function(aten.slice.Tensor, (target, dim, low, high))
            target.meta["example_value"] = aten.slice.Tensor(written, dim, low, high)
        if write.step < 0:
            content = graph.call_function(aten.flip.default, (content, [0]))
        content = graph.call_function(torch.movedim, (content, 0, dim))
        if sliced:
            content = graph.call_function(torch.flatten, (content, dim, dim + 1))
        graph.call_function(aten.copy_.default, (target, content))

    def _bounds(self, write: Any) -> tuple[Any, Any]:
        """Return between which positions all steps write."""
        low = min(write.start, write.start + write.step * (self.count - 1))
        return low, low + write.width * self.count

    def _replace_list(self, items: Node, stacked: Node) -> None:
        """Let what used the list of all steps' values use the stack."""
        graph = self.gm.graph
        if isinstance(items.meta["example_value"], torch.Tensor):
            with graph.inserting_before(items):
                whole = graph.call_method("contiguous", (stacked,))
            whole.meta["example_value"] = items.meta["example_value"]
            items.replace_all_uses_with(whole)
            return
        position: dict[Node, int] = {node: node.args[1] for node in items.users if node.target is operator.getitem}  # type: ignore[misc]
        joins = {user: None for node in position for user in node.users if user.target in _JOINS}
        for join in joins:
            self._replace_join(join, position, stacked)
        for node in list(position):
            if not node.users:
                graph.erase_node(node)
        if items.users:
            with graph.inserting_before(items):
                dense = graph.call_method("contiguous", (stacked,))
                whole = graph.call_function(torch.unbind, (dense, 0))
            dense.meta["example_value"] = stacked.meta["example_value"].contiguous()
            whole.meta["example_value"] = items.meta["example_value"]
            items.replace_all_uses_with(whole)

    def _replace_join(self, join: Any, position: dict[Node, int], stacked: Node) -> None:
        tensors = list(join.args[0] if join.args else join.kwargs["tensors"])
        dim = join.args[1] if len(join.args) > 1 else join.kwargs.get("dim", 0)
        rank = _example(join).dim()
        dim %= rank
        new_axis = join.target is torch.stack
        graph, parts, at = self.gm.graph, [], 0
        with graph.inserting_before(join):
            while at < len(tensors):
                run = _run_from(tensors, at, position)
                if run == 1:
                    one = tensors[at]
                    parts.append(graph.call_function(torch.unsqueeze, (one, dim)) if new_axis else one)
                else:
                    first, last = position[tensors[at]], position[tensors[at + run - 1]]
                    low, high = min(first, last), max(first, last) + 1
                    x = graph.call_function(aten.slice.Tensor, (stacked, 0, low, high))
                    if last < first:
                        x = graph.call_function(aten.flip.default, (x, [0]))
                    x = graph.call_function(torch.movedim, (x, 0, dim))
                    parts.append(x if new_axis else graph.call_function(torch.flatten, (x, dim, dim + 1)))
                at += run
            if len(parts) > 1:
                new = graph.call_function(torch.cat, (parts, dim))
            else:
                new = graph.call_method("contiguous", (parts[0],))
        new.meta = dict(join.meta)
        join.replace_all_uses_with(new)
        graph.erase_node(join)


_JOINS = (torch.stack, torch.cat, torch.concat, torch.concatenate)


def _run_from(tensors: list[Any], at: int, position: dict[Node, int]) -> int:
    """Return how many tensors from here on are neighbours in the list of all steps, in one direction."""
    run = 1
    while at + run < len(tensors):
        a, b = (position.get(tensors[at + run - i]) for i in (1, 0))
        if (
            a is None
            or b is None
            or abs(b - a) != 1
            or (run > 1 and b - a != position[tensors[at + 1]] - position[tensors[at]])
        ):
            break
        run += 1
    return run


_UNBINDS = ("unbind", torch.unbind, torch.Tensor.unbind, aten.unbind.int)


def _unbound(unbind: Any) -> tuple[Node, int]:
    """Return what is unbound, and along which axis."""
    return unbind.args[0], unbind.args[1] if len(unbind.args) > 1 else unbind.kwargs.get("dim", 0)


def _drop_items(graph: Graph, sequences: list[Node]) -> None:
    """Erase what Dynamo unpacked to iterate over; the few items that are still used are selected one by one."""
    for sequence in sequences:
        for item in list(sequence.users):
            if item.target is operator.getitem and not item.users:
                graph.erase_node(item)
        if sequence.target in _UNBINDS and all(item.target is operator.getitem for item in sequence.users):
            source, dim = _unbound(sequence)
            for item in list(sequence.users):
                with graph.inserting_before(item):
                    new = graph.call_function(torch.select, (source, dim, item.args[1]))
                new.meta = dict(item.meta)
                item.replace_all_uses_with(new)
                graph.erase_node(item)
            graph.erase_node(sequence)


def _example(node: Node) -> torch.Tensor:
    return node.meta["example_value"]


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()


def _storage(node: Node) -> Any:
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if isinstance(example, torch.Tensor) else id(node)


def _detail(count: Any, loops: list[Loop]) -> str:
    if not loops:
        return f"{count if isinstance(count, int) else 'any number of'} steps that carry nothing, all at once"
    return loops[0].described


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
