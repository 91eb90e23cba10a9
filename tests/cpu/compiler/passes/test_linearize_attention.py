"""Causal attention without a softmax becomes a scan in any spelling; other attention stays as it is."""

import random
from functools import reduce

import pytest
import torch

from refold.compiler.inductor import show_graph
from refold.compiler.pipeline import run
from refold.compiler.recurrence import quadratic_form
from refold.verify.numerics import unit_roundoff
from support.chunked import below, difference, lower_triangle, masked_last, masked_running_sum
from support.trained import trained

NAME = "linearize attention"
BATCH, HEADS, STATES, CHANNELS = 2, 3, 5, 4


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(quadratic_form, "SHORTEST", 7)


def inputs(tokens=11):
    q, k = torch.randn(2, BATCH, HEADS, tokens, STATES)
    return q, k, torch.randn(BATCH, HEADS, tokens, CHANNELS), -torch.rand(BATCH, HEADS, tokens)


def distance(length, dtype=torch.float32):
    places = torch.arange(length, dtype=dtype)
    return places[:, None] - places


def written(a):
    weights = 0.9 ** distance(a.shape[-1], torch.int64) * (distance(a.shape[-1]) >= 0).float()
    weights[weights != weights] = 0
    return weights.to(a.dtype)


def rate(a):
    """Return a log decay per head, from those of tokens."""
    return a.mean((0, 2))[:, None, None]


MASKS = {
    "tril": torch.tril,
    "masked_fill": lambda w: w.masked_fill(~below(w.shape[-1]), 0.0),
    "where": lambda w: torch.where(below(w.shape[-1]), w, 0.0),
    "other": lambda w: torch.where(below(w.shape[-1], -1).mT, 0.0, w),
    "ones": lambda w: w * torch.ones(w.shape[-2:], dtype=w.dtype).tril(),
    "tri": lambda w: w * (distance(w.shape[-1]) >= 0).to(w.dtype),
    "bool": lambda w: w * (distance(w.shape[-1]) >= 0),
}
DECAYS = {
    "none": lambda a: torch.ones(a.shape[-1:] * 2, dtype=a.dtype),
    "running": masked_running_sum,
    "difference": difference,
    "last": masked_last,
    "triangle": lower_triangle,
    "plain": lambda a: (a.cumsum(-1)[..., None] - a.cumsum(-1)[..., None, :]).exp(),
    "cleared": lambda a: (a.cumsum(-1)[..., None] - a.cumsum(-1)[..., None, :]).tril().exp(),
    "number": lambda a: 0.9 ** distance(a.shape[-1], torch.int64),
    "literals": lambda a: torch.exp(distance(a.shape[-1], a.dtype) * torch.tensor([-0.1, 0.0, -1.0])[:, None, None]),
    "written": written,
    "heads": lambda a: torch.exp(distance(a.shape[-1], a.dtype) * rate(a)),
    "two": lambda a: torch.exp2(rate(a) * distance(a.shape[-1], a.dtype)),
    "infinite": lambda a: (rate(a) * distance(a.shape[-1])).masked_fill(~below(a.shape[-1]), -torch.inf).exp(),
}  # fmt: skip
PRODUCTS = {
    "matmul": lambda q, k, v, w: w(q @ k.mT) @ v,
    "einsum": lambda q, k, v, w: torch.einsum("bhij,bhjp->bhip", w(torch.einsum("bhin,bhjn->bhij", q, k)), v),
    "transposed": lambda q, k, v, w: (v.mT @ w(q @ k.mT).mT).mT,
    "scaled": lambda q, k, v, w: (w((q * STATES**-0.5) @ k.mT) @ v) * 3.0,
    "time_first": lambda q, k, v, w: torch.einsum(
        "bhij,bjhp->bihp", w(torch.einsum("bihn,bjhn->bhij", q.transpose(1, 2), k.transpose(1, 2))), v.transpose(1, 2)
    ),
    "one_key": lambda q, k, v, w: w(q @ k[:, :1].mT) @ v,
}
DIVISORS = {
    "none": lambda w, a: w,
    "tokens": lambda w, a: w / (2 + a[..., None]),
    "number": lambda w, a: w / 3,
    "root": lambda w, a: w / (2 + rate(a)).sqrt(),
}


def attention(seed):
    """Draw a spelling and inputs."""
    draw = random.Random(seed)
    mask, decays, product, divide = (table[draw.choice([*table])] for table in (MASKS, DECAYS, PRODUCTS, DIVISORS))
    first = draw.random() < 0.5

    def layer(q, k, v, a):
        return product(q, k, v, lambda w: divide(mask(w) * decays(a) if first else mask(w * decays(a)), a))

    torch.manual_seed(seed)
    return layer, inputs(draw.choice([7, 8, 11, 64]))


@pytest.mark.parametrize("seed", range(48))
def test_every_spelling_is_a_scan(rewritten, seed):
    layer, given = attention(seed)
    outcome = rewritten(layer, *given, dynamic=seed % 8 == 0)  # lengths that were symbols become numbers
    assert outcome.names == [NAME]
    assert outcome.targets.count("refold.ssd.default") == 1
    assert not [target for target in outcome.targets if "mm" in target]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("seed", range(100, 108))
