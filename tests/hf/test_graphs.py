"""One token per row by a graph: the same tokens as without, whatever happens in between.

The graph is a stand-in on the CPU (`support.recorder`); tests/gpu/test_generate.py runs CUDA's.
"""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import refold
from refold.integrations import graphs
from support.families import NAMES, VOCAB, cache_name, make
from support.recorder import record

MIXTURES = ("jamba", "granitemoehybrid")
WITH_ATTENTION = ("mamba2", "granitemoehybrid", "falcon_h1")
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setitem(graphs.recorders, "cpu", record)
    monkeypatch.setattr(graphs, "SMALLEST", 8)  # the capacity of attention doubles within a test


def ids_of(*shape):
    return torch.randint(1, VOCAB, shape)


def pair(name, experts="batched_mm", **changed):
    """Return an accelerated model with graphs, one without, and the summary of the first."""
    model = make(name, **changed)
    if name in MIXTURES:
        model.set_experts_implementation(experts)
    plain = copy.deepcopy(model)
    refold.accelerate(plain, graphs=False)
    return model, plain, refold.accelerate(model)


def replayed(summary):
    return sum(graphs.replayed for graphs in summary.graphs)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_of_every_family(name):
    """One row, four rows of different lengths, one row again; attention outgrows its capacity twice."""
    model, plain, summary = pair(name)
    for rows in (1, 4, 1):
        ids, mask = ids_of(rows, 7), torch.ones(rows, 7, dtype=torch.long)
        for row in range(1, rows):
            mask[row, : 2 * row - 1] = 0
        expected = plain.generate(ids, attention_mask=mask, **GREEDY, output_logits=True, return_dict_in_generate=True)
        found = model.generate(ids, attention_mask=mask, **GREEDY, output_logits=True, return_dict_in_generate=True)
        assert found.sequences.tolist() == expected.sequences.tolist()
        for a, b in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert "graph of 4 rows" in str(summary)
    assert replayed(summary) > 20, str(summary)


