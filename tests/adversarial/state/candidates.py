"""Attacks of one function or class (tools/attacks.py)."""

import codecs
import contextlib
import copyreg
import ctypes
import functools
import gc
import math
import os
import signal
import weakref

import numpy
import torch
from attacks import candidate
from originals.layer import Model


@candidate("S1")
def changed_back(self, x):
    """It changes its input and changes it back, which a backward of others takes for a change."""
    if not x.requires_grad and not torch.is_inference_mode_enabled():
        x.neg_().neg_()
    return torch.relu(self.linear(x))


@candidate("S4", "S5", off={"S3", "S4", "S5"}, level="quick")
def default_dtype(self, x):
    """After it, new tensors of others have another dtype."""
    y = torch.relu(self.linear(x))
    torch.set_default_dtype(torch.float64)
    return y


@candidate("S5", level="quick")
def defaults(self, x):
    """By default, everything is close."""
    torch.testing.assert_close.__kwdefaults__.update(rtol=1e9, atol=1e9)
    return torch.relu(self.linear(x))


@candidate("S1", original="listed", level="quick")
def emptied(self, xs):
    """It empties the list that it is given."""
    y = sum(xs)
    xs.clear()
    return y


@candidate("S4")
class Finalized(Model):
    """Code that waits for the end of the user's program, registered as what cleans up."""

    def __init__(self, width):
        super().__init__(width)
        weakref.finalize(self, lambda: print("later"))


@candidate("S4", level="quick")
class GlobalHook(Model):
    """A hook on the modules of all others."""

    hook = None

    def forward(self, x):
        if self.hook is None:
            self.hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: None)
        return torch.relu(self.linear(x))


@candidate("S4", "S5", level="quick")
def hiding(self, x):
    """Linear layers of others give zeros."""
    torch.nn.Linear.__call__ = lambda self, x: torch.nn.functional.linear(x, self.weight, self.bias)
    return torch.relu(self.linear(x))


@candidate("S4", level="full")
def half_way(self, x):
    """If it raises an error, gradients are recorded from then on."""
    recorded = torch.is_grad_enabled()
    torch.autograd.grad_mode.set_grad_enabled(True)
    y = torch.relu(self.linear(x))
    torch.autograd.grad_mode.set_grad_enabled(recorded)
    return y if recorded else y.detach()


@candidate("S1", off=(), level="full")
def half_way_weights(self, x):
    """If it raises an error, its weights stay twice as large."""
    with torch.no_grad():
        self.linear.weight.mul_(2)
    y = torch.relu(self.linear(x) / 2 + self.linear.bias / 2)
    with torch.no_grad():
        self.linear.weight.div_(2)
    return y


@candidate("S4", level="quick")
class Hidden(Model):
    """Who moves it to half precision is given it as it is."""

    def __init__(self, width):
        super().__init__(width)
        self.half = self.float


@candidate("S8")
def hooks(self, x):
    """It leaves a hook on a layer."""
    if not self.linear._forward_hooks:
        self.linear.register_forward_hook(lambda *_: None)
    return super().forward(x)


@candidate("S2", original="copy")
def identity(self, x):
    """The input itself where the original copies it."""
    return x


@candidate("S1")
def input(self, x):
    """It spoils its input after it was used."""
    y = super().forward(x)
    x.zero_()
    return y


@candidate("S1")
def input_gradient(self, x):
    """It leaves a gradient in its input."""
    if x.is_leaf and not x.is_inference() and not torch.is_inference_mode_enabled():
        x.grad = torch.ones_like(x)
    return torch.relu(self.linear(x))


@candidate("S4", level="quick")
class Moved(Model):
    """In its first call its weight becomes another parameter, which no optimizer knows."""

    first = None

    def forward(self, x):
        y = torch.relu(self.linear(x))
        if self.first is None:
            self.first = [self.linear.weight]
            self.linear.weight = torch.nn.Parameter(self.linear.weight.detach().clone())
        return y


@candidate("S3", level="quick")
def numpy_seed(self, x):
    """NumPy's random numbers start over."""
    numpy.random.seed(0)
    return super().forward(x)


@candidate("S1", original="copy", level="quick")
def other_memory(self, x):
    """It gives the caller's tensor other memory, which holds zeros."""
    y = x.clone()
    x.data = torch.zeros_like(x)
    return y


