"""Whether numbers are right: those that the candidate gives, beside the original's and those of float64."""

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
from .errors import Raised
from .messages import FORWARD
from .process import Call, Process, Result
from .results import ORDINARY, PARTS, integral, judged, rms, unlike
from .sides import Sides

COARSE = 0.01, 0.1  # of a gradient at large inputs, where backwards lose digits: at least, and at most
SPOT = 0.05  # of the size of such a gradient, by which one element may be off
DIGITS = 1e-4  # of it by which the original is off at most where it loses few digits itself
# Roundings that the original may always have: its gradients for inputs that are not ordinary, its results for large
# ones. What computes weights as exp(score - logsumexp) is off by a rounding of the score, which may be some hundreds; a
# softmax whose largest weight is one has no such error. Eight times these are allowed: less than 10 bits of float32.
ANEW = numerics.Errors(16.0, 64.0)
LOW = {"autocast": torch.bfloat16}  # ways of use in which a program may round so
METADATA = frozenset({"M1", "M2", "M3"})


class NumberChecks:
    """Compares what calls gave, and remembers what the original's own errors are.

    Attributes:
        known: Errors that the original is known to make.
        lucky: Whether a result was excused, since the original's own was right by luck.
        past: The candidate's last results.
    """

    def __init__(self, docket: Docket, sides: Sides):
        self.docket, self.sides = docket, sides
        self.known = numerics.NOTHING
        self.lucky = False
        # Norms of zero-mean inputs together, of their gradients, and of each input.
        self._usual: tuple[float, list[float], list[float]] | None = None
        self.past: deque[Result] = deque(maxlen=8)

    def compare(self, kind: str, check: str, call: Call, r: Result, o: Result, y: Result) -> None:
        """N1 and its kin: the two norms, for every result."""
        pairs = zip(o.tensors, y.tensors, strict=False)
        if (other := unlike(o, y)) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
            if not METADATA & self.docket.off:
                self.docket.step("M2", other or "what it returns cannot be compared")
            return  # metadata that was told to be ignored
        count = len(self.sides.outputs)
        far = kind == "astronomic"
        if kind in inputs.LARGE and not far and any(map(near_overflow, r.tensors, o.tensors)):
            self.docket.note(f"for {kind} inputs, the order of products decides what is finite; nothing was compared")
            return
        if far and (self.sides.squares or not all(map(_stays_exact, r.tensors, o.tensors))):
            return  # what squares on the way, as the original may itself, is as right
        known = [self.known * 1.125] * len(o.tensors) if r is o else self._estimate(call, len(o.tensors))
        if kind not in ORDINARY and self.sides.dtype in (torch.float32, torch.float64):
            anew = ANEW * numerics.roundoff(self.sides.dtype)
            first = 0 if kind in inputs.LARGE else count
            known[first:] = [each | anew for each in known[first:]]
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
                if inputs.is_real(b):
                    a, b = numerics.real(a, b)
                    self.known |= numerics.own_errors(a.double(), b)
        failure = worst.reason and f"{kind} inputs: {worst.reason}"
        if failure and (index := found.index(worst)) >= count:
            check, failure = check if call.use else "N7", f"{self._gradient(call, o, index - count)}, {failure}"
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
        # A score is a product of two inputs; a weight that is computed as its exponential is off by its rounding.
        scores = unit * grown * (self.sides.longest > 1)
        if scores > 1 and sides:
            self.docket.note(f"gradients for {kind} inputs were not compared: a rounding of a product is above one")
            return
        part = max(COARSE[0], 16 * unit, min(COARSE[1], 4 * scores))
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
            off, saturated = rms([y - r]) if finite else math.inf, size <= limit
            growth = left * grown if saturated else limit
            growth *= self.sides.longest > 1  # without a sum there are no such products
            most = max(part * size, 8 * own, left, growth)
            spot = float((y - r).abs().max()) if finite and r.numel() else 0.0
            failure = f"off by {off:.1e}, its size is {size:.1e}" if not off <= most else ""
            largest = max(size, float(r.abs().max())) if r.numel() else 0.0
            least = max(max(SPOT, 4 * part, 100 * unit) * largest, 8 * growth)
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
            each = zip(call.tensors, unit, signs, strict=True)
            tensors = [(t * (1 + 1.01 * u * s)).to(t.dtype) if u else t for t, u, s in each]
            other = replace(call, tensors=tensors, same_place=False)
            with contextlib.suppress(Raised):
                if sides.stateful and sides.shares_state:
                    sides.give(sides.witness, sides.given, sides.dtype)
                moved.append(sides.witness.call(other))
        out = []
        for index, one in enumerate(found):
            others = [m.tensors[index] for m in moved if len(m.tensors) == len(o.tensors)]
            near = not one.passed and numerics.no_farther(r.tensors[index], y.tensors[index], others, kind in PARTS)
            self.lucky |= near and kind in ORDINARY
            out.append(replace(one, passed=True, reason="", error=0.0) if near else one)
        return out

    def _estimate(self, call: Call, count: int) -> list[numerics.Errors]:
        """Estimate the errors of a float64 original from a float32 run."""
        sides = self.sides
        if sides.narrow is None or sides.random:
            return [numerics.NOTHING] * count

        def run(process: Process, dtype: torch.dtype) -> numerics.Function:
            wide = partial(sides.wide, dtype=dtype)
            return lambda *xs: process.call(wide(replace(call, tensors=list(xs)))).tensors

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
            worse = sides.reference.call(sides.wide(replace(call, tensors=rounded)))
        known = self._estimate(call, len(o.tensors))
        each = zip(r.tensors, o.tensors, worse.tensors, known, strict=True)
        valid = not all(judged("normal", a, b, c.to(b.dtype), d, sides.longest).passed for a, b, c, d in each)
        self.docket.step("N3", valid=valid)
        if not valid:
            self.docket.note(f"precision unverified: inputs rounded to {lower} would have passed as well")

    def near(self, o: Result, y: Result, kind: str = "") -> list[numerics.KindResult]:
        """Compare results with the original's own, whose error counts twice."""
        known, longest = self.known * 1.125, self.sides.longest
        return [judged(kind, a, a, b, known, longest) for a, b in zip(o.tensors, y.tensors, strict=True)]

    def timed(self, kind: str, call: Call, o: Result, y: Result, state: dict[str, torch.Tensor]) -> None:
        """C3: a timed result is right. First by the original's own result, whose error counts twice."""
        sides, usual = self.sides, "" if self.lucky or kind != "timed" else kind
        far = next((one for one in self.near(o, y, usual) if one.reason), None)
        if far is not None and not (sides.random or sides.stateful):
            # As any other, with float64 and moved inputs.
            if sides.shares_state:
                sides.give(sides.reference, state, torch.float64)
                sides.give(sides.witness, state, sides.dtype)
            with sides.of_the_original():
                r = sides.reference.call(sides.wide(call))
            self.compare(kind, "C3", call, r, o, y)
            if sides.shares_state:
                sides.give(sides.reference, sides.state, torch.float64)
        elif far is not None:
            failure = f"a timed call gave a wrong result: {far.reason}"
            self.docket.step("C3", failure, error=far.error, bound=far.bound)
        self.past.append(y)

    def _earlier(self, o: Result, y: Result) -> str:
        """Say so if a wrong result is one that an earlier call gave."""
        for old in self.past:
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


def near_overflow(exact: torch.Tensor, original: torch.Tensor) -> bool:
    """Say whether a result is so large that products of some of its factors may not be finite in its dtype."""
    if not (original.is_floating_point() and exact.numel()):
        return False
    return not float(exact.abs().max()) <= torch.finfo(original.dtype).max ** 0.5


def _stays_exact(exact: torch.Tensor, original: torch.Tensor) -> bool:
    """Say whether a result is right in its dtype, and far from all that is not finite."""
    if not (inputs.is_real(original) and exact.numel()):
        return True
    finite = bool(original.isfinite().all()) and float(exact.abs().max()) <= torch.finfo(original.dtype).max * 2.0**-20
    return finite and rms([original - exact]) <= COARSE[0] * rms([exact])


def _vanished(left: float, r: torch.Tensor, y: torch.Tensor, one: numerics.KindResult) -> numerics.KindResult:
    """Let pass what roundings leave of a gradient that vanishes next to others, as a query's where there is one key."""
    near = not one.passed and not bool(r.any()) and bool(y.isfinite().all()) and rms([y]) <= left
    return replace(one, passed=True, reason="", error=0.0) if near else one
