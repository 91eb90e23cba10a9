"""Names of other packages that are not their public interface, as far as refold uses them."""

import ast
import functools
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


@functools.lru_cache(maxsize=1)
def nodes(source):
    """List the nodes of a program; of the last one they are kept."""
    return list(ast.walk(ast.parse(source)))


def imported(path):
    """Return the private names that a file imports, as (module, name)."""
    found = set()
    for node in nodes(path.read_text()):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {(node.module, alias.name) for alias in node.names if is_private(f"{node.module}.{alias.name}")}
        elif isinstance(node, ast.Import):
            found |= {tuple(alias.name.rsplit(".", 1)) for alias in node.names if is_private(alias.name)}
    return found


def on_objects(path, own):
    """Return the private attributes of objects that a file uses, but for those in ``own`` and of operators."""
    found = set()
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            holder = ast.unparse(node.value)
            operator = holder.startswith(("aten", "prims", "torch.ops."))  # which a saved program may hold: these stay
            if node.attr not in own and not operator and holder not in ("os", "sys"):
                found.add(ast.unparse(node))
    return found


def defined(paths):
    """Return the private names that some files define: functions, classes, variables, attributes of ``self``."""
    found = set()
    for node in (node for path in paths for node in nodes(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "compiled", "framework_of_type") else set()
    return {name for name in found if name.startswith("_")}


def used(path):
    """Return all private names that a file uses, dotted: imported, or as attributes of an imported package."""
    found = {".".join(pair) for pair in imported(path)}
    for node in nodes(path.read_text()):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and is_private(name := ".".join([node.id, *parts])):
            found.add(name)
    return found