def test_other_models_compile_in_one_graph_after_a_token_by_a_graph():
    """The function of attention that a graph registers is every model's."""
    model, plain, _ = pair("falcon_h1")
    model.generate(ids_of(1, 7), **GREEDY)
    compiled, ids = torch.compile(plain, backend="eager", fullgraph=True), ids_of(2, 9)
    with torch.no_grad():
        found, expected = compiled(ids, use_cache=False).logits, plain(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_wait_for_the_device_are_not_captured(name):
    model, plain, summary = pair(name, experts="eager")
    ids = ids_of(2, 5)
    assert model.generate(ids, **GREEDY).tolist() == plain.generate(ids, **GREEDY).tolist()
    assert not replayed(summary)
    assert "cannot be captured" in str(summary)


class NotTwice(LogitsProcessor):
    """Forbids the token that was chosen last."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_ways_of_generating(name):
    """Processors, sampling, stopping, beams after greedy, assisted generation, hidden states, scores."""
    model, plain, summary = pair(name)
    ids = ids_of(2, 6)
    calls = [
        {}, {"logits_processor": LogitsProcessorList([NotTwice()])}, {"repetition_penalty": 1.3},
        {"do_sample": True, "top_k": 7}, {"eos_token_id": 5, "max_new_tokens": 9}, {"num_beams": 3},
        {"output_hidden_states": True, "return_dict_in_generate": True}, {"prompt_lookup_num_tokens": 2}, {},
    ]  # fmt: skip
    for call in calls:
        if "prompt_lookup_num_tokens" in call:
            call["max_new_tokens"], given = 6, ids[:1]
        else:
            given = ids
        found = []
        for each in (plain, model):
            torch.manual_seed(3)
            try:
                result = each.generate(given, **GREEDY | call)
                found.append(getattr(result, "sequences", result).tolist())
            except (ValueError, RuntimeError) as error:  # transformers refuses some of them for some families
                found.append(str(error))
        assert found[0] == found[1], call
    assert replayed(summary)
    assert "output_hidden_states is on" in str(summary)


@pytest.mark.parametrize("name", WITH_ATTENTION[1:])  # without attention, a cache does not know how much it has read
def test_turns_on_one_cache(name):
    """A conversation goes on, another one comes between, then both go on; a piece of several tokens in the middle."""
    model, plain, _ = pair(name)
    first, second = ids_of(2, 6), ids_of(2, 3)

    def talk(each):
        caches, texts, said = [DynamicCache(config=each.config) for _ in range(2)], [first, second], []
        for turn in (0, 1, 0, 1, 1, 0):
            more = {cache_name(each): caches[turn], "return_dict_in_generate": True, "max_new_tokens": 5}
            if said:  # the user says something
                texts[turn] = torch.cat([texts[turn], first[:, :2]], 1)
            mask = torch.ones_like(texts[turn])
            texts[turn] = each.generate(texts[turn], attention_mask=mask, **GREEDY | more).sequences
            said.append(texts[turn].tolist())
        return said

    assert talk(model) == talk(plain)


def one_by_one(model, ids, cache, **more):
    """Return the logits of tokens that are read one by one, by the model's own call."""
    found = []
    with torch.no_grad():
        for t in range(ids.shape[1]):
            found.append(model(ids[:, t : t + 1], **{cache_name(model): cache}, use_cache=True, **more).logits)
    return torch.cat(found, 1)


def read(model, ids):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{cache_name(model): cache}, use_cache=True)
    return cache


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_caches_are_the_users(name):
    """A cache that is copied, cut back, reordered, pickled or used without a graph goes on as any other."""
    model, plain, summary = pair(name)
    prompt, ids, other = ids_of(2, 5), ids_of(2, 6), ids_of(2, 6)
    kept, expected = read(model, prompt), read(plain, prompt)
    torch.testing.assert_close(one_by_one(model, ids, kept), one_by_one(plain, ids, expected), rtol=1e-4, atol=1e-4)
    assert replayed(summary)
    for change in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), _reordered):
        branch, reference = change(kept), change(expected)
        for cache, wanted in ((branch, reference), (kept, expected)):
            torch.testing.assert_close(
                one_by_one(model, other[:, :3], cache), one_by_one(plain, other[:, :3], wanted), rtol=1e-4, atol=1e-4
            )
    with torch.no_grad():  # several tokens, then one again
        for each, cache in ((model, kept), (plain, expected)):
            each(other, **{cache_name(each): cache}, use_cache=True)
    torch.testing.assert_close(one_by_one(model, ids, kept), one_by_one(plain, ids, expected), rtol=1e-4, atol=1e-4)
    summary.undo()
    torch.testing.assert_close(one_by_one(model, ids, kept), one_by_one(plain, ids, expected), rtol=1e-4, atol=1e-4)


def _reordered(cache):
    cache = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    return cache


