"""Where Dynamo's interpreter meets a loop: a ``for`` at its ``FOR_ITER``, a ``while`` where it goes back.

`install` replaces one method of Dynamo's interpreter, ``run``. For a marked backend (`dynamo.captures_loops`) it gives
that one interpreter its own table of instructions; for all others it calls the original. Whatever goes wrong, the
interpreter is as it was, and goes on to execute the loop step by step; `notes` tells why.
"""

from __future__ import annotations

import dataclasses
import dis
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import external_utils, symbolic_convert
from torch._dynamo.exc import RestartAnalysis, SkipFrame, TorchDynamoException, Unsupported
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.lists import DequeVariable
from torch._guards import TracingContext

from .. import switch
from . import lengths
from .fixpoint import capture_loop
from .iterators import ENUMERATE, element, remaining, start_enumeration
from .trace import SHORTEST, LoopCode
from .variables import NotCaptured, Translator, place_of, realized, while_of

# The first steps may differ (`if h is None`, `max(t - 3, 0)`): so many heads of one loop are tried.
HEADS = 3
# Where PyTorch asks whether an autograd function returns what it is given.
_AUTOGRAD_FUNCTIONS = "torch._functorch.autograd_function"
# The operation that Dynamo makes of a call of ``torch.utils.checkpoint``.
_CHECKPOINT = "tag_activation_checkpoint"
# Where Dynamo keeps its own spellings of functions of Python's library, such as `itertools.accumulate`.
_POLYFILLS = "torch/_dynamo/polyfills"


def notes() -> list[str]:
    """Say of the compile under way which long loops were traced step by step, and why."""
    state = _state()
    return [f"the loop at {at} is traced step by step: {why}" for at, why in state.refused.items()] if state else []


@dataclass
class _Met:
    """How often a loop was met, how often tried, and at which head to try next.

    Its iterator, or the instruction that goes back, is kept, so that its identity stays its own.
    """

    kept: Any
    heads: int = 0
    tries: int = 0
    next: int = 0
    # Whether it was refused for what a step decides on its number: the first such decision is what a person is told.
    decided: bool = False


@dataclass
class _State:
    """What one compile knows of its loops."""

    # Whether a body is being traced.
    busy: bool = False
    # The loops that were met, by frame, and iterator or instruction.
    met: dict[tuple[Translator, int], _Met] = field(default_factory=dict)
    # Why loops of yet unknown length were not captured, and why long loops were not, by location in the code.
    doubts: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def _state() -> _State | None:
    context = TracingContext.try_get()
    return None if context is None else vars(context).setdefault("refold_loops", _State())


def _meet_for(tx: Translator, instruction: Any) -> None:
    """Try to capture the ``for`` whose next step is due."""
    iterator = realized(tx.stack[-1])

    def code() -> LoopCode | None:
        start_enumeration(tx, iterator)
        found = element(tx, iterator)
        return None if found is None else LoopCode(tx.instruction_pointer - 1, tx.indexof[instruction.target], found)

    if tx.f_code is not ENUMERATE:
        frame = _users_frame(tx)
        where, _ = place_of(frame, frame.current_instruction)
        where = where or f"{frame.f_code.co_filename}:{frame.lineno}"
        _meet(tx, iterator, where, remaining(tx, iterator), code)


def _meet_while(tx: Translator, instruction: Any) -> None:
    """Try to capture the ``while`` that an instruction has just gone back in."""
    head = tx.indexof[instruction.target]
    if tx.instruction_pointer == head and instruction.target.opname != "FOR_ITER":
        code = LoopCode(head, tx.indexof[instruction] + 1, None)
        _meet(tx, instruction, while_of(tx, instruction), None, lambda: code)


