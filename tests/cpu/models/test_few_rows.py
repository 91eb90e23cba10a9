"""Products and steps of a few rows on the CPU."""

import os

import pytest

pytest.importorskip("numba")
import torch

from refold import ops
from refold.models.torch import steps
from refold.models.torch.layers import few_rows
from refold.ops.numba import blocks


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 17), (1030, 515)], ids=str)
def test_products(rows, sizes, two_threads):
    x, weight, bias = torch.randn(rows, 2 * sizes[1])[:, ::2], torch.randn(sizes), torch.randn(sizes[0])
    assert few_rows().takes(x, weight)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    assert ((few_rows().product(x, weight) - exact).abs() <= sizes[1] * 2**-24 * scale).all()
    found = steps.project(x, weight, bias)
    assert ((found - exact - bias).abs() <= (sizes[1] + 2) * 2**-24 * (scale + bias.abs())).all()


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (3, 6, 5, 2, 9), (8, 24, 64, 1, 128)], ids=str)
def test_states(sizes, two_threads):
    b, h, p, g, n = sizes
    x, B, C, z = (torch.randn(b, *rest, 2)[..., 0] for rest in ((h, p), (g, n), (g, n), (h, p)))
    dt, A_log, D, bias, state = (
        torch.randn(b, h),
        torch.randn(h),
        torch.randn(h),
        torch.randn(h),
        torch.randn(b, h, p, n),
    )
    assert few_rows().takes_state(x, state)
    active = torch.arange(b) != 1
    exact = state.double()
    sizes = steps.step_sizes(dt.double(), bias.double(), active, (0.1, 2.0))
    wide = [a.double() for a in (B, C, exact)]
    expected, _ = ops.ssd_step_(x.double(), sizes, -A_log.double().exp(), *wide, D=D.double(), z=z.double())
    before = state.clone()
    found = steps.ssd_(x, B, C, dt, z, A_log, D, bias, (0.1, 2.0), state, active)
    for a, e in ((found, expected), (state, wide[2])):
        assert (a - e).abs().max() <= (n + 8) * 2**-24 * e.abs().max()
    assert torch.equal(state[~active], before[~active])


def test_threads_of_a_fork_are_its_own(two_threads, monkeypatch):
    """A child of `os.fork` has none of the threads that its parent waits for."""
    x, weight = torch.randn(1, 1024), torch.randn(2048, 1024)
    assert weight.nbytes >= 2 * few_rows().BYTES_A_THREAD
    expected, pool = few_rows().product(x, weight), blocks._pool(os.getpid())
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert torch.equal(few_rows().product(x, weight), expected)
    assert blocks._pool(-1) is not pool


def test_what_is_not_finite_stays_in_its_row_and_channel():
    x, weight = torch.ones(5, 40), torch.ones(6, 40)
    x[1, 3], weight[4, 39] = torch.inf, torch.nan
    found = few_rows().product(x, weight)
    assert found[1, :4].isposinf().all()
    assert found[:, 4].isnan().all()
    assert (found[[0, 2, 3, 4]][:, [0, 1, 2, 3, 5]] == 40).all()


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(9, 4), torch.ones(3, 4)),
        (torch.ones(1, 4), torch.ones(4, 3).T),
        (torch.ones(1, 4).double(), torch.ones(3, 4).double()),
        (torch.ones(1, 4), torch.ones(3, 4).bfloat16()),
        (torch.ones(0, 4), torch.ones(3, 4)),
        (torch.ones(1, 4), torch.ones(3, 4).as_subclass(type("Mine", (torch.Tensor,), {}))),
    ],
    ids=["rows", "strides", "float64", "bfloat16", "none", "subclass"],
)
def test_other_products_are_those_of_torch(x, weight):
    assert not few_rows().takes(x, weight)
    assert torch.equal(steps.project(x, weight), (x.to(weight.dtype) @ weight.T).to(steps.wide(weight.dtype)))
