"""``y + D * x`` after ``ssd`` becomes its argument D in every spelling; what only looks like it stays."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refold import ops
from refold.compiler.options import Options
from refold.compiler.passes import absorb_skips
from refold.compiler.validate.region import validate_region
from refold.verify.numerics import unit_roundoff
from support.chunked import BATCH, CHANNELS, HEADS, Listing, inputs, repeat_groups

pytestmark = pytest.mark.rows(16)

NAME = "absorb skip"
TOKENS = 6


def arguments(heads=HEADS, channels=CHANNELS, dtype=torch.float32):
    x, z = (torch.randn(BATCH, TOKENS, heads, channels) for _ in "xz")
    dt, A, D = torch.rand(BATCH, TOKENS, heads), -torch.rand(heads), torch.randn(heads)
    B, C = (torch.randn(BATCH, TOKENS, 1, 3) for _ in "BC")
    return [v.to(dtype) for v in (x, dt, A, B, C, D, z)]


def scan(x, dt, A, B, C):
    return ops.ssd(x, dt, A, B, C)[0]


def padded(v):
    return F.pad(v, (0, 0, 0, 0, 0, 2))


FOUND = {
    "plain": lambda y, x, D, z: y + D[:, None] * x,
    "other_order": lambda y, x, D, z: x * D[:, None] + y,
    "alpha": lambda y, x, D, z: torch.add(y, D[:, None] * x, alpha=-3),
    "subtracted": lambda y, x, D, z: y - (0.5 * D)[:, None] * x,
    "negated": lambda y, x, D, z: y + -(x * 2) * D[:, None],
    "in_place": lambda y, x, D, z: y.clone().add_(D[:, None] * x),
    "two_numbers": lambda y, x, D, z: y + (x * D[:, None]) * D.exp()[:, None],
    "per_channel": lambda y, x, D, z: y + torch.outer(D, torch.arange(CHANNELS) + 1.0) * x,
    "one_number": lambda y, x, D, z: y + D[0] * x,
    "a_plain_number": lambda y, x, D, z: y + 0.25 * x,
    "flat": lambda y, x, D, z: y.flatten(2) + D.repeat_interleave(CHANNELS) * x.flatten(2),
    "heads_first": lambda y, x, D, z: y.transpose(1, 2) + D[:, None, None] * x.transpose(1, 2),
    "chunks": lambda y, x, D, z: y.unflatten(1, (2, 3)) + D[:, None] * x.unflatten(1, (2, 3)),
    "padded": lambda y, x, D, z: (padded(y) + D[:, None] * padded(x))[:, :TOKENS],
    "padding_dropped": lambda y, x, D, z: padded(y).unflatten(1, (4, 2)).flatten(1, 2)[:, :TOKENS] + D[:, None] * x,
    "gated_and_normed": lambda y, x, D, z: F.layer_norm((y + D[:, None] * x) * F.silu(z), (CHANNELS,)),
}

STAY = {
    "residual": lambda y, x, D, z: y + x,
    "another_tensor": lambda y, x, D, z: y + D[:, None] * z,
    "read_twice": lambda y, x, D, z: (y + D[:, None] * x, y.exp()),
    "product_read_twice": lambda y, x, D, z: (skip := D[:, None] * x, y + skip),
    "depends_on_time": lambda y, x, D, z: y + D[:, None] * torch.arange(TOKENS).view(-1, 1, 1) * x,
    "depends_on_batch": lambda y, x, D, z: y + (D + torch.arange(BATCH).view(-1, 1))[:, None, :, None] * x,
    "another_x": lambda y, x, D, z: y + D[:, None] * (x + 1),
    "multiplied_x": lambda y, x, D, z: y + D[:, None] * x * z,
    "earlier_x": lambda y, x, D, z: y + D[:, None] * F.pad(x, (0, 0, 0, 0, 1, -1)),
    "other_heads": lambda y, x, D, z: y + D[:, None] * x.flip(2),
    "scaled_y": lambda y, x, D, z: torch.add(D[:, None] * x, y, alpha=2),
    "taken_from": lambda y, x, D, z: D[:, None] * x - y,
    "earlier_y": lambda y, x, D, z: F.pad(y, (0, 0, 0, 0, 1, -1)) + D[:, None] * x,
    "only_some_tokens": lambda y, x, D, z: y[:, : TOKENS - 1] + D[:, None] * x[:, : TOKENS - 1],
    "from_the_result": lambda y, x, D, z: y + y.sum((0, 1, 3))[:, None] * x,
}


def check(outcome, found):
    assert outcome.names.count(NAME) == found
    assert outcome.targets.count("refold.ssd.default") == 1
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("skip", FOUND.values(), ids=FOUND)
def test_spellings(rewritten, skip):
    outcome = rewritten(lambda x, dt, A, B, C, D, z: skip(scan(x, dt, A, B, C), x, D, z), *arguments())
    check(outcome, 1)


@pytest.mark.parametrize("skip", STAY.values(), ids=STAY)
def test_what_only_looks_like_it_stays(rewritten, skip):
    check(rewritten(lambda x, dt, A, B, C, D, z: skip(scan(x, dt, A, B, C), x, D, z), *arguments()), 0)


def test_heads_and_channels_of_one_size_are_told_apart(rewritten):
    def exchanged(x, dt, A, B, C, D, z):
        return scan(x, dt, A, B, C) + D[:, None] * x.transpose(2, 3)

    check(rewritten(exchanged, *arguments(channels=HEADS)), 0)

    def by_channel(x, dt, A, B, C, D, z):
        return scan(x, dt, A, B, C) + D * x

    outcome = rewritten(by_channel, *arguments(channels=HEADS))
    check(outcome, 1)
    assert f"{HEADS} x {HEADS}" in outcome.rewrites[0].detail


def test_a_product_that_the_scan_reads(rewritten):
    check(rewritten(lambda x, dt, A, B, C, D, z: scan(x * z, dt, A, B, C) + D[:, None] * z * x, *arguments()), 1)


def test_the_state_comes_from_the_same_call(rewritten):
    def layer(x, dt, A, B, C, D, z):
        y, state = ops.ssd(x, dt, A, B, C)
        return state.exp(), y + D[:, None] * x

    check(rewritten(layer, *arguments()), 1)


def test_another_skip_or_a_gate_inside_stays(rewritten):
    def layer(x, dt, A, B, C, D, z):
        return ops.ssd(x, dt, A, B, C, D=D)[0] + D[:, None] * x, ops.ssd(x, dt, A, B, C, z=z)[0] + D[:, None] * x

    outcome = rewritten(layer, *arguments())
    assert NAME not in outcome.names


@pytest.mark.parametrize("tokens", [8, 11])
def test_a_layer_that_is_widened(rewritten, tokens):
    """As transformers does it: the scan and the skip in float32, padded, narrowed after the gate."""

    def layer(x, dt, A, B, C, D, z):
        x, B, C = x.float(), repeat_groups(B).float(), repeat_groups(C).float()
        pad = -tokens % 4
        given = (x * dt[..., None].float(), dt.float() * A, B, C)
        y = Listing()(*(F.pad(v, [0, 0] * (v.dim() - 2) + [0, pad]) for v in given))[0]
        y = (y + D[:, None] * F.pad(x, (0, 0, 0, 0, 0, pad)))[:, :tokens]
        return (y * F.silu(z.float())).bfloat16()

    x, dt, B, C = (v.bfloat16() for v in inputs(tokens, 1))
    outcome = rewritten(layer, x, dt.abs(), -torch.rand(HEADS), B, C, torch.randn(HEADS), x.clone())
    assert outcome.names == ["fuse chunked scan", NAME]
    assert "bfloat16" in outcome.rewrites[0].detail
    assert outcome.worst() < 4 * unit_roundoff(torch.bfloat16)
    (node,) = outcome.rewrites[1].candidate.graph.find_nodes(op="call_function", target=torch.ops.refold.ssd.default)
    assert (node.args[0].meta["val"].dtype, node.args[5].meta["val"].dtype) == (torch.bfloat16, torch.float32)


def test_a_loop_that_became_a_scan(rewritten):
    def loop(x, dt, A, B, C, D, z):
        h, ys = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1]), []
        for t in range(x.shape[1]):
            step = dt[:, t, :, None, None]
            h = torch.exp(step * A[:, None, None]) * h + step * x[:, t, :, :, None] * B[:, t, :, None]
            ys.append((h * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
        return torch.stack(ys, 1)

    check(rewritten(loop, *arguments()), 1)


@pytest.mark.exhaustive
@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.sampled_from([1, 2, 4]),
    channels=st.sampled_from([1, 2, 4]),
    order=st.permutations(range(4)),
    spanned=st.lists(st.booleans(), min_size=4, max_size=4),
    same=st.booleans(),
    sign=st.sampled_from([1, -1, 0.5]),
)
def test_random_variants(rewritten, heads, channels, order, spanned, same, sign):
    """Any D over any axes, any order of axes; x as it is, or with two axes of one size exchanged."""
    x, dt, A, B, C, _, _ = arguments(heads, channels)
    D = torch.randn([size if one else 1 for size, one in zip(x.shape, spanned, strict=True)])

    def layer(x, dt, A, B, C, D):
        other = x if same else x.flatten(2).unflatten(2, (channels, heads)).transpose(2, 3)
        skip = (sign * D * other).permute(order)
        return (scan(x, dt, A, B, C).permute(order) + skip).contiguous()

    torch._dynamo.reset()
    outcome = rewritten(layer, x, dt, A, B, C, D)
    per_head = D.shape[:2] == (1, 1)
    check(outcome, per_head and (same or min(heads, channels) == 1))


@pytest.mark.parametrize("bug", ["sign", "order"])
def test_planted_bugs_are_refused(rewritten, monkeypatch, bug):
    laid = absorb_skips._laid

    def wrong(build, skip):
        node = laid(build, skip)
        if bug == "sign":
            return build.call(torch.ops.aten.neg.default, node)
        return build.call(torch.ops.aten.flip.default, node, [0])

    monkeypatch.setattr(absorb_skips, "_laid", wrong)
    skip = FOUND["plain"]
    outcome = rewritten(lambda x, dt, A, B, C, D, z: skip(scan(x, dt, A, B, C), x, D, z), *arguments())
    (rewrite,) = outcome.rewrites
    assert "not equal" in validate_region(rewrite, None, Options(accept="always")).reason
