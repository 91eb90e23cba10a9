"""Models of random configurations, from checkpoints, compared with transformers': accelerated, and lean.

``PYTHONPATH=src:tests python -m support.random_models 0 200`` checks two hundred of them.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import traceback
from typing import Any

import numpy as np
import torch
import transformers as t

import refold
from refold.generate.torch import Generator
from refold.models.torch import load_checkpoint, model_for

VOCAB = 97
LEAN = ("mamba", "falcon_mamba", "mamba2", "bamba", "granitemoehybrid")
CLASSES = {
    "mamba": (t.MambaForCausalLM, t.MambaConfig),
    "falcon_mamba": (t.FalconMambaForCausalLM, t.FalconMambaConfig),
    "jamba": (t.JambaForCausalLM, t.JambaConfig),
    "zamba": (t.ZambaForCausalLM, t.ZambaConfig),
    "mamba2": (t.Mamba2ForCausalLM, t.Mamba2Config),
    "bamba": (t.BambaForCausalLM, t.BambaConfig),
    "granitemoehybrid": (t.GraniteMoeHybridForCausalLM, t.GraniteMoeHybridConfig),
    "falcon_h1": (t.FalconH1ForCausalLM, t.FalconH1Config),
    "nemotron_h": (t.NemotronHForCausalLM, t.NemotronHConfig),
    "zamba2": (t.Zamba2ForCausalLM, t.Zamba2Config),
}
FAMILIES = tuple(CLASSES)


def draw(family: str, rng: np.random.Generator) -> dict[str, Any]:
    """Draw the settings of a configuration."""

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def coin() -> bool:
        return bool(rng.integers(2))

    hidden, layers, expand = one(24, 40, 48), int(rng.integers(1, 4)), one(1, 2, 3)
    common = {
        "vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers, "tie_word_embeddings": coin(),
        "eos_token_id": None, "pad_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    heads = one(1, 2, hidden // 8)
    attention = {
        "num_attention_heads": heads, "num_key_value_heads": one(1, heads), "intermediate_size": one(16, 40),
        "initializer_range": 0.2,
    }  # fmt: skip
    states, width, rank = int(rng.integers(1, 20)), one(2, 3, 4), int(rng.integers(1, 9))
    inner = expand * hidden
    channels = one(*(n for n in (1, 3, 8, 12, 16, 24) if inner % n == 0))
    mixers = inner // channels
    groups = one(*(n for n in (1, 2, 3, 4, 5, 8) if mixers % n == 0))
    chunk, eps = one(3, 8, 16, 32), one(1e-6, 1e-5, 1e-2)
    limits = one((0.0, float("inf")), (0.0, float("inf")), (0.2, 1.1))
    mamba2 = {
        "mamba_n_heads": mixers, "mamba_d_state": states, "mamba_n_groups": groups, "mamba_chunk_size": chunk,
        "mamba_d_conv": width, "mamba_expand": expand, "mamba_conv_bias": coin(), "mamba_proj_bias": coin(),
        "mamba_d_head": channels, "rms_norm_eps": eps,
    }  # fmt: skip
    kinds = [one("mamba", "attention") for _ in range(layers)]
    kinds[rng.integers(layers)] = "mamba"
    match family:
        case "mamba" | "falcon_mamba":
            return common | {
                "state_size": states, "expand": expand, "time_step_rank": rank, "conv_kernel": width,
                "use_bias": coin(), "use_conv_bias": coin(), "layer_norm_epsilon": eps, "residual_in_fp32": coin(),
                "initializer_range": 0.2,
            }  # fmt: skip
        case "jamba":
            period = one(2, 3)
            return common | attention | {
                "num_hidden_layers": layers + 2, "attn_layer_period": period,
                "attn_layer_offset": int(rng.integers(1, period)),
                "expert_layer_period": 2, "expert_layer_offset": one(0, 1), "num_experts": one(1, 3),
                "num_experts_per_tok": 1, "mamba_d_state": states, "mamba_d_conv": width, "mamba_expand": expand,
                "mamba_dt_rank": rank, "mamba_conv_bias": coin(), "mamba_proj_bias": coin(), "rms_norm_eps": eps,
            }  # fmt: skip
        case "zamba":
            return common | attention | {
                "num_hidden_layers": layers + 4, "attn_layer_period": 3, "attn_layer_offset": 1,
                "n_mamba_heads": one(*(n for n in (1, 2, 3) if inner % n == 0)), "mamba_d_state": states,
                "mamba_d_conv": width, "mamba_expand": expand, "mamba_dt_rank": rank, "mamba_conv_bias": coin(),
                "mamba_proj_bias": coin(), "rms_norm_eps": eps,
            }  # fmt: skip
        case "mamba2":
            return common | {
                "num_heads": mixers, "head_dim": channels, "state_size": states, "n_groups": groups, "expand": expand,
                "chunk_size": chunk, "conv_kernel": width, "use_bias": coin(), "use_conv_bias": coin(),
                "time_step_limit": limits, "layer_norm_epsilon": eps,
            }  # fmt: skip
        case "bamba":
            where = [i for i, kind in enumerate(kinds) if kind == "attention"]
            return common | attention | mamba2 | {
                "num_hidden_layers": layers + 1, "attn_layer_indices": [*where, layers],
                "attention_bias": coin(), "mlp_bias": coin(),
                "max_position_embeddings": 512,
            }  # fmt: skip
        case "granitemoehybrid":
            experts = one(0, 3)
            return common | attention | mamba2 | {
                "num_hidden_layers": layers + 1, "layer_types": [*kinds, "attention"], "num_local_experts": experts,
                "num_experts_per_tok": min(experts, 2), "shared_intermediate_size": 40, "embedding_multiplier": 3.0,
                "logits_scaling": 2.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2,
                "position_embedding_type": one("rope", "nope"), "attention_bias": coin(),
            }  # fmt: skip
        case "falcon_h1":
            return common | attention | mamba2 | {
                "mamba_d_ssm": inner, "mamba_rms_norm": coin(), "mamba_norm_before_gate": coin(),
                "ssm_in_multiplier": 0.7, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "projectors_bias": coin(),
            }  # fmt: skip
        case "nemotron_h":
            del common["num_hidden_layers"]
            return common | attention | {
                "layers_block_type": [*kinds, one("mlp", "attention"), "attention"], "mamba_num_heads": mixers,
                "mamba_head_dim": channels, "ssm_state_size": states, "n_groups": groups, "chunk_size": chunk,
                "conv_kernel": width, "head_dim": 8, "use_bias": coin(), "use_conv_bias": coin(),
                "layer_norm_epsilon": eps, "expand": expand, "time_step_limit": limits,
            }  # fmt: skip
        case "zamba2":
            return common | attention | {
                "num_hidden_layers": layers + 1, "layers_block_type": [*["mamba"] * layers, "hybrid"],
                "num_key_value_heads": heads, "mamba_headdim": channels, "mamba_d_state": states,
                "mamba_ngroups": groups, "chunk_size": chunk, "n_mamba_heads": mixers, "mamba_expand": expand,
                "mamba_d_conv": width, "num_mem_blocks": 1, "use_mem_rope": coin(), "use_conv_bias": coin(),
                "add_bias_linear": coin(), "time_step_limit": limits, "rms_norm_eps": eps,
            }  # fmt: skip
    raise ValueError(family)


def make(seed: int) -> tuple[str, torch.nn.Module, str]:
    """Return a family, a model whose every parameter matters, and the folder that it was saved to and read from."""
    t.logging.set_verbosity_error()
    t.logging.disable_progress_bar()
    rng, family = np.random.default_rng(seed), FAMILIES[seed % len(FAMILIES)]
    kind, config = CLASSES[family]
    torch.manual_seed(seed)
    model = kind(config(**draw(family, rng)))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 1 or "proj" in key:
                p += 0.2 * torch.randn_like(p)
    folder = tempfile.mkdtemp(prefix="refold-random-")
    model.save_pretrained(folder)
    model = kind.from_pretrained(folder).float().eval()
    model.set_experts_implementation("eager")  # the default product of experts knows no float64
    return family, model, folder


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy whose every parameter is moved by up to a rounding."""
    near = copy.deepcopy(model)
    with torch.no_grad():
        for p in near.parameters():
            p += p * 2**-23 * (torch.rand_like(p) - 0.5)
    return near


