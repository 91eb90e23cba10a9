"""Operations and bytes that a model needs, counted from its configuration, for comparison with measurements.

A multiply and an add are two operations. Bytes are the fewest that must move: every weight read once, every state read
and written once. Elementwise work is left out of the operations; it is bound by bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refold.errors import ArgumentError
from refold.models.checkpoint import layout
from refold.models.configs import Config, DeltaConfig, HybridConfig, MambaConfig


@dataclass(frozen=True)
class Counts:
    """Operations and bytes of one call."""

    flops: float
    bytes: float


def parameters(config: Config) -> int:
    """Count the parameters, a tied head once."""
    return sum(math.prod(entry.shape) for entry in layout(config))


def active_parameters(config: Config) -> int:
    """Count the parameters that one token's step multiplies with: those of the chosen experts only."""
    total = parameters(config)
    if isinstance(config, HybridConfig) and config.nexperts:
        idle = config.nexperts - config.experts_per_token
        total -= config.nlayers * idle * 3 * config.expert_dim * config.d_model
    return total


def _matrices(config: Config) -> int:
    """Count the weights of the layers' matrix products for one token."""
    skipped = ("embedding", "head", "norm", "expert_in", "expert_out")
    count = sum(
        math.prod(entry.shape)
        for entry in layout(config)
        if len(entry.stored) > 1 and entry.path[-1] not in (*skipped, "A_log", "conv_weight")
    )
    if isinstance(config, HybridConfig) and config.nexperts:
        count += config.nlayers * config.experts_per_token * 3 * config.expert_dim * config.d_model
    return count


def _mixer_layers(config: Config) -> int:
    return config.kinds.count("mixer") if isinstance(config, HybridConfig) else config.nlayers


def state_shapes(config: Config, batch: int, capacity: int = 0) -> dict[str, tuple[tuple[int, ...], str]]:
    """Give the shape of each array of a model's state, and whether it has the dtype of weights, of states, or int32.

    ``length (b,)`` counts the tokens read. ``conv (l, b, channels, w-1)`` holds the last inputs of the convolutions,
    ``ssm (l, b, ...)`` the recurrent states: their sizes do not depend on how many tokens will be read. ``k`` and ``v
    (a, b, capacity, kv heads, head dim)`` hold what attention has read.
    """
    mixer, layers = config.mixer, _mixer_layers(config)
    found: dict[str, tuple[tuple[int, ...], str]] = {
        "length": ((batch,), "int32"),
        "conv": ((layers, batch, mixer.conv_dim, mixer.conv_width - 1), "weights"),
        "ssm": ((layers, batch, *mixer.state), "states"),
    }
    if isinstance(config, HybridConfig):
        cache = (config.kinds.count("attention"), batch, capacity, config.nkvheads, config.headdim)
        found |= {"k": (cache, "weights"), "v": (cache, "weights")}
    return found


def check_state(config: Config, batch: int, state: Mapping[str, Any]) -> None:
    """Refuse what is no state of ``batch`` rows of this model, in stacks or as tuples of layers.

    Its key-value cache may have room for any number of tokens.

    Raises:
        ArgumentError: An array is missing, is not known, or has another shape.
    """
    given = {name: _shape(a) for name, a in state.items()}
    expected = state_shapes(config, batch, given["k"][2] if len(given.get("k", ())) == 5 else 0)
    for name in (*expected, *given):
        wanted, got = expected.get(name, (None,))[0], given.get(name)
        if wanted != got:
            raise ArgumentError(
                f"state[{name!r}] must have the shape {wanted} where this model reads {batch} rows; got {got}. Pass "
                "what its init_state, forward or step returned."
            )


def _shape(stack: Any) -> tuple[int, ...]:
    if not isinstance(stack, tuple):
        return tuple(stack.shape)
    shapes = {tuple(layer.shape) for layer in stack}
    return (len(stack), *(shapes.pop() if len(shapes) == 1 else ()))


def state_elements(config: Config) -> tuple[int, int]:
    """Count one sequence's recurrent state and convolution window."""
    shapes = state_shapes(config, 1)
    return math.prod(shapes["ssm"][0]), math.prod(shapes["conv"][0])


def decode(config: Config, batch: int, weight_bytes: int, state_bytes: int = 4, past: int = 0) -> Counts:
    """Count one decoding step of ``batch`` rows that have each read ``past`` tokens."""
    ssm, conv = state_elements(config)
    head = config.d_model * config.vocab_size
    width = config.mixer.conv_width
    taps = conv // max(width - 1, 1) * width
    flops = 2 * (_matrices(config) + head + taps) + _per_state(config) * ssm
    moved = weight_bytes * (batch * active_parameters(config) if _experts(config) else parameters(config))
    moved += 2 * batch * (state_bytes * ssm + weight_bytes * conv) + 4 * batch * config.vocab_size
    if isinstance(config, HybridConfig):
        attended = config.kinds.count("attention") * past
        flops += 4 * attended * config.nheads * config.headdim
        moved += batch * 2 * attended * config.nkvheads * config.headdim * weight_bytes
    return Counts(batch * flops, moved)


def prefill(config: Config, batch: int, seqlen: int, chunk_size: int, weight_bytes: int) -> Counts:
    """Count the reading of ``seqlen`` tokens per row, last logits; of causal products (chunks, attention) the half."""
    ssm, _ = state_elements(config)
    scan = _per_state(config) * ssm
    if not isinstance(config, MambaConfig):
        m = config.mixer
        within, across = m.ngroups * m.dstate + m.d_inner, 4
        if isinstance(m, DeltaConfig):  # keys with keys, and the inverse of that times values and keys
            within, across = 2 * within + m.nheads * m.dstate, 6
        scan = _mixer_layers(config) * (chunk_size * within + across * m.d_inner * m.dstate)
    flops = seqlen * (2 * _matrices(config) + scan) + 2 * config.d_model * config.vocab_size
    if isinstance(config, HybridConfig):
        flops += 2 * config.kinds.count("attention") * config.nheads * config.headdim * seqlen**2
    return Counts(batch * flops, weight_bytes * parameters(config) + 8 * batch * ssm)


def working_bytes(config: Config, batch: int, seqlen: int, weight_bytes: int) -> int:
    """Estimate the memory for reading ``seqlen`` tokens per row, without weights and states: widest layer, logits."""
    if isinstance(config, MambaConfig):
        wide = 5 * config.d_inner + 3 * config.d_inner  # step sizes are float32
    else:
        m = config.mixer
        wide = 4 * m.d_inner + 2 * m.conv_dim + m.nheads
    if isinstance(config, HybridConfig):
        fed = config.shared_dim + config.experts_per_token * (config.expert_dim + config.d_model)
        wide = max(wide, 3 * fed, 3 * config.nheads * config.headdim)
    return batch * (seqlen * (weight_bytes * (wide + config.d_model) + 8 * config.d_model) + 8 * config.vocab_size)


def _per_state(config: Config) -> int:
    """Count the operations of one token with one number of a state; a delta rule reads it before it writes."""
    return 7 if isinstance(config.mixer, DeltaConfig) else 6


def _experts(config: Config) -> bool:
    return isinstance(config, HybridConfig) and config.nexperts > 0
