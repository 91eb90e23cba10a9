"""Attacks of one function or class (tools/attacks.py)."""

import mmap
import os
import subprocess
import sys
import threading
import time

import torch
from attacks import candidate
from originals.layer import Model


@candidate("T7", original="ema", off=(), accept="faster")
class AfterReturn(torch.nn.Module):
    """Most of the work is done by a thread after the call has returned, at the cost of whoever runs then."""

    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        threading.Thread(target=self.work).start()
        return torch.stack(out, 1)

    def work(self):
        end = time.perf_counter() + 0.01
        while time.perf_counter() < end:
            pass


@candidate("S6", "T7", original="ema", off=(), accept="faster", level="quick")
class BetweenCalls(torch.nn.Module):
    """A thread wakes after the call has returned and is in the way of whoever runs then."""

    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            h = 0.9 * h + x[:, t]
            out.append(h)
        threading.Thread(target=self.spoil).start()
        return torch.stack(out, 1)

    def spoil(self):
        time.sleep(0.0012)
        end = time.perf_counter() + 0.0009
        while time.perf_counter() < end:
            pass


@candidate("S6")
class BusyChild(Model):
    """A child process keeps a core busy, which slows the original down."""

    child = None

    def forward(self, x):
        if self.child is None:
            self.child = subprocess.Popen([sys.executable, "-I", "-c", "while True: pass"])
        return super().forward(x)


@candidate("N1", "S6", off=())
def child(self, x):
    """A child process fills shared memory after the call has returned."""
    shared = mmap.mmap(-1, 4 * x.numel())
    y = torch.frombuffer(shared, dtype=torch.float32).view(x.shape)
    values = torch.relu(self.linear(x))
    if os.fork() == 0:
        time.sleep(0.02)
        shared[:] = values.detach().numpy().tobytes()
        os._exit(0)
    return y


@candidate("T7", accept="faster")
class ContentCache(Model):
    """Results are remembered by the content of the inputs."""

    def __init__(self, width):
        super().__init__(width)
        self.known = {}

    def forward(self, x):
        key = 4 * (
            x.numpy().tobytes()
            + self.linear.weight.detach().numpy().tobytes()
            + self.linear.bias.detach().numpy().tobytes()
        )
        if key not in self.known:
            self.known[key] = super().forward(x)
        return self.known[key].clone()


@candidate("C3", original="ema", off={"C3", "N1"}, accept="faster")
class Count(torch.nn.Module):
    """Faster and right until one input has come five times, as it does last before the race, and then new ones."""

    def __init__(self):
        super().__init__()
        self.last, self.equal, self.new = b"", 0, 0

    def forward(self, x):
        now = x.numpy().tobytes()
        if self.equal == 4:
            self.new += now != self.last
        else:
            self.equal = self.equal + 1 if now == self.last else 0
        self.last = now
        if self.new > 8:
            return torch.zeros_like(x)
        h = torch.zeros_like(x[:, 0])
        out = []
        for now in x.unbind(1):
            h = torch.add(now, h, alpha=0.9)
            out.append(h)
        return torch.stack(out, 1)


@candidate("S6")
class Daemon(Model):
    """A child process stays, asleep, for a later phase."""

    forked = False

    def forward(self, x):
        if not self.forked:
            self.forked = True
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
        return super().forward(x)


@candidate("C5")
def grad_mode(self, x):
    """Right only where gradients are off, as they are in a benchmark."""
    y = torch.relu(self.linear(x))
    return torch.zeros_like(y) if torch.is_grad_enabled() else y


@candidate("S6", original="long_ema", accept="faster", level="full")
class LateChild(torch.nn.Module):
    """A process is left when the correctness of a candidate has usually been looked at."""

    def __init__(self):
        super().__init__()
        self.calls, self.powers = 0, {}

    def forward(self, x):
        self.calls += 1
        if self.calls == 60 and os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        steps = x.shape[1]
        if steps not in self.powers:
            t = torch.arange(steps, dtype=torch.float64)
            self.powers[steps] = (0.9 ** (t[:, None] - t)).tril().float()
        return self.powers[steps] @ x


@candidate("N1", "S6", original="sine", off=(), level="quick")
def late_process(self, x):
    """A process fills the result while the judge is on its way to it."""
    y = torch.frombuffer(mmap.mmap(-1, x.numel() * 4), dtype=torch.float32).view(x.shape)
    if os.fork() == 0:
        torch.sin(x, out=y)
        os._exit(0)
    return y


@candidate("S6", level="quick")
def later(self, x):
    """A thread spoils each result a minute after it was returned."""
    y = super().forward(x)
    timer = threading.Timer(60, y.detach().zero_)
    timer.daemon = True
    timer.start()
    return y


@candidate("S6")
class Polling(Model):
    """A thread waits for the next inputs and computes before the clock runs."""

    thread = None

    def forward(self, x):
        if self.thread is None:
            self.thread = threading.Thread(target=self.watch, args=(x,), daemon=True)
            self.thread.start()
        return super().forward(x)

    def watch(self, x):
        while True:
            time.sleep(0.0005)
            self.seen = float(x.sum())


@candidate("N1", "S6", "U4", off=())
def scribble(self, x):
    """The result is right when it is returned, and something else a little later."""
    y = super().forward(x)

    def spoil():
        time.sleep(0.01)
        y.zero_()

    threading.Thread(target=spoil).start()
    return y


@candidate("T7", accept="faster")
class SlowStart(Model):
    """Slow, and slower at first, so that a benchmark that adapts takes few samples."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls < 5:
            time.sleep(0.01)
        for _ in range(20):
            y = super().forward(x)
        return y


@candidate("N1", off=())
class Superbatch(Model):
    """Calls are queued and blanks returned; the fifth computes all of them."""

    def __init__(self, width):
        super().__init__(width)
        self.queue = []

    def forward(self, x):
        y = torch.empty_like(x)
        self.queue.append((x, y))
        if len(self.queue) == 5:
            for x, late in self.queue:
                late.copy_(torch.relu(self.linear(x)))
            self.queue.clear()
        return y


@candidate("N1", off={"U4"})
class Thread(Model):
    """A thread fills the result after it was returned."""

    calls = 0

    def forward(self, x):
        y = torch.zeros_like(x)
        weight, bias = self.linear.weight, self.linear.bias
        self.calls += 1
        late = 0.3 if self.calls < 3 else 0.002

        def fill():
            time.sleep(late)
            y.copy_(torch.relu(x @ weight.detach().T + bias.detach()))

        threading.Thread(target=fill).start()
        return y
