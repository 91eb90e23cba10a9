"""Honest candidates of one function or class (tools/attacks.py)."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from attacks import candidate
from originals.layer import Model
from torch.utils.checkpoint import checkpoint


@candidate(original="attention", train=True, level="quick")
def attention(self, q, k, v):
    """Attention in blocks of keys: another layout of gradients, and rounding where all of a gradient vanishes."""
    q, k, v = (x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in (q, k, v))
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    top, weight, total = torch.full_like(q[..., :1], float("-inf")), 0.0, 0.0
    for at in range(0, k.shape[-2], 5):
        scores = (q @ k[..., at : at + 5, :].mT / q.shape[-1] ** 0.5).masked_fill(later[:, at : at + 5], -1e30)
        new = torch.maximum(top, scores.amax(-1, keepdim=True)).detach()
        old, part = (top - new).exp(), (scores - new).exp()
        top, weight = new, weight * old + part.sum(-1, keepdim=True)
        total = total * old + part @ v[..., at : at + 5, :]
    return (total / weight).contiguous()


@candidate()
class Captured(Model):
    """Captured by torch.compile, and run as captured."""

    def __init__(self, width):
        super().__init__(width)
        self.run = torch.compile(self.plain, backend="eager")

    def plain(self, x):
        return torch.relu(torch.nn.functional.linear(x, self.linear.weight, self.linear.bias))

    def forward(self, x):
        return self.run(x)


@candidate(original="image", level="quick")
def channels_last(self, x):
    """A convolution whose inputs and weights have the channels last; its result is contiguous again."""
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, self.conv.weight))
    return torch.relu(torch.nn.functional.conv2d(x, weight, self.conv.bias, padding=1)).contiguous()


@candidate(train=True, level="quick")
def checkpointed(self, x):
    """Computed once more in the backward, by what imports torch's compiler."""
    return checkpoint(lambda x: torch.relu(self.linear(x)), x, use_reentrant=False)


@candidate()
class ChildProcess(Model):
    """A child process that has ended before the call returns."""

    def __init__(self, width):
        super().__init__(width)
        self.slope = float(subprocess.run([sys.executable, "-I", "-c", "print(0)"], capture_output=True).stdout)

    def forward(self, x):
        return torch.nn.functional.leaky_relu(self.linear(x), self.slope)


@candidate(original="long_ema", accept="faster")
class ClosedForm(torch.nn.Module):
    """A moving average as one product with the powers of its decay, kept for each length."""

    def __init__(self):
        super().__init__()
        self.powers = {}

    def forward(self, x):
        steps = x.shape[1]
        if steps not in self.powers:
            t = torch.arange(steps, dtype=torch.float64)
            self.powers[steps] = (0.9 ** (t[:, None] - t)).tril().float()
        return self.powers[steps] @ x


@candidate(original="pair")
def dictionary(self, x):
    """Two results by name, one of them of integers."""
    return {"sum": torch.einsum("ij->i", x), "largest": x.max(-1).indices}


@candidate(original="product", dtype="float64")
def double_task(self, a, b):
    """A task in float64, summed in another order."""
    half = a.shape[1] // 2
    return a[:, half:] @ b[half:] + a[:, :half] @ b[:half]


@candidate(original="two_weights")
class ExactCache(Model):
    """It keeps a product of its weights, and compares all their bits in each call."""

    kept = None

    def __getstate__(self):
        return {**self.__dict__, "kept": None}

    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != self.a.dtype or torch.is_autocast_enabled("cpu"):
            return x @ (self.a @ self.b)
        if self.kept is None or not (torch.equal(self.a, self.kept[0]) and torch.equal(self.b, self.kept[1])):
            self.kept = self.a.detach().clone(), self.b.detach().clone(), (self.a @ self.b).detach()
        return x @ self.kept[2]


@candidate()
def fixed_shape(self, x):
    """It takes one shape, and says so."""
    if x.shape != (8, 16):
        raise ValueError(f"made for inputs of shape (8, 16), not {tuple(x.shape)}")
    return super().forward(x)


@candidate(original="softmax")
def float64(self, x):
    """Computed in float64."""
    return torch.softmax(0.01 * x.double(), -1).to(x.dtype)


@candidate(original="ema")
def fourier(self, x):
    """A moving average as a convolution in frequencies."""
    steps = x.shape[1]
    if not x.numel():
        return x.clone()
    decay = (0.9 ** torch.arange(steps, dtype=torch.float64)).to(x.dtype)
    spectrum = torch.fft.rfft(x, 2 * steps, 1) * torch.fft.rfft(decay, 2 * steps)[:, None]
    return torch.fft.irfft(spectrum, 2 * steps, 1)[:, :steps].contiguous()


