"""The trial of a candidate: the checks in their order, each with its name in the protocol.

Three processes run under the same conditions: the candidate; the original as a *witness* of what a call must return,
change, share and leave; and the original in float64 as the *reference*. This process draws inputs, reads results, keeps
the clock and decides. It runs no code of the two programs. Seeds are drawn after the candidate is loaded, and are
written down only after its process has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import numerics
from ..contention import OTHERS, Usage, others, usage
from ..timing import ALPHA, BEST_OF, DELTA, SHORT_MS, median_bounds
from . import inputs
from .process import GUARD, Call, Misbehaved, Nursery, Raised, Result, Unjudgeable, Worker
from .program import Program
from .sandbox import enough
from .terms import LEVELS, Terms
from .verdict import Verdict

Tensors = Sequence[torch.Tensor]


GRADIENTS = "torch.fx.experimental.symbolic_shapes"  # which torch.autograd.grad imports
ORDINARY = ("actual", "normal", "timed")  # kinds of inputs by which also small results next to large ones are judged
BETWEEN_S = 3e-5  # of processor time between two calls, about what equal programs differ by on average
DISCRETE, MORE = (
    4096,
    200,
)  # so many integers and truth values among results are compared, in so many more calls at most
KEPT = 64 << 20  # bytes beyond those that the original keeps; less is not worth a note
LOOKED_AT = 16  # one timed call in so many is followed by a look at what it left
COARSE = 0.01  # of a gradient at large inputs, where backwards lose digits
MADE_S = 1.0  # to be made; less is not worth a note
CLEAR = 2.0  # times as fast, by the bound: what waits of equal programs do not make of each other
WAITED = 0.2  # of the time of calls; more is waiting for other programs, or for a machine that is slow to wake threads
BUSY = 10  # times the time of a timing test that may pass on a busy machine
PATIENCE = 3  # times the time of a timing test that may pass until it can be decided at all
COMPILE_S = 40.0  # what torch.compile may take for the original
SLOW = 2  # times the processor time that shapes may take, for a candidate that compiles anew for each
SIZES = 6  # other shapes that are tried while the C library looks at memory
POSSIBLE = 0.5  # of the time that writing the results takes, on a machine that may be busier at one time than another
# Operations that a library does, of which a kernel of one's own would say more.
_LIBRARY = "mm bmm addmm baddbmm mv dot convolution _convolution mkldnn_convolution cudnn_convolution"
LIBRARY = frozenset(_LIBRARY.split())


class _Refused(Exception):
    """A check decided."""


class Trial:
    """Tries one candidate; `run` gives the verdict."""

    def __init__(
        self,
        original: Program,
        candidate: Program,
        given: Tensors | None,
        terms: Terms,
        nursery: Nursery,
        *,
        seed: int | None = None,
        off: frozenset[str] = frozenset(),
    ):
        self.original, self.candidate, self.given, self.terms, self.nursery = original, candidate, given, terms, nursery
        self.level = LEVELS[terms.level]
        self.off = off
        self.verdict = Verdict(original, candidate, terms, off=sorted(off))
        self._seed = seed
        self._secret = b""
        self._shares_state = False
        self._longest = 1
        self._known = numerics.NOTHING
        self._usual: tuple[float, list[float]] | None = None  # norms of zero-mean inputs and of their gradients
        self._lucky = False  # whether a result was excused, since the original's own was right by luck
        self._past: deque[Result] = deque(maxlen=8)
        self._random = False
        self._compiled: Worker | None = None
        self._most = 1 << 20
        self._began = time.perf_counter()
        self._hashes = _hashes() if self.level.hashed else ""

    def run(self) -> Verdict:
        """Try the candidate."""
        verdict = self.verdict
        try:
            with contextlib.ExitStack() as stack:
                self._open(stack)
                self._try()
        except _Refused:
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

    # Setting up

    def _open(self, stack: contextlib.ExitStack) -> None:
        terms = self.terms
        self.nursery.imports = [GRADIENTS] if terms.train else []

        def start(program: Program, name: str, room: int) -> Worker:
            return stack.enter_context(self.nursery.program(program.text, name, room=room))

        self.giver = start(self.original, "original.py", 1 << 16)
        self.verdict.sandbox = self.giver.active
        for text in self.giver.unseen:
            self.verdict.note(text)
        if self.nursery.sandboxed and (missing := enough(self.giver.active)):
            raise Unjudgeable(
                f"there is no sandbox to run it in: {missing}. --allow-unsandboxed (allow_unsandboxed=True) runs it "
                "without one"
            )
        with self._of_the_original():
            self.giver.load(self.original.attribute, terms.timeout)
            self._arguments = str(self.giver.request(do="arguments", seed=0)["arguments"])
            sizes = [math.prod(m["shape"]) * 8 for _, m in self._build(self.giver, self.original, terms.dtype)["state"]]
        self._tree, first = self._own_inputs(0)
        room = 6 * sum(t.numel() * 8 + 4 * GUARD for t in first) + 2 * max(sizes, default=0) + (1 << 20)
        self.suspect = start(self.candidate, "candidate.py", room)
        self.suspect.lenient = self.off
        seconds = self.suspect.load(self.candidate.attribute, terms.timeout)
        self._step("P3", "", load_s=round(seconds, 3))
        # Only now are there secrets.
        self._secret = os.urandom(6) if self._seed is None else self._seed.to_bytes(6, "little")
        self.witness = start(self.original, "original.py", room)
        self.reference = start(self.original, "original.py", 2 * room)
        self.narrow = start(self.original, "original.py", room) if terms.dtype == "float64" else None
        with self._of_the_original():
            for worker in filter(None, (self.witness, self.reference, self.narrow)):
                worker.load(self.original.attribute, terms.timeout)
            theirs, made = self._timed_build(self.witness, self.original)
            self._build(self.reference, self.original, "float64")
            if self.narrow:
                self._build(self.narrow, self.original, "float32")
        ours, own = self._timed_build(self.suspect, self.candidate)
        self._start, self._made = ours, (made, own)
        shape, other = ({name: (m["shape"], m["dtype"]) for name, m in side["state"]} for side in (theirs, ours))
        self._shares_state = bool(shape) and shape == other
        if shape and not self._shares_state:
            self.verdict.note(
                "its parameters differ from the original's in names or shapes, so no other weights than those of its "
                "own construction can be given to it"
            )
        self._state = self._read_state(self.witness, theirs)
        self._adopt(self._state, suspect=self._shares_state)
        if self._shares_state:
            self.suspect.request(do="order", names=list(shape))

    @contextlib.contextmanager
    def _of_the_original(self) -> Iterator[None]:
        """Make what the original does wrong no fault of the candidate."""
        try:
            yield
        except Misbehaved as error:
            raise Unjudgeable(f"the original itself cannot be run: {error.reason}") from error

    def _build(self, worker: Worker, program: Program, dtype: str, compiled: bool = False) -> dict[str, Any]:
        worker.request(
            self.terms.timeout, do="build", attribute=program.attribute, arguments=self._arguments,
            seed=self._derived("build"), dtype=dtype, device=self.terms.device, train=self.terms.train,
            compiled=compiled,
        )  # fmt: skip
        return worker.inspect()

    def _timed_build(self, worker: Worker, program: Program) -> tuple[dict[str, Any], float]:
        """Also return the seconds it took, without those in which other programs had its processor."""
        start, queued = time.perf_counter(), worker.queue_time()
        found = self._build(worker, program, self.terms.dtype)
        return found, time.perf_counter() - start - (worker.queue_time() - queued)

    def _derived(self, *purpose: object) -> int:
        """Return the seed of one purpose; none tells anything of another."""
        return int.from_bytes(hashlib.sha256(self._secret + repr(purpose).encode()).digest()[:6], "little")

    def _own_inputs(self, seed: int) -> tuple[Any, list[torch.Tensor]]:
        """Return the original's inputs: those given, changed a little, or those it draws itself."""
        dtype = getattr(torch, self.terms.dtype)
        if self.given is not None:
            tree = {"sequence": "tuple", "items": [{"tensor": i} for i in range(len(self.given))]}
            values = inputs.jittered(self.given, seed) if seed else list(self.given)
        else:
            with self._of_the_original():
                answer = self.giver.request(self.terms.timeout, do="inputs", seed=seed)
                if "missing" in answer:
                    raise Unjudgeable(f"{self.original.name} does not define get_inputs(), and no inputs are given")
                tree, values = answer["tree"], self.giver.tensors(answer["tensors"], 1 << 40)
        return tree, [x.to(dtype).contiguous() if x.is_floating_point() else x.contiguous() for x in values]

    def _actual(self, *purpose: object) -> list[torch.Tensor]:
        return self._own_inputs(self._derived("actual", *purpose))[1]

    def _read_state(self, worker: Worker, inspected: dict[str, Any], most: int = 1 << 40) -> dict[str, torch.Tensor]:
        names, described = [name for name, _ in inspected["state"]], [m for _, m in inspected["state"]]
        return dict(zip(names, worker.tensors(described, most), strict=True))

    def _adopt(self, state: dict[str, torch.Tensor], *, suspect: bool = True, steps: bool = False) -> None:
        """Give all sides the same parameters and buffers, in the precision of each."""
        own = getattr(torch, self.terms.dtype)
        sides = [(self.witness, own), (self.reference, torch.float64)]
        sides += [(self.narrow, torch.float32)] if self.narrow else []
        sides += [(self.suspect, own)] if suspect else []
        self._give(state, sides, steps=steps)

    def _give(
        self, state: dict[str, torch.Tensor], sides: Sequence[tuple[Worker, torch.dtype]], *, steps: bool = False
    ) -> None:
        for worker, dtype in sides:
            values = {n: (t.to(dtype) if t.is_floating_point() else t).contiguous() for n, t in state.items()}
            for batch in worker.batches(values):
                specs = worker.wrap(list(batch.values()))
                worker.fill(specs, list(batch.values()), 0xFF)
                tensors = dict(zip(batch, specs, strict=True))
                worker.request(self.terms.timeout, do="adopt", tensors=tensors, steps=steps)

    # Writing down

    def _step(self, check: str, failure: str, **numbers: Any) -> None:
        """Write down the outcome of a check; a failure decides."""
        ignored = check in self.off
        self.verdict.line(check, not failure or ignored, failure, **numbers)
        if failure and not ignored:
            self.verdict.end("refused", check, failure[:1000])
            raise _Refused

    # The checks

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

    def _call(self, values: Tensors, **options: Any) -> Call:
        seed = self._derived("call", len(self.verdict.lines), options.pop("salt", ""))
        call = Call(
            self._tree, list(values), seed=seed, grad=self.terms.train, requires_grad=self.terms.train, **options
        )
        return replace(call, cotangents=self._cotangents(seed)) if self.terms.train else call

    def _cotangents(self, seed: int) -> list[torch.Tensor]:
        """Draw what flows back: random, for a sum's ones would hide permutations."""
        g = inputs.generator(seed)
        return [inputs.normal(torch.empty(shape, dtype=dtype), g) for shape, dtype in self._outputs]

    def _wide(self, call: Call, dtype: torch.dtype = torch.float64) -> Call:
        kinds = {torch.float64: torch.complex128, torch.float32: torch.complex64}

        def cast(t: torch.Tensor) -> torch.Tensor:
            return t.to(dtype) if t.is_floating_point() else t.to(kinds[dtype]) if t.is_complex() else t

        return replace(call, tensors=list(map(cast, call.tensors)), cotangents=list(map(cast, call.cotangents)))

    def _sane(self) -> None:
        """N8: what would say nothing about any candidate is not tried."""
        self._outputs: list[tuple[list[int], torch.dtype]] = []
        plain = [Call(self._tree, self._actual("sane", i), seed=1) for i in (1, 2)]
        with self._of_the_original():
            found = [self.witness.call(call, self.terms.timeout) for call in plain]
            after = self.witness.inspect()
            self.witness.request(do="seed", seed=1)
            self._random = after["random"] != self.witness.inspect()["random"]
            state = self._read_state(self.witness, after)
            self._stateful = any(not _identical(state[name], value) for name, value in self._state.items())
            self._outputs = [(list(t.shape), t.dtype) for t in found[0].tensors]
            self._longest = self.reference.terms(self._wide(self._call(plain[0].tensors)), self.terms.timeout)
            self._cost = 3 * self._seconds(found[1])
        if unknown := _unknown(found[0].tree):
            raise Unjudgeable(f"the original returns a {unknown}, which cannot be compared; let it return tensors")
        if odd := next((m["odd"] for m in found[0].metadata if m["odd"]), None):
            raise Unjudgeable(
                f"the original returns a tensor that is {' and '.join(odd)}, which cannot be compared; let it return "
                "plain ones (resolve_conj(), resolve_neg(), to_dense())"
            )
        if not found[0].tensors:
            raise Unjudgeable("the original returns no tensor, so there is nothing to compare; let it return tensors")
        if all(_identical(a, b) for a, b in zip(found[0].tensors, found[1].tensors, strict=True)):
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

    def _round(self, kind: str, values: Tensors, *, check: str = "", **options: Any) -> tuple[Result, Result]:
        """Run one call on all sides and compare everything that comes back."""
        call = self._call(values, **options)
        if self._stateful and self._shares_state:
            self._adopt(self._state)
        with self._of_the_original():
            o = self.witness.call(call, self.terms.timeout)
            # What a number must be is known by then, so that the original in its own precision can stand for it.
            plain = self._random or bool(check)
            r = o if plain else self.reference.call(self._wide(call), self.terms.timeout)
        y = self._ask(call)
        self._metadata(o, y)
        self._numbers(kind, check or _rule(kind), call, r, o, y)
        self._aliases = o.aliases
        self._traces(o, y)
        self._past.append(y)
        return o, y

    def _ask(self, call: Call) -> Result:
        return self.suspect.call(call, self.terms.timeout, most=self._most)

    def _metadata(self, o: Result, y: Result) -> None:
        """M1 to M4: what kind of thing came back."""
        for index, m in enumerate(y.metadata):
            where = f"result {index}"
            expected = o.metadata[index] if index < len(o.metadata) else m
            if m["type"] != expected["type"]:
                self._step("M1", f"{where} is a {m['type']}, the original's a {expected['type']}")
            if more := set(m["traits"]) - set(expected["traits"]):
                self._step("M1", f"{where} is {', '.join(sorted(more))}, which the original's is not")
            if m["odd"] != expected["odd"]:
                self._step("M1", f"{where} is {', '.join(m['odd']) or 'plain'}, which the original's is not")
            if m["requires_grad"] != expected["requires_grad"] and (self.terms.train or m["requires_grad"]):
                self._step("M4", f"{where} has {'a' if m['requires_grad'] else 'no'} gradient, unlike the original's")
            if not m["address"] and math.prod(m["shape"]) and not m["odd"]:
                self._step("M1", f"{where} has no memory")
        if y.tree != o.tree and self.terms.train and y.tree.get("items", [])[:1] == o.tree["items"][:1]:
            self._step("N7", "it has gradients for other inputs or parameters than the original")
        if other := _unlike(o, y):
            self._step("M2", other)
        for index, (a, b) in enumerate(zip(o.metadata, y.metadata, strict=True)):
            if _strides(a) != _strides(b) and index < len(self._outputs):  # of gradients they mean nothing
                if _strides(b) != _contiguous(b["shape"]):
                    self._step("M3", f"result {index} has strides {b['stride']}, the original's {a['stride']}")
                self.verdict.note(f"result {index} is contiguous where the original's has strides {a['stride']}")

    def _numbers(self, kind: str, check: str, call: Call, r: Result, o: Result, y: Result) -> None:
        """N1 and its kin: the two norms, for every result."""
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(o.tensors, y.tensors, strict=True)):
            return  # metadata that was told to be ignored
        known = [self._known * 1.125] * len(o.tensors) if r is o else self._estimate(call, len(o.tensors))
        sides = list(zip(r.tensors, o.tensors, y.tensors, known, strict=True))
        if kind in inputs.LARGE:
            # Exponentials are saturated there, and what kernels keep of them for the backward has no digits left.
            self._coarse(kind, call, sides[len(self._outputs) :])
            sides = sides[: len(self._outputs)]
        found = [_judged(kind, *each, self._longest) for each in sides]
        if check == "N2":
            whole = [_integral(*each) for each in zip(r.tensors, o.tensors, y.tensors, strict=True)]
            check = "N2" if all(whole) else "N4"
            found = [exact or one for exact, one in zip(whole, found, strict=True)]
        if check != "N2" and not all(one.passed for one in found):
            found = self._excused(kind, call, r, o, y, found)
        worst = min(found, key=lambda one: (one.passed, -one.error / (one.bound or 1.0)))
        if check == "N1" and r is not o:
            # What the original's own errors are, for calls that are compared with the original alone.
            for a, b in zip(r.tensors, o.tensors, strict=True):
                if b.is_floating_point() or b.is_complex():
                    a, b = numerics.real(a, b)
                    self._known |= numerics.own_errors(a.double(), b)
        failure = worst.reason and f"{kind} inputs: {worst.reason}"
        if failure and found.index(worst) >= len(self._outputs):
            check, failure = "N7", f"gradient {found.index(worst) - len(self._outputs)}, {failure}"
        if failure and check != "N9" and "C1" not in self.off and (stale := self._earlier(o, y)):
            check, failure = "C1", stale
        numbers = {"error": worst.error, "original": worst.original_error, "worst": worst.worst, "bound": worst.bound}
        self._step(check, failure, kind=kind, **numbers)
        if kind == "normal" and r is not o:
            self._usual = _size(call.tensors), [_size([t]) for t in r.tensors[len(self._outputs) :]]
            self._calibrate(call, r, o)

    def _coarse(self, kind: str, call: Call, sides: Sequence[tuple[Any, ...]]) -> None:
        """N7: gradients at large inputs are near, but for what is left of products of large inputs and no digits."""
        unit = numerics.roundoff(getattr(torch, self.terms.dtype))
        grown = max(1.0, _size(call.tensors) / self._usual[0]) ** 2 if self._usual and self._usual[0] else 1.0
        for index, (r, o, y) in enumerate(side[:3] for side in sides):
            r, o, y = (t.double() for t in numerics.real(r, o, y))
            if not bool(r.isfinite().all() & o.isfinite().all()):
                continue
            usual = self._usual[1][index] if self._usual else 0.0
            size, off = _size([r]), _size([y - r]) if bool(y.isfinite().all()) else math.inf
            most = max(max(COARSE, 16 * unit) * size, 8 * _size([o - r]), 100 * unit * usual * grown)
            failure = f"gradient {index}, {kind} inputs: off by {off:.1e}, its size is {size:.1e}"
            self._step("N7", "" if off <= most else failure, kind=kind, error=off, bound=most)

    def _excused(
        self, kind: str, call: Call, r: Result, o: Result, y: Result, found: list[numerics.KindResult]
    ) -> list[numerics.KindResult]:
        """Let pass what is off as the original is when its inputs move by one rounding.

        Where little is left of a difference of nearly equal numbers, how far off the original is on these very inputs
        may be luck: the variance of equal numbers is zero in one order of summation, and nearly zero in others.
        """
        g = inputs.generator(self._derived("moved", kind))
        unit = [numerics.roundoff(t.dtype) if t.is_floating_point() else 0.0 for t in call.tensors]
        moved: list[Result] = []
        for _ in range(numerics.MOVES):
            signs = [2 * torch.randint(0, 2, t.shape, generator=g) - 1 for t in call.tensors]
            tensors = [
                (t * (1 + 1.01 * u * s)).to(t.dtype) if u else t
                for t, u, s in zip(call.tensors, unit, signs, strict=True)
            ]
            with contextlib.suppress(Raised):
                moved.append(self.witness.call(replace(call, tensors=tensors, same_place=False), self.terms.timeout))
        out = []
        for index, one in enumerate(found):
            others = [m.tensors[index] for m in moved if len(m.tensors) == len(o.tensors)]
            near = not one.passed and numerics.no_farther(r.tensors[index], y.tensors[index], others, kind in ORDINARY)
            self._lucky |= near and kind in ORDINARY
            out.append(replace(one, passed=True, reason="", error=0.0) if near else one)
        return out

    def _earlier(self, o: Result, y: Result) -> str:
        """Say so if a wrong result is one that an earlier call gave."""
        for old in self._past:
            if len(old.tensors) != len(y.tensors):
                continue
            same = [
                torch.equal(a, b) and a.numel() > 1 and not torch.equal(a, c)
                for a, b, c in zip(y.tensors, old.tensors, o.tensors, strict=True)
                if a.shape == b.shape and a.dtype == b.dtype
            ]
            if same and all(same) and all(bool((t != t.reshape(-1)[:1]).any()) for t in y.tensors):
                return "it returned the result of an earlier call for new inputs"
        return ""

    def _estimate(self, call: Call, count: int) -> list[numerics.Errors]:
        """Errors of a float64 original, read off a float32 run."""
        if self.narrow is None or self._random:
            return [numerics.NOTHING] * count

        def run(worker: Worker, dtype: torch.dtype) -> numerics.Program:
            return lambda *xs: (
                worker.call(self._wide(replace(call, tensors=list(xs)), dtype), self.terms.timeout).tensors
            )

        narrowed, reference = run(self.narrow, torch.float32), run(self.reference, torch.float64)
        with self._of_the_original():
            return numerics.estimated(narrowed, reference, list(call.tensors), False)

    def _calibrate(self, call: Call, r: Result, o: Result) -> None:
        """N3: a kind of input says something about precision only if less of it would be refused."""
        lower = {torch.float32: torch.float16, torch.float64: torch.float32}.get(getattr(torch, self.terms.dtype))
        if lower is None:
            return
        rounded = [t.to(lower).to(t.dtype) if t.is_floating_point() else t for t in call.tensors]
        with self._of_the_original():
            worse = self.reference.call(self._wide(replace(call, tensors=rounded)), self.terms.timeout)
        known = self._estimate(call, len(o.tensors))
        sides = zip(r.tensors, o.tensors, worse.tensors, known, strict=True)
        valid = not all(_judged("normal", a, b, c.to(b.dtype), d, self._longest).passed for a, b, c, d in sides)
        self._step("N3", "", valid=valid)
        if not valid:
            self.verdict.note(f"precision unverified: inputs rounded to {lower} would have passed as well")

    def _traces(self, o: Result, y: Result) -> None:
        """S1, S2, U2: what a call did other than returning."""
        for index in y.changed:
            if index not in o.changed:
                self._step("S1", f"it changed input {index}, which the original leaves alone")
        for index in o.changed:
            if index not in y.changed:
                self._step("S1", f"it left input {index} alone, which the original changes")
            result = _judged("", o.inputs_after[index].double(), o.inputs_after[index], y.inputs_after[index],
                             numerics.NOTHING, 4 * self._longest)  # fmt: skip
            if result.reason:
                self._step("S1", f"it changed input {index} otherwise than the original: {result.reason}")
        if others := sorted(set(y.arguments) - set(o.arguments)):
            self._step("S1", f"it changed {', '.join(others)}, in the caller's hands")
        if y.cotangents_changed and not o.cotangents_changed:
            self._step("S1", "its backward changed the gradient that it was given, which others may use")
        if self._aliases != y.aliases:
            self._step("S2", f"its results share memory with {y.aliases}, the original's with {self._aliases}")
        if y.overrun and not o.overrun:
            self._step("U2", "it wrote to memory next to its inputs")
        for index in range(len(self._outputs)):
            if y.reused[index] and not o.reused[index]:
                self._step("S7", f"result {index} lies in the memory of an earlier call's result, which is still held")

    def _late(self, y: Result) -> None:
        """U4, S6: when a call has returned its results are what they are, and nothing runs."""
        asleep = self.suspect.settle()
        time.sleep(0.02)
        busy = bool(asleep) and self.suspect.activity() != asleep
        changed = [not _identical(a, b) for a, b in zip(y.tensors, self.suspect.again(y, self._most), strict=True)]
        self._step("U4", "its result changed after it had returned it" if any(changed) else "")
        self._step("S6", "it used the processor between calls" if busy else "")

    def _left_behind(self, turn: int) -> None:
        """S3 to S6, S8: the world after a call is as the original leaves it."""
        self._round("actual", self._actual("left behind", turn))
        self.suspect.settle()
        left = self.suspect.lingering()
        self._step("S6", f"it left {len(left)} processes running" if left else "")
        self._surroundings(self.witness, self.suspect, self._start["modes"])

    def _surroundings(self, original: Worker, candidate: Worker, modes: str, calls: int = 1) -> None:
        """S1, S3 to S5, S8: what a candidate left, whose modes were these, and its state after so many calls."""
        with self._of_the_original():
            expected = original.inspect()
        found = candidate.inspect()
        changed = {n: v for n, v in found["settings"].items() if expected["settings"].get(n) != v}
        self._step("S4", f"it changed global settings: {_listed(changed)}" if changed else "")
        patched = sorted(set(found["patched"]) - set(expected["patched"]))
        self._step("S5", f"it replaced {', '.join(map(str, patched))}" if patched else "")
        differs = found["random"] != expected["random"]
        self._step("S3", "it leaves another random state than the original" if differs else "")
        failure = "it changed its training mode, its hooks, or which parameters need or have a gradient"
        self._step("S8", failure if found["modes"] != modes else "")
        if self._shares_state:
            theirs = self._read_state(original, expected)
            most = 2 * sum(t.numel() * t.element_size() for t in theirs.values()) + (1 << 20)
            self._same_state(theirs, self._read_state(candidate, found, most), calls)

    def _same_state(self, theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], calls: int) -> None:
        if theirs.keys() != ours.keys():
            self._step("S1", "it changed the names of its parameters")
        for name, value in theirs.items():
            mine = ours[name]
            if _identical(value, mine):
                continue
            untouched = _identical(value, self._state[name])
            if untouched or value.shape != mine.shape or value.dtype != mine.dtype or not value.is_floating_point():
                self._step(
                    "S1", f"it changed its parameter or buffer {name}" if untouched else f"its {name} is another"
                )
                continue
            terms = 4 * self._longest * calls**2  # each call adds its rounding error
            result = numerics.compare("", value.double(), value, mine, None, terms, parts=False)
            self._step("S1", result.reason and f"its parameter or buffer {name} differs: {result.reason}")

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

    def _unchanged(self, worker: Worker, kept: Result) -> None:
        now = worker.again(kept, self._most)
        own = [not alias or alias[0] != "input" for alias in kept.aliases]
        if any(mine and not _identical(a, b) for mine, a, b in zip(own, kept.tensors, now, strict=True)):
            self._step("S7", "a result that was kept changed with a later call")

    def _repeatable(self, first: Tensors) -> None:
        """U1 and determinism: the same bits each time, whatever new memory holds."""
        call = self._call(inputs.draw("normal", first, self._derived("repeat")))
        results = [self._ask(call) for _ in range(self.level.repeats)]
        equal = all(_alike(results[0], other) for other in results[1:])
        if not equal:
            with self._of_the_original():
                theirs = [self.witness.call(call, self.terms.timeout) for _ in range(self.level.repeats)]
            if all(_alike(theirs[0], other) for other in theirs[1:]):
                self._step("D1", "it gives different bits for the same inputs, the original does not")
            self.verdict.note("neither it nor the original gives the same bits each time")
            return
        self._step("D1", "")
        # 0xFF is a NaN in every format, 0x7B a large number.
        poisoned = [self._ask(replace(call, perturb=byte)) for byte in (0xFF, 0x7B)]
        equal = all(_alike(results[0], other) for other in poisoned)
        self._step("U1", "" if equal else "its result depends on uninitialised memory, or on memory next to its inputs")

    def _weights(self, first: Tensors) -> None:
        """C2: weights that change are used."""
        if not self._shares_state:
            return
        for turn, steps in enumerate((False, True)):
            g = inputs.generator(self._derived("weights", turn))
            new = {}
            for name, value in self._state.items():
                factor = 1 + 0.3 * torch.randn(value.shape, generator=g).double().abs()
                new[name] = (value.double() * factor).to(value.dtype) if value.is_floating_point() else value
            self._adopt(new, steps=steps)
            kind = "after its weights changed in place" if steps else "after load_state_dict"
            self._round(kind, self._actual("weights", turn), check="C2")
        self._adopt(self._state)

    def _grad_mode(self, first: Tensors) -> None:
        """C5: the same values whether gradients are recorded or not, and whether they flow back or not."""
        call = self._call(inputs.draw("normal", first, self._derived("grad")))
        if self.terms.train:
            self._unless_refused("no backward", "C5", replace(call, cotangents=()), "only with a backward")
        else:
            self._unless_refused("gradients recorded", "C5", replace(call, grad=True), "only without gradients")

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
        real = [index for index, x in enumerate(first) if inputs.is_real(x)]
        constant = [frozenset(real) - {index} for index in real] if len(real) > 1 else []
        for some in [frozenset(real), *constant]:
            call = self._call(inputs.draw("normal", first, self._derived("constant", *some)), constant=some)
            which = ", ".join(str(index) for index in sorted(some))
            self._unless_refused(
                f"no gradient for input {which}, normal", "N7", call, f"not without a gradient for input {which}",
                wide=True,
            )  # fmt: skip

    def _specials(self, first: Tensors) -> None:
        """N5: NaN and infinities stay where the original has them, as far as that is asked for."""
        for name, values in inputs.specials(
            inputs.draw("normal", first, self._derived("specials")), self._derived("at")
        ):
            call = self._call(values)
            with self._of_the_original():
                o = self.witness.call(call, self.terms.timeout)
            y = self._ask(call)
            if other := _unlike(o, y):
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
        if other := _unlike(o, y):
            self._step("M2", f"{name}: {other}")
        self._numbers(name, check, call, r, o, y)
        return True

    # What it does

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
        nursery, failure = self.nursery.careful(), ""
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
            with nursery.program(program.text, "candidate.py", room=self.suspect.room) as worker:
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

    # Time

    def _faster(self) -> None:
        """T7: faster beyond noise, each timed call on new content and each timed result verified."""
        with contextlib.ExitStack() as stack:
            base, name = self._rival(stack)
            self._decided(base, name)

    def _rival(self, stack: contextlib.ExitStack) -> tuple[Worker, str]:
        """Return the faster of the original and the original compiled, each in a process without the candidate."""
        if not self.level.rival or self.terms.rival == "eager" or self._random or self._stateful:
            return self.witness, "eager"
        call = self._call(self._actual("rival"))
        try:
            worker = stack.enter_context(
                self.nursery.program(self.original.text, "original.py", room=self.suspect.room)
            )
            worker.load(self.original.attribute, self.terms.timeout)
            self._build(worker, self.original, self.terms.dtype, compiled=True)
            worker.call(call, COMPILE_S)
            self._compiled = worker
            times = [
                min(each.call(call, self.terms.timeout).seconds for _ in range(3)) for each in (self.witness, worker)
            ]
        except Misbehaved as error:
            self.verdict.note(f"torch.compile of the original was not timed: {error.reason[:120]}")
            return self.witness, "eager"
        return (worker, "torch.compile") if times[1] < times[0] else (self.witness, "eager")

    def _decided(self, base: Worker, against: str) -> None:
        race = {**self._race(base, self.suspect, "race"), "against": against}
        self.verdict.timing = race
        if self.level.confirmations and race["faster"]:
            self._alike_twins(base, against)
        for turn in range(self.level.confirmations):
            if not race["faster"]:
                break
            with contextlib.ExitStack() as stack:
                fresh = []
                for program, name in ((self.original, "original.py"), (self.candidate, "candidate.py")):
                    worker = stack.enter_context(self.nursery.program(program.text, name, room=self.suspect.room))
                    worker.load(program.attribute, self.terms.timeout)
                    self._build(worker, program, self.terms.dtype)
                    fresh.append(worker)
                first = base if against != "eager" else fresh[0]
                race = {**self._race(first, fresh[1], f"confirmation {turn + 1}"), "against": against}
                self.verdict.timing = race
        self._possible(race)
        speed = f"{race['speedup']:.3f}x of {against} (at least {race['at_least']:.3f}x)"
        words = f"{speed} after {race['pairs']} pairs of calls"
        failure = "" if race["faster"] else f"not shown to be more than {DELTA:.0%} faster: {words}"
        self._step("T7", failure, **race)

    def _alike_twins(self, base: Worker, against: str) -> None:
        """T6: two processes with the same program are equally fast, or the clock cannot be trusted here."""
        with contextlib.ExitStack() as stack, self._of_the_original():
            twin = stack.enter_context(self.nursery.program(self.original.text, "original.py", room=self.suspect.room))
            twin.load(self.original.attribute, self.terms.timeout)
            self._build(twin, self.original, self.terms.dtype, compiled=against != "eager")
            race = self._race(base, twin, "twins")
        apart = race["at_least"] > 1 + DELTA or race["at_most"] < 1 / (1 + DELTA)
        if apart and "T6" not in self.off:
            raise Unjudgeable(
                f"two processes with the original take different times here: {race['speedup']:.3f}x, "
                f"{race['at_least']:.3f}x to {race['at_most']:.3f}x; try again on a quiet machine"
            )
        self._step("T6", "", **race)

    def _possible(self, race: dict[str, Any]) -> None:
        """T5: no result is written in less time than its bytes take to be written."""
        own = [t for t, alias in zip(self._kept.tensors, self._kept.aliases, strict=True) if alias is None]
        size = sum(t.numel() * t.element_size() for t in own)
        into = torch.empty(size, dtype=torch.uint8)
        least = math.inf
        for value in range(5):
            start = time.thread_time()  # waiting for a processor is no part of it
            ctypes.memset(into.data_ptr(), value, size)
            least = min(least, time.thread_time() - start)
        floor = POSSIBLE * least * 1e3 / self.terms.threads
        impossible = race["candidate_ms"] < floor
        failure = f"it took {race['candidate_ms']:.3g} ms, less than to write its results takes ({floor:.3g} ms)"
        self._step("T5", failure if impossible else "", floor_ms=floor)

    def _race(self, base: Worker, candidate: Worker, name: str) -> dict[str, Any]:
        order = random.Random(self._derived(name, "order"))
        # A busy machine makes calls wait, not work; the limit of time is one of work.
        spent, patience = 0.0, time.perf_counter() + BUSY * self.level.seconds
        share = ALPHA / self.terms.tried / len(self.level.looks)
        pairs: list[list[tuple[Result, Result]]] = []
        self._processor = [0.0, 0.0, 0.0]
        self._before: tuple[Result, Result] | None = None
        self._processors = sorted(os.sched_getaffinity(0))
        self._width = min(self.terms.threads, len(self._processors))
        logs: list[float] = []
        lower = upper = 0.0
        self._begin(base, candidate)
        began = self._usage(base, candidate)
        self._alone = candidate.births()
        done = -1  # the first pair warms both up, as all calls before it did
        for look in self.level.looks:
            # So many pairs are needed before all of them won could decide; what is slow gets the time for that.
            most = self.level.seconds * (1 + (0.5**done > share) * PATIENCE)
            while done < look and (look == self.level.looks[0] or (spent < most and time.perf_counter() < patience)):
                time.sleep(order.random() * 2e-3)  # not in step with anything
                samples = [self._pair(base, candidate, (name, done), order.random() < 0.5)]
                if max(each.seconds for each in samples[0]) * 1e3 < SHORT_MS:
                    more = range(1, BEST_OF)
                    samples += [self._pair(base, candidate, (name, done, i), order.random() < 0.5) for i in more]
                done += 1
                spent += sum(self._seconds(each) for sample in samples for each in sample)
                if done > 0:
                    pairs.append(samples)
            times = self._times(candidate, pairs)
            logs = sorted(math.log(a / b) for a, b in zip(*times, strict=True))
            lower, upper = median_bounds(logs, share)
            if lower > math.log1p(DELTA) or upper < math.log1p(DELTA) or len(logs) < look:
                break
        self._look(base, candidate)
        for worker in (base, candidate):
            worker.pin(set(self._processors))
        used, given, waited = self._processor
        elsewhere = others(self._usage(base, candidate) - began)
        clear = lower > math.log(CLEAR) or upper < -math.log(CLEAR)
        if self.terms.threads > 1 and waited > WAITED * given and not elsewhere < OTHERS and not clear:
            who = "" if math.isnan(elsewhere) else f" while other programs kept {elsewhere:.1f} of them busy"
            raise Unjudgeable(
                f"the machine is busy: calls waited {waited / given:.0%} of their time for its {len(self._processors)} "
                f"processors{who}, and whether a program with several threads is faster cannot be told; try again, or "
                "with one thread"
            )
        processors = used / given if given else 0.0
        most = 1.15 * self.terms.threads + 0.02 / given
        failure = f"it used {processors:.1f} processors during its calls, and was given {self.terms.threads}"
        self._step("T1", failure if processors > most else "", processors=round(processors, 2))
        return {
            "name": name,
            "base_ms": statistics.median(times[0]) * 1e3,
            "candidate_ms": statistics.median(times[1]) * 1e3,
            "speedup": math.exp(statistics.median(logs)),
            "at_least": math.exp(lower),
            "at_most": math.exp(upper),
            "pairs": len(logs),
            "faster": lower > math.log1p(DELTA),
            "waited": waited / given if given else 0.0,
            "others": elsewhere,
        }

    def _begin(self, base: Worker, candidate: Worker) -> None:
        """Give both the same state, which the timed calls may change."""
        own = getattr(torch, self.terms.dtype)
        if self._shares_state:
            self._give(self._state, [(each, own) for each in (base, candidate) if each is not self._compiled])
        self._modes, self._looked, self._calls = candidate.inspect()["modes"], False, 0

    def _look(self, base: Worker, candidate: Worker) -> None:
        """See what the timed calls so far have left: they, too, change and leave what the original does."""
        if base is not self._compiled:
            self._surroundings(base, candidate, self._modes, self._calls)

    def _usage(self, *workers: Worker) -> Usage:
        """Return what was used until now, with what these processes used as this one's own."""
        found = usage()
        return replace(found, own=found.own + sum(sum(worker.processor_time()) for worker in workers))

    def _times(self, candidate: Worker, pairs: list[list[tuple[Result, Result]]]) -> list[list[float]]:
        """Return the seconds of both sides, of each sample the least.

        Work between calls that the original does not do either is the candidate's own, and so is spread over its calls.
        A process that the candidate started, and that has ended, is counted nowhere; it may have waited for that one.
        """
        before, now = self._alone, candidate.births()
        known = before is not None and now is not None
        alone = before is not None and now == before + 1
        if alone:
            self._alone = now

        extra = [y.outside - o.outside for samples in pairs for o, y in samples]
        between = max(0.0, statistics.fmean(extra) - BETWEEN_S) if extra else 0.0

        def own(y: Result) -> float:
            trusted = alone if known else not y.started
            return self._seconds(y if trusted else replace(y, waited=0.0)) + between

        return [
            [min(self._seconds(o) for o, _ in samples) for samples in pairs],
            [min(own(y) for _, y in samples) for samples in pairs],
        ]

    def _pair(
        self, base: Worker, candidate: Worker, purpose: tuple[object, ...], swapped: bool
    ) -> tuple[Result, Result]:
        """Call both on content that neither has seen."""
        values = self._actual(*purpose)
        if self._derived(*purpose, "kind") % 4 == 0:  # rounding shows best on zero-mean values
            values = inputs.draw("normal", values, self._derived(*purpose, "normal"))
        call = self._call(values, salt=purpose)

        # On the same processors, so that for both the same other programs are in the way.
        here = set(random.Random(self._derived(*purpose, "here")).sample(self._processors, self._width))
        base.pin(here)
        candidate.pin(here)

        def ask_base() -> Result:
            with self._of_the_original():
                return base.call(call, self.terms.timeout)

        def ask_candidate() -> Result:
            return candidate.call(call, self.terms.timeout, most=self._most)

        if swapped:
            y = ask_candidate()
            o = ask_base()
        else:
            o = ask_base()
            y = ask_candidate()
        if base is not self._compiled:
            self._metadata(o, y)
        elif other := _unlike(o, y):
            self._step("M2", f"in a timed call, {other}")
        self._verify(call, o, y)
        # A candidate may notice that it is timed, so what it leaves is looked at here, too.
        self._traces(o, y)
        if self._before is not None:
            if self.terms.device != "cpu":  # where looking again is work for the process, for both alike
                base.again(self._before[0])
            self._unchanged(candidate, self._before[1])
        self._before = o, y
        self._calls += 1
        if self._looked:  # which was work for the process, between calls
            o, y = replace(o, outside=0.0), replace(y, outside=0.0)
        self._looked = self._derived(*purpose, "look") % LOOKED_AT == 0
        if self._looked:
            self._look(base, candidate)
        self._processor[0] += y.processor
        self._processor[1] += y.seconds
        self._processor[2] += max(each.waited / each.seconds for each in (o, y)) * y.seconds
        if self.suspect.lingering():
            self._step("S6", "another process of it ran during its timed calls")
        return replace(o, tensors=[], inputs_after=[]), replace(y, tensors=[], inputs_after=[])

    def _seconds(self, result: Result) -> float:
        """Return the time of a call, without that in which other programs had its processor.

        Of one thread it is known how long it waited. What its process used is counted in any case, so that waiting
        for one's own helpers is no gain. Of several threads it is not known.
        """
        if self.terms.threads > 1:
            return result.seconds
        return max(result.seconds - result.waited, result.processor)

    def _verify(self, call: Call, o: Result, y: Result) -> None:
        """C3: a timed result is right. The original's own result is the reference, and its error counts twice."""
        known, kind = self._known * 1.125, "" if self._lucky else "timed"
        for a, b in zip(o.tensors, y.tensors, strict=True):
            result = _judged(kind, a.double() if a.is_floating_point() else a, a, b, known, self._longest)
            if result.reason:
                check, failure = "C3", f"a timed call gave a wrong result: {result.reason}"
                if "C1" not in self.off and (stale := self._earlier(o, y)):
                    check, failure = "C1", stale
                self._step(check, failure, error=result.error, bound=result.bound)
        self._past.append(y)


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


