"""How results of a call are compared with the reference in float64: the two norms, and what is excused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import numerics
from . import inputs
from .process import Call, Raised, Result, Worker
from .results import ORDINARY, integral, judged, rms
from .session import Session

COARSE = 0.01  # of a gradient at large inputs, where backwards lose digits


class Comparison(Session):
    """The part of a trial that is about numbers."""

    def _wide(self, call: Call, dtype: torch.dtype = torch.float64) -> Call:
        kinds = {torch.float64: torch.complex128, torch.float32: torch.complex64}

        def cast(t: torch.Tensor) -> torch.Tensor:
            return t.to(dtype) if t.is_floating_point() else t.to(kinds[dtype]) if t.is_complex() else t

        return replace(call, tensors=list(map(cast, call.tensors)), cotangents=list(map(cast, call.cotangents)))

    def _numbers(self, kind: str, check: str, call: Call, r: Result, o: Result, y: Result) -> None:
        """N1 and its kin: the two norms, for every result."""
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(o.tensors, y.tensors, strict=True)):
            return  # metadata that was told to be ignored
        known = [self._known * 1.125] * len(o.tensors) if r is o else self._estimate(call, len(o.tensors))
        sides = list(zip(r.tensors, o.tensors, y.tensors, known, strict=True))
        if kind in inputs.LARGE:
            # Exponentials are saturated there, and what kernels keep of them for the backward has no digits left.
            self._coarse(kind, call, sides[len(self._outputs) :])
            sides = sides[: len(self._outputs)]
        found = [judged(kind, *each, self._longest) for each in sides]
        if check == "N2":
            whole = [integral(*each) for each in zip(r.tensors, o.tensors, y.tensors, strict=True)]
            check = "N2" if all(whole) else "N4"
            found = [exact or one for exact, one in zip(whole, found, strict=True)]
        if check != "N2" and not all(one.passed for one in found):
            found = self._excused(kind, call, r, o, y, found)
        worst = min(found, key=lambda one: (one.passed, -one.error / (one.bound or 1.0)))
        if check == "N1" and r is not o:
            # What the original's own errors are, for calls that are compared with the original alone.
            for a, b in zip(r.tensors, o.tensors, strict=True):
                if b.is_floating_point() or b.is_complex():
                    a, b = numerics.real(a, b)
                    self._known |= numerics.own_errors(a.double(), b)
        failure = worst.reason and f"{kind} inputs: {worst.reason}"
        if failure and found.index(worst) >= len(self._outputs):
            check, failure = "N7", f"gradient {found.index(worst) - len(self._outputs)}, {failure}"
        if failure and check != "N9" and "C1" not in self.off and (stale := self._earlier(o, y)):
            check, failure = "C1", stale
        numbers = {"error": worst.error, "original": worst.original_error, "worst": worst.worst, "bound": worst.bound}
        self._step(check, failure, kind=kind, **numbers)
        if kind == "normal" and r is not o:
            self._usual = rms(call.tensors), [rms([t]) for t in r.tensors[len(self._outputs) :]]
            self._calibrate(call, r, o)

    def _coarse(self, kind: str, call: Call, sides: Sequence[tuple[Any, ...]]) -> None:
        """N7: gradients at large inputs are near, but for what is left of products of large inputs and no digits."""
        unit = numerics.roundoff(getattr(torch, self.terms.dtype))
        grown = max(1.0, rms(call.tensors) / self._usual[0]) ** 2 if self._usual and self._usual[0] else 1.0
        for index, (r, o, y) in enumerate(side[:3] for side in sides):
            r, o, y = (t.double() for t in numerics.real(r, o, y))
            if not bool(r.isfinite().all() & o.isfinite().all()):
                continue
            usual = self._usual[1][index] if self._usual else 0.0
            size, off = rms([r]), rms([y - r]) if bool(y.isfinite().all()) else math.inf
            most = max(max(COARSE, 16 * unit) * size, 8 * rms([o - r]), 100 * unit * usual * grown)
            failure = f"gradient {index}, {kind} inputs: off by {off:.1e}, its size is {size:.1e}"
            self._step("N7", "" if off <= most else failure, kind=kind, error=off, bound=most)

    def _excused(
        self, kind: str, call: Call, r: Result, o: Result, y: Result, found: list[numerics.KindResult]
    ) -> list[numerics.KindResult]:
        """Let pass what is off as the original is when its inputs move by one rounding.

        Where little is left of a difference of nearly equal numbers, how far off the original is on these very inputs
        may be luck: the variance of equal numbers is zero in one order of summation, and nearly zero in others.
        """
        g = inputs.generator(self._derived("moved", kind))
        unit = [numerics.roundoff(t.dtype) if t.is_floating_point() else 0.0 for t in call.tensors]
        moved: list[Result] = []
        for _ in range(numerics.MOVES):
            signs = [2 * torch.randint(0, 2, t.shape, generator=g) - 1 for t in call.tensors]
            tensors = [
                (t * (1 + 1.01 * u * s)).to(t.dtype) if u else t
                for t, u, s in zip(call.tensors, unit, signs, strict=True)
            ]
            with contextlib.suppress(Raised):
                moved.append(self.witness.call(replace(call, tensors=tensors, same_place=False), self.terms.timeout))
        out = []
        for index, one in enumerate(found):
            others = [m.tensors[index] for m in moved if len(m.tensors) == len(o.tensors)]
            near = not one.passed and numerics.no_farther(r.tensors[index], y.tensors[index], others, kind in ORDINARY)
            self._lucky |= near and kind in ORDINARY
            out.append(replace(one, passed=True, reason="", error=0.0) if near else one)
        return out

    def _estimate(self, call: Call, count: int) -> list[numerics.Errors]:
        """Errors of a float64 original, read off a float32 run."""
        if self.narrow is None or self._random:
            return [numerics.NOTHING] * count

        def run(worker: Worker, dtype: torch.dtype) -> numerics.Program:
            return lambda *xs: (
                worker.call(self._wide(replace(call, tensors=list(xs)), dtype), self.terms.timeout).tensors
            )

        narrowed, reference = run(self.narrow, torch.float32), run(self.reference, torch.float64)
        with self._of_the_original():
            return numerics.estimated(narrowed, reference, list(call.tensors), False)

    def _calibrate(self, call: Call, r: Result, o: Result) -> None:
        """N3: a kind of input says something about precision only if less of it would be refused."""
        lower = {torch.float32: torch.float16, torch.float64: torch.float32}.get(getattr(torch, self.terms.dtype))
        if lower is None:
            return
        rounded = [t.to(lower).to(t.dtype) if t.is_floating_point() else t for t in call.tensors]
        with self._of_the_original():
            worse = self.reference.call(self._wide(replace(call, tensors=rounded)), self.terms.timeout)
        known = self._estimate(call, len(o.tensors))
        sides = zip(r.tensors, o.tensors, worse.tensors, known, strict=True)
        valid = not all(judged("normal", a, b, c.to(b.dtype), d, self._longest).passed for a, b, c, d in sides)
        self._step("N3", "", valid=valid)
        if not valid:
            self.verdict.note(f"precision unverified: inputs rounded to {lower} would have passed as well")
