"""`refold.accelerate`: results equal the unmodified model's, in every family and every kind of use."""

import copy
import io
import math
import pickle
import re
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache

import refold
from refold.errors import ArgumentError, DtypeError, RefoldError, RefoldWarning, ShapeError
from refold.integrations.transformers import MIXERS
from support.families import EVERY, OTHERS, VOCAB, WIDTH, cache_name, make
from support.products import few

FAMILIES = tuple(name for name in EVERY if "-" not in name)


def ids_of(*shape):
    return torch.randint(0, VOCAB, shape)


def assert_equal(found, reference, exact, tokens, what=""):
    """Allow four times what the reference itself loses against its run in float64, and four roundings of a sum.

    Such a sum is over the width of the model, or over the tokens if they are more; its rounding grows by their root.
    """
    terms, eps = max(WIDTH, tokens), torch.finfo(found.dtype).eps
    bound = 4 * (reference.double() - exact).abs().max() + 4 * math.sqrt(terms) * eps * exact.abs().max()
    error = (found.double() - exact).abs().max()
    assert error <= bound, (what, float(error), float(bound))


def logits_and_gradients(model, ids, **keywords):
    logits = model(ids, use_cache=False, **keywords).logits
    keep = keywords.get("attention_mask", torch.ones_like(ids)).bool()
    weights = torch.linspace(-1, 1, VOCAB, dtype=logits.dtype)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(
        (logits[keep] * weights).sum() / keep.sum(), list(parameters.values()), allow_unused=True
    )
    return logits[keep], {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def compare(model, ids, **keywords):
    """Compare logits and the gradient of every parameter with those before acceleration; return the summary."""
    reference = logits_and_gradients(model, ids, **keywords)
    exact = logits_and_gradients(copy.deepcopy(model).double(), ids, **keywords)
    summary = refold.accelerate(model)
    found = logits_and_gradients(model, ids, **keywords)
    assert_equal(found[0], reference[0], exact[0], ids.numel(), "logits")
    assert found[1].keys() == reference[1].keys()
    for name, gradient in found[1].items():
        assert_equal(gradient, reference[1][name], exact[1][name], ids.numel(), name)
    return summary


@pytest.mark.rows(12)
@pytest.mark.parametrize("name", EVERY)
def test_logits_and_gradients_in_training_with_padding_on_either_side(name):
    model = make(name).train()
    mask = torch.ones(4, 21, dtype=torch.long)
    mask[1, :4] = 0
    mask[2, :20] = 0
    mask[3, 5:] = 0
    compare(model, ids_of(4, 21), attention_mask=mask)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", OTHERS)
def test_padding_neither_writes_nor_decays(name, side):
    model, x, mask = make(name), ids_of(2, 30), torch.ones(2, 30, dtype=torch.long)
    refold.accelerate(model)
    real = slice(9, None) if side == "left" else slice(None, -9)
    mask[0] = 0
    mask[0, real] = 1
    with torch.no_grad():
        padded = model(x, attention_mask=mask, use_cache=True)[cache_name(model)]
        alone = model(x[:1, real], use_cache=True)[cache_name(model)]
    if name == "minimax":
        states = [cache.linear_cache[1][:1] for cache in (padded, alone)]
    else:
        states = [cache.layers[0].recurrent_states[0][:1] for cache in (padded, alone)]
        windows = [cache.layers[0].conv_states[0][:1] for cache in (padded, alone)]
        torch.testing.assert_close(*windows, rtol=0, atol=1e-5)
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_bfloat16_follows_float64(name):
    """Accelerated, a model in bfloat16 is no further from float64 than transformers' is, twice over; decoding, too.

    A token near the border of two experts may get the other one, so this looks at three of four tokens.
    """
    model, ids = make(name).bfloat16(), ids_of(16, 20)

    def logits(model):
        with torch.no_grad():
            whole = model(ids, use_cache=False).logits
            cache = model(ids[:, :19], use_cache=True)[cache_name(model)]
            last = model(ids[:, 19:], use_cache=True, **{cache_name(model): cache}).logits
        return whole.double(), last.double()

    def errors(model):
        return [(a - b).norm(dim=-1).quantile(0.75) for a, b in zip(logits(model), exact, strict=True)]

    exact = logits(copy.deepcopy(model).double())
    reference = errors(model)
    refold.accelerate(model)
    for found, allowed in zip(errors(model), reference, strict=True):
        assert found <= 2 * allowed


def generate(model, ids, mask, **keywords):
    keywords = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | keywords
    return model.generate(ids, attention_mask=mask, **keywords)[:, ids.shape[1] :].tolist()


@pytest.mark.rows(12)
@pytest.mark.parametrize("name", EVERY)
def test_greedy_tokens(name):
    """One row, then four of different lengths.

    The gated norm of transformers' Falcon-H1 drops the axis of time where it sees one token, and mixes the rows of a
    batch so; without a cache it does not.
    """
    model, rest = make(name), {"use_cache": False} if name == "falcon_h1-normed" else {}
    prompts = [(ids_of(1, 7), torch.ones(1, 7, dtype=torch.long)), (ids_of(4, 18), torch.ones(4, 18, dtype=torch.long))]
    for row, padding in enumerate((0, 3, 11, 17)):
        prompts[1][1][row, :padding] = 0
    asked = ({}, {"max_new_tokens": 16})
    expected = [generate(model, *prompt, **more, **rest) for prompt, more in zip(prompts, asked, strict=True)]
    refold.accelerate(model)
    assert [generate(model, *prompt, **more) for prompt, more in zip(prompts, asked, strict=True)] == expected
    assert len(set(expected[0][0])) > 4  # a model that repeats one token would prove nothing


def generated_logits(model, ids, mask, **way):
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **way}
    found = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings)
    return torch.stack(found.logits)


