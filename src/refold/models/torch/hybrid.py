"""Granite 4, Bamba and Qwen3.5: Mamba-2 or the delta rule, and attention, each followed by an MLP or experts.

The state has the states of the mixers, and a key-value cache of some capacity, which is written in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refold.models.configs import DeltaConfig, HybridConfig
from refold.models.counts import check_state
from refold.models.torch import delta, mamba2, steps
from refold.models.torch.heads import enter, leave
from refold.models.torch.layers import (
    Rows,
    Tree,
    add_norm,
    embed,
    init_state,
    linear,
    output,
    rms_norm,
    rotate,
    told,
    wide,
)
from refold.ops.torch.cuts import whole

QUERY_BLOCK = 1024
"""Queries whose scores against what was read before are held at one time."""


def _mixer(config: HybridConfig) -> ModuleType:
    """Choose the module that computes the layers that are not attention."""
    return delta if isinstance(config.mixer, DeltaConfig) else mamba2


def grow_state(state: Tree, capacity: int) -> Tree:
    """Return the state with room for ``capacity`` tokens in its key-value cache."""
    missing = max(0, capacity - state["k"].shape[2])
    return {**state, **{name: F.pad(state[name], (0, 0, 0, 0, 0, missing)) for name in ("k", "v")}}


def forward(
    config: HybridConfig, params: Tree, tokens: Tensor, state: Tree | None = None, *,
    lengths: Sequence[int] | None = None, kind: str = "last", chunk_size: int | None = None, group: Any = None,
) -> tuple[Tensor, Tree]:  # fmt: skip
    """Read ``tokens (b, t)`` on top of ``state``, whose cache must have room; otherwise as ``stack.forward``."""
    c = config
    rows = Rows.of(tokens, lengths, None if group is None else told(group, tokens))
    if state is None:
        dtype = params["embedding"].dtype
        state = init_state(c, rows.batch, dtype, device=tokens.device, capacity=rows.length)
    check_state(c, rows.batch, state)
    past = state["length"].tolist()
    hidden, mixed = embed(params, rows.tokens) * c.embedding_multiplier, None
    windows, states = list(state["conv"]), list(state["ssm"])
    seen = {"mixer": 0, "attention": 0}
    for common, kind_ in zip(params["layers"], c.kinds, strict=True):
        i = seen[kind_]
        seen[kind_] += 1
        weights = params[kind_][i]
        hidden, normed = add_norm(hidden, mixed, common["norm"], c.norm_eps, c.residual_multiplier)
        if kind_ == "mixer":
            mixed, windows[i], states[i] = _mixer(c).mixer(
                c.mixer, weights, normed, windows[i], states[i], rows.offsets, chunk_size, rows.group
            )
        else:
            mixed = _attention(c, weights, normed, rows, past, state["k"][i], state["v"][i])
        hidden, normed = add_norm(hidden, mixed, common["mlp_norm"], c.norm_eps, c.residual_multiplier)
        mixed = _mlp(c, common, normed)
        if c.nexperts:
            mixed = mixed + _experts(c, common, normed, normed.numel() // c.d_model * c.experts_per_token <= c.nexperts)
    _, normed = add_norm(hidden, mixed, params["norm"], c.norm_eps, c.residual_multiplier)
    mixed_states = {"conv": torch.stack(windows), "ssm": torch.stack(states)} if windows else {}
    after = {**state, **rows.after(state, **mixed_states)}
    out = output(params, normed, rows, kind)
    return out if kind == "hidden" else out / c.logits_divisor, after


def step_(config: HybridConfig, params: Tree, token: Tensor, state: Tree, *, active: Tensor | None = None) -> Tensor:
    """Read one token per row; the cache must have room. Arguments and results as in ``stack.step_``."""
    c = config
    check_state(c, len(token), state)
    hidden = embed(params, token) * c.embedding_multiplier
    seen = {"mixer": 0, "attention": 0}
    for common, kind in zip(params["layers"], c.kinds, strict=True):
        i = seen[kind]
        seen[kind] += 1
        weights = params[kind][i]
        if kind == "mixer":
            window, ssm = state["conv"][i], state["ssm"][i]
            _mixer(c).mixer_step_(
                c.mixer, weights, hidden, common["norm"], c.norm_eps, window, ssm, active, c.residual_multiplier
            )
        else:
            _attention_step_(c, weights, hidden, common["norm"], state["k"][i], state["v"][i], state["length"])
        _feed_(c, common, hidden)
    state["length"] += 1 if active is None else active
    weight = params.get("head", params["embedding"])
    return steps.project(hidden, weight, norm=params["norm"], eps=c.norm_eps) / c.logits_divisor


def _feed_(config: HybridConfig, common: Tree, hidden: Tensor) -> None:
    """Add the answers of the MLP and of the experts to the stream of one token per row."""
    c = config
    normed = rms_norm(hidden, common["mlp_norm"], c.norm_eps) if c.nexperts else None
    if "mlp_in" in common:
        fed = steps.project(hidden, common["mlp_in"], norm=common["mlp_norm"], eps=c.norm_eps)
    else:
        fed = torch.cat(_project_all(common, ("mlp_gate", "mlp_up"), hidden, common["mlp_norm"], c.norm_eps), -1)
    scale = c.residual_multiplier
    out, bias = common["mlp_out"], common.get("mlp_out_bias")
    steps.add_projected_(hidden, fed, out, bias, gated=True, scale=scale, heads=c.mlp_channels)
    if normed is not None:
        few = len(hidden) * c.experts_per_token <= c.nexperts
        hidden.add_(_experts(c, common, normed, few or hidden.is_cuda), alpha=scale)  # a CUDA graph cannot count


def _project_all(weights: Tree, names: Sequence[str], hidden: Tensor, norm: Tensor, eps: float) -> list[Tensor]:
    biases = [weights.get(f"{name}_bias") for name in names]
    return steps.project_all(hidden, [weights[name] for name in names], biases, norm=norm, eps=eps)


def _heads(
    config: HybridConfig, weights: Tree, products: Iterable[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Split queries, keys and values by heads; return them with the gate of the answers."""
    heads = (config.nheads, config.nkvheads, config.nkvheads)
    q, k, v = (x.unflatten(-1, (n, -1)) for x, n in zip(products, heads, strict=True))
    if not config.gated:
        return q, k, v, None
    q, gate = q.chunk(2, -1)
    q, k = (rms_norm(x, weights[n], config.norm_eps).to(x.dtype) for x, n in ((q, "q_norm"), (k, "k_norm")))
    return q, k, v, gate.flatten(-2).sigmoid()


