"""Whether it is right for other inputs: values, integers, constants, layouts, shapes, NaN and infinities."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import random
from dataclasses import replace
from typing import Any

import torch

from ...verify import numerics
from .. import inputs, weights
from ..case import Case
from ..errors import Misbehaved, Raised
from ..numbers import COARSE, near_overflow
from ..process import Call, Result
from ..results import alike, judged, rms, unlike
from ..shared import needed
from ..sides import ROWS, Tensors
from ..terms import DTYPES

DISCRETE = 4096  # integers and truth values among results that are compared,
MORE = 200  # in so many more calls at most
TWINS = 7  # times at most that one tensor is given for several arguments
USUAL = 4096.0  # numbers of a source up to which values are drawn around them together; larger ones have their own
FAR = 4  # of these
SLOW = 2  # times the processor time that shapes may take, for a candidate that compiles anew for each


def kinds(case: Case) -> None:
    """N1, N2, N4: many kinds of values."""
    sides, docket = case.sides, case.docket
    for kind in _chosen(case, inputs.names(sides.first)):
        whole = kind == "integers" and sides.shares_state
        if whole:
            sides.adopt(weights.whole(sides.state, docket.derived("whole numbers")))
        case.round(kind, sides.drawn(kind))
        if whole:
            sides.adopt(sides.state)
    _written(case)
    sizes = [math.prod(shape) for shape, dtype in sides.outputs if not (dtype.is_floating_point or dtype.is_complex)]
    if docket.level.deep and any(sizes):
        # Of a position or a truth value, rounding shows only where two values are nearly equal, which is rare.
        for turn in range(min(-(-DISCRETE // sum(sizes)), MORE, int(docket.level.kinds_s / sides.cost))):
            case.round("normal", sides.drawn("normal", "discrete", turn))


def _written(case: Case) -> None:
    """N4, N6: values at and around numbers that stand in its source, and integers and positions beyond them."""
    sides, docket = case.sides, case.docket
    numbers = sides.candidate.numbers
    for turn in range(2 + docket.level.deep):
        usual = inputs.around([n for n in numbers if n <= USUAL], sides.first, docket.derived("written", turn))
        case.round(inputs.WRITTEN, usual)
    far = [n for n in numbers if n > USUAL]
    for n in far[-FAR:] if docket.level.deep else ():
        scaled = [n * (t + t.sign()) if inputs.is_real(t) else t for t in sides.drawn("normal", "far", n)]
        case.round("astronomic", [t.to(x.dtype) for t, x in zip(scaled, sides.first, strict=True)])
    for n in (n for n in far[-FAR:] if n < 1 << 24):
        later = [_with_last(x, int(n) + 1) for x in sides.first]
        if docket.level.deep and _differ(sides.first, later):
            elsewhere(case, f"the integer {int(n) + 1}", later, "not for large integers")


def _with_last(x: torch.Tensor, n: int) -> torch.Tensor:
    """Let the last of some positions be another one."""
    positions = x.dtype in (torch.int32, torch.int64) and x.numel() > 1 and bool((x.diff() == 1).all())
    return torch.cat((x[..., :-1], torch.full_like(x[..., -1:], n)), -1) if positions else x


def _chosen(case: Case, found: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds of inputs to try: all, or, where calls are slow, a secret choice that time allows."""
    level = case.docket.level
    affordable = max(int(level.kinds_s / case.sides.cost), 3)
    if affordable >= len(found):
        return found
    others = [kind for kind in found if kind not in ("normal", "integers")]
    random.Random(case.docket.derived("kinds")).shuffle(others)
    if level.deep:
        case.docket.note(f"calls take long, so {affordable} of {len(found)} kinds of inputs were tried")
    return ("normal", "integers", *others[: affordable - 2])


