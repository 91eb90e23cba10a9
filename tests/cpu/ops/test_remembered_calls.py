"""A call reuses the plan of an earlier call only if its checks, backend and plan would be the same."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

import refold.ops as ops
from refold.errors import ArgumentError, RefoldError
from refold.ops.torch import registry

NAMES = ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state", "cu_seqlens"]
OPTIONS = (True, (0.0, inf), 4, None)
REMEMBERED = "what ran before"


def run(arrays: Sequence[Any], options: Sequence[Any] = OPTIONS, backend: str = "") -> Any:
    return registry.run("ssd", arrays, options, backend)


def arrays() -> list[Any]:
    """Return x, dt, A, B, C and D of ssd; B and C are the same tensor."""
    x, dt, B = torch.randn(1, 6, 2, 4), torch.rand(1, 6, 2), torch.randn(1, 6, 1, 4)
    return [x, dt, -torch.ones(2), B, B, torch.ones(2), None, None, None, None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that calls ssd after a plain call of it, which then is all that is remembered."""

    def answer(before: Sequence[Any], after: Sequence[Any], *rest: Any) -> Any:
        monkeypatch.setattr(registry.RUNNERS["ssd"], "recent", ())
        monkeypatch.setattr(registry.RUNNERS["ssd"], "known", {})
        run(before)
        (known,) = registry.RUNNERS["ssd"].recent
        known.run = lambda *_: REMEMBERED
        try:
            return run(after, *rest)
        except (RefoldError, NotImplementedError) as error:  # of a call that was looked at
            return error

    return answer


def changed(name: str, change: Callable[[Tensor], Any], given: Sequence[Any] | None = None) -> list[Any]:
    """Return the arrays with one of them changed."""
    found = list(given or arrays())
    found[NAMES.index(name)] = change(found[NAMES.index(name)])
    return found


def shifted(array: Tensor) -> Tensor:
    """Return a copy whose address is no multiple of 16."""
    return torch.cat([array.new_zeros(1), array.flatten()])[1:].view(array.shape)


class Tagged(Tensor):
    pass


TENSORS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "size": ("x", lambda a: torch.randn(2, *a.shape[1:])),
    "stride": ("x", lambda a: a.mT.contiguous().mT),
    "stride of one row": ("x", lambda a: a.as_strided(a.shape, (64, *a.stride()[1:]))),
    "rank": ("D", lambda a: a[:, None].expand(2, 4)),
    "dtype": ("dt", lambda a: a.bfloat16()),
    "device": ("A", lambda a: a.to("meta")),
    "alignment": ("x", shifted),
    "alignment of the last": ("D", shifted),
    "gradient": ("A", lambda a: a.requires_grad_()),
    "subclass": ("x", lambda a: a.as_subclass(Tagged)),
    "sign not applied": ("x", torch._neg_view),
    "absent": ("D", lambda a: None),
    "given": ("z", lambda a: torch.randn(1, 6, 2, 4)),
    "no longer the same tensor": ("C", lambda a: a.bfloat16()),
    "framework": ("B", lambda a: a.numpy()),
}  # fmt: skip


def test_the_same_signature_is_served(call: Callable[..., Any]) -> None:
    assert call(arrays(), arrays()) is REMEMBERED


@pytest.mark.parametrize("change", TENSORS)
def test_another_tensor_is_not_served(call: Callable[..., Any], change: str) -> None:
    assert call(arrays(), changed(*TENSORS[change])) is not REMEMBERED


def test_none_elsewhere_is_not_served(call: Callable[..., Any]) -> None:
    moved = changed("dt_bias", lambda _: torch.ones(2), changed("D", lambda _: None))
    assert call(arrays(), moved) is not REMEMBERED


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ((False, *OPTIONS[1:]), ""), ((1, *OPTIONS[1:]), ""), ((*OPTIONS[:2], 2, None), ""),
        ((*OPTIONS[:2], 4.0, None), ""), ((*OPTIONS[:3], torch.float64), ""), (OPTIONS, "torch"),
    ],
)  # fmt: skip
def test_other_options_are_not_served(call: Callable[..., Any], options: Any, backend: str) -> None:
    assert call(arrays(), arrays(), options, backend) is not REMEMBERED


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Hearing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Looking, Hearing, torch.inference_mode])
def test_another_mode_is_not_served(call: Callable[..., Any], mode: Callable[[], AbstractContextManager[Any]]) -> None:
    given = arrays()
    assert call(given, given) is REMEMBERED
    with mode():
        assert run(given) is not REMEMBERED


