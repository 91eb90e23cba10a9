"""The delta rule in chunks becomes one operator in every spelling; what is almost one is refused by its check."""

import pytest
import torch

import refold
from refold.compiler.options import Options
from refold.compiler.validate.region import validate_region
from refold.verify.numerics import unit_roundoff
from support.chunked_deltas import CHUNK, chunked, inputs
from support.scans import operators

pytestmark = pytest.mark.rows(8)

NAME = "fuse chunked delta rule"


def called(fn, given, *more, **options):
    """Give a function only the arrays that are there."""
    there = [x is not None for x in given]

    def call(*arrays):
        arrays, rest = list(arrays[: sum(there)]), arrays[sum(there) :]
        return fn(*(arrays.pop(0) if one else None for one in there), *rest, **options)

    return call, [x for x in given if x is not None] + list(more)


def check(outcome, rewrites):
    assert outcome.names == [NAME] * rewrites
    assert outcome.targets.count("refold.delta_rule.default") == 1
    assert not [target for target in outcome.targets if "mm" in target or "cumsum" in target or "solve" in target]
    assert outcome.worst() < 64 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("decay", ["head", "key", "none"])
@pytest.mark.parametrize("how", ["solve", "rows"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("final", [True, False])
def test_spellings(rewritten, decay, how, inside, final):
    fn, given = called(chunked, inputs(3 * CHUNK, decay), how=how, inside=inside)
    check(rewritten(fn if final else lambda *xs: fn(*xs)[0], *given), 1 + final)


@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("tokens", [1, CHUNK, CHUNK + 1, 3 * CHUNK - 1])
def test_lengths_and_initial_states(rewritten, decay, tokens):
    fn, given = called(chunked, inputs(tokens, decay), torch.randn(2, 2, 3, 5))
    check(rewritten(fn, *given), 2)


@pytest.mark.parametrize(("n", "p"), [(CHUNK, CHUNK), (CHUNK, 3), (2, 2), (5, CHUNK)])
def test_sizes_that_look_alike(rewritten, n, p):
    """Queries, values and states are told apart where all their sizes are the same, too."""
    fn, given = called(chunked, inputs(2 * CHUNK, n=n, p=p))
    check(rewritten(fn, *given), 2)


@pytest.mark.parametrize("wrong", ["values", "state", "write"])
def test_what_is_almost_one_is_refused(rewritten, wrong):
    fn, given = called(chunked, inputs(3 * CHUNK), wrong=wrong)
    rewrites = rewritten(fn, *given).rewrites
    sizes = [[node.meta["val"] for node in x.original.graph.find_nodes(op="placeholder")] for x in rewrites]
    drawn = [[0.5 * torch.rand(x.shape) for x in some] for some in sizes]
    reasons = [
        validate_region(x, values, Options(accept="always")).reason for x, values in zip(rewrites, drawn, strict=True)
    ]
    assert len(reasons) == 0 if wrong == "values" else 2  # strengths that values lack are seen at once
    assert all("[not-equal]" in reason for reason in reasons), reasons


@pytest.mark.parametrize("decay", ["head", "key"])
def test_training(decay):
    fn, given = called(chunked, inputs(2 * CHUNK + 1, decay))
    run, results = refold.compile(fn, accept="always", strict=True), []
    for program in (run, fn):
        leaves = [x.clone().requires_grad_() for x in given]
        y, state = program(*leaves)
        (y.sum() + state.square().sum()).backward()
        results.append([y.detach(), state.detach(), *(x.grad for x in leaves)])
    assert operators(run) == ["delta_rule"] * 2
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_parts_without_gradients_keep_them(recwarn):
    """A chunk that the code detaches has no gradient: nothing may be put in its place."""

    def detached(q, k, v, g, beta):
        y, state = chunked(q, k, v.detach() + 0 * v, g, beta)
        with torch.no_grad():
            z, _ = chunked(q, k, v, g, beta)
        return y + z, state

    given = inputs(2 * CHUNK)
    run, results = refold.compile(detached, accept="always"), []
    for program in (run, detached):
        leaves = [x.clone().requires_grad_() for x in given]
        program(*leaves)[0].sum().backward()
        results.append([x.grad for x in leaves])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm() + 1e-6
