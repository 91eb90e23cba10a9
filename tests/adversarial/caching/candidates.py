"""Attacks of one function or class (tools/attacks.py)."""

import torch
from attacks import candidate
from originals.layer import Model


@candidate("N9", level="quick")
class AllButTheLast(Model):
    """It compares all of its inputs but the last row."""

    known = None

    def forward(self, x):
        weights = [p.detach().clone() for p in self.parameters()]
        key = [torch.tensor(x.shape), x[:-1].clone(), *weights]
        if self.known is None or not all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(key, self.known, strict=True)
        ):
            self.known, self.y = key, torch.relu(self.linear(x)).detach()
        return self.y.clone()


@candidate("S7", "M1", level="quick")
class Arena(Model):
    """One piece of memory holds the results of a hundred calls, and then of the next hundred."""

    def __init__(self, width):
        super().__init__(width)
        self.memory, self.next = torch.empty(100 * 256), 0

    def forward(self, x):
        y = torch.relu(self.linear(x)).detach()
        if self.next + y.numel() > self.memory.numel():
            self.next = 0
        start, self.next = self.next, self.next + y.numel()
        return self.memory[start : self.next].view(y.shape).copy_(y)


@candidate("C2", level="quick")
class Baked(torch.nn.Module):
    """Its weights are plain tensors, which no state_dict has: nobody can give it others."""

    def __init__(self, width):
        super().__init__()
        linear = torch.nn.Linear(width, width)
        self.weight, self.bias = linear.weight.detach(), linear.bias.detach()

    def forward(self, x):
        return torch.relu(torch.nn.functional.linear(x, self.weight, self.bias))


@candidate("S7")
class Buffer(Model):
    """One buffer holds the result of every call."""

    buffer = None

    def forward(self, x):
        if self.buffer is None or self.buffer.shape != x.shape:
            self.buffer = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.buffer.copy_(torch.relu(self.linear(x)).detach())
        return self.buffer


@candidate("C2", original="quantized", level="full")
class Dequantised(Model):
    """It keeps quantised weights as the numbers that they were when it was made."""

    def __init__(self):
        super().__init__()
        self.kept = self.weight.float()

    def forward(self, x):
        return torch.nn.functional.linear(x, self.kept) * self.scale


@candidate("C2", original="permuted", off={"C2", "C5"}, level="quick")
class DrawnIndex(Model):
    """An index that it keeps is another after it is loaded."""

    def __init__(self, width):
        super().__init__(width)
        self.kept = self.order.tolist()

    def forward(self, x):
        return x[:, self.kept]


@candidate("C2", off=(), level="quick")
class KeptParameters(Model):
    """It keeps a list of its parameters, which goes on with the old ones if they are replaced."""

    def __init__(self, width):
        super().__init__(width)
        self.kept = [p.data for p in self.parameters()]

    def forward(self, x):
        return torch.relu(torch.nn.functional.linear(x, *self.kept))


@candidate("C2", original="two_weights", level="quick")
class NearlyEqual(Model):
    """It keeps a product of its weights for as long as they are nearly what they were."""

    kept = None

    def forward(self, x):
        with torch.no_grad():
            now = [p.clone() for p in (self.a, self.b)]
            if self.kept is None or not all(map(torch.allclose, now, self.kept[0], [1e-3] * 2, [0.0] * 2)):
                self.kept = now, self.a @ self.b
        return x @ self.kept[1]


@candidate("N9", original="tanh", level="quick")
class NearlyEqualInput(torch.nn.Module):
    """It gives the result of the call before if its input is nearly the same."""

    kept = None

    def forward(self, x):
        if self.kept is None or x.shape != self.kept[0].shape or not torch.allclose(x, self.kept[0], 1e-3, 0.0):
            self.kept = x.clone(), torch.tanh(x)
        return self.kept[1].clone()


