"""Numerical proof of a candidate: norms against float64, exact integers, metadata, untouched inputs.

With ``r`` the original in float64, ``o`` the original and ``y`` the candidate in their own dtype,
``u`` the unit roundoff and ``K`` the number of terms in the longest sum, a candidate passes if

    E2(v)   = ||v - r||_2 / ||r||_2         E2(y)   <= max(8 E2(o),   ( 8 + sqrt(K)/2) u)
    Einf(v) = max |v - r| / s               Einf(y) <= max(8 Einf(o), (16 + sqrt(K))   u)

for every kind of input, where ``s`` is the same program on absolute values (rounding is relative
to what is added up, not to what is left) or, when that is not defined, ``max(|r|, rms(r))``. Both
norms are needed: the first sees a loss of precision, the second a few wrong elements. There is no
absolute tolerance. Sums of products are run on small integers besides, where every honest order of
summation gives the same bits.

Of a float64 program ``o`` and ``r`` are one, so nothing is known of ``E(o)``. It is estimated: rounding errors
are proportional to the unit as long as their squares do not count, so the program is run with float32 in place
of float64, on inputs that float32 holds exactly, and its errors are taken times the ratio of the units. If they
exceed ``sqrt(u)`` of float32 they say nothing, for then they are not proportional, or a comparison went another
way; the floor alone holds. No bound is therefore ever above ``8 sqrt(2**-24) 2**-29``, 4e-12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Program = Callable[..., Any]
Values = Sequence[Any]

_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# What torch.set_float32_matmul_precision lets matrix products round float32 inputs to.
_MATMUL_ROUNDOFF = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}


@dataclass(frozen=True)
class KindResult:
    """The outcome for one kind of input.

    Attributes:
        kind: ``actual``, ``normal`` or ``integers``.
        passed: Whether the candidate is accepted on this kind.
        error: E2 of the candidate against float64.
        original_error: E2 of the original against float64; of a float64 original, what a float32 run says of it.
        worst: Einf of the candidate.
        bound: What ``error`` had to stay below.
        reason: Why it failed; empty otherwise.
    """

    kind: str
    passed: bool
    error: float
    original_error: float
    worst: float
    bound: float
    reason: str = ""


@dataclass
class Evidence:
    """Everything established about one candidate."""

    kinds: list[KindResult] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check passed, and at least one ran."""
        return not self.failure and bool(self.kinds) and all(kind.passed for kind in self.kinds)

    @property
    def reason(self) -> str:
        """Why the candidate is refused; empty if it is not."""
        if self.failure:
            return self.failure
        return "; ".join(f"{kind.kind} inputs: {kind.reason}" for kind in self.kinds if not kind.passed)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the relative error of one rounding, as matrix products in this dtype are allowed to round."""
    allowed = _MATMUL_ROUNDOFF[torch.get_float32_matmul_precision()] if dtype == torch.float32 else 0.0
    return max(_ROUNDOFF[dtype], allowed)


def check(
    original: Program,
    candidate: Program,
    reference: Program,
    actual: Values | None,
    like: Values,
    *,
    terms: int,
    multilinear: bool,
    spread: float = 1.0,
    seed: int = 0,
    narrowed: Program | None = None,
) -> Evidence:
    """Compare a candidate with the original at level "quick".

    Args:
        original: The program as it was.
        candidate: The program to judge; same inputs, one tensor or several out.
        reference: The original computed in float64, from the same inputs.
        actual: Inputs as the user's data makes them, or None if they could not be had.
        like: Values with the shapes, dtypes and devices of the inputs.
        terms: Number of terms added up for one output element.
        multilinear: Whether the program is a sum of products of its inputs.
        spread: Standard deviation of the random inputs.
        seed: Seeds the random inputs.
        narrowed: The original with float32 in place of float64, from the same inputs; None if there is none.

    Returns:
        The evidence; ``passed`` only if every kind passed.
    """
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    kinds: list[tuple[str, Values]] = [] if actual is None else [("actual", actual)]
    kinds.append(("normal", [_normal(x, generator, spread) for x in like]))
    if multilinear:
        kinds.append(("integers", [_integers(x, terms, generator) for x in like]))
    for kind, inputs in kinds:
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
        ys = _several(candidate(*inputs))
        if not all(_same(a, b) for a, b in zip(inputs, before, strict=True)):
            evidence.failure = f"changed its inputs ({kind})"
            return evidence
        del before
        if any(_shares_memory(x, y) for x in inputs for y in ys):
            evidence.failure = "its output shares memory with an input"
            return evidence
        os, rs = _several(original(*inputs)), _several(reference(*inputs))
        if failure := next(filter(None, map(_metadata, os, ys)), ""):
            evidence.failure = failure
            return evidence
        if kind == "integers":
            found = [_exact(r, o, y) for r, o, y in zip(rs, os, ys, strict=True)]
        else:
            scales = _several(reference(*[_absolute(x) for x in inputs])) if multilinear else [None] * len(rs)
            known = [(0.0, 0.0)] * len(rs)
            if narrowed is not None and any(y.dtype == torch.float64 for y in ys):
                known = estimated(narrowed, reference, inputs, multilinear)
            results = zip(rs, os, ys, scales, known, strict=True)
            found = [compare(kind, r, o, y, scale, terms, least) for r, o, y, scale, least in results]
        # One result stands for all: the first that fails, else the one nearest to its bound.
        evidence.kinds.append(min(found, key=lambda one: (one.passed, -one.error / (one.bound or 1.0))))
    return evidence


def _several(results: Any) -> Sequence[torch.Tensor]:
    return results if isinstance(results, (tuple, list)) else [results]


def _normal(x: Any, generator: torch.Generator, spread: float) -> Any:
    """Draw zero-mean inputs: positive ones hide a loss of precision."""
    if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
        return x
    return _like(x, spread * torch.randn(x.shape, generator=generator))


def _integers(x: Any, terms: int, generator: torch.Generator) -> Any:
    """Draw from {-1, 0, 1}, sparse enough that sums stay exact in the dtype."""
    if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
        return x
    largest = 0.5 / _ROUNDOFF[x.dtype]
    density = min(2 / 3, largest / max(terms, 1) / 4)
    drawn = torch.rand(x.shape, generator=generator)
    return _like(x, (drawn < density / 2).float() - (drawn > 1 - density / 2).float())


def _like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return out.copy_(values) if not _overlaps(x) else values.to(x.device, x.dtype)


def _overlaps(x: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


def _absolute(x: Any) -> Any:
    return x.abs() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return a is b or a == b
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def _shares_memory(x: Any, y: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() != 0


def _metadata(o: torch.Tensor, y: torch.Tensor) -> str:
    for what in ("shape", "dtype", "device"):
        expected, got = getattr(o, what), getattr(y, what)
        if expected != got:
            return f"its output has {what} {got}, the original's {expected}"
    return ""


def _finite_only(r: torch.Tensor, o: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Set positions to zero where the reference or the original is not finite; rewrites may differ there."""
    good = r.isfinite() & o.isfinite()
    return [torch.where(good, v.double(), 0.0) for v in (r, o, y)]


