"""A node where gradients are off: its function is called at once, unless something looks at the call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.fake_impl import FakeImplHolder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import refold
from refold.ops.torch import private
from refold.ops.torch.nodes import AT_ONCE, define, differentiate

CALLS: list[str] = []


def _double(x: Tensor) -> Tensor:
    CALLS.append("forward")
    return 2 * x


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    CALLS.append("save")


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return 3 * grad  # not the derivative: its use is seen


DOUBLE = define("a_node_of_tests", "(Tensor x) -> Tensor", _double, torch.empty_like)
differentiate("a_node_of_tests", _backward, _save)


@contextmanager
def through_pytorch(count: int) -> Iterator[None]:
    """Expect so many calls to pass what PyTorch does for autograd, which calls the dispatcher again."""
    seen, guard = [], torch._C._AutoDispatchBelowAutograd
    torch._C._AutoDispatchBelowAutograd = lambda: (seen.append(1), guard())[1]  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch._C._AutoDispatchBelowAutograd = guard  # type: ignore[misc]
    assert len(seen) == count


@pytest.fixture(autouse=True)
def none_before() -> None:
    CALLS.clear()


@pytest.mark.skipif(private.gradient is None, reason="this release of PyTorch has other private names")
def test_without_gradients_the_function_is_called_at_once() -> None:
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad(), through_pytorch(0):
        y = DOUBLE(x)
    assert torch.equal(y, 2 * x.detach())
    assert (y.requires_grad, CALLS) == (False, ["forward"])
    with through_pytorch(1):
        assert not DOUBLE(x.detach()).requires_grad


def test_the_gradient_is_the_one_given() -> None:
    x = torch.randn(3, requires_grad=True)
    assert torch.autograd.grad(DOUBLE(x).sum(), x)[0].tolist() == [3.0] * 3
    assert CALLS == ["forward", "save"]
    with torch.no_grad():
        DOUBLE(x)
    assert torch.autograd.grad(DOUBLE(x).sum(), x)[0].tolist() == [3.0] * 3


@pytest.mark.parametrize("grad", [False, True])
def test_who_looks_at_calls_sees_the_node(grad: bool) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **kwargs or {})

    x: Tensor = torch.ones(2)
    seen: list[Any] = []
    with torch.set_grad_enabled(grad), Names():
        DOUBLE(x)
    assert seen[0] is DOUBLE
    with torch.set_grad_enabled(grad):
        traced = make_fx(DOUBLE)(x)
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [DOUBLE]


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_without_memory(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        assert DOUBLE(torch.ones(2, device="meta")).device.type == "meta"
        with FakeTensorMode() as mode:
            assert DOUBLE(mode.from_tensor(torch.ones(2))).shape == (2,)
    assert CALLS == []


def test_shapes_are_registered_by_pytorch_if_its_private_names_change(monkeypatch: pytest.MonkeyPatch) -> None:
    own, calls = FakeImplHolder.register, list[str]()

    def other(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(args[1])
        if len(calls) == 1:
            raise TypeError("another signature")
        return own(self, *args, **options)

    monkeypatch.setattr(FakeImplHolder, "register", other)
    node = define("another_node_of_tests", "(Tensor x) -> Tensor", _double, torch.empty_like)
    with FakeTensorMode() as mode:
        assert node(mode.from_tensor(torch.ones(2))).shape == (2,)
    assert len(calls) == 2


@pytest.mark.parametrize("grad", [False, True])
def test_lazy_conjugates_and_signs(grad: bool) -> None:
    x = torch.randn(4, dtype=torch.complex64)
    with torch.set_grad_enabled(grad):
        for view in (x.conj(), x.conj().imag):
            torch.testing.assert_close(DOUBLE(view), 2 * view)


@pytest.mark.parametrize("grad", [False, True])
def test_functional_tensors_and_inference_mode(grad: bool) -> None:
    x = torch.randn(2, 3)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(torch.func.functionalize(DOUBLE)(x), 2 * x)
        with torch.inference_mode():
            torch.testing.assert_close(DOUBLE(x), 2 * x)


def test_no_tangent_is_lost_without_gradients() -> None:
    """With gradients off, PyTorch's own functions do keep tangents: a node raises, or keeps them."""
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        try:
            tangent = forward_ad.unpack_dual(DOUBLE(dual)).tangent
        except (RuntimeError, NotImplementedError):
            return
        assert tangent is not None
        assert tangent.tolist() == [2.0, 2.0]


# In compiled code --------------------------------------------------------------------------------------


def test_what_compiled_code_calls_leaves_to_the_dispatcher_what_it_must_do() -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **kwargs or {})

    seen: list[Any] = []
    x = torch.randn(4, dtype=torch.complex64)
    for view in (x, x.conj(), x.conj().imag):
        with torch.no_grad():
            torch.testing.assert_close(DOUBLE.at_once(view), 2 * view)
    with Names():
        DOUBLE.at_once(x)
    assert seen[0] is DOUBLE
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        DOUBLE.at_once(x)
    assert "refold::a_node_of_tests" in {event.key for event in profile.key_averages()}
    with through_pytorch(0):
        DOUBLE.at_once(x)


def test_a_node_that_writes_to_an_argument_is_left_to_the_dispatcher() -> None:
    def write(x: Tensor) -> Tensor:
        return x.add_(1).clone()

    node = define("a_node_of_tests_that_writes", "(Tensor(a!) x) -> Tensor", write, torch.empty_like)
    assert not hasattr(node, "at_once")
    assert hasattr(DOUBLE, "at_once")


def test_arguments_have_no_defaults() -> None:
    """Compiled code would name such an argument, and leave the call to the dispatcher."""
    from refold.compiler import engine
    from refold.compiler.recurrence import systems

    assert engine.refold  # its passes define nodes, too
    assert systems.BOUNDED_SCAN.at_once
    for name in AT_ONCE - {"cumsum"}:  # it takes the place of aten.cumsum, with its arguments
        arguments = getattr(torch.ops.refold, name).default._schema.arguments
        assert not any(argument.has_default_value() for argument in arguments), name


def test_compiled_code_calls_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = refold.compile(lambda x: DOUBLE(x + 1).sum(), cache=False)
    x = torch.randn(3)
    torch.testing.assert_close(compiled(x), (2 * (x + 1)).sum())
    monkeypatch.setattr(DOUBLE, "at_once", lambda x: 5 * x)
    torch.testing.assert_close(compiled(x), (5 * (x + 1)).sum())
