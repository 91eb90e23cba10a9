"""Loops of tests/cpu/compiler on a GPU: they become the same operators, and err no more than the loops."""

import importlib

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from cpu.compiler.beside_float64 import errors  # noqa: E402
from refold.bench.recurrences import RECURRENCES  # noqa: E402
from refold.compiler.dynamo.capture.trace import SHORTEST  # noqa: E402
from refold.compiler.recurrence.systems import BOUNDED_SCAN, LINEAR_SYSTEM  # noqa: E402
from support import chunked_deltas  # noqa: E402
from support.scans import compiled, operators  # noqa: E402

pytestmark = pytest.mark.gpu
CHUNKS, KEYED = "linear_scan over chunks", "delta_rule"
TIES = (0.5, 1.0), (0.5, 1.0)  # as PyTorch's maximum and minimum share a gradient
LOOPS = {
    "recurrence.test_readout": {"bonus": KEYED, "by_products": KEYED, "one_decay_a_head": "ssd",
                                "output_first": "selective_scan"},
    "recurrence.test_gated": {"attention": KEYED, "attention_with_roots": KEYED},
    "passes.test_contract_scans": {"retention": "ssd", "read_first": "ssd", "loop": "selective_scan"},
    "recurrence.test_lti_chunks": {"s4d": CHUNKS, "signed": CHUNKS, "one_system": CHUNKS},
    "dynamo.test_producers": {"mamba": "selective_scan", "one_decay_a_head": "ssd"},
}  # fmt: skip


def arguments(module, loop):
    if module.__name__.endswith("test_gated"):
        return module.inputs(200)
    if loop in ("retention", "read_first"):
        q, k, v, state = module.heads()
        return q, k, v, module.signed_decays(timed=loop == "read_first"), state
    return module.tensors() if hasattr(module, "tensors") else module.inputs()


@pytest.fixture
def cuda():
    yield torch.device("cuda")
    torch.set_default_device(None)


@pytest.mark.parametrize(("name", "loop"), [(name, loop) for name, loops in LOOPS.items() for loop in loops])
def test_loop(name, loop, cuda):
    module = importlib.import_module(f"cpu.compiler.{name}")
    given = [a.to(cuda) for a in arguments(module, loop)]
    torch.set_default_device(cuda)
    function = getattr(module, loop)
    run = compiled(function)
    found, own = (errors(program, function, given) for program in (run, function))
    assert operators(run) == [LOOPS[name][loop]]
    for error, bound in zip(found, own, strict=True):
        assert error <= 4 * bound + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["lru", "bidirectional-ssm", "holt-winters", "biquad", "rwkv4", "ind-rnn"])
def test_public_recurrence(name, grad, cuda):
    one = RECURRENCES[name]
    inputs = [x.to(cuda) for x in one.inputs(2, 64, 16)]
    run = compiled(one.fn)
    found, own = (errors(program, one.fn, inputs, grad) for program in (run, one.fn))
    assert any(one.found in operator for operator in operators(run))
    assert not any("Inductor failed" in note for graph in run.report.graphs for note in graph.notes)
    for error, bound in zip(found, own, strict=True):
        assert error <= 16 * bound + 1e-6


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("decay", ["head", "key", "none"])
@pytest.mark.parametrize("chunks", [3, SHORTEST + 1])
def test_delta_rule_in_chunks(chunks, decay, grad, cuda):
    """Under a default device, Dynamo writes methods of tensors in place of functions."""
    q, k, v, g, beta = chunked_deltas.inputs(chunks * chunked_deltas.CHUNK - 1, decay, n=16)
    mild = g if g is None else 0.1 * g  # what is forgotten has small gradients, which err more
    given = [x if x is None else x.to(cuda) for x in (q, k, v, mild, beta)]
    torch.set_default_device(cuda)
    run = compiled(chunked_deltas.chunked)
    assert max(errors(run, chunked_deltas.chunked, given, grad)) <= 1e-5
    assert operators(run) == ["delta_rule"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("steps", [1, 129])
def test_sweeps_agree_with_those_of_the_cpu(dtype, size, steps, cuda):
    generator = torch.Generator().manual_seed(0)
    A, b, start = (
        torch.randn(shape, generator=generator, dtype=dtype) / 4
        for shape in ((size, size, 1, 1), (size, steps, 3, 37), (size, 3, 37))
    )
    for reverse in (False, True):
        for initial in (start, None):
            want = LINEAR_SYSTEM(A, b, initial, reverse, [])
            got = LINEAR_SYSTEM(A.to(cuda), b.to(cuda), None if initial is None else initial.to(cuda), reverse, [])
            torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("smooth", [False, True])
def test_running_maxima_agree_with_those_of_the_cpu(smooth, cuda):
    shift, floor, start = (torch.randn(shape) for shape in ((129, 77), (129, 77), (77,)))
    want = BOUNDED_SCAN(None, shift, floor, None, start, smooth, *TIES)
    got = BOUNDED_SCAN(None, shift.to(cuda), floor.to(cuda), None, start.to(cuda), smooth, *TIES)
    torch.testing.assert_close(got.cpu(), want)


@pytest.mark.parametrize("steps", [1, 129])
def test_bounded_scans_agree_with_those_of_the_cpu(steps, cuda):
    operands = [torch.randn(shape) for shape in ((steps, 77), (129, 77), (steps, 77), (129, 77), (77,))]
    want = BOUNDED_SCAN(*operands, False, *TIES)
    torch.testing.assert_close(BOUNDED_SCAN(*(x.to(cuda) for x in operands), False, *TIES).cpu(), want)
