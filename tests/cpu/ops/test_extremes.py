"""Long sequences, extreme decays, growth, and the memory of the backward."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import refold.ops as ops
from refold.ops.backends import absence
from refold.ops.linear_scan.reference import linear_scan as linear_reference
from refold.ops.selective_scan.reference import selective_scan as selective_reference
from refold.ops.spec import load
from refold.ops.ssd import _torch as ssd_torch
from refold.ops.ssd.reference import ssd as ssd_reference

pytestmark = pytest.mark.rows(6)

LONG = 131072
EPS = torch.finfo(torch.float32).eps


def error(found: torch.Tensor, truth: np.ndarray) -> float:
    assert torch.isfinite(found).all()
    return float(np.abs(found.double().numpy() - truth).max() / np.abs(truth).max())


def drawn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(np.float64)


def steps_over_five_decades(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """With A = -1: decays from exp(-1e-4) to exp(-50), neighbours of different size."""
    return np.exp(rng.uniform(np.log(1e-4), np.log(50.0), shape)).astype(np.float32).astype(np.float64)


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(a).float() for a in arrays]


@pytest.mark.parametrize("decay", ["weak", "mixed", "strong"])
def test_ssd_long(decay: str) -> None:
    rng = np.random.default_rng(0)
    x, B, C, A = drawn(rng, 1, LONG, 1, 2), drawn(rng, 1, LONG, 1, 3), drawn(rng, 1, LONG, 1, 3), -np.ones(1)
    dt = steps_over_five_decades(rng, 1, LONG, 1)
    dt = {"weak": np.full_like(dt, 1e-4).astype(np.float32).astype(np.float64), "mixed": dt, "strong": dt * 0 + 50}[
        decay
    ]
    y, state = ops.ssd(*tensors(x, dt, A, B, C))
    y_true, state_true = ssd_reference(x, dt, A, B, C)
    # A value remembers about 1 / (1 - decay) tokens: as many roundings, their root in expectation.
    memory = 1 / (1 - np.exp(-dt).mean())
    allowed = 8 * EPS * np.sqrt(memory + 3)
    assert error(y, y_true) < allowed
    assert error(state, state_true) < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_decays_behind_large_ones_keep_their_digits(dtype: torch.dtype) -> None:
    """One step that forgets everything, then steps that forget little: sums of log decays must not lose the latter."""
    rng = np.random.default_rng(1)
    x, B, C, A = drawn(rng, 1, 64, 1, 4), drawn(rng, 1, 64, 1, 4), drawn(rng, 1, 64, 1, 4), -np.ones(1)
    dt = np.full((1, 64, 1), 0.01).astype(np.float32).astype(np.float64)
    dt[0, 8] = 50000.0
    x[0, 8] = 0.0
    y, _ = ops.ssd(*(torch.from_numpy(a).to(dtype) for a in (x, dt, A, B, C)), chunk_size=64)
    y_true = ssd_reference(x, dt, A, B, C)[0]
    assert error(y[:, 9:], y_true[:, 9:]) < 8 * torch.finfo(dtype).eps


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("backend", ["torch", *(["triton"] if INTERPRETED else [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("huge", [1e3, 1e9, 1e12, 1e30])
def test_ssd_decays_beyond_any_state(huge: float, dtype: torch.dtype, backend: str) -> None:
    rng = np.random.default_rng(3)
    x, B, C, A = drawn(rng, 1, 40, 1, 4), drawn(rng, 1, 40, 1, 4), drawn(rng, 1, 40, 1, 4), -np.full(1, huge)
    dt = np.where(np.arange(40) % 7 == 3, 1.0, 0.01 / huge)[None, :, None]
    given = [torch.from_numpy(a).to(dtype) for a in (x, dt)] + [torch.from_numpy(A).float()]
    given += [torch.from_numpy(a).to(dtype) for a in (B, C)]
    y, state = ops.ssd(*given, backend=backend)
    y_true, state_true = ssd_reference(*(a.double().numpy() for a in given))
    rounding = 4 * torch.finfo(dtype).eps
    assert error(y, y_true) < rounding
    assert error(state, state_true) < rounding


@pytest.mark.parametrize("backend", ["torch", *(["triton"] if INTERPRETED else [])])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 1.0)])
@pytest.mark.parametrize("softplus", [False, True])
def test_ssd_nan_is_not_clipped_away(limit: tuple[float, float], softplus: bool, backend: str) -> None:
    x, dt, B = torch.ones(1, 20, 1, 4), torch.ones(1, 20, 1), torch.ones(1, 20, 1, 4)
    dt[0, 7] = float("nan")
    options: dict[str, Any] = {"dt_limit": limit, "dt_softplus": softplus, "backend": backend}
    y, state = ops.ssd(x, dt, -torch.ones(1), B, B, **options)
    assert torch.isnan(y[:, 7:]).all()
    assert torch.isnan(state).all()
    y, state = ops.ssd_step(x[:, 7], dt[:, 7], -torch.ones(1), B[:, 7], B[:, 7], torch.ones(1, 1, 4, 4), **options)
    assert torch.isnan(y).all()
    assert torch.isnan(state).all()


@pytest.mark.parametrize("backend", ["torch", *(["triton"] if INTERPRETED else [])])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_conv_nan_at_the_end_stays_at_its_tap(activation: str | None, backend: str) -> None:
    """The last token meets the last tap alone; a kernel's tile goes on after the end of time."""
    x, weight = torch.ones(1, 9, 2), torch.ones(2, 4)
    x[0, 8, 0] = float("nan")
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    y, _ = ops.causal_conv1d(*leaves, activation=activation, backend=backend)
    cotangent = torch.ones_like(y)
    dx, dweight = torch.autograd.grad(y, leaves, cotangent)
    spoiled = torch.tensor([[activation is not None] * 3 + [True], [False] * 4])
    assert torch.equal(dweight.isnan(), spoiled)
    assert dx[0, :5].isfinite().all()
    assert dx[..., 1].isfinite().all()


