"""Every case of every operator's spec on the GPU: the Triton backend against the float64 definition.

The bound is twice the error of the torch backend plus what `allowance` computes from dtype and problem, and the
contract's roundings of inputs.
"""

import dataclasses
import importlib
import math
import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from refold.ops.spec import all_specs, load, shape_of  # noqa: E402
from refold.ops.testing import Problem  # noqa: E402
from refold.ops.testing.contract import roundings_of_inputs  # noqa: E402
from refold.ops.testing.frameworks import TorchFrame  # noqa: E402
from refold.verify.numerics import unit_roundoff  # noqa: E402

pytestmark = pytest.mark.gpu
ROUNDING = {dtype: unit_roundoff(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
CASES = [(spec, case) for spec in all_specs() for case in spec.cases()]


def arguments(spec, case, dtype):
    rng = np.random.default_rng(zlib.crc32(f"{spec.name}{case.name}".encode()))
    sizes = dict(case.sizes)
    sizes["k"] = len(case.lengths) or sizes.get("b", 1)
    found = {option.name: case.options.get(option.name, option.default) for option in spec.options}
    for arg in spec.args:
        found[arg.name] = None
        if arg.name == "cu_seqlens":
            if case.lengths:
                found[arg.name] = torch.tensor(np.cumsum([0, *case.lengths]), dtype=torch.int32, device="cuda")
        elif not arg.optional or arg.name in case.given:
            axes = arg.axes[case.layout.get(arg.name, 0)]
            axes = axes if "t" in sizes or not spec.time_optional else axes.replace("t ", "")
            values = np.asarray(arg.sample(rng, shape_of(axes, sizes)))
            name = "bool" if values.dtype == bool else "float32" if arg.wide else str(dtype).removeprefix("torch.")
            found[arg.name] = TorchFrame("cuda").array(values, name, case.strided)
    return found


def allowance(spec, case, dtype):
    """Return a rounding of 16-bit operands, and for float32 sums what `refold.verify.numerics` allows any program.

    Tensor cores cut where others round as they add up, so that twice the torch backend's error alone is no bound.
    """
    given = {letter for arg in spec.args for letter in arg.axes[case.layout.get(arg.name, 0)].split()}
    summed = given - set(spec.outputs[0].axes.split()) | ({"t"} if spec.scans else set())
    terms = math.prod(case.sizes.get(letter, 1) for letter in summed if letter not in ("k", "w-1", "g"))
    operands = 0.0 if dtype == torch.float32 else ROUNDING[dtype]
    return operands + (8 + math.sqrt(terms) / 2) * ROUNDING[torch.float32]


def results(module, spec, values):
    out = getattr(module, spec.name)(**values)
    return out if isinstance(out, tuple) else (out,)


def norm_error(value, truth):
    return float(np.linalg.norm(value - truth) / (np.linalg.norm(truth) + 1e-30))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("spec", "case"), CASES, ids=[f"{s.name}-{c.name}" for s, c in CASES])
def test_matches_definition(spec, case, dtype):
    values = arguments(spec, case, dtype)
    triton, other = (importlib.import_module(f"{spec.module}._{name}") for name in ("triton", "torch"))
    poison = [torch.full((1 << 14,), float("nan"), device="cuda") for _ in range(3)]
    del poison
    got, again, torch_got = results(triton, spec, values), results(triton, spec, values), results(other, spec, values)
    here = {name: value.cpu() for name, value in values.items() if torch.is_tensor(value)}
    arrays = {name: (a.double() if a.is_floating_point() else a).numpy() for name, a in here.items()}
    options = {option.name: values[option.name] for option in spec.options}
    given = Problem(spec, case, str(dtype).removeprefix("torch."), arrays, options)
    more = roundings_of_inputs(given, norm_error)
    for (name, want), one, same, peer in zip(given.results().items(), got, again, torch_got, strict=True):
        error, bound = (norm_error(a.cpu().double().numpy(), want) for a in (one, peer))
        assert one.dtype == peer.dtype
        assert torch.equal(one, same), "two runs differ"
        assert error <= 2 * bound + allowance(spec, case, dtype) + more[name], (name, error, bound)


# Batch, tokens, heads, channels, groups, states: every way to cut heads and states into tiles, tiles that are not full,
# heads that share no group, and time in one piece, in pieces chained by the scan, and passed on.
SSD_SIZES = [
    (1, 1, 2, 64, 1, 128), (2, 333, 8, 64, 2, 128), (1, 1000, 6, 64, 1, 64), (3, 64, 4, 64, 1, 192),
    (2, 333, 8, 128, 2, 128), (2, 200, 4, 256, 2, 256), (2, 333, 8, 32, 2, 64), (2, 333, 6, 64, 2, 256),
    (2, 333, 3, 64, 3, 64), (1, 333, 3, 64, 3, 128), (2, 333, 4, 80, 1, 16), (2, 333, 4, 96, 2, 48),
    (1, 333, 4, 48, 2, 200), (2, 130, 4, 40, 4, 72), (1, 2000, 24, 64, 1, 256), (1, 8192, 4, 192, 1, 128),
    (1, 8192, 3, 64, 3, 64), (1, 4100, 2, 256, 2, 32), (1, 5000, 3, 128, 3, 256), (1, 1024, 5, 160, 1, 112),
    (4, 100, 2, 32, 1, 16), (1, 333, 4, 8, 2, 8),
]  # fmt: skip


def ssd_problem(shape, dtype, gate):
    """Return arrays and options of a call of ssd."""
    b, t, h, p, g, n = shape
    torch.manual_seed(0)
    x, B, C = (torch.randn(*s, device="cuda").to(dtype) for s in ((b, t, h, p), (b, t, g, n), (b, t, g, n)))
    dt = torch.randn(b, t, h, device="cuda").to(dtype)
    arrays = {"x": x, "dt": dt, "A": -torch.rand(h, device="cuda") * min(1, 100 / t), "B": B, "C": C}
    arrays["D"] = torch.randn(h, p, device="cuda")
    if gate:
        arrays |= {"z": torch.randn_like(x), "initial_state": torch.randn(b, h, p, n, device="cuda")}
    return arrays, {"dt_softplus": True}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", SSD_SIZES)
@pytest.mark.parametrize("gate", [False, True])
def test_tensor_core_shapes(dtype, shape, gate):
    import refold

    arrays, options = ssd_problem(shape, dtype, gate)
    found = []
    for _ in range(3):  # The first call plans; later ones find their tensors elsewhere.
        arrays = {name: a.clone() for name, a in arrays.items()}
        found.append(refold.ops.ssd(**arrays, **options, backend="triton"))
    want = refold.ops.ssd(**{name: a.double() for name, a in arrays.items()}, **options, backend="torch")
    for one, same, expected in zip(found[0], found[2], want, strict=True):
        assert torch.equal(one, same)
        assert (one.double() - expected).norm() <= ROUNDING[dtype] * 1.1 * expected.norm()


@pytest.mark.parametrize("shape", SSD_SIZES[1::2])
def test_steps_of_any_sign(shape):
    """The Hopper kernels take them, too: growth, decays of zero, and no decay."""
    import refold

    arrays, options = ssd_problem(shape, torch.bfloat16, True)
    arrays["dt"][:, 7::31] = 0.0
    arrays["dt"][:, 11], arrays["x"][:, 11] = 3e5, 0.0
    options = {"dt_limit": (-math.inf, math.inf)}
    found = [refold.ops.ssd(**arrays, **options, backend="triton") for _ in range(2)]
    want = refold.ops.ssd(**{name: a.double() for name, a in arrays.items()}, **options, backend="torch")
    for one, same, expected in zip(*found, want, strict=True):
        assert torch.equal(one, same)
        assert (one.double() - expected).norm() <= ROUNDING[torch.bfloat16] * 1.1 * expected.norm()


@pytest.mark.parametrize("shape", SSD_SIZES[1:])
@pytest.mark.parametrize("gate", [False, True])
def test_values_that_are_not_finite(shape, gate):
    """They spoil what the definition spoils, and no earlier token, no other channel."""
    import refold

    arrays, options = ssd_problem(shape, torch.bfloat16, gate)
    draw = torch.Generator().manual_seed(0)
    nan, inf = math.nan, math.inf
    for name, value in (("x", nan), ("x", inf), ("dt", inf), ("dt", nan), ("B", nan), ("C", -inf)):
        given = {key: a.clone() for key, a in arrays.items()}
        given[name][tuple(int(torch.randint(0, n, (1,), generator=draw)) for n in given[name].shape)] = value
        got = refold.ops.ssd(**given, **options, backend="triton")
        want = refold.ops.ssd(**{key: a.double() for key, a in given.items()}, **options, backend="torch")
        for one, expected in zip(got, want, strict=True):
            finite = torch.isfinite(expected)
            assert torch.equal(torch.isfinite(one), finite), (name, value)
            kept = torch.where(finite, expected, 0.0)
            difference = torch.where(finite, one.double(), 0.0) - kept
            assert difference.norm() <= ROUNDING[torch.bfloat16] * 1.1 * kept.norm(), (name, value)


@pytest.mark.parametrize(
    ("p", "n", "packed"), [(64, 20, 0), (20, 20, 0), (52, 100, 0), (128, 250, 0), (64, 128, 9), (36, 36, 9)]
)
def test_rows_of_any_size(p, n, packed):
    """Rows that do not lie on 16 bytes, and packs: right each time, and each time the same in every bit."""
    import refold

    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()  # noqa: E731
    given = {"x": draw(1, 3000, 4, p), "dt": draw(1, 3000, 4), "B": draw(1, 3000, 2, n), "C": draw(1, 3000, 2, n)}
    given |= {"A": -torch.rand(4, device="cuda"), "dt_softplus": True}
    wide = {key: a.double() if torch.is_tensor(a) else a for key, a in given.items()}
    if packed:
        cuts = sorted(torch.randperm(2999)[:packed].add(1).tolist())
        given["cu_seqlens"] = wide["cu_seqlens"] = torch.tensor([0, *cuts, 3000], dtype=torch.int32, device="cuda")
    want = refold.ops.ssd(**wide, backend="torch")
    first = refold.ops.ssd(**given, backend="triton")
    for _ in range(20):
        for one, same, expected in zip(refold.ops.ssd(**given, backend="triton"), first, want, strict=True):
            assert torch.equal(one, same)
            assert (one.double() - expected).norm() <= ROUNDING[torch.bfloat16] * 1.1 * expected.norm()


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("skipped", [0, 1, 8])
@pytest.mark.parametrize(("tokens", "heads", "n"), [(200, 8, 128), (200, 8, 64), (1024, 128, 128), (8192, 24, 128)])
def test_initial_states(dtype, skipped, tokens, heads, n):
    """Initial states of any dtype and alignment, for time in one piece, in pieces chained by the scan and passed on."""
    import refold

    torch.manual_seed(0)
    shapes = ((2, tokens, heads, 64), (2, tokens, heads), (2, tokens, 1, n), (2, tokens, 1, n))
    x, dt, B, C = (torch.randn(*shape, device="cuda").bfloat16() for shape in shapes)
    A, size = -torch.rand(heads, device="cuda") / 64, 2 * heads * 64 * n
    for _ in range(2):  # The first call plans.
        wide = torch.full((skipped + size + 1,), float("nan"), device="cuda", dtype=dtype)
        initial = wide[skipped:-1].normal_().view(2, heads, 64, n)
        y, state = refold.ops.ssd(x, dt, A, B, C, dt_softplus=True, initial_state=initial, backend="triton")
    exact = [a.double() for a in (x, dt, A, B, C)]
    want = refold.ops.ssd(*exact, dt_softplus=True, initial_state=initial.double(), backend="torch")
    for one, expected in zip((y, state), want, strict=True):
        assert (one.double() - expected).norm() <= ROUNDING[torch.bfloat16] * 1.1 * expected.norm()


@pytest.mark.parametrize(("tokens", "heads"), [(256, 24), (1024, 128), (8192, 24)])
def test_replayed_from_a_graph(tokens, heads):
    """Two, three and four launches, of which the later ones start early, keep their order in a CUDA graph."""
    import refold

    torch.manual_seed(0)
    shapes = ((1, tokens, heads, 64), (1, tokens, heads), (1, tokens, 1, 128), (1, tokens, 1, 128))
    x, dt, B, C = held = [torch.randn(*shape, device="cuda").bfloat16() for shape in shapes]
    A, initial = -torch.rand(heads, device="cuda"), torch.randn(1, heads, 64, 128, device="cuda")

    def run():
        return refold.ops.ssd(x, dt, A, B, C, dt_softplus=True, initial_state=initial, backend="triton")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for array in held:
        array.normal_()
    for _ in range(10):
        graph.replay()
    for one, expected in zip(captured, run(), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("skipped", [1, 16])
@pytest.mark.parametrize(
    "shape",
    [(1, 77, 37, 1, 12), (2, 129, 208, 1, 16), (1, 2049, 64, 2, 64), (2, 33, 48, 3, 256), (1, 300, 16, 1, 4)],
)
def test_selective_scan_shapes(dtype, packed, decays, skipped, shape):
    """Ragged sizes, rows of a wider array with and without alignment, exponentials from 1 - 2e-4 to 2e-9.

    Given decays have both signs, some are zero, some above one.
    """
    import refold

    b, t, d, g, n = shape
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 1, 1, t // 3, t], dtype=torch.int32, device="cuda") if packed else None
    b, sequences = (1, 4) if packed else (b, b)
    wide = torch.randn(b, t, 3 * d + skipped, device="cuda").to(dtype)
    x, dt, z = (wide[..., skipped + i * d :][..., :d] for i in range(3))
    given = torch.rand_like(wide).mul_(2.4).sub_(1.2)
    decay = given.masked_fill_(torch.rand_like(given) < 0.01, 0)[..., skipped : skipped + d] if decays else None
    A = -torch.exp(torch.rand(d, n, device="cuda") * 11 - 8)
    B, C = (torch.randn(b, t, g, n, device="cuda").to(dtype) for _ in range(2))
    more = {"D": torch.randn(d, device="cuda"), "z": z, "dt_bias": torch.randn(d, device="cuda"),
            "initial_state": torch.randn(sequences, d, n, device="cuda"), "decay": decay}  # fmt: skip
    options = {"cu_seqlens": cu_seqlens, "dt_softplus": True}
    got, peer = (
        refold.ops.selective_scan(x, dt, A, B, C, **more, **options, backend=name) for name in ("triton", "torch")
    )
    double = {name: None if value is None else value.double() for name, value in more.items()}
    want = refold.ops.selective_scan(*(a.double() for a in (x, dt, A, B, C)), **double, **options, backend="torch")
    for one, other, expected in zip(got, peer, want, strict=True):
        error, bound = ((a.double() - expected).norm() / expected.norm() for a in (one, other))
        assert error <= 2 * bound + ROUNDING[dtype], (float(error), float(bound))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("spec", "case"), CASES, ids=[f"{s.name}-{c.name}" for s, c in CASES])
def test_second_gpu_while_the_first_is_current(spec, case):
    """Two calls on each: the first one plans and loads kernels."""
    import refold

    values = arguments(spec, case, torch.bfloat16)
    there = {name: v.to("cuda:1") if torch.is_tensor(v) else v for name, v in values.items()}
    run = getattr(refold.ops, spec.name)
    for _ in range(2):
        here, other = (run(**given, backend="triton") for given in (values, there))
        here, other = ((r if isinstance(r, tuple) else (r,)) for r in (here, other))
        assert torch.cuda.current_device() == 0
        for one, same in zip(here, other, strict=True):
            assert same.device.index == 1
            assert torch.equal(one, same.to(one.device))


@pytest.mark.parametrize("offsets", [[0, 1 << 30, 50], [0, 40, -7, 50], [30, 0, 50, 10], [0, 50, 0, 50, 0, 50]])
@pytest.mark.parametrize("op", ["ssd", "selective_scan", "linear_scan", "causal_conv1d"])
def test_wrong_offsets_stay_inside(op, offsets):
    """Offsets on a GPU are not read by the host: wrong ones may give wrong numbers, no illegal access."""
    spec = load(op)
    case = next(case for case in spec.cases() if case.name == "packed")
    case = dataclasses.replace(case, sizes={**case.sizes, "t": 50}, lengths=(1,) * (len(offsets) - 1))
    values = arguments(spec, case, torch.float32)
    values["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    results(importlib.import_module(f"{spec.module}._triton"), spec, values)
    torch.cuda.synchronize()
