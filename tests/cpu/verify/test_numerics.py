"""The numerical proof accepts what is right and refuses what is subtly wrong."""

import pytest
import torch

from refold.verify import check


def matmul(a, b):
    return a @ b


def reference(a, b):
    return a.double() @ b.double()


def judge(candidate, n=64, dtype=torch.float32, actual=None):
    like = [torch.randn(32, n, dtype=dtype), torch.randn(n, 24, dtype=dtype)]
    return check(matmul, candidate, reference, actual or like, like, terms=n, multilinear=True)


HONEST = {
    "same": matmul,
    "other_order": lambda a, b: (a.flip(1)) @ b.flip(0),
    "multiply_and_sum": lambda a, b: (a[:, :, None] * b[None]).sum(1),
    "sequential": lambda a, b: sum(a[:, k : k + 1] * b[k : k + 1] for k in range(a.shape[1])),
    "split": lambda a, b: a[:, ::2] @ b[::2] + a[:, 1::2] @ b[1::2],
}

WRONG = {
    "zeros": lambda a, b: torch.zeros(32, 24),
    "half_precision": lambda a, b: (a.half() @ b.half()).float(),
    "bfloat16": lambda a, b: (a.bfloat16() @ b.bfloat16()).float(),
    "scaled": lambda a, b: (a @ b) * (1 + 1e-5),
    "one_element": lambda a, b: (a @ b).index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(0.0)),
    "a_term_dropped": lambda a, b: a[:, 1:] @ b[1:],
    "transposed_blocks": lambda a, b: (a @ b).roll(1, 0),
    "absolute": lambda a, b: a.abs() @ b.abs(),
    "nan": lambda a, b: (a @ b) * float("nan"),
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("n", [8, 64, 1024])
def test_honest_reorderings_pass(name, n):
    evidence = judge(HONEST[name], n)
    assert evidence.passed, evidence.reason


@pytest.mark.parametrize("name", WRONG)
def test_wrong_candidates_are_refused_with_a_reason(name):
    evidence = judge(WRONG[name])
    assert not evidence.passed
    assert "inputs:" in evidence.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_originals_allow_their_own_rounding(dtype):
    assert judge(HONEST["split"], dtype=dtype).passed
    assert not judge(lambda a, b: (a @ b) * 1.1, dtype=dtype).passed


def test_changing_an_input_is_refused():
    evidence = judge(lambda a, b: a.mul_(2) @ b * 0.5)
    assert evidence.failure.startswith("changed its inputs")


def test_returning_an_input_is_refused():
    like = [torch.randn(4, 4)]
    evidence = check(lambda x: x.clone(), lambda x: x, lambda x: x.double(), like, like, terms=1, multilinear=True)
    assert "shares memory" in evidence.failure


@pytest.mark.parametrize(
    ("candidate", "what"),
    [(lambda a, b: (a @ b)[:1], "shape"), (lambda a, b: (a @ b).double(), "dtype")],
)
def test_other_metadata_is_refused(candidate, what):
    assert f"has {what}" in judge(candidate).failure


def test_wrong_only_on_the_users_data_is_found():
    large = [torch.full((32, 64), 1e4), torch.randn(64, 24)]
    evidence = judge(lambda a, b: a.clamp(-100, 100) @ b, actual=large)
    assert "actual inputs" in evidence.reason
    assert "normal inputs" not in evidence.reason
