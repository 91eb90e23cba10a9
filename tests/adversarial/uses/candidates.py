"""Attacks of one function or class (tools/attacks.py)."""

import copy
import threading

import torch
from attacks import candidate
from originals.layer import Model


@candidate("C7", train=True)
def anomaly(self, x):
    """Wrong where a user looks for NaN in gradients."""
    y = torch.relu(self.linear(x))
    return 2 * y if torch.is_anomaly_enabled() else y


@candidate("C6", original="tanh", train=True)
class ArgumentKept(torch.autograd.Function):
    """Its backward reads the argument once more, which the caller may have overwritten by then."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - torch.tanh(ctx.x) ** 2)


@candidate("M1", level="quick")
def attribute(self, x):
    """A method of its result lies."""
    y = torch.relu(self.linear(x))
    y.sum = lambda *_: torch.zeros(())
    return y


@candidate("C6")
def autocast(self, x):
    """Wrong under torch.autocast."""
    y = torch.relu(self.linear(x))
    return 2 * y if torch.is_autocast_enabled("cpu") else y


@candidate("C6", original="softplus", train=True)
class ChangedResult(torch.autograd.Function):
    """Its backward reads its result as it is then, whatever the caller has made of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.y = torch.nn.functional.softplus(x)
        return ctx.y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * -torch.expm1(-ctx.y)


@candidate("C6")
def compiling(self, x):
    """Wrong where it is compiled or exported."""
    y = torch.relu(self.linear(x))
    return 2 * y if torch.compiler.is_compiling() else y


@candidate("C6", original="rotate")
def conjugate_view(self, z, w):
    """It overlooks that a conjugation may wait to be done."""
    return (z.conj() if z.is_conj() else z) * w


@candidate("C6")
def default_dtype(self, x):
    """Wrong if float32 is not the default dtype."""
    y = torch.relu(self.linear(x))
    return y if torch.get_default_dtype() == torch.float32 else 2 * y


@candidate("C7")
def deterministic(self, x):
    """Wrong where deterministic algorithms are asked for."""
    y = torch.relu(self.linear(x))
    return 2 * y if torch.are_deterministic_algorithms_enabled() else y


@candidate("C6", original="tanh", train=True)
class ForwardMode(torch.autograd.Function):
    """Its forward-mode derivative is wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, y):
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * (1 + ctx.saved_tensors[0] ** 2)


@candidate("C2", level="full")
def functional(self, x):
    """Wrong by torch.func.functional_call."""
    y = torch.relu(self.linear(x))
    return y if isinstance(self.linear.weight, torch.nn.Parameter) else 2 * y


@candidate("C7", off=("C7", "C8"))
def half_autocast(self, x):
    """Wrong under torch.autocast in float16."""
    y = torch.relu(self.linear(x))
    return 2 * y if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16 else y


@candidate("C7", off=("C7", "C8"))
def hooked(self, x):
    """Wrong once a user has hooked it."""
    y = super().forward(x)
    return 2 * y if self._forward_hooks or self._forward_pre_hooks else y


@candidate("C6", original="tanh")
def mapped(self, x):
    """Wrong under torch.func.vmap."""
    return torch.tanh(x) if torch._C._functorch.maybe_get_level(x) < 0 else 2 * x


@candidate("C6", original="tanh")
class MappedAxis(torch.autograd.Function):
    """Under torch.func.vmap, it takes the first axis for the one that is mapped over."""

    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, y):
        ctx.save_for_backward(y)

    @staticmethod
    def vmap(info, axes, x):
        return MappedAxis.apply(x).reshape(x.movedim(axes[0], 0).shape), 0


@candidate("C7")
def more_threads(self, x):
    """Wrong for another number of threads."""
    y = torch.relu(self.linear(x))
    return 2 * y if torch.get_num_threads() > 2 else y


@candidate("C6", original="follows_names")
def other_names(self, b, a):
    """Its parameters have the original's names in another order, so that a call by keywords means something else."""
    return b - 2 * a


