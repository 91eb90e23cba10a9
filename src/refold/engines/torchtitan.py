"""An override for torchtitan: the gated delta rule of its Qwen3.5 models, with gradients, by refold.

``--override.imports refold.engines.torchtitan.gated_delta_rule`` switches it on. `share` lets ranks share
sequences. This file imports torchtitan.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from refold import ops
from refold.engines import doors
from refold.errors import ArgumentError, BackendUnsupported


def _refused(what: str, why: str) -> BackendUnsupported:
    return BackendUnsupported(
        f"gated_delta_rule: {what} of torchtitan {doors.version('torchtitan')} has {why}. "
        "Leave the override out, or use a newer refold."
    )


try:
    from torchtitan.config import derive, override
    from torchtitan.models.qwen3_5.model import GatedDeltaKernel, GatedDeltaNet

    _Config, _convolution = GatedDeltaKernel.Config, GatedDeltaNet._causal_conv
except (ImportError, AttributeError) as error:
    if getattr(error, "name", None) == "torchtitan":  # it is not installed
        raise
    raise _refused("the model", f"other names: {error}") from error


class RefoldGatedDeltaKernel(GatedDeltaKernel):  # type: ignore[misc]
    """`refold.ops.gated_delta_rule` in place of that of flash-linear-attention."""

    group: Any = None
    """The ranks that share each sequence, as `share` sets them; None if each has whole ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Config):  # type: ignore[misc, valid-type]
        """As that of torchtitan, whose ``backend`` has no effect."""

    def forward(
        self, xq_BLNK: Tensor, xk_BLNK: Tensor, xv_BLNV: Tensor, g_BLN: Tensor, beta_BLN: Tensor, *,
        cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the outputs, like the values ``(b, t, h, p)``; queries and keys may have fewer heads."""
        return ops.gated_delta_rule(
            xq_BLNK, xk_BLNK, xv_BLNV, g=g_BLN, beta=beta_BLN, normalize=True, cu_seqlens=cu_seqlens, group=self.group
        )[0]


def _causal_conv(
    group: Any, x_BLD: Tensor, conv: Any, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """Return the convolution of a rank's tokens ``(1, t, d)`` with those before them on other ranks, and its SiLU."""
    return ops.causal_conv1d(
        x_BLD, conv.weight.squeeze(1), conv.bias, activation="silu", cu_seqlens=cu_seqlens, group=group
    )[0]


def share(model: nn.Module, group: Any) -> None:
    """Let ranks share sequences in all gated DeltaNet layers: context parallelism.

    Each rank then passes its own tokens of one row, and offsets of the whole sequence. Other layers are left as they
    are, and gradients of parameters are of the rank's tokens: sum them over ranks.

    Args:
        model: A model with the override.
        group: A process group, a 1-D device mesh or a `refold.parallel.Cut`.

    Raises:
        ArgumentError: The model has no layer with refold's kernel.
        BackendUnsupported: The convolution of these layers has parameters that refold does not know.
    """
    why = doors.differs(_convolution, functools.partial(_causal_conv, group))
    if why is not None:
        raise _refused("the convolution", why)
    ours = RefoldGatedDeltaKernel
    layers: list[Any] = [layer for layer in model.modules() if isinstance(getattr(layer, "kernel", None), ours)]
    if not layers:
        raise ArgumentError(
            "share: the model has no gated DeltaNet layer with refold's kernel. Build it with "
            "--override.imports refold.engines.torchtitan.gated_delta_rule."
        )
    for layer in layers:
        layer.kernel.group = group
        layer._causal_conv = functools.partial(_causal_conv, group)


@override(target=_Config, description="refold's gated delta rule")
def gated_delta_rule(config: Any) -> Any:
    """Return the configuration of refold's kernel.

    Raises:
        BackendUnsupported: torchtitan's kernel has parameters that refold does not know.
    """
    if (why := doors.differs(GatedDeltaKernel.forward, RefoldGatedDeltaKernel.forward)) is not None:
        raise _refused("the kernel", why)
    doors.log("torchtitan").info("refold: the gated delta rule is refold.ops.gated_delta_rule")
    return derive(config, RefoldGatedDeltaKernel.Config)
