"""transformers' own recurrent models, unmodified and compiled, next to the same models accelerated, in inference.

A model has a few layers of its recurrent kind at the proportions of a published model, without experts, and with an MLP
as wide as the model. It reads embeddings, and keeps no cache. All programs of a case have the same weights. Results are
compared with the model in float64 before anything is timed. Programs take turns.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import refold

from ..compat import PACKAGES
from ..errors import ArgumentError, RefoldWarning
from .contest import BOUND, contest
from .layers import twin
from .options import check_names
from .peers import hidden
from .progress import wanted
from .rows import Row

# The configurations name the same sizes in three ways.
_MAMBA1 = {"state_size": 16}
_JAMBA = {"mamba_d_state": 16, "attn_layer_offset": 7, "num_experts": 1, "num_experts_per_tok": 1}


class Model(NamedTuple):
    """A model of transformers.

    Attributes:
        kind: The name of its class, without ``Model``.
        width: The width of the published model.
        more: Returns further settings, from the width and the number of layers.
    """

    kind: str
    width: int
    more: Callable[[int, int], dict[str, Any]]


def _heads(width: int, states: int) -> dict[str, Any]:
    """Return the sizes of a Mamba-2 layer with heads of 64 channels, and of the attention that a model may have."""
    sizes = {"mamba_n_heads": 2 * width // 64, "mamba_d_head": 64, "mamba_d_state": states, "mamba_n_groups": 1}
    return {**sizes, **_attention(width)}


def _attention(width: int) -> dict[str, Any]:
    return {"num_attention_heads": max(1, width // 128), "num_key_value_heads": max(1, width // 512)}


MODELS = {
    "mamba2": Model("Mamba2", 2560, lambda width, layers: {
        "num_heads": 2 * width // 64, "head_dim": 64, "state_size": 128, "n_groups": 1}),
    "bamba": Model("Bamba", 4096, lambda width, layers: {**_heads(width, 128), "attn_layer_indices": []}),
    "granitemoehybrid": Model("GraniteMoeHybrid", 1536, lambda width, layers: {
        **_heads(width, 128), "layer_types": ["mamba"] * layers, "num_local_experts": 0,
        "shared_intermediate_size": width}),
    "falcon_h1": Model("FalconH1", 2048, lambda width, layers: {**_heads(width, 256), "mamba_d_ssm": 2 * width}),
    "nemotron_h": Model("NemotronH", 4096, lambda width, layers: {
        **_attention(width), "layers_block_type": ["mamba"] * layers, "mamba_num_heads": 2 * width // 64,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": min(8, 2 * width // 64)}),
    "zamba2": Model("Zamba2", 2560, lambda width, layers: {
        "layers_block_type": ["mamba"] * layers, "n_mamba_heads": 2 * width // 64, "mamba_headdim": 64,
        "mamba_d_state": 64, "num_attention_heads": max(1, width // 128)}),
    "recurrent_gemma": Model("RecurrentGemma", 2560, lambda width, layers: {
        **_attention(width), "lru_width": width, "block_types": ["recurrent"]}),
    "minimax": Model("MiniMax", 4096, lambda width, layers: {
        **_attention(width), "layer_types": ["linear_attention"] * layers, "num_local_experts": 1,
        "num_experts_per_tok": 1}),
    "mamba": Model("Mamba", 2560, lambda width, layers: {**_MAMBA1, "time_step_rank": width // 16}),
    "falcon_mamba": Model("FalconMamba", 4096, lambda width, layers: {**_MAMBA1, "time_step_rank": width // 16}),
    "jamba": Model("Jamba", 4096, lambda width, layers: {**_JAMBA, **_attention(width), "mamba_dt_rank": width // 16}),
}  # fmt: skip
"""By transformers' names; those whose original is a loop over all tokens come last."""


