"""Eight devices on one CPU, for the tests of sharding, and an interpreter of Triton's kernels that is quick."""

import os

from refold.ops.testing.frameworks import interpret_quickly

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
interpret_quickly()
