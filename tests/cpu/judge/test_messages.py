"""Whatever a process answers is refused, or its numbers are compared: nothing is decided by what it says of itself."""

import builtins
import dataclasses
import json

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from refold.judge import Terms, Verdict, channel, messages, process, results, source, worker
from refold.judge.case import Case
from refold.judge.docket import Docket
from refold.judge.errors import Misbehaved, Raised, Refused
from refold.judge.process import Call, Result
from refold.judge.sides import Sides

NOTHING = source("Model = ModelNew = None", name="original.py", role="original")
RIGHT = {"result": torch.randn(2, 3), "number": torch.randn(()), "row": torch.randn(1, 1)}
TENSOR = messages.Description("Tensor", "float32", "cpu", [2, 3], [3, 1], 64, 64, 64, 24, [], [], False)
ANSWERS = {
    "Returned": messages.Returned({"tensor": 0}, [TENSOR], []),
    "Inspected": messages.Inspected({"weight": TENSOR}, "", {"x": "1"}, ["torch.relu"], "ab", ["x"]),
    "Drawn": messages.Drawn({"sequence": "list", "items": [{"tensor": 0}, {"value": 3}]}, [TENSOR]),
    "Confined": messages.Confined(["landlock"], []),
    "Failure": messages.Failure("ValueError", "no", [3]),
    "state": {"weight": TENSOR},
    "seconds": 0.5,
    "number": 7,
    "counts": {"aten::mm": 1},
    "arguments": "gAR9lC4=",
    "whether": True,
    "nothing": None,
}
KINDS = {name: type(each) for name, each in ANSWERS.items()}
KINDS |= {"state": dict[str, messages.Description], "counts": dict[str, int], "nothing": None}
KINDS |= {"Drawn": messages.Drawn | None}
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
nested = st.lists(plain, max_size=3) | st.dictionaries(st.text(max_size=5), plain, max_size=3)
keys = st.sampled_from(["items", "dict", "sequence", "tensor", "object", "value", "x"])
anything = plain | nested | st.lists(nested, max_size=3) | st.dictionaries(keys, plain | nested, max_size=4)
words = st.lists(st.sampled_from([*messages.ODD, *messages.TRAITS]), max_size=2)
likely = st.lists(st.integers(0, 9), max_size=4) | words | st.sampled_from(["Parameter", "float64", "bool", "cuda"])


def _paths(data, path=()):
    """Yield where each value of an answer is."""
    yield path
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inner:
        yield from _paths(value, (*path, key))


def _forged(answer, path, value):
    """Return a copy of an answer with another value at one place."""
    data = json.loads(json.dumps(answer))
    if not path:
        return value
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return data


PLACES = [(name, path) for name, each in ANSWERS.items() for path in _paths(json.loads(messages.to_json(each)))]


@given(st.sampled_from(PLACES), anything | likely)
@example(("Returned", ("answer", "tensors", 0, "stride")), [])
@example(("Returned", ("answer", "tensors", 0, "shape")), [1 << 47, 1 << 47, 0])
@example(("seconds", ("answer",)), 10**400)
@example(("Failure", ("failure", "type")), "the first line of a file")
@example(("Failure", ("failure", "type")), "print")
def test_an_answer_is_whole_or_none(place, value):
    name, path = place
    frame = json.dumps(_forged(json.loads(messages.to_json(ANSWERS[name])), path, value)).encode()
    try:
        found = messages.read(frame, KINDS[name])
    except messages.Malformed:
        return
    assert messages.read(messages.to_json(found), KINDS[name]) == found
    if isinstance(found, messages.Failure):
        assert found.type in vars(builtins).keys() | vars(torch).keys()
    if isinstance(found, messages.Returned | messages.Drawn):
        results.foreign_type(found.tree)
        results.outline(found.tree)


@pytest.mark.parametrize("frame", [b"", b"[]", b"{", b"{}", b'{"answer": "1"}', b'{"answer": 1, "x": 2}',
                                   b'{"answer": NaN}', b'{"answer": true}', b"[" * 100_000])  # fmt: skip
def test_what_is_no_answer(frame):
    with pytest.raises(messages.Malformed):
        messages.read(frame, int)


class Suspect(process.Process):
    """A process whose memory holds nothing but zeros, which are wrong."""

    def __init__(self):
        pass

    def read(self, address, size):
        return torch.zeros(size, dtype=torch.uint8)

    def answered(self, frame):
        answer = channel.read(frame, messages.Returned)
        found = self.tensors(answer.tensors, 1 << 20)
        count = len(found)
        return Result(answer.tree, answer.tensors, found, 1.0, left=answer.left, aliases=[None] * count)


class Witness:
    """An original that no longer runs, so that it excuses nothing."""

    def call(self, *_):
        raise Raised(messages.Failure("ValueError", "", []))


def _described(t):
    return dataclasses.replace(TENSOR, shape=list(t.shape), stride=list(t.stride()))


@given(st.sampled_from(sorted(RIGHT)), st.booleans(), st.data(), anything | likely)
def test_wrong_numbers_are_refused_however_they_are_described(name, train, data, value):
    """Each field of a call's answer with a value of each kind: no call ends well without its numbers."""
    right = RIGHT[name]
    tree = {"sequence": "with gradients", "items": [{"tensor": 0}, {"sequence": "list", "items": [{"tensor": 1}]}]}
    tensors = [_described(right)] * (1 + train)
    answer = json.loads(messages.to_json(messages.Returned(tree if train else {"tensor": 0}, tensors, [])))
    forged = _forged(answer, data.draw(st.sampled_from(list(_paths(answer)))), value)
    docket = Docket(Verdict(NOTHING, NOTHING, Terms(level="quick", train=train)), 1, frozenset())
    sides = Sides(NOTHING, NOTHING, None, docket, None)
    sides.witness = Witness()
    sides.outputs, sides.most = [(list(right.shape), torch.float32)], 1 << 20
    o = Result(answer["answer"]["tree"], tensors, [right] * (1 + train), 1.0, aliases=[None] * (1 + train))

    def compare():
        y = Suspect().answered(json.dumps(forged).encode())
        comparison = Case(docket, sides)
        comparison.metadata(o, y)
        comparison.numbers.compare("timed", "N1", Call({"tensor": 0}, [right]), o, o, y)

    with pytest.raises((Refused, Misbehaved)):
        compare()
    assert docket.verdict.outcome != "accepted"


@pytest.mark.parametrize("it", [{1}, object(), iter("x")])
def test_what_no_process_can_be_given_is_named(it):
    with pytest.raises(TypeError, match=f"a {type(it).__name__} cannot be given"):
        worker._unflatten(worker._flatten([it], [], result=False), [])