def assert_near(found, expected):
    assert (found - expected).abs().max() <= 64 * 2**-24 * expected.abs().max()


@pytest.mark.parametrize("way", [{"num_beams": 3}, {"cache_implementation": "static"}], ids=["beams", "static"])
def test_other_ways_to_generate(way):
    """With padding, whose mask has another form where the cache is static."""
    model, ids, mask = make("jamba"), ids_of(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3] = 0
    expected = generated_logits(model, ids, mask, max_new_tokens=6, **way)
    refold.accelerate(model)
    assert_near(generated_logits(model, ids, mask, max_new_tokens=6, **way), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_read_in_pieces(name):
    """A cache goes on where it was, also where transformers starts its Mamba-1 layers afresh."""
    model, ids = make(name), ids_of(2, 40)
    with torch.no_grad():
        reference = model(ids, use_cache=False).logits
        exact = copy.deepcopy(model).double()(ids, use_cache=False).logits
        refold.accelerate(model)
        keyword, cache, found = cache_name(model), None, []
        positions = torch.arange(40).expand(2, -1).split([17, 2, 1, 19, 1], 1)
        for piece, places in zip(ids.split([17, 2, 1, 19, 1], 1), positions, strict=True):
            out = model(piece, position_ids=places, use_cache=True, **({} if cache is None else {keyword: cache}))
            cache = out[keyword]
            found.append(out.logits)
    if found[0].shape[1] == 1:  # Zamba and others only compute the last
        reference, exact = reference[:, [16, 18, 19, 38, 39]], exact[:, [16, 18, 19, 38, 39]]
    assert_equal(torch.cat(found, 1), reference, exact, ids.numel())


@pytest.mark.parametrize("name", ["mamba", "mamba2", "bamba"])
def test_padded_prompts_read_in_pieces(name):
    model, ids, mask = make(name), ids_of(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[1, :10] = 0  # one token more than the first piece: where `in_proj` has a bias, padding has effects
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        refold.accelerate(model)
        keyword = cache_name(model)
        given = {"attention_mask": mask[:, :9], "position_ids": positions[:, :9]}
        cache = model(ids[:, :9], use_cache=True, **given)[keyword]
        given = {"attention_mask": mask, "position_ids": positions[:, 9:], keyword: cache}
        found = model(ids[:, 9:], use_cache=True, **given).logits[:, -1]
    assert_near(found, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])  # masks of booleans, and of numbers to add
def test_padded_prompts_read_in_pieces_into_a_static_cache(attention):
    """The mask that a Mamba layer gets ends with its piece: whether a row has begun is in the mask of attention."""
    model, ids, mask = make("bamba", mamba_proj_bias=True), ids_of(3, 20), torch.ones(3, 20, dtype=torch.long)
    model.set_attn_implementation(attention)
    mask[1, :10] = 0
    mask[2, :19] = 0
    refold.accelerate(model)
    expected = generated_logits(model, ids, mask, max_new_tokens=2)
    for piece in (9, 5):
        way = {"cache_implementation": "static", "prefill_chunk_size": piece}
        assert_near(generated_logits(model, ids, mask, max_new_tokens=2, **way), expected)


def packed(lengths):
    """Return ids of documents in one row, their positions, and each document by itself."""
    ids = ids_of(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return ids, positions, list(ids.split(lengths, 1))


NAMED = ("in_proj.weight", "in_proj_qkv.weight", "k_proj.weight", "qkv_proj.weight", "conv1d.weight", "A_log")
NAMED += ("f_proj.weight", "f_b_proj.weight")
CHECKPOINTED = [
    (name, way) for name in ("jamba", "zamba", "mamba2", "kimi_linear", "qwen3_5", "minimax") for way in (False, True)
]


@pytest.mark.rows(12)
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [(name, None) for name in FAMILIES if name != "glm5_next"] + CHECKPOINTED,  # one family of each way to call a block
    ids=lambda v: {None: "plain", False: "checkpoint", True: "reentrant"}.get(v, v),
)
def test_documents_of_a_row_do_not_see_each_other(name, checkpointing):
    model = make(name).train()
    ids, positions, apart = packed([9, 1, 2, 14])
    keywords = {"position_ids": positions}
    if name == "granitemoehybrid":  # whose attention has to be told apart
        document = (positions == 0).cumsum(1)
        seen = (document[:, None] == document[..., None]) & torch.ones(26, 26).tril().bool()
        keywords["attention_mask"] = torch.where(seen, 0.0, -torch.inf)[:, None]

    def run(model, *rows, **keywords):
        model.zero_grad()
        logits = torch.cat([model(row, use_cache=False, **keywords).logits for row in rows], 1)
        (logits * torch.linspace(-1, 1, VOCAB, dtype=logits.dtype)).mean().backward()
        named = [p for n, p in model.named_parameters() if n.endswith(NAMED) and "forget_gate.A_log" not in n]
        return logits, [p.grad for p in named if p.grad is not None]  # that of one rate for many decays cancels

    expected, exact = run(model, *apart), run(copy.deepcopy(model).double(), *apart)
    leaking, _ = run(model, ids, **keywords)
    refold.accelerate(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    found = run(model, ids, **keywords)
    for a, b, c in zip([found[0], *found[1]], [expected[0], *expected[1]], [exact[0], *exact[1]], strict=True):
        assert_equal(a, b, c, ids.numel())
    assert (leaking - expected[0]).abs().max() > 1e-3  # transformers' own layers mix them


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mamba2", "bamba"])
def test_hooks_and_gradients_under_checkpointing(name, reentrant):
    """Hooks of a layer, of its output and of its gradient run as often, and see the same, as without both."""
    model, ids = make(name).double().train(), ids_of(2, 24)
    layer = model.base_model.layers[0]

    def run():
        model.zero_grad()
        seen = []

        def forward(module, given, out):
            out = out if isinstance(out, torch.Tensor) else out[0]
            if out.requires_grad:
                out.register_hook(lambda gradient: seen.append(gradient.norm()))

        hooks = [
            layer.register_forward_hook(forward),
            layer.register_full_backward_hook(lambda module, given, got: seen.append(got[0].norm())),
        ]
        logits = model(ids, use_cache=False).logits
        (logits * torch.linspace(-1, 1, VOCAB, dtype=logits.dtype)).mean().backward()
        for hook in hooks:
            hook.remove()
        return torch.stack(seen), [p.grad for p in model.parameters() if p.grad is not None]

    expected = run()
    refold.accelerate(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = run()
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for a, b in zip(found[1], expected[1], strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(b.abs().max(), 1e-4)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "zamba"])
def test_every_spelling_of_documents(name):
    model = make(name)
    ids, positions, _ = packed([5, 6, 1, 8])
    offsets = torch.tensor([0, 5, 11, 12, 20], dtype=torch.int32)
    index = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 6, 1, 8]))[None].int()
    refold.accelerate(model)
    backbone = model.base_model
    with torch.no_grad():
        runs = [
            backbone(ids, use_cache=False, position_ids=positions, **keywords).last_hidden_state
            for keywords in ({}, {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}, {"seq_idx": index})
        ]
    for run in runs[1:]:
        assert torch.equal(run, runs[0])


