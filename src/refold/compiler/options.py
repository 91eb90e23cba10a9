"""What refold takes besides what ``torch.compile`` takes: listed, read and checked here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch.fx import Graph

from ..errors import ArgumentError
from . import pipeline
from .choices import Choices
from .decisions import Plan, folder_for
from .ir.rewrite import Rewrite
from .notation.rules import Rule, read_rules
from .private import inductor_modes, inductor_options


@dataclass(frozen=True)
class Options:
    """The options of one compile; `refold.compiler.engine.compile` says what each means.

    Attributes:
        inductor: Options passed on to Inductor, those of a mode included.
    """

    verify: str = "quick"
    accept: str = "faster"
    strict: bool = False
    loops: str = "capture"
    compile_budget: float = 60.0
    cache: Any = True
    plan: Plan | None = None
    rules: Sequence[Rule] = ()
    choose: Choices = field(default_factory=Choices)
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any], mode: str | None = None) -> Options:
        """Read what a user gives: refold's own options and Inductor's, beside one another.

        Raises:
            ArgumentError: Names the option, its value and what is allowed.
        """
        own = {name: given[name] for name in OWN if name in given}
        others = {name: value for name, value in given.items() if name not in (*OWN, "report")}
        modes = inductor_modes() if mode is not None else None
        if modes is not None and mode not in modes:
            raise ArgumentError(f"mode must be one of {', '.join(map(repr, modes))}, not {mode!r}")
        _check_inductor(others)
        for name, allowed in (
            ("verify", ("quick", "off")),
            ("accept", ("faster", "always")),
            ("strict", (True, False)),
            ("loops", ("capture", "unroll")),
        ):
            if (got := own.get(name, allowed[0])) not in allowed:
                raise ArgumentError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {got!r}")
        budget = own.get("compile_budget", cls.compile_budget)
        if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
            raise ArgumentError(f"compile_budget must be a number of seconds above 0, not {budget!r}")
        folder_for(own.get("cache", cls.cache))
        own["rules"], own["choose"] = read_rules(own.get("rules")), Choices.read(own.get("choose"))
        own["plan"] = None if own.get("plan") is None else Plan.read(own["plan"])
        return cls(**own, inductor={**((modes or {}).get(mode or "") or {}), **others})

    def facts(self) -> dict[str, Any]:
        """Return, as plain data, all that a decision depends on."""
        plain = {name: getattr(self, name) for name in ("verify", "accept", "loops", "compile_budget")}
        rules = [rule.digest for rule in self.rules]
        return {**plain, "rules": rules, "choose": self.choose.to_dict(), "options": dict(self.inductor)}

    def rewrite(self, graph: Graph, wanted: Callable[[str], bool], notes: list[str] | None = None) -> list[Rewrite]:
        """Run the passes and rules that are chosen over a joint graph, in place."""
        passes = pipeline.passes_of(pipeline.Stage.JOINT, self.choose.passes)
        made = pipeline.run(graph, wanted, notes, passes, rules=self.rules)
        for each in (graph, *(rewrite.candidate.graph for rewrite in made)):
            self.choose.tune(each)
        return made


OWN = tuple(one.name for one in fields(Options) if one.name != "inductor")


def _check_inductor(options: Mapping[str, Any]) -> None:
    """Refuse options that neither refold nor Inductor has, as plain ``torch.compile`` does."""
    others = inductor_options() if options else []
    known = [*OWN, "report", *(others or [])]
    for name in options:
        if others is not None and name.replace("-", "_") not in known:
            alike = difflib.get_close_matches(name, known)
            hint = f"; did you mean {' or '.join(alike)}?" if alike else "."
            raise ArgumentError(
                f"unexpected option {name!r}: refold's own are {', '.join(known[: len(OWN) + 1])}, the others "
                f"those of torch._inductor.list_options(){hint}"
            )
