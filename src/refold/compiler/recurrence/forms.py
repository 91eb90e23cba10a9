"""Which recurrence becomes which operator: the table to read first.

A scan ``h[t] = a[t] h[t-1] + b[t]`` writes all states (`refold.compiler.recurrence.affine` finds it). If the states are
only read through a contraction, ``y[t] = sum over n of C[t] h[t]``, they need not be written. What `facts` says of the
factors of ``a``, ``b`` and ``C`` decides how ``y`` is computed instead: by the first form that does not refuse.

    axes that the decay runs along            becomes
    n, but neither time nor batch             a convolution in chunks, and a scan over chunks
    one axis of heads, or none                matrix products in chunks (state space duality)
    the channels and n, as exp(dt * A)        one pass that keeps states in registers
    n, in any other way                       matrix products in chunks, between references (the delta rule's)

A recurrence that no form takes stays a scan. A carry whose elements a step mixes is no such scan. One form computes it,
if what it mixes is one contraction (`refold.compiler.recurrence.delta`): the delta rule. The operator of that rule is
the last one of the table, too, with nothing that is corrected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch.fx import Node

from ...ops.torch.registry import Operation
from ..ir.builder import Builder
from ..ir.operators import CONTRACTED, HEADS, RANK_ONE, SCAN
from . import lti_chunks
from .delta_form import Corrections, rank_one, refuses_rank_one
from .duality import gated, gated_axes, has_log_decay, per_channel, per_head, time_invariant
from .facts import Facts, read_facts, spans
from .readout import Readout
from .vectorize import Value

FEW = 16
"""Channels, or halves of the steps, for which the states of all steps are not worth avoiding."""

F = TypeVar("F")
Y = TypeVar("Y")


@dataclass(frozen=True)
class Form(Generic[F, Y]):
    """One way to compute what reads the states of a recurrence.

    Attributes:
        name: What it is, in the field's words.
        refuses: Says why it does not fit; None if it fits.
        emit: Emits what reads the states, and the last state; None if the operands cannot be laid out.
        operator: What runs in the end.
        paper: Where it comes from.
    """

    name: str
    refuses: Callable[[F], str | None]
    emit: Callable[[F], tuple[Y, Node] | None]
    operator: Operation
    paper: str


def _refuses_time_invariant(facts: Facts) -> str | None:
    if not facts.varies or facts.shape[0] < lti_chunks.CHUNK:
        return "the decay is one number, or there are too few steps"
    if spans(*facts.b.along(facts.n)[0], *facts.queries, *facts.a.terms) & {0, 1}:
        return "the decay, or what multiplies the states, depends on time or on the batch"
    return None if facts.n in spans(*facts.a.terms) else "the decay is the same for all contracted states"


def _has_heads(facts: Facts) -> bool:
    """Tell whether the decay is one number per head, with one axis of channels below it."""
    if facts.decay is None or facts.n in facts.decay_spans or len(facts.kept) > 2:
        return False
    rest = facts.decay.rest
    # Where no gradient is taken, signs can be kept apart: that of a logarithm says nothing at a decay of zero.
    signed = bool(rest.terms) and rest.number != 0 and not torch.is_grad_enabled()
    return (rest.positive or signed) and len(facts.kept) - len(facts.heads) == 1


def _refuses_heads(facts: Facts) -> str | None:
    if not _has_heads(facts):
        return "the decay is not one number per head, or its sign is unknown"
    return None if has_log_decay(facts) else "its step sizes are too small to divide by in float16, or in a gradient"


def _refuses_channels(facts: Facts) -> str | None:
    if facts.decay is None or _has_heads(facts) or len(facts.kept) != 1:
        return "the decay is no exponential, is one number per head, or states have more axes"
    if facts.wide or facts.n in spans(*facts.decay.rest.terms):
        return "keys or queries run along channels, or a factor of the decay along the contracted states"
    return None


def _refuses_gated(facts: Facts) -> str | None:
    if not facts.varies or not facts.a.positive:
        return "the decay is one number, or may be negative"
    _, channels = gated_axes(facts)
    if len(channels) != 1:
        return "no single axis is run along by values alone"
    few = facts.shape[channels[0]] < FEW or facts.shape[0] < 2 * FEW
    return "the states are hardly larger than what would be computed instead" if few else None


FORMS: tuple[Form[Facts, Node], ...] = (
    Form("time-invariant", _refuses_time_invariant, time_invariant, SCAN, "Gu et al. 2022 (S4D, arXiv:2206.11893)"),
    Form("one decay per head", _refuses_heads, per_head, HEADS, "Dao & Gu 2024 (arXiv:2405.21060)"),
    Form("one decay per channel and state", _refuses_channels, per_channel, CONTRACTED,
         "Gu & Dao 2023, algorithm 2 (arXiv:2312.00752)"),
    Form("one decay per key", _refuses_gated, gated, RANK_ONE, "Yang et al. 2024 (arXiv:2312.06635), section 4"),
)  # fmt: skip
"""Those of a contracted scan, in order of preference."""

CORRECTED: Form[Corrections, dict[Node, Node]] = Form(
    "decay and correction", refuses_rank_one, rank_one, RANK_ONE,
    "Yang, Kautz & Hatamizadeh 2024 (arXiv:2412.06464)")  # fmt: skip
"""That of a state which steps correct."""


def match_form(
    emit: Builder, read: Readout, scale: Value | None, offset: Value | None, shape: list[int], initial: Node | None
) -> tuple[Node, Node] | None:
    """Emit what computes ``y``, where ``h[t] = scale[t] h[t-1] + offset[t]`` and ``read`` reads the states.

    Args:
        emit: Where to.
        read: How the states are read.
        scale: What each state is multiplied by on the way to the next, broadcast to ``shape``; None for 1.
        offset: What is added, broadcast to ``shape``.
        shape: Shape of all states: (t, b, *kept and n).
        initial: The state before the first, ``shape[1:]``; None for zeros.

    Returns:
        ``y`` as ``read.node`` has it, and the last state; None if no form fits.
    """
    facts = read_facts(emit, read, scale, offset, shape, initial)
    fitting = (form for form in FORMS if facts is not None and form.refuses(facts) is None)
    return next((found for form in fitting if facts is not None and (found := form.emit(facts)) is not None), None)