def test_rows_of_documents_with_padding_between_and_behind():
    model = make("mamba2")
    ids = ids_of(2, 20)
    positions = torch.tensor([[*range(7), *range(13)], [*range(6), 1, 1, *range(10), 1, 1]])
    mask = torch.ones_like(ids)
    mask[1, [6, 7, 18, 19]] = 0
    with torch.no_grad():
        expected = [
            model(part, use_cache=False).logits for part in (ids[:1, :7], ids[:1, 7:], ids[1:, :6], ids[1:, 8:18])
        ]
        refold.accelerate(model)
        found = model(ids, use_cache=False, position_ids=positions, attention_mask=mask).logits
    for a, b in zip((found[:1, :7], found[:1, 7:], found[1:, :6], found[1:, 8:18]), expected, strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_padding_inside_a_document_does_not_end_it(name):
    model, ids, mask = make(name, use_bias=False), ids_of(2, 14), torch.ones(2, 14, dtype=torch.long)
    mask[0, [0, 1, 6, 7]] = 0
    keep = mask.bool()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        refold.accelerate(model)
        expected = [model(row[real][None], use_cache=False).logits[0] for row, real in zip(ids, keep, strict=True)]
        found = model(ids, use_cache=False, attention_mask=mask, position_ids=positions).logits
    for row, alone, real in zip(found, expected, keep, strict=True):
        assert_near(row[real], alone)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "zamba2"])
