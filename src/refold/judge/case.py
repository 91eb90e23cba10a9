"""One call, on all sides: what comes back, what is shared, what is changed, and whether the numbers are right."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..verify import numerics
from . import inputs
from .docket import Docket
from .errors import Raised, Unjudgeable
from .messages import USES, Inspected
from .numbers import LOW, NumberChecks
from .process import Call, Process, Result
from .results import identical, judged, rule, strides, unlike
from .sides import Sides, Tensors, together

LARGER, LITTLE = 8, 1 << 16  # times and bytes by which the memory that a result is a part of may be larger
OTHER_DTYPES = (*LOW, "float64")  # in which results may be of other dtypes
TURNS = 3  # calls at most that a way of use makes


class Case:
    """One candidate beside its original: calls all sides, and compares what comes back.

    Attributes:
        docket: The record of the trial.
        sides: The programs in their processes.
        kept: A result of the candidate that is alive until the trial ends.
        aliases: What the original's results shared memory with in the last round.
        numbers: Compares the numbers.
    """

    kept: Result
    aliases: list[Any]

    def __init__(self, docket: Docket, sides: Sides):
        self.docket, self.sides = docket, sides
        self.numbers = NumberChecks(docket, sides)
        self._empty: list[Call] = []

    def round(
        self, kind: str, values: Tensors, *, check: str = "", adopted: bool = False, **options: Any
    ) -> tuple[Result, Result]:
        """Run one call on all sides and compare everything that comes back; say if they have their state already."""
        call = self.sides.call(values, salt=kind, **options)
        # If a check is named, what a number must be is known, and the original in its own precision stands for it.
        r, o, y = self.answers(call, wide=not check, adopted=adopted)
        self.metadata(o, y)
        self.numbers.compare(kind, check or rule(kind), call, r, o, y)
        self.aliases = o.aliases
        self.traces(o, y, o.aliases)
        self.numbers.past.append(y)
        self.compared(call, kind, wide=not check)
        return o, y

    def answers(self, call: Call, *, wide: bool = True, adopted: bool = False) -> tuple[Result, Result, Result]:
        """Call the reference, the original and the candidate."""
        if not adopted:
            self.sides.settle_state()
        with self.sides.of_the_original():
            o, r = self.sides.originals(call, wide=wide)
        return r, o, self.sides.ask(call)

    def compared(self, call: Call, name: str = "", *, wide: bool = False) -> None:
        """Count what the last call ran, now that it was right; with a name, one that ran what is new is looked into."""
        if (cover := self.sides.cover) is not None:
            first = not cover.marks
            new = cover.compared()
            if new and name and not first:
                self._look_into(name, call, wide)
            if not first:  # whose result is looked at again
                cover.raise_errors(partial(self.sides.suspect.call, call))
            cover.enough()

    def _look_into(self, name: str, call: Call, wide: bool) -> None:
        """C2, C6, S1 to S4, S7: make a call again: other weights, numbers in another order, calls in between."""
        sides, given = self.sides, self.sides.given
        if sides.shares_state:
            sides.adopt(sides.other_weights("moved", "look into", name))
        kind = name if name in (*inputs.LARGE, *inputs.EQUAL_TERMS) else f"{name} once more:"
        kept: list[Result] = []
        for check, use in (("C2", call.use), ("C6", call.use), ("C6", call.use or "between")):
            numbers = [inputs.rolled(t, len(kept)) for t in call.tensors]
            again = replace(call, tensors=numbers, use=use, same_place=False)
            with contextlib.suppress(Raised):  # by the original, which may not accept these
                if found := self._both(kind, check, again, "", wide):
                    kept.append(found[1])
        if kept and not call.use:
            self.unchanged(sides.suspect, kept[0])
            self.surroundings(sides.witness, sides.suspect, sides.modes, len(kept))
        if sides.shares_state:
            sides.adopt(given)

    def unless_refused(self, name: str, check: str, call: Call, note: str, *, wide: bool = False) -> bool:
        """Compare a call that the original may not accept, and that a candidate may refuse, by an exception.

        Args:
            name: What is special about the call.
            check: The check that a wrong result fails.
            call: The call.
            note: What is said of a candidate that refuses it; if empty, it may not.
            wide: Whether the reference is the original in float64, unless that draws random numbers.

        Returns:
            Whether the original accepts it.
        """
        try:
            if self._both(name, check, call, note, wide):
                self.compared(call, name, wide=wide)
        except Raised:
            return self.refused(call)
        return True

    def _both(self, name: str, check: str, call: Call, note: str, wide: bool) -> tuple[Result, Result] | None:
        """Compare a call, and return both results; nothing if the candidate refuses it."""
        sides = self.sides
        sides.settle_state()
        o, r = sides.originals(call, wide=wide)
        try:
            y = sides.ask(replace(call, perturb=call.perturb or 0xFF))  # what it leaves unwritten is NaN
        except Raised as error:
            if not note:
                self.docket.step(check, f"{name}: {error.reason}")
            self.docket.note(f"{note}: {error.reason}")
            return None
        if check != "C2" and call.use not in OTHER_DTYPES and all(t.numel() for t in call.tensors):
            self.surroundings(sides.witness, sides.suspect, "", TURNS, name)
        if call.use in OTHER_DTYPES:
            r, o, y = self._of_one_dtype(call, r, o, y)
        if other := unlike(o, y):
            self.docket.step("C6" if call.use else "M2", f"{name}: {other}")
        self.traces(o, y, o.aliases, name)
        self.numbers.compare(name, check, call, r, o, y)
        if check == "N6" and sides.cover is None and any(sides.ask(call).reused[: len(sides.outputs)]):
            self.docket.step("S7", f"{name}: its next result lies in the memory of this one, which is still held")
        return o, y

    def refused(self, call: Call) -> bool:
        """Keep empty inputs that the original refuses for the end: an error may leave a program in disorder."""
        self._empty += [] if all(t.numel() for t in call.tensors) else [call]
        return False

    def outside(self) -> None:
        """Count what runs for empty inputs that the original refuses: any result is as good as another there.

        What catches an error there would catch others, too, of which nothing is known.
        """
        for call in self._empty:
            with contextlib.suppress(Raised):
                self.sides.ask(call)
                if self.sides.cover is None or not self.sides.cover.caught():
                    self.compared(call)

    def accepts(self, call: Call) -> bool:
        """Say whether the original accepts a call."""
        try:
            self.sides.witness.call(call)
        except Raised:
            return False
        return True

    def agrees(self, call: Call) -> bool | None:
        """Say whether the candidate gives what the original gives; None if the original refuses the call."""
        sides = self.sides
        sides.settle_state()
        try:
            o = sides.witness.call(call)
        except Raised:
            return None
        try:
            y = sides.ask(call)
        except Raised:
            return False
        alike = all(a.shape == b.shape for a, b in zip(o.tensors, y.tensors, strict=False))
        right = not unlike(o, y) and alike and all(one.passed for one in self.numbers.near(o, y))
        if right:
            self.compared(call)
        return right

    def _of_one_dtype(self, call: Call, r: Result, o: Result, y: Result) -> tuple[Result, Result, Result]:
        """Cast results to one dtype, where the way of use says which dtypes a program computes in; integers are let be.

        A candidate need not follow: what the original gives in the plain way is as right.
        """
        sides, dtype = self.sides, LOW.get(call.use, self.sides.dtype)
        if o.tree != y.tree or [m.shape for m in o.metadata] != [m.shape for m in y.metadata]:
            return r, o, y
        if [m.dtype for m in o.metadata] != [m.dtype for m in y.metadata]:
            self.docket.note(f"{USES[call.use]}, it gives other dtypes than the original")

        def cast(result: Result) -> Result:
            each = zip(result.tensors, o.tensors, strict=True)
            tensors = [inputs.cast(t, dtype) if inputs.is_real(t) else own for t, own in each]
            metadata = [replace(m, dtype=str(t.dtype)[6:]) for m, t in zip(o.metadata, tensors, strict=True)]
            return replace(result, tensors=tensors, metadata=metadata)

        sides.settle_state()
        with sides.of_the_original():
            plain = cast(sides.witness.call(replace(call, use="")))
        each = zip(plain.tensors, cast(y).tensors, strict=True)
        known = self.numbers.known
        if all(judged("", a.to(torch.promote_types(a.dtype, torch.float64)), a, b, known, sides.longest).passed
               for a, b in each):  # fmt: skip
            return plain, plain, cast(y)
        return r, cast(o), cast(y)

    # What kind of thing came back.

    def metadata(self, o: Result, y: Result) -> None:
        """M1 to M4: what kind of thing came back."""
        step, train = self.docket.step, self.docket.terms.train
        if odd := next((m.odd for m in o.metadata if m.odd), None):
            raise Unjudgeable(f"the original gives a tensor that is {' and '.join(odd)}, which cannot be compared")
        for index, m in enumerate(y.metadata):
            where = f"result {index}"
            expected = o.metadata[index] if index < len(o.metadata) else m
            if m.type != expected.type:
                step("M1", f"{where} is a {m.type}, the original's a {expected.type}")
            if more := sorted(set(m.traits) - set(expected.traits)) or m.odd:
                step("M1", f"{where} is {', '.join(more)}, which the original's is not")
            if m.requires_grad != expected.requires_grad and (train or m.requires_grad):
                step("M4", f"{where} has {'a' if m.requires_grad else 'no'} gradient, unlike the original's")
            large = m.storage_bytes > LARGER * max(m.span, expected.storage_bytes) + LITTLE
            if large and index < len(self.sides.outputs):
                step("M1", f"{where} of {m.span} bytes keeps {m.storage_bytes} bytes of memory; return a copy")
            if not m.address and torch.Size(m.shape).numel() and not m.odd:
                step("M1", f"{where} has no memory")
        if y.tree != o.tree and train and y.tree.get("items", [])[:1] == o.tree["items"][:1]:
            step("N7", "it has gradients for other inputs or parameters than the original")
        if other := unlike(o, y):
            step("M2", other)
        for index, (a, b) in enumerate(zip(o.metadata, y.metadata, strict=True)):
            theirs, own = (strides(m.shape, m.stride) for m in (a, b))
            if theirs != own and index < len(self.sides.outputs):  # of gradients they mean nothing
                if own != strides(b.shape, torch.empty(b.shape, device="meta").stride()):
                    said = f"result {index} has strides {b.stride}, the original's {a.stride}"
                    step("M3", f"{said}; return it so, or contiguous")
                self.docket.note(f"result {index} is contiguous where the original's has strides {a.stride}")

    # What a call did other than returning.

    def _untouched(self, o: Result, y: Result) -> None:
        """S1, U2: what a call did to what the caller holds."""
        step = self.docket.step
        for index in y.changed:
            if index not in o.changed:
                step("S1", f"it changed input {index}, which the original leaves alone")
        for index in o.changed:
            if index not in y.changed:
                step("S1", f"it left input {index} alone, which the original changes")
            own = o.inputs_after[index]
            wide = own.to(torch.promote_types(own.dtype, torch.float64))
            result = judged("", wide, own, y.inputs_after[index], numerics.NOTHING, 4 * self.sides.longest)
            if result.reason:
                step("S1", f"it changed input {index} otherwise than the original: {result.reason}")
        if others := sorted(set(y.left) - set(o.left)):
            step("S1", f"it changed {', '.join(others)}, in the caller's hands")
        if y.cotangents_changed and not o.cotangents_changed:
            step("S1", "its backward changed the gradient that it was given, which others may use")
        if y.overrun and not o.overrun:
            step("U2", "it wrote to memory next to its inputs")

    def traces(self, o: Result, y: Result, aliases: list[Any], name: str = "") -> None:
        """S1, S2, S7, U2: what a call did other than returning, whose results may share memory with these.

        Of an unusual call, which has a name, they need not, where what they share is chance: an axis of one element.
        """
        self._untouched(o, y)
        each = list(zip(self._shared(aliases), self._shared(y.aliases), strict=False))
        if any(theirs != own and (own or not name) for theirs, own in each):
            said = f"{name}: " if name else ""
            self.docket.step("S2", f"{said}its results share memory with {y.aliases}, the original's with {aliases}")
        for index, (mine, theirs) in enumerate(zip(y.reused[: len(self.sides.outputs)], o.reused, strict=False)):
            if mine and not theirs:
                said = f"result {index} lies in the memory of an earlier call's result, which is still held"
                self.docket.step("S7", said)

    def _shared(self, aliases: list[Any]) -> list[Any]:
        """Leave out what gradients share with one another, which autograd expects; they need not."""
        count = len(self.sides.outputs)
        return [None if at >= count and a and a[0] == "output" and a[1] >= count else a for at, a in enumerate(aliases)]

    def surroundings(self, original: Process, candidate: Process, modes: str, calls: int = 1, name: str = "") -> None:
        """S1, S3 to S5, S8: what a candidate left, whose modes were these, and its state after so many calls.

        After an unusual call, which has a name, functions and modes are let be.
        """

        def theirs() -> Inspected:
            with self.sides.of_the_original():
                return original.inspect(functions=not name)

        expected, found = together(theirs, partial(candidate.inspect, functions=not name))
        step = self.docket.step
        changed = {n: v for n, v in found.settings.items() if expected.settings.get(n) != v}
        listed = ", ".join(f"{n} is {value[:80]}" for n, value in sorted(changed.items()))
        step("S4", f"it changed global settings: {listed}" if changed else "")
        patched = sorted(set(found.patched) - set(expected.patched))
        step("S5", f"it replaced {', '.join(patched)}" if patched else "")
        step("S3", "it leaves another random state than the original" if found.random != expected.random else "")
        failure = "it changed its training mode, its hooks, or which parameters need or have a gradient"
        step("S8", failure if found.modes != modes and not name else "")
        if self.sides.shares_state:
            _same_state(self, original, expected, candidate, found, calls, f"{name}: " if name else "")

    def unchanged(self, process: Process, kept: Result) -> None:
        """S7: a result that is kept does not change."""
        now = process.again(kept)
        own = [not alias or alias[0] == "output" for alias in kept.aliases]
        if any(mine and not identical(a, b) for mine, a, b in zip(own, kept.tensors, now, strict=True)):
            self.docket.step("S7", "a result that was kept changed with a later call")


def _same_state(
    case: Case, original: Process, expected: Inspected, candidate: Process, found: Inspected, calls: int, said: str = ""
) -> None:
    """S1: what a candidate made of its parameters and buffers is what the original made of them."""
    theirs = case.sides.read_state(original, expected)
    most = 2 * sum(t.numel() * t.element_size() for t in theirs.values()) + (1 << 20)
    ours = case.sides.read_state(candidate, found, most)
    if theirs.keys() != ours.keys():
        case.docket.step("S1", "it changed the names of its parameters")
    for name, value in theirs.items():
        mine = ours[name]
        if identical(value, mine):
            continue
        untouched = identical(value, case.sides.state[name])
        if untouched or value.shape != mine.shape or value.dtype != mine.dtype or not value.is_floating_point():
            what = f"it changed its parameter or buffer {name}" if untouched else f"its {name} is another"
            case.docket.step("S1", said + what)
            continue
        terms = 4 * case.sides.longest * calls**2  # each call adds its rounding error
        result = numerics.compare("", value.double(), value, mine, None, terms, parts=False)
        case.docket.step("S1", result.reason and f"{said}its parameter or buffer {name} differs: {result.reason}")
