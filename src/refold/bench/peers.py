"""Language models of other packages at the sizes of a configuration, random weights: mamba-ssm's, and transformers'.

A model is made when it is first called for. What cannot be imported is named as not run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from ..errors import first_line
from ..models.configs import Mamba2Config, MambaConfig
from ..ops.timed import set_aside
from ..ops.torch.graphs import recorders

Call = Callable[[], None]


def absent(*modules: str) -> str | None:
    """Return why one of these modules cannot be imported; None if all can."""
    for name in modules:
        try:
            import_module(name)
        except (ImportError, OSError) as error:  # the second from a library of other versions
            return first_line(error, 200)
    return None


def of_transformers(model: Mamba2Config | MambaConfig) -> Any:
    """Return transformers' model of the same sizes."""
    import transformers as t

    common: dict[str, Any] = {
        "num_hidden_layers": model.nlayers, "vocab_size": model.vocab_size, "tie_word_embeddings": True,
    }  # fmt: skip
    if isinstance(model, Mamba2Config):
        m = model.mixer
        sizes: dict[str, Any] = {
            "num_heads": m.nheads,
            "head_dim": m.headdim,
            "state_size": m.dstate,
            "n_groups": m.ngroups,
        }
        return t.Mamba2ForCausalLM(t.Mamba2Config(hidden_size=m.d_model, **sizes, **common)).eval()
    sizes = {"state_size": model.dstate, "time_step_rank": model.dt_rank, "expand": model.d_inner // model.d_model}
    return t.MambaForCausalLM(t.MambaConfig(hidden_size=model.d_model, **sizes, **common)).eval()


def of_mamba_ssm(model: Mamba2Config | MambaConfig, device: str, dtype: torch.dtype) -> Any:
    """Return mamba-ssm's model of the same sizes."""
    from mamba_ssm.models.config_mamba import MambaConfig as Settings
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    if isinstance(model, Mamba2Config):
        m = model.mixer
        width, layer = m.d_model, {"layer": "Mamba2", "d_state": m.dstate, "headdim": m.headdim, "ngroups": m.ngroups}
    else:
        width, layer = model.d_model, {"layer": "Mamba1", "d_state": model.dstate, "dt_rank": model.dt_rank}
    settings = Settings(d_model=width, n_layer=model.nlayers, vocab_size=model.vocab_size, ssm_cfg=layer)
    return MambaLMHeadModel(settings, device=device, dtype=dtype).eval()


def name_of_mamba_ssm() -> str:
    """Return mamba-ssm's name in rows: it says if its convolution is not the fast one."""
    return "mamba-ssm" if absent("causal_conv1d_cuda") is None else "mamba-ssm, PyTorch convolution"


@torch.inference_mode()
def mamba_ssm_decoder(peer: Any, batch: int, past: int, steps: int, graph: bool = True) -> Call:
    """Return a call that decodes after a prompt as ``mamba_ssm.utils.generation.decode`` does, greedily.

    With ``graph`` the forward of a token is a replay of its own CUDA graph.
    """
    from mamba_ssm.utils.generation import InferenceParams, update_graph_cache

    ids = torch.full((batch, past), 7, device=peer.lm_head.weight.device)
    if graph:
        cache = update_graph_cache(peer, None, batch, past, past + steps)
        params = cache.inference_params
        params.reset(past + steps, batch)
    else:
        params = InferenceParams(max_seqlen=past + steps, max_batch_size=batch)
    peer(ids, inference_params=params, num_last_tokens=1)
    first = ids[:, -1:].clone()

    @torch.inference_mode()
    def call() -> None:
        params.seqlen_offset, token = past, first
        for _ in range(steps):
            at = torch.full((batch, 1), params.seqlen_offset, device=token.device)
            if graph:
                logits = cache.run(token, at, params.seqlen_offset)
            else:
                logits = peer(token, position_ids=at, inference_params=params, num_last_tokens=1).logits
            params.seqlen_offset += 1
            token = logits.squeeze(1).argmax(-1, keepdim=True)
        _wait(token)

    (_, state), *_ = params.key_value_memory_dict.values()
    return with_state_dtype(call, state)


@torch.inference_mode()
def mamba_ssm_reader(peer: Any, seqlen: int) -> Call:
    """Return a call that reads a prompt into a cache."""
    from mamba_ssm.utils.generation import InferenceParams

    ids = torch.randint(0, 50000, (1, seqlen), device=peer.lm_head.weight.device) % peer.lm_head.weight.shape[0]

    @torch.inference_mode()
    def call() -> None:
        params = InferenceParams(max_seqlen=seqlen + 1, max_batch_size=1)
        _wait(peer(ids, inference_params=params, num_last_tokens=1).logits)

    return call


@torch.no_grad()
def transformers_decoder(peer: Any, batch: int, past: int, steps: int, graph: bool = False) -> Call:
    """Return a call that decodes after a prompt by transformers' model, greedily; with ``graph`` by a CUDA graph."""
    token = torch.full((batch, 1), 7, device=peer.device)
    read = peer(token.expand(-1, past), use_cache=True)
    name = "cache" if "cache" in read else "cache_params"  # before transformers 5.24
    held = read[name]

    @torch.no_grad()
    def step() -> None:
        token.copy_(peer(token, use_cache=True, **{name: held}).logits[:, -1:].argmax(-1))

    run: Call = recorded(step) if graph else step

    def call() -> None:
        for _ in range(steps):
            run()
        _wait(token)

    return with_state_dtype(call, held.layers[0].recurrent_states[0])


@torch.no_grad()
def transformers_reader(peer: Any, seqlen: int) -> Call:
    """Return a call that reads a prompt by transformers' model into a cache."""
    ids = torch.randint(0, 50000, (1, seqlen), device=peer.device) % peer.config.vocab_size

    @torch.no_grad()
    def call() -> None:
        _wait(peer(ids, use_cache=True, logits_to_keep=1).logits)

    return call


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let imports of packages fail meanwhile."""
    with set_aside(*packages):
        sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
        yield


def with_state_dtype(call: Call, state: torch.Tensor) -> Call:
    """Note at a call that decodes in which dtype it keeps its states, for its row."""
    vars(call)["state_dtype"] = str(state.dtype).removeprefix("torch.")
    return call


def recorded(step: Call) -> Call:
    """Record a step as a CUDA graph; return what replays it."""
    for _ in range(2):  # compiles, and fills caches
        step()
    return recorders["cuda"](step, None)[1]


def _wait(made: torch.Tensor) -> None:
    """Wait for a result, and see that it is finite."""
    assert torch.isfinite(made).all(), "a model of another package made values that are not finite"