def integers(case: Case) -> None:
    """N6: integers are drawn by the original alone, and may be the same in each call."""
    first = case.sides.first
    other = inputs.shuffled(first, case.docket.derived("order"))
    each = enumerate(zip(first, case.sides.actual("integers"), other, strict=True))
    fixed = [str(at) for at, (x, *xs) in each if not x.is_floating_point() and all(torch.equal(x, t) for t in xs)]
    if fixed:
        case.docket.note(f"input {', '.join(fixed)} was the same in all calls; other values were not tried")
    if _differ(first, other):
        elsewhere(case, "integers in another order", other, "not for integers in another order")
    far = [x if inputs.is_real(x) or x.dtype == torch.bool else 16 * x for x in first]
    if _differ(first, far):
        case.agrees(case.sides.call(far).forward)  # as positions beyond a table
    below = [x if inputs.is_real(x) or x.dtype in (torch.bool, torch.uint8) or not x.numel() else x - 1 - x.max()
             for x in first]  # fmt: skip
    if case.docket.level.deep and _differ(first, below):  # as places that are counted from the end
        elsewhere(case, "negative integers", below, "not for negative integers")
    narrow = [x.int() if x.dtype == torch.int64 else x.long() if x.dtype == torch.int32 else x for x in first]
    if case.docket.level.deep and _differ(first, narrow):
        elsewhere(case, "integers of another dtype", narrow, "not for integers of another dtype")


def _differ(these: Tensors, others: Tensors) -> bool:
    return not all(map(operator.is_, these, others))


def dtypes(case: Case) -> None:
    """Say so if it is wrong in another dtype, in which it is made anew; it is judged in one."""
    sides, docket = case.sides, case.docket
    if sides.random or sum(sides.suspect.processor_time()) > docket.level.shapes_s:  # as of what is compiled anew
        return
    for name in DTYPES:
        if (dtype := getattr(torch, name)) == sides.dtype:
            continue
        call = sides.wide(sides.call(sides.drawn("normal", name)), dtype).forward
        found: list[Result] = []
        try:
            r = sides.reference.call(sides.wide(call))
            for program, beside in ((sides.original, None), (sides.candidate, sides.suspect)):
                with sides.ready(program, dtype=name, beside=beside) as process:
                    process.names = beside.names if beside is not None else {}
                    if sides.shares_state:
                        sides.give(process, sides.state, dtype)
                    found.append(process.call(call))
        except Misbehaved as error:
            if found:
                docket.note(f"not in {name}: {error.reason}")
            continue
        each = zip(r.tensors, found[0].tensors, found[1].tensors, strict=False)
        if unlike(*found) or not all(judged("", *one, numerics.NOTHING, sides.longest).passed for one in each):
            docket.note(f"it is judged in {docket.terms.dtype}; in {name} it does not give what the original gives")


def arguments(case: Case) -> None:
    """N6: a number among the arguments is read, and each tensor of a list; one tensor may be given for two of them."""
    sides = case.sides
    call = sides.call(sides.drawn("normal", "constants"))
    numbers, stay = inputs.constants(sides.tree)
    for tree in (*numbers, *inputs.lengths(sides.tree)):
        elsewhere(case, "another number or length", call.tensors, "not for other numbers or lengths of lists", tree)
    if stay:
        said = f"the arguments {', '.join(map(repr, stay))} were the same in all calls; other values were not tried"
        case.docket.note(said)
    if left := sides.not_given:
        said = f"the arguments {', '.join(left)} have defaults and were not given"
        case.docket.note(f"{said}; it was not tried with them")
    for twins in itertools.islice(inputs.twins(sides.tree, call.tensors), TWINS):
        name, twin = "one tensor given twice", replace(call, tree=twins)
        case.unless_refused(name, "N6", twin, f"not for {name}", wide=case.docket.terms.train)