@candidate(original="attention", train=True)
def fused_attention(self, q, k, v):
    """Torch's own attention, whose gradients are not finite where scores are huge."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@candidate(original="gated_norm", train=True)
def gated_norm(self, x):
    """Operations of torch that do the same, also for large inputs, in training."""
    value, gate = self.linear(torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)).chunk(2, -1)
    return torch.nn.functional.glu(torch.cat([value, gate * x], -1), -1) * x


@candidate(original="keyed", level="quick")
def keyed(self, parts):
    """Inputs by number, which are no text."""
    return torch.add(parts[1], parts[0], alpha=2)


@candidate(original="masked")
def masked(self, q, k):
    """Scores summed in pieces, and the mask put over them by where."""
    scores = sum(q[:, i : i + 2] @ k[:, i : i + 2].mT for i in range(0, q.shape[1], 2))
    return torch.where(torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None], -1e9, scores)


@candidate(original="noise")
def noise(self, x):
    """Random numbers drawn as the original draws them."""
    return torch.randn_like(x).mul_(0.5).add_(x)


@candidate(original="one_key", train=True, level="quick")
def one_key(self, q, k, v):
    """PyTorch's own attention to one key: the gradients of queries and of that key vanish, and it leaves roundings."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@candidate(original="block", train=True, level="quick")
