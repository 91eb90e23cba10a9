"""A small random model of every family that refold accelerates."""

from __future__ import annotations

import inspect

import torch
import transformers as t

VOCAB, WIDTH = 97, 48
_COMMON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
_ATTENTION = {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40}
_MAMBA1 = {**_COMMON, "num_hidden_layers": 2, "state_size": 8}
_HEADS = {"mamba_n_heads": 6, "mamba_d_state": 12, "mamba_n_groups": 3, "mamba_chunk_size": 16}


def _configs() -> dict[str, tuple[type, object]]:
    common, attention = _COMMON, _ATTENTION
    return {
        "mamba": (t.MambaForCausalLM, t.MambaConfig(**_MAMBA1, use_bias=True)),
        "falcon_mamba": (t.FalconMambaForCausalLM, t.FalconMambaConfig(**_MAMBA1)),
        "jamba": (t.JambaForCausalLM, t.JambaConfig(
            **common, **attention, num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1,
            expert_layer_period=2, expert_layer_offset=1, num_experts=3, num_experts_per_tok=2, mamba_d_state=8,
            mamba_dt_rank=5, mamba_proj_bias=True)),
        "zamba": (t.ZambaForCausalLM, t.ZambaConfig(
            **common, **attention, num_hidden_layers=5, attn_layer_period=3, attn_layer_offset=1, n_mamba_heads=2,
            mamba_d_state=8, mamba_dt_rank=5, tie_word_embeddings=False)),
        "mamba2": (t.Mamba2ForCausalLM, t.Mamba2Config(
            **common, num_hidden_layers=2, num_heads=6, head_dim=16, state_size=12, n_groups=3, chunk_size=16)),
        "bamba": (t.BambaForCausalLM, t.BambaConfig(
            **common, **attention, **_HEADS, num_hidden_layers=2, attn_layer_indices=[1], mamba_conv_bias=False)),
        "granitemoehybrid": (t.GraniteMoeHybridForCausalLM, t.GraniteMoeHybridConfig(
            **common, **attention, **_HEADS, num_hidden_layers=2, shared_intermediate_size=40, num_local_experts=3,
            num_experts_per_tok=2, layer_types=["mamba", "attention"])),
        "falcon_h1": (t.FalconH1ForCausalLM, t.FalconH1Config(
            **common, **attention, **_HEADS, num_hidden_layers=2, mamba_d_ssm=96, mamba_d_head=16,
            ssm_in_multiplier=0.7, ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7])),
        "falcon_h1-normed": (t.FalconH1ForCausalLM, t.FalconH1Config(
            **common, **attention, **_HEADS, num_hidden_layers=1, mamba_d_ssm=96, mamba_d_head=16,
            mamba_rms_norm=True)),
        "nemotron_h": (t.NemotronHForCausalLM, t.NemotronHConfig(
            **common, **attention, layers_block_type=["mamba", "attention"], mamba_num_heads=6, mamba_head_dim=16,
            ssm_state_size=12, n_groups=3, chunk_size=16, head_dim=8)),
        "zamba2": (t.Zamba2ForCausalLM, t.Zamba2Config(
            **common, **attention, num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_headdim=16, mamba_d_state=12, mamba_ngroups=3, chunk_size=16, n_mamba_heads=6, num_mem_blocks=1,
            use_mem_rope=True)),
    }  # fmt: skip


NAMES = tuple(_configs())
"""Families of Mamba."""

