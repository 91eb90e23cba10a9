"""What `refold.compiler.backend` hands on: ``torch.compile(backend="refold")``, `refold.compile`, `refold.explain`.

One graph goes through these steps. Inductor is started with a hook on its ATen graph. If the pipeline finds nothing
there, the compile ends as Inductor's own. Otherwise the compile is stopped, and each rewrite is checked against float64
and timed against its original. The compile is started again with the rewrites that passed. The result is timed against
eager and plain Inductor. What runs in the end is the fastest of the three, and the report says why.
Design decision 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from os import PathLike
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch
from torch.fx import Graph, GraphModule

from ..errors import ArgumentError, CompileError, PlanError, first_line, warn
from ..report import GraphReport, Report
from .choices import Choices
from .dynamo import captures_loops, notes
from .dynamo.as_written import run_as_written
from .environment import environment
from .inductor import Compiled, show_graph
from .ir.fx import mend_powers
from .options import Options
from .patience import patience
from .private import TraceAgain, compile_number, recompile_limit
from .recurrence.serial_chains import serial_loops
from .refusals import refused
from .replay import Remembering
from .session import describe_captured, survey
from .validate.program import Outcome, plain

BUG = "Please report this with the output of `refold doctor`."


@captures_loops
def refold(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one Dynamo graph; the function of ``torch.compile(..., backend="refold")``.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: The values it was captured with.
        options: Those of `compile` (`refold.compiler.options.Options`), and ``report``, a `refold.report.Report` to add
            to; all else is passed to Inductor.
        mode: A mode of ``torch.compile``, passed to Inductor.

    Returns:
        A callable with the graph's signature.

    Raises:
        ArgumentError: An option has an unknown value.
        CompileError: refold itself failed, or Inductor, and ``strict`` was set.
        PlanError: The plan does not fit, and ``strict`` was set.
    """
    read = Options.read(options or {}, mode)
    report = (options or {}).get("report")
    return compile_graph(gm, example_inputs, read, Report() if report is None else report)


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], options: Options, report: Report) -> Compiled:
    """Compile one Dynamo graph, and add what was decided to the report; see `refold`."""
    mend_powers(gm)
    report.environment = report.environment or environment()  # torch.compile may have been given an empty report
    entry = GraphReport(index=len(report.graphs), mode="training" if _is_training(gm) else "inference")
    run, entry = _outcome(gm, example_inputs, options, entry.saying(*notes(), *_limit_notes()))
    report.graphs.append(entry)
    # A call of a module looks for hooks first, which a graph has none of.
    return run_as_written(run).forward if isinstance(run, GraphModule) else run


def _outcome(gm: GraphModule, inputs: Sequence[Any], options: Options, entry: GraphReport) -> Outcome:
    """Decide what is to run; if refold itself fails, Inductor compiles the graph."""
    # On a GPU, a backward runs in a thread of its own. Inductor compiles it there when it first runs, and waits for the
    # lock of the compile under way, which this thread holds. So backwards run in this thread meanwhile.
    try:
        with patience(), _unseen_by_hooks(), torch.autograd.set_multithreading_enabled(False):
            if kind := next(filter(None, map(_left_alone, inputs)), ""):
                return plain(gm, inputs, options, entry.saying(f"nothing was looked for: {kind}"))
            if any(isinstance(x, torch.Tensor) and x.is_neg() for x in inputs):
                # Dynamo compiles again for them: its guards compare dispatch keys.
                return _eager(gm, entry, "because Inductor drops the sign of an input, a negated view")
            if any(getattr(node.target, "__name__", "") == "_enter_inference_mode" for node in gm.graph.nodes):
                # AOTAutograd fails in it, and takes down what runs in the process afterwards.
                return _eager(gm, entry, "because PyTorch does not compile a graph that enters inference mode")
            return Remembering(gm, inputs, options, entry).run()
    except (PlanError, TraceAgain):
        raise
    except Exception as error:
        if options.strict:
            if isinstance(error, CompileError):  # it is Inductor that failed
                raise
            message = f"refold failed on graph {entry.index}: {first_line(error)}. {BUG}"
            raise CompileError(message) from error
        warn(f"refold failed on graph {entry.index} ({first_line(error)}); Inductor compiles it instead. {BUG}")
        entry = entry.saying(f"refold failed: {refused('refold-failed', first_line(error))}")
        return plain(gm, inputs, options, replace(entry, chosen="inductor", reason="because refold failed"))


