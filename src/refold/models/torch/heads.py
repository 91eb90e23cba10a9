"""Heads that are cut over the ranks of a group: which rows of parameters a rank keeps, and what the ranks sum.

A rank keeps the rows of its heads, and of the groups that these read. A group that several ranks read is on each of
them, and the gradient of its rows is summed. All ranks have all tokens. What enters a layer is the same on every rank,
and its gradient is summed over ranks; what leaves it is the sum of what the ranks' heads give.

`shard_heads` cuts the parameters of a lean model, `refold.integrations.heads` the layers of a model of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from refold.errors import ArgumentError
from refold.models.configs import Config, DeltaConfig, HybridConfig, MambaConfig, Mixer2Config
from refold.models.torch.layers import Tree, linear, wide
from refold.ops.torch.cuts import Cut, summed

HEADS, GROUPS = "heads", "groups"
Run = tuple[tuple[str, int], ...]
"""Rows of a parameter, as widths of each head or each group. Several are all of a group, and then of the next one."""


def of_heads(width: int) -> Run:
    """Return rows of which each head has some."""
    return ((HEADS, width),)


def of_groups(width: int) -> Run:
    """Return rows of which each group has some."""
    return ((GROUPS, width),)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, now: bool, back: bool) -> Tensor:
        ctx.cut, ctx.back = cut, back
        return summed(cut, x) if now else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return summed(ctx.cut, gradients[0]) if ctx.back else gradients[0], None, None, None


def sum_over(cut: Cut, x: Tensor, *, now: bool = False, back: bool = False) -> Tensor:
    """Return the sum over ranks of ``x``, of its gradient, or of both."""
    found: Tensor = _Sum.apply(x, cut, now, back)
    return found


class SharedRows(nn.Module):
    """A parameter of which other ranks hold some rows, too: the gradient of these is the sum over ranks."""

    def __init__(self, cut: Cut, rows: Tensor, shared: Tensor, total: int) -> None:
        super().__init__()
        self.cut, self.rows, self.shared, self.total = cut, rows, shared, total

    @classmethod
    def whole(cls, cut: Cut, size: int) -> SharedRows:
        """Return that of a parameter that every rank has."""
        rows = torch.arange(size)
        return cls(cut, rows, rows, size)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the parameter."""
        found: Tensor = _SumRows.apply(weight, self)
        return found


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, held: SharedRows) -> Tensor:
        ctx.held = held
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        held, found = ctx.held, gradients[0].clone()
        rows, shared = held.rows.to(found.device), held.shared.to(found.device)
        whole = found.new_zeros(held.total, *found.shape[1:]).index_add(0, rows, found[shared])
        found[shared] = summed(held.cut, whole)[rows]
        return found, None


