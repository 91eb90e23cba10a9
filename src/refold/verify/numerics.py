"""The numerical check of a candidate: norms against float64, exact integers, metadata, untouched inputs.

With ``r`` the original in float64, ``o`` the original and ``y`` the candidate in their own dtype,
``u`` the unit roundoff and ``K`` the number of terms in the longest sum, a candidate passes if

    E2(v)   = ||v - r||_2 / ||r||_2         E2(y)   <= max(8 E2(o),   ( 8 + sqrt(K)/2) u)
    Einf(v) = max |v - r| / s               Einf(y) <= max(8 Einf(o), (16 + sqrt(K))   u)

for every kind of input. ``s`` is the same program on absolute values, because rounding is relative to the size of the
summands, not of the sum. If that is not defined, ``s`` is ``max(|r|, rms(r))``. The first norm finds a loss of
precision, the second finds a few wrong elements. There is no absolute tolerance. Sums of products also run on small
integers, on which every order of summation gives the same bits.

Without the program on absolute values, both norms are blind where a result is small next to large ones: a channel of
1e-6 next to channels of 1. So such elements, if they are many, are compared by themselves (`small_parts`), with the
same bounds. Right candidates may be less exact than the original there by luck. Then the original also runs on inputs
that are moved by at most one rounding, and ``E(o)`` is the largest error seen.

Such runs also say what is asked of a candidate that rounds to 16 bits what the original computes in float32 from 16-bit
inputs. Where large terms cancel, no program in 16 bits is as exact. But there the original's result, too, is only as
good as the last rounding of its inputs.

Where the original is not finite, nothing is compared. But a rewrite must not lose finite results. So the program also
runs with one infinity in each input: earlier steps must not see it, and a decay of ``exp(-inf)`` forgets it. Wherever
the original is finite, the candidate must be finite and near it. Of gradients this is asked at the steps before the
first infinity: where they differ after one, the infinities move to the last step, and gradients are compared once more.

For a float64 program, ``o`` and ``r`` are the same, so ``E(o)`` is unknown and is estimated. Rounding errors are
proportional to the unit roundoff, if their squares are negligible. So the program runs in float32, on inputs that
float32 holds exactly, and its errors are multiplied by the ratio of the roundoffs. If they exceed ``sqrt(u)`` of
float32, they are not proportional, or a comparison had another outcome; then the estimate is discarded. So no bound is
above ``8 sqrt(2**-24) 2**-29``, 4e-12. Design decision 17.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

Function = Callable[..., Any]
Values = Sequence[Any]

_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# What torch.set_float32_matmul_precision lets matrix products round float32 inputs to.
_MATMUL_ROUNDOFF = {"highest": 2.0**-24, "high": 2.0**-11, "medium": 2.0**-8}

# Elements are small next to others below this share of their root mean square, and count if they are so many of all.
SMALL, LEAST = 2.0**-12, 2.0**-4
# So often inputs are moved by at most one rounding.
MOVES = 3


@dataclass(frozen=True)
class KindResult:
    """The outcome for one kind of input.

    Attributes:
        kind: ``actual``, ``normal``, ``integers`` or ``infinities``.
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


class Errors(NamedTuple):
    """How far a result is from its reference, in two norms: all elements, and those that are small next to others.

    Attributes:
        e2: E2.
        einf: Einf.
        small_e2: The largest E2 of a part of small elements.
        small_einf: The largest Einf of such a part.
    """

    e2: float = 0.0
    einf: float = 0.0
    small_e2: float = 0.0
    small_einf: float = 0.0

    def __mul__(self, by: float) -> Errors:  # type: ignore[override]
        """Return all of them, scaled."""
        return Errors(*(by * e for e in self))

    def __or__(self, other: Errors) -> Errors:
        """Return the larger ones of two."""
        return Errors(*map(max, self, other))


