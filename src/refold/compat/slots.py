"""States in slots, as inference engines keep them: which rows of a large tensor a call reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from refold.errors import ArgumentError, DtypeError, ShapeError
from refold.ops.dispatch import call_in_place
from refold.ops.spec import OpSpec
from refold.ops.torch.slots import Places, update


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
        check(op, batch, count, pad, **indices)
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
        if not len(self.source):
            return step(state[:0])[0]
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


def check(op: str, batch: int, count: int, pad: int, **indices: Tensor | None) -> None:
    """Refuse indices that do not give each row one slot of ``count``, as far as that can be known."""
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


def step_(
    op: str, spec: OpSpec, given: dict[str, Any], *, pad: int = -1, out: Tensor | None = None, **indices: Tensor | None
) -> Tensor:
    """Run a step in place, each row on its slot of a pool of states, and return the outputs.

    A backend that takes slots does it where the states lie; else rows are gathered and scattered.

    Args:
        op: What errors name.
        spec: The step.
        given: Its arguments by name; what is not there has its default.
        pad: A slot that means padding, as negative ones do.
        out: Where outputs may be written; what is returned may be elsewhere.
        **indices: By its name in errors, the slot that each row reads, and the one that it writes, if another.
    """
    arrays, options = _in_order(spec, given)
    state = arrays[spec.updates_at]
    if not any(index is not None for index in indices.values()):
        return call_in_place(spec, arrays, options, None)  # type: ignore[no-any-return]
    check(op, len(arrays[0]), len(state), pad, **indices)
    source, target = (*indices.values(), None)[:2]
    y = update(spec, arrays, options, Places(source, target, pad=pad), out)
    if y is not None:
        return y
    slots = Slots.of(op, len(arrays[0]), len(state), pad, **indices)
    assert slots is not None

    def on_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
        return call_in_place(spec, _with(spec, arrays, rows), options, None), rows

    return slots.update(state, on_rows)


def steps_(
    op: str, spec: OpSpec, given: dict[str, Any], *, source: Tensor, target: Tensor | None, accepted: Tensor | None,
    offsets: Tensor | None, pad: int, out: Tensor,
) -> Tensor:  # fmt: skip
    """Do the same for sequences of several tokens, which lie one after the other, by `Places`; write ``out``."""
    arrays, options = _in_order(spec, given)
    y = update(spec, arrays, options, Places(source, target, accepted, offsets, pad), out)
    if y is not None:
        return y
    state, total = arrays[spec.updates_at], len(arrays[0])
    starts = (torch.arange(total + 1, device=out.device) if offsets is None else offsets).long()
    count, length = len(starts) - 1, starts.diff()
    target = source if target is None else target
    source, target = (i[:count].view(count, -1) for i in (source, target))
    if accepted is None:  # only the state after the last token is written
        longest, begin = total, source[:, 0]
    else:
        last = (accepted - 1).clamp(0, source.shape[1] - 1)
        longest, begin = target.shape[1], source.gather(1, last.long()[:, None])[:, 0]
    slots = Slots.of(op, count, len(state), pad, source=begin)
    assert slots is not None
    rows, ys = slots.read(state).to(torch.promote_types(state.dtype, torch.float32)), []

    def write(step: int, live: Tensor) -> None:
        to = target[:, step]
        valid = slots.valid & live & (to >= 0) & (to != pad) & (to < len(state))
        replace(slots, target=to.long(), valid=valid).write(state, rows)

    timed = [arg.timed for arg in spec.args]
    for step in range(longest):
        live, token = step < length, (starts[:-1] + step).clamp(max=total - 1)
        one = [a.index_select(0, token) if a is not None and of else a for a, of in zip(arrays, timed, strict=True)]
        after = rows.clone()
        y = call_in_place(spec, _with(spec, one, after), options, None)
        ys.append(torch.where(per_row(slots.valid, y), y, 0))
        rows = torch.where(per_row(live, rows), after, rows)
        if accepted is not None:
            write(step, live)
    if accepted is None:
        write(0, length > 0)
    place = torch.arange(total, device=out.device)
    sequence = torch.searchsorted(starts[1:], place, right=True)
    y = torch.stack(ys, 1)[sequence.clamp(max=count - 1), (place - starts[sequence]).clamp(0, longest - 1)]
    return torch.where(per_row(sequence < count, y), y, out)  # tokens behind the last sequence are padding


def _in_order(spec: OpSpec, given: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return [given.get(arg.name) for arg in spec.args], [given.get(o.name, o.default) for o in spec.options]


def _with(spec: OpSpec, arrays: list[Any], state: Tensor) -> list[Any]:
    return [*arrays[: spec.updates_at], state, *arrays[spec.updates_at + 1 :]]


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
