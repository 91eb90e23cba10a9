"""The command line: evidence on standard output, one sentence and exit code 2 on bad input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from refold import __version__
from refold.cli import main
from refold.doctor import examine
from refold.targets import load

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
def here(layer, monkeypatch, capfd):
    """Return a function that runs a command in this process: a new one imports torch and its compiler each time."""

    def run(*arguments):
        monkeypatch.chdir(layer.parent)
        monkeypatch.syspath_prepend(layer.parent)
        for name in ("layer", "width"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "argv", ["refold", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        return subprocess.CompletedProcess(sys.argv, ended.value.code or 0, printed.out, printed.err)

    return run


@pytest.fixture
def layer(tmp_path):
    path = tmp_path / "layer.py"
    path.write_text(LAYER)
    return path


def test_explain_lists_waste(layer, here, tmp_path):
    out = tmp_path / "report.json"
    done = here("explain", layer, "--json", out)
    assert done.returncode == 0, done.stderr
    assert "products are written out only to be summed" in done.stdout
    assert "layer.py:8: return (x[:, None, :] * self.w[None]).sum(-1)" in done.stdout
    (rewrite,) = json.loads(out.read_text())["graphs"][0]["rewrites"]
    assert rewrite["status"] == "found"


@pytest.mark.slow
def test_optimize_prints_the_evidence_and_plain_progress(layer, tmp_path):
    out = tmp_path / "report.json"
    done = refold("optimize", layer, "--accept", "always", "--seed", "3", "--json", out)
    assert done.returncode == 0, done.stderr
    assert "... checking sum_1" in done.stderr
    assert "\x1b" not in done.stderr
    assert "against float64" in done.stdout
    (graph,) = json.loads(out.read_text())["graphs"]
    assert graph["chosen"] == "refold"


def test_a_factory_is_a_target_too(here):
    done = here("explain", "layer:factory", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "recover contraction" in done.stdout


def test_doctor_misses_the_compiler_that_triton_needs(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.path.exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("CC", "")
    assert examine()["parts"]["triton"].startswith("no: Triton needs a C compiler")
    monkeypatch.setenv("CC", "/opt/cc")
    assert examine()["parts"]["triton"] == "yes"


def test_doctor_says_what_is_usable_and_why_not():
    done = refold("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("versions", "devices", "parts", "torch", "compiler", "triton", "jax", "off with these versions"):
        assert word in done.stdout


def test_commands_import_what_they_need():
    """Without a GPU to ask about, the doctor needs no PyTorch, and neither it nor the version a command line."""
    loaded = "import sys; {}; print(sorted({{'torch', 'jax', 'rich', 'typer'}} & sys.modules.keys()))"
    doctor = "from refold import doctor; doctor._jax_elsewhere = str; doctor._cuda = lambda: None; doctor.examine()"
    version = "sys.argv = ['refold', '--version']; from refold.__main__ import main; main()"
    for command in (doctor, version):
        command = [sys.executable, "-c", loaded.format(command)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]", done.stdout


def test_doctor_lists_what_is_off_with_these_versions(monkeypatch):
    from importlib import metadata

    real = metadata.version
    given = {"torch": "2.12.1", "triton": "3.11.0"}
    monkeypatch.setattr(metadata, "version", lambda name: given.get(name) or real(name))
    found = examine()
    assert found["versions"]["triton"] == "3.11.0 (tested: triton 3.6 to 3.9)"
    assert found["versions"]["torch"] == "2.12.1"
    lines = list(found["off with these versions"].values())
    assert any("a compile of its own: torch 2.12.1 is older than 2.13" in line for line in lines)
    assert any("launched by Triton itself" in line and "triton 3.11.0 was not tested" in line for line in lines)
    given["torch"] = "2.16.0"
    assert any("not captured" in line for line in examine()["off with these versions"].values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["layer.txt"], "layer.txt is neither a Python file nor package.module:factory"),
        (["nowhere.at.all:factory"], "module nowhere.at.all cannot be imported"),
        (["layer:nothing"], "module layer has no function 'nothing'"),
        (["layer:get_inputs"], "get_inputs() must return (module, inputs)"),
        (["layer.py", "--dtype", "int8"], "--dtype must be one of float32, float16, bfloat16, float64, not 'int8'"),
        (["layer.py", "--device", "gpu"], "--device 'gpu' cannot be used here"),
        (["layer.py", "--json", "layer.py/report.json"], "--json layer.py/report.json cannot be written"),
        (["empty.py"], "does not define Model or get_inputs"),
        (["broken.py"], "importing it raised SyntaxError"),
        (["raises.py"], "Model(...) raised RuntimeError: planted"),
        (["forward.py"], "forward.py: forward raised RuntimeError: "),
        (["ends.py"], "ends.py: importing it raised SystemExit: 0"),
        (["stops:factory"], "stops:factory: importing stops raised SystemExit: 0"),
        (["folder.py"], "folder.py is a directory"),
        ([":factory"], "'' is no module"),
        (["./layer.py:Model"], "'./layer.py' is no module"),
        (["layer.py", "--seed", str(2**64)], "--seed must be between 0 and 2**64 - 1"),
        (["layer.py", "--html", "-"], "--html needs a file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(layer, arguments, sentence, here):
    for name in ("ends.py", "stops.py"):
        (layer.parent / name).write_text("raise SystemExit(0)")
    (layer.parent / "folder.py").mkdir()
    (layer.parent / "empty.py").write_text("")
    (layer.parent / "broken.py").write_text("def\n")
    (layer.parent / "raises.py").write_text(LAYER.replace("super().__init__()", "raise RuntimeError('planted')"))
    (layer.parent / "forward.py").write_text(LAYER.replace("return (x", "return torch.ones(7, 7) @ x; (x"))
    done = here("explain", *arguments)
    assert done.returncode == 2
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("refold: ")
    assert sentence in message
    assert "Traceback" not in done.stderr


def test_an_unknown_option_is_exit_code_2(layer, here):
    done = here("optimize", layer, "--accept", "perhaps")
    assert done.returncode == 2
    assert "accept must be one of 'faster', 'always', not 'perhaps'" in done.stderr


@pytest.mark.parametrize("name", ["json", "layer"])  # a package's, and that of a file before
def test_a_layer_may_have_a_name_that_is_taken(layer, tmp_path, monkeypatch, name):
    """What reads its module by name, as dataclasses do, finds its own: ``kind`` is no field."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    load(str(layer), device="cpu", dtype="float32", seed=0)
    (other := tmp_path / "other").mkdir()
    (other / f"{name}.py").write_text(
        "from __future__ import annotations\nimport dataclasses\nimport typing\nimport torch\n"
        "@dataclasses.dataclass\nclass Sizes:\n    kind: typing.ClassVar[str] = ''\n    width: int = 4\n"
        "class Model(torch.nn.Module):\n    def forward(self, x):\n        return x * Sizes(2).width\n"
        "def get_inputs():\n    return [torch.ones(1)]\n"
    )
    module, inputs = load(str(other / f"{name}.py"), device="cpu", dtype="float32", seed=0)
    assert module(*inputs).item() == 2


