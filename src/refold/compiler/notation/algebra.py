"""Multiply out: sums of products of sums, written as sums of products and done in the order of least work.

A contraction is expanded through what it reads: other contractions, products, sums of two values, constants, and
multiplication and division by numbers. It is also expanded through a diagonal, ``where(i == j, v, 0)``, which makes two
axes one. Then each product is done in the order that `opt_einsum` finds. So a sum over an axis of a matrix product
becomes a product with a vector of sums. A chain of products starts where it is narrow. A product with a diagonal matrix
scales rows. Whether that is less work is counted; whether it is exact enough and faster is found out by those who use
it.

Values have the axes that their letters say, in any order. Sources: Aji & McEliece 2000 (the distributive law); Smith &
Gray 2018 (opt_einsum) for the order of products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..ir.contract import least_work
from .program import Equation, Equations, Groups, Letters, Read

MOST_TERMS = 4
MOST_FACTORS = 8
SUMS = ("contract", "mean")


@dataclass(frozen=True)
class Term:
    """A number times factors, summed over the letters in ``bound``, laid out over those of the result."""

    scale: float
    factors: tuple[Read, ...]
    bound: frozenset[str]


@dataclass(frozen=True)
class Sum:
    """What a step is when multiplied out.

    Attributes:
        letters: Of the result.
        terms: To be added up.
        inside: Steps that were looked through.
        sizes: Of all letters.
    """

    letters: Letters
    terms: tuple[Term, ...]
    inside: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)


class _Cannot(Exception):
    """A factor is not to be expanded."""


class Expander:
    """Multiplies out the steps of a program.

    Args:
        program: The program.
        inner: Which values may be looked through: those that nothing else needs.
    """

    def __init__(self, program: Equations, inner: frozenset[str]) -> None:
        self.steps = program.defined()
        self.sizes = dict(program.sizes)
        self.inner = inner
        self.fresh = itertools.count()

    def expand(self, name: str) -> Sum | None:
        """Multiply a step out; None if it is no sum of products, or nothing can be looked through."""
        step = self.steps[name]
        if step.do not in SUMS or not step.reads:
            return None
        scale = math.prod(float(x) for x in step.of if not isinstance(x, Read))
        letters = {letter for read in step.reads for letter in read.letters}
        bound = frozenset(letters - set(step.letters))
        if step.do == "mean":
            scale /= math.prod(self.sizes[letter] for letter in bound)
        done: list[Term] = []
        open_terms = [Term(scale, tuple(step.reads), bound)]
        inside: list[str] = []
        while open_terms:
            term = open_terms.pop()
            for at, factor in enumerate(term.factors):
                if len(done) + len(open_terms) + 2 > MOST_TERMS or len(term.factors) >= MOST_FACTORS:
                    continue
                try:
                    found = self._through(term, at, factor)
                except _Cannot:
                    continue
                inside.append(factor.name)
                open_terms += found
                break
            else:
                done.append(self._counted(term, step.letters))
        if not inside:
            return None
        return Sum(step.letters, tuple(done[::-1]), tuple(dict.fromkeys(inside)), dict(self.sizes))

    def _counted(self, term: Term, out: Letters) -> Term:
        """Take letters out that no factor has any more: so many equal summands."""
        present = {letter for read in term.factors for letter in read.letters}
        gone = term.bound - present
        count = math.prod(self.sizes[letter] for letter in gone)
        return Term(term.scale * count, term.factors, term.bound - gone)

    def _through(self, term: Term, at: int, factor: Read) -> list[Term]:
        step = self.steps.get(factor.name)
        if step is None or factor.name not in self.inner:
            raise _Cannot
        groups = dict(zip(step.letters, factor.axes, strict=True))
        rest = (*term.factors[:at], *term.factors[at + 1 :])
        numbers = [x for x in step.of if not isinstance(x, Read)]
        do = step.do
        if do == "contract":
            summed = {letter for read in step.reads for letter in read.letters} - set(step.letters)
            for letter in sorted(summed):
                groups[letter] = (self._new(self.sizes[letter]),)
            new = tuple(_renamed(read, groups) for read in step.reads)
            bound = term.bound | {groups[letter][0] for letter in summed}
            return [Term(term.scale * math.prod(numbers), (*rest, *new), bound)]
        if do == "mul":
            new = tuple(_renamed(read, groups) for read in step.reads)
            return [Term(term.scale * math.prod(numbers), (*rest, *new), term.bound)]
        if do == "neg":
            return [Term(-term.scale, (*rest, _renamed(step.reads[0], groups)), term.bound)]
        if do == "div" and not isinstance(step.of[1], Read) and step.of[1]:
            return [Term(term.scale / step.of[1], (*rest, _renamed(step.reads[0], groups)), term.bound)]
        if do in ("add", "sub"):
            signs = (1, 1 if do == "add" else -1)
            return [self._summand(term, rest, x, sign, groups) for x, sign in zip(step.of, signs, strict=True)]
        if do == "fill" and not isinstance(step.of[0], Read) and math.isfinite(step.of[0]):
            return [Term(term.scale * step.of[0], rest, term.bound)]
        if do in ("where", "cast"):
            return [self._diagonal(term, rest, step, groups)]
        raise _Cannot

    def _summand(
        self, term: Term, rest: tuple[Read, ...], x: Read | float, sign: int, groups: Mapping[str, Letters]
    ) -> Term:
        if isinstance(x, Read):
            return Term(sign * term.scale, (*rest, _renamed(x, groups)), term.bound)
        if not math.isfinite(x):
            raise _Cannot
        return Term(sign * term.scale * x, rest, term.bound)

    def _diagonal(self, term: Term, rest: tuple[Read, ...], step: Equation, groups: Mapping[str, Letters]) -> Term:
        """Read ``where(i == j, v, 0)``, or ``i == j`` as a number, under a sum over one of the two."""
        mask, x, other = step.of if step.do == "where" else (step.of[0], 1, 0)
        equal = self.steps.get(mask.name) if isinstance(mask, Read) else None
        if equal is None or equal.do != "eq" or other != 0 or not isinstance(mask, Read):
            raise _Cannot
        inner = dict(zip(equal.letters, mask.axes, strict=True))
        pair = []
        for read in equal.of:
            own = self.steps.get(read.name) if isinstance(read, Read) else None
            if own is None or own.do != "position" or not isinstance(read, Read):
                raise _Cannot
            letters = [letter for outer in _renamed(read, inner).letters for letter in groups[outer]]
            if len(letters) != 1:
                raise _Cannot
            pair.append(letters[0])
        a, b = pair
        if a == b or self.sizes[a] != self.sizes[b]:
            raise _Cannot
        if a not in term.bound:
            a, b = b, a
        if a not in term.bound:
            raise _Cannot
        one = {a: (b,)}
        scaled = [_renamed(x, groups)] if isinstance(x, Read) else []
        factors = tuple(_renamed(read, one) for read in (*rest, *scaled))
        if not scaled and not math.isfinite(x):  # type: ignore[arg-type]
            raise _Cannot
        if any(len(set(read.letters)) != len(read.letters) for read in factors):
            raise _Cannot  # a diagonal of something else
        return Term(term.scale if scaled else term.scale * x, factors, term.bound - {a})  # type: ignore[operator]

    def _new(self, size: int) -> str:
        letter = f"m{next(self.fresh)}"
        while letter in self.sizes:
            letter = f"m{next(self.fresh)}"
        self.sizes[letter] = size
        return letter


def _renamed(read: Read, groups: Mapping[str, Letters]) -> Read:
    """Replace letters by others, or by several."""
    axes = tuple(tuple(new for letter in group for new in groups.get(letter, (letter,))) for group in read.axes)
    return Read(read.name, axes)


# Work ---------------------------------------------------------------------------------------------


def path(term: Term, out: Letters, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the order of least work for a product."""
    if len(term.factors) < 2:
        return []
    present = {letter for read in term.factors for letter in read.letters}
    kept = [letter for letter in out if letter in present]
    return least_work([read.letters for read in term.factors], kept, sizes.__getitem__)


