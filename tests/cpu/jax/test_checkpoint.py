"""A wrong checkpoint gives one error that names what is wrong."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from refold.errors import CheckpointError
from refold.models.checkpoint import layout, load_checkpoint, random_params
from refold.models.configs import Config, read_config

SETTINGS = {
    "model_type": "mamba2", "vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 16,
    "state_size": 4, "n_groups": 1, "tie_word_embeddings": True, "time_step_limit": [0.0, {"__float__": "Infinity"}],
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    rng = np.random.default_rng(0)
    tensors = {e.key: rng.standard_normal(e.shape).astype(np.float32) for e in layout(read_config(tmp_path))}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def change(directory: Path, edit) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def settings(directory: Path, **changed) -> None:
    (directory / "config.json").write_text(json.dumps(SETTINGS | changed))


def test_every_tensor_lands_in_its_place(directory: Path) -> None:
    config, params = load_checkpoint(directory)
    tensors = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(params["layers"]["in_proj"][1], tensors["backbone.layers.1.mixer.in_proj.weight"])
    np.testing.assert_array_equal(
        params["layers"]["conv_weight"][0], tensors["backbone.layers.0.mixer.conv1d.weight"][:, 0]
    )
    count = params["embedding"].size + params["norm"].size + sum(a.size for a in params["layers"].values())
    assert count == sum(t.size for t in tensors.values())
    assert config.mixer.dt_limit == (0.0, float("inf"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_asked_for_is_the_dtype_got(directory: Path, dtype: str) -> None:
    _, params = load_checkpoint(directory, dtype)
    exact = {"A_log", "D", "dt_bias"}
    assert {a.dtype.name for k, a in params["layers"].items() if k not in exact} == {dtype}
    assert {params["layers"][k].dtype.name for k in exact} == {"float32"}


def test_missing_extra_and_misshapen_tensors_are_named(directory: Path) -> None:
    def edit(tensors) -> None:
        del tensors["backbone.layers.1.mixer.D"]
        tensors["backbone.surprise"] = np.ones(1, np.float32)
        tensors["backbone.norm_f.weight"] = np.ones(1, np.float32)

    change(directory, edit)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory)
    for part in ("missing: backbone.layers.1.mixer.D", "not expected: backbone.surprise", "(1,), expected (16,)"):
        assert part in str(caught.value)


def test_a_second_copy_of_tied_embeddings_must_agree(directory: Path) -> None:
    def edit(tensors, shift: float) -> None:
        tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"] + np.float32(shift)

    change(directory, lambda t: edit(t, 0.0))
    load_checkpoint(directory)
    change(directory, lambda t: edit(t, 1.0))
    with pytest.raises(CheckpointError, match="tied"):
        load_checkpoint(directory)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        *(
            (
                {"model_type": kind},
                f"unknown architecture '{kind}'. refold reads: bamba, falcon_mamba, granite",
            )
            for kind in ("llama", "jamba", "zamba2", "falcon_h1", "nemotron_h")
        ),
        ({"model_type": None}, "unknown architecture"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"hidden_size": None}, "hidden_size.*positive"),
        ({"model_type": "granitemoehybrid", "layer_types": ["conv"]}, "positive integer"),
    ],
)
def test_settings_that_cannot_be_computed(directory: Path, changed, says: str) -> None:
    settings(directory, **changed)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(directory)


def test_broken_files(directory: Path) -> None:
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="cut short"):
        load_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match="not there"):
        load_checkpoint(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_checkpoint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(directory)
    with pytest.raises(CheckpointError, match="neither a directory nor a hub name"):
        load_checkpoint("nowhere")


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code from a checkpoint ran')",))


def test_code_in_a_pickle_is_not_run(torch, directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({"a": Evil()}, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="tensors alone") as error:
        load_checkpoint(directory)
    assert "weights_only" not in str(error.value)  # PyTorch's advice is to switch the protection off


def test_a_torch_file_that_was_cut_short(torch, directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(1000)}, directory / "pytorch_model.bin")
    (directory / "pytorch_model.bin").write_bytes((directory / "pytorch_model.bin").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"is not a whole torch file \([^.\n]*\); was it cut short\?$"):
        load_checkpoint(directory)


def test_torch_file_in_bfloat16(torch, directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save({k: torch.tensor(v).bfloat16() for k, v in tensors.items()}, directory / "model.pt")
    _, params = load_checkpoint(directory)
    assert params["embedding"].dtype.name == "bfloat16"


def test_state_spaces_settings_that_cannot_be_computed(tmp_path: Path) -> None:
    raw = {"d_model": 32, "n_layer": 1, "vocab_size": 64, "rms_norm": True, "attn_layer_idx": [], "d_intermediate": 0}
    usual = {"layer": "Mamba2", "D_has_hdim": False, "norm_before_gate": False, "rmsnorm": True, "d_ssm": None}

    def read(**changed: object) -> Config:
        ssm = usual | {key: value for key, value in changed.items() if key in usual}
        changed = {key: value for key, value in changed.items() if key not in usual}
        (tmp_path / "config.json").write_text(json.dumps({**raw, "ssm_cfg": ssm, **changed}))
        return read_config(tmp_path)

    assert read(vocab_size=50277, pad_vocab_size_multiple=16).vocab_size == 50288
    for changed in (
        {"layer": "Mamba9"}, {"D_has_hdim": True}, {"norm_before_gate": True}, {"rmsnorm": False}, {"d_ssm": 32},
        {"rms_norm": False}, {"attn_layer_idx": [1]}, {"d_intermediate": 64},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=next(iter(changed.keys() - {"layer"}), "Mamba9")):
            read(**changed)


def test_random_parameters_fit_their_layout(directory: Path) -> None:
    config = read_config(directory)
    params = random_params(config)
    assert params["layers"]["in_proj"].shape == (2, 74, 16)


@pytest.mark.parametrize("dtype", ["int8", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_weights_that_are_no_floats_are_refused(torch, directory: Path, dtype: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors, name = load_file(directory / "model.safetensors"), "backbone.layers.1.mixer.in_proj.weight"
    tensors[name] = tensors[name].to(getattr(torch, dtype))
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} is stored as .*; weights must be float64, float32"):
        load_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=rf"{name} is stored as {dtype}"):
        load_checkpoint(directory)


def test_layers_of_different_dtypes_are_refused_unless_one_is_named(directory: Path) -> None:
    def edit(tensors) -> None:
        name = "backbone.layers.0.mixer.in_proj.weight"
        tensors[name] = tensors[name].astype(np.float16)

    change(directory, edit)
    with pytest.raises(CheckpointError, match=r"layers.0.mixer.in_proj.weight is float16, but .*layers.1.* is float32"):
        load_checkpoint(directory)
    assert load_checkpoint(directory, "float32")[1]["layers"]["in_proj"].dtype == np.float32


def test_pickles_of_anything_but_names_and_dense_tensors_are_refused(torch, directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    for content in ({1: torch.ones(1)}, [torch.ones(1)], {"a": {"b": torch.ones(1)}}, {"a": torch.eye(2).to_sparse()}):
        torch.save(content, directory / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="dictionary of names and dense tensors"):
            load_checkpoint(directory)


@pytest.mark.parametrize(
    "index",
    ["[]", "null", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null}}', "\xff"],
)
def test_an_index_that_is_none(directory: Path, index: str) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_bytes(index.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json"):
        load_checkpoint(directory)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/hostname", "a/b.safetensors", "..", "", "..\\x"])
def test_an_index_does_not_point_outside(directory: Path, shard: str) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="a shard must be a file next to the index"):
        load_checkpoint(directory)


IMPOSSIBLE = [
    ("num_hidden_layers", 10**6), ("num_hidden_layers", 10**18), ("num_hidden_layers", 10**400), ("hidden_size", True),
    ("n_groups", 2.0), ("n_groups", "24"), ("n_groups", [24]), ("n_groups", 3), ("time_step_limit", [1]),
    ("time_step_limit", ["a", "b"]), ("time_step_limit", [{"x": 1}, 2]), ("time_step_limit", [2, 1]),
    ("time_step_limit", 3), ("time_step_limit", [0, 10**400]), ("layer_norm_epsilon", -1e-5),
    ("eos_token_id", "x"), ("eos_token_id", [1, [2]]), ("eos_token_id", -1),
    ("model_type", ["a"]), ("model_type", "gpt"), ("layer_norm_epsilon", "x"), ("layer_norm_epsilon", float("nan")),
    ("conv_kernel", 0), ("use_bias", "no"), ("tie_word_embeddings", 1), ("quantization_config", {"bits": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), IMPOSSIBLE)
def test_impossible_settings_are_refused_at_once(directory: Path, key: str, value: object) -> None:
    settings(directory, **{key: value})
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory)
    assert (
        key in str(caught.value)
        or "layers" in str(caught.value)
        or "groups" in str(caught.value)
        or key == "model_type"
    )


MAMBA = {"model_type": "mamba", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "state_size": 2}
GRANITE = {
    "model_type": "granitemoehybrid", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "shared_intermediate_size": 4, "mamba_n_heads": 2, "mamba_d_state": 2,
    "position_embedding_type": "rope",
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "changed", "says"),
    [
        (MAMBA, {"time_step_rank": "x"}, "time_step_rank"),
        (MAMBA, {"expand": "x"}, "expand"),
        *((MAMBA, {"expand": value}, "expand|intermediate_size") for value in (10**300, 10**400, 1e308)),
        (MAMBA, {"layer_norm_epsilon": -1.0}, "layer_norm_epsilon"),
        (GRANITE, {"rope_theta": 0}, "rope_theta=0"),
        (GRANITE, {"rope_parameters": {"rope_theta": -2.0}}, "rope_theta=-2"),
        (GRANITE, {"residual_multiplier": 1e300}, "residual_multiplier.*float32 can hold"),
        (GRANITE, {"embedding_multiplier": 10**400}, "embedding_multiplier.*float32 can hold"),
        (GRANITE, {"rms_norm_eps": -1}, "rms_norm_eps.*0 or more"),
    ],
)
def test_impossible_settings_of_other_models(tmp_path: Path, raw: dict, changed: dict, says: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | changed))
    with pytest.raises(CheckpointError, match=says):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("installed", "groups"), [("5.17.0", 1), ("5.22.0", 1), ("5.23.0.dev0", 2), ("6.0", 2), (None, 2)]
)
def test_groups_of_the_gated_norm_follow_transformers(directory: Path, monkeypatch, installed, groups) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    settings(directory, num_heads=4, n_groups=2)
    assert read_config(directory).mixer.norm_groups == groups


def test_a_configuration_that_is_a_directory(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(directory)
