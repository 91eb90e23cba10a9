"""The functions of the package mamba-ssm, under its signatures.

Layouts, defaults and the number of results are that package's. The package ignores some arguments that have a meaning,
such as offsets of documents without ``seq_idx``; here they have that meaning. A value without a meaning raises an error
that names it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold import ops
from refold.compat.causal_conv1d import causal_conv1d_fn, into, time_last
from refold.compat.checks import positive, shaped, states_dtype, tensors
from refold.compat.documents import Documents
from refold.compat.norms import RMSNorm, RMSNormGated, layer_norm_fn, rms_norm_fn, rmsnorm_fn
from refold.compat.slots import step_, steps_
from refold.errors import ArgumentError, DtypeError, ShapeError
from refold.ops.gated_rmsnorm.spec import EPS
from refold.ops.selective_scan.spec import STEP as SELECTIVE_SCAN_STEP
from refold.ops.spec import check_cu_seqlens_values
from refold.ops.ssd.spec import DT_LIMIT
from refold.ops.ssd.spec import STEP as SSD_STEP

__all__ = [
    "RMSNorm",
    "RMSNormGated",
    "layer_norm_fn",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "rms_norm_fn",
    "rmsnorm_fn",
    "selective_scan_fn",
    "selective_state_update",
]


@tensors(x=(4,), dt=(3,), B=(4,), C=(4,), z=(4,), initial_states=(4,))
def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
    return_varlen_states: bool = False, state_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Scan as Mamba-2 does, by `refold.ops.ssd`.

    Args:
        x: ``(b, t, h, p)``.
        dt: ``(b, t, h)``.
        A: ``(h,)``.
        B: ``(b, t, g, n)``.
        C: ``(b, t, g, n)``.
        chunk_size: Checked, and otherwise left to refold: it only changes rounding.
        D: ``(h,)`` or ``(h, p)``.
        z: ``(b, t, h, p)``.
        dt_bias: ``(h,)``.
        initial_states: ``(b, h, p, n)``; each row's first document goes on from them.
        seq_idx: ``(b, t)``, the number of each token's document. Reading it waits for a GPU.
        cu_seqlens: ``(k + 1,)``, offsets of documents in a batch of one row. They separate documents with and without
            ``seq_idx``, which must tell the same if given (checked on the CPU).
        dt_softplus: Pass ``dt`` through softplus.
        dt_limit: Clip step sizes to this range.
        return_final_states: Return the state of each row's end, ``(b, h, p, n)``, float32.
        return_varlen_states: Return the state of each document's end, ``(k, h, p, n)``; needs ``cu_seqlens``.
        state_dtype: Dtype of the states of documents; None is that of ``C``. Inside they are at least float32.

    Returns:
        ``out``, followed by what was asked for, in this order.

    Raises:
        ArgumentError: An argument has no meaning here; the message names it.
        ShapeError: Axes disagree.
    """
    op = "mamba_chunk_scan_combined"
    positive(op, "chunk_size", chunk_size)
    dt_limit = DT_LIMIT.read(op, dt_limit)
    states_dtype(op, "state_dtype", state_dtype)
    if return_varlen_states and cu_seqlens is None:
        raise ArgumentError(f"{op}: return_varlen_states=True needs cu_seqlens; got None.")
    documents = _documents(op, x, seq_idx, cu_seqlens)
    tokens = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
    rest: dict[str, Any] = {"A": A, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    if documents is None:
        out, states = ops.ssd(x, dt, B=B, C=C, z=z, **rest, initial_state=initial_states)
        return (out, states) if return_final_states else out
    out, states = documents.run(ops.ssd, tokens, initial_states, **rest)
    results: tuple[Tensor, ...] = (out,)
    if return_final_states:
        results += (documents.ends(states),)
    if return_varlen_states:
        results += (states.to(C.dtype if state_dtype is None else state_dtype),)
    return results if len(results) > 1 else out


@tensors(zxbcdt=(3,), conv1d_weight=(2,), D=(1, 2), outproj_weight=(2,))
def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor, D: Tensor,
    chunk_size: int, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False, activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None, rmsnorm_eps: float = 1e-6, outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None, headdim: int | None = None, ngroups: int = 1, norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Compute a Mamba-2 layer after its input projection: convolution, scan, gated norm, and the output product.

    A layer that hands over ``outproj_weight`` never calls its output projection, so LoRA, quantisation or a hook there
    does nothing. Where that matters, leave it None and call the projection on the result.

    Args:
        zxbcdt: ``(b, t, 2 m + 2 h p + 2 g n + h)``: channels of a gated MLP (m may be 0), z, x, B, C, dt.
        conv1d_weight: ``(h p + 2 g n, w)``.
        conv1d_bias: ``(h p + 2 g n,)``.
        dt_bias: ``(h,)``.
        A: ``(h,)``.
        D: ``(h,)``, or ``(h, p)``.
        chunk_size: Checked, and otherwise left to refold.
        initial_states: ``(b, h, p, n)``.
        seq_idx: ``(b, t)``, the number of each token's document, for convolution and scan.
        dt_limit: Clip step sizes to this range, after softplus.
        return_final_states: Return the state of each row's end, too.
        activation: Of the convolution: None, ``"silu"`` or ``"swish"``.
        rmsnorm_weight: ``(h p,)``: the norm over each of ``ngroups`` groups. None gates without a norm.
        rmsnorm_eps: Its epsilon.
        outproj_weight: ``(out, m + h p)``.
        outproj_bias: ``(out,)``.
        headdim: p; needed where D is ``(h,)``.
        ngroups: g.
        norm_before_gate: Gate the normalised values rather than the inputs of the norm.
        state_dtype: None or a float dtype; states are at least float32 inside.

    Returns:
        ``out`` ``(b, t, m + h p)``, or of the output product; or ``(out, final_states)``.

    Raises:
        ArgumentError: An argument has no meaning here; the message names it.
        ShapeError: Axes disagree.
    """
    op = "mamba_split_conv1d_scan_combined"
    if D.ndim == 1 and headdim is None:
        raise ArgumentError(f"{op}: headdim is needed where D has the shape (h,); got None.")
    if headdim is not None:
        positive(op, "headdim", headdim)
    positive(op, "ngroups", ngroups)
    if rmsnorm_weight is not None:
        rmsnorm_eps = EPS.read(op, rmsnorm_eps, "rmsnorm_eps")
    if outproj_bias is not None and outproj_weight is None:
        raise ArgumentError(f"{op}: outproj_bias needs outproj_weight; got None.")
    heads: Any = (len(D), headdim) if D.ndim == 1 else tuple(D.shape)
    nheads, dim = heads[0], math.prod(heads)
    states = (conv1d_weight.shape[0] - dim) // 2
    mlp = zxbcdt.shape[-1] - 2 * dim - 2 * states - nheads
    if states < ngroups or states % ngroups or mlp < 0 or mlp % 2 or conv1d_weight.shape[0] != dim + 2 * states:
        raise ShapeError(
            f"{op}: zxbcdt must have 2 m + 2 h p + 2 g n + h channels and conv1d_weight h p + 2 g n rows; got "
            f"{zxbcdt.shape[-1]} and {conv1d_weight.shape[0]} with h={nheads}, p={heads[1]}, g={ngroups}."
        )
    if rmsnorm_weight is not None and dim % ngroups:
        raise ShapeError(f"{op}: ngroups must divide h p = {dim}; got {ngroups}.")
    gated, z, xBC, dt = zxbcdt.split([mlp, dim, dim + 2 * states, nheads], -1)
    xBC = causal_conv1d_fn(xBC.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, B, C = xBC.split([dim, states, states], -1)
    groups = ngroups, states // ngroups
    out, final = mamba_chunk_scan_combined(
        torch.unflatten(x, -1, heads), dt, A, torch.unflatten(B, -1, groups), torch.unflatten(C, -1, groups),
        chunk_size, D=D, z=torch.unflatten(z, -1, heads) if rmsnorm_weight is None else None,
        dt_bias=dt_bias, initial_states=initial_states,
        seq_idx=seq_idx, dt_softplus=True, dt_limit=dt_limit, return_final_states=True, state_dtype=state_dtype,
    )  # fmt: skip
    out = out.flatten(-2)
    if rmsnorm_weight is not None:
        out = ops.gated_rmsnorm(
            out, z, rmsnorm_weight, eps=rmsnorm_eps, group_size=dim // ngroups, norm_before_gate=norm_before_gate
        )
    if mlp:
        first, second = gated.chunk(2, -1)
        out = torch.cat([F.silu(first) * second, out], -1)
    if outproj_weight is not None:
        out = _product(op, out, outproj_weight=outproj_weight, outproj_bias=outproj_bias)
    return (out, final) if return_final_states else out


@tensors(u=(3,), delta=(3,), z=(3,), A=(2,))
def selective_scan_fn(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False,
) -> Any:  # fmt: skip
    """Scan as Mamba-1 does, by `refold.ops.selective_scan`.

    Args:
        u: Inputs, ``(b, d, t)``.
        delta: Step sizes, ``(b, d, t)``.
        A: ``(d, n)``, real.
        B: ``(d, n)`` for all tokens, or ``(b, n, t)``, or ``(b, g, n, t)``.
        C: Like ``B``, independently of it.
        D: ``(d,)``.
        z: ``(b, d, t)``.
        delta_bias: ``(d,)``.
        delta_softplus: Pass ``delta`` through softplus.
        return_last_state: Return the last state, ``(b, d, n)``, too. Gradients flow from it, unlike in the package.

    Returns:
        ``out`` like ``u``, or ``(out, last_state)``.

    Raises:
        DtypeError: ``A`` is complex.
        ShapeError: Axes disagree.
    """
    op = "selective_scan_fn"
    y, state = ops.selective_scan(
        u.mT, delta.mT, A, *_alike(_projection(op, "B", B, u), _projection(op, "C", C, u), u.shape[1]), D=D,
        z=None if z is None else z.mT, dt_bias=delta_bias, dt_softplus=bool(delta_softplus),
    )  # fmt: skip
    out = time_last(y, u)
    return (out, state) if return_last_state else out


@tensors(
    xz=(3,), conv1d_weight=(2, 3), x_proj_weight=(2,), delta_proj_weight=(2,), out_proj_weight=(2,), A=(2,)
)  # fmt: skip
def mamba_inner_fn(
    xz: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, x_proj_weight: Tensor, delta_proj_weight: Tensor,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None, A: Tensor, B: Tensor | None = None, C: Tensor | None = None,
    D: Tensor | None = None, delta_bias: Tensor | None = None, B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None, delta_softplus: bool = True, checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None, c_rms_weight: Tensor | None = None, dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Compute a Mamba-1 layer after its input projection, with the output product.

    Args:
        xz: ``(b, 2 d, t)``: inputs and gate.
        conv1d_weight: ``(d, 1, w)``.
        conv1d_bias: ``(d,)``.
        x_proj_weight: ``(r + 2 n, d)``; without the n rows of a ``B`` that is given.
        delta_proj_weight: ``(d, r)``.
        out_proj_weight: ``(out, d)``. As in the package, the projection itself is never called.
        out_proj_bias: ``(out,)``.
        A: ``(d, n)``, real.
        B: None to project it from the inputs, else as in `selective_scan_fn`.
        C: Likewise.
        D: ``(d,)``.
        delta_bias: ``(d,)``.
        B_proj_bias: ``(n,)``, added to a projected ``B``.
        C_proj_bias: ``(n,)``, added to a projected ``C``.
        delta_softplus: Pass step sizes through softplus.
        checkpoint_lvl: 0 or 1. Only the operators' inputs are kept for the backward either way.
        b_rms_weight: ``(n,)``: norm of a projected ``B``.
        c_rms_weight: ``(n,)``: norm of a projected ``C``.
        dt_rms_weight: ``(d,)``: norm of the step sizes, over channels, before bias and softplus.
        b_c_dt_rms_eps: Epsilon of these norms.

    Returns:
        ``(b, t, out)``.

    Raises:
        ArgumentError: An argument contradicts another; the message names both.
        DtypeError: ``A`` is complex.
        ShapeError: Axes disagree.
    """
    op = "mamba_inner_fn"
    if checkpoint_lvl not in (0, 1):
        raise ArgumentError(f"{op}: checkpoint_lvl must be 0 or 1; got {checkpoint_lvl!r}.")
    if any(weight is not None for weight in (b_rms_weight, c_rms_weight, dt_rms_weight)):
        b_c_dt_rms_eps = EPS.read(op, b_c_dt_rms_eps, "b_c_dt_rms_eps")
    given = {"B": (B, B_proj_bias, b_rms_weight), "C": (C, C_proj_bias, c_rms_weight)}
    for name, (value, bias, weight) in given.items():
        if value is not None and (bias is not None or weight is not None):
            raise ArgumentError(
                f"{op}: {name}_proj_bias and {name.lower()}_rms_weight belong to a projected {name}; {name} is given. "
                "Apply them to it before the call."
            )
    rank, dstate = delta_proj_weight.shape[1], A.shape[1]
    channels, projects = len(conv1d_weight), (B is None) + (C is None)
    shaped(
        op, xz=(xz, (len(xz), 2 * channels, xz.shape[2])), delta_proj_weight=(delta_proj_weight, (channels, rank)),
        x_proj_weight=(x_proj_weight, (rank + projects * dstate, channels)), B_proj_bias=(B_proj_bias, (dstate,)),
        C_proj_bias=(C_proj_bias, (dstate,)),
    )  # fmt: skip
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu").mT
    projected = _product(op, x, x_proj_weight=x_proj_weight)
    delta = _product(op, projected[..., :rank], delta_proj_weight=delta_proj_weight)
    if dt_rms_weight is not None:
        delta = ops.gated_rmsnorm(delta, None, dt_rms_weight, eps=b_c_dt_rms_eps)

    def project(name: str, place: slice) -> Tensor:
        value, bias, weight = given[name]
        if value is not None:
            return _projection(op, name, value, x.mT)
        value = projected[..., place]
        value = value if bias is None else value + bias.to(value.dtype)
        return value if weight is None else ops.gated_rmsnorm(value, None, weight, eps=b_c_dt_rms_eps)

    y, _ = ops.selective_scan(
        x, delta, A, *_alike(project("B", slice(rank, rank + dstate)), project("C", slice(-dstate, None)), x.shape[-1]),
        D=D, z=z.mT, dt_bias=delta_bias, dt_softplus=delta_softplus,
    )  # fmt: skip
    return _product(op, y, out_proj_weight=out_proj_weight, out_proj_bias=out_proj_bias)


@tensors()
def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None, *, dst_state_batch_indices: Tensor | None = None, pad_slot_id: int = -1,
    out: Tensor | None = None, num_accepted_tokens: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Take one token of a Mamba-1 or Mamba-2 layer, or a few, in; ``state`` is overwritten.

    Where ``A``, ``dt`` and ``dt_bias`` are expanded over the channels and states of a head (strides of zero), this is
    `refold.ops.ssd_step_`, else `refold.ops.selective_scan_step_` over all channels of all heads.

    Args:
        state: ``(b, d, n)`` or ``(b, h, p, n)``; with slots ``(slots, ...)``.
        x: ``(b, d)`` or ``(b, h, p)``; with one axis more after the batch, a few tokens. (Not in the package.)
        dt: Like ``x``.
        A: ``(d, n)`` or ``(h, p, n)``.
        B: ``(b, n)`` or ``(b, g, n)``, with the axis of tokens if ``x`` has it.
        C: Like ``B``.
        D: ``(d,)`` or ``(h, p)``.
        z: Like ``x``.
        dt_bias: ``(d,)`` or ``(h, p)``.
        dt_softplus: Pass ``dt`` through softplus.
        state_batch_indices: ``(b,)``, the slot of ``state`` that each row reads. Rows with a negative slot are padding:
            zeros are returned for them and nothing is written.
        dst_state_batch_indices: ``(b,)``, the slots that are written; None writes those that are read. (Not in the
            package.)
        pad_slot_id: A slot that means padding, too. (Not in the package.)
        out: Where to write the result, like ``x``. (Not in the package.)
        num_accepted_tokens: ``(k,)``: each of k sequences goes on from its slot of the last accepted token, and the
            state after its token i goes to its slot i; slots are ``(k, m)``. Needs ``out``. (Not in the package.)
        cu_seqlens: ``(k + 1,)``, offsets of the sequences' tokens along the first axis of ``x``. Needs ``out``, of
            which tokens after the last sequence are left as they are. (Not in the package.)

    Returns:
        ``out``, like ``x``.

    Raises:
        ArgumentError: A gradient is needed: use the functions of `refold.ops` without underscore. A slot does not exist
            (on the CPU).
        ShapeError: Axes disagree.
    """
    op = "selective_state_update"
    heads = state.ndim == 4
    if state.ndim not in (3, 4) or x.ndim not in (state.ndim - 1, state.ndim):
        raise ShapeError(
            f"{op}: state must be (b, d, n) or (b, h, p, n), and x one axis fewer, or as many for several tokens; got "
            f"{tuple(state.shape)} and {tuple(x.shape)}."
        )
    like = {"dt": dt, "z": z, "out": out}
    shape = tuple(x.shape[-2:] if heads else x.shape[-1:]) + tuple(state.shape[-1:])
    one = shape[:-1]
    shaped(op, A=(A, shape), dt_bias=(dt_bias, one), D=(D, one), **{n: (v, x.shape) for n, v in like.items()})
    rank = B.ndim - (x.ndim == state.ndim)
    if heads and rank == 2:
        B, C = B.unsqueeze(-2), C.unsqueeze(-2)
    tied = heads and _same(A, -1) and _same(A, -2) and _same(dt, -1) and (dt_bias is None or _same(dt_bias, -1))
    given: dict[str, Any] = {"x": x, "B": B, "C": C, "D": D, "z": z, "dt_softplus": dt_softplus, "state": state}
    if tied:
        bias = None if dt_bias is None else dt_bias[:, 0]
        given |= {"dt": dt[..., 0], "A": A[:, 0, 0], "dt_bias": bias, "dt_limit": (-math.inf, math.inf)}
    elif heads:
        given |= {name: v if v is None else v.flatten(-2) for name, v in (("x", x), ("dt", dt), ("z", z))}
        given |= {name: v if v is None else v.flatten(0, 1) for name, v in (("A", A), ("D", D), ("dt_bias", dt_bias))}
        given["state"] = state.flatten(1, 2)  # of a state that cannot be seen so, a copy
    else:
        given |= {"dt": dt, "A": A, "dt_bias": dt_bias}
    spec = SSD_STEP if tied else SELECTIVE_SCAN_STEP
    place = None if out is None or not out.is_contiguous() else out.view(given["x"].shape)
    if num_accepted_tokens is None and cu_seqlens is None:
        indices = {"state_batch_indices": state_batch_indices, "dst_state_batch_indices": dst_state_batch_indices}
        y = step_(op, spec, given, pad=pad_slot_id, out=place, **indices)
    elif state_batch_indices is None or out is None:
        raise ArgumentError(f"{op}: several tokens a sequence need state_batch_indices and out; got None.")
    else:
        place = out.reshape(given["x"].shape) if place is None else place
        y = steps_(
            op, spec, given, source=state_batch_indices, target=dst_state_batch_indices, accepted=num_accepted_tokens,
            offsets=cu_seqlens, pad=pad_slot_id, out=place,
        )  # fmt: skip
    if given["state"] is not state and given["state"].data_ptr() != state.data_ptr():
        state.copy_(given["state"].view_as(state))
    if out is not None and out.is_contiguous() and y is place:
        return out
    return into(op, out, y if y.shape == x.shape else y.reshape(x.shape))


def _documents(op: str, x: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Documents | None:
    if seq_idx is not None:
        shaped(op, seq_idx=(seq_idx, x.shape[:2]))
    if cu_seqlens is None:
        return None if seq_idx is None else Documents.from_index(seq_idx)
    if len(x) != 1:
        raise ShapeError(f"{op}: with cu_seqlens the batch is 1; got {len(x)}. Put documents one after the other.")
    if seq_idx is not None and not cu_seqlens.is_cuda:
        check_cu_seqlens_values(op, cu_seqlens.tolist(), x.shape[1])
        if not torch.equal(Documents.from_index(seq_idx).cu_seqlens.cpu(), cu_seqlens.unique().int()):
            raise ArgumentError(f"{op}: seq_idx and cu_seqlens mark different documents. Pass one of them.")
    return Documents.from_offsets(cu_seqlens)


def _projection(op: str, name: str, value: Tensor, u: Tensor) -> Tensor:
    """Return B or C, in any of the package's layouts, as (b, t, n) or (b, t, g, n); ``u`` is (b, d, t)."""
    batch, channels, seqlen = u.shape
    if value.ndim == 2:
        if value.shape[0] != channels:
            raise ShapeError(f"{op}: {name} must be (d, n) with d={channels}; got shape {tuple(value.shape)}.")
        return value.expand(batch, seqlen, *value.shape)
    if value.ndim not in (3, 4) or not value.shape[1]:
        raise ShapeError(f"{op}: {name} must be (d, n), (b, n, t) or (b, g, n, t); got shape {tuple(value.shape)}.")
    return value.movedim(-1, 1)


def _product(op: str, x: Tensor, **given: Tensor | None) -> Tensor:
    """Return a product with a weight and, if given, a bias; callers hand over a float32 bias with 16-bit weights."""
    (name, weight), (bias_name, bias) = (*given.items(), ("", None))[:2]
    assert weight is not None
    shaped(op, **{name: (weight, (len(weight), x.shape[-1])), bias_name: (bias, (len(weight),))})
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        raise DtypeError(f"{op}: {name} must be {x.dtype}, as what it multiplies; got {weight.dtype}. Convert {name}.")
    return F.linear(x, weight, None if bias is None else bias.to(weight.dtype))


def _alike(B: Tensor, C: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Give a group to each channel where B and C have different groups: one is constant, the other not."""
    if B.ndim == C.ndim == 4 and B.shape[2] != C.shape[2]:
        B, C = (v.repeat_interleave(channels // v.shape[2], 2) for v in (B, C))
    return B, C


def _same(a: Tensor, axis: int) -> bool:
    """Whether all entries along an axis are one, by the way it is laid out."""
    return a.stride(axis) == 0 or a.shape[axis] == 1
