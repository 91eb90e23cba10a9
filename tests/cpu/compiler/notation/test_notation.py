"""Programs in index notation: the grammar, reading graphs, lowering, multiplying out."""

import json
from random import Random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from refold.compiler.inductor import show_graph
from refold.compiler.notation import algebra, read
from refold.compiler.notation.program import parse
from refold.compiler.notation.rules import Rule, apply_rules
from refold.compiler.passes.multiply_out import multiply_out
from refold.compiler.regions import regions
from refold.errors import ProgramError
from support import programs, random_graphs
from support.examples import examples

PROGRAM = {
    "inputs": {"x": "b k", "w": "n k"},
    "sizes": {"b": 4, "k": 6, "n": 5},
    "steps": [
        {"let": "v[k]", "do": "contract", "of": ["w[n k]"]},
        {"let": "y[b]", "do": "contract", "of": ["x[b k]", "v[k]", 0.5]},
    ],
    "result": "y[b 1]",
}


def changed(**parts):
    return {**PROGRAM, **parts}


def step(**parts):
    return changed(steps=[{**PROGRAM["steps"][0], **parts}], result="v[k]")


def test_a_program_is_written_as_it_was_read():
    program = parse(json.dumps(PROGRAM))
    assert program.to_dict() == PROGRAM
    assert program.shape == (4, 1)
    assert program.terms() == 30
    assert not program.multilinear  # a half is no whole number
    assert str(program).splitlines()[1] == "y[b] = contract(x[b k], v[k], 0.5)"


