"""The functions of `refold.compat` against float64 definitions, in every layout and with every argument."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from refold.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from refold.compat.mamba_ssm import (
    mamba_chunk_scan_combined,
    mamba_inner_fn,
    mamba_split_conv1d_scan_combined,
    rmsnorm_fn,
    selective_scan_fn,
    selective_state_update,
)
from refold.errors import ArgumentError, DtypeError, ShapeError
from refold.ops.causal_conv1d import reference as conv_reference
from refold.ops.definition import silu
from refold.ops.gated_rmsnorm import reference as norm_reference
from refold.ops.selective_scan import reference as scan_reference
from refold.ops.ssd import reference as ssd_reference

b, t, h, p, g, n, w = 2, 11, 4, 3, 2, 5, 4
d = h * p
INDEX = torch.tensor([[0] * 4 + [1] * 1 + [2] * 6, [7] * 11], dtype=torch.int32)
OFFSETS = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
SPANS = [[(0, 4), (4, 5), (5, 11)], [(0, 11)]]  # of INDEX, row by row


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(found, expected):
    expected = torch.as_tensor(np.asarray(expected))
    assert found.shape == expected.shape
    assert found.dtype == torch.float64
    assert (found - expected).abs().max() <= 4096 * torch.finfo(torch.float64).eps * expected.abs().max()


def numbers(**arrays):
    return {k: v.detach().numpy() if isinstance(v, torch.Tensor) else v for k, v in arrays.items()}


def by_document(reference, tokens, initial, spans, **rest):
    """Run a NumPy definition document by document; return y and the states after each document, row by row."""
    tokens, rest, ys, states = numbers(**tokens), numbers(**rest), [], []
    for row, pieces in enumerate(spans):
        y, ends = [], []
        for start, end in pieces:
            part = {k: None if v is None else v[row : row + 1, start:end] for k, v in tokens.items()}
            before = None if initial is None or start else initial[row : row + 1].numpy()
            out, state = reference(**part, **rest, initial_state=before)
            y.append(out)
            ends.append(state)
        ys.append(np.concatenate(y, 1))
        states.append(np.concatenate(ends))
    return np.concatenate(ys), states


def ssd_arguments():
    x, dt, z = rand(b, t, h, p), rand(b, t, h), rand(b, t, h, p)
    return x, dt, -rand(h).exp(), rand(b, t, g, n), rand(b, t, g, n), rand(h, p), z, rand(h), rand(b, h, p, n)


WHOLE = [[(0, t)]] * b


@pytest.mark.parametrize("documents", ["none", "index", "offsets", "both"])
@pytest.mark.parametrize("every", [False, True])
def test_mamba_chunk_scan_combined(documents, every):
    x, dt, A, B, C, D, z, bias, initial = ssd_arguments()
    if not every:
        D = z = bias = initial = None
        dt = dt.abs()
    rest = {"dt_softplus": every, "dt_limit": (0.2, 1.5) if every else (0.0, float("inf"))}
    spans, given = WHOLE, {}
    if documents != "none":
        spans, given = SPANS, {"seq_idx": INDEX}
    if documents in ("offsets", "both"):
        x, dt, B, C = x[:1], dt[:1], B[:1], C[:1]
        z, initial = (None, None) if not every else (z[:1], initial[:1])
        spans = SPANS[:1]
        given = {"cu_seqlens": OFFSETS, "return_varlen_states": True}
        given |= {"seq_idx": INDEX[:1]} if documents == "both" else {}
    expected, states = by_document(
        ssd_reference.ssd, {"x": x, "dt": dt, "B": B, "C": C, "z": z}, initial, spans, A=A, D=D, dt_bias=bias, **rest
    )
    arguments = (x, dt, A, B, C, 8, D, z, bias, initial)
    out, final, *varlen = mamba_chunk_scan_combined(*arguments, **given, **rest, return_final_states=True)
    close(out, expected)
    close(final, np.concatenate([s[-1:] for s in states]))
    if varlen:
        close(varlen[0], states[0])
        alone, ends = mamba_chunk_scan_combined(*arguments, **given, **rest)
        assert torch.equal(alone, out)
        assert torch.equal(ends, varlen[0])
        half = mamba_chunk_scan_combined(*arguments, **given, **rest, state_dtype=torch.float16)[1]
        assert half.dtype == torch.float16
    else:
        assert torch.equal(mamba_chunk_scan_combined(*arguments, **given, **rest), out)


def test_mamba_chunk_scan_combined_refuses():
    x, dt, A, B, C, *_ = ssd_arguments()
    with pytest.raises(ArgumentError, match="return_varlen_states=True needs cu_seqlens"):
        mamba_chunk_scan_combined(x, dt, A, B, C, 8, return_varlen_states=True)
    with pytest.raises(ArgumentError, match="chunk_size must be a positive integer; got 0"):
        mamba_chunk_scan_combined(x, dt, A, B, C, 0)
    with pytest.raises(ShapeError, match="with cu_seqlens the batch is 1; got 2"):
        mamba_chunk_scan_combined(x, dt, A, B, C, 8, cu_seqlens=OFFSETS)
    with pytest.raises(ShapeError, match=r"seq_idx must have the shape \(2, 11\)"):
        mamba_chunk_scan_combined(x, dt, A, B, C, 8, seq_idx=INDEX[:1])
    one = (x[:1], dt[:1], A, B[:1], C[:1], 8)
    with pytest.raises(ArgumentError, match="seq_idx and cu_seqlens mark different documents"):
        mamba_chunk_scan_combined(*one, seq_idx=INDEX[:1], cu_seqlens=torch.tensor([0, 3, 5, 11]))
    with pytest.raises(ArgumentError, match="cu_seqlens must end at t=11; got 10"):
        mamba_chunk_scan_combined(*one, seq_idx=INDEX[:1], cu_seqlens=torch.tensor([0, 4, 10]))


@pytest.mark.parametrize("layout", ["constant", "plain", "grouped", "mixed", "unlike"])
@pytest.mark.parametrize("every", [False, True])
def test_selective_scan_fn(layout, every):
    u, delta, z = rand(b, d, t), rand(b, d, t), rand(b, d, t) if every else None
    A, D, bias = -rand(d, n).exp(), *((rand(d), rand(d)) if every else (None, None))
    layouts = {"constant": (d, n), "plain": (b, n, t), "grouped": (b, g, n, t)}
    pair = {"mixed": ("plain", "constant"), "unlike": ("constant", "grouped")}.get(layout, (layout, layout))
    B, C = (rand(*layouts[k]) for k in pair)

    def per_token(value):
        value = value.numpy()
        if value.ndim == 2:
            return np.broadcast_to(value, (b, t, d, n))
        return np.moveaxis(value, -1, 1)

    given = numbers(x=u.mT, dt=delta.mT, A=A, D=D, dt_bias=bias, z=None if z is None else z.mT)
    expected, state = scan_reference.selective_scan(**given, B=per_token(B), C=per_token(C), dt_softplus=every)
    out, last = selective_scan_fn(u, delta, A, B, C, D, z, bias, every, return_last_state=True)
    close(out, expected.swapaxes(1, 2))
    close(last, state)
    assert out.is_contiguous()
    channels_last = selective_scan_fn(u.mT.contiguous().mT, delta, A, B, C, D, z, bias, every)
    assert torch.equal(channels_last, out)
    assert channels_last.stride(1) == 1
    with pytest.raises(DtypeError, match=r"A must be dense, and float32.*; got torch\.complex128"):
        selective_scan_fn(u, delta, A + 1j, B, C)
    with pytest.raises(ShapeError, match="u must have 3 axes"):
        selective_scan_fn(u[0], delta, A, B, C)
    with pytest.raises(ShapeError, match=r"B must be \(d, n\) with d=12"):
        selective_scan_fn(u, delta, A, B=torch.ones(3, n), C=C)


@pytest.mark.parametrize("index", [None, INDEX])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_causal_conv1d_fn(index, activation):
    x, weight, bias, initial = rand(b, d, t), rand(d, w), rand(d), rand(b, d, w - 1)
    name = "silu" if activation else None
    spans = WHOLE if index is None else SPANS
    expected, states = by_document(
        conv_reference.causal_conv1d, {"x": x.mT}, initial, spans, weight=weight, bias=bias, activation=name
    )
    out, final = causal_conv1d_fn(x, weight, bias, index, initial, True, activation=activation)
    close(out, expected.swapaxes(1, 2))
    close(final, np.concatenate([s[-1:] for s in states]))
    kept = torch.full((b, w - 1, d), torch.nan, dtype=torch.float64).mT
    again, same = causal_conv1d_fn(x, weight, bias, index, initial, True, kept, activation)
    assert same is kept
    assert torch.equal(kept, final)
    assert torch.equal(again, out)
    plain = causal_conv1d_fn(x, weight, activation=activation)
    close(plain, conv_reference.causal_conv1d(x.mT.numpy(), weight.numpy(), activation=name)[0].swapaxes(1, 2))


def test_causal_conv1d_fn_padding_and_refusals():
    x, weight = rand(1, d, t), rand(d, w)
    index = torch.tensor([[0] * 5 + [-1] * 2 + [1] * 4])
    out = causal_conv1d_fn(x, weight, rand(d), index)
    assert (out[..., 5:7] == 0).all()
    close(
        out[..., :5],
        causal_conv1d_fn(x[..., :5], weight, out.new_zeros(d)) + (out[..., :1] - x[..., :1] * weight[:, -1:]),
    )
    with pytest.raises(ArgumentError, match="activation must be None, 'silu' or 'swish'; got 'gelu'"):
        causal_conv1d_fn(x, weight, activation="gelu")
    with pytest.raises(ArgumentError, match="final_states_out needs return_final_states=True"):
        causal_conv1d_fn(x, weight, final_states_out=x)
    with pytest.raises(ShapeError, match="x must have 3 axes"):
        causal_conv1d_fn(x[0], weight)


@pytest.mark.parametrize("length", [w - 1, w, 7])
@pytest.mark.parametrize("tokens", [None, 1, 3, 9])
@pytest.mark.parametrize("ring", [False, True])
def test_causal_conv1d_update(length, tokens, ring):
    state, weight, bias = rand(b, d, length), rand(d, w), rand(d)
    x = rand(b, d) if tokens is None else rand(b, d, tokens)
    many = x[..., None] if tokens is None else x
    read = torch.tensor([2, 12], dtype=torch.int32)
    rows = state
    if ring:  # row r's next token goes to place read[r] modulo length; the oldest input lies there
        rows = torch.stack([row.roll(-int(k) % length, 1) for row, k in zip(state, read, strict=True)])
    before = rows[..., length - (w - 1) :]
    expected, _ = conv_reference.causal_conv1d(*(a.numpy() for a in (many.mT, weight, bias, before)), activation="silu")
    after = torch.cat([rows, many], -1)[..., -length:]
    if ring:
        count = many.shape[-1]
        after = torch.stack([row.roll((int(k) + count) % length, 1) for row, k in zip(after, read, strict=True)])
    out = causal_conv1d_update(x, state, weight, bias, "silu", read if ring else None)
    close(out, expected[:, 0] if tokens is None else expected.swapaxes(1, 2))
    assert torch.equal(state, after)


def test_causal_conv1d_update_in_slots():
    state, weight, x = rand(6, d, w), rand(d, w), rand(4, d)
    slots, before = torch.tensor([3, -1, 0, 5], dtype=torch.int32), state.clone()
    rows = state[[3, 0, 5]].clone()
    expected = causal_conv1d_update(x[[0, 2, 3]], rows, weight)
    out = torch.full_like(x, torch.nan)
    assert causal_conv1d_update(x, state, weight, conv_state_indices=slots, out=out) is out
    assert torch.equal(out[[0, 2, 3]], expected)
    assert (out[1] == 0).all()
    assert torch.equal(state[[3, 0, 5]], rows)
    assert torch.equal(state[[1, 2, 4]], before[[1, 2, 4]])
    with pytest.raises(ShapeError, match=r"conv_state must be \(b, d, s\) with s >= 3"):
        causal_conv1d_update(x, state[..., :2], weight)
    with pytest.raises(ShapeError, match=r"conv_state_indices must have the shape \(4,\)"):
        causal_conv1d_update(x, state, weight, conv_state_indices=slots[:3])
    with pytest.raises(DtypeError, match=r"must be dense, and int32 or int64; got torch\.float32"):
        causal_conv1d_update(x, state, weight, conv_state_indices=slots.float())
    with pytest.raises(ShapeError, match=r"cache_seqlens must have the shape \(4,\)"):
        causal_conv1d_update(x, state, weight, cache_seqlens=slots[:3])
    with pytest.raises(ShapeError, match=r"out must have the shape \(4, 12\)"):
        causal_conv1d_update(x, state, weight, conv_state_indices=slots, out=out[:2])


@pytest.mark.parametrize("length", [1, w - 1, 9])
def test_last_inputs_of_documents(length):
    x = rand(int(OFFSETS[-1]), d)
    found = causal_conv1d_varlen_states(x, OFFSETS, length)
    documents = x.split(OFFSETS.diff().tolist())
    assert torch.equal(found, torch.stack([F.pad(one.mT, (length, 0))[..., -length:] for one in documents]))
    with pytest.raises(ArgumentError, match="state_len must be a positive integer; got 0"):
        causal_conv1d_varlen_states(x, OFFSETS, 0)
    with pytest.raises(ShapeError, match="x must have 2 axes"):
        causal_conv1d_varlen_states(x[None], OFFSETS, length)


def step_definition(state, x, dt, A, B, C, D, z, bias, softplus):
    """One token of every channel by itself, in float64; all with an axis of heads."""
    step = ssd_reference.step_size(dt.numpy(), None if bias is None else bias.numpy(), softplus, (-np.inf, np.inf))
    step, x = torch.as_tensor(step), x
    repeat = x.shape[1] // B.shape[1]
    B, C = B.repeat_interleave(repeat, 1), C.repeat_interleave(repeat, 1)
    after = (step[..., None] * A).exp() * state + (step * x)[..., None] * B[:, :, None]
    y = (after * C[:, :, None]).sum(-1)
    y = y if D is None else y + D * x
    return (y if z is None else y * F.silu(z)), after


def step_arguments(kind, every, rows=b):
    """Arguments with the axis of heads; ``tied`` ones are expanded over a head's channels and states."""
    if kind == "tied":
        A = (-rand(h).exp())[:, None, None].expand(h, p, n)
        dt, bias = rand(rows, h)[..., None].expand(-1, -1, p), rand(h)[:, None].expand(h, p)
    else:
        A, dt, bias = -rand(h, p, n).exp(), rand(rows, h, p), rand(h, p)
    D, z = rand(h, p), rand(rows, h, p)
    return [rand(rows, h, p), dt, A, rand(rows, g, n), rand(rows, g, n), *((D, z, bias) if every else (None,) * 3)]


