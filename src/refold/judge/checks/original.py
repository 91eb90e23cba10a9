"""What must be so of the original, or nothing can be said of any candidate."""

from __future__ import annotations

from ..case import Case
from ..errors import Unjudgeable
from ..inputs import is_real
from ..numbers import COARSE
from ..process import Call
from ..results import foreign_type, identical, rms


def says_something(case: Case) -> None:
    """N8: what would say nothing about any candidate is not tried."""
    sides, docket = case.sides, case.docket
    plain = [Call(sides.tree, sides.actual("sane", i), seed=1) for i in (1, 2)]
    with sides.of_the_original():
        found = [sides.witness.call(call) for call in plain]
        after = sides.witness.inspect()
        sides.witness.ask("seed", seed=1)
        sides.random = after.random != sides.witness.inspect().random
        state = sides.read_state(sides.witness, after)
        sides.constant = {name for name, value in sides.state.items() if identical(state[name], value)}
        sides.stateful = len(sides.constant) < len(sides.state)
        sides.outputs = [(list(t.shape), t.dtype) for t in found[0].tensors]
        sides.longest, sides.squares = sides.reference.terms(sides.wide(sides.call(plain[0].tensors)))
        sides.cost, again = 3 * found[1].seconds, sides.witness.call(plain[0])
    if foreign := foreign_type(found[0].tree):
        raise Unjudgeable(f"the original returns a {foreign}, which cannot be compared; let it return tensors")
    if odd := next((m.odd for m in found[0].metadata if m.odd), None):
        raise Unjudgeable(
            f"the original returns a tensor that is {' and '.join(odd)}, which cannot be compared; let it return "
            "plain ones (resolve_conj(), resolve_neg(), to_dense())"
        )
    if not found[0].tensors:
        raise Unjudgeable("the original returns no tensor, so there is nothing to compare; let it return tensors")
    pairs = [(a, b) for a, b in zip(found[0].tensors, again.tensors, strict=True) if is_real(a)]
    if not sides.random and not sides.stateful and any(rms([b - a]) > COARSE[0] * rms([a]) for a, b in pairs):
        raise Unjudgeable(
            "the original's results depend on earlier calls by what it does not save; let it keep that in a buffer of "
            "its state_dict"
        )
    if all(identical(a, b) for a, b in zip(found[0].tensors, found[1].tensors, strict=True)):
        raise Unjudgeable(
            "the original returns the same for different inputs, so right and wrong candidates look alike"
        )
    sizes = sum(t.numel() for ts in (found[0].tensors, plain[0].tensors, sides.state.values()) for t in ts)
    sides.most = sides.suspect.most = 64 * sizes + (1 << 24)
    if sides.random:
        docket.note("the original draws random numbers: it is compared in its own precision, from equal seeds")
    if sides.stateful and not sides.shares_state:
        docket.step("S1", "the original changes its buffers, and these are not the candidate's")
    docket.step("N8", terms=sides.longest, random=sides.random, stateful=sides.stateful)
