"""The functions of `refold.compat` against the packages' own reference code, from checkouts outside this repository.

``REFOLD_PEERS`` names a folder with checkouts of state-spaces/mamba as ``mamba``, of Dao-AILab/causal-conv1d as
``causal-conv1d`` and of fla-org/flash-linear-attention under its name. Nothing of them is built: their references are
PyTorch.
"""

import ast
import importlib
import inspect
import itertools
import math
import os
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from refold.compat import causal_conv1d as conv
from refold.compat import fla
from refold.compat import mamba_ssm as mamba

PEERS = os.environ.get("REFOLD_PEERS")
pytestmark = pytest.mark.skipif(not PEERS, reason="REFOLD_PEERS names no folder with checkouts of the packages")

FUNCTIONS = {
    mamba.mamba_chunk_scan_combined: "mamba/mamba_ssm/ops/triton/ssd_combined.py",
    mamba.mamba_split_conv1d_scan_combined: "mamba/mamba_ssm/ops/triton/ssd_combined.py",
    mamba.selective_scan_fn: "mamba/mamba_ssm/ops/selective_scan_interface.py",
    mamba.mamba_inner_fn: "mamba/mamba_ssm/ops/selective_scan_interface.py",
    mamba.selective_state_update: "mamba/mamba_ssm/ops/triton/selective_state_update.py",
    mamba.rmsnorm_fn: "mamba/mamba_ssm/ops/triton/layernorm_gated.py",
    mamba.layer_norm_fn: "mamba/mamba_ssm/ops/triton/layer_norm.py",
    mamba.rms_norm_fn: "mamba/mamba_ssm/ops/triton/layer_norm.py",
    mamba.RMSNorm: "mamba/mamba_ssm/ops/triton/layer_norm.py",
    mamba.RMSNormGated: "mamba/mamba_ssm/ops/triton/layernorm_gated.py",
    conv.causal_conv1d_fn: "causal-conv1d/causal_conv1d/causal_conv1d_interface.py",
    conv.causal_conv1d_update: "causal-conv1d/causal_conv1d/causal_conv1d_interface.py",
    fla.chunk_gated_delta_rule: "flash-linear-attention/fla/ops/gated_delta_rule/chunk.py",
    fla.fused_recurrent_gated_delta_rule: "flash-linear-attention/fla/ops/gated_delta_rule/fused_recurrent.py",
    fla.chunk_kda: "flash-linear-attention/fla/ops/kda/chunk.py",
    fla.fused_recurrent_kda: "flash-linear-attention/fla/ops/kda/fused_recurrent.py",
    fla.chunk_gla: "flash-linear-attention/fla/ops/gla/chunk.py",
    fla.chunk_simple_gla: "flash-linear-attention/fla/ops/simple_gla/chunk.py",
    fla.chunk_delta_rule: "flash-linear-attention/fla/ops/delta_rule/chunk.py",
}


def signature_of(file, name):
    tree = ast.parse((Path(PEERS) / file).read_text())
    body = tree.body
    if name[0].isupper():  # a module: what makes it
        name = name.removesuffix("Gated")
        body, name = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == name).body, "__init__"
    node = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == name)
    defaults = [eval(ast.unparse(v), {"float": float}) for v in node.args.defaults]
    names = [a.arg for a in node.args.args if a.arg != "self"]
    return names, dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_signatures(function):
    """Names, order and defaults of what may be given by position; ours may take more by name."""
    names, defaults = signature_of(FUNCTIONS[function], function.__name__)
    ours = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours] == names
    assert {p.name: p.default for p in ours if p.default is not p.empty} == defaults


@pytest.fixture(scope="module")
def theirs():
    """Import the packages from their checkouts, with an empty module in place of what is built."""
    if find_spec("einops") is None or find_spec("triton") is None:
        pytest.skip("the references need the packages einops and triton")
    before = set(sys.modules)
    sys.path[:0] = [f"{PEERS}/mamba", f"{PEERS}/causal-conv1d"]
    sys.modules["causal_conv1d_cuda"] = types.ModuleType("causal_conv1d_cuda")
    for package in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.utils", "mamba_ssm.ops.triton"):  # not their __init__
        module = sys.modules[package] = types.ModuleType(package)
        module.__path__ = [f"{PEERS}/mamba/{package.replace('.', '/')}"]
    names = {
        "scan": "mamba_ssm.ops.selective_scan_interface",
        "update": "mamba_ssm.ops.triton.selective_state_update",
        "ssd": "mamba_ssm.ops.triton.ssd_combined",
        "norm": "mamba_ssm.ops.triton.layernorm_gated",
        "add_norm": "mamba_ssm.ops.triton.layer_norm",
        "conv": "causal_conv1d.causal_conv1d_interface",
    }
    yield types.SimpleNamespace(**{k: importlib.import_module(v) for k, v in names.items()})
    del sys.path[:2]
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mamba_ssm", "causal_conv1d", "causal_conv1d_cuda"):
            del sys.modules[name]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