@pytest.mark.parametrize("kind", ["tied", "free", "without_heads"])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_selective_state_update(kind, every, strided):
    arguments = step_arguments(kind, every)
    state = rand(b, h, p, n)
    expected, after = step_definition(state, *arguments, every)
    if strided:
        state = state.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "without_heads":  # then B and C may come without groups, too
        x, dt, A, B, C, D, z, bias = arguments
        flat = [None if v is None else v.flatten(1) for v in (x, dt, z)]
        D, bias = (None if v is None else v.flatten() for v in (D, bias))
        arguments = [flat[0], flat[1], A.flatten(0, 1), B, C, D, flat[2], bias]
        state = state.reshape(b, d, n) if not strided else state.reshape(b, d, n).mT.contiguous().mT
        expected, after = expected.flatten(1), after.flatten(1, 2)
    out = selective_state_update(state, *arguments, dt_softplus=every)
    close(out, expected)
    close(state, after)


def test_selective_state_update_without_groups():
    arguments, state = step_arguments("tied", True), rand(b, h, p, n)
    twin = state.clone()
    arguments[3:5] = [v[:, :1] for v in arguments[3:5]]
    expected = selective_state_update(state, *arguments)
    arguments[3:5] = [v[:, 0] for v in arguments[3:5]]
    assert torch.equal(selective_state_update(twin, *arguments), expected)
    assert torch.equal(state, twin)


