"""SSD on GPUs with Triton: forward, one step, and gradients."""

from refold.ops.ssd._triton_forward import ssd as ssd
from refold.ops.ssd._triton_forward import ssd_step as ssd_step
from refold.ops.ssd._triton_forward import ssd_step_ as ssd_step_
from refold.ops.ssd._triton_forward import ssd_step_slots as ssd_step_slots
from refold.ops.ssd._triton_forward import supports as supports
from refold.ops.torch.launch import later

_ENTER = dict.fromkeys(("leave", "enter", "enter_backward"), f"{__package__}._triton_enter")
__getattr__ = later(ssd_backward=f"{__package__}._triton_backward", **_ENTER)
