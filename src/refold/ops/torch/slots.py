"""Steps on slots: states lie in a pool, as engines keep them, and a step reads and writes some of its rows in place.

A backend computes such a step by a function ``<step>_slots`` next to ``<step>``. Where it has none, or something could
observe the call, callers gather and scatter rows (`refold.compat.slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from refold.ops.arrays import keyword_arguments, meta_of
from refold.ops.backends import resolve
from refold.ops.spec import INTEGERS, Arg, OpSpec
from refold.ops.torch import private, registry

NAMES = ("source", "target", "accepted", "offsets")
_plans: dict[Any, Callable[..., Tensor] | None] = {}
_LIMIT = 4096  # Distinct signatures that are remembered; then the memory starts afresh.


@dataclass(frozen=True)
class Places:
    """Which slots the k sequences of a step read and write, of a pool ``(slots, ...)``.

    A negative slot, and ``pad``, mean none: the sequence's outputs are zeros, and nothing is written for it. A slot
    that does not exist does the same, and its outputs are NaN. Slots that one sequence writes and another reads have,
    for the reader, the state before or after: there is no order between sequences.
    """

    source: Tensor | None = None
    """Slots that are read, ``(k,)`` or ``(k, m)``; None: sequence i reads slot i."""
    target: Tensor | None = None
    """Slots that are written, likewise; None: those that are read."""
    accepted: Tensor | None = None
    """``(k,)``: sequences go on from their slot of this number, from 1, and the state after token i goes to slot i.
    None: the first slots are read, and written after the last token."""
    offsets: Tensor | None = None
    """``(k + 1,)`` of the tokens of x, which then has no batch axis; None: one sequence a row."""
    pad: int = -1

    def arrays(self) -> tuple[Tensor | None, ...]:
        """Return the tensors in the order of `NAMES`."""
        return self.source, self.target, self.accepted, self.offsets

    def count(self, rows: int) -> int:
        """How many sequences there are, where x has this many rows."""
        return rows if self.offsets is None else len(self.offsets) - 1

    def strides(self, tensor: Tensor | None, timeless: bool) -> tuple[int, int, int]:
        """Return the steps of a tensor of tokens from row to row, from token to token, and from head to head."""
        if tensor is None:
            return 0, 0, 0
        if not timeless:
            return tensor.stride(0), tensor.stride(1), tensor.stride(2)
        return tensor.stride(0), 0 if self.offsets is None else tensor.stride(0), tensor.stride(1)

    def ints(self, rows: int, slots: int) -> tuple[int, ...]:
        """Return the integers that kernels take: see `refold.ops.triton.slots.place`."""
        target = self.source if self.target is None else self.target
        if target is None:
            return (0,) * 9
        (columns, *source), (kept, *to) = map(_columns, (self.source, target))
        return rows, slots, self.pad, columns, kept, *source, *to


def _columns(slots: Tensor | None) -> tuple[int, int, int]:
    """Return how many slots a sequence has, and the steps from sequence to sequence and from slot to slot."""
    if slots is None:
        return 1, 0, 0
    return (slots.shape[1], slots.stride(0), slots.stride(1)) if slots.ndim == 2 else (1, slots.stride(0), 0)


def on_slots(spec: OpSpec) -> OpSpec:
    """Return a step's spec with the arrays of `Places` and the place of the outputs; for plans, not for checks."""
    more = [Arg(name, ("k",), optional=True, dtypes=INTEGERS) for name in NAMES]
    return replace(spec, args=(*spec.args, *more, Arg("out", spec.args[0].axes, optional=True)))


def in_slots(spec: OpSpec, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of the arrays of `on_slots`; ``step`` takes the new state before the places."""
    at, end = spec.updates_at, len(spec.args)

    def run(*arrays: Any) -> Tensor:
        source, target, *rest = arrays[end:]
        return step(*arrays[:end], arrays[at], source, source if target is None else target, *rest)

    return run


def update(
    spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any], places: Places, out: Tensor | None
) -> Tensor | None:
    """Run a step on slots of the pool ``spec.updates``, where they lie; None if no backend does, or it is observed."""
    given = (*arrays, *places.arrays(), out)
    options = spec.plain_options(options)
    if private.watched() or not registry.is_plain(given, options):
        return None
    registry.refuse_gradients(f"{spec.name}_", arrays)
    key = spec.name, registry.signature_of(given, (*options, places.pad), "")
    if key not in _plans:
        if len(_plans) >= _LIMIT:
            _plans.clear()
        _plans[key] = _plan(spec, arrays, options, places, out)
    if (run := _plans[key]) is None:
        return None
    y = run(*given)
    torch.autograd.graph.increment_version(arrays[spec.updates_at])
    return y


def _plan(
    spec: OpSpec, arrays: Sequence[Any], options: Sequence[Any], places: Places, out: Tensor | None
) -> Callable[..., Tensor] | None:
    at = spec.updates_at
    registry.refuse_overlap(spec, arrays[at])
    # What is checked and what chooses the backend is a step whose states are already gathered.
    rows = [a if i != at else a[:1].expand(len(arrays[0]), *a.shape[1:]) for i, a in enumerate(arrays)]
    meta = spec.validate(meta_of(spec, "torch", rows, options))
    make = getattr(resolve(spec, meta, ""), f"{spec.name}_slots", None)
    if make is None or arrays[0].numel() == 0 or (out is not None and out.stride(-1) != 1):
        return None
    given = keyword_arguments(spec, arrays, options) | dict(zip(NAMES, places.arrays(), strict=True))
    plan: Callable[..., Tensor] = make.plan(**given, pad=places.pad, out=out)
    return plan
