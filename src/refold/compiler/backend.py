"""The entry points: ``torch.compile(backend="refold")``, `refold.compile` and `refold.explain`.

One graph goes through these steps. Inductor is started with a hook on its ATen graph; if the
pipeline finds nothing there, the compile simply ends as Inductor's own. Otherwise it is stopped,
each rewrite is proven against float64 and raced against its original, the compile is started again
with those that stand, and the result is raced against eager and plain Inductor. What runs in the
end is the fastest of the three, and the report says why.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from .. import __version__
from ..errors import ArgumentError, CompileError, RefoldWarning
from ..report import GraphReport, Report
from .dynamo import captures_loops, notes
from .inductor import Compiled, Hook, Stopped, inductor
from .passes.reroll_loops import refusals
from .recurrence.serial_chains import serial_loops
from .session import GraphCompile, lower_lifted, survey
from .validate.program import first_line
from .validate.region import Settings

BUG = "Please report this with the output of `refold doctor`."
OWN_OPTIONS = ("verify", "accept", "strict", "loops", "report")


@captures_loops
def refold(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one Dynamo graph; the function behind ``torch.compile(..., backend="refold")``.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: The values it was captured with.
        options: refold's own ``verify`` ("quick" or "off"), ``accept`` ("faster" or "always"),
            ``strict`` (bool), ``loops`` ("capture" or "unroll") and ``report`` (a `refold.report.Report` to
            add to); everything else is passed to Inductor.
        mode: A mode of ``torch.compile``, passed to Inductor.

    Returns:
        A callable with the graph's signature.

    Raises:
        ArgumentError: An option has an unknown value.
        CompileError: refold itself failed, and ``strict`` was set.
    """
    given = dict(options or {})
    own = {key: given.pop(key) for key in OWN_OPTIONS if key in given}
    report = own.pop("report", None)
    report = Report() if report is None else report
    inductor_options = {**(torch._inductor.list_mode_options(mode) if mode else {}), **given}
    settings = check_settings(Settings(**own, options=inductor_options))
    entry = GraphReport(index=len(report.graphs), mode="training" if _is_training(gm) else "inference")
    report.graphs.append(entry)
    entry.notes += notes()
    try:
        return GraphCompile(gm, example_inputs, settings, entry).run()
    except Exception as error:
        if settings.strict:
            raise CompileError(f"refold failed on graph {entry.index}: {first_line(error)}. {BUG}") from error
        warnings.warn(
            f"refold failed on graph {entry.index} ({first_line(error)}); Inductor compiles it instead. {BUG}",
            RefoldWarning,
            stacklevel=2,
        )
        entry.notes.append(f"refold failed: {first_line(error)}")
        entry.chosen, entry.reason = "inductor", "because refold failed"
        for row in entry.rewrites:
            row.status, row.reason = "refused", "refold failed"
        return inductor(gm, example_inputs, options=inductor_options)


def _is_training(gm: GraphModule) -> bool:
    """Tell whether a result of the graph has a gradient."""
    results = [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in results)


def check_settings(settings: Settings) -> Settings:
    """Refuse unknown option values.

    Raises:
        ArgumentError: Names the option, its value and what is allowed.
    """
    for name, allowed in (
        ("verify", ("quick", "off")),
        ("accept", ("faster", "always")),
        ("strict", (True, False)),
        ("loops", ("capture", "unroll")),
    ):
        if (got := getattr(settings, name)) not in allowed:
            raise ArgumentError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {got!r}")
    return settings


def compile(
    module: Callable[..., Any],
    *,
    verify: str = "quick",
    accept: str = "faster",
    strict: bool = False,
    loops: str = "capture",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a module or function with refold; ``torch.compile`` with a report.

    Args:
        module: An ``nn.Module`` or a function of tensors.
        verify: ``"quick"`` proves every rewrite against float64 when it is first compiled;
            ``"off"`` trusts the algebra.
        accept: ``"faster"`` keeps what is measured to be faster than the best of eager and
            ``torch.compile`` on this machine at these shapes; ``"always"`` keeps all that is right.
        strict: Raise refold's own failures instead of falling back to Inductor with a warning.
        loops: ``"capture"`` traces the body of a long loop over time once; ``"unroll"`` leaves Dynamo's
            interpreter alone, which then executes every step. The environment variable
            ``REFOLD_LOOPS=unroll`` does the same for a whole process.
        fullgraph: As for ``torch.compile``.
        dynamic: As for ``torch.compile``.
        mode: As for ``torch.compile``.
        options: Options for Inductor.

    Returns:
        The compiled callable. Its ``report`` (`refold.report.Report`) fills as graphs are compiled,
        that is at the first call with each new kind of input.

    Raises:
        ArgumentError: An option has an unknown value.

    Example:
        >>> import torch, refold
        >>> @refold.compile
        ... def scores(q, k):
        ...     return (q[:, None, :] * k[None, :, :]).sum(-1)
        >>> scores(torch.ones(3, 8), torch.ones(5, 8)).shape
        torch.Size([3, 5])
    """
    if not callable(module):
        raise ArgumentError(f"module must be a torch.nn.Module or a function, not {type(module).__name__}")
    check_settings(Settings(verify, accept, strict, loops))
    report = Report(target=_name(module), environment=environment())
    own = {"verify": verify, "accept": accept, "strict": strict, "loops": loops, "report": report}
    backend = _with_options(refold, {**(options or {}), **own}, mode)
    compiled = torch.compile(module, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    # OptimizedModule forwards plain attribute writes to the user's module.
    object.__setattr__(compiled, "report", report)
    return compiled


def explain(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """List what is wasteful in a module, and why, without changing or compiling anything.

    The module runs once, eagerly, on the given arguments.

    Args:
        module: An ``nn.Module`` or a function of tensors.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        A report whose rewrites have status ``found``: products that are written out only to be
        summed, repeats that are computed on, with FLOPs and bytes before and after; and whose
        ``loops`` are steps that wait for one another.
    """
    report = Report(target=_name(module), environment=environment())

    @captures_loops
    def look(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        entry = GraphReport(index=len(report.graphs), chosen="eager", reason="this is an explanation only")
        report.graphs.append(entry)

        gm = lower_lifted(entry, gm)

        def visit(index: int, graph: Graph) -> None:
            entry.loops += serial_loops(graph)
            if entry.loops:
                entry.notes += [f"a loop over time stays: {reason}" for reason in refusals(graph)]
            survey(entry, graph)
            raise Stopped

        hook = Hook(visit)
        try:
            inductor(gm, inputs, hook=hook)
        except Exception:
            if not hook.stopped:
                raise
        return gm

    torch.compile(module, backend=look)(*args, **kwargs)
    return report


def environment() -> dict[str, str]:
    """Return what the numbers of a report depend on: versions, device, threads."""
    versions = {"refold": __version__, "torch": torch.__version__}
    versions["python"] = platform.python_version()
    versions["device"] = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    )
    return versions


def _with_options(backend: Callable[..., Compiled], options: Mapping[str, Any], mode: str | None) -> Any:
    def run(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        return backend(gm, inputs, options=options, mode=mode)

    run.__name__ = "refold"
    return captures_loops(run) if options.get("loops") == "capture" else run


def _name(module: Callable[..., Any]) -> str:
    return getattr(module, "__qualname__", None) or type(module).__qualname__