def _size(tensors: Sequence[torch.Tensor]) -> float:
    """Return the root mean square of real and complex numbers; those that are not finite count for nothing."""
    parts = [t.abs().double().nan_to_num(0, 0, 0).flatten() for t in tensors if inputs.is_real(t)]
    return math.sqrt(float(torch.cat(parts).square().mean())) if parts and sum(map(len, parts)) else 0.0


def _rule(kind: str) -> str:
    return {"actual": "N1", "normal": "N1", "integers": "N2"}.get(kind, "N4")


def _judged(
    kind: str,
    r: torch.Tensor,
    o: torch.Tensor,
    y: torch.Tensor,
    known: numerics.Errors,
    terms: int,
) -> numerics.KindResult:
    """Compare one result; ``known`` are errors that the original is known to have."""
    r, o, y = numerics.real(r, o, y)
    if kind in inputs.EQUAL_TERMS:
        terms = terms**2  # roundings of equal terms have one sign: they add up in proportion to the number of terms
    if y.is_floating_point():
        return numerics.compare(kind, r.double(), o, y, None, terms, known, kind in ORDINARY)
    # Where float64 decides otherwise than the original itself, either is right, and what is as near.
    off, own = (y.double() - r.double()).abs(), (o.double() - r.double()).abs()
    wrong = int(((y != o) & ~(off <= 8 * own)).sum())
    reason = f"{wrong} of {y.numel()} elements differ" if wrong else ""
    return numerics.KindResult(kind, not wrong, float(wrong), 0.0, float(wrong), 0.0, reason)


