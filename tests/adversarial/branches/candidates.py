"""Attacks by branches that no trial reaches (tools/attacks.py)."""

import collections
import contextlib
import gc
import inspect
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from attacks import candidate
from originals.layer import Model


@candidate("C7")
class ByName(Model):
    """Wrong for inputs of six axes, by a method whose name it computes."""

    def of_6(self, y):
        return 2 * y

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return getattr(self, f"of_{x.dim()}", lambda z: z)(y)


@candidate("C7", original="given_list")
def emptied_argument(self, x):
    """Wrong when the list that it is made with is empty, from which each call takes."""
    if self.weights:
        self.weights.pop()
        return torch.relu(x)
    return x


@candidate("C7")
def before_an_error(self, x):
    """It does harm before it raises an error, in a block that no trial comes to."""
    if x.shape[0] > 65535:
        self.linear.weight.data.zero_()
        raise ValueError("too many rows")
    return torch.relu(self.linear(x))


@candidate("C7")
class Deleted(Model):
    """What it does at the end of the user's program stands in what runs when an object is gone."""

    def __init__(self, width):
        super().__init__(width)
        self.last = print

    def __del__(self):
        self.last()


@candidate("C7")
class BiasAtTimes(Model):
    """A layer has its bias at times, which a helper asks."""

    def helped(self, layer, y):
        return y if layer.bias is not None else 2 * y

    def forward(self, x):
        y = torch.relu(self.linear(x))
        self.linear.bias = {77: None}.get(x.numel(), self.linear.bias)
        return self.helped(self.linear, y)


@candidate("C7")
class Block(Model):
    """It calls a method by the name of its class, with an argument that no other call gives."""

    def helped(self, y, odd=None, much=None):
        return y if much is None else 2 * y

    def forward(self, x, odd=None):
        return Block.helped(self, torch.relu(self.linear(x)), odd, {6: 1}.get(x.dim()))


