"""The entry points: ``torch.compile(backend="refold")``, `refold.compile` and `refold.explain`.

One graph goes through these steps. Inductor is started with a hook on its ATen graph; if the
pipeline finds nothing there, the compile simply ends as Inductor's own. Otherwise it is stopped,
each rewrite is proven against float64 and raced against its original, the compile is started again
with those that stand, and the result is raced against eager and plain Inductor. What runs in the
end is the fastest of the three, and the report says why.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..errors import ArgumentError, CompileError
from ..report import GraphReport, Report, RewriteReport
from ..verify import Race, median_ms, race
from ..verify.memory import available_bytes, peak_bytes
from .capture import Compiled, Hook, Stopped, bind, clone_inputs, inductor, standalone
from .cost import Cost, graph_cost
from .evaluate import values_at
from .loops import serial_loops
from .passes.scan import keep_scans_external
from .pipeline import run as run_pipeline
from .proof import Settings, Verdict, fastest, judge
from .rewrite import Rewrite

log = logging.getLogger("refold")

BUG = "Please report it at https://github.com/refold/refold/issues with the output of `refold doctor`."
OWN_OPTIONS = ("verify", "accept", "strict", "report")
# Whole-graph races may take this long.
RACE_BUDGET_S = 20.0


class RefoldWarning(UserWarning):
    """refold could not do its work on a graph and something slower, but right, runs instead."""


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
            ``strict`` (bool) and ``report`` (a `refold.report.Report` to add to); everything else
            is passed to Inductor.
        mode: A mode of ``torch.compile``, passed to Inductor.

    Returns:
        A callable with the graph's signature.

    Raises:
        ArgumentError: An option has an unknown value.
        CompileError: refold itself failed, and ``strict`` was set.
    """
    given = dict(options or {})
    own = {key: given.pop(key) for key in OWN_OPTIONS if key in given}
    report = own.pop("report", None) or Report()
    inductor_options = {**(torch._inductor.list_mode_options(mode) if mode else {}), **given}
    settings = check_settings(Settings(**own, options=inductor_options))
    entry = GraphReport(index=len(report.graphs))
    report.graphs.append(entry)
    try:
        return _Compile(gm, example_inputs, settings, entry).run()
    except Exception as error:
        if settings.strict:
            raise CompileError(f"refold failed on graph {entry.index}: {type(error).__name__}: {error}. {BUG}") from error
        warnings.warn(
            f"refold failed on graph {entry.index} ({type(error).__name__}: {error}); Inductor compiles it instead. {BUG}",
            RefoldWarning,
            stacklevel=2,
        )
        entry.notes.append(f"refold failed: {type(error).__name__}: {error}")
        entry.rewrites.clear()
        entry.chosen, entry.reason = "inductor", "because refold failed"
        return inductor(gm, example_inputs, options=inductor_options)


def check_settings(settings: Settings) -> Settings:
    """Refuse unknown option values."""
    for name, allowed in (("verify", ("quick", "off")), ("accept", ("faster", "always")), ("strict", (True, False))):
        if (got := getattr(settings, name)) not in allowed:
            raise ArgumentError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {got!r}")
    return settings


@dataclass
class _Pending:
    """A graph whose rewrites are still to be judged."""

    index: int
    original: Graph
    rewritten: Graph
    rewrites: list[Rewrite]


