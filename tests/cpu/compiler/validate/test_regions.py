"""The check of one region, where its inputs or its numbers are unusual."""

import torch

import refold
from support.trial import no_code


def modulate(x):
    """Quantise with feedback of the error: the gradient of what is returned is zero."""
    error, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        total = x[:, t] + error
        bit = torch.sign(total)
        error = total - bit
        out.append(bit)
    return torch.stack(out, 1)


def test_a_region_of_constants_alone():
    torch._dynamo.reset()
    x = torch.randn(2, 20, 3, requires_grad=True)
    compiled = refold.compile(modulate, accept="always", strict=True, cache=False)
    with no_code():
        y = compiled(x)
    assert torch.equal(y, modulate(x))
    assert not torch.autograd.grad(y.sum(), x)[0].any()


def test_products_with_fractions_are_not_said_to_be_exact(rewritten):
    def weighted(x, share):
        matrix = torch.stack([torch.full((1,), number) for number in (share, 1.0, 1.0, 1.0)]).view(2, 2, 1)
        return (matrix * x).sum(1)

    for share, exact in ((0.9, False), (0.75, True)):
        torch._dynamo.reset()
        (found,) = rewritten(lambda x, share=share: weighted(x, share), torch.randn(2, 8)).rewrites
        assert found.multilinear is exact
