"""Models whose sequence is cut over ranks: loss and gradients equal those of one device.

The processes start once and run everything; the tests look at what they found.
"""

import copy
import itertools
import runpy
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as t
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import refold
from refold.compat.documents import Documents
from refold.errors import ArgumentError, RefoldError
from refold.integrations import documents, mixers, ranks
from refold.ops.torch import cuts
from refold.parallel import Cut, shard
from support.families import NAMES, OTHERS, cache_name, ids, make, qwen
from support.ranks import on_ranks

pytestmark = pytest.mark.exhaustive
BOUND = 1e-6
"""Norms and heads of transformers round to float32."""
OFFSETS = torch.tensor([0, 4, 15, 16, 23])
POSITIONS = torch.cat([torch.arange(n) for n in OFFSETS.diff()])[None]
INDEX = torch.repeat_interleave(torch.arange(4), OFFSETS.diff())[None]
UNEVEN = (11, 3, 9)
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_over_ranks.py")


class Own(t.models.granitemoehybrid.modeling_granitemoehybrid.GraniteMoeHybridAttention):
    """Attention with a forward of its own."""

    def forward(self, x, attention_mask, **kwargs):
        """Return values."""
        return self.v_proj(x), None


class Indexer(torch.nn.Module):
    """What chooses the tokens that attention sees."""


