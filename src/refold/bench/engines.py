"""Calls of serving engines at the sizes of published layers: refold's adapters next to the engines' own kernels.

All programs of a case get the same prompts and states, which are copies of their own. Results and states are compared
with the adapter in float64. Programs that are right are captured in a CUDA graph, of as many layers as make 4 times the
L2 cache, and replayed in turns: ``median_ms`` is of one layer. ``eager_ms`` is without a graph. The engines' kernels
come from folders, ``--set vllm=FOLDER`` and ``--set sglang=FOLDER``; what cannot run is named under ``not_run``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..engines import adapters
from ..errors import first_line
from . import engine_kernels
from .contest import relative, times_ms
from .options import check_names
from .progress import wanted
from .rows import Row

Given = dict[str, Any]
EngineCall = Callable[[Given], tuple[Tensor, Tensor]]
BOUND = 3e-2
"""Relative L2 error of outputs and states; tokens are bfloat16, states float32."""
CHUNK = 64  # Tokens of a chunk of the engines' delta rules.


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer: heads of values, their channels, heads of keys or groups, states, tokens of a chunk."""

    kind: str
    heads: int
    channels: int
    groups: int
    states: int
    chunk: int = CHUNK


LAYERS = {
    "nemotron-h-8b": Layer("mamba2", 128, 64, 8, 128, 128),
    "granite-4.0-h-micro": Layer("mamba2", 64, 64, 1, 128, 256),
    "qwen3.5": Layer("gated delta", 32, 128, 16, 128),
    "kimi-linear": Layer("kimi delta", 32, 128, 32, 128),
    "falcon-mamba-7b": Layer("mamba1", 1, 8192, 1, 16),
    "tiny-mamba2": Layer("mamba2", 2, 16, 1, 16, 16),
    "tiny-gated-delta": Layer("gated delta", 2, 16, 1, 16),
    "tiny-kimi-delta": Layer("kimi delta", 2, 16, 2, 16),
    "tiny-mamba1": Layer("mamba1", 1, 32, 1, 16),
}
PUBLISHED = tuple(name for name in LAYERS if not name.startswith("tiny"))
SHARES = (0.5, 0.25, 0.2)
"""Prompts of a pack, by their share of its tokens; a last one has the rest."""


def _offsets(tokens: int) -> list[int]:
    ends = [0]
    for share in SHARES:
        ends.append(min(tokens, ends[-1] + (int(tokens * share) | 1)))
    return [*ends, tokens]


def _chunks(offsets: list[int], chunk: int) -> tuple[list[int], list[int], list[int]]:
    """Return offsets of chunks, none of which is in two prompts; the prompt of each; the last chunk of each prompt."""
    ends, prompts, last = [0], list[int](), list[int]()
    for prompt, (begin, end) in enumerate(pairwise(offsets)):
        cuts = [*range(begin + chunk, end, chunk), end]
        ends, prompts = ends + cuts, prompts + [prompt] * len(cuts)
        last.append(len(prompts) - 1)
    return ends, prompts, last


def drawn(layer: Layer, phase: str, size: int, device: str) -> Given:
    """Return the arguments of a call: ``size`` tokens of packed prompts, or as many rows of one token."""

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def index(values: Any) -> Tensor:
        return torch.as_tensor(list(values), device=device, dtype=torch.int32)

    h, p, g, n, wide = layer.heads, layer.channels, layer.groups, layer.states, torch.float32
    prefill = phase == "prefill"
    offsets = _offsets(size) if prefill else list(range(size + 1))
    count = len(offsets) - 1
    given: Given = {"offsets": index(offsets), "slots": index(range(1, count + 1))}
    shape = (h, p, n) if layer.kind != "mamba1" else (p, n)
    given["pool"] = normal(count + 1, *shape, dtype=wide)
    if "delta" in layer.kind:
        given |= {"q": normal(1, size, g, n), "k": normal(1, size, g, n), "v": normal(1, size, h, p)}
        keys = (n,) if layer.kind == "kimi delta" else ()
        given |= {"a": normal(1, size, h, *keys), "b": normal(1, size, h)}
        given |= {"A_log": torch.rand(h, device=device).log(), "dt_bias": normal(h, *keys, dtype=wide)}
        given["chunks"] = index([
            [prompt, i]
            for prompt, (a, b) in enumerate(pairwise(offsets))
            for i in range(math.ceil((b - a) / CHUNK))
        ])  # fmt: skip
        return given
    width = (h, p) if layer.kind == "mamba2" else (p,)
    rate = (h,) if layer.kind == "mamba2" else (p, n)
    given |= {"x": normal(size, *width), "dt": normal(size, width[0]), "A": -torch.rand(rate, device=device)}
    shared = (g, n) if layer.kind == "mamba2" else (n,)
    given |= {"B": normal(size, *shared), "C": normal(size, *shared)}
    given |= {"D": normal(width[0], dtype=wide), "dt_bias": normal(width[0], dtype=wide)}
    ends, prompts, last = _chunks(offsets, layer.chunk)
    return given | {"ends": index(ends), "prompts": index(prompts), "last": index(last), "chunk": layer.chunk,
                    "documents": torch.repeat_interleave(index(range(count)), index(offsets).diff())[None]}  # fmt: skip


