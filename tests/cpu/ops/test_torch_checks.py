"""Wrong torch arguments, and metadata that must not be read from values."""

import numpy as np
import pytest
import torch

import refold.ops as ops
from refold.errors import ArgumentError, BackendUnsupported, DeviceError, DtypeError, ShapeError
from refold.ops.spec import all_specs
from refold.ops.testing import problem


def arrays(t: int = 6) -> dict[str, torch.Tensor]:
    return {
        "x": torch.ones(1, t, 2, 3), "dt": torch.ones(1, t, 2), "A": -torch.ones(2), "B": torch.ones(1, t, 1, 4),
        "C": torch.ones(1, t, 1, 4),
    }  # fmt: skip


def test_wrong_shape_dtype_and_framework() -> None:
    with pytest.raises(ShapeError, match=r"ssd: dt has t=5 but x has t=6"):
        ops.ssd(**{**arrays(), "dt": torch.ones(1, 5, 2)})
    with pytest.raises(DtypeError, match=r"ssd: A must be float32 or .*; got int64"):
        ops.ssd(**{**arrays(), "A": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(DtypeError, match=r"ssd: C is a numpy.ndarray but x is a torch array"):
        ops.ssd(**{**arrays(), "C": torch.ones(1, 6, 1, 4).numpy()})


@pytest.mark.parametrize("other", [torch.float32, torch.Size([6]), torch.nn.ReLU(), np.dtype("float32")], ids=str)
def test_what_comes_from_a_framework_and_is_no_array(other: object) -> None:
    ops.ssd(**arrays())
    for name in arrays():
        with pytest.raises(DtypeError, match=rf"ssd: {name} "):
            ops.ssd(**{**arrays(), name: other})


def test_wrong_device() -> None:
    with pytest.raises(DeviceError, match=r"ssd: B is on meta but x is on cpu. Move B"):
        ops.ssd(**{**arrays(), "B": torch.ones(1, 6, 1, 4, device="meta")})


def test_errors_do_not_become_remembered_answers() -> None:
    for _ in range(2):
        with pytest.raises(ArgumentError, match="chunk_size"):
            ops.ssd(**arrays(), chunk_size=0)


def test_options_no_schema_takes() -> None:
    with pytest.raises(ArgumentError, match=r"state_dtype must be None or a float torch\.dtype; got 'float16'"):
        ops.ssd(**arrays(), state_dtype="float16")
    with pytest.raises(ArgumentError, match="activation must be None or 'silu'; got "):
        ops.causal_conv1d(torch.ones(1, 6, 3), torch.ones(3, 2), activation=["silu"])


@pytest.mark.parametrize("offsets", [[1, 6], [0, 4], [0, 7], [0, 5, 3, 6]])
def test_inconsistent_packs_on_the_host_are_found_on_every_call(offsets: list[int]) -> None:
    ops.ssd(**arrays(), cu_seqlens=torch.tensor([0] * (len(offsets) - 1) + [6]))
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        ops.ssd(**arrays(), cu_seqlens=torch.tensor(offsets))


def test_named_backend_runs_or_raises() -> None:
    with pytest.raises(BackendUnsupported, match="jax: takes jax arrays; these are torch"):
        ops.ssd(**arrays(), backend="jax")
    explanation = ops.explain("ssd", **arrays())
    assert explanation["torch"] is None
    if explanation["triton"] is not None:
        with pytest.raises(BackendUnsupported, match="triton: "):
            ops.ssd(**arrays(), backend="triton")
    with pytest.raises(ArgumentError, match="explain: missing a required argument: 'x'"):
        ops.explain("ssd")


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_derivatives_that_do_not_exist_are_refused(backend: str) -> None:
    x = torch.rand(1, 6, 3)

    def scan(x: torch.Tensor) -> torch.Tensor:
        return ops.linear_scan(x, x, backend=backend)[0]

    with pytest.raises(ArgumentError, match="linear_scan: it has no forward-mode derivative"):
        torch.func.jvp(scan, (x,), (x,))
    for transform in (torch.func.grad(lambda x: scan(x).sum()), torch.func.jacrev(scan)):
        with pytest.raises(ArgumentError, match=r"linear_scan: torch\.func cannot differentiate it"):
            transform(x)
    with torch.autograd.forward_ad.dual_level():
        scan(x)
        with pytest.raises(ArgumentError, match="linear_scan: it has no forward-mode derivative"):
            scan(torch.autograd.forward_ad.make_dual(x, x))
    x.requires_grad_()
    (dx,) = torch.autograd.grad(scan(x).square().sum(), x, create_graph=True)
    with pytest.raises(ArgumentError, match="linear_scan: it has no second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("limit", [0.1, None, (0.0,), (1.0, 0.0), (float("nan"), 1.0), ("0", "1")])
def test_limits_that_are_no_ordered_pair_are_refused(limit: object) -> None:
    with pytest.raises(ArgumentError, match="dt_limit must be a pair of numbers"):
        ops.ssd(**arrays(), dt_limit=limit)


def test_subclasses_and_parameters_are_torch_arrays() -> None:
    class Tagged(torch.Tensor):
        pass

    given = arrays()
    y, _ = ops.ssd(**{**given, "A": torch.nn.Parameter(given["A"]), "x": given["x"].as_subclass(Tagged)})
    assert y.shape == given["x"].shape


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_state_dtype(state_dtype: torch.dtype) -> None:
    _, state = ops.ssd(**arrays(), state_dtype=state_dtype)
    assert state.dtype == state_dtype
    x = torch.ones(1, 6, 3)
    _, state = ops.selective_scan(
        x, x, -torch.ones(3, 4), torch.ones(1, 6, 4), torch.ones(1, 6, 4), state_dtype=state_dtype
    )
    assert state.dtype == state_dtype


LAYOUTS = {
    "nested": lambda a: torch.nested.nested_tensor([a]),
    "nested, jagged": lambda a: torch.nested.nested_tensor([a], layout=torch.jagged),
    "sparse_coo": lambda a: a.to_sparse(),
    "sparse_csr": lambda a: a.reshape(len(a), -1).to_sparse_csr(),
    "_mkldnn": lambda a: a.to_mkldnn(),
}
SPECS = {spec.name: spec for spec in all_specs()}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*SPECS, "ssd_step_"])
def test_tensors_that_are_not_dense(name: str, layout: str) -> None:
    """Also after a call of the same shapes: what remembers calls must not ask such a tensor for its strides."""
    spec = SPECS[name.removesuffix("_") if name == "ssd_step_" else name]
    case = spec.cases()[0]
    given = {k: torch.from_numpy(a).float() for k, a in problem(spec, case).arrays.items()}
    options = dict(case.options) | {arg.name: None for arg in spec.args if arg.name not in given}
    function = getattr(ops, name)
    for argument in [None, *given]:
        if argument is None:
            function(**given, **options)
            continue
        bad = {**given, argument: LAYOUTS[layout](given[argument])}
        with pytest.raises(
            ArgumentError, match=rf"{argument} must be a dense tensor; it is {layout.partition(',')[0]}"
        ):
            function(**bad, **options)
        with pytest.raises(ArgumentError, match="must be a dense tensor"):
            ops.explain(spec.name, **bad, **options)


def test_numbers_of_numpy_and_integers_are_options() -> None:
    x = torch.rand(2, 6, 4)
    assert torch.equal(
        ops.gated_rmsnorm(x, None, x[0, 0], eps=0), ops.gated_rmsnorm(x, None, x[0, 0], eps=np.float64(0.0))
    )
    assert torch.equal(ops.linear_scan(x, x, reverse=np.bool_(True))[0], ops.linear_scan(x, x, reverse=True)[0])
    ops.ssd(**arrays(), chunk_size=np.int64(2))
    with pytest.raises(ArgumentError, match="reverse must be a bool"):
        ops.linear_scan(x, x, reverse=1)


def test_arrays_without_memory_give_results_without_memory() -> None:
    y, state = ops.ssd(**{name: x.to("meta") for name, x in arrays().items()})
    assert (y.device.type, y.shape, state.shape) == ("meta", (1, 6, 2, 3), (1, 2, 3, 4))
    with pytest.raises(DeviceError, match=r"ssd: .* is on (meta|cpu) but x is on (cpu|meta)"):
        ops.ssd(**{**arrays(), "x": arrays()["x"].to("meta")})


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "z"])
@pytest.mark.parametrize("op", ["ssd_step", "selective_scan_step"])
def test_an_argument_may_lie_in_the_state_that_is_overwritten(op: str, name: str) -> None:
    sizes = {"b": 2, "h": 2, "p": 8, "g": 2, "n": 8} if op == "ssd_step" else {"b": 2, "d": 16, "n": 16, "g": 2}
    axes = {
        "ssd_step": {"x": "b h p", "dt": "b h", "A": "h", "B": "b g n", "C": "b g n", "z": "b h p"},
        "selective_scan_step": {"x": "b d", "dt": "b d", "A": "d n", "B": "b n", "C": "b n", "z": "b d"},
    }[op]
    given = {key: torch.rand([sizes[axis] for axis in kind.split()]) for key, kind in axes.items()}
    given["A"] = -given["A"]
    state = torch.rand([sizes[axis] for axis in ("b h p n" if op == "ssd_step" else "b d n").split()])
    given[name] = state.flatten(1)[:, 5 : 5 + given[name][0].numel()].view(given[name].shape)
    y, last = getattr(ops, op)(**{**given, name: given[name].clone()}, state=state.clone())
    written, same = getattr(ops, f"{op}_")(**given, state=state)
    assert same is state
    torch.testing.assert_close((written, state), (y, last))


