"""Names of other packages that are not their public interface, as far as refold uses them."""

import ast
from pathlib import Path

import refold

ROOT = Path(refold.__file__).parent
PACKAGES = {"torch", "triton", "numba", "llvmlite", "jax", "transformers"}
# Public by name, but said to change.
UNSTABLE = ("torch.fx.experimental.", "triton.experimental.", "triton.runtime.", "triton.knobs", "triton.compiler.")


def is_private(name):
    """Tell whether a dotted name belongs to another package and is not public."""
    first, *rest = name.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in rest)
    operator = name.startswith("torch.ops.")  # which a saved program may hold: these stay
    return first in PACKAGES and (hidden or name.startswith(UNSTABLE)) and not operator


def imported(path):
    """Return the private names that a file imports, as (module, name)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {(node.module, alias.name) for alias in node.names if is_private(f"{node.module}.{alias.name}")}
        elif isinstance(node, ast.Import):
            found |= {tuple(alias.name.rsplit(".", 1)) for alias in node.names if is_private(alias.name)}
    return found


def used(path):
    """Return all private names that a file uses, dotted: imported, or as attributes of an imported package."""
    found = {".".join(pair) for pair in imported(path)}
    for node in ast.walk(ast.parse(path.read_text())):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and is_private(name := ".".join([node.id, *parts])):
            found.add(name)
    return found
