"""Every way to spread a model over eight devices (virtual ones: see tests/cpu/conftest.py) equals one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from refold.generate.jax import Generator
from refold.models.checkpoint import random_params
from refold.models.configs import GraniteHybridConfig, Mamba2Config, MambaConfig, Mixer2Config
from refold.models.jax import model_for, to_device
from refold.models.jax.granite_hybrid import grow_state
from refold.models.jax.sharding.heads import shard_heads, shard_state
from refold.models.jax.sharding.prompt import read_sharded

MIXER = Mixer2Config(d_model=32, nheads=8, headdim=8, ngroups=2, dstate=8, proj_bias=True)
CONFIGS = {
    "mamba": MambaConfig(vocab_size=64, d_model=32, nlayers=2, d_inner=64, dstate=4, dt_rank=2),
    "mamba2": Mamba2Config(vocab_size=64, nlayers=2, mixer=MIXER),
    "granite": GraniteHybridConfig(
        vocab_size=64, kinds=("mamba", "attention"), mixer=MIXER, nheads=8, nkvheads=8, headdim=4, attention_bias=False,
        rope_theta=1e4, shared_dim=32, expert_dim=16, nexperts=4, experts_per_token=2, embedding_multiplier=1.0,
        residual_multiplier=1.0, attention_multiplier=0.5, logits_divisor=1.0, max_positions=256, norm_eps=1e-6,
        tied=True,
    ),
}  # fmt: skip
CONFIGS["bamba"] = dataclasses.replace(CONFIGS["granite"], layout="bamba", nexperts=0, rope_dim=2, mlp_bias=True)


@pytest.fixture(autouse=True)
def _eight_devices() -> None:
    assert len(jax.devices()) == 8


def close(a, b) -> None:
    """Differences come from the order of sums alone: a few dozen roundings of float32."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    bound = 256 * np.finfo(np.float32).eps * np.abs(b).max()
    assert np.abs(a - b).max() <= bound, (np.abs(a - b).max(), bound)


# Arrays of `jax.make_mesh` have Explicit axes by default; those of `Mesh` are Auto.
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@KINDS
@pytest.mark.parametrize("name", CONFIGS)
def test_heads_over_devices(name: str, kind: AxisType) -> None:
    config = CONFIGS[name]
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(kind,))
    params = to_device(random_params(config))
    model = model_for(config)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 24)))
    step = jax.jit(lambda p, t, s: model.step(config, p, t, s))
    forward = jax.jit(lambda p, t: model.forward(config, p, t))
    logits, state = forward(params, tokens)
    spread = shard_heads(config, params, mesh)
    logits8, state8 = forward(spread, tokens)
    close(logits8, logits)
    state8 = shard_state(state8, mesh)
    assert len(state8["ssm"].sharding.device_set) == 8
    assert not state8["ssm"].sharding.is_fully_replicated
    if "k" in state:
        state, state8 = grow_state(state, 32), grow_state(state8, 32)
    logits, state = step(params, tokens[:, 0], state)
    logits8, state8 = step(spread, tokens[:, 0], state8)
    close(logits8, logits)
    close(state8["ssm"], state["ssm"])
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    assert Generator(config, spread).generate(prompts, 8) == Generator(config, params).generate(prompts, 8)


@KINDS
@pytest.mark.parametrize("name", CONFIGS)
def test_time_over_devices(name: str, kind: AxisType) -> None:
    config = CONFIGS[name]
    mesh = jax.make_mesh((8,), ("time",), axis_types=(kind,))
    params = to_device(random_params(config))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 64)))
    logits, state = jax.jit(lambda p, t: model_for(config).forward(config, p, t))(params, tokens)
    logits8, state8 = read_sharded(config, params, tokens, mesh)
    close(logits8, logits)
    for name in state:
        close(state8[name], state[name])
