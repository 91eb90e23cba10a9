"""Numba's machine code, which is named after its text, is for all processes of a run and of later ones."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from refold.cache import default_folder

BUILD = Path(__file__).parents[2] / "build"


def keep_machine_code(*, load: bool = False) -> None:
    """Let kernels keep it below the checkout, although the cache is off; ``load`` imports kernels first."""
    if load and find_spec("numba"):
        import_module("refold.ops.numba.kernel")
    if kernels := sys.modules.get("refold.ops.numba.kernel"):
        kernels.default_folder = lambda: default_folder() or BUILD / "tests"