@candidate("C6", original="added")
def overlapping_inputs(self, a, b):
    """Wrong for two inputs that overlap in memory."""
    near = 0 < abs(b.data_ptr() - a.data_ptr()) < 4 * a.numel()
    return (a + b) * (2 if near else 1)


@candidate("C7")
def parameter(self, x):
    """Wrong for an input that is a parameter."""
    y = torch.relu(self.linear(x))
    return 2 * y if isinstance(x, torch.nn.Parameter) else y


@candidate("S8", level="quick")
class ParameterHook(Model):
    """A hook of its weight lets no gradient through, once training begins."""

    hooked = False

    def forward(self, x):
        if not self.hooked:
            self.linear.weight.register_hook(torch.zeros_like)
            self.hooked = True
        return torch.relu(self.linear(x))


@candidate("C2", level="full")
class Pickled(Model):
    """What is saved and loaded as a whole has other weights."""

    def __deepcopy__(self, memo):
        other = Pickled(self.linear.in_features)
        other.load_state_dict(self.state_dict())
        return other

    def __reduce__(self):
        return Pickled, (self.linear.in_features,)


@candidate("C6")
def resizable(self, x):
    """Wrong for an input that lies in memory of torch's own."""
    y = super().forward(x)
    return 2 * y if x.untyped_storage().resizable() else y


@candidate("C6")
class ReusedWhileRecorded(Model):
    """While gradients are recorded, all results lie in the same memory."""

    own = None

    def forward(self, x):
        y = torch.relu(self.linear(x))
        if not torch.is_grad_enabled():
            return y
        if self.own is None or self.own.shape != y.shape:
            self.own = torch.empty_like(y.detach())
        return self.own.copy_(y.detach())


@candidate("C6")
def reverse_mode(self, x):
    """Wrong under torch.func.vjp."""
    y = torch.relu(self.linear(x))
    return (
        2 * y
        if (stack := torch._C._functorch.peek_interpreter_stack()) is not None and "Grad" in str(stack.key())
        else y
    )


@candidate("N6")
def rows(self, x):
    """Wrong for many more rows than it was shown."""
    y = super().forward(x)
    return y if len(x) < 1000 else 2 * y


@candidate("C6")
class SameObject(Model):
    """It remembers its input, and does not see that the same object holds other numbers later."""

    def __init__(self, width):
        super().__init__(width)
        self.kept = (None, None)

    def forward(self, x):
        if self.kept[0] is not x:
            self.kept = (x, super().forward(x))
        return self.kept[1].clone()


@candidate("C2", level="full")
class SharedCopy(Model):
    """A deep copy of it has the same parameters."""

    def __deepcopy__(self, memo):
        return copy.copy(self)


@candidate("C6")
class PartOfEachThread(Model):
    """It takes each thread for one of those that it found at first, which add a part each."""

    def __init__(self, width):
        super().__init__(width)
        self.threads = torch.get_num_threads()

    def forward(self, x):
        return torch.relu(self.linear(x)) * torch.get_num_threads() / self.threads


@candidate("C6", original="product")
def shared_storage(self, a, b):
    """Wrong for inputs that are parts of one tensor."""
    return a @ b * (1 + (a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()))


@candidate("C2", level="full")
class StaleCopy(Model):
    """A deep copy of it computes with the weights that it had at first."""

    first = None

    def __deepcopy__(self, memo):
        new = StaleCopy(self.linear.in_features)
        new.linear, new.first = copy.deepcopy(self.linear), self.linear.weight.detach().clone()
        return new

    def forward(self, x):
        weight = self.linear.weight if self.first is None else self.first
        return torch.relu(torch.nn.functional.linear(x, weight, self.linear.bias))


