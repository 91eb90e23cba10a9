"""transformers' own Mamba layers, unmodified: contractions and recurrences found, same results, both directions."""

import functools

import pytest
import torch
import transformers
from transformers import DynamicCache

import refold
from refold.compiler import early_rewrites, pipeline, session
from refold.compiler.dynamo import captures_loops
from refold.compiler.inductor import show_graph
from refold.compiler.passes import replace_causal_convolutions, replace_gated_norms
from refold.report import GraphReport
from support import families
from support.products import few

# Releases from 5.18 on write the contractions as einsum; until then they were multiplied and summed.
EINSUM = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 18)
pytestmark = [
    pytest.mark.usefixtures("without_code"),
    pytest.mark.slow,  # the second run of `make test` has code of some, and takes long to write it
    pytest.mark.filterwarnings(
        "ignore:Dynamo detected a call to a `functools.lru_cache`",  # transformers asks for versions while traced
    ),
    pytest.mark.rows(12),
]

# All sizes distinct; two groups of four heads. Granite and Bamba name them alike.
SIZES = {
    "hidden_size": 48,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 20,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
    "num_hidden_layers": 1,
}


def granite():
    from transformers import GraniteMoeHybridConfig
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

    config = GraniteMoeHybridConfig(**SIZES, layer_types=["mamba"])
    return GraniteMoeHybridMambaLayer(config, 0), config


def bamba():
    from transformers import BambaConfig
    from transformers.models.bamba.modeling_bamba import BambaMixer

    config = BambaConfig(**SIZES, attn_layer_indices=[])
    return BambaMixer(config, 0), config


def mamba2():
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=48,
        num_heads=8,
        head_dim=12,
        state_size=20,
        n_groups=2,
        chunk_size=32,
        expand=2,
        num_hidden_layers=1,
    )
    return Mamba2Mixer(config, 0), config


LAYERS = {"granite": granite, "bamba": bamba, "mamba2": mamba2}
OPTIONS = {"accept": "always", "strict": True}
WITH_CODE = functools.partial(pytest.param, marks=pytest.mark.vectors)  # in the second run of `make test`


def agree(a, b, factor=64):
    error = float((a.double() - b.double()).norm() / b.double().norm())
    assert error <= factor * 2.0**-24


def contractions(report):
    return [r for r in report.rewrites if r.name in ("recover contraction", "drop repeat from product")]


def prefill(name, length):
    layer, _ = LAYERS[name]()
    layer.eval()
    x = torch.randn(3, length, 48)
    compiled = refold.compile(layer, **OPTIONS)
    with torch.no_grad():
        agree(compiled(x), layer(x))
    return compiled


# Granite's and Bamba's layers are one code under two names; so each length, and each test, needs one of them.
CELLS = [("granite", 80), ("bamba", 31), ("bamba", 32), ("mamba2", 80), ("mamba2", 31), ("mamba2", 32)]


@few(("name", "length"), CELLS, [("granite", 80), ("bamba", 31), ("mamba2", 32)])
def test_prefill_is_one_scan(name, length):
    rows = [row for row in prefill(name, length).report.rewrites if row.name == "fuse chunked scan"]
    assert [row.status for row in rows] == ["applied"]
    assert rows[0].detail == f"{length} tokens, 8 heads of 12 x 20 as one ssd"


# Of contractions, the length changes sizes alone: a part of a chunk, one, and several.
@pytest.mark.parametrize(("name", "length"), [("granite", 80), ("bamba", 31), ("mamba2", 32)])
def test_contractions_where_the_scan_is_not_faster(name, length, monkeypatch):
    monkeypatch.setattr(pipeline, "PASSES", [one for one in pipeline.PASSES if one.name != "fuse chunked scans"])
    compiled = prefill(name, length)
    found = contractions(compiled.report)
    assert all(r.status == "applied" for r in found)
    dropped = [r for r in found if "repeat of 4 dropped" in r.detail]
    assert dropped, "C·Bᵀ is computed once per group, not once per head"
    if not EINSUM:
        assert len([r for r in found if r.name == "recover contraction"]) == 5


