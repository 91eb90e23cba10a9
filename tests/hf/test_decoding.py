"""One token of an accelerated Mamba layer in three or four launches equals its ordinary forward.

Without a GPU the kernels are interpreted, in a process of its own.
"""

import copy
import os
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")
import refold
from refold.integrations import decoding, graphs, hybrids, parts
from refold.ops import backends
from refold.ops.testing.frameworks import interpret_quickly
from support.families import VOCAB, cache_name, make
from support.interpreted import ONCE_OR_ALL, passed
from support.recorder import record

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpret_quickly()
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
here = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs interpreted, in a process of its own")
pytestmark = pytest.mark.rows(12)
SMALL = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "n_groups": 2, "state_size": 4}
ODD = {"use_bias": True, "use_conv_bias": False, "residual_in_fp32": False, "time_step_limit": (0.6, 0.9)}
CASES = [  # family, rows, dtype, changes, layers that have the form
    ("mamba2", 1, torch.float32, SMALL, 2),
    ("mamba2", 1, torch.float32, {**SMALL, **ODD}, 2),
    ("mamba2", 1, torch.bfloat16, {**SMALL, "residual_in_fp32": False}, 2),
    ("mamba2", 3, torch.bfloat16, {}, 2),
    ("bamba", 1, torch.float32, {}, 1),
    ("bamba", 3, torch.bfloat16, {"mamba_proj_bias": True}, 1),
    ("granitemoehybrid", 1, torch.float32, {}, 1),
    ("nemotron_h", 1, torch.float32, {}, 1),
    ("zamba2", 1, torch.float32, {}, 3),
    ("falcon_h1", 1, torch.float32, {}, 2),
    ("falcon_h1", 3, torch.bfloat16, {}, 2),
    ("falcon_h1-normed", 1, torch.float32, {}, 0),
    ("mamba", 1, torch.float32, {}, 2),
    ("mamba", 3, torch.bfloat16, {"residual_in_fp32": False, "use_conv_bias": False}, 2),
    ("falcon_mamba", 1, torch.float32, {}, 2),
    ("falcon_mamba", 3, torch.bfloat16, {}, 2),
    ("jamba", 1, torch.float32, {}, 2),
    ("jamba", 3, torch.bfloat16, {}, 2),
    ("mamba2", 3, torch.float32, SMALL, 0),  # the kernels take several rows in 16 bits only
]


@ONCE_OR_ALL
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is that process, or there is a GPU")
def test_interpreted(rows):
    passed(__file__, "-x", "-m", rows)


def use(monkeypatch, kernels):
    """Let layers, norms and attention run on these kernels, or on none."""
    for module in (decoding, parts):
        monkeypatch.setattr(module, "kernels", lambda x: kernels)


@pytest.fixture
def fused(monkeypatch):
    """Let the kernels run on this device; return the dtypes of the results that they gave.

    Where they are interpreted, the operators run in PyTorch: to interpret or compile theirs takes longer. A program
    then owns more outputs: its own sizes are those of tests/cpu/models/test_step_kernels.py.
    """
    from refold.models.torch import kernels

    if INTERPRETED:
        monkeypatch.setattr(backends, "_installed", lambda package: package == "torch")
        monkeypatch.setattr(kernels, "_row_config", lambda size: (16, 2))

    steps, step_ = [], decoding._step_

    def counted(*args, **keywords):
        y = step_(*args, **keywords)
        steps.append(y.dtype)
        return y

    use(monkeypatch, kernels)
    monkeypatch.setattr(decoding, "_step_", counted)
    return steps


def decode(model, ids, prompt=6):
    """Read a prompt and then one token after the other; return what came of the tokens, and what the cache holds."""
    with torch.no_grad():
        cache, found = model(ids[:, :prompt], use_cache=True)[cache_name(model)], []
        for token in ids[:, prompt:].split(1, 1):
            out = model(token, use_cache=True, output_hidden_states=True, **{cache_name(model): cache})
            found += [out.logits, *out.hidden_states]
    for layer in cache.layers:
        if getattr(layer, "conv_states", {}).get(0) is not None:
            found += [layer.conv_states[0][..., 1:].clone(), layer.recurrent_states[0].clone()]
    return found


