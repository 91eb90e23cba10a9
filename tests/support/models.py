"""Tiny configurations of every family, and their random parameters."""

import dataclasses

from refold.models.configs import DeltaConfig, HybridConfig, Mamba2Config, MambaConfig, Mixer2Config

MIXER = Mixer2Config(d_model=32, nheads=4, headdim=16, ngroups=2, dstate=8)
MAMBA = MambaConfig(vocab_size=64, d_model=32, nlayers=2, d_inner=64, dstate=4, dt_rank=2)
MAMBA2 = Mamba2Config(vocab_size=64, nlayers=2, mixer=MIXER)
GRANITE = HybridConfig(
    vocab_size=64, kinds=("mixer", "attention", "mixer") * 2, mixer=MIXER, nheads=4, nkvheads=2, headdim=8,
    attention_bias=False, rope_theta=None, shared_dim=32, expert_dim=16, nexperts=0, experts_per_token=0,
    embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.3, logits_divisor=2.0, max_positions=128,
    norm_eps=1e-6, tied=True,
)  # fmt: skip
QWEN = dataclasses.replace(
    GRANITE, mixer=DeltaConfig(d_model=32, nheads=4, headdim=16, ngroups=2, dstate=8, conv_bias=False), gated=True,
    rope_theta=1e4, rope_dim=4, layout="qwen3_5",
)  # fmt: skip
CONFIGS = {"mamba": MAMBA, "mamba2": MAMBA2, "granite": GRANITE, "qwen": QWEN}
