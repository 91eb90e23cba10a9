"""Checkpoints as nested dictionaries of arrays with stacked layers: NumPy arrays, or those of a framework.

For each tensor of a configuration, a table has its name in the file, its shape, and its place in the dictionary. Every
tensor of the table must be in the files with exactly that shape, and every tensor of the files in the table. Weights
keep the files' dtype unless another is requested. The few numbers that enter exponentials (A_log, D, dt_bias) become
float32.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from refold.errors import CheckpointError, MissingDependency
from refold.models.configs import (
    Config,
    DeltaConfig,
    HybridConfig,
    MambaConfig,
    Mixer2Config,
    read_config,
    read_json,
)

Params = dict[str, Any]


@dataclass(frozen=True)
class Arrays:
    """What parameters are read into.

    Attributes:
        framework: What safetensors reads: ``np`` or ``pt``.
        empty: Makes an array of a shape and a dtype by name; assigning to its parts fills it.
    """

    framework: str
    empty: Callable[[tuple[int, ...], str], Any]


@dataclass(frozen=True)
class Entry:
    """One tensor: its key in the files, its shape there, and its place.

    Attributes:
        key: Name in the files.
        shape: Shape in the files.
        path: Place in the parameters; ``index`` is the position in the stack there, None for an unstacked one.
        index: Layer among the layers of its kind.
        depth: Number of layers of its kind.
        exact: Whether it is kept in float32 whatever the dtype.
        squeeze: Whether a middle axis of length one is dropped (convolution weights).
        rows: Where several tensors make one array: how many rows it has, and which of them these are.
        shift: Added to the numbers of the files: 1 where norms are stored as their distance from one.
    """

    key: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    index: int | None = None
    depth: int = 0
    exact: bool = False
    squeeze: bool = False
    rows: tuple[int, Any] | None = None
    shift: int = 0

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of this tensor in the parameters."""
        return (self.shape[0], self.shape[2]) if self.squeeze else self.shape

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of one layer's array in the parameters."""
        return self.stored if self.rows is None else (self.rows[0], *self.stored[1:])


def load_checkpoint(model: str | Path, dtype: str | None = None, arrays: Arrays | None = None) -> tuple[Config, Params]:
    """Read a checkpoint directory, or a name on the Hugging Face hub.

    Args:
        model: A directory with ``config.json`` and ``model.safetensors``, ``model.safetensors.index.json`` with its
            shards, or ``pytorch_model.bin`` (which needs torch to be read, without unpickling code); or ``owner/name``.
        dtype: ``float32``, ``bfloat16`` or ``float16`` for the weights; None keeps the files'.
        arrays: What the parameters are read into; None means NumPy arrays.

    Returns:
        The configuration, and the parameters: ``embedding (vocab, d)``, ``norm (d,)``, ``head (vocab, d)`` if not
        tied, and the stacks of each kind of layer with layers on axis 0.

    Raises:
        CheckpointError: a file is missing, truncated or of an unknown architecture, or keys or shapes do not fit; the
            message names them.
        MissingDependency: an optional package is needed to read this format.
    """
    if dtype is not None:
        _check_dtype(dtype)
    arrays = arrays or NUMPY
    directory = find_checkpoint(model)
    config = read_config(directory)
    tensors = _open(directory, arrays.framework)
    entries = list(layout(config))
    _check_keys(directory, config, entries, tensors)
    if dtype is None:
        _check_stacks(directory, entries, tensors)
    return config, _assemble(entries, tensors, dtype, arrays)


