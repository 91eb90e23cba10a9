"""Kernels for a state that enters, on one GPU: ranks of this process take turns, and equal the whole in float64."""

from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from refold import ops  # noqa: E402
from refold.ops.spec import Example, load  # noqa: E402
from refold.ops.ssd.spec import EVERY  # noqa: E402
from refold.ops.testing import problem  # noqa: E402
from refold.ops.torch import ranks  # noqa: E402

pytestmark = pytest.mark.gpu
SPEC = load("ssd")
LENGTHS = [700, 1300, 1000]
SIZES = {"b": 1, "t": sum(LENGTHS), "h": 4, "p": 64, "g": 2, "n": 128}
OPTIONS = {"dt_softplus": True, "dt_limit": (0.001, 2.0)}
CASES = {
    "plain": (SIZES | {"b": 2}, frozenset(), {}, ()),
    "all": (SIZES | {"b": 2}, EVERY, OPTIONS, ()),
    "packed": (SIZES, EVERY, OPTIONS, (100, 590, 1500, 0, 810)),
    "wide": (SIZES | {"p": 80, "n": 200}, EVERY, OPTIONS, ()),
    "any sign": (SIZES, EVERY, {"dt_limit": (-0.1, 0.1)}, ()),
}
TOKENS = {arg.name for arg in SPEC.args if arg.timed}


def in_turn(arrays, options, weights):
    """Return y, the final states, and gradients by name, of ranks that are told what earlier turns told."""
    told = {}

    def gathered(cut, row, meanwhile=lambda: None):
        told[cut.rank] = row.clone()
        meanwhile()
        return torch.stack([told.get(r, row * torch.nan) for r in range(cut.size)])

    def cut(rank, lengths, layout):
        return SimpleNamespace(rank=int(rank), size=len(LENGTHS), lengths=lengths, layout=layout, runs=1)

    begins = [sum(LENGTHS[:rank]) for rank in range(len(LENGTHS))]
    options = SPEC.written_options([options.get(o.name, o.default) for o in SPEC.options])
    calls, found = [], {}
    with mock.patch.object(ranks, "all_gather", gathered), mock.patch.object(ranks, "cut_of_node", cut):
        for rank, (begin, count) in enumerate(zip(begins, LENGTHS, strict=True)):
            own = {n: a[:, begin : begin + count] if n in TOKENS else a for n, a in arrays.items()}
            own = {n: a.detach().requires_grad_(a.is_floating_point()) for n, a in own.items()}
            given = [own.get(arg.name) for arg in SPEC.args]
            y, state = ranks.OPS["ssd_ranks"](*given, *options, "triton", str(rank), LENGTHS, "contiguous", 1)[:2]
            calls.append((own, y, state, weights[0][:, begin : begin + count]))
        told.clear()
        for own, y, state, weight in reversed(calls):
            leaves = {n: a for n, a in own.items() if a.requires_grad}
            gradients = torch.autograd.grad((y * weight).sum() + (state * weights[1]).sum(), list(leaves.values()))
            for n, gradient in zip(leaves, gradients, strict=True):
                found.setdefault(n, []).insert(0, gradient)
    gradients = {n: torch.cat(g, 1) if n in TOKENS else torch.stack(g).sum(0) for n, g in found.items()}
    return {"y": torch.cat([y for _, y, *_ in calls], 1), "state": sum(state for *_, state, _ in calls)} | gradients


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("decay", [1.0, 0.01])
@pytest.mark.parametrize("name", CASES)
def test_equal_one_device(name, decay, dtype):
    sizes, given, options, lengths = CASES[name]
    made = problem(SPEC, Example(name, sizes, given, options, lengths), dtype)
    arrays = {n: torch.tensor(a, device="cuda").to(getattr(torch, made.dtype_of(n))) for n, a in made.arrays.items()}
    arrays["A"] *= decay
    if name == "any sign":  # of all sizes: where every step is cut off, its gradient is zero
        arrays["dt"] -= 0.35
    whole = {n: a.double().requires_grad_() if a.is_floating_point() else a for n, a in arrays.items()}
    results = ops.ssd(**whole, **options, backend="torch")
    weights = [torch.randn_like(a) for a in results]
    leaves = [a for a in whole.values() if a.requires_grad]
    wanted = torch.autograd.grad(sum((a * w).sum() for a, w in zip(results, weights, strict=True)), leaves)
    names = ["y", "state", *(n for n, a in whole.items() if a.requires_grad)]
    found = [in_turn(arrays, options, weights) for _ in range(2)]
    for n, expected in zip(names, (*results, *wanted), strict=True):
        assert torch.equal(found[0][n], found[1][n]), n
        error = (found[0][n].double() - expected).norm() / expected.norm()
        assert error <= 4 * made.tolerance(), (n, float(error))