@pytest.mark.parametrize("backend", ["torch", *(["triton"] if INTERPRETED else [])])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # in what the interpreter computes and drops
def test_conv_nan_in_no_token_after_the_end(backend: str) -> None:
    """The gradient of the last token comes from its own output alone, however large the weights of later ones are."""
    x, weight = torch.ones(1, 9, 2, requires_grad=True), torch.ones(2, 4)
    weight[0, :3] = float("inf")
    y, _ = ops.causal_conv1d(x, weight, backend=backend)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx[0, :, 0].isfinite(), torch.tensor([False] * 8 + [True]))
    assert torch.equal(dx[0, 5:, 1], torch.tensor([4.0, 3.0, 2.0, 1.0]))


@pytest.mark.parametrize("backend", ["torch", *(["triton"] if INTERPRETED else [])])
@pytest.mark.parametrize("lengths", [None, (2, 0, 7)], ids=["alone", "packed"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # in what the interpreter computes and drops
def test_conv_nan_in_no_token_that_a_tap_does_not_reach(lengths: tuple[int, ...] | None, backend: str) -> None:
    """Nothing stands before a sequence without an initial state, so there an infinite weight multiplies nothing."""
    x, weight = torch.ones(1, 9, 2), torch.ones(2, 4)
    weight[0, 0] = float("inf")
    offsets = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
    y, _ = ops.causal_conv1d(x, weight, cu_seqlens=offsets, backend=backend)
    token = [t for n in lengths or (9,) for t in range(n)]
    assert y[0, :, 0].tolist() == [t + 1 if t < 3 else float("inf") for t in token]
    assert y[0, :, 1].tolist() == [min(t, 3) + 1 for t in token]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_selective_scan_long(backend: str) -> None:
    if reason := absence(load("selective_scan"), backend):
        pytest.skip(reason)
    rng = np.random.default_rng(2)
    x, B, C, A = drawn(rng, 1, LONG, 2), drawn(rng, 1, LONG, 2), drawn(rng, 1, LONG, 2), -np.ones((2, 2))
    dt = steps_over_five_decades(rng, 1, LONG, 2)
    y, state = ops.selective_scan(*tensors(x, dt, A, B, C), backend=backend)
    y_true, state_true = selective_reference(x, dt, A, B, C)
    assert error(y, y_true) < 16 * EPS
    assert error(state, state_true) < 16 * EPS


def test_decays_that_overflow_apart_from_their_powers() -> None:
    rng = np.random.default_rng(5)
    x, B, C, A = drawn(rng, 1, 300, 2), drawn(rng, 1, 300, 2), drawn(rng, 1, 300, 2), np.full((2, 2), -18.5)
    decay = rng.choice([-1e8, 0.0, 1e8, 2e8], (1, 300, 2), p=[0.1, 0.05, 0.45, 0.4])
    x_, dt, A_, B_, C_, decay_ = tensors(x, np.ones_like(x), A, B, C, decay)
    y, state = ops.selective_scan(x_, dt, A_, B_, C_, decay=decay_)
    y_true, state_true = selective_reference(x, np.ones_like(x), A, B, C, decay=decay)
    # A relative rounding of an exponent is an absolute one of its power, once per token that is remembered.
    assert error(y, y_true) < 18.5 * 16 * EPS
    assert error(state, state_true) < 18.5 * 16 * EPS


@pytest.mark.parametrize("channels", [2, 4096])
def test_linear_scan_long(channels: int) -> None:
    rng = np.random.default_rng(3)
    seqlen = LONG if channels == 2 else 512
    a = np.exp(-steps_over_five_decades(rng, 1, seqlen, channels)).astype(np.float32).astype(np.float64)
    x = drawn(rng, 1, seqlen, channels)
    h, state = ops.linear_scan(*tensors(a, x))
    h_true, state_true = linear_reference(a, x)
    assert error(h, h_true) < 16 * EPS
    assert error(state, state_true) < 16 * EPS


@pytest.mark.parametrize("chunk_size", [4, 64])
def test_rates_above_zero_grow_as_they_should(chunk_size: int) -> None:
    rng = np.random.default_rng(4)
    x, B, C, A = drawn(rng, 1, 100, 2, 3), drawn(rng, 1, 100, 1, 4), drawn(rng, 1, 100, 1, 4), np.array([0.5, 1.0])
    dt = rng.uniform(0.0, 0.5, (1, 100, 2)).astype(np.float32).astype(np.float64)
    y, state = ops.ssd(*tensors(x, dt, A, B, C), chunk_size=chunk_size)
    y_true, state_true = ssd_reference(x, dt, A, B, C)
    # The exponents reach 50, and a relative rounding of an exponent is an absolute one of its power.
    assert error(y, y_true) < 50 * EPS
    assert error(state, state_true) < 50 * EPS


def test_gradients_of_strong_decays_do_not_cancel() -> None:
    """Where every decay is exp(-40), its gradient is that of a product of tiny factors, not a difference of sums."""
    torch.manual_seed(0)
    x, B = torch.randn(1, 64, 1, 4), torch.randn(1, 64, 1, 4)
    A = torch.tensor([-40.0], requires_grad=True)
    y, _ = ops.ssd(x, torch.ones(1, 64, 1), A, B, B)
    (found,) = torch.autograd.grad(y.sum(), A)
    A64 = A.detach().double().requires_grad_()
    y, _ = ops.ssd(x.double(), torch.ones(1, 64, 1).double(), A64, B.double(), B.double())
    (truth,) = torch.autograd.grad(y.sum(), A64)
    assert abs(found.double() - truth) < 1e-3 * abs(truth)


def test_the_written_out_exponential_is_exact_to_rounding_and_right_at_its_ends() -> None:
    pytest.importorskip("numba")
    # One token from a state of one: the new state is exp2 of the exponent, whose own rounding is taken out.
    exponents = torch.cat([torch.linspace(-125, 127.9, 5000), torch.tensor([-200.0, -1e30, -torch.inf, 0, 128, 1e30])])
    rates, one = (exponents / np.log2(np.e))[:, None], torch.ones(1, 1, len(exponents))
    exact = (rates.double() * np.log2(np.e)).float().double().exp2()[:, 0]
    zero = torch.zeros(1, 1, 1)
    _, state = ops.selective_scan(
        0 * one, one, rates, zero, zero, initial_state=torch.ones(1, len(exponents), 1), backend="numba"
    )
    found = state[0, :, 0].double()
    ends = exact.float().isinf() | (exact < torch.finfo(torch.float32).tiny)
    assert ((found - exact).abs() <= 2 * EPS * exact)[~ends].all()
    assert torch.equal(found[ends].float(), exact[ends].float())


def test_threads_of_the_cpu_kernel_agree_bit_for_bit() -> None:
    pytest.importorskip("numba")
    torch.manual_seed(0)
    x, dt, A, B = torch.randn(2, 70, 900), torch.rand(2, 70, 900), -torch.rand(900, 8), torch.randn(2, 70, 8)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.selective_scan(x, dt, A, B, B, backend="numba"))
    finally:
        torch.set_num_threads(before)
    for y, state in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(state, results[0][1])


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_backward_of_ssd_keeps_one_block_at_a_time() -> None:
    nheads, headdim, dstate, chunk = 8, 2, 2, 64

    def largest(seqlen: int) -> int:
        x, dt = torch.randn(1, seqlen, nheads, headdim), torch.rand(1, seqlen, nheads)
        B, A = torch.randn(1, seqlen, 1, dstate), -torch.ones(nheads)
        with LargestTensor() as record:
            ssd_torch.ssd_backward(
                dy=x, dstate=None, needs=frozenset({"x"}), x=x, dt=dt, A=A, B=B, C=B, D=None, z=None, dt_bias=None,
                initial_state=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                chunk_size=chunk, state_dtype=None,
            )  # fmt: skip
        return record.elements

    seqlen = 1 << 16
    assert largest(seqlen) <= max(seqlen * nheads * headdim, 2 * ssd_torch.BLOCK_ELEMENTS)
    assert largest(seqlen) < seqlen * nheads * chunk // 8, "the decay matrices of all chunks would be this times eight"
