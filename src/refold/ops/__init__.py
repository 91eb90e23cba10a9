"""The operators: one call each, on torch, jax and numpy arrays, with gradients and a float64 definition."""

from refold.ops.causal_conv1d import causal_conv1d as causal_conv1d
from refold.ops.causal_conv1d import causal_conv1d_step as causal_conv1d_step
from refold.ops.causal_conv1d import causal_conv1d_step_ as causal_conv1d_step_
from refold.ops.delta_rule import delta_rule as delta_rule
from refold.ops.delta_rule import delta_rule_step as delta_rule_step
from refold.ops.delta_rule import delta_rule_step_ as delta_rule_step_
from refold.ops.delta_rule.family import delta_product as delta_product
from refold.ops.delta_rule.family import gated_delta_rule as gated_delta_rule
from refold.ops.delta_rule.family import gla as gla
from refold.ops.delta_rule.family import kda as kda
from refold.ops.delta_rule.family import rwkv7 as rwkv7
from refold.ops.dispatch import explain as explain
from refold.ops.gated_rmsnorm import gated_rmsnorm as gated_rmsnorm
from refold.ops.linear_scan import linear_scan as linear_scan
from refold.ops.selective_scan import selective_scan as selective_scan
from refold.ops.selective_scan import selective_scan_step as selective_scan_step
from refold.ops.selective_scan import selective_scan_step_ as selective_scan_step_
from refold.ops.ssd import ssd as ssd
from refold.ops.ssd import ssd_step as ssd_step
from refold.ops.ssd import ssd_step_ as ssd_step_

__all__ = [
    "causal_conv1d",
    "causal_conv1d_step",
    "causal_conv1d_step_",
    "delta_product",
    "delta_rule",
    "delta_rule_step",
    "delta_rule_step_",
    "explain",
    "gated_delta_rule",
    "gated_rmsnorm",
    "gla",
    "kda",
    "linear_scan",
    "rwkv7",
    "selective_scan",
    "selective_scan_step",
    "selective_scan_step_",
    "ssd",
    "ssd_step",
    "ssd_step_",
]
