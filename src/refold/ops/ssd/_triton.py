"""SSD on GPUs with Triton: forward, one step, and gradients."""

from refold.ops.ssd._triton_backward import ssd_backward as ssd_backward
from refold.ops.ssd._triton_enter import enter as enter
from refold.ops.ssd._triton_enter import enter_backward as enter_backward
from refold.ops.ssd._triton_enter import leave as leave
from refold.ops.ssd._triton_forward import ssd as ssd
from refold.ops.ssd._triton_forward import ssd_step as ssd_step
from refold.ops.ssd._triton_forward import ssd_step_ as ssd_step_
from refold.ops.ssd._triton_forward import ssd_step_slots as ssd_step_slots
from refold.ops.ssd._triton_forward import supports as supports
