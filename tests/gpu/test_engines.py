"""What plugins put into engines is captured in CUDA graphs: nothing waits, and a replay gives the same."""

import pytest
import torch

from refold.bench.engines import CALLS, LAYERS, captured, copied, drawn, programs
from refold.engines import adapters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]
TINY = {layer.kind: layer for name, layer in LAYERS.items() if name.startswith("tiny")}


def replayed(run, given):
    """Return the results of a call, and those of a replay of its graph on fresh copies of what it overwrites."""
    first, second = copied(given), copied(given)
    expected = run(first)
    run(copied(given))
    before = {name: one.clone() for name, one in second.items() if isinstance(one, torch.Tensor)}
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            found = run(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, one in before.items():
        second[name].copy_(one)
    graph.replay()
    return expected, found


def same(expected, found):
    for a, b in zip(expected, found, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "phase"), CALLS, ids=": ".join)
@pytest.mark.parametrize("padded", [False, True])
def test_each_call_is_captured(kind, phase, padded):
    torch.manual_seed(0)
    given = drawn(TINY[kind], phase.partition(",")[0], 70 if phase.startswith("prefill") else 5, "cuda")
    if padded and "new" not in phase:  # these write by the caller's index, as layers do
        pad = 0 if kind.startswith("mamba") else -1
        given["slots"][1] = pad if phase == "decode" or kind == "mamba1" else given["slots"][1]
    for run in programs(kind, phase, {}).values():
        same(*replayed(run, given))


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_several_tokens_with_counts_of_accepted_ones_are_captured(kind):
    torch.manual_seed(0)
    given = drawn(TINY[kind], "decode", 9, "cuda")
    given["slots"] = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], device="cuda", dtype=torch.int32)
    counts = torch.tensor([2, 1, 3], device="cuda", dtype=torch.int32)
    offsets = torch.tensor([0, 3, 5, 8], device="cuda", dtype=torch.int32)

    def kernel(*args, **kw):
        adapters.state_update(*args, **kw, num_accepted_tokens=counts, cu_seqlens=offsets)

    call = CALLS[kind, "decode"]["refold"][0]

    def run(one):
        out, pool = call(kernel, one)
        return out[:8], pool  # the last token is padding

    same(*replayed(run, given))


def test_states_after_chunks_are_captured():
    torch.manual_seed(0)
    given = drawn(TINY["mamba2"], "prefill", 70, "cuda")

    def run(g):
        out = torch.empty_like(g["x"])
        states = adapters.chunk_scan_varlen(
            g["x"], g["dt"], g["A"], g["B"], g["C"], g["chunk"], g["offsets"], g["ends"], g["last"], g["prompts"], out,
            D=g["D"], dt_bias=g["dt_bias"], dt_softplus=True, return_intermediate_states=True,
        )  # fmt: skip
        return out, states

    same(*replayed(run, given))


def test_what_a_replay_reads_is_kept():
    given = drawn(TINY["mamba2"], "prefill", 70, "cuda")
    replay = captured(programs("mamba2", "prefill", {})["refold"], given, 2)
    torch.cuda.empty_cache()
    noise = [torch.full((2**12,), torch.nan, device="cuda") for _ in range(4096)]
    replay()
    (results, _), _ = replay(), noise
    assert all(outputs.isfinite().all() for outputs, _ in results)
