"""One token per row by CUDA's graphs: the tokens of ``model.generate`` without them, in every family."""

import copy

import pytest
import torch

import refold
from support.families import NAMES, VOCAB, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 24}


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_changed_weights(name):
    """Rows of different lengths, another number of rows, then other weights, and a model that was merged."""
    model = make(name).cuda()
    if name in ("jamba", "granitemoehybrid"):
        model.set_experts_implementation("batched_mm")
    plain = copy.deepcopy(model)
    refold.accelerate(plain, graphs=False)
    summary = refold.accelerate(model)
    for change in (None, "in place", "replaced"):
        for each in (model, plain):
            with torch.no_grad():
                if change == "in place":
                    each.lm_head.weight *= 1.25
                elif change == "replaced":
                    each.lm_head.weight = torch.nn.Parameter(each.lm_head.weight.detach().flip(0).clone())
        for rows in (1, 4, 1):
            torch.manual_seed(rows)
            ids = torch.randint(1, VOCAB, (rows, 9)).cuda()
            mask = torch.ones_like(ids)
            for row in range(1, rows):
                mask[row, : 2 * row] = 0
            given = GREEDY | {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
            found, expected = (each.generate(ids, **given) for each in (model, plain))
            assert torch.equal(found.sequences, expected.sequences), (change, rows)
            for a, b in zip(found.logits, expected.logits, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert summary.graphs[0].replayed > 100, str(summary)
    held = torch.cuda.memory_allocated()
    summary.undo()
    assert torch.cuda.memory_allocated() < held


def test_a_capture_that_fails_leaves_no_trace():
    """Experts that wait for the device cannot be captured; random numbers go on as if nobody had tried."""
    model = make("jamba").cuda()
    model.set_experts_implementation("eager")
    plain = copy.deepcopy(model)
    refold.accelerate(plain, graphs=False)
    summary = refold.accelerate(model)
    ids = torch.randint(1, VOCAB, (2, 9)).cuda()
    found = []
    for each in (model, plain):
        torch.manual_seed(5)
        sequences = each.generate(ids, **GREEDY | {"do_sample": True, "top_k": 9})
        found.append((sequences.tolist(), torch.rand(4, device="cuda").tolist()))
    assert found[0] == found[1]
    assert "cannot be captured" in str(summary), str(summary)
