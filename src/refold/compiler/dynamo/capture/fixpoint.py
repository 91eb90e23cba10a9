"""Capture one loop: find a state that the body leads to itself, and put the loop into Dynamo's graph as one node.

The body is traced from a form of the state; if it leaves another, it is traced again from that. When both agree, the
trace is the program of every step for which the decisions on the step's number are the same.

Source: Kildall 1973, the iteration to a fixed point of data flow analysis. Design decision 8.
"""

from __future__ import annotations

import dataclasses
from typing import cast

from torch._dynamo.exc import RestartAnalysis

from .carried import CarrySpec, first_spec, widen
from .emit import emit
from .iterators import Element, advance, element, goes_through, remaining
from .lengths import SymbolicIterator
from .liveness import live_at
from .trace import SHORTEST, TRACES, LoopCode, Trace, trace
from .variables import NotCaptured, Translator, described, example, form, name_of, not_carried, realized, tensors

# More steps than any loop has: what a ``while`` is asked for.
ENDLESS = 2**62


def capture_loop(tx: Translator, code: LoopCode) -> None:
    """Capture a loop at whose head the translator is, or raise; the translator is unchanged then.

    A loop of unknown length is tried as such first, and then with its length as a number.

    Raises:
        NotCaptured: It says why the loop is not captured. Other exceptions are Dynamo's, and mean the same.
    """
    iterator = None if code.element is None else realized(tx.stack[-1])
    if not isinstance(iterator, SymbolicIterator):
        return _capture(tx, code)
    try:
        return _capture(tx, code)
    except RestartAnalysis:
        raise
    except Exception:  # whatever it is, it may be otherwise with a number
        iterator.known()
    return _capture(tx, dataclasses.replace(code, element=cast(Element, element(tx, iterator))))


def _capture(tx: Translator, code: LoopCode) -> None:
    try:
        return _captured(tx, code)
    except RestartAnalysis:
        raise
    except Exception:  # limits of the step's number that are no arithmetic may be decided
        if not code.limited:
            raise
    return _captured(tx, dataclasses.replace(code, decides=True))


def _captured(tx: Translator, code: LoopCode) -> None:
    live = live_at(tx.instructions, tx.instructions[code.head])
    assumed, found = find(tx, code, live)
    iterator = None if code.element is None else realized(tx.stack[-1])
    if any(growing.grown and goes_through(iterator, growing.items) for growing in found.lists):
        raise NotCaptured("list-read", "the loop appends to the list that it goes through")
    count = left = ENDLESS if iterator is None else remaining(tx, iterator) or 0
    if isinstance(count, int):
        count = found.number.steps(count)
        if count == ENDLESS:
            raise NotCaptured("sequence-unknown", "no number that counts its steps decides when it ends")
    elif not found.number.hold(count):
        raise NotCaptured("step-number", found.number.decided(count, code.done))
    if count < SHORTEST:
        refused = NotCaptured("step-number", found.number.decided(left, code.done))
        refused.alike = count
        raise refused
    if not assumed.carried and found.only_reads:  # as views of their tensor, the items are of more use
        return
    emit(tx, assumed, found, count, live)
    if iterator is not None:
        advance(tx, iterator, count)


def find(tx: Translator, code: LoopCode, live: set[str]) -> tuple[CarrySpec, Trace]:
    """Find a form of the state that the body leads from and to, and the trace that shows it."""
    assumed = first_spec(tx, code.stored(tx.instructions), live)
    for _ in range(TRACES):
        try:
            found = trace(tx, code, assumed)
        except RestartAnalysis:
            raise
        except Exception as error:
            names = ", ".join(sorted(f"`{location.name}`" for location in assumed.unknown))
            if isinstance(error, NotCaptured) or not (names or assumed.plain):
                raise
            if names:
                raise not_carried(names) from error
            names = ", ".join(f"`{name_of(tx, x)}`" for x in assumed.plain)
            raise NotCaptured("list-read", f"the loop reads one of the lists {names}, and changes it") from error
        again = widen(tx, assumed, found.after, found.lists, found.number)
        if again is None:
            break
        moved = [f"`{x.name}`" for x, values in again.carried.items() if values is not assumed.carried.get(x)]
        assumed = again
    else:
        raise NotCaptured(
            "state-unstable", f"each step changes the type, shape, dtype or gradient of {', '.join(moved)}"
        )
    entry = {location: [example(x) for x in tensors(location.now(tx))] for location in assumed.carried}
    for location, later in assumed.carried.items():
        if [form(x) for x in entry[location]] == [form(x) for x in later]:
            continue
        # The first step starts from tensors of another form (say, without gradient): it must be the same program.
        first = trace(tx, code, dataclasses.replace(assumed, carried=entry))
        if first.program() != found.program():
            before, after = (", ".join(map(described, xs)) for xs in (entry[location], later))
            what = f"`{location.name}` is {before} before the loop, and {after} after a step"
            message = f"the first step runs another program, because {what}"
            raise NotCaptured("first-step", message)
        break
    return assumed, found