class _Compile:
    """The compile of one graph."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], settings: Settings, entry: GraphReport) -> None:
        self.gm, self.inputs, self.settings, self.entry = gm, inputs, settings, entry
        self.options = dict(settings.options or {})
        self.refused: set[str] = set()
        self.verdicts: dict[str, Verdict] = {}
        self.rows: dict[str, RewriteReport] = {}
        self.external_scans = False

    def run(self) -> Compiled:
        start = time.perf_counter()
        compiled = self._compile()
        self.entry.compile_s = time.perf_counter() - start - self.entry.proof_s
        self.entry.rewrites = list(self.rows.values())
        if compiled is None:
            self.entry.chosen = "eager"
            return self.gm
        if not self.entry.applied and not self.external_scans:
            self.entry.chosen = "inductor"
            self.entry.reason = "no rewrite stands" if self.rows else ""
            return compiled
        self.entry.chosen = "refold"
        if self.settings.accept == "faster" and self.entry.applied:
            start = time.perf_counter()
            compiled = self._choose(compiled)
            self.entry.proof_s += time.perf_counter() - start
        log.info("graph %d: %s runs, %d rewrites", self.entry.index, self.entry.chosen, len(self.entry.applied))
        return compiled

    # Finding and proving rewrites ------------------------------------------------------------

    def _compile(self) -> Compiled | None:
        """Start Inductor until every rewrite it sees has been judged; None if it cannot compile the graph."""
        while True:
            pending: list[_Pending] = []
            hook = Hook(functools.partial(self._visit, pending))
            try:
                return inductor(self.gm, self.inputs, hook=hook, options=self.options)
            except Exception as error:
                if not hook.stopped:
                    if not self._recover(error):
                        return None
                    continue
            start = time.perf_counter()
            for found in pending:
                self._judge(found)
            self.entry.proof_s += time.perf_counter() - start

    def _visit(self, pending: list[_Pending], index: int, graph: Graph) -> None:
        """Rewrite one ATen graph in place, or stop the compile to judge what is new."""
        if any(str(node.target).startswith("tangents") for node in graph.find_nodes(op="placeholder")):
            self.entry.mode = "training"
        if index == 0:
            self.entry.flops_before = self.entry.flops_after = self.entry.bytes_before = self.entry.bytes_after = 0
        before = graph_cost(graph.nodes)
        original = _copy(graph)
        rewrites = run_pipeline(graph, lambda site: f"{index}:{site}" not in self.refused)
        for rewrite in rewrites:
            self.rows[f"{index}:{rewrite.site}"] = _row(rewrite, self.verdicts.get(rewrite.signature))
        proofless = self.settings.verify == "off" and self.settings.accept == "always"
        if not proofless and any(rewrite.signature not in self.verdicts for rewrite in rewrites):
            pending.append(_Pending(index, original, graph, rewrites))
            raise Stopped
        for rewrite in rewrites:
            self.rows[f"{index}:{rewrite.site}"].status = "applied"
        after = graph_cost(graph.nodes) if rewrites else before
        _add_costs(self.entry, before, after)
        if self.external_scans:
            keep_scans_external(graph)

    def _judge(self, found: _Pending) -> None:
        """Judge rewrites not seen before, on values from the user's own inputs where possible."""
        index, rewrites = found.index, found.rewrites
        fresh = list({r.signature: r for r in rewrites if r.signature not in self.verdicts}.values())
        values: dict[str, Any] = {}
        if (bound := bind(found.original, self.inputs)) is not None:
            names = {name for r in fresh for name in r.inputs}
            # A region may read what an earlier rewrite of the same run made.
            for graph in (found.original, found.rewritten):
                with _quiet_rng():
                    values |= values_at(graph, sorted(names - values.keys()), bound)
        else:
            self.entry.notes.append("rewrites were proven on random inputs only: the graph's inputs could not be matched")
        for rewrite in fresh:
            actual = [values[name] for name in rewrite.inputs] if values.keys() >= set(rewrite.inputs) else None
            with _quiet_rng():
                self.verdicts[rewrite.signature] = judge(rewrite, actual, self.settings)
        for rewrite in rewrites:
            verdict = self.verdicts[rewrite.signature]
            site = f"{index}:{rewrite.site}"
            self.rows[site] = _row(rewrite, verdict)
            if verdict.reason:
                self.rows[site].status = "refused"
                self.refused.add(site)

    def _recover(self, error: Exception) -> bool:
        """After Inductor failed: tell whether another attempt is worth it."""
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if not self.external_scans and any("cumsum" in str(node.target) for node in self.gm.graph.nodes):
            self.external_scans = True
            self.entry.notes.append(f"Inductor failed ({text}); cumulative sums are handed to ATen instead")
            return True
        if self.settings.strict:
            raise error
        warnings.warn(f"Inductor failed on this graph ({text}); it runs eagerly", RefoldWarning, stacklevel=2)
        self.entry.notes.append(f"Inductor failed ({text}); the graph runs eagerly")
        return False

    # Choosing what runs ----------------------------------------------------------------------

    def _choose(self, compiled: Compiled) -> Compiled:
        """Race the rewritten graph against eager and plain Inductor; return the fastest."""
        device = _device(self.inputs)
        contenders: dict[str, Callable[[], object]] = {}
        plain: Compiled | None = None
        if _fits_eagerly(self.entry, device):
            contenders["eager"] = _trial(self.gm, self.inputs)
        else:
            self.entry.notes.append("eager was not timed: it does not fit in memory")
        start = time.perf_counter()
        try:
            plain = standalone(self.gm, self.inputs, self.options)
            contenders["torch.compile"] = _trial(plain, self.inputs)
            contenders["torch.compile"]()
            self.entry.inductor_compile_s = time.perf_counter() - start
        except Exception as error:
            contenders.pop("torch.compile", None)
            first = str(error).splitlines()[0] if str(error) else ""
            self.entry.notes.append(f"torch.compile alone fails on this graph: {type(error).__name__}: {first}")
        ours = _trial(compiled, self.inputs)
        with _quiet_rng():
            ours()
            if not contenders:
                self.entry.times_ms["refold"] = median_ms(ours, device)
                return compiled
            name, base = fastest(contenders, device)
            result = race(base, ours, device, budget_s=RACE_BUDGET_S)
            self._record(contenders, ours, name, result, device)
        if result.faster:
            return compiled
        self.entry.chosen = "eager" if name == "eager" else "inductor"
        self.entry.reason = f"because the rewritten graph is not faster than {name} ({result.speedup:.2f}x)"
        for row in self.entry.applied:
            row.status, row.reason = "refused", "the whole graph is not faster with the rewrites"
        if name == "eager":
            return self.gm
        return inductor(self.gm, self.inputs, options=self.options)

    def _record(
        self,
        contenders: dict[str, Callable[[], object]],
        ours: Callable[[], object],
        best: str,
        result: Race,
        device: torch.device,
    ) -> None:
        entry = self.entry
        for name, run in contenders.items():
            entry.times_ms[name] = result.base_ms if name == best else median_ms(run, device)
            entry.peak_bytes[name] = peak_bytes(run, device)
        entry.times_ms["refold"] = result.candidate_ms
        entry.peak_bytes["refold"] = peak_bytes(ours, device)
        entry.speedup, entry.speedup_at_least = result.speedup, result.at_least
        if "eager" in contenders and entry.mode == "inference":
            entry.difference_from_eager = _difference(contenders["eager"](), ours())