def special_values(case: Case) -> None:
    """N5: NaN and infinities stay where the original has them, as far as that is asked for; the rest is right."""
    sides, docket = case.sides, case.docket
    plain, seed = sides.call(sides.drawn("normal", "specials")), docket.derived("at")
    calls = [(name, replace(plain, tensors=values)) for name, values in inputs.specials(plain.tensors, seed)]
    back = inputs.specials(plain.cotangents, seed)
    for name, call in [*calls, *((f"{name} flowing back", replace(plain, cotangents=values)) for name, values in back)]:
        if name == inputs.MASKS and not case.accepts(call.forward):
            continue
        try:
            _, o, y = case.answers(call, wide=False)
        except Raised as error:
            if name != inputs.MASKS:
                raise
            docket.note(f"not with {name}: {error.reason}")
            continue
        if other := unlike(o, y):
            docket.step("M2", f"with {name} among its inputs, {other}")
        differ = [
            not (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf() * a.sign(), b.isinf() * b.sign()))
            for a, b in zip(o.tensors, y.tensors, strict=True)
            if a.is_floating_point()
        ]
        for a, b, _ in zip(o.tensors, y.tensors, sides.outputs, strict=False):  # of gradients, algebra decides more
            both = a.isfinite() & b.isfinite()
            if inputs.is_real(a) and rms([(b - a)[both]]) > COARSE[0] * rms([a[both]]):
                docket.step("N5", f"with {name} among its inputs, finite results are wrong")
        failure = f"with {name} among its inputs, other results are not finite than of the original"
        if any(differ) and docket.terms.nonfinite != "strict":
            docket.note(failure)
        docket.step("N5", failure if any(differ) and docket.terms.nonfinite == "strict" else "", special=name)
        case.compared(call)


def layouts(case: Case) -> None:
    """N6: inputs that lie otherwise in memory."""
    sides, seed = case.sides, case.docket.derived("layouts")
    for name, values in inputs.layouts(sides.first, seed):
        elsewhere(case, name, values, f"not for {name} inputs")
    if case.docket.terms.train:
        call = sides.call(sides.drawn("normal", "cotangents"))
        for name, values in inputs.layouts(call.cotangents, seed):
            other, said = replace(call, cotangents=values), f"{name} cotangents"
            case.unless_refused(said, "N6", other, f"not for {said}", wide=True)


def shapes(case: Case) -> None:
    """N6: other shapes. A candidate may refuse them, by an exception; wrong results it may not give."""
    level, sides = case.docket.level, case.sides
    if not level.shapes_s:
        return
    most = min(60 if case.docket.terms.level == "paranoid" else 24, max(int(level.shapes_s / sides.cost), 2))
    tried, began = 0, sum(sides.suspect.processor_time())
    size = sum(t.numel() for t in sides.first)
    for name, values in inputs.resized(sides.first, case.docket.derived("shapes")):
        if tried >= most or sum(sides.suspect.processor_time()) - began > SLOW * level.shapes_s:
            break
        if sum(t.numel() for t in values) > 4 * size + 64:
            continue
        if _is_broadcast(case, name, call := sides.call(values).forward):
            if case.agrees(call) is False:
                case.docket.note(f"it is not right where sizes are broadcast to those of weights: {name}")
            continue
        tried += elsewhere(case, f"size {name}", values, f"not for size {name}")
    sizes = sorted({n for x in sides.first for n in x.shape if n > 1})
    random.Random(case.docket.derived("long")).shuffle(sizes)
    for long in sizes:
        _long(case, long, level.shapes_s / 2 / len(sizes))
    _like_none_before(case)


def _is_broadcast(case: Case, name: str, call: Call) -> bool:
    """Say whether a size of one is broadcast to one of weights: a result is as large as ever."""
    old, _, new = name.partition(" -> ")
    usual = {tuple(shape) for shape, _ in case.sides.outputs}
    with contextlib.suppress(Raised):
        if new == "1" and any(int(old) in t.shape for t in case.sides.state.values()):
            return any(tuple(t.shape) in usual for t in case.sides.witness.call(call).tensors)
    return False


def _shortened(case: Case, size: int) -> dict[int, int]:
    """Let all other sizes be short, if the original allows it, so that this one may get long."""
    sides, short = case.sides, dict[int, int]()
    for other in sorted({n for x in sides.first for n in x.shape if n > 2} - {size}, reverse=True):
        short[other] = 2
        if not case.accepts(Call(sides.tree, inputs.sized(sides.first, {**short, size: size + 1}, 0))):
            del short[other]
    return short