def test_a_state_that_overlaps_itself_is_not_overwritten() -> None:
    given = {name: x[:, 0] if x.dim() > 1 else x for name, x in arrays().items()}
    overlapping = torch.zeros(40).as_strided((1, 2, 3, 4), (24, 12, 2, 1))
    for state in (overlapping, torch.zeros(1, 2, 1, 4).expand(1, 2, 3, 4)):
        with pytest.raises(ArgumentError, match=r"ssd_step_: the elements of state must not share memory; .* strides"):
            ops.ssd_step_(**given, state=state)
    for state in (torch.zeros(2, 3, 1, 4).permute(2, 0, 3, 1).mT, torch.zeros(1, 2, 6, 8)[:, :, ::2, ::2]):
        ops.ssd_step_(**given, state=state)


def test_zeros_without_memory_are_zeros() -> None:
    """Forward-mode derivatives of PyTorch make such tensors; kernels that get their address end the process."""
    a, zeros = torch.rand(2, 5, 3), torch._efficientzerotensor(2, 5, 3)
    for backend in ("numba", "torch"):
        h, _ = ops.linear_scan(a, zeros, backend=backend)
        assert torch.equal(h, torch.zeros(2, 5, 3))


@pytest.mark.parametrize("make", [lambda: torch.randn(2, 4, 3, dtype=torch.cfloat).conj().imag,
                                  lambda: torch._efficientzerotensor(2, 4, 3)], ids=["negated", "zeros"])  # fmt: skip
def test_a_state_that_does_not_hold_its_values_is_not_overwritten(make) -> None:
    with pytest.raises(ArgumentError, match="causal_conv1d_step_: state must be a tensor that can be written"):
        ops.causal_conv1d_step_(torch.ones(2, 4), torch.ones(4, 4), make())


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_numpy_arrays_that_mean_something_else() -> None:
    x = np.ones((3, 3))
    for other, remedy in ((np.ma.masked_array(x, x > 0), "filled"), (np.matrix(x), "numpy.asarray")):
        with pytest.raises(ArgumentError, match=f"linear_scan: x must be a plain numpy array; .* Pass .*{remedy}"):
            ops.linear_scan(x, other)
    state = np.ones((2, 4, 3))
    state.flags.writeable = False
    with pytest.raises(ArgumentError, match="causal_conv1d_step_: state is read-only"):
        ops.causal_conv1d_step_(np.ones((2, 4)), np.ones((4, 4)), state)
