"""Each reader of moves says of a random graph of moves what running the graph does; planted bugs are caught."""

import copy
from random import Random

import pytest
import torch

from refold.compiler.dynamo import split_carries
from refold.compiler.dynamo.body import Traced
from refold.compiler.ir import moves
from refold.compiler.ir.builder import Builder
from refold.compiler.ir.contract import lay_out, operand
from refold.compiler.ir.coordinates import sink_moves
from refold.compiler.ir.index import index
from refold.compiler.ir.sinking import part
from refold.compiler.notation.lower import lower
from refold.compiler.notation.read import read as read_program
from refold.compiler.recurrence import prefix, vectorize
from refold.compiler.recurrence.signs import sign
from support import random_moves

aten = torch.ops.aten
SEEDS = 60
FEW = 20  # without exhaustive tests
SHAPES = ((), (3,), (4, 1), (2, 3), (1, 6, 2), (2, 1, 3, 2))


def ran(gm, *inputs):
    """Run a graph to which nodes were added."""
    gm.graph.lint()
    return torch.fx.GraphModule(gm, gm.graph)(*inputs)


def drawn(r, shape=None, most=5, turned=None):
    shape = r.choice(SHAPES) if shape is None else shape
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    return random_moves.draw(r, x, most, turned), x


def calls(gm):
    return [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor)]


def returned(gm, node):
    gm.graph.output_node().args = (node,)
    return gm


# Readers: for a random graph, pairs of what a reader says of a value and of what it is, and the moves that it read.


def emitted(r):
    """The table itself: what a node is read as, inserted anew."""
    gm, x = drawn(r)
    truth = random_moves.values(gm, x)
    for node in calls(gm):
        if (found := moves.read(node)) is not None:
            twin = copy.deepcopy(gm)
            build = Builder(twin.graph.output_node(), like=next(iter(twin.graph.nodes)))
            same = dict(zip(gm.graph.nodes, twin.graph.nodes, strict=True))
            new = moves.insert(build, found, same.__getitem__)
            yield ran(returned(twin, new), x), truth[node], found


def labelled(r):
    """Labels of axes: a value laid out anew by them."""
    gm, x = drawn(r)
    truth = random_moves.values(gm, x)
    for node in calls(gm):
        product = index(node)
        if product.factors[0].node is not node and product.scale == 1 and len(product.factors) == 1:
            twin = copy.deepcopy(gm)
            same = dict(zip(gm.graph.nodes, twin.graph.nodes, strict=True))
            product = index(same[node])
            build = Builder(twin.graph.output_node(), like=next(iter(twin.graph.nodes)))
            new = lay_out(build, operand(build, product.factors[0]), product)
            yield ran(returned(twin, new), x), truth[node], moves.read(node)


def timed(r):
    """All steps at once: the values of each."""
    gm, x = drawn(r)
    xs = torch.stack([x, -x, 2 * x])
    steps = [random_moves.values(gm, y) for y in xs]
    graph = torch.fx.Graph()
    first = graph.placeholder("x")
    with next(iter(gm.graph.nodes)).meta["val"].fake_mode as mode:
        first.meta["val"] = mode.from_tensor(xs)
    anchor = graph.output(first)
    build = Builder(anchor, like=first)
    found = {next(iter(gm.graph.nodes)): vectorize.Value(first, True)}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        args = torch.fx.node.map_arg(list(node.args), lambda x: found.get(x, x))
        if not any(a in found for a in node.all_input_nodes):
            if isinstance(node.meta["val"], torch.Tensor):
                found[node] = vectorize.Value(build.call(node.target, *node.args, **node.kwargs))
            continue
        try:
            found[node] = vectorize.vectorize_node(build, node, args, 3)
        except vectorize.NotALoop:
            return
        if isinstance(node.meta["val"], torch.Tensor):
            anchor.args = (found[node].node,)
            got = torch.fx.GraphModule({}, copy.deepcopy(graph))(xs)
            yield got, torch.stack([step[node] for step in steps]), moves.read(node)