@pytest.mark.parametrize("kind", ["tied", "free"])
@pytest.mark.parametrize("tokens", [None, 3])
def test_selective_state_update_in_slots(kind, tokens):
    """Slots are read and written apart, padding touches nothing, several tokens go one after the other."""
    calls = [step_arguments(kind, True, rows=5) for _ in range(tokens or 1)]
    for call in calls[1:]:
        call[2], call[5], call[7] = calls[0][2], calls[0][5], calls[0][7]
    state = rand(7, h, p, n)
    source, target = torch.tensor([4, 0, -1, 2, 6]), torch.tensor([5, 0, 3, 3, 1])
    before, pad = state.clone(), 6
    real = [0, 1, 3]
    rows, ys = before[source[real]], []
    for call in calls:
        part = [v if i in (2, 5, 7) else v[real] for i, v in enumerate(call)]
        y, rows = step_definition(rows, *part, True)
        ys.append(y)
    given = calls[0]
    if tokens:
        given = [v if i in (2, 5, 7) else torch.stack([c[i] for c in calls], 1) for i, v in enumerate(given)]
        if kind == "tied":
            given[1] = given[1][..., :1].expand(-1, -1, -1, p)
    expected = ys[0] if tokens is None else torch.stack(ys, 1)
    out = torch.full(given[0].shape, torch.nan, dtype=torch.float64)
    slots = {"state_batch_indices": source, "dst_state_batch_indices": target, "pad_slot_id": pad}
    assert selective_state_update(state, *given, dt_softplus=True, **slots, out=out) is out
    close(out[real], expected)
    assert (out[[2, 4]] == 0).all()
    close(state[target[real]], rows)
    assert torch.equal(state[[1, 2, 4, 6]], before[[1, 2, 4, 6]])