@pytest.mark.parametrize("name", WITH_ATTENTION)
def test_a_cache_that_was_reset_begins_anew(name):
    model, plain, summary = pair(name)
    prompt, ids = ids_of(1, 5), ids_of(1, 4)
    found = []
    for each in (model, plain):
        cache = read(each, prompt)
        one_by_one(each, ids, cache)
        cache.reset()
        first = one_by_one(each, ids[:, :1], cache)
        with torch.no_grad():
            more = each(ids, **{cache_name(each): cache}, use_cache=True).logits
        found.append(torch.cat([first, more, one_by_one(each, ids, cache)], 1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert replayed(summary)


def test_who_holds_the_states_sees_them_move_on():
    """Callers that capture graphs of their own keep the tensors of a cache."""
    model, _, summary = pair("mamba2")
    cache = read(model, ids_of(1, 4))
    held = [layer.recurrent_states[0] for layer in cache.layers]
    one_by_one(model, ids_of(1, 5), cache)
    with torch.no_grad():
        model(ids_of(1, 3), cache_params=cache, use_cache=True)
    assert replayed(summary)
    assert all(layer.recurrent_states[0] is tensor for layer, tensor in zip(cache.layers, held, strict=True))


def test_results_are_the_callers():
    model, _, _ = pair("mamba2")
    cache = read(model, ids_of(1, 4))
    with torch.no_grad():
        results = [model(ids_of(1, 1), cache_params=cache, use_cache=True).logits for _ in range(6)]
    assert len({logits.data_ptr() for logits in results}) == 6


CHANGES = {
    "in place": lambda model: model.lm_head.weight.data.mul_(1.5),
    "data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 1.5),
    "replaced": lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)),
    "double": lambda model: model.double(),
    "forward": lambda model: setattr(model.lm_head, "forward", lambda x: x[..., :1] * torch.ones(VOCAB)),
    "hook": lambda model: model.lm_head.register_forward_hook(lambda module, args, out: out * 2),
    "training": lambda model: model.train(),
    "factor": lambda model: setattr(model.model.layers[0], "residual_multiplier", 2.0),
    "bias": lambda model: setattr(model.lm_head, "bias", torch.nn.Parameter(torch.arange(float(VOCAB)))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_never_runs_a_stale_graph(change):
    model, plain, summary = pair("granitemoehybrid", num_local_experts=0)
    prompt, first, ids = ids_of(1, 4), ids_of(1, 7), ids_of(1, 5)
    kept, expected = read(model, prompt), read(plain, prompt)
    one_by_one(model, first, kept)
    one_by_one(plain, first, expected)
    (step,) = summary.graphs[0].steps.values()
    assert step.replay is not None  # and it has room for all tokens
    assert step.capacity >= step.length + ids.shape[1]
    for each in (model, plain):
        torch.manual_seed(0)
        CHANGES[change](each)
    if change == "double":
        kept, expected = read(model, prompt), read(plain, prompt)
    found = one_by_one(model, ids, kept)
    torch.testing.assert_close(found, one_by_one(plain, ids, expected), rtol=1e-4, atol=1e-4)


def between(change):
    """Make ways to run ``change`` once within a call of ``generate``, between two tokens."""
    at = iter([False] * 4 + [True] + [False] * 99)

    def processed(ids, scores):
        if next(at):
            change()
        return scores

    def stopped(ids, scores, **given):
        processed(ids, scores)
        return torch.zeros(len(ids), dtype=torch.bool)

    class Streamed(BaseStreamer):
        def put(self, value):
            processed(value, None)

        def end(self):
            """Say nothing."""

    return {
        "logits_processor": LogitsProcessorList([processed]),
        "stopping_criteria": StoppingCriteriaList([stopped]),
        "prefix_allowed_tokens_fn": lambda row, ids: processed(ids, list(range(VOCAB))),
        "streamer": Streamed(),
    }


@pytest.mark.parametrize("name", between(None))
def test_what_the_user_runs_between_two_tokens_may_change_the_model(name):
    model, plain, summary = pair("granitemoehybrid", num_local_experts=0)
    ids = ids_of(1, 7)
    still, found = plain.generate(ids, **GREEDY).tolist(), []
    for each in (plain, model):
        given = between(lambda each=each: setattr(each.lm_head, "weight", flipped(each)))[name]
        found.append(each.generate(ids, **GREEDY, **{name: given}).tolist())
    assert found[0] == found[1] != still
    assert replayed(summary)


def flipped(model):
    return torch.nn.Parameter(-model.lm_head.weight.detach())


def test_a_call_without_code_of_the_users_looks_at_the_model_once(monkeypatch):
    model, plain, _ = pair("falcon_h1")
    looks, holds = [], graphs.Snapshot.holds
    monkeypatch.setattr(graphs.Snapshot, "holds", lambda self: bool(looks.append(1)) or holds(self))
    ids, seen = ids_of(1, 7), []
    streamer = between(lambda: None)["streamer"]
    for call in ({}, {"do_sample": True, "past_key_values": DynamicCache(config=model.config)}, {"streamer": streamer}):
        looks.clear()
        model.generate(ids, **GREEDY | call)
        seen.append(len(looks))
    assert seen[0] <= 1
    assert seen[1] == 1
    assert seen[2] > 8
    for each in (model, plain):  # the next call, of a model or of ``generate``, looks again
        each.lm_head.weight = flipped(each)
    assert model.generate(ids, **GREEDY).tolist() == plain.generate(ids, **GREEDY).tolist()


OTHER = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 0.5, str: lambda v: f"{v}s"}


def places_of(value, name):
    """Yield the settings below a place: what holds each, and its name there."""
    found = value[name]
    for place in found if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ():
        yield from places_of(found, place)
    if type(found) in OTHER:
        yield value, name


@pytest.mark.parametrize("name", ["granitemoehybrid", "falcon_h1"])
def test_every_setting_that_changes_is_seen(name):
    model = make(name).eval()
    model.config.nested = {"list": [1, {"deep": 2.0}]}
    snapshot = graphs.Snapshot(model)
    tables = [vars(module) for module in model.modules()] + [vars(model.config)]
    own = set(vars(torch.nn.Module())) - {"training"}
    places = [place for table in tables for name in table if name not in own for place in places_of(table, name)]
    assert len(places) > 100
    for holder, key in places:
        before = holder[key]
        holder[key] = OTHER[type(before)](before)
        assert not snapshot.holds(), key
        holder[key] = type(before)(before)
        assert snapshot.holds(), key
    for value in (torch.ones(3), torch.ones(3).numpy()):
        model.config.nested = value
        assert not snapshot.holds()
    del model.config.nested
    assert not snapshot.holds()
    model.config.others = {}
    assert not snapshot.holds()


def test_every_module_and_tensor_that_is_replaced_is_seen():
    model = make("granitemoehybrid").eval()
    model.lm_head.scale = torch.nn.Parameter(torch.ones(1))  # equal to another, as a number
    model.lm_head.register_buffer("none", torch.ones(0))
    snapshot = graphs.Snapshot(model)
    held = [vars(module)[name] for module in model.modules() for name in ("_modules", "_parameters", "_buffers")]
    places = [(table, name) for table in held for name, value in table.items() if value is not None]
    assert len(places) > 50
    for table, name in places:
        before = table[name]
        table[name] = copy.deepcopy(before)
        assert not snapshot.holds(), name
        table[name] = before
        assert snapshot.holds(), name


def test_memory_is_given_back():
    model, _, summary = pair("granitemoehybrid", num_local_experts=0)
    for rows in range(1, 8):
        one_by_one(model, ids_of(rows, 3), read(model, ids_of(rows, 4)))
    (found,) = summary.graphs
    assert len(found.steps) == graphs.KEPT
    assert all(step.bytes < 2**20 for step in found.steps.values())
    summary.undo()
    assert not found.steps
    again = refold.accelerate(model)
    one_by_one(model, ids_of(1, 3), read(model, ids_of(1, 4)))
    assert replayed(again)


def test_a_default_device_is_no_reason_for_ordinary_calls():
    model, plain, summary = pair("mamba2")
    ids = ids_of(1, 4)
    with torch.device("cpu"):
        assert model.generate(ids, **GREEDY).tolist() == plain.generate(ids, **GREEDY).tolist()
    assert replayed(summary) > 2
    assert "watches" not in str(summary)


def test_what_is_said_of_calls_without_a_graph():
    model, _, summary = pair("mamba2")
    cache = read(model, ids_of(1, 4))
    model(ids_of(1, 1), cache_params=cache, use_cache=True)
    with torch.no_grad():
        model(ids_of(1, 1), use_cache=True)
        with torch.autocast("cpu"):
            model(ids_of(1, 1), cache_params=cache, use_cache=True)
    assert "1 tokens by ordinary calls: gradients are on" in str(summary)
    assert "no cache was given" in str(summary)
    assert "autocast is on" in str(summary)


def test_copies_and_pickles_have_graphs_of_their_own():
    model, plain, _ = pair("mamba2")
    ids = ids_of(1, 4)
    expected = plain.generate(ids, **GREEDY).tolist()
    assert model.generate(ids, **GREEDY).tolist() == expected
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other).__name__ == "Mamba2ForCausalLM"
        assert other.generate(ids, **GREEDY).tolist() == expected
        assert replayed(refold.accelerate(other))
    assert len({id(refold.accelerate(each).graphs[0]) for each in (model, other)}) == 2
