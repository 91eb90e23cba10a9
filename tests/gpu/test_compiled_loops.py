"""Loops of tests/cpu/compiler on a GPU: they become the same operators, and err no more than the loops."""

import importlib

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from support.scans import compiled, flat, operators  # noqa: E402

pytestmark = pytest.mark.gpu
CHUNKS = "linear_scan over chunks"
LOOPS = {
    "recurrence.test_readout": {"bonus": CHUNKS, "by_products": CHUNKS, "plain": CHUNKS, "one_decay_a_head": "ssd",
                         "output_first": "selective_scan"},
    "recurrence.test_gated_chunks": {"attention": CHUNKS, "attention_with_roots": CHUNKS},
    "passes.test_contract_scans": {"retention": "ssd", "read_first": "ssd", "loop": "selective_scan"},
    "recurrence.test_lti_chunks": {"s4d": CHUNKS, "signed": CHUNKS, "one_system": CHUNKS},
    "dynamo.test_producers": {"mamba": "selective_scan", "one_decay_a_head": "ssd"},
}  # fmt: skip


def arguments(module, loop):
    if module.__name__.endswith("test_gated_chunks"):
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
    with torch.no_grad():
        run = compiled(function)
        got, eager = flat(run(*given)), flat(function(*given))
        exact = flat(function(*(a.double() for a in given)))
    assert operators(run) == [LOOPS[name][loop]]
    for one, other, want in zip(got, eager, exact, strict=True):
        error, bound = ((a.double() - want).norm() / want.norm() for a in (one, other))
        assert error <= 4 * bound + torch.finfo(one.dtype).eps
