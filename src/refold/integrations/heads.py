"""Layers of an accelerated model whose heads are cut over the ranks of a mesh: the plan for ``parallelize_module``.

Each rank holds the rows of its heads, and of the groups that these read. A group that several ranks read is on each of
them, and the gradient of its rows is summed. In Mamba-1 each channel is a head, and ranks sum what is made of all of
them. Attention and gated MLPs are cut by PyTorch's own styles where their sizes divide and they hold nothing but
projections. Everything else is computed by every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.utils.parametrize import register_parametrization

from refold.errors import ArgumentError
from refold.integrations.mixers import norm_options
from refold.ops.torch.cuts import Cut

_ATTENTION = ["q_proj", "k_proj", "v_proj"], "o_proj"
_MLP = ["gate_proj", "up_proj"], "down_proj"


def heads_plan(model: nn.Module, replaced: dict[str, str]) -> dict[str, ParallelStyle]:
    """Return a style for each module whose heads or channels can be cut; ``replaced`` names the recurrent layers."""
    plan: dict[str, ParallelStyle] = {name: _Mixer() for name in replaced}
    for name, module in model.named_modules():
        for columns, rows in (_ATTENTION, _MLP):
            held = {path.split(".")[0] for path, _ in module.named_parameters()}
            if held == {*columns, rows} and all(type(module.get_submodule(n)) is nn.Linear for n in held):
                plan[name] = _Projections(columns, rows)
    return plan


class _Sum(torch.autograd.Function):
    """Sum over ranks, forward, backward or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, now: bool, back: bool) -> Tensor:
        ctx.cut, ctx.back = cut, back
        return _summed(x, cut) if now else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.cut) if ctx.back else gradients[0], None, None, None


def _summed(x: Tensor, cut: Cut) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    all_reduce(x, group=cut.group)
    return x


class _Shared(nn.Module):
    """A parameter of which other ranks hold some rows, too: the gradient of these is the sum over ranks."""

    def __init__(self, cut: Cut, rows: Tensor, shared: Tensor, total: int) -> None:
        super().__init__()
        self.cut, self.rows, self.shared, self.total = cut, rows, shared, total

    def forward(self, weight: Tensor) -> Tensor:
        """Return the parameter."""
        found: Tensor = _SumRows.apply(weight, self)
        return found


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, held: _Shared) -> Tensor:
        ctx.held = held
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        held, found = ctx.held, gradients[0].clone()
        rows, shared = held.rows.to(found.device), held.shared.to(found.device)
        whole = found.new_zeros(held.total, *found.shape[1:]).index_add(0, rows, found[shared])
        all_reduce(whole, group=held.cut.group)
        found[shared] = whole[rows]
        return found, None


