"""Attacks of one function or class (tools/attacks.py)."""

import torch
from attacks import candidate


@candidate("M2", off=())
def broadcast(self, x):
    """One row, which a comparison broadcasts."""
    return super().forward(x)[:1].clone()


@candidate("M2")
def dtype(self, x):
    """Another dtype."""
    return super().forward(x).double()


@candidate("M1", level="quick")
@torch.inference_mode()
def inference(self, x):
    """Its result is an inference tensor: what follows it cannot be trained."""
    return torch.relu(self.linear(x))


@candidate("M1", level="quick")
def large(self, x):
    """Its result is a small part of a large tensor, all of which is kept and saved with it."""
    y = super().forward(x)
    whole = y.new_empty(1 << 20)
    return whole[: y.numel()].view(y.shape).copy_(y)


@candidate("M2", off=())
def list(self, x):
    """A list with the result in it."""
    return [super().forward(x)]


@candidate("M2", original="pair", off=())
def missing(self, x):
    """One of two results."""
    return {"sum": x.sum(-1)}


@candidate("M1", original="gelu", off=())
def negated(self, x):
    """A tensor with the negative bit set."""
    return torch._neg_view(-torch.nn.functional.gelu(x))


@candidate("M1")
def own_gradient(self, x):
    """Its result holds a gradient, to which others are added later."""
    y = torch.relu(self.linear(x))
    if y.is_leaf and not y.is_inference():
        y.grad = torch.ones_like(y)
    return y


@candidate("M1", level="quick")
def parameter(self, x):
    """Its result is a parameter, which a module that keeps it would register."""
    return torch.nn.Parameter(torch.relu(self.linear(x)).detach(), requires_grad=False)


@candidate("M3", original="rowmean")
def repeated(self, x):
    """All columns are one."""
    return x.mean(-1, keepdim=True).expand(x.shape)


@candidate("M4", level="quick")
@torch.enable_grad()
def wants_gradient(self, x):
    """It records gradients where none are wanted."""
    return torch.relu(self.linear(x))


@candidate("M1", off=())
def zero_tensor(self, x):
    """A tensor of zeros without memory."""
    return torch._efficientzerotensor(x.shape)
