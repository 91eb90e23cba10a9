"""Whether all of its code ran in calls that were compared; nothing is known of what did not."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from functools import partial

from .. import inputs
from ..branches import Cover, Marks, marked
from ..case import Case
from ..errors import Enough
from ..process import Call
from ..terms import LEVELS
from . import domain, use

WAYS = (
    use.first_calls, use.repeatable, use.modes, use.stale, use.gradients, domain.kinds, use.other_weights,
    use.far_weights, domain.integers, domain.arguments, domain.special_values, domain.layouts, domain.shapes,
    use.otherwise,
)  # fmt: skip
"""What may reach a branch, cheap ones first; while one has not run, all are tried, at level quick for a while each."""
SECONDS = 0.7
LISTED = 5
MOST = 2000  # numbers that are changed, one by one, if it remembers its inputs


def _remembers(case: Case, cover: Cover) -> None:
    """N9: what runs other code for inputs that it has had before does so only if each number is the same."""
    sides = case.sides

    def ran(call: Call) -> Marks:
        sides.ask(call)
        return cover.ran()

    for turn in range(3):
        call = sides.call(sides.drawn("normal", "remembered", turn))
        if cover.always == cover.marks or ran(call) == (again := ran(call)):
            return
    places = [(index, at) for index, t in enumerate(call.tensors) if inputs.is_real(t) for at in range(t.numel())]
    random.Random(case.docket.derived("remembered")).shuffle(places)
    for index, at in places[:MOST]:
        numbers = call.tensors[index].view(-1)
        numbers[at] = 2 * numbers[at] + 1
        if ran(call) == again:
            said = f"input {index} has another number at {at}, and it runs what it runs for inputs"
            case.docket.step("N9", f"{said} that it has had before")
    case.docket.note(f"it remembers inputs; {min(MOST, len(places))} of {len(places)} numbers were changed, one by one")


def everything(case: Case) -> None:
    """C7 and C8: every block of its source ran, and every truth value and mask was true and false."""
    docket, sides, level = case.docket, case.sides, case.docket.level
    if {"C7", "C8"} <= docket.off:
        return
    candidate, given = sides.candidate, len(sides.tree.get("items", ()))
    path, seed = str(sides.suspect.folder / "candidate.py"), docket.derived("where marks lie")
    if candidate.lines == 0:
        docket.note("branches in the files of a package are not seen")
        return
    branches = marked(candidate, path, given, docket.terms.train, seed)
    if branches.from_text:
        docket.step("C7", f"line {branches.from_text[0]} makes code of text, or has __del__: when it runs is not known")
    with sides.doubled(branches) as cover:
        double = Case(docket, sides)
        double.numbers.known = case.numbers.known
        if not level.deep:
            docket.level = replace(LEVELS["full"], kinds_s=SECONDS, shapes_s=3 * SECONDS)
        with contextlib.suppress(Enough):
            try:
                for way in WAYS:
                    way(double)
                double.outside()
            finally:
                docket.level = level
        _remembers(double, cover)
    if cover.forged:
        docket.step("C7", "it runs functions to which no name leads, or writes to what tells what it runs")
    if unraised := cover.unraised:
        with sides.doubled(branches) as first:
            ask = partial(sides.suspect.call, sides.call(sides.first))
            cover.marks |= {place for at, kind, place in unraised if first.ends(ask, at, kind)}
    missing = branches.missing(cover.marks)
    for check in ("C7", "C8"):
        found = [f"{site} {wanted}" for site, wanted, why in missing if not why and site.value is (check == "C8")]
        listed = list(dict.fromkeys(found))[:LISTED]
        docket.step(check, "in calls that were compared, " + "; ".join(listed) if listed else "")
    for why in sorted({why for site, _, why in missing if not site.value} - {"", "unused"}):
        lines = dict.fromkeys(str(site) for site, _, other in missing if other == why and not site.value)
        docket.note(f"what runs {why} was not tried: {', '.join(lines)}")
    if branches.unseen:
        docket.note(f"branches of what is compiled are not seen: line {', '.join(map(str, branches.unseen))}")