def test_gradients(seed):
    layer, given = attention(seed)
    entry, error = trained(layer, *(x.requires_grad_() for x in given))
    assert [row.name for row in entry.rewrites] == [NAME]
    assert error < 8


@pytest.mark.parametrize("decays", ["none", "difference", "heads"])
def test_weights_divided_by_their_sum(rewritten, decays):
    def layer(q, k, v, a):
        w = (q.exp() @ k.exp().mT).tril() * DECAYS[decays](a)
        return (w / (w.sum(-1, keepdim=True) + 1e-6)) @ v

    outcome = rewritten(layer, *inputs())
    assert outcome.names == [NAME] * 2
    assert not [target for target in outcome.targets if "mm" in target]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


def weighted(weights):
    return lambda q, k, v, a: weights(q @ k.mT, a) @ v


def segments(a):
    total = a.cumsum(-1)
    return total[..., None] - total[..., None, :]


NEAR_MISSES = {
    "no_mask": weighted(lambda w, a: w * segments(a).exp()),
    "below_the_diagonal": weighted(lambda w, a: w.tril(-1)),
    "above_the_diagonal": weighted(lambda w, a: w.tril(1)),
    "another_power": weighted(lambda w, a: w * written(a) * (distance(w.shape[-1]) < 7)),
    "later_tokens": weighted(lambda w, a: w.triu()),
    "a_window": weighted(lambda w, a: w.tril().triu(-3)),
    "decays_to_earlier": weighted(lambda w, a: w.tril() * segments(a).mT.exp()),
    "two_decays": weighted(lambda w, a: w.tril() * segments(a).exp() * segments(a.sin()).exp()),
    "growing_by_distance_squared": weighted(lambda w, a: w.tril() * 0.9 ** distance(w.shape[-1]).square()),
    "distance_and_rate_of_tokens": weighted(lambda w, a: w.tril() * torch.exp(distance(w.shape[-1]) * a[..., None])),
    "bias": weighted(lambda w, a: (w + a[..., None]).tril()),
    "divided_by_what_is_read": weighted(lambda w, a: w.tril() / (2 + a[..., None, :])),
    "integers": weighted(lambda w, a: w.tril().long().to(w.dtype)),
    "eight_bits": weighted(lambda w, a: w.tril().to(torch.float8_e4m3fn).to(w.dtype)),
    "products": weighted(lambda w, a: reduce(lambda x, _: x * torch.where(x > 0, x, 1.0), range(40), w)),
    "softmax": weighted(lambda w, a: w.masked_fill(~below(w.shape[-1]), -torch.inf).softmax(-1)),
    "sigmoid": weighted(lambda w, a: w.sigmoid().tril()),
    "cut_decays": weighted(lambda w, a: w.tril() * segments(a).clamp(min=-1).exp()),
    "cleared_elsewhere": weighted(lambda w, a: w.tril() * segments(a).tril(-2).exp()),
    "mask_of_another_axis": lambda q, k, v, a: (q @ k.mT) @ v[..., :1].expand(*v.shape[:-1], v.shape[-2]).tril(),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay(rewritten, name):
    outcome = rewritten(NEAR_MISSES[name], *inputs())
    assert NAME not in outcome.names
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.parametrize(("tokens", "names"), [(6, []), (11, [NAME]), (12, [])])
def test_masks_have_limits_and_weights_none(rewritten, monkeypatch, tokens, names):
    monkeypatch.setattr(quadratic_form, "LARGEST", 11 * 11)
    assert rewritten(weighted(lambda w, a: w.tril() * difference(a)), *inputs(tokens)).names == names


@pytest.mark.parametrize("layer", ["softmax", "sigmoid", "a_window", "products"])
def test_lengths_stay_symbols_where_there_is_no_such_attention(layer):
    made = []

    def backend(gm, given):
        show_graph(gm, given, lambda graph: made.append(run(graph)))
        return gm

    compiled = torch.compile(NEAR_MISSES[layer], backend=backend, dynamic=True, fullgraph=True)
    for tokens in (11, 13):
        compiled(*inputs(tokens))
    assert len(made) == 1


CASTS = {
    "wide": lambda w, a: (w.double() * difference(a.double())).to(w.dtype),
    "decays": lambda w, a: w * difference(a.float()).to(w.dtype),
    "weights": lambda w, a: (w.float() * difference(a.float())).to(w.dtype),
    "promoted": lambda w, a: (w.tril() * torch.exp2(rate(a.float()) * distance(w.shape[-1]))).to(w.dtype),
    "divided": lambda w, a: (w.float().tril() / (2 + a.float()[..., None])).to(w.dtype),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(rewritten, dtype, cast):
    layer, given = weighted(CASTS[cast]), [x.to(dtype) for x in inputs()]
    outcome = rewritten(layer, *given)
    assert outcome.names == [NAME]
    assert "aten.bmm.default" not in outcome.targets
    assert outcome.worst() < 64 * unit_roundoff(dtype)
    entry, error = trained(layer, *(x.requires_grad_() for x in given))
    assert [row.name for row in entry.rewrites] == [NAME]
    assert error < 8
