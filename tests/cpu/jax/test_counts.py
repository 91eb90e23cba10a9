"""The compiled decoding step does the work that the equations need, and moves the bytes, no more than a fifth over."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from models import GRANITE, MAMBA, MAMBA2

from refold.models import counts
from refold.models.checkpoint import random_params
from refold.models.configs import Mixer2Config
from refold.models.jax import model_for, to_device

# Wide enough that matrix products, not elementwise work, are most of it, as in real models.
WIDE = Mixer2Config(d_model=256, nheads=8, headdim=64, ngroups=1, dstate=64)
MODELS = {
    "mamba": dataclasses.replace(MAMBA, vocab_size=2048, d_model=256, d_inner=512, dstate=16, dt_rank=16),
    "mamba2": dataclasses.replace(MAMBA2, vocab_size=2048, mixer=WIDE),
    "granite": dataclasses.replace(
        GRANITE,
        vocab_size=2048,
        mixer=WIDE,
        nheads=8,
        nkvheads=2,
        headdim=32,
        shared_dim=512,
        kinds=("mamba", "attention"),
    ),
}


def compiled_step(name: str, batch: int, monkeypatch):
    """Compile a step with its loops over layers unrolled: XLA counts the body of a loop once."""
    config = MODELS[name]
    params = to_device(random_params(config))
    model = model_for(config)
    room = {"capacity": 32} if name == "granite" else {}
    state = model.init_state(config, batch, **room)
    monkeypatch.setattr(jax.lax, "scan", partial(jax.lax.scan, unroll=True))
    step = jax.jit(lambda p, t, s: model.step(config, p, t, s), donate_argnums=2)
    return config, step.lower(params, jnp.zeros(batch, jnp.int32), state).compile().cost_analysis()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 4])
def test_flops_of_a_step(name: str, batch: int, monkeypatch) -> None:
    config, cost = compiled_step(name, batch, monkeypatch)
    need = counts.decode(config, batch, 4, past=32 if name == "granite" else 0)
    assert need.flops <= cost["flops"] * 1.2
    assert cost["flops"] <= 1.2 * need.flops


@pytest.mark.parametrize(("name", "kinds"), [("mamba", None), ("mamba2", None), ("granite", ("mamba",))])
def test_bytes_of_a_step(name: str, kinds: tuple[str, ...] | None, monkeypatch) -> None:
    """One layer, one row: with more layers XLA on CPU copies each layer out of its stack, which GPUs fuse away."""
    one = {"nlayers": 1} if kinds is None else {"kinds": kinds}
    monkeypatch.setitem(MODELS, name, dataclasses.replace(MODELS[name], **one))
    config, cost = compiled_step(name, 1, monkeypatch)
    need = counts.decode(config, 1, 4)
    assert need.bytes <= cost["bytes accessed"] * 1.2
    assert cost["bytes accessed"] <= 1.2 * need.bytes


def test_parameter_count_of_published_size() -> None:
    config = dataclasses.replace(
        MAMBA2,
        vocab_size=50288,
        nlayers=24,
        mixer=Mixer2Config(d_model=768, nheads=24, headdim=64, ngroups=1, dstate=128),
    )
    assert counts.parameters(config) == 128_989_632


@pytest.mark.parametrize("name", MODELS)
def test_compiled_size_does_not_grow_with_depth(name: str) -> None:
    config = MODELS[name]

    def size(depth: int) -> int:
        grown = dataclasses.replace(
            config, **({"kinds": config.kinds * depth} if name == "granite" else {"nlayers": depth})
        )
        model = model_for(grown)
        params = jax.eval_shape(lambda: to_device(random_params(grown)))
        tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
        return len(jax.jit(lambda p, t: model.forward(grown, p, t)).lower(params, tokens).as_text().splitlines())

    assert size(6) == size(3)