def _after(pool: Tensor, slots: Tensor, states: Tensor) -> Tensor:
    pool[slots.long()] = states.to(pool.dtype)
    return pool


def _scan(kernel: Callable[..., Any], given: Given) -> tuple[Tensor, Tensor]:
    """Call vLLM's prefill of Mamba-2, or the adapter in its place, and write states as its layer does."""
    g, out = given, torch.empty_like(given["x"])
    states = kernel(
        g["x"], g["dt"], g["A"], g["B"], g["C"], g["chunk"], g["offsets"], g["ends"], g["last"], g["prompts"], out,
        D=g["D"], dt_bias=g["dt_bias"], initial_states=g["pool"][g["slots"].long()], dt_softplus=True,
        state_dtype=g["pool"].dtype,
    )  # fmt: skip
    return out, _after(g["pool"], g["slots"], states)


def _scan_fresh(kernel: Callable[..., Any], given: Given) -> tuple[Tensor, Tensor]:
    """Do the same under SGLang's signature."""
    g, out = given, torch.empty_like(given["x"])
    _, states, _ = kernel(
        g["x"][None], g["dt"][None], g["A"], g["B"][None], g["C"][None], g["chunk"], D=g["D"], dt_bias=g["dt_bias"],
        seq_idx=g["documents"], cu_seqlens=g["offsets"], return_varlen_states=True, return_track_states=True,
        dt_softplus=True, out=out[None], state_dtype=g["pool"].dtype,
    )  # fmt: skip
    return out, _after(g["pool"], g["slots"], states)


def _update(kernel: Callable[..., Any], given: Given) -> tuple[Tensor, Tensor]:
    """Call the state update of either engine, or an adapter; parameters are expanded over channels as layers do."""
    g, out = given, torch.empty_like(given["x"])
    dt, A, D, bias = g["dt"], g["A"], g["D"], g["dt_bias"]
    if g["x"].ndim == 3:
        _, h, p, n = g["pool"].shape
        dt, A = dt[:, :, None].expand(-1, -1, p), A[:, None, None].expand(h, p, n)
        D, bias = D[:, None].expand(h, p), bias[:, None].expand(h, p)
    kernel(
        g["pool"], g["x"], dt, A, g["B"], g["C"], D=D, dt_bias=bias, dt_softplus=True, state_batch_indices=g["slots"],
        out=out,
    )  # fmt: skip
    return out, g["pool"]


def _selective_scan(given: Given) -> tuple[Tensor, Tensor]:
    g, first = given, torch.ones_like(given["slots"], dtype=torch.bool)
    turned = {name: g[name].T.contiguous() for name in ("x", "dt", "B", "C")}
    out = adapters.selective_scan_varlen(
        turned["x"], g["pool"], turned["dt"], g["A"], turned["B"], turned["C"], g["D"], None, g["dt_bias"], True,
        g["offsets"], g["slots"], first,
    )  # fmt: skip
    return out.T, g["pool"]


def _gates(given: Given) -> tuple[Tensor, Tensor]:
    a = given["a"].to(given["A_log"].dtype)
    return -given["A_log"].exp() * torch.nn.functional.softplus(a + given["dt_bias"]), given["b"].to(a.dtype).sigmoid()


