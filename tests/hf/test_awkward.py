"""Calls of ``generate`` that are not the plain one, in turns on one model: results equal those without graphs.

Graphs are the stand-in of the CPU; without it, the lean model computes tokens there.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
from transformers import DynamicCache, StaticCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer, WatermarkingConfig

import refold
from refold.integrations import graphs
from support.families import VOCAB, cache_name, make
from support.recorder import record

pytestmark = pytest.mark.rows(6)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 9}
SAMPLED = GREEDY | {"do_sample": True}
WAYS = [("mamba2", True), ("granitemoehybrid", True), ("falcon_h1", True), ("mamba2", False)]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{'graph' if way[1] else 'lean'}")
def way(request, monkeypatch):
    name, graph = request.param
    if graph:
        monkeypatch.setitem(graphs.recorders, "cpu", record)
        monkeypatch.setattr(graphs, "SMALLEST", 8)
    return name


def pair(name):
    model = make(name, **({"num_local_experts": 0} if name == "granitemoehybrid" else {}))
    plain = copy.deepcopy(model)
    refold.accelerate(plain, graphs=False)
    return model, plain, refold.accelerate(model)


def read(summary):
    return sum(each.replayed + each.computed for each in summary.graphs)


def ids_of(rows, length, seed=0):
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


class Heard(BaseStreamer):
    def __init__(self):
        self.said = []

    def put(self, value):
        self.said.append(value.tolist())

    def end(self):
        self.said.append("end")


class Stop(StoppingCriteria):
    """Ends the first row after four tokens, the others later."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.arange(len(input_ids)) + input_ids.shape[1] >= 11


def assistant(model):
    other = copy.deepcopy(model)
    other.lm_head.weight.data = other.lm_head.weight.data + 0.05 * torch.randn(other.lm_head.weight.shape)
    return other


