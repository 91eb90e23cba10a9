"""The entry points without a compiler: Inductor compiles graphs as they are, and reports say why nothing is rewritten.

They take what those of `refold.compiler.engine` take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..report import GraphReport, Report
from .environment import environment

reason = ""
"""Why there is no compiler."""


def refold(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph by Inductor; eagerly if that is not available either."""
    report = (options or {}).get("report") or Report()
    try:
        run = torch._dynamo.lookup_backend("inductor")(gm, list(example_inputs))
    except (ImportError, AttributeError) as error:
        _add(report, "eager", f"Inductor is not available ({error}); the graph runs eagerly")
        return gm
    _add(report, "inductor")
    return run


def compile(
    module: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **own: Any,
) -> Any:
    """Compile a module or function by Inductor; the result has a ``report`` that says why nothing is rewritten."""
    if module is None:
        return lambda module: compile(module, fullgraph=fullgraph, dynamic=dynamic)
    report = Report(getattr(module, "__qualname__", type(module).__qualname__), environment())

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return refold(gm, inputs, options={"report": report})

    compiled = torch.compile(module, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    object.__setattr__(compiled, "report", report)
    return compiled


def explain(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run a module once; the report says why nothing can be found."""
    report = Report(getattr(module, "__qualname__", type(module).__qualname__), environment())

    def look(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _add(report, "eager")
        return gm

    torch.compile(module, backend=look)(*args, **kwargs)
    return report


def _add(report: Report, chosen: str, *notes: str) -> None:
    graph = GraphReport(len(report.graphs), chosen=chosen)
    report.graphs.append(graph.saying(f"nothing can be rewritten: {reason}", *notes))