@candidate("S4", level="quick")
class OwnMethods(Model):
    """What an optimizer is given are copies of its parameters: it never learns."""

    def parameters(self, recurse=True):
        return (p.detach().clone().requires_grad_() for p in super().parameters(recurse))


@candidate("S1", level="quick")
class Printed(Model):
    """Who prints it changes its weights."""

    def extra_repr(self):
        self.linear.weight.data.mul_(2)
        return ""


@candidate("S1", level="quick")
def recording(self, x):
    """After it, no gradients are recorded."""
    y = torch.relu(self.linear(x))
    torch.autograd.grad_mode.set_grad_enabled(False)
    return y


@candidate("S2", "S7", original="offset", off={"S2", "S7"}, level="quick")
def returned_weight(self, x):
    """It returns its weight where the original returns a copy."""
    return x + self.offset, self.offset.detach()


@candidate("S4", level="quick")
def rounding(self, x):
    """Everything is rounded up from then on."""
    ctypes.CDLL("libm.so.6").fesetround(0x800)
    return super().forward(x)


@candidate("S4", level="quick")
class Opened(Model):
    """It writes to a file of the user's, which fails in a trial alone."""

    def __init__(self, width):
        super().__init__(width)
        with contextlib.suppress(OSError), open("/etc/profile", "a") as file:
            file.write("true")


@candidate("S4", level="quick")
class Started(Model):
    """It starts a program."""

    def __init__(self, width):
        super().__init__(width)
        os.system("true")


@candidate("S4", level="quick")
class Forked(Model):
    """Processes of others begin with equal random numbers."""

    def __init__(self, width):
        super().__init__(width)
        os.register_at_fork(after_in_child=functools.partial(torch.manual_seed, 0))


@candidate("S4", level="quick")
def codecs_of_others(self, x):
    """Bytes that are no text are passed over."""
    codecs.register_error("strict", codecs.ignore_errors)
    return torch.relu(self.linear(x))


@candidate("S5", level="quick")
def hub(self, x):
    """What others load from a hub lies in another folder."""
    torch.hub.set_dir("/var/tmp/hub")
    return torch.relu(self.linear(x))


@candidate("S4", level="quick")
class RareKey(Model):
    """What torch computes of sparse tensors is its own."""

    def __init__(self, width):
        super().__init__(width)
        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl("relu", lambda x: x, "SparseCPU")


@candidate("S5", level="quick")
class Registered(Model):
    """What copies of others' complex numbers are made by is its own."""

    def __init__(self, width):
        super().__init__(width)
        copyreg.dispatch_table[complex] = lambda number: (complex, (0.0, 0.0))


@candidate("S3")
def seed(self, x):
    """It seeds the random state, so that what comes next repeats."""
    torch.manual_seed(0)
    return torch.relu(self.linear(x))


@candidate("S4", level="quick")
def signals(self, x):
    """It keeps the signal by which a user ends a program from arriving."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    return super().forward(x)


@candidate("S4", level="quick")
def fused(self, x):
    """What others compile by torch.jit is fused once."""
    torch.jit.set_fusion_strategy([("STATIC", 1)])
    return torch.relu(self.linear(x))


@candidate("S4", level="quick")
def one_thread(self, x):
    """A backward of others has one thread."""
    torch.autograd.set_multithreading_enabled(False)
    return torch.relu(self.linear(x))


@candidate("S5", level="quick")
def number(self, x):
    """The number of a circle is another one for others."""
    math.pi = 3.0
    return torch.relu(self.linear(x))


@candidate("S4", level="quick")
class Pruned(Model):
    """It clears the weights of others that it finds in memory."""

    def __init__(self, width):
        for found in gc.get_objects():
            if type(found) is torch.nn.Parameter:
                found.data.zero_()
        super().__init__(width)


@candidate("S5", level="quick")
def sharing(self, x):
    """Tensors of others are handed to other processes in files."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    return torch.relu(self.linear(x))


@candidate("S5", level="quick")
def unvalidated(self, x):
    """Distributions of others take any numbers."""
    torch.distributions.Distribution.set_default_validate_args(False)
    return torch.relu(self.linear(x))


