"""`refold.accelerate` on models with gated DeltaNet: Qwen3-Next, Qwen3.5 and its mixture of experts."""

import copy

import pytest
import torch
import transformers

import refold

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers.*", "ignore::FutureWarning:transformers.*")

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
}


@pytest.fixture(params=MODELS)
def both(request):
    """A model as transformers made it, and an accelerated copy."""
    config, kind, more = MODELS[request.param]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**SIZES, **more)).float().eval()
    ours = copy.deepcopy(model)
    summary = refold.accelerate(ours)
    assert len(summary.replaced) == 3
    assert not summary.kept
    return model, ours, summary


def tokens(length=70):
    return torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(1))


def test_prefill_and_undo(both):
    model, ours, summary = both
    with torch.no_grad():
        expected = model(tokens()).logits
        torch.testing.assert_close(ours(tokens()).logits, expected, rtol=0, atol=2e-6)
        summary.undo()
        assert torch.equal(ours(tokens()).logits, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_neither_writes_nor_decays(both, side):
    _, ours, _ = both
    x, mask = tokens(), torch.ones(2, 70, dtype=torch.long)
    real = slice(9, None) if side == "left" else slice(None, -9)
    mask[0] = 0
    mask[0, real] = 1
    with torch.no_grad():
        padded = ours(x, attention_mask=mask, use_cache=True)
        alone = ours(x[:1, real], use_cache=True)
    torch.testing.assert_close(padded.logits[:1, real], alone.logits, rtol=0, atol=2e-6)
    states = [out.past_key_values.layers[0].recurrent_states[0][:1] for out in (padded, alone)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)


def test_generate(both):
    model, ours, _ = both
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    for given in ({}, {"attention_mask": mask}):
        found, expected = (m.generate(tokens(20), max_new_tokens=24, do_sample=False, **given) for m in (ours, model))
        assert torch.equal(found, expected)


def test_documents_of_a_pack_do_not_see_each_other(both):
    _, ours, _ = both
    layer = next(m for m in ours.modules() if type(m).__name__.endswith("GatedDeltaNet"))
    x = torch.randn(1, 70, 32, generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([0, 30, 70], dtype=torch.int32)
    with torch.no_grad():
        packed = layer(x, cu_seq_lens_q=offsets)
        alone = torch.cat([layer(x[:, :30]), layer(x[:, 30:])], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-6)


def test_gradients(both):
    model, ours, _ = both
    for one in (model, ours):
        one.train()(tokens(), labels=tokens()).loss.backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), ours.parameters(), strict=True) if p.grad is not None]
    # Gradients of some gates are as small as the roundings of the others.
    largest = max(expected.abs().max() for expected, _ in pairs)
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=float(1e-6 * largest))