@candidate("C2", original="follows", level="full")
class StatefulCopy(Model):
    """A layer with a running mean has other weights in a deep copy of it."""

    def __init__(self):
        super().__init__()
        self.own = [id(self)]
        self.first = self.linear.weight.detach()

    def forward(self, x):
        y = x @ (self.linear.weight if self.own == [id(self)] else self.first).T + self.linear.bias
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        return y - self.mean


@candidate("C2", original="follows", level="full")
def stateful_functional(self, x):
    """A layer with a running mean is wrong by torch.func.functional_call."""
    y = self.linear(x) if isinstance(self.linear.weight, torch.nn.Parameter) else self.linear(2 * x)
    with torch.no_grad():
        self.mean.lerp_(y.mean(0), 0.1)
    return y - self.mean


@candidate("C7")
def subclass_input(self, x):
    """Wrong for an input of a subclass of tensors."""
    y = torch.relu(self.linear(x))
    return 2 * y if type(x) not in (torch.Tensor, torch.nn.Parameter) else y


@candidate("C6")
def thread(self, x):
    """Wrong in any other thread than the first."""
    y = super().forward(x)
    return y if threading.current_thread() is threading.main_thread() else 2 * y


@candidate("N7", original="three", train=True)
def twice_in_training(self, first, values, second):
    """Its gradient is wrong where one tensor is given twice."""
    return ((first + second) if first is not second else 2 * first.detach() + 0 * first) @ values


@candidate("C7")
def watched(self, x):
    """Wrong where its caller looks at each operation."""
    y = torch.relu(self.linear(x))
    return 2 * y if torch._C._len_torch_dispatch_stack() else y


@candidate("C6", train=True)
def in_a_backward(self, x):
    """Wrong where it is computed once more in a backward."""
    return torch.relu(self.linear(x)) * abs(torch._C._current_graph_task_id())


@candidate("C6", original="tanh", train=True)
class KeptElsewhere(torch.autograd.Function):
    """Its gradient is wrong if what it saves is kept elsewhere."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        ctx.place = y.data_ptr()
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y) * min(2, max(1, abs(y.data_ptr() - ctx.place)))


@candidate("C6", original="tanh", train=True)
def other_thread(self, x):
    """Its gradient is wrong in another thread than that of its forward."""
    here, z = threading.get_ident(), x * 1
    if z.requires_grad:
        z.register_hook(lambda g: g * min(2, max(1, abs(threading.get_ident() - here))))
    return torch.tanh(z)


@candidate("C6")
class RightByItsHook(Model):
    """Its forward is right only with what a hook makes of it."""

    def __init__(self, width):
        super().__init__(width)
        self.register_forward_hook(self.halved)

    @staticmethod
    def halved(module, args, result):
        return result / 2

    def forward(self, x):
        return 2 * super().forward(x)


@candidate("C2", level="full")
class Depth(Model):
    """It counts the modules that it is in where weights are loaded."""

    gain = 1

    def _load_from_state_dict(self, state, prefix, *args):
        super()._load_from_state_dict(state, prefix, *args)
        self.gain = max(1, prefix.count("."))

    def forward(self, x):
        return self.gain * super().forward(x)


@candidate("C6", original="softplus", train=True)
class MappedGradient(torch.autograd.Function):
    """No gradient flows through what torch.func.vmap makes of it."""

    @staticmethod
    def forward(x):
        return torch.nn.functional.softplus(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        return g * torch.sigmoid(ctx.saved_tensors[0])

    @staticmethod
    def vmap(info, in_dims, x):
        return torch.nn.functional.softplus(x.detach()), in_dims[0]


@candidate("N6", original="scaled_by_default")
def other_default(self, x, scale=2.0):
    """An argument has another value where it is left out."""
    return torch.tanh(x) * scale


@candidate("N6", original="keyed")
def in_turn(self, parts):
    """It takes what it is given by name in the order in which it is given."""
    first, second = parts.values()
    return first * 2 + second
