"""One call, on all sides: what comes back, what is shared, what is changed, and whether the numbers are right."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..verify import numerics
from . import inputs
from .docket import Docket
from .errors import Raised, Unjudgeable
from .messages import FORWARD, USES, Inspected
from .process import Call, Process, Result
from .results import ORDINARY, contiguous, identical, integral, judged, real64, rms, rule, strides, unlike
from .sides import Sides, Tensors, together

COARSE = 0.01  # of a gradient at large inputs, where backwards lose digits
SPOT = 0.05  # of the size of such a gradient, by which one element may be off
DIGITS = 1e-4  # of it by which the original is off at most where it loses few digits itself
LOW = {"autocast": torch.bfloat16}  # ways of use in which a program may round so
OTHER_DTYPES = (*LOW, "float64")  # in which results may be of other dtypes
METADATA = frozenset({"M1", "M2", "M3"})


class Case:
    """One candidate beside its original: calls all sides, and compares what comes back.

    Attributes:
        docket: The record of the trial.
        sides: The programs in their processes.
        kept: A result of the candidate that is alive until the trial ends.
        known: Errors that the original is known to make.
        lucky: Whether a result was excused, since the original's own was right by luck.
    """

    kept: Result

    def __init__(self, docket: Docket, sides: Sides):
        self.docket, self.sides = docket, sides
        self.known = numerics.NOTHING
        self.lucky = False
        self._aliases: list[Any] = []  # what the original's results share memory with
        # Norms of zero-mean inputs together, of their gradients, and of each input.
        self._usual: tuple[float, list[float], list[float]] | None = None
        self._past: deque[Result] = deque(maxlen=8)

    def round(
        self, kind: str, values: Tensors, *, check: str = "", adopted: bool = False, **options: Any
    ) -> tuple[Result, Result]:
        """Run one call on all sides and compare everything that comes back; say if they have their state already."""
        sides = self.sides
        call = sides.call(values, salt=kind, **options)
        if not adopted:
            sides.settle_state()
        with sides.of_the_original():
            # If a check is named, what a number must be is known, and the original in its own precision stands for it.
            o, r = sides.originals(call, wide=not check)
        y = sides.ask(call)
        self.metadata(o, y)
        self.numbers(kind, check or rule(kind), call, r, o, y)
        self._aliases = o.aliases
        self.traces(o, y)
        self._past.append(y)
        self.compared()
        return o, y

    def compared(self) -> None:
        """Count what the last call ran, now that it was right."""
        if self.sides.cover is not None:
            self.sides.cover.compared()

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
        sides = self.sides
        sides.settle_state()
        try:
            o, r = sides.originals(call, wide=wide)
        except Raised:
            return False
        try:
            y = sides.ask(call)
        except Raised as error:
            if not note:
                self.docket.step(check, f"{name}: {error.reason}")
            self.docket.note(f"{note}: {error.reason}")
            return True
        if call.use in OTHER_DTYPES:
            r, o, y = self._of_one_dtype(call, r, o, y)
        if other := unlike(o, y):
            self.docket.step("C6" if call.use else "M2", f"{name}: {other}")
        self._untouched(o, y)
        self.numbers(name, check, call, r, o, y)
        self.compared()
        return True

    def agrees(self, call: Call) -> bool | None:
        """Say whether the candidate gives what the original gives; None if the original refuses the call."""
        sides = self.sides
        sides.settle_state()
        try:
            o = sides.witness.call(call, self.docket.terms.timeout)
        except Raised:
            return None
        try:
            y = sides.ask(call)
        except Raised:
            return False
        known = self.known * 1.125
        right = not unlike(o, y) and all(
            a.shape == b.shape and judged("", real64(a), a, b, known, sides.longest).passed
            for a, b in zip(o.tensors, y.tensors, strict=True)
        )
        if right:
            self.compared()
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
            real = torch.complex128 if dtype == torch.float64 else torch.complex64
            tensors = [
                t.to(dtype) if t.is_floating_point() else t.to(real) if t.is_complex() else own
                for t, own in zip(result.tensors, o.tensors, strict=True)
            ]
            metadata = [replace(m, dtype=str(t.dtype)[6:]) for m, t in zip(o.metadata, tensors, strict=True)]
            return replace(result, tensors=tensors, metadata=metadata)

        sides.settle_state()
        with sides.of_the_original():
            plain = cast(sides.witness.call(replace(call, use=""), self.docket.terms.timeout))
        each = zip(plain.tensors, cast(y).tensors, strict=True)
        if all(judged("", a.to(torch.promote_types(a.dtype, torch.float64)), a, b, self.known, sides.longest).passed
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
            if more := set(m.traits) - set(expected.traits):
                step("M1", f"{where} is {', '.join(sorted(more))}, which the original's is not")
            if m.odd:
                step("M1", f"{where} is {', '.join(m.odd)}, which the original's is not")
            if m.requires_grad != expected.requires_grad and (train or m.requires_grad):
                step("M4", f"{where} has {'a' if m.requires_grad else 'no'} gradient, unlike the original's")
            if not m.address and torch.Size(m.shape).numel() and not m.odd:
                step("M1", f"{where} has no memory")
        if y.tree != o.tree and train and y.tree.get("items", [])[:1] == o.tree["items"][:1]:
            step("N7", "it has gradients for other inputs or parameters than the original")
        if other := unlike(o, y):
            step("M2", other)
        for index, (a, b) in enumerate(zip(o.metadata, y.metadata, strict=True)):
            if strides(a) != strides(b) and index < len(self.sides.outputs):  # of gradients they mean nothing
                if strides(b) != contiguous(b.shape):
                    said = f"result {index} has strides {b.stride}, the original's {a.stride}"
                    step("M3", f"{said}; return it so, or contiguous")
                self.docket.note(f"result {index} is contiguous where the original's has strides {a.stride}")

    # Numbers.

    def numbers(self, kind: str, check: str, call: Call, r: Result, o: Result, y: Result) -> None:
        """N1 and its kin: the two norms, for every result."""
        pairs = zip(o.tensors, y.tensors, strict=False)
        if (other := unlike(o, y)) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
            if not METADATA & self.docket.off:
                self.docket.step("M2", other or "what it returns cannot be compared")
            return  # metadata that was told to be ignored
        count = len(self.sides.outputs)
        if kind == "enormous" and any(map(_near_overflow, r.tensors, o.tensors)):
            self.docket.note("of enormous inputs, the order of products decides what is finite; nothing was compared")
            return
        known = [self.known * 1.125] * len(o.tensors) if r is o else self._estimate(call, len(o.tensors))
        sides = list(zip(r.tensors, o.tensors, y.tensors, known, strict=True))
        if kind in inputs.LARGE:
            # Exponentials are saturated there, and what kernels keep of them for the backward has no digits left.
            self.coarse(kind, call, o, sides[count:])
            sides = sides[:count]
        found = [judged(kind, *each, self.sides.longest) for each in sides]
        if check == "N2":
            whole = [integral(*each) for each in zip(r.tensors, o.tensors, y.tensors, strict=True)]
            check = "N2" if all(whole) else "N4"
            found = [exact or one for exact, one in zip(whole, found, strict=True)]
        if check != "N2" and not all(one.passed for one in found):
            others = max([0.0, *(rms([t]) for t in r.tensors[count:]), *(self._usual[1] if self._usual else ())])
            left = 32 * numerics.roundoff(self.sides.dtype) * others
            for index in range(count, len(found)):
                found[index] = _vanished(left, r.tensors[index], y.tensors[index], found[index])
        if check != "N2" and not all(one.passed for one in found):
            found = self._excused(kind, call, r, o, y, found)
        worst = min(found, key=lambda one: (one.passed, -one.error / (one.bound or 1.0)))
        if check == "N1" and r is not o:
            # What the original's own errors are, for calls that are compared with the original alone.
            for a, b in zip(r.tensors, o.tensors, strict=True):
                if b.is_floating_point() or b.is_complex():
                    a, b = numerics.real(a, b)
                    self.known |= numerics.own_errors(a.double(), b)
        failure = worst.reason and f"{kind} inputs: {worst.reason}"
        if failure and found.index(worst) >= count:
            check, failure = (
                check if call.use else "N7",
                f"{self._gradient(call, o, found.index(worst) - count)}, {failure}",
            )
        if failure and check not in ("N9", "C6") and "C1" not in self.docket.off and (stale := self._earlier(o, y)):
            check, failure = "C1", stale
        numbers = {"error": worst.error, "original": worst.original_error, "worst": worst.worst, "bound": worst.bound}
        self.docket.step(check, failure, kind=kind, **numbers)
        if kind == "normal" and r is not o:
            if self._usual is None or len(sides) - count > len(self._usual[1]):  # not of a call that asks for some
                self._usual = rms(call.tensors), [rms([t]) for t in r.tensors[count:]], [rms([t]) for t in call.tensors]
            self._calibrate(call, r, o)

    def _gradient(self, call: Call, o: Result, index: int) -> str:
        """Name a gradient by what it is taken of."""
        names = self.gradients(call, o)
        if call.use in FORWARD:
            return f"derivative of result {index}"
        return f"gradient of {names[index]}" if index < len(names) else f"gradient {index}"

    def gradients(self, call: Call, o: Result) -> list[str]:
        """Name all gradients by what they are taken of; those that are none have no tensor."""
        tree = o.tree["items"][1] if isinstance(o.tree, dict) and o.tree.get("sequence") == "with gradients" else {}
        each = zip(self.sides.gradients(call), tree.get("items", ()), strict=False)
        return [name for name, one in each if "tensor" in one]

    def coarse(self, kind: str, call: Call, result: Result, sides: Sequence[tuple[Any, ...]]) -> None:
        """N7: gradients at large inputs are near, but for what is left of products of large inputs and no digits.

        Where the original itself loses none, no single element may be far off either.
        """
        unit = numerics.roundoff(self.sides.dtype)
        usual, before, sizes = self._usual or (0.0, [], [])
        grown = max(1.0, rms(call.tensors) / usual) ** 2 if usual else 1.0
        times = [max(1.0, rms([t]) / (n or 1.0)) for t, n in zip(call.tensors, sizes, strict=False)]
        names = self.gradients(call, result)
        for index, (r, o, y) in enumerate(side[:3] for side in sides):
            r, o, y = (t.double() for t in numerics.real(r, o, y))
            if not bool(r.isfinite().all() & o.isfinite().all()):
                continue
            # What roundings of terms leave: they are as large as a gradient would be that is a product of all other
            # inputs. One that always vanishes has terms as large as those of others.
            left = 100 * unit * (before[index] or max(before) if before else 0.0)
            own_input = names[index].removeprefix("input ") if index < len(names) else ""
            limit = left * math.prod(n for at, n in enumerate(times) if str(at) != own_input)
            size, own = rms([r]), rms([o - r])
            finite = bool(y.isfinite().all())
            if not finite and kind in ("huge", "enormous"):  # as of torch's own attention; it cannot go unseen
                self.docket.note(f"{self._gradient(call, result, index)} is not finite for {kind} inputs")
                continue
            off, saturated = rms([y - r]) if finite else math.inf, size <= limit
            growth = left * grown if saturated else limit
            growth *= self.sides.longest > 1  # without a sum there are no such products
            most = max(max(COARSE, 16 * unit) * size, 8 * own, left, growth)
            spot = float((y - r).abs().max()) if finite and r.numel() else 0.0
            failure = f"off by {off:.1e}, its size is {size:.1e}" if not off <= most else ""
            least = max(max(SPOT, 100 * unit) * max(size, float(r.abs().max())), 8 * growth) if r.numel() else 0.0
            if own <= DIGITS * size and not saturated and not failure and spot > least:
                failure = f"one element is off by {spot:.1e}, its size is {size:.1e}"
            said = failure and f"{self._gradient(call, result, index)}, {kind} inputs: {failure}"
            self.docket.step("N7", said, kind=kind, error=off, bound=most)

    def _excused(
        self, kind: str, call: Call, r: Result, o: Result, y: Result, found: list[numerics.KindResult]
    ) -> list[numerics.KindResult]:
        """Let pass what is off as the original is when its inputs move by one rounding.

        Where little is left of a difference of nearly equal numbers, how far off the original is on these very inputs
        may be luck: the variance of equal numbers is zero in one order of summation, and nearly zero in others.
        """
        sides = self.sides
        g = inputs.generator(self.docket.derived("moved", kind))
        low = numerics.roundoff(LOW[call.use]) if call.use in LOW else 0.0
        unit = [max(low, numerics.roundoff(t.dtype)) if t.is_floating_point() else 0.0 for t in call.tensors]
        moved: list[Result] = []
        for _ in range(numerics.MOVES):
            signs = [2 * torch.randint(0, 2, t.shape, generator=g) - 1 for t in call.tensors]
            tensors = [
                (t * (1 + 1.01 * u * s)).to(t.dtype) if u else t
                for t, u, s in zip(call.tensors, unit, signs, strict=True)
            ]
            other = replace(call, tensors=tensors, same_place=False)
            with contextlib.suppress(Raised):
                if sides.stateful and sides.shares_state:
                    sides.give(sides.witness, sides.given, sides.dtype)
                moved.append(sides.witness.call(other, self.docket.terms.timeout))
        out = []
        for index, one in enumerate(found):
            others = [m.tensors[index] for m in moved if len(m.tensors) == len(o.tensors)]
            near = not one.passed and numerics.no_farther(r.tensors[index], y.tensors[index], others, kind in ORDINARY)
            self.lucky |= near and kind in ORDINARY
            out.append(replace(one, passed=True, reason="", error=0.0) if near else one)
        return out

    def _estimate(self, call: Call, count: int) -> list[numerics.Errors]:
        """Estimate the errors of a float64 original from a float32 run."""
        sides = self.sides
        if sides.narrow is None or sides.random:
            return [numerics.NOTHING] * count

        def run(process: Process, dtype: torch.dtype) -> numerics.Function:
            return lambda *xs: (
                process.call(sides.wide(replace(call, tensors=list(xs)), dtype), self.docket.terms.timeout).tensors
            )

        narrowed, reference = run(sides.narrow, torch.float32), run(sides.reference, torch.float64)
        with sides.of_the_original():
            return numerics.estimated(narrowed, reference, list(call.tensors), False)

    def _calibrate(self, call: Call, r: Result, o: Result) -> None:
        """N3: a kind of input says something about precision only if less of it would be refused."""
        sides = self.sides
        lower = {torch.float32: torch.float16, torch.float64: torch.float32}.get(sides.dtype)
        if lower is None:
            return
        rounded = [t.to(lower).to(t.dtype) if t.is_floating_point() else t for t in call.tensors]
        with sides.of_the_original():
            worse = sides.reference.call(sides.wide(replace(call, tensors=rounded)), self.docket.terms.timeout)
        known = self._estimate(call, len(o.tensors))
        each = zip(r.tensors, o.tensors, worse.tensors, known, strict=True)
        valid = not all(judged("normal", a, b, c.to(b.dtype), d, sides.longest).passed for a, b, c, d in each)
        self.docket.step("N3", valid=valid)
        if not valid:
            self.docket.note(f"precision unverified: inputs rounded to {lower} would have passed as well")

    def timed(self, kind: str, call: Call, o: Result, y: Result, state: dict[str, torch.Tensor]) -> None:
        """C3: a timed result is right. First by the original's own result, whose error counts twice."""
        known, sides = self.known * 1.125, self.sides
        usual = "" if self.lucky or kind != "timed" else kind
        near = [judged(usual, real64(a), a, b, known, sides.longest) for a, b in zip(o.tensors, y.tensors, strict=True)]
        far = next((one for one in near if one.reason), None)
        if far is not None and not (sides.random or sides.stateful):
            # As any other, with float64 and moved inputs.
            if sides.shares_state:
                sides.give(sides.reference, state, torch.float64)
                sides.give(sides.witness, state, sides.dtype)
            with sides.of_the_original():
                r = sides.reference.call(sides.wide(call), self.docket.terms.timeout)
            self.numbers(kind, "C3", call, r, o, y)
            if sides.shares_state:
                sides.give(sides.reference, sides.state, torch.float64)
        elif far is not None:
            failure = f"a timed call gave a wrong result: {far.reason}"
            self.docket.step("C3", failure, error=far.error, bound=far.bound)
        self._past.append(y)

    def _earlier(self, o: Result, y: Result) -> str:
        """Say so if a wrong result is one that an earlier call gave."""
        for old in self._past:
            if len(old.tensors) != len(y.tensors):
                continue
            same = [
                torch.equal(a, b) and a.numel() > 1 and not torch.equal(a, c)
                for a, b, c in zip(y.tensors, old.tensors, o.tensors, strict=True)
                if a.shape == b.shape and a.dtype == b.dtype
            ]
            if same and all(same) and all(bool((t != t.reshape(-1)[:1]).any()) for t in y.tensors):
                return "it returned the result of an earlier call for new inputs"
        return ""

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

    def traces(self, o: Result, y: Result) -> None:
        """S1, S2, S7, U2: what a call did other than returning."""
        self._untouched(o, y)
        if self._shared(self._aliases) != self._shared(y.aliases):
            said = f"its results share memory with {y.aliases}, the original's with {self._aliases}"
            self.docket.step("S2", said)
        for index in range(len(self.sides.outputs)):
            if y.reused[index] and not o.reused[index]:
                said = f"result {index} lies in the memory of an earlier call's result, which is still held"
                self.docket.step("S7", said)

    def _shared(self, aliases: list[Any]) -> list[Any]:
        """Leave out what gradients share with one another, which autograd expects; they need not."""
        count = len(self.sides.outputs)
        return [None if at >= count and a and a[0] == "output" and a[1] >= count else a for at, a in enumerate(aliases)]

    def surroundings(self, original: Process, candidate: Process, modes: str, calls: int = 1) -> None:
        """S1, S3 to S5, S8: what a candidate left, whose modes were these, and its state after so many calls."""

        def theirs() -> Inspected:
            with self.sides.of_the_original():
                return original.inspect(functions=True)

        expected, found = together(theirs, partial(candidate.inspect, functions=True))
        step = self.docket.step
        changed = {n: v for n, v in found.settings.items() if expected.settings.get(n) != v}
        listed = ", ".join(f"{name} is {value[:80]}" for name, value in sorted(changed.items()))
        step("S4", f"it changed global settings: {listed}" if changed else "")
        patched = sorted(set(found.patched) - set(expected.patched))
        step("S5", f"it replaced {', '.join(patched)}" if patched else "")
        step("S3", "it leaves another random state than the original" if found.random != expected.random else "")
        failure = "it changed its training mode, its hooks, or which parameters need or have a gradient"
        step("S8", failure if found.modes != modes else "")
        if self.sides.shares_state:
            self._same_state(original, expected, candidate, found, calls)

    def _same_state(
        self, original: Process, expected: Inspected, candidate: Process, found: Inspected, calls: int
    ) -> None:
        theirs = self.sides.read_state(original, expected)
        most = 2 * sum(t.numel() * t.element_size() for t in theirs.values()) + (1 << 20)
        ours = self.sides.read_state(candidate, found, most)
        if theirs.keys() != ours.keys():
            self.docket.step("S1", "it changed the names of its parameters")
        for name, value in theirs.items():
            mine = ours[name]
            if identical(value, mine):
                continue
            untouched = identical(value, self.sides.state[name])
            if untouched or value.shape != mine.shape or value.dtype != mine.dtype or not value.is_floating_point():
                said = f"it changed its parameter or buffer {name}" if untouched else f"its {name} is another"
                self.docket.step("S1", said)
                continue
            terms = 4 * self.sides.longest * calls**2  # each call adds its rounding error
            result = numerics.compare("", value.double(), value, mine, None, terms, parts=False)
            self.docket.step("S1", result.reason and f"its parameter or buffer {name} differs: {result.reason}")

    def unchanged(self, process: Process, kept: Result) -> None:
        """S7: a result that is kept does not change."""
        now = process.again(kept, self.sides.most)
        own = [not alias or alias[0] == "output" for alias in kept.aliases]
        if any(mine and not identical(a, b) for mine, a, b in zip(own, kept.tensors, now, strict=True)):
            self.docket.step("S7", "a result that was kept changed with a later call")


def _near_overflow(exact: torch.Tensor, original: torch.Tensor) -> bool:
    """Say whether a result is so large that products of some of its factors may not be finite in its dtype."""
    if not (original.is_floating_point() and exact.numel()):
        return False
    return not float(exact.abs().max()) <= torch.finfo(original.dtype).max ** 0.5


def _vanished(left: float, r: torch.Tensor, y: torch.Tensor, one: numerics.KindResult) -> numerics.KindResult:
    """Let pass what roundings leave of a gradient that vanishes next to others, as a query's where there is one key."""
    near = not one.passed and not bool(r.any()) and bool(y.isfinite().all()) and rms([y]) <= left
    return replace(one, passed=True, reason="", error=0.0) if near else one
