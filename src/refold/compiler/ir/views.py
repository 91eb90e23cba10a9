"""What each view of ATen does with the symbols of its input's axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from .fx import Size, arg, same, value
from .symbols import Axis, Label, regroup

aten = torch.ops.aten

# Views: (node, labels of the input) -> labels of the output, or None if they cannot be told.
LabelMap = Callable[[Node, tuple[Label, ...]], tuple[Label, ...] | None]


def keep(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    """Leave the symbols where they are."""
    return labels


def _reshape(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...] | None:
    return regroup(labels, value(node).shape)


def _permute(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    return tuple(labels[dim] for dim in arg(node, 1))


def _transpose(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    order = list(labels)
    i, j = arg(node, 1, default=0), arg(node, 2, default=-1)
    order[i], order[j] = order[j], order[i]
    return tuple(order)


def _unsqueeze(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    dim = arg(node, 1) % (len(labels) + 1)
    return (*labels[:dim], (), *labels[dim:])


def _squeeze(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    rank = len(labels)
    dims = arg(node, 1, "dim", range(rank))
    dropped = {dim % rank for dim in (dims if isinstance(dims, (list, tuple, range)) else [dims])}
    shape = value(arg(node, 0)).shape
    return tuple(label for dim, label in enumerate(labels) if not (dim in dropped and same(shape[dim], 1)))


def _expand(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    shape = value(node).shape
    padded = ((),) * (len(shape) - len(labels)) + labels
    return tuple(label or (() if same(size, 1) else (Axis(size),)) for label, size in zip(padded, shape, strict=True))


def _repeat(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...]:
    """Tile every axis: the copies are a symbol of their own, outside the axis."""
    times = arg(node, 1)
    padded = ((),) * (len(times) - len(labels)) + labels
    copies = [() if same(count, 1) else (Axis(count),) for count in _sizes(times)]
    return tuple((*copy, *label) for copy, label in zip(copies, padded, strict=True))


def _sizes(arguments: Sequence[Any]) -> list[Size]:
    return [entry.meta["val"] if isinstance(entry, Node) else entry for entry in arguments]


VIEWS: dict[Any, LabelMap] = {
    aten.alias.default: keep,
    aten.clone.default: keep,
    aten.detach.default: keep,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
}


def viewed(node: Node, labels: tuple[Label, ...]) -> tuple[Label, ...] | None:
    """Return the labels of a view, from those of its input; None if they cannot be told."""
    return VIEWS.get(node.target, keep)(node, labels)


def is_view(node: Node) -> bool:
    """Tell whether a node only moves symbols between axes (a copy and ``x[:]`` count)."""
    return node.target in VIEWS or (
        node.target is aten.slice.Tensor
        and all(same(a, b) for a, b in zip(value(node).shape, value(arg(node, 0)).shape, strict=True))
    )