NOTHING = Errors()


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the relative error of one rounding, as matrix products in this dtype are allowed to round."""
    allowed = _MATMUL_ROUNDOFF[torch.get_float32_matmul_precision()] if dtype == torch.float32 else 0.0
    return max(_ROUNDOFF[dtype], allowed)


def roundoff(dtype: torch.dtype) -> float:
    """Return the relative error of one rounding in a dtype."""
    return _ROUNDOFF[dtype]


def check(
    original: Function, candidate: Function, reference: Function, actual: Values | None, like: Values, *, terms: int,
    multilinear: bool, spread: float = 1.0, seed: int = 0, narrowed: Function | None = None,
    differentiated: Sequence[bool] = (), coupled: int = 1, rounds_more: bool = False,
) -> Evidence:  # fmt: skip
    """Compare a candidate with the original at level "quick".

    Args:
        original: The program as it was.
        candidate: The program to judge; same inputs, one tensor or several out.
        reference: The original computed in float64, from the same inputs.
        actual: Inputs as the user's data makes them, or None if they could not be had.
        like: Values with the shapes, dtypes, devices and, if the program is no sum of products, signs of the inputs.
        terms: Number of terms added up for one output element.
        multilinear: Whether the program is a sum of products of its inputs.
        spread: Standard deviation of the random inputs.
        seed: Seeds the random inputs.
        narrowed: The original in float32, from the same inputs; None if there is none.
        differentiated: For each input, whether its gradient is among the results, which end with these.
        coupled: How many values a recurrence carries that depend on one another.
        rounds_more: Whether the candidate rounds to 16 bits what the original, of 16-bit inputs, does not.

    Returns:
        The evidence; ``passed`` only if every kind passed.
    """
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    kinds: list[tuple[str, Values]] = [] if actual is None else [("actual", actual)]
    kinds.append(("normal", [_normal(x, generator, spread, not multilinear) for x in like]))
    if multilinear:
        kinds.append(("integers", [_integers(x, terms, generator) for x in like]))
    bounds: list[float] = []
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
        rs = _several(reference(*inputs))
        if kind == "integers":  # what the original errs is not asked where arithmetic is exact
            found = [_exact(r, y) for r, y in zip(rs, ys, strict=True)]
            evidence.kinds.append(min(found, key=lambda one: one.passed))
            continue
        os = _several(original(*inputs))
        if failure := next(filter(None, map(_metadata, os, ys)), ""):
            evidence.failure = failure
            return evidence
        scales = _several(reference(*[_absolute(x) for x in inputs])) if multilinear else [None] * len(rs)
        known = [NOTHING] * len(rs)
        if narrowed is not None and any(y.dtype == torch.float64 for y in ys):
            known = estimated(narrowed, reference, inputs, multilinear)

        judged = partial(_judged, kind, rs, os, ys, scales, terms)
        found = judged(known)
        failed = not all(one.passed for one in found)
        if failed and (rounds_more or all(one.passed for one in judged(known, parts=False))):
            for at in range(MOVES):
                moves = torch.Generator().manual_seed(seed + at)
                others = _several(original(*[moved(x, moves) for x in inputs]))
                seen = [own_errors(r, o) for r, o in zip(rs, others, strict=True)]
                seen = seen if rounds_more else [Errors(0.0, 0.0, *one[2:]) for one in seen]
                known = [a | b for a, b in zip(known, seen, strict=True)]
            found = judged(known)
        bounds = [max(pair) for pair in zip(bounds or [0.0] * len(ys), (one.bound for one in found), strict=True)]
        # One result stands for all: the first that fails, else the one nearest to its bound.
        evidence.kinds.append(min(found, key=lambda one: (one.passed, -one.error / (one.bound or 1.0))))
    if evidence.passed:
        leaves = sum(differentiated)

        def drawn(infinity: str) -> tuple[Values, list[torch.Tensor]]:
            inputs = [_normal(x, generator, spread, not multilinear, infinity) for x in like]
            return inputs, list(_several(original(*inputs)))

        def with_infinities(inputs: Values, os: list[torch.Tensor]) -> list[KindResult]:
            ys = _several(candidate(*inputs))
            ends = [0] * len(os)
            given = (x for x, need in zip(inputs, differentiated, strict=False) if need)
            for at, x in enumerate(given, len(os) - leaves):
                os[at] = torch.where(x.isfinite(), os[at], math.nan)  # the gradient at an infinity is not used
                # Nothing reads the state that the last step leaves, so the original has no gradient there: zero. A scan
                # multiplies by that zero, which makes a NaN if the state is infinite. Of coupled values, what one step
                # leaves is read by another only steps later.
                ends[at] = coupled
            return list(map(_where_finite, os, ys, bounds, ends))

        found = with_infinities(*drawn("late"))
        values = len(found) - leaves
        if all(one.passed for one in found[:values]) and not all(one.passed for one in found):
            # Gradients are promised at the steps before the first infinity. After it, a sum over steps may have another
            # zero that it multiplies by than the original. The last step is the one that reaches fewest results; of a
            # program that goes against time, it is the first in memory.
            ends = [drawn("last"), drawn("first")]
            found[values:] = with_infinities(*max(ends, key=lambda end: _finite(end[1][:values])))[values:]
        evidence.kinds.append(min(found, key=lambda one: (one.passed, -one.error / (one.bound or 1.0))))
    return evidence


def _judged(
    kind: str, rs: Sequence[torch.Tensor], os: Sequence[torch.Tensor], ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None], terms: int, known: Sequence[Errors], parts: bool = True,
) -> list[KindResult]:  # fmt: skip
    """Compare result by result."""
    results = zip(rs, os, ys, scales, known, strict=True)
    return [compare(kind, r, o, y, scale, terms, least, parts) for r, o, y, scale, least in results]


def agree(
    kind: str, r: torch.Tensor, o: torch.Tensor, y: torch.Tensor, terms: int, known: Errors = NOTHING,
    parts: bool = True,
) -> KindResult:  # fmt: skip
    """Compare one result of a whole program, of any dtype, with the original's.

    Of integers and truth values the bound is a number of elements: eight times as many as the original has otherwise
    than the reference.

    Args:
        kind: What the result is called.
        r: The reference, in float64 where the program computes in floating point.
        o: The original.
        y: The candidate.
        terms: Number of terms added up for one element.
        known: Errors that the original is known to make, whatever ``o`` says.
        parts: Whether small elements are also compared by themselves.
    """
    if failure := _metadata(o, y):
        return KindResult(kind, False, math.inf, 0.0, math.inf, 0.0, failure)
    r, o, y = real(r, o, y)
    if y.is_floating_point():
        return compare(kind, r, o, y, None, terms, known, parts)
    wrong, own = (float((v != r).sum()) for v in (y, o))
    reason = f"{wrong:.0f} of {y.numel()} elements differ, of the original {own:.0f}" if wrong > 8 * own else ""
    return KindResult(kind, not reason, wrong, own, wrong, 8 * own, reason)


def _several(results: Any) -> Sequence[torch.Tensor]:
    return results if isinstance(results, (tuple, list)) else [results]


def _normal(x: Any, generator: torch.Generator, spread: float, signed: bool, infinity: str = "") -> Any:
    """Draw zero-mean inputs: positive ones hide a loss of precision.

    Args:
        x: What to draw like.
        generator: Where from.
        spread: The standard deviation.
        signed: Whether an input that is never positive, or never negative, stays so. A log decay that is positive
            at half of the steps makes states grow by many orders of magnitude, and with them the rounding of its sums.
        infinity: Which element is infinite, if one is: a ``"late"`` one, in the second half of the memory, since time
            goes on there; or the ``"last"``, or the ``"first"``.
    """
    if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
        return x
    values = spread * torch.randn(_apart(x), generator=generator)
    sign = _sign(x) if signed else 0
    if sign:
        values = sign * values.abs()
    if infinity and x.numel():
        late = torch.randint(values.numel() // 2, values.numel(), (), generator=generator)
        at = {"late": int(late), "last": -1, "first": 0}[infinity]
        values.view(-1)[at] = (sign or -1) * math.inf
    return _like(x, values.expand(x.shape))


def _sign(x: torch.Tensor) -> int:
    """Return the sign that all elements have, as far as they are not zero; 0 if there are two signs, or none."""
    positive, negative = (bool(some.any()) for some in (~(x <= 0), ~(x >= 0)))
    return int(positive) - int(negative)


def _integers(x: Any, terms: int, generator: torch.Generator) -> Any:
    """Draw from {-1, 0, 1}, sparse enough that sums stay exact in the dtype."""
    if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
        return x
    largest = 0.5 / _ROUNDOFF[x.dtype]
    density = min(2 / 3, largest / max(terms, 1) / 4)
    drawn = torch.rand(x.shape, generator=generator)
    return _like(x, (drawn < density / 2).float() - (drawn > 1 - density / 2).float())


def _like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return in_strides(values.to(x.device, x.dtype), x.stride())


def in_strides(values: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return values that lie in memory with these strides; where a stride is 0, the first value stands for all."""
    first = values
    for dim, stride in enumerate(strides):
        if stride == 0 and values.shape[dim] > 1:
            first = first.narrow(dim, 0, 1)
    own = torch.empty_strided(first.shape, list(strides), dtype=values.dtype, device=values.device)
    return own.copy_(first).expand(values.shape)


