"""Operators on a sequence that ranks share: every case of every spec, values and gradients equal one device's.

The processes start once and run everything; the tests look at what they found.
"""

import itertools
import os
import random
import runpy
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import refold.ops as ops
from refold.errors import ArgumentError, RefoldError
from refold.ops.spec import Example, load
from refold.ops.ssd.spec import EVERY
from refold.ops.testing.frameworks import interpret_quickly
from refold.ops.testing.problems import EPS, problem
from refold.ops.torch import ranks
from refold.ops.torch.cuts import LAYOUTS, Cut, pieces
from refold.parallel import shard
from support.ranks import on_ranks

interpret_quickly()  # in the processes of ranks, too

NAMES = "ssd", "selective_scan", "linear_scan", "delta_rule", "causal_conv1d"
EXAMPLE = str(Path(__file__).parents[3] / "examples" / "share_a_sequence.py")
LENGTHS = {  # of ranks, as parts of the whole: even, uneven, with ranks that have nothing
    2: [(1, 1), (1, 3), (0, 1), (1, 0)],
    3: [(1, 5, 0), (1, 1, 1), (2, 0, 1), (0, 1, 2)],
    4: [(1, 1, 1, 1), (0, 3, 0, 2)],
}


def cut_to(total, parts):
    ends = [round(total * sum(parts[: i + 1]) / sum(parts)) for i in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def tokens_of(whole, rank, lengths, layout):
    """Return the tokens of an array that a rank holds."""
    own = [p for p in pieces(lengths, layout) if p.rank == rank]
    return torch.cat([whole[:, p.begin : p.end] for p in sorted(own, key=lambda p: p.at)], 1)


def sharding(group):
    """Yield the differences between the tokens that ranks hold of a batch and those that they should."""
    x, cu = torch.arange(22).reshape(1, 11, 2), torch.tensor([0, 4, 11])
    for layout in LAYOUTS:
        own, cut = shard({"x": x, "cu_seqlens": cu}, group, layout=layout)
        expected = tokens_of(x, group.rank(), [4, 4, 3], layout)
        if not (torch.equal(own["x"], expected) and own["cu_seqlens"] is cu and cut.lengths == (4, 4, 3)):
            yield own
        if not torch.equal(x[:, cut.positions()], expected):
            yield cut.positions()


def difference(name, found, expected, bound):
    scale = expected.abs().max() if expected.numel() else 0.0
    error = (found - expected).abs().max() if found.numel() else 0.0
    return [] if error <= bound * max(scale, 1e-3) else [f"{name}: {error:.1e} of {scale:.1e}"]


def compare(name, arrays, options, group, lengths, layout="contiguous", told=False, bound=1e-12, again=False):
    """Return the differences between ranks and one device, and, if asked, between two calls."""
    leaves = {n: a.detach().requires_grad_(a.is_floating_point()) for n, a in arrays.items()}
    floats = [n for n, a in leaves.items() if a.requires_grad]
    run, rank = getattr(ops, name), group.rank()
    expected = run(**leaves, **options)
    rng = np.random.default_rng(0)
    weights = [torch.tensor(rng.standard_normal(y.shape)).to(y.dtype) for y in expected]
    loss = sum((y * w).sum() for y, w in zip(expected, weights, strict=True))
    wanted = dict(zip(floats, torch.autograd.grad(loss, [leaves[n] for n in floats]), strict=True))
    told_by_spec = [arg.name for arg in load(name).args if arg.timed] if name in NAMES else list(leaves)
    token = [n for n in told_by_spec if n in leaves and n != "cu_seqlens"]

    def mine(n, a):
        if n not in token:
            return a
        return tokens_of(a.unflatten(1, (sum(lengths), -1)), rank, lengths, layout).flatten(1, 2)  # some write more

    own = {n: mine(n, a.detach()).clone().requires_grad_(n in floats) for n, a in leaves.items()}
    part, calls = tokens_of(weights[0], rank, lengths, layout), []
    for _ in range(1 + again):
        y, state = run(**own, **options, group=Cut(group, lengths if told else None, layout))
        local = (y * part).sum() + (state * weights[1]).sum()
        calls.append([y, state, *torch.autograd.grad(local, [own[n] for n in floats])])
    wrong = [] if all(map(torch.equal, calls[0], calls[-1])) else ["two calls differ"]
    y, state, *found = (a.detach().double() for a in calls[0])
    found = dict(zip(floats, found, strict=True))
    for a in (state, *(found[n] for n in floats if n not in token)):
        dist.all_reduce(a, group=group)
    wrong += difference("y", y, tokens_of(expected[0], rank, lengths, layout), bound)
    wrong += difference("state", state, expected[1], bound)
    return wrong + [line for n in floats for line in difference(f"d{n}", found[n], mine(n, wanted[n]), bound)]


def cases(name):
    """Yield the problems of a spec, how many ranks share each, and how."""
    spec = load(name)
    chosen = [c for c in spec.cases() if not c.options.get("reverse") and "4100" not in str(c.sizes)]
    for turn, case in enumerate(chosen):
        made = problem(spec, case, "float64")
        arrays = {n: torch.tensor(a) for n, a in made.arrays.items()}
        parts, start = LENGTHS[2 + turn % 3], turn // 3
        for i, part in enumerate([*parts, *parts][start % len(parts) :][: 2 if case.lengths else 1]):
            layout = LAYOUTS[(i + turn // 3) % 2]
            lengths = cut_to(case.sizes["t"], part)
            bound = 64 * EPS["float64"] * made.growth()
            yield f"{case.name} {lengths} {layout}", arrays, case.options, lengths, layout, i % 2 == 0, bound


CHOICES = {
    "dt_softplus": [True], "dt_limit": [(0.1, 0.5), (-1.0, 0.4)], "chunk_size": [1, 4, 7], "activation": ["silu"],
    "state_dtype": [torch.float64], "scale": [-0.5], "normalize": [True], "lower_bound": [-1.0, -20.0],
    "beta_limit": [1.0, 2.0], "erase": [False],
}  # fmt: skip
"""What options may be, besides what they are if they are not given."""


def mixes(name, count, dtypes=("float64", "float64", "float32", "bfloat16")):
    """Yield problems of random sizes, arguments, options, documents and cuts over three ranks, some in 16 bits."""
    spec, made, seed = load(name), 0, 0
    while made < count:
        seed += 1
        rng = random.Random(f"{name} {seed}")
        t, packed = rng.choice([3, 12, 23, 40, 65]), rng.random() < 0.5
        ends = sorted([0, t, *rng.choices(range(t + 1), k=rng.randrange(6))])
        sizes = {"b": 1 if packed else 2, "t": t, "h": 4, "d": 4, "g": rng.choice([1, 2, 4]), "p": 3, "n": 4, "*": (2,)}
        optional = [arg.name for arg in spec.args if arg.optional and arg.name != "cu_seqlens" and rng.random() < 0.6]
        case = Example(
            f"mix {seed}", sizes | {"w": rng.choice([1, 2, 4, 9])}, frozenset(optional),
            {o.name: rng.choice([o.default, *CHOICES.get(o.name, ())]) for o in spec.options},
            tuple(np.diff(ends).tolist()) if packed else (), {a.name: rng.randrange(len(a.axes)) for a in spec.args},
        )  # fmt: skip
        problem_ = problem(spec, case, rng.choice(dtypes))
        try:
            problem_.meta()
        except RefoldError:  # what shapes something else that is not given
            continue
        made += 1
        arrays = {n: torch.tensor(a).to(getattr(torch, problem_.dtype_of(n))) for n, a in problem_.arrays.items()}
        lengths = cut_to(t, rng.choice([(1, 1, 1), (2, 1, 5), (0, 1, 3), (1, 0, 0), (5, 1, 0)]))
        rest = rng.choice(LAYOUTS), rng.random() < 0.5, 8 * problem_.tolerance()
        yield f"{case} {problem_.dtype} {lengths} {rest}", arrays, case.options, lengths, *rest


def every_case(groups, rank, share):
    for name in NAMES:
        for label, arrays, options, lengths, *rest in islice(cases(name), 0, None, share):
            if rank < len(lengths):
                for line in compare(name, arrays, options, groups[len(lengths)], lengths, *rest):
                    yield name, f"rank {rank}: {label}: {line}"


def forgetful(arrays, options):
    """Return arrays with which nothing is left of a state after a few tokens; None if a state stays."""
    if "A" in arrays:
        return arrays | {"A": -30 - 40 * arrays["A"].abs()}
    if "a" in arrays:
        return arrays | {"a": arrays["a"] * 1e-5}
    if "g" not in arrays or "r" in arrays:
        return None
    made_of = "A_log" in arrays or options.get("lower_bound") is not None
    return arrays | {"g": (60 + arrays["g"].abs()) * (1 if made_of else -1)}


FADING = "ssd", "selective_scan", "linear_scan", "delta_rule"


def faded(group, share, names=FADING):
    """Compare where nothing is left of a state after a few tokens, and count those that are computed again."""
    look, reaches = ranks._Call.look, []

    def seen(call, part):
        near = look(call, part)
        reaches.append((part.enters is not False, near, part.count))
        return near

    with mock.patch.object(ranks._Call, "look", seen):
        for name in names:
            for label, arrays, options, _, layout, told, _ in islice(cases(name), 0, None, share):
                total = next(iter(arrays.values())).shape[1]
                if total < 15 or (strong := forgetful(arrays, options)) is None:
                    continue
                for lengths in ([total - 12, 7, 5], [2, 0, total - 2]):
                    for line in compare(name, strong, options, group, lengths, layout, told):
                        yield f"{name} {label} {lengths}: {line}"
    few = sum(enters and near < count for enters, near, count in reaches)
    if 2 * few < sum(enters and count > 4 for enters, _, count in reaches):
        yield f"few of {reaches} are short"


def spoiled(group, share):
    """Yield where NaN is not as on one device, if what one rank gets is not finite and all states fade."""
    for op in FADING:
        for label, arrays, options, _, layout, told, _ in islice(cases(op), 0, None, share):
            total, name = next(iter(arrays.values())).shape[1], "v" if op == "delta_rule" else "x"
            if total < 15 or (strong := forgetful(arrays, options)) is None:
                continue
            spoilt = arrays[name].clone()
            spoilt[(slice(None), 1, *[0] * (spoilt.dim() - 2))] = torch.nan
            given, lengths = strong | {name: spoilt}, [2, total - 5, 3]
            expected = getattr(ops, op)(**given, **options)
            token = [arg.name for arg in load(op).args if arg.timed and arg.name in given]
            own = {n: tokens_of(a, group.rank(), lengths, layout) if n in token else a for n, a in given.items()}
            y, state = getattr(ops, op)(**own, **options, group=Cut(group, lengths if told else None, layout))
            dist.all_reduce(state, group=group)
            wanted = tokens_of(expected[0], group.rank(), lengths, layout)
            if not (torch.equal(y.isnan(), wanted.isnan()) and torch.equal(state.isnan(), expected[1].isnan())):
                yield f"{op} {label} {layout}"


def mixed(group, share):
    """Compare random mixes, and look whether calls can be repeated."""
    for name in NAMES:
        for label, arrays, options, *cut in mixes(name, 16 // share):
            for line in compare(name, arrays, options, group, *cut, again=True):
                yield f"{name} {label}: {line}"


def walked(rank, size, share):
    """Yield how kernels for what enters differ from one device, and which bugs in them are not seen."""
    from refold.ops.ssd import _triton_enter as kernels
    from refold.ops.ssd.tables import ENTER

    group, hook, ran = dist.group.WORLD, ranks._Call.hook, []

    def seen(call, name, part, **given):
        ran.append(name)
        return hook(call, name, part, **given)

    def differences(label, arrays, options, *cut):
        return [f"{label}: {line}" for line in compare("ssd", arrays, options | {"backend": "triton"}, group, *cut)]

    found = {"walked": []}
    with mock.patch.dict(ENTER.default, block=4, walkers=2), mock.patch.object(ranks._Call, "hook", seen):
        for label, arrays, options, *cut in mixes("ssd", 7 if share == 1 else 0, ["float32", "bfloat16"]):
            found["walked"] += differences(label, arrays, options, *cut, True)
            strong = forgetful(arrays, options)
            found["walked"] += differences(f"{label}, fading", strong, options, *cut)
        t, documents, cut = (50, (3, 35, 12), [10, 33, 7]) if share == 1 else (26, (3, 17, 6), [5, 17, 4])
        case = Example("every", {"b": 1, "t": t, "h": 2, "p": 3, "g": 1, "n": 4}, EVERY, {}, documents)
        made = problem(load("ssd"), case)
        arrays = {n: torch.tensor(a).to(getattr(torch, made.dtype_of(n))) for n, a in made.arrays.items()}
        arrays["A"] *= 0.1
        given = arrays, {}, cut, "contiguous", True, 8 * made.tolerance()
        found["walked"] += differences("every", *given, True)
        found["walked"] += [f"{name} never ran" for name in ranks.HOOKS if rank and name not in ran]
        decays, following, tokens = kernels._decays, kernels._next, kernels._tokens
        bugs = {
            "nothing decays between blocks": (kernels, "_next", lambda sums, base, *rest: base),
            "nothing decays before blocks": (kernels, "_decays", lambda *a: decays(*a[:3], a[3] * 0.0, *a[4:])),
            "another's blocks": (kernels, "_next", lambda sums, base, block, *a: following(sums, base, block * 0, *a)),
            "documents do not end": (kernels, "_tokens", lambda end, seqlen: tokens(None, seqlen)),
            "no gate": (kernels, "silu", lambda z: z * 0.0 + 1.0),
            "too short": (ranks, "NEGLIGIBLE", 2.0**22),
        }
        found["bugs"] = {}
        for bug, (owner, name, replacement) in bugs.items() if share == 1 else ():
            with mock.patch.object(owner, name, replacement):
                found["bugs"][bug] = differences("every", *given)
        told = [None] * size
        dist.all_gather_object(told, found)
    return told


def family(group):
    """Compare the layers that write more than once per token."""
    rng = np.random.default_rng(1)

    def draw(*shape):
        return torch.tensor(rng.standard_normal(shape))

    x = {n: draw(1, 11, 2, 3) for n in ("q", "k", "v", "a", "b")}
    writes = {n: draw(1, 22, 2, 3) for n in ("k", "v")}
    packed = {"cu_seqlens": torch.tensor([0, 2, 2, 9, 11])}
    product = {"q": x["q"], **writes, "g": -draw(1, 11, 2).abs(), "beta": draw(1, 22, 2).sigmoid()} | packed
    receptances = x | packed | {"w": -0.5 * draw(1, 11, 2, 3).abs()}
    for told, layout, lengths in itertools.product((False, True), LAYOUTS, ([5, 0, 6], [5, 1, 5])):
        yield from compare("rwkv7", receptances, {}, group, lengths, layout, told)
        yield from compare("delta_product", product, {"normalize": True}, group, lengths, layout, told)


def small(rank):
    """Return a call in which each of three ranks has three tokens."""
    generator = torch.Generator().manual_seed(0)
    x, B = torch.randn(1, 9, 2, 3, generator=generator), torch.randn(1, 9, 1, 2, generator=generator)
    own = slice(3 * rank, 3 * rank + 3)
    return {
        "x": x[:, own],
        "dt": x[:, own, :, 0].abs(),
        "A": torch.tensor([-1.0, -0.1]),
        "B": B[:, own],
        "C": B[:, own],
    }


def errors(group):
    """Yield the error of a call that one rank makes otherwise."""
    rank = group.rank()
    good = small(rank)
    changed = [
        {"A": good["A"].double()},
        {"chunk_size": 4},
        {"cu_seqlens": torch.tensor([0, 5 + (rank == 1), 9])},
        {"B": good["B"][:, :2]},
        {"chunk_size": -1},
        {"dt_limit": "all"},
    ]
    for one in changed:
        given = good | (one if rank == 1 or "cu_seqlens" in one else {})
        try:
            ops.ssd(**given, group=group)
            yield "no error"
        except ArgumentError as error:
            yield f"{type(error).__name__} {error}"
    try:
        ops.ssd(**good, group=Cut(group, layout=LAYOUTS[rank == 1]))
        yield "no error"
    except ArgumentError as error:
        yield str(error)
    for wrong in ({"reverse": True}, {"reverse": False}):
        try:
            ops.linear_scan(good["x"], good["x"], group=group, **wrong)
            yield "no error"
        except ArgumentError as error:
            yield str(error)
    keys = torch.full((1, 3, 2, 4), 0.5)
    for wrong in (keys[..., :3], [1.0]):
        given = dict.fromkeys("qwkvab", keys) | ({"k": wrong} if rank == 1 else {})
        try:
            ops.rwkv7(**given, group=group)
            yield "no error"
        except ArgumentError as error:
            yield str(error)


def planted(group, share):
    """Yield a bug, an operator, and how many differences are seen with it."""
    moved = ranks._Call.moved
    bugs = {
        "not transposed": (ranks._Call, "moved", lambda *args, back=False: moved(*args)),
        "not moved": (ranks._Call, "moved", lambda *args, back=False: args[-1]),
        "another document": (ranks._Part, "row", lambda self, states, document: states[:1]),
    }  # fmt: skip
    for bug, (owner, name, replacement) in bugs.items():
        with mock.patch.object(owner, name, replacement):
            for op in ("ssd", "delta_rule", "causal_conv1d"):
                start = "packed" if owner is ranks._Part else "all_t"
                _, arrays, options, *_ = max((c for c in cases(op) if c[0].startswith(start)), key=lambda c: sum(c[3]))
                total = next(iter(arrays.values())).shape[1]
                yield f"{bug}: {op}", len(compare(op, arrays, options, group, [total - 5, 2, 3]))
    with mock.patch.object(ranks, "NEGLIGIBLE", 2.0**30):
        yield "too short", len(list(faded(group, share)))
    with mock.patch.object(ranks._Part, "put", lambda self, states, document, row, where: states):
        yield "nothing enters", len(list(faded(group, share)))


def heads_and_time():
    """Yield how heads over one dimension of a mesh, and time over the other, differ from one device."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "time"))
    whole = {n: torch.cat([small(rank)[n] for rank in range(3)], 1) for n in ("x", "dt", "B", "C")}
    whole = {n: a.requires_grad_() for n, a in (whole | {"A": small(0)["A"]}).items()}
    y, _ = ops.ssd(**whole)
    wanted = torch.autograd.grad(y.sin().sum(), list(whole.values()))
    rank = mesh["time"].get_local_rank()
    own = {n: a if n == "A" else tokens_of(a, rank, [4, 5], "contiguous") for n, a in whole.items()}
    heads = {"x": Shard(2), "dt": Shard(2), "A": Shard(0)}
    placed = {
        n: distribute_tensor(a.detach(), mesh["heads"], [heads.get(n, Replicate())]).requires_grad_()
        for n, a in own.items()
    }
    found, _ = ops.ssd(**placed, group=mesh["time"])
    yield from difference("y", found.full_tensor(), tokens_of(y, rank, [4, 5], "contiguous"), 1e-6)
    gradients = torch.autograd.grad(found.full_tensor().sin().sum(), list(placed.values()))
    for n, gradient, one in zip(whole, gradients, wanted, strict=True):
        gradient = gradient.full_tensor()
        if n == "A":
            dist.all_reduce(gradient, group=mesh["time"].get_group())
        yield from difference(n, gradient, one if n == "A" else tokens_of(one, rank, [4, 5], "contiguous"), 1e-6)


def compiled(group):
    """Return the nodes of the compiled call, and its differences from the call as it is."""
    seen = []

    def backend(graph, inputs):
        seen.extend(str(n.target) for n in graph.graph.nodes if "ranks" in str(n.target))
        return graph

    run = torch.compile(lambda **given: ops.ssd(**given, group=group)[0].sin(), backend=backend, fullgraph=True)
    given = {n: a.requires_grad_() for n, a in small(group.rank()).items()}
    results = [f(**given) for f in (run, lambda **given: ops.ssd(**given, group=group)[0].sin())]
    gradients = [torch.autograd.grad(y.sum(), list(given.values())) for y in results]
    return seen, all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)) and torch.equal(*results)


def work(rank, size, share):
    groups = {n: dist.new_group(list(range(n))) for n in LENGTHS}
    found = {name: [] for name in NAMES} | {"family": []}
    for name, line in every_case(groups, rank, share):
        found[name].append(line)
    if rank < 3:
        found["family"] = [*family(groups[3]), *sharding(groups[3])]
        found["errors"] = list(errors(groups[3]))
        found["planted"] = dict(planted(groups[3], share))
        found["mixed"] = list(mixed(groups[3], share))
        found["faded"] = [*faded(groups[3], share), *spoiled(groups[3], share)]
        with mock.patch.dict(ranks.STEPS, cpu=2):
            found["faded"] += faded(groups[3], share, ("ssd", "delta_rule"))
        found["compiled"] = compiled(groups[3])
    found["family"] += heads_and_time()
    with mock.patch.multiple(dist, init_process_group=lambda *_: None, destroy_process_group=lambda: None):
        runpy.run_path(EXAMPLE)  # it ends with an error if ranks differ from one device
    told = [None] * size
    dist.all_gather_object(told, found)
    if rank == size - 1:
        os._exit(0)  # a rank that dies
    try:
        ops.linear_scan(torch.ones(1, 2, 3), torch.ones(1, 2, 3), group=dist.group.WORLD)
        found["death"] = "no error"
    except RuntimeError as error:
        found["death"] = str(error)
    return told if rank == 0 else found["death"]


@pytest.fixture(scope="module", params=[8, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def results(tmp_path_factory, request):
    """Run one case in eight, or all."""
    return on_ranks(4, partial(work, share=request.param), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*NAMES, "family", "mixed", "faded"])
def test_equals_one_device(results, name):
    assert [line for found in results[0] for line in found.get(name, ())] == []


@pytest.mark.slow
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["some", "all"])
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton_interpreted")
def test_kernels_for_what_enters(share, tmp_path):
    told = on_ranks(3, partial(walked, share=share), tmp_path)[0]
    assert [line for found in told for line in found["walked"]] == []
    assert [bug for bug in told[0]["bugs"] if not any(found["bugs"][bug] for found in told)] == []


def test_ranks_that_disagree_all_stop(results):
    good, bad = results[0][0]["errors"], results[0][1]["errors"]
    for at, name in enumerate(["A; here it is (torch.float32, 2)", "options", "cu_seqlens; here it is [0, 5, 9]"]):
        assert f"ssd: ranks 1 disagree with rank 0 about {name}" in good[at]
        assert "ssd: ranks 0, 2 disagree with rank 1 about" in bad[at]
    assert all("the arguments of rank 1 are refused; the error there" in line for line in good[3:6])
    assert all(
        part in line for part, line in zip(["B has t=2", "chunk_size must", "dt_limit must"], bad[3:6], strict=True)
    )
    assert "disagree with rank 0 about the layout; here it is contiguous" in good[6]
    assert "time runs forward; got reverse=True" in good[7]
    assert good[8] == "no error"  # the group goes on after errors
    assert all("the arguments of rank 1 are refused; the error there" in line for line in good[9:])
    assert bad[9].startswith("rwkv7: k has n=3 but q has n=4")
    assert bad[10].startswith("rwkv7: k is a builtins.list but q is a torch array")


def test_a_rank_that_dies_is_an_error_on_the_others(results):
    assert set(results) == {0, 1, 2}
    assert "no error" not in (results[1], results[2])


def test_bugs_are_seen(results):
    seen = {bug: sum(found["planted"][bug] for found in results[0][:3]) for bug in results[0][0]["planted"]}
    missed = [bug for bug, count in seen.items() if not count]
    assert missed == ["not transposed: ssd"]  # its maps are numbers


def test_a_compiled_call_is_one_node_with_the_same_bits(results):
    assert [found["compiled"] for found in results[0][:3]] == [(["refold.ssd_ranks.default"], True)] * 3


def test_what_is_no_group_is_refused():
    x = torch.ones(1, 2, 3)
    with pytest.raises(ArgumentError, match="group must be a process group or a device mesh; got 'ranks'"):
        ops.linear_scan(x, x, group="ranks")
    with pytest.raises(ArgumentError, match=r"group is for tensors of PyTorch; got numpy\. In JAX, shard"):
        ops.linear_scan(x.numpy(), x.numpy(), group="ranks")
