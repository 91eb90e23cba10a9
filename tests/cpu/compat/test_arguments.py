"""Wrong arguments of other packages' functions: a typed error that names the argument, in refold's words."""

from contextlib import suppress

import pytest
import torch

from refold.compat import causal_conv1d, fla, mamba_ssm
from refold.errors import ArgumentError


def f(*shape):
    return torch.full(shape, 0.5)


B, T, H, N, P, D = 1, 6, 2, 4, 3, 8
QKV = {"q": f(B, T, H, N), "k": f(B, T, H, N), "v": f(B, T, H, P)}
SCAN = {"A": -f(D, N), "D": f(D)}
CALLS = {
    fla.chunk_gated_delta_rule: {**QKV, "g": -f(B, T, H), "beta": f(B, T, H)},
    fla.fused_recurrent_gated_delta_rule: {**QKV, "g": -f(B, T, H), "gk": -f(B, T, H, N), "beta": f(B, T, H)},
    fla.chunk_kda: {
        **QKV, "g": -f(B, T, H, N), "beta": f(B, T, H), "A_log": f(H), "dt_bias": f(H * N), "use_gate_in_kernel": True},
    fla.fused_recurrent_kda: {**QKV, "g": -f(B, T, H, N), "beta": f(B, T, H)},
    fla.chunk_gla: {**QKV, "g": -f(B, T, H, N)},
    fla.chunk_simple_gla: {**QKV, "g_gamma": -f(H)},
    fla.chunk_delta_rule: {**QKV, "beta": f(B, T, H)},
    mamba_ssm.mamba_chunk_scan_combined: {
        "x": f(B, T, H, P), "dt": f(B, T, H), "A": -f(H), "B": f(B, T, 1, N), "C": f(B, T, 1, N), "chunk_size": 4,
        "D": f(H), "z": f(B, T, H, P), "initial_states": f(B, H, P, N), "seq_idx": torch.zeros(B, T, dtype=torch.int)},
    mamba_ssm.mamba_split_conv1d_scan_combined: {
        "zxbcdt": f(B, T, 2 * H * P + 2 * N + H), "conv1d_weight": f(H * P + 2 * N, 4), "conv1d_bias": None,
        "dt_bias": f(H), "A": -f(H), "D": f(H), "chunk_size": 4, "headdim": P, "outproj_weight": f(5, H * P),
        "outproj_bias": f(5)},
    mamba_ssm.selective_scan_fn: {
        "u": f(B, D, T), "delta": f(B, D, T), "B": f(B, N, T), "C": f(B, N, T), "z": f(B, D, T), **SCAN},
    mamba_ssm.mamba_inner_fn: {
        "xz": f(B, 2 * D, T), "conv1d_weight": f(D, 1, 4), "conv1d_bias": f(D), "x_proj_weight": f(3 + 2 * N, D),
        "delta_proj_weight": f(D, 3), "out_proj_weight": f(5, D), "out_proj_bias": f(5), "B_proj_bias": f(N), **SCAN},
    mamba_ssm.selective_state_update: {
        "state": f(B, D, N), "x": f(B, D), "dt": f(B, D), "B": f(B, N), "C": f(B, N), "z": f(B, D), "out": f(B, D),
        **SCAN},
    mamba_ssm.layer_norm_fn: {"x": f(B, T, D), "weight": f(D), "bias": f(D)},
    mamba_ssm.rms_norm_fn: {"x": f(B, T, D), "weight": f(D), "bias": f(D)},
    mamba_ssm.rmsnorm_fn: {"x": f(B, T, D), "weight": f(D), "bias": f(D), "z": f(B, T, D)},
    causal_conv1d.causal_conv1d_fn: {
        "x": f(B, D, T), "weight": f(D, 4), "bias": f(D), "seq_idx": torch.zeros(B, T, dtype=torch.int),
        "initial_states": f(B, D, 3), "return_final_states": True, "final_states_out": f(B, D, 3)},
    causal_conv1d.causal_conv1d_varlen_states: {"x": f(T, D), "cu_seqlens": torch.tensor([0, T]), "state_len": 3},
    causal_conv1d.causal_conv1d_update: {"x": f(B, D), "conv_state": f(B, D, 4), "weight": f(D, 4), "bias": f(D)},
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_wrong_arguments_are_named(call):
    call(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in CALLS[call].items()})
    for name, x in CALLS[call].items():
        if not isinstance(x, torch.Tensor):
            continue
        shapes = x.sum(), x[..., None], *(torch.cat([x, x.narrow(i, 0, 1)], i) for i in range(x.ndim))
        for wrong in ([1.0], "x", 1.0, x.numpy(), *shapes, *(x.narrow(i, 0, 0) for i in range(x.ndim))):
            with suppress(ArgumentError):  # anything else fails; some are computed
                call(**{**CALLS[call], name: wrong})
        for wrong in (x > 0, x.to(torch.complex64), x.long() if x.is_floating_point() else x.float(), x.to_sparse()):
            with pytest.raises(ArgumentError, match=f"{call.__name__}: {name} must be dense, and"):
                call(**{**CALLS[call], name: wrong})
    for name in [name for name, kind in call.__annotations__.items() if "bool" in kind]:
        with pytest.raises(ArgumentError, match=f"{call.__name__}: {name} must not be a tensor; got the shape"):
            call(**{**CALLS[call], name: f(2)})


@pytest.mark.parametrize(("call", "name", "wrong"), [
    (mamba_ssm.mamba_inner_fn, "x_proj_weight", f(4 + 2 * N, D)),
    (mamba_ssm.mamba_inner_fn, "B_proj_bias", f(1)),
    (mamba_ssm.rmsnorm_fn, "z", f(B, 1, D)),
    (mamba_ssm.rmsnorm_fn, "bias", f(1)),
    (causal_conv1d.causal_conv1d_fn, "final_states_out", f(2, B, D, 3)),
    (causal_conv1d.causal_conv1d_fn, "initial_states", f(2, D, 3)),
    (causal_conv1d.causal_conv1d_update, "x", f(B, 1)),
    (mamba_ssm.mamba_inner_fn, "out_proj_weight", f(5, D).double()),
])  # fmt: skip
def test_what_would_be_computed_wrongly_or_fail_inside_is_refused(call, name, wrong):
    with pytest.raises(ArgumentError, match=f"{name.rstrip('s')}.* must "):
        call(**{**CALLS[call], name: wrong})


@pytest.mark.parametrize("name", ["outproj_weight", "outproj_bias"])
def test_products_name_their_weights(name):
    call = mamba_ssm.mamba_split_conv1d_scan_combined
    x = CALLS[call][name]
    for wrong in (x[..., :-1], x.to("meta"), x > 0 if name == "outproj_weight" else x[..., :-1]):
        with pytest.raises(ArgumentError, match=f"mamba_split_conv1d_scan_combined: {name} (must|is on)"):
            call(**{**CALLS[call], name: wrong})
