"""Read tokens whose time is cut over the devices of a mesh axis: a prompt, or all of a batch to train on."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from refold.errors import ArgumentError
from refold.models.configs import Config
from refold.models.jax import model_for
from refold.models.jax.sharding import automatic

Tree = Any


def read_sharded(config: Config, params: Tree, tokens: jax.Array, mesh: Mesh, axis: str = "time") -> Any:
    """Read a prompt whose time is cut over the devices of ``axis``.

    Args:
        config: The model.
        params: Its parameters, on every device.
        tokens: ``(b, t)``; t divides among the devices, each part no shorter than the convolution.
        mesh: Devices.
        axis: Mesh axis to cut time over.

    Returns:
        Logits ``(b, vocab)`` after the last token, and the state, both on every device.

    Raises:
        ArgumentError: the tokens do not divide.
    """
    _check(config, tokens, mesh, axis)
    forward = partial(model_for(config).forward, config, time_axis=axis)
    # Every device ends with the same logits and state, by gathers that the replication checker cannot see through.
    run = jax.shard_map(
        lambda p, t: forward(p, t),
        mesh=automatic(mesh),
        in_specs=(PartitionSpec(), PartitionSpec(None, axis)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(run)(params, jnp.asarray(tokens))


def logits_sharded(
    config: Config, params: Tree, tokens: jax.Array, mesh: Mesh, axis: str = "time", rows: str | None = None
) -> jax.Array:
    """Compute the logits of all tokens, to train: gradients flow to ``params`` and are those of one device.

    Args:
        config: The model.
        params: Its parameters, on every device.
        tokens: ``(b, t)``; t divides among the devices of ``axis``, each part no shorter than the convolution.
        mesh: Devices. Inside of ``jax.set_mesh``, the one that is set.
        axis: Mesh axis to cut time over.
        rows: Mesh axis to cut rows over, if there is one.

    Returns:
        ``(b, t, vocab)``, spread over devices as the tokens are.

    Raises:
        ArgumentError: the tokens do not divide.
    """
    _check(config, tokens, mesh, axis)
    forward, cut = model_for(config).forward, PartitionSpec(rows, axis)
    run = jax.shard_map(
        lambda p, t: forward(config, p, t, kind="all", time_axis=axis)[0],
        mesh=mesh,
        in_specs=(PartitionSpec(), cut),
        out_specs=cut,
        check_vma=False,
    )
    return jax.jit(run)(params, jnp.asarray(tokens))


def _check(config: Config, tokens: jax.Array, mesh: Mesh, axis: str) -> None:
    size = mesh.shape[axis]
    width = config.mixer.conv_width
    if tokens.shape[1] % size or tokens.shape[1] // size < width - 1:
        raise ArgumentError(
            f"{tokens.shape[1]} tokens do not divide into {size} equal parts of at least {width - 1} tokens."
        )