def compare(model, ids, expected, exact):
    """Allow four times what the ordinary forward loses against float64, and a few roundings; dtypes are the same."""
    eps = torch.finfo(next(model.parameters()).dtype).eps
    found = decode(model, ids)
    assert len(found) == len(expected)
    for a, b, c in zip(found, expected, (value.to(ids.device) for value in exact), strict=True):
        assert a.dtype == b.dtype
        bound = 4 * (b.double() - c).abs().max() + 16 * eps * c.abs().max()
        assert (a.double() - c).abs().max() <= bound, (float((a.double() - c).abs().max()), float(bound))


def ordinary(model, ids, monkeypatch):
    """Return the results of `decode` where no kernel runs, and the same in float64."""
    with monkeypatch.context() as patch:
        use(patch, None)
        return decode(model, ids), decode(copy.deepcopy(model).double().cpu(), ids.cpu())


def prepared(name, rows, dtype, changes, tokens=1):
    model = make(name, **changes).to(DEVICE, dtype)
    refold.accelerate(model)
    return model, torch.randint(0, VOCAB, (rows, 6 + tokens), device=DEVICE)


@pytest.mark.slow
@here
@pytest.mark.parametrize(("name", "rows", "dtype", "changes", "layers"), CASES)
def test_equals_the_ordinary_forward(name, rows, dtype, changes, layers, fused, monkeypatch):
    model, ids = prepared(name, rows, dtype, changes)
    results = ordinary(model, ids, monkeypatch)
    assert not fused
    compare(model, ids, *results)
    assert len(fused) == layers


@here
@pytest.mark.parametrize("bug", ["the wrong columns", "the block's input is overwritten"])
def test_a_planted_bug_is_found(bug, fused, monkeypatch):
    model, ids = prepared("mamba2", 1, torch.float32, SMALL)
    kernels, results = decoding.kernels(ids), ordinary(model, ids, monkeypatch)
    project = kernels.project

    def planted(x, weight, bias, norm, eps, group, gated, convolution=None, onto=None, out=None, **rest):
        if bug == "the wrong columns" and convolution is not None:
            window, *others = convolution
            convolution = (window.as_strided(window.shape, window.stride(), window.storage_offset() - 1), *others)
        if bug == "the block's input is overwritten" and onto is not None:
            out = onto
        return project(x, weight, bias, norm, eps, group, gated, convolution, onto, out=out, **rest)

    monkeypatch.setattr(kernels, "project", planted)
    with pytest.raises(AssertionError):
        compare(model, ids, *results)
    assert fused


@here
@pytest.mark.parametrize("bug", ["no norms", "norms without weights", "the bias is left out", "z and x change places"])
def test_a_planted_bug_of_a_selective_scan_is_found(bug, fused, monkeypatch):
    model, ids = prepared("jamba", 1, torch.float32, {})
    kernels, results = decoding.kernels(ids), ordinary(model, ids, monkeypatch)
    scan_ = kernels.selective_scan_

    def planted(x, dt, B, C, z, dt_proj, dt_bias, A_log, D, state, active, eps, norms):
        if bug.startswith("no"):
            eps, norms = None if bug == "no norms" else eps, None
        elif bug.startswith("the"):
            dt_bias = torch.zeros_like(dt_bias)
        else:
            x, z = z, x
        return scan_(x, dt, B, C, z, dt_proj, dt_bias, A_log, D, state, active, eps, norms)

    monkeypatch.setattr(kernels, "selective_scan_", planted)
    with pytest.raises(AssertionError):
        compare(model, ids, *results)
    assert fused


