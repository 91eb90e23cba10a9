"""The proposer ``search``: contraction orders and plans, tried systematically, without a model or a network.

First come programs: each region multiplied out (`refold.compiler.notation.algebra`), in several orders of its products,
those with the fewest multiply-adds first. Then plans that change one thing: a place left alone, a pass left out or
moved, a backend, a chunk size, an option of Inductor. A plan that was measured to be faster is kept and changed
further, until nothing is left to change. The proposals depend on the request alone, so a run can be repeated.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..compiler.notation.algebra import Expander, orders, work_of, written
from ..compiler.notation.program import Equations, parse
from ..errors import ProgramError
from .protocol import Proposal, Proposer, Request

_CHUNKS = (16, 32, 64, 128, 256)
_ORDERS = 4  # of one region
_ALL = 64  # looked at, to find these


class Systematic(Proposer):
    """Proposes contraction orders, then plans around the best plan so far."""

    name = "search"

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def propose(self, request: Request) -> Sequence[Proposal]:
        """Return the next proposals that were not made yet."""
        self._seen |= {attempt.source for attempt in request.attempts}
        found = []
        for proposal in itertools.chain(_programs(request), _plans(request)):
            if proposal.text not in self._seen:
                self._seen.add(proposal.text)
                found.append(proposal)
                if len(found) == request.wanted:
                    break
        return found


def _programs(request: Request) -> Iterator[Proposal]:
    for region in request.regions:
        try:
            program = parse(region["program"])
        except (ProgramError, KeyError):
            continue
        for other in alternatives(program, _ORDERS):
            text = json.dumps({"region": region["name"], "program": other.to_dict()})
            yield Proposal(text, "its products in another order", "program")


def alternatives(program: Equations, most: int) -> list[Equations]:
    """Return programs for the same, with the sums of the last contraction in other orders, the least work first."""
    steps = program.defined()
    users: dict[str, set[str]] = {}
    for step in program.steps:
        for read in step.reads:
            users.setdefault(read.name, set()).add(step.name)
    found: dict[str, tuple[int, Equations]] = {}
    for root in reversed(program.steps):
        inner = _only_for(root.name, users)
        expander = Expander(program, frozenset(inner))
        sums = expander.expand(root.name)
        if sums is None or not all(len(term.factors) <= 6 for term in sums.terms):
            continue
        each: list[list[list[tuple[int, ...]]]] = [
            list(orders(term, _ALL)) if len(term.factors) > 1 else [[]] for term in sums.terms
        ]
        for chosen in itertools.islice(itertools.product(*each), _ALL):
            try:
                part, work = written(sums, program, root.name, chosen)
            except Exception:
                continue
            before = work_of(steps, [root.name, *sums.inside], sums.sizes)
            if work <= 2 * before:
                whole = joined(program, root.name, part)
                found.setdefault(str(whole), (work - before, whole))
    ranked = sorted(found.items(), key=lambda item: (item[1][0], item[0]))
    return [whole for text, (_, whole) in ranked[:most] if text != str(program)]


def joined(program: Equations, name: str, part: Equations) -> Equations:
    """Put a program in the place of one step; what only that step needed falls out."""
    taken = {*program.inputs, *program.defined()}
    names = {step.name: f"{name}_{step.name}" for step in part.steps}
    if any(new in taken for new in names.values()):
        names = {old: f"{new}_" for old, new in names.items()}
    text = part.to_dict()
    steps: list[dict[str, Any]] = []
    for step in program.to_dict()["steps"]:
        if step["let"].split("[")[0] != name:
            steps.append(step)
            continue
        for own in text["steps"]:
            steps.append({**own, "let": _named(own["let"], names),
                          "of": [_named(x, names) if isinstance(x, str) else x for x in own["of"]]})  # fmt: skip
        steps.append({"let": step["let"], "do": "contract", "of": [steps[-1]["let"]]})
    data = {**program.to_dict(), "steps": steps, "sizes": {**text["sizes"], **program.sizes}}
    return parse(_pruned(data))


def _named(text: str, names: Mapping[str, str]) -> str:
    head, bracket, rest = text.partition("[")
    return names.get(head, head) + bracket + rest


def _pruned(data: dict[str, Any]) -> dict[str, Any]:
    """Leave out steps that nothing reads."""
    needed = {data["result"].split("[")[0]}
    kept = []
    for step in reversed(data["steps"]):
        if step["let"].split("[")[0] in needed:
            kept.append(step)
            of = step["of"].values() if isinstance(step["of"], dict) else step["of"]
            needed |= {x.split("[")[0] for x in of if isinstance(x, str)}
    inputs = {k: v for k, v in data["inputs"].items() if k in needed}
    dtypes = {k: v for k, v in data.get("dtypes", {}).items() if k in needed}
    return {**data, "steps": kept[::-1], "inputs": inputs, "dtypes": dtypes}


def _only_for(name: str, users: Mapping[str, set[str]]) -> set[str]:
    """Return the values that serve one step alone."""
    inner: set[str] = set()
    grown = True
    while grown:
        fresh = {value for value, by in users.items() if value not in inner and by <= {name, *inner}}
        grown = bool(fresh)
        inner |= fresh
    return inner


def _plans(request: Request) -> Iterator[Proposal]:
    choices = request.choices
    if not choices:
        return
    best = next(
        (attempt.source for attempt in request.attempts if attempt.outcome == "accepted" and attempt.kind == "plan"), ""
    )
    base: dict[str, Any] = json.loads(best).get("plan", {}) if best else {}
    places = choices.get("places", [])
    for place in places:
        if place["key"] not in base.get("skip", []):
            yield _plan({**base, "skip": [*base.get("skip", []), place["key"]]}, f"without {place['pass']}")
    passes = base.get("passes", choices.get("passes", []))
    for used in sorted({place["pass"] for place in places} & set(passes)):
        yield _plan({**base, "passes": [name for name in passes if name != used]}, f"without the pass {used}")
        yield _plan({**base, "passes": [used, *(name for name in passes if name != used)]}, f"{used} first")
    for name, options in choices.get("operators", {}).items():
        if not any(name in str(place) for place in places) and f"{name}(" not in request.source:
            continue
        own = base.get("operators", {})
        values: list[tuple[str, Any]] = [("backend", b) for b in ("torch", "numba", "triton")]
        values += [("chunk_size", size) for size in _CHUNKS] if "chunk_size" in options else []
        for option, value in values:
            tuned = {**own, name: {**own.get(name, {}), option: value}}
            yield _plan({**base, "operators": tuned}, f"{option} {value} for {name}")
    for knob, values in choices.get("inductor", {}).items():
        for value in values:
            if base.get("inductor", {}).get(knob) != value:
                yield _plan({**base, "inductor": {**base.get("inductor", {}), knob: value}}, f"{knob}={value}")


def _plan(plan: dict[str, Any], note: str) -> Proposal:
    return Proposal(json.dumps({"plan": plan}), note, "plan")