def assert_near(found: torch.Tensor, exact: torch.Tensor, what: str, *references: torch.Tensor) -> None:
    """Allow ten times what the references lose against a run in float64, and a few roundings.

    One of them is of parameters that are `moved`: a reference alone may lose little by luck where a rounding of the
    parameters moves the result a lot.
    """
    lost = max((reference.double() - exact).abs().max() for reference in references)
    bound = 10 * lost + 64 * 2**-23 * exact.abs().max()
    error = (found.double() - exact).abs().max()
    assert error <= bound, f"{what}: an error of {float(error):.3g}; allowed are {float(bound):.3g}"


def results(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the logits of what is no padding, and the gradients of a loss of them."""
    logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    loss = (logits * torch.linspace(-1, 1, VOCAB, dtype=logits.dtype)).sum() / mask.sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {"logits": logits.detach()} | {n: g for n, g in zip(names, found, strict=True) if g is not None}


@torch.no_grad()
def decoded(model: Any, ids: torch.Tensor, steps: int, cached: bool) -> list[int]:
    """Return greedy tokens of one row."""
    mask = torch.ones_like(ids)
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, use_cache=cached, pad_token_id=0
    )
    return made[0, ids.shape[1] :].tolist()


def limited(config: Any) -> bool:
    """Tell whether step sizes are clipped, which transformers does not do with its cache."""
    return tuple(getattr(config, "time_step_limit", None) or (0.0, float("inf"))) != (0.0, float("inf"))


def check(seed: int) -> str:
    """Check the models of a seed; return the family.

    Raises:
        AssertionError: Something differs.
    """
    family, model, folder = make(seed)
    wide, rng = copy.deepcopy(model).double(), np.random.default_rng(seed + 10**6)
    length = int(rng.integers(2, 40))
    ids = torch.from_numpy(rng.integers(0, VOCAB, (3, length)))
    mask = torch.ones_like(ids)
    for row, padding in enumerate(rng.integers(0, length, 2), 1):
        mask[row, : int(padding)] = 0
    near = moved(model)
    reference, shifted, exact = (results(m, ids, mask) for m in (model, near, wide))
    # transformers does not clip with its cache, and Falcon-H1's norm mixes rows in decoding
    cached = not limited(model.config) and not getattr(model.config, "mamba_rms_norm", False)
    tokens = decoded(model, ids[:1], 12, cached)
    with torch.no_grad():
        *plain, plain_wide = (m(ids, use_cache=False).logits for m in (model, near, wide))

    if family in LEAN:
        config, params = load_checkpoint(folder)
        with torch.no_grad():
            logits, _ = model_for(config).forward(config, params, ids, kind="all")
        assert_near(logits, plain_wide, "logits of the lean model", *plain)
        generator = Generator(config, params)
        assert generator.generate(ids[:1].tolist(), 12)[0] == tokens, "tokens of the lean model"
        prompts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
        alone = [generator.generate([prompt], 6)[0] for prompt in prompts]
        assert generator.generate(prompts, 6) == alone, "tokens of rows of different lengths"

    summary = refold.accelerate(model)
    assert not summary.kept, summary.kept
    found = results(model, ids, mask)
    assert found.keys() == exact.keys()
    for name, value in found.items():
        assert_near(value, exact[name], name, reference[name], shifted[name])
    assert decoded(model, ids[:1], 12, True) == tokens, "tokens of the accelerated model"
    if family in ("mamba", "falcon_mamba", "mamba2"):  # no attention layer that sees other documents
        cut = int(rng.integers(1, length))
        offsets = torch.tensor([0, cut, length], dtype=torch.int32)
        with torch.no_grad():
            parts = ids[:1].split([cut, length - cut], 1)
            *apart, apart_wide = (torch.cat([m(part).logits for part in parts], 1) for m in (model, near, wide))
            packed = model(ids[:1], cu_seq_lens_q=offsets, use_cache=False).logits
        assert_near(packed, apart_wide, "documents of a row", *apart)
    return family


def main() -> None:
    """Check the seeds from the first argument to the second."""
    failed = 0
    for seed in range(*map(int, sys.argv[1:3])):
        try:
            print(seed, check(seed), "right", flush=True)
        except Exception as error:
            failed += 1
            print(seed, FAMILIES[seed % len(FAMILIES)], type(error).__name__, str(error)[:300], flush=True)
            if "-v" in sys.argv:
                traceback.print_exc()
    print(f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
