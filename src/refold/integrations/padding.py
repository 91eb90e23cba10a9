"""Padding in a row: the layer goes on as if only the row's own tokens had been there.

Tokens move to the front of their row, and padding behind them: no convolution reads it there. Its step sizes are zero,
so the scan's state passes it. What is kept then belongs to the row's own last token.

Padding before a row's first token ever stays where it is. It acts as in transformers: not at all, unless ``in_proj``
has a bias, which the first convolutions then see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from refold.integrations.documents import once


@dataclass(frozen=True)
class Padding:
    """Where the tokens of a batch go so that padding is behind them."""

    stays: Tensor
    """``(b, t)``: whether a place is a token, or padding before all tokens of its row."""
    place: Tensor
    """``(b, t)``: the place that each goes to."""
    count: Tensor
    """``(b,)``: how many of a row stay; its padding comes after them."""

    @classmethod
    def of(cls, mask: Tensor | None, seqlen: int, state: Tensor | None, keeps: bool) -> Padding | None:
        """Return the padding that must move in the last ``seqlen`` places of a mask; None if all may stay.

        Args:
            mask: ``(b, s)``, zero at padding.
            seqlen: Places that the layer reads now.
            state: What a cache holds of the layer, or None. A row whose state is zero has not begun.
            keeps: Whether the layer keeps a state. If not, padding at the end of a row is harmless.

        One synchronisation per call of the model on a GPU. While a graph is traced, values cannot be read: then all
        padding moves.
        """
        if mask is None:
            return None
        if torch.compiler.is_compiling():
            return cls._of(mask, seqlen, state)

        def read() -> Padding | None:
            found = cls._of(mask, seqlen, state)
            moves = found.place != torch.arange(seqlen, device=mask.device)
            if keeps:
                moves = moves | ~found.stays
            return found if bool(moves.any()) else None

        return once(mask, (seqlen, state is None, keeps), read)

    @classmethod
    def _of(cls, mask: Tensor, seqlen: int, state: Tensor | None) -> Padding:
        real = mask[:, -seqlen:].bool()
        begun = real.cumsum(1) > 0
        if state is not None:
            begun = begun | state.flatten(1).any(1, keepdim=True).to(mask.device)
        stays = real | ~begun
        count = stays.sum(1)
        place = torch.where(stays, stays.cumsum(1) - 1, count[:, None] + (~stays).cumsum(1) - 1)
        return cls(stays, place, count)

    def behind(self, x: Tensor) -> Tensor:
        """Return ``x`` (b, t, ...) with padding behind the tokens."""
        return torch.zeros_like(x).scatter(1, self._like(x), x)

    def back(self, y: Tensor) -> Tensor:
        """Undo `behind`, of its result or of what was made of that."""
        return y.gather(1, self._like(y))

    def _like(self, x: Tensor) -> Tensor:
        return self.place.view(*self.place.shape, *[1] * (x.ndim - 2)).expand(x.shape)
