"""The JAX model of the published portable SSD, with the weights of a generator of ours.

It comes from a checkout of github.com/CosmoNaught/mamba2-jax, and needs flax and optax. Decoding is one compiled loop
on the device, with its own cache, as its authors describe.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..models.checkpoint import layout
from ..models.configs import Mamba2Config


class Published:
    """Its language model of given sizes.

    Args:
        checkout: The folder of its code.
        config: The sizes.
        params: Weights, as `refold.models.jax` takes them.
    """

    def __init__(self, checkout: str, config: Mamba2Config, params: Any) -> None:
        if checkout not in sys.path:
            sys.path.insert(0, checkout)
        package, params_of = import_module("mamba2_jax"), import_module("mamba2_jax.params")
        nnx, mixer = import_module("flax.nnx"), config.mixer
        sizes = package.Mamba2Config(
            vocab_size=config.vocab_size, hidden_size=mixer.d_model, state_size=mixer.dstate, head_dim=mixer.headdim,
            num_hidden_layers=config.nlayers,
        )  # fmt: skip
        empty = nnx.eval_shape(lambda: package.Mamba2ForCausalLM(sizes, rngs=nnx.Rngs(0)))
        dtype = params["embedding"].dtype
        graph, shapes = nnx.split(empty)
        model = nnx.merge(graph, jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), shapes))
        self._graph, self._merge = graph, nnx.merge
        named = {}
        for entry in layout(config):
            value = params
            for part in entry.path:
                value = value[part]
            value = value if entry.index is None else value[entry.index]
            named[entry.key.replace("embeddings", "embedding")] = value.reshape(entry.shape)
        _, _, skipped = params_of.load_pytorch_weights(model, named, dtype=dtype, strict=True)
        assert not skipped
        self._weights = nnx.split(model)[1]

    @partial(jax.jit, static_argnums=0)
    def _read(self, weights: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
        out = self._merge(self._graph, weights)(ids)
        return out["logits"][:, -1], out["cache"]

    @partial(jax.jit, static_argnums=(0, 4))
    def _loop(self, weights: Any, logits: jax.Array, cache: Any, steps: int) -> tuple[jax.Array, jax.Array]:
        model = self._merge(self._graph, weights)

        def step(carry: Any, _: None) -> Any:
            logits, cache = carry
            token = logits.argmax(-1).astype(jnp.int32)
            out = model(token[:, None], cache=cache)
            new = jax.tree.map(lambda new, old: new.astype(old.dtype), out["cache"], cache)
            return (out["logits"][:, -1].astype(logits.dtype), new), token

        (logits, _), tokens = jax.lax.scan(step, (logits, cache), length=steps)
        return tokens.T, logits

    def read(self, ids: Any) -> tuple[jax.Array, Any]:
        """Read prompts of one length; return the logits after them, and the cache."""
        return self._read(self._weights, jnp.asarray(np.asarray(ids), jnp.int32))  # type: ignore[no-any-return]

    def decoder(self, prompts: Any, steps: int) -> Callable[[], np.ndarray]:
        """Return a call that decodes greedily after prompts of one length, and gives the tokens."""
        logits, cache = self.read(prompts)
        loop = Published._loop.lower(self, self._weights, logits, cache, steps).as_text()
        assert "stablehlo.while" in loop, "its tokens are not decoded by one loop on the device"
        return lambda: np.asarray(self._loop(self._weights, logits, cache, steps)[0])