def _meet(tx: Translator, kept: Any, where: str, count: int | None, code: Callable[[], LoopCode | None]) -> None:
    """Try to capture a loop at one of its heads.

    Args:
        tx: The frame.
        kept: What the loop goes through, or goes back by; it is of this loop and no other.
        where: Its line.
        count: How many steps are left, where that is known.
        code: Reads the loop's code; None if it is not a loop over time.
    """
    state = _state()
    if state is None or (count is not None and count < SHORTEST):
        return
    if state.busy:
        if count is not None and code() is not None:
            raise NotCaptured(
                "loop-inside", "the loop contains another long loop", *place_of(tx, tx.current_instruction)
            )
        return
    loop = state.met.setdefault((tx, id(kept)), _Met(kept))
    met, loop.heads = loop.heads, loop.heads + 1
    if count is None and met + 1 == SHORTEST:
        state.refused[where] = state.doubts.get(where) or _advice(
            NotCaptured("sequence-unknown", "only running the iterator can tell when it ends"), where
        )
    if loop.tries >= HEADS or met < loop.next:
        return
    loop.tries += 1
    reasons = state.doubts if count is None else state.refused
    state.busy = True
    try:
        _check_modes(tx)
        _check_hooks(tx)
        if (found := code()) is not None:
            capture_loop(tx, dataclasses.replace(found, done=met))
            reasons.pop(where, None)
    except RestartAnalysis:
        raise
    except Exception as error:  # whatever it is: the loop is traced step by step
        decided = isinstance(error, NotCaptured) and error.reason == "step-number"
        if isinstance(error, AttributeError) and _is_ours(error):
            switch.lose_loops(error)
        if _users_frame(tx) is not tx and isinstance(
            error, NotCaptured
        ):  # the line is of a function of Python's, as Dynamo writes it
            reason = error.reason
            error = NotCaptured(reason, f"in `{tx.f_code.co_name.strip('_')}`, {error.args[0]}")
        if not (decided and loop.decided):
            reasons[where] = _advice(_by_deque(tx, error) or error, where)
        loop.decided = decided
        loop.next = met + (error.alike if isinstance(error, NotCaptured) else 1)
    finally:
        state.busy = False


def _users_frame(tx: Translator) -> Translator:
    """Return the innermost frame that is not Dynamo's own spelling of a function of Python's library."""
    while _POLYFILLS in tx.f_code.co_filename.replace("\\", "/") and getattr(tx, "parent", None) is not None:
        tx = tx.parent
    return tx


def _by_deque(tx: Translator, error: Exception) -> NotCaptured | None:
    """Explain an error of Dynamo's at a line that names a deque of the frame."""
    stack = getattr(error, "real_stack", None)
    if isinstance(error, NotCaptured) or not stack:
        return None
    line = stack[-1].line or ""
    deques = [name for name, x in tx.symbolic_locals.items() if type(realized(x)) is DequeVariable]
    name = next((name for name in deques if re.search(rf"\b{re.escape(name)}\b", line)), None)
    if name is None:
        return None
    refused = NotCaptured("deque", f"each step changes the deque `{name}`")
    refused.found_at(f"{stack[-1].filename}:{stack[-1].lineno}: {line}", "")
    return refused


def _check_identity(tx: Translator) -> None:
    """Refuse to compare tensors by identity in a body: a stand-in for the tensors of all steps is none of them."""
    state = _state()
    if tx.f_globals.get("__name__") == _AUTOGRAD_FUNCTIONS:  # such a call is refused, and not for this question
        return
    if state is not None and state.busy and all(type(realized(x)) is TensorVariable for x in tx.stack[-2:]):
        raise NotCaptured("identity", "the loop asks whether two tensors are the same object")


def _advice(error: Exception, where: str) -> str:
    """Return reason and remedy for a loop at a line."""
    if not isinstance(error, NotCaptured):
        stack = getattr(error, "real_stack", None)
        error = NotCaptured("dynamo", f"Dynamo says: {(str(error).splitlines() or [type(error).__name__])[0]}")
        if stack:
            error.found_at(f"{stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}", "")
    error.found_at(where, "")
    error.line = "" if error.line == where else error.line
    return error.advice


def _check_modes(tx: Translator) -> None:
    for tracer in tx.output.tracers[1:]:
        if getattr(tracer.source_target, "__name__", "") != _CHECKPOINT:
            raise NotCaptured("higher-order", "it is in a function that Dynamo captured as one operation")
    if torch._C._is_any_autocast_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotCaptured("mode", "autocast or a function transform is active")


