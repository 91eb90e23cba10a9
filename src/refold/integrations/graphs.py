"""One token per row of an accelerated model as one CUDA graph, under the user's own ``model.generate``.

The host takes ten times as long to launch a token's kernels as the device takes to run them. So the second call that
reads one token per row is captured, and later calls replay the graph. A graph has fixed memory: it lends this memory to
the cache of one conversation at a time. Layers of attention get keys and values of a fixed capacity; the user's cache
holds views of what is filled. When another cache comes, the one before gets copies of its own.

`refusal` says when a graph may run. Everything else, and every call that was refused, runs as before.
Design decision 27.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from refold.errors import first_line
from refold.integrations import attention, documents, lean, parts
from refold.integrations.decoding import any_global_hook
from refold.integrations.documents import CACHES, cache_of
from refold.integrations.lean import Lean
from refold.integrations.mixers import HOOKS
from refold.ops.torch import private
from refold.ops.torch.graphs import recorders

INPUTS = ("input_ids", "attention_mask", "position_ids")
LAYERS = ("LinearAttentionLayer", "DynamicLayer", "LinearAttentionAndFullAttentionLayer")
"""Classes of transformers' cache layers whose memory a graph can lend."""
ATTENTION = ("sdpa", "eager")
"""Implementations of attention that take keys and values of a fixed capacity with a mask."""
PACKAGES = ("torch.nn.modules.", "transformers.", "refold.")
"""Modules of these packages compute from their parameters alone, so a change can be seen (`Snapshot`)."""
SMALLEST = 1024
"""Least capacity of keys and values, in tokens; it is doubled when it is full."""
KEPT = 4
"""Graphs that a model keeps: those of the numbers of rows that were used last."""
_STATES = ("conv_states", "recurrent_states")
_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")
_IDLE = (attention.__name__, documents.__name__, "transformers.utils.output_capturing")
_COMMON = frozenset(vars(nn.Module())) - {"training"}
"""What every module holds besides its settings."""


class Snapshot:
    """What a graph relies on in a model: its modules, hooks and settings, and where parameters and buffers lie."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.fields = [vars(module) for module in self.modules]
        tables = [fields[name] for fields in self.fields for name in ("_modules", "_parameters", "_buffers")]
        hooks = [fields[name] for fields in self.fields for name in HOOKS]
        self.empty = [table for table in (*tables, *hooks) if not table]
        self.filled = [table for table in tables if table]
        self.hooks = [table for table in hooks if table]
        self.kept = [*map(dict, self.filled)]
        places = [(t, name) for t in self.filled for name, value in t.items() if isinstance(value, Tensor)]
        self.tensors = [table[name] for table, name in places]
        self.single = [(table, name) for table, name in places if table[name].numel() == 1]
        self.tables = _tables(self.fields)
        self.settings = _settings(self.tables)
        self.seen = _copied(self._look())

    def _look(self) -> tuple[Any, ...]:
        return (
            [*map(type, self.modules)],
            [*map(len, self.tables)],
            [*map(len, self.hooks)],
            [id(table[name]) for table, name in self.single],
            [*map(Tensor.data_ptr, self.tensors)],
            [[*map(read, tables)] for read, tables in self.settings],
        )

    def holds(self) -> bool:
        """Whether nothing has changed since; values of weights may have."""
        try:  # equal tables hold the same objects: another tensor of several numbers is not equal or unequal
            return not any(self.empty) and self.filled == self.kept and self.seen == self._look()
        except (KeyError, RuntimeError, ValueError):  # something is gone, or is neither equal nor unequal
            return False

    def refusal(self) -> str | None:
        """Say why no graph may run this model; None if one may."""
        if any(fields["training"] for fields in self.fields):
            return "the model is in training mode: call model.eval()"
        for module, fields in zip(self.modules, self.fields, strict=True):
            kind = type(module)
            if not kind.__module__.startswith(PACKAGES):
                return f"it has a {kind.__name__} of the package {kind.__module__.partition('.')[0]}"
            if "forward" in fields:
                return f"the forward of a {kind.__name__} was replaced on the instance"
            if not all(_idle(hook) for name in HOOKS for hook in fields[name].values()):
                return f"a {kind.__name__} has hooks"
        if {type(tensor) for tensor in self.tensors} - {Tensor, nn.Parameter, nn.Buffer}:
            return "its weights are quantised or sharded"
        if len({tensor.device for tensor in self.tensors}) != 1:
            return "its weights are on several devices"
        return None


class _Fixed:
    """A layer of attention's cache whose keys and values do not move: a token is written at ``position``."""

    is_compileable = True  # the mask is always made then, since most of the capacity is empty
    keys: Tensor
    values: Tensor
    position: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token and hand out keys and values of the whole capacity."""
        self.keys.index_copy_(2, self.position, key_states)
        self.values.index_copy_(2, self.position, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Tensor:
        """Give the number of tokens read, on the device."""
        return self.position[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Give the number of keys, and the position of the first."""
        return self.keys.shape[2], 0