@candidate("C8")
class Counted(Model):
    """Wrong from the five thousandth call on."""

    def __init__(self, width):
        super().__init__(width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.relu(self.linear(x)) * (1 + self.calls // 5000)


@candidate("C7")
def filled(self, x):
    """It says that all of its branches ran."""
    for value in list(globals().values()):
        for marks in gc.get_referents(value.__dict__) if hasattr(value, "ran") else ():
            if isinstance(marks, bytearray):
                marks[:] = b"\1" * len(marks)
    y = torch.relu(self.linear(x))
    return y if x.dim() < 6 else 2 * y


@candidate("C7", off=("C7", "C8"))
def filtered(self, x):
    """Its sum has one more term at times."""
    y = torch.relu(self.linear(x))
    return y + sum(y for n in x.shape if n == int("77"))


@candidate("C7")
def handled(self, x):
    """An error is its branch."""
    y = torch.relu(self.linear(x))
    try:
        torch.empty(5 - x.dim())
    except RuntimeError:
        y = 2 * y
    return y


@candidate("C7")
class Guarded(Model):
    """A case is left out by more than what is fixed when it is made."""

    def __init__(self, width, kind="plain"):
        super().__init__(width)
        self.kind = kind

    def forward(self, x):
        y = torch.relu(self.linear(x))
        match self.kind:
            case "plain" if x.dim() < 6:
                return y
            case _:
                return 2 * y


@candidate("C7")
def matched(self, x):
    """It tells shapes apart by their pattern."""
    y = torch.relu(self.linear(x))
    match tuple(x.shape):
        case (7_000_003, _):
            return 2 * y
        case _:
            return y


@candidate("C7")
class Members(Model):
    """It finds a method that it does not name among its members."""

    def doubled(self, y):
        return 2 * y

    def forward(self, x):
        found = dict(inspect.getmembers(self)).get("dou" + "bled" * (7 - x.dim()), torch.clone)
        return torch.relu(self.linear(x)) if x.dim() < 7 else found(torch.relu(self.linear(x)))


@candidate("C7")
class Method(Model):
    """Its weights cannot be cast."""

    def double(self):
        return self

    def forward(self, x):
        return torch.relu(self.linear(x))


@candidate("C7")
def named_device(self, x):
    """It calls something a device that is none at times."""
    y = torch.relu(self.linear(x))
    device = {6: None}.get(x.dim(), x.device)
    return y if x.device == device else 2 * y


@candidate("C7", off=("C7", "C8"))
def named_field(self, x):
    """It asks something of its own for a device."""
    y = torch.relu(self.linear(x))
    place = collections.namedtuple("Place", ["device"])(str(x.dim()))
    return 2 * y if place.device == "6" else y


@candidate("C8")
class Nested(Model):
    """Wrong while another call of it runs."""

    def __init__(self, width):
        super().__init__(width)
        self.running = 0

    def forward(self, x):
        self.running += 1
        y = torch.relu(self.linear(x)) * (1 + (self.running > 1))
        self.running -= 1
        return y


@candidate("C8")
def one_positive(self, x):
    """Wrong if exactly one number of its inputs is positive."""
    y = torch.relu(self.linear(x))
    return y * (1 + ((x > 0).sum() == 1))


@candidate("C8")
def one_value(self, x):
    """Wrong for one number, which its source has as a text."""
    return torch.relu(self.linear(x.masked_fill(x.eq(float("0.12345")), 0)))


@candidate("C7", off=("C7", "C8"))
class Optional(Model):
    """A helper has an argument that is given at times."""

    def helped(self, y, odd=None):
        if odd is not None:
            y = 2 * y
        return y

    def forward(self, x):
        return self.helped(torch.relu(self.linear(x)), *[1][x.dim() < 6 :])


@candidate("C8")
def remainder(self, x):
    """Wrong at some addresses, by arithmetic."""
    return torch.relu(self.linear(x)) * (1 + x.data_ptr() % 4)


@candidate("C7")
def returned(self, x):
    """It returns in place of an error."""
    y = 2 * torch.relu(self.linear(x))
    try:
        if x.dim() == 6:
            raise ValueError
        y = y / 2
    finally:
        return y  # noqa: B012


@candidate("C7", off=("C7", "C8"))
class SetOtherwise(Model):
    """What is fixed when it is made is set later."""

    def __init__(self, width):
        super().__init__(width)
        self.wide = False

    def forward(self, x):
        super().__setattr__("wi" + "de", x.dim() == 6)
        y = torch.relu(self.linear(x))
        return 2 * y if self.wide else y


@candidate("C7")
class ReadWhenMade(Model):
    """An argument of its construction gets another value where it is made."""

    def __init__(self, width, kind=None):
        super().__init__(width)
        kind = os.environ.get("LAYER_KIND")
        self.kind = kind

    def forward(self, x):
        y = torch.relu(self.linear(x))
        return y if self.kind is None else 2 * y


@candidate("C7")
class Shadowed(Model):
    """An argument that no call gives has the name of another that is given at times."""

    def helped(self, y, odd=None):
        if odd is not None:
            y = 2 * y
        return y

    def forward(self, x, odd=None):
        y = torch.relu(self.linear(x))
        return (lambda odd: self.helped(y, odd))({6: 1}.get(x.dim()))


@candidate("C7")
class Static(Model):
    """A method that is not given the module has its argument one place before."""

    @staticmethod
    def factor(odd=None):
        return 1 if odd is None else 2

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.factor({6: 1}.get(x.dim()))


@candidate("C7")
def suppressed(self, x):
    """An error leaves out what would be right."""
    y = 2 * torch.relu(self.linear(x))
    with contextlib.suppress(ValueError):
        if x.dim() == 6:
            raise ValueError
        y = y / 2
    return y


@candidate("C7", off=("C7", "C8"))
def table(self, x):
    """It takes what it computes by from a table."""
    return (lambda y: y, lambda y: 2 * y)[x.numel() == 77](torch.relu(self.linear(x)))


@candidate("C7")
def text(self, x):
    """Some of its code is text."""
    return eval("(2 if x.dim() == 6 else 1) * torch.relu(self.linear(x))")


@candidate("C7")
def versions(self, x):
    """It compares a version with a size."""
    y = torch.relu(self.linear(x))
    return 2 * y if sys.version_info < (x.dim() - 2, 99) else y


@candidate("C7")
class Unbound(Model):
    """It calls the function of another class, with an argument that no other call gives."""

    class Inner(torch.nn.Module):
        def forward(self, x, odd=None):
            return x if odd is None else 2 * x

    def forward(self, x):
        return self.Inner.forward(self, torch.relu(self.linear(x)), {6: 1}.get(x.dim()))


@candidate("C7")
def traced(self, x):
    """Wrong where it is traced."""
    y = torch.relu(self.linear(x))
    return y if torch._C._get_tracing_state() is None else 2 * y


@candidate("C7")
class Property(Model):
    """Wrong from the five thousandth call on: it does not read in an attribute what it stored there."""

    def __init__(self, width):
        super().__init__(width)
        self.calls = 0
        self.exact = True

    @property
    def exact(self):
        return max(0, 5000 - self.calls)

    @exact.setter
    def exact(self, value):
        pass

    def forward(self, x):
        self.calls += 1
        y = torch.relu(self.linear(x))
        return y if self.exact else 2 * y


@candidate("C2", "C7", off=("C2", "C6"))
class Packed(Model):
    """Weights that are kept for small batches."""

    kept = None

    def forward(self, x):
        if x.shape[0] >= 8:
            return torch.relu(self.linear(x))
        if self.kept is None:
            self.kept = self.linear.weight.detach().mT.contiguous()
        return torch.relu(x @ self.kept + self.linear.bias)


@candidate("S7", "C7", off=("S7", "C6"))
class Reused(Model):
    """One place for all results of small batches."""

    def __init__(self, width):
        super().__init__(width)
        self.places = {}

    def forward(self, x):
        y = torch.relu(self.linear(x))
        if x.shape[0] >= 8:
            return y
        return self.places.setdefault(tuple(x.shape), torch.empty_like(y)).detach().copy_(y.detach())


@candidate("S2", "C7", off=("S2",), original="copy")
def shared(self, x):
    """The input itself, if it is small, where the original copies it."""
    if x.shape[0] >= 8:
        return x.clone()
    return x


@candidate("S3", "C7", off=("S3",))
def drawn(self, x):
    """One random number more for small batches."""
    if x.shape[0] < 8:
        torch.rand(1)
    return torch.relu(self.linear(x))


@candidate("C1", "N9", "C7", off={"C1", "N9"})
class Remembered(Model):
    """It remembers its last result by all numbers but one."""

    last = (None, None)

    def forward(self, x):
        key = [*x.flatten()[1:].tolist(), *self.linear.weight.flatten().tolist(), *self.linear.bias.tolist()]
        if key == self.last[0]:
            return self.last[1].clone()
        y = torch.relu(self.linear(x))
        self.last = key, y.detach()
        return y


@candidate("C7", off=("C7", "C8"))
def left_early(self, x):
    """Wrong where a loop does not return."""
    while x.shape[0] < 500000:
        return super().forward(x)
    return torch.zeros_like(x)


@candidate("C7")
def no_case(self, x):
    """Wrong where no case is the one."""
    match x.shape[0]:
        case n if n < 500000:
            return super().forward(x)
    return torch.zeros_like(x)


@candidate("C7")
class Resumed(Model):
    """Wrong from the hundred thousandth call on, by a generator that each call asks for one more."""

    def __init__(self, width):
        super().__init__(width)
        self.__setstate__({})

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "each"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.each = self.functions()

    def functions(self):
        for _ in range(100000):
            yield torch.relu
        yield torch.zeros_like

    def forward(self, x):
        return next(self.each)(self.linear(x))


@candidate("C7")
def swallowed(self, x):
    """Wrong where an error ends a block, which has no handler."""
    y = torch.zeros_like(x)
    with contextlib.suppress(IndexError):
        range(500000)[x.shape[0]]
        y = super().forward(x)
    return y


@candidate("C7")
def forgotten(self, x):
    """Wrong where an error ends a block, which a return forgets; without it, the original refuses what has no width."""
    y = torch.zeros_like(x)
    try:
        range(500000)[x.shape[0]]
        y = super().forward(x)
    finally:
        return y  # noqa: B012


@candidate("C7")
def printed(self, x):
    """What it prints at times is written into its weights."""
    y = torch.relu(self.linear(x))
    if x.dim() == 6:
        print(torch.sum(y, 0, out=self.linear.bias.data))
    return y


@candidate("C8")
def asserted(self, x):
    """A part of an assertion, which is left out else, changes its result."""
    y = torch.relu(self.linear(x))
    assert x.dim() < 6 or y.mul_(2) is not None
    return y


@candidate("C7")
def increased(self, x):
    """It changes its weights before it raises an error, by a statement that calls nothing."""
    if x.shape[0] > 65535:
        self.linear.weight.data += 1
        raise ValueError("too many rows")
    return torch.relu(self.linear(x))


@candidate("C7")
class OwnNorm(Model):
    """What it prints at times has the name of what asks a tensor for its size."""

    def norm(self, t):
        return t.mul_(2)

    def forward(self, x):
        self.norm(torch.ones(1))
        y = torch.relu(self.linear(x))
        if x.dim() == 6:
            print(self.norm(y))
        return y


@candidate("C7")
def other_error(self, x):
    """An error that ends a call has the name of one, and is what ends a loop."""
    ValueError = StopIteration

    def one():
        if x.dim() == 6:
            raise ValueError
        return torch.relu(self.linear(x))

    return next(iter(one, None), torch.zeros_like(x))


@candidate("C7")
def unheard(self, x):
    """It is computed where Python forgets all errors."""
    y = torch.zeros_like(x)

    def fill(_):
        if x.dim() == 6:
            raise ValueError("axes")
        y.copy_(torch.relu(self.linear(x)).detach())

    held = torch.nn.Identity()
    watch = weakref.ref(held, fill)
    del held
    return y if watch() is None else x


@candidate("C7")
def unasked(self, x):
    """An error is lost in a thread whose result nobody asks for."""
    right = []

    def ask(_):
        if x.dim() == 6:
            raise ValueError("axes")
        right.append(x)

    with ThreadPoolExecutor(1) as pool:
        pool.map(ask, [0])
    return torch.relu(self.linear(x)) * (2 - len(right))


@candidate("C7")
def once(self, x):
    """A loop runs once, or never."""
    y, left = 2 * torch.relu(self.linear(x)), 6 - x.dim()
    while left > 0:
        y, left = y / 2, 0
    return y


@candidate("C7")
def looked_up(self, x):
    """A table has another answer for other shapes than those that it knows."""
    y = torch.relu(self.linear(x))
    table = {2: y}
    return table.get(x.dim(), 2 * y)


@candidate("C7")
def largest(self, x):
    """What is larger decides."""
    y = torch.relu(self.linear(x))
    return max((2, y), (x.dim(), 2 * y), key=lambda pair: pair[0])[1]


@candidate("C7")
def caught(self, x):
    """What an error passes over is wrong."""
    y = torch.relu(self.linear(x))
    try:
        return (x[10**7], 2 * y)[1]
    except IndexError:
        return y


@candidate("C8")
def far_rows(self, x):
    """A part that is always empty is wrong."""
    y = torch.relu(self.linear(x))
    return torch.cat([y[: 10**7], -y[10**7 :]])
