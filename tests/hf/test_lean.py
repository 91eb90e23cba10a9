"""One token per row on the CPU by the lean model: the same tokens, whatever happens in between."""

import copy

import pytest
import torch

import refold
from refold.integrations.lean import Lean
from support.families import VOCAB, cache_name, make

NAMES = ("mamba", "falcon_mamba", "mamba2")
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}


def pair(name, **changed):
    model = make(name, **changed)
    plain = copy.deepcopy(model)
    refold.accelerate(plain, graphs=False)
    return model, plain, refold.accelerate(model)


def computed(summary):
    return sum(graphs.computed for graphs in summary.graphs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("changed", [{}, {"tie_word_embeddings": True}])
def test_tokens_and_logits(name, changed):
    model, plain, summary = pair(name, **changed)
    for rows in (1, 4, 1):
        ids, mask = torch.randint(1, VOCAB, (rows, 7)), torch.ones(rows, 7, dtype=torch.long)
        for row in range(1, rows):
            mask[row, : 2 * row - 1] = 0
        given = GREEDY | {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
        found, expected = (each.generate(ids, **given) for each in (model, plain))
        assert found.sequences.tolist() == expected.sequences.tolist()
        for a, b in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert computed(summary) == 32  # of 33 tokens after the prompts, the first was computed by both
    assert "32 tokens by the lean model" in str(summary)


CHANGES = {
    "in place": lambda model: model.lm_head.weight.data.mul_(1.5),
    "data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 1.5),
    "norm": lambda model: setattr(model.backbone.norm_f, "weight", torch.nn.Parameter(torch.rand(48) + 0.5)),
    "double": lambda model: model.double(),
    "hook": lambda model: model.lm_head.register_forward_hook(lambda module, args, out: out * 2),
    "training": lambda model: model.train(),
    "undo": lambda model: refold.accelerate(model).undo(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model(change):
    model, plain, summary = pair("mamba2")
    ids = torch.randint(1, VOCAB, (2, 5))
    assert model.generate(ids, **GREEDY).tolist() == plain.generate(ids, **GREEDY).tolist()
    assert computed(summary) == 10
    for each in (model, plain):
        torch.manual_seed(0)
        CHANGES[change](each)
    given = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    found, expected = (each.generate(ids, **given) for each in (model, plain))
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_turns_of_several_ways_on_one_cache():
    model, plain, summary = pair("mamba")
    name, ids, found = cache_name(model), torch.randint(1, VOCAB, (2, 14)), []
    for each in (model, plain):
        logits = []
        with torch.no_grad():
            cache = each(ids[:, :4], use_cache=True)[name]
            for begin, end in ((4, 5), (5, 6), (6, 8), (8, 9), (9, 10)):
                logits.append(each(ids[:, begin:end], use_cache=True, **{name: cache}).logits)
        with torch.inference_mode():
            logits.append(each(ids[:, 10:11], use_cache=True, **{name: cache}).logits)
        logits.append(each(ids[:, 11:12], use_cache=True, **{name: cache}).logits.detach())  # gradients are on
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert computed(summary) == 4
    assert "gradients are on" in str(summary)


def test_a_setting_that_the_lean_model_does_not_know_is_seen(monkeypatch):
    """A model whose modules do not do what its configuration says."""
    model, plain, summary = pair("mamba2")
    ids = torch.randint(1, VOCAB, (1, 5))
    for each in (model, plain):
        each.backbone.layers[0].mixer.time_step_limit = (0.5, 0.6)
    assert model.generate(ids, **GREEDY).tolist() == plain.generate(ids, **GREEDY).tolist()
    assert not computed(summary)
    assert "the lean model gives other logits" in str(summary)


def test_a_planted_bug_is_found(monkeypatch):
    step_ = Lean.step_
    model, plain, summary = pair("mamba2")
    ids = torch.randint(1, VOCAB, (1, 5))
    monkeypatch.setattr(Lean, "compare", lambda self, found, result, held: setattr(
        self, "result", lambda logits, held: type(result)(logits=logits, cache_params=held)))  # fmt: skip
    monkeypatch.setattr(Lean, "step_", lambda self, ids, held: step_(self, ids, held).flip(-1))
    assert model.generate(ids, **GREEDY).tolist() != plain.generate(ids, **GREEDY).tolist()
    assert computed(summary)
