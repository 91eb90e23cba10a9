"""The Gluon backward of the Mamba-1 scan: interpreted, and compiled for a GPU that is not there."""

import os
from dataclasses import replace
from importlib import import_module

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from refold.ops.spec import load  # noqa: E402
from refold.ops.testing import check, problem  # noqa: E402
from refold.ops.torch.launch import Launch  # noqa: E402
from support import gluon  # noqa: E402

pytestmark = pytest.mark.rows(6)

SPEC = load("selective_scan")
CASES = {case.name: case for case in SPEC.cases()}
KERNELS = "refold.ops.selective_scan._gluon_backward_kernels"
plans = import_module("refold.ops.selective_scan._triton_backward")

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton_interpreted, in a process of its own"
)


@pytest.fixture
def launched(monkeypatch):
    """Plan as for a GPU with asynchronous copies, run kernels in Gluon with torch, and list what runs."""
    names = gluon.launched(monkeypatch, KERNELS)
    monkeypatch.setattr(plans, "copies_ahead", lambda device: True)
    return names


def given(name, dtype="float32", **sizes):
    case = CASES[name]
    wide = case.sizes | {"d": 32, "n": 16, "g": 1} | sizes
    return problem(SPEC, replace(case, name=f"wide_{name}", sizes={k: wide[k] for k in case.sizes}), dtype)


@interpreted
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("all_t33", {"d": 96, "g": 2}),
        ("packed_empty", {}),
        ("all_t17", {"t": 32}),  # all tiles are full
        ("all_t17", {"b": 1, "t": 150}),  # in segments
        ("all_t17", {"n": 32}),
        ("all_t17", {"n": 64}),
    ],
)
def test_gradients(name, sizes, launched):
    check("gradients", given(name, **sizes), "triton")
    assert "_selective_scan_bwd_lanes_kernel" in launched
    assert ("_selective_scan_bwd_segments_lanes_kernel" in launched) == (sizes.get("t") == 150)


@interpreted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, launched):
    check("gradients", given("all_t17", dtype), "triton")
    assert "_selective_scan_bwd_lanes_kernel" in launched


@pytest.mark.exhaustive
@interpreted
@pytest.mark.parametrize("name", ["all_t17", "packed_empty"])
def test_values_that_are_not_finite(name, launched):
    """What is not finite stays at its tokens."""
    check("nonfinite_gradients", given(name), "triton")
    check("zero_decay", given(name), "triton")
    assert "_selective_scan_bwd_lanes_kernel" in launched


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled where kernels are interpreted"
)
@pytest.mark.parametrize("dstate", [16, 64])
def test_kernel_compiles(dstate, monkeypatch):
    """Layouts are such that no data moves between threads where the kernel says so; two programs share a processor."""
    runtime = pytest.importorskip("triton.experimental.gluon._runtime")
    import triton
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where nothing is said.
    monkeypatch.setattr(plans, "copies_ahead", lambda device: True)
    made = []
    monkeypatch.setattr(
        "refold.ops.torch.launch.compile_together", lambda *args: None
    )  # it asks the driver for a stream
    monkeypatch.setattr(plans, "Launch", lambda *args: made.append(Launch(*args)) or made[-1])
    x, B = torch.zeros(2, 64, 32, dtype=torch.bfloat16), torch.zeros(2, 64, dstate, dtype=torch.bfloat16)
    plans.selective_scan_backward.plan(
        dy=x, dstate=None, needs=frozenset(), x=x, dt=x, A=torch.zeros(32, dstate), B=B, C=B, D=torch.zeros(32), z=x,
        dt_bias=torch.zeros(32), decay=None, initial_state=None, cu_seqlens=None, dt_softplus=True, state_dtype=None,
    )  # fmt: skip
    launch = next(one for one in made if one.kernel.__name__ == "_selective_scan_bwd_lanes_kernel")
    absent = ("cu_seqlens_ptr", "decay_ptr", "initial_ptr", "dfinal_ptr", "ddecay_ptr", "dinitial_ptr")
    halves = ("x_ptr", "dt_ptr", "B_ptr", "C_ptr", "z_ptr", "dy_ptr", "dx_ptr", "ddt_ptr", "dz_ptr")
    signature, constants = {}, {}
    for i, name in enumerate(launch.kernel.arg_names):
        if name in launch.consts or name in absent:
            signature[name], constants[i,] = "constexpr", launch.consts.get(name)
        elif name == "flags_ptr":
            signature[name] = "*i32"
        elif name.endswith("_ptr"):
            signature[name] = "*bf16" if name in halves else "*fp32"
        else:
            signature[name] = "i32"
    whole = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind != "constexpr"}
    source = runtime.GluonASTSource(launch.kernel, signature, constexprs=constants, attrs=whole)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))
    assert 2 * (kernel.metadata.shared + 1024) <= 228 * 1024
