"""The frame of the passes: invariants between them, and the printed graphs."""

import logging
from unittest.mock import Mock

import pytest
import torch

from refold.compiler import pipeline
from refold.compiler.ir.builder import Builder
from refold.compiler.ir.rewrite import Rewrite

aten = torch.ops.aten


def contraction(q, k):
    return (q[:, None] * k[None]).sum(-1)


def inputs():
    return torch.randn(4, 8), torch.randn(4, 8)


def planted(spoil):
    """Return a pass that changes one node wrongly."""

    def apply(graph, wanted):
        node = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)[0]
        spoil(graph, node)
        yield Mock(spec=Rewrite)

    return apply


def forgets_the_value(graph, node):
    del node.meta["val"]


def misstates_strides(graph, node):
    with node.meta["val"].fake_mode:
        node.meta["val"] = node.meta["val"].t()


def misstates_the_dtype(graph, node):
    with node.meta["val"].fake_mode:
        node.meta["val"] = node.meta["val"].double()


def is_out_of_order(graph, node):
    late = Builder(graph.output_node(), like=node).call(aten.neg.default, node)
    node.args = (late, *node.args[1:])


@pytest.mark.parametrize("spoil", [forgets_the_value, misstates_strides, misstates_the_dtype, is_out_of_order])
def test_a_pass_that_breaks_an_invariant_is_named(rewritten, monkeypatch, spoil):
    monkeypatch.setattr(pipeline, "PASSES", [pipeline.Pass("planted", planted(spoil))])
    with pytest.raises(Exception, match=r'after "planted"|before it has been defined'):
        rewritten(contraction, *inputs())


def test_graphs_are_printed_after_each_pass_that_changed_one(rewritten, caplog, monkeypatch, capsys):
    with caplog.at_level(logging.DEBUG, "refold.graphs"):
        rewritten(contraction, *inputs())
    before, after = [record.message for record in caplog.records if record.name == "refold.graphs"]
    assert before.startswith("graph as it was:")
    assert "torch.ops.aten.mul.Tensor" in before
    assert after.startswith('graph after "recover contractions":')
    assert "torch.ops.aten.mm.default" in after
    torch._dynamo.reset()
    monkeypatch.setenv(pipeline.LOG, "1")
    rewritten(contraction, *inputs())
    assert "torch.ops.aten.mm.default" in capsys.readouterr().err
