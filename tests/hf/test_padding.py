"""Rows with padding behind or between their tokens go on as if they were alone."""

import pytest
import torch

import refold
from refold.errors import ArgumentError
from refold.integrations import mixers, padding
from refold.integrations.mixers import _step_sizes
from support.families import NAMES, VOCAB, cache_name, make

MASKS = {
    "right": ["111111111", "111110000", "110000000", "100000000"],
    "middle": ["110110111", "101010001", "000110110", "111111111"],
    "everywhere": ["011011110", "000000001", "100000001", "011010000"],
}
PIECES = {
    "tokens": [["1"] * 4, ["1"] * 4],
    "pieces": [["11111", "11000", "00011", "01010"], ["0111"] * 4, ["1"] * 4],
    "pauses": [["11111", "00000", "10001", "00100"], ["1"] * 4],
}
"""The masks of further calls, by row."""


def alone(model, ids, mask):
    """Return the logits of each row's own tokens."""
    return [model(row[keep.bool()][None], use_cache=False).logits[0] for row, keep in zip(ids, mask, strict=True)]


def in_pieces(model, ids, masks):
    """Return the logits of all tokens, read in pieces of these masks."""
    keyword, cache, found = cache_name(model), {}, []
    mask = torch.cat(masks, 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    end = 0
    for piece in masks:
        start, end = end, end + piece.shape[1]
        out = model(
            ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end], use_cache=True,
            logits_to_keep=0, **cache,
        )  # fmt: skip
        cache = {keyword: out[keyword]}
        found.append(out.logits)
    return torch.cat(found, 1)


def close(found, expected, mask):
    worst = 0.0
    for row, want, keep in zip(found, expected, mask, strict=True):
        worst = max(worst, float((row[keep.bool()] - want).abs().max() / want.abs().max()))
    return worst < 1e-9, worst


def tensor(rows):
    return torch.tensor([[int(c) for c in row] for row in rows])


@pytest.mark.parametrize("name", NAMES)
def test_rows_go_on_as_if_they_were_alone(name):
    """In float64, so that a step that should not have been taken cannot hide in rounding."""
    model = make(name, use_bias=False, mamba_proj_bias=False).double()
    refold.accelerate(model)
    with torch.no_grad():
        for before in MASKS.values():
            for after in PIECES.values():
                masks = [tensor(rows) for rows in (before, *after)]
                mask = torch.cat(masks, 1)
                ids = torch.randint(1, VOCAB, mask.shape)
                good, worst = close(in_pieces(model, ids, masks), alone(model, ids, mask), mask)
                assert good, (before, after, worst)


@pytest.mark.parametrize("name", ["mamba", "jamba", "zamba", "bamba"])
def test_gradients_of_rows_that_go_on(name):
    """Through padded pieces with a cache, one of a single token; gradients are those of the rows alone."""
    model = make(name, use_bias=False, mamba_proj_bias=False).double()
    masks = [tensor(rows) for rows in (MASKS["middle"], *PIECES["pieces"])]
    mask = torch.cat(masks, 1)
    ids, parameters = torch.randint(1, VOCAB, mask.shape), list(model.parameters())

    def gradients(rows):
        return torch.autograd.grad(sum(row.sin().sum() for row in rows), parameters, allow_unused=True)

    refold.accelerate(model)  # whose gradients of a row are right; transformers' have parts in float32
    expected = gradients(alone(model, ids, mask))
    found = gradients([row[keep.bool()] for row, keep in zip(in_pieces(model, ids, masks), mask, strict=True)])
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert (a - b).abs().max() <= 1e-9 * b.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_pause_for_one_token(name):
    """It would read what is no token of its own; rows that have not begun may wait."""
    model, ids = make(name), torch.randint(1, VOCAB, (2, 6))
    refold.accelerate(model)
    with torch.no_grad():
        in_pieces(model, ids, list(tensor(["111111", "000011"]).split([3, 1, 1, 1], 1)))
        with pytest.raises(ArgumentError, match="attention_mask is 0 for the one token of row 1, and a row cannot"):
            in_pieces(model, ids, list(tensor(["111111", "111101"]).split([4, 1, 1], 1)))
        rest = ids[:, :3]
        assert model(rest, use_cache=False).logits.isfinite().all()  # the call that was refused is over


def test_padding_before_a_row_acts_as_in_transformers():
    """Where `in_proj` has a bias, the first convolutions see it there. Rows that have begun do not."""
    model, mask = make("mamba").double(), tensor(["000111", "000001"])
    ids = torch.randint(1, VOCAB, (2, 6))
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        refold.accelerate(model)
        found = in_pieces(model, ids, list(mask.split([2, 2, 2], 1)))
        assert close(found, [row[keep] for row, keep in zip(expected, mask.bool(), strict=True)], mask)[1] < 1e-6
        mask = tensor(["110100", "100001"])
        expected = alone(model, ids, mask)
        assert close(in_pieces(model, ids, list(mask.split([2, 2, 2], 1))), expected, mask)[0]


@pytest.mark.parametrize("bug", ["no padding moves", "steps are taken", "the last inputs of the row"])
def test_a_planted_bug_is_found(bug, monkeypatch):
    if bug == "no padding moves":
        monkeypatch.setattr(padding.Padding, "of", lambda *args: None)
    elif bug == "steps are taken":
        monkeypatch.setattr(mixers, "_step_sizes", lambda *args: _step_sizes(*args) + 0.1)
    else:
        monkeypatch.setattr(mixers, "_last_inputs", lambda x, call, width: x.mT)
    with pytest.raises(AssertionError):
        test_rows_go_on_as_if_they_were_alone("mamba2")


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_compiled_with_a_mask(name):
    """One graph that holds for every mask."""
    model = make(name, use_bias=False).double()
    refold.accelerate(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.randint(1, VOCAB, (4, 9))
    with torch.no_grad():
        for rows in MASKS.values():
            found = compiled(ids, attention_mask=tensor(rows), use_cache=False).logits
            assert close(found, alone(model, ids, tensor(rows)), tensor(rows))[0]


def test_values_of_a_mask_are_read_once_a_call(monkeypatch):
    """Each reading waits for a GPU."""
    model, mask, count = make("mamba2"), tensor(MASKS["middle"]), []
    refold.accelerate(model)
    original = padding.Padding._of
    monkeypatch.setattr(padding.Padding, "_of", lambda *args: count.append(1) or original(*args))
    with torch.no_grad():
        model(torch.randint(1, VOCAB, (4, 9)), attention_mask=mask)
    assert len(count) == 1
