"""What a loop's body must leave alone, and what is put back after it was traced for a trial.

Dynamo keeps what a program did to Python's objects in variables and side tables. A body is traced more than once, and
not every trace is kept. So the translator's registers are restored after each trace. Everything else that the body
could reach is compared with what it was before. State that may change (`capture.carried`) is taken out first.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, SymNodeVariable, TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.iter import IteratorVariable

from .variables import NotCaptured, Translator

# Of a frame; not all of them in every version of PyTorch or of Python, or only in generators' frames.
_REGISTERS = (
    "stack", "symbolic_locals", "block_stack", "instruction_pointer", "current_instruction", "current_speculation",
    "accept_prefix_inst", "prefix_insts", "kw_names", "lineno", "generator_exhausted", "generated_items", "frame_state",
)  # fmt: skip
_CONTAINERS = (list, dict, deque)
# The function of Dynamo's that traces a hook, which it does as the function of an operation.
_REGISTERS_HOOK = "_method_register_hook"


@dataclass
class MutableState:
    """Contents of containers, positions of iterators and generators, and counts of what is only added to."""

    containers: list[tuple[Any, Any]]
    iterators: list[tuple[Any, dict[str, Any]]]
    hooks: int
    rest: tuple[Any, ...]

    def restore(self) -> None:
        """Put it all back: Dynamo may change something before it finds that it must not."""
        _put_back(self.containers)
        for x, state in self.iterators:
            x.__dict__.update({name: copy.copy(y) if isinstance(y, _CONTAINERS) else y for name, y in state.items()})

    def unchanged(self, other: MutableState) -> bool:
        """Tell whether another snapshot found the same.

        Raises:
            NotCaptured: A hook was registered.
        """
        if other.hooks != self.hooks:
            raise NotCaptured("hook", "a step registers a hook on a tensor that exists before the loop")
        before = {id(container): content for container, content in self.containers}
        pairs = [(before[id(x)], content) for x, content in other.containers if id(x) in before]
        stood = {id(x): state for x, state in self.iterators}
        pairs += [(stood[id(x)], state) for x, state in other.iterators if id(x) in stood]
        return self.rest == other.rest and all(_same(a, b) for a, b in pairs)


def snapshot(tx: Translator) -> MutableState:
    """Look at everything that a frame's code can reach: attributes, containers, hooks, random state, modes."""
    output, containers = tx.output, []
    iterators: list[tuple[Any, dict[str, Any]]] = []
    effects = output.side_effects
    stack: list[Any] = [*effects.id_to_variable.values()]

    def watch(container: Any) -> None:
        containers.append((container, copy.copy(container)))
        stack.extend(container.values() if isinstance(container, dict) else container)

    for attributes in effects.store_attr_mutations.values():
        watch(attributes)
    stack += [*tx.stack, *tx.symbolic_locals.values()]
    frame = tx.parent
    while frame is not None:
        watch(frame.stack)
        watch(frame.symbolic_locals)
        frame = frame.parent
    seen: set[int] = set()
    while stack:
        x = stack.pop()
        if type(x) in (TensorVariable, ConstantVariable, SymNodeVariable) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, LazyVariableTracker):
            stack += [x.realize()] if x.is_realized() else []
        elif isinstance(x, LocalGeneratorObjectVariable):
            inner = x.inline_tracer
            if inner is not tx:
                iterators.append((inner, _registers(inner)))
                stack += [*inner.stack, *inner.symbolic_locals.values()]
        elif isinstance(x, VariableTracker):
            if isinstance(x, IteratorVariable):
                iterators.append((x, {key: y for key, y in vars(x).items() if not isinstance(y, _CONTAINERS)}))
            for name, part in vars(x).items():
                if name == "items" and isinstance(part, _CONTAINERS):
                    watch(part)
                elif isinstance(part, VariableTracker):
                    stack.append(part)
                elif isinstance(part, (list, tuple)):
                    stack += [y for y in part if isinstance(y, VariableTracker)]
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    counts = len(effects.save_for_backward), len(output.random_calls)
    existing = {id(x) for x in effects.store_attr_mutations if isinstance(x.mutation_type, AttributeMutationExisting)}
    return MutableState(containers, iterators, len(effects.tensor_hooks), (flags, counts, existing))


