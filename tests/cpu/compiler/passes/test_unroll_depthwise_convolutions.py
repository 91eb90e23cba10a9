"""Short depthwise convolutions become shifted multiplications; all others stay."""

import pytest
import torch
import torch.nn.functional as F

from refold.verify.numerics import unit_roundoff

pytestmark = pytest.mark.rows(16)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(("width", "padding", "dilation"), [(4, 3, 1), (2, 0, 1), (3, 4, 2)])
def test_every_option(rewritten, width, padding, dilation, bias, dynamic):
    conv = torch.nn.Conv1d(6, 6, width, padding=padding, dilation=dilation, groups=6, bias=bias).requires_grad_(False)
    outcome = rewritten(conv, torch.randn(2, 6, 11), dynamic=dynamic)
    assert outcome.names == ["unroll depthwise convolution"]
    assert outcome.worst() <= (8 + width**0.5 / 2) * unit_roundoff(torch.float32)


@pytest.mark.parametrize(("width", "padding"), [(4, 3), (4, 5), (3, 1)])
def test_an_infinity_spoils_only_what_it_is_multiplied_with(rewritten, width, padding):
    x, w = torch.randn(2, 6, 11), torch.randn(6, 1, width)
    x[0, 1, 4], w[2, 0, 0], w[3, 0, -1] = torch.inf, torch.inf, -torch.inf
    outcome = rewritten(lambda x, w: F.conv1d(x, w, padding=padding, groups=6), x, w)
    (before,), (after,) = outcome.before, outcome.after
    finite = before.isfinite()
    assert not finite.all()  # the library may multiply its padding, too: only what it has finite is compared
    torch.testing.assert_close(after[finite], before[finite])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(rewritten, dtype):
    x, w = torch.randn(2, 6, 64, dtype=dtype), torch.randn(6, 1, 4, dtype=dtype)
    outcome = rewritten(lambda x, w: F.conv1d(x, w, padding=3, groups=6), x, w)
    exact = F.conv1d(x.double(), w.double(), padding=3, groups=6)
    (y,) = outcome.after
    assert float((y.double() - exact).norm() / exact.norm()) <= unit_roundoff(dtype)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: F.conv1d(x, w.expand(6, 6, 4).contiguous()),
        lambda x, w: F.conv1d(x, w, stride=2, groups=6),
        lambda x, w: F.conv_transpose1d(x, w, groups=6),
        lambda x, w: F.conv1d(x, w.repeat(1, 1, 3), groups=6),
        lambda x, w: F.conv1d(x, w.repeat(2, 1, 1), groups=6),
        lambda x, w: F.conv2d(x[:, :, None], w[:, :, None], groups=6),
    ],
    ids=["dense", "strided", "transposed", "wide", "two_filters_a_channel", "two_dimensional"],
)
def test_others_stay(rewritten, fn):
    assert rewritten(fn, torch.randn(2, 6, 20), torch.randn(6, 1, 4)).names == []