def _check_hooks(tx: Translator) -> None:
    """Refuse if the function registers hooks, and Dynamo writes one as an autograd function.

    Before torch 2.13, all lines that read the tensor, also those of the loop, then read that function's result.
    """
    frame: Any = tx
    while frame is not None and hasattr(external_utils, "_ApplyBackwardHook"):
        if "register_hook" in frame.f_code.co_names:
            raise NotCaptured(
                "hook", f"`{frame.f_code.co_name}` registers a hook, and this is PyTorch {torch.__version__}"
            )
        frame = getattr(frame, "parent", None)


def _skipped(tx: Translator, error: TorchDynamoException) -> None:
    """Note in the report that no graph comes of a frame, because of a graph break in a loop, say."""
    report = switch.report_of(tx.output.compiler_fn)
    stack = getattr(error, "real_stack", None)
    if report is None or not stack:
        return
    name, why = tx.f_code.co_name, _advice(error, "")
    told, left = notes(), f"`{name}` is not compiled, Dynamo leaves it to Python"
    told.append(f"{left}, for the same reason" if any(why in note for note in told) else f"{left}: {why}")
    report.notes += [note for note in told if note not in report.notes]


def install() -> Callable[[], None]:
    """Let marked backends capture loops.

    Returns:
        A function that removes everything again.
    """
    tables = {
        kind: _table(kind.dispatch_table)
        for name in ("InstructionTranslator", "InliningInstructionTranslator", "InliningGeneratorInstructionTranslator")
        for kind in [getattr(symbolic_convert, name)]
    }
    interpreter: Any = symbolic_convert.InstructionTranslatorBase
    original = interpreter.run

    def run(tx: Translator) -> Any:
        try:
            if (table := tables.get(type(tx))) is not None and switch.is_marked(tx.output.compiler_fn):
                lengths.watch(tx)
                tx.dispatch_table = table
        except Exception as error:  # Dynamo has changed
            switch.lose_loops(error)
        try:
            return original(tx)
        except (Unsupported, SkipFrame) as error:
            if type(tx) is symbolic_convert.InstructionTranslator:
                _skipped(tx, error)
            raise

    interpreter.run = run

    def remove() -> None:
        interpreter.run = original

    return remove


def _table(originals: list[Any]) -> list[Any]:
    """Return a table of instructions that tries to capture loops before, or after, it does what Dynamo does."""
    table = list(originals)
    begin, compare = dis.opmap["FOR_ITER"], dis.opmap["IS_OP"]

    def for_iter(tx: Translator, instruction: Any) -> None:
        _attempt(tx, lambda: _meet_for(tx, instruction))
        originals[begin](tx, instruction)

    def is_op(tx: Translator, instruction: Any) -> None:
        _attempt(tx, lambda: _check_identity(tx))
        originals[compare](tx, instruction)

    def back(code: int) -> Callable[[Translator, Any], None]:
        def jump(tx: Translator, instruction: Any) -> None:
            originals[code](tx, instruction)
            _attempt(tx, lambda: _meet_while(tx, instruction))

        return jump

    table[begin], table[compare] = for_iter, is_op
    for name, code in dis.opmap.items():
        if "JUMP_BACKWARD" in name and "INTERRUPT" not in name and code < len(table):
            table[code] = back(code)
    return table


def _attempt(tx: Translator, act: Callable[[], None]) -> None:
    """Do one of refold's own parts; all but refusals and Dynamo's own errors mean that Dynamo has changed."""
    if switch.unavailable() is not None:  # since this frame began
        return
    try:
        act()
    except (NotCaptured, TorchDynamoException):  # ends the trace of a body
        raise
    except Exception as error:
        why = switch.lose_loops(error)
        context = TracingContext.try_get()  # by hand: what failed may be `_state`
        state: _State | None = None if context is None else vars(context).get("refold_loops")
        if state is not None and state.busy:  # a check of this body could not be made
            raise NotCaptured("dynamo", why) from error
        if state is not None:
            state.refused[f"{tx.f_code.co_filename}:{tx.lineno}"] = why


def _is_ours(error: BaseException) -> bool:
    """Tell whether refold's own code met an error: a name that Dynamo does not have."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__")).startswith("refold.")