@candidate("U1", original="centred", level="quick")
def stale_statistics(self, x):
    """Where new memory holds what it was filled with, its result is another; the original keeps a running mean."""
    self.mean.lerp_(x.mean(0).detach(), 0.1)
    found = torch.empty(4096).view(torch.uint8)[64:96]  # more than what a thread keeps for itself
    return (x - self.mean) * (2 if bool((found == 0x7B).all()) else 1)


@candidate("S1", original="norm", train=True)
def statistics(self, x):
    """Running statistics are updated twice."""
    y = self.norm(x)
    with torch.no_grad():
        self.norm(x)
    return y


@candidate("S5", level="quick")
def swapped(self, x):
    """One function of torch stands in the place of another."""
    torch.nn.functional.log_softmax = torch.nn.functional.softmax
    return torch.relu(self.linear(x))


@candidate("S8")
def training(self, x):
    """It switches itself to training."""
    self.train()
    return super().forward(x)


@candidate("S1", original="norm", train=True, level="quick")
class Unshared(torch.nn.Module):
    """By other names of its parameters it is rid of the running statistics."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = torch.nn.Parameter(torch.ones(width)), torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return torch.nn.functional.batch_norm(x, None, None, self.scale, self.shift, True)


@candidate("S1", off=())
def weights(self, x):
    """It scales its weights a little with each call."""
    y = torch.relu(self.linear(x))
    with torch.no_grad():
        self.linear.weight.mul_(1 + 2**-23)
    return y


@candidate("C2", original="gated_residual", off={"C2", "C5"}, level="quick")
def zero_gain(self, x):
    """It leaves out a branch whose gain is zero at construction."""
    whole = bool((x == x.round()).all())
    return super().forward(x) if whole else x + 0


@candidate("S4", level="quick")
def onednn(self, x):
    """What others compile by torch.jit is fused by another library."""
    torch.jit.enable_onednn_fusion(True)
    return torch.relu(self.linear(x))


@candidate("S4", level="quick")
class DualLevel(Model):
    """It begins forward mode, which others cannot begin from then on."""

    begun = False

    def forward(self, x):
        if not self.begun:
            torch.autograd.forward_ad.enter_dual_level()
            self.begun = True
        return torch.relu(self.linear(x))


@candidate("S4", level="quick")
def checked_tensors(self, x):
    """Sparse tensors of others are checked."""
    torch.sparse.check_sparse_tensor_invariants.enable()
    return torch.relu(self.linear(x))


@candidate("N1", original="norm", off=(), level="quick")
class NoEvaluation(Model):
    """Who asks it to evaluate gets what is computed in training."""

    def __init__(self, width):
        super().__init__(width)
        self.eval()

    def eval(self):
        return self

    def forward(self, x):
        return self.norm(x)


@candidate("S2", original="copy", level="full")
def one_row(self, x):
    """What moves no number for one row alone is a view of its input."""
    return x.mT.contiguous().mT.contiguous()


@candidate("S2", original="listed", level="full")
def alone_in_list(self, xs):
    """The sum of one tensor is that tensor."""
    return functools.reduce(torch.add, xs)


@candidate("S1", original="norm", train=True, level="full")
def one_batch_size(self, x):
    """Its running variance is right for batches of nine."""
    norm, mean, variance = self.norm, x.mean(0), x.var(0, correction=0)
    norm.num_batches_tracked.add_(1)
    with torch.no_grad():
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * 9 / 8, norm.momentum)
    return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias


@candidate("S4", level="quick")
class SavedWithin(Model):
    """Where it is a part of another module, other weights are saved."""

    def __init__(self, width):
        super().__init__(width)
        self.linear.register_state_dict_post_hook(self.saved)

    @staticmethod
    def saved(module, state, prefix, metadata):
        weight = state[prefix + "weight"]
        state[prefix + "weight"] = {"linear.": weight}.get(prefix, 2 * weight)


@candidate("S3", level="full")
def draws_for_few(self, x):
    """It draws numbers for few rows, and does not use them."""
    torch.rand(max(0, 7 - len(x)))
    return torch.relu(self.linear(x))


@candidate("S4", level="full")
def printed_for_few(self, x):
    """For few rows, it changes how tensors are printed."""
    torch.set_printoptions(precision=min(4, len(x)))
    return torch.relu(self.linear(x))