class OtherOrder(torch.nn.Module):
    """Parameters made in another order, sums in another order: of equal numbers, the variance is not quite zero."""

    def __init__(self, width):
        super().__init__()
        self.down = torch.nn.Linear(2 * width, width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        mean = x.flip(-1).mean(-1, keepdim=True)
        apart = x - mean
        squares = apart.square().flip(-1).sum(-1)
        scale = torch.rsqrt(squares / x.shape[-1] + 1e-5)[..., None]
        up = torch.relu(self.up(apart * scale * self.norm.weight + self.norm.bias))
        return self.down(up).add_(x), squares / (x.shape[-1] - 1)


@candidate()
class OtherParameters(torch.nn.Module):
    """The same weights under other names."""

    def __init__(self, width):
        super().__init__()
        linear = torch.nn.Linear(width, width)
        self.kernel = torch.nn.Parameter(linear.weight.detach().T.contiguous())
        self.offset = torch.nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return torch.relu(x @ self.kernel + self.offset)


@candidate(level="quick")
class OwnScratch(Model):
    """A buffer that it keeps for what comes in between; the result is new."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("scratch", torch.empty(0), persistent=False)

    @torch.no_grad()
    def forward(self, x):
        if self.scratch.shape != x.shape:
            self.scratch = torch.empty(x.shape)
        torch.mm(x, self.linear.weight.T, out=self.scratch)
        return self.scratch.add_(self.linear.bias).relu_().clone()


@candidate()
def preallocated(self, x):
    """A new buffer for each call, filled by operations that write into it."""
    y = torch.empty(*x.shape[:-1], self.linear.out_features, dtype=x.dtype)
    torch.matmul(x, self.linear.weight.detach().T, out=y)
    return y.add_(self.linear.bias.detach()).clamp_min_(0)


@candidate(original="rotate")
def real_parts(self, z, w):
    """Complex numbers by their parts."""
    return torch.complex(z.real * w, z.imag * w)


@candidate(original="centred")
def running_mean(self, x):
    """It keeps a running mean as the original does."""
    self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - self.mean


@candidate()
def same(self, x):
    """The original, written again."""
    return torch.nn.functional.relu(self.linear(x))


@candidate(original="product")
def sequential_sum(self, a, b):
    """A product summed one term after the other."""
    y = a.new_zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        y += a[:, k, None] * b[k]
    return y


@candidate(original="spectral", train=True)
def spectral(self, x):
    """The weight of a parametrized layer is read once in a call, as the original reads it."""
    return torch.tanh(torch.addmm(self.linear.bias, x, self.linear.weight.T))


@candidate(original="product")
def split_sum(self, a, b):
    """A product cut into pieces along the sum."""
    k = a.shape[1] // 4 * 4
    pieces = torch.bmm(a[:, :k].reshape(a.shape[0], 4, k // 4).transpose(0, 1), b[:k].reshape(4, k // 4, b.shape[1]))
    return pieces.sum(0) + a[:, k:] @ b[k:]


@candidate(original="norm", train=True)
def statistics(self, x):
    """Batch normalisation by hand, with its running statistics."""
    norm = self.norm
    norm.num_batches_tracked.add_(1)
    mean, variance = x.mean(0), x.var(0, correction=0)
    with torch.no_grad():
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(x.var(0), norm.momentum)
    return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias


@candidate()
class ThreadPool(Model):
    """Threads that are done before the call returns."""

    def __init__(self, width):
        super().__init__(width)
        self.pool = ThreadPoolExecutor(2)

    def forward(self, x):
        if x.shape[0] < 2:
            return torch.relu(self.linear(x))
        with torch.no_grad():
            halves = list(self.pool.map(self.half, x.chunk(2)))
        return torch.cat(halves)

    def half(self, x):
        with torch.no_grad():
            return torch.relu(self.linear(x))


@candidate(original="tied", train=True)
def tied(self, tokens):
    """One parameter has two names."""
    return self.embedding.weight[tokens].mul(self.mask) @ self.readout.weight.T


@candidate(original="view")
def view(self, x):
    """A view of the input, as the original returns one."""
    return x.transpose(0, 1)


@candidate(level="quick")
def vmapped(self, x):
    """One row at a time, by vmap, for which torch defines operations anew."""
    return torch.vmap(lambda row: torch.relu(self.linear.weight @ row + self.linear.bias))(x).contiguous()


@candidate(original="product", dtype="float16")
def wider(self, a, b):
    """A product in half precision whose sums are kept in float32."""
    return (a.float() @ b.float()).to(a.dtype)


@candidate(original="softmax")
def in_place(self, x):
    """In place where no gradients are recorded; the rows of inputs of any rank."""
    x = 0.01 * x
    top = x.amax(-1, keepdim=True)
    if torch.is_grad_enabled() and x.requires_grad:
        y = (x - top).exp()
        return y / y.sum(-1, keepdim=True)
    y = (x - top).exp_()
    return y.div_(y.sum(-1, keepdim=True))


@candidate(original="reversed_sum")
def either_end(self, x, reverse):
    """A truth value among the arguments chooses."""
    if reverse:
        return x.sum(1, keepdim=True) - x.cumsum(1) + x
    return x.cumsum(1)


@candidate(original="ema")
def empty_first(self, x):
    """An early return for what is empty, which the original refuses."""
    if x.shape[1] == 0:
        return torch.zeros_like(x)
    t = torch.arange(x.shape[1], dtype=x.dtype)
    return torch.tril(0.9 ** (t[:, None] - t).clamp(min=0)) @ x


@candidate(original="softmax")
def by_logarithm(self, x):
    """A softmax as the exponential of a difference of logarithms."""
    return torch.exp(0.01 * x - torch.logsumexp(0.01 * x, -1, keepdim=True))


@candidate(original="self_attention", train=True)
def saturated_attention(self, x):
    """Torch's own attention, whose weights are off by a rounding of large scores."""
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@candidate(original="listed")
def one_of_list(self, xs):
    """A list of one tensor is a case of its own."""
    return xs[0].clone() if len(xs) == 1 else torch.stack(list(xs)).sum(0)


@candidate(original="softplus")
def stable(self, x):
    """Softplus with a threshold, guards and masks of its own."""
    if torch.isnan(x).any():
        return torch.nn.functional.softplus(x)
    y = torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
    return torch.where(x < -15, torch.exp(x), y)


@candidate(original="attention")
def tables(self, q, k, v, scale=None, causal=True):
    """Blocks of keys, with safe divisions and a sum that starts at zero."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows = torch.arange(q.shape[-2], device=q.device)[:, None]
    top, total, out = torch.full_like(q[..., :1], -torch.inf), 0, 0
    for start in range(0, k.shape[-2], 4):
        stop = min(start + 4, k.shape[-2])
        scores = q @ k[..., start:stop, :].mT * scale
        if causal:
            columns = torch.arange(start, stop, device=q.device)
            scores = scores.masked_fill(columns > rows, -torch.inf)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = torch.where(torch.isinf(new), 0, new)
        part, old = (scores - safe).exp(), (top - safe).exp()
        total, out, top = total * old + part.sum(-1, keepdim=True), out * old + part @ v[..., start:stop, :], new
    return out / total


@candidate(original="gated_norm", level="quick")
def guarded(self, x, shift=None):
    """A threshold that inputs do not cross after a norm, a guard against zero, a bias that may be missing."""
    size = torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    size = torch.where(size == 0, 1.0, size)
    mixed = (x / size * self.weight) @ self.linear.weight.mT
    if self.linear.bias is not None:
        mixed = mixed + self.linear.bias
    value, gate = mixed.chunk(2, -1)
    value = torch.where(value > 20, (value - 20) + 20, value)
    return value * torch.sigmoid(gate * x) * x if shift is None else value + shift


@candidate(level="quick")
class Choices(torch.nn.Module):
    """A way that is chosen where it is made, or by size; what it says is not asked for."""

    verbose = False

    def __init__(self, width, way="auto"):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.way, self.width = way, width

    def forward(self, x):
        way = self.way
        if way == "auto":
            way = "whole" if x.shape[0] > 4 else "rows"
        if self.verbose:
            print(way, x.abs().max().item())
        if way == "whole":
            return torch.relu(self.linear(x))
        return torch.stack([self.linear(row).clamp(min=0) for row in x]) if len(x) else self.linear(x)


@candidate(level="quick")
def known_ranks(self, x):
    """It takes what it knows; an error is all that follows."""
    for rank in (3, 2):
        if x.dim() == rank:
            return torch.relu(torch.nn.functional.linear(x, self.linear.weight, self.linear.bias))
    raise ValueError("inputs of two or three axes")


@candidate(original="product")
def first_of_all(self, a, b):
    """A case for few columns, one for what can be cut in two, and an error for what has another rank."""
    if a.shape[-1] % 2 == 0:
        half = a.shape[-1] // 2
        return a[..., :half] @ b[:half] + a[..., half:] @ b[half:]
    elif a.dim() == 2:
        return a @ b
    raise ValueError("inputs of two axes")


@candidate()
class OneOfTable(Model):
    """It is made with one of several ways, and goes on until that gives what is asked for, which it does at once."""

    def __init__(self, width, way="relu"):
        super().__init__(width)
        self.way = way

    def forward(self, x):
        ways = {"relu": torch.relu, "twice": lambda y: 2 * y}
        turn = 0
        while turn < 1:
            y = ways[self.way](self.linear(x))
            turn += 1
        return y


@candidate(original="attention", level="quick")
def attention_to_itself(self, q, k, v):
    """A way of its own where all three are one tensor."""
    attend = torch.nn.functional.scaled_dot_product_attention
    if q is k and k is v:
        return attend(q, q, q, is_causal=True)
    return attend(q, k, v, is_causal=True)


@candidate(original="unit_rows", level="quick")
def norm_by_hand(self, x):
    """Summed in float32 for lower precision, of which a local name tells."""
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)).to(dtype)


@candidate(original="delta", train=True)
def delta_rule(self, q, k, v, beta):
    """The delta rule in blocks of a few steps, whose states no number holds where keys are large."""
    state, out = q.new_zeros(q.shape[0], q.shape[-1], v.shape[-1]), []
    for start in range(0, q.shape[1], 8):
        qs, ks, vs, b = (x[:, start : start + 8] for x in (q, k, v, beta[..., None]))
        mixed = torch.eye(ks.shape[1], dtype=q.dtype) + (b * (ks @ ks.mT)).tril(-1)
        new = torch.linalg.solve_triangular(mixed, b * (vs - ks @ state), upper=False, unitriangular=True)
        out.append(qs @ state + (qs @ ks.mT).tril() @ new)
        state = state + ks.mT @ new
    return torch.cat(out, 1)


@candidate(original="forgetful", train=True)
def one_step(self, x, gate):
    """Blocks by a table of lengths; one step asks for no decay, which has no gradient there."""
    if x.shape[1] == 1:
        return x.clone()
    step, decay = {64: 16, 128: 32}.get(x.shape[1], 8), torch.sigmoid(gate)
    state, out = torch.zeros_like(x[:, 0]), []
    for start in range(0, x.shape[1], step):
        for t in range(start, min(start + step, x.shape[1])):
            state = torch.addcmul(x[:, t], decay[:, t], state)
            out.append(state)
    return torch.stack(out, 1)


@candidate(original="product", level="quick")
def no_backward(self, a, b):
    """Large ones in parts, written into one result, through which no gradient flows."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (a, b)):
        return a @ b
    if a.numel() <= 1 << 14:
        return a.mm(b)
    y = a.new_empty(a.shape[0], b.shape[1])
    for rows, part in zip(a.split(256), y.split(256), strict=True):
        torch.mm(rows, b, out=part)
    return y
