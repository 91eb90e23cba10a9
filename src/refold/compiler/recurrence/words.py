"""Words about the steps of a linear recurrence, and what their products and sums are.

A word says what an element of a tensor is, in terms of the factors a and the inputs b of ``h[t] = a[t] h[t-1] + b[t]``:

- ``a[i] ... a[j]`` is a product;
- ``b[j] + a[j] b[j-1] + ... + a[j] ... a[i+1] b[i]`` is a state that started at step i;
- a product of the factors after a state, and that state, is a decayed state.

A product of neighbours is a product; a decayed state and the state after it are a longer state. Nothing else is a word.
Source: the associative operator of Blelloch 1990 (CMU-CS-90-190), section 1.4.
"""

from __future__ import annotations

from typing import Any

ZERO, ONE = 0, 1
"""The numbers of the words 0 and 1."""


class Opaque(Exception):
    """A value is no word about a recurrence."""


class Algebra:
    """Numbers for words, and what their products and sums are."""

    def __init__(self) -> None:
        self._words: list[tuple[Any, ...]] = [("0",), ("1",)]
        self._numbers: dict[tuple[Any, ...], int] = {word: i for i, word in enumerate(self._words)}

    def number(self, *word: Any) -> int:
        """Return the number of a word."""
        if word not in self._numbers:
            self._numbers[word] = len(self._words)
            self._words.append(word)
        return self._numbers[word]

    def leaf(self, source: Any, t: int) -> int:
        """Return an operand at a step."""
        return self.number("leaf", source, t)

    def _product(self, x: int) -> tuple[Any, int, int] | None:
        """Read a word as a product: (operand, first, last)."""
        word = self._words[x]
        if word[0] == "leaf":
            return word[1], word[2], word[2]
        return word[1:] if word[0] == "product" else None

    def state(self, x: int) -> tuple[Any, Any, int, int] | None:
        """Read a word as a state: (factors or None, inputs, first, last); any factors, ``...``, if it is one input."""
        word = self._words[x]
        if word[0] == "leaf":
            return ..., word[1], word[2], word[2]
        return word[1:] if word[0] == "state" else None

    def _decayed(self, x: int) -> tuple[Any, Any, int, int, int] | None:
        """Read a word as a decayed state: (factors, inputs, first, last, step to which it decayed)."""
        word = self._words[x]
        if word[0] == "decayed":
            return word[1:]
        if word[0] == "state" and word[1] is None:
            return None, word[2], word[3], word[4], word[4]
        return None

    def times(self, x: int, y: int) -> int:
        """Return a product of words.

        Raises:
            Opaque: It is no word.
        """
        if ZERO in (x, y):
            return ZERO
        if ONE in (x, y):
            return y if x == ONE else x
        p, q = self._product(x), self._product(y)
        if p is not None and q is not None and p[0] == q[0]:
            (source, i, j), (_, k, m) = sorted((p, q), key=lambda part: part[1])
            if j + 1 != k:
                raise Opaque
            return self.number("product", source, i, m)
        for factor, other in ((p, y), (q, x)):
            if factor is None:
                continue
            source, first, last = factor
            state, decayed = self.state(other), self._decayed(other)
            if state is not None and state[0] in (..., source) and state[3] + 1 == first and source != state[1]:
                return self.number("decayed", source, *state[1:], last)
            if decayed is not None and decayed[0] == source and decayed[4] + 1 == first:
                return self.number("decayed", *decayed[:4], last)
        raise Opaque

    def plus(self, x: int, y: int) -> int:
        """Return a sum of words.

        Raises:
            Opaque: It is no word.
        """
        if ZERO in (x, y):
            return y if x == ZERO else x
        for earlier, later in ((x, y), (y, x)):
            decayed, state, other = self._decayed(earlier), self.state(later), self._decayed(later)
            if decayed is None and (alone := self.state(earlier)) is not None and alone[0] is ...:
                decayed = None, alone[1], alone[2], alone[3], alone[3]  # a sum without factors begins
            if decayed is None:
                continue
            a, b, first, last, to = decayed
            follows = state is not None and state[0] in (..., a) and state[1:3] == (b, last + 1)
            if state is not None and follows and (a is None or to == state[3]):
                return self.number("state", a, b, first, state[3])
            if other is not None and a is not None and other[:3] == (a, b, last + 1) and other[4] == to:
                return self.number("decayed", a, b, first, other[3], to)
        raise Opaque

    def exp(self, x: int) -> int:
        """Return the exponential of a word: that of a sum is a product.

        Raises:
            Opaque: It is no word.
        """
        if x == ZERO:
            return ONE
        state = self.state(x)
        if state is None or state[0] not in (None, ...):
            raise Opaque
        source = ("exp", state[1])
        return self.leaf(source, state[2]) if state[2] == state[3] else self.number("product", source, *state[2:])
