"""What a loop's body must leave alone, and what is put back after it was traced for a trial.

Dynamo keeps what a program did to Python's objects in variables and side tables. A body is traced more than once, and
not every trace is kept: so the translator's registers are restored after each, and everything else that the body could
reach is compared with what it was before. State that may change (`refold.compiler.lifting.state`) is taken out first.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, SymNodeVariable, TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, VariableTracker

from .variables import Translator

_REGISTERS = ("stack", "symbolic_locals", "block_stack", "instruction_pointer", "current_instruction")
# Not in every version of PyTorch or of Python.
_MORE_REGISTERS = ("current_speculation", "kw_names", "lineno")


@dataclass
class World:
    """Contents of containers, and counts of everything that is only added to."""

    containers: list[tuple[Any, Any]]
    rest: tuple[Any, ...]

    def restore(self) -> None:
        """Put the containers' contents back: Dynamo may change them before it finds that it must not."""
        _put_back(self.containers)

    def unchanged(self, other: World) -> bool:
        """Tell whether another look at the world found the same."""
        before = {id(container): content for container, content in self.containers}
        pairs = [(before[id(x)], content) for x, content in other.containers if id(x) in before]
        return self.rest == other.rest and all(_same(a, b) for a, b in pairs)


def world(tx: Translator) -> World:
    """Look at everything that a frame's code can reach: attributes, containers, hooks, random state, modes."""
    output, containers = tx.output, []
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
        elif isinstance(x, VariableTracker):
            for name, part in vars(x).items():
                if name == "items" and isinstance(part, (list, dict)):
                    watch(part)
                elif isinstance(part, VariableTracker):
                    stack.append(part)
                elif isinstance(part, (list, tuple)):
                    stack += [y for y in part if isinstance(y, VariableTracker)]
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    counts = len(effects.tensor_hooks), len(effects.save_for_backward), len(output.random_calls)
    existing = {id(x) for x in effects.store_attr_mutations if isinstance(x.mutation_type, AttributeMutationExisting)}
    return World(containers, (flags, counts, existing))


@contextlib.contextmanager
def kept(tx: Translator) -> Iterator[None]:
    """Put a translator's registers back afterwards, and on failure what Dynamo noted of side effects."""
    registers = {name: copy.copy(getattr(tx, name)) for name in _REGISTERS}
    registers |= {name: getattr(tx, name) for name in _MORE_REGISTERS if hasattr(tx, name)}
    exceptions = {name: copy.copy(x) for name, x in vars(tx.exn_vt_stack).items()}
    log, mode = tx.speculation_log, tx.output.fake_mode
    entries, index, cached = log.entries, log.index, mode.cache_enabled
    effects = _contents(tx.output.side_effects)
    tx.current_speculation = None
    # Speculations in the body must not be found in the log when Dynamo starts over.
    log.entries, log.index = [], 0
    # Fake values are cached by expressions; those of the step's number mean something else in every trace.
    mode.cache_enabled = False
    try:
        yield
    except BaseException:
        _put_back(effects)
        raise
    finally:
        for name, x in registers.items():
            setattr(tx, name, x)
        vars(tx.exn_vt_stack).update(exceptions)
        log.entries, log.index, mode.cache_enabled = entries, index, cached


def _same(a: Any, b: Any) -> bool:
    a, b = (list(x.items()) if isinstance(x, dict) else [(None, y) for y in x] for x in (a, b))
    return len(a) == len(b) and all(k == l and x is y for (k, x), (l, y) in zip(a, b, strict=True))


def _contents(effects: Any) -> list[tuple[Any, Any]]:
    """Return the containers in which Dynamo records side effects, with copies; others hold references to them."""
    found = [x for x in vars(effects).values() if isinstance(x, (dict, list, set))]
    found += [y for x in found if isinstance(x, dict) for y in x.values() if isinstance(y, (dict, list, set))]
    return [(x, copy.copy(x)) for x in found]


def _put_back(contents: list[tuple[Any, Any]]) -> None:
    for container, content in contents:
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)
