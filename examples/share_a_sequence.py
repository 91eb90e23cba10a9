"""A layer of Mamba-2 whose sequence is cut over processes, compared with one device: no GPU is needed.

Start it with ``torchrun --nproc-per-node 3 examples/share_a_sequence.py``.
"""

import torch
import torch.distributed as dist
from torch import nn

from refold.ops import causal_conv1d, ssd
from refold.parallel import shard


class Layer(nn.Module):
    """The convolution and the scan of a layer, between two projections."""

    def __init__(self, width: int = 32, heads: int = 4, states: int = 8) -> None:
        super().__init__()
        self.heads, self.sizes = heads, (width, states, states, heads)
        self.into, self.out = nn.Linear(width, sum(self.sizes)), nn.Linear(width, width)
        self.weight = nn.Parameter(0.3 * torch.randn(width + 2 * states, 4))
        self.rates = nn.Parameter(-torch.rand(heads))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor, group: object = None) -> torch.Tensor:
        """Return ``(1, t, width)``, of the tokens of this rank if there is a group."""
        mixed, dt = self.into(x).split([sum(self.sizes[:3]), self.heads], -1)
        mixed, _ = causal_conv1d(mixed, self.weight, activation="silu", cu_seqlens=cu_seqlens, group=group)
        value, key, query = mixed.split(self.sizes[:3], -1)
        value, key, query = value.unflatten(-1, (self.heads, -1)), key.unsqueeze(2), query.unsqueeze(2)
        y, _ = ssd(value, dt, self.rates, key, query, dt_softplus=True, cu_seqlens=cu_seqlens, group=group)
        return self.out(y.flatten(2))


dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
layer, x = Layer(), torch.randn(1, 301, 32)
documents = torch.tensor([0, 40, 230, 301])  # of the whole sequence: the second one crosses ranks

one_device = layer(x, documents)
one_device.square().mean().backward()
expected = {name: p.grad.clone() for name, p in layer.named_parameters()}

layer.zero_grad()
own, cut = shard({"x": x, "cu_seqlens": documents}, dist.group.WORLD)
y = layer(own["x"], own["cu_seqlens"], group=cut)
(y.square().sum() / x.numel()).backward()  # the sum over ranks is the mean of all
for p in layer.parameters():
    dist.all_reduce(p.grad)

errors = {name: float((p.grad - expected[name]).abs().max()) for name, p in layer.named_parameters()}
errors["y"] = float((y.detach() - one_device[:, cut.positions()]).abs().max())
assert max(errors.values()) < 1e-12, errors
print(f"rank {cut.rank}: {cut.lengths[cut.rank]} tokens, largest difference from one device {max(errors.values()):.0e}")
dist.destroy_process_group()
