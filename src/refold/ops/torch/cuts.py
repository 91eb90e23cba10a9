"""How the tokens of a sequence lie on the ranks of a process group, and whether the ranks mean the same call."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from refold.errors import ArgumentError

LAYOUTS = "contiguous", "zigzag"

_GROUPS: dict[str, Any] = {}
"""Name -> process group: nodes of graphs hold names."""

_CUTS: dict[Any, Cut] = {}
"""What nodes stand for."""

_ALL_GATHER = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # by its newer name, if it has one

_SENT = torch.float32, torch.float64  # What every backend of torch.distributed sends as it is.

_FACTS = 16  # Numbers that a rank tells the others: whether it goes on, its tokens, and a checksum for each fact.


@dataclass(frozen=True)
class Cut:
    """A sequence that is cut over the ranks of a process group: what ``group=`` of an operator takes.

    Args:
        group: A process group of torch.distributed, or a 1-D device mesh.
        lengths: The tokens of each rank. None lets every call ask the ranks, which also finds ranks that disagree
            about a call. With lengths, a call sends nothing but states, and ranks that disagree may wait for one
            another until the group's timeout.
        layout: ``"contiguous"``: one run of tokens per rank, in the order of ranks. ``"zigzag"``: of 2 n runs, rank r
            holds runs r and 2 n - 1 - r one after the other, as attention is balanced. A rank with an odd number of
            tokens has one more in its first run.

    Raises:
        ArgumentError: What is given is no group, or lengths or layout do not fit it.
    """

    group: Any
    lengths: tuple[int, ...] | None = None
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        """Take the group of a mesh, and check what is given."""
        group = self.group
        if hasattr(group, "get_group"):
            if group.ndim != 1:
                raise ArgumentError(f"Cut: a mesh must have one dimension; got {group}. Pass mesh['its name'].")
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise ArgumentError(f"Cut: group must be a process group or a device mesh; got {group!r}.")
        object.__setattr__(self, "group", group)
        if self.layout not in LAYOUTS:
            raise ArgumentError(f"Cut: layout must be one of {', '.join(LAYOUTS)}; got {self.layout!r}.")
        if self.lengths is not None:
            lengths = tuple(map(int, self.lengths))
            if len(lengths) != self.size or min(lengths) < 0:
                raise ArgumentError(f"Cut: lengths must be {self.size} numbers of tokens, one per rank; got {lengths}.")
            object.__setattr__(self, "lengths", lengths)
        if issubclass(type(group), dist.ProcessGroup):  # while a compiler traces, something else stands for it
            _GROUPS[self.name] = group

    def __deepcopy__(self, memo: Any) -> Cut:
        """Return the cut itself: copies of a model are on the same ranks."""
        return self

    @property
    def name(self) -> str:
        """The name of the group: the same on all of its ranks."""
        return str(self.group.group_name)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.group.size())

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return int(self.group.rank())

    @property
    def runs(self) -> int:
        """The runs of tokens of each rank."""
        return 2 if self.layout == "zigzag" else 1

    def positions(self, device: Any = None) -> Tensor:
        """Return where the tokens of this rank are in the sequence; the cut must have lengths."""
        own = [p for p in pieces(self.lengths or (), self.layout) if p.rank == self.rank]
        runs = [torch.arange(p.begin, p.end, device=device) for p in sorted(own, key=lambda p: p.at)]
        return torch.cat(runs)

    def node(self) -> tuple[str, list[int], str]:
        """Write the cut as arguments of a graph's node; `cut_of_node` is the inverse."""
        return self.name, list(self.lengths or ()), self.layout


def cut_of_node(name: str, lengths: Sequence[int], layout: str) -> Cut:
    """Return the cut that the node of a graph stands for."""
    if name not in _GROUPS:
        raise ArgumentError(f"Cut: group {name} is not known. Make a Cut(group) before a compiled function has it.")
    key = name, tuple(lengths), layout
    if (found := _CUTS.get(key)) is None or found.group is not _GROUPS[name]:
        if len(_CUTS) > 4096:
            _CUTS.clear()
        found = _CUTS[key] = Cut(_GROUPS[name], tuple(lengths) or None, layout)
    return found


def node_of(group: Any) -> tuple[str, list[int], str]:
    """Write a group, a mesh or a cut as arguments of a graph's node."""
    return (group if isinstance(group, Cut) else Cut(group)).node()


# What torch.compiler.assume_constant_result sets: Dynamo asks once and does not trace it.
node_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Piece:
    """A run of tokens: whose it is, where it starts among the tokens of its rank, and where it is in the sequence."""

    rank: int
    at: int
    begin: int
    end: int


