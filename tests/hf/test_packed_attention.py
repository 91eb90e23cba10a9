"""Documents of one row do not see each other in attention layers either, in every hybrid."""

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

import refold
from refold.errors import ArgumentError
from refold.integrations import attention
from support.families import NAMES, VOCAB, cache_name, make

HYBRIDS = tuple(name for name in NAMES if name not in ("mamba", "falcon_mamba", "mamba2"))
LENGTHS = [5, 1, 9, 4]


def draw(*shape):
    return torch.randint(1, VOCAB, shape)


def pack():
    """Return documents, their row, positions, and offsets."""
    documents = [draw(1, n) for n in LENGTHS]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return documents, torch.cat(documents, 1), positions, torch.tensor([0, *LENGTHS]).cumsum(0).int()


def difference(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", [*HYBRIDS, "minimax"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_packed_row(name, implementation):
    """With a cache and without, documents told by positions, by offsets as TRL gives them, and by an index."""
    model = make(name, **({"sliding_window": 4} if name == "minimax" else {})).double()
    model.set_attn_implementation(implementation)
    documents, row, positions, offsets = pack()
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()
    longest = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    refold.accelerate(model)
    ways = [{}, {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, **longest}, {"seq_idx": index}]
    ways.append({"attention_mask": torch.ones_like(row)})
    with torch.no_grad():
        expected = torch.cat([model(d, use_cache=False).logits for d in documents], 1)
        for way in ways:
            for use_cache in (False, True):
                found = model(row, position_ids=positions, use_cache=use_cache, logits_to_keep=0, **way).logits
                assert difference(found, expected) < 1e-6, (way, use_cache)


@pytest.mark.parametrize("name", ["granitemoehybrid", "falcon_h1"])
def test_gradients_of_a_packed_row(name):
    model = make(name).double().train()
    documents, row, positions, _ = pack()
    refold.accelerate(model)
    parameters = list(model.parameters())

    def gradients(logits):
        return torch.autograd.grad(logits.sin().sum(), parameters, allow_unused=True)

    expected = gradients(torch.cat([model(d, use_cache=False).logits for d in documents], 1))
    for a, b in zip(gradients(model(row, position_ids=positions).logits), expected, strict=True):
        assert b is None or difference(a, b) < 1e-6


@pytest.mark.parametrize("name", ["bamba", "jamba", "granitemoehybrid", "zamba2"])
def test_rows_of_documents_with_padding_then_continued(name):
    """A cache goes on from the last document of each row, also over a further border, and for single tokens."""
    model = make(name, mamba_proj_bias=False).double()
    rows = [[4, 7], [2, 3, 3]]
    documents = [[draw(1, n) for n in lengths] for lengths in rows]
    more, ids, mask, positions = draw(2, 4), torch.zeros(2, 11, dtype=torch.long), torch.zeros(2, 11).long(), []
    for i, parts in enumerate(documents):
        whole = torch.cat(parts, 1)[0]
        ids[i, : len(whole)], mask[i, : len(whole)] = whole, 1
        positions.append(torch.cat([torch.arange(n) for n in rows[i]] + [torch.ones(11 - len(whole)).long()]))
    refold.accelerate(model)
    keyword, places = cache_name(model), torch.stack(positions)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=places, use_cache=True, logits_to_keep=0)
        for i, parts in enumerate(documents):
            expected = torch.cat([model(d, use_cache=False).logits for d in parts], 1)
            assert difference(out.logits[i : i + 1, : expected.shape[1]], expected) < 1e-6
        last = torch.tensor([[lengths[-1]] for lengths in rows])
        found = []
        for t in range(4):
            mask = torch.cat([mask, torch.ones(2, 1).long()], 1)
            given = {"attention_mask": mask, "position_ids": last + t, keyword: out[keyword]}
            out = model(more[:, t : t + 1], use_cache=True, **given)
            found.append(out.logits)
        for i, parts in enumerate(documents):
            alone = model(torch.cat([parts[-1], more[i : i + 1]], 1), use_cache=False).logits[:, -4:]
            assert difference(torch.cat(found, 1)[i : i + 1], alone) < 1e-6
        # One that goes on for two tokens, and begins another.
        piece = draw(2, 5)
        places = torch.cat([last + 4 + torch.arange(2), torch.arange(3).expand(2, -1)], 1)
        mask = torch.cat([mask, torch.ones(2, 5).long()], 1)
        given = {"attention_mask": mask, "position_ids": places, keyword: out[keyword]}
        out = model(piece, use_cache=True, logits_to_keep=0, **given)
        expected = model(piece[:, 2:], use_cache=False).logits
        assert difference(out.logits[:, 2:], expected) < 1e-6
        for i, parts in enumerate(documents):
            whole = torch.cat([parts[-1], more[i : i + 1], piece[i : i + 1, :2]], 1)
            assert difference(out.logits[i : i + 1, :2], model(whole, use_cache=False).logits[:, -2:]) < 1e-6


@pytest.mark.parametrize("name", HYBRIDS)
def test_an_implementation_that_takes_no_mask_gets_offsets(name):
    """As flash attention does, which runs on GPUs alone."""
    model, seen = make(name), []

    def flash(module, query, key, value, mask, **kwargs):
        seen.append((kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_k")))
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None

    AttentionInterface.register("spy", flash)
    model.set_attn_implementation("spy")
    _, row, positions, offsets = pack()
    refold.accelerate(model)
    with torch.no_grad():
        model(row, position_ids=positions, use_cache=False)
        assert seen
        assert all(torch.equal(given, offsets) and longest == 9 for given, longest in seen)
        with pytest.raises(ArgumentError, match="spy takes documents only in a batch of one row"):
            model(row.expand(2, -1), position_ids=positions, use_cache=False)


def test_what_cannot_be_kept_apart():
    model = make("bamba")
    _, row, positions, _ = pack()
    refold.accelerate(model)
    with torch.no_grad():
        cache = model(row, position_ids=positions, use_cache=True).past_key_values
        cache.layers[1].crop(-1)
        with pytest.raises(ArgumentError, match="holds documents of 1 rows and 19 tokens, and was changed to 1 rows"):
            model(draw(1, 1), use_cache=True, past_key_values=cache)
        with pytest.raises(ArgumentError, match="got masks that were made before the call"):
            model(row, position_ids=positions, attention_mask={"full_attention": None, "linear_attention": None})
        cache = DynamicCache(config=model.config)
        model(draw(1, 3), use_cache=True, past_key_values=cache)
        assert not hasattr(cache, attention._HIDDEN)


def test_a_planted_bug_is_found(monkeypatch):
    monkeypatch.setattr(attention, "_visible", lambda documents, seen, past, seqlen: seen[:, None, None].tril())
    with pytest.raises(AssertionError):
        test_a_packed_row("granitemoehybrid", "sdpa")