b, t, h, p, g, n, w = 2, 37, 4, 8, 2, 6, 4
d = h * p


def test_selective_scan(theirs):
    u, delta, z = (torch.randn(b, d, t) for _ in range(3))
    A, D, bias = -torch.rand(d, n) - 0.1, torch.randn(d), torch.randn(d)
    for shape in ((d, n), (b, n, t), (b, g, n, t)):
        B, C = torch.randn(shape), torch.randn(shape)
        given = (u, delta, A, B, C, D, z, bias, True, True)
        for a, e in zip(mamba.selective_scan_fn(*given), theirs.scan.selective_scan_ref(*given), strict=True):
            close(a, e)


def test_inner(theirs, monkeypatch):
    monkeypatch.setattr(theirs.scan, "causal_conv1d_fn", theirs.conv.causal_conv1d_ref)
    monkeypatch.setattr(theirs.scan, "selective_scan_fn", theirs.scan.selective_scan_ref)
    given = (
        torch.randn(b, 2 * d, t), torch.randn(d, 1, w), torch.randn(d), torch.randn(3 + 2 * n, d) / 8,
        torch.randn(d, 3), torch.randn(5, d), torch.randn(5), -torch.rand(d, n) - 0.1, None, None, torch.randn(d),
        torch.randn(d), torch.randn(n), torch.randn(n),
    )  # fmt: skip
    close(mamba.mamba_inner_fn(*given), theirs.scan.mamba_inner_ref(*given))


def test_chunk_scan(theirs):
    t = 48  # whole chunks: their reference takes no others
    x, z, dt = torch.randn(b, t, h, p), torch.randn(b, t, h, p), torch.randn(b, t, h)
    A, B, C = -torch.rand(h) - 0.1, torch.randn(b, t, g, n), torch.randn(b, t, g, n)
    D, bias = torch.randn(h, p), torch.randn(h)
    expected = theirs.ssd.ssd_chunk_scan_combined_ref(x, dt, A, B, C, 16, D, z, bias, True)
    close(mamba.mamba_chunk_scan_combined(x, dt, A, B, C, 16, D, z, bias, dt_softplus=True), expected)


@pytest.mark.parametrize("before", [False, True])
def test_split_and_norm(theirs, monkeypatch, before):
    def norm(x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True):
        return theirs.norm.rms_norm_ref(x, weight, bias, z, eps, group_size, norm_before_gate)

    monkeypatch.setattr(theirs.ssd, "causal_conv1d_fn", theirs.conv.causal_conv1d_ref)
    monkeypatch.setattr(theirs.scan, "selective_scan_fn", theirs.scan.selective_scan_ref)
    monkeypatch.setattr(theirs.ssd, "rmsnorm_fn", norm)
    x, z, weight, bias = torch.randn(b, t, d), torch.randn(b, t, d), torch.randn(d), torch.randn(d)
    close(mamba.rmsnorm_fn(x, weight, bias, z, 1e-3, p, before), norm(x, weight, bias, z, 1e-3, p, before))
    width = d + 2 * n
    given = (
        torch.randn(b, t, 2 * d + 2 * n + h), torch.randn(width, w), torch.randn(width), torch.randn(h),
        -torch.rand(h) - 0.1, torch.randn(h), 16,
    )  # fmt: skip
    for limit in ((0.0, math.inf), (0.2, 1.0)):
        rest = {"headdim": p, "rmsnorm_weight": weight, "norm_before_gate": before, "dt_limit": limit}
        rest |= {"outproj_weight": torch.randn(5, d), "outproj_bias": torch.randn(5)}
        found = mamba.mamba_split_conv1d_scan_combined(*given, **rest)
        close(found, theirs.ssd.mamba_split_conv1d_scan_ref(*given, **rest))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_norm_of_stream(theirs, name, dropout):
    ours, reference = getattr(mamba, f"{name}_fn"), getattr(theirs.add_norm, f"{name}_ref")
    x, residual, x1 = (torch.randn(b, t, d) for _ in range(3))
    weight, bias, weight1, bias1, scale = *(torch.randn(d) for _ in range(4)), torch.randn(b, t)
    for given in (
        {"residual": residual, "rowscale": scale},
        {"residual": residual, "x1": x1, "weight1": weight1, "bias1": bias1},
        {"x1": x1, "weight1": weight1},
    ):
        for offset, prenorm in itertools.product((bias, None), (True, False)):
            rest = given | {"eps": 1e-3, "dropout_p": dropout, "prenorm": prenorm}
            *found, kept, kept1 = ours(x, weight, offset, **rest, return_dropout_mask=True)
            rest |= {"dropout_mask": kept, "dropout_mask1": kept1} if dropout else {}
            expected = reference(x, weight, offset, **rest)
            expected = expected if isinstance(expected, tuple) else (expected,)
            for a, e in zip(found, expected, strict=True):
                close(a, e)