def _integral(r: torch.Tensor, o: torch.Tensor, y: torch.Tensor) -> numerics.KindResult | None:
    """N2: where the original is exact on small integers, the candidate is nearer to them than to any others."""
    if not y.is_floating_point() or not bool((r == r.round()).all()) or not torch.equal(o.double(), r.double()):
        return None
    distance = (y.double() - r.double()).abs()
    wrong = int((~(distance < 0.5)).sum())
    reason = f"{wrong} of {y.numel()} elements differ where arithmetic is exact" if wrong else ""
    worst = float(distance.max()) if distance.numel() else 0.0
    return numerics.KindResult("integers", not wrong, worst, 0.0, worst, 0.5, reason)


def _unlike(o: Result, y: Result) -> str:
    """Say what else a candidate returns than values of the same structure, shapes and dtypes; empty if nothing."""
    if json.dumps(y.tree) != json.dumps(o.tree):  # in Python, true is one
        return f"it returns {_outline(y.tree)}, the original {_outline(o.tree)}"
    for index, (a, b) in enumerate(zip(o.metadata, y.metadata, strict=True)):
        for what in ("shape", "dtype", "device"):
            if a[what] != b[what]:
                return f"result {index} has {what} {b[what]}, the original's {a[what]}"
    return ""


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def _alike(a: Result, b: Result) -> bool:
    return len(a.tensors) == len(b.tensors) and all(map(_identical, a.tensors, b.tensors))


