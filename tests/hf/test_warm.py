"""`refold doctor --warm`: what a model needs is compiled once, and a second process compiles nothing."""

import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from refold.cli import app
from refold.errors import ArgumentError
from support.families import make

SIZES = "mamba2:hidden_size=48,num_heads=6,head_dim=16,state_size=12,n_groups=3,num_hidden_layers=4,vocab_size=97"
USER = """
import torch, refold
from transformers import AutoConfig, AutoModelForCausalLM
from refold.warm import _config
model = AutoModelForCausalLM.from_config(_config({sizes!r})).eval()
refold.accelerate(model)
ids = torch.randint(97, ({rows}, 33))
model(ids, labels=ids, use_cache=False).loss.backward()
model.generate(ids, max_new_tokens=3, pad_token_id=0)
"""


def files(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*.nb?")}


@pytest.mark.exhaustive
def test_a_second_process_compiles_nothing(tmp_path):
    pytest.importorskip("numba")
    environment = os.environ | {"REFOLD_CACHE": str(tmp_path), "PYTHONWARNINGS": "ignore"}

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)

    done = run("-m", "refold", "doctor", "--warm", SIZES)
    assert "mamba2, 4 rows, torch.float32 on cpu: training, prompts, generation" in done.stdout
    assert "the lean model" in done.stdout
    kept = files(tmp_path)
    assert kept
    run("-c", USER.format(sizes=SIZES, rows=3))
    assert files(tmp_path) == kept


@pytest.mark.exhaustive
def test_without_warming_a_process_compiles(tmp_path):
    """The test above can fail."""
    pytest.importorskip("numba")
    environment = os.environ | {"REFOLD_CACHE": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", USER.format(sizes=SIZES, rows=1)], env=environment, check=True)
    assert files(tmp_path)


@pytest.mark.parametrize("name", ["mamba", "jamba", "zamba2", "falcon_h1", "granitemoehybrid"])
def test_families(name, tmp_path, monkeypatch):
    from refold import warm

    monkeypatch.setattr(warm, "PROMPTS", (9,))
    make(name).config.save_pretrained(tmp_path)
    lines = list(warm.warm(str(tmp_path), "cpu"))
    assert len(lines) == 2 + (name in ("mamba", "granitemoehybrid"))


def test_what_is_no_model():
    for what in ("nothing:size=3", "/nowhere/at/all"):
        done = CliRunner().invoke(app, ["doctor", "--warm", what])
        assert done.exit_code
        assert "Give a folder with config.json" in str(done.exception or done.output)


def test_without_a_network_an_unknown_name_is_refused_at_once(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    done = CliRunner().invoke(app, ["doctor", "--warm", "nobody/nothing"])
    assert time.monotonic() - began < 20  # the hub's own attempts take 40 seconds and more
    assert isinstance(done.exception, ArgumentError)
    assert "not on this machine, and http://127.0.0.1:9 does not answer" in str(done.exception)
    assert "Give a folder with config.json" in str(done.exception)
