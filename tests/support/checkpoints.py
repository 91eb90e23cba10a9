"""Small random transformers checkpoints of every family, as a user would save them."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

VOCAB = 97


def _configs() -> dict[str, tuple[type, object]]:
    t = transformers
    common = {"vocab_size": VOCAB, "hidden_size": 48, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    granite = {
        **common, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 24,
        "shared_intermediate_size": 40, "mamba_n_heads": 6, "mamba_d_state": 12, "mamba_n_groups": 3,
        "mamba_chunk_size": 32, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.6,
        "attention_multiplier": 0.2, "tie_word_embeddings": True, "num_local_experts": 0, "num_experts_per_tok": 0,
        "layer_types": ["mamba", "mamba", "attention"] * 2, "initializer_range": 0.2,
    }  # fmt: skip
    bamba = {
        **common, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40,
        "mamba_n_heads": 6, "mamba_d_state": 12, "mamba_n_groups": 3, "mamba_chunk_size": 32, "initializer_range": 0.2,
        "attn_layer_indices": [1], "max_position_embeddings": 512,
    }  # fmt: skip
    qwen = {
        **common, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40,
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
        "linear_value_head_dim": 20, "initializer_range": 0.2, "tie_word_embeddings": False,
    }  # fmt: skip
    mamba2 = {**common, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 16, "state_size": 12, "chunk_size": 32}
    return {
        "mamba": (t.MambaForCausalLM, t.MambaConfig(**common, num_hidden_layers=3, state_size=8)),
        "mamba-untied": (
            t.MambaForCausalLM,
            t.MambaConfig(
                **common,
                num_hidden_layers=2,
                state_size=8,
                tie_word_embeddings=False,
                use_bias=True,
                use_conv_bias=False,
            ),
        ),
        "falcon-mamba": (
            t.FalconMambaForCausalLM,
            t.FalconMambaConfig(**common, num_hidden_layers=2, state_size=8, initializer_range=0.3),
        ),
        "bamba": (t.BambaForCausalLM, t.BambaConfig(**bamba)),
        "bamba-biases": (
            t.BambaForCausalLM,
            t.BambaConfig(
                **{
                    **bamba,
                    "attn_layer_indices": [0, 3],
                    "attention_bias": True,
                    "mlp_bias": True,
                    "mamba_proj_bias": True,
                    "mamba_conv_bias": False,
                    "tie_word_embeddings": True,
                }
            ),
        ),
        "mamba2": (t.Mamba2ForCausalLM, t.Mamba2Config(**mamba2, n_groups=1, tie_word_embeddings=True)),
        "mamba2-groups": (t.Mamba2ForCausalLM, t.Mamba2Config(**mamba2, n_groups=3, use_bias=True)),
        "mamba2-limited": (t.Mamba2ForCausalLM, t.Mamba2Config(**mamba2, n_groups=1, time_step_limit=(0.3, 0.9))),
        "granite": (t.GraniteMoeHybridForCausalLM, t.GraniteMoeHybridConfig(**granite)),
        "granite-moe-rope": (
            t.GraniteMoeHybridForCausalLM,
            t.GraniteMoeHybridConfig(
                **{
                    **granite,
                    "num_local_experts": 5,
                    "num_experts_per_tok": 2,
                    "position_embedding_type": "rope",
                    "layer_types": ["mamba", "attention", "mamba", "mamba", "attention", "mamba"],
                    "attention_bias": True,
                    "tie_word_embeddings": False,
                }
            ),
        ),
        # sizes that nothing divides, ones, and what the published models leave at its default
        "mamba-odd": (
            t.MambaForCausalLM,
            t.MambaConfig(
                **common,
                num_hidden_layers=2,
                state_size=1,
                expand=3,
                time_step_rank=7,
                conv_kernel=3,
                layer_norm_epsilon=1e-3,
                residual_in_fp32=False,
            ),
        ),
        "mamba2-odd": (
            t.Mamba2ForCausalLM,
            t.Mamba2Config(
                **{**common, "hidden_size": 30},
                num_hidden_layers=2,
                num_heads=5,
                head_dim=12,
                n_groups=5,
                state_size=1,
                chunk_size=7,
                conv_kernel=2,
                use_conv_bias=False,
                layer_norm_epsilon=1e-3,
            ),
        ),
        "mamba2-one-channel-heads": (
            t.Mamba2ForCausalLM,
            t.Mamba2Config(
                **{**common, "hidden_size": 30}, num_hidden_layers=2, num_heads=60, head_dim=1, n_groups=4, state_size=9
            ),
        ),
        "granite-attention": (
            t.GraniteMoeHybridForCausalLM,
            t.GraniteMoeHybridConfig(
                **{
                    **granite,
                    "layer_types": ["attention"] * 6,
                    "num_key_value_heads": 6,
                    "position_embedding_type": "rope",
                    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
                    "num_local_experts": 3,
                    "num_experts_per_tok": 1,
                }
            ),
        ),
        "granite-odd": (
            t.GraniteMoeHybridForCausalLM,
            t.GraniteMoeHybridConfig(
                **{
                    **granite,
                    "layer_types": ["mamba"] * 5 + ["attention"],  # transformers refuses to go without one
                    "mamba_n_heads": 10,
                    "mamba_d_head": 9,
                    "hidden_size": 45,
                    "num_attention_heads": 5,
                    "num_key_value_heads": 1,
                    "mamba_n_groups": 5,
                    "rms_norm_eps": 1e-2,
                    "mamba_proj_bias": True,
                }
            ),
        ),
        "qwen3.5": (t.Qwen3_5ForCausalLM, t.Qwen3_5TextConfig(**qwen)),
        "qwen3.5-odd": (
            t.Qwen3_5ForCausalLM,
            t.Qwen3_5TextConfig(
                **{
                    **qwen,
                    "hidden_size": 45,
                    "num_attention_heads": 3,
                    "num_key_value_heads": 3,
                    "head_dim": 10,
                    "linear_num_key_heads": 3,
                    "linear_num_value_heads": 3,
                    "linear_key_head_dim": 5,
                    "linear_value_head_dim": 9,
                    "linear_conv_kernel_dim": 3,
                    "num_hidden_layers": 3,
                    "rms_norm_eps": 1e-2,
                    "attention_bias": True,
                    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                    "tie_word_embeddings": True,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 1.0},
                }
            ),
        ),
        "qwen3-next": (t.Qwen3NextForCausalLM, t.Qwen3NextConfig(**qwen, num_experts=0)),
        "bamba-whole-rotation": (
            t.BambaForCausalLM,
            t.BambaConfig(
                **{
                    **bamba,
                    "attn_layer_indices": [3],
                    "rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 1.0},
                }
            ),
        ),
    }


NAMES = tuple(name for name in _configs() if name != "mamba2-limited")  # which differs from transformers; tested apart


@functools.cache
def saved(name: str, dtype: str = "float32", shard: str | None = None) -> tuple[torch.nn.Module, Path]:
    """Return a model and the directory it was saved to."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind, config = _configs()[name]
    torch.manual_seed(sum(map(ord, name)))
    model = kind(config).eval()
    model.set_experts_implementation("eager")  # the default product of experts knows no float64
    with torch.no_grad():  # spread what is initialised to constants, so that every parameter matters
        for key, p in model.named_parameters():
            if p.ndim == 1 or "in_proj" in key or "out_proj" in key:
                p += 0.3 * torch.randn_like(p)
    model = model.to(getattr(torch, dtype))
    directory = Path(tempfile.mkdtemp(prefix="refold-checkpoint-"))
    model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
    return model, directory


def rounding_bound(reference: np.ndarray, exact: np.ndarray) -> float:
    """Allow eight times what the reference itself loses against its run in float64, and a few roundings.

    (transformers' scans compute in float32 even then, so this is the part of its error that can be known.) One largest
    error is one sample: where weights moved by one rounding move an element by 0.003, it was 0.0005.
    """
    return float(8 * np.abs(reference - exact).max() + 16 * np.finfo(np.float32).eps * np.abs(exact).max())


def prompt(length: int, rows: int = 1, seed: int = 0) -> np.ndarray:
    """Draw token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length))