def _apart(x: torch.Tensor) -> list[int]:
    """Return the shape of the elements that have memory of their own."""
    return [1 if stride == 0 and size > 1 else size for size, stride in zip(x.shape, x.stride(), strict=True)]


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
    if _all_finite(r) and _all_finite(o):
        return [v.double() for v in (r, o, y)]
    good = r.isfinite() & o.isfinite()
    return [torch.where(good, v.double(), 0.0) for v in (r, o, y)]


def _all_finite(x: torch.Tensor) -> bool:
    """Say whether all elements are finite, by one pass over memory; a sum that overflows says no as well."""
    return math.isfinite(float(x.sum(dtype=torch.float64)))


def _exact(r: torch.Tensor, y: torch.Tensor) -> KindResult:
    expected = r.to(y.dtype)
    wrong = int((y != expected).sum())
    reason = f"{wrong} of {y.numel()} elements differ where arithmetic is exact" if wrong else ""
    difference = y.double() - r
    return KindResult("integers", not wrong, _relative(difference, r), 0.0, float(difference.abs().max()), 0.0, reason)


def moved(x: Any, generator: torch.Generator, least: float = 0.0) -> Any:
    """Return a floating-point tensor with each element moved by at most one rounding; anything else as it is.

    Args:
        x: The tensor.
        generator: Draws by how much.
        least: The relative error of the rounding, if that of the tensor's dtype is smaller.
    """
    if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
        return x
    unit = max(least, unit_roundoff(x.dtype))
    by = torch.rand(x.shape, generator=generator).mul_(2).sub_(1).to(x.device).double() * unit
    return _like(x, x.detach().double() * (1 + by)).requires_grad_(x.requires_grad)


