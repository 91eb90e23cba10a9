"""The functions of flash-linear-attention against their recurrences, one token after the other, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from refold.compat import fla
from refold.errors import ArgumentError

B, T, G, H, N, P = 2, 9, 2, 4, 5, 3


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def given() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "q": drawn(B, T, G, N), "k": F.normalize(drawn(B, T, G, N), dim=-1), "v": drawn(B, T, H, P),
        "g": -drawn(B, T, H).abs(), "gk": -drawn(B, T, H, N).abs(), "beta": torch.rand(B, T, H, dtype=torch.float64),
        "state": drawn(B, H, N, P), "A_log": drawn(H), "bias": drawn(H), "bias_k": drawn(H * N),
    }  # fmt: skip


def loop(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """``decay`` (b, t, h, 1 or n) is a log; without ``beta``, nothing is erased."""
    q, k = (a.repeat_interleave(v.shape[2] // a.shape[2], 2) for a in (q, k))
    ys = []
    for t in range(q.shape[1]):
        state = decay[:, t].exp()[..., None] * state
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - (k[:, t, :, :, None] * state).sum(2))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        ys.append((q[:, t, :, :, None] * state).sum(2))
    return torch.stack(ys, 1) * (q.shape[-1] ** -0.5 if scale is None else scale), state


def unit(z: Tensor) -> Tensor:
    return z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()


Given = dict[str, Tensor]


def same(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_gated_delta_rule(given: Given, function: str) -> None:
    call = getattr(fla, function)
    q, k, v, g, beta, state = (given[n] for n in ("q", "k", "v", "g", "beta", "state"))
    same(call(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True),
         loop(q, k, v, g[..., None], beta, state))  # fmt: skip
    y, none = call(q, k, v, g=g, beta=beta, initial_state=state, scale=0.3, use_qk_l2norm_in_kernel=True)
    assert none is None
    torch.testing.assert_close(y, loop(unit(q), unit(k), v, g[..., None], beta, state, 0.3)[0])
    gates = {"use_gate_in_kernel": True, "A_log": given["A_log"], "dt_bias": given["bias"]}
    sigmoid = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    y, last = call(q, k, v, g=g, beta=beta, initial_state=state.mT.contiguous(), output_final_state=True,
                   state_v_first=True, **gates, **sigmoid)  # fmt: skip
    decay = -given["A_log"].exp() * F.softplus(g + given["bias"])
    expected = loop(q, k, v, decay[..., None], 2 * beta.sigmoid(), state)
    same((y, last), (expected[0], expected[1].mT))
    assert last.is_contiguous()


def test_fused_recurrent_decays_per_key_and_without_strengths(given: Given) -> None:
    q, k, v, g, gk, state = (given[n] for n in ("q", "k", "v", "g", "gk", "state"))
    call, ones = fla.fused_recurrent_gated_delta_rule, torch.ones_like(g)
    same(call(q, k, v, gk=gk, initial_state=state, output_final_state=True), loop(q, k, v, gk, ones, state))
    same(call(q, k, v, g, gk, initial_state=state, output_final_state=True),
         loop(q, k, v, g[..., None] + gk, ones, state))  # fmt: skip
    same(call(q, k, v, initial_state=state, output_final_state=True),
         loop(q, k, v, 0 * g[..., None], ones, state))  # fmt: skip


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kda(given: Given, function: str, lower_bound: float | None) -> None:
    call = getattr(fla, function)
    q, k, v, g, beta, state = (given[n] for n in ("q", "k", "v", "gk", "beta", "state"))
    same(call(q, k, v, g, beta, initial_state=state, output_final_state=True, lower_bound=lower_bound),
         loop(q, k, v, g, beta, state))  # fmt: skip
    rate, raw = given["A_log"].exp()[:, None], g + given["bias_k"].view(H, N)
    decay = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    found = call(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_gate_in_kernel=True, A_log=given["A_log"],
        dt_bias=given["bias_k"], lower_bound=lower_bound, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
    )  # fmt: skip
    same(found, loop(unit(q), unit(k), v, decay, beta.sigmoid(), state))
    if lower_bound is not None:
        y, _ = call(q, k, v, g, beta, initial_state=state, use_gate_in_kernel=True, lower_bound=lower_bound)
        torch.testing.assert_close(y, loop(q, k, v, lower_bound * torch.sigmoid(g), beta, state)[0])


def test_linear_attention(given: Given) -> None:
    q, k, v, g, gk, state = (given[n] for n in ("q", "k", "v", "g", "gk", "state"))
    same(fla.chunk_gla(q, k, v, gk, initial_state=state, output_final_state=True), loop(q, k, v, gk, None, state))
    last = fla.chunk_gla(q, k, v, gk, 1.0, state.mT.contiguous(), True, True)[1]
    torch.testing.assert_close(last, loop(q, k, v, gk, None, state)[1].mT)
    simple = fla.chunk_simple_gla
    same(simple(q, k, v, g, initial_state=state, output_final_state=True), loop(q, k, v, g[..., None], None, state))
    gamma = g[0, 0]
    same(simple(q, k, v, g_gamma=gamma, initial_state=state, output_final_state=True),
         loop(q, k, v, gamma.expand(B, T, H)[..., None], None, state))  # fmt: skip
    same(simple(q, k, v, initial_state=state, output_final_state=True), loop(q, k, v, 0 * gk, None, state))


def test_delta_rule(given: Given) -> None:
    q, k, v, beta, state = (given[n] for n in ("q", "k", "v", "beta", "state"))
    expected = loop(q, k, v, 0 * given["gk"], beta, state)
    same(fla.chunk_delta_rule(q, k, v, beta, initial_state=state, output_final_state=True, chunk_size=16), expected)


def test_packs_and_gradients(given: Given) -> None:
    q, k, v, g, beta, state = (given[n].requires_grad_() for n in ("q", "k", "v", "g", "beta", "state"))
    flat = [a.reshape(1, B * T, *a.shape[2:]) for a in (q, k, v, g, beta)]
    offsets = torch.tensor([0, T, 2 * T])
    y, last = fla.chunk_gated_delta_rule(*flat, None, state, True, cu_seqlens=offsets, cu_seqlens_cpu=offsets)
    expected = loop(q, k, v, g[..., None], beta, state)
    same((y.reshape(expected[0].shape), last), expected)
    leaves = [q, k, v, g, beta, state]
    grads = [torch.autograd.grad(sum(r.sin().sum() for r in rs), leaves) for rs in ((y, last), expected)]
    torch.testing.assert_close(*grads)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no A_log": ("chunk_gated_delta_rule", {"use_gate_in_kernel": True}, "needs A_log; got None. Pass A_log"),
    "no sigmoid": ("chunk_kda", {"allow_neg_eigval": True}, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel"),
    "context": ("chunk_gated_delta_rule", {"cp_context": object()}, "cp_context is not computed here; got object"),
    "states": ("chunk_kda", {"return_intermediate_states": True}, "return_intermediate_states is not computed here"),
    "values": ("fused_recurrent_gated_delta_rule", {"gv": torch.zeros(1)}, "gv is not computed here"),
    "bound": (
        "chunk_kda", {"safe_gate": True, "use_gate_in_kernel": True, "lower_bound": -9.0},
        "safe_gate=True needs a lower_bound from -5 to below 0; got -9.0",
    ),
    "two layouts": (
        "chunk_gated_delta_rule", {"state_v_first": True, "transpose_state_layout": True}, "got both. Pass state",
    ),
    "chunks": ("chunk_delta_rule", {"chunk_size": 0}, "chunk_size must be a positive integer; got 0"),
    "two decays": ("chunk_simple_gla", {"g_gamma": torch.zeros(H)}, "of g and g_gamma, only one may be given"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_computed_is_refused(given: Given, name: str) -> None:
    function, changed, message = WRONG[name]
    args = {n: given[n] for n in ("q", "k", "v")} | {"g": given["gk" if "kda" in function else "g"]}
    args |= {"beta": given["beta"]} if "gla" not in function else {}
    if function == "chunk_delta_rule":
        args.pop("g")
    with pytest.raises(ArgumentError, match=message):
        getattr(fla, function)(**args, **changed)


def test_the_former_name_of_a_layout_warns(given: Given) -> None:
    q, k, v, g, beta, state = (given[n] for n in ("q", "k", "v", "g", "beta", "state"))
    with pytest.warns(DeprecationWarning, match="now named state_v_first"):
        _, last = fla.chunk_gated_delta_rule(q, k, v, g, beta, None, state.mT, True, transpose_state_layout=True)
    assert last is not None
    torch.testing.assert_close(last.mT, loop(q, k, v, g[..., None], beta, state)[1])
