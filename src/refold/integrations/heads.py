"""Layers of an accelerated model whose heads are cut over the ranks of a mesh: the plan for ``parallelize_module``.

Each rank holds the rows of its heads, and of the groups that these read. A group that several ranks read is on each of
them, and the gradient of its rows is summed. Attention and gated MLPs are cut by PyTorch's own styles where their sizes
divide and they hold nothing but projections. Everything else is computed by every rank.
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
        RowwiseParallel()._apply(module.out_proj, mesh)
        return module  # type: ignore[no-any-return]


def _cut(self: Any, cut: Cut) -> None:
    """Keep the parameters of this rank's heads, less ``out_proj``."""
    who, sizes = type(self).__name__, _sizes(self)
    if sizes is None:
        raise ArgumentError(f"{who}: its heads cannot be cut; only those of Mamba-2 and Qwen3.5 layers. Omit it.")
    heads, groups, parts = sizes
    if heads % cut.size:
        raise ArgumentError(f"{who}: {heads} heads do not divide over {cut.size} ranks. Use a divisor, or omit it.")
    own = heads // cut.size
    first = own * cut.rank
    read = (torch.arange(first, first + own) // (heads // groups)).tolist()
    held = sorted(set(read))
    if read != [group for group in held for _ in range(own // len(held))]:
        held = read  # heads of a group must be equally many: so each head has a copy of its own
    shared = bool(groups % cut.size)

    def place(kinds: list[tuple[str, int]]) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the rows that are kept; which of them are of groups; where these are among all those; how many."""
        rows, ours, at, begin, total, kept = [], [torch.arange(0)], [torch.arange(0)], 0, 0, 0
        for kind, width in kinds:
            units = range(first, first + own) if kind == "heads" else held
            found = (torch.tensor(units)[:, None] * width + torch.arange(width)).flatten()
            rows.append(begin + found)
            if kind == "groups":
                ours.append(kept + torch.arange(len(found)))
                at.append(total + found)
                total += groups * width
            begin, kept = begin + (heads if kind == "heads" else groups) * width, kept + len(found)
        return torch.cat(rows), torch.cat(ours), torch.cat(at), total

    for path, kinds in parts.items():
        owner = self.get_submodule(path.rpartition(".")[0])
        name = path.rpartition(".")[2]
        if (whole := getattr(owner, name, None)) is None:
            continue
        rows, ours, at, total = place(kinds)
        kept = whole.detach().index_select(whole.dim() - 1 if name == "mup_vector" else 0, rows.to(whole.device))
        if not isinstance(whole, nn.Parameter):
            setattr(owner, name, kept)
            continue
        setattr(owner, name, nn.Parameter(kept, requires_grad=whole.requires_grad))
        if shared and len(ours):
            register_parametrization(owner, name, _Shared(cut, at, ours, total))
        if isinstance(owner, nn.Linear):
            owner.out_features = len(rows)
        elif isinstance(owner, nn.Conv1d):
            owner.in_channels = owner.out_channels = owner.groups = len(rows)
    _cut_norm(self, cut, first, heads, own)
    for name, (one, kind) in _WIDTHS.items():
        if hasattr(self, name) and (width := 1 if one is None else getattr(self, one, None)) is not None:
            setattr(self, name, width * (own if kind == "heads" else len(held)))
    self.conv_dim = self.conv1d.out_channels
    self.register_forward_pre_hook(lambda _, args, kwargs: _entering(cut, args, kwargs), with_kwargs=True)


_WIDTHS = {
    "num_heads": (None, "heads"), "n_groups": (None, "groups"), "intermediate_size": ("head_dim", "heads"),
    "num_v_heads": (None, "heads"), "num_k_heads": (None, "groups"), "value_dim": ("head_v_dim", "heads"),
    "key_dim": ("head_k_dim", "groups"),
}  # fmt: skip
"""A size that a layer keeps -> the size of one head or group (None: 1), and which it counts."""


def _sizes(self: Any) -> tuple[int, int, dict[str, list[tuple[str, int]]]] | None:
    """Return heads, groups, and of each parameter the runs of rows, as widths of heads or of groups; or None."""
    linears = [m for m in self.children() if isinstance(m, nn.Linear)]
    if not hasattr(self, "conv1d") or any(type(m) is not nn.Linear for m in linears):
        return None
    each = {name: [("heads", 1)] for name in ("A_log", "D", "dt_bias")}
    if hasattr(self, "in_proj_qkv"):
        k, v = self.head_k_dim, self.head_v_dim
        qkv = [("groups", k), ("groups", k), ("heads", v)]
        rows = {"in_proj_qkv": qkv, "conv1d": qkv, "in_proj_z": [("heads", v)]}
        rows |= {name: [("heads", 1)] for name in ("in_proj_b", "in_proj_a")}
        heads, groups = self.num_v_heads, self.num_k_heads
    elif hasattr(self, "n_groups") and hasattr(self, "in_proj"):
        n, p = self.ssm_state_size, self.head_dim
        xBC = [("heads", p), ("groups", n), ("groups", n)]
        rows = {"in_proj": [("heads", p), *xBC, ("heads", 1)], "conv1d": xBC}
        each["mup_vector"] = rows["in_proj"]
        heads, groups = self.num_heads, self.n_groups
    else:
        return None
    both = {f"{name}.{part}": kinds for name, kinds in rows.items() for part in ("weight", "bias")}
    return heads, groups, each | both


def _cut_norm(self: Any, cut: Cut, first: int, heads: int, own: int) -> None:
    """Cut the norm after the scan: of the channels of all heads, or one for each head."""
    norm = getattr(self, "norm", None)
    if norm is None or not getattr(self, "mamba_rms_norm", True):
        return
    if hasattr(self, "head_v_dim"):  # each head by itself, with one weight
        rows = torch.arange(len(norm.weight))
        register_parametrization(norm, "weight", _Shared(cut, rows, rows, len(rows)))
        return
    if (options := norm_options(norm)) is None:
        raise ArgumentError(f"{type(self).__name__}: {type(norm).__name__} cannot be cut. Omit this layer.")
    total, width = len(norm.weight), len(norm.weight) // heads
    own_weight = norm.weight.detach()[first * width : (first + own) * width].clone()
    weight = nn.Parameter(own_weight, requires_grad=norm.weight.requires_grad)
    self.norm = _Norm(weight, first * width, total, options, cut).to(weight.device)


def _entering(cut: Cut, args: Any, kwargs: Any) -> Any:
    """Let the gradient of what enters a layer be the sum over ranks."""
    if args:
        return (_Sum.apply(args[0], cut, False, True), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _Sum.apply(kwargs["hidden_states"], cut, False, True)}
