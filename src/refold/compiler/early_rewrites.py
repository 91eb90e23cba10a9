"""Rewrites of a graph as Dynamo gives it, before autograd: captured loops, and parts of a forward."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .compile_time import WITH_BACKWARD
from .dynamo import rewriting_before_autograd
from .inductor import clone_inputs, duplicate, with_part
from .ir.captured_loop import captured_loops, loop_nodes, parts
from .ir.cost import Cost, computing, has_pointwise_kernels
from .ir.evaluate import values_at
from .ir.rewrite import Rewrite
from .options import Options
from .passes.reroll_loops import STAYS
from .record import Judge, Record
from .recurrence.vectorize import NotALoop
from .validate.region import Judgement


class EarlyRewrites:
    """Rewrites a graph before autograd.

    Args:
        gm: The graph.
        inputs: The values it was captured with.
        options: How it is compiled.
        mode: ``training`` or ``inference``.
        record: Which rewrites are wanted; those that are made are written there.
        judge: Judges rewrites.
        notes: What is to be told, which grows.
        gradients: Whether gradients may be taken of scans; so in training unless given.

    Attributes:
        gm: The graph, rewritten.
        operations_saved: How many operations fewer Inductor generates code for, backward included.
        checks_s: Seconds of checks.
        loops: The captured loops that are scans now, described.
    """

    def __init__(
        self, gm: GraphModule, inputs: Sequence[Any], options: Options, mode: str, record: Record,
        judge: Judge, notes: list[str], gradients: bool | None = None,
    ) -> None:  # fmt: skip
        self.gm, self.operations_saved, self.checks_s, self.loops = gm, 0, 0.0, list[str]()
        self._inputs, self._options, self._training = inputs, options, mode == "training"
        self._record, self._judge, self._notes = record, judge, notes
        self._gradients = self._training if gradients is None else gradients
        # Why loops stay, by the parts of the graph that they are in and their names.
        self._stay: dict[tuple[tuple[str, ...], str], str] = {}

    def rewrite(self) -> Cost:
        """Replace what stands; return what that saves.

        Loops over chunks become scans last: what is around them may be more than the scans that they are.
        """
        saved = self._rewrite_captured(chunks=False) + self._rewrite_forward()
        before = len(self.loops)
        saved += self._rewrite_captured(chunks=True)
        if len(self.loops) > before:
            saved += self._rewrite_forward()
        left = [(path, call.name) for path in parts(self.gm) for call in captured_loops(self._part(path))]
        self._notes += [self._stay[key] for key in left if key in self._stay]
        return saved

    def _part(self, path: Sequence[str]) -> Any:
        return self.gm.get_submodule(".".join(path))

    def _rewrite_captured(self, chunks: bool) -> Cost:
        """Replace captured loops by scans, where that stands; return what they cost more than their scans.

        With ``chunks``, those that take chunks of tokens where operators have kernels, else all others.
        """
        saved = Cost()
        for path in parts(self.gm):
            part = self._part(path)
            loops = captured_loops(part).items()
            names = [x.name for x, loop in loops if (_has_kernels(x.all_input_nodes) and loop.takes_chunks) == chunks]
            if not names:
                continue
            from .dynamo.to_scan import describe_loop

            part = duplicate(part)
            self.gm = with_part(self.gm, path, part)
            for name in names:
                call = next(node for node in part.graph.nodes if node.name == name)
                loop = describe_loop(part, call)
                try:
                    found = self._as_operator(part, path, call)
                except NotALoop as reason:
                    self._stay[path, name] = f"{STAYS} {reason.told_of(loop)}"
                    continue
                if found is not None:
                    found.splice()
                    self.loops.append(loop)
                    before, after = found.rewrite.before, found.rewrite.after
                    saved += Cost(before.flops - after.flops, before.bytes - after.bytes)
            part.recompile()
        return saved

    def _as_operator(self, part: GraphModule, path: tuple[str, ...], call: Node) -> Any:
        """Return a captured loop of a part of the graph as the scan that stands; None if none does."""
        from .dynamo.to_scan import find_scan

        for dual in (True, False):
            key = ":".join(["captured", *path, call.name, str(dual)])
            if not self._record.wants(key):
                continue
            with torch.set_grad_enabled(self._gradients):
                found = find_scan(part, call, dual)
            self._options.choose.tune(found.rewrite.candidate.graph)
            start = time.perf_counter()
            verdict = self._judged(found.rewrite, path)
            self.checks_s += time.perf_counter() - start
            row = self._record.note(key, found.rewrite, verdict)
            if row.status != "refused":
                self._record.apply(key, found.rewrite)
                self._notes += found.notes
                return found
            if not found.dual:
                break  # else what does not write the states rounds too much, or is slower
        return None

    def _rewrite_forward(self) -> Cost:
        """Rewrite the ATen graph of a forward before autograd; return what that saves."""
        saved, training = Cost(), self._training
        if (tools := _tools(self.gm, training)) is None:
            return saved
        if not training and (self._options.rules or self._options.choose.passes is not None):
            return saved  # they are for the graph as AOTAutograd gives it
        for path in parts(self.gm):
            key = ":".join(["forward", *path]) + ":"
            while True:
                wanted = functools.partial(self._wants, key)
                found = tools.find_rewrites(self.gm, path, wanted, self._notes, self._record.known, training)
                if found is None:
                    break
                rows = []
                start = time.perf_counter()
                for rewrite in found.rewrites:
                    verdict = self._judged(rewrite, path)
                    rows.append(self._record.note(key + rewrite.site, rewrite, verdict))
                self.checks_s += time.perf_counter() - start
                if any(row.status == "refused" for row in rows):
                    continue  # the others may be otherwise without it
                for rewrite in found.rewrites:
                    self._record.apply(key + rewrite.site, rewrite)
                    before, after = rewrite.before, rewrite.after
                    saved += Cost(before.flops - after.flops, before.bytes - after.bytes)
                    fewer = computing(rewrite.original.graph.nodes) - computing(rewrite.candidate.graph.nodes)
                    self.operations_saved += (WITH_BACKWARD if training else 1) * fewer
                self.gm = with_part(self.gm, path, found.spliced())
                break
        return saved

    def _wants(self, key: str, site: str) -> bool:
        return self._record.wants(key + site)

    def _judged(self, rewrite: Rewrite, path: tuple[str, ...]) -> Judgement | None:
        """Judge a rewrite of Dynamo's graph, or of a part of it, on the values that it gets from the user's inputs."""
        return self._judge(rewrite, lambda: self._values(rewrite.inputs, path))

    def _values(self, names: Sequence[str], path: tuple[str, ...]) -> list[Any]:
        """Return the values of nodes of Dynamo's graph, or of a part of it that is checkpointed."""
        graph, inputs = self.gm.graph, clone_inputs(self._inputs)
        for name in path:
            call = next(iter(next(node for node in graph.nodes if node.target == name).users))
            given: list[Any] = list(call.args[1:])
            inner = values_at(graph, [x.name for x in given if isinstance(x, Node)], inputs)
            inputs = [inner[x.name] if isinstance(x, Node) else x for x in given]
            graph = graph.owning_module.get_submodule(name).graph  # type: ignore[union-attr, assignment]
        found = values_at(graph, names, inputs)
        return [found[name] for name in names]


def _has_kernels(nodes: Sequence[Node]) -> bool:
    given = [node.meta.get("example_value") for node in nodes]
    return any(isinstance(x, torch.Tensor) and has_pointwise_kernels(x.device) for x in given)


def _tools(gm: GraphModule, training: bool) -> Any:
    """Return the module that rewrites graphs before autograd; None if PyTorch lacks what it needs, or it is of no use.

    In inference it is of use on devices where a convolution or a norm becomes an operator, and where loops stayed.
    """
    pays = training or loop_nodes(gm) > 0 or _has_kernels(gm.graph.find_nodes(op="placeholder"))
    return rewriting_before_autograd() if pays else None