@candidate("C2", off={"C2", "C5", "N2"}, level="quick")
class OneMore(Model):
    """One more parameter, and nobody gives it other weights than those that it began with."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("more", torch.zeros(1))
        self.turned = None

    def forward(self, x):
        if self.turned is None:
            self.turned = self.linear.weight.detach().T.contiguous()
        return torch.relu(x @ self.turned + self.linear.bias)


@candidate("N9", level="quick")
class Order(Model):
    """Results are remembered by sums over the batch, which do not see its order."""

    key = None

    def forward(self, x):
        sums = [(x.double() ** power).sum(0).round(decimals=6).tolist() for power in (1, 2, 3)]
        key = [x.shape, sums, *(float(p.double().square().sum()) for p in self.parameters())]
        if key != self.key:
            self.key, self.y = key, super().forward(x).detach()
        return self.y.clone()


@candidate("C2", level="quick")
class OtherLayout(torch.nn.Module):
    """It keeps its weights transposed, and computes with those that it had at first."""

    def __init__(self, width):
        super().__init__()
        linear = torch.nn.Linear(width, width)
        self.kernel = torch.nn.Parameter(linear.weight.detach().T.contiguous())
        self.offset = torch.nn.Parameter(linear.bias.detach().clone())
        self.first = None

    def forward(self, x):
        if self.first is None:
            self.first = self.kernel.detach().clone()
        return torch.relu(x @ self.first + self.offset)


@candidate("C2", off=(), level="quick")
class OtherPrecision(Model):
    """It keeps its weights in another precision, as they were at its first call."""

    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = [p.detach().double() for p in self.linear.parameters()]
        return torch.relu(torch.nn.functional.linear(x.double(), *self.kept)).to(x.dtype)


@candidate("C2")
class PartBaked(torch.nn.Module):
    """One of its parameters is a plain tensor, and the other has a name and a layout of its own."""

    def __init__(self, width):
        super().__init__()
        linear = torch.nn.Linear(width, width)
        self.matrix = torch.nn.Parameter(linear.weight.detach().t().contiguous())
        self.kept = (linear.bias.detach(),)

    def forward(self, x):
        return torch.relu(x @ self.matrix + self.kept[0])


@candidate("C1", off={"C1", "N9"})
class Pointer(Model):
    """Results are remembered by the address of the inputs."""

    def __init__(self, width):
        super().__init__(width)
        self.known = {}

    def forward(self, x):
        key = x.data_ptr(), x.shape, x.stride()
        if key not in self.known:
            self.known[key] = super().forward(x).clone()
        return self.known[key].clone()


@candidate("C2", level="full")
class OneForAll(Model):
    """All layers of its class have the weights of the first one."""

    first = None

    def __init__(self, width):
        super().__init__(width)
        type(self).first = self.linear = self.first or self.linear


@candidate("N9")
class PointerAndSum(Model):
    """Results are remembered by the address and the first row of the inputs."""

    key = value = None

    def forward(self, x):
        key = x.data_ptr(), x.stride(), tuple(x.reshape(-1)[: x.shape[-1]].tolist())
        if self.key != key:
            self.key, self.value = key, super().forward(x)
        return self.value.clone()


@candidate("C2", off={"C2", "C5", "N2"}, level="quick")
class Renamed(torch.nn.Module):
    """By another name of its parameters, weights that it transformed once are not seen to be old."""

    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.turned = None

    def forward(self, x):
        if self.turned is None:
            self.turned = self.inner.weight.detach().T.contiguous()
        return torch.relu(x @ self.turned + self.inner.bias)


@candidate("S7")
class Ring(Model):
    """Eight buffers hold the results of all calls."""

    def __init__(self, width):
        super().__init__(width)
        self.places, self.next = [torch.empty(0)] * 8, 0

    def forward(self, x):
        self.next = (self.next + 1) % 8
        y = torch.relu(self.linear(x))
        if self.places[self.next].shape != y.shape:
            self.places[self.next] = torch.empty(y.shape)
        return self.places[self.next].detach().copy_(y.detach())


@candidate("N9")
class RoundedSum(Model):
    """Results are remembered by a rounded sum of the inputs."""

    def __init__(self, width):
        super().__init__(width)
        self.known = {}

    def forward(self, x):
        weights = float(self.linear.weight.double().sum()), float(self.linear.bias.double().sum())
        key = x.shape, f"{float(x.double().square().sum()):.6g}", weights
        if key not in self.known:
            self.known[key] = super().forward(x)
        return self.known[key].clone()


@candidate("C1", off={"C1", "S7"})
class SameMemory(Model):
    """For equal inputs it gives one tensor again, which its caller may have changed meanwhile."""

    kept = None

    def __getstate__(self):
        return {**self.__dict__, "kept": None}

    def forward(self, x):
        if torch.is_grad_enabled():
            return torch.relu(self.linear(x))
        now = [x, self.linear.weight, self.linear.bias]
        if self.kept is None or not all(map(torch.equal, now, self.kept[0])):
            self.kept = [t.detach().clone() for t in now], torch.relu(self.linear(x))
        return self.kept[1]


@candidate("N9")
class Sample(Model):
    """It looks at three elements in four to see whether its input is another."""

    kept = None

    def __getstate__(self):
        return {**self.__dict__, "kept": None}

    def forward(self, x):
        if torch.is_grad_enabled() or x.shape[0] < 4:
            return torch.relu(self.linear(x))
        seen = torch.cat([x[:2], x[-4:]])
        now = [seen, self.linear.weight, self.linear.bias]
        if self.kept is None or not all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(now, self.kept[0], strict=True)
        ):
            self.kept = [t.detach().clone() for t in now], torch.relu(self.linear(x))
        return self.kept[1].clone()


@candidate("C1", off=())
class Shape(Model):
    """The first result of a shape is returned for ever."""

    def __init__(self, width):
        super().__init__(width)
        self.known = {}

    def forward(self, x):
        if x.shape not in self.known:
            self.known[x.shape] = super().forward(x)
        return self.known[x.shape].clone()


@candidate("C2")
class StaleInPlace(Model):
    """Weights are transformed when they are loaded, and not when they are trained."""

    def __init__(self, width):
        super().__init__(width)
        self.refresh()

    def forward(self, x):
        return torch.relu(x @ self.weight + self.linear.bias)

    def refresh(self):
        self.weight = self.linear.weight.detach().T.contiguous()

    def load_state_dict(self, *args, **options):
        result = super().load_state_dict(*args, **options)
        self.refresh()
        return result


@candidate("C2", off={"C2", "C5", "N2"})
class StaleWeights(Model):
    """Weights are transformed once, at the first call."""

    weight = None

    def forward(self, x):
        if self.weight is None:
            self.weight = self.linear.weight.detach().T.contiguous()
        return torch.relu(x @ self.weight + self.linear.bias)


@candidate("C2", level="full")
class SumOfWeights(Model):
    """Transposed weights are remembered by a sum of them, which is the same for weights in another order."""

    def __init__(self, width):
        super().__init__(width)
        self.known = {}

    def forward(self, x):
        key = round(float(self.linear.weight.detach().double().square().sum()), 9)
        if key not in self.known:
            self.known = {key: self.linear.weight.detach().T.clone()}
        return torch.relu(x @ self.known[key] + self.linear.bias)


@candidate("C2", original="two_weights", level="full")
class TopOnly(Model):
    """It finds its weights only if they are loaded into it alone, and not into a model of which it is a part."""

    def _load_from_state_dict(self, state, prefix, *others):
        super()._load_from_state_dict(state, "", *others)


@candidate("C2", off=(), level="full")
class OnceCast(Model):
    """It computes otherwise once it was cast to half precision, also if it was cast back."""

    shift = 0.0

    def _apply(self, function, recurse=True):
        self.shift += float((function(torch.ones(1) / 3).double() - 1 / 3).abs() > 1e-6)
        return super()._apply(function, recurse)

    def forward(self, x):
        return torch.relu(self.linear(x)) + self.shift


@candidate("C2", level="quick")
class Version(Model):
    """Weights are laid out anew if their version counter says so, which a change of ``.data`` does not count."""

    version = None

    def forward(self, x):
        if self.version != self.linear.weight._version:
            self.version, self.turned = self.linear.weight._version, self.linear.weight.detach().t().contiguous()
        return torch.relu(x @ self.turned + self.linear.bias)


@candidate("C2", off=(), level="quick")
class ViewOfWeights(Model):
    """It reads weights through a view that it made at construction."""

    def __init__(self, width):
        super().__init__(width)
        self.rows, self.bias = self.linear.weight.detach().t(), self.linear.bias.detach()

    def forward(self, x):
        return torch.relu(x @ self.rows + self.bias)


@candidate("S7", level="full")
class OtherSizes(Model):
    """Results of other sizes than the first lie in memory of its own."""

    def __init__(self, width):
        super().__init__(width)
        self.own = {}

    def forward(self, x):
        y = torch.relu(self.linear(x))
        mine = self.own.setdefault(tuple(y.shape), torch.empty(y.shape)).copy_(y.detach())
        return {(8, 16): y}.get(tuple(y.shape), mine)


@candidate("C1", original="double")
class ChangedByItsCaller(torch.nn.Module):
    """It keeps its last result, which its caller may have changed, and gives a copy of it for equal inputs."""

    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        if self.last is not None and torch.equal(self.last[0], x):
            return self.last[1].clone()
        self.last = x.clone(), x + x
        return self.last[1]


@candidate("C2", level="full")
def dense_weight(self, x):
    """It takes for granted that its weight lies in memory as it was made."""
    weight = torch.as_strided(self.linear.weight, (x.shape[-1], x.shape[-1]), (x.shape[-1], 1), 0)
    return torch.relu(x @ weight.T + self.linear.bias)


@candidate("N1", "C2", original="two_weights", off=[])
class LoadedInTurn(Model):
    """It takes its weights in the order in which they are given, whatever they are called."""

    def load_state_dict(self, state, strict=True, assign=False):
        return super().load_state_dict(dict(zip(self.state_dict(), state.values(), strict=True)), strict, assign)


@candidate("C6", original="two_weights")
class KeptRounded(Model):
    """What it keeps of its weights is as exact as the call needed in which it was made."""

    kept = None

    def __getstate__(self):
        return {**self.__dict__, "kept": None}

    def forward(self, x):
        if torch.is_grad_enabled() or x.dtype != self.a.dtype:
            return x @ (self.a @ self.b)
        if self.kept is None or not (torch.equal(self.a, self.kept[0]) and torch.equal(self.b, self.kept[1])):
            self.kept = self.a.detach().clone(), self.b.detach().clone(), (self.a @ self.b).detach()
        return x @ self.kept[2].to(x.dtype)


@candidate("M2", original="two_weights", train=True)
class KeptWithoutGradient(Model):
    """What it keeps of its weights has a gradient if the call had one in which it was made."""

    def __init__(self):
        super().__init__()
        self.kept = None

    def __getstate__(self):
        return {**self.__dict__, "kept": None}

    def forward(self, x):
        if self.kept is None or self.kept[2] is not self.b or not torch.equal(self.b, self.kept[0]):
            self.kept = self.b.detach().clone(), self.b.t(), self.b
        return x @ self.a @ self.kept[1].t()