def test_a_default_device_is_not_asked(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a mode of torch's functions, which would take microseconds of each use of a tensor."""
    given = arrays()
    expected = ops.ssd(*given[:5])[0]
    assert call(given, given) is REMEMBERED
    monkeypatch.setattr(DeviceContext, "__torch_function__", lambda *_: pytest.fail("it was asked"))
    with torch.device("meta"):
        assert run(given) is REMEMBERED
        found = [ops.ssd(*given[:5])[0] for _ in range(2)]
        in_a_program = registry.OPS["ssd"].at_once(*given, *registry.RUNNERS["ssd"].spec.written_options(OPTIONS), "")
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    others = {"D": given[5], "dt_softplus": True, "chunk_size": 4, "backend": "torch"}
    torch.testing.assert_close(in_a_program[0], ops.ssd(*given[:5], **others)[0])
    monkeypatch.undo()
    with torch.device("meta"):
        with pytest.raises(ArgumentError, match="dt"):
            ops.ssd(given[0], given[1][:, 1:], *given[2:5])
        assert torch.ones(1).is_meta


def test_gradients_are_not_lost_when_they_are_enabled_again(call: Callable[..., Any]) -> None:
    given = changed("x", lambda a: a.requires_grad_())
    with torch.no_grad():
        assert call(given, given) is REMEMBERED
        registry.RUNNERS["ssd"].known.clear()
        registry.RUNNERS["ssd"].recent = ()
        assert not run(given)[0].requires_grad
    assert run(given)[0].requires_grad
    with pytest.raises(RefoldError, match="overwrites the state"):
        ops.ssd_step_(*(a[:, 0] for a in given[:2]), given[2], given[3][:, 0], given[4][:, 0], torch.zeros(1, 2, 4, 4))


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_signs_that_are_not_applied_yet_count(backend: str) -> None:
    x = torch.randn(1, 6, 2)
    for _ in range(2):
        found, _ = ops.linear_scan(x, torch._neg_view(x), backend=backend)
        assert torch.equal(found, ops.linear_scan(x, -x, backend=backend)[0])


def test_transforms_and_traces_are_not_served(call: Callable[..., Any]) -> None:
    given = arrays()
    assert call(given, given) is REMEMBERED
    many = torch.vmap(lambda x: run([x, *given[1:]])[0])
    assert many(torch.stack([given[0]] * 3)).shape == (3, *given[0].shape)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: ops.ssd(*a, D=given[5], dt_softplus=True, chunk_size=4), backend="eager")
    assert compiled(*given[:5])[0].shape == given[0].shape


def test_a_public_call_like_the_last_one_forms_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dt, A, B, C, D, *_ = arrays()
    given = {"D": D, "dt_softplus": True, "dt_limit": (0.1, 2.0)}
    expected, _ = ops.ssd(x, dt, A, B, C, **given)
    monkeypatch.setattr(registry, "signature_of", lambda *_: pytest.fail("a signature was formed"))
    assert torch.equal(ops.ssd(x, dt, A, B, C, **given)[0], expected)


def test_many_signatures_in_turn_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    known = registry._Known
    monkeypatch.setattr(registry, "_Known", lambda *given: made.append(given[0][0].shape) or known(*given))
    lengths = range(40, 42 + registry._RECENT)
    for _ in range(3):
        for seqlen in lengths:
            x = torch.randn(1, seqlen, 3)
            assert torch.equal(ops.linear_scan(torch.zeros_like(x), x)[0], x)
    assert made == [(1, seqlen, 3) for seqlen in lengths]


def test_threads_with_different_signatures_get_their_own_results() -> None:
    def repeat(seqlen: int) -> None:
        x, dt, B = torch.ones(1, seqlen, 1, 1), torch.ones(1, seqlen, 1), torch.ones(1, seqlen, 1, 1)
        for _ in range(200):
            y, state = ops.ssd(x, dt, torch.zeros(1), B, B, backend="torch")
            assert y.shape == x.shape
            assert state.item() == seqlen

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(repeat, range(1, 9)))
