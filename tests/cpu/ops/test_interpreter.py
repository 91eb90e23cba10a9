"""Triton's interpreter, made quicker for tests, computes as before and gives its language back after a launch."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_interpreted, in a process of its own", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import interpreter

from refold.ops.testing.frameworks import interpret_quickly


@triton.jit
def _add(a, b):
    return a + tl.sum(b, 0)


@triton.jit
def _sum_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([], tl.float32)
    for start in tl.range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total = _add(total, tl.load(x_ptr + offsets, mask=offsets < n, other=0.0))
    tl.store(y_ptr, total)


def test_the_language_is_replaced_once_a_launch_and_given_back(monkeypatch):
    replaced, replace = [], interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *a: replaced.append(a[0]) or replace(*a))
    counts, own = [], tl.range
    for tokens in (4, 40):
        x, y = torch.arange(tokens, dtype=torch.float32), torch.zeros(())
        _sum_kernel[(1,)](x, y, tokens, BLOCK=4)
        assert float(y) == x.sum()
        assert tl.range is own
        counts.append(replaced.count(tl.tensor))
        replaced.clear()
    # Once for the kernel; in the first launch of the process, also for the module of `sum`, whose names stay replaced.
    assert counts in ([2, 1], [1, 1])


def test_other_names_are_left_alone(monkeypatch):
    monkeypatch.delattr(interpreter, "_patch_lang")
    monkeypatch.setattr(interpreter, "_get_np_dtype", "no function")
    interpret_quickly()
    assert not hasattr(interpreter, "_patch_lang")
    assert interpreter._get_np_dtype == "no function"