def test_slots_that_are_all_padding():
    arguments, state = step_arguments("tied", True), rand(3, h, p, n)
    before = state.clone()
    out = selective_state_update(state, *arguments, state_batch_indices=torch.tensor([-1, -1]))
    assert torch.equal(state, before)
    assert (out == 0).all()


def test_selective_state_update_refuses():
    arguments, state = step_arguments("tied", True), rand(b, h, p, n)
    with pytest.raises(ShapeError, match="state must be"):
        selective_state_update(state[0, 0], *arguments)
    with pytest.raises(ShapeError, match=r"A must have the shape \(4, 3, 5\); got \(4,\)"):
        selective_state_update(state, *arguments[:2], arguments[2][:, 0, 0], *arguments[3:])
    with pytest.raises(ShapeError, match=r"dt must have the shape \(2, 4, 3\); got \(2, 4\)"):
        selective_state_update(state, arguments[0], arguments[1][..., 0], *arguments[2:])
    arguments[0].requires_grad_()
    with pytest.raises(ArgumentError, match="has no gradient"):
        selective_state_update(state, *arguments)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("given", ["z", "bias", "z bias", ""])
@pytest.mark.parametrize("group", [None, 3])
def test_rmsnorm_fn(before, given, group):
    x, weight = rand(b, t, d), rand(d)
    z, bias = rand(b, t, d) if "z" in given else None, rand(d) if "bias" in given else None
    gate = 1 if z is None else F.silu(z).numpy()
    inner = x.numpy() if before else x.numpy() * gate
    expected = norm_reference.gated_rmsnorm(inner, None, weight.numpy(), 1e-3, group)
    expected = expected if bias is None else expected + bias.numpy()
    close(rmsnorm_fn(x, weight, bias, z, 1e-3, group, before), expected * gate if before else expected)


