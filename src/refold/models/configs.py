"""The settings of a checkpoint's ``config.json``, in one vocabulary for all authors.

Two formats are read: that of transformers (``model_type``, see ``_READERS``) and that of state-spaces (``ssm_cfg``). A
setting that refold's models do not compute is refused here, by name.
"""

import importlib.metadata
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from refold.errors import CheckpointError

MOST_LAYERS = 10_000
"""More of them are refused at once: the table of their tensors alone would take minutes."""


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-1. ``layout`` names the writer of the checkpoint, which decides the names of its tensors.

    ``heads`` is what `refold.models.torch.heads` knows where other ranks have other channels. Falcon Mamba normalises
    the low-rank step, B and C, without weights, with ``selection_eps``; None: they stay as is.
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
    heads: Any = None

    @property
    def mixer(self) -> "MambaConfig":
        """What a layer's mixer is configured by, as in the other models."""
        return self

    @property
    def conv_dim(self) -> int:
        """Channels that pass the convolution."""
        return self.d_inner

    @property
    def state(self) -> tuple[int, int]:
        """Shape of the recurrent state of one row."""
        return self.d_inner, self.dstate


@dataclass(frozen=True)
class Mixer2Config:
    """One Mamba-2 mixer: ``norm_groups`` groups of channels are normalised alone; dt is clipped to ``dt_limit``.

    ``heads`` is as in `MambaConfig`.
    """

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
    heads: Any = None

    @property
    def d_inner(self) -> int:
        """Channels of all heads."""
        return self.nheads * self.headdim

    @property
    def conv_dim(self) -> int:
        """Channels that pass the convolution: x, B and C."""
        return self.d_inner + 2 * self.ngroups * self.dstate

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of the recurrent state of one row."""
        return self.nheads, self.headdim, self.dstate

    @property
    def parts(self) -> dict[str, int]:
        """Rows of the first projection, in their order: a gate, three parts that pass the convolution, and others."""
        states = self.ngroups * self.dstate
        return {"z": self.d_inner, "x": self.d_inner, "B": states, "C": states, "dt": self.nheads}


@dataclass(frozen=True)
class DeltaConfig(Mixer2Config):
    """One gated delta rule: ``nheads`` heads of ``headdim`` values, ``ngroups`` of ``dstate`` keys and queries."""

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of the recurrent state of one row."""
        return self.nheads, self.dstate, self.headdim

    @property
    def parts(self) -> dict[str, int]:
        """Rows of the first projection, as of `Mixer2Config`; the others are gates of writes, and of decays."""
        keys = self.ngroups * self.dstate
        return {"z": self.d_inner, "q": keys, "k": keys, "v": self.d_inner, "b": self.nheads, "a": self.nheads}


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
class HybridConfig:
    """Granite 4, Bamba and Qwen3.5: mixers and attention in the order of ``kinds``, each followed by an MLP or experts.

    ``rope_theta`` is None where attention sees no positions; the first ``rope_dim`` numbers of a head are rotated, all
    if None. ``nexperts`` 0 means no mixture of experts. ``gated`` attention normalises each head of its queries and
    keys, and has an output gate next to each query. ``root`` begins the names of a checkpoint's tensors.
    ``attention_heads`` and ``mlp_channels`` are as ``heads`` in `MambaConfig`.
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
    attention_multiplier: float
    max_positions: int
    norm_eps: float
    tied: bool
    expert_dim: int = 0
    nexperts: int = 0
    experts_per_token: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    rope_dim: int | None = None
    mlp_bias: bool = False
    gated: bool = False
    stop_tokens: tuple[int, ...] = ()
    layout: str = "transformers"
    root: str = "model"
    attention_heads: Any = None
    mlp_channels: Any = None

    @property
    def nlayers(self) -> int:
        """Layers of both kinds."""
        return len(self.kinds)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.mixer.d_model


Config = MambaConfig | Mamba2Config | HybridConfig


def read_config(directory: Path) -> Config:
    """Read ``config.json`` (and the stop tokens of ``generation_config.json``) of a checkpoint directory.

    Raises:
        CheckpointError: the file is missing or not JSON, the architecture is unknown, or a setting is not supported.
    """
    raw = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists():
        raw = {**raw, **{k: v for k, v in read_json(generation).items() if k == "eos_token_id" and v is not None}}
    return config_of(raw, directory)


def config_of(raw: dict[str, Any], directory: Path) -> Config:
    """Read the settings of a ``config.json``; errors name ``directory``.

    Raises:
        CheckpointError: the architecture is unknown, or a setting is not supported.
    """
    kind = raw.get("model_type") or ("state-spaces" if "n_layer" in raw and "d_model" in raw else None)
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(sorted(_READERS))
        rest = " Load this one with transformers, call refold.accelerate(model), and use model.generate."
        raise CheckpointError(
            f"{directory}: unknown architecture {kind!r}. refold reads: {known}.{rest if kind in _ACCELERATED else ''}"
        )
    if raw.get("quantization_config"):
        raise CheckpointError(f"{directory}: quantization_config is set; refold reads weights that are not quantised.")
    settings = _Settings(raw, directory)
    config = _READERS[kind](settings)
    config = replace(config, stop_tokens=config.stop_tokens or settings.stop_tokens())
    for complaint in _impossible(config):
        raise CheckpointError(f"{directory / 'config.json'}: {complaint}.")
    return config


def _impossible(config: Config) -> Iterator[str]:
    """Yield the settings that no model can have together, although each is possible alone."""
    if config.nlayers > MOST_LAYERS:
        yield f"{config.nlayers} layers are more than any model has"
    mixer = None if isinstance(config, MambaConfig) else config.mixer
    if mixer is not None and (mixer.nheads < 1 or mixer.nheads % mixer.ngroups):
        yield f"{mixer.nheads} heads do not divide into {mixer.ngroups} groups"
    if isinstance(config, HybridConfig):
        if config.logits_divisor == 0:
            yield "logits cannot be divided by logits_scaling=0"
        if config.nheads % config.nkvheads:
            yield f"{config.nheads} attention heads do not divide among {config.nkvheads} key-value heads"
        if config.nexperts and not 1 <= config.experts_per_token <= config.nexperts:
            yield f"{config.experts_per_token} experts per token cannot be chosen among {config.nexperts}"
        rotated = config.headdim if config.rope_dim is None else config.rope_dim
        if config.rope_theta is not None and (rotated % 2 or not 0 < rotated <= config.headdim):
            yield f"{rotated} of {config.headdim} channels of a head cannot be rotated in pairs"
        if config.rope_theta is not None and config.rope_theta <= 0:
            yield f"no angles can be made of rope_theta={config.rope_theta}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        CheckpointError: there is none, or the file is no JSON.
    """
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; a checkpoint directory needs it.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:  # of the first: bytes that are no text, text that is no JSON
        raise CheckpointError(f"{path} is not valid JSON ({error}); was the download cut short?") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, not an object.")
    return raw


