"""Layers of an accelerated model whose heads are cut over the ranks of a mesh: the plan for ``parallelize_module``.

Each rank holds the rows of its heads, and of the groups that these read. A group that several ranks read is on each of
them, and the gradient of its rows is summed. In Mamba-1 each channel is a head, and ranks sum what is made of all of
them. Attention and gated MLPs are cut by PyTorch's own styles where their sizes divide and they hold nothing but
projections. Everything else is computed by every rank.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.utils.parametrize import register_parametrization

from refold.errors import ArgumentError
from refold.integrations import parts as norms
from refold.integrations.mixers import norm_options
from refold.models.torch.heads import GROUPS, HEADS, Kept, Run, SharedRows, norm_over, of_groups, of_heads, sum_over
from refold.models.torch.layers import wide
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


class _Norm(nn.Module):
    """An RMS norm of channels that are cut, gated or not."""

    def __init__(self, weight: nn.Parameter, first: int, total: int, options: dict[str, Any], cut: Cut) -> None:
        super().__init__()
        self.weight, self.eps, self.before = weight, options["eps"], options["norm_before_gate"]
        self.cut, self.first, self.size, self.total = cut, first, options["group_size"] or total, total

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the norm of the channels of this rank, like ``x``."""
        gate = 1.0 if z is None else F.silu(z.to(wide(x.dtype)))
        y = x if self.before else x * gate
        y = norm_over(self.cut, self.first, self.size, self.total, y, self.weight, self.eps)
        return (y * gate if self.before else y).to(x.dtype)


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


def _cut(self: Any, cut: Cut) -> None:
    """Keep the parameters of this rank's heads, less those of the last projection."""
    who, sizes = type(self).__name__, _sizes(self)
    if sizes is None:
        raise ArgumentError(f"{who}: its heads cannot be cut. Take its name out of the plan.")
    heads, groups, parts = sizes
    kept = Kept(who, heads, groups, cut)
    for path, runs in parts.items():
        owner = self.get_submodule(path.rpartition(".")[0])
        name = path.rpartition(".")[2]
        if (whole := getattr(owner, name, None)) is None:
            continue
        rows, shared = kept.place(runs)
        axis = 1 if path == "x_proj.weight" else list(whole.shape).index(sum(map(kept.size, runs)))
        part = whole.detach().index_select(axis, rows.to(whole.device))
        if not isinstance(whole, nn.Parameter):
            setattr(owner, name, part)
            continue
        setattr(owner, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        if shared is not None:
            register_parametrization(owner, name, shared)
        if isinstance(owner, nn.Linear):
            setattr(owner, "in_features" if axis else "out_features", len(rows))
        elif isinstance(owner, nn.Conv1d):
            owner.in_channels = owner.out_channels = owner.groups = len(rows)
    _cut_norm(self, cut, kept)
    for layer in (self, getattr(self, "forget_gate", None)):
        for name, (one, kind) in _WIDTHS.items():
            if hasattr(layer, name) and (width := 1 if one is None else getattr(self, one, None)) is not None:
                setattr(layer, name, width * (kept.own if kind == HEADS else len(kept.held)))
    if hasattr(self, "conv_dim"):
        self.conv_dim = self.conv1d.out_channels
    if hasattr(self, "x_proj"):  # step sizes, B and C are of all channels
        self.intermediate_size = kept.own
        self.x_proj.register_forward_hook(lambda _, args, y: sum_over(cut, y, now=True, back=True))
    self.register_forward_pre_hook(lambda _, args, kwargs: _entering(cut, args, kwargs), with_kwargs=True)


_WIDTHS = {
    "num_heads": (None, HEADS), "n_groups": (None, GROUPS), "intermediate_size": ("head_dim", HEADS),
    "num_v_heads": (None, HEADS), "num_k_heads": (None, GROUPS), "value_dim": ("head_v_dim", HEADS),
    "key_dim": ("head_k_dim", GROUPS), "qkv_dim": ("head_dim", HEADS), "n_mamba_heads": (None, HEADS),
    "num_attention_heads": (None, HEADS),
}  # fmt: skip
"""A size that a layer keeps -> the size of one head or group (None: 1), and which it counts."""


def _sizes(self: Any) -> tuple[int, int, dict[str, tuple[Run, ...]]] | None:
    """Return heads, groups, and the runs of rows of each parameter; or None."""
    linears = [m for m in self.modules() if isinstance(m, nn.Linear)]
    if any(type(m) is not nn.Linear for m in linears):
        return None
    rows: dict[str, tuple[Run, ...]]
    one: tuple[Run, ...] = (of_heads(1),)
    groups, each = 1, dict.fromkeys(("A_log", "D", "dt_bias"), one)
    if hasattr(self, "slope_rate"):  # lightning attention
        heads, width = self.num_attention_heads, self.head_dim
        rows = {"output_gate": (of_heads(width),), "qkv_proj": (of_heads(3 * width),)}
        each = dict.fromkeys(("slope_rate", "query_decay", "key_decay", "diagonal_decay"), one)
    elif not hasattr(self, "conv1d"):
        return None
    elif hasattr(self, "forget_gate"):  # a decay for each key
        heads, p = self.num_heads, (of_heads(self.head_dim),)
        rows = dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj"), p) | {"conv1d": 3 * p, "b_proj": one}
        rows |= dict.fromkeys(("forget_gate.f_proj", "forget_gate.f_b_proj"), p)
        each = {"forget_gate.A_log": one, "forget_gate.dt_bias": p}
    elif hasattr(self, "num_v_heads"):
        k, v = of_groups(self.head_k_dim), of_heads(self.head_v_dim)
        rows = dict.fromkeys(("in_proj_qkv", "conv1d"), (k, k, v)) | dict.fromkeys(("q_proj", "k_proj"), (k,))
        rows |= dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (v,)) | {"in_proj_qkvz": (k + k + v + v,)}
        rows |= dict.fromkeys(("in_proj_b", "in_proj_a", "b_proj", "a_proj"), one) | {"in_proj_ba": (2 * of_heads(1),)}
        heads, groups = self.num_v_heads, self.num_k_heads
    elif hasattr(self, "x_proj"):  # each channel is a head
        heads, rows = self.intermediate_size, {"in_proj": 2 * one, "conv1d": one, "x_proj": one, "dt_proj": one}
    elif hasattr(self, "x_proj_weight"):
        heads, width = self.n_mamba_heads, self.intermediate_size // self.n_mamba_heads
        rows = {"in_proj": (of_heads(2 * width),), "conv1d": (of_heads(width),)}
        each |= dict.fromkeys(("x_proj_weight", "dt_proj_weight", "dt_proj_bias"), one)
    elif hasattr(self, "n_groups"):
        n, v = of_groups(self.ssm_state_size), of_heads(self.head_dim)
        rows = {"in_proj": (v, v, n, n, of_heads(1)), "conv1d": (v, n, n)}
        each["mup_vector"] = rows["in_proj"]
        heads, groups = self.num_heads, self.n_groups
    else:
        return None
    inside = {name for name, _ in self.named_modules()}
    both = {f"{name}.{part}": runs for name, runs in rows.items() if name in inside for part in ("weight", "bias")}
    return heads, groups, each | both