def _exact(r: torch.Tensor, o: torch.Tensor, y: torch.Tensor) -> KindResult:
    expected = r.to(y.dtype)
    wrong = int((y != expected).sum())
    reason = f"{wrong} of {y.numel()} elements differ where arithmetic is exact" if wrong else ""
    e = [_relative(v.double() - r, r) for v in (y, o)]
    return KindResult("integers", not wrong, e[0], e[1], float((y.double() - r).abs().max()), 0.0, reason)


def estimated(narrowed: Program, reference: Program, inputs: Values, multilinear: bool) -> list[tuple[float, float]]:
    """Estimate E2 and Einf of each result of a float64 program from a float32 run; zeros where that says nothing."""
    rounded = [x.float().double() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x for x in inputs]
    rs, os = _several(reference(*rounded)), _several(narrowed(*rounded))
    scales = _several(reference(*[_absolute(x) for x in rounded])) if multilinear else [None] * len(rs)
    unit = unit_roundoff(torch.float32)
    found = []
    for r, o, scale in zip(rs, os, scales, strict=True):
        r, wide, _ = _finite_only(r, o, o)
        errors = [measure[0] for measure in _errors(r, scale, wide)]
        proportional = o.dtype == torch.float32 and max(errors) <= math.sqrt(unit)
        e2, einf = (e * _ROUNDOFF[torch.float64] / unit if proportional else 0.0 for e in errors)
        found.append((e2, einf))
    return found


def _errors(r: torch.Tensor, scale: torch.Tensor | None, *values: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return E2 and Einf of values against the reference."""
    s = r.abs().clamp_min(_rms(r)) if scale is None else scale.double().clamp_min(torch.finfo(torch.float64).tiny)
    worst = [float(((v - r).abs() / s).nan_to_num(math.inf, math.inf).max()) if r.numel() else 0.0 for v in values]
    return [_relative(v - r, r) for v in values], worst


def compare(
    kind: str,
    r: torch.Tensor,
    o: torch.Tensor,
    y: torch.Tensor,
    scale: torch.Tensor | None,
    terms: int,
    known: tuple[float, float],
) -> KindResult:
    """Judge one result by the two norms; ``known`` are errors that the original is known to have at least."""
    u = unit_roundoff(y.dtype)
    r, o, y = _finite_only(r, o, y)
    errors, worst = _errors(r, scale, y, o)
    errors[1], worst[1] = max(errors[1], known[0]), max(worst[1], known[1])
    bound = max(8 * errors[1], (8 + math.sqrt(terms) / 2) * u)
    worst_bound = max(8 * worst[1], (16 + math.sqrt(terms)) * u)
    reason = ""
    if not errors[0] <= bound:
        reason = f"relative error {errors[0]:.1e} exceeds {bound:.1e} (original {errors[1]:.1e})"
    elif not worst[0] <= worst_bound:
        reason = f"largest error {worst[0]:.1e} exceeds {worst_bound:.1e} (original {worst[1]:.1e})"
    return KindResult(kind, not reason, errors[0], errors[1], worst[0], bound, reason)


def _relative(difference: torch.Tensor, r: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(r))
    error = float(torch.linalg.vector_norm(difference))
    return error / norm if norm else (0.0 if error == 0 else math.inf)


def _rms(r: torch.Tensor) -> float:
    return float(r.square().mean().sqrt()) or 1.0 if r.numel() else 1.0