def worded(r):
    """Words about steps: those of the elements that a value has."""
    shape = list(r.choice([(), (2,), (1, 3), (2, 1)]))
    shape.insert(dim := r.randrange(len(shape) + 1), r.choice([8, 12]))
    gm, _ = drawn(r, tuple(shape))
    start = next(iter(gm.graph.nodes))
    reader = prefix._Reader(False)
    reader.words[start] = reader.begin(start, dim)
    ids = torch.from_numpy(reader.words[start].ids).double().expand(shape).contiguous()
    truth = random_moves.values(torch.fx.GraphModule(gm, gm.graph), ids)
    for node in calls(gm):
        reader.read(node)
        if node in reader.words and reader.words[node].ids.max() <= ids.max():  # not of another operand
            own = torch.from_numpy(reader.words[node].ids.copy()).double()
            labels = reader.words[node].labels
            for d, label in enumerate(labels):
                if isinstance(label, prefix.Blocks):
                    own = own.repeat_interleave(truth[node].shape[d] // own.shape[d], d)
            yield own.expand(truth[node].shape), truth[node], moves.read(node)


def split(r):
    """Elements of a short axis: put together, they are the value."""
    shape = r.choice([s for s in SHAPES if max(s, default=1) > 1])
    axis = r.choice([d for d, n in enumerate(shape) if n > 1])
    gm, x = drawn(r, shape, turned=axis)
    truth = gm(x)
    graph = copy.deepcopy(gm.graph)
    (start,) = graph.find_nodes(op="placeholder")
    with graph.inserting_before(start):
        step = graph.placeholder("step")
    step.meta["val"] = 0
    result = graph.output_node().args[0]
    graph.output_node().args = ((result,),)
    if result is start:
        return
    body = Traced(torch.fx.GraphModule(gm, graph), None, None, step, [start], [result], [], 1, ("h",), [], [], [], [])
    splitter = split_carries._Splitter(body, {0: axis}, True)
    found = splitter.run()
    if found is None:
        return
    parts = [x.narrow(axis, i, 1) for i in range(x.shape[axis])]
    by_name = {found.step: 0, found.placeholders[0]: x, **dict(zip(found.placeholders[1:], parts, strict=True))}
    got = found.module(*(by_name[n] for n in found.module.graph.find_nodes(op="placeholder")))
    for node in calls(gm):
        yield got[0], truth, moves.read(node)
    yield torch.cat(got[1:], axis) if truth.shape == x.shape else got[0], truth, None


def signed(r):
    """Signs: no element has another."""
    gm, x = drawn(r)
    x = x.exp() * r.choice([1, -1])
    (start,) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(start):
        source = gm.graph.call_function(aten.exp.default, (start,))
    source.meta = dict(start.meta)
    start.replace_all_uses_with(source, delete_user_cb=lambda user: user is not source)
    truth = random_moves.values(torch.fx.GraphModule(gm, gm.graph), x)
    for node in calls(gm):
        found = sign(node)
        if found.nonnegative:
            yield (truth[node] < 0).any(), torch.tensor(False), moves.read(node)
        if found.nonpositive:
            yield (truth[node] > 0).any(), torch.tensor(False), moves.read(node)


def told(r):
    """Index notation: a program that computes the value."""
    gm, x = drawn(r)
    truth = random_moves.values(gm, x)
    for i, node in enumerate(gm.graph.nodes):
        if node not in calls(gm):
            continue
        twin = copy.deepcopy(gm)
        root = list(twin.graph.nodes)[i]
        returned(twin, root)
        reading = read_program(twin.graph)
        program = reading.region(root)
        if program is not None:
            build = Builder(twin.graph.output_node(), like=next(iter(twin.graph.nodes)))
            new = lower(program, build, {name: reading.nodes[name] for name in program.inputs})
            yield ran(returned(twin, new), x), truth[node], moves.read(node)


def sunk(r):
    """Moves of a step that go down to where they end: the step does the same."""
    gm, x = drawn(r, most=4)
    node = next(iter(gm.graph.nodes))
    truth = gm(x).exp()
    result = gm.graph.output_node().args[0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        new = gm.graph.call_function(aten.exp.default, (result,))
    with result.meta["val"].fake_mode:
        new.meta["val"] = result.meta["val"].exp()
    returned(gm, new)
    read = [moves.read(n) for n in calls(gm)]
    sink_moves(gm.graph, [node])
    for found in read:
        yield ran(gm, x), truth, found


def sliced(r):
    """Slices that are taken as early as they can be."""
    gm, x = drawn(r)
    truth = random_moves.values(gm, x)
    for i, node in enumerate(gm.graph.nodes):
        if node not in calls(gm) or not node.meta["val"].dim():
            continue
        twin = copy.deepcopy(gm)
        root = list(twin.graph.nodes)[i]
        dim = r.randrange(truth[node].dim())
        size = truth[node].shape[dim]
        if size:
            start = r.randrange(size)
            length = r.randrange(1, size - start + 1)
            build = Builder(twin.graph.output_node(), like=next(iter(twin.graph.nodes)))
            new = part(build, root, dim, start, length)
            yield ran(returned(twin, new), x), truth[node].narrow(dim, start, length), moves.read(node)


LABEL_MOVES = {"Copy", "View", "Permute", "Expand"}
EVERY = {"Copy", "View", "Permute", "Expand", "Slice", "Pad", "Cat", "Flip", "Write"}
READERS = {
    emitted: EVERY,
    labelled: LABEL_MOVES,
    timed: EVERY,
    worded: EVERY - {"Expand"},
    split: EVERY - {"Pad", "Expand"},
    signed: EVERY,
    told: {"View", "Slice", "Pad", "Cat"},
    sunk: {"View", "Permute"},
    sliced: EVERY - {"Write", "Flip"},
}


def check(reader, seeds=SEEDS):
    """Compare what a reader says with the truth; return the moves that it read."""
    kinds = set()
    for seed in range(seeds):
        for got, truth, found in reader(Random(seed)):
            assert torch.equal(torch.as_tensor(got).to(truth.dtype), truth), (seed, found)
            kinds |= {type(x).__name__ for x in found.chain()} if found is not None else set()
    return kinds


@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("reader", READERS, ids=lambda x: x.__name__)
def test_readers(reader, seeds):
    found = check(reader, seeds)
    assert found & READERS[reader] if seeds == FEW else found >= READERS[reader]


def _backwards(patch):
    """The order of a permutation is read from its end."""
    for target in (aten.permute.default, aten.transpose.int, aten.t.default):
        patch.setitem(moves._SPELLINGS, target, _reversed)


_right = moves._SPELLINGS[aten.permute.default]


def _reversed(node, holds):
    found = _right(node, holds)
    return moves.Permute(found.of, found.shape, found.order[::-1])


def _one_further(patch):
    """A position is read one too late."""
    right = moves._position
    patch.setattr(moves, "_position", lambda x, dim, at, shape: right(x, dim, (at + 1) % moves.shape_of(x)[dim], shape))


CAUGHT = (AssertionError, RuntimeError, ValueError, IndexError)


@pytest.mark.parametrize("reader", [emitted, labelled, split, sunk, sliced], ids=lambda x: x.__name__)
def test_a_permutation_read_backwards_is_caught(reader, monkeypatch):
    _backwards(monkeypatch)
    with pytest.raises(CAUGHT):
        check(reader)


@pytest.mark.parametrize("reader", [emitted, timed, worded, split, told, sliced], ids=lambda x: x.__name__)
def test_a_position_too_far_is_caught(reader, monkeypatch):
    _one_further(monkeypatch)
    with pytest.raises(CAUGHT):
        check(reader)