@contextlib.contextmanager
def rolled_back(tx: Translator) -> Iterator[None]:
    """Put a translator's registers back afterwards, and on failure what Dynamo noted of side effects."""
    registers = _registers(tx)
    exceptions = {name: copy.copy(x) for name, x in vars(tx.exn_vt_stack).items()}
    log, mode = tx.speculation_log, tx.output.fake_mode
    entries, index, cached = log.entries, log.index, mode.cache_enabled
    effects, signatures = tx.output.side_effects, tx.output.signature_cache.copy()
    contents, known = _contents(effects), effects.id_to_variable
    effects.id_to_variable = found = _Found(known)
    effects.clone = _refuse
    # Generators that Dynamo closes in the end, since torch 2.15: those of a trace are gone by then.
    generators = getattr(tx.output, "local_generators", [])
    tracked = len(generators)
    tx.current_speculation = None
    # Speculations in the body must not be found in the log when Dynamo starts over.
    log.entries, log.index = [], 0
    # Fake values are cached by expressions; those of the step's number mean something else in every trace.
    mode.cache_enabled = False
    try:
        yield
        known.update(found)
    except BaseException:
        _put_back(contents)
        known.update(found.as_it_was())
        # Dynamo looks up what it keeps alive, and what was found for this trace alone is forgotten.
        effects.keepalive[:] = [x for x in effects.keepalive if id(x) in known]
        # AttributeRecorder that Dynamo made on the way, whose attributes were just forgotten.
        _put_back([(tx.output.signature_cache, signatures)])
        raise
    finally:
        effects.id_to_variable = known
        del effects.clone, generators[tracked:]
        tx.__dict__.update(registers)
        vars(tx.exn_vt_stack).update(exceptions)
        log.entries, log.index, mode.cache_enabled = entries, index, cached


def _refuse() -> None:
    # Dynamo would go on with a copy of what it knows.
    if any(frame.f_code.co_name == _REGISTERS_HOOK for frame, _ in traceback.walk_stack(None)):
        raise NotCaptured("hook", "a step registers a hook on what it computes")
    raise NotCaptured("higher-order", "an operation in the loop takes a function, as checkpointing does")


def _registers(frame: Translator) -> dict[str, Any]:
    held = {name: vars(frame)[name] for name in _REGISTERS if name in vars(frame)}
    return {name: copy.copy(y) if isinstance(y, _CONTAINERS) else y for name, y in held.items()}


class _Found(dict[int, Any]):
    """The objects that Dynamo knows; remembers what those held that it came to know during a trace.

    Dynamo does not look again for an object that it has found once. So the object must stay known when the trace is
    forgotten: Dynamo loses a change of an object that it does not know.
    """

    def __init__(self, known: dict[int, Any]) -> None:
        super().__init__(known)
        self.contents: dict[int, list[tuple[Any, Any]]] = {}

    def __setitem__(self, key: int, x: Any) -> None:
        super().__setitem__(key, x)
        holders = [x, *(part for part in vars(x).values() if isinstance(part, VariableTracker))]
        items = [vars(holder).get("items") for holder in holders if not isinstance(holder, LazyVariableTracker)]
        self.contents[key] = [(part, copy.copy(part)) for part in items if isinstance(part, _CONTAINERS)]

    def as_it_was(self) -> dict[int, Any]:
        """Return the objects that were found, and were there before the trace, with what they held."""
        mutations = AttributeMutationExisting, ValueMutationExisting
        found = {key: self[key] for key in self.contents if isinstance(self[key].mutation_type, mutations)}
        for key in found:
            _put_back(self.contents[key])
        return found


def _same(a: Any, b: Any) -> bool:
    """Tell whether two copies of a container hold the same objects."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(x, b[key]) for key, x in a.items())
    return len(a) == len(b) and all(map(_equal, a, b))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, _CONTAINERS):
        return type(x) is type(y) and _same(x, y)
    return x is y or (type(x) is type(y) is int and x == y)


def _contents(effects: Any) -> list[tuple[Any, Any]]:
    """Return the containers in which Dynamo records side effects, with copies; others hold references to them."""
    # What it keeps alive it may still know.
    found = [x for name, x in vars(effects).items() if isinstance(x, (dict, list, set)) and name != "keepalive"]
    found += [y for x in found if isinstance(x, dict) for y in x.values() if isinstance(y, (dict, list, set))]
    return [(x, copy.copy(x)) for x in found]


def _put_back(contents: list[tuple[Any, Any]]) -> None:
    for container, content in contents:
        container.clear()
        container.extend(content) if isinstance(container, (list, deque)) else container.update(content)