class _Settings:
    """The raw settings, with errors that name file and key."""

    def __init__(self, raw: dict[str, Any], directory: Path) -> None:
        self.raw, self.path, self.name = raw, directory / "config.json", ""

    def __getitem__(self, key: str) -> Any:
        """Return a size that must be there."""
        return self._checked(key, self.raw.get(key), _is_size, "a positive integer below 2^40")

    def size(self, key: str, default: int, least: int = 1) -> int:
        """Return a size that need not be there."""
        expected = "a positive integer below 2^40" if least else "an integer of 0 or more, below 2^40"
        return self._checked(key, self.get(key, default), lambda v: _is_size(v, least), expected)

    def auto_size(self, key: str, automatic: int) -> int:
        """Return a size that may be left to its rule."""
        value = self.get(key, "auto")
        expected = "'auto' or a positive integer below 2^40"
        return automatic if value == "auto" else self._checked(key, value, _is_size, expected)

    def flag(self, key: str, default: bool) -> bool:
        """Return a setting that is on or off."""
        return self._checked(key, self.get(key, default), lambda v: isinstance(v, bool), "true or false")

    def number(self, key: str, default: float, least: float = -math.inf) -> float:
        """Return a number that float32 can hold."""
        expected = "a number that float32 can hold" + (f", {least:g} or more" if least > -math.inf else "")
        return float(self._checked(key, self.get(key, default), lambda v: _is_number(v) and v >= least, expected))

    def epsilon(self, key: str, default: float) -> float:
        """Read the number that a norm adds to a mean of squares."""
        return self.number(key, default, least=0.0)

    def part(self, key: str) -> "_Settings":
        """Return the settings of an object inside, which need not be there."""
        value = self._checked(key, self.get(key, {}), lambda v: isinstance(v, dict), "an object")
        inside = _Settings(value, self.path.parent)
        inside.name = f"{key}."
        return inside

    def items(self, key: str, default: Sequence[Any], check: Callable[[Any], bool], expected: str) -> Sequence[Any]:
        """Return a list whose items are alike."""
        return self._checked(
            key, self.get(key, default), lambda v: isinstance(v, (list, tuple)) and all(map(check, v)), expected
        )

    def _checked(self, key: str, value: Any, check: Callable[[Any], bool], expected: str) -> Any:
        if not check(value):
            shown = f"{value!r:.80}"
            raise CheckpointError(f"{self.path}: {self.name + key!r} must be {expected}; it is {shown}.")
        return value

    def get(self, key: str, default: Any) -> Any:
        """Return a setting of any kind."""
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
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        expected = "a token id, a list of them, or null"
        return tuple(self._checked("eos_token_id", token, lambda v: _is_size(v, 0), expected) for token in tokens)

    def limit(self, key: str = "time_step_limit") -> tuple[float, float]:
        """Return a range; transformers writes infinity as an object, older files as a bare word."""
        given = self.get(key, (0.0, math.inf))
        try:
            low, high = (float(v["__float__"]) if isinstance(v, dict) else float(v) for v in given)
        except (TypeError, ValueError, KeyError, OverflowError):  # of the last: an integer that no float holds
            low = high = math.nan
        self._checked(key, given, lambda _: low <= high, "two numbers, the lower one first")
        return low, high


