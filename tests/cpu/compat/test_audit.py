"""`refold doctor --audit` finds right functions right, planted mistakes wrong, and says what it did not run."""

import sys

import pytest
import torch
from typer.testing import CliRunner

from refold import audit, cli
from refold.compat import fla
from refold.ops import delta_rule

PREAMBLE = """
import torch
from refold.compat import causal_conv1d as conv, mamba_ssm as mamba
from refold.audit import linear_recurrence
"""

RIGHT = {
    "mamba_ssm/ops/triton/ssd_combined.py": "mamba_chunk_scan_combined = mamba.mamba_chunk_scan_combined",
    "causal_conv1d/__init__.py": "from refold.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update",
    "mamba_ssm/ops/triton/layernorm_gated.py": "rmsnorm_fn = mamba.rmsnorm_fn",
}
PLANTED = {
    "a pack is ignored": (
        "mamba_ssm/ops/triton/ssd_combined.py",
        "def mamba_chunk_scan_combined(*, seq_idx=None, **k): return mamba.mamba_chunk_scan_combined(**k)",
        {"pack", "gradients of a pack of strided views"},
    ),
    "a gradient is half of what it should be": (
        "mamba_ssm/ops/triton/ssd_combined.py",
        "def mamba_chunk_scan_combined(*, B, **k):\n"
        "    return mamba.mamba_chunk_scan_combined(B=(B + B.detach()) / 2, **k)",
        {"gradients", "gradients of a pack of strided views"},
    ),
    "strides are taken for those of a contiguous tensor": (
        "mamba_ssm/ops/triton/ssd_combined.py",
        "def mamba_chunk_scan_combined(*, dt, **k):\n"
        "    wrong = dt.as_strided(dt.shape, torch.empty(dt.shape).stride())\n"
        "    return mamba.mamba_chunk_scan_combined(dt=wrong, **k)",
        {"strided views", "gradients of a pack of strided views"},
    ),
    "the last tokens are not written": (
        "causal_conv1d/__init__.py",
        "def causal_conv1d_fn(x, *a, **k):\n"
        "    y = conv.causal_conv1d_fn(x, *a, **k).clone()\n"
        "    y[..., -3:] = float('nan')\n"
        "    return y\n"
        "causal_conv1d_update = conv.causal_conv1d_update",
        {"strided views", "contiguous", "pack", "gradients of a pack"},
    ),
    "the state is not kept": (
        "causal_conv1d/__init__.py",
        "causal_conv1d_fn = conv.causal_conv1d_fn\n"
        "def causal_conv1d_update(x, conv_state, **k):\n"
        "    return conv.causal_conv1d_update(x, conv_state.clone(), **k)",
        {"one token"},
    ),
}  # fmt: skip


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that makes files importable as packages, which alone are audited."""
    monkeypatch.setattr(audit, "CASES", [case for case in audit.CASES if case.package != "refold"])

    def install(files):
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path).parents:
                (tmp_path / folder / "__init__.py").touch()
            path.write_text(PREAMBLE + source)
        monkeypatch.syspath_prepend(tmp_path)

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] in ("mamba_ssm", "causal_conv1d", "fla")]:
            del sys.modules[name]

    forget()
    yield install
    forget()


@pytest.fixture
def quick(monkeypatch):
    """Run float32 alone; bfloat16 differs in nothing but rounding."""
    kept = [c for c in audit.CASES if c.gib or torch.float32 in c.dtypes]
    monkeypatch.setattr(audit, "CASES", [audit.CallForm(**{**vars(c), "dtypes": c.dtypes[:1]}) for c in kept])


def by_case(findings, verdict):
    return {f.case.rpartition(", ")[0] for f in findings if f.verdict == verdict}


def test_what_is_right(installed):
    installed(RIGHT)
    findings = list(audit.audit("cpu"))
    assert by_case(findings, "wrong") == set()
    right = [f for f in findings if f.verdict == "right"]
    assert {f.function for f in right} == {
        "mamba_chunk_scan_combined", "causal_conv1d_fn", "causal_conv1d_update", "rmsnorm_fn"
    }  # fmt: skip
    assert {f.case.rpartition(", ")[2] for f in right} == {"float32", "bfloat16"}
    reasons = {f.function: f.detail for f in findings if f.verdict == "not run" and "2^31" not in f.case}
    assert (
        "mamba_ssm.ops.selective_scan_interface cannot be imported: ModuleNotFoundError" in reasons["selective_scan_fn"]
    )
    long = {f.detail for f in findings if "2^31" in f.case and f.function == "rmsnorm_fn"}
    assert long == {"needs a GPU with 20 GiB free"}
    assert [f.detail for f in findings if f.package == "fla"] == ["the package is not installed"]


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.usefixtures("quick")
def test_what_is_wrong(installed, bug):
    file, source, cases = PLANTED[bug]
    installed({file: source})
    findings = list(audit.audit("cpu"))
    assert by_case(findings, "wrong") == cases
    assert by_case(findings, "right") or bug == "the last tokens are not written"


@pytest.mark.usefixtures("quick")
def test_an_error_is_not_a_verdict(installed):
    installed({"fla/ops/simple_gla.py": "def chunk_simple_gla(**k): raise ValueError('no such GPU')"})
    findings = [f for f in audit.audit("cpu") if f.function == "chunk_simple_gla"]
    assert {(f.verdict, f.detail) for f in findings} == {("not run", "raised ValueError: no such GPU")}


@pytest.mark.usefixtures("quick")
def test_linear_attention(installed):
    """The loop in float64 agrees with the textbook recurrence over the whole matrix of a state."""
    installed({
        "fla/ops/simple_gla.py": "def chunk_simple_gla(**k): return linear_recurrence(**k), None",
        "fla/ops/kda.py": "def chunk_kda(*, beta, **k): return linear_recurrence(beta=1.1 * beta, **k), None",
    })  # fmt: skip
    findings = list(audit.audit("cpu"))
    assert by_case([f for f in findings if f.function == "chunk_simple_gla"], "wrong") == set()
    assert by_case([f for f in findings if f.package == "fla"], "wrong") == {"contiguous", "pack", "gradients"}
    q, k, v = (torch.randn(1, 9, 2, d, dtype=torch.float64) for d in (4, 4, 3))
    g, beta = -torch.rand(1, 9, 2, 4, dtype=torch.float64), torch.rand(1, 9, 2, dtype=torch.float64)
    linear, delta = torch.zeros(2, 4, 3, dtype=torch.float64), torch.zeros(2, 4, 3, dtype=torch.float64)
    found = audit.linear_recurrence(q, k, v, 0.5, g[..., 0]), audit.linear_recurrence(q, k, v, 0.5, g, beta)
    for t in range(9):
        for h in range(2):
            outer = k[0, t, h, :, None] * v[0, t, h]
            linear[h] = g[0, t, h, 0].exp() * linear[h] + outer
            erase = torch.eye(4, dtype=torch.float64) - beta[0, t, h] * k[0, t, h, :, None] * k[0, t, h]
            delta[h] = erase @ (g[0, t, h].exp()[:, None] * delta[h]) + beta[0, t, h] * outer
            for state, y in zip((linear, delta), found, strict=True):
                torch.testing.assert_close(y[0, t, h], 0.5 * q[0, t, h] @ state[h])


def test_the_functions_that_take_the_place_of_those_of_fla(monkeypatch):
    """All are right here; a planted mistake is seen."""
    own = [c for c in audit.CASES if c.package == "refold" and (c.name == "pack" or c.function == "chunk_kda")]
    own = [audit.CallForm(**{**vars(c), "dtypes": c.dtypes[:1]}) for c in own]
    monkeypatch.setattr(audit, "CASES", own)
    findings = list(audit.audit("cpu"))
    assert {f.verdict for f in findings} == {"right"}, [str(f) for f in findings if f.verdict != "right"]
    assert {f.function for f in findings} == set(fla.__all__)
    monkeypatch.setattr(fla.ops, "delta_rule", lambda *a, cu_seqlens=None, **k: delta_rule(*a, **k))
    monkeypatch.setattr(audit, "CASES", [c for c in own if c.name != "gradients"][-3:])
    assert by_case(audit.audit("cpu"), "wrong") == {"pack"}


@pytest.mark.usefixtures("quick")
def test_the_command(installed):
    installed({PLANTED["the state is not kept"][0]: PLANTED["the state is not kept"][1]})
    result = CliRunner().invoke(cli.app, ["doctor", "--audit"])
    assert result.exit_code == 1, "something is wrong, and scripts can tell"
    assert "wrong    causal_conv1d causal_conv1d_update, one token, float32" in result.output
    assert "right    causal_conv1d causal_conv1d_fn, pack, float32" in result.output
    assert "not run  mamba_ssm, all cases: the package is not installed" in result.output