def orders(term: Term, most: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield the orders in which a product may be done two at a time, as many as are wanted."""

    def below(count: int) -> Iterator[list[tuple[int, ...]]]:
        if count < 2:
            yield []
            return
        for pair in itertools.combinations(range(count), 2):
            for rest in below(count - 1):
                yield [pair, *rest]

    yield from itertools.islice(below(len(term.factors)), most)


def written(
    found: Sum, program: Equations, name: str, paths: Sequence[Sequence[tuple[int, ...]]]
) -> tuple[Equations, int]:
    """Write a multiplied-out step as a program, each product in the given order, and count its multiply-adds.

    Args:
        found: The step.
        program: Where it comes from; names that are read become inputs.
        name: The step's name.
        paths: For each term which factors are multiplied next, as positions in what is left.
    """
    steps: list[Equation] = []
    work = 0
    names = (f"z{n}" for n in itertools.count())
    sums: list[Read] = []
    constant = 0.0
    out = found.letters

    def size(letters: set[str]) -> int:
        return math.prod(found.sizes[letter] for letter in letters)

    for term, order in zip(found.terms, paths, strict=True):
        factors = list(term.factors)
        if not factors:
            constant += term.scale
            continue
        for group in order or [tuple(range(len(factors)))]:
            chosen = [factors[i] for i in group]
            factors = [x for i, x in enumerate(factors) if i not in group]
            union = {letter for read in chosen for letter in read.letters}
            later = {*out, *(letter for read in factors for letter in read.letters)}
            last = not factors
            scale = [term.scale] if last and term.scale != 1 else []
            kept = [x for x in out if x in union] + sorted(x for x in union if x in later and x not in out)
            if last and len(chosen) == 1 and not scale and tuple(kept) == chosen[0].letters:
                factors.append(chosen[0])
                continue
            new = next(names)
            steps.append(Equation(new, tuple(kept), "contract", (*chosen, *scale)))
            # What is summed in only one of two factors is summed before they are multiplied.
            own = [set(read.letters) for read in chosen]
            if len(own) == 2:
                shared = [letters & (later | other) for letters, other in zip(own, own[::-1], strict=True)]
                work += sum(size(letters) for letters, less in zip(own, shared, strict=True) if letters != less)
                work += size(shared[0] | shared[1])
            else:
                work += size(union)
            factors.append(Read(new, tuple((x,) for x in kept)))
        sums += factors
    if not sums:
        raise _Cannot
    result, *others = sums
    if constant:
        new = next(names)
        steps.append(Equation(new, result.letters, "add", (result, constant)))
        result = Read(new, tuple((x,) for x in result.letters))
    for other in others:
        new = next(names)
        letters = tuple(x for x in out if x in result.letters or x in other.letters)
        steps.append(Equation(new, letters, "add", (result, other)))
        work += size(set(letters))
        result = Read(new, tuple((x,) for x in letters))
    if result.letters != out:
        new = next(names)
        steps.append(Equation(new, out, "contract", (result,)))
        result = Read(new, tuple((x,) for x in out))
    known = {step.name for step in steps}
    read = {x.name for step in steps for x in step.reads} - known
    every = {**{k: tuple((x,) for g in v for x in g) for k, v in program.inputs.items()},
             **{s.name: tuple((x,) for x in s.letters) for s in program.steps}}  # fmt: skip
    inputs: dict[str, Groups] = {k: every[k] for k in every if k in read}
    used = {x for groups in inputs.values() for g in groups for x in g} | {x for s in steps for x in s.letters}
    used |= {x for s in steps for r in s.reads for x in r.letters}
    sizes = {k: v for k, v in found.sizes.items() if k in used}
    return Equations(inputs, sizes, tuple(steps), Read(result.name, tuple((x,) for x in out))), work


def work_of(steps: Mapping[str, Equation], names: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return the multiply-adds of steps as they are; elementwise work, which fuses, does not count."""
    total = 0
    for name in names:
        step = steps[name]
        if step.do in (*SUMS, "where"):
            letters = {letter for read in step.reads for letter in read.letters} | set(step.letters)
            total += math.prod(sizes[letter] for letter in letters)
    return total


@dataclass(frozen=True)
class Cheaper:
    """A step multiplied out: the program, whether it is a sum of products, and the terms that it adds up."""

    program: Equations
    multilinear: bool
    terms: int


def cheaper(program: Equations, name: str, inner: frozenset[str], worthwhile: float) -> Cheaper | None:
    """Return a step multiplied out in the order of least work, if that is so many times less."""
    steps = program.defined()
    try:
        found = Expander(program, inner).expand(name)
        if found is None:
            return None
        paths = [path(term, found.letters, found.sizes) for term in found.terms]
        result, work = written(found, program, name, paths)
    except (_Cannot, ValueError):
        return None
    if work * worthwhile > work_of(steps, [name, *found.inside], found.sizes):
        return None
    chosen = [steps[one] for one in (name, *found.inside)]
    plain = all(step.do in ("contract", "add", "mul") and len(step.reads) == len(step.of) for step in chosen)
    terms = max(math.prod(found.sizes[letter] for letter in term.bound) for term in found.terms)
    return Cheaper(result, plain, max(terms, result.terms()))
