"""Accelerated models on a GPU, and the functions under other packages' names on tensors past 2^31 elements."""

import pytest
import torch

import refold
from refold import audit
from refold.compat import causal_conv1d, mamba_ssm
from refold.integrations import decoding
from refold.verify.profile import profiling, take

families = pytest.importorskip("support.families", reason="transformers is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", families.NAMES)
def test_logits_and_tokens(name):
    model = families.make(name).cuda()
    ids = torch.randint(0, families.VOCAB, (2, 40), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :7] = 0

    def run(**keywords):
        with torch.no_grad():
            tokens = model.generate(
                ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0, **keywords
            )
            return model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], tokens

    # Without a cache, since transformers' norm of Falcon-H1 mixes the rows of a batch with one.
    expected, tokens = run(**({"use_cache": False} if name == "falcon_h1-normed" else {}))
    refold.accelerate(model)
    found, same = run()
    assert (found - expected).abs().max() <= 64 * 2**-24 * expected.abs().max()
    assert torch.equal(same, tokens)


def replayed(model, ids):
    """Return the logits of the tokens from the 20th on, by a graph of one token."""
    with torch.no_grad():
        cache, token = model(ids[:, :20], use_cache=True)[families.cache_name(model)], ids[:, 20:21].clone()
        states = [(layer.conv_states[0], layer.recurrent_states[0]) for layer in cache.layers]
        kept = [tuple(s.clone() for s in pair) for pair in states]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # which makes the token
        with torch.cuda.stream(stream):
            model(token, use_cache=True, **{families.cache_name(model): cache})
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(token, use_cache=True, **{families.cache_name(model): cache}).logits
        for pair, saved in zip(states, kept, strict=True):
            for state, value in zip(pair, saved, strict=True):
                state.copy_(value)
        found = []
        for t in range(20, 24):
            token.copy_(ids[:, t : t + 1])
            graph.replay()
            found.append(logits.clone())
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "mamba2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_in_a_cuda_graph(name, dtype, rows, monkeypatch):
    """With the kernels of one token, and without."""
    model = families.make(name).to("cuda", dtype)
    refold.accelerate(model)
    ids = torch.randint(0, families.VOCAB, (rows, 24), device="cuda")
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 20:]
    bound = 64 * (2**-24 if dtype is torch.float32 else 2**-8) * expected.abs().max()
    steps, step_ = [], decoding._step_
    monkeypatch.setattr(decoding, "_step_", lambda *args, **rest: steps.append(1) or step_(*args, **rest))
    assert (replayed(model, ids) - expected).abs().max() <= bound
    assert len(steps) == (4 if rows == 1 or dtype == torch.bfloat16 else 0)  # twice two layers
    monkeypatch.setattr(decoding, "kernels", lambda x: None)
    assert (replayed(model, ids) - expected).abs().max() <= bound


@pytest.mark.parametrize(("name", "most"), [("mamba", 5), ("falcon_mamba", 5), ("mamba2", 4)])
@pytest.mark.parametrize("whole", [True, False], ids=["block", "layer"])
@pytest.mark.parametrize("wide", [True, False])
def test_a_layer_reads_one_token_in_few_launches(name, most, whole, wide, monkeypatch):
    model = families.make(name, residual_in_fp32=wide).to("cuda", torch.bfloat16)
    refold.accelerate(model)
    block = model.backbone.layers[0]
    ids, x = torch.randint(0, families.VOCAB, (1, 8), device="cuda"), torch.randn(1, 1, 48, device="cuda").bfloat16()

    def launches():
        with torch.no_grad():
            cache = model(ids, use_cache=True)[families.cache_name(model)]
            layer = block if whole else block.mixer
            with profiling():
                kernels = take("layer", lambda: layer(x, **{families.cache_name(model): cache}), torch.device("cuda"))
            return sum(kernel["count"] for kernel in kernels), layer(x, **{families.cache_name(model): cache}).dtype

    count, dtype = launches()
    assert 1 <= count <= most
    monkeypatch.setattr(decoding, "kernels", lambda x: None)
    before = launches()
    assert before[0] > 8
    assert dtype == before[1]


@pytest.mark.parametrize("case", audit.CASES, ids=lambda c: f"{c.function}-{c.name}".replace(" ", "_"))
def test_own_functions_pass_the_audit(case):
    ours = {"mamba_ssm": mamba_ssm, "causal_conv1d": causal_conv1d}.get(case.package)
    if ours is None:
        pytest.skip("refold has no function of this name")
    for dtype in case.dtypes:
        finding = audit._judge(case, getattr(ours, case.function), torch.device("cuda"), dtype)
        if "GiB free" in finding.detail:
            pytest.skip(finding.detail)
        assert finding.verdict == "right", str(finding)