def make(name: str, width: int, layers: int) -> Any:
    """Return a model with random weights whose layers weigh as much as their inputs."""
    # transformers takes the kernels of these packages where it finds them; the model here is its PyTorch code.
    with hidden(*PACKAGES):
        one = MODELS[name]
        given = {
            "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": width, "vocab_size": 8,
            "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **one.more(width, layers),
        }  # fmt: skip
        if one.kind == "NemotronH":  # their number is the length of the list of their kinds
            del given["num_hidden_layers"]
        if one.kind in ("Mamba", "FalconMamba", "Mamba2"):  # no MLP, and the name is another size there
            del given["intermediate_size"]
        model = getattr(transformers, f"{one.kind}Model")(getattr(transformers, f"{one.kind}Config")(**given))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5)
    return model.eval()


def models(
    *, case: tuple[str, ...] = tuple(MODELS), device: str = "cpu", dtype: str = "float32", width: int = 256,
    layers: int = 2, batch: int = 1, tokens: int = 512, rounds: int = 20, eager: bool = True, both: bool = False,
    inductor: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """Time transformers' models in inference: eager, accelerated, compiled, and with both=true the two together.

    A width of 0 is that of the published model.
    """
    check_names("models: case", case, MODELS)
    check_names("models: dtype", [dtype], BOUND)
    if width % 512 and width not in (128, 256):  # else heads of attention do not share keys evenly
        raise ArgumentError(f"models: width is {width}. Give 128, 256, a multiple of 512, or 0 for the published width")
    transformers.logging.set_verbosity_error()
    for name in case:
        what: Row = {"case": name, "transformers": transformers.__version__, "dtype": dtype, "batch": batch}
        what |= {"tokens": tokens, "layers": layers, "width": width or MODELS[name].width}
        if not wanted(**what):
            continue
        torch.manual_seed(0)
        torch.compiler.reset()
        model = make(name, what["width"], layers).to(device, getattr(torch, dtype))
        x = torch.randn(batch, tokens, what["width"]).to(device, getattr(torch, dtype))
        compiled = refold.compile(model, cache=False)
        programs = {"refold": compiled, "accelerated": _accelerated(model)}
        programs |= {"eager": model} if eager else {}
        programs |= {"accelerated, refold": refold.compile(_accelerated(model), cache=False)} if both else {}
        programs |= {"torch.compile": torch.compile(model)} if inductor else {}
        row = what | measure(model, programs, x, BOUND[dtype], rounds)
        graphs = compiled.report.graphs
        yield row | {
            "found": [one.detail for graph in graphs for one in graph.applied],
            "left": [f"{one.detail}: {one.reason}" for one in compiled.report.rewrites if one.status == "refused"],
            "chosen": [graph.chosen for graph in graphs],
            "notes": [note for graph in graphs for note in graph.notes],
            "compile_s": sum(graph.compile_s or 0.0 for graph in graphs),
            "checks_s": sum(graph.checks_s or 0.0 for graph in graphs),
        }


@torch.no_grad()
def measure(model: Any, programs: dict[str, Any], x: Tensor, bound: float, rounds: int) -> Row:
    """Check the programs of a model, and time those that are right in turns."""

    def exact() -> Tensor:
        wide = copy.deepcopy(model).double()
        wide.set_experts_implementation("eager")  # a grouped product of matrices takes no float64
        return _call(wide, x.double())

    calling = {name: partial(_call, program, x) for name, program in programs.items() if program is not None}
    row, _ = contest(calling, exact, bound, rounds, x.device)
    row["not_run"] |= dict.fromkeys(programs.keys() - calling.keys(), "refold has no forward for its layers")
    return row


def _call(model: Any, x: Tensor) -> Tensor:
    return model(inputs_embeds=x, use_cache=False).last_hidden_state


def _accelerated(model: Any) -> Any:
    """Return an accelerated copy of a model that shares its weights; None if no layer of it can be accelerated."""
    other = twin(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefoldWarning)
        return other if refold.accelerate(other).replaced else None