def _copy(graph: Graph) -> Graph:
    twin = copy.deepcopy(graph)
    twin.owning_module = graph.owning_module
    return twin


def _row(rewrite: Rewrite, verdict: Verdict | None) -> RewriteReport:
    row = RewriteReport(
        name=rewrite.name,
        site=rewrite.site,
        source=rewrite.source,
        detail=rewrite.detail,
        flops_before=rewrite.before.flops,
        flops_after=rewrite.after.flops,
        bytes_before=rewrite.before.bytes,
        bytes_after=rewrite.after.bytes,
        largest_before=rewrite.before.largest,
        largest_after=rewrite.after.largest,
    )
    if verdict is not None:
        row.reason = verdict.reason
        if verdict.evidence is not None:
            row.errors = [vars(kind) for kind in verdict.evidence.kinds]
        if verdict.race is not None:
            row.original_ms, row.candidate_ms = verdict.race.base_ms, verdict.race.candidate_ms
            row.original_by = verdict.original_by
            row.speedup, row.at_least = verdict.race.speedup, verdict.race.at_least
    return row


def _add_costs(entry: GraphReport, before: Cost, after: Cost) -> None:
    entry.flops_before += before.flops
    entry.flops_after += after.flops
    entry.bytes_before += before.bytes
    entry.bytes_after += after.bytes


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [x.device for x in inputs if isinstance(x, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _fits_eagerly(entry: GraphReport, device: torch.device) -> bool:
    largest = max((row.largest_before for row in entry.rewrites), default=0)
    return 2 * largest < available_bytes(device)


def _trial(run: Compiled, inputs: Sequence[Any]) -> Callable[[], object]:
    """Return a call on copies of the inputs, with backward where the outputs ask for it."""
    own = clone_inputs(inputs)
    leaves = [x for x in own if isinstance(x, torch.Tensor) and x.requires_grad]

    def call() -> object:
        out = run(*own)
        outputs = [y for y in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(y, torch.Tensor)]
        if torch.is_grad_enabled() and leaves:
            roots = [y for y in outputs if y.requires_grad]
            if roots:
                torch.autograd.grad(roots, leaves, [torch.ones_like(y) for y in roots], allow_unused=True)
        return [y.detach() for y in outputs]

    return call


def _difference(expected: Any, got: Any) -> float:
    """Return the largest relative L2 difference over the floating-point outputs."""
    worst = 0.0
    for a, b in zip(expected, got, strict=True):
        if a.is_floating_point():
            a, b = a.double(), b.double()
            norm = float(torch.linalg.vector_norm(a)) or 1.0
            worst = max(worst, float(torch.linalg.vector_norm(b - a)) / norm)
    return worst


def _quiet_rng():
    """Keep trial runs from advancing the user's random state."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices=devices)
