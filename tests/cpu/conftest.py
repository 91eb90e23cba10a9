"""XLA compiles each small test problem; without optimisation that takes a tenth of the time and rounds alike."""

import os
from importlib.metadata import version
from importlib.util import find_spec

_CHEAP = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_force_host_platform_device_count=8"
)
# XLA ends the process at a flag it does not know, and later releases do not know this one.
if find_spec("jaxlib") and version("jaxlib").startswith("0.10."):
    _CHEAP += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_CHEAP}".strip()
