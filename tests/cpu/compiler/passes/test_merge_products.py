"""Several products of one matrix become one, if the copy of the matrices is smaller than the saving."""

import pytest
import torch

import refold
from refold.compiler.passes.merge_products import merge_products
from support import programs

linear = torch.nn.functional.linear


def merged(graph):
    found = list(merge_products(graph, lambda _: True))
    graph.eliminate_dead_code()
    graph.lint()
    return found


def judged(fn, *shapes):
    inputs = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        outcome = programs.judge(programs.Program(lambda *xs: (fn(*xs),), inputs, ""), merged)
    assert outcome.failure == ""
    return outcome.rewrites


def projections(x, b, c, dt, bias):
    return torch.cat([linear(x, b).sin(), linear(x, c) * 2, linear(x, dt, bias)], -1)


def test_projections_of_the_same_tokens_are_one_product():
    (rewrite,) = judged(projections, (4, 100, 64), (8, 64), (16, 64), (4, 64), (4,))
    assert rewrite == "merge products: (400 x 64) @ (64 x (8 + 16 + 4))"


DIFFERENT = {
    "few rows": (lambda x, b, c: linear(x, b) + linear(x, c), (4, 64), (8, 64), (8, 64)),
    "another input": (lambda x, b, c: linear(x, b) + linear(x * 2, c), (400, 64), (8, 64), (8, 64)),
    "one after the other": (lambda x, b: x @ (x.T @ (x @ b)), (64, 64), (64, 4)),
    "one product": (lambda x, b: linear(x, b), (400, 64), (8, 64)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_others_stay(name):
    assert judged(*DIFFERENT[name]) == []


def test_a_matrix_that_depends_on_another_product_is_left_out():
    def fn(x, b):
        y = x @ b  # (400, 8)
        return y.sum() + (x @ (b * y.sum())).sum() + (x @ (b + 1)).sum()

    (rewrite,) = judged(fn, (400, 64), (64, 8))
    assert rewrite.endswith("(64 x (8 + 8))")


def test_all_of_the_region_is_checked():
    """Each of the products is compared, on the same random input."""
    inputs = [torch.randn(shape) for shape in ((400, 64), (8, 64), (16, 64), (4, 64), (4,))]
    compiled = refold.compile(projections, accept="always", cache=False, choose={"passes": ["merge products"]})
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), projections(*inputs))
    (row,) = compiled.report.rewrites
    assert row.status == "applied"
    assert [error["kind"] for error in row.errors] == ["actual", "normal", "integers", "infinities"]
