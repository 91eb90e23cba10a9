"""The trial of a candidate: the checks in their order, each with its name in the protocol.

Three processes run under the same conditions: the candidate; the original as a *witness* of what a call must return,
change, share and leave; and the original in float64 as the *reference*. This process draws inputs, reads results, keeps
the clock and decides. It runs no code of the two programs.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import inputs
from .process import Call, Misbehaved, Nursery, Raised, Result, Unjudgeable
from .program import Program
from .race import Race
from .results import alike, foreign_type, identical, rule, unlike
from .session import Refused, Tensors
from .verdict import Verdict

DISCRETE, MORE = (
    4096,
    200,
)  # so many integers and truth values among results are compared, in so many more calls at most
KEPT = 64 << 20  # bytes beyond those that the original keeps; less is not worth a note
MADE_S = 1.0  # to be made; less is not worth a note
SLOW = 2  # times the processor time that shapes may take, for a candidate that compiles anew for each
SIZES = 6  # other shapes that are tried while the C library looks at memory
# Operations that a library does, of which a kernel of one's own would say more.
_LIBRARY = "mm bmm addmm baddbmm mv dot convolution _convolution mkldnn_convolution cudnn_convolution"
LIBRARY = frozenset(_LIBRARY.split())


class Trial(Race):
    """Tries one candidate; `run` gives the verdict."""

    def run(self) -> Verdict:
        """Try the candidate."""
        verdict = self.verdict
        self._hashes = _hashes() if self.level.hashed else ""
        try:
            with contextlib.ExitStack() as stack:
                self._open(stack)
                self._try()
        except Refused:
            pass
        except Misbehaved as error:
            verdict.end("refused", error.check, error.reason)
        except Unjudgeable as error:
            verdict.end("unjudged", "", str(error))
        else:
            verdict.outcome = "accepted"
        verdict.seconds = time.perf_counter() - self._began
        verdict.seed = int.from_bytes(self._secret, "little")
        return verdict

    def _try(self) -> None:
        level, terms = self.level, self.terms
        self._sane()
        first = self._actual(0)
        _, y = self._round("actual", first)
        self._late(y)
        self._left_behind(0)
        self._weights(first)
        several = sum(map(inputs.is_real, first)) > 1
        for kind in self._chosen((*inputs.KINDS, *(inputs.UNLIKE if several else ()))):
            whole = kind == "integers" and self._shares_state
            if whole:
                self._adopt(self._whole_numbers())
            self._round(kind, inputs.draw(kind, first, self._derived(kind)))
            if whole:
                self._adopt(self._state)
        discrete = [
            math.prod(shape) for shape, dtype in self._outputs if not (dtype.is_floating_point or dtype.is_complex)
        ]
        if level.deep and any(discrete):
            # Of a position or a truth value, rounding shows only where two values are nearly equal, which is rare.
            for turn in range(min(-(-DISCRETE // sum(discrete)), MORE, int(level.kinds_s / self._cost))):
                self._round("normal", inputs.draw("normal", first, self._derived("discrete", turn)))
        self._stale(first)
        self._repeatable(first)
        self._grad_mode(first)
        self._integers(first)
        self._constants(first)
        self._second_gradients(first)
        if level.deep:
            self._specials(first)
            self._layouts(first)
        self._left_behind(1)
        if level.shapes_s:
            self._shapes(first)
        if terms.accept == "faster":
            self._faster()
            self._left_behind(2)
        self._still()
        if level.deep:
            self._kept_for_good()
            self._census(first)
            self._heap(first)
        if self._hashes:
            same = _hashes() == self._hashes
            self._step("P6", "" if same else "files of refold, torch or triton are others than before the trial")

    def _chosen(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        """Return the kinds of inputs to try: all, or, where calls are slow, a secret choice that time allows."""
        affordable = max(int(self.level.kinds_s / self._cost), 3)
        if affordable >= len(kinds):
            return kinds
        others = [kind for kind in kinds if kind not in ("normal", "integers")]
        random.Random(self._derived("kinds")).shuffle(others)
        if self.level.deep:
            self.verdict.note(f"calls take long, so {affordable} of {len(kinds)} kinds of inputs were tried")
        return ("normal", "integers", *others[: affordable - 2])

    def _whole_numbers(self) -> dict[str, torch.Tensor]:
        """Return weights with which sums of products of small integers are integers."""
        g = inputs.generator(self._derived("whole numbers"))
        return {
            name: torch.randint(-1, 2, value.shape, generator=g).to(value.dtype) if value.is_floating_point() else value
            for name, value in self._state.items()
        }

    def _sane(self) -> None:
        """N8: what would say nothing about any candidate is not tried."""
        self._outputs = []
        plain = [Call(self._tree, self._actual("sane", i), seed=1) for i in (1, 2)]
        with self._of_the_original():
            found = [self.witness.call(call, self.terms.timeout) for call in plain]
            after = self.witness.inspect()
            self.witness.request(do="seed", seed=1)
            self._random = after["random"] != self.witness.inspect()["random"]
            state = self._read_state(self.witness, after)
            self._constant = {name for name, value in self._state.items() if identical(state[name], value)}
            self._stateful = len(self._constant) < len(self._state)
            self._outputs = [(list(t.shape), t.dtype) for t in found[0].tensors]
            self._longest = self.reference.terms(self._wide(self._call(plain[0].tensors)), self.terms.timeout)
            self._cost = 3 * self._seconds(found[1])
        if foreign := foreign_type(found[0].tree):
            raise Unjudgeable(f"the original returns a {foreign}, which cannot be compared; let it return tensors")
        if odd := next((m["odd"] for m in found[0].metadata if m["odd"]), None):
            raise Unjudgeable(
                f"the original returns a tensor that is {' and '.join(odd)}, which cannot be compared; let it return "
                "plain ones (resolve_conj(), resolve_neg(), to_dense())"
            )
        if not found[0].tensors:
            raise Unjudgeable("the original returns no tensor, so there is nothing to compare; let it return tensors")
        if all(identical(a, b) for a, b in zip(found[0].tensors, found[1].tensors, strict=True)):
            raise Unjudgeable(
                "the original returns the same for different inputs, so right and wrong candidates look alike"
            )
        sizes = sum(t.numel() for ts in (found[0].tensors, plain[0].tensors, self._state.values()) for t in ts)
        self._most = 64 * sizes + (1 << 24)
        if self._random:
            self.verdict.note(
                "the original draws random numbers: it is compared in its own precision, from equal seeds"
            )
        if self._stateful and not self._shares_state:
            self._step("S1", "the original changes its buffers, and these are not the candidate's")
        self._step("N8", "", terms=self._longest, random=self._random, stateful=self._stateful)

    def _round(
        self, kind: str, values: Tensors, *, check: str = "", adopted: bool = False, **options: Any
    ) -> tuple[Result, Result]:
        """Run one call on all sides and compare everything that comes back; say if they have their state already."""
        call = self._call(values, **options)
        if self._stateful and self._shares_state and not adopted:
            self._adopt(self._given_state)
        with self._of_the_original():
            o = self.witness.call(call, self.terms.timeout)
            # What a number must be is known by then, so that the original in its own precision can stand for it.
            plain = self._random or bool(check)
            r = o if plain else self.reference.call(self._wide(call), self.terms.timeout)
        y = self._ask(call)
        self._metadata(o, y)
        self._numbers(kind, check or rule(kind), call, r, o, y)
        self._aliases = o.aliases
        self._traces(o, y)
        self._past.append(y)
        return o, y

    def _ask(self, call: Call) -> Result:
        return self.suspect.call(call, self.terms.timeout, most=self._most)

    def _late(self, y: Result) -> None:
        """U4, S6: when a call has returned its results are what they are, and nothing runs."""
        asleep = self.suspect.settle()
        time.sleep(0.02)
        busy = bool(asleep) and self.suspect.activity() != asleep
        changed = [not identical(a, b) for a, b in zip(y.tensors, self.suspect.again(y, self._most), strict=True)]
        self._step("U4", "its result changed after it had returned it" if any(changed) else "")
        self._step("S6", "it used the processor between calls" if busy else "")

    def _left_behind(self, turn: int) -> None:
        """S3 to S6, S8: the world after a call is as the original leaves it."""
        self._round("actual", self._actual("left behind", turn))
        self.suspect.settle()
        left = self.suspect.lingering()
        self._step("S6", f"it left {len(left)} processes running" if left else self.suspect.wakes())
        self._surroundings(self.witness, self.suspect, self._start["modes"])

    def _stale(self, first: Tensors) -> None:
        """C1 and N9: new values at the old address; the old values except for one element; results kept."""
        _, kept = self._round("same place", inputs.draw("normal", first, self._derived("place")), check="C1", keep=True)
        again = inputs.draw("normal", first, self._derived("again"))
        self._round("same place", again, check="C1", same_place=True)
        self._kept = kept
        self._still()
        for kind, change in inputs.CHANGES.items():
            again = change(again, self._derived(kind))
            self._round(kind, again, check="N9", same_place=True)

    def _still(self) -> None:
        """S7: a result that is kept does not change."""
        self._unchanged(self.suspect, self._kept)

    def _repeatable(self, first: Tensors) -> None:
        """U1 and determinism: the same bits each time, whatever new memory holds."""
        call = self._call(inputs.draw("normal", first, self._derived("repeat")))
        results = [self._ask(call) for _ in range(self.level.repeats)]
        equal = all(alike(results[0], other) for other in results[1:])
        if not equal:
            with self._of_the_original():
                theirs = [self.witness.call(call, self.terms.timeout) for _ in range(self.level.repeats)]
            if all(alike(theirs[0], other) for other in theirs[1:]):
                self._step("D1", "it gives different bits for the same inputs, the original does not")
            self.verdict.note("neither it nor the original gives the same bits each time")
            return
        self._step("D1", "")
        # 0xFF is a NaN in every format, 0x7B a large number.
        poisoned = [self._ask(replace(call, perturb=byte)) for byte in (0xFF, 0x7B)]
        equal = all(alike(results[0], other) for other in poisoned)
        self._step("U1", "" if equal else "its result depends on uninitialised memory, or on memory next to its inputs")

    def _weights(self, first: Tensors) -> None:
        """C2: weights that change are used."""
        if not self._shares_state:
            return
        for turn, steps in enumerate((False, True)):
            self._adopt(self._other_weights("weights", turn), steps=steps)
            kind = "after its weights changed in place" if steps else "after load_state_dict"
            self._round(kind, self._actual("weights", turn), check="C2")
        # What was asked and told until now may have made it look at its weights once more.
        places = self._places(self.suspect)
        self._round("settled", self._actual("settled"), check="C2")
        other = self._other_weights("written over")
        self._adopt({n: other[n] if n in places else t for n, t in self._given_state.items()}, suspect=False)
        self._written(self.suspect, places, other)
        self._round("after its weights were written over", self._actual("written"), check="C2", adopted=True)
        self._adopt(self._state)

    def _grad_mode(self, first: Tensors) -> None:
        """C5: the same values whether gradients are recorded or not, and whether they flow back or not."""
        call = self._call(inputs.draw("normal", first, self._derived("grad")))
        if self.terms.train:
            self._unless_refused("no backward", "C5", replace(call, cotangents=()), "only with a backward")
        else:
            self._unless_refused("gradients recorded", "C5", replace(call, grad=True), "only without gradients")
            self._unless_refused("inference mode", "C5", replace(call, inference=True), "not in inference mode")

    def _integers(self, first: Tensors) -> None:
        """N6: integers are drawn by the original alone, and may be the same in each call."""
        other = inputs.shuffled(first, self._derived("order"))
        fixed = [
            index
            for index, values in enumerate(zip(first, self._actual("integers"), other, strict=True))
            if not values[0].is_floating_point() and all(torch.equal(values[0], x) for x in values[1:])
        ]
        if fixed:
            self.verdict.note(
                f"input {', '.join(map(str, fixed))} was the same in all calls; other values were not tried"
            )
        if any(a is not b for a, b in zip(first, other, strict=True)):
            self._elsewhere("integers in another order", other, "not for integers in another order")

    def _constants(self, first: Tensors) -> None:
        """N6: a number among the arguments is read; other constants are the same in all calls."""
        call = self._call(inputs.draw("normal", first, self._derived("constants")))
        tree, others = inputs.constants(self._tree)
        if tree != self._tree:
            self._unless_refused("another number", "N6", replace(call, tree=tree), "not for other numbers as arguments")
        if others:
            self.verdict.note(
                f"the arguments {', '.join(map(repr, others))} were the same in all calls; other values were not tried"
            )

    def _second_gradients(self, first: Tensors) -> None:
        """N7: gradients as a training loop may ask for them; gradients of gradients, where the original has them."""
        if not self.terms.train:
            return
        call = replace(self._call(inputs.draw("normal", first, self._derived("second"))), flow="differentiated")
        self._unless_refused("second gradients of normal", "N7", call, "no second gradients", wide=True)
        call = replace(self._call(inputs.draw("normal", first, self._derived("accumulated"))), flow="accumulated")
        note = "no second backward of one graph"
        self._unless_refused("accumulated gradients of normal", "N7", call, note, wide=True)
        if self._state:
            call = replace(self._call(inputs.draw("normal", first, self._derived("frozen"))), frozen=True)
            self._unless_refused("frozen parameters, normal", "N7", call, "not with frozen parameters", wide=True)
        self._plain_sum(first)
        real = [index for index, x in enumerate(first) if inputs.is_real(x)]
        constant = [frozenset(real)] if self._state else []  # parameters need them still
        if len(real) > 1:
            constant.append(frozenset(real) - {random.Random(self._derived("wanted")).choice(real)})
        for some in constant:
            call = self._call(inputs.draw("normal", first, self._derived("constant", *some)), constant=some)
            which = ", ".join(str(index) for index in sorted(some))
            self._unless_refused(
                f"no gradient for input {which}, normal", "N7", call, f"not without a gradient for input {which}",
                wide=True,
            )  # fmt: skip

    def _plain_sum(self, first: Tensors) -> None:
        """N7: what flows back from a sum of all results, one number for all of them, of which nothing may be left."""
        call = self._call(inputs.draw("normal", first, self._derived("sum")))
        ones = [torch.ones((), dtype=t.dtype).expand(t.shape) for t in call.cotangents]
        call = replace(call, cotangents=ones)
        with self._of_the_original():
            o = self.witness.call(call, self.terms.timeout)
            r = o if self._random else self.reference.call(self._wide(call), self.terms.timeout)
        y = self._ask(call)
        self._metadata(o, y)
        sides = list(zip(r.tensors, o.tensors, y.tensors, strict=True))
        self._coarse("a sum's", call, sides[len(self._outputs) :])

    def _specials(self, first: Tensors) -> None:
        """N5: NaN and infinities stay where the original has them, as far as that is asked for."""
        for name, values in inputs.specials(
            inputs.draw("normal", first, self._derived("specials")), self._derived("at")
        ):
            call = self._call(values)
            with self._of_the_original():
                o = self.witness.call(call, self.terms.timeout)
            y = self._ask(call)
            if other := unlike(o, y):
                self._step("M2", f"with one {name} among its inputs, {other}")
            differ = [
                not (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf() * a.sign(), b.isinf() * b.sign()))
                for a, b in zip(o.tensors, y.tensors, strict=True)
                if a.is_floating_point()
            ]
            failure = f"with one {name} among its inputs, other results are not finite than of the original"
            if any(differ) and self.terms.nonfinite != "strict":
                self.verdict.note(failure)
            self._step("N5", failure if any(differ) and self.terms.nonfinite == "strict" else "", special=name)

    def _layouts(self, first: Tensors) -> None:
        """N6: inputs that lie otherwise in memory."""
        for name, values in inputs.layouts(first, self._derived("layouts")):
            self._elsewhere(name, values, f"not for {name} inputs")
        if self.terms.train:
            call = self._call(inputs.draw("normal", first, self._derived("cotangents")))
            for name, values in inputs.layouts(call.cotangents, self._derived("layouts")):
                other = replace(call, cotangents=values)
                self._unless_refused(f"{name} cotangents", "N6", other, f"not for {name} cotangents", wide=True)

    def _shapes(self, first: Tensors) -> None:
        """N6: other shapes. A candidate may refuse them, by an exception; wrong results it may not give."""
        most = min(60 if self.terms.level == "paranoid" else 24, max(int(self.level.shapes_s / self._cost), 2))
        tried, began = 0, sum(self.suspect.processor_time())
        size = sum(t.numel() for t in first)
        for name, values in inputs.resized(first, self._derived("shapes")):
            if tried >= most or sum(self.suspect.processor_time()) - began > SLOW * self.level.shapes_s:
                break
            if sum(t.numel() for t in values) <= 4 * size + 64:
                tried += self._elsewhere(f"size {name}", values, f"not for size {name}")

    def _elsewhere(self, name: str, values: Tensors, note: str) -> bool:
        """Try inputs that the original may not accept, and the candidate may refuse."""
        call = self._call(values)
        if self.terms.train:
            try:
                plain = self.witness.call(replace(call, cotangents=()), self.terms.timeout)
            except Raised:
                return False
            g = inputs.generator(self._derived("cotangents", name))
            call = replace(call, cotangents=[inputs.normal(t, g) for t in plain.tensors])
        if self.witness.needed([*call.tensors, *call.cotangents]) > self.witness.room:
            return False
        return self._unless_refused(name, "N6", call, note)

    def _unless_refused(self, name: str, check: str, call: Call, note: str, *, wide: bool = False) -> bool:
        """Compare a call that the original may not accept, and that a candidate may refuse, by an exception.

        Args:
            name: What is special about the call.
            check: The check that a wrong result fails.
            call: The call.
            note: What is said of a candidate that refuses it.
            wide: Whether the reference is the original in float64, unless that draws random numbers.

        Returns:
            Whether the original accepts it.
        """
        try:
            o = self.witness.call(call, self.terms.timeout)
            r = self.reference.call(self._wide(call), self.terms.timeout) if wide and not self._random else o
        except Raised:
            return False
        try:
            y = self._ask(call)
        except Raised as error:
            self.verdict.note(f"{note}: {error.reason}")
            return True
        if other := unlike(o, y):
            self._step("M2", f"{name}: {other}")
        self._untouched(o, y)
        self._numbers(name, check, call, r, o, y)
        return True

    def _kept_for_good(self) -> None:
        """T11: work that was done when it was made, and memory that it keeps, are no part of the time of a call."""
        made, held = self._made, [worker.held() for worker in (self.witness, self.suspect)]
        if made[1] > max(10 * made[0], MADE_S):
            self.verdict.note(f"making it takes {made[1]:.1f} s, making the original {made[0]:.1f} s")
        if held[1] > held[0] + KEPT:
            self.verdict.note(f"it keeps {(held[1] - held[0]) >> 20} MB of memory that the original does not keep")
        self._step("T11", "", made_s=[round(s, 3) for s in made], held_bytes=held)

    def _census(self, first: Tensors) -> None:
        """T12: which operations and kernels run; said of the program by its own process, and so only noted."""
        call = self._call(inputs.draw("normal", first, self._derived("census")))
        try:
            own, theirs = (worker.census(call, self.terms.timeout) for worker in (self.suspect, self.witness))
        except (Raised, Misbehaved):
            return
        calls = sorted(name for name in own if name.removeprefix("aten::") in LIBRARY)
        if own == theirs and own:
            self.verdict.note("it runs the operations of the original, no others: it may have fallen back to them")
        elif calls:
            self.verdict.note(f"it calls the library: {', '.join(calls)}")
        self._step("T12", "", operations=own)

    def _heap(self, first: Tensors) -> None:
        """U3: what is written next to memory of its own shows when the C library looks at that memory."""
        if self.terms.device != "cpu":
            return
        values = [self._actual("heap"), *(drawn for _, drawn in inputs.layouts(first, self._derived("heap")))]
        calls = [self._call(each) for each in values]
        others = inputs.resized(first, self._derived("heap sizes"))
        calls += [replace(self._call(drawn), cotangents=()) for _, drawn in itertools.islice(others, SIZES)]
        known = []
        for call in calls:
            with contextlib.suppress(Raised):
                self.witness.call(call, self.terms.timeout)
                known.append(call)
        nursery, failure = self.nursery.other(careful=True), ""
        ended = self._ended(nursery, self.candidate, known)
        if not nursery.is_careful():
            self.verdict.note("whether it writes beyond its own memory is unknown: there is no libc_malloc_debug here")
        elif ended and self._ended(nursery, self.original, known):
            self.verdict.note("where the C library looks at all memory, neither it nor the original runs to the end")
        elif ended:
            failure = f"it wrote beyond memory of its own: where the C library looks at that, {ended}"
        self._step("U3", failure, calls=len(known))

    def _ended(self, nursery: Nursery, program: Program, calls: Sequence[Call]) -> str:
        """Make calls and let go of each result; say how the process ended, empty if it lives."""
        try:
            beside = self.suspect if program is self.candidate else None
            with nursery.program(program.text, "candidate.py", room=self.suspect.room, beside=beside) as worker:
                worker.lenient = self.off
                worker.load(program.attribute, self.terms.timeout)
                self._build(worker, program, self.terms.dtype)
                for call in [*calls, calls[0]]:
                    with contextlib.suppress(Raised):  # what it may refuse
                        worker.call(call, self.terms.timeout, most=self._most, hold=False)
        except Raised:
            pass
        except Misbehaved as error:
            if error.check == "P4":
                return error.reason
            if error.check != "P3":  # it may be slow there
                raise
        return ""


def _hashes() -> str:
    """Return a digest of all that refold, torch and triton have in Python."""
    digest = hashlib.sha256()
    for name in ("refold", "torch", "triton"):
        spec = importlib.util.find_spec(name)
        for root in (spec.submodule_search_locations or []) if spec is not None else []:
            for path in sorted(Path(root).rglob("*.py")):
                digest.update(str(path).encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