def _is_size(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 40


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**127


def _of_all(s: _Settings, tied: bool) -> dict[str, Any]:
    """Read what every model of transformers has; ``tied`` where the settings do not say it."""
    s.refuse("hidden_act", ("silu",), "silu")
    return {"vocab_size": s["vocab_size"], "tied": s.flag("tie_word_embeddings", tied)}


def _of_mixer(s: _Settings) -> dict[str, Any]:
    """Read what the mixers of Mamba and Mamba-2 have in common."""
    return {
        "dstate": s["state_size"],
        "conv_width": s.size("conv_kernel", 4),
        "conv_bias": s.flag("use_conv_bias", True),
        "proj_bias": s.flag("use_bias", False),
        "norm_eps": s.epsilon("layer_norm_epsilon", 1e-5),
    }


def _mamba(s: _Settings) -> MambaConfig:
    d_model = s["hidden_size"]
    return MambaConfig(
        **_of_all(s, tied=True),
        **_of_mixer(s),
        d_model=d_model,
        nlayers=s["num_hidden_layers"],
        d_inner=s.size("intermediate_size", int(s.number("expand", 2) * d_model)),
        dt_rank=s.auto_size("time_step_rank", -(-d_model // 16)),
    )


_NORMS_GROUPS = (5, 23)
"""The first release of transformers whose gated norm takes each group of channels alone."""


def _norm_groups(ngroups: int) -> int:
    """Return how many groups of channels the gated norm of transformers takes alone.

    A checkpoint does not say it. Its authors trained with one norm per group. Before 5.23, transformers took all
    channels together (Mamba-2, Bamba, Granite). So this follows the installed release; without one, the authors.
    """
    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ngroups
    return ngroups if tuple(map(int, re.findall(r"\d+", installed)[:2])) >= _NORMS_GROUPS else 1


def _mamba2(s: _Settings) -> Mamba2Config:
    ngroups = s.size("n_groups", 1)
    mixer = Mixer2Config(
        **_of_mixer(s),
        d_model=s["hidden_size"],
        nheads=s["num_heads"],
        headdim=s["head_dim"],
        ngroups=ngroups,
        norm_groups=_norm_groups(ngroups),
        dt_limit=s.limit(),
    )
    return Mamba2Config(**_of_all(s, tied=False), nlayers=s["num_hidden_layers"], mixer=mixer)


_KINDS = {"mamba": "mixer", "linear_attention": "mixer", "attention": "attention", "full_attention": "attention"}


def _hybrid_mixer(s: _Settings, norm_eps: float) -> Mixer2Config:
    d_model, nheads, ngroups = s["hidden_size"], s["mamba_n_heads"], s.size("mamba_n_groups", 1)
    return Mixer2Config(
        d_model=d_model,
        nheads=nheads,
        headdim=s.auto_size("mamba_d_head", int(s.number("mamba_expand", 2) * d_model) // nheads),
        ngroups=ngroups,
        dstate=s["mamba_d_state"],
        conv_width=s.size("mamba_d_conv", 4),
        conv_bias=s.flag("mamba_conv_bias", True),
        proj_bias=s.flag("mamba_proj_bias", False),
        norm_groups=_norm_groups(ngroups),
        norm_eps=s.epsilon("rms_norm_eps", norm_eps),
        dt_limit=s.limit(),
    )


def _layers(s: _Settings) -> int:
    """Return the number of layers."""
    return min(s["num_hidden_layers"], MOST_LAYERS + 1)


def _rope_theta(s: _Settings) -> float:
    rope = s.part("rope_parameters")
    if rope.get("rope_type", "default") != "default" or s.raw.get("rope_scaling"):
        raise CheckpointError(f"{s.path}: only the default rotary embedding is supported, not {rope.raw!r:.200}.")
    return rope.number("rope_theta", s.number("rope_theta", 10000.0))


def _kinds(s: _Settings, every: int = 0) -> tuple[str, ...]:
    """Return the kinds of the layers; where no list names them, ``every`` so many-th is attention."""
    nlayers = _layers(s)
    expected = f"names of {nlayers} layers, each one of {', '.join(_KINDS)}"
    key = "layer_types" if s.raw.get("layer_types") else "layers_block_type"
    kinds = s.items(key, (), lambda v: isinstance(v, str) and v in _KINDS, expected)
    kinds = kinds or ["attention" if every and not i % every else "mamba" for i in range(1, nlayers + 1)]
    if len(kinds) != nlayers:
        raise CheckpointError(f"{s.path}: {key!r} must be {expected}; it names {len(kinds)}.")
    return tuple(_KINDS[kind] for kind in kinds)


def _rope_dim(s: _Settings, headdim: int, share: float) -> int:
    """Return how many channels of a head are rotated: ``share`` of them, where the settings do not say it."""
    share = s.number("partial_rotary_factor", share)
    return int(headdim * s.part("rope_parameters").number("partial_rotary_factor", share))


def _of_hybrid(s: _Settings, eps: float, positions: int) -> dict[str, Any]:
    """Read what all hybrids have, with defaults where the settings do not say it."""
    nheads = s["num_attention_heads"]
    return _of_all(s, tied=False) | {
        "nheads": nheads,
        "nkvheads": s.size("num_key_value_heads", nheads),
        "headdim": s.size("head_dim", s["hidden_size"] // nheads),
        "attention_bias": s.flag("attention_bias", False),
        "max_positions": s.size("max_position_embeddings", positions),
        "norm_eps": s.epsilon("rms_norm_eps", eps),
    }


def _granite(s: _Settings) -> HybridConfig:
    s.refuse("position_embedding_type", (None, "rope", "nope"), None)
    return HybridConfig(
        **_of_hybrid(s, eps=1e-6, positions=2048),
        kinds=_kinds(s),
        mixer=_hybrid_mixer(s, norm_eps=1e-6),
        rope_theta=_rope_theta(s) if s.raw.get("position_embedding_type") == "rope" else None,
        shared_dim=s["shared_intermediate_size"],
        expert_dim=s.size("intermediate_size", 0, least=0),
        nexperts=s.size("num_local_experts", 0, least=0),
        experts_per_token=s.size("num_experts_per_tok", 0, least=0),
        embedding_multiplier=s.number("embedding_multiplier", 1.0),
        residual_multiplier=s.number("residual_multiplier", 1.0),
        attention_multiplier=s.number("attention_multiplier", 1.0),
        logits_divisor=s.number("logits_scaling", 1.0),
    )


def _bamba(s: _Settings) -> HybridConfig:
    """Read Bamba: Granite's layers without multipliers and experts, half of each attention head rotated."""
    common = _of_hybrid(s, eps=1e-5, positions=262144)
    attention = s.items("attn_layer_indices", (), lambda v: _is_size(v, 0), "a list of layers")
    return HybridConfig(
        **common,
        kinds=tuple("attention" if layer in attention else "mixer" for layer in range(_layers(s))),
        mixer=_hybrid_mixer(s, norm_eps=1e-5),
        rope_theta=_rope_theta(s),
        rope_dim=_rope_dim(s, common["headdim"], 0.5),
        shared_dim=s["intermediate_size"],
        mlp_bias=s.flag("mlp_bias", False),
        attention_multiplier=common["headdim"] ** -0.5,
        layout="bamba",
    )


def _qwen(outer: _Settings) -> HybridConfig:
    """Read Qwen3.5, alone or as the text part of a model that sees, or a Qwen3-Next without experts."""
    s = outer.part("text_config") if outer.raw.get("text_config") else outer
    common, headdim = _of_hybrid(s, eps=1e-6, positions=32768), s["head_dim"]
    common |= {
        "nkvheads": s["num_key_value_heads"],
        "tied": outer.flag("tie_word_embeddings", common["tied"]),
        "stop_tokens": outer.stop_tokens() or s.stop_tokens(),
    }
    dense, step = s.items("mlp_only_layers", (), lambda v: _is_size(v, 0), "a list of layers"), "decoder_sparse_step"
    kinds = _kinds(s, s.size("full_attention_interval", 4))
    routed = [i for i in range(len(kinds)) if i not in dense and not (i + 1) % s.size(step, 1)]
    if s.size("num_experts", 0, least=0) and routed:
        raise CheckpointError(
            f"{s.path}: layer {routed[0]} has experts (num_experts), and refold reads models of this architecture "
            "without them. Load it with transformers, call refold.accelerate(model), and use model.generate."
        )
    mixer = DeltaConfig(
        d_model=s["hidden_size"],
        nheads=s["linear_num_value_heads"],
        headdim=s["linear_value_head_dim"],
        ngroups=s["linear_num_key_heads"],
        dstate=s["linear_key_head_dim"],
        conv_width=s.size("linear_conv_kernel_dim", 4),
        conv_bias=False,
        norm_eps=common["norm_eps"],
    )
    return HybridConfig(
        **common,
        kinds=kinds,
        mixer=mixer,
        gated=True,
        rope_theta=_rope_theta(s),
        rope_dim=_rope_dim(s, headdim, 0.25),
        shared_dim=s["intermediate_size"],
        attention_multiplier=headdim**-0.5,
        layout="qwen3_next" if outer.get("model_type", "") == "qwen3_next" else "qwen3_5",
        root="model" if s is outer else "model.language_model",
    )


def _state_spaces(s: _Settings) -> MambaConfig | Mamba2Config:
    """Read a configuration in the state-spaces layout, whose embedding rows are padded to a multiple."""
    ssm = s.part("ssm_cfg")
    layer = ssm.get("layer", "Mamba1")
    s.refuse("rms_norm", (True,), True)
    if s.raw.get("attn_layer_idx") or s.raw.get("d_intermediate"):
        raise CheckpointError(f"{s.path}: attention and MLP layers (attn_layer_idx, d_intermediate) are not supported.")
    known = {"layer", "d_state", "d_conv", "expand", "dt_rank", "conv_bias", "bias", "headdim", "ngroups", "chunk_size"}
    known |= {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "use_fast_path", "dt_limit"}
    fixed = {"D_has_hdim": False, "norm_before_gate": False, "rmsnorm": True, "d_ssm": None}  # computed thus alone
    unknown = sorted(key for key in set(ssm.raw) - known if key not in fixed or ssm.raw[key] != fixed[key])
    if unknown:
        raise CheckpointError(f"{s.path}: ssm_cfg has settings that are not supported: {', '.join(unknown)}.")
    multiple, d_model = s.size("pad_vocab_size_multiple", 8), s["d_model"]
    d_inner = int(ssm.number("expand", 2) * d_model)
    model = {
        "vocab_size": -(-s["vocab_size"] // multiple) * multiple,
        "nlayers": s["n_layer"],
        "tied": s.flag("tie_embeddings", True),
        "layout": "state-spaces",
    }
    mixer = {
        "d_model": d_model,
        "conv_width": ssm.size("d_conv", 4),
        "conv_bias": ssm.flag("conv_bias", True),
        "proj_bias": ssm.flag("bias", False),
        "norm_eps": s.epsilon("norm_epsilon", 1e-5),
    }
    if layer == "Mamba1":
        dt_rank = ssm.auto_size("dt_rank", -(-d_model // 16))
        return MambaConfig(**model, **mixer, d_inner=d_inner, dstate=ssm.size("d_state", 16), dt_rank=dt_rank)
    if layer != "Mamba2":
        raise CheckpointError(f"{s.path}: unknown architecture {layer!r}; state-spaces layers: Mamba1, Mamba2.")
    ngroups, headdim = ssm.size("ngroups", 1), ssm.size("headdim", 64)
    mixer |= {
        "nheads": d_inner // headdim,
        "headdim": headdim,
        "ngroups": ngroups,
        "dstate": ssm.size("d_state", 128),
        "norm_groups": ngroups,
        "dt_limit": ssm.limit("dt_limit"),
    }
    return Mamba2Config(**model, mixer=Mixer2Config(**mixer))


_READERS: dict[str, Callable[[_Settings], Config]] = {
    "mamba": _mamba,
    "falcon_mamba": lambda s: replace(_mamba(s), selection_eps=s.epsilon("mixer_rms_eps", 1e-6)),
    "mamba2": _mamba2,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "qwen3_5": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_next": _qwen,
    "state-spaces": _state_spaces,
}

_ACCELERATED = (
    "jamba", "zamba", "zamba2", "falcon_h1", "nemotron_h", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp",
    "qwen4_exp_text", "lara_mini", "olmo_hybrid", "kimi_linear", "glm5_next", "glm5_next_text", "bailing_hybrid",
    "minimax",
)  # fmt: skip
"""Families that have no reader here, but whose layers `refold.accelerate` replaces."""
