"""An override for torchtitan: the gated delta rule of its Qwen3.5 models, with gradients, by refold.

``--override.imports refold.engines.torchtitan.gated_delta_rule`` switches it on. This file imports torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.qwen3_5.model import GatedDeltaKernel

from refold.compat import fla
from refold.engines import doors
from refold.errors import BackendUnsupported


class RefoldGatedDeltaKernel(GatedDeltaKernel):  # type: ignore[misc]
    """`refold.compat.fla.chunk_gated_delta_rule` in place of that of flash-linear-attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaKernel.Config):  # type: ignore[misc]
        """As that of torchtitan, whose ``backend`` has no effect."""

    def forward(
        self,
        xq_BLNK: Tensor,
        xk_BLNK: Tensor,
        xv_BLNV: Tensor,
        g_BLN: Tensor,
        beta_BLN: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs, like the values ``(b, t, h, p)``; queries and keys may have fewer heads."""
        return fla.chunk_gated_delta_rule(
            xq_BLNK, xk_BLNK, xv_BLNV, g_BLN, beta_BLN, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
        )[0]


@override(target=GatedDeltaKernel.Config, description="refold's gated delta rule")
def gated_delta_rule(config: Any) -> Any:
    """Return the configuration of refold's kernel.

    Raises:
        BackendUnsupported: torchtitan's kernel has parameters that refold does not know.
    """
    if (why := doors.differs(GatedDeltaKernel.forward, RefoldGatedDeltaKernel.forward)) is not None:
        raise BackendUnsupported(
            f"gated_delta_rule: the kernel of torchtitan {doors.version('torchtitan')} has {why}. "
            "Leave the override out, or use a newer refold."
        )
    doors.log("torchtitan").info("refold: the gated delta rule is refold.compat.fla.chunk_gated_delta_rule")
    return derive(config, RefoldGatedDeltaKernel.Config)
