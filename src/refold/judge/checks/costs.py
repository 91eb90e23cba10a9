"""What it costs beside its time, and what it writes to beside its results; when all else is right."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

from .. import inputs
from ..case import Case
from ..errors import Misbehaved, Raised
from ..numbers import COARSE
from ..nursery import Nursery
from ..process import Call
from ..program import Program
from ..results import rms

KEPT = 64 << 20  # bytes beyond those that the original keeps; less is not worth a note
MADE_S = 1.0  # to be made; less is not worth a note
CALLS = 16  # to see what is kept of each
SIZES = 6  # other shapes that are tried while the C library looks at memory


def kept(case: Case) -> None:
    """T11: work that was done when it was made, and memory that it keeps, are no part of the time of a call."""
    both, alive = (case.sides.witness, case.sides.suspect), list[list[int]]()
    for turn in (0, CALLS):
        for number in range(turn):
            case.round("actual", case.sides.actual("kept", number))
        alive.append([process.ask("alive", int) for process in both])
    theirs, own = (after - before for before, after in zip(*alive, strict=True))
    if own > theirs + CALLS // 2:  # the last results are kept in any case
        case.docket.note(f"it keeps tensors of each call: {own} after {CALLS} calls, the original {max(theirs, 0)}")
    made, held = case.sides.made, [process.held() for process in both]
    if made[1] > max(10 * made[0], MADE_S):
        case.docket.note(f"making it takes {made[1]:.1f} s, making the original {made[0]:.1f} s")
    if held[1] > held[0] + KEPT:
        case.docket.note(f"it keeps {(held[1] - held[0]) >> 20} MB of memory that the original does not keep")
    case.docket.step("T11", made_s=[round(s, 3) for s in made], held_bytes=held)


def heap(case: Case) -> None:
    """U3: what is written next to memory of its own shows when the C library looks at that memory.

    D1: the process for that has another hash seed, so that sets of texts have another order.
    """
    sides = case.sides
    if case.docket.terms.device != "cpu":
        return
    laid = inputs.layouts(sides.first, case.docket.derived("heap"))
    first = sides.call(sides.actual("heap"))
    calls = [first, *(sides.call(drawn) for _, drawn in laid)]
    others = inputs.resized(sides.first, case.docket.derived("heap sizes"))
    calls += [replace(sides.call(drawn), cotangents=()) for _, drawn in itertools.islice(others, SIZES)]
    known = []
    for call in calls:
        with contextlib.suppress(Raised):
            sides.witness.call(call)
            known.append(call)
    nursery, failure = sides.nursery.other(careful=True), ""
    ended = _ended(case, nursery, sides.candidate, known)
    if not nursery.is_careful():
        case.docket.note("whether it writes beyond its own memory is unknown: there is no libc_malloc_debug here")
    elif not ended and not sides.random and not sides.stateful:
        with sides.ready(sides.candidate, nursery=nursery, beside=sides.suspect) as other:
            other.names = sides.suspect.names
            if sides.shares_state:
                sides.give(other, sides.state, sides.dtype)
            found = zip(sides.ask(first).tensors, other.call(first).tensors, strict=True)
        apart = any(rms([b - a]) > COARSE[0] * rms([a]) for a, b in found if inputs.is_real(a))
        case.docket.step("D1", "it gives other results where sets have another order" if apart else "")
    elif ended and _ended(case, nursery, sides.original, known):
        case.docket.note("where the C library looks at all memory, neither it nor the original runs to the end")
    elif ended:
        failure = f"it wrote beyond memory of its own: where the C library looks at that, {ended}"
    case.docket.step("U3", failure, calls=len(known))


def _ended(case: Case, nursery: Nursery, program: Program, calls: Sequence[Call]) -> str:
    """Make calls and let go of each result; say how the process ended, empty if it lives."""
    sides = case.sides
    beside = sides.suspect if program is sides.candidate else None
    try:
        with sides.ready(program, nursery=nursery, beside=beside) as process:
            for call in [*calls, calls[0]]:
                with contextlib.suppress(Raised):  # what it may refuse
                    process.call(call, hold=False)
    except Raised:
        pass
    except Misbehaved as error:
        if error.check == "P4":
            return error.reason
        if error.check != "P3":  # it may be slow there
            raise
    return ""