def _eager(gm: GraphModule, entry: GraphReport, reason: str) -> Outcome:
    return Outcome(gm, replace(entry, chosen="eager", reason=reason))


def _unseen_by_hooks() -> AbstractContextManager[Any]:
    """Return a context in which hooks of the caller (checkpointing) get no saved tensors.

    What a compile traces, checks and times saves tensors of its own. Where the caller has no hooks there are none
    here either: transforms of ``torch.func``, which the graph may hold, do not run under any.
    """

    def itself(x: torch.Tensor) -> torch.Tensor:
        return x

    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("there are hooks"):
            return nullcontext()
    except RuntimeError:
        return torch.autograd.graph.saved_tensors_hooks(itself, itself)


def _left_alone(x: Any) -> str:
    """Say why a graph with such an input is Inductor's alone; empty if it is not."""
    if (isinstance(x, torch.SymInt) and x.node.is_nested_int()) or (isinstance(x, torch.Tensor) and x.is_nested):
        return "an input is a nested tensor"
    return "an input has no values, only a shape" if isinstance(x, torch.Tensor) and x.is_meta else ""


def _limit_notes() -> list[str]:
    """Say when PyTorch will not compile a function again: it then runs eagerly for all other arguments."""
    nth, limit = compile_number(), recompile_limit()
    if nth is None or limit is None or nth + 1 < limit:
        return []
    return [
        f"this is the last of {limit} compiles of this function (torch._dynamo.config.recompile_limit): "
        "arguments for which none of them was made run eagerly"
    ]


def _is_training(gm: GraphModule) -> bool:
    """Tell whether a result of the graph has a gradient."""
    results = [node.meta.get("example_value") for node in gm.graph.output_node().all_input_nodes]
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in results)


def check_callable(module: Any) -> None:
    """Refuse what is no module and no function.

    Raises:
        ArgumentError: Says what it is.
    """
    if isinstance(module, type):
        raise ArgumentError(f"module must be a module, not the class {module.__name__}; pass {module.__name__}(...)")
    if not callable(module):
        raise ArgumentError(f"module must be a torch.nn.Module or a function, not {type(module).__name__}")


P = ParamSpec("P")
K = ParamSpec("K")
R = TypeVar("R")
Out = TypeVar("Out", covariant=True)


class CompiledFunction(Protocol[P, Out]):
    """For type checkers: a compiled function has the signature that it had, and a report."""

    report: Report

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out:
        """Run the compiled program."""
        ...

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., Out]:
        """Bind it as a method."""
        ...


class Decorator(Protocol):
    """For type checkers: what `compile` returns without a module."""

    @overload
    def __call__(self, module: torch.nn.Module) -> Any: ...
    @overload
    def __call__(self, module: Callable[P, R]) -> CompiledFunction[P, R]: ...


class Compile(Protocol[K]):
    """For type checkers: `compile` with a module or a function, or without."""

    @overload
    def __call__(self, module: torch.nn.Module, *args: K.args, **kwargs: K.kwargs) -> Any: ...
    @overload
    def __call__(self, module: Callable[P, R], *args: K.args, **kwargs: K.kwargs) -> CompiledFunction[P, R]: ...
    @overload
    def __call__(self, module: None = None, *args: K.args, **kwargs: K.kwargs) -> Decorator: ...


def _typed(function: Callable[Concatenate[Callable[..., Any] | None, K], Any]) -> Compile[K]:
    return function  # type: ignore[return-value]