def _strides(m: dict[str, Any]) -> list[int]:
    """Strides, without those of axes of one element, which mean nothing."""
    return [] if 0 in m["shape"] else [s for n, s in zip(m["shape"], m["stride"], strict=False) if n > 1]


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(shape):
        if n > 1:
            strides.append(step)
        step *= n
    return strides[::-1] if 0 not in shape else []


def _outline(tree: Any) -> str:
    if not isinstance(tree, dict):
        return "nothing"
    if "items" in tree:
        named = "dict" in tree
        inner = [f"{item[0]}: {_outline(item[1])}" if named else _outline(item) for item in tree["items"]]
        return f"{tree.get('dict') or tree.get('sequence')}({', '.join(inner)})"
    return "tensor" if "tensor" in tree else "float" if "float" in tree else str(tree.get("value", tree.get("object")))


def _unknown(tree: Any) -> str:
    """Return the type of something in a structure that is nothing a judge can read; empty if there is none."""
    inner = [item[1] if "dict" in tree else item for item in tree.get("items", ())]
    return next(filter(None, map(_unknown, inner)), "") or str(tree.get("object", ""))


def _listed(changed: dict[str, str]) -> str:
    return ", ".join(f"{name} is {str(value)[:80]}" for name, value in sorted(changed.items()))
