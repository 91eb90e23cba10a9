"""States in slots, as inference engines keep them: which rows of a large tensor a call reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from refold.errors import ArgumentError, DtypeError, ShapeError


@dataclass(frozen=True)
class Slots:
    """The slots of a call. Rows with a negative slot, or with ``pad``, are padding: they read zeros, write nothing."""

    source: Tensor
    target: Tensor
    valid: Tensor

    @classmethod
    def of(cls, op: str, batch: int, pad: int, **indices: Tensor | None) -> Slots | None:
        """Take the slots that are read and, if they differ, written; None if neither is given."""
        if not isinstance(pad, int) or isinstance(pad, bool):
            raise ArgumentError(f"{op}: pad_slot_id must be an integer; got {pad!r}.")
        for name, index in indices.items():
            if index is not None and index.shape != (batch,):
                raise ShapeError(
                    f"{op}: {name} must have the shape ({batch},); got {tuple(index.shape)}. Give one per row."
                )
            if index is not None and index.dtype not in (torch.int32, torch.int64):
                raise DtypeError(f"{op}: {name} must be int32 or int64; got {index.dtype}. Convert it.")
        source, target = (*indices.values(), None)[:2]
        if source is None and target is None:
            return None
        source = torch.arange(batch, device=target.device) if source is None else source  # type: ignore[union-attr]
        target = source if target is None else target
        valid = (source >= 0) & (source != pad) & (target >= 0) & (target != pad)
        return cls(source.long(), target.long(), valid)

    def update(self, state: Tensor, step: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Run ``step(rows of state) -> (y, new rows)`` on the slots, write the new rows, and return ``y``.

        Nothing here waits for a GPU. A row of padding writes what some other row writes, and to the same place.
        """
        rows = state.index_select(0, torch.where(self.valid, self.source, 0))
        y, after = step(torch.where(_wide(self.valid, rows), rows, 0))
        other, some = self.valid.int().argmax(), self.valid.any()  # a valid row, if there is one
        row = torch.where(self.valid, torch.arange(len(self.valid), device=rows.device), other)
        target = torch.where(some, self.target.index_select(0, row), 0)
        state.index_copy_(0, target, torch.where(some, after.index_select(0, row), state[:1]).to(state.dtype))
        return torch.where(_wide(self.valid, y), y, 0)


def _wide(flags: Tensor, like: Tensor) -> Tensor:
    return flags.view(-1, *[1] * (like.ndim - 1))