@here
def test_forwards_take_turns_on_one_cache(fused, monkeypatch):
    """The kernels, the ordinary forward, transformers' own, and a piece of two tokens."""
    model = make("mamba2", **SMALL).to(DEVICE)
    ids = torch.randint(0, VOCAB, (1, 14), device=DEVICE)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 4:]
        exact = copy.deepcopy(model).double()(ids, use_cache=False).logits[:, 4:]
        summary, found = refold.accelerate(model, graphs=False), []
        cache = model(ids[:, :4], use_cache=True)[cache_name(model)]
        t = 4
        for way in ("kernels", "kernels", "own", "kernels", "ordinary", "kernels", "own", "piece", "kernels"):
            tokens, before = 2 if way == "piece" else 1, len(fused)
            if way == "own":
                summary.undo()
            with monkeypatch.context() as patch:
                if way == "ordinary":
                    use(patch, None)
                found.append(model(ids[:, t : t + tokens], use_cache=True, **{cache_name(model): cache}).logits)
            assert len(fused) - before == (2 if way == "kernels" else 0)
            if way == "own":
                summary = refold.accelerate(model, graphs=False)
            t += tokens
    error = (torch.cat(found, 1).double() - exact).abs().max()
    assert error <= 4 * (expected.double() - exact).abs().max() + 64 * 2**-24 * exact.abs().max()


class Adapted(nn.Linear):
    """A linear layer with more than its weight."""

    def forward(self, x):
        return super().forward(x) + 1


class Hidden(Tensor):
    """A weight whose numbers are another matter."""


def hook(*args):
    return None


def change(model, mixer, way):
    """Make something of a layer, or around it, unusual; return a context and arguments for its call."""
    keywords = {}
    if way == "adapter":
        mixer.out_proj = Adapted(*reversed(mixer.out_proj.weight.shape), bias=False).to(DEVICE)
    elif way.startswith("hook"):
        getattr(mixer, way.split()[1]).register_forward_hook(hook)
    elif way == "forward":
        mixer.in_proj.forward = mixer.in_proj.forward
    elif way == "subclass":
        mixer.in_proj.weight = nn.Parameter(mixer.in_proj.weight.detach().as_subclass(Hidden))
    elif way == "activation":
        mixer.activation, mixer.act = "gelu", nn.GELU()
    elif way == "autocast":
        return torch.autocast(DEVICE, torch.bfloat16), keywords
    elif way == "mode":
        return torch.utils.flop_counter.FlopCounterMode(display=False), keywords
    elif way == "documents":
        keywords["cu_seq_lens_q"] = torch.tensor([0, 1], device=DEVICE)
    elif way == "mask":
        keywords["attention_mask"] = torch.ones(1, 1, device=DEVICE)
    elif way == "global hook":
        return nn.modules.module.register_module_forward_hook(hook), keywords
    elif way == "gradients":
        return torch.enable_grad(), keywords
    return nullcontext(), keywords


WAYS = (
    "adapter", "hook in_proj", "hook out_proj", "hook conv1d", "hook norm", "forward", "subclass", "activation",
    "autocast", "mode", "documents", "mask", "global hook", "gradients", "past", "strides", "float64", "two tokens",
    "no cache",
)  # fmt: skip


@here
@pytest.mark.parametrize("way", [None, *WAYS])
def test_whatever_is_unusual_runs_the_ordinary_forward(way, fused, monkeypatch):
    model, ids = prepared("mamba2", 1, torch.float64 if way == "float64" else torch.float32, SMALL)
    block, name = model.backbone.layers[0], cache_name(model)
    with torch.no_grad():
        cache = model(ids, use_cache=True)[name]
        held = cache.layers[0]
        if way == "past":
            cache.layers[0].activate_past_recording()
        if way == "strides":
            held.recurrent_states[0] = held.recurrent_states[0].mT.contiguous().mT
        x = torch.randn(1, 2 if way == "two tokens" else 1, 16, device=DEVICE, dtype=next(block.parameters()).dtype)
        context, keywords = change(model, block.mixer, way or "")
        if way != "no cache":
            keywords[name] = cache
        caches = [copy.deepcopy(cache) for _ in range(2)]
        results = []
        with context:
            for copied, allowed in zip(caches, (True, False), strict=True):
                if name in keywords:
                    keywords[name] = copied
                if not allowed:
                    monkeypatch.setattr(decoding, "kernels", lambda x: None)
                results.append([f(x, **keywords).detach() for f in (block, block.mixer)])
    assert len(fused) == (2 if way is None else 0)
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= (64 * 2**-24 * expected.abs().max() if way is None else 0)
    widths = {copied.layers[0].conv_states[0].shape[-1] for copied in caches}
    assert widths == {4 + 2 * (way == "past")}


