"""An empty batch gives empty results of the right shapes, and zero gradients for arguments without a batch axis."""

from typing import Any

import numpy as np
import pytest

from refold.errors import ShapeError
from refold.ops.dispatch import call, call_in_place
from refold.ops.spec import CU_SEQLENS, OpSpec, all_specs, shape_of
from refold.ops.testing import frame_of

SIZES = {"t": 5, "d": 4, "n": 3, "g": 1, "h": 2, "p": 3, "w": 3, "b": 0, "k": 0}
SPECS = [pytest.param(spec, id=spec.name) for spec in all_specs()]


def problem(spec: OpSpec, **changed: int) -> tuple[dict[str, Any], list[Any]]:
    sizes: dict[str, Any] = SIZES | {"*": (0,) if spec.name == "gated_rmsnorm" else (4,)} | changed
    arrays = {}
    for arg in spec.args:
        axes = arg.axes[0].replace("t ", "") if spec.time_optional else arg.axes[0]
        if arg.name != CU_SEQLENS:
            arrays[arg.name] = np.ones(shape_of(axes, sizes), "float32" if arg.differentiable else arg.dtypes[0])
    return sizes, [arrays.get(arg.name) for arg in spec.args]


def options(spec: OpSpec) -> list[Any]:
    return [1e-5 if option.name == "eps" else option.default for option in spec.options]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("spec", SPECS)
def test_results_are_empty(spec: OpSpec, framework: str) -> None:
    sizes, arrays = problem(spec)
    if framework != "numpy":
        pytest.importorskip(framework)
        frame = frame_of(framework)
        arrays = [None if a is None else frame.array(a, str(a.dtype)) for a in arrays]
    results = call(spec, arrays, options(spec), None)
    axes = [out.axes.replace("t ", "") if spec.time_optional else out.axes for out in spec.outputs]
    results = results if isinstance(results, tuple) else (results,)
    assert [tuple(y.shape) for y in results] == [shape_of(one, sizes) for one in axes]
    assert all(0 in y.shape for y in results)
    if spec.updates and framework != "jax":
        y = call_in_place(spec, arrays, options(spec), None)
        assert tuple(y.shape) == shape_of(axes[0], sizes)


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_parameters_are_zero(spec: OpSpec) -> None:
    torch = pytest.importorskip("torch")
    _, arrays = problem(spec)
    given = [None if a is None else torch.from_numpy(a) for a in arrays]
    for x in given:
        if x is not None and x.is_floating_point():
            x.requires_grad_()
    results = call(spec, given, options(spec), None)
    sum(y.sum() for y in (results if isinstance(results, tuple) else (results,))).backward()
    grads = [(x.shape, x.grad) for x in given if x is not None and x.requires_grad]
    assert all(grad.shape == shape and not grad.any() for shape, grad in grads)


@pytest.mark.parametrize("axis", ["d", "h"])
def test_other_axes_must_not_be_empty(axis: str) -> None:
    for spec in all_specs():
        _, arrays = problem(spec, **{axis: 0})
        if any(axis in arg.axes[0].split() for arg in spec.args):
            with pytest.raises(ShapeError, match=f"axis {axis} .* is empty: 0"):
                call(spec, arrays, options(spec), None)
