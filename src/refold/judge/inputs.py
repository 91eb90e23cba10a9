"""The inputs a program is tried on: many kinds of values, special values, other shapes, other layouts.

Zero-mean values decide about precision, since rounding errors of positive ones average out in a norm; the others catch
programs that rely on signs, scales, order or density. All are drawn from a secret seed after the program is loaded.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

Tensors = list[torch.Tensor]
Kind = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
Change = Callable[[Sequence[torch.Tensor], int], Tensors]


def _normal(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    return torch.randn(x.shape, generator=g)


def _uniform(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    return torch.rand(x.shape, generator=g)


def _below(n: int, g: torch.Generator) -> int:
    return int(torch.randint(n, (), generator=g))


def _one_in_each_row(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    return _normal(x, g) * (torch.arange(x.shape[-1]) == _below(x.shape[-1], g) if x.numel() and x.dim() else 1)


def _one_hot(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    size = x.shape[-1] if x.dim() else 1
    return (torch.arange(size) == torch.randint(max(size, 1), (*x.shape[:-1], 1), generator=g)).float().view(x.shape)


def _mirrored(axis: int) -> Kind:
    return lambda x, g: (n := _normal(x, g)) + (n.flip(min(axis, x.dim() - 1)) if x.dim() else 0)


def _astronomic(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Draw values whose squares are not finite in float32, though sums of them are."""
    size = min(2.0 ** (68 + 20 * float(torch.rand((), generator=g))), torch.finfo(x.dtype).max ** 0.75)
    values = _normal(x, g)
    return size * (values + values.sign())


