"""Steps on slots of a pool by the Triton kernels, interpreted, against the torch backend in float64 on rows."""

import os

import pytest
import torch

from refold.compat import slots
from refold.errors import ArgumentError
from refold.ops.spec import load
from refold.ops.torch.slots import Places, update

pytestmark = pytest.mark.rows(4)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_interpreted, in a process of its own", allow_module_level=True)

h, p, g, n, d = 4, 3, 2, 5, 6
KINDS = ("ssd", "selective_scan", "delta_rule", "delta_rule per key")
NULL, COUNT = 0, 14


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def drawn(kind, t):
    """Tokens (t, ...) and parameters of a step, and the shape of a state."""
    if kind == "ssd":
        tokens = {"x": rand(t, h, p), "dt": rand(t, h), "B": rand(t, g, n), "C": rand(t, g, n), "z": rand(t, h, p)}
        return tokens, {"A": -rand(h).exp(), "D": rand(h, p), "dt_bias": rand(h), "dt_softplus": True}, (h, p, n)
    if kind == "selective_scan":
        tokens = {"x": rand(t, d), "dt": rand(t, d), "B": rand(t, n), "C": rand(t, n), "z": rand(t, d)}
        return tokens, {"A": -rand(d, n).exp(), "D": rand(d), "dt_bias": rand(d), "dt_softplus": True}, (d, n)
    keys = (n,) if kind.endswith("key") else ()
    tokens = {"q": rand(t, g, n), "k": rand(t, g, n), "v": rand(t, h, p), "g": rand(t, h, *keys), "beta": rand(t, h)}
    rest = {"A_log": rand(h), "dt_bias": rand(h, *keys), "normalize": True, "beta_limit": 1.0}
    return tokens, rest, (h, p, n)


class Problem:
    """The same call twice: in 32 or 16 bits on slots, in float64 on rows that are gathered."""

    def __init__(self, kind, t, dtype, monkeypatch):
        torch.manual_seed(0)
        self.spec, self.dtype, self.taken = load(f"{kind.split()[0]}_step"), dtype, []
        tokens, rest, shape = drawn(kind, t)
        tokens = {name: v.to(dtype) for name, v in tokens.items()}
        rest = {name: v.float() if isinstance(v, torch.Tensor) else v for name, v in rest.items()}
        self.given, self.wide = {**tokens, **rest}, {}
        for name, v in self.given.items():
            self.wide[name] = v.double() if isinstance(v, torch.Tensor) else v
        # Slots are apart in memory, and those of the delta rule are transposed, as engines have them.
        pool = rand(COUNT, 2, *shape).to(dtype)[:, 1]
        self.pool = pool.mT if kind.startswith("delta") else pool
        self.pool[[NULL, 13]] = torch.nan  # the null slot, and one that a sequence has
        self.before = self.pool.clone()
        monkeypatch.setattr(slots, "update", self.spied)

    def spied(self, *args):
        y = update(*args)
        self.taken.append(y is not None)
        return y

    def run(self, function, **places):
        """Outputs in slots; they and the pool are those of the twin."""
        wide, places = self.pool.double(), {"out": None, **places}
        twin = places["out"] if places["out"] is None else places["out"].double()
        found = function("step", self.spec, {**self.given, "state": self.pool}, **places)
        expected = function("step", self.spec, {**self.wide, "state": wide}, **{**places, "out": twin})
        assert self.taken[-2:] == [True, False]
        eps = max(torch.finfo(torch.float32).eps, torch.finfo(self.dtype).eps / 32)
        for a, b in ((found, expected), (self.pool, wide)):
            bound = float(64 * eps * b.nan_to_num().abs().max())
            torch.testing.assert_close(a.double(), b, rtol=0, atol=bound, equal_nan=True)
        return found

    def untouched(self, *written):
        others = [slot for slot in range(COUNT) if slot not in written]
        torch.testing.assert_close(self.pool[others], self.before[others], rtol=0, atol=0, equal_nan=True)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_token_a_sequence(kind, dtype, elsewhere, monkeypatch):
    problem = Problem(kind, 5, dtype, monkeypatch)
    source = torch.tensor([[5, 9], [NULL, 9], [-1, 9], [13, 9], [2, 9]], dtype=torch.int32)[:, 0]
    target = {"target": torch.tensor([6, 7, 1, 12, NULL])} if elsewhere else {}
    written = (6, 12) if elsewhere else (5, 13, 2)
    y = problem.run(slots.step_, pad=NULL, source=source, **target)
    assert (y[1:3] == 0).all()
    assert y[3].isnan().all()
    assert y[[0, 4]].isfinite().all()
    assert problem.pool[written[0]].isfinite().all()
    problem.untouched(*written)
    if not elsewhere:  # slots used again
        problem.run(slots.step_, pad=NULL, source=source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counted", [False, True])
def test_several_tokens_a_sequence(kind, dtype, counted, monkeypatch):
    problem = Problem(kind, 9, dtype, monkeypatch)
    offsets = torch.tensor([0, 3, 3, 5, 6, 8], dtype=torch.int32)  # the second is empty, the last token is padding
    places = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [NULL, 1, 1], [13, 10, -1]], dtype=torch.int32)
    accepted = torch.tensor([2, 1, 0, 1, 1], dtype=torch.int32) if counted else None
    first = problem.given[problem.spec.outputs[0].like]
    out = torch.full_like(first, 7.0).repeat(1, 2, *[1] * (first.ndim - 2))[:, : first.shape[1]]  # with gaps
    given = {"source": places, "target": None, "accepted": accepted, "offsets": offsets}
    y = problem.run(slots.steps_, out=out, pad=NULL, **given)
    assert y is out
    problem.untouched(*((1, 2, 3, 7, 8, 13, 10) if counted else (1, 7, 13)))
    assert (y[8] == 7).all()
    assert (y[5] == 0).all()
    assert y[:5].isfinite().all()


def test_a_slot_that_does_not_exist_and_a_batch_of_nothing(kind, monkeypatch):
    problem = Problem(kind, 3, torch.float32, monkeypatch)
    arrays = [{**problem.given, "state": problem.pool}.get(arg.name) for arg in problem.spec.args]
    options = [problem.given.get(o.name, o.default) for o in problem.spec.options]
    y = update(problem.spec, arrays, options, Places(torch.tensor([5, COUNT, 6])), None)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()
    problem.untouched(5, 6)
    with pytest.raises(ArgumentError, match=r"source\[1\] is slot 14"):
        problem.run(slots.step_, source=torch.tensor([5, COUNT, 6]))
    nothing = {name: v[:0] if arg.timed else v for arg in problem.spec.args if (name := arg.name) in problem.given
               for v in [problem.given[name]]}  # fmt: skip
    given = {**problem.given, **nothing, "state": problem.pool}
    y = slots.step_("step", problem.spec, given, source=torch.tensor([], dtype=torch.int32))
    assert len(y) == 0