@cache
def _fixed(kind: Any) -> Any:
    return type(f"Fixed{kind.__name__}", (_Fixed, kind), {})


class HeldTensor(NamedTuple):
    """One tensor of a cache: its layer in the user's cache, its name there, and its fixed memory."""

    layer: int
    name: str
    state: int | None
    """Key in the layer's dictionary of states; None for keys and values, whose fixed memory has the capacity."""
    memory: Tensor

    def of(self, layer: Any) -> Tensor:
        """Give what a layer of a cache holds there."""
        found = getattr(layer, self.name)
        return found if self.state is None else found[self.state]

    def put(self, layer: Any, value: Tensor) -> None:
        """Let a layer of a cache hold a tensor there."""
        if self.state is None:
            setattr(layer, self.name, value)
        else:
            getattr(layer, self.name)[self.state] = value

    def part(self, length: int) -> Tensor:
        """Give the part of the fixed memory that is filled after ``length`` tokens."""
        return self.memory if self.state is not None else self.memory[:, :, :length]


class Step:
    """One token of one number of rows: fixed inputs, the fixed memory of a cache, and what fills the result."""

    def __init__(self, model: Any, name: str, held: Any, given: Mapping[str, Any], capacity: int) -> None:
        ids = given["input_ids"]
        self.name, self.capacity, self.length, self.busy = name, capacity, 0, 0
        self.options = {key: value for key, value in given.items() if key not in (*INPUTS, *CACHES)}
        self.holder: Callable[[], Any] = lambda: None
        self.lent: list[tuple[Any, HeldTensor, Tensor]] = []
        self.replay: Callable[[], None] | None = None
        self.result: Any = None
        with torch.inference_mode(False):  # tensors of that mode cannot be written outside of it
            self.position = torch.zeros(1, dtype=torch.long, device=ids.device)
            self.inputs = {"input_ids": torch.empty_like(ids)}
            if capacity:
                self.inputs["attention_mask"] = torch.ones(len(ids), capacity, dtype=torch.long, device=ids.device)
            if given.get("position_ids") is not None:
                self.inputs["position_ids"] = torch.empty_like(given["position_ids"])
            self.cache = copy.copy(held)
            self.cache.layers = [self._fix(layer) for layer in held.layers]
        self.layers: list[Any] = []
        """Those of the cache that holds the fixed memory."""
        self.slots = [
            HeldTensor(i, key, state, memory)
            for i, layer in enumerate(self.cache.layers)
            for key, state, memory in _tensors(layer)
        ]
        self.growing = any(slot.state is None for slot in self.slots)

    def _fix(self, layer: Any) -> Any:
        """Copy a layer of a cache. Its states stay where they are: who holds these tensors sees them move on."""
        kind: Any = _fixed(layer.__class__) if _attends(layer) else layer.__class__
        own = kind.__new__(kind)
        vars(own).update(vars(layer), position=self.position)
        for name in (*_STATES, *_FLAGS):
            if hasattr(layer, name):
                setattr(own, name, dict(getattr(layer, name)))
        for name, state, tensor in _tensors(layer):
            if state is None:
                shape = (*tensor.shape[:2], self.capacity, tensor.shape[3])
                setattr(own, name, torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
            elif tensor.is_inference() or not tensor.is_contiguous():
                getattr(own, name)[state] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return own

    @property
    def bytes(self) -> int:
        """Size of the fixed memory."""
        tensors = [*self.inputs.values(), *(slot.memory for slot in self.slots)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def fill(self, given: Mapping[str, Any]) -> None:
        """Copy the arguments of a call into the fixed inputs."""
        for name in ("input_ids", "position_ids"):
            if name in self.inputs:
                self.inputs[name].copy_(given[name])
        if self.growing:
            mask = given.get("attention_mask")
            known = self.inputs["attention_mask"][:, : self.length + 1]
            known.fill_(1) if mask is None else known.copy_(mask)

    def run(self, model: Any, ordinary: Callable[..., Any]) -> Any:
        """Run the model's own call on the fixed inputs; what is captured."""
        with parts.reading(self.cache):
            result = ordinary(model, **self.inputs, **self.options, **{self.name: self.cache})
        self.position.add_(1)
        return result

    def untouched(self, held: Any) -> bool:
        """Whether a cache is as this step left it."""
        return (
            bool(self.lent)
            and self.holder() is held
            and held.layers == self.layers
            and all(slot.of(layer) is tensor for layer, slot, tensor in self.lent)
            and not any(map(_not_ready, self.layers))
        )

    def adopt(self, held: Any, length: int) -> list[Tensor]:
        """Move a cache into the fixed memory; give what it held before, if a first run can fail half way."""
        found = [slot.of(held.layers[slot.layer]) for slot in self.slots]
        self._release(held)
        for slot, tensor in zip(self.slots, found, strict=True):
            part = slot.part(length)
            if tensor.data_ptr() != part.data_ptr() or tensor.stride() != part.stride():
                overlaps = tensor.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
                part.copy_(tensor.clone() if overlaps else tensor)
            if slot.state is None:
                slot.memory[:, :, length:].zero_()  # a weight of zero times what is left of another row may be NaN
        self.position.fill_(length)
        self.length, self.holder, self.layers, self.lent = length, weakref.ref(held), list(held.layers), []
        if self.result is None:
            return [a.clone() if a is slot.memory else a for slot, a in zip(self.slots, found, strict=True)]
        return found

    def lend(self) -> None:
        """Let the cache hold the fixed memory after one more token: states at first, keys and values each time."""
        self.length += 1
        moved = [slot for slot in self.slots if slot.state is None or not self.lent]
        lent = [(self.layers[slot.layer], slot, slot.part(self.length)) for slot in moved]
        for layer, slot, tensor in lent:
            slot.put(layer, tensor)
        if lent:
            self.lent = [*(one for one in self.lent if one[1].state is not None), *lent]

    def _release(self, new: Any) -> None:
        """Give the cache that holds the fixed memory copies of its own, unless it is ``new``."""
        held, self.holder = self.holder(), lambda: None
        if held is not None and held is not new:
            for layer, slot, tensor in self.lent:
                if slot.of(layer) is tensor:
                    slot.put(layer, tensor.clone())

    def answer(self, held: Any) -> Any:
        """Give the result with tensors of its own and the user's cache."""
        found = self.result.items()
        own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in found}
        own |= {name: held for name, value in found if value is self.cache}
        return type(self.result)(**own)


HELD = "_refold_graphs"
"""Attribute of a model that holds its graphs."""


def graphs_of(model: nn.Module) -> Graphs:
    """Give the graphs of a model; they go when it goes, and copies of a model have their own."""
    fields = vars(model)
    held: Graphs = fields.get(HELD) or fields.setdefault(HELD, Graphs())  # a snapshot holds the model: a cycle
    return held


class Graphs:
    """The graphs of one model, and why calls ran without one."""

    def __init__(self) -> None:
        self.steps: dict[tuple[tuple[Hashable, Hashable], int], Step] = {}
        self.replayed = 0
        """Tokens per row that graphs have read."""
        self.lean: Lean | str | None = None
        """On the CPU: the lean model, or why there is none; None as long as nobody has asked."""
        self.computed = 0
        """Tokens per row that the lean model has read."""
        self.ordinary: Counter[str] = Counter()
        """Why calls of one token per row ran without a graph -> how many."""
        self.failed: dict[Hashable, str] = {}
        self.snapshot: Snapshot | None = None
        self.refused: str | None = None
        self.pool: Any = None
        self.looked: dict[int, Snapshot | None] = {}
        """Threads that are in `generating` -> the snapshot that held then, if any."""
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Let copies and pickles of a model have graphs of their own."""
        return Graphs, ()

    def __str__(self) -> str:
        """Give a line per graph, and one per reason for calls without one."""
        lines = [f"  {self.replayed} tokens by a graph"] if self.replayed else []
        lines += [f"  {self.computed} tokens by the lean model"] if self.computed else []
        for step in self.steps.values():
            room = f", room for {step.capacity} tokens" if step.capacity else ""
            lines.append(f"    graph of {len(step.inputs['input_ids'])} rows: {step.bytes / 2**20:.0f} MiB{room}")
        return "\n".join([*lines, *(f"  {n} tokens by ordinary calls: {why}" for why, n in self.ordinary.items())])

    @contextmanager
    def generating(self, *given: Any) -> Iterator[None]:
        """Look at the model once in a call of ``generate`` whose arguments bring no code that runs between tokens."""
        thread = threading.get_ident()
        if _still(given):
            self.looked[thread] = None
        try:
            yield
        finally:
            self.looked.pop(thread, None)

    def call(self, model: Any, ordinary: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Run a call of the model, by a graph where `refusal` finds no reason against it."""
        ids = given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != 1 or not ids.numel():
            return self._without(model, ordinary, given)
        if (kind := ids.device.type) not in recorders:
            by_lean = kind == "cpu" and lean.known(model)
            return self._lean(model, ordinary, given) if by_lean else self._without(model, ordinary, given)
        with self.lock:  # what one thread lends, another must not take while it is in use
            found = refusal(model, given) or self._changed(model) or self._token(model, ordinary, given)
        if not isinstance(found, str):
            return found
        self.ordinary[found] += 1
        return self._without(model, ordinary, given)

    def _lean(self, model: Any, ordinary: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Run a call on the CPU by the lean model, where it may; its first token is computed by both."""
        ids, by, reason = given["input_ids"], self.lean, refusal(model, given)
        if reason is None:
            held = cache_of(given)
            with self.lock:
                reason = self._changed(model) or cache_refusal(model, held, ids) or lean.refusal(held)
                if reason is None and given.get("attention_mask") is not None:
                    reason = "attention_mask was given with one token, and no layer attends"
                if reason is None and self.lean is None:
                    self.lean = lean.of(model)
                by = self.lean
        if reason is not None or not isinstance(by, Lean):
            self.ordinary[reason or str(by)] += 1
            return ordinary(model, **given)
        if by.result is not None:
            self.computed += 1
            return by.result(by.step_(ids, held), held)
        found = by.step_(ids, copy.deepcopy(held))
        result = ordinary(model, **given)
        if (reason := by.compare(found, result, held)) is not None:
            self.lean = reason
        return result

    def _without(self, model: Any, ordinary: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Run the ordinary call; no other thread may take the memory that it works on."""
        held = cache_of(given)
        with self.lock:
            keys = [key for key, step in self.steps.items() if held is not None and step.holder() is held]
            steps = [self.steps[key] for key in keys]
            if keys and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                for key in keys:  # the caller's own graph: from now on the memory belongs to the cache
                    self.steps.pop(key)
            for step in steps:
                step.busy += 1
        try:
            return ordinary(model, **given)
        finally:
            with self.lock:
                for step in steps:
                    step.busy -= 1

    def _changed(self, model: Any) -> str | None:
        thread = threading.get_ident()
        if self.snapshot is None or (self.looked.get(thread) is not self.snapshot and not self.snapshot.holds()):
            self.forget()
            self.snapshot = Snapshot(model)
            self.refused = self.snapshot.refusal()
        if thread in self.looked:
            self.looked[thread] = self.snapshot
        return self.refused

    def forget(self) -> None:
        """Drop all graphs and give their memory back."""
        while self.steps:
            self._drop(next(iter(self.steps)))
        self.failed, self.snapshot, self.pool, self.lean = {}, None, None, None

    def _drop(self, key: tuple[tuple[Hashable, Hashable], int]) -> None:
        step = self.steps.pop(key)  # the memory belongs to the cache that holds it
        if step.position.device.type == "cuda":
            torch.cuda.synchronize(step.position.device)  # its graph may be under way on another stream

    def _token(self, model: Any, ordinary: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Read one token by the step of its sizes; a reason if that is not possible."""
        name, held = next((name, given[name]) for name in CACHES if given.get(name) is not None)
        call, before = _key(name, given), None
        for (key, _), step in self.steps.items():
            if key[0] == call and step.untouched(held) and step.length < (step.capacity or step.length + 1):
                break
        else:
            if (reason := cache_refusal(model, held, given["input_ids"])) is not None:
                return reason
            key, length = (call, _sizes(held)), _length(held)
            if key in self.failed:
                return self.failed[key]
            capacity = 0 if length is None else max(SMALLEST, 1 << (length + 1).bit_length())
            step = self.steps.get((key, capacity)) or Step(model, name, held, given, capacity)
            if step.busy:
                return "another thread works on the memory of the graph"
            before = step.adopt(held, length or 0)
        mask = given.get("attention_mask")
        if mask is not None and not step.growing:
            return "attention_mask was given with one token, and no layer attends"
        if mask is not None and tuple(mask.shape) != (len(mask), step.length + 1):
            return "attention_mask does not have one number per token of the cache and the new one"
        step.fill(given)
        try:
            self._advance(step, model, ordinary)
        except Exception as error:  # whatever a model does that cannot be captured, its own call can do
            step.holder = lambda: None
            for i, slot in enumerate(step.slots):
                if before is None or step.result is not None:  # nothing ran, and the memory is the cache's from now on
                    slot.put(held.layers[slot.layer], slot.part(step.length))
                elif slot.of(held.layers[slot.layer]) is slot.memory:
                    slot.memory.copy_(before[i])
                else:
                    slot.put(held.layers[slot.layer], before[i])
            self.steps.pop((key, step.capacity), None)
            self.failed[key] = f"it cannot be captured ({first_line(error, 200)})"
            return self.failed[key]
        step.lend()
        if before is not None:
            for old in [old for old in self.steps if old[0] == key and old[1] != step.capacity]:
                self._drop(old)  # the conversation has outgrown its capacity
            self.steps.pop((key, step.capacity), None)
            self.steps[key, step.capacity] = step
            while len(self.steps) > KEPT:
                self._drop(next(iter(self.steps)))
        return step.answer(held)

    def _advance(self, step: Step, model: Any, ordinary: Callable[..., Any]) -> None:
        """Run a step: at first as it is, since kernels compile then; then capture it, and replay it from then on."""
        device = step.position.device
        if step.result is None:
            result = step.run(model, ordinary)
            if not isinstance(result, Mapping) or not all(map(_plain(step), result.values())):
                raise TypeError("the model returns more than logits and a cache")
            step.result = result
            return
        if step.replay is None:
            if self.pool is None and device.type == "cuda":
                self.pool = torch.cuda.graph_pool_handle()
            with torch.cuda.device_of(step.position):
                step.result, step.replay = recorders[device.type](lambda: step.run(model, ordinary), self.pool)
        step.replay()
        self.replayed += 1


def refusal(model: Any, given: Mapping[str, Any]) -> str | None:
    """Say why a call of one token per row must run as it is; None if a graph may run it.

    A graph computes what an ordinary call computes if there are no gradients, nothing watches or changes calls, all
    arguments are known, and the cache is one that grows by one token.
    """
    ids = given["input_ids"]
    if torch.is_grad_enabled():
        return "gradients are on: use torch.no_grad()"
    if private.watched(ids.device) or any_global_hook():
        return "something watches calls (a mode, a transform, a global hook)"
    if torch.is_autocast_enabled(ids.device.type):
        return "autocast is on"
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "the model is compiled"
    if ids.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the caller captures a graph"
    for name, value in given.items():
        if name in INPUTS or name in CACHES:
            continue
        if value is not None and not isinstance(value, (bool, int)):
            return f"{name} was given"
        if value and name.startswith("output_"):
            return f"{name} is on"
    if not given.get("use_cache", True) or given.get("return_dict") is False:
        return "use_cache or return_dict is off"
    for name in ("output_hidden_states", "output_attentions"):
        if given.get(name) is None and getattr(model.config, name, False):
            return f"{name} is on in the configuration"
    if given.get("return_dict") is None and getattr(model.config, "return_dict", True) is False:
        return "return_dict is off in the configuration"
    held = [given[name] for name in CACHES if given.get(name) is not None]
    if len(held) != 1:
        return "no cache was given"
    if attention.hidden(held[0]) is not None:
        return "the cache holds several documents in a row"
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != len(ids)):
        return "attention_mask has another form than one number per token"
    if positions is not None and (positions.ndim != 2 or positions.shape[1] != 1):
        return "position_ids do not have one number per row"
    return None


def cache_refusal(model: Any, held: Any, ids: Tensor) -> str | None:
    """Say why the memory of a cache cannot be lent; None if it can: all layers are known, and have read something."""
    if type(held).__name__ != "DynamicCache" or getattr(held, "offloading", False) or not held.layers:
        return f"the cache is a {type(held).__name__}"
    length = _length(held)
    for layer in held.layers:
        if type(layer).__name__ not in LAYERS or not type(layer).__module__.startswith("transformers."):
            return f"the cache has a {type(layer).__name__}"
        if (reason := _not_ready(layer)) is not None:
            return reason
        for _, _, tensor in _tensors(layer):
            if type(tensor) is not Tensor or tensor.device != ids.device or len(tensor) != len(ids):
                return "the cache does not fit the tokens"
        if _attends(layer) and layer.keys.shape[2] != length:
            return "layers of the cache have read different lengths"
    implementation = getattr(model.config, "_attn_implementation", None)
    return None if length is None or implementation in ATTENTION else f"attention runs by {implementation}"


def _still(value: Any) -> bool:
    """Whether an argument of ``generate`` brings no code of its own: numbers, texts, tensors, a cache, settings."""
    if isinstance(value, (tuple, list)):
        return all(map(_still, value))
    if type(value) is dict:
        return all(map(_still, value.values()))
    kind = type(value)
    known = kind.__module__.startswith("transformers.") and kind.__name__ in ("DynamicCache", "GenerationConfig")
    return known or value is None or kind in (Tensor, bool, int, float, str)


def _key(name: str, given: Mapping[str, Any]) -> Hashable:
    """Everything of a call that a graph holds as a constant; settings of the model are in the snapshot."""
    ids, positions = given["input_ids"], given.get("position_ids")
    return (
        name, ids.dtype, len(ids), None if positions is None else (positions.dtype, tuple(positions.shape)),
        tuple((n, v) for n, v in given.items() if n not in (*INPUTS, *CACHES)),
        torch.cuda.current_stream(ids.device).cuda_stream if ids.device.type == "cuda" else 0,
    )  # fmt: skip


def _sizes(held: Any) -> Hashable:
    return tuple((t.dtype, *t.shape[1:2], *t.shape[3:]) for layer in held.layers for _, _, t in _tensors(layer))


def _tensors(layer: Any) -> Iterator[tuple[str, int | None, Tensor]]:
    """Yield the name, the key (None for keys and values) and the tensor of all that a layer of a cache holds."""
    for name in _STATES:
        for state, tensor in getattr(layer, name, {}).items():
            if tensor is not None:
                yield name, state, tensor
    if _attends(layer):
        yield "keys", None, layer.keys
        yield "values", None, layer.values


def _not_ready(layer: Any) -> str | None:
    """Say why a layer of a cache cannot read a token by a graph, if its memory can be lent."""
    if getattr(layer, "record_past", False):
        return "the cache can go back"
    flags = getattr(layer, "has_previous_state", None)  # a cache that was reset has the same memory
    return None if flags is None or all(flags.values()) else "the cache has read nothing before"


def _attends(layer: Any) -> bool:
    """Whether a layer of a cache holds keys and values."""
    return getattr(layer, "keys", None) is not None and layer.keys.ndim == 4


def _length(held: Any) -> int | None:
    """Give how many tokens attention has read; None without such layers."""
    return next((layer.keys.shape[2] for layer in held.layers if _attends(layer)), None)


def _tables(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the dictionaries of modules, and those of the configurations that they hold."""
    tables, seen = list(fields), set[int]()
    for table in tables:
        configs = {id(value): vars(value) for value in table.values() if hasattr(type(value), "model_type")}
        tables += [configs[key] for key in configs.keys() - seen]
        seen |= configs.keys()
    return tables


def _settings(tables: list[dict[str, Any]]) -> list[tuple[Callable[[Any], Any], list[dict[str, Any]]]]:
    """Give what reads settings, and the dictionaries that have those."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for table in tables:
        groups.setdefault(tuple(name for name in table if name not in _COMMON), []).append(table)
    return [(itemgetter(*names), found) for names, found in groups.items()]


def _copied(value: Any) -> Any:
    """Copy lists and dictionaries, so that what is changed within them differs from the copy."""
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


def _idle(hook: Any) -> bool:
    """Whether a hook does nothing in a call that a graph may run: refold's own, and what `output_...` left behind."""
    return getattr(getattr(hook, "func", hook), "__module__", "") in _IDLE


def _plain(step: Step) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Tensor) or value is None or value is step.cache
