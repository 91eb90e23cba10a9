"""What others do with a sequence that ranks share: each rank gets all tokens of some heads, and gives them back.

Two all-to-alls a call, of inputs and of results; what has too few heads is gathered whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.torch.cuts import Cut, whole


class _Exchange(torch.autograd.Function):
    """``(1, t, h, ...)`` of each rank to ``(1, n t, h / n, ...)``, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut, back: bool) -> Tensor:
        ctx.cut, ctx.back, n = cut, back, cut.size
        given = (x[0].unflatten(0, (n, -1)) if back else x[0].unflatten(1, (n, -1)).movedim(1, 0)).contiguous()
        dist.all_to_all_single(told := torch.empty_like(given), given, group=cut.group)
        return (told.movedim(0, 1).flatten(1, 2) if back else told.flatten(0, 1))[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Exchange.apply(gradients[0], ctx.cut, not ctx.back), None, None


def all_to_all(operator: Callable[..., Any], given: Mapping[str, Any], cut: Cut) -> Tensor:
    """Call an operator on one sequence whose tokens lie evenly on the ranks; return the rank's tokens of the result."""

    def mine(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        if a.dim() == 1:
            return a.tensor_split(cut.size)[cut.rank]
        return whole(cut, a) if a.shape[2] % cut.size else _Exchange.apply(a, cut, False)

    y: Tensor = _Exchange.apply(operator(**{name: mine(a) for name, a in given.items()})[0], cut, True)
    return y