def find_checkpoint(model: str | Path) -> Path:
    """Return the directory of ``model``, downloading it if it is a hub name that is no directory here."""
    directory = Path(model)
    if directory.is_dir():
        return directory
    if not isinstance(model, str) or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise CheckpointError(f"{model} is neither a directory nor a hub name of the form owner/name.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependency(
            f"{model} is no directory here; to fetch it from the hub, install huggingface_hub (pip install refold[hf])."
        ) from error
    patterns = ["*.json", "*.safetensors", "*.bin", "*.txt"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated types; all mean that there is no checkpoint
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{model} is no directory here, and the hub did not give it: {reason}") from error


# --- what each architecture stores -----------------------------------------------------------------------------------


def layout(config: Config) -> Iterator[Entry]:
    """List every tensor of a configuration, in the names of the checkpoint's writer."""
    hybrid = isinstance(config, HybridConfig)
    root = config.root if isinstance(config, HybridConfig) else "backbone"
    embedding = "embed_tokens" if hybrid else "embedding" if config.layout == "state-spaces" else "embeddings"
    table = (config.vocab_size, config.d_model)
    yield Entry(f"{root}.{embedding}.weight", table, ("embedding",))
    norm = "norm_f" if not hybrid else "final_layernorm" if config.layout == "bamba" else "norm"
    yield _shifted(config, Entry(f"{root}.{norm}.weight", (config.d_model,), ("norm",)))
    if not config.tied:
        yield Entry("lm_head.weight", table, ("head",))
    if isinstance(config, HybridConfig):
        yield from (_shifted(config, entry) for entry in _hybrid_layers(config))
    else:
        mixer = _mamba_mixer(config) if isinstance(config, MambaConfig) else _mamba2_mixer(config.mixer)
        parts = {"norm.weight": ("norm", (config.d_model,))} | {f"mixer.{key}": part for key, part in mixer.items()}
        for layer in range(config.nlayers):
            yield from _entries(f"backbone.layers.{layer}", "layers", parts, layer, config.nlayers)


_EXACT = {"A_log", "D", "dt_bias"}
_Parts = dict[str, tuple[str, tuple[int, ...]]]
_NORMS = {"norm", "mlp_norm", "q_norm", "k_norm"}


def _entries(
    prefix: str, kind: str, parts: _Parts, index: int, depth: int, rows: Mapping[str, tuple[int, Any]] | None = None
) -> Iterator[Entry]:
    for key, (name, shape) in parts.items():
        where = (rows or {}).get(key)
        yield Entry(f"{prefix}.{key}", shape, (kind, name), index, depth, name in _EXACT, name == "conv_weight", where)


def _shifted(config: Config, entry: Entry) -> Entry:
    """Let the norms of Qwen be around one, in float32: bfloat16 would round what their distances from one tell."""
    shifts = config.layout.startswith("qwen") and entry.path[-1] in _NORMS
    return replace(entry, shift=1, exact=True) if shifts else entry


def _mixer(c: MambaConfig | Mixer2Config, projected: int, own: _Parts) -> _Parts:
    """Return the parts of a mixer that projects to so many channels; ``own`` are those of its kind."""
    parts: _Parts = {
        "in_proj.weight": ("in_proj", (projected, c.d_model)),
        "conv1d.weight": ("conv_weight", (c.conv_dim, 1, c.conv_width)),
        **own,
        "out_proj.weight": ("out_proj", (c.d_model, c.d_inner)),
    }
    if c.conv_bias:
        parts["conv1d.bias"] = ("conv_bias", (c.conv_dim,))
    if c.proj_bias:
        parts |= {"in_proj.bias": ("in_bias", (projected,)), "out_proj.bias": ("out_bias", (c.d_model,))}
    return parts


def _mamba_mixer(c: MambaConfig) -> _Parts:
    return _mixer(c, 2 * c.d_inner, {
        "x_proj.weight": ("x_proj", (c.dt_rank + 2 * c.dstate, c.d_inner)),
        "dt_proj.weight": ("dt_proj", (c.d_inner, c.dt_rank)),
        "dt_proj.bias": ("dt_bias", (c.d_inner,)),
        "A_log": ("A_log", (c.d_inner, c.dstate)),
        "D": ("D", (c.d_inner,)),
    })  # fmt: skip


def _mamba2_mixer(c: Mixer2Config) -> _Parts:
    return _mixer(c, c.d_inner + c.conv_dim + c.nheads, {
        "A_log": ("A_log", (c.nheads,)),
        "D": ("D", (c.nheads,)),
        "dt_bias": ("dt_bias", (c.nheads,)),
        "norm.weight": ("gated_norm", (c.d_inner,)),
    })  # fmt: skip


def _delta_mixer(c: DeltaConfig, layout: str) -> tuple[_Parts, dict[str, tuple[int, Any]]]:
    """Return the parts of a delta rule, and the rows of ``in_proj``, which is z, q, k, v, b and a, for each tensor."""
    values, keys, heads = c.d_inner, c.ngroups * c.dstate, c.nheads
    sizes = [values, keys, keys, values, heads, heads]
    z, q, k, v, b, a = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if layout == "qwen3_next":  # its rows are sorted by groups of heads
        names = {"qkvz": (q, k, v, z), "ba": (b, a)}
        rows = {n: np.concatenate([r.reshape(c.ngroups, -1) for r in parts], 1).ravel() for n, parts in names.items()}
    else:
        rows = {"qkv": np.concatenate([q, k, v]), "z": z, "b": b, "a": a}
    parts: _Parts = {f"in_proj_{name}.weight": ("in_proj", (len(r), c.d_model)) for name, r in rows.items()}
    parts |= {
        "conv1d.weight": ("conv_weight", (c.conv_dim, 1, c.conv_width)),
        "A_log": ("A_log", (c.nheads,)),
        "dt_bias": ("dt_bias", (c.nheads,)),
        "norm.weight": ("gated_norm", (c.headdim,)),
        "out_proj.weight": ("out_proj", (c.d_model, values)),
    }
    return parts, {f"in_proj_{name}.weight": (sum(sizes), r) for name, r in rows.items()}


def _hybrid_layers(c: HybridConfig) -> Iterator[Entry]:
    common: _Parts = {"input_layernorm.weight": ("norm", (c.d_model,))}
    if c.layout != "transformers":
        norm, mlp = ("pre_ff_layernorm", "feed_forward") if c.layout == "bamba" else ("post_attention_layernorm", "mlp")
        common[f"{norm}.weight"] = ("mlp_norm", (c.d_model,))
        for name, key, rows, columns in (
            ("mlp_gate", "gate_proj", c.shared_dim, c.d_model),
            ("mlp_up", "up_proj", c.shared_dim, c.d_model),
            ("mlp_out", "down_proj", c.d_model, c.shared_dim),
        ):
            common[f"{mlp}.{key}.weight"] = (name, (rows, columns))
            if c.mlp_bias:
                common[f"{mlp}.{key}.bias"] = (f"{name}_bias", (rows,))
    else:
        common |= {
            "post_attention_layernorm.weight": ("mlp_norm", (c.d_model,)),
            "shared_mlp.input_linear.weight": ("mlp_in", (2 * c.shared_dim, c.d_model)),
            "shared_mlp.output_linear.weight": ("mlp_out", (c.d_model, c.shared_dim)),
        }
    if c.nexperts:
        common |= {
            "block_sparse_moe.router.layer.weight": ("router", (c.nexperts, c.d_model)),
            "block_sparse_moe.input_linear.weight": ("expert_in", (c.nexperts, 2 * c.expert_dim, c.d_model)),
            "block_sparse_moe.output_linear.weight": ("expert_out", (c.nexperts, c.d_model, c.expert_dim)),
        }
    query, keys = c.nheads * c.headdim, c.nkvheads * c.headdim
    attention: _Parts = {}
    for name, rows in (("q", query * (1 + c.gated)), ("k", keys), ("v", keys)):
        attention[f"{name}_proj.weight"] = (name, (rows, c.d_model))
        if c.attention_bias:
            attention[f"{name}_proj.bias"] = (f"{name}_bias", (rows,))
    attention["o_proj.weight"] = ("o", (c.d_model, query))
    if c.attention_bias:
        attention["o_proj.bias"] = ("o_bias", (c.d_model,))
    if c.gated:
        attention |= {f"{name}_norm.weight": (f"{name}_norm", (c.headdim,)) for name in ("q", "k")}
    if isinstance(c.mixer, DeltaConfig):
        mixer, places = _delta_mixer(c.mixer, c.layout)
    else:
        mixer, places = _mamba2_mixer(c.mixer), {}
    mixer_name = "linear_attn" if isinstance(c.mixer, DeltaConfig) else "mamba"
    kinds = {"mixer": (mixer_name, mixer), "attention": ("self_attn", attention)}
    seen = dict.fromkeys(kinds, 0)
    for layer, kind in enumerate(c.kinds):
        prefix, (name, parts) = f"{c.root}.layers.{layer}", kinds[kind]
        yield from _entries(prefix, "layers", common, layer, c.nlayers)
        yield from _entries(f"{prefix}.{name}", kind, parts, seen[kind], c.kinds.count(kind), places)
        seen[kind] += 1


# --- reading files ---------------------------------------------------------------------------------------------------


_SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOATS = tuple(_SAFETENSORS.values())


@dataclass(frozen=True)
class _Tensor:
    """A tensor in a file: its shape, how to read it, and the name of its dtype."""

    shape: tuple[int, ...]
    read: Callable[[], Any]
    dtype: str = "float32"


def _open(directory: Path, framework: str) -> dict[str, _Tensor]:
    """Find the weight files of a directory and list their tensors."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        return _open_safetensors(directory / "model.safetensors", framework)
    if index.exists():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
            raise CheckpointError(
                f"{index} is not an index of shards: its weight_map must name a file for each tensor."
            )
        tensors: dict[str, _Tensor] = {}
        for shard in sorted(set(placed.values())):
            if shard != Path(shard).name or "\\" in shard or shard in ("", ".", ".."):
                raise CheckpointError(f"{index} names the shard {shard!r}; a shard must be a file next to the index.")
            if not (directory / shard).exists():
                raise CheckpointError(f"{index} names the shard {shard}, which is not there.")
            tensors |= _open_safetensors(directory / shard, framework)
        lost = sorted(set(placed) - set(tensors))
        if lost:
            raise CheckpointError(f"{index} promises {_some(lost)}, which no shard has.")
        return tensors
    pickles = sorted(p for p in directory.iterdir() if p.suffix in (".bin", ".pt") and "training" not in p.name)
    if len(pickles) == 1:
        return _open_pickle(pickles[0], framework)
    found = ", ".join(p.name for p in pickles) or "none"
    raise CheckpointError(
        f"{directory}: expected model.safetensors, model.safetensors.index.json, or one .bin or .pt file; "
        f"of the last, found: {found}."
    )


def _open_safetensors(path: Path, framework: str) -> dict[str, _Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependency(f"{path}: reading it needs safetensors (pip install refold[hf]).") from error
    try:
        file = safe_open(path, framework)
        keys = list(file.keys())
        slices = {key: file.get_slice(key) for key in keys}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); was it cut short?") from error

    def reader(key: str) -> Callable[[], Any]:
        if slices[key].get_dtype() == "BF16" and framework == "np":
            _need_ml_dtypes(path)
        return lambda: file.get_tensor(key)

    def tensor(key: str) -> _Tensor:
        dtype = slices[key].get_dtype()
        return _Tensor(tuple(slices[key].get_shape()), reader(key), _SAFETENSORS.get(dtype, dtype))

    return {key: tensor(key) for key in keys}


def _open_pickle(path: Path, framework: str) -> dict[str, _Tensor]:
    """List the tensors of a torch file; ``weights_only`` refuses anything but tensors."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(
            f"{path}: .bin and .pt files need torch to be read (pip install refold[torch]), "
            "or convert the checkpoint to safetensors."
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is not a torch file of tensors alone, and to open what else it holds may run a program; "
            "convert the checkpoint to safetensors where you trust it."
        ) from error
    except Exception as error:  # torch raises zip, runtime and end-of-file errors for what is no tensor file
        reason = str(error).partition(". ")[0].partition("\n")[0]
        raise CheckpointError(f"{path} is not a whole torch file ({reason}); was it cut short?") from error
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided
        for key, value in state.items()
    ):
        raise CheckpointError(f"{path} does not hold a dictionary of names and dense tensors.")
    state = {key: value.detach() for key, value in state.items()}

    def reader(tensor: Any) -> Callable[[], Any]:
        if framework == "pt":
            return lambda: tensor
        if tensor.dtype != torch.bfloat16:
            return lambda: tensor.numpy()
        ml_dtypes = _need_ml_dtypes(path)
        return lambda: tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)

    return {
        key: _Tensor(tuple(tensor.shape), reader(tensor), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in state.items()
    }


def _need_ml_dtypes(path: Path) -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependency(
            f"{path} holds bfloat16; NumPy needs ml_dtypes for it (pip install ml_dtypes)."
        ) from error
    return ml_dtypes


_UNUSED = {"qwen3_5": ("mtp.", "model.visual."), "qwen3_next": ("mtp.",)}
"""What checkpoints hold for other uses: to guess several tokens at once, and to see. As in transformers, no error."""


def _check_keys(directory: Path, config: Config, entries: list[Entry], tensors: dict[str, _Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{directory}: {key} is stored as {tensor.dtype}; weights must be {', '.join(_FLOATS)}. "
                "Checkpoints with quantised weights are not supported."
            )
    expected = {entry.key: entry for entry in entries}
    extra = {key for key in set(tensors) - set(expected) if not key.startswith(_UNUSED.get(config.layout, ()))}
    if config.tied and "lm_head.weight" in extra:
        # A tied head is stored a second time by some writers; it must be the same one.
        extra.remove("lm_head.weight")
        first = next(entry.key for entry in entries if entry.path == ("embedding",))
        head, embedding = tensors["lm_head.weight"], tensors.get(first)
        if embedding and (head.shape != embedding.shape or not bool((head.read() == embedding.read()).all())):
            raise CheckpointError(f"{directory}: the embeddings are tied, but lm_head.weight differs from {first}.")
    missing = sorted(set(expected) - set(tensors))
    misshapen = [
        f"{key} is {tensors[key].shape}, expected {entry.shape}"
        for key, entry in expected.items()
        if key in tensors and tensors[key].shape != entry.shape
    ]
    problems = [
        f"{label} {_some(keys)}"
        for label, keys in (("missing:", missing), ("not expected:", sorted(extra)), ("wrong shape:", misshapen))
        if keys
    ]
    if problems:
        raise CheckpointError(f"{directory}: the tensors do not fit {type(config).__name__}: {'; '.join(problems)}.")


def _check_stacks(directory: Path, entries: list[Entry], tensors: dict[str, _Tensor]) -> None:
    """Refuse stacks whose layers have several dtypes: a stack has one, and rounding would not be seen."""
    first: dict[tuple[str, ...], Entry] = {}
    for entry in entries:
        other = first.setdefault(entry.path, entry)
        one, two = tensors[other.key].dtype, tensors[entry.key].dtype
        if one != two and not entry.exact:
            raise CheckpointError(
                f"{directory}: {other.key} is {one}, but {entry.key} is {two}. Layers must have one dtype; "
                "name the one to convert them to (dtype=, --dtype)."
            )


def _some(items: list[str], most: int = 8) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _assemble(entries: list[Entry], tensors: dict[str, _Tensor], dtype: str | None, arrays: Arrays) -> Params:
    """Read each tensor once into its place; the stacks are allocated whole, so the peak is the model's size."""
    params: Params = {}
    for entry in entries:
        tensor = tensors[entry.key]
        place = params
        for name in entry.path[:-1]:
            place = place.setdefault(name, {})
        if entry.path[-1] not in place:
            shape = entry.whole if entry.index is None else (entry.depth, *entry.whole)
            place[entry.path[-1]] = arrays.empty(shape, "float32" if entry.exact else dtype or tensor.dtype)
        target = place[entry.path[-1]]
        target = target if entry.index is None else target[entry.index]
        target[... if entry.rows is None else entry.rows[1]] = tensor.read().reshape(entry.stored)
        if entry.shift:
            target += entry.shift
    return params


def _check_dtype(name: str) -> None:
    if name not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(f"dtype {name!r} is not supported; supported: float32, bfloat16, float16.")


def _dtype(name: str) -> np.dtype:
    return np.dtype(_need_ml_dtypes(Path("bfloat16 weights")).bfloat16 if name == "bfloat16" else name)


NUMPY = Arrays("np", lambda shape, name: np.empty(shape, _dtype(name)))


def random_params(config: Config, seed: int = 0, dtype: str = "float32") -> Params:
    """Draw parameters of a configuration, scaled so that activations neither vanish nor grow. For tests and timing."""
    _check_dtype(dtype)
    rng = np.random.default_rng(seed)

    def draw(entry: Entry) -> np.ndarray:
        name = entry.path[-1]
        if name == "A_log":
            return np.log(rng.uniform(1, 16, entry.shape))
        if name == "dt_bias":
            return np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), entry.shape))))
        if name == "D" or name.endswith("norm"):
            return np.full(entry.shape, 1 - entry.shift)
        return rng.standard_normal(entry.shape, np.float32) * (0.02 if entry.index is None else entry.shape[-1] ** -0.5)

    entries = list(layout(config))
    tensors = {entry.key: _Tensor(entry.shape, partial(draw, entry), dtype) for entry in entries}
    return _assemble(entries, tensors, dtype, NUMPY)
