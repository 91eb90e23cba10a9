"""The same operators as a local repository of the package ``kernels``, for ``KernelConfig(use_local_kernel=True)``.

The package replaces functions of a modeling file. This changes all models of that file in the process, and cannot be
undone; `refold.accelerate` changes one model and can be undone. The functions know only their arguments. They do not
know limits of step sizes in decoding, a state to continue from in Mamba-1, or documents that the model drops.
Gates stay what the modeling file makes of them: the functions get log decays and strengths.
"""

from __future__ import annotations

from pathlib import Path

from refold.errors import ArgumentError

_BOTH = ("causal_conv1d_fn", "causal_conv1d_update", "selective_state_update")
_MAMBA1 = dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), (*_BOTH, "selective_scan_fn"))
_MAMBA2 = dict.fromkeys(
    ("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"), (*_BOTH, "mamba_chunk_scan_combined")
)
_CONVOLUTIONS = _BOTH[:2]
_GATED = dict.fromkeys(
    (
        "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text",
        "lara_mini", "olmo_hybrid",
    ),
    (*_CONVOLUTIONS, "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
)  # fmt: skip
_KDA = dict.fromkeys(
    ("kimi_linear", "glm5_next", "glm5_next_text", "bailing_hybrid"),
    (*_CONVOLUTIONS, "chunk_kda", "fused_recurrent_kda"),
)
FUNCTIONS = _MAMBA1 | _MAMBA2 | _GATED | _KDA
"""``model_type`` -> the functions of its modeling file that have a layer here."""


def kernel_mapping(model_type: str) -> dict[str, str]:
    """Map a model's functions for ``transformers.KernelConfig``: name of a function -> ``"<folder>:<layer>"``.

    The fused functions of a whole layer (``mamba_inner_fn``, ``mamba_split_conv1d_scan_combined``) are left out: they
    take the weights of projections and never call them. The package ``kernels`` knows no CPU in a ``KernelConfig``.

    Args:
        model_type: As in the model's configuration, such as ``"mamba2"``.

    Raises:
        ArgumentError: There is nothing for that kind of model.

    Example:
        >>> mapping = kernel_mapping("mamba2")
        >>> config = KernelConfig(mapping, use_local_kernel=True)
        >>> model = AutoModelForCausalLM.from_pretrained(path, use_kernels=True, kernel_config=config)
    """
    if model_type not in FUNCTIONS:
        raise ArgumentError(f"kernel_mapping: model_type must be one of {', '.join(FUNCTIONS)}; got {model_type!r}.")
    return {name: f"{Path(__file__).parent}:{name}" for name in FUNCTIONS[model_type]}
