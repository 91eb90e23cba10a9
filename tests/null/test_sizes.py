"""No function over 80 lines without its docstring, and no class over 300, unless the reason stands here."""

import ast

from null.source import ROOT, files, tree

LINES = {ast.FunctionDef: 80, ast.ClassDef: 300}
REASONS = {
    "src/refold/judge/excuses.py Excuses": "a kind of condition is a method",
    "src/refold/judge/process.py Process": "what is done with a process, in the order in which a call does it",
    "src/refold/judge/sides.py Sides": "who is asked, and what inputs and weights all of them have at that moment",
    "src/refold/judge/worker.py Stub": "a command is a method",
    "src/refold/ops/selective_scan/_triton_backward.py selective_scan_backward": "one plan: launches in their order",
    "src/refold/ops/ssd/_triton_backward.py __init__": "one plan: launches in their order",
    "src/refold/ops/ssd/_triton_forward.py __init__": "one plan: launches in their order",
    "src/refold/ops/torch/ranks.py _Call": "all of it is about one call, whose facts all methods read",
    "tests/support/checkpoints.py _configs": "a table of configurations",
    "tests/support/random_models.py draw": "one choice after the other, whose order the seed fixes",
}
# What a kernel of a GPU knows is in registers, which a function cannot hand over without a copy of its arguments.
KERNEL = "jit"


def size(node):
    """Count the lines of a function without its docstring, or of a class."""
    text = ast.get_docstring(node, clean=False) if isinstance(node, ast.FunctionDef) else None
    return node.end_lineno - node.lineno + 1 - (0 if text is None else text.count("\n") + 1)


def long(path):
    """Name what is too long in a file."""
    for node in ast.walk(tree(path)):
        limit = LINES.get(type(node))
        if limit and size(node) > limit and not any(KERNEL in ast.unparse(each) for each in node.decorator_list):
            yield f"{path.relative_to(ROOT)} {node.name}"


def test_what_is_long_has_a_reason():
    assert {name for path in files() for name in long(path)} == set(REASONS)
