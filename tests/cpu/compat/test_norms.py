"""The norms of `refold.compat.mamba_ssm` against float64 definitions, with every argument."""

import itertools

import numpy as np
import pytest
import torch

from refold.compat.mamba_ssm import RMSNorm, RMSNormGated, layer_norm_fn, rms_norm_fn, rmsnorm_fn
from refold.errors import ArgumentError, ShapeError

rows, d = (3, 5), 7
EPS = 1e-2


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def near(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found.numpy() - expected).max() <= 256 * 2**-52 * np.abs(expected).max()


def definition(stream, weight, bias, rms):
    centred = stream if rms else stream - stream.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS) * weight.numpy()
    return y if bias is None else y + bias.numpy()


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_every_mix_of_arguments(rms, dropout):
    names = ("bias", "residual", "rowscale", "x1", "weight1", "bias1", "prenorm", "masks")
    mixes = [set(itertools.compress(names, bits)) for bits in itertools.product((0, 1), repeat=len(names))]
    for mix in mixes:
        if {"rowscale", "x1"} <= mix or ("bias1" in mix and "weight1" not in mix) or (dropout and "masks" not in mix):
            continue
        x, weight = rand(*rows, d), rand(d)
        shapes = {"bias": (d,), "residual": (*rows, d), "rowscale": rows, "x1": (*rows, d), "weight1": (d,)}
        given = {name: rand(*shape) for name, shape in (shapes | {"bias1": (d,)}).items() if name in mix}
        bias = given.pop("bias", None)
        found = (rms_norm_fn if rms else layer_norm_fn)(
            x, weight, bias, **given, eps=EPS, dropout_p=dropout, prenorm="prenorm" in mix,
            return_dropout_mask="masks" in mix,
        )  # fmt: skip
        found = list(found) if isinstance(found, tuple) else [found]
        kept = [None, None]
        if "masks" in mix:
            kept = [found.pop(-2), found.pop()]
            assert [k is None for k in kept] == [not dropout, not dropout or "x1" not in mix]
        kept = [1.0 if k is None else k.numpy() / (1 - dropout) for k in kept]
        stream = x.numpy() * (given["rowscale"].numpy()[..., None] if "rowscale" in mix else 1.0) * kept[0]
        stream = stream + (given["x1"].numpy() * kept[1] if "x1" in mix else 0.0)
        stream = stream + (given["residual"].numpy() if "residual" in mix else 0.0)
        expected = [definition(stream, weight, bias, rms)]
        if "weight1" in mix:
            expected.append(definition(stream, given["weight1"], given.get("bias1"), rms))
        expected += [stream] if "prenorm" in mix else []
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            near(a, b)


@pytest.mark.parametrize("rms", [False, True])
def test_gradients(rms):
    def run(x, weight, bias, residual, x1, weight1, bias1):
        return layer_norm_fn(x, weight, bias, residual, x1, weight1, bias1, prenorm=True, is_rms_norm=rms)

    given = [rand(2, d), rand(d), rand(d), rand(2, d), rand(2, d), rand(d), rand(d)]
    assert torch.autograd.gradcheck(run, [v.requires_grad_() for v in given], fast_mode=True)


def test_dropout():
    x, weight = torch.ones(64, 64), torch.ones(64)
    torch.manual_seed(0)
    _, stream, kept, none = layer_norm_fn(x, weight, None, dropout_p=0.25, prenorm=True, return_dropout_mask=True)
    assert none is None
    assert 0.7 < kept.double().mean() < 0.8
    assert torch.equal(stream, kept / 0.75)
    x.requires_grad_()
    layer_norm_fn(x, weight, None, dropout_p=0.25, prenorm=True)[1].sum().backward()
    assert set(x.grad.unique().tolist()) == {0.0, x.new_tensor(1 / 0.75).item()}


def test_dtypes():
    """Inside it is float32: the norm sees the stream before it is rounded."""
    x, residual = torch.randn(4, d).bfloat16(), torch.randn(4, d)
    weight = torch.ones(d)
    for fn in (layer_norm_fn, rms_norm_fn):
        out, stream = fn(x, weight, None, residual, prenorm=True)
        assert (out.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(stream, x.float() + residual)
        out, stream = fn(x, weight, None, residual.bfloat16(), prenorm=True, residual_in_fp32=True)
        assert (out.dtype, stream.dtype) == (torch.bfloat16, torch.bfloat16)
        wide = fn(x.float() + residual.bfloat16().float(), weight, None)
        assert torch.equal(out, wide.bfloat16())
        for asked, kept in ((False, torch.bfloat16), (True, torch.float32)):
            assert fn(x, weight, None, prenorm=True, residual_in_fp32=asked)[1].dtype == kept


def test_modules():
    x, residual, z = rand(2, 3, 8), rand(2, 3, 8), rand(2, 3, 8)
    norm = RMSNorm(8, eps=EPS, dropout_p=0.5, dtype=torch.float64)
    assert list(norm.state_dict()) == ["weight"]
    assert norm.bias is None
    with torch.no_grad():
        norm.weight.copy_(rand(8))
    out, stream = norm.eval()(x, residual, prenorm=True)
    near(out.detach(), definition((x + residual).numpy(), norm.weight.detach(), None, True))
    assert torch.equal(stream, x + residual)
    assert (norm.train()(x, prenorm=True)[1] == 0).any(), "dropout in training"
    gated = RMSNormGated(8, eps=EPS, group_size=4, norm_before_gate=False, dtype=torch.float64)
    assert list(gated.state_dict()) == ["weight"]
    assert torch.equal(gated(x, z), rmsnorm_fn(x, gated.weight, None, z, EPS, 4, False))
    assert torch.equal(gated(x), rmsnorm_fn(x, gated.weight, None, None, EPS, 4, False))


def test_what_is_refused():
    x, weight = torch.randn(2, 3, d), torch.ones(d)
    for name, value in (
        ("bias", torch.ones(1)), ("residual", x[:1]), ("x1", x[0]), ("weight1", torch.ones(d + 1)),
        ("rowscale", torch.ones(2, 1)),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=f"layer_norm_fn: {name} must have the shape"):
            layer_norm_fn(**{"x": x, "weight": weight, "bias": None, name: value})
    with pytest.raises(ShapeError, match="rms_norm_fn: weight must have the shape"):
        rms_norm_fn(x, torch.ones(d, 1), None)
    for given, says in (
        ({"dropout_p": 1.0}, "dropout_p must be 0 or more and below 1; got 1.0"),
        ({"rowscale": x[..., 0], "x1": x}, "rowscale and x1 exclude each other"),
        ({"bias1": weight}, "bias1 needs weight1"),
    ):
        with pytest.raises(ArgumentError, match=says):
            layer_norm_fn(x, weight, None, **given)