_GATED = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MANY = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
_PER_KEY = {"linear_num_heads": 4, "linear_head_dim": 8}
_LATENT = {
    "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 40, "kv_lora_rank": 12,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, **_EXPERTS,
}  # fmt: skip
_LINEAR, _FULL = "linear_attention", "full_attention"
_OTHERS = {
    "qwen3_next": ("Qwen3Next", "", {**_ATTENTION, **_GATED, **_MANY, "head_dim": 8}, _FULL),
    "qwen3_5": ("Qwen3_5", "Text", {**_ATTENTION, **_GATED, "head_dim": 8}, _FULL),
    "qwen3_5_moe": ("Qwen3_5Moe", "Text", {**_ATTENTION, **_GATED, **_MANY, "head_dim": 8}, _FULL),
    "qwen4_exp": ("Qwen4Exp", "Text", {
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, **_GATED, **_MANY, "hc_count": 2,
        "hc_lowrank": 8, "output_gate_type": "sigmoid", "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 256, "indexer_compress_ratio": 4}, _FULL),
    "lara_mini": ("LaraMini", "", {
        **_ATTENTION, **_GATED, **_MANY, "head_dim": 8, "sliding_window": 64}, "sliding_attention"),
    "olmo_hybrid": ("OlmoHybrid", "", {**_ATTENTION, **_GATED}, _FULL),
    "kimi_linear": ("KimiLinear", "", {
        **_LATENT, **_PER_KEY, "qk_rope_head_dim": 8, "num_local_experts": 4, "n_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"]}, _FULL),
    "glm5_next": ("Glm5Next", "Text", {
        **_LATENT, **_PER_KEY, "q_lora_rank": 12, "n_routed_experts": 4, "hc_mult": 2, "index_n_heads": 2,
        "index_head_dim": 8, "index_topk": 256, "index_kpool": 4, "mlp_layer_types": ["dense", "sparse"]}, _FULL),
    "bailing_hybrid": ("BailingHybrid", "", {
        **_LATENT, "qk_rope_head_dim": 8, "head_dim": 8, "num_local_experts": 4, "first_k_dense_replace": 1}, _FULL),
    "minimax": ("MiniMax", "", {
        **_ATTENTION, "head_dim": 8, "block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, _FULL),
}  # fmt: skip
OTHERS = tuple(name for name, (kind, *_) in _OTHERS.items() if hasattr(t, f"{kind}Config"))
"""Families of delta rules, and of lightning attention, that the installed transformers has."""
EVERY = NAMES + OTHERS


def _config(name: str) -> tuple[type, object]:
    if name not in OTHERS:
        return _configs()[name]
    kind, text, sizes, attention = _OTHERS[name]
    sizes = {**_COMMON, "num_hidden_layers": 2, "layer_types": [_LINEAR, attention], **sizes}
    if name == "minimax":  # whose cache asks its first layer how many tokens it holds
        sizes["layer_types"] = [attention, _LINEAR]
    config = getattr(t, f"{kind}{text}Config")(**sizes)
    if name == "glm5_next":  # which comes with eyes only
        eyes = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 48, "intermediate_size": 16}
        config = t.Glm5NextConfig(text_config=config, vision_config={**eyes, "projection_intermediate_size": 16})
        return t.Glm5NextForConditionalGeneration, config
    return getattr(t, f"{kind}ForCausalLM"), config


def make(name: str, **changed: object) -> torch.nn.Module:
    """Return a model whose every parameter matters."""
    t.logging.set_verbosity_error()
    kind, config = _config(name)
    for key, value in changed.items():
        setattr(config, key, value)
    torch.manual_seed(sum(map(ord, name)))
    model = kind(config).eval()
    model.set_experts_implementation("eager")  # the default product of experts knows no float64
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 1 or "proj" in key or "embed" in key:
                p += 0.2 * torch.randn_like(p)
    return model


def cache_name(module):
    """Return the name under which a model, block or layer takes its cache, and a model's output holds it."""
    names = inspect.signature(module.forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in names)


def ids(rows=1, tokens=23):
    """Return tokens, ``(rows, tokens)``."""
    return torch.randint(1, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def qwen():
    """Return a Qwen3.5 model: gated delta rule and gated attention."""
    torch.manual_seed(0)
    heads = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    }
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    kinds = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(vocab_size=VOCAB, **heads, **sizes, **kinds))
