"""Random problems: hypothesis draws the sizes and options, and the contract checks them."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import refold.ops as ops
from refold.ops.spec import Example, OpSpec, all_specs, load
from refold.ops.testing import check, problem

OPTIONAL = ("D", "z", "dt_bias", "initial_state")
CHECKS = ("values", "gradients", "split", "packed", "causal")


@st.composite
def packs(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    """Return a length and, half of the time, how a pack divides it."""
    lengths = tuple(draw(st.lists(st.integers(0, 12), min_size=1, max_size=5)))
    if draw(st.booleans()) and sum(lengths):
        return sum(lengths), lengths
    return draw(st.integers(1, 40)), ()


@st.composite
def ssd_cases(draw: st.DrawFn) -> Example:
    seqlen, lengths = draw(packs())
    groups, repeat = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = {
        "b": 1 if lengths else draw(st.integers(1, 2)), "t": seqlen, "h": groups * repeat, "p": draw(st.integers(1, 6)),
        "g": groups, "n": draw(st.integers(1, 6)),
    }  # fmt: skip
    options = {"dt_softplus": draw(st.booleans()), "chunk_size": draw(st.integers(1, 17))}
    present = draw(st.sets(st.sampled_from(OPTIONAL)))
    return Example(f"drawn_{draw(st.integers(0, 999))}", sizes, frozenset(present), options, lengths)


@st.composite
def selective_scan_cases(draw: st.DrawFn) -> Example:
    seqlen, lengths = draw(packs())
    groups, repeat = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = {
        "b": 1 if lengths else draw(st.integers(1, 2)), "t": seqlen, "d": groups * repeat, "n": draw(st.integers(1, 6)),
        "g": groups,
    }  # fmt: skip
    layout = draw(st.sampled_from([{}, {"B": 1}, {"C": 1}, {"B": 1, "C": 1}]))
    present = draw(st.sets(st.sampled_from((*OPTIONAL, "decay"))))
    options = {"dt_softplus": draw(st.booleans())}
    return Example(f"drawn_{draw(st.integers(0, 999))}", sizes, frozenset(present), options, lengths, layout)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ssd_cases())
@example(Example("drawn_0", {"b": 1, "t": 1, "h": 1, "p": 6, "g": 1, "n": 1}, frozenset()))  # dB: terms that cancel
def test_ssd(case: Example) -> None:
    for name in CHECKS:
        check(name, problem(load("ssd"), case), "torch")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(selective_scan_cases())
def test_selective_scan(case: Example) -> None:
    for name in CHECKS:
        check(name, problem(load("selective_scan"), case), "torch")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(packs(), st.sampled_from([(), (3,), (2, 5)]), st.booleans(), st.booleans())
def test_linear_scan(pack: tuple[int, tuple[int, ...]], rest: tuple[int, ...], reverse: bool, initial: bool) -> None:
    seqlen, lengths = pack
    sizes = {"b": 1 if lengths else 2, "t": seqlen, "*": rest}
    case = Example("drawn", sizes, frozenset({"initial_state"} if initial else ()), {"reverse": reverse}, lengths)
    for name in CHECKS:
        check(name, problem(load("linear_scan"), case), "torch")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(packs(), st.integers(1, 6), st.booleans(), st.sampled_from([None, "silu"]))
def test_causal_conv1d(pack: tuple[int, tuple[int, ...]], width: int, initial: bool, activation: str | None) -> None:
    seqlen, lengths = pack
    sizes = {"b": 1 if lengths else 2, "t": seqlen, "d": 3, "w": width}
    case = Example("drawn", sizes, frozenset({"initial_state"} if initial else ()), {"activation": activation}, lengths)
    for name in CHECKS:
        check(name, problem(load("causal_conv1d"), case), "torch")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 50), st.integers(1, 20))
def test_ssd_without_decay_is_causal_linear_attention(seqlen: int, chunk_size: int) -> None:
    torch.manual_seed(seqlen)
    queries, keys = (torch.randn(2, seqlen, 3, 5, dtype=torch.float64) for _ in range(2))
    values = torch.randn(2, seqlen, 3, 4, dtype=torch.float64)
    scores = torch.einsum("bthn,bshn->bhts", queries, keys).tril()
    attention = torch.einsum("bhts,bshp->bthp", scores, values)
    no_decay, unit_steps = values.new_zeros(3), values.new_ones(2, seqlen, 3)
    y, state = ops.ssd(values, unit_steps, no_decay, keys, queries, chunk_size=chunk_size)
    torch.testing.assert_close(y, attention)
    torch.testing.assert_close(state, torch.einsum("bthp,bthn->bhpn", values, keys))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 40))
def test_zero_steps_leave_the_state_alone(seqlen: int) -> None:
    torch.manual_seed(seqlen)
    x, B, start = torch.randn(1, seqlen, 2, 3), torch.randn(1, seqlen, 1, 4), torch.randn(1, 2, 3, 4)
    _, state = ops.ssd(x, torch.zeros(1, seqlen, 2), -torch.ones(2), B, B, initial_state=start, chunk_size=8)
    assert torch.equal(state, start)


@pytest.mark.parametrize("spec", [spec for spec in all_specs() if spec.complete], ids=lambda spec: spec.name)
def test_one_argument_of_32_bits_among_64_makes_no_other_numbers(spec: OpSpec) -> None:
    """What is computed of it, as gates are, has the precision of the others."""
    (case,) = [case for case in spec.cases() if case.name == spec.complete]
    given = problem(spec, case)
    arrays = {name: torch.from_numpy(array) for name, array in given.arrays.items()}
    function, narrow = getattr(ops, spec.name), {name: x.float() for name, x in arrays.items() if x.is_floating_point()}

    def run(**changed: torch.Tensor) -> list[torch.Tensor]:
        found = function(**{**arrays, **{name: x.double() for name, x in narrow.items()}, **changed}, **given.options)
        return list(found) if isinstance(found, tuple) else [found]

    expected = run()
    for name, x in narrow.items():
        if name not in ("x", "v", spec.updates):
            torch.testing.assert_close(run(**{name: x}), expected, rtol=1e-12, atol=1e-12)
