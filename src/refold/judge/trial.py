"""A judge: processes for programs, and the checks of a trial in their order (design decision 22)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from .case import Case
from .checks import costs, domain, original, ran, use
from .docket import Docket
from .errors import Misbehaved, Refused, Unjudgeable
from .nursery import Nursery
from .program import Program
from .race import faster
from .sides import Sides
from .terms import Terms
from .verdict import Verdict

log = logging.getLogger("refold")
Check = Callable[[Case], None]  # a part of a trial: it makes calls, and writes down what they show
LARGE = 1 << 22  # numbers among inputs, from which on more threads than one compare them sooner

CHECKS: tuple[tuple[Check, bool], ...] = (
    (original.says_something, False),
    (use.first_calls, False),
    (use.left_behind, False),
    (use.other_weights, False),
    (domain.kinds, False),
    (use.stale, False),
    (use.repeatable, False),
    (use.modes, False),
    (domain.integers, False),
    (domain.arguments, False),
    (use.gradients, False),
    (use.otherwise, True),
    (domain.special_values, True),
    (domain.layouts, True),
    (use.left_behind, True),
    (domain.shapes, True),
    (domain.dtypes, True),
    (ran.everything, False),
    (faster, False),
    (use.left_behind, False),
    (use.still, False),
    (costs.kept, True),
    (costs.heap, True),
    (use.broken_off, True),
)
"""The checks in their order, cheap ones first, and whether one is left out at level quick."""


def decide(
    nursery: Nursery,
    original: Program,
    candidate: Program,
    inputs: Sequence[torch.Tensor] | None,
    terms: Terms,
    *,
    seed: int | None = None,
    off: frozenset[str] = frozenset(),
) -> Verdict:
    """Try whether one candidate may take the place of its original. Whatever happens in a trial ends in a verdict.

    Args:
        nursery: Starts the processes of programs.
        original: The program that it is compared with.
        candidate: The candidate.
        inputs: Example inputs; None takes the original's own.
        terms: On what terms.
        seed: Where all that is random comes from, to repeat a trial.
        off: Checks that decide nothing, so that tests can show that they are needed.
    """
    verdict = Verdict(original, candidate, terms, off=sorted(off))
    docket = Docket(verdict, seed, off)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # others wait for work in a loop, for longer than small tensors need one
        with Sides(original, candidate, inputs, docket, nursery) as sides:
            sides.open()
            if sum(t.numel() for t in sides.first) > LARGE:
                torch.set_num_threads(terms.threads)
            case = Case(docket, sides)
            for check, deep in CHECKS:
                if docket.level.deep or not deep:
                    docket.check = check.__name__
                    check(case)
    except Refused:
        pass
    except Misbehaved as error:
        verdict.end("refused", error.check, error.reason)
        verdict.failure = getattr(error, "failure", None)
    except Unjudgeable as error:
        verdict.end("unjudged", "", str(error))
    except Exception as error:  # no error of the judge is an acceptance, nor does it end a run of many trials
        log.debug("a trial ended by an error of the judge", exc_info=True)
        verdict.end("unjudged", "", f"the judge itself failed: {type(error).__name__}: {str(error)[:500]}")
    else:
        verdict.outcome = "accepted"
    finally:
        torch.set_num_threads(threads)
    verdict.seconds = time.perf_counter() - docket.began
    return verdict
