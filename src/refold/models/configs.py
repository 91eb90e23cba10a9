"""What a checkpoint's ``config.json`` says, in one vocabulary, whoever wrote it.

Two writers are read: transformers (``model_type``, see ``_READERS``) and state-spaces (``ssm_cfg``). A setting that
refold's models do not compute is refused here, by name, rather than ignored there.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from refold.errors import CheckpointError


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-1. ``layout`` names the writer of the checkpoint, which decides the names of its tensors.

    Falcon Mamba normalises the low-rank step, B and C, without weights, with ``selection_eps``; None: they stay as is.
    """

    vocab_size: int
    d_model: int
    nlayers: int
    d_inner: int
    dstate: int
    dt_rank: int
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    norm_eps: float = 1e-5
    selection_eps: float | None = None
    tied: bool = True
    stop_tokens: tuple[int, ...] = ()
    layout: str = "transformers"


@dataclass(frozen=True)
class Mixer2Config:
    """One Mamba-2 mixer: ``norm_groups`` groups of channels are normalised apart; dt is clipped to ``dt_limit``."""

    d_model: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    norm_groups: int = 1
    norm_eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def d_inner(self) -> int:
        """Channels of all heads."""
        return self.nheads * self.headdim

    @property
    def conv_dim(self) -> int:
        """Channels that pass the convolution: x, B and C."""
        return self.d_inner + 2 * self.ngroups * self.dstate


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2: equal layers of one mixer each."""

    vocab_size: int
    nlayers: int
    mixer: Mixer2Config
    tied: bool = True
    stop_tokens: tuple[int, ...] = ()
    layout: str = "transformers"

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.mixer.d_model

    @property
    def norm_eps(self) -> float:
        """Epsilon of every normalisation."""
        return self.mixer.norm_eps


@dataclass(frozen=True)
class GraniteHybridConfig:
    """Granite 4 and Bamba: Mamba-2 and attention layers in the order of ``kinds``, each followed by an MLP or experts.

    ``rope_theta`` is None where attention sees no positions; the first ``rope_dim`` numbers of a head are rotated, all
    if None. ``nexperts`` 0 means no mixture of experts.
    """

    vocab_size: int
    kinds: tuple[str, ...]
    mixer: Mixer2Config
    nheads: int
    nkvheads: int
    headdim: int
    attention_bias: bool
    rope_theta: float | None
    shared_dim: int
    expert_dim: int
    nexperts: int
    experts_per_token: int
    embedding_multiplier: float
    residual_multiplier: float
    attention_multiplier: float
    logits_divisor: float
    max_positions: int
    norm_eps: float
    tied: bool
    rope_dim: int | None = None
    mlp_bias: bool = False
    stop_tokens: tuple[int, ...] = ()
    layout: str = "transformers"

    @property
    def nlayers(self) -> int:
        """Layers of both kinds."""
        return len(self.kinds)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.mixer.d_model


Config = MambaConfig | Mamba2Config | GraniteHybridConfig


def read_config(directory: Path) -> Config:
    """Read ``config.json`` (and the stop tokens of ``generation_config.json``) of a checkpoint directory.

    Raises:
        CheckpointError: the file is missing or not JSON, the architecture is unknown, or a setting is not supported.
    """
    raw = _read_json(directory / "config.json")
    kind = raw.get("model_type") or ("state-spaces" if "n_layer" in raw and "d_model" in raw else None)
    if kind not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise CheckpointError(f"{directory}: unknown architecture {kind!r}. refold reads: {known}.")
    generation = directory / "generation_config.json"
    if generation.exists():
        raw = {**raw, **{k: v for k, v in _read_json(generation).items() if k == "eos_token_id" and v is not None}}
    try:
        return _READERS[kind](_Settings(raw, directory))
    except (TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{directory / 'config.json'}: a setting has an impossible value ({error}).") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; a checkpoint directory needs it.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); was the download cut short?") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, not an object.")
    return raw


class _Settings:
    """The raw settings, with errors that name file and key."""

    def __init__(self, raw: dict[str, Any], directory: Path) -> None:
        self.raw, self.path = raw, directory / "config.json"

    def __getitem__(self, key: str) -> Any:
        """Return a size that must be there."""
        value = self.raw.get(key)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: {key!r} must be a positive integer; it is {value!r}.")
        return value

    def get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def refuse(self, key: str, allowed: tuple[Any, ...], default: Any) -> None:
        value = self.raw.get(key, default)
        if value not in allowed:
            raise CheckpointError(
                f"{self.path}: {key}={value!r} is not supported; supported: {', '.join(map(repr, allowed))}."
            )

    def stop_tokens(self) -> tuple[int, ...]:
        value = self.raw.get("eos_token_id")
        return () if value is None else tuple(value) if isinstance(value, list) else (value,)

    def limit(self) -> tuple[float, float]:
        """``time_step_limit``; transformers writes infinity as an object, older files as a bare word."""
        values = self.get("time_step_limit", (0.0, math.inf))
        low, high = (float(v["__float__"]) if isinstance(v, dict) else float(v) for v in values)
        return low, high


def _mamba(s: _Settings) -> MambaConfig:
    s.refuse("hidden_act", ("silu",), "silu")
    d_model = s["hidden_size"]
    rank = s.get("time_step_rank", "auto")
    return MambaConfig(
        vocab_size=s["vocab_size"],
        d_model=d_model,
        nlayers=s["num_hidden_layers"],
        d_inner=s.get("intermediate_size", int(s.get("expand", 2) * d_model)),
        dstate=s["state_size"],
        dt_rank=math.ceil(d_model / 16) if rank == "auto" else rank,
        conv_width=s.get("conv_kernel", 4),
        conv_bias=s.get("use_conv_bias", True),
        proj_bias=s.get("use_bias", False),
        norm_eps=s.get("layer_norm_epsilon", 1e-5),
        tied=s.get("tie_word_embeddings", True),
        stop_tokens=s.stop_tokens(),
    )


def _falcon_mamba(s: _Settings) -> MambaConfig:
    return replace(_mamba(s), selection_eps=s.get("mixer_rms_eps", 1e-6))


def _mamba2(s: _Settings) -> Mamba2Config:
    s.refuse("hidden_act", ("silu",), "silu")
    mixer = Mixer2Config(
        d_model=s["hidden_size"],
        nheads=s["num_heads"],
        headdim=s["head_dim"],
        ngroups=s.get("n_groups", 1),
        dstate=s["state_size"],
        conv_width=s.get("conv_kernel", 4),
        conv_bias=s.get("use_conv_bias", True),
        proj_bias=s.get("use_bias", False),
        norm_eps=s.get("layer_norm_epsilon", 1e-5),
        dt_limit=s.limit(),
    )
    return Mamba2Config(
        vocab_size=s["vocab_size"],
        nlayers=s["num_hidden_layers"],
        mixer=mixer,
        tied=s.get("tie_word_embeddings", False),
        stop_tokens=s.stop_tokens(),
    )


_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


def _hybrid_mixer(s: _Settings, norm_eps: float) -> Mixer2Config:
    d_model, nheads = s["hidden_size"], s["mamba_n_heads"]
    headdim = s.get("mamba_d_head", "auto")
    return Mixer2Config(
        d_model=d_model,
        nheads=nheads,
        headdim=s.get("mamba_expand", 2) * d_model // nheads if headdim == "auto" else headdim,
        ngroups=s.get("mamba_n_groups", 1),
        dstate=s["mamba_d_state"],
        conv_width=s.get("mamba_d_conv", 4),
        conv_bias=s.get("mamba_conv_bias", True),
        proj_bias=s.get("mamba_proj_bias", False),
        norm_eps=s.get("rms_norm_eps", norm_eps),
        dt_limit=s.limit(),
    )


def _rope_theta(s: _Settings) -> float:
    rope = s.get("rope_parameters", {})
    if rope.get("rope_type", "default") != "default" or s.raw.get("rope_scaling"):
        raise CheckpointError(f"{s.path}: only the default rotary embedding is supported, not {rope!r}.")
    return float(rope.get("rope_theta", s.get("rope_theta", 10000.0)))


def _granite(s: _Settings) -> GraniteHybridConfig:
    s.refuse("hidden_act", ("silu",), "silu")
    s.refuse("position_embedding_type", (None, "rope", "nope"), None)
    d_model, nheads = s["hidden_size"], s["num_attention_heads"]
    kinds = s.get("layer_types", None) or s.get("layers_block_type", None) or ["mamba"] * s["num_hidden_layers"]
    if len(kinds) != s["num_hidden_layers"] or any(kind not in _KINDS for kind in kinds):
        raise CheckpointError(
            f"{s.path}: layer_types must name {s['num_hidden_layers']} layers, each one of {', '.join(_KINDS)}; "
            f"it is {kinds!r}."
        )
    return GraniteHybridConfig(
        vocab_size=s["vocab_size"],
        kinds=tuple(_KINDS[kind] for kind in kinds),
        mixer=_hybrid_mixer(s, norm_eps=1e-6),
        nheads=nheads,
        nkvheads=s.get("num_key_value_heads", nheads),
        headdim=s.get("head_dim", d_model // nheads),
        attention_bias=s.get("attention_bias", False),
        rope_theta=_rope_theta(s) if s.raw.get("position_embedding_type") == "rope" else None,
        shared_dim=s["shared_intermediate_size"],
        expert_dim=s.get("intermediate_size", 0),
        nexperts=s.get("num_local_experts", 0),
        experts_per_token=s.get("num_experts_per_tok", 0),
        embedding_multiplier=s.get("embedding_multiplier", 1.0),
        residual_multiplier=s.get("residual_multiplier", 1.0),
        attention_multiplier=s.get("attention_multiplier", 1.0),
        logits_divisor=s.get("logits_scaling", 1.0),
        max_positions=s.get("max_position_embeddings", 2048),
        norm_eps=s.get("rms_norm_eps", 1e-6),
        tied=s.get("tie_word_embeddings", False),
        stop_tokens=s.stop_tokens(),
    )


def _bamba(s: _Settings) -> GraniteHybridConfig:
    """Read Bamba: Granite's layers without multipliers and experts, half of each attention head rotated."""
    s.refuse("hidden_act", ("silu",), "silu")
    d_model, nheads = s["hidden_size"], s["num_attention_heads"]
    headdim = s.get("head_dim", d_model // nheads)
    attention = s.get("attn_layer_indices", ())
    rope = s.get("rope_parameters", {})
    return GraniteHybridConfig(
        vocab_size=s["vocab_size"],
        kinds=tuple("attention" if layer in attention else "mamba" for layer in range(s["num_hidden_layers"])),
        mixer=_hybrid_mixer(s, norm_eps=1e-5),
        nheads=nheads,
        nkvheads=s.get("num_key_value_heads", nheads),
        headdim=headdim,
        attention_bias=s.get("attention_bias", False),
        rope_theta=_rope_theta(s),
        rope_dim=int(headdim * rope.get("partial_rotary_factor", s.get("partial_rotary_factor", 0.5))),
        shared_dim=s["intermediate_size"],
        mlp_bias=s.get("mlp_bias", False),
        expert_dim=0,
        nexperts=0,
        experts_per_token=0,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        attention_multiplier=headdim**-0.5,
        logits_divisor=1.0,
        max_positions=s.get("max_position_embeddings", 262144),
        norm_eps=s.get("rms_norm_eps", 1e-5),
        tied=s.get("tie_word_embeddings", False),
        stop_tokens=s.stop_tokens(),
        layout="bamba",
    )


def _state_spaces(s: _Settings) -> MambaConfig | Mamba2Config:
    """Read a configuration in the state-spaces layout, whose embedding rows are padded to a multiple."""
    ssm = s.get("ssm_cfg", {})
    layer = ssm.get("layer", "Mamba1")
    s.refuse("rms_norm", (True,), True)
    if s.raw.get("attn_layer_idx") or s.raw.get("d_intermediate"):
        raise CheckpointError(f"{s.path}: attention and MLP layers (attn_layer_idx, d_intermediate) are not supported.")
    known = {"layer", "d_state", "d_conv", "expand", "dt_rank", "conv_bias", "bias", "headdim", "ngroups", "chunk_size"}
    known |= {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "use_fast_path", "dt_limit"}
    fixed = {"D_has_hdim": False, "norm_before_gate": False, "rmsnorm": True, "d_ssm": None}  # computed thus alone
    unknown = sorted(key for key in set(ssm) - known if key not in fixed or ssm[key] != fixed[key])
    if unknown:
        raise CheckpointError(f"{s.path}: ssm_cfg has settings that are not supported: {', '.join(unknown)}.")
    multiple = s.get("pad_vocab_size_multiple", 8)
    vocab_size = -(-s["vocab_size"] // multiple) * multiple
    d_model, nlayers, tied = s["d_model"], s["n_layer"], s.get("tie_embeddings", True)
    d_inner = int(ssm.get("expand", 2) * d_model)
    conv_width, conv_bias, bias = ssm.get("d_conv", 4), ssm.get("conv_bias", True), ssm.get("bias", False)
    eps = s.get("norm_epsilon", 1e-5)
    if layer == "Mamba1":
        rank = ssm.get("dt_rank", "auto")
        return MambaConfig(
            vocab_size=vocab_size,
            d_model=d_model,
            nlayers=nlayers,
            d_inner=d_inner,
            dstate=ssm.get("d_state", 16),
            dt_rank=math.ceil(d_model / 16) if rank == "auto" else rank,
            conv_width=conv_width,
            conv_bias=conv_bias,
            proj_bias=bias,
            norm_eps=eps,
            tied=tied,
            stop_tokens=s.stop_tokens(),
            layout="state-spaces",
        )
    if layer != "Mamba2":
        raise CheckpointError(f"{s.path}: unknown architecture {layer!r}; state-spaces layers: Mamba1, Mamba2.")
    ngroups = ssm.get("ngroups", 1)
    low, high = ssm.get("dt_limit", (0.0, math.inf))
    mixer = Mixer2Config(
        d_model=d_model,
        nheads=d_inner // ssm.get("headdim", 64),
        headdim=ssm.get("headdim", 64),
        ngroups=ngroups,
        dstate=ssm.get("d_state", 128),
        conv_width=conv_width,
        conv_bias=conv_bias,
        proj_bias=bias,
        norm_groups=ngroups,
        norm_eps=eps,
        dt_limit=(float(low), float(high)),
    )
    return Mamba2Config(
        vocab_size=vocab_size,
        nlayers=nlayers,
        mixer=mixer,
        tied=tied,
        stop_tokens=s.stop_tokens(),
        layout="state-spaces",
    )


_READERS: dict[str, Callable[[_Settings], Config]] = {
    "mamba": _mamba,
    "falcon_mamba": _falcon_mamba,
    "mamba2": _mamba2,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "state-spaces": _state_spaces,
}
