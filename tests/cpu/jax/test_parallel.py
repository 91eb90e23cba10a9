"""Every way to spread a model over eight devices (virtual ones: see tests/cpu/conftest.py) equals one device."""

import dataclasses
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from refold.errors import ArgumentError
from refold.generate.jax import Generator
from refold.models.checkpoint import random_params
from refold.models.configs import DeltaConfig, HybridConfig, Mamba2Config, MambaConfig, Mixer2Config
from refold.models.jax import model_for, to_device
from refold.models.jax.hybrid import grow_state
from refold.models.jax.sharding.heads import shard_heads, shard_state
from refold.models.jax.sharding.prompt import logits_sharded, read_sharded
from support.products import few

MIXER = Mixer2Config(d_model=32, nheads=8, headdim=8, ngroups=2, dstate=8, proj_bias=True)
CONFIGS = {
    "mamba": MambaConfig(vocab_size=64, d_model=32, nlayers=2, d_inner=64, dstate=4, dt_rank=2),
    "mamba2": Mamba2Config(vocab_size=64, nlayers=2, mixer=MIXER),
    "granite": HybridConfig(
        vocab_size=64, kinds=("mixer", "attention"), mixer=MIXER, nheads=8, nkvheads=8, headdim=4, attention_bias=False,
        rope_theta=1e4, shared_dim=32, expert_dim=16, nexperts=4, experts_per_token=2, embedding_multiplier=1.0,
        residual_multiplier=1.0, attention_multiplier=0.5, logits_divisor=1.0, max_positions=256, norm_eps=1e-6,
        tied=True,
    ),
}  # fmt: skip
CONFIGS["bamba"] = dataclasses.replace(CONFIGS["granite"], layout="bamba", nexperts=0, rope_dim=2, mlp_bias=True)

CONFIGS["qwen"] = dataclasses.replace(
    CONFIGS["bamba"], layout="qwen3_5", mlp_bias=False, gated=True,
    mixer=DeltaConfig(d_model=32, nheads=8, headdim=6, ngroups=2, dstate=8, conv_bias=False),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _eight_devices() -> None:
    assert len(jax.devices()) == 8


def close(a, b) -> None:
    """Differences come from the order of sums alone: a few dozen roundings of float32."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    bound = 256 * np.finfo(np.float32).eps * np.abs(b).max()
    assert np.abs(a - b).max() <= bound, (np.abs(a - b).max(), bound)


# Arrays of `jax.make_mesh` have Explicit axes by default; those of `Mesh` are Auto.
KINDS = [AxisType.Auto, AxisType.Explicit]
TURNS = few(("name", "kind"), list(product(CONFIGS, KINDS)), list(zip(CONFIGS, KINDS, strict=False)))


def both_kinds(*rows):
    """Parametrize with all models and kinds of axes; those that are not given take long, and are exhaustive."""
    return few(("name", "kind"), list(product(CONFIGS, KINDS)), rows)


@pytest.mark.slow
@both_kinds(("mamba2", AxisType.Explicit))
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


@TURNS
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


def loss_of(logits, tokens):
    """Return the mean over tokens of how badly each was foreseen."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32)[:, :-1])
    return -(scores * jax.nn.one_hot(tokens[:, 1:], scores.shape[-1])).sum(-1).mean()


@pytest.mark.slow
@both_kinds(("mamba", AxisType.Auto))
def test_training_over_time(name: str, kind: AxisType) -> None:
    """Loss and all gradients, of arrays that are placed on the mesh that is set: time alone, or rows, too."""
    config, forward = CONFIGS[name], model_for(CONFIGS[name]).forward
    params = to_device(random_params(config))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (2, 64)))
    one = jax.jit(jax.value_and_grad(lambda p, t: loss_of(forward(config, p, t, kind="all")[0], t)))
    loss, wanted = one(params, tokens)
    axes = {"time": 8} if kind is AxisType.Auto else {"rows": 2, "time": 4}
    mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=(kind,) * len(axes))
    rows = "rows" if "rows" in axes else None
    everywhere = NamedSharding(mesh, PartitionSpec())
    spread = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(rows, "time")))

    def loss_over(p, t):
        logits = logits_sharded(config, p, t, mesh, rows=rows)
        assert "time" in str(jax.typeof(logits).sharding.spec) or kind is AxisType.Auto
        return loss_of(jax.sharding.reshard(logits, everywhere), jax.sharding.reshard(t, everywhere))

    with jax.set_mesh(mesh):
        loss8, found = jax.jit(jax.value_and_grad(loss_over))(jax.device_put(params, everywhere), spread)
    close(loss8, loss)
    least = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(wanted))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error, scale = float(jnp.abs(a - b).max()), max(float(jnp.abs(b).max()), 1e-2 * least)
        assert error <= 2048 * np.finfo(np.float32).eps * scale, (error, scale)
    with pytest.raises(ArgumentError, match="60 tokens do not divide into 8 equal parts of at least 3"):
        logits_sharded(config, params, tokens[:, :60], jax.make_mesh((8,), ("time",)))