WRONG = {
    "no object": ([], "a program is an object"),
    "no JSON": ("{", "not JSON"),
    "another key": (changed(code="import os"), "not code"),
    "no steps": (changed(steps=3), "steps must be a list"),
    "an unknown word": (step(do="torch.mm"), "do must be one of"),
    "an attribute": (step(do="__class__"), "do must be one of"),
    "an unknown value": (step(of=["u[n k]"]), "u is not defined before; there are x, w"),
    "another number of axes": (step(of=["w[n]"]), "w has 2 axes, n k"),
    "another size": (step(of=["w[k n]"]), "step 0 (contract): an axis of size 5 is read as (k), which makes 6"),
    "a diagonal": (changed(sizes={"b": 4, "k": 4}, inputs={"x": "b k"},
                           steps=[{"let": "y[b]", "do": "contract", "of": ["x[b b]"]}], result="y[b]"), "no|diagonal"),
    "an option of another word": (step(along="k"), "no option along; it has none"),
    "a letter from nowhere": (step(let="v[k z]"), "the size of z is not known"),
    "defined twice": (changed(steps=[PROGRAM["steps"][0]] * 2), "v is defined already"),
    "too large": (changed(sizes={"b": 1 << 30, "k": 1 << 30, "n": 5}, steps=[
        {"let": "y[b k n]", "do": "mul", "of": ["x[b k]", "w[n k]"]}], result="y[b k n]"), "at most"),
    "an infinite size": (changed(sizes={"b": 0, "k": 6, "n": 5}), "positive integer"),
    "a boolean": (step(of=["w[n k]", True]), "a number or name"),
    "a huge integer": (step(of=["w[n k]", 1 << 60]), "larger than a number"),
    "a name of Python": (step(let="__import__('os')[k]"), "let must be name"),
    "another result": (changed(result="y[b k]"), "it must have the axes b of y"),
    "what does not divide": (changed(inputs={"x": "(b c) k", "w": "n k"}), "size of c is not known"),
    "an elementwise sum": (step(do="exp"), "its result lacks n"),
    "a number sliced": (changed(steps=[{"let": "v[k]", "do": "slice", "of": [1.0], "along": "k"}]), "values"),
    "an unknown operator's argument": (changed(steps=[{"let": "v[b k]", "do": "causal_conv1d", "of": {"q": "x[b k]"}}]),
                                       "no argument q"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_outside_the_grammar_is_refused(name):
    data, message = WRONG[name]
    with pytest.raises(ProgramError) as error:
        parse(data)
    assert any(part in str(error.value) for part in message.split("|")), str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["x[b k]", "w[n k]", "(", "b", "y[]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["inputs", "sizes", "steps", "result", "let", "do", "of", "along", "x", "b"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(JSON, st.sampled_from(["inputs", "sizes", "steps", "result"]))
def test_nonsense_is_refused_and_never_fails_otherwise(data, part):
    for each in (data, {**PROGRAM, part: data}):
        try:
            parse(each)
        except ProgramError:
            continue


def test_shapes_of_the_inputs_that_there_are_count():
    shapes = {"x": (4, 6), "w": (5, 6), "other": (3,)}
    assert parse({**PROGRAM, "sizes": {}}, shapes=shapes).sizes == {"b": 4, "k": 6, "n": 5}
    with pytest.raises(ProgramError, match="input q: there is no such input; there are x, w, other"):
        parse(changed(inputs={"q": "b k"}), shapes=shapes)
    with pytest.raises(ProgramError, match=r"k has size 6 elsewhere and 7 here|axis of size 7"):
        parse(PROGRAM, shapes={**shapes, "w": (5, 7)})


# Graphs are read, and what was read computes the same.


def again(graph):
    """Replace every region of a graph by what index notation says it is, found by its own rule."""
    reading = read.read(graph)
    found = []
    for number, root in enumerate(reading.roots()):
        region = reading.region(root)
        if region is None or not region.inputs:
            continue
        shapes = {name: tuple(reading.nodes[name].meta["val"].shape) for name in region.inputs}
        program = parse(region.to_json(), shapes=shapes)
        assert program.to_json() == region.to_json()
        notes = []
        made = list(apply_rules(graph, lambda site, own=root.name: site.split(":")[0] == own,
                                [Rule(f"again {number}", region, program)], notes))  # fmt: skip
        assert made, (region.to_json(), notes)
        found += made
        reading = read.read(graph)
    graph.lint()
    return found


@pytest.mark.slow
@examples(40)
def test_random_graphs_are_read_and_lowered(r):
    program = random_graphs.graph(r)
    program.hostile.clear()  # infinities are for rewrites: the checks ask after them
    assert programs.judge(program, again).failure == "", program.about


DTYPES = {
    "no axes, and wider": (lambda x: x * x.double().sum(), torch.float16),
    "one axis of size one, and wider": (lambda x: x[0] - x[0, :1].double() / 3, torch.float16),
    "repeated, and wider": (lambda x: (x.double().sum() / 3).expand(3, 3) == x, torch.float32),
    "a constant and an integer": (lambda x: torch.scalar_tensor(1.001, dtype=torch.float64) + x, torch.int64),
    "chosen": (lambda x: torch.where(x > 2, x, x.float().sum() / 3), torch.bfloat16),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_promoted_as_in_the_graph(name):
    """What has axes of size one widens others in PyTorch; in index notation it has no axes."""
    fn, dtype = DTYPES[name]
    program = programs.Program(lambda x: (fn(x), x * 1), [torch.arange(1, 10).reshape(3, 3).to(dtype)], "")
    assert programs.judge(program, again).failure == ""


def test_a_swapped_axis_is_seen(monkeypatch):
    """The test above can fail."""
    right = read._Reader._pointwise

    def wrong(self, node, do, of):
        right(self, node, "add" if do == "sub" else do, of)

    monkeypatch.setattr(read._Reader, "_pointwise", wrong)

    def fn(x, y):
        return ((x - y) * 2,)

    program = programs.Program(fn, [torch.randn(3, 4), torch.randn(3, 4)], "")
    assert programs.judge(program, again).failure


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.norm = nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        y = torch.softmax(nn.functional.gelu(self.norm(self.proj(x))), -1)
        y = torch.cat([y[:, 1:], nn.functional.pad(y[:, :2], (0, 0, 1, 0))], 1).cumsum(1)
        return torch.logsumexp(y.amax(-1, keepdim=True), 1) + nn.functional.softplus(y).mean()


def graph_of(fn, *inputs):
    """Return the ATen graph of a function."""
    found = []

    def backend(gm, given):
        show_graph(gm, given, found.append)
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend)(*inputs)
    return found[0]


def test_a_layer_is_one_region_with_the_users_names():
    with torch.no_grad():
        ((region,), seconds) = regions(Layer(), [torch.randn(2, 4, 16)])
    text = str(region.program)
    assert seconds == 0
    assert {"x", "proj_weight", "proj_bias", "norm_weight", "norm_bias"} == set(region.program.inputs)
    assert "addmm_product[b t h] = contract(x[b t d], proj_weight[h d])" in text
    assert "cumsum(" in text
    assert "slice(" in text
    assert region.line.endswith(
        "return torch.logsumexp(y.amax(-1, keepdim=True), 1) + nn.functional.softplus(y).mean()"
    )
    assert region.cost.flops > 0


def test_what_has_no_word_divides_a_layer():
    layer = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Linear(14, 3))
    with torch.no_grad():
        found, _ = regions(layer, [torch.randn(2, 4, 8)])
    assert ["contract" in str(region.program) for region in found] == [True, True]
    assert "convolution" in found[1].program.inputs


def test_operators_and_scans_are_lowered():
    """All operators of refold are words; a state of one channel a head is a scan of products."""
    b, t, h, p, n = 2, 20, 3, 4, 5
    sizes = {"b": b, "t": t, "h": h, "p": p, "n": n, "g": 3, "w": 2}
    steps = [
        {"let": "y[b t h p]", "do": "ssd", "options": {"chunk_size": 8}, "of": {
            "x": "x[b t h p]", "dt": "dt[b t h]", "A": "A[h]", "B": "B[b t g n]", "C": "C[b t g n]"}},
        {"let": "a[b t h p]", "do": "sigmoid", "of": ["y[b t h p]"]},
        {"let": "s[b t h p]", "do": "linear_scan", "of": ["a[b t h p]", "x[b t h p]"], "along": "t", "reverse": True},
    ]  # fmt: skip
    inputs = {"x": "b t h p", "dt": "b t h", "A": "h", "B": "b t g n", "C": "b t g n"}
    program = parse({"inputs": inputs, "sizes": sizes, "steps": steps, "result": "s[b t (h p)]"})
    shapes = [[sizes[letter] for letter in text.split()] for text in inputs.values()]
    values = [torch.randn(shape) for shape in shapes]
    values[1], values[2] = values[1].abs(), -values[2].abs()
    graph = graph_of(lambda *xs: xs[0].flatten(2) * xs[1].sum() * xs[2].sum() * xs[3].sum() * xs[4].sum(), *values)
    nodes = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
    from refold.compiler.ir.builder import Builder
    from refold.compiler.ir.evaluate import evaluate
    from refold.compiler.notation.lower import lower
    from refold.ops import linear_scan, ssd

    output = graph.output_node()
    root = output.all_input_nodes[0]
    output.args = ((lower(program, Builder(output, like=root), nodes),),)
    (got,) = evaluate(torch.fx.GraphModule({}, graph), values)
    y, _ = ssd(*values, chunk_size=8)
    want, _ = linear_scan(torch.sigmoid(y), values[0], reverse=True)
    torch.testing.assert_close(got, want.flatten(2))


def test_arguments_that_do_not_go_together_are_refused():
    graph = graph_of(lambda x: x * 2, torch.randn(3, 4))
    from refold.compiler.ir.builder import Builder
    from refold.compiler.notation.lower import lower

    program = parse({"inputs": {"x": "b k"}, "sizes": {"b": 3, "k": 4}, "result": "y[b k]",
                     "steps": [{"let": "y[b k]", "do": "gated_rmsnorm", "of": {
                         "x": "x[b k]", "weight": "x[b k]"}}]})  # fmt: skip
    (node,) = graph.find_nodes(op="placeholder")
    count = len(graph.nodes)
    with pytest.raises(ProgramError, match=r"step 0 \(gated_rmsnorm\): "):
        lower(program, Builder(graph.output_node(), like=node), {"x": node})
    assert len(graph.nodes) == count  # nothing is left behind


# Multiplying out

linear = nn.functional.linear
WB = (48, 32), (48,)
LESS = {
    "a sum of a product": (lambda x, w: (torch.matmul(x, w.T) / 2).sum(1, keepdim=True) * 1.5, (16, 32), (48, 32)),
    "a mean of a layer": (lambda x, w, b: linear(x, w, b).mean(-1), (4, 16, 32), *WB),
    "a sum of everything": (lambda x, w, b: (linear(x, w, b) - 3).sum(), (16, 32), *WB),
    "a weighted sum": (lambda x, m, w, b: (linear(x, w, b) * m).sum(-1), (16, 32), (48,), *WB),
    "a diagonal": (lambda a, b: torch.diag(a) @ b, (32,), (32, 16)),
    "a diagonal on the right": (lambda a, b: b @ torch.diag(a), (32,), (16, 32)),
    "diagonals": (lambda a, b: torch.diag_embed(a) @ b, (3, 32), (3, 32, 16)),
    "a chain": (lambda a, b, v: (a @ b) @ v, (32, 32), (32, 32), (32, 2)),
    "linear attention": (lambda q, k, v: ((q @ k.mT) * 0.1) @ v, (2, 64, 8), (2, 64, 8), (2, 64, 8)),
}


def used(x, w):
    y = x @ w.T
    return y.exp() * y.sum(-1, keepdim=True)


SAME = {
    "a product": (lambda a, b: a @ b, (16, 32), (32, 16)),
    "a narrow chain": (lambda a, b, c: (a @ b) @ c, (2, 32), (32, 32), (32, 32)),
    "a sum of what is not linear": (lambda x, w, b: torch.relu(linear(x, w, b)).sum(-1), (16, 32), *WB),
    "a maximum": (lambda x, w, b: linear(x, w, b).amax(-1), (16, 32), *WB),
    "a product that is used": (used, (16, 32), (48, 32)),
}


def multiplied(graph):
    found = list(multiply_out(graph, lambda _: True))
    graph.eliminate_dead_code()
    return found


def seeded(fn, *shapes):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    return programs.Program(lambda *xs: (fn(*xs),), inputs, "")


@pytest.mark.parametrize("name", LESS)
def test_sums_of_products_of_sums_are_less_work(name):
    program = seeded(*LESS[name])
    found = []

    def passes(graph):
        found.extend(multiplied(graph))
        return found

    with torch.no_grad():
        assert programs.judge(program, passes).failure == ""
    (rewrite,) = found
    assert rewrite.after.flops * 2 < rewrite.before.flops
    assert rewrite.name == "multiply out"


@pytest.mark.parametrize("name", SAME)
def test_what_is_no_less_work_stays(name):
    with torch.no_grad():
        assert programs.judge(seeded(*SAME[name]), multiplied).rewrites == []


@examples(40)
def test_random_graphs_are_multiplied_out(r):
    program = random_graphs.graph(r)
    program.hostile.clear()

    def passes(graph):
        with pytest.MonkeyPatch.context() as patch:  # whatever can be, also where it gains nothing
            patch.setattr("refold.compiler.passes.multiply_out.WORTHWHILE", 0)
            return multiplied(graph)

    assert programs.judge(program, passes).failure == "", program.about


def test_a_forgotten_count_is_seen(monkeypatch):
    """The tests above can fail."""
    monkeypatch.setattr(algebra.Expander, "_counted", lambda self, term, out: term)
    with torch.no_grad():
        assert programs.judge(seeded(*LESS["a sum of a product"]), multiplied).failure == ""
        assert programs.judge(seeded(*LESS["a sum of everything"]), multiplied).failure != ""


# Rules

RULE = {"schema": 1, "name": "a vector of sums", "region": {
    "inputs": {"x": "b k", "w": "n k"}, "sizes": {"b": 8, "k": 8, "n": 8},
    "steps": [{"let": "m[b n]", "do": "contract", "of": ["x[b k]", "w[n k]"]},
              {"let": "h[b n]", "do": "div", "of": ["m[b n]", 2]},
              {"let": "y[b]", "do": "contract", "of": ["h[b n]"]}], "result": "y[b]"},
    "program": {**PROGRAM, "sizes": {}, "result": "y[b]"}}  # fmt: skip


def apply(fn, *inputs, rule=RULE):
    graph, notes = graph_of(fn, *inputs), []
    made = list(apply_rules(graph, lambda _: True, [Rule.from_dict(rule)], notes))
    return made, notes


SPELLINGS = {
    "matmul": (lambda x, w: (x @ w.T / 2).sum(1), (5, 7), (6, 7)),
    "linear": (lambda x, w: nn.functional.linear(x, w).div(2).sum(-1, keepdim=True), (5, 7), (6, 7)),
    "transposed": (lambda x, w: (w @ x.T / 2).sum(0), (5, 7), (6, 7)),
    "written out": (lambda x, w: ((x[:, None] * w).sum(-1) / 2).sum(1), (5, 7), (6, 7)),
    "sizes that are equal": (lambda x, w: (x @ w.T / 2).sum(1), (8, 8), (8, 8)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_rule_finds_its_region_in_other_spellings_and_sizes(name):
    fn, *shapes = SPELLINGS[name]
    made, notes = apply(fn, *(torch.randn(shape) for shape in shapes))
    assert [rewrite.name for rewrite in made] == ["rule a vector of sums"]
    assert made[0].site.endswith(":a vector of sums")
    assert notes == []


def test_letters_that_no_value_has_get_sizes():
    """An axis that is read as two, one of them summed over: the sizes of both are known from the reading alone."""
    steps = [{"let": "y[c]", "do": "contract", "of": ["x[(c p)]"]}]
    region = {"inputs": {"x": "k"}, "sizes": {"k": 8, "c": 2, "p": 4}, "steps": steps, "result": "y[c]"}
    rule = {**RULE, "region": region, "program": {**region, "sizes": {"c": 2}}}
    graph = graph_of(lambda x: x.view(2, 3).sum(1).tanh(), torch.randn(6))
    (made,) = apply_rules(graph, lambda _: True, [Rule.from_dict(rule)], [])
    assert made.name == "rule a vector of sums"


@pytest.mark.parametrize("fn", [
    lambda x, w: (x @ w.T / 3).sum(1),
    lambda x, w: (x @ w.T / 2).sum(),
    lambda x, w: (x @ w.T / 2).amax(1),
    lambda x, w: (x @ w.T - 2).sum(1),
    lambda x, w: (x @ w.T / 2),
], ids=["another number", "more axes", "a maximum", "another operation", "less"])  # fmt: skip
def test_a_rule_finds_nothing_else(fn):
    made, _ = apply(fn, torch.randn(5, 7), torch.randn(6, 7))
    assert made == []


def test_a_rule_that_does_not_fit_says_so():
    steps = [
        {"let": "c[b c p]", "do": "mul", "of": ["x[b (c p)]", 1]},
        {"let": "y[b]", "do": "contract", "of": ["c[b c p]"]},
    ]
    rule = {**RULE, "program": {"inputs": {"x": "b k"}, "sizes": {"p": 4}, "steps": steps, "result": "y[b]"}}
    made, notes = apply(SPELLINGS["matmul"][0], torch.randn(5, 7), torch.randn(6, 7), rule=rule)
    assert made == []
    assert "was found at" in notes[0]
    assert "does not fit" in notes[0]


def test_a_program_may_not_write_much_more_than_its_region():
    steps = [{"let": "p[b k n z]", "do": "mul", "of": ["x[b k]", "w[n k]"]},
             {"let": "y[b]", "do": "contract", "of": ["p[b k n z]"]}]  # fmt: skip
    big = {"inputs": {"x": "b k", "w": "n k"}, "sizes": {"z": 1 << 20}, "steps": steps, "result": "y[b]"}
    with pytest.raises(ProgramError, match="elements; for this region at most 16777216 are allowed"):
        Rule.from_dict({**RULE, "program": big})


def test_random_regions_match_themselves_only_where_they_are():
    """A region of one random graph is found in it, and hardly ever in another."""
    found = 0
    for seed in range(6):
        program = random_graphs.graph(Random(seed))
        gm = programs.traced(program)
        other = programs.traced(random_graphs.graph(Random(seed + 100)))
        reading = read.read(gm.graph)
        regions_ = [r for r in map(reading.region, reading.roots()) if r is not None and len(r.steps) > 3]
        for region in regions_:
            rule = Rule("self", region, region)
            found += len(list(apply_rules(other.graph, lambda _: True, [rule], [])))
    assert found == 0
