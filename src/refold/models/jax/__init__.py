"""Language models as pure JAX functions of a configuration, a parameter pytree and a state pytree.

Every model has the same three functions: ``init_state(config, batch)``, ``forward(config, params, tokens, state)``
for any number of tokens, and ``step(config, params, token, state)``, which is one step of the recurrence.

Layers come stacked, on axis 0 of each array, and are scanned over, so that compile time does not grow with depth.
``step`` also takes separate layers (:func:`take_layers_apart`), in parameters and state. It then moves a third of the
bytes, but compile time grows with depth.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from refold.models.configs import Config, HybridConfig
from refold.models.jax.layers import stack_layers, take_layers_apart

__all__ = ["model_for", "stack_layers", "take_layers_apart", "to_device"]


def model_for(config: Config) -> ModuleType:
    """Return the module that computes a configuration's model."""
    from refold.models.jax import hybrid, stack

    return hybrid if isinstance(config, HybridConfig) else stack


def to_device(params: Any) -> Any:
    """Put NumPy parameters on the default device, array by array."""
    return jax.tree.map(jnp.asarray, params)
