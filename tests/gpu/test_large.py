"""Batch rows of more than 2^31 elements: offsets along rows and along time are 64 bits wide."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import refold.ops  # noqa: E402
from refold.ops.spec import load, shape_of  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("large")]  # one at a time, with --dist loadgroup
ROUNDING = 2**-8  # of bfloat16
SEQLEN = (1 << 19) + 77
TAIL = 1024  # Tokens after which nothing is left of a state, with the decays below.
NEEDED = 48 << 30
CASES = {
    "causal_conv1d": ({"b": 2, "t": SEQLEN, "d": 4096, "w": 4}, {"activation": "silu"}),
    "gated_rmsnorm": ({"*": (2 * SEQLEN,), "d": 4096}, {"eps": 1e-5}),
    "linear_scan": ({"b": 2, "t": SEQLEN, "*": (4096,)}, {}),
    "selective_scan": ({"b": 2, "t": SEQLEN, "d": 4096, "n": 16}, {"dt_softplus": True}),
    "ssd": ({"b": 2, "t": SEQLEN, "h": 64, "p": 64, "g": 1, "n": 128}, {"dt_softplus": True}),
}


def draw(arg, sizes):
    array = torch.randn(
        shape_of(arg.axes[0], sizes), device="cuda", dtype=torch.float32 if arg.wide else torch.bfloat16
    )
    if arg.name == "A":
        return array.abs_().add_(0.5).neg_()
    return array.abs_().clamp_(max=0.9) if arg.name == "a" else array


def tail(array, axes, rows):
    """Return the last batch row and its last tokens, or the last of the ``rows`` if there is no batch."""
    lengths = {"b": 1, "k": 1, "t": TAIL, "*": TAIL if rows else array.numel()}
    return array[tuple(slice(-lengths.get(letter, array.numel()), None) for letter in axes.split())]


@pytest.mark.parametrize("op", CASES)
def test_last_tokens(op):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of free device memory")
    torch.manual_seed(0)
    spec, (sizes, options) = load(op), CASES[op]
    rows = "b" not in sizes
    arrays = {arg.name: draw(arg, sizes) for arg in spec.args if not arg.optional or arg.name == "z"}
    last = {arg.name: tail(arrays[arg.name], arg.axes[0], rows).double() for arg in spec.args if arg.name in arrays}
    assert arrays["x"][-1 if not rows else slice(None)].numel() > 2**31
    got = getattr(refold.ops, op)(**arrays, **options, backend="triton")
    want = getattr(refold.ops, op)(**last, **options, backend="torch")
    for output, one, expected in zip(
        spec.outputs, *(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True
    ):
        one = tail(one, output.axes, rows)
        if "t" in output.axes.split():
            one, expected = one[:, TAIL // 2 :], expected[:, TAIL // 2 :]
        assert (one.double() - expected).norm() <= 1.1 * ROUNDING * expected.norm()


@pytest.mark.parametrize("op", [op for op in CASES if "b" in CASES[op][0]])
def test_gradients_of_last_tokens(op):
    """Gradients of the last tokens know nothing of the first ones."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 2 * NEEDED:
        pytest.skip(f"needs {2 * NEEDED >> 30} GiB of free device memory")
    torch.manual_seed(0)
    spec, (sizes, options) = load(op), CASES[op]
    arrays = {arg.name: draw(arg, sizes) for arg in spec.args if not arg.optional}
    axes = {arg.name: arg.axes[0] for arg in spec.args}
    dy = torch.randn_like(arrays["x"])
    last = {name: tail(array, axes[name], False).double() for name, array in arrays.items()}
    found = []
    for given, backend, out in ((arrays, "triton", dy), (last, "torch", tail(dy, axes["x"], False).double())):
        leaves = {name: array.requires_grad_() for name, array in given.items() if "t" in axes[name].split()}
        y, _ = getattr(refold.ops, op)(**given, **options, backend=backend)
        found.append(dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), out), strict=True)))
        del y
    for name, expected in found[1].items():
        one = tail(found[0][name], axes[name], False)[:, TAIL // 2 :].double()
        expected = expected[:, TAIL // 2 :]
        assert (one - expected).norm() <= 1.5 * ROUNDING * expected.norm(), name
