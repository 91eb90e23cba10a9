"""Functions of other packages under their own names and signatures, computed by refold's operators.

An import line is all that changes: ``from refold.compat.mamba_ssm import mamba_chunk_scan_combined``. Nothing is
registered under the other package's name. docs/accelerate.md lists the functions and where they differ on purpose.
"""

PACKAGES = ("mamba_ssm", "causal_conv1d")
"""The packages, as they are imported."""