def _one_huge(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    values = _normal(x, g)
    values.view(-1)[_below(max(x.numel(), 1), g) :][:1] *= min(2.0**20, torch.finfo(x.dtype).max ** 0.5)
    return values


def _sorted(axis: int, *, descending: bool = False) -> Kind:
    return lambda x, g: _normal(x, g).sort(axis, descending).values if x.dim() else _normal(x, g)


def _repeated(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Repeat the first numbers along an axis, if there is such a one."""
    return x.narrow(axis, 0, 1).expand(x.shape) if x.numel() and -x.dim() <= axis < x.dim() else x


def _apart(axis: int) -> Kind:
    """Draw values of another scale in each part of an axis, which has some parts; of the last if there is none such."""

    def kind(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
        if not x.numel() or x.dim() < (1 if axis else 2):
            return _normal(x, g)
        by = min(axis, x.dim() - 1)
        size = x.shape[by]
        parts = 2 + _below(max(size - 1, 1), g)
        least = max(-40.0, math.log2(torch.finfo(x.dtype).tiny) / 2)
        least += max(-12 - least, 0) * float(torch.rand((), generator=g))
        drawn = torch.rand(parts, generator=g)
        drawn = (drawn - drawn.min()) / (drawn.max() - drawn.min()).clamp_min(1e-9)
        scales = torch.exp2(least + (8 - least) * drawn)[torch.arange(size) * parts // size]
        return (_normal(x, g).movedim(by, -1) * scales).movedim(-1, by)

    return kind


def _scaled(low: float, high: float) -> Kind:
    """Draw values of one scale between two, whose squares are normal numbers in their dtype."""

    def kind(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
        exponent = math.log2(low) + (math.log2(high) - math.log2(low)) * float(torch.rand((), generator=g))
        limits = torch.finfo(x.dtype)
        return _normal(x, g) * min(max(2.0**exponent, limits.tiny**0.5), limits.max**0.5)

    return kind


KINDS: dict[str, Kind] = {
    "normal": _normal,
    "integers": lambda x, g: torch.randint(-1, 2, x.shape, generator=g).float(),
    "uniform": _uniform,
    "negated": lambda x, g: -_uniform(x, g),
    "minute": _scaled(2.0**-60, 2.0**-60),
    "tiny": _scaled(2.0**-40, 2.0**-40),
    "very small": _scaled(1e-6, 3e-4),
    "small": _scaled(3e-4, 0.01),
    "x0.01": _scaled(0.01, 0.01),
    "x3": _scaled(3.0, 3.0),
    "tens": _scaled(8.0, 40.0),
    "hundreds": _scaled(40.0, 400.0),
    "x1000": _scaled(1e3, 1e3),
    "huge": _scaled(2.0**20, 2.0**20),
    "enormous": _scaled(2.0**40, 2.0**40),
    "astronomic": _astronomic,
    # Where rounding and steps decide; of zeros, some are negative.
    "halves": lambda x, g: torch.randint(17, x.shape, generator=g) / 2 * _normal(x, g).sign(),
    "zeros and ones": lambda x, g: torch.randint(2, x.shape, generator=g).float(),
    "large whole numbers": lambda x, g: (100 * _normal(x, g)).round(),
    "wide exponents": lambda x, g: _normal(x, g) * torch.exp2(16 * _uniform(x, g) - 8),
    "sparse": lambda x, g: _normal(x, g) * (_uniform(x, g) < 0.1),
    "one in each row": _one_in_each_row,
    "one-hot rows": _one_hot,
    "zero rows": lambda x, g: _normal(x, g) * (_uniform(x[..., :1] if x.dim() > 1 else x, g) < 0.5),
    "constant rows": lambda x, g: _repeated(_normal(x, g), -1),
    "constant columns": lambda x, g: _repeated(_normal(x, g), -2),
    "all equal": lambda x, g: torch.randn((), generator=g).expand(x.shape),
    "rows apart": _apart(0),
    "columns apart": _apart(-1),
    "parts apart": _apart(1),
    "one huge element": _one_huge,
    "sorted": _sorted(-1),
    "sorted downwards": _sorted(-1, descending=True),
    "sorted columns": _sorted(0),
    "mirrored rows": _mirrored(-1),
    "mirrored columns": _mirrored(0),
    "mirrored parts": _mirrored(1),
    "zeros": lambda x, g: torch.zeros(x.shape),
    "all large": lambda x, g: 8 + _normal(x, g),
    "all very negative": lambda x, g: -8 + _normal(x, g),
}


# Kinds for more than one tensor. Of each, it is drawn by what it is multiplied,
UNLIKE = ("unlike scales", "other scales", "more scales")
_SCALES = (1e-3, 1.0, 1e3)
# or which one of them has large values of one sign: gates that are all open, or all shut.
ALONE = {"one is large": 8.0, "one is very negative": -8.0}
# or that those of one shape are the first or its negative: by a bit of their number, so that of any four each two are
# opposite once.
OPPOSITE = {"opposite": 1, "opposite by twos": 2}

# Kinds that are others than those of rows and columns only where there are three axes.
OF_THREE_AXES = ("parts apart", "mirrored parts")

# Kinds on which gradients are compared coarsely, if at all.
SATURATED = ("all large", "all very negative", *ALONE)
FAR_WEIGHTS = "weights far apart,"
WRITTEN = "written"  # at numbers of the candidate's source
LARGE = (
    *("tens", "hundreds", "x1000", "huge", "enormous", "astronomic", "large whole numbers", "wide exponents"),
    *("rows apart", "columns apart", "parts apart", "one huge element", *UNLIKE, *SATURATED, FAR_WEIGHTS, WRITTEN),
)

REPEATED = "repeated"
MASKS = "other masks"
# Kinds of which sums may have terms that are all equal.
EQUAL_TERMS = ("constant rows", "constant columns", "all equal", "zeros and ones", "one-hot rows", REPEATED)


def generator(seed: int) -> torch.Generator:
    """Return a source of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


def names(like: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Name the kinds that are worth trying for such tensors."""
    axes = [x.dim() for x in like if is_real(x)]
    found = (*KINDS, *UNLIKE, *ALONE, *OPPOSITE) if len(axes) > 1 else tuple(KINDS)
    return found if max(axes, default=0) > 2 else tuple(kind for kind in found if kind not in OF_THREE_AXES)


def draw(kind: str, like: Sequence[torch.Tensor], seed: int) -> Tensors:
    """Draw values of a kind for all floating-point tensors, with their shapes and dtypes; others stay."""
    g = generator(seed)

    def drawn(x: torch.Tensor, scale: float) -> torch.Tensor:
        if x.is_complex():
            return torch.complex(*(drawn(part, scale) for part in (x.real, x.imag))).to(x.dtype)
        return (scale * KINDS.get(kind, _normal)(x, g)).to(x.dtype).contiguous() if x.is_floating_point() else x

    real = [index for index, x in enumerate(like) if is_real(x)]
    scales = dict.fromkeys(real, 1.0)
    if kind in UNLIKE and len(real) > 1:
        while len(set(scales.values())) == 1:
            scales = {index: _SCALES[_below(len(_SCALES), g)] for index in real}
    values = [drawn(x, scales[index]) if index in scales else x for index, x in enumerate(like)]
    if kind in ALONE and real:
        index = real[_below(len(real), g)]
        values[index] = (values[index] + ALONE[kind]).to(values[index].dtype)
    of_one_shape: dict[Any, Tensors] = {}
    for index in real if kind in OPPOSITE else ():
        same = of_one_shape.setdefault((like[index].shape, like[index].dtype), [])
        same.append(values[index])
        values[index] = -same[0] if len(same) - 1 & OPPOSITE[kind] else same[0]
    return values


def around(numbers: Sequence[float], like: Sequence[torch.Tensor], seed: int) -> Tensors:
    """Draw zero-mean values, and half of them at, around and between some numbers; integers stay."""
    g = generator(seed)
    between = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]

    def drawn(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return normal(x, g)
        fine = torch.finfo(x.dtype)
        points = torch.tensor([n for n in (*numbers, *between) if fine.tiny < n < fine.max / 4] or [1.0]).to(x.dtype)
        chosen = points[torch.randint(len(points), x.shape, generator=g)]
        moved = 1 + torch.randint(-1, 2, x.shape, generator=g) * 2.0**-10 * _uniform(x, g)
        sign = _normal(x, g).sign()
        return torch.where(_uniform(x, g) < 0.5, _normal(x, g), chosen * moved * sign).to(x.dtype)

    return [drawn(x) for x in like]


def is_real(x: torch.Tensor) -> bool:
    """Say whether a tensor has real or complex numbers."""
    return x.is_floating_point() or x.is_complex()


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast real numbers to a dtype, and complex ones to those of float64 or of float32; others stay."""
    if x.is_complex():
        return x.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return x.to(dtype) if x.is_floating_point() else x


def jittered(like: Sequence[torch.Tensor], seed: int) -> Tensors:
    """Change each floating-point value by a percent: content that was not seen before, and like the user's."""
    g = generator(seed)
    return [x * (1 + 0.01 * torch.randn(x.shape, generator=g)).to(x.dtype) if is_real(x) else x for x in like]


def _edited(edit: Kind) -> Change:
    """Make an editor of floating-point tensors that have elements, of which it gets copies."""

    def change(like: Sequence[torch.Tensor], seed: int) -> Tensors:
        g = generator(seed)
        return [edit(x.clone(), g) if x.is_floating_point() and x.numel() else x for x in like]

    return change


def _one_element(by: float, at: int | None = None) -> Change:
    """Change one element, at a random place or at this one, by so many times the spread of all."""

    def edit(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
        spread = float(x.double().std()) if x.numel() > 1 else 1.0
        x.view(-1)[_below(x.numel(), g) if at is None else at] += by * spread or by
        return x

    return _edited(edit)


def _swap_two(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Swap two elements, which no sum and no norm of all of them sees."""
    if x.numel() > 1:
        places = torch.randperm(x.numel(), generator=g)[:2]
        x.view(-1)[places] = x.view(-1)[places.flip(0)]
    return x


def _move(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Change all elements by so little that a comparison with a tolerance may not see it.

    It is about ten times what a sum in float32 may be off.
    """
    return (x * (1 + 2.0**-15 * torch.randn(x.shape, generator=g))).to(x.dtype)


def shuffled(like: Sequence[torch.Tensor], seed: int) -> Tensors:
    """Give integers and truth values another order; what is sorted along its last axis may have to be, and stays."""
    g = generator(seed)
    out = []
    for x in like:
        ordered = is_real(x) or x.dim() == 0 or x.shape[-1] < 2
        ordered = ordered or any(bool((a[..., 1:] >= a[..., :-1]).all()) for a in (x, x.flip(-1)))
        out.append(x if ordered else x.reshape(-1)[torch.randperm(x.numel(), generator=g)].reshape(x.shape))
    return out


# Small changes of content, in the same place: what an incomplete comparison of contents does not see.
CHANGES: dict[str, Change] = {
    "one element changed": _one_element(2.0),
    "one element changed little": _one_element(0.05),
    "two elements swapped": _edited(_swap_two),
    "rows in another order": _edited(lambda x, g: x.roll(1, 0).contiguous() if x.dim() else x),
    "the last element changed": _one_element(2.0, at=-1),
    "all elements changed very little": _edited(_move),
}


def changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure of arguments with other leaves."""
    if "items" not in tree:
        return change(tree)
    named = "dict" in tree
    items = [[each[0], changed(each[1], change)] if named else changed(each, change) for each in tree["items"]]
    return {**tree, "items": items}


def constants(tree: Any) -> tuple[list[Any], list[Any]]:
    """Return structures of arguments in which one number or truth value is another, and the constants that stay."""
    found: list[Any] = []
    changed(tree, found.append)
    each = [(leaf, other) for leaf in found for other in _other_numbers(leaf.get("value"))]
    trees = [changed(tree, partial(_instead, leaf, {**leaf, "value": other})) for leaf, other in each]
    return trees, [value for leaf in found if (value := leaf.get("value")) is not None and not _other_numbers(value)]


def _other_numbers(value: Any) -> list[Any]:
    if isinstance(value, int):
        return [not value] if isinstance(value, bool) else [value + 1, value - 1]
    return [1.5 * value + 0.25, -value - 0.25, 4 * value + 2] if isinstance(value, float) else []


def lengths(tree: Any) -> Iterator[Any]:
    """Yield structures in which a sequence among the arguments is one shorter or longer, or has one element.

    A dictionary has another order, and the last arguments are left out, which may have defaults.
    """
    arguments = tree["items"] if "sequence" in tree else []
    for at, inner in enumerate(arguments):
        if at:
            yield {**tree, "items": arguments[:at]}
        items, ordered = inner.get("items", []), "sequence" in inner
        for other in ((items[:1], items[:-1], [*items, items[0]]) if ordered else (items[::-1],)) * (len(items) > 1):
            yield {**tree, "items": [*arguments[:at], {**inner, "items": other}, *arguments[at + 1 :]]}


def twins(tree: Any, like: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield structures in which one tensor is given for two arguments of equal shape and dtype, or for all such."""
    every = tree
    for first, other in itertools.combinations(range(len(like)), 2):
        if (like[first].shape, like[first].dtype) == (like[other].shape, like[other].dtype):
            one = partial(_instead, {"tensor": other}, {"tensor": first})
            yield changed(tree, one)
            every = changed(every, one)
    if every != tree:
        yield every


def _instead(old: Any, new: Any, leaf: Any) -> Any:
    return new if leaf is old or (leaf == old and "tensor" in old) else leaf


def specials(like: Sequence[torch.Tensor], seed: int) -> Iterator[tuple[str, Tensors]]:
    """Yield inputs with a NaN or an infinity at a random place of one of them, and with other masks."""
    g = generator(seed)
    floating = [i for i, x in enumerate(like) if x.is_floating_point() and x.numel()]
    for value in (math.nan, math.inf, -math.inf) if floating else ():
        values = [x.clone() for x in like]
        chosen = values[floating[_below(len(floating), g)]]
        chosen.view(-1)[_below(chosen.numel(), g)] = value
        yield f"one {value}", values
    for axis in (None, -1, 0):
        masks = [_other_mask(x, axis, g) for x in like]
        if not all(map(operator.is_, like, masks)):
            yield MASKS, masks
    for value in (False, True) if any(x.dtype == torch.bool for x in like) else ():
        yield MASKS, [torch.full_like(x, value) if x.dtype == torch.bool else x for x in like]


def _other_mask(x: torch.Tensor, axis: int | None, g: torch.Generator) -> torch.Tensor:
    """Turn truth values around, or make them false all along an axis; make some of equal whole numbers smaller."""
    drawn = torch.rand(x.shape, generator=g)
    some = drawn < 0.25
    if x.dtype == torch.bool:
        return x ^ some if axis is None or not (x.numel() and x.dim()) else x & (drawn.narrow(axis, 0, 1) < 0.5)
    if is_real(x) or not x.numel() or int(x.min()) != int(x.max()) or int(x.max()) < 1:
        return x
    return torch.where(some, torch.randint(int(x.max()), x.shape, generator=g).to(x.dtype), x)


def resized(like: Sequence[torch.Tensor], seed: int) -> Iterator[tuple[str, Tensors]]:
    """Yield inputs of other shapes: a size becomes one, one more or less, a prime, a power of two, more, or zero.

    Each size is changed in one way before any is in the next, so that few trials reach all axes. Which sizes belong
    together is not known. Equal ones are changed together first, then the leading ones alone; what the original does
    not accept is none of the program's domain.
    """
    axes = itertools.zip_longest(*(x.shape for x in like), fillvalue=1)
    sizes = list(dict.fromkeys(n for axis in axes for n in axis if n > 1))
    places: list[Callable[[torch.Tensor, int, int], list[int]]] = [
        lambda x, old, new: [new if n == old else n for n in x.shape],
        lambda x, old, new: [new, *x.shape[1:]] if x.dim() and x.shape[0] == old else list(x.shape),
    ]
    seen = {tuple(tuple(x.shape) for x in like)}
    g = generator(seed)
    changes: list[Callable[[int], int]] = [
        lambda n: n + 1, lambda n: n - 1, lambda n: 0, lambda n: 1 << (n - 1).bit_length(), lambda n: 1,
        lambda n: 3 * n + 1, lambda n: _prime(n // 2 + 1), lambda n: 2 + _below(min(n, 15), g), lambda n: 2 * n,
    ]  # fmt: skip
    for change in changes:
        for old in sizes:
            new = change(old)
            for place in places:
                shapes = tuple(tuple(place(x, old, new)) for x in like)
                if shapes not in seen:
                    seen.add(shapes)
                    yield f"{old} -> {new}", [_fitted(x, shape, g) for x, shape in zip(like, shapes, strict=True)]


def broadcast(like: Sequence[torch.Tensor], seed: int) -> Iterator[tuple[str, Tensors]]:
    """Yield inputs of which one has a single element along an axis, for each with several axes or elements."""
    g = generator(seed)
    for index, x in enumerate(like):
        if len(like) > 1 and x.dim() and x.numel() and (is_real(x) or x.dtype == torch.bool):  # no list of places
            short = x.narrow(_below(x.dim(), g), 0, 1).contiguous()
            yield f"input {index}", [short if at == index else other for at, other in enumerate(like)]


def sized(like: Sequence[torch.Tensor], sizes: Mapping[int, int], seed: int) -> Tensors:
    """Draw inputs with other sizes, wherever an axis has one of these."""
    g = generator(seed)
    return [_fitted(x, tuple(sizes.get(n, n) for n in x.shape), g) for x in like]


def rolled(t: torch.Tensor, places: int) -> torch.Tensor:
    """Move the numbers of a tensor on by some places, in its layout; integers, which may be positions, stay."""
    if not places or not is_real(t) or 0 in (*t.shape, *t.stride()):
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.flatten().roll(places).view(t.shape))


def layouts(like: Sequence[torch.Tensor], seed: int) -> Iterator[tuple[str, Tensors]]:
    """Yield inputs whose elements lie otherwise in memory: transposed, in parts, repeated, at an odd address."""
    fresh, g = draw("normal", like, seed), generator(seed)
    yield "transposed", [x.mT.contiguous().mT if x.dim() > 1 else x for x in fresh]
    yield "channels last", [x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x for x in fresh]
    yield "strided", [torch.stack((x, torch.zeros_like(x)), -1).flatten(-2)[..., ::2] if x.dim() else x for x in fresh]
    yield "padded", [torch.cat((x, x), -1)[..., : x.shape[-1]] if x.dim() else x for x in fresh]
    for axis in (0, -1):
        yield REPEATED, [_repeated(x, axis) if is_real(x) else x for x in fresh]
    yield "odd address", [_shifted(x, 1 + _below(15, g)) for x in fresh]


def _prime(n: int) -> int:
    while any(n % k == 0 for k in range(2, math.isqrt(n) + 1)):
        n += 1
    return n


def _fitted(x: torch.Tensor, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    if is_real(x):
        return normal(x.new_empty(shape), g)
    # Integers may be positions or classes: those of the user's inputs, as many as are needed.
    flat, count = x.reshape(-1), math.prod(shape)
    return flat[torch.arange(count) % max(flat.numel(), 1)].reshape(shape).contiguous()


def normal(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Draw zero-mean values for a tensor of real or complex numbers; others stay."""
    if x.is_complex():
        return torch.randn(x.shape, dtype=x.dtype, generator=g)
    return torch.randn(x.shape, generator=g).to(x.dtype) if x.is_floating_point() else x


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    return torch.cat((x.new_zeros(by), x.reshape(-1)))[by:].view(x.shape)