def test_state_update(theirs):
    for heads in (False, True):
        lead = (h, p) if heads else (d,)
        state = torch.randn(b, *lead, n)
        twin = state.clone()
        x, dt, z = (torch.randn(b, *lead) for _ in range(3))
        rest = (
            -torch.rand(*lead, n),
            torch.randn(b, g, n),
            torch.randn(b, g, n),
            torch.randn(lead),
            z,
            torch.randn(lead),
        )
        if not heads:  # their reference takes no groups then
            rest = (rest[0], *(v[:, 0] for v in rest[1:3]), *rest[3:])
        expected = theirs.update.selective_state_update_ref(twin, x, dt, *rest, True)
        close(mamba.selective_state_update(state, x, dt, *rest, True), expected)
        close(state, twin)


def test_convolution(theirs):
    x, weight, bias, initial = torch.randn(b, d, t), torch.randn(d, w), torch.randn(d), torch.randn(b, d, w - 1)
    expected = theirs.conv.causal_conv1d_ref(x, weight, bias, initial, activation="silu")
    close(conv.causal_conv1d_fn(x, weight, bias, None, initial, activation="silu"), expected)
    _, final = conv.causal_conv1d_fn(x, weight, bias, return_final_states=True)
    close(final, x[..., 1 - w :])
    for length, tokens in ((w - 1, 1), (9, 2), (w, 7)):
        for read in (None, torch.tensor([3, 20])):
            state, twin = torch.randn(b, d, length).repeat(2, 1, 1, 1).unbind()
            given = (weight, bias, "silu", read)
            if read is not None and tokens > length:
                continue  # their reference scatters several tokens to one place
            expected = theirs.conv.causal_conv1d_update_ref(x[..., :tokens], twin, *given)
            close(conv.causal_conv1d_update(x[..., :tokens], state, *given), expected)
            close(state, twin)


def naive(op, name):
    """Load a reference of flash-linear-attention from its file; the package itself imports Triton kernels."""
    pytest.importorskip("einops")
    path = Path(PEERS) / "flash-linear-attention/fla/ops" / op / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{op}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.parametrize("length", [1, 15, 64, 65])
@pytest.mark.parametrize("state", [False, True])
def test_delta_rules_against_the_references_of_fla(length, state):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, length, 2, 8)
    k = torch.nn.functional.normalize(k, dim=-1)
    g, gk, beta = -torch.rand(2, length, 2), -torch.rand(2, length, 2, 8), torch.rand(2, length, 2)
    last = {"initial_state": torch.randn(2, 2, 8, 8) if state else None, "output_final_state": True}
    compared = (
        (fla.chunk_gated_delta_rule(q, k, v, g, beta, **last),
         naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")(q, k, v, beta, g, **last)),
        (fla.chunk_kda(q, k, v, gk, beta, **last), naive("kda", "naive_recurrent_kda")(q, k, v, gk, beta, **last)),
        (fla.chunk_gla(q, k, v, gk, **last), naive("gla", "naive_recurrent_gla")(q, k, v, gk, **last)),
    )  # fmt: skip
    for found, expected in compared:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    y, state = fla.chunk_delta_rule(q, k, v, beta, **last)
    heads = [a.transpose(1, 2) for a in (q, k, v, beta)]
    y_theirs, theirs = naive("delta_rule", "delta_rule_recurrence")(*heads, last["initial_state"])
    torch.testing.assert_close((y, state), (y_theirs.transpose(1, 2), theirs), rtol=1e-4, atol=1e-5)