def test_a_cache_goes_on_from_the_last_document(name):
    model = refold.accelerate(make(name)).model
    ids, positions, apart = packed([12, 2])
    step, keyword = ids_of(1, 1), cache_name(model)
    with torch.no_grad():
        cache = model(ids, position_ids=positions, use_cache=True)[keyword]
        if name == "zamba2":  # its attention layers keep the first document's keys; its first Mamba layer must not
            layer, other = cache.layers[0], model(apart[1], use_cache=True)[keyword].layers[0]
            torch.testing.assert_close(layer.conv_states[0], other.conv_states[0])
            torch.testing.assert_close(layer.recurrent_states[0], other.recurrent_states[0])
            return
        found = model(step, use_cache=True, **{keyword: cache}).logits
        expected = model(torch.cat([apart[1], step], 1), use_cache=False).logits[:, -1:]
        # A piece that begins a document forgets what the cache held.
        cache = model(ids_of(1, 3), use_cache=True)[keyword]
        again = model(apart[0], position_ids=positions[:, :12], use_cache=True, **{keyword: cache}).logits
        alone = model(apart[0], use_cache=False).logits
        # So does one that is shorter than the convolution's window, with the document in it.
        cache = model(ids_of(1, 4), use_cache=True)[keyword]
        piece = torch.cat([ids_of(1, 1), apart[1][:, :1]], 1)
        model(piece, position_ids=torch.tensor([[4, 0]]), use_cache=True, **{keyword: cache})
        after = model(step, use_cache=True, **{keyword: cache}).logits
        short = model(torch.cat([apart[1][:, :1], step], 1), use_cache=False).logits[:, -1:]
    assert_near(after, short)
    assert_near(found, expected)
    assert_near(again, alone)