@contextmanager
def one_rank():
    """Make this process a group of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gradients(model, batch, targets, count):
    """Return logits, and the gradient of each parameter of a loss in float64 that ranks sum."""
    logits = model(**batch).logits
    loss = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="sum") / count
    loss.backward()
    return logits.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def compare(model, batch, group, lengths, layout="contiguous", local=(), checkpointing=None):
    """Return the differences from one device; ``local`` names the arguments with an entry per token."""
    model = model.double().train()
    one, many = copy.deepcopy(model), copy.deepcopy(model)
    refold.accelerate(one)
    refold.accelerate(many, group=Cut(group, layout=layout))
    if checkpointing:
        many.gradient_checkpointing_enable(checkpointing)
    places, targets = Cut(group, lengths, layout).positions(), batch["input_ids"].roll(-1, 1)
    own = {n: a[:, places] if n in ("input_ids", *local) else a for n, a in batch.items()}
    y, wanted = gradients(one, batch, targets, targets.numel())
    found_y, found = gradients(many, own, targets[:, places], targets.numel())
    wrong = [] if torch.allclose(found_y, y[:, places], rtol=0, atol=BOUND * float(y.abs().max())) else ["logits"]
    least = 1e-3 * max(g.abs().max() for g in wanted)
    for (name, _), g, w in zip(model.named_parameters(), found, wanted, strict=True):
        dist.all_reduce(g, group=group)
        error = float((g - w).abs().max() / w.abs().max().clamp(min=least))
        wrong += [] if error <= BOUND else [f"{name} {error:.1e}"]
    return wrong


def cases():
    """Yield a name, a model, a batch, the tokens of each rank, and how they are cut."""
    for name in NAMES:
        yield name, make(name), {"input_ids": ids(2)}, (14, 9), {}
    for name in ("qwen3_next", "kimi_linear", "minimax", *{"lara_mini"}.intersection(OTHERS)):
        yield name, make(name, sliding_window=5), {"input_ids": ids(2)}, UNEVEN, {}
    yield "qwen3_5", qwen(), {"input_ids": ids(2)}, UNEVEN, {}
    rope = make("granitemoehybrid", position_embedding_type="rope")
    packed = {"input_ids": ids(), "cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}
    for name, model in {"mamba2": make("mamba2"), "rope": rope, "qwen3_5": qwen()}.items():
        yield f"{name}, offsets", model, packed, UNEVEN, {}
        yield f"{name}, offsets, zig-zag", model, packed, (12, 11), {"layout": "zigzag"}
    yield "positions", rope, {"input_ids": ids(), "position_ids": POSITIONS}, (8, 15), {"local": ["position_ids"]}
    yield "an index", rope, {"input_ids": ids(), "seq_idx": INDEX}, (8, 7, 8), {"local": ["seq_idx"]}
    yield "zig-zag", rope, {"input_ids": ids(2)}, (6, 12, 5), {"layout": "zigzag"}
    yield "zig-zag of one token", rope, {"input_ids": ids(2)}, (1, 21, 1), {"layout": "zigzag"}
    for again, batch in ((True, packed), (False, {"input_ids": ids(2)})):
        yield f"checkpointing, {again}", rope, batch, UNEVEN, {"checkpointing": {"use_reentrant": again}}


def prompts(group):
    """Yield how logits differ that follow a prompt that ranks have read, on each of them alone."""
    rope, more = make("granitemoehybrid", position_embedding_type="rope"), ids(2, 5)
    cut = itertools.cycle([((10, 12, 1), "zigzag"), ((20, 1, 2), "contiguous"), (UNEVEN, "contiguous")])
    models = make("mamba2"), make("jamba"), make("falcon_h1"), qwen().eval(), rope
    for model, (lengths, layout) in zip(models, cut, strict=False):
        model.double()
        places, keyword = Cut(group, lengths, layout).positions(), cache_name(model)
        with torch.no_grad():
            summary = refold.accelerate(model, group=Cut(group, layout=layout))
            cache = model(ids(2)[:, places], use_cache=True)[keyword]
            summary.undo()
            refold.accelerate(model)
            expected = model(torch.cat([ids(2), more], 1), use_cache=False).logits[:, -5:]
            found = torch.cat([model(more[:, i : i + 1], **{keyword: cache}).logits for i in range(5)], 1)
        yield float((found - expected).abs().max() / expected.abs().max())


def sharded(group):
    """Yield how gradients differ whose parameters FSDP2 shards over the same ranks, in float32."""
    mesh, model = init_device_mesh("cpu", (3,)), make("granitemoehybrid", num_local_experts=0).train()
    batch = {"input_ids": ids(), "labels": ids(), "cu_seq_lens_q": OFFSETS}
    one = copy.deepcopy(model)
    refold.accelerate(one)
    one(**batch).loss.backward()
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    refold.accelerate(model, group=mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    (model(**shard(batch, mesh)[0]).loss * 3).backward()  # FSDP averages
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        yield float((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max().clamp(min=1e-3))


def wrapped(group):
    """Yield how gradients differ under DDP, which averages, and compiled, also where ranks have other tokens."""
    model = make("granitemoehybrid", num_local_experts=0, position_embedding_type="rope").train()
    own, _ = shard({"input_ids": ids(), "labels": ids()}, group)
    plain, many, averaged = (copy.deepcopy(model) for _ in range(3))
    for one in (plain, many, averaged):
        refold.accelerate(one, group=group, positions=False)
    plain(**own).loss.backward()
    under = DistributedDataParallel(averaged)
    (under(**own).loss * group.size()).backward()
    for p, q in zip(plain.parameters(), averaged.parameters(), strict=True):
        dist.all_reduce(p.grad)
        yield float((q.grad - p.grad).abs().max() / p.grad.abs().max().clamp(min=1e-3))
    nodes = []

    def backend(graph, inputs):
        nodes.extend(node for node in graph.graph.nodes if "_ranks" in str(node.target))
        return graph

    run = torch.compile(many, backend=backend)
    for lengths in ((10, 5, 8), (6, 5, 12)):
        tokens = {"input_ids": ids()[:, Cut(group, lengths).positions()], "cu_seq_lens_q": OFFSETS}
        found = []
        for call, of in ((plain, plain), (run, many)):
            of.zero_grad()
            call(**tokens).logits.square().mean().backward()
            found.append([p.grad for p in of.parameters()])
        for p, q in zip(*found, strict=True):
            yield float((q - p).abs().max() / p.abs().max().clamp(min=1e-6))
    yield 0.0 if len(nodes) >= 4 else float("inf")  # a convolution and a scan per layer, each time


def refused(group):
    """Yield the errors of calls that a model cannot take over ranks; ``rank 1`` makes them, or all do."""
    model, rank, own = make("granitemoehybrid"), group.rank(), ids(2)
    refold.accelerate(model, group=group)
    mask, two = torch.ones_like(own), POSITIONS.expand(2, -1)
    calls = [
        {"labels": own}, {"use_cache": True}, {"attention_mask": mask.index_fill(1, torch.tensor([0]), 0)},
        {"output_router_logits": True}, {"input_ids": None}, {"seq_idx": INDEX[:, 1:]}, {"input_ids": ids(3)},
    ]  # fmt: skip
    everywhere = [{"position_ids": two}, {"input_ids": ids(), "cu_seq_lens_q": OFFSETS}, {"attention_mask": mask}]
    everywhere.append({"input_ids": ids(2, 5 * (rank > 0))})
    for call in [*({} if rank != 1 else call for call in calls), *everywhere]:
        try:
            model(**{"input_ids": own} | call)
            yield "no error"
        except ArgumentError as error:
            yield str(error)
    for change in (
        lambda: model.model.layers[1].self_attn(torch.ones(1, 2, 48), None),
        lambda: refold.accelerate(model, group=Cut(group, layout="zigzag")),
    ):
        with pytest.raises(ArgumentError) as error:
            change()
        yield str(error.value)


def checked(group):
    """Yield whether `check` is content, and what it says with a bug."""
    model = make("granitemoehybrid", position_embedding_type="rope").train()
    summary = refold.accelerate(model, group=group)
    batch = {"input_ids": ids(), "labels": ids().index_fill(1, OFFSETS[:-1], -100), "cu_seq_lens_q": OFFSETS}
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = summary.check(batch)
    yield "right", set(found) == {"loss", *before} and max(found.values()) < 1e-6
    yield "unchanged", all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    visible, sums = ranks._visible, cuts._Whole.backward
    unseen = staticmethod(lambda ctx, g: (sums(ctx, g)[0] * 0, None, None))
    bugs = {
        "no gradients of keys": (cuts._Whole, "backward", unseen),
        "local positions": (Cut, "positions", lambda cut, device=None: torch.arange(cut.lengths[cut.rank])),
        "later tokens": (ranks, "_visible", lambda documents, *rest: visible(None, *rest)),
        "no group": (mixers, "shared", lambda: None),
    }  # fmt: skip
    for name, bug in bugs.items():
        with mock.patch.object(*bug), pytest.raises(RefoldError) as error:
            summary.check(batch)
        yield name, str(error.value)
    own, _ = shard(batch, group)
    loss = model(**own).loss.detach()
    dist.all_reduce(loss)
    summary.undo()
    refold.accelerate(model)
    yield "loss", bool((loss - model(**batch).loss).abs() < 1e-5)
    yield "undone", model.config._attn_implementation == "sdpa" and documents.shared() is None


def work(rank, size):
    groups, found = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}, {"cases": {}}
    for name, model, batch, lengths, options in cases():
        if rank < len(lengths):
            found["cases"][name] = compare(model, batch, groups[len(lengths)], lengths, **options)
    with mock.patch.multiple(dist, init_process_group=lambda *_: None, destroy_process_group=lambda: None):
        runpy.run_path(EXAMPLE)  # it ends with an error if ranks differ from one device
    found["wrapped"] = list(wrapped(groups[3]))
    return (
        found
        | {"refused": list(refused(groups[3])), "checked": dict(checked(groups[3]))}
        | {"prompts": list(prompts(groups[3])), "sharded": list(sharded(groups[3]))}
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return on_ranks(3, work, tmp_path_factory.mktemp("ranks"))


def test_equals_one_device(results):
    wrong = [(rank, name, lines) for rank, found in results.items() for name, lines in found["cases"].items() if lines]
    assert wrong == []
    assert len(results[0]["cases"]) == len(NAMES) + 16 + ("lara_mini" in OTHERS)


def test_each_rank_goes_on_from_a_prompt_that_all_have_read(results):
    assert max(max(found["prompts"]) for found in results.values()) < BOUND
    assert len(results[0]["prompts"]) == 5


def test_parameters_that_are_sharded(results):
    assert max(max(found["sharded"]) for found in results.values()) < 1e-4


def test_under_ddp_and_compiled(results):
    assert max(max(found["wrapped"]) for found in results.values()) < 1e-4


def test_all_ranks_raise_what_cannot_be_honoured(results):
    said, others = results[1]["refused"], results[0]["refused"]
    expected = [
        "Pass shift_labels and num_items_in_batch with labels, as refold.parallel.shard",
        "Pass use_cache=True under torch.no_grad(), and no cache",
        "attention_mask must be None or ones (2, 23)",
        "Pass output_router_logits=False",
        "a call has input_ids or inputs_embeds",
        "seq_idx must have the shape (2, 23); got (1, 22)",
        "ranks 0, 2 disagree with rank 1 about rows; here it is 3",
    ]
    shared = [
        "documents over ranks must lie in one row; got 2 rows",
        "offsets are those of the whole sequence, 69 tokens on all ranks; they end at 23",
        "no error",  # the group goes on after errors, and a mask of ones hides nothing
        "each rank must have tokens; they have [0, 5, 5]",
        "GraniteMoeHybridAttention: over ranks, it must be called by its model",
        "the model was accelerated without this group. Call its summary's undo() first",
    ]
    for lines, parts in ((said, expected + shared), (others[len(expected) :], shared)):
        assert [part for line, part in zip(lines, parts, strict=True) if part not in line] == []
    assert all("the arguments of rank 1 are refused; the error there" in line for line in others[:6])
    assert "ranks 1 disagree with rank 0 about rows" in others[6]


def test_check_knows_right_from_wrong(results):
    for found in results.values():
        checks = found["checked"]
        assert all(checks[name] is True for name in ("right", "unchanged", "loss", "undone"))
        assert "self_attn.k_proj.weight" in checks["no gradients of keys"]
        assert all("values over 3 ranks differ" in checks[name] for name in ("local positions", "later tokens"))
        assert "causal_conv1d: cu_seqlens must end at t=" in checks["no group"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            lambda attention: setattr(attention, "is_causal", False),
            "self_attn does not: GraniteMoeHybridAttention is not",
        ),
        (
            lambda attention: setattr(attention, "A_log", 1),
            "self_attn does not: GraniteMoeHybridAttention is not known to refold",
        ),
        (lambda attention: setattr(attention, "__class__", Own), "self_attn does not: Own does not call the attention"),
        (
            lambda attention: attention.add_module("indexer", Indexer()),
            "self_attn does not: GraniteMoeHybridAttention has an indexer",
        ),
    ],
)
def test_a_layer_that_does_not_know_ranks_is_named(change, part):
    model = make("granitemoehybrid")
    change(model.model.layers[1].self_attn)
    classes = [type(module) for module in model.modules()]
    with one_rank() as group, pytest.raises(ArgumentError, match=part):
        refold.accelerate(model, group=group)
    assert classes == [type(module) for module in model.modules()]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packed", [False, True])
def test_sliding_windows(layout, packed):
    """Of documents, too; the reference has a mask of all tokens."""
    q, k, v = (torch.randn(2, h, 23, 4, dtype=torch.float64) for h in (4, 2, 2))
    back = torch.arange(23)[:, None] - torch.arange(23)
    seen = (back >= 0) & (back < 5) & (INDEX[0, :, None] == INDEX[0] if packed else back >= 0)
    expected = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).transpose(1, 2)
    packs = Documents.from_offsets(OFFSETS) if packed else None
    with one_rank() as group, documents.reading(packs, Cut(group, (23,), layout)):
        found, _ = ranks.attend(torch.nn.Identity(), q, k, v, None, sliding_window=5)
    torch.testing.assert_close(found, expected)


def test_what_has_no_ranks():
    with one_rank() as group, pytest.raises(ArgumentError, match="Linear has no layer that refold can replace"):
        refold.accelerate(torch.nn.Linear(2, 2), group=group)
    with pytest.raises(ArgumentError, match="the model runs on one device"):
        refold.accelerate(make("mamba2")).check({})
