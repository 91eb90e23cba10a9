"""Random loops whose states are kept in many ways: variables, tuples, lists, dictionaries, objects; some only move.

The loop is written out as Python, for what is judged is how it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch

from .programs import Program


class Pair(NamedTuple):
    """Two states."""

    now: Any
    then: Any


@dataclass
class Levels:
    """Two states."""

    fast: Any
    slow: Any


# How three states are kept besides the one in a variable: what makes the nest of them, and how each is read.
KEEPERS = {
    "variables": ("a, b, c = {}, {}, {}", ["a", "b", "c"]),
    "tuple": ("kept = ({}, {}, {})", ["kept[0]", "kept[1]", "kept[2]"]),
    "list": ("kept = [{}, {}, {}]", ["kept[0]", "kept[1]", "kept[2]"]),
    "list in place": ("kept[0], kept[1], kept[2] = {}, {}, {}", ["kept[0]", "kept[1]", "kept[2]"]),
    "all of a list": ("kept[:] = [{}, {}, {}]", ["kept[0]", "kept[1]", "kept[2]"]),
    "nest": ("kept = ({}, [{}, {}])", ["kept[0]", "kept[1][0]", "kept[1][1]"]),
    "dictionary": ("kept = {{'a': {}, 'b': ({}, {})}}", ["kept['a']", "kept['b'][0]", "kept['b'][1]"]),
    "dictionary in place": ("kept['a'], kept['b'], kept['c'] = {}, {}, {}", ["kept['a']", "kept['b']", "kept['c']"]),
    "named tuple": ("kept = Pair({}, ({}, {}))", ["kept.now", "kept.then[0]", "kept.then[1]"]),
    "data class": ("kept = Levels({}, [{}, {}])", ["kept.fast", "kept.slow[0]", "kept.slow[1]"]),
    "two": ("a, kept = {}, ({}, {})", ["a", "kept[0]", "kept[1]"]),
}
STARTS = {  # where a nest is not made as it is changed
    "list in place": "kept = [{}, {}, {}]",
    "all of a list": "kept = [{}, {}, {}]",
    "dictionary in place": "kept = {{'a': {}, 'b': {}, 'c': {}}}",
}
LOOPS = {
    "range": ["for t in range(x.shape[1]):", "    u = x[:, t]"],
    "items": ["for t, u in enumerate(x.unbind(1)):"],
    "while": ["t = 0", "while t < x.shape[1]:", "    u = x[:, t]", "    t += 1"],
}


def kept(r: Random) -> Program:
    """Draw a captured loop with four states, of which a step computes some and moves others."""
    steps, shape = r.randrange(16, 22), r.choice([(2, 3), (1, 4), (3,)])
    keeper, loop = r.choice(list(KEEPERS)), r.choice(list(LOOPS))
    form, places = KEEPERS[keeper]
    number = r.choice(places) if r.random() < 0.25 else ""  # a state that is a number
    held = ["h", *(place for place in places if place != number)]
    in_place = r.random() < 0.2
    new = [_counted(r, place) if place == number else _moved(r, held, in_place) for place in places]
    starts = [r.choice(["0", "1.5", "3"]) if place == number else _start(r) for place in places]
    others = "".join(f" - 0.3 * {place}" for place in held[1:] if r.random() < 0.3)
    computed = f"h = 0.5 * h{others} + u"
    if in_place and not others:
        computed = "h.mul_(0.5).add_(u)"
    step = _assigned(r, keeper, form, places, new)
    total = " + ".join(r.sample(held, r.randrange(1, len(held))) if r.random() < 0.5 else ["h"])
    seen = f"ys.append({number} * ({total}))" if number else f"ys.append({total})"
    lines = [
        "def fn(x, s):",
        "    first, ys = s[0].clone(), []",
        f"    h = {r.choice(['first', 's[2].clone()'])}",
        "    " + STARTS.get(keeper, form).format(*starts),
        *("    " + line for line in LOOPS[loop]),
        *(
            "        " + line
            for line in r.choice([[seen, computed, *step], [computed, *step, seen], [*step, computed, seen]])
        ),
        f"    return torch.stack(ys, 1), {', '.join(r.sample(held, r.randrange(1, len(held) + 1)))}",
    ]
    scope: dict[str, Any] = {"torch": torch, "Pair": Pair, "Levels": Levels}
    exec("\n".join(lines), scope)
    generator = torch.Generator().manual_seed(r.randrange(2**30))
    inputs = [torch.randn(size, generator=generator) for size in ((2, steps, *shape), (3, 2, *shape))]
    return Program(scope["fn"], inputs, "\n".join(lines), r.choice(["", "autograd"]))


def _start(r: Random) -> str:
    """Draw a first value; several states may begin as one tensor."""
    return r.choice(["first", "s[0].clone()", "s[1]", "s[2]"])


def _counted(r: Random, place: str) -> str:
    return f"{place} {r.choice(['+ 1', '* 0.5', '- 2'])}"


def _moved(r: Random, held: list[str], in_place: bool) -> str:
    """Draw what a state becomes: another one, an input, or what a step computes of one."""
    given = "u * 1.0" if in_place else "u"  # an input is never changed
    other = r.choice(held)
    return r.choice([other, other, other, "h", given, f"0.7 * {other} + u"])


def _assigned(r: Random, keeper: str, form: str, places: list[str], new: list[str]) -> list[str]:
    """Change what is kept at once; variables, lists and dictionaries also one place after another."""
    if (keeper in STARTS or keeper == "variables") and r.random() < 0.4:
        return r.sample([f"{place} = {value}" for place, value in zip(places, new, strict=True)], 3)
    return [form.format(*new)]