@here
@pytest.mark.parametrize("way", ["", "x_proj", "dt_proj", "dt_layernorm", "another norm", "no bias"])
def test_unusual_parts_of_a_selective_layer_run_the_ordinary_forward(way, fused):
    model, ids = prepared("falcon_mamba", 1, torch.float32, {})
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad():
        cache = model(ids, use_cache=True)[cache_name(model)]
        if way == "another norm":
            mixer.c_layernorm = nn.RMSNorm(8, device=DEVICE)
        elif way == "no bias":
            mixer.dt_proj.bias = None
        elif way:
            getattr(mixer, way).register_forward_hook(hook)
        model.backbone.layers[0](torch.randn(1, 1, 48, device=DEVICE), **{cache_name(model): cache})
    assert len(fused) == (not way)


@here
@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "nemotron_h", "zamba2", "jamba"])
@pytest.mark.parametrize("planted", [False, True])
def test_attention_and_norms_within_a_graph(name, planted, fused, monkeypatch):
    """Rows of different lengths; keys that no query may see; a mask that is not looked at changes the tokens."""
    monkeypatch.setitem(graphs.recorders, DEVICE, graphs.recorders.get("cuda") if DEVICE == "cuda" else record)
    monkeypatch.setattr(graphs, "SMALLEST", 8)
    model, ids = prepared(name, 3, torch.float32, {})
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :5] = 0, 0
    if name == "jamba":
        model.set_experts_implementation("batched_mm")
    kernels, calls = parts.kernels(ids), []
    attend_ = kernels.attend_

    def counted(*arguments):
        *rest, mask, angles = arguments
        calls.append(angles)
        return attend_(*rest, torch.ones_like(mask) if planted else mask, angles)

    monkeypatch.setattr(kernels, "attend_", counted)
    options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "max_new_tokens": 5}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(ids, **options)
    assert calls
    use(monkeypatch, None)
    expected = copy.deepcopy(model).generate(ids, **options)
    close = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found.logits, expected.logits, strict=True)]
    assert all(close) != planted


FACTORS = {
    "falcon_h1": {
        "attention_in_multiplier": 0.7, "attention_out_multiplier": 1.3, "key_multiplier": 0.6,
        "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "mlp_multipliers": [0.9, 1.4], "mlp_bias": True,
    },
    "granitemoehybrid": {"residual_multiplier": 0.6, "num_local_experts": 0, "num_experts_per_tok": 0},
    "bamba": {},
}  # fmt: skip
HYBRIDS = [(name, *case) for name in FACTORS for case in ((1, torch.float32), (3, torch.bfloat16))]


def read(model, ids, prompt=6):
    """Read a prompt and then one token after the other; return the logits of these."""
    with torch.no_grad():
        cache, found = model(ids[:, :prompt], use_cache=True)[cache_name(model)], []
        for token in ids[:, prompt:].split(1, 1):
            found.append(model(token, use_cache=True, **{cache_name(model): cache}).logits)
    return torch.stack(found).double()


