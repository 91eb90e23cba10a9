"""What the user's source calls a node: line, expression, variable; less where the source says less."""

import operator

import pytest
import torch
from torch.fx import Graph

from refold.compiler.ir.source import expression, name_of, named, segment, source_line

SOURCE = """
def step(self, h, x, t):
    h = torch.tanh(h) * x[t] + self.b
    a, b = h * 2, h + 3
    h *= a
    self.state = x.exp()
    u = torch.where(
        h > 0, h, x)
    g = "ä" + torch.sigmoid(h) * 2
    return -torch.roll(h, 1) @ b
"""


@pytest.fixture
def node(tmp_path):
    """Return a function: (line number, operation, text where the expression begins or None) -> node."""
    file = tmp_path / "layer.py"
    file.write_text(SOURCE)

    def make(number, target, begins=None):
        graph = Graph()
        made = graph.call_function(target, (graph.placeholder("x"),))
        code = SOURCE.splitlines()[number - 1].strip()
        marks = "" if begins is None else "    " + " " * code.index(begins) + "^^^\n"
        made.meta["stack_trace"] = f'  File "{file}", line {number}, in step\n    {code}\n{marks}'
        return made

    return make


CASES = [
    (3, torch.tanh, "torch.tanh", "torch.tanh(h)", "torch.tanh(h)"),
    (3, operator.mul, "torch.tanh", "torch.tanh(h) * x[t]", "torch.tanh(h) * x[t]"),
    (3, operator.add, "torch.tanh", "torch.tanh(h) * x[t] + self.b", "h"),
    (3, torch.ops.aten.add.Tensor, None, "torch.tanh(h) * x[t] + self.b", "h"),
    (3, operator.getitem, "x[t]", "x[t]", "x[t]"),
    (4, operator.add, "h + 3", "h + 3", "b"),
    (5, operator.imul, None, "h *= a", "h"),
    (6, torch.ops.aten.exp.default, "x.exp", "x.exp()", "self.state"),
    (7, torch.where, "torch.where", "torch.where( h > 0, h, x)", "u"),
    (9, torch.sigmoid, None, "torch.sigmoid(h)", "torch.sigmoid(h)"),
    (10, operator.neg, "-torch", "-torch.roll(h, 1)", "-torch.roll(h, 1)"),
    (10, torch.ops.aten.mm.default, None, "-torch.roll(h, 1) @ b", "-torch.roll(h, 1) @ b"),
]


@pytest.mark.parametrize(("number", "target", "begins", "text", "name"), CASES, ids=[case[3] for case in CASES])
def test_expressions_and_variables(node, number, target, begins, text, name):
    made = node(number, target, begins)
    assert source_line(made).endswith(f"layer.py:{number}: {SOURCE.splitlines()[number - 1].strip()}")
    assert expression(made) == text
    assert name_of(made) == name


def test_without_a_source_the_operation_is_named(node):
    made = node(3, torch.ops.aten.add.Tensor)
    made.meta["stack_trace"] = made.meta["stack_trace"].replace("layer.py", "gone.py")
    assert expression(made) == name_of(made) == "aten.add.Tensor"
    made.meta["stack_trace"] = ""
    assert source_line(made) == ""
    assert expression(made) == "aten.add.Tensor"


def test_inputs():
    graph = Graph()
    assert name_of(graph.placeholder("l_x_")) == "x"
    assert named("L['self']._modules['lin']._parameters['weight']") == "self.lin.weight"
    assert named("L['states'][0]") == "states[0]"


def test_long_expressions_are_cut(tmp_path):
    class Place:
        lineno, end_lineno, col_offset, end_col_offset = 1, 1, 0, 200

    (tmp_path / "long.py").write_text("x" * 200)
    assert segment(str(tmp_path / "long.py"), Place) == "x" * 69 + "..."


def test_modes_are_left_out(node):
    """A mode calls torch's functions in a frame of its own; the user's line is the one before."""
    made = node(3, torch.tanh, "torch.tanh")
    code = "return func(*args, **kwargs)"
    made.meta["stack_trace"] += f'  File "/torch/utils/_device.py", line 122, in __torch_function__\n    {code}\n'
    assert expression(made) == "torch.tanh(h)"
    made.meta["stack_trace"] = '  File "mine.py", line 1, in __torch_function__\n    return x\n'
    assert source_line(made).startswith("mine.py:1")
