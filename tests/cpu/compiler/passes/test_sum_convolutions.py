"""A convolution that is only summed over space is not computed over space."""

import pytest
import torch

import refold
from refold.compiler.passes.sum_convolutions import sum_convolutions
from support import programs

pytestmark = pytest.mark.rows(16)

conv2d, convt2d = torch.nn.functional.conv2d, torch.nn.functional.conv_transpose2d
conv3d, convt3d = torch.nn.functional.conv3d, torch.nn.functional.conv_transpose3d
conv1d = torch.nn.functional.conv1d


def summed(graph):
    found = list(sum_convolutions(graph, lambda _: True))
    graph.eliminate_dead_code()
    graph.lint()
    return found


X2, X3 = (3, 4, 9, 11), (2, 3, 6, 7, 5)
CASES = {
    "transposed": (lambda x, w, b: convt2d(x, w, b).mean((2, 3), keepdim=True), X2, (4, 6, 3, 2), (6,)),
    "transposed, stride and padding": (
        lambda x, w, b: (convt2d(x, w, b, stride=2, padding=1, output_padding=1) * 0.5).mean((2, 3)),
        X2, (4, 6, 3, 4), (6,)),
    "transposed, cropped": (lambda x, w: convt2d(x, w, padding=(4, 5), dilation=2).sum((2, 3)), X2, (4, 6, 3, 4)),
    "transposed, large stride": (lambda x, w: convt2d(x, w, stride=5).sum((2, 3)), X2, (4, 6, 3, 4)),
    "one axis": (lambda x, w, b: convt3d(x, w, b, stride=(1, 2, 1), padding=1).mean(2), X3, (3, 4, 3, 3, 3), (4,)),
    "two axes": (lambda x, w, b: convt3d(x, w, b).sum((2, 4), keepdim=True), X3, (3, 4, 3, 2, 3), (4,)),
    "plain": (lambda x, w, b: conv2d(x, w, b, padding=1).mean((2, 3)), X2, (6, 4, 3, 3), (6,)),
    "plain, stride": (lambda x, w, b: conv2d(x, w, b, stride=(2, 3), padding=2).sum((2, 3)), X2, (6, 4, 3, 3), (6,)),
    "plain, dilation": (lambda x, w: conv2d(x, w, dilation=(2, 3)).mean((2, 3)) * 2, X2, (6, 4, 3, 3)),
    "plain, one axis": (lambda x, w, b: (conv3d(x, w, b, stride=2, padding=1) / 3).mean(3), X3, (4, 3, 3, 3, 3), (4,)),
    "one dimension": (lambda x, w: conv1d(x, w, padding=2).sum(2), (3, 4, 9), (6, 4, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sums_over_space_are_sums_of_the_input(name):
    fn, *shapes = CASES[name]
    inputs = [torch.randn(shape) for shape in shapes]
    found = []

    def passes(graph):
        found.extend(summed(graph))
        return found

    with torch.no_grad():
        assert programs.judge(programs.Program(lambda *xs: (fn(*xs),), inputs, ""), passes).failure == ""
    (rewrite,) = found
    assert rewrite.name == "sum a convolution's input"


@pytest.mark.parametrize("fn", [
    lambda x, w: torch.relu(conv2d(x, w)).mean((2, 3)),
    lambda x, w: conv2d(x, w).mean((1, 2, 3)),
    lambda x, w: conv2d(x, w).amax((2, 3)),
    lambda x, w: (lambda y: y.mean((2, 3), keepdim=True) * y)(conv2d(x, w)),
], ids=["not linear", "channels too", "a maximum", "used otherwise"])  # fmt: skip
def test_others_stay(fn):
    inputs = [torch.randn(X2), torch.randn(6, 4, 3, 3)]
    with torch.no_grad():
        assert programs.judge(programs.Program(lambda *xs: (fn(*xs),), inputs, ""), summed).rewrites == []


def test_groups_stay():
    def fn(x, w):
        return (conv2d(x, w, groups=4).mean((2, 3)),)

    with torch.no_grad():
        assert (
            programs.judge(programs.Program(fn, [torch.randn(X2), torch.randn(4, 1, 3, 3)], ""), summed).rewrites == []
        )


def test_it_is_checked_and_used():
    layer = torch.nn.Sequential(torch.nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1), torch.nn.AdaptiveAvgPool2d(1))
    x = torch.randn(4, 8, 24, 24)
    compiled = refold.compile(layer, accept="always", cache=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    names = [row.name for row in compiled.report.rewrites if row.status == "applied"]
    assert "sum a convolution's input" in names
