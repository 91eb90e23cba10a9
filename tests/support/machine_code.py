"""Numba's machine code, which is named after its text, is for all processes of a run and of later ones."""

import sys
from pathlib import Path

from refold.cache import default_folder

BUILD = Path(__file__).parents[2] / "build"


def keep_machine_code() -> None:
    """Let kernels that this process has imported keep it below the checkout, although the cache is off."""
    if kernels := sys.modules.get("refold.ops.numba.kernel"):
        kernels.default_folder = lambda: default_folder() or BUILD / "tests"