def pieces(lengths: Sequence[int], layout: str, writes: int = 1) -> list[Piece]:
    """List the runs of tokens of all ranks, in the order of time; each has whole numbers of ``writes``."""
    runs = [(rank, 0, length) for rank, length in enumerate(lengths)]
    if layout == "zigzag":
        first = [(rank, 0, (length // writes + 1) // 2 * writes) for rank, length in enumerate(lengths)]
        runs = first + [(rank, half, lengths[rank] - half) for rank, _, half in reversed(first)]
    found, begin = [], 0
    for rank, at, length in runs:
        found.append(Piece(rank, at, begin, begin + length))
        begin += length
    return found


def agree(
    cut: Cut, who: str, facts: Mapping[str, Any], tokens: int, device: torch.device, *, refused: bool
) -> list[int]:
    """Return the tokens of each rank, once it is known that all ranks make the same call.

    Args:
        cut: The ranks.
        who: What they call.
        facts: What must be equal on all ranks, by the names that an error gives them.
        tokens: The tokens of this rank.
        device: Where numbers are sent from.
        refused: Whether this rank refuses its arguments. It raises the reason after this call.

    Raises:
        ArgumentError: A rank refused its arguments, or ranks disagree. All ranks raise.
    """
    facts = {"the layout": cut.layout, **facts}
    sums = [zlib.crc32(repr(fact).encode()) for fact in facts.values()]
    own = torch.tensor([int(not refused), tokens, *sums, *[0] * (_FACTS - len(sums) - 2)])
    told = all_gather(cut, own.to(device)).tolist()
    if refused:
        return []
    if bad := [rank for rank, row in enumerate(told) if not row[0]]:
        raise ArgumentError(
            f"{who}: the arguments of rank {', '.join(map(str, bad))} are refused; the error there says why. "
            "No rank of the group has computed."
        )
    for (name, fact), column in zip(facts.items(), range(2, _FACTS), strict=False):
        if len({row[column] for row in told}) > 1:
            others = [rank for rank, row in enumerate(told) if row[column] != told[cut.rank][column]]
            raise ArgumentError(
                f"{who}: ranks {', '.join(map(str, others))} disagree with rank {cut.rank} about {name}; here it "
                f"is {fact}. Only numbers of tokens may differ."
            )
    return [row[1] for row in told]


def all_gather(cut: Cut, row: Tensor, meanwhile: Callable[[], object] = lambda: None) -> Tensor:
    """Return the rows of all ranks, ``(n, ...)``; each passes one of the same shape, and does something meanwhile."""
    plain = row.dim() == 1 and row.dtype in _SENT
    flat = row if plain or not row.dim() else row.contiguous().view(torch.uint8).flatten()
    if cut.size == 1 or not flat.numel():
        meanwhile()
        return row.expand(cut.size, *row.shape)
    told = flat.new_empty(cut.size * flat.numel())
    sending = _ALL_GATHER(told, flat, group=cut.group, async_op=True)
    meanwhile()
    sending.wait()
    if plain:
        return told.view(cut.size, -1)
    return told.view(row.dtype).view(cut.size, *row.shape)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, axis: int) -> Tensor:
        ctx.cut, ctx.axis, own = cut, axis, x.movedim(axis, 0)
        rows = own.new_zeros(max(cut.lengths or ()), *own.shape[1:])
        rows[: len(own)] = own
        told = all_gather(cut, rows)
        runs = [told[p.rank, p.at : p.at + p.end - p.begin] for p in pieces(cut.lengths or (), cut.layout)]
        return torch.cat(runs).movedim(0, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cut, given = ctx.cut, gradients[0].movedim(ctx.axis, 0)
        rows = given.new_zeros(cut.size, max(cut.lengths), *given.shape[1:])
        for p in pieces(cut.lengths, cut.layout):
            rows[p.rank, p.at : p.at + p.end - p.begin] = given[p.begin : p.end]
        told = torch.empty_like(rows)
        dist.all_to_all_single(told, rows, group=cut.group)
        own = told.sum(0, dtype=torch.promote_types(given.dtype, torch.float32))[: cut.lengths[cut.rank]]
        return own.to(given.dtype).movedim(0, ctx.axis), None, None


def whole(cut: Cut, x: Tensor, axis: int = 1) -> Tensor:
    """Return the tokens of all ranks, in the order of time; the cut must have lengths.

    In backward, a rank gets the gradients of its tokens from all ranks, and sums them in at least float32.
    """
    found: Tensor = _Whole.apply(x, cut, axis)
    return found


def summed(cut: Cut, x: Tensor) -> Tensor:
    """Return the sum over ranks, without a gradient: a final state, of which one rank has each row."""
    found = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=cut.group)
    return found