def norm_over(cut: Cut, first: int, size: int, total: int, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of channels that are cut over ranks: the sums of squares are those of all.

    Args:
        cut: The ranks.
        first: Where the channels of this rank begin.
        size: How many are normalised together.
        total: How many there are on all ranks.
        y: ``(..., channels)``.
        weight: ``(channels,)``.
        eps: Added to the mean squares.
    """
    y, groups = y.to(wide(y.dtype)), (first + torch.arange(len(weight), device=y.device)) // size
    own = y.new_zeros(*y.shape[:-1], total // size).index_add(-1, groups, y.square())
    return y * torch.rsqrt(sum_over(cut, own, now=True, back=True) / size + eps)[..., groups] * weight


class Kept:
    """The heads of a rank, and the groups that they read.

    Raises:
        ArgumentError: The heads do not divide over the ranks.
    """

    def __init__(self, who: str, heads: int, groups: int, cut: Cut) -> None:
        if heads % cut.size:
            raise ArgumentError(f"{who}: {heads} heads do not divide over {cut.size} ranks. Use a divisor, or omit it.")
        self.cut, self.heads, self.groups, self.own = cut, heads, groups, heads // cut.size
        self.first = self.own * cut.rank
        read = (torch.arange(self.first, self.first + self.own) // (heads // groups)).tolist()
        self.held = sorted(set(read))
        if read != [group for group in self.held for _ in range(self.own // len(self.held))]:
            self.held = read  # heads of a group must be equally many: so each head has a copy of its own

    def size(self, run: Run) -> int:
        """Count the rows of a run."""
        return sum(width * (self.heads if kind == HEADS else self.groups) for kind, width in run)

    def place(self, runs: tuple[Run, ...]) -> tuple[Tensor, SharedRows | None]:
        """Return the rows that are kept, and what sums the gradients of those that other ranks keep, too."""
        of_group, rows, begin = torch.zeros(sum(map(self.size, runs)), dtype=torch.bool), list[Tensor](), 0
        each, per = self.heads // self.groups, self.own // len(self.held)
        for run in runs:
            block = torch.arange(begin, begin + self.size(run)).view(self.groups, -1)
            widths = [width * (each if kind == HEADS else 1) for kind, width in run]
            units = [part.reshape(-1, width) for part, (_, width) in zip(block.split(widths, 1), run, strict=True)]
            for (kind, _), unit in zip(run, units, strict=True):
                of_group[unit.flatten()] = kind == GROUPS
            for slot, number in enumerate(self.held):
                heads = slice(self.first + slot * per, self.first + (slot + 1) * per)
                rows += [
                    unit[heads if kind == HEADS else number].flatten()
                    for (kind, _), unit in zip(run, units, strict=True)
                ]
            begin += block.numel()
        kept = torch.cat(rows)
        ours = of_group[kept].nonzero()[:, 0]
        if not (self.groups % self.cut.size and len(ours)):
            return kept, None
        return kept, SharedRows(self.cut, (of_group.cumsum(0) - 1)[kept[ours]], ours, int(of_group.sum()))


@dataclass(frozen=True, eq=False)
class Heads:
    """What a rank's layers of one kind know of the others: `refold.models.configs` keeps it.

    Attributes:
        cut: The ranks.
        shares: What sums gradients of parameters, by their names.
        norm: The norm after the scan, ``(y, weight, eps)``, if it spans ranks.
    """

    cut: Cut
    shares: Mapping[str, SharedRows]
    norm: Callable[..., Tensor] | None = None


def enter(heads: Heads | None, x: Tensor, weights: Tree) -> tuple[Tensor, Tree]:
    """Let the gradients of a layer's inputs and parameters be summed over ranks, where they must be."""
    if heads is None:
        return x, weights
    own = {name: heads.shares[name](a) if name in heads.shares else a for name, a in weights.items()}
    return sum_over(heads.cut, x, back=True), own


def leave(heads: Heads | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the last product of a layer, whose inputs are cut."""
    if heads is None:
        return linear(x, weight, bias)
    y = sum_over(heads.cut, linear(x, weight), now=True)
    return y if bias is None else y + bias


def shard_heads(config: Config, params: Tree, group: Any) -> tuple[Config, Tree]:
    """Return the configuration and the parameters of this rank's heads: every function of the model takes them.

    Attention and MLPs are cut, too, where their heads or channels divide. Each rank passes all tokens, and gets all
    logits; its state is that of its heads. Gradients of what every rank has are the same on every rank.

    Args:
        config: The model.
        params: Its parameters with separate layers, as ``refold.models.torch`` has them.
        group: A process group, a 1-D device mesh, or a `refold.parallel.Cut`.

    Raises:
        ArgumentError: The heads of recurrent layers do not divide over the ranks.
    """
    cut, params = group if isinstance(group, Cut) else Cut(group), {**params}
    if isinstance(config, MambaConfig):
        kept = Kept("shard_heads", config.d_inner, 1, cut)
        params["layers"], own = _taken(params["layers"], kept, _MAMBA)
        return replace(config, d_inner=kept.own, heads=own), params
    mixer, name = config.mixer, "mixer" if isinstance(config, HybridConfig) else "layers"
    kept = Kept("shard_heads", mixer.nheads, mixer.ngroups, cut)
    alone = not mixer.norm_groups % cut.size
    norm = partial(norm_over, cut, kept.first * mixer.headdim, mixer.d_inner // mixer.norm_groups, mixer.d_inner)
    params[name], own = _taken(params[name], kept, _rows(mixer), None if alone else norm)
    norms = max(mixer.norm_groups // cut.size, 1)
    config = replace(
        config, mixer=replace(mixer, nheads=kept.own, ngroups=len(kept.held), norm_groups=norms, heads=own)
    )
    if isinstance(config, HybridConfig) and config.nheads % cut.size == 0:
        kept, e = Kept("shard_heads", config.nheads, config.nkvheads, cut), config.headdim
        rows: dict[str, tuple[Run, ...]] = dict.fromkeys("kv", (of_groups(e),))
        rows |= {"q": (of_heads(e * (1 + config.gated)),), "o": (of_heads(e),)}
        params["attention"], own = _taken(params["attention"], kept, rows)
        config = replace(config, nheads=kept.own, nkvheads=len(kept.held), attention_heads=own)
    if isinstance(config, HybridConfig) and config.shared_dim % cut.size == 0:
        rows = dict.fromkeys(("mlp_gate", "mlp_up", "mlp_out"), _ONE) | {"mlp_in": 2 * _ONE}
        kept = Kept("shard_heads", config.shared_dim, 1, cut)
        params["layers"], own = _taken(params["layers"], kept, rows)
        config = replace(config, shared_dim=kept.own, mlp_channels=own)
    return config, params


_ONE: tuple[Run, ...] = (of_heads(1),)
_COLUMNS = "out_proj", "x_proj", "o", "mlp_out"
"""Parameters whose columns are cut, so that their products are sums over ranks; their biases are whole."""
_WHOLE = "q_norm", "k_norm", "gated_norm"
"""Parameters of each head that are the same for all."""
_MAMBA = {"in_proj": 2 * _ONE, "in_bias": 2 * _ONE} | dict.fromkeys(
    ("conv_weight", "conv_bias", "x_proj", "dt_proj", "dt_bias", "A_log", "D", "out_proj"), _ONE
)


def _rows(c: Mixer2Config) -> dict[str, tuple[Run, ...]]:
    v, n, rows = of_heads(c.headdim), of_groups(c.dstate), dict.fromkeys(("A_log", "D", "dt_bias"), _ONE)
    if isinstance(c, DeltaConfig):
        return rows | {"in_proj": (v, n, n, v, *_ONE, *_ONE), "conv_weight": (n, n, v), "out_proj": (v,)}
    rows |= dict.fromkeys(("in_proj", "in_bias"), (v, v, n, n, *_ONE)) | {"gated_norm": (v,), "out_proj": (v,)}
    return rows | dict.fromkeys(("conv_weight", "conv_bias"), (v, n, n))


def _taken(
    layers: Tree, kept: Kept, rows: Mapping[str, tuple[Run, ...]], norm: Callable[..., Tensor] | None = None
) -> tuple[Tree, Heads]:
    """Return the parameters of layers that a rank keeps, and what it knows of the others."""
    rows = {**rows, **{f"{name}_bias": runs for name, runs in rows.items() if name not in _COLUMNS}}
    places = {name: kept.place(runs) for name, runs in rows.items()}
    shares = {name: shared for name, (_, shared) in places.items() if shared is not None}
    for name in _WHOLE:
        if layers and name in layers[0] and name not in rows:
            shares[name] = SharedRows.whole(kept.cut, len(layers[0][name]))

    def take(name: str, a: Tensor) -> Tensor:
        if name not in places:
            return a
        return a.detach().index_select(int(name in _COLUMNS), places[name][0].to(a.device))

    return tuple({n: take(n, a) for n, a in layer.items()} for layer in layers), Heads(kept.cut, shares, norm)
