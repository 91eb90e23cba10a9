"""The local repository for the package ``kernels``; each test that replaces functions runs in its own process."""

import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.utils import is_kernels_available

from refold.errors import ArgumentError
from refold.integrations.kernels import FUNCTIONS, kernel_mapping, layers
from support.families import EVERY, make

REASON = "the package kernels is not installed" if find_spec("kernels") is None else "transformers wants other kernels"

PROGRAM = """
import sys; sys.path[:0] = {path!r}
import warnings; warnings.simplefilter("ignore")
import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from transformers import KernelConfig
from support.families import make
from refold.integrations.kernels import kernel_mapping
from pathlib import Path

model, ids = make({name!r}), torch.randint(0, 97, (2, 19))
mapping = kernel_mapping(model.config.model_type)
KernelConfig(dict(mapping), use_local_kernel=True).sanitize_kernel_mapping(model)

def run():
    with torch.no_grad():
        mask = torch.ones_like(ids)
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    logits = model(ids, use_cache=False).logits
    rates = [p for n, p in model.named_parameters() if "A_log" in n]
    return tokens, logits, torch.autograd.grad(logits.square().mean(), rates)

tokens, logits, gradients = run()
import refold.ops as ops
calls = []
for name in ("ssd", "selective_scan", "delta_rule"):
    setattr(ops, name, lambda *a, f=getattr(ops, name), **k: (calls.append(1), f(*a, **k))[1])
repositories = {{}}
for n, place in mapping.items():
    folder, _, layer = place.rpartition(":")
    repositories[n] = {{"cpu": {{Mode.INFERENCE: LocalLayerRepository(Path(folder), layer_name=layer)}}}}
with use_kernel_mapping(repositories, inherit_mapping=False):
    kernelize(model, mode=Mode.INFERENCE, device="cpu")
found = run()
assert calls, "transformers' functions still run"
assert torch.equal(found[0], tokens)
torch.testing.assert_close(found[1], logits, rtol=1e-4, atol=1e-5)
for a, b in zip(found[2], gradients):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
"""


@pytest.mark.skipif(not is_kernels_available(), reason=REASON)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name in EVERY])
def test_models_run_on_it(name):
    here = Path(__file__)
    program = PROGRAM.format(path=[str(here.parents[1]), str(here.parents[2] / "src")], name=name)
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("name", [name for name in EVERY if "-" not in name])
def test_what_a_modeling_file_lets_be_replaced_is_in_the_mapping(name):
    """Every decorated function that has a layer here, with the layer's own parameters."""
    module = inspect.getmodule(make(name).forward)
    named = set(re.findall(r'with_fallback\(\s*"(\w+)"', inspect.getsource(module)))
    assert named & set(layers.__all__) == set(FUNCTIONS.get(name, ()))


def test_the_mapping():
    mapping = kernel_mapping("bamba")
    assert set(mapping) == {
        "causal_conv1d_fn", "causal_conv1d_update", "selective_state_update", "mamba_chunk_scan_combined"
    }  # fmt: skip
    folder = Path(mapping["causal_conv1d_fn"].rpartition(":")[0])
    assert (folder / "build" / "torch-universal" / "metadata.json").is_file()
    with pytest.raises(ArgumentError, match=r"model_type must be one of mamba, .*; got 'llama'"):
        kernel_mapping("llama")
