"""Documents that share a row of a batch: where they begin and end, and operators that keep them separate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.compat.checks import shaped
from refold.compat.slots import per_row


def run_apart(
    operator: Callable[..., Any], documents: Documents | None, tokens: Mapping[str, Tensor | None],
    state: Tensor | None, **rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run an operator after a ``state`` a row; return ``y`` and the state after each row.

    Documents, if there are any, do not see one another.
    """
    if documents is None:
        return operator(**tokens, initial_state=state, **rest)  # type: ignore[no-any-return]
    y, states = documents.run(operator, tokens, state, **rest)
    return y, documents.ends(states)


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end in a batch of b rows of t tokens, seen as one row of ``b * t`` tokens."""

    cu_seqlens: Tensor
    """``(k + 1,)`` offsets of the k documents in that row."""
    first: Tensor
    """``(b,)``: the document that each row begins with."""
    last: Tensor
    """``(b,)``: the document that each row ends with."""
    fresh: Tensor | None = None
    """``(b,)``: whether a row's first token begins a document; if not, or if None, it continues an earlier one."""

    @classmethod
    def from_offsets(cls, cu_seqlens: Tensor) -> Documents:
        """Take the offsets of documents in a batch of one row."""
        first = torch.zeros(1, dtype=torch.long, device=cu_seqlens.device)
        return cls(cu_seqlens, first, first + (cu_seqlens.numel() - 2))

    @classmethod
    def from_index(cls, index: Tensor) -> Documents:
        """Take the number of each token's document, ``(b, t)``; where it changes, one begins. Waits for a GPU."""
        starts = torch.zeros_like(index, dtype=torch.bool)
        starts[:, 1:] = index[:, 1:] != index[:, :-1]
        return cls.from_starts(starts)

    @classmethod
    def from_starts(cls, starts: Tensor, fresh: Tensor | None = None) -> Documents:
        """Take a mark, ``(b, t)``, on each token that begins a document; first tokens do anyway. Waits for a GPU."""
        flat = starts.clone()
        flat[:, 0] = True
        flat = flat.flatten()
        end = torch.tensor([flat.numel()], device=flat.device)
        document = (flat.cumsum(0) - 1).view(starts.shape)
        return cls(torch.cat([flat.nonzero()[:, 0], end]).int(), document[:, 0], document[:, -1], fresh)

    def run(
        self, operator: Callable[..., Any], tokens: Mapping[str, Tensor | None], state: Tensor | None, **rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Run an operator over ``tokens``, each ``(b, t, ...)``, after a ``state`` a row.

        Returns:
            ``y``, ``(b, t, ...)``, and the state after each document, ``(k, ...)``.
        """
        batch, seqlen = next(v.shape[:2] for v in tokens.values() if v is not None)
        if state is not None:
            shaped(operator.__name__, initial_state=(state, (batch, *state.shape[1:])))
        flat = {name: None if v is None else v.flatten(0, 1)[None] for name, v in tokens.items()}
        device = next(v.device for v in flat.values() if v is not None)
        offsets = self.cu_seqlens.to(device)
        y, states = operator(**flat, initial_state=self._initial(state), cu_seqlens=offsets, **rest)
        return torch.unflatten(y[0], 0, (batch, seqlen)), states

    def ends(self, states: Tensor) -> Tensor:
        """Return of the states after each document, ``(k, ...)``, those after each row, ``(b, ...)``."""
        return states.index_select(0, self.last.to(states.device))

    def _initial(self, state: Tensor | None) -> Tensor | None:
        if state is None:
            return None
        if self.fresh is not None:
            state = torch.where(per_row(self.fresh.to(state.device), state), 0, state)
        count = self.cu_seqlens.numel() - 1
        return state.new_zeros(count, *state.shape[1:]).index_copy(0, self.first.to(state.device), state)

    def without(self, stays: Tensor) -> Documents:
        """Return the documents once padding is behind all else in its row; ``stays`` (b, t) is False at padding.

        Padding belongs to the document before it then.
        """
        stays, offsets = stays.to(self.cu_seqlens.device), self.cu_seqlens.long()
        before = F.pad(stays.flatten().cumsum(0), (1, 0))
        last = torch.where(stays, self.numbers(stays.shape), self.first.to(offsets.device)[:, None]).amax(1)
        lengths = (before[offsets[1:]] - before[offsets[:-1]]).index_add(0, last, (~stays).sum(1))
        return replace(self, cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).to(self.cu_seqlens.dtype), last=last)

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        """Return the number of the document of each token of a batch of this shape ``(b, t)``."""
        token = torch.arange(shape[0] * shape[1], device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens[1:].long(), token, right=True).view(shape)

    def goes_on(self) -> Tensor:
        """Return whether each row, ``(b,)``, ends with the document that it continues."""
        same = self.first == self.last
        return same if self.fresh is None else same & ~self.fresh

    def last_begins(self, seqlen: int) -> Tensor:
        """Return the place ``(b,)`` in its row at which each row's last document begins; before 0 if it goes on."""
        rows = torch.arange(len(self.first), device=self.cu_seqlens.device)
        begins = self.cu_seqlens[self.last.to(rows.device)] - rows * seqlen
        return torch.where(self.goes_on().to(rows.device), torch.iinfo(torch.int32).min, begins)
