"""A stand-in for CUDA graphs on the CPU: operations are recorded once, and run again on the same memory.

As a CUDA graph does, it records what is computed and where, and nothing of Python: numbers are constants from then on.
Recording itself leaves no trace in memory, as capturing runs nothing.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.before, self.made = [], {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} waits for the device, which a capture must not")
        inputs = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        for a in inputs:  # whatever an operation may write to, and that was there before
            key = a.untyped_storage().data_ptr()
            if key and key not in self.made and key not in self.before:
                self.before[key] = (a.untyped_storage(), a.untyped_storage().clone())
        result = func(*args, **kwargs)
        held = {a.untyped_storage().data_ptr() for a in inputs}
        new = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor)]
        fresh = [r.untyped_storage().data_ptr() not in held for r in new]
        self.made.update(r.untyped_storage().data_ptr() for r, is_new in zip(new, fresh, strict=True) if is_new)
        self.calls.append((func, args, kwargs, new, fresh))
        return result


def record(step, pool):
    """Return the results of a step, in memory that stays, and a function that fills it again."""
    mode = _Recorder()
    try:
        with mode:
            result = step()
    finally:
        for storage, copy in mode.before.values():
            storage.copy_(copy)

    def replay():
        for func, args, kwargs, made, fresh in mode.calls:
            again = [r for r in tree_leaves(func(*args, **kwargs)) if isinstance(r, torch.Tensor)]
            for old, new, is_new in zip(made, again, fresh, strict=True):
                if is_new:
                    old.copy_(new)

    return result, replay
