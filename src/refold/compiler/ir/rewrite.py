"""A rewrite: one region of a graph, what it was, what it became, and what that saves."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..private import without_modes
from .builder import between, extract, region_inputs, upstream
from .cost import Cost, graph_cost
from .source import source_line


@dataclass(frozen=True, eq=False)
class Rewrite:
    """One change to a graph.

    Attributes:
        name: The pass that made it, as an imperative phrase.
        site: Name of the node that was replaced; stable from one trace of a module to the next. That of a rule goes on
            with a colon and the rule's name.
        source: The user's line, ``file:line: code``; empty if the tracer did not keep it.
        why: What is wasteful about the original, in a few words.
        detail: What was recognised, e.g. the einsum with its sizes.
        original: The region as it was; takes the region's inputs, returns one tensor, or several.
        candidate: The region as it became; same inputs, same output shape, dtype and strides.
        inputs: Names of the region's inputs in the graph.
        multilinear: Whether the region is a sum of products, so that small integers come out exactly.
        terms: How many products are added up for one output element.
        timed_alone: Whether timing the region by itself means anything. It does not when the candidate
            does no arithmetic, or pays off by being fused with what surrounds it; then only the race
            of the whole graph decides.
        spread: Standard deviation of the random inputs of the check. A recurrence over many steps
            overflows at one: there is nothing to compare then.
        differentiated: For each input, whether its gradient must be right as well; empty if no gradient is taken.
        coupled: How many values a recurrence carries that depend on one another.
        rounds_more: Whether the candidate rounds to 16 bits what the original, of 16-bit inputs, does not.
        guessed: Whether only a check can tell that it is right: it is checked even where nothing else is.
        result: Name of the node that stands for the replaced one.
    """

    name: str
    site: str
    source: str
    why: str
    detail: str
    original: GraphModule
    candidate: GraphModule
    inputs: tuple[str, ...]
    multilinear: bool
    terms: int
    timed_alone: bool = True
    spread: float = 1.0
    differentiated: tuple[bool, ...] = ()
    coupled: int = 1
    rounds_more: bool = False
    guessed: bool = False
    result: str = ""

    @cached_property
    def before(self) -> Cost:
        """FLOPs and bytes of the region as it was."""
        return graph_cost(self.original.graph.nodes)

    @cached_property
    def after(self) -> Cost:
        """FLOPs and bytes of the region as it became."""
        return graph_cost(self.candidate.graph.nodes)

    @cached_property
    def size(self) -> int:
        """Number of nodes of the original."""
        return len(self.original.graph.nodes)

    @cached_property
    def signature(self) -> str:
        """A digest of both programs and their input types: equal regions need one check."""
        return digest(self.candidate, canonical(self.original))


def digest(candidate: GraphModule, *facts: object) -> str:
    """Return a digest of a program, the types of its inputs, and more facts."""
    types = [str(_kind(n.meta.get("val"))) for n in candidate.graph.find_nodes(op="placeholder")]
    text = "\n".join([*types, canonical(candidate), *map(str, facts)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kind(val: object) -> object:
    return (tuple(val.shape), val.dtype, val.device, val.stride()) if isinstance(val, torch.Tensor) else val


def canonical(gm: GraphModule) -> str:
    """Return a graph as text in which nodes are numbered: names differ between equal regions of one graph."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}

    def number(node: Node) -> str:
        return f"%{position[node]}"

    def called(node: Node) -> str:
        if node.op != "get_attr":
            return str(node.target if node.op == "call_function" else node.op)
        constant: Any = getattr(gm, str(node.target), None)
        if isinstance(constant, GraphModule):
            return canonical(constant)
        if type(constant) is not torch.Tensor:
            return f"{type(constant)} {id(constant)}"
        with without_modes() or nullcontext():
            content = constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"constant {_kind(constant)} {hashlib.sha256(content.tobytes()).hexdigest()}"

    return "\n".join(
        f"{called(node)} {torch.fx.node.map_arg((node.args, node.kwargs), number)}" for node in gm.graph.nodes
    )


def _is_fraction(x: object) -> bool:
    """Tell whether a product of integers and this number may be rounded."""
    return isinstance(x, float) and math.isfinite(x) and not (x * 2**10).is_integer()


def replace_node(
    old: Node | Sequence[Node], new: Node | Sequence[Node], *, inside: Iterable[Node] = (), added: Iterable[Node],
    name: str, why: str, detail: str, multilinear: bool, terms: int, timed_alone: bool = True, spread: float = 1.0,
    rounds_more: bool = False, guessed: bool = False, site: str = "",
) -> Rewrite:  # fmt: skip
    """Swap a node for another, or several at once for as many others, and return the record of it.

    Args:
        old: The node whose value is now computed otherwise, or several. The rewrite is named after the first.
        new: The node that computes it, or as many.
        inside: Further nodes of the original computation than those between what the new one reads and ``old``.
        added: Nodes made for the new computation, and those of ``inside`` that it reads as well.
        name: See `Rewrite`, as for the rest.
        why: See `Rewrite`.
        detail: See `Rewrite`.
        multilinear: See `Rewrite`.
        terms: See `Rewrite`.
        timed_alone: See `Rewrite`.
        spread: See `Rewrite`.
        rounds_more: See `Rewrite`.
        guessed: See `Rewrite`.
        site: See `Rewrite`; the name of ``old`` unless given.
    """
    olds, news = ([x] if isinstance(x, Node) else list(x) for x in (old, new))
    order = {node: i for i, node in enumerate(olds[0].graph.nodes)}
    read = {x for node in news for x in region_inputs(node, added)}
    # No input of the region may be computed from what the new computation reads: values that a check makes up for both
    # would not fit together, and a gradient would flow to one of them only.
    inside = (set(inside) | {x for node in olds for x in between(node, read)}) & set[Node]().union(*map(upstream, olds))
    inputs = {x for node in olds for x in region_inputs(node, inside)} | read
    if inputs & inside:
        raise AssertionError(f"the rewrite of {olds[0]} reads {inputs & inside}, which it replaces")
    ordered = sorted(inputs, key=order.__getitem__)
    original = extract(old, ordered)
    record = Rewrite(
        name=name,
        site=site or olds[0].name,
        source=source_line(olds[0]),
        why=why,
        detail=detail,
        original=original,
        candidate=extract(new, ordered),
        inputs=tuple(node.name for node in ordered),
        multilinear=multilinear and not any(_is_fraction(x) for node in original.graph.nodes for x in node.args),
        terms=terms,
        timed_alone=timed_alone,
        spread=spread,
        rounds_more=rounds_more,
        guessed=guessed,
        result=news[0].name,
    )
    for a, b in zip(olds, news, strict=True):
        a.replace_all_uses_with(b)
    return record