class _Norm(nn.Module):
    """A gated RMS norm of channels that are cut: the sums of squares are those of all ranks."""

    def __init__(self, weight: nn.Parameter, first: int, total: int, options: dict[str, Any], cut: Cut) -> None:
        super().__init__()
        self.weight, self.options, self.cut = weight, options, cut
        self.size = options["group_size"] or total
        self.register_buffer("groups", (first + torch.arange(len(weight))) // self.size, persistent=False)
        self.count = total // self.size

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the norm of the channels of this rank, like ``x``."""
        wide, groups = torch.promote_types(x.dtype, torch.float32), self.get_buffer("groups")
        gate, y, before = F.silu(z.to(wide)), x.to(wide), self.options["norm_before_gate"]
        y = y if before else y * gate
        own = y.new_zeros(*y.shape[:-1], self.count).index_add(-1, groups, y.square())
        scale = torch.rsqrt(_Sum.apply(own, self.cut, True, True) / self.size + self.options["eps"])
        y = y * scale[..., groups] * self.weight
        return (y * gate if before else y).to(x.dtype)


class _Projections(ParallelStyle):
    """Projections to heads or channels, and back."""

    def __init__(self, columns: list[str], rows: str) -> None:
        super().__init__()
        self.columns, self.rows = columns, rows

    def _apply(self, module: Any, mesh: Any) -> nn.Module:
        width = getattr(module, "head_dim", 1)
        if all(getattr(module, name).out_features % (width * mesh.size()) == 0 for name in self.columns):
            for name in self.columns:
                ColwiseParallel()._apply(getattr(module, name), mesh)
            RowwiseParallel()._apply(getattr(module, self.rows), mesh)
        return module  # type: ignore[no-any-return]


class _Mixer(ParallelStyle):
    """A recurrent layer."""

    def _apply(self, module: Any, mesh: Any) -> nn.Module:
        _cut(module, Cut(mesh))
        RowwiseParallel()._apply(getattr(module, "out_proj", None) or module.o_proj, mesh)
        return module  # type: ignore[no-any-return]


_HEADS, _GROUPS = "heads", "groups"
Run = tuple[tuple[str, int], ...]
"""Rows of a parameter, as widths of each head or each group. Several are all of a group, and then of the next one."""


def _cut(self: Any, cut: Cut) -> None:
    """Keep the parameters of this rank's heads, less those of the last projection."""
    who, sizes = type(self).__name__, _sizes(self)
    if sizes is None:
        raise ArgumentError(f"{who}: its heads cannot be cut. Take its name out of the plan.")
    heads, groups, parts = sizes
    if heads % cut.size:
        raise ArgumentError(f"{who}: {heads} heads do not divide over {cut.size} ranks. Use a divisor, or omit it.")
    kept = _Kept(heads, groups, cut)
    for path, runs in parts.items():
        owner = self.get_submodule(path.rpartition(".")[0])
        name = path.rpartition(".")[2]
        if (whole := getattr(owner, name, None)) is None:
            continue
        rows, ours, at, total = kept.place(runs)
        axis = 1 if path == "x_proj.weight" else list(whole.shape).index(sum(map(kept.size, runs)))
        part = whole.detach().index_select(axis, rows.to(whole.device))
        if not isinstance(whole, nn.Parameter):
            setattr(owner, name, part)
            continue
        setattr(owner, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        if groups % cut.size and len(ours):
            register_parametrization(owner, name, _Shared(cut, at, ours, total))
        if isinstance(owner, nn.Linear):
            setattr(owner, "in_features" if axis else "out_features", len(rows))
        elif isinstance(owner, nn.Conv1d):
            owner.in_channels = owner.out_channels = owner.groups = len(rows)
    _cut_norm(self, cut, kept)
    for layer in (self, getattr(self, "forget_gate", None)):
        for name, (one, kind) in _WIDTHS.items():
            if hasattr(layer, name) and (width := 1 if one is None else getattr(self, one, None)) is not None:
                setattr(layer, name, width * (kept.own if kind == _HEADS else len(kept.held)))
    if hasattr(self, "conv_dim"):
        self.conv_dim = self.conv1d.out_channels
    if hasattr(self, "x_proj"):  # step sizes, B and C are of all channels
        self.intermediate_size = kept.own
        self.x_proj.register_forward_hook(lambda _, args, y: _Sum.apply(y, cut, True, True))
    self.register_forward_pre_hook(lambda _, args, kwargs: _entering(cut, args, kwargs), with_kwargs=True)


class _Kept:
    """The heads of a rank, and the groups that they read."""

    def __init__(self, heads: int, groups: int, cut: Cut) -> None:
        self.heads, self.groups, self.own = heads, groups, heads // cut.size
        self.first = self.own * cut.rank
        read = (torch.arange(self.first, self.first + self.own) // (heads // groups)).tolist()
        self.held = sorted(set(read))
        if read != [group for group in self.held for _ in range(self.own // len(self.held))]:
            self.held = read  # heads of a group must be equally many: so each head has a copy of its own

    def size(self, run: Run) -> int:
        """Count the rows of a run."""
        return sum(width * (self.heads if kind == _HEADS else self.groups) for kind, width in run)

    def place(self, runs: tuple[Run, ...]) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the rows that are kept; which of them are of groups; where these are among all those; how many."""
        of_group, rows, begin = torch.zeros(sum(map(self.size, runs)), dtype=torch.bool), list[Tensor](), 0
        each, per = self.heads // self.groups, self.own // len(self.held)
        for run in runs:
            block = torch.arange(begin, begin + self.size(run)).view(self.groups, -1)
            widths = [width * (each if kind == _HEADS else 1) for kind, width in run]
            units = [part.reshape(-1, width) for part, (_, width) in zip(block.split(widths, 1), run, strict=True)]
            for (kind, _), unit in zip(run, units, strict=True):
                of_group[unit.flatten()] = kind == _GROUPS
            for slot, group in enumerate(self.held):
                heads = slice(self.first + slot * per, self.first + (slot + 1) * per)
                rows += [
                    unit[heads if kind == _HEADS else group].flatten()
                    for (kind, _), unit in zip(run, units, strict=True)
                ]
            begin += block.numel()
        kept = torch.cat(rows)
        shared = of_group[kept]
        return kept, shared.nonzero()[:, 0], (of_group.cumsum(0) - 1)[kept[shared]], int(of_group.sum())


_WIDTHS = {
    "num_heads": (None, _HEADS), "n_groups": (None, _GROUPS), "intermediate_size": ("head_dim", _HEADS),
    "num_v_heads": (None, _HEADS), "num_k_heads": (None, _GROUPS), "value_dim": ("head_v_dim", _HEADS),
    "key_dim": ("head_k_dim", _GROUPS), "qkv_dim": ("head_dim", _HEADS), "n_mamba_heads": (None, _HEADS),
}  # fmt: skip
"""A size that a layer keeps -> the size of one head or group (None: 1), and which it counts."""


def _sizes(self: Any) -> tuple[int, int, dict[str, tuple[Run, ...]]] | None:
    """Return heads, groups, and the runs of rows of each parameter; or None."""
    linears = [m for m in self.modules() if isinstance(m, nn.Linear)]
    if not hasattr(self, "conv1d") or any(type(m) is not nn.Linear for m in linears):
        return None

    def head(width: int) -> Run:
        return ((_HEADS, width),)

    def group(width: int) -> Run:
        return ((_GROUPS, width),)

    one: tuple[Run, ...] = (head(1),)
    groups, each = 1, dict.fromkeys(("A_log", "D", "dt_bias"), one)
    if hasattr(self, "forget_gate"):  # a decay for each key
        heads, p = self.num_heads, (head(self.head_dim),)
        rows = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj"), p) | {"conv1d": 3 * p, "b_proj": one}
        rows |= dict.fromkeys(("forget_gate.f_proj", "forget_gate.f_b_proj"), p)
        each = {"forget_gate.A_log": one, "forget_gate.dt_bias": p}
    elif hasattr(self, "num_v_heads"):
        k, v = group(self.head_k_dim), head(self.head_v_dim)
        rows = dict.fromkeys(("in_proj_qkv", "conv1d"), (k, k, v)) | dict.fromkeys(("q_proj", "k_proj"), (k,))
        rows |= dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (v,)) | {"in_proj_qkvz": (k + k + v + v,)}
        rows |= dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj"), one) | {"in_proj_ba": (2 * head(1),)}
        heads, groups = self.num_v_heads, self.num_k_heads
    elif hasattr(self, "x_proj"):  # each channel is a head
        heads, rows = self.intermediate_size, {"in_proj": 2 * one, "conv1d": one, "x_proj": one, "dt_proj": one}
    elif hasattr(self, "x_proj_weight"):
        heads, width = self.n_mamba_heads, self.intermediate_size // self.n_mamba_heads
        rows = {"in_proj": (head(2 * width),), "conv1d": (head(width),)}
        each |= dict.fromkeys(("x_proj_weight", "dt_proj_weight", "dt_proj_bias"), one)
    elif hasattr(self, "n_groups"):
        n, v = group(self.ssm_state_size), head(self.head_dim)
        rows = {"in_proj": (v, v, n, n, head(1)), "conv1d": (v, n, n)}
        each["mup_vector"] = rows["in_proj"]
        heads, groups = self.num_heads, self.n_groups
    else:
        return None
    inside = {name for name, _ in self.named_modules()}
    both = {f"{name}.{part}": runs for name, runs in rows.items() if name in inside for part in ("weight", "bias")}
    return heads, groups, each | both


_EVERYWHERE = ("dt_layernorm", "b_layernorm", "c_layernorm", "g_a_proj", "forget_gate.f_a_proj")
"""Modules inside of a layer that each rank has whole."""


def _cut_norm(self: Any, cut: Cut, kept: _Kept) -> None:
    """Cut the norm after the scan, if it is of the channels of all heads; sum gradients of what each rank has whole."""
    name = "o_norm" if hasattr(self, "o_norm") else "norm"
    norm = getattr(self, name, None)
    alone = hasattr(self, "head_v_dim") or hasattr(self, "forget_gate")  # each head by itself, with one weight
    inside = dict(self.named_modules())
    for path in (*_EVERYWHERE, *([name] if alone else [])):
        if (weight := getattr(inside.get(path), "weight", None)) is not None:
            rows = torch.arange(len(weight))
            register_parametrization(inside[path], "weight", _Shared(cut, rows, rows, len(rows)))
    if norm is None or alone or not getattr(self, "mamba_rms_norm", True):
        return
    if (options := norm_options(norm)) is None:
        raise ArgumentError(f"{type(self).__name__}: {type(norm).__name__} cannot be cut. Omit this layer.")
    total, width = len(norm.weight), len(norm.weight) // kept.heads
    own_weight = norm.weight.detach()[kept.first * width : (kept.first + kept.own) * width].clone()
    weight = nn.Parameter(own_weight, requires_grad=norm.weight.requires_grad)
    self.norm = _Norm(weight, kept.first * width, total, options, cut).to(weight.device)


def _entering(cut: Cut, args: Any, kwargs: Any) -> Any:
    """Let the gradient of what enters a layer be the sum over ranks."""
    if args:
        return (_Sum.apply(args[0], cut, False, True), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _Sum.apply(kwargs["hidden_states"], cut, False, True)}