def test_documents_that_cannot_be_honoured():
    model = make("mamba2")
    refold.accelerate(model)
    with pytest.raises(ShapeError, match=r"cu_seq_lens_q needs a batch of one row; got 2"):
        model(ids_of(2, 6), cu_seq_lens_q=torch.tensor([0, 6]))
    with pytest.raises(ArgumentError, match="cu_seq_lens_k must be cu_seq_lens_q"):
        model(ids_of(1, 6), cu_seq_lens_q=torch.tensor([0, 6]), cu_seq_lens_k=torch.tensor([0, 3, 6]))
    with pytest.raises(ShapeError, match=re.escape("seq_idx must have the shape (1, 6); got (1, 5)")):
        model(ids_of(1, 6), seq_idx=torch.zeros(1, 5, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="cu_seqlens must end at t=6; got 5"):
        model(ids_of(1, 6), cu_seq_lens_q=torch.tensor([0, 5]))
    for name, wrong in (("cu_seq_lens_q", [0, 6]), ("seq_idx", torch.full((1, 6), torch.nan)), ("position_ids", [1])):
        with pytest.raises(DtypeError, match=f"{name} must be a tensor of integers; got (list|torch.float32)"):
            model.backbone(ids_of(1, 6), **{name: wrong})
    with torch.no_grad():  # and none of these errors is remembered by the next call
        model(ids_of(2, 6))


def test_positions_in_images():
    """They have a time, a height and a width; with a number of the token before these, documents are known."""
    model, ids = make("qwen3_5"), ids_of(1, 12)
    positions = torch.arange(12).expand(4, 1, -1)
    apart = positions.remainder(6)
    with torch.no_grad():
        expected = model(ids, position_ids=positions[1:], use_cache=False).logits
        alone = [model(half, position_ids=apart[..., :6], use_cache=False).logits for half in ids.split(6, 1)]
        refold.accelerate(model)
        for given in (positions[1:], positions):
            assert_near(model(ids, position_ids=given, use_cache=False).logits, expected)
        assert_near(model(ids, position_ids=apart, use_cache=False).logits, torch.cat(alone, 1))


class LowRank(nn.Module):
    """LoRA, as libraries write it: a module around a linear layer or convolution that shows the inner weight."""

    def __init__(self, inner):
        super().__init__()
        self.inner, rows = inner, inner.weight.shape[0]
        columns = inner.weight.shape[1] if isinstance(inner, nn.Linear) else rows
        self.a, self.b = nn.Parameter(0.1 * torch.randn(2, columns)), nn.Parameter(0.1 * torch.randn(rows, 2))

    weight = property(lambda self: self.inner.weight)
    bias = property(lambda self: self.inner.bias)

    def forward(self, x):
        if isinstance(self.inner, nn.Linear):
            return self.inner(x) + x @ self.a.T @ self.b.T
        low = torch.einsum("or,ri,bit->bot", self.b, self.a, x)
        return self.inner(x) + nn.functional.pad(low, (0, self.inner.kernel_size[0] - 1))


@pytest.mark.parametrize(
    ("name", "layer", "projection"),
    [
        ("mamba", "backbone.layers.0.mixer", p) for p in ("in_proj", "x_proj", "dt_proj", "out_proj", "conv1d")
    ] + [("mamba2", "backbone.layers.1.mixer", p) for p in ("in_proj", "out_proj", "conv1d")]
    + [("qwen3_5", "model.layers.0.linear_attn", p) for p in (
        "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "conv1d")]
    + [("kimi_linear", "model.layers.0.self_attn", p) for p in (
        "q_proj", "k_proj", "v_proj", "g_a_proj", "g_b_proj", "b_proj", "forget_gate.f_a_proj",
        "forget_gate.f_b_proj", "o_proj", "conv1d")]
    + [("minimax", "model.layers.1.self_attn", p) for p in ("qkv_proj", "output_gate", "out_proj")],
)  # fmt: skip
def test_low_rank_projections_are_called_and_trained(name, layer, projection):
    model = make(name).train()
    ids = ids_of(2, 9)
    refold.accelerate(model)
    mixer, _, projection = f"{layer}.{projection}".rpartition(".")
    mixer = model.get_submodule(mixer)
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        setattr(mixer, projection, adapter := LowRank(getattr(mixer, projection)))
        adapter.b.zero_()
        torch.testing.assert_close(model(ids, use_cache=False).logits, before, rtol=1e-4, atol=1e-5)
        adapter.b.copy_(0.1 * torch.randn_like(adapter.b))
    logits = model(ids, use_cache=False).logits
    gradients = torch.autograd.grad(logits.square().mean(), [adapter.a, adapter.b])
    assert all(g.abs().max() > 0 for g in gradients)
    model.eval()
    with torch.no_grad():  # the cache sees what the adapter does, too
        name = cache_name(model)
        cache = model(ids[:, :7], use_cache=True)[name]
        steps = [model(ids[:, t : t + 1], use_cache=True, **{name: cache}).logits for t in (7, 8)]
    torch.testing.assert_close(torch.cat(steps, 1), logits[:, 7:], rtol=1e-4, atol=1e-5)
    if projection == "conv1d":
        with pytest.raises(ArgumentError, match="conv1d is a LowRank that must be called"):
            model(ids[:1], cu_seq_lens_q=torch.tensor([0, 4, 9]))


class Int8(nn.Module):
    """A quantised linear layer without a weight that could be multiplied with."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.abs().amax(1) / 127
        self.codes = (linear.weight / self.scale[:, None]).round().to(torch.int8)
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale[:, None], self.bias)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_quantised_projections(name):
    model, ids = make(name), ids_of(1, 9)
    refold.accelerate(model)
    with torch.no_grad():
        for mixer in [m for m in model.modules() if hasattr(m, "A_log")]:
            for child, linear in list(mixer.named_children()):
                if isinstance(linear, nn.Linear):
                    quantised = Int8(linear)
                    linear.weight.copy_(quantised.codes * quantised.scale[:, None])
                    setattr(mixer, child, nn.ModuleList([quantised])[0])
        found = generate(model, ids, torch.ones_like(ids), max_new_tokens=6)
        for mixer in [m for m in model.modules() if hasattr(m, "A_log")]:
            for child, quantised in list(mixer.named_children()):
                if isinstance(quantised, Int8):
                    linear = nn.Linear(*quantised.codes.T.shape, bias=quantised.bias is not None)
                    linear.weight.copy_(quantised.codes * quantised.scale[:, None])
                    if quantised.bias is not None:
                        linear.bias = quantised.bias
                    setattr(mixer, child, linear)
        refold.accelerate(model).undo()
        assert found == generate(model, ids, torch.ones_like(ids), max_new_tokens=6)


def test_hooks_of_projections_run_in_order():
    """Sharding gathers a layer's weights in a hook before its forward and frees them in one after it."""
    model = make("mamba")
    refold.accelerate(model)
    mixer, calls = model.backbone.layers[0].mixer, []
    for name, child in mixer.named_children():
        if isinstance(child, nn.Linear):
            weight = child.weight.data

            def gather(module, args, name=name, weight=weight):
                calls.append(name)
                module.weight.data = weight

            child.register_forward_pre_hook(gather)
            child.register_forward_hook(lambda m, a, o: setattr(m.weight, "data", torch.empty(0)))
            child.weight.data = torch.empty(0)
    with torch.no_grad():
        model(ids_of(1, 5))
    assert calls == ["in_proj", "x_proj", "dt_proj", "out_proj"]


@pytest.fixture
def group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # of any linear layer with a bias
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@pytest.mark.parametrize("first", ["sharded", "accelerated"])
def test_fully_sharded(name, first, group):
    from torch.distributed.fsdp import fully_shard

    model, alone = make(name).train(), make(name).train()
    ids = ids_of(2, 12)
    if first == "accelerated":
        refold.accelerate(model)
    for block in model.backbone.layers:
        for projection in [m for m in block.modules() if type(m) in (nn.Linear, nn.Conv1d)]:
            fully_shard(projection, mesh=group)
        fully_shard(block, mesh=group)
    fully_shard(model, mesh=group)
    runs = [(model, refold.accelerate(model)), (alone, refold.accelerate(alone))]
    found, expected = (run(ids, use_cache=False).logits for run, _ in runs)
    assert len(runs[0][1].replaced) == 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.square().mean().backward()
    expected.square().mean().backward()
    for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5, msg=key)


class OffloadHook:
    """What the package accelerate calls around a forward."""

    def __init__(self):
        self.seen = []

    def pre_forward(self, module, *args, **kwargs):
        self.seen.append(f"{type(module).__name__} before")
        return args, kwargs

    def post_forward(self, module, output):
        self.seen.append(f"{type(module).__name__} after")
        return output


def hooked(module, hook):
    """Do what accelerate.hooks.add_hook_to_module does."""
    module._hf_hook, module._old_forward = hook, module.forward

    def forward(*args, **kwargs):
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return hook.post_forward(module, module._old_forward(*args, **kwargs))

    module.forward = forward


@pytest.mark.parametrize("first", [True, False], ids=["hooks-first", "hooks-last"])
def test_offloading_hooks(first):
    model, ids, hook = make("mamba2"), ids_of(1, 9), OffloadHook()
    with torch.no_grad():
        expected = model(ids).logits
    mixer = model.backbone.layers[0].mixer
    if not first:
        refold.accelerate(model)
    for module in (model.backbone.layers[0], mixer, mixer.conv1d, mixer.in_proj):
        hooked(module, hook)
    summary = refold.accelerate(model)
    ran = []
    original = type(mixer).forward
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("refold.ops.ssd", lambda *a, f=refold.ops.ssd, **k: (ran.append(1), f(*a, **k))[1])
        found = model(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(ran) == 2, "both layers ran on refold"
    assert hook.seen.count("Conv1d before") == hook.seen.count("Conv1d after") == 1
    summary.undo()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)
    assert type(mixer).forward is not original


def state_of(model):
    return [
        (type(m), m.__dict__.keys() - {"_modules"}, len(m._forward_hooks), len(m._forward_pre_hooks))
        for m in model.modules()
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_instance_once_and_back(name):
    model, other, ids = make(name), make(name), ids_of(1, 9)
    before = state_of(model)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    summary = refold.accelerate(model)
    after = state_of(model)
    assert refold.accelerate(model) is summary
    assert state_of(model) == after
    assert state_of(other) == before
    layers = [m for m in other.modules() if type(m).__name__ in MIXERS]
    assert len(summary.replaced) == len(layers)
    assert f"{len(layers)} x {type(layers[0]).__name__} replaced" in str(summary)
    assert summary.kept == {}
    summary.undo()
    assert "undone" in str(summary)
    assert "replaced" not in str(summary)
    assert state_of(model) == before
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert refold.accelerate(model) is not summary


@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_copies_are_accelerated_models_of_their_own(way):
    model, ids = make("mamba2"), ids_of(1, 9)
    summary = refold.accelerate(model)
    if way == "copy":
        twin = copy.deepcopy(model)
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(twin(ids).logits, expected)
        for p in model.parameters():
            p.zero_()
        assert torch.equal(twin(ids).logits, expected)
    refold.accelerate(twin).undo()
    assert not [m for m in twin.modules() if type(m).__name__.startswith("Accelerated")]
    assert [m for m in model.modules() if type(m).__name__.startswith("Accelerated")]
    summary.undo()
    pickle.dumps(model)


def test_undo_refuses_what_it_cannot_put_back():
    model = make("mamba2")
    summary = refold.accelerate(model)
    mixer = model.backbone.layers[0].mixer
    ours = type(mixer)
    mixer.__class__ = type("Sharded", (ours,), {})
    with pytest.raises(RefoldError, match="the class of a layer was changed to Sharded since"):
        summary.undo()
    mixer.__class__ = ours
    summary.undo()


def test_layers_that_are_kept_say_why():
    model = make("mamba2")

    class Mine(type(model.backbone.layers[0].mixer)):
        def forward(self, hidden_states, **kwargs):
            return hidden_states

    model.backbone.layers[0].mixer.__class__ = Mine
    model.backbone.layers[1].mixer.forward = lambda x, **kwargs: x
    with pytest.warns(RefoldWarning, match="has no layer that refold can replace"):
        summary = refold.accelerate(model)
    assert summary.kept == {
        "backbone.layers.0.mixer": "its class Mine has a forward of its own",
        "backbone.layers.1.mixer": "its forward was replaced on the instance",
    }
    with pytest.warns(RefoldWarning, match="Linear has no layer"):
        refold.accelerate(nn.Linear(2, 2))


KINDS = {
    "recurrent_gemma": ("RecurrentGemma", {"num_hidden_layers": 3}, "RG-LRU"),
    "rwkv": ("Rwkv", {}, "RWKV"),
    "xlstm": ("xLSTM", {"num_heads": 4}, "is xLSTM"),
    "lfm2": ("Lfm2", {"layer_types": ["conv"] * 4}, "is a short convolution"),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", KINDS)
def test_layers_of_other_kinds_are_named(name):
    kind, changes, words = KINDS[name]
    config = getattr(transformers, f"{kind}Config", None)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM", None)
    if config is None or model is None:
        pytest.skip(f"this version of transformers has no {name}")
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "pad_token_id": 0}
    with torch.device("meta"):
        model = model(config(**sizes | changes))
    with pytest.warns(RefoldWarning, match="has no layer that refold can replace") as told:
        summary = refold.accelerate(model)
    assert words in str(summary)
    assert words in str(told[0].message)
    assert not summary.replaced


def test_a_pack_whose_tokens_an_indexer_pools_is_refused():
    model = refold.accelerate(make("glm5_next")).model
    with pytest.raises(ArgumentError, match="cannot be kept apart: its indexer pools tokens"):
        model(ids_of(1, 6), cu_seq_lens_q=torch.tensor([0, 2, 6]))


def test_a_part_that_is_not_known():
    """What a forward does not read must not be lost."""
    model = make("falcon_mamba")
    first, second = (block.mixer for block in model.backbone.layers)
    first.state_layernorm = nn.LayerNorm(4)
    second.probe = nn.Identity()  # holds no values
    summary = refold.accelerate(model)
    assert summary.kept == {"backbone.layers.0.mixer": "refold does not know state_layernorm, which it has"}
    assert list(summary.replaced) == ["backbone.layers.1.mixer"]


def test_an_argument_that_is_not_known(monkeypatch):
    """A cache under a new name must not be lost among further arguments."""
    model = make("mamba2")
    kind = type(model.backbone.layers[0].mixer)

    def forward(self, hidden_states, past=None, attention_mask=None, **kwargs):
        return hidden_states

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.warns(RefoldWarning, match="has no layer that refold can replace"):
        summary = refold.accelerate(model)
    assert set(summary.kept.values()) == {"refold does not know past, which its forward takes"}


@pytest.mark.parametrize("name", ["mamba", "mamba2", "zamba"])
def test_a_layer_takes_its_cache_under_either_name(name):
    model = refold.accelerate(make(name)).model
    layer = next(module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "A_log"))
    x, found = torch.randn(2, 6, 48), []
    with torch.no_grad():
        for keyword in ("cache", "cache_params", None):
            cache = DynamicCache(config=model.config)
            for token in x.split([4, 1, 1], 1):
                y = layer(token, cache) if keyword is None else layer(token, **{keyword: cache})
            found.append(y)
        alone = layer(x[:, 5:])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], alone)