@pytest.mark.slow
@here
@pytest.mark.parametrize(("name", "rows", "dtype"), HYBRIDS)
@pytest.mark.parametrize("planted", [None, "a factor", "an angle"])
def test_a_layer_of_a_hybrid_within_a_graph(name, rows, dtype, planted, fused, monkeypatch):
    """Factors, norms, sums, MLP, and attention with rotary positions equal the ordinary forward up to rounding."""
    if planted is not None and (dtype != torch.float32 or (planted == "an angle" and name != "falcon_h1")):
        pytest.skip("it would be within the bound, or there is none")
    monkeypatch.setitem(graphs.recorders, DEVICE, graphs.recorders.get("cuda") if DEVICE == "cuda" else record)
    monkeypatch.setattr(graphs, "SMALLEST", 8)
    model, ids = prepared(name, rows, dtype, FACTORS[name], tokens=5)
    kernels, calls, feed, add = decoding.kernels(ids), [], hybrids._feed, hybrids._add
    attend_ = kernels.attend_
    if planted == "a factor":
        monkeypatch.setattr(hybrids, "_add", lambda *given, gated=False: add(*given[:4], given[4] * 1.25, gated))
    if planted == "an angle":
        turned = lambda *given: attend_(*given[:-1], given[-1] and (given[-1][0], -given[-1][1]))  # noqa: E731
        monkeypatch.setattr(kernels, "attend_", turned)
    monkeypatch.setattr(hybrids, "_feed", lambda *given: (calls.append(given[-1]), feed(*given))[1])
    found = read(model, ids)
    assert len(calls) >= sum(getattr(layer, "mamba", None) is not None for layer in model.model.layers)
    assert graphs.graphs_of(model).replayed
    use(monkeypatch, None)
    expected, exact = read(copy.deepcopy(model), ids), read(copy.deepcopy(model).double(), ids)
    bound = 4 * (expected - exact).abs().max() + 16 * torch.finfo(dtype).eps * exact.abs().max()
    assert ((found - exact).abs().max() <= bound) == (planted is None)


@here
def test_a_part_is_what_its_class_computes(fused):
    for name in ("mamba2", "granitemoehybrid", "falcon_mamba"):
        model = make(name).to(DEVICE)
        summary = refold.accelerate(model)
        assert summary.parts
        for part in map(model.get_submodule, summary.parts):
            x = torch.randn(2, 5, part.weight.shape[-1], device=DEVICE)
            with torch.no_grad():
                found, own = part(x), parts.original(part).forward(part, x)
            torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-6)
            x.requires_grad_()
            part(x).sum().backward()
            assert x.grad is not None
        summary.undo()
        assert not any("Accelerated" in type(module).__name__ for module in model.modules())


@here
def test_logits_of_words_whose_number_is_odd(fused, monkeypatch):
    """One token a row only; with gradients and for whole prompts the class's own forward runs."""
    from refold.models.torch import kernels

    calls, own = [], kernels.project
    monkeypatch.setattr(kernels, "project", lambda *args, **given: (calls.append(1), own(*args, **given))[1])
    model = make("falcon_h1").to(DEVICE)
    summary = refold.accelerate(model)
    assert summary.parts["lm_head"] == "Linear"
    x = torch.randn(2, 5, model.lm_head.in_features, device=DEVICE)
    for rows, tokens in ((2, 5), (1, 1)):
        with torch.no_grad():
            found = model.lm_head(x[:rows, :tokens])
            torch.testing.assert_close(found, x[:rows, :tokens] @ model.lm_head.weight.T, rtol=1e-5, atol=1e-5)
        assert len(calls) == (tokens == 1)
    assert torch.equal(copy.deepcopy(model).lm_head.weight, model.lm_head.weight)
    model.lm_head(x[:1, :1].requires_grad_()).sum().backward()
    assert len(calls) == 1
    summary.undo()
    assert type(model.lm_head) is nn.Linear
    model.get_output_embeddings = None  # no model is asked where none is to be a graph
    assert "lm_head" not in refold.accelerate(model, graphs=False).parts
    assert "lm_head" not in refold.accelerate(make("falcon_h1", vocab_size=96)).parts


@here
def test_hooks_of_a_layer_run_and_its_kernels_too(fused):
    model, ids = prepared("mamba2", 1, torch.float32, SMALL)
    block, seen = model.backbone.layers[0], []
    with torch.no_grad():
        cache = model(ids, use_cache=True)[cache_name(model)]
        block.mixer.register_forward_hook(lambda module, args, output: seen.append(output))
        x = torch.randn(1, 1, 16, device=DEVICE)
        y = block(x, **{cache_name(model): cache})
    assert len(fused) == len(seen) == 1
    assert torch.equal(y, x + seen[0])
