"""Layers that are measured: naive code, and for each the same layer by refold's operators and by mamba-ssm's kernels.

All programs of a layer share its weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F

import refold
from refold import ops

from ..compat import PACKAGES
from ..errors import DeviceError, MissingDependency
from ..verify import Function
from . import peers
from .fusion_example import source


def twin(module: Any) -> Any:
    """Copy a module, but for its parameters and buffers, which both have."""
    return copy.deepcopy(module, {id(one): one for one in (*module.parameters(), *module.buffers())})


def mamba1(width: int) -> tuple[torch.nn.Module, dict[str, Function]]:
    """Return a naive Mamba-1 layer, a loop over time, and the same layer by operators."""
    layer: Any = source("examples/naive_mamba.py").Model(width)

    def by_operators(u: torch.Tensor) -> torch.Tensor:
        x, z = layer.in_proj(u).chunk(2, dim=-1)
        x = ops.causal_conv1d(x, layer.conv.weight[:, 0], layer.conv.bias, activation="silu")[0]
        dt, B, C = layer.x_proj(x).split([layer.rank, layer.state, layer.state], dim=-1)
        dt, A = F.linear(dt, layer.dt_proj.weight), -torch.exp(layer.A_log.float())
        more: Any = {"D": layer.D, "z": z, "dt_bias": layer.dt_proj.bias, "dt_softplus": True}
        return layer.out_proj(ops.selective_scan(x, dt, A, B, C, **more)[0])

    def by_mamba_ssm(u: torch.Tensor) -> torch.Tensor:
        from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

        xz = layer.in_proj(u).mT
        weights = (layer.conv.weight, layer.conv.bias, layer.x_proj.weight, layer.dt_proj.weight, layer.out_proj.weight)
        A, D = -torch.exp(layer.A_log.float()), layer.D.float()
        return mamba_inner_fn(
            xz, *weights, None, A, None, None, D, delta_bias=layer.dt_proj.bias.float(), delta_softplus=True
        )

    return layer, {"refold.ops": by_operators, "mamba_ssm": by_mamba_ssm}


def mamba2(width: int) -> tuple[torch.nn.Module, dict[str, Function]]:
    """Return a naive Mamba-2 layer, multiplied and summed in chunks, and the same layer by operators."""
    layer: Any = source("examples/naive_mamba2.py").Model(width, heads=2 * width // 64)
    sizes = [layer.inner, layer.groups * layer.state, layer.groups * layer.state]

    def by_operators(u: torch.Tensor) -> torch.Tensor:
        z, xBC, dt = layer.in_proj(u).split([layer.inner, layer.conv_dim, layer.heads], dim=-1)
        xBC = ops.causal_conv1d(xBC, layer.conv.weight[:, 0], layer.conv.bias, activation="silu")[0]
        x, B, C = xBC.split(sizes, dim=-1)
        x, B, C = (v.unflatten(-1, (n, -1)) for v, n in ((x, layer.heads), (B, layer.groups), (C, layer.groups)))
        more: Any = {"D": layer.D, "dt_bias": layer.dt_bias, "dt_softplus": True}
        y = ops.ssd(x, dt, -torch.exp(layer.A_log.float()), B, C, **more)[0]
        return layer.out_proj(ops.gated_rmsnorm(y.flatten(-2), z, layer.norm, eps=1e-5))

    def by_mamba_ssm(u: torch.Tensor) -> torch.Tensor:
        return _split_scan(layer, layer.in_proj(u), layer.conv, layer.norm, 1e-5, layer.head_dim, layer.groups)

    return layer, {"refold.ops": by_operators, "mamba_ssm": by_mamba_ssm}


def granite_of_transformers(width: int) -> torch.nn.Module:
    """Return transformers' GraniteMoeHybridMambaLayer at granite-4.0-h-tiny's proportions, random weights."""
    from transformers import GraniteMoeHybridConfig

    # transformers takes the kernels of these packages where it finds them; the layer here is its PyTorch code.
    with peers.hidden(*PACKAGES):
        from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

    config = GraniteMoeHybridConfig(
        hidden_size=width,
        mamba_n_heads=2 * width // 64,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_chunk_size=256,
        mamba_expand=2,
    )
    return GraniteMoeHybridMambaLayer(config, 0)


def granite(width: int) -> tuple[torch.nn.Module, dict[str, Function]]:
    """Return transformers' own GraniteMoeHybridMambaLayer at granite-4.0-h-tiny's proportions, and two faster ones."""
    layer: Any = granite_of_transformers(width)
    other: Any = torch.nn.Module()
    other.layer = twin(layer)
    refold.accelerate(other)

    def by_mamba_ssm(u: torch.Tensor) -> torch.Tensor:
        norm = layer.norm
        return _split_scan(layer, layer.in_proj(u), layer.conv1d, norm.weight, norm.variance_epsilon, layer.head_dim, 1)

    return layer, {"refold.ops": other.layer, "mamba_ssm": by_mamba_ssm}


def _split_scan(
    layer: Any, projected: torch.Tensor, conv: Any, norm: torch.Tensor, eps: float, head_dim: int, groups: int
) -> torch.Tensor:
    """Call mamba-ssm's function for a whole Mamba-2 layer in training."""
    if not projected.is_cuda:
        raise DeviceError("mamba-ssm's kernels need a GPU")
    if why := peers.absent("causal_conv1d_cuda"):
        raise MissingDependency(f"mamba-ssm's layer needs the package causal-conv1d: {why}")
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    return mamba_split_conv1d_scan_combined(
        projected, conv.weight[:, 0], conv.bias, layer.dt_bias, -torch.exp(layer.A_log.float()), D=layer.D,
        chunk_size=256, activation="silu", rmsnorm_weight=norm, rmsnorm_eps=eps, outproj_weight=layer.out_proj.weight,
        outproj_bias=None, headdim=head_dim, ngroups=groups, norm_before_gate=False,
    )  # fmt: skip


LAYERS = {"mamba1": (mamba1, 1024), "mamba2": (mamba2, 768), "granite": (granite, 1536)}