CALLS = {
    "greedy": lambda m: GREEDY,
    "beams": lambda m: GREEDY | {"num_beams": 3},
    "beams that return several": lambda m: GREEDY | {"num_beams": 4, "num_return_sequences": 2},
    "sampled beams": lambda m: SAMPLED | {"num_beams": 2},
    "several sequences": lambda m: SAMPLED | {"num_return_sequences": 3, "top_k": 5},
    "scores": lambda m: SAMPLED | {"output_scores": True, "output_logits": True},
    "attentions": lambda m: GREEDY | {"output_attentions": True},
    "hidden states": lambda m: GREEDY | {"output_hidden_states": True},
    "embeds": lambda m: GREEDY | {"inputs_embeds": m.get_input_embeddings()(ids_of(2, 7)).detach()},
    "embeds and ids": lambda m: GREEDY | {
        "input_ids": ids_of(2, 7), "inputs_embeds": m.get_input_embeddings()(ids_of(2, 7)).detach()},
    "a given cache": lambda m: GREEDY | {cache_name(m): DynamicCache(config=m.config)},
    "a static cache": lambda m: GREEDY | {cache_name(m): StaticCache(config=m.config, max_cache_len=32)},
    "static": lambda m: GREEDY | {"cache_implementation": "static", "disable_compile": True},
    "dynamic": lambda m: GREEDY | {"cache_implementation": "dynamic"},
    "offloaded": lambda m: GREEDY | {"cache_implementation": "offloaded"},
    "quantized": lambda m: GREEDY | {"cache_implementation": "quantized"},
    "dynamic_full": lambda m: GREEDY | {"cache_implementation": "dynamic_full"},
    "without a cache": lambda m: GREEDY | {"use_cache": False},
    "assisted": lambda m: GREEDY | {"assistant_model": assistant(m), "input_ids": ids_of(1, 7)},
    "lookup": lambda m: GREEDY | {"prompt_lookup_num_tokens": 3, "input_ids": ids_of(1, 7)},
    "contrastive": lambda m: GREEDY | {"penalty_alpha": 0.6, "top_k": 4},
    "layers": lambda m: GREEDY | {"dola_layers": "low"},
    "streamer": lambda m: GREEDY | {"streamer": Heard(), "input_ids": ids_of(1, 7)},
    "stopping": lambda m: GREEDY | {"stopping_criteria": StoppingCriteriaList([Stop()])},
    "time": lambda m: GREEDY | {"max_time": 100.0},
    "end": lambda m: GREEDY | {"eos_token_id": [3, 5, 11, 17, 40, 41, 42, 43, 44]},
    "guided": lambda m: GREEDY | {"guidance_scale": 1.5},
    "guided by another prompt": lambda m: GREEDY | {"guidance_scale": 1.5, "negative_prompt_ids": ids_of(2, 3, 4)},
    "watermark": lambda m: GREEDY | {"watermarking_config": WatermarkingConfig()},
    "processors": lambda m: GREEDY | {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": [[4], [5, 6]], "min_new_tokens": 3,
        "suppress_tokens": [1, 2]},
    "warpers": lambda m: SAMPLED | {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    "one token": lambda m: GREEDY | {"max_new_tokens": 1},
    "a prompt of one token": lambda m: GREEDY | {"input_ids": ids_of(3, 1)},
    "a shorter batch": lambda m: GREEDY | {"input_ids": ids_of(1, 4)},
    "a longer batch": lambda m: GREEDY | {"input_ids": ids_of(5, 12)},
    "padding on the right": lambda m: GREEDY | {"attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2])},
    "chunks": lambda m: GREEDY | {"prefill_chunk_size": 3},
    "low memory": lambda m: GREEDY | {"num_beams": 2, "low_memory": True},
    "plain tuples": lambda m: GREEDY | {"return_dict_in_generate": False},
}  # fmt: skip


def said(model, call):
    """Give what a call returns, or the error that transformers raises."""
    torch.manual_seed(3)
    options = CALLS[call](model)
    if "input_ids" not in options and "inputs_embeds" not in options:
        options = options | {"input_ids": ids_of(2, 7)}
    try:
        found = model.generate(**{"return_dict_in_generate": True} | options)
    except Exception as error:  # transformers refuses some calls of some families, and both must say the same
        return f"{type(error).__name__}: {str(error)[:80]}"
    heard = options["streamer"].said if "streamer" in options else None
    if isinstance(found, torch.Tensor):
        return found.tolist()
    return found.sequences.tolist(), heard, [n for n, v in sorted(found.items()) if v is not None]


@pytest.mark.exhaustive
def test_all_calls_one_after_the_other(way):
    model, plain, summary = pair(way)
    for call in CALLS:
        assert said(model, call) == said(plain, call), call
        assert said(model, "greedy") == said(plain, "greedy"), call
    assert read(summary) > 100


class Wrapped(torch.nn.Module):
    """A linear layer with an adapter of another package."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.weight = linear, linear.weight

    def forward(self, x):
        return self.linear(x) + 1


def _adapted_and_merged(model):
    linear = model.lm_head
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "proj" in name:
            module.weight.data += 0.05 * torch.outer(*(torch.randn(n) for n in module.weight.shape))
    model.lm_head = Wrapped(linear)  # what wraps it goes, and the weight was changed meanwhile
    model.generate(ids_of(2, 5), **GREEDY)
    linear.weight.data *= 1.1
    model.lm_head = linear


CHANGES = {
    "merged": _adapted_and_merged,
    "to bfloat16 and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "loaded": lambda m: m.load_state_dict({k: v * 1.02 for k, v in m.state_dict().items()}),
    "loaded by assigning": lambda m: m.load_state_dict({k: v * 1.02 for k, v in m.state_dict().items()}, assign=True),
    "resized": lambda m: m.resize_token_embeddings(VOCAB + 7, mean_resizing=False),
    "trained": lambda m: _trained(m),
    "configured": lambda m: setattr(m.config, "output_hidden_states", True),
    "without a cache": lambda m: setattr(m.generation_config, "use_cache", False),
    "another head": lambda m: m.set_output_embeddings(torch.nn.Linear(48, VOCAB, bias=False)),
    "attention": lambda m: m.set_attn_implementation("eager"),
    "frozen": lambda m: m.requires_grad_(False),
    "moved": lambda m: m.cpu(),
    "settings": lambda m: [vars(x).update(variance_epsilon=0.5) for x in m.modules() if hasattr(x, "variance_epsilon")],
}


def _trained(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = ids_of(2, 9)
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    model.eval()


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_in_between(way, change):
    model, plain, summary = pair(way)
    assert said(model, "greedy") == said(plain, "greedy")
    assert read(summary)
    for each in (model, plain):
        torch.manual_seed(0)
        CHANGES[change](each)
    for call in ("scores", "greedy", "beams", "greedy"):
        assert said(model, call) == said(plain, call), call


def test_a_model_that_is_deleted_gives_everything_back(way):
    model, _, summary = pair(way)
    said(model, "greedy")
    held, steps = weakref.ref(model), [weakref.ref(step) for step in summary.graphs[0].steps.values()]
    weight = weakref.ref(next(model.parameters()))
    del model, summary
    gc.collect()
    assert held() is None
    assert weight() is None
    assert not any(step() for step in steps)


def test_threads_with_different_calls(way):
    model, plain, _ = pair(way)
    calls = ["greedy", "a shorter batch", "beams", "a longer batch", "stopping", "embeds"]
    expected, found = {call: said(plain, call) for call in calls}, {}
    threads = [threading.Thread(target=lambda call=call: found.update({call: said(model, call)})) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
