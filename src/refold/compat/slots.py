"""States in slots, as inference engines keep them: which rows of a large tensor a call reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from refold.errors import ArgumentError, DtypeError, ShapeError


@dataclass(frozen=True)
class Slots:
    """The slots of a call. Rows with a negative slot, or with ``pad``, are padding: they read zeros, write nothing.

    A slot that does not exist is an error on the CPU. Elsewhere, and in a graph, its value is not known in time: its
    row reads and writes nothing, and the row's result is NaN.
    """

    source: Tensor
    target: Tensor
    valid: Tensor
    absent: Tensor
    """Which rows name a slot that does not exist."""

    @classmethod
    def of(cls, op: str, batch: int, count: int, pad: int, **indices: Tensor | None) -> Slots | None:
        """Take the slots, of ``count``, that are read and, if they differ, written; None if neither is given."""
        if not isinstance(pad, int) or isinstance(pad, bool):
            raise ArgumentError(f"{op}: pad_slot_id must be an integer; got {pad!r}.")
        for name, index in indices.items():
            if index is not None and index.shape != (batch,):
                raise ShapeError(
                    f"{op}: {name} must have the shape ({batch},); got {tuple(index.shape)}. Give one per row."
                )
            if index is not None and index.dtype not in (torch.int32, torch.int64):
                raise DtypeError(f"{op}: {name} must be int32 or int64; got {index.dtype}. Convert it.")
            if index is not None and index.device.type == "cpu" and not torch.compiler.is_compiling():
                _require(op, name, index, count, pad)
        source, target = (*indices.values(), None)[:2]
        if source is None and target is None:
            return None
        source = torch.arange(batch, device=target.device) if source is None else source  # type: ignore[union-attr]
        target = source if target is None else target
        used = (source >= 0) & (source != pad) & (target >= 0) & (target != pad)
        absent = used & ((source >= count) | (target >= count))
        return cls(source.long(), target.long(), used & ~absent, absent)

    def update(self, state: Tensor, step: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Run ``step(rows of state) -> (y, new rows)`` on the slots, write the new rows, and return ``y``."""
        y, after = step(self.read(state))
        self.write(state, after)
        return torch.where(per_row(self.valid, y), y, per_row(torch.where(self.absent, torch.nan, 0.0), y).to(y.dtype))

    def read(self, state: Tensor) -> Tensor:
        """Return the rows of ``state``. Nothing here waits for a GPU."""
        rows = state.index_select(0, torch.where(self.valid, self.source, 0))
        return torch.where(per_row(self.valid, rows), rows, 0)

    def write(self, state: Tensor, after: Tensor) -> None:
        """Write new rows. A row of padding writes what some other row writes, and to the same place."""
        other, some = self.valid.int().argmax(), self.valid.any()  # a valid row, if there is one
        row = torch.where(self.valid, torch.arange(len(self.valid), device=after.device), other)
        target = torch.where(some, self.target.index_select(0, row), 0)
        state.index_copy_(0, target, torch.where(some, after.index_select(0, row), state[:1]).to(state.dtype))


def to_read(state: Tensor) -> Tensor:
    """Return a state that is overwritten after it was computed with: a copy where it may be saved for gradients."""
    return state.clone() if torch.is_grad_enabled() else state


def _require(op: str, name: str, index: Tensor, count: int, pad: int) -> None:
    """Refuse slots that a state of ``count`` slots does not have."""
    for row, slot in enumerate(index.tolist()):
        if slot >= count and slot != pad:
            raise ArgumentError(
                f"{op}: {name}[{row}] is slot {slot}, but the state has the slots 0 to {count - 1}. Give slots that it "
                "has; -1 means padding."
            )


def per_row(flags: Tensor, like: Tensor) -> Tensor:
    """Return flags of rows ``(k,)`` so that they apply to all of a row of another tensor."""
    return flags.view(-1, *[1] * (like.ndim - 1))