def estimated(narrowed: Function, reference: Function, inputs: Values, multilinear: bool) -> list[Errors]:
    """Estimate the errors of each result of a float64 program from a float32 run; zeros where that says nothing."""
    rounded = [x.float().double() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x for x in inputs]
    rs, os = _several(reference(*rounded)), _several(narrowed(*rounded))
    scales = _several(reference(*[_absolute(x) for x in rounded])) if multilinear else [None] * len(rs)
    return [narrow_errors(r, o, scale) for r, o, scale in zip(rs, os, scales, strict=True)]


def narrow_errors(r: torch.Tensor, narrow: torch.Tensor, scale: torch.Tensor | None = None) -> Errors:
    """Estimate the errors of a float64 result from a float32 run; zeros where that says nothing."""
    unit = unit_roundoff(torch.float32)
    errors = own_errors(r, narrow, scale)

    def proportional(*found: float) -> list[float]:
        trusted = narrow.dtype == torch.float32 and max(found) <= math.sqrt(unit)
        return [e * _ROUNDOFF[torch.float64] / unit if trusted else 0.0 for e in found]

    return Errors(*proportional(*errors[:2]), *proportional(*errors[2:]))


def own_errors(r: torch.Tensor, o: torch.Tensor, scale: torch.Tensor | None = None) -> Errors:
    """Return the errors of a result against its reference."""
    r, o, _ = _finite_only(r, o, o)

    def both(r: torch.Tensor, o: torch.Tensor, scale: torch.Tensor | None = None) -> list[float]:
        return [measure[0] for measure in _errors(r, scale, o)]

    found = Errors(*both(r, o, scale))
    for at in small_parts(r) if scale is None else ():
        found |= Errors(0.0, 0.0, *both(r[at], o[at]))
    return found


