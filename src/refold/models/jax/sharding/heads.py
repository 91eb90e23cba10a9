"""Heads sharded over devices (tensor parallel).

The code is the same as for one device: parameters and state are placed with shardings, and XLA inserts the one sum per
layer. The input projection is split, so that every device holds whole heads.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from refold.errors import ArgumentError
from refold.models.configs import Config, HybridConfig, MambaConfig
from refold.models.jax.sharding import automatic

Tree = Any

# Name of a parameter -> its axis, without the layer axis, that is cut. What is not named is on every device.
_CUT = {
    "embedding": 0, "head": 0,
    "z": 0, "x": 0, "dt": 0, "b": 0, "a": 0, "out_proj": 1, "gated_norm": 0, "A_log": 0, "D": 0, "dt_bias": 0,
    "x_proj": 1, "dt_proj": 0,
    "q": 0, "k": 0, "v": 0, "o": 1, "q_bias": 0, "k_bias": 0, "v_bias": 0, "mlp_in": 0, "mlp_gate": 0,
    "mlp_up": 0, "mlp_gate_bias": 0, "mlp_up_bias": 0, "mlp_out": 1,
}  # fmt: skip
_CUT_STATE = {"ssm": 2, "k": 3, "v": 3}


def shard_heads(config: Config, params: Tree, mesh: Mesh, axis: str = "heads") -> Tree:
    """Place parameters so that each device of ``axis`` computes its share of the heads.

    Returns:
        Parameters for the model's functions and for ``Generator``; their ``in_proj`` is split.

    Raises:
        ArgumentError: the heads do not divide among the devices.
    """
    size = mesh.shape[axis]
    heads = config.d_inner if isinstance(config, MambaConfig) else config.mixer.nheads
    if heads % size:
        raise ArgumentError(f"{heads} heads (channels) do not divide among the {size} devices of mesh axis {axis!r}.")
    params = {**params}
    kind = "mixer" if isinstance(config, HybridConfig) else "layers"
    params[kind] = take_apart(config, params[kind])

    mesh = automatic(mesh)

    def place(path: Any, a: Any) -> jax.Array:
        cut = _CUT.get(path[-1].key)
        cut = None if cut is None else cut + (len(path) > 1)
        return jax.device_put(a, NamedSharding(mesh, _spec(a.shape, cut, size, axis)))

    return jax.tree_util.tree_map_with_path(place, params)


def shard_state(state: Tree, mesh: Mesh, axis: str = "heads") -> Tree:
    """Place a model's state to match :func:`shard_heads`."""
    size, mesh = mesh.shape[axis], automatic(mesh)
    return {
        name: jax.device_put(a, NamedSharding(mesh, _spec(a.shape, _CUT_STATE.get(name), size, axis)))
        for name, a in state.items()
    }


def _spec(shape: tuple[int, ...], cut: int | None, size: int, axis: str) -> PartitionSpec:
    if cut is None or cut >= len(shape) or shape[cut] % size:
        return PartitionSpec()
    return PartitionSpec(*[axis if i == cut else None for i in range(len(shape))])


def take_apart(config: Config, layers: Tree) -> Tree:
    """Replace a stack's fused ``in_proj`` (and bias) by ``in_parts`` (``in_bias_parts``), one matrix per result."""
    both = {"x": config.d_inner, "z": config.d_inner} if isinstance(config, MambaConfig) else None
    sizes = both or config.mixer.parts  # type: ignore[union-attr]
    taken = {name: a for name, a in layers.items() if name not in ("in_proj", "in_bias")}
    for fused, parts in (("in_proj", "in_parts"), ("in_bias", "in_bias_parts")):
        if fused in layers:
            taken[parts], begin = {}, 0
            for name, size in sizes.items():
                taken[parts][name] = layers[fused][:, begin : begin + size]
                begin += size
    return taken