def split_arguments(mlp=0):
    zxbcdt, weight, bias = rand(b, t, 2 * mlp + 2 * d + 2 * g * n + h), rand(d + 2 * g * n, w), rand(d + 2 * g * n)
    return zxbcdt, weight, bias, rand(h), -rand(h).exp(), rand(h)


def split_definition(zxbcdt, weight, bias, dt_bias, A, D, initial, spans, norm, before, mlp, limit):
    gated, z, xBC, dt = (v.numpy() for v in zxbcdt.split([2 * mlp, d, d + 2 * g * n, h], -1))
    xBC, _ = by_document(
        conv_reference.causal_conv1d, {"x": torch.tensor(xBC)}, None, spans, weight=weight, bias=bias, activation="silu"
    )
    x, B, C = np.split(xBC, [d, d + g * n], -1)
    tokens = {"x": x.reshape(b, t, h, p), "dt": dt, "B": B.reshape(b, t, g, n), "C": C.reshape(b, t, g, n)}
    y, states = by_document(
        ssd_reference.ssd, tokens, initial, spans, A=A, D=D, dt_bias=dt_bias, dt_softplus=True, dt_limit=limit
    )
    y = y.reshape(b, t, d)
    y = y * silu(z) if norm is None else norm_reference.gated_rmsnorm(y, z, norm.numpy(), 1e-6, d // g, before)
    if mlp:
        y = np.concatenate([silu(gated[..., :mlp]) * gated[..., mlp:], y], -1)
    return y, np.concatenate([s[-1:] for s in states])


@pytest.mark.parametrize("index", [None, INDEX])
@pytest.mark.parametrize("norm", ["none", "before", "after"])
@pytest.mark.parametrize("mlp", [0, 2])
def test_mamba_split_conv1d_scan_combined(index, norm, mlp):
    arguments, initial = split_arguments(mlp), rand(b, h, p, n)
    weight = None if norm == "none" else rand(d)
    projection, offset = rand(7, d + mlp), rand(7)
    spans = WHOLE if index is None else SPANS
    expected, states = split_definition(*arguments, initial, spans, weight, norm == "before", mlp, (0.3, 1.2))
    given = {
        "initial_states": initial, "seq_idx": index, "dt_limit": (0.3, 1.2), "rmsnorm_weight": weight, "headdim": p,
        "ngroups": g, "norm_before_gate": norm == "before",
    }  # fmt: skip
    out, final = mamba_split_conv1d_scan_combined(*arguments, 8, **given, return_final_states=True)
    close(out, expected)
    close(final, states)
    projected = mamba_split_conv1d_scan_combined(
        *arguments, 8, **given, outproj_weight=projection, outproj_bias=offset
    )  # fmt: skip
    close(projected, expected @ projection.numpy().T + offset.numpy())
    wide = (*arguments[:5], arguments[5][:, None].expand(h, p))
    close(mamba_split_conv1d_scan_combined(*wide, 8, **{**given, "headdim": None}), expected)


def test_mamba_split_conv1d_scan_combined_refuses():
    arguments = split_arguments()
    with pytest.raises(ArgumentError, match="headdim is needed"):
        mamba_split_conv1d_scan_combined(*arguments, 8)
    with pytest.raises(ArgumentError, match="outproj_bias needs outproj_weight"):
        mamba_split_conv1d_scan_combined(*arguments, 8, headdim=p, outproj_bias=rand(7))
    with pytest.raises(ShapeError, match="zxbcdt must have"):
        mamba_split_conv1d_scan_combined(arguments[0][..., 3:], *arguments[1:], 8, headdim=p, ngroups=g)
    with pytest.raises(ArgumentError, match="activation must be None, 'silu' or 'swish'; got 'relu'"):
        mamba_split_conv1d_scan_combined(*arguments, 8, headdim=p, ngroups=g, activation="relu")


@pytest.mark.parametrize("given", ["projected", "norms", "biases", "constant"])
def test_mamba_inner_fn(given):
    rank = 3
    xz, conv, bias = rand(b, 2 * d, t), rand(d, 1, w), rand(d)
    rows = rank if given == "constant" else rank + 2 * n
    x_proj, delta_proj, out_proj, offset = rand(rows, d), rand(d, rank), rand(7, d), rand(7)
    A, D, delta_bias = -rand(d, n).exp(), rand(d), rand(d)
    extra = {
        "norms": {"b_rms_weight": rand(n), "c_rms_weight": rand(n), "dt_rms_weight": rand(d), "b_c_dt_rms_eps": 1e-3},
        "biases": {"B_proj_bias": rand(n), "C_proj_bias": rand(n)},
        "constant": {"B": rand(d, n), "C": rand(b, n, t)},
    }.get(given, {})  # fmt: skip
    x, z = (v.mT.numpy() for v in xz.chunk(2, 1))
    x, _ = conv_reference.causal_conv1d(x, conv[:, 0].numpy(), bias.numpy(), activation="silu")
    projected = x @ x_proj.numpy().T
    dt = projected[..., :rank] @ delta_proj.numpy().T
    B, C = projected[..., rank : rank + n], projected[..., rank + n :]
    norm = norm_reference.gated_rmsnorm
    if given == "norms":
        B, C, dt = (norm(v, None, extra[f"{k}_rms_weight"].numpy(), 1e-3) for k, v in (("b", B), ("c", C), ("dt", dt)))
    if given == "biases":
        B, C = B + extra["B_proj_bias"].numpy(), C + extra["C_proj_bias"].numpy()
    if given == "constant":
        B, C = np.broadcast_to(extra["B"].numpy(), (b, t, d, n)), np.moveaxis(extra["C"].numpy(), -1, 1)
    y, _ = scan_reference.selective_scan(x, dt, A.numpy(), B, C, D.numpy(), z, delta_bias.numpy(), dt_softplus=True)
    out = mamba_inner_fn(
        xz, conv, bias, x_proj, delta_proj, out_proj, offset, A, D=D, delta_bias=delta_bias, **extra
    )  # fmt: skip
    close(out, y @ out_proj.numpy().T + offset.numpy())


def test_mamba_inner_fn_refuses():
    arguments = (rand(b, 2 * d, t), rand(d, 1, w), None, rand(3 + 2 * n, d), rand(d, 3), rand(7, d), None)
    A = -rand(d, n).exp()
    with pytest.raises(DtypeError, match="A must be dense, and float32"):
        mamba_inner_fn(*arguments, A + 1j)
    with pytest.raises(ArgumentError, match="checkpoint_lvl must be 0 or 1; got 2"):
        mamba_inner_fn(*arguments, A, checkpoint_lvl=2)
    with pytest.raises(ArgumentError, match="B_proj_bias and b_rms_weight belong to a projected B; B is given"):
        mamba_inner_fn(*arguments, A, rand(d, n), b_rms_weight=rand(n))


def differentiable(*tensors):
    return [v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in tensors]


def test_gradients():
    """Of every floating-point argument, by finite differences, in packs."""
    x, dt, A, B, C, D, z, bias, initial = ssd_arguments()
    index = torch.tensor([[0, 0, 1]])
    small = (
        [v[:1, :3] for v in (x, dt)] + [A] + [v[:1, :3] for v in (B, C)] + [8, D, z[:1, :3], bias, initial[:1], index]
    )
    run = lambda *a: mamba_chunk_scan_combined(*a, dt_softplus=True, return_final_states=True)  # noqa: E731
    assert torch.autograd.gradcheck(run, differentiable(*small), fast_mode=True)
    u = rand(1, d, 3)
    scan = (
        u,
        rand(1, d, 3),
        -rand(d, n).exp(),
        rand(d, n),
        rand(1, g, n, 3),
        rand(d),
        rand(1, d, 3),
        rand(d),
        True,
        True,
    )
    assert torch.autograd.gradcheck(selective_scan_fn, differentiable(*scan), fast_mode=True)
    conv = (rand(1, d, 3), rand(d, w), rand(d), index, rand(1, d, w - 1), True, None, "silu")
    assert torch.autograd.gradcheck(causal_conv1d_fn, differentiable(*conv), fast_mode=True)
    zxbcdt, *rest = split_arguments()
    split = lambda *a: mamba_split_conv1d_scan_combined(*a[:6], 8, seq_idx=index, rmsnorm_weight=a[6], headdim=p, ngroups=g)  # noqa: E731, E501  # fmt: skip
    assert torch.autograd.gradcheck(split, differentiable(zxbcdt[:1, :3], *rest, rand(d)), fast_mode=True)
    norm = (rand(2, d), rand(d), rand(d), rand(2, d), 1e-3, 3, True)
    assert torch.autograd.gradcheck(rmsnorm_fn, differentiable(*norm), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_results(dtype):
    x, dt, A, B, C, D, z, bias, initial = (v.float() for v in ssd_arguments())
    low = [v.to(dtype) for v in (x, dt, B, C, z)]
    out, final, ends = mamba_chunk_scan_combined(
        low[0][:1], low[1][:1], A, low[2][:1], low[3][:1], 8, D, low[4][:1], bias, initial[:1], cu_seqlens=OFFSETS,
        dt_softplus=True, return_final_states=True, return_varlen_states=True,
    )  # fmt: skip
    assert (out.dtype, final.dtype, ends.dtype) == (dtype, torch.float32, dtype)
    u = torch.randn(b, d, t).to(dtype)
    out, last = selective_scan_fn(u, u, -torch.ones(d, n), u[:, :n], u[:, :n], torch.ones(d), u, None, True, True)
    assert (out.dtype, last.dtype) == (dtype, torch.float32)
    assert rmsnorm_fn(u.mT, torch.ones(d), torch.ones(d), u.mT).dtype == dtype
    # Callers hand over weights in 16 bit and the bias of the output projection in float32.
    weights = [torch.randn(s).to(dtype) for s in ((d, 1, w), (d,), (3 + 2 * n, d), (d, 3), (7, d))]
    A, D, offset = -torch.ones(d, n), torch.ones(d), torch.randn(7)
    made = [
        mamba_inner_fn(torch.cat([u, u], 1), *weights, offset.to(kind), A, D=D, delta_bias=D)
        for kind in (torch.float32, dtype)
    ]
    assert made[0].dtype == dtype
    assert torch.equal(*made)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_is_trained_token_by_token(width):
    """What the backward reads is not overwritten, nor where the states that are read and returned are one tensor."""
    x, weight = rand(2, 6, 5), rand(6, width).requires_grad_()
    state = torch.zeros(2, 6, 3, dtype=x.dtype)
    y = torch.stack([causal_conv1d_update(x[..., i], state, weight, None, "silu") for i in range(5)], -1)
    (found,) = torch.autograd.grad(y.square().sum(), weight)
    before = torch.zeros(2, 6, width - 1, dtype=x.dtype)
    whole = []
    for piece in x.split([2, 3], -1):
        out, before = causal_conv1d_fn(
            piece, weight, activation="silu", initial_states=before, return_final_states=True, final_states_out=before
        )
        whole.append(out)
    (again,) = torch.autograd.grad(torch.cat(whole, -1).square().sum(), weight)
    direct = F.silu(F.conv1d(F.pad(x, (width - 1, 0)), weight[:, None], groups=6))
    (expected,) = torch.autograd.grad(direct.square().sum(), weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected)


def test_slots_that_do_not_exist():
    x, conv, weight, state = rand(3, 6), rand(4, 6, 3), rand(6, 4), rand(4, 6, 3)
    given = (x, x.abs(), -rand(6, 3).abs(), rand(3, 3), rand(3, 3))
    slots, good = torch.tensor([1, 4, 9]), torch.tensor([1, 2, 3])
    named = re.escape("[1] is slot 4, but the state has the slots 0 to 3")
    with pytest.raises(ArgumentError, match="conv_state_indices" + named):
        causal_conv1d_update(x, conv, weight, conv_state_indices=slots)
    with pytest.raises(ArgumentError, match="state_batch_indices" + named):
        selective_state_update(state, *given, state_batch_indices=slots)
    with pytest.raises(ArgumentError, match="dst_state_batch_indices" + named):
        selective_state_update(state, *given, state_batch_indices=good, dst_state_batch_indices=slots)
    y = causal_conv1d_update(x, conv, weight, conv_state_indices=torch.tensor([1, 9, 3]), pad_slot_id=9)
    assert y[1].eq(0).all()


def test_slots_that_do_not_exist_where_values_are_not_read():
    """In a graph, as on a GPU: nothing outside is read or written, and the result shows it."""
    x, conv, weight = rand(3, 6), rand(4, 6, 3), rand(6, 4)
    run = torch.compile(causal_conv1d_update, backend="eager", fullgraph=True)
    before = conv.clone()
    y = run(x, conv, weight, conv_state_indices=torch.tensor([1, 4, -1]))
    alone = causal_conv1d_update(x[:1], before[1:2].clone(), weight)
    torch.testing.assert_close(y[:1], alone)
    assert y[1].isnan().all()
    assert y[2].eq(0).all()
    assert torch.equal(conv[[0, 2, 3]], before[[0, 2, 3]])


def test_offsets_of_varlen_states_are_checked():
    x = rand(6, 3)
    assert causal_conv1d_varlen_states(x, torch.tensor([0, 2, 4]), 2).shape == (2, 3, 2)
    with pytest.raises(ArgumentError, match="cu_seqlens must not decrease; got 9 then 6"):
        causal_conv1d_varlen_states(x, torch.tensor([0, 9]), 2)