def _long(case: Case, size: int, seconds: float) -> None:
    """N6: an axis gets as long as numbers that stand in its source, and longer, if time and results allow it.

    Or so long that an input has as many numbers. Far from the usual length, only gross errors count.
    """
    sides, longest, began = case.sides, case.sides.longest, sum(case.sides.suspect.processor_time())
    short = _shortened(case, size)
    rests = {math.prod(short.get(n, n) for n in x.shape) // size or 1 for x in sides.first if size in x.shape}
    wanted = {size << power | 1 for power in range(3, 20, 3)}
    for n in (int(n) for n in sides.candidate.numbers if n.is_integer() and n <= ROWS):
        wanted |= {n, n + 1, *(n // rest + 1 for rest in rests)}
    slowness = results = 0.0  # the original's seconds and results for each of a size
    for new in sorted(n for n in wanted if n > 4 and n != size):  # of fewer, some are in order by chance
        seed, name = case.docket.derived("long", size, new), f"size {size} -> {new}"
        drawn = inputs.sized(sides.first, {**short, size: new}, seed)
        spent = sum(sides.suspect.processor_time()) - began
        if (
            sum(t.numel() for t in drawn) + results * new > ROWS
            or slowness * new > max(seconds / 4, 0.15)
            or spent > seconds
        ):
            return
        try:
            o = sides.witness.call(Call(sides.tree, drawn))
            if any(map(near_overflow, o.tensors, o.tensors)):
                return
            slowness, results = o.seconds / new, sum(t.numel() for t in o.tensors) / new
            if new > 8 * size:
                terms, _ = sides.reference.terms(sides.wide(Call(sides.tree, drawn)))
                sides.longest = max(longest, terms) ** 2
            marks = set() if sides.cover is None else set(sides.cover.marks)
            elsewhere(case, name, drawn, f"not for {name}")
            if sides.cover is not None and sides.cover.marks - marks:  # what is left to one size may ask for more
                elsewhere(case, name, next(inputs.layouts(drawn, seed))[1], f"not for {name}")
                recorded = replace(sides.call(drawn).forward, mode="recorded", requires_grad=True)
                case.unless_refused(name, "N6", recorded, f"not for {name}")
        except Raised:
            return
        finally:
            sides.longest = longest


def _like_none_before(case: Case) -> None:
    """N6: inputs of more axes, or that are broadcast; a note says if it is right for the axes of its inputs alone.

    A kernel that asks for no size reads beyond an input that is broadcast, which does not make it a wrong one. What
    gives the same wrong result whatever lies there knows that it is.
    """
    sides, seed = case.sides, case.docket.derived("axes")
    values = sides.drawn("normal", "axes")
    for said, some in (("more", [x.unsqueeze(0) for x in values]), ("less", [x[0] if x.dim() else x for x in values])):
        if all(x.numel() for x in some) and case.agrees(sides.call(some).forward) is False:
            case.docket.note(f"it is not right for inputs of one axis {said}")
    for name, few in inputs.broadcast(values, seed):
        call = sides.call(few).forward
        if case.agrees(call) is not False:
            continue
        case.docket.note(f"it is not right where {name} is broadcast")
        with contextlib.suppress(Raised):
            o, found = sides.witness.call(call), [sides.ask(replace(call, perturb=byte)) for byte in (0xFF, 0x7B)]
            if not unlike(o, found[0]) and alike(*found):
                case.docket.step("N6", f"where {name} is broadcast, it is wrong")


def elsewhere(case: Case, name: str, values: Tensors, note: str, tree: Any = None) -> bool:
    """Try inputs that the original may not accept, and the candidate may refuse; say if the original accepts them."""
    sides = case.sides
    call = replace(sides.call(values), tree=tree or sides.tree)
    if case.docket.terms.train:
        try:
            plain = sides.witness.call(replace(call, cotangents=()))
        except Raised:
            return case.refused(call.forward)
        g = inputs.generator(case.docket.derived("cotangents", name))
        # Of a sequence of one step, whether the gradient of a decay is zero or none depends on how it is written.
        call = replace(call, cotangents=[inputs.normal(t, g) for t in plain.tensors], flow="filled")
    if needed(call.values) > sides.witness.shared.room:
        return False
    return case.unless_refused(name, "N6", call, note)