def _attention(
    config: HybridConfig, weights: Tree, u: Tensor, rows: Rows, past: list[int], k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Attend, row by row, to what the caches hold and to the row itself, causally; the caches get the row's keys."""
    u, weights = enter(config.attention_heads, u, weights)
    products = (linear(u, weights[name], weights.get(f"{name}_bias")) for name in ("q", "k", "v"))
    q, k, v, gate = _heads(config, weights, products)
    answers = []
    for r, (query, key, value) in enumerate(zip(*(rows.apart(a) for a in (q, k, v)), strict=True)):
        before = past[r]
        position = before + rows.positions(len(key), u.device)
        query, key = (rotate(a, position, config.rope_theta, config.rope_dim) for a in (query, key))
        if rows.group is not None:
            key, value = (whole(rows.group, a[None])[0] for a in (key, value))
        after = before + len(key)
        k_cache[r, before:after], v_cache[r, before:after] = key.detach(), value.detach()
        if before:
            key, value = torch.cat([k_cache[r, :before], key]), torch.cat([v_cache[r, :before], value])
        parts, ends = zip(*rows.runs(len(query)), strict=True)
        runs = zip(query.split(parts), (before + end for end in ends), strict=True)
        answers.append(torch.cat([_attend(config, run, key[:end], value[:end]) for run, end in runs]))
    y = rows.joined(answers).flatten(-2)
    return leave(config.attention_heads, y if gate is None else y * gate, weights["o"], weights.get("o_bias"))


def _attend(config: HybridConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``(t, heads, e)`` for queries that are the last ``t`` of the keys ``(s, kv heads, e)``."""
    q, k, v = (a.movedim(0, 1)[None] for a in (q, k, v))
    attend = partial(
        F.scaled_dot_product_attention,
        scale=config.attention_multiplier,
        enable_gqa=config.nheads != config.nkvheads,
    )
    before = k.shape[2] - q.shape[2]
    if not before:
        y = attend(q, k, v, is_causal=True)
    else:
        parts, begin = [], before
        for block in q.split(QUERY_BLOCK, 2):
            end = begin + block.shape[2]
            seen = torch.arange(end, device=q.device) <= torch.arange(begin, end, device=q.device)[:, None]
            parts.append(attend(block, k[:, :, :end], v[:, :, :end], attn_mask=seen))
            begin = end
        y = torch.cat(parts, 2)
    return y[0].movedim(1, 0)


def _attention_step_(
    config: HybridConfig, weights: Tree, hidden: Tensor, norm: Tensor, k_cache: Tensor, v_cache: Tensor, length: Tensor
) -> None:
    """Attend from one token per row. A row that is not active writes where its next token will write."""
    c = config
    products = _project_all(weights, ("q", "k", "v"), hidden, norm, c.norm_eps)
    q, k, v, gate = _heads(c, weights, products)
    y = steps.attend_(
        q, k, v, k_cache, v_cache, length, scale=c.attention_multiplier, theta=c.rope_theta, rope_dim=c.rope_dim
    )
    y = y if gate is None else y * gate
    out, bias = weights["o"], weights.get("o_bias")
    steps.add_projected_(hidden, y, out, bias, scale=c.residual_multiplier, heads=c.attention_heads)


def _mlp(config: HybridConfig, common: Tree, x: Tensor) -> Tensor:
    x, common = enter(config.mlp_channels, x, common)
    if "mlp_in" in common:
        gate, up = linear(x, common["mlp_in"]).chunk(2, -1)
    else:
        gate, up = (linear(x, common[name], common.get(f"{name}_bias")) for name in ("mlp_gate", "mlp_up"))
    return leave(config.mlp_channels, F.silu(gate) * up, common["mlp_out"], common.get("mlp_out_bias"))


def _experts(config: HybridConfig, common: Tree, x: Tensor, gather: bool) -> Tensor:
    """Send each token to its ``experts_per_token`` best experts and sum their answers by the softmax of the scores.

    Tokens ``gather`` their experts' weights, which suits few; else they are sorted by expert, and each expert reads its
    own.
    """
    c = config
    tokens = x.flatten(0, -2)
    top = c.experts_per_token
    scores, chosen = linear(tokens, common["router"]).to(wide(x.dtype)).topk(top)  # (m, k)
    share = scores.softmax(-1).to(x.dtype)
    if gather:
        hidden = torch.einsum("mi,mkoi->mko", tokens, common["expert_in"][chosen])
        gate, up = hidden.chunk(2, -1)
        answer = torch.einsum("mkf,mkif->mki", F.silu(gate) * up, common["expert_out"][chosen])
        return torch.einsum("mk,mki->mi", share, answer).view_as(x)
    order = chosen.flatten().argsort(stable=True)
    sizes = chosen.flatten().bincount(minlength=c.nexperts).tolist()
    answers = []
    for part, weight_in, weight_out in zip(
        tokens[order // top].split(sizes), common["expert_in"], common["expert_out"], strict=True
    ):
        gate, up = linear(part, weight_in).chunk(2, -1)
        answers.append(linear(F.silu(gate) * up, weight_out))
    shared = torch.cat(answers) * share.flatten()[order][:, None]
    return torch.zeros_like(tokens).index_add(0, order // top, shared).view_as(x)
