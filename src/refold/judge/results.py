"""How what a candidate returns is compared with what the original returns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..verify import numerics
from . import inputs
from .process import Result

ORDINARY = ("actual", "normal", "timed")
# Kinds of inputs by which also small results next to large ones are judged.
PARTS = (*ORDINARY, "rows apart", inputs.FAR_WEIGHTS)


def rule(kind: str) -> str:
    """Return the check that compares results on a kind of inputs."""
    return {"actual": "N1", "normal": "N1", "integers": "N2", "halves": "N2"}.get(kind, "N4")


def judged(
    kind: str, r: torch.Tensor, o: torch.Tensor, y: torch.Tensor, known: numerics.Errors, terms: int
) -> numerics.KindResult:
    """Compare one result; ``known`` are errors that the original is known to have."""
    r, o, y = numerics.real(r, o, y)
    if kind in inputs.EQUAL_TERMS:
        terms = terms**2  # roundings of equal terms have one sign: they add up in proportion to the number of terms
    if y.is_floating_point():
        return numerics.compare(kind, r.double(), o, y, None, terms, known, kind in PARTS)
    # Where float64 decides otherwise than the original itself, either is right, and what is as near.
    off, own = (y.double() - r.double()).abs(), (o.double() - r.double()).abs()
    wrong = int(((y != o) & ~((off <= 8 * own) & (own > 0))).sum())  # float64 does not hold all integers
    reason = f"{wrong} of {y.numel()} elements differ" if wrong else ""
    return numerics.KindResult(kind, not wrong, float(wrong), 0.0, float(wrong), 0.0, reason)


def integral(r: torch.Tensor, o: torch.Tensor, y: torch.Tensor) -> numerics.KindResult | None:
    """N2: where the original is exact on small integers, the candidate is nearer to them than to any others."""
    if not y.is_floating_point() or not bool((r == r.round()).all()) or not torch.equal(o.double(), r.double()):
        return None
    distance = (y.double() - r.double()).abs()
    wrong = int((~(distance < 0.5)).sum())
    reason = f"{wrong} of {y.numel()} elements differ where arithmetic is exact" if wrong else ""
    worst = float(distance.max()) if distance.numel() else 0.0
    return numerics.KindResult("integers", not wrong, worst, 0.0, worst, 0.5, reason)


def unlike(o: Result, y: Result) -> str:
    """Say what else a candidate returns than values of the same structure, shapes and dtypes; empty if nothing."""
    if json.dumps(y.tree) != json.dumps(o.tree):  # in Python, true is one
        return f"it returns {outline(y.tree)}, the original {outline(o.tree)}"
    for index, (a, b) in enumerate(zip(o.metadata, y.metadata, strict=True)):
        for what in ("shape", "dtype", "device"):
            if getattr(a, what) != getattr(b, what):
                return f"result {index} has {what} {getattr(b, what)}, the original's {getattr(a, what)}"
    return ""


def identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors hold the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def alike(a: Result, b: Result) -> bool:
    """Say whether two calls returned the same bits."""
    return len(a.tensors) == len(b.tensors) and all(map(identical, a.tensors, b.tensors))


def strides(shape: Sequence[int], given: Sequence[int]) -> list[int]:
    """Return strides without those of axes of one element, which mean nothing."""
    return [] if 0 in shape else [s for n, s in zip(shape, given, strict=True) if n > 1]


def outline(tree: Any) -> str:
    """Say what a structure is, in a line."""
    if not isinstance(tree, dict):
        return "nothing"
    if "items" in tree:
        named = "dict" in tree
        inner = [f"{item[0]}: {outline(item[1])}" if named else outline(item) for item in tree["items"]]
        return f"{tree.get('dict') or tree.get('sequence')}({', '.join(inner)})"
    return "tensor" if "tensor" in tree else "float" if "float" in tree else str(tree.get("value", tree.get("object")))


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a structure, in order."""
    for item in tree.get("items", ()):
        yield from leaves(item[1] if "dict" in tree else item)
    if "items" not in tree:
        yield tree


def foreign_type(tree: Any) -> str:
    """Return the type of something in a structure that is nothing a judge can read; empty if there is none."""
    return next((str(leaf["object"]) for leaf in leaves(tree) if leaf.get("object")), "")


def rms(tensors: Sequence[torch.Tensor]) -> float:
    """Return the root mean square of real and complex numbers; those that are not finite count for nothing."""
    parts = [t.abs().double().nan_to_num(0, 0, 0).flatten() for t in tensors if inputs.is_real(t)]
    return math.sqrt(float(torch.cat(parts).square().mean())) if parts and sum(map(len, parts)) else 0.0