def _delta_by_vllm(kernel: Callable[..., Any], given: Given) -> tuple[Tensor, Tensor]:
    """Call vLLM's prefill of the gated delta rule, or the adapter, between gathering and scattering states."""
    g, (decay, beta) = given, _gates(given)
    o, states = kernel(
        q=g["q"], k=g["k"], v=g["v"], g=decay, beta=beta, initial_state=g["pool"][g["slots"].long()],
        output_final_state=True, cu_seqlens=g["offsets"], chunk_indices=g["chunks"], use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return o, _after(g["pool"], g["slots"], states)


def _delta_by_sglang(kernel: Callable[..., Any], given: Given) -> tuple[Tensor, Tensor]:
    """Call SGLang's prefill of the gated delta rule, which updates states where they lie."""
    g, (decay, beta) = given, _gates(given)
    o = kernel(
        q=g["q"], k=g["k"], v=g["v"], g=decay, beta=beta, initial_state=g["pool"], initial_state_indices=g["slots"],
        cu_seqlens=g["offsets"], use_qk_l2norm_in_kernel=True,
    )[0]  # fmt: skip
    return o, g["pool"]


def _extend(given: Given) -> tuple[Tensor, Tensor]:
    g, (decay, beta) = given, _gates(given)
    places = {"ssm_states": g["pool"], "cache_indices": g["slots"], "query_start_loc": g["offsets"]}
    return adapters.gated_delta_extend(g["q"], g["k"], g["v"], decay, beta, **places), g["pool"]


def _decode(kernel: Callable[..., Any], given: Given) -> tuple[Tensor, Tensor]:
    g = given
    places = {"ssm_states": g["pool"], "cache_indices": g["slots"], "query_start_loc": g["offsets"]}
    gates = {"A_log": g["A_log"], "dt_bias": g["dt_bias"]}
    return kernel(g["q"], g["k"], g["v"], g["a"][0], g["b"][0], **gates, **places), g["pool"]


def _decode_by_vllm(kernel: Callable[..., Any], given: Given) -> tuple[Tensor, Tensor]:
    g = given
    o = kernel(
        A_log=g["A_log"], a=g["a"][0], b=g["b"][0], dt_bias=g["dt_bias"], q=g["q"], k=g["k"], v=g["v"],
        initial_state=g["pool"], cu_seqlens=g["offsets"], ssm_state_indices=g["slots"], use_qk_l2norm_in_kernel=True,
    )[0]  # fmt: skip
    return o, g["pool"]


def _decode_by_sglang(kernel: Callable[..., Any], given: Given, kimi: bool = False) -> tuple[Tensor, Tensor]:
    g, heads = given, given["v"].shape[2]
    rows = g["a"].shape[1]
    o = kernel(
        A_log=g["A_log"], a=g["a"].reshape(rows, -1), dt_bias=g["dt_bias"].flatten(), softplus_beta=1.0,
        softplus_threshold=20.0, q=g["q"], k=g["k"], v=g["v"], b=g["b"].reshape(rows, heads),
        initial_state_source=g["pool"], initial_state_indices=g["slots"], use_qk_l2norm_in_kernel=True,
        cu_seqlens=g["offsets"], is_kda=kimi,
    )  # fmt: skip
    return o, g["pool"]


def _kimi(kernel: Callable[..., Any], given: Given, ours: bool = False) -> tuple[Tensor, Tensor]:
    g = given
    gates = {"A_log": g["A_log"], "dt_bias": g["dt_bias"], "beta_is_raw": True}
    if ours:
        places = {"ssm_states": g["pool"], "cache_indices": g["slots"], "query_start_loc": g["offsets"]}
        return kernel(g["q"], g["k"], g["v"], g["a"], g["b"], **gates, **places), g["pool"]
    o = kernel(
        q=g["q"], k=g["k"], v=g["v"], g=g["a"], beta=g["b"], initial_state=g["pool"],
        initial_state_indices=g["slots"], use_qk_l2norm_in_kernel=True, cu_seqlens=g["offsets"],
        chunk_indices=g["chunks"], **{**gates, "dt_bias": g["dt_bias"].flatten()},
    )  # fmt: skip
    return o, g["pool"]


CALLS: dict[tuple[str, str], dict[str, tuple[Callable[..., Any], Any]]] = {
    ("mamba2", "prefill"): {
        "refold": (_scan, adapters.chunk_scan_varlen), "vllm": (_scan, "chunk_scan"),
    },
    ("mamba2", "prefill, new prompts"): {
        "refold": (_scan_fresh, adapters.chunk_scan_packed), "sglang": (_scan_fresh, "chunk_scan"),
    },
    ("mamba2", "decode"): {
        "refold": (_update, adapters.state_update), "refold, sglang": (_update, adapters.slot_update),
        "vllm": (_update, "state_update"), "sglang": (_update, "state_update"),
    },
    ("mamba1", "prefill"): {"refold": (_selective_scan, None)},
    ("mamba1", "decode"): {
        "refold": (_update, adapters.state_update), "vllm": (_update, "state_update"),
        "sglang": (_update, "state_update"),
    },
    ("gated delta", "prefill"): {
        "refold": (_delta_by_vllm, adapters.gated_delta_prefill), "refold, sglang": (_extend, None),
        "vllm": (_delta_by_vllm, "gated_delta"), "sglang": (_delta_by_sglang, "gated_delta"),
    },
    ("gated delta", "decode"): {
        "refold": (_decode, adapters.gated_delta_decode), "vllm": (_decode_by_vllm, "gated_delta_update"),
        "sglang": (_decode_by_sglang, "gated_delta_update"),
    },
    ("kimi delta", "prefill"): {
        "refold": (partial(_kimi, ours=True), adapters.kimi_delta_extend), "sglang": (_kimi, "kimi_delta"),
    },
    ("kimi delta", "decode"): {
        "refold": (_decode, adapters.kimi_delta_decode),
        "sglang": (partial(_decode_by_sglang, kimi=True), "gated_delta_update"),
    },
}  # fmt: skip
"""By kind of layer and phase: for each program how it is called, and the adapter or the name of an engine's kernel."""


def programs(kind: str, phase: str, kernels: dict[str, engine_kernels.Kernels]) -> dict[str, EngineCall]:
    """Return the programs of a case; ``kernels`` are those of the engines that are there."""
    found: dict[str, EngineCall] = {}
    for name, (call, kernel) in CALLS[kind, phase].items():
        if isinstance(kernel, str):
            if name not in kernels:
                continue
            kernel = kernels[name][kernel]
        found[name] = call if kernel is None else partial(call, kernel)
    return found


def copied(given: Given, wide: bool = False) -> Given:
    """Copy what layers have of their own; indices are shared, as the metadata of a step is."""
    dtype = torch.float64 if wide else None
    own = {name: one for name, one in given.items() if isinstance(one, Tensor) and one.is_floating_point()}
    return given | {name: one.to(dtype=dtype or one.dtype, copy=True) for name, one in own.items()}


def captured(run: EngineCall, given: Given, layers: int) -> Callable[[], object]:
    """Return the replay of a graph that makes a call once for each of some layers, with arguments of their own."""
    copies = [copied(given) for _ in range(layers)]
    run(copies[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run(one) for one in copies]

    def replay() -> object:  # which keeps what the graph reads: the next capture gives back memory that is free
        graph.replay()
        return kept, copies

    return replay


def _measure(runs: dict[str, EngineCall], given: Given, rounds: int) -> Row:
    """Return errors and times of programs; the first is the adapter, which defines the result in float64."""
    expected, device = next(iter(runs.values()))(copied(given, wide=True)), given["pool"].device
    size = sum(one.nbytes for one in given.values() if isinstance(one, Tensor))
    cache = torch.cuda.get_device_properties().L2_cache_size if device.type == "cuda" else 0
    layers = min(32, max(2, math.ceil(4 * cache / size)))
    row: Row = {"errors": {}, "not_run": {}}
    eager, graphs = dict[str, Callable[[], object]](), dict[str, Callable[[], object]]()
    for name, run in runs.items():
        try:
            found = run(copied(given))
            errors = [relative(a, b) for a, b in zip(found, expected, strict=True)]
            row["errors"][name] = max(errors)
            if not max(errors) <= BOUND:
                row["not_run"][name] = f"an error above {BOUND}"
                continue
            if device.type == "cuda":
                graphs[name] = captured(run, given, layers)
            eager[name] = partial(run, copied(given))
        except Exception as error:  # whatever a kernel raises; the run goes on
            row["not_run"][name] = first_line(error, 200)
    times = {"eager_ms": times_ms(eager, rounds, device), "median_ms": times_ms(graphs, rounds, device)}
    for key, taken in times.items():
        count = layers if key == "median_ms" else 1
        row[key] = {name: statistics.median(values) / count for name, values in taken.items()}
    return row


def engines(
    *, device: str = "cuda", model: tuple[str, ...] = PUBLISHED, tokens: tuple[int, ...] = (2048, 8192),
    rows: tuple[int, ...] = (1, 16, 128), vllm: str = "", sglang: str = "", rounds: int = 20,
) -> Iterator[Row]:  # fmt: skip
    """Time what plugins put into vLLM and SGLang in CUDA graphs, beside the engines' Triton kernels from a folder."""
    check_names("engines: model", model, LAYERS)
    folders = {name: folder for name, folder in (("vllm", vllm), ("sglang", sglang)) if folder}
    kernels: dict[str, engine_kernels.Kernels] = {}
    for name in model:
        layer = LAYERS[name]
        for phase in (phase for kind, phase in CALLS if kind == layer.kind):
            for size in tokens if phase.startswith("prefill") else rows:
                what: Row = {"case": f"{name}, {phase}", "dtype": "bfloat16"}
                what |= {"batch": 1, "tokens": size} if phase.startswith("prefill") else {"batch": size, "tokens": 1}
                if not wanted(**what):
                    continue
                kernels = kernels or {one: engine_kernels.kernels(one, folder) for one, folder in folders.items()}
                torch.manual_seed(0)
                given = drawn(layer, phase.partition(",")[0], size, device)
                peers = {one: engine_kernels.version(one, folder) for one, folder in folders.items()}
                yield what | {"peers": peers} | _measure(programs(layer.kind, phase, kernels), given, rounds)
