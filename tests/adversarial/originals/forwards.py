"""Originals without parameters: what they draw as inputs, and what they compute (tools/attacks.py)."""

import torch
from attacks import original


@original(lambda: [torch.randn(6, 10), torch.randn(6, 10)])
def added(self, a, b):
    """A sum of two inputs."""
    return a + b


@original(lambda: [torch.randn(2, 3, 12, 8) for _ in range(3)])
def attention(self, q, k, v):
    """Causal attention, step by step."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v


@original(lambda: [torch.randn(6, 10), torch.tensor([4, 1, 5, 0, 3, 2])])
def chosen(self, x, index):
    """Rows chosen by an index that is always the same."""
    return x[index]


@original(lambda: [torch.randn(6, 10)])
def copy(self, x):
    """A copy."""
    return x.clone()


@original(lambda: [torch.randn(32, 10), torch.randint(0, 10, (32,))])
def cross_entropy(self, logits, target):
    """The cross entropy of classes, one number."""
    return torch.nn.functional.cross_entropy(logits, target)


@original(lambda: [torch.randn(6, 10)])
def cube(self, x):
    """The third power."""
    return x * x * x


@original(lambda: [torch.randn(6, 10)])
def double(self, x):
    """Twice the input."""
    return x + x


@original(lambda: [torch.randn(256, 256)])
def dropout(self, x):
    """Dropout."""
    return torch.nn.functional.dropout(x, 0.5)


@original(lambda: [torch.randn(3, 60, 4)])
def ema(self, x):
    """A moving average, one step at a time: slow, and the same in fewer steps."""
    h = torch.zeros_like(x[:, 0])
    out = []
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


@original(lambda: [torch.randn(6, 10), torch.randn(6, 10)])
def far_apart(self, a, b):
    """The logarithm of a sum of exponentials, of two inputs."""
    return torch.logaddexp(a, b)


@original(lambda: [torch.randn(6, 10), torch.randn(6, 10)])
def follows_names(self, a, b):
    """A difference of two arguments that have names."""
    return a - 2 * b


@original(lambda: [torch.randn(2, 18, 6), 0.4 * torch.randn(2, 18, 6), torch.randn(2, 18, 5), torch.rand(2, 18)])
def delta(self, q, k, v, beta):
    """The delta rule, step by step."""
    state, out = q.new_zeros(q.shape[0], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        error = v[:, t] - torch.einsum("bd,bde->be", k[:, t], state)
        state = state + beta[:, t, None, None] * k[:, t, :, None] * error[:, None]
        out.append(torch.einsum("bd,bde->be", q[:, t], state))
    return torch.stack(out, 1)


@original(lambda: [torch.randn(2, 40, 3), torch.randn(2, 40, 3)])
def forgetful(self, x, gate):
    """A recurrence whose decays are inputs."""
    decay = torch.sigmoid(gate)
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


@original(lambda: [torch.randn(7, 12)])
def gelu(self, x):
    """Gelu."""
    return torch.nn.functional.gelu(x)


@original(lambda: [{0: torch.randn(4, 5), 1: torch.randn(4, 5)}])
def keyed(self, parts):
    """Inputs by number."""
    return parts[0] * 2 + parts[1]


@original(lambda: [torch.randint(0, 1 << 24, (6, 10))])
def large_integers(self, k):
    """Whole numbers of which float64 does not hold each."""
    return k * 8675309 + (1 << 60)


@original(lambda: [torch.randn(6, 10), 0.01])
def leaky(self, x, slope):
    """A function with a slope among its arguments."""
    return torch.where(x > 0, x, slope * x)


@original(lambda: [torch.randn(6, 10), torch.ones(6, 10, dtype=torch.bool)])
def kept(self, x, keep):
    """Numbers that a mask keeps, which here are all."""
    return x.masked_fill(~keep, 0)


@original(lambda: [[torch.randn(6, 10), torch.randn(6, 10)]])
def listed(self, xs):
    """The sum of a list of tensors."""
    return sum(xs)


@original(lambda: [torch.randn(2, 600, 4)])
def long_ema(self, x):
    """A moving average, one step at a time: slow, and the same in fewer steps."""
    h = torch.zeros_like(x[:, 0])
    out = []
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


@original(lambda: [torch.randn(16, 8), torch.randn(16, 8)])
def masked(self, q, k):
    """Scores under a causal mask."""
    later = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)
    return (q @ k.mT).masked_fill(later, -1e9)


@original(lambda: [torch.randn(8, 16)])
def mean(self, x):
    """One number."""
    return (x * x).mean()


@original(lambda: [torch.randn(6, 10)])
def noise(self, x):
    """Adds random numbers."""
    return x + 0.5 * torch.randn_like(x)


@original(lambda: [torch.randn(8, 16)])
def number(self, x):
    """A number of Python."""
    return float(x.mean())


@original(lambda: [torch.randn(6, 10)])
def pair(self, x):
    """Two results by name."""
    return {"sum": x.sum(-1), "largest": x.argmax(-1)}


@original(lambda: [torch.randn(12, 64), torch.randn(64, 20)])
def product(self, a, b):
    """A product of two matrices."""
    return a @ b


@original(lambda: [torch.randn(3, 12), True])
def reversed_sum(self, x, reverse):
    """A running sum, from one end or from the other."""
    return x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1)


@original(lambda: [torch.randn(6, 10, dtype=torch.complex64), torch.randn(10)])
def rotate(self, z, w):
    """Complex numbers, scaled."""
    return z * w


@original(lambda: [3 * torch.randn(6, 10)])
def rounded(self, x):
    """Numbers rounded to whole ones, halves to even ones."""
    return torch.round(x)


@original(lambda: [torch.randn(6, 10)])
def rowmean(self, x):
    """The mean of a row in each of its places."""
    return x.mean(-1, keepdim=True).expand(x.shape).contiguous()


@original(lambda: [torch.randn(1 << 19)])
def running_sum(self, x):
    """A running sum: one long chain of additions, as slow in any language."""
    return x.cumsum(0)


@original(lambda: [torch.randn(6, 10), 0.5])
def scaled(self, x, scale):
    """A function with a number among its arguments."""
    return torch.tanh(x) * scale


@original(lambda: [torch.randn(6, 10), 0.5])
def scaled_by_default(self, x, scale=0.5):
    """A function with a number among its arguments, which may be left out."""
    return torch.tanh(x) * scale


@original(lambda: [torch.randn(2, 9, 8)])
def self_attention(self, x):
    """Attention of a sequence to itself."""
    return torch.softmax(x @ x.mT / x.shape[-1] ** 0.5, -1) @ x


@original(lambda: [torch.randn(6, 12)])
def signs(self, x):
    """Signs of a product."""
    return x.sign().sum(-1)


@original(lambda: [5 + 0.1 * torch.rand(6, 10)])
def sine(self, x):
    """A sine of numbers from a narrow range."""
    return torch.sin(x)


@original(lambda: [torch.randn(4, 512)])
def softmax(self, x):
    """Softmax of long rows: small, nearly equal numbers."""
    return torch.softmax(0.01 * x, -1)


@original(lambda: [torch.randn(6, 10)])
def softplus(self, x):
    """A smooth form of relu, whose derivative needs no result."""
    return torch.nn.functional.softplus(x)


@original(lambda: [torch.randn(6, 10)])
def tanh(self, x):
    """Tanh."""
    return torch.tanh(x)


@original(lambda: [torch.randn(6, 12), torch.randn(12, 5), torch.randn(6, 12)])
def three(self, first, values, second):
    """Two score matrices, added, times values."""
    return (first + second) @ values


@original(lambda: [torch.randn(9, 4), torch.arange(9)])
def turned(self, x, positions):
    """Numbers that turn with their positions."""
    return x * torch.cos(positions[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=x.dtype))


@original(lambda: [torch.randn(16, 16)])
def two(self, x):
    """Two results."""
    return torch.cos(x), torch.cos(x).flatten()[64:]


@original(lambda: [torch.randn(6, 10)])
def two_results(self, x):
    """Two results, of which a user may need one."""
    return torch.cos(x), torch.sin(x)


@original(lambda: [torch.randn(6, 30)])
def unit_rows(self, x):
    """Rows divided by their norm, and not by zero."""
    return torch.nn.functional.normalize(x, dim=-1)


@original(lambda: [torch.randn(6, 10)])
def view(self, x):
    """A transposed view of the input."""
    return x.T


@original(lambda: [torch.rand(6, 10)])
def whole(self, x):
    """Large whole numbers, of which float32 and float64 have different ones."""
    return (x * 3e8).long()