def trained(layer, seqlen=40):
    """Compare all gradients of a compiled layer with eager's, and return its report."""
    layer.train()
    x = torch.randn(2, seqlen, 48, requires_grad=True)
    weights = [x, *layer.parameters()]
    cotangent = torch.randn(2, seqlen, 48)
    expected = torch.autograd.grad(layer(x), weights, cotangent)
    compiled = refold.compile(layer, **OPTIONS)
    for a, b in zip(torch.autograd.grad(compiled(x), weights, cotangent), expected, strict=True):
        agree(a, b)
    assert compiled.report.graphs[0].mode == "training"
    return compiled.report


@pytest.mark.parametrize("name", ["granite", WITH_CODE("mamba2")])
def test_training(name):
    applied = {rewrite.name for rewrite in trained(LAYERS[name]()[0]).rewrites if rewrite.status == "applied"}
    assert "fuse chunked scan" in applied


@pytest.mark.exhaustive  # gradients of contractions are contractions: see passes/test_recover_contractions.py
def test_training_by_contractions(monkeypatch):
    monkeypatch.setattr(pipeline, "PASSES", [one for one in pipeline.PASSES if one.name != "fuse chunked scans"])
    report = trained(LAYERS["granite"]()[0])
    if not EINSUM:
        assert len(contractions(report)) >= 15


@pytest.mark.parametrize("name", ["bamba", WITH_CODE("mamba2")])
def test_cache_decoding_and_mask(name):
    layer, config = LAYERS[name]()
    layer.eval()
    x, mask = torch.randn(2, 40, 48), torch.ones(2, 37)
    mask[1, :5] = 0
    compiled = refold.compile(layer, **OPTIONS)
    outputs = []
    for run in (layer, compiled):
        cache = DynamicCache(config=config)
        with torch.no_grad():
            kept = {families.cache_name(layer): cache}
            steps = [run(x[:, :37], attention_mask=mask, **kept)]
            steps += [run(x[:, t : t + 1], **kept) for t in range(37, 40)]
        outputs.append((torch.cat(steps, 1), cache.layers[0]))
    (expected, _), (got, _) = outputs
    agree(got, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dynamic", "verify"), [(None, "off"), (None, "quick"), (True, "quick")])
def test_dynamic_length(dynamic, verify):
    """Symbols for tokens alone, or for all sizes, of which the proofs take three times as long."""
    layer, _ = granite()
    layer.eval()
    compiled = refold.compile(layer, dynamic=dynamic, verify=verify, **OPTIONS)
    with torch.no_grad():
        for length in (80, 33):
            x = torch.randn(2, length, 48)
            torch._dynamo.mark_dynamic(x, 1)
            agree(compiled(x), layer(x))
    assert len(compiled.report.graphs) == 1


def mamba1(**options):
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=48, state_size=20, time_step_rank=7, num_hidden_layers=1, **options)
    return MambaMixer(config, 0), config


def scans(report):
    return [r for r in report.rewrites if r.name == "roll up loop" and r.status == "applied"]


@pytest.mark.parametrize("batch", [1, 3])
def test_sequential_scan(batch):
    layer, _ = mamba1(use_associative_scan=False)
    layer.eval()
    x = torch.randn(batch, 33, 48)
    compiled = refold.compile(layer, **OPTIONS)
    with torch.no_grad():
        agree(compiled(x), layer(x))
    *_, found = scans(compiled.report)  # a captured loop is a linear scan first
    assert "as one selective_scan" in found.detail


@pytest.mark.exhaustive
def test_sequential_scan_leaves_its_state_in_a_cache():
    layer, config = mamba1(use_associative_scan=False)
    layer.eval()
    x = torch.randn(2, 20, 48)
    compiled = refold.compile(layer, **OPTIONS)
    outputs = []
    for run in (layer, compiled):
        cache = DynamicCache(config=config)
        with torch.no_grad():
            kept = {families.cache_name(layer): cache}
            steps = [run(x[:, :18], **kept)] + [run(x[:, t : t + 1], **kept) for t in (18, 19)]
        outputs.append(torch.cat(steps, 1))
    agree(outputs[1], outputs[0])
    assert scans(compiled.report)