def _errors(r: torch.Tensor, scale: torch.Tensor | None, *values: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return E2 and Einf of values against the reference."""
    s = r.abs().clamp_min_(_rms(r)) if scale is None else scale.double().clamp_min(torch.finfo(torch.float64).tiny)
    errors, worst = [], []
    for v in values:
        difference = v - r
        errors.append(_relative(difference, r))
        largest = float(difference.abs_().div_(s).max()) if r.numel() else 0.0
        worst.append(math.inf if math.isnan(largest) else largest)
    return errors, worst


def compare(
    kind: str, r: torch.Tensor, o: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | None, terms: int,
    known: Errors = NOTHING, parts: bool = True,
) -> KindResult:  # fmt: skip
    """Judge one result by the two norms.

    Args:
        kind: What the result is called.
        r: The reference.
        o: The original.
        y: The candidate.
        scale: The program on absolute values; None if that is not defined.
        terms: Number of terms added up for one element.
        known: Errors that the original is known to have at least.
        parts: Whether elements that are small next to others are also judged by themselves, if there is no scale.

    Below the normal numbers roundings have one size, which a later factor multiplies; what sums of them leave is equal.
    """
    u, limits = unit_roundoff(y.dtype), torch.finfo(torch.promote_types(y.dtype, torch.float32))
    y = torch.where((y.double() - r).abs() <= 8 * terms * limits.eps * limits.tiny, r.to(y.dtype), y)
    exact, *sides = _finite_only(r, o, y)
    errors, worst = _errors(exact, scale, *reversed(sides))
    errors[1], worst[1] = max(errors[1], known.e2), max(worst[1], known.einf)
    bound = max(8 * errors[1], (8 + math.sqrt(terms) / 2) * u)
    worst_bound = max(8 * worst[1], (16 + math.sqrt(terms)) * u)
    reason = ""
    if not errors[0] <= bound:
        reason = f"relative error {errors[0]:.1e} exceeds {bound:.1e} (original {errors[1]:.1e})"
    elif not worst[0] <= worst_bound:
        reason = f"largest error {worst[0]:.1e} exceeds {worst_bound:.1e} (original {worst[1]:.1e})"
    for at in small_parts(exact) if parts and scale is None and not reason else ():
        part = compare(kind, r[at], o[at], y[at], None, terms, Errors(*known[2:]), parts=False)
        if not part.passed:
            return replace(part, reason=f"of the elements that are small next to others, {part.reason}")
    return KindResult(kind, not reason, errors[0], errors[1], worst[0], bound, reason)


def small_parts(r: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield where a result is small next to others in it: what is wrong there is lost in norms of the whole.

    A mask of -1e9 next to scores, or powers of a number, make such results. Each part is all that is not zero and below
    a 4096th of the root mean square of what was there before, if that is a sixteenth of the result.
    """
    rest = size = (r.double() if _all_finite(r) else torch.where(r.isfinite(), r.double(), 0.0)).abs()
    while r.numel():
        part = (size > 0) & (size < _rms(rest) * SMALL)
        if not max(1, LEAST * r.numel()) <= int(part.sum()) < rest.numel():  # squares may be zero or infinite
            return
        rest = size[part]
        yield part


def no_farther(r: torch.Tensor, y: torch.Tensor, others: Sequence[torch.Tensor], parts: bool = False) -> bool:
    """Say whether a result is at most eight times as far from the reference as the farthest of others, in both norms.

    Unlike relative errors, this has a meaning where the reference is zero.

    Args:
        r: The reference.
        y: The result.
        others: Other results.
        parts: Whether this must also hold for each part of small elements.
    """
    r, y, *others = real(r, y, *others)
    if not y.is_floating_point() or any(v.shape != r.shape for v in (y, *others)):
        return False
    good = r.isfinite()
    others = [v for v in others if bool(v.isfinite()[good].all())]
    if not others:
        return False
    for part in [good, *(small_parts(r) if parts else ())]:
        own, *moved = (_distances(torch.where(part, v.double() - r.double(), 0.0)) for v in (y, *others))
        if not all(a <= 8 * max(b) for a, *b in zip(own, *moved, strict=True)):
            return False
    return True


def real(*values: torch.Tensor) -> list[torch.Tensor]:
    """Return complex tensors as real ones with an axis for the two parts, and others as they are."""
    return [torch.view_as_real(v.resolve_conj().contiguous()) if v.is_complex() else v for v in values]


def _distances(difference: torch.Tensor) -> list[float]:
    if not difference.numel():
        return [0.0, 0.0]
    return [float(torch.linalg.vector_norm(difference)), float(difference.abs().max())]


def _finite(results: Sequence[torch.Tensor]) -> int:
    return sum(int(y.isfinite().sum()) for y in results)


def _where_finite(o: torch.Tensor, y: torch.Tensor, known: float, ends: int) -> KindResult:
    """Compare a candidate with the original where that is finite; each may be as far off as was found before.

    At one end of an axis, ``ends`` positions may be not finite where the original's are, if the axis is longer than
    both ends.
    """
    _, o, y = _finite_only(o, o, y)
    if ends and (at := (~y.isfinite()).nonzero()).numel():
        spans = zip(at.amin(0).tolist(), at.amax(0).tolist(), y.shape, strict=True)
        if any(size > 2 * ends and (last < ends or first >= size - ends) for first, last, size in spans):
            _, o, y = _finite_only(y, o, y)
    (error,), (worst,) = _errors(o, None, y)
    bound = 2 * known
    lost = 0 if _all_finite(y) else int((~y.isfinite()).sum())
    reason = ""
    if lost:
        reason = f"{lost} of {y.numel()} elements are not finite where the original's are"
    elif not error <= bound:
        reason = f"relative difference {error:.1e} exceeds {bound:.1e}"
    return KindResult("infinities", not reason, error, 0.0, worst, bound, reason)


def _relative(difference: torch.Tensor, r: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(r))
    error = float(torch.linalg.vector_norm(difference))
    return error / norm if norm else (0.0 if error == 0 else math.inf)


def _rms(r: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(r)) / math.sqrt(r.numel()) or 1.0 if r.numel() else 1.0
