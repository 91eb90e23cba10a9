"""No attack succeeds, no honest candidate is refused, and each check is needed."""

import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from refold.judge import Nursery
from refold.judge.verdict import CHECKS
from support.products import covering, others_exhaustive

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("attacks", ROOT / "tools" / "attacks.py")
attacks = sys.modules["attacks"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(attacks)

KINDS = ("triton", "numba", "g++", "torch.compile", "autograd.Function", "Thread", "multiprocessing")


def facts(entry):
    """Say what can be different about a candidate: what refuses it, and under which terms."""
    return [
        *entry.expect,
        *((name, str(value)) for name, value in entry.terms.items()),
        *(kind for kind in KINDS if kind in entry.text),
    ]


def some(entries):
    """Make parameters of candidates; those that differ in no fact from others are exhaustive."""
    kept = covering(entries, facts)
    return others_exhaustive([(entry,) for entry in entries], kept, [entry.name for entry in entries])


HOSTILE = attacks.entries(ROOT / "tests" / "adversarial")
HONEST = attacks.entries(ROOT / "tests" / "benign")
NEEDED = [entry for entry in HOSTILE if entry.off]
BETWEEN = [(entry, check) for entry in NEEDED if len(entry.off) > 1 for check in sorted(entry.off)]
# Checks that no attack shows alone: they end the trial, or say something of the original, or are notes.
NOT_ALONE = {"P3", "P4", "N8", "N3", "T11"}
SEED = 20


@pytest.fixture(scope="module")
def nursery():
    with Nursery(threads=1) as nursery:
        yield nursery


@pytest.mark.parametrize("entry", some(HOSTILE))
def test_an_attack_is_refused_by_its_check(entry, nursery):
    verdict = entry.trial(nursery, seed=SEED)
    assert verdict.check in entry.expect, str(verdict)
    assert verdict.exit_code == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", NEEDED, ids=lambda entry: entry.name)
def test_without_its_checks_an_attack_passes(entry, nursery):
    verdict = entry.trial(nursery, off=entry.off, seed=SEED)
    assert verdict.accepted, str(verdict)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("entry", "check"), BETWEEN, ids=lambda value: getattr(value, "name", value))
def test_each_of_several_checks_is_enough(entry, check, nursery):
    verdict = entry.trial(nursery, off=entry.off - {check}, seed=SEED)
    assert verdict.check == check, str(verdict)


def test_every_check_is_needed_by_an_attack():
    needed = set(itertools.chain.from_iterable(entry.off for entry in NEEDED))
    assert needed | NOT_ALONE == set(CHECKS)


@pytest.mark.parametrize("entry", some(HONEST))
def test_an_honest_candidate_passes(entry, nursery):
    verdict = entry.trial(nursery, seed=SEED)
    assert verdict.accepted, str(verdict)


@pytest.mark.parametrize("seed", [27, 34, 37])
def test_attention_passes_on_inputs_that_saturate_it(seed, nursery):
    """Its weights are exp(score - logsumexp), which a rounding of a large score moves; those of softmax are ones."""
    (entry,) = (entry for entry in HONEST if entry.name == "benign/fused_attention")
    verdict = replace(entry, terms=entry.terms | {"level": "quick"}).trial(nursery, seed=seed)
    assert verdict.accepted, str(verdict)


def test_there_are_honest_candidates_of_every_kind():
    text = "".join(entry.text for entry in HONEST)
    assert len(HONEST) >= 15
    assert all(kind in text for kind in KINDS[:5])
