"""Sequences that the ranks of a process group share: who has which tokens (`Cut`), and batches that are cut so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.errors import ShapeError
from refold.ops.torch.cuts import Cut as Cut

__all__ = ["Cut", "shard"]

IGNORED = -100
"""The label of a token without a target, in transformers."""


def shard(
    batch: Mapping[str, Any], group: Any, *, layout: str = "contiguous", axis: int = 1
) -> tuple[dict[str, Any], Cut]:
    """Cut a batch that all ranks hold over the tokens, as evenly as can be.

    Args:
        batch: Tensors by name. Those whose ``axis`` is as long as that of the first are cut; others stay as they are:
            the global ``cu_seqlens``, for example. The target of a rank's last token is on another rank; so if there
            are ``"labels"``, which a model of transformers shifts, their ``"shift_labels"`` come with them, and
            ``"num_items_in_batch"``, the number of targets on all ranks: the sum of losses over ranks is the mean.
        group: A process group or a 1-D device mesh.
        layout: See `Cut`.
        axis: The axis of tokens.

    Returns:
        ``(own, cut)``: the batch of this rank, and what operators take as ``group``. ``cut.positions()`` are the places
        of the tokens in the sequence.

    Raises:
        ShapeError: The first tensor has no such axis.

    Example:
        >>> import torch.distributed as dist
        >>> from refold.parallel import shard
        >>> dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        >>> own, cut = shard({"x": torch.ones(1, 6, 2)}, dist.group.WORLD)
        >>> own["x"].shape, cut.lengths
        (torch.Size([1, 6, 2]), (6,))
        >>> dist.destroy_process_group()
    """
    name, first = next(iter(batch.items()))
    if not (isinstance(first, Tensor) and first.dim() > axis):
        raise ShapeError(f"shard: {name} must have tokens along axis {axis}; got {getattr(first, 'shape', first)}.")
    total, cut = first.shape[axis], Cut(group, layout=layout)
    cut = Cut(group, tuple(len(run) for run in torch.arange(total).tensor_split(cut.size)), layout)
    positions = cut.positions(first.device)
    if isinstance(labels := batch.get("labels"), Tensor):
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        batch = {**batch, "shift_labels": targets, "num_items_in_batch": (targets != IGNORED).sum()}
    own = {
        name: a.index_select(axis, positions)
        if isinstance(a, Tensor) and a.dim() > axis and a.shape[axis] == total
        else a
        for name, a in batch.items()
    }
    return own, cut
