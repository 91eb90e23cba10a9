"""The command line: evidence on standard output, one sentence and exit code 2 on bad input."""

import json
import subprocess
import sys

import pytest

LAYER = """
import torch
class Model(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(width, 16))
    def forward(self, x):
        return (x[:, None, :] * self.w[None]).sum(-1)
def get_inputs():
    return [torch.randn(32, 16)]
def get_init_inputs():
    return [24]
def factory():
    return Model(), (torch.randn(4, 16),)
"""


def refold(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "refold.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=300,
    )


@pytest.fixture
def layer(tmp_path):
    path = tmp_path / "layer.py"
    path.write_text(LAYER)
    return path


def test_explain_lists_waste(layer, tmp_path):
    out = tmp_path / "report.json"
    done = refold("explain", layer, "--json", out)
    assert done.returncode == 0, done.stderr
    assert "products are written out only to be summed" in done.stdout
    assert "layer.py:8: return (x[:, None, :] * self.w[None]).sum(-1)" in done.stdout
    (rewrite,) = json.loads(out.read_text())["graphs"][0]["rewrites"]
    assert rewrite["status"] == "found"


def test_optimize_prints_the_evidence_and_plain_progress(layer, tmp_path):
    out = tmp_path / "report.json"
    done = refold("optimize", layer, "--accept", "always", "--seed", "3", "--json", out)
    assert done.returncode == 0, done.stderr
    assert "... proving sum_1" in done.stderr
    assert "\x1b" not in done.stderr
    assert "against float64" in done.stdout
    (graph,) = json.loads(out.read_text())["graphs"]
    assert graph["chosen"] == "refold"


def test_a_factory_is_a_target_too(layer):
    done = refold("explain", "layer:factory", "--dtype", "bfloat16", cwd=layer.parent)
    assert done.returncode == 0, done.stderr
    assert "recover contraction" in done.stdout


def test_doctor_says_what_is_usable_and_why_not():
    done = refold("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("versions", "devices", "parts", "torch", "compiler", "triton", "jax"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["layer.txt"], "layer.txt is neither a Python file nor package.module:factory"),
        (["nowhere.at.all:factory"], "module nowhere.at.all cannot be imported"),
        (["layer:nothing"], "module layer has no function 'nothing'"),
        (["layer:get_inputs"], "get_inputs() must return (module, inputs)"),
        (["layer.py", "--dtype", "int8"], "--dtype must be one of float32, float16, bfloat16, float64, not 'int8'"),
        (["layer.py", "--device", "gpu"], "--device gpu cannot be used here"),
        (["layer.py", "--json", "/nonexistent/report.json"], "--json /nonexistent/report.json cannot be written"),
        (["empty.py"], "does not define Model or get_inputs"),
        (["broken.py"], "importing it raised SyntaxError"),
        (["raises.py"], "Model(...) raised RuntimeError: planted"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(layer, arguments, sentence):
    (layer.parent / "empty.py").write_text("")
    (layer.parent / "broken.py").write_text("def\n")
    (layer.parent / "raises.py").write_text(LAYER.replace("super().__init__()", "raise RuntimeError('planted')"))
    done = refold("explain", *arguments, cwd=layer.parent)
    assert done.returncode == 2
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("refold: ")
    assert sentence in message
    assert "Traceback" not in done.stderr


def test_an_unknown_option_is_exit_code_2(layer):
    done = refold("optimize", layer, "--accept", "perhaps")
    assert done.returncode == 2
    assert "accept must be one of 'faster', 'always', not 'perhaps'" in done.stderr
