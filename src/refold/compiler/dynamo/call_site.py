"""One captured loop where it stands in Dynamo's graph: what it reads and writes, and which of its results are used."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..ir.captured_loop import CapturedLoop, step_count
from ..ir.fx import arg, known, registers_hook
from ..ir.source import name_of
from ..private import tree_leaves
from ..recurrence.delta import IDENTITY
from ..recurrence.vectorize import NotALoop
from .body import Slices, trace
from .capture.lengths import JOINS
from .capture.trace import SHORTEST
from .mutation import changed_in_place, memory, storages, writes

aten = torch.ops.aten

SPLITS = ("split", torch.split, torch.functional.split, torch.Tensor.split, "chunk", torch.chunk, torch.Tensor.chunk)
UNBINDS = ("unbind", torch.unbind, torch.Tensor.unbind, aten.unbind.int)


class CallSite:
    """A call of a captured loop, of which it is known that a scan may replace it.

    Attributes:
        gm: Dynamo's graph.
        call: The node.
        loop: The loop that it calls.
        count: How many steps there are: a number, or a symbol.
        operands: What the loop reads.
        sequences: For each operand that is read step by step, its axis and positions.
        traced: The body in ATen.
        uses: Which results anything uses: (index in the body's results, the node of the loop's result).
        lists: The index from which on results are lists of all steps' values.
        training: Whether a result has a gradient.
    """

    def __init__(self, gm: GraphModule, call: Node) -> None:
        """Look at a call.

        Raises:
            NotALoop: It says why no scan may replace it.
        """
        self.gm, self.call = gm, call
        self.loop = cast(CapturedLoop, gm.get_submodule(str(call.target)))
        self.count = step_count(self.loop, call)
        self.sequences: list[Slices] = []
        self.operands: list[Node] = []
        self._read_operands()
        self._return_views()
        self.traced = trace(self.loop, self.count, [example(node) for node in self.operands], self.sequences)
        added = [_name(self.operands[x.operand], x.back) for x in self.traced.added]
        self.traced.names = (*self.loop.names, *added, *map(name_of, self.operands[self.loop.carried :]))
        self._check_writes()
        self.lists = self.loop.carried + self.loop.lasts
        self.uses = sorted((int(user.args[1]), user) for user in call.users if user.users)  # type: ignore[arg-type, call-overload]
        results = tree_leaves(call.meta["example_value"])
        self.training = any(x.requires_grad for x in results)
        self.mutated = set[Any]()
        changed = changed_in_place(gm, True, call) | self.written()
        for node, own in list(zip(self.operands, self.traced.own, strict=True))[self.loop.carried :]:
            if _is_identity(node) and memory(example(node)) not in changed:
                own.meta[IDENTITY] = True
        self._check_finals()
        self._check_left()
        self._check_aliases()
        if more := len(self.traced.added):
            self.lists += more
            self.uses = [(i + more if i >= self.loop.carried else i, use) for i, use in self.uses]

    def _read_operands(self) -> None:
        loop = self.loop
        args: list[Any] = list(self.call.args if loop.count is not None else self.call.args[:-1])
        for at, read in enumerate(loop.reads, loop.carried):
            source: Any = args[at]
            given = source.meta["example_value"]
            dim, width = 0, None
            if isinstance(given, torch.Tensor):
                pass
            elif source.target in UNBINDS:
                source, dim = unbound(source)
            elif source.target in SPLITS and (parts := _parts(source)) is not None:
                source, dim, width = parts
            else:
                raise NotALoop(
                    "read-uneven",
                    f"the loop goes through `{name_of(source)}`, a list of tensors that are not slices of one tensor",
                )
            rank, size = example(source).dim(), example(source).shape[dim] // (width or 1)
            start = read.start + size if read.start < 0 else read.start
            args[at] = source
            self.sequences.append(Slices(dim % rank, start, read.step, width))
        kinds = (torch.Tensor, torch.SymInt, int)
        for x in args:
            if not (isinstance(x, Node) and isinstance(x.meta.get("example_value"), kinds)):
                number: Any = x.args[0] if isinstance(x, Node) and x.target == "item" else x
                name = name_of(number) if isinstance(number, Node) else number
                raise NotALoop("carry-not-tensor", f"the loop reads `{name}`, which is neither a tensor nor a size")
        self.operands = args

    def _return_views(self) -> None:
        """Let results that are views of what the loop reads be views of it, as the user's loop leaves them."""
        loop, results, changed = self.loop, _results(self.loop), changed_in_place(self.gm)
        read = {storage(x) for x in loop.body.graph.find_nodes(op="placeholder")[loop.carried + 1 :]}
        count: Any = self.call.args[-1] if loop.count is None else loop.count
        for use in [user for user in self.call.users if user.users]:
            i: Any = use.args[1]
            x, back = self._held(results[i]) if i < loop.carried + loop.lasts else (None, 0)
            if isinstance(x, Node) and storage(x) in read:
                with self.gm.graph.inserting_before(self.call), torch.set_grad_enabled(example(use).requires_grad):
                    view = self._outside(x, self._made(operator.sub, count, 1 + back))
                if isinstance(view, Node) and memory(example(view)) not in changed:
                    use.replace_all_uses_with(view)

    def _outside(self, x: Any, step: Any) -> Any:
        """Compute a value of the body outside of the loop; None if it depends on what the loop carries."""
        if not isinstance(x, Node):
            return x
        loop = self.loop
        if x.op == "placeholder":
            at = loop.body.graph.find_nodes(op="placeholder").index(x) - 1
            if at < loop.carried:
                return step if at == loop.carried - 1 else None
            source, item = self.operands[at], at - loop.carried
            if item >= len(self.sequences):
                return source
            read = self.sequences[item]
            position = self._made(operator.add, read.start, self._made(operator.mul, read.step, step))
            if read.width is None:
                return self._made(torch.select, source, read.dim, position)
            return self._made(
                torch.narrow, source, read.dim, self._made(operator.mul, position, read.width), read.width
            )
        inputs = {node: self._outside(node, step) for node in x.all_input_nodes}
        if not x.op.startswith("call_") or any(own is None for own in inputs.values()):
            return None
        args, kwargs = map_arg((x.args, x.kwargs), inputs.get)
        return self._made(x.target, *args, **kwargs)

    def _made(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, or a method, in Dynamo's graph; on numbers alone, call it now."""
        run = target if callable(target) else getattr(torch.Tensor, target)
        found = run(*map_arg(args, example), **map_arg(kwargs, example))
        if isinstance(found, int):
            return found
        node = self.gm.graph.create_node("call_function" if callable(target) else "call_method", target, args, kwargs)
        node.meta = {"example_value": found, "stack_trace": self.call.meta.get("stack_trace", "")}
        return node

    def _held(self, x: Any) -> tuple[Any, int]:
        """Trace a result of the body after the last step to what a step so many before it made, or was given."""
        given = self.loop.body.graph.find_nodes(op="placeholder")[: self.loop.carried]
        after, back = dict(zip(given, _results(self.loop), strict=False)), 0
        most = min(self.count, len(given) + 1) if isinstance(self.count, int) else SHORTEST
        while x in after and back < most - 1:
            x, back = after[x], back + 1
        return x, back

    def written(self) -> set[Any]:
        """Return the storages that the loop itself writes to."""
        places = [write.operand for write in self.traced.writes] + [operand for operand, _ in self.traced.finals]
        return {storage(self.operands[place]) for place in places}

    def bounds(self, write: Any) -> tuple[Any, Any]:
        """Return the positions that all steps write, from the first to before the last."""
        low = min(write.start, write.start + write.step * (self.count - 1))
        return low, low + write.width * self.count

    def _check_writes(self) -> None:
        """Refuse writes that anything else could see in between."""
        for write in self.traced.writes:
            written = self.operands[write.operand]
            if self._is_shared(write.operand):
                reason = f"it writes to `{name_of(written)}`, which is also read, or comes from outside"
                raise NotALoop("shared-memory", reason, write.content)
            if write.operand < self.loop.carried or abs(write.step) != write.width:
                reason = f"the slices of `{name_of(written)}` that the steps write overlap or leave gaps"
                raise NotALoop("write-uneven", reason, write.content)
            whole = (0, known(example(written).shape[write.dim]))
            if not isinstance(self.count, int) and self.bounds(write) != whole:
                reason = f"the loop writes to a part of `{name_of(written)}`, and the size of that part is not known"
                raise NotALoop("size-unknown", reason, write.content)

    def _is_shared(self, operand: int) -> bool:
        """Tell whether an operand shares memory with another one, or with what comes from outside."""
        others = [x for i, x in enumerate(self.operands) if i != operand]
        outside = [x for x in self.gm.graph.nodes if x.op in ("placeholder", "get_attr")]
        return storage(self.operands[operand]) in map(storage, others + outside)

    def _check_finals(self) -> None:
        """Refuse states in place that anything else could see in between."""
        body = self.loop.body.graph
        placeholders, results = body.find_nodes(op="placeholder"), list[Any](body.output_node().args[0])  # type: ignore[arg-type]
        carried, collected = results[: self.loop.carried], results[self.loop.carried + self.loop.lasts :]
        for operand, _ in self.traced.finals:
            if self._is_shared(operand):
                raise NotALoop(
                    "in-place",
                    f"a step changes `{name_of(self.operands[operand])}` in place, which shares memory with an input "
                    "or with another tensor that the loop reads",
                )
            own = storage(placeholders[operand + (operand >= self.loop.carried)])
            handed = [x for at, x in enumerate(carried) if at != operand]
            if own in map(storage, [*handed, *collected]):
                raise NotALoop(
                    "in-place",
                    f"the loop keeps `{name_of(self.operands[operand])}` of each step, and later steps change it in "
                    "place",
                )
            self.mutated.add(own)

    def _check_left(self) -> None:
        """Refuse states that a step changes in place, and then replaces, if anything else could see the change."""
        body = self.loop.body.graph
        placeholders, results = body.find_nodes(op="placeholder"), list[Any](body.output_node().args[0])  # type: ignore[arg-type]
        nodes = list(self.gm.graph.nodes)
        later = set(nodes[nodes.index(self.call) + 1 :])
        for i in self.traced.left:
            first, given, new = self.operands[i], storage(placeholders[i]), storage(results[i])
            own = [x for x in nodes if storage(x) == storage(first)]
            kept = [storage(x) for at, x in enumerate(results) if at != i]
            seen = new in map(storage, placeholders) or new in kept or given in kept
            seen |= any(x.op in ("placeholder", "get_attr") or not later.isdisjoint(x.users) for x in own)
            if seen or any(at != i and storage(x) == storage(first) for at, x in enumerate(self.operands)):
                raise NotALoop(
                    "in-place",
                    f"a step changes `{self.loop.names[i]}` in place before it replaces it, and the tensor is read "
                    "elsewhere",
                )

    def _check_aliases(self) -> None:
        """Refuse if the user could observe that a result is no longer a tensor of its own."""
        changed = changed_in_place(self.gm)
        hooks = [node for node in self.gm.graph.nodes if registers_hook(node)]
        hooked = {memory: node for node in hooks for x in node.all_input_nodes for memory in storages(x)}
        inner: Any = self.loop.body.graph.output_node().args[0]
        escaping: dict[int, Any] = {}
        for i, use in self.uses:
            tensors = tree_leaves(use.meta.get("example_value", self.call.meta["example_value"][i]))
            if any(memory(x) in changed for x in tensors):
                change = next((user for user in use.users if writes(user)), use)
                raise NotALoop(
                    "in-place", f"a result, `{name_of(inner[i])}`, is changed in place after the loop", change
                )
            if hook := next((hooked[memory(x)] for x in tensors if memory(x) in hooked), None):
                # Results of a scan are not computed from one another: a hook on one would miss the others' gradients.
                raise NotALoop("hook", f"a hook is registered on a result, `{name_of(inner[i])}`", hook)
            together = isinstance(self.call.meta["example_value"][i], torch.Tensor)
            if i < self.lists or (
                not together and any(user.target not in JOINS for item in use.users for user in item.users)
            ):
                escaping[i] = inner[i]
        given = self.loop.body.graph.find_nodes(op="placeholder")
        before = {storage(x) for x in given}
        listed = [storage(x) for i, x in escaping.items() if i >= self.lists]
        # Carried tensors whose memory nothing has after the loop: their places then hold what a step made.
        gone = {x for x in given[: self.loop.carried] if not listed and storage(self._held(x)[0]) not in before}
        read = {storage(x) for x in given if x not in gone} - self.mutated
        ends = {i: self._held(x) for i, x in escaping.items() if i < self.lists}
        seen = [(storage(x), back) for x, back in ends.values()] + [(x, 0) for x in listed]
        for i, x in escaping.items():
            end, back = ends.get(i, (x, 0))
            if storage(end) in read or (back and storage(end) in listed) or seen.count((storage(end), back)) > 1:
                raise NotALoop(
                    "shared-memory",
                    f"a result, `{name_of(x)}`, shares memory with another result or with a tensor that the loop reads",
                    x,
                )


def _results(loop: CapturedLoop) -> list[Any]:
    """List a step's results."""
    return list(loop.body.graph.output_node().args[0])  # type: ignore[arg-type]


# What leaves a batch of matrices one, if sizes say so.
_OF_BATCHES = ("to", "type_as", "expand", "expand_as", "unsqueeze", "view", "reshape", "contiguous", "clone", "float")


def _is_identity(node: Node) -> bool:
    """Tell whether a node of Dynamo's graph is an identity matrix, or a batch of these."""
    target, args = node.target, node.args
    if target is torch.eye:
        return len(args) == 1 or args[0] == args[1]
    x, *rest = args or (None,)
    if target is operator.getitem:
        moved = all(at in (None, ..., slice(None)) for at in (rest[0] if isinstance(rest[0], tuple) else rest))
    else:
        moved = node.op == "call_method" and target in _OF_BATCHES
    return moved and isinstance(x, Node) and example(x).shape[-2:] == example(node).shape[-2:] and _is_identity(x)


def unbound(unbind: Any) -> tuple[Node, int]:
    """Read which node is unbound, and along which axis."""
    return unbind.args[0], arg(unbind, 1, "dim", 0)


def _name(tensor: Node, back: int) -> str:
    name = name_of(tensor)
    return f"{name} of {back} step{'s' if back > 1 else ''} ago" if back else name


def _parts(split: Any) -> tuple[Node, int, int] | None:
    """Read which node is split, along which axis, and the size of its parts; None if they have several."""
    source, rank = split.args[0], example(split.args[0]).dim()
    dim = arg(split, 2, "dim", 0) % rank
    sizes = {known(part.shape[dim]) for part in split.meta["example_value"]}
    (width,) = sizes if len(sizes) == 1 else (None,)
    return (source, dim, width) if isinstance(width, int) else None


def example(node: Node) -> torch.Tensor:
    """Return the fake tensor that Dynamo traced a node with."""
    return node.meta.get("example_value")  # type: ignore[return-value]


def storage(node: Node) -> Any:
    """Identify a node's memory: equal for two nodes that share it."""
    x = node.meta.get("example_value")
    return memory(x) if isinstance(x, torch.Tensor) else id(node)
