"""The metadata of a graph is true after every edit: code is generated from it."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from refold.compiler.ir.builder import Builder
from refold.compiler.ir.metadata import refresh, stale, substitute
from refold.compiler.ir.rewrite import replace_node
from refold.compiler.options import Options
from refold.compiler.recurrence import forms
from refold.compiler.validate.region import validate_region

aten = torch.ops.aten
ALWAYS = Options(accept="always")


def traced(fn, *inputs):
    return make_fx(fn, tracing_mode="fake")(*inputs)


def node_of(gm, target):
    (node,) = gm.graph.find_nodes(op="call_function", target=target)
    return node


def relaid(gm):
    """Let what reads an exponential read an equal value with its axes in another order in memory."""
    root = node_of(gm, aten.exp.default)
    build = Builder(root)
    twin = build.call(aten.exp.default, *root.args)
    order = list(range(twin.meta["val"].dim()))[::-1]
    turned = build.call(aten.clone.default, build.permute(twin, order), memory_format=torch.contiguous_format)
    return substitute(root, build.permute(turned, order))


def test_stale_metadata_is_found_and_refreshed():
    x = torch.randn(2, 3, 4, 5)
    fn = lambda x: (x.exp() * 2).tanh().view(6, 20)  # noqa: E731
    gm = traced(fn, x)
    readers = relaid(gm)
    assert "says" in stale(gm.graph)
    refresh(gm.graph, readers)
    assert stale(gm.graph) == ""
    gm.recompile()
    got, want = gm(x), fn(x)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("fn", [lambda x: x.exp(), lambda x: x.exp() * 2])
def test_what_leaves_a_graph_keeps_its_strides(fn):
    x = torch.randn(2, 3, 4, 5)
    gm = traced(fn, x)
    refresh(gm.graph, relaid(gm))
    gm.recompile()
    assert gm(x).stride() == x.stride()


def planted(new_strides):
    """A rewrite that computes the right values, lays them out otherwise, and says that it does not."""
    gm = traced(lambda x: (x * 2).exp(), torch.randn(4, 6))
    root = node_of(gm, aten.exp.default)
    build = Builder(root)
    new = build.call(aten.exp.default, node_of(gm, aten.mul.Tensor))
    if new_strides:
        source = build.call(aten.clone.default, build.permute(new, [1, 0]), memory_format=torch.contiguous_format)
        new = build.permute(source, [1, 0])
        new.meta["val"] = root.meta["val"]
    return replace_node(
        root, new, inside=(), added=build.added, name="planted", why="", detail="", multilinear=False, terms=1
    )  # fmt: skip


def test_a_rewrite_that_misstates_its_strides_is_refused():
    x = [torch.randn(4, 6)]
    assert validate_region(planted(new_strides=False), x, ALWAYS).reason == ""
    assert "metadata is wrong" in validate_region(planted(new_strides=True), x, ALWAYS).reason


def test_a_rewrite_of_other_strides_is_refused():
    rewrite = planted(new_strides=True)
    node_of(rewrite.candidate, aten.clone.default)
    output = rewrite.candidate.graph.output_node().args[0]
    output.meta["val"] = output.args[0].meta["val"].permute(1, 0)
    assert "its result has strides" in validate_region(rewrite, [torch.randn(4, 6)], ALWAYS).reason


def attention(q, k, v, g):
    """Gated linear attention, heads before time."""
    out, state = torch.zeros_like(v), q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    for i in range(q.shape[2]):
        state = state * g[:, :, i].exp()[..., None] + k[:, :, i][..., None] * v[:, :, i][..., None, :]
        out[:, :, i] = (q[:, :, i][..., None] * state).sum(-2)
    return out.transpose(1, 2)


def test_a_scan_read_by_more_than_its_contraction_leaves_no_stale_strides(rewritten, monkeypatch):
    """The outputs of the scan lie in memory otherwise than the sum that they replace; a cosine reads them."""
    monkeypatch.setattr(forms, "FEW", 4)
    q, k, v, g = (torch.randn(1, 8, 2, 4).transpose(1, 2) for _ in range(4))
    gradient = torch.func.grad(lambda *xs: attention(*xs).sin().sum(), argnums=(0, 3))
    outcome = rewritten(gradient, q, k, v, -g.abs())
    assert any("delta_rule" in rewrite.detail for rewrite in outcome.rewrites)
    assert all(not stale(rewrite.candidate.graph) for rewrite in outcome.rewrites)
    # Its region starts where both programs do: values of one that the other lacks cannot be made up.
    inputs = {
        node.name for rewrite in outcome.rewrites for node in rewrite.candidate.graph.find_nodes(op="placeholder")
    }
    assert all(name.startswith("arg") for name in inputs)
    assert outcome.worst() < 1e-5


@pytest.mark.parametrize("shape", [(3, 4, 1, 3), (3, 1, 4), (1, 3), (2, 1, 1, 3)])
@pytest.mark.parametrize("last_first", [False, True])
def test_a_layout_holds_for_axes_of_size_one_too(shape, last_first):
    """What PyTorch makes of two operands depends on these strides, so fake values after them do."""
    fresh = torch.empty(shape[::-1]).permute(*reversed(range(len(shape)))) if last_first else torch.empty(shape)
    gm = traced(lambda x: x.exp(), torch.randn(tuple(2 * n for n in shape))[tuple(slice(n) for n in shape)])
    root = node_of(gm, aten.exp.default)
    like = fresh.exp()
    twin = Builder(root).call(aten.mul.Tensor, root.args[0], 1.0)
    relaid = Builder(root).restride(twin, like)
    if relaid is not twin:
        assert relaid.meta["val"].stride() == like.stride()