def test_optimize_of_a_layer_that_fails_is_one_sentence(layer, here):
    layer.write_text(LAYER.replace("return (x", "return torch.ones(7, 7) @ x; (x"))
    done = here("optimize", layer)
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert "forward raised RuntimeError: mat1 and mat2 shapes cannot be multiplied" in said
    line = next(n for n, text in enumerate(layer.read_text().splitlines(), 1) if "torch.ones(7, 7) @ x" in text)
    assert f"{layer.name}:{line}: return torch.ones(7, 7) @ x" in said
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("json", ["nowhere/report.json", "."])
def test_a_report_that_cannot_be_written_is_noticed_before_the_work(layer, here, json):
    layer.write_text("raise SystemExit('imported')")
    done = here("optimize", layer, "--json", json)
    assert done.returncode == 2
    assert f"--json {json} cannot be written" in done.stderr
    assert "imported" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that cannot be written")
@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_report_is_printed_before_files_that_may_fail(layer, here, option):
    done = here("optimize", layer, "--accept", "always", option, "/dev/full", "-q")
    assert done.returncode == 2
    assert done.stderr == f"refold: {option} /dev/full cannot be written: No space left on device\n"
    assert "recover contraction" in done.stdout


def test_a_target_imports_what_lies_beside_it(layer, here):
    (layer.parent / "width.py").write_text("WIDTH = 8")
    layer.write_text(LAYER.replace("import torch", "import torch\nfrom width import WIDTH", 1))
    done = here("explain", layer)
    assert done.returncode == 0, done.stderr


def test_version_and_module():
    done = subprocess.run([sys.executable, "-m", "refold", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout == f"refold {__version__}\n"
    assert "Usage" in refold().stdout + refold().stderr


WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
import importlib.util
import importlib.machinery
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "torch" else find(name, *rest)
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "sys.argv = ['refold', 'optimize', 'x.py']; from refold.cli import main; main()",
            "pip install 'refold[torch]'",
        ),
        (
            "sys.argv = ['refold', 'explain', 'x.py']; from refold.cli import main; main()",
            "pip install 'refold[torch]'",
        ),
        ("sys.argv = ['refold', 'doctor']; from refold.cli import main; main()", "pip install 'refold[torch]'"),
        ("from refold import *; print(ops, errors)", "refold.ops"),
        ("import refold\ntry: refold.compile\nexcept refold.errors.MissingDependency as e: print(e)", "refold[torch]"),
    ],
)
def test_without_torch(code, says):
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, check=False)
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_optimize_writes_a_page_and_a_trace(layer, here, tmp_path):
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    done = here("optimize", layer, "--accept", "always", "--html", page, "--trace", trace, "--json", "-", "-q")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (graph,) = json.loads(done.stdout)["graphs"]
    assert graph["chosen"] == "refold"
    text = page.read_text()
    for fact in ("layer.py", "recover contraction", "return (x[:, None, :] * self.w[None]).sum(-1)"):
        assert fact in text
    names = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"}
    assert {"recover contraction [sum_1]: before", "recover contraction [sum_1]: after"} <= names


def test_progress_can_have_times(layer, here):
    done = here("explain", layer, "-v")
    assert re.match(r" +\d+\.\d\d s  loading", done.stderr)
    assert here("explain", layer, "-v", "-q").returncode == 2


def test_a_wrong_program_is_refused_in_words_and_in_lines_of_json(here, layer):
    wrong = LAYER.replace("class Model(", "class ModelNew(").replace(".sum(-1)", ".sum(-1) * 2")
    (layer.parent / "wrong.py").write_text(wrong)
    text, lines = (here("verify", layer, "wrong.py", "--level", "quick", *log) for log in ((), ("--log", "-")))
    assert text.returncode == lines.returncode == 1
    assert "rounding plays no part here" in text.stdout  # an error of one is no matter of precision
    *_, last = map(json.loads, lines.stdout.splitlines())
    assert (last["outcome"], last["check"]) == ("refused", "N1")
