"""JAX without torch, torch without JAX: each in a process where the other cannot be imported."""

import json
import subprocess
import sys

import pytest

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("blocked: " + name, name=name.split(".")[0])
sys.meta_path.insert(0, Block())
"""


def run(blocked: set[str], code: str) -> subprocess.CompletedProcess:
    script = BLOCK.format(blocked=blocked) + code
    return subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)


def test_jax_path_needs_no_torch(tmp_path) -> None:
    done = run(
        {"torch", "triton", "transformers", "huggingface_hub"},
        """
from refold.generate.jax import Generator
from refold.models.checkpoint import random_params
from refold.models.configs import Mamba2Config, Mixer2Config
mixer = Mixer2Config(d_model=16, nheads=2, headdim=16, ngroups=1, dstate=4)
config = Mamba2Config(vocab_size=32, nlayers=1, mixer=mixer)
assert len(Generator(config, random_params(config)).generate([[1, 2]], 3)[0]) == 3
import jax.numpy as jnp, refold.ops
y, state = refold.ops.linear_scan(jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2)))
assert state.tolist() == [[3.0, 3.0]]
print("done")
""",
    )
    assert done.stdout.strip() == "done", done.stderr


def test_torch_path_needs_no_jax() -> None:
    done = run(
        {"jax", "jaxlib"},
        """
import torch, refold.ops
y, state = refold.ops.ssd(torch.ones(1, 3, 1, 2), torch.ones(1, 3, 1), -torch.ones(1), *[torch.ones(1, 3, 1, 4)] * 2)
import refold.models.checkpoint, refold.generate.cli
from refold.generate.torch import Generator
from refold.models.checkpoint import random_params
from refold.models.configs import Mamba2Config, Mixer2Config
mixer = Mixer2Config(d_model=16, nheads=2, headdim=16, ngroups=1, dstate=4)
config = Mamba2Config(vocab_size=32, nlayers=1, mixer=mixer)
assert len(Generator(config, random_params(config)).generate([[1, 2]], 3)[0]) == 3
print("done")
""",
    )
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize(("blocked", "says"), [("torch", "refold[torch]"), ("safetensors", "refold[hf]")])
def test_missing_reader_says_what_to_install(blocked: str, says: str, tmp_path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "vocab_size": 8, "hidden_size": 4,
                                                      "num_hidden_layers": 1, "state_size": 2}))  # fmt: skip
    if blocked == "torch":
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
    else:
        save_file({}, tmp_path / "model.safetensors")
    done = run(
        {blocked},
        f"""
from refold.errors import MissingDependency
from refold.models.checkpoint import load_checkpoint
try:
    load_checkpoint({str(tmp_path)!r})
except MissingDependency as error:
    print(error)
""",
    )
    assert says in done.stdout, done.stderr


def test_generate_without_jax_says_what_to_install(tmp_path) -> None:
    done = run(
        {"jax"},
        """
from refold.errors import MissingDependency
from refold.generate.cli import generate_text
try:
    list(generate_text("somewhere", token_ids="1", framework="jax"))
except MissingDependency as error:
    print(error)
""",
    )
    assert "refold[jax]" in done.stdout, done.stderr