_EVERYWHERE = ("dt_layernorm", "b_layernorm", "c_layernorm", "g_a_proj", "forget_gate.f_a_proj")
"""Modules inside of a layer that each rank has whole."""


def _cut_norm(self: Any, cut: Cut, kept: Kept) -> None:
    """Cut the norm after the scan, if it is of the channels of all heads; sum gradients of what each rank has whole."""
    name = "o_norm" if hasattr(self, "o_norm") else "norm"
    norm = getattr(self, name, None)
    alone = hasattr(self, "head_v_dim") or hasattr(self, "forget_gate")  # each head by itself, with one weight
    inside = dict(self.named_modules())
    for path in (*_EVERYWHERE, *([name] if alone else [])):
        if (weight := getattr(inside.get(path), "weight", None)) is not None:
            register_parametrization(inside[path], "weight", SharedRows.whole(cut, len(weight)))
    if norm is None or alone or not getattr(self, "mamba_rms_norm", True):
        return
    options = norm_options(norm)
    if (plain := norms.norm_options(norms.original(norm))) is not None and not plain[1]:
        options = {"eps": getattr(norm, plain[0]), "group_size": None, "norm_before_gate": False}
    if options is None:
        raise ArgumentError(f"{type(self).__name__}: {type(norm).__name__} cannot be cut. Omit this layer.")
    total, width = len(norm.weight), len(norm.weight) // kept.heads
    own_weight = norm.weight.detach()[kept.first * width : (kept.first + kept.own) * width].clone()
    weight = nn.Parameter(own_weight, requires_grad=norm.weight.requires_grad)
    self.norm = _Norm(weight, kept.first * width, total, options, cut).to(weight.device)


def _entering(cut: Cut, args: Any, kwargs: Any) -> Any:
    """Let the gradient of what enters a layer be the sum over ranks."""
    if args:
        return (sum_over(cut, args[0], back=True), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": sum_over(cut, kwargs["hidden_states"], back=True)}