def test_part_of_a_model_then_all_of_it():
    model = make("mamba2")
    part = refold.accelerate(model.backbone.layers[0])
    whole = refold.accelerate(model)
    assert list(part.replaced) == ["mixer"]
    assert list(whole.replaced) == ["backbone.layers.1.mixer"]
    assert whole.kept == {"backbone.layers.0.mixer": "it belongs to a model that was accelerated by itself"}
    whole.undo()
    part.undo()


@pytest.mark.parametrize("name", ["mamba2", "zamba2"])
def test_step_limits_hold_in_decoding_as_in_prefill(name):
    """transformers clips steps where it reads many tokens, not where it reads one; without its cache it always does."""
    model, ids = make(name), ids_of(1, 9)
    for mixer in [m for m in model.modules() if hasattr(m, "A_log")]:
        mixer.time_step_limit = (0.3, 0.9)
    mask = torch.ones_like(ids)
    expected, cached = (generate(model, ids, mask, max_new_tokens=24, use_cache=c) for c in (False, True))
    refold.accelerate(model)
    assert generate(model, ids, mask, max_new_tokens=24) == expected
    assert cached != expected


@few("name", ["mamba", "falcon_h1", "qwen3_5", "kimi_linear", "minimax"], ["mamba"])
@few("mode", [nullcontext(), torch.device("cpu")], [torch.device("cpu")])
def test_compiled_whole(name, mode):
    """One graph, in training, and with documents by their offsets; a default device is a mode of torch's functions."""
    model, ids = make(name, **({} if name in OTHERS else {"num_hidden_layers": 1})), ids_of(2, 12)
    model.set_experts_implementation("batched_mm")  # the eager ones break a graph
    refold.accelerate(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    weights = torch.linspace(-1, 1, VOCAB)
    model.train()
    parameters = [p for n, p in model.named_parameters() if n.endswith(NAMED)]
    with mode:
        found, expected = (
            torch.autograd.grad((run(ids, use_cache=False).logits * weights).mean(), parameters)
            for run in (compiled, model)
        )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    model.eval()
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    with torch.no_grad(), mode:
        given = {"use_cache": False, "cu_seq_lens_q": offsets}
        found, expected = (run(ids[:1], **given).logits for run in (compiled, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.rows(12)
@pytest.mark.parametrize("name", ["mamba2", "mamba", "qwen3_5", "kimi_linear"])
def test_compiled_decoding(name):
    model, ids = make(name), ids_of(1, 5)
    expected = generate(model, ids, torch.ones_like(ids), max_new_tokens=8)
    refold.accelerate(model)
    model.set_experts_implementation("batched_mm")  # the eager ones break a graph
    cache, tokens, keyword = None, [], cache_name(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        out = model(ids, use_cache=True)
        for _ in range(8):
            tokens.append(int(out.logits[0, -1].argmax()))
            cache = out[keyword]
            out = compiled(torch.tensor([[tokens[-1]]]), use_cache=True, **{keyword: cache})
    assert [tokens] == expected


@pytest.mark.parametrize(
    ("name", "first", "rest"),
    [("minimax", torch.inference_mode, torch.no_grad), ("mamba2", nullcontext, nullcontext)],
    ids=["of inference mode", "with gradients"],
)
def test_a_cache_goes_on_in_another_mode(name, first, rest):
    """MiniMax's cache takes new states in place of old ones; those of other families are written to, and cannot."""
    model, ids = make(name), ids_of(1, 6)
    refold.accelerate(model)
    keyword = cache_name(model)
    with first():
        cache = model(ids[:, :4], use_cache=True)[keyword]
    with rest():
        steps = [model(ids[:, t : t + 1], use_cache=True, **{keyword: cache}).logits for t in (4, 5)]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits[:, 4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mamba", "zamba", "mamba2"])
def test_exported_to_onnx_as_before(name):
    pytest.importorskip("onnxscript")
    model, ids = make(name), ids_of(1, 6)
    refold.accelerate(model)
    torch.onnx.export(model, (ids,), kwargs={"use_cache": False}, dynamo=True, verbose=False)


def test_what_is_no_model_is_named():
    class Pipeline:
        model = torch.nn.Linear(2, 2)

        def __getattr__(self, name):
            return self

    for what, got in ((Pipeline(), "Pipeline"), ("mamba", "str"), (torch.nn.Linear, "the class Linear")):
        with pytest.raises(ArgumentError, match=f"model must be a torch.nn.Module; got {got}. Pass a model"):
            refold.accelerate(what)


def test_a_model_that_was_compiled_before():
    plain = make("mamba2")
    compiled, ids = torch.compile(copy.deepcopy(plain), backend="eager"), torch.randint(1, VOCAB, (1, 6))
    assert len(refold.accelerate(compiled).replaced) == 2
    given = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
    assert compiled.generate(ids, **given).tolist() == plain.generate(ids, **given).tolist()
