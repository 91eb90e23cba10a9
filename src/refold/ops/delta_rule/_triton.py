"""The delta rule on GPUs with Triton: forward, one step, and gradients."""

from refold.ops.delta_rule._triton_forward import delta_rule as delta_rule
from refold.ops.delta_rule._triton_forward import delta_rule_step as delta_rule_step
from refold.ops.delta_rule._triton_forward import delta_rule_step_ as delta_rule_step_
from refold.ops.delta_rule._triton_forward import delta_rule_step_slots as delta_rule_step_slots
from refold.ops.delta_rule._triton_forward import supports as supports
from refold.ops.torch.launch import later

__getattr__ = later(delta_rule_backward=f"{__package__}._triton_backward")
