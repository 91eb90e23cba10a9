"""Drive Inductor: hand it a graph, get at the ATen graph before code is generated, get a callable back.

Dynamo and AOTAutograd do the work of capture. `Hook` is one of Inductor's custom passes on the joint or inference
graph. It runs after functionalisation and autograd. So aliasing, mutation and gradients are explicit, and a rewrite
need not know of them. Design decision 1.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from .. import __version__
from ..errors import first_line
from ..ops.torch.nodes import AT_ONCE
from .complex_values import lay_out_complex_values
from .external_cumsum import keep_scans_external
from .ir.fx import SizesFixed, concrete, until_fixed
from .private import (
    CustomGraphPass,
    TraceAgain,
    apart,
    compile_fx,
    inductor_config,
    with_backward,
    without_autograd_cache,
    write_calls_at_once,
)

Compiled = Callable[..., Any]


class Stopped(Exception):
    """Raised by a hook to end a compile after the graph has been seen."""


class Hook(CustomGraphPass):
    """Calls back with every ATen graph that one compile produces, numbered in order.

    Args:
        visit: Called with the number and the graph.
        outcome: Names what the callback makes of any graph whose compile it does not stop.
        cached: Whether AOTAutograd's cache, which knows the graph before the pass, is asked. Where it knows the result,
            the callback is not called.
        notes: Gets a sentence if sizes became numbers by the callback, and all began again.
    """

    def __init__(
        self, visit: Callable[[int, Graph], None], outcome: str = "", cached: bool = False,
        notes: list[str] | None = None,
    ) -> None:  # fmt: skip
        self.visit = visit
        self.outcome, self.cached = outcome, cached
        self.notes: list[str] = [] if notes is None else notes
        self.count = 0
        self.stopped = False
        # What the callback raised otherwise: Inductor may wrap it, and it is not Inductor's failure.
        self.error: Exception | None = None

    def __call__(self, graph: Graph) -> None:
        """Visit one graph; may edit it in place or raise `Stopped`."""
        index, self.count = self.count, self.count + 1
        try:
            with torch.no_grad():  # autograd is over: passes need not care for the gradients of what they make
                self.visit(index, graph)
        except Stopped:
            self.stopped = True
            raise
        except Exception as error:
            self.error = error
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        """Return itself: PyTorch copies Inductor's settings while it traces, and a hook knows the user's tensors."""
        return self

    def uuid(self) -> str:
        """Identify the pass to the caches of Inductor, keyed by the graph *after* it, and of AOTAutograd."""
        return f"refold-{__version__}-{self.outcome}"


class _Chain(CustomGraphPass):
    """The user's own pass, then ours."""

    def __init__(self, first: Any, second: Hook) -> None:
        self.first, self.second = first, second

    def __call__(self, graph: Graph) -> None:
        self.first(graph)
        self.second(graph)

    def uuid(self) -> Any:
        first = self.first.uuid() if hasattr(self.first, "uuid") else None
        return None if first is None else (first, self.second.uuid())