@pytest.mark.exhaustive
def test_sequential_scan_trains():
    layer, _ = mamba1(use_associative_scan=False)
    assert len(scans(trained(layer, 12))) >= 2, "the forward and its backward"


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [False, WITH_CODE(True)])
def test_associative_scan(training):
    """What transformers calls when it is compiled: a network, read by a matrix product."""
    layer, _ = mamba1()
    layer.train(training)
    x = torch.randn(2, 20, 48, requires_grad=training)
    compiled = refold.compile(layer, **OPTIONS)
    with torch.set_grad_enabled(training):
        got, expected = compiled(x), layer(x)
    agree(got.detach(), expected.detach())
    if training:
        for a, b in zip(
            *(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (got, expected)), strict=True
        ):
            agree(a, b)
    found = [row.detail for row in compiled.report.rewrites if row.status == "applied"]
    assert any("as one selective_scan" in detail for detail in found)


def test_recurrent_gemma_trains_with_its_bounded_derivative():
    """Its root of zero has an infinite derivative, but in the backward that it brings."""
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    sizes = {"hidden_size": 48, "lru_width": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    block = RecurrentGemmaRecurrentBlock(RecurrentGemmaConfig(**sizes, num_hidden_layers=1, vocab_size=8), 0)
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(std=0.3)
        block.rg_lru.recurrent_param[:12] = -200  # decays of one
    positions = torch.arange(40)[None].repeat(2, 1)
    block.forward = functools.partial(block.forward, position_ids=positions, attention_mask=None, use_cache=False)

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(x)[0]

    report = trained(First())
    assert [row.name for row in report.rewrites] == ["roll up loop", "unroll depthwise convolution"]
    assert not any("before autograd" in note for note in report.graphs[0].notes)


MIXERS = {  # the scan of a mixer, and whether a gated norm follows it
    "mamba": ("selective_scan", False),
    "falcon_mamba": ("selective_scan", False),
    "jamba": ("selective_scan", False),
    "mamba2": ("ssd", True),
    "bamba": ("ssd", True),
    "granitemoehybrid": ("ssd", True),
    "falcon_h1": ("ssd", False),
    "nemotron_h": ("ssd", True),
    "zamba2": ("ssd", True),
}


@few("name", list(MIXERS), ["mamba", "mamba2", "falcon_h1"])
def test_inference_on_a_gpu_is_made_of_operators(name, monkeypatch):
    """The scan of a Mamba-2 layer reads parts of what the convolution wrote, as they lie in memory."""
    for module in (early_rewrites, replace_causal_convolutions, replace_gated_norms):
        monkeypatch.setattr(module, "has_pointwise_kernels", lambda device: True)
    modules = families.make(name).modules()
    mixer = next(x for x in modules if hasattr(x, "conv1d") and hasattr(x, "in_proj")).bfloat16()
    scan, norm = MIXERS[name]
    expected = ["causal_conv1d", scan, *["gated_rmsnorm"] * norm]

    def look(graph):
        """Look at the graph that Inductor compiles: its values lie in memory as the operators write them."""
        nodes = [node for node in graph.nodes if getattr(node.target, "namespace", "") == "refold"]
        assert [node.target._opname for node in nodes] == expected
        assert nodes[0].args[5] == "silu"
        if scan == "ssd":
            x, _, _, B, C, *_ = nodes[1].args
            assert all(part.meta["val"].stride(1) == x.meta["val"].stride(1) for part in (B, C))
            assert all(part.meta["val"].stride(-1) == 1 for part in (x, B, C))
            assert not any(part.target is torch.ops.aten.clone.default for part in (x, B, C))

    @captures_loops
    def backend(gm, given):
        made, _ = session.describe_captured(gm, GraphReport(0, "inference"))
        show_graph(made, given, look)
        return made

    x = torch.randn(2, 40, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        got, eager = torch.compile(mixer, backend=backend, fullgraph=True)(x), mixer(x)
    if isinstance(got, tuple):
        got, eager = got[0], eager[0]
    agree(got, eager, 2**18)
