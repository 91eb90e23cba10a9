"""What a view does with the symbols of its input's axes."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .fx import CASTS, arg, same
from .moves import Copy, Expand, Moved, NotThis, Permute, Rules, Slice, View, is_whole, read
from .symbols import Axis, Label, regroup

Labels = tuple[Label, ...]
LABELS: Rules[None, Labels] = Rules()


@LABELS.on(Copy, Slice)
def _whole(_: Any, x: Moved, labels: Labels) -> Labels:
    if not is_whole(x.shape, x.given):
        raise NotThis
    return labels


@LABELS.on(View)
def _view(_: Any, x: Moved, labels: Labels) -> Labels:
    found = regroup(labels, x.shape)
    if found is None:
        raise NotThis
    return found


@LABELS.on(Permute)
def _permute(_: Any, x: Permute, labels: Labels) -> Labels:
    return tuple(labels[d] for d in x.order)


@LABELS.on(Expand)
def _expand(_: Any, x: Moved, labels: Labels) -> Labels:
    padded = ((),) * (len(x.shape) - len(labels)) + labels
    return tuple(label or (() if same(size, 1) else (Axis(size),)) for label, size in zip(padded, x.shape, strict=True))


def viewed(node: Node, labels: Labels) -> Labels | None:
    """Return the labels of a view, from those of its input; None if they cannot be told."""
    found = read(node)
    try:
        return labels if found is None else LABELS.apply(None, found, lambda _: labels)
    except NotThis:
        return None


def is_view(node: Any) -> bool:
    """Tell whether a node only moves symbols between the axes of its first argument.

    Copies and ``x[:]`` count, and conversions do not, to the same dtype neither.
    """
    found = read(node) if node.target not in CASTS else None
    return (
        found is not None
        and next(found.nodes()) is arg(node, 0)
        and all(
            isinstance(x, Copy | View | Permute | Expand) or (type(x) is Slice and is_whole(x.shape, x.given))
            for x in found.chain()
        )
    )