def inductor(
    gm: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, notes: list[str] | None = None
) -> Compiled:
    """Compile a Dynamo graph with Inductor as it is; cumulative sums that it has no code for are left to ATen.

    Args:
        gm: The graph; not changed.
        inputs: The values that Dynamo traced with.
        options: Inductor options, as for ``torch.compile(options=...)``.
        notes: Gets a sentence if sums are left to ATen.
    """
    try:
        return inductor_with(gm, inputs, None, options)
    except (TraceAgain, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Inductor's failures have no common type
        failure = error
    for sizes in itertools.count(1):

        def visit(index: int, graph: Graph, sizes: int = sizes) -> None:
            if keep_scans_external(graph, sizes) < sizes and not index:
                raise Stopped  # no more sums could be left to ATen

        hook = Hook(visit, f"external sums of {sizes} sizes", cached=True)
        try:
            compiled = inductor_with(gm, inputs, hook, options)
        except Exception:
            if hook.stopped or not hook.count:
                break
            continue
        if notes is not None and (note := sums_are_external(failure)) not in notes:
            notes.append(note)
        return compiled
    raise failure


def sums_are_external(failure: Exception) -> str:
    """Say why cumulative sums are left to ATen."""
    what = first_line(failure)
    return f"Inductor failed ({what}); cumulative sums are handed to ATen, smallest first, until it compiles"


def inductor_with(
    gm: GraphModule, inputs: Sequence[Any], hook: Hook | None, options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compile a Dynamo graph with Inductor, once, whatever comes of it.

    Args:
        gm: The graph; not changed.
        inputs: The values that Dynamo traced with.
        hook: Sees, and may edit, each ATen graph.
        options: Inductor options, as for ``torch.compile(options=...)``.
    """
    write_calls_at_once(AT_ONCE)
    patches = dict(options or {})
    if hook is not None:
        _add(patches, "joint_custom_pre_pass", hook)
    apart_from_cache = hook is not None and not hook.cached

    def attempt() -> Compiled:
        if hook is not None:
            hook.count, hook.error = 0, None
        try:
            return compile_fx(duplicate(gm), list(inputs), config_patches=patches or None)  # type: ignore[return-value]
        except Exception:
            if hook is not None and isinstance(hook.error, SizesFixed):  # Inductor may have wrapped it
                raise hook.error from None
            raise

    compiled = functools.partial(until_fixed, attempt, [] if hook is None else hook.notes)
    with without_autograd_cache() if apart_from_cache else contextlib.nullcontext(), with_backward():
        try:
            return compiled()
        except Exception as error:
            if "complex" not in str(error) or (hook is not None and hook.error is not None):
                raise
            _add(patches, "post_grad_custom_post_pass", Hook(lambda _, graph: lay_out_complex_values(graph)))
            # The first error says more. Inductor warns of complex values, which is an error where warnings are errors.
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*complex")
                return compiled()
            raise


def _add(patches: dict[str, Any], name: str, hook: Hook) -> None:
    """Put a hook among Inductor's options, after the user's own pass."""
    user = patches.get(name, getattr(inductor_config, name))
    patches[name] = hook if user is None else _Chain(user, hook)


def show_graph(gm: GraphModule, inputs: Sequence[Any], look: Callable[[Graph], object]) -> list[str]:
    """Show the first ATen graph that Inductor makes of a Dynamo graph; generate no code.

    Args:
        gm: The graph; not changed.
        inputs: The values that Dynamo traced with.
        look: Called with the ATen graph, which it may edit.

    Returns:
        Sentences of what was met on the way.
    """

    def visit(index: int, graph: Graph) -> None:
        look(graph)
        raise Stopped

    hook = Hook(visit)
    try:
        inductor_with(gm, inputs, hook)
    except Exception:
        if hook.error is not None:
            raise hook.error from None
        if not hook.stopped:
            raise
    return hook.notes


def standalone(
    gm: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, notes: list[str] | None = None
) -> Compiled:
    """Compile a graph for exactly these inputs, apart from whatever compile is under way; see `inductor`."""
    with apart():
        return inductor(gm, inputs, options=options, notes=notes)


def duplicate(gm: GraphModule) -> GraphModule:
    """Copy a graph module's graph; parameters, buffers and attributes stay shared."""
    twin = GraphModule(gm, copy.deepcopy(gm.graph))
    # Dynamo leaves notes for AOTAutograd on the module and on its placeholders.
    for old, new in [(gm, twin), *zip(gm.graph.nodes, twin.graph.nodes, strict=True)]:
        for name, entry in vars(old).items():
            vars(new).setdefault(name, entry)
    twin.meta = dict(getattr(gm, "meta", {}))
    return twin


def with_part(gm: GraphModule, path: tuple[str, ...], part: GraphModule) -> GraphModule:
    """Return a graph with another part; the graph itself is not changed."""
    if not path:
        return part
    twin, inner = duplicate(gm), gm.get_submodule(path[0])
    setattr(twin, path[0], with_part(inner, path[1:], part))  # type: ignore[arg-type]
    return twin


def bind(graph: Graph, inputs: Sequence[Any]) -> list[Any] | None:
    """Match the placeholders of an ATen graph with a compile's inputs.

    Returns:
        A value for each placeholder, tangents drawn at random; None if the graph takes something
        else (a subgraph, or inputs that AOTAutograd merged because they alias).
    """
    values: list[Any] = []
    rest = list(inputs)
    generator = torch.Generator().manual_seed(0)
    for node in graph.find_nodes(op="placeholder"):
        expected = node.meta.get("val")
        if str(node.target).startswith("tangents") and isinstance(expected, torch.Tensor):
            shape = [concrete(size) for size in expected.shape]
            drawn = torch.randn(shape, generator=generator) if expected.is_floating_point() else torch.zeros(shape)
            values.append(drawn.to(expected.device, expected.dtype))
            continue
        if not rest:
            return None
        got = rest.pop(0)
        if isinstance(expected, torch.Tensor) != isinstance(got, torch.Tensor):
            return None
        if isinstance(got, torch.Tensor) and (
            type(got) not in (torch.Tensor, torch.nn.Parameter)
            or (got.dtype, got.device, got.dim()) != (expected.dtype, expected.device, expected.dim())
            or any(isinstance(e, int) and e != g for e, g in zip(expected.shape, got.shape, strict=True))
        ):
            return None
        values.append(got.detach() if isinstance(got, torch.Tensor) else concrete(got))
    return None if rest else values


def clone_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Copy tensors so that a trial run cannot touch the user's; storage shared between inputs stays shared."""
    storages: dict[int, torch.UntypedStorage] = {}
    clones: list[Any] = []
    for x in inputs:
        if not isinstance(x, torch.Tensor):
            clones.append(concrete(x))
            continue
        storage = x.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()
        own = storages[storage.data_ptr()] if storage.nbytes() else storage.clone()
        twin = torch.empty(0, dtype=x.dtype, device=x.device)
        twin.set_(own, x.storage_offset(), x.shape, x.stride())
        clones.append(twin.requires_grad_(x.requires_grad))
    return clones


def arguments(leaves: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Choose the arguments of a call, so that autograd's gradients go to copies of the inputs.

    An input that is the result of an operation may be changed in place. A copy that is a leaf may not, so what is
    passed is a copy of that one.

    Args:
        leaves: What `clone_inputs` made of the inputs.
        inputs: The inputs.
    """
    passed: list[Any] = []
    for leaf, x in zip(leaves, inputs, strict=True):
        made = isinstance(x, torch.Tensor) and leaf.requires_grad and not x.is_leaf and torch.is_grad_enabled()
        twin = leaf.clone() if made else leaf
        passed.append(twin if not made or twin.stride() == leaf.stride() else leaf)
    return passed