@_typed
def compile(
    module: Callable[..., Any] | None = None,
    *,
    verify: str = "quick",
    accept: str = "faster",
    strict: bool = False,
    loops: str = "capture",
    compile_budget: float = 60.0,
    cache: bool | str | PathLike[str] = True,
    plan: Report | Mapping[str, Any] | str | PathLike[str] | None = None,
    rules: Any = None,
    choose: Choices | Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a module or function with refold; ``torch.compile`` with a report.

    Args:
        module: An ``nn.Module`` or a function of tensors. Without one, the call returns a decorator that has the other
            arguments.
        verify: ``"quick"`` checks every rewrite against float64 when it is first compiled;
            ``"off"`` only those of which nothing else tells that they are right.
        accept: ``"faster"`` keeps a rewrite if it is measured to be faster than the faster of eager and
            ``torch.compile``, on this machine and at these shapes; ``"always"`` keeps all that pass the check.
        strict: If refold itself fails, raise an error instead of falling back to Inductor with a warning.
        loops: ``"capture"`` traces the body of a long loop over time once; ``"unroll"`` leaves Dynamo's
            interpreter alone, which then executes every step. The environment variable
            ``REFOLD_LOOPS=unroll`` does the same for a whole process.
        compile_budget: How many seconds Inductor may take, as estimated before it is started, for unrolled loops
            over time that cannot be rewritten. Beyond that the graph runs eagerly, and the report says so.
        cache: Where decisions are kept, so that neither a recompile nor the next process takes them again: True
            for the default folder (``$REFOLD_CACHE``, else ``~/.cache/refold``), a folder, or False for nowhere.
        plan: Decisions to replay without timing anything: the ``report`` of a compiled callable, or the path that
            its ``save`` wrote. Two runs with one plan run the same programs.
        rules: Rewrites that were found elsewhere (docs/proposers.md): files, folders of files, or rules. Each is
            checked and timed like those of the compiler.
        choose: Which passes run and in which order, which places are left alone, backends and chunk sizes of
            operators (`refold.compiler.choices.Choices`, or its data).
        fullgraph: As for ``torch.compile``.
        dynamic: As for ``torch.compile``.
        mode: As for ``torch.compile``.
        options: Options for Inductor.

    Returns:
        The compiled callable. Its ``report`` (`refold.report.Report`) fills as graphs are compiled,
        that is at the first call with each new kind of input. Copies and pickles of a compiled module have the report
        so far, and compile for themselves.

    Raises:
        ArgumentError: ``module`` is not a module or function, an option is unknown or has an unknown value, or
            ``plan`` is not a report.

    Example:
        >>> import torch, refold
        >>> @refold.compile
        ... def scores(q, k):
        ...     return (q[:, None, :] * k[None, :, :]).sum(-1)
        >>> scores(torch.ones(3, 8), torch.ones(5, 8)).shape
        torch.Size([3, 5])
    """
    own = {"verify": verify, "accept": accept, "strict": strict, "loops": loops, "compile_budget": compile_budget}
    own |= {"cache": cache, "plan": plan, "rules": rules, "choose": choose}
    read = Options.read({**(options or {}), **own}, mode)

    def compiling(module: Callable[..., Any]) -> Any:
        return _compile(module, None, read, fullgraph, dynamic)

    return compiling if module is None else compiling(module)


def _compile(
    module: Callable[..., Any], report: Report | None, options: Options, fullgraph: bool, dynamic: bool | None
) -> Any:
    check_callable(module)
    if report is None:
        report = Report(target=_name(module), environment=environment())

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        return compile_graph(gm, inputs, options, report)

    backend.__name__, backend.report = "refold", report  # type: ignore[attr-defined]
    if options.loops == "capture":
        captures_loops(backend)
    compiled = torch.compile(module, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    # OptimizedModule forwards plain attribute writes to the user's module.
    object.__setattr__(compiled, "report", report)
    if isinstance(compiled, torch.nn.Module):
        kind: Any = type(compiled)
        object.__setattr__(compiled, "_refold_arguments", (module, report, options, fullgraph, dynamic))
        object.__setattr__(compiled, "__class__", _copied_by_compiling(kind))
    return compiled


@cache
def _copied_by_compiling(kind: Any) -> Any:
    """Return ``kind``, the class of compiled modules, with copies and pickles that compile the module again.

    What `torch.compile` made of it holds functions of this process; the module and the arguments are all there is.
    """
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__reduce__": _recipe})


def _recipe(compiled: Any) -> tuple[Any, ...]:
    return _compile, compiled._refold_arguments


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
    check_callable(module)
    report = Report(target=_name(module), environment=environment())

    @captures_loops
    def look(gm: GraphModule, inputs: Sequence[Any]) -> Compiled:
        mode = "training" if _is_training(gm) else "inference"
        entry = GraphReport(len(report.graphs), mode, chosen="eager", reason="refold.explain changes nothing")
        mend_powers(gm)
        gm, entry = describe_captured(gm, entry.saying(*notes()))
        surveyed = [entry]

        def describe(graph: Graph) -> None:
            loops = (*entry.loops, *serial_loops(graph))
            surveyed.append(survey(graph, replace(entry, loops=loops)))

        met = show_graph(gm, inputs, describe)
        report.graphs.append(surveyed[-1].saying(*met))
        return gm

    look.report = report
    torch.compile(module, backend=look)(*args, **kwargs)
    return report


def _name(module: Callable[..., Any]) -> str:
    return getattr(module, "__qualname__", None) or type(module).__qualname__
